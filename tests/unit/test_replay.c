// Decode steps are recorded once and replayed: what is counted while a model decodes, that answers
// do not depend on it, and that a KV type works on the device asked for or is refused by name. On
// the CPU always; with MX_TEST_DEVICE=cuda on a GPU too, where replays are graphs.
#include "backend/cuda/cuda.h"
#include "base/knobs.h"
#include "engine/engine_int.h"
#include "support/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

// The context passes 256 positions, where a step has another plan, while tokens are decoded.
enum { PROMPT = 230, DECODE = 60 };

static char *dir, *model;
static const char *devices[2] = {"cpu", NULL};

static int set_up(void **state) {
    (void)state;
    devices[1] = getenv("MX_TEST_DEVICE");
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "tiny.gguf");
    tiny_write(model, &(tiny_opts){.max_ctx = 4096});
    mx_log_set_level(MX_LOG_ERROR);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_free(model);
    ckpt_remove_dir(dir);
    return 0;
}

static int try_open(mlxcel_engine **e, const char *device, const char *kv, mlxcel_error *err) {
    mlxcel_params p = {.model = model,
                       .device = device,
                       .kv_type = kv,
                       .n_threads = 1,
                       .ctx_size = 512,
                       .max_batch = 3,
                       .prefill_chunk = 64,
                       .deterministic = true};
    *e = NULL;
    *err = (mlxcel_error){0};
    return mlxcel_open(e, &p, err);
}

static mlxcel_engine *open_engine(const char *device) {
    mlxcel_engine *e;
    mlxcel_error err;
    if (try_open(&e, device, NULL, &err) != 0) fail_msg("%s", err.message);
    return e;
}

static mlxcel_request *submit(mlxcel_engine *e, uint32_t seed) {
    int32_t ids[PROMPT];
    for (size_t i = 0; i < PROMPT; i++) ids[i] = (int32_t)(ckpt_mix(seed, i) % 256);
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = PROMPT;
    p.max_tokens = DECODE;
    p.run_past_end = true;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static uint64_t collect(mlxcel_request *r) {
    mlxcel_event ev = {0};
    do {
        assert_true(mlxcel_next_event(r, 60, &ev));
    } while (ev.kind != MLXCEL_EVENT_DONE);
    assert_int_equal(ev.error.status, 0);
    uint64_t hash = ev.token_hash;
    mlxcel_request_free(r);
    return hash;
}

// One, three together, one again: hashes of the five answers.
static void answer(mlxcel_engine *e, uint64_t out[5]) {
    mlxcel_request *r[3];
    out[0] = collect(submit(e, 1));
    for (uint32_t i = 0; i < 3; i++) r[i] = submit(e, i + 1);
    for (int i = 0; i < 3; i++) out[i + 1] = collect(r[i]);
    out[4] = collect(submit(e, 1));
}

typedef struct counts {
    uint64_t plans, hits, graphs, launches;
} counts;

// The engine has nothing to do: nobody counts meanwhile.
static counts count(mlxcel_engine *e) {
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    counts c = {.plans = s.plans_made, .hits = s.plan_hits};
    if (e->facts.kind != MX_DEVICE_CUDA) return c;
    mx_cuda_counters g;
    mx_cuda_counters_get(e->backend, &g);
    c.graphs = g.graphs_made;
    c.launches = g.graph_launches;
    return c;
}

static const char *decode_steps(mlxcel_engine *e) {
    mlxcel_info info;
    mlxcel_get_info(e, &info);
    return info.decode_steps;
}

static void check_replays(const char *device) {
    mlxcel_engine *e = open_engine(device);
    bool gpu = e->facts.kind == MX_DEVICE_CUDA;
    uint64_t want[5], again[5];
    assert_string_equal(decode_steps(e), gpu ? "CUDA graphs" : "recorded op lists");
    answer(e, want);
    assert_true(want[0] == want[1] &&
                want[0] == want[4]); // no plan of another batch, no old pointer
    answer(e, again);
    assert_memory_equal(want, again, sizeof want);
    counts first = count(e);
    assert_true(collect(submit(e, 1)) == want[0]); // all of it was recorded before
    counts second = count(e);
    enum { LATE = 4 }; // steps that are counted after their tokens were seen
    assert_int_equal(second.plans, first.plans);
    assert_true(second.hits - first.hits >= DECODE - LATE);
    if (gpu) {
        assert_true(first.graphs > 0);
        assert_int_equal(second.graphs, first.graphs);
        assert_true(second.launches - first.launches >= DECODE - LATE);
    }
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.slow[MX_SLOW_NO_GRAPHS], 0);
    mlxcel_close(e);
    if (!gpu) return;
    setenv("MLXCEL_CUDA_GRAPHS", "0", 1);
    mx_knobs_reload();
    e = open_engine(device);
    assert_string_equal(decode_steps(e), "kernel by kernel (MLXCEL_CUDA_GRAPHS=0)");
    answer(e, again);
    assert_memory_equal(want, again, sizeof want);
    mlxcel_get_stats(e, &s);
    assert_true(s.slow[MX_SLOW_NO_GRAPHS] > 0); // nobody loses graphs without seeing it
    assert_int_equal(count(e).launches, 0);
    mlxcel_close(e);
    unsetenv("MLXCEL_CUDA_GRAPHS");
    mx_knobs_reload();
}

