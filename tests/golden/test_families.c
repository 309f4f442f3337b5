// Every family against transformers: the small models of tests/golden/*/*.json (make_families.py
// wrote them) in each container form, float-exact, through the library. Teacher-forced scores,
// prefill, decode; then what must change nothing: chunks, pages, a neighbour in the batch.
#include "base/knobs.h"
#include "mlxcel.h"
#include "support/golden_model.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

enum { N_GREEDY = 16, N_TOP = 64, MAX_PROMPT = 300 };
// |difference of log-probabilities| that is allowed: float32 sums in another order
#define LIMIT      1e-4
#define LIMIT_CUDA 2e-3
// its mean in the default mode: float weights (f16 state), quantised weights (int8 activations too)
#define MEAN_FLOAT 2e-3
#define MEAN_QUANT 0.04
#define MEAN_CUDA  0.02 // float weights meet bf16 activations there

static char *dir;
static double worst; // of the test
// MX_TEST_DEVICE=cuda runs the same on a GPU, whose sums have another order by shape: values are
// held to LIMIT_CUDA there, and bits to nothing, unless MLXCEL_DETERMINISTIC=1 is set too.
static const char *device = "cpu";
static bool same_bits = true, on_cpu = true;

static void set_exact(bool on) {
    if (on)
        setenv("MLXCEL_EXACT", "1", 1);
    else
        unsetenv("MLXCEL_EXACT");
    mx_knobs_reload();
}

static int set_up(void **state) {
    (void)state;
    const char *other = getenv("MX_TEST_DEVICE");
    if (other) device = other;
    on_cpu = strcmp(device, "cpu") == 0;
    same_bits = on_cpu || getenv("MLXCEL_DETERMINISTIC");
    dir = ckpt_temp_dir();
    mx_log_set_level(MX_LOG_ERROR);
    set_exact(true);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    ckpt_remove_dir(dir);
    return 0;
}

// ---- Running -----------------------------------------------------------------------------------

typedef struct row { // of the distribution after some position
    int32_t id;      // the next token, and its log-probability
    float logprob;
    mlxcel_top_logprob top[N_TOP];
} row;

typedef struct run {
    row rows[MAX_PROMPT];
    int32_t n;
    uint64_t tokens, logits; // hashes
} run;

static mlxcel_engine *open_engine(const char *path, const mlxcel_params *p) {
    mlxcel_params q = *p;
    mlxcel_engine *e = NULL;
    mlxcel_error err = {0};
    q.model = path;
    q.device = device;
    q.n_threads = 2;
    q.prefill_grant_interval = 1; // a prompt does not wait for who decodes
    if (mlxcel_open(&e, &q, &err) != 0) fail_msg("open: %s", err.message);
    return e;
}

// n_decode < 0: scores the prompt.
static mlxcel_request *submit(mlxcel_engine *e, const int32_t *ids, size_t n, int32_t n_decode) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.score = n_decode < 0;
    p.max_tokens = p.score ? 0 : n_decode;
    p.n_logprobs = N_TOP;
    p.hash_logits = true;
    p.sampling.ignore_eos = true;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static void collect(mlxcel_request *r, run *out) {
    mlxcel_event ev;
    bool done = false;
    *out = (run){0};
    while (!done) {
        if (!mlxcel_next_event(r, 60, &ev)) fail_msg("no event in 60 s");
        bool rows = ev.kind == MLXCEL_EVENT_TEXT || ev.kind == MLXCEL_EVENT_SCORE;
        for (int32_t i = 0; rows && i < ev.n_tokens; i++) {
            assert_true(out->n < MAX_PROMPT);
            row *w = &out->rows[out->n++];
            const mlxcel_token *t = &ev.tokens[i];
            w->id = t->id;
            w->logprob = t->logprob;
            assert_int_equal(t->n_top, N_TOP);
            memcpy(w->top, t->top, sizeof w->top);
        }
        done = ev.kind == MLXCEL_EVENT_DONE;
        if (!done) continue;
        if (ev.error.status) fail_msg("%s", ev.error.message);
        out->tokens = ev.token_hash;
        out->logits = ev.logit_hash;
    }
    mlxcel_request_free(r);
}

static void assert_same(const char *what, const run *a, const run *b) {
    assert_int_equal(a->n, b->n);
    for (int32_t i = 0; i < a->n; i++) {
        const row *x = &a->rows[i], *y = &b->rows[i];
        if (same_bits ? x->id != y->id || x->logprob != y->logprob
                      : x->id == y->id && !(fabs(x->logprob - y->logprob) <= LIMIT_CUDA)) {
            fail_msg("%s: row %d: %d (%.9g) and %d (%.9g)", what, i, x->id, x->logprob, y->id,
                     y->logprob);
        }
    }
    if (!same_bits) return;
    assert_true(a->tokens == b->tokens);
    assert_true(a->logits == b->logits);
}

