// The server on a GPU that runs out of memory, or is lost, while it serves: a stand-in for the
// driver (tests/ops/stub_gpu.c) whose kernels do nothing, so texts say nothing; statuses and
// messages do. A build without CUDA skips.
#include "support/served.h"

#include "backend/cuda/cuda.h"

static const script scripts[] = {{'A', "Hello"}};
static char *full,
    *lost; // while a file of this name exists: no memory is left; nothing is launched

static int set_up(void **state) {
    (void)state;
    if (!mx_cuda_archs()[0]) return 0;
    char *folder = realpath(MX_TEST_BUILD_DATA "/stub-gpu", NULL);
    assert_non_null(folder);
    dir = ckpt_temp_dir();
    full = mx_path_join(dir, "full");
    assert_int_equal(setenv("LD_LIBRARY_PATH", folder, 1), 0);
    lost = mx_path_join(dir, "lost");
    assert_int_equal(setenv("STUB_GPU_FULL", full, 1), 0);
    assert_int_equal(setenv("STUB_GPU_LOST", lost, 1), 0);
    assert_int_equal(setenv("MLXCEL_CUBLASLT", "0", 1), 0);
    free(folder);
    model = mx_path_join(dir, "script.gguf");
    script_write(model, scripts, MX_COUNT(scripts), 512, "{{ messages[0].content }}");
    setenv("HOME", dir, 1);
    unsetenv("MLXCEL_DEVICE");
    server_start(S, dir, model, "--device cuda --metrics");
    return 0;
}

static int stop(void **state) {
    if (!mx_cuda_archs()[0]) return 0;
    remove(full), remove(lost);
    mx_free(full), mx_free(lost);
    return tear_down(state);
}

static void need_cuda(void) {
    if (mx_cuda_archs()[0]) return;
    print_message("skipped: built without CUDA\n");
    skip();
}

static void touch(const char *path) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
}

// The answer's status to a prompt of n letters; what a refusal has to say.
static void ask(int n, int status, const char *why) {
    char body[600];
    int used = snprintf(body, sizeof body, "{\"max_tokens\":4,\"temperature\":0,\"prompt\":\"");
    memset(body + used, 'A', (size_t)n);
    snprintf(body + used + n, sizeof body - (size_t)(used + n), "\"}");
    json_t *v = post_json(S, "/v1/completions", body, status);
    const char *text = json_string_value(at(v, "error/message"));
    if (why && (!text || !strstr(text, why))) fail_msg("it says '%s'", text ? text : "nothing");
    json_decref(v);
}

static void memory_that_runs_out_ends_its_requests_only(void **state) {
    (void)state;
    need_cuda();
    ask(8, 200, NULL);
    ask(8, 200, NULL); // from the prefix cache: other steps
    touch(full);
    ask(200, 503, "GiB"); // steps of a shape that is new
    ask(8, 200, NULL);    // all that these need is there
    json_decref(get_json(S, "/health", 200));
    remove(full);
    ask(200, 200, NULL);
}

static void health_says_so_when_the_device_is_lost(void **state) {
    (void)state;
    need_cuda();
    touch(lost);
    for (int i = 0; i < 3; i++) ask(20, 500, "launch");
    json_decref(get_json(S, "/health", 503));
    remove(lost);
    ask(20, 200, NULL);
    json_decref(get_json(S, "/health", 200));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_runs_out_ends_its_requests_only),
        cmocka_unit_test(health_says_so_when_the_device_is_lost),
    };
    return cmocka_run_group_tests(tests, set_up, stop);
}
