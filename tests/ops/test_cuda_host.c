// The CUDA backend's host side against a driver that fails (stub_gpu.c): from opening the device to
// closing it, every call of the driver fails once. Each time: an error that says what, or an
// answer; nothing is left on the device; no second release. A build without CUDA skips.
#include "backend/cuda/cuda.h"
#include "engine/engine_int.h"
#include "support/tiny_model.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

#define STUB MX_TEST_BUILD_DATA "/stub-gpu/libcuda.so.1"

enum { NO_MEMORY = 2, UNKNOWN_TO_THE_DRIVER = 12345 };

static char *dir, *model;
static void (*fail_at)(int k, int code);
static void (*set_free)(size_t n);
static const char *(*failed)(void), *(*left)(void);

static void find(void *lib, const char *name, void *f) {
    void *p = dlsym(lib, name);
    assert_non_null(p);
    memcpy(f, &p, sizeof p);
}

static int set_up(void **state) {
    (void)state;
    if (!mx_cuda_archs()[0]) return 0;
    setenv("MLXCEL_CUBLASLT", "0", 1); // it would want the driver too
    mx_log_set_level(MX_LOG_ERROR);
    void *lib = dlopen(STUB, RTLD_NOW | RTLD_GLOBAL); // found again by its name
    assert_non_null(lib);
    find(lib, "stub_fail_at", &fail_at);
    find(lib, "stub_failed", &failed);
    find(lib, "stub_live", &left);
    find(lib, "stub_set_free", &set_free);
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "tiny.gguf");
    tiny_write(model, &(tiny_opts){.d_model = 128, .d_ff = 256, .type = MX_Q4_1});
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_free(model);
    if (dir) ckpt_remove_dir(dir);
    return 0;
}

static void check_text(const char *text, const char *name) {
    bool sound = text[0] && !strstr(text, "(null)") && !strstr(text, "cuda_d");
    if (!sound) fail_msg("%s failed: '%s'", name, text);
}

// One answer of five tokens; the error that ended it.
static void answer(mlxcel_engine *e, mlxcel_error *err) {
    static const int32_t ids[] = {10, 20, 30, 40};
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = MX_COUNT(ids);
    p.max_tokens = 5;
    p.run_past_end = true;
    mlxcel_request *r = NULL;
    if (mlxcel_submit(e, &p, &r, err) != 0) return;
    mlxcel_event ev;
    bool done = false;
    while (!done && mlxcel_next_event(r, 60, &ev)) {
        done = ev.kind == MLXCEL_EVENT_DONE;
        if (done) *err = ev.error;
    }
    assert_true(done);
    mlxcel_request_free(r);
}

// From opening to closing. False when there was no k-th call.
static bool live_through(int k, int code, bool *answered) {
    mlxcel_params p = {
        .model = model, .device = "cuda", .n_threads = 1, .ctx_size = 128, .max_batch = 1};
    mlxcel_engine *e = NULL;
    mlxcel_error err = {0};
    fail_at(k, code);
    if (mlxcel_open(&e, &p, &err) == 0) answer(e, &err);
    *answered = err.status == 0;
    const char *name = failed();
    mlxcel_close(e);
    if (err.status != 0) check_text(err.message, name ? name : "nothing");
    if (err.status != 0 && code == NO_MEMORY) assert_int_equal(err.status, MX_NOMEM);
    name = failed(); // closing has calls too
    fail_at(0, 0);
    if (left()) fail_msg("call %d, %s: %s is left", k, name ? name : "none", left());
    if (name && strcmp(name, "cuDeviceGetAttribute") == 0) {
        assert_non_null(strstr(err.message, name)); // what the device is like is not guessed
    }
    return name != NULL;
}

static void every_call_may_fail(void **state) {
    (void)state;
    if (!mx_cuda_archs()[0]) {
        printf("skip: built without CUDA\n");
        skip();
    }
    bool answered, all;
    int k = 1, refused = 0;
    for (; live_through(k, UNKNOWN_TO_THE_DRIVER, &answered); k += MX_TEST_SLOW > 1 ? 3 : 1) {
        refused += !answered;
    }
    assert_true(answered && k > 300 && refused > 50);
    for (k = 1; live_through(k, NO_MEMORY, &answered); k += 7) refused += !answered;
    all = answered;
    live_through(0, 0, &answered);
    assert_true(all && answered);
}

// No rate is better than one of no bytes.
static void the_read_rate_needs_memory(void **state) {
    (void)state;
    if (!mx_cuda_archs()[0]) {
        printf("skip: built without CUDA\n");
        skip();
    }
    mx_backend *b;
    mx_err err = {0};
    double rate = 0;
    fail_at(0, 0);
    if (mx_cuda_open(0, &b, &err) != MX_OK) fail_msg("%s", err.msg);
    set_free(100 << 20);
    assert_int_equal(b->ops->read_rate(b, &rate, &err), MX_NOMEM);
    assert_non_null(strstr(err.msg, "read rate: 104857600 bytes"));
    set_free((size_t)1 << 30);
    assert_int_equal(b->ops->read_rate(b, &rate, &err), MX_OK);
    assert_true(rate > 0);
    b->ops->close(b);
    assert_null(left());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_may_fail),
        cmocka_unit_test(the_read_rate_needs_memory),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