// ---- Comparing ---------------------------------------------------------------------------------

static void check_logprob(const char *what, int64_t at, double got, double want) {
    double d = fabs(got - want);
    worst = MX_MAX(worst, d);
    if (!(d <= (on_cpu ? LIMIT : LIMIT_CUDA))) {
        fail_msg("%s: row %lld: log-probability %.6f, expected %.6f", what, (long long)at, got,
                 want);
    }
}

// want: [ids, log-probabilities] of the 20 most likely
static void check_top(const char *what, int64_t at, const row *r, const json_t *want) {
    const json_t *ids = json_array_get(want, 0), *lps = json_array_get(want, 1);
    assert_int_equal(json_array_size(ids), 20);
    for (size_t i = 0; i < 20; i++) {
        int64_t id = json_integer_value(json_array_get(ids, i));
        int k = 0;
        while (k < N_TOP && r->top[k].id != id) k++;
        if (k == N_TOP) fail_msg("%s: row %ld: id %lld is far down", what, (long)at, (long long)id);
        check_logprob(what, at, r->top[k].logprob, json_number_value(json_array_get(lps, i)));
    }
}

static void check_tops(const char *what, const run *r, const json_t *tops) {
    const char *key;
    json_t *want;
    assert_true(json_object_size(tops) > 0);
    json_object_foreach((json_t *)(uintptr_t)tops, key, want) {
        long at = strtol(key, NULL, 10);
        assert_true(at < r->n);
        check_top(what, at, &r->rows[at], want);
    }
}

static void check_score(const char *what, const run *r, const json_t *form) {
    const json_t *want = json_object_get(form, "logprobs");
    assert_int_equal(r->n, json_array_size(want));
    for (int32_t i = 0; i < r->n; i++) {
        check_logprob(what, i, r->rows[i].logprob,
                      json_number_value(json_array_get(want, (size_t)i)));
    }
    check_tops(what, r, json_object_get(form, "top"));
}

static void check_greedy(const char *what, const run *r, const json_t *form) {
    const json_t *ids = json_object_get(form, "greedy");
    const json_t *lps = json_object_get(form, "greedy_logprobs");
    assert_int_equal(json_array_size(ids), N_GREEDY);
    assert_int_equal(r->n, N_GREEDY);
    for (int32_t i = 0; i < N_GREEDY; i++) {
        int64_t id = json_integer_value(json_array_get(ids, (size_t)i));
        if (r->rows[i].id != id) {
            fail_msg("%s: token %d is %d, expected %lld", what, i, r->rows[i].id, (long long)id);
        }
        check_logprob(what, i, r->rows[i].logprob,
                      json_number_value(json_array_get(lps, (size_t)i)));
    }
    check_tops(what, r, json_object_get(form, "greedy_top"));
}

// ---- One checkpoint ----------------------------------------------------------------------------

typedef struct trial {
    run score, decode, other; // other: a second prompt
} trial;

static void run_trial(mlxcel_engine *e, const json_t *form, bool together, trial *t) {
    size_t n, m;
    int32_t *ids = gm_prompt(form, &n, ""), *ids2 = gm_prompt(form, &m, " other");
    m -= 5; // not in step with the first
    collect(submit(e, ids, n, -1), &t->score);
    mlxcel_request *r = submit(e, ids, n, N_GREEDY), *r2 = NULL;
    if (together) r2 = submit(e, ids2, m, N_GREEDY);
    collect(r, &t->decode);
    if (!r2) r2 = submit(e, ids2, m, N_GREEDY);
    collect(r2, &t->other);
    mx_free(ids);
    mx_free(ids2);
}