static void decode_steps_are_replayed(void **state) {
    (void)state;
    for (int d = 0; d < 2 && devices[d]; d++) check_replays(devices[d]);
}

// What a run of all answers has shown.
typedef struct trace {
    uint64_t answers[5], host_sampled, pipelined, kernels;
    bool pinned;
} trace;

static trace trace_of(const char *device) {
    trace t = {.pinned = true};
    mlxcel_stats s;
    mx_cuda_counters g;
    mlxcel_engine *e = open_engine(device);
    bool gpu = e->facts.kind == MX_DEVICE_CUDA;
    collect(submit(e, 1));
    if (gpu) { // one sequence: its steps are the same each time
        mx_cuda_counters_get(e->backend, &g);
        t.kernels = g.kernel_launches;
        t.pinned = g.pinned;
    }
    answer(e, t.answers);
    mlxcel_get_stats(e, &s);
    t.host_sampled = s.slow[MX_SLOW_HOST_SAMPLING];
    t.pipelined = s.steps_decode_pipelined;
    mlxcel_close(e);
    return t;
}

// Fast paths that whole steps have, switched off one by one: the same answers, and on a GPU one
// sees that they were off.
static void check_switches(const char *device) {
    static const char *const names[][2] = {
        {"MLXCEL_FORCE_SYNC", "1"},       {"MLXCEL_DEVICE_SAMPLING", "0"},
        {"MLXCEL_CUDA_FUSED_ROPE", "0"},  {"MLXCEL_CUDA_OVERLAP", "0"},
        {"MLXCEL_CUDA_PINNED_LOAD", "0"},
    };
    trace on = trace_of(device), off[MX_COUNT(names)];
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        setenv(names[i][0], names[i][1], 1);
        mx_knobs_reload();
        off[i] = trace_of(device);
        unsetenv(names[i][0]);
        mx_knobs_reload();
        if (memcmp(on.answers, off[i].answers, sizeof on.answers) != 0) {
            fail_msg("%s: other answers with %s=%s", device, names[i][0], names[i][1]);
        }
    }
    if (strcmp(device, "cpu") == 0) return;
    assert_true(on.pipelined > 0 && off[0].pipelined == 0);
    assert_true(on.host_sampled == 0 && off[1].host_sampled > 0);
    assert_true(off[2].kernels > on.kernels);
    assert_true(on.pinned && !off[4].pinned);
}

static void switches_change_no_answer(void **state) {
    (void)state;
    for (int d = 0; d < 2 && devices[d]; d++) check_switches(devices[d]);
}

static void a_kv_type_works_or_is_refused(void **state) {
    (void)state;
    static const char *const types[] = {"f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "F16", ""};
    for (int d = 0; d < 2 && devices[d]; d++) {
        for (size_t t = 0; t < MX_COUNT(types); t++) {
            mlxcel_engine *e;
            mlxcel_error err;
            if (try_open(&e, devices[d], types[t], &err) != 0) {
                assert_true(t >= 2);
                assert_int_equal(err.status, MX_INVALID);
                char quoted[16];
                snprintf(quoted, sizeof quoted, "'%s'", types[t]);
                assert_non_null(strstr(err.message, quoted));
                continue;
            }
            mlxcel_info info;
            mlxcel_get_info(e, &info);
            assert_string_equal(info.kv_type, types[t]);
            assert_int_equal(strncmp(info.arch, "sm_", 3) == 0, d == 1);
            collect(submit(e, 1));
            mlxcel_close(e);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_steps_are_replayed),
        cmocka_unit_test(switches_change_no_answer),
        cmocka_unit_test(a_kv_type_works_or_is_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
