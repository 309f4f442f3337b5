// Memory that runs out: a model that does not fit is refused with numbers; a call of the device
// that fails late ends the requests of its step, and later ones have the same answer as ever. On
// the CPU always; with MX_TEST_DEVICE=cuda on a GPU, where the driver's k-th allocation fails too.
#include "base/knobs.h"
#include "engine/engine_int.h"
#include "support/tiny_model.h"

#ifdef MX_TEST_CUDA_HOST
#include "backend/cuda/cuda.h"
#include "backend/cuda/drv.h"
#endif

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

static char *dir, *model;
static const char *device = "cpu";
static bool lazy;
static atomic_int calls, fail_at; // the call that fails, from 1; 0: none

static bool fails(void) {
    return atomic_fetch_add(&calls, 1) + 1 == atomic_load(&fail_at);
}

static void fail_next(int k) {
    atomic_store(&calls, 0);
    atomic_store(&fail_at, k);
}

static bool has_failed(void) {
    return atomic_load(&calls) >= atomic_load(&fail_at);
}

static int set_up(void **state) {
    (void)state;
    const char *other = getenv("MX_TEST_DEVICE");
    if (other) device = other;
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

// ---- A backend whose k-th call fails -----------------------------------------------------------

static const mx_backend_ops *real;
static mx_backend_ops failing;

static mx_status no_memory(mx_err *err) {
    return mx_err_set(err, MX_NOMEM, "made up: 1.00 GiB more, 0.50 of 2.00 GiB are free");
}

static mx_status bad_alloc(mx_backend *b, mx_buffer **out, size_t n, mx_usage use, mx_err *err) {
    *out = NULL;
    return fails() ? no_memory(err) : real->alloc(b, out, n, use, err);
}

static mx_status bad_plan(mx_backend *b, mx_plan *plan, mx_buffer *arena, mx_err *err) {
    return fails() ? no_memory(err) : real->plan_make(b, plan, arena, err);
}

static atomic_bool lost; // the device: no step works

static mx_status bad_submit(mx_backend *b, mx_plan *plan, const mx_step_facts *facts, int32_t slot,
                            mx_ticket *out, mx_err *err) {
    if (atomic_load(&lost)) return mx_err_set(err, MX_DEVICE, "made up: the device is lost");
    return fails() ? no_memory(err) : real->submit(b, plan, facts, slot, out, err);
}

static mx_status bad_wait(mx_backend *b, mx_ticket t, bool block, bool logits, bool *done,
                          mx_run_stats *stats, mx_err *err) {
    mx_status st = real->wait(b, t, block, logits, done, stats, err);
    if (st == MX_OK && atomic_load(&lost)) st = mx_err_set(err, MX_DEVICE, "made up: lost");
    return st == MX_OK && fails() ? no_memory(err) : st;
}

static mx_status bad_upload(mx_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err) {
    return fails() ? no_memory(err) : real->upload(b, out, w, err);
}

static mx_status bad_upload_end(mx_backend *b, mx_err *err) {
    mx_status st = real->upload_end(b, err);
    return st == MX_OK && fails() ? no_memory(err) : st;
}

// Nothing of the engine runs yet.
static void install(mlxcel_engine *e) {
    real = e->backend->ops;
    failing = *real;
    failing.alloc = bad_alloc;
    failing.plan_make = bad_plan;
    failing.submit = bad_submit;
    failing.wait = bad_wait;
    failing.upload = bad_upload;
    if (real->upload_end) failing.upload_end = bad_upload_end;
    e->backend->ops = &failing;
}

// ---- Requests ----------------------------------------------------------------------------------

typedef struct result {
    uint64_t tokens;
    mlxcel_error err;
} result;

static int try_open(mlxcel_engine **e, mlxcel_error *err) {
    mlxcel_params p = {.model = model,
                       .device = device,
                       .n_threads = 1,
                       .ctx_size = 1024,
                       .max_batch = 2,
                       .lazy_weights = lazy,
                       .prefill_chunk = 64,
                       .deterministic = true};
    *e = NULL;
    return mlxcel_open(e, &p, err);
}

static mlxcel_request *submit(mlxcel_engine *e, uint32_t seed, size_t n) {
    int32_t ids[300];
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)(ckpt_mix(seed, i) % 256);
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.max_tokens = 6;
    p.run_past_end = true;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static result collect(mlxcel_request *r) {
    result out = {0};
    mlxcel_event ev;
    bool done = false;
    while (!done && mlxcel_next_event(r, 60, &ev)) {
        done = ev.kind == MLXCEL_EVENT_DONE;
        if (!done) continue;
        out.tokens = ev.token_hash;
        out.err = ev.error;
    }
    assert_true(done);
    mlxcel_request_free(r);
    return out;
}

// The answer of a sound engine, or 503 with a text.
static bool check(result got, result want) {
    if (got.err.status == 0) {
        assert_true(got.tokens == want.tokens);
        return true;
    }
    assert_int_equal(got.err.status, MX_NOMEM);
    assert_int_equal(got.err.http, 503);
    assert_non_null(strstr(got.err.message, "GiB"));
    return false;
}

// ---- Tests -------------------------------------------------------------------------------------

// Fails the k-th call for every k; the number of calls and of failed requests.
static void fail_each(const result want[2], int *n_calls, int *n_failed) {
    *n_failed = 0;
    for (int k = 1;; k += k < 60 ? 1 : 7) {
        mlxcel_engine *e;
        mlxcel_error err = {0};
        if (try_open(&e, &err) != 0) fail_msg("%s", err.message);
        install(e);
        fail_next(k);
        mlxcel_request *r[2] = {submit(e, 1, 300), submit(e, 2, 40)};
        for (int i = 0; i < 2; i++) *n_failed += !check(collect(r[i]), want[i]);
        bool over = !has_failed();
        fail_next(0);
        assert_true(check(collect(submit(e, 1, 300)), want[0]));
        assert_true(check(collect(submit(e, 2, 40)), want[1]));
        mlxcel_stats s;
        mlxcel_get_stats(e, &s);
        assert_int_equal(s.kv_pages, s.kv_pages_free);
        mlxcel_close(e);
        *n_calls = k;
        if (over) return; // there are not so many calls
    }
}

// Twice: with all weights there, and with weights that come at the first step.
static void a_late_failure_is_of_its_requests_only(void **state) {
    (void)state;
    mlxcel_engine *e;
    mlxcel_error err = {0};
    if (try_open(&e, &err) != 0) fail_msg("%s", err.message);
    result want[2] = {collect(submit(e, 1, 300)), collect(submit(e, 2, 40))};
    mlxcel_close(e);
    int calls_of[2], failed[2];
    for (int i = 0; i < 2; i++) {
        lazy = i == 1;
        fail_each(want, &calls_of[i], &failed[i]);
    }
    lazy = false;
    assert_true(calls_of[0] >= 15 && failed[0] >= 10);
    assert_true(calls_of[1] >= calls_of[0] + 10 && failed[1] >= failed[0] + 10);
}

static int32_t failed_steps(mlxcel_engine *e) {
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    return s.n_failed_steps;
}

// What /health goes by: steps that fail one after the other, but not for want of memory.
static void a_lost_device_is_noticed(void **state) {
    (void)state;
    mlxcel_engine *e;
    mlxcel_error err = {0};
    if (try_open(&e, &err) != 0) fail_msg("%s", err.message);
    result want = collect(submit(e, 2, 40));
    install(e);
    fail_next(1);
    assert_false(check(collect(submit(e, 2, 40)), want));
    fail_next(0);
    assert_int_equal(failed_steps(e), 0);
    atomic_store(&lost, true);
    for (int i = 1; i <= 4; i++) {
        result r = collect(submit(e, 2, 40));
        assert_int_equal(r.err.status, MX_DEVICE);
        assert_true(r.err.http >= 500);
        assert_int_equal(failed_steps(e), i);
    }
    atomic_store(&lost, false);
    assert_true(check(collect(submit(e, 2, 40)), want));
    assert_int_equal(failed_steps(e), 0);
    mlxcel_close(e);
}

static void what_does_not_fit_is_refused_with_numbers(void **state) {
    (void)state;
    mlxcel_engine *e;
    mlxcel_error err = {0};
    setenv("MLXCEL_MEMORY_LIMIT", "1000", 1);
    mx_knobs_reload();
    assert_int_not_equal(try_open(&e, &err), 0);
    unsetenv("MLXCEL_MEMORY_LIMIT");
    mx_knobs_reload();
    assert_int_equal(err.status, MX_NOMEM);
    assert_non_null(strstr(err.message, "more than the 1000 bytes"));
    assert_non_null(strstr(err.message, "KV cache"));
    assert_non_null(strstr(err.message, "scratch about"));
    if (strcmp(device, "cpu") == 0) return;
    assert_non_null(strstr(err.message, ", weights "));
    assert_non_null(strstr(err.message, ", loading them "));
}

#ifdef MX_TEST_CUDA_HOST
static CUresult (*real_alloc)(CUdeviceptr *, size_t);

static CUresult CUDAAPI alloc_or_not(CUdeviceptr *p, size_t n) {
    return fails() ? CUDA_ERROR_OUT_OF_MEMORY : real_alloc(p, n);
}

// While a model is loaded, and later: it does not start, or the request is refused, or all is well;
// a small request afterwards is answered.
static void the_driver_refuses_memory(void **state) {
    (void)state;
    if (strcmp(device, "cpu") == 0 || mx_cuda_device_count() < 1) {
        printf("skip: no GPU asked for\n");
        skip();
    }
    mlxcel_engine *e;
    mlxcel_error err = {0};
    if (try_open(&e, &err) != 0) fail_msg("%s", err.message);
    result want = collect(submit(e, 2, 40));
    mlxcel_close(e);
    real_alloc = cuda_d.cuMemAlloc;
    cuda_d.cuMemAlloc = alloc_or_not;
    int refused = 0, k = 1;
    for (bool over = false; !over && k <= 200; k++) {
        fail_next(k);
        err = (mlxcel_error){0};
        if (try_open(&e, &err) != 0) {
            refused++;
            assert_int_equal(err.status, MX_NOMEM);
            assert_true(err.message[0]);
            continue;
        }
        check(collect(submit(e, 2, 40)), want);
        over = !has_failed();
        fail_next(0);
        assert_true(check(collect(submit(e, 2, 40)), want));
        mlxcel_close(e);
    }
    cuda_d.cuMemAlloc = real_alloc;
    assert_true(refused > 5);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_late_failure_is_of_its_requests_only),
        cmocka_unit_test(a_lost_device_is_noticed),
        cmocka_unit_test(what_does_not_fit_is_refused_with_numbers),
#ifdef MX_TEST_CUDA_HOST
        cmocka_unit_test(the_driver_refuses_memory),
#endif
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