static void check_checkpoint(const char *path, const char *what, const json_t *form) {
    static trial plain, other;
    static const mlxcel_params params[] = {
        {.kv_type = "f32", .prefill_chunk = 512, .kv_storage = "dense"},
        {.kv_type = "f32", .prefill_chunk = 512, .kv_storage = "paged", .max_batch = 2},
        {.kv_type = "f32", .prefill_chunk = 7, .kv_storage = "dense", .max_batch = 2},
        {.kv_type = "f32", .prefill_chunk = 21, .kv_storage = "paged", .max_batch = 3},
    };
    mlxcel_engine *e = open_engine(path, &params[0]);
    run_trial(e, form, false, &plain);
    mlxcel_close(e);
    check_score(what, &plain.score, form);
    check_greedy(what, &plain.decode, form);
    for (size_t i = 1; i < MX_COUNT(params); i++) {
        e = open_engine(path, &params[i]);
        // until the two did share steps; they do unless this thread is kept from submitting
        bool shared = false;
        for (int k = 0; k < 50 && !shared; k++) {
            mlxcel_stats before, after;
            mlxcel_get_stats(e, &before);
            run_trial(e, form, true, &other);
            mlxcel_get_stats(e, &after);
            assert_same(what, &plain.score, &other.score);
            assert_same(what, &plain.decode, &other.decode);
            assert_same(what, &plain.other, &other.other);
            shared = after.steps_decode - before.steps_decode < 2 * N_GREEDY - 2;
            if (params[i].prefill_chunk == 7) break; // the first ends before the other is prefilled
        }
        mlxcel_close(e);
        assert_true(shared || params[i].prefill_chunk == 7);
    }
}

// The default mode (int8 activations, f16 state): close, not equal.
static void check_default_mode(const char *path, const char *what, const json_t *form) {
    static run r;
    const json_t *want = json_object_get(form, "logprobs");
    double sum = 0;
    size_t n;
    set_exact(false);
    int32_t *ids = gm_prompt(form, &n, "");
    mlxcel_engine *e = open_engine(path, &(mlxcel_params){.prefill_chunk = 512});
    collect(submit(e, ids, n, -1), &r);
    mlxcel_close(e);
    mx_free(ids);
    set_exact(true);
    assert_int_equal(r.n, json_array_size(want));
    for (int32_t i = 0; i < r.n; i++) {
        sum += fabs(r.rows[i].logprob - json_number_value(json_array_get(want, (size_t)i)));
    }
    double limit = json_object_get(form, "quantization") ? MEAN_QUANT
                   : on_cpu                              ? MEAN_FLOAT
                                                         : MEAN_CUDA;
    if (!(sum <= limit * r.n)) fail_msg("%s: mean difference %.3g", what, sum / r.n);
}

static void check_case(const char *id) {
    json_t *m = gm_load(id);
    char *hf = mx_path_join(dir, "hf"), *gguf = mx_path_join(dir, "m.gguf");
    const char *name;
    json_t *form;
    worst = 0;
    json_object_foreach(json_object_get(m, "forms"), name, form) {
        char what[100];
        snprintf(what, sizeof what, "%s %s", id, name);
        gm_write_hf(hf, m, form, &(gm_folder){0});
        check_checkpoint(hf, what, form);
        check_default_mode(hf, what, form);
        if (!json_object_get(m, "gguf") || json_object_get(form, "quantization")) continue;
        snprintf(what, sizeof what, "%s %s gguf", id, name);
        gm_write_gguf(gguf, m, gm_dtype(name));
        check_checkpoint(gguf, what, form);
        check_default_mode(gguf, what, form);
    }
    print_message("%s: largest difference %.2g\n", id, worst);
    mx_free(hf);
    mx_free(gguf);
    json_decref(m);
}

#define CASE(name, id)                                                                             \
    static void name(void **state) {                                                               \
        (void)state;                                                                               \
        check_case(id);                                                                            \
    }
CASE(llama_plain, "llama/plain")
CASE(llama_with_llama3_rotation, "llama/llama3")
CASE(llama_with_linear_rotation_and_biases, "llama/linear")
CASE(qwen2_plain, "qwen2/plain")
CASE(qwen2_with_window_layers, "qwen2/window")
CASE(qwen3_plain, "qwen3/plain")
CASE(qwen3_with_layer_types, "qwen3/window")
CASE(gemma3_with_a_pattern, "gemma3/pattern")
CASE(gemma3_as_gguf_says_it, "gemma3/default")

// ---- The same model under another prefix, with towers ------------------------------------------

// A text model inside a wrapper: prefixed names, text_config, tensors of a tower (of a type that
// nobody reads), overrides under yet another prefix.
static void check_wrapped(const char *prefix, size_t drop, const char *key_prefix) {
    json_t *m = gm_load("gemma3/pattern");
    const json_t *form = gm_form(m, "a4");
    gm_folder how = {.prefix = prefix, .drop = drop};
    ckpt c = gm_tensors_hf(m, form, &how);
    int64_t dim[2] = {3, 5};
    ckpt_add(&c, "vision_tower.vision_model.encoder.layers.0.self_attn.v_proj.weight", MX_I16, 2,
             dim, NULL);
    ckpt_add(&c, "multi_modal_projector.mm_soft_emb_norm.weight", MX_F32, 1, dim, NULL);
    json_t *text = gm_config(m, form, &how), *quant = json_object(), *v;
    const char *key;
    json_object_foreach(json_object_get(text, "quantization"), key, v) {
        char name[200];
        bool path = strncmp(key, "model.", 6) == 0;
        snprintf(name, sizeof name, "%s%s", path ? key_prefix : "", path ? key + 6 : key);
        json_object_set(quant, name, v);
    }
    // what mlx-vlm writes of a tower that it left alone; not about the text model's layer 0
    json_object_set_new(quant, "vision_tower.vision_model.encoder.layers.0.self_attn.v_proj",
                        json_false());
    json_object_del(text, "quantization");
    json_t *config = json_pack("{s:s,s:o,s:o,s:{},s:i}", "model_type", "gemma3", "text_config",
                               text, "quantization", quant, "vision_config", "eos_token_id", 256);
    char *hf = mx_path_join(dir, "wrapped");
    gm_write_folder(hf, &c, config);
    check_checkpoint(hf, prefix, form);
    mx_free(hf);
    json_decref(config);
    ckpt_free(&c);
    json_decref(m);
}

static void a_wrapped_text_model(void **state) {
    (void)state;
    check_wrapped("language_model.", 0, "language_model.model.");
    check_wrapped("model.language_model.", 6, "language_model.model.");
    check_wrapped("language_model.", 0, "model.language_model.");
    check_wrapped("", 6, "");
}

// ---- Lossless re-expressions -------------------------------------------------------------------

static void check_equal(const char *what, const char *a, const char *b, const json_t *form) {
    static run ra, rb;
    for (int exact = 0; exact < 2; exact++) {
        char text[100];
        snprintf(text, sizeof text, "%s%s", what, exact ? " exact" : "");
        set_exact(exact);
        mlxcel_params p = {.ctx_size = 512};
        mlxcel_engine *ea = open_engine(a, &p), *eb = open_engine(b, &p);
        static const char *const salt[] = {"", " 1", " 2"};
        for (size_t i = 0; i < MX_COUNT(salt); i++) {
            size_t n;
            int32_t *ids = gm_prompt(form, &n, salt[i]);
            collect(submit(ea, ids, n, 64), &ra);
            collect(submit(eb, ids, n, 64), &rb);
            assert_int_equal(ra.n, 64);
            assert_same(text, &ra, &rb);
            mx_free(ids);
        }
        mlxcel_close(ea);
        mlxcel_close(eb);
    }
    set_exact(true);
}

// F16 is the HF checkpoint of that type; Q4_1 is affine 4-bit, Q8_0 affine 8-bit, groups of 32.
static void containers_of_the_same_numbers_agree_bit_for_bit(void **state) {
    (void)state;
    same_bits = on_cpu; // a GPU packs the forms differently
    static const char *const ids[] = {"llama/plain", "qwen2/plain", "qwen3/plain",
                                      "gemma3/default"};
    char *hf = mx_path_join(dir, "same"), *gguf = mx_path_join(dir, "same.gguf");
    for (size_t i = 0; i < MX_COUNT(ids); i++) {
        json_t *m = gm_load(ids[i]);
        const json_t *f32 = gm_form(m, "f32"), *f16 = gm_form(m, "f16");
        gm_write_hf(hf, m, f16, &(gm_folder){0});
        gm_write_gguf(gguf, m, MX_F16);
        check_equal("f16", hf, gguf, f16);
        static const mx_dtype blocks[] = {MX_Q4_1, MX_Q8_0};
        for (size_t k = 0; k < MX_COUNT(blocks); k++) {
            gm_write_hf(hf, m, f32, &(gm_folder){.blocks = blocks[k], .with_blocks = true});
            gm_write_gguf(gguf, m, blocks[k]);
            check_equal(mx_dtype_get(blocks[k])->name, hf, gguf, f32);
        }
        json_decref(m);
    }
    mx_free(hf);
    mx_free(gguf);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_plain),
        cmocka_unit_test(llama_with_llama3_rotation),
        cmocka_unit_test(llama_with_linear_rotation_and_biases),
        cmocka_unit_test(qwen2_plain),
        cmocka_unit_test(qwen2_with_window_layers),
        cmocka_unit_test(qwen3_plain),
        cmocka_unit_test(qwen3_with_layer_types),
        cmocka_unit_test(gemma3_with_a_pattern),
        cmocka_unit_test(gemma3_as_gguf_says_it),
        cmocka_unit_test(a_wrapped_text_model),
        cmocka_unit_test(containers_of_the_same_numbers_agree_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
