// The measuring commands as a user meets them: profile and bench --ab on tiny models print what
// they promise, hashes are equal where they must be, and wrong usage says what is wrong.
#include "base/mem.h"
#include "base/str.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

enum { MAX_ARGS = 32 };

// Runs the program with these arguments; standard output (out) or standard error (err) into text.
static int run(mx_buf *out, mx_buf *err, const char *const *args) {
    const char *argv[MAX_ARGS] = {MX_TEST_PROGRAM};
    int fd[2][2], n = 1, status;
    for (; *args; args++) argv[n++] = *args;
    assert_int_equal(pipe(fd[0]) | pipe(fd[1]), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[0][1], 1);
        dup2(fd[1][1], 2);
        for (int i = 3; i < 32; i++) close(i);
        execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    mx_buf *to[2] = {out, err};
    for (int i = 0; i < 2; i++) { // the first is read to its end: messages are few
        close(fd[i][1]);
        char chunk[4096];
        ssize_t k;
        mx_buf_clear(to[i]);
        while ((k = read(fd[i][0], chunk, sizeof chunk)) > 0) mx_buf_add(to[i], chunk, (size_t)k);
        close(fd[i][0]);
    }
    while (waitpid(pid, &status, 0) < 0) assert_int_equal(errno, EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

static mx_buf out, err;

static json_t *run_json(const char *const *args) {
    int code = run(&out, &err, args);
    if (code != 0) fail_msg("exit %d: %s", code, err.data ? err.data : "");
    json_t *j = json_loads(out.data, 0, NULL);
    assert_non_null(j);
    return j;
}
#define RUN_JSON(...) run_json((const char *const[]){__VA_ARGS__, "-o", "json", NULL})

static double number(const json_t *j, const char *key) {
    const json_t *v = json_object_get(j, key);
    assert_true(json_is_number(v));
    return json_number_value(v);
}

static void a_chain_is_the_same_in_any_buffers(void **state) {
    (void)state;
    json_t *j = RUN_JSON("profile", "--chain", "400", "-r", "2");
    const json_t *rows = json_object_get(j, "rows");
    // five unsplit, 1001, 201, 101, 51, 21 ops each
    static const int buffers[10] = {1, 1, 1, 1, 1, 1, 2, 4, 8, 20};
    assert_int_equal(json_array_size(rows), 20);
    for (size_t i = 0; i < 20; i++) {
        const json_t *r = json_array_get(rows, i);
        assert_int_equal(number(r, "buffers"), buffers[i % 10]);
        assert_int_equal(json_is_true(json_object_get(r, "wait")), i >= 10);
        assert_true(number(r, "null_ms") >= 0);
        assert_true(json_equal(json_object_get(r, "hash"),
                               json_object_get(json_array_get(rows, 0), "hash")));
        assert_true(number(r, "ms") > 0);
    }
    assert_true(json_is_true(json_object_get(j, "hashes_equal")));
    json_decref(j);
}

static void parts_of_a_step(void **state) {
    (void)state;
    json_t *j = RUN_JSON("profile", "-m", "synthetic:tiny-q8_0", "-r", "2", "-d", "33", "-b", "2");
    static const char *const names[] = {"attention", "mlp", "head", "sampling", "embed", "norm"};
    static const int kernels[] = {16, 8, 1, 1, 2, 9};
    const json_t *rows = json_object_get(j, "segments");
    assert_int_equal(json_array_size(rows), MX_COUNT(names));
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        const json_t *r = json_array_get(rows, i);
        assert_string_equal(json_string_value(json_object_get(r, "segment")), names[i]);
        assert_int_equal(number(r, "kernels"), kernels[i]);
        assert_int_equal(number(r, "buffers"), 1);
        assert_true(number(r, "bytes") > 0);
    }
    assert_int_equal(number(j, "kernels"), 28);
    assert_int_equal(number(j, "buffers"), 1);
    assert_true(json_is_true(json_object_get(j, "hashes_equal")));
    json_decref(j);
}

static void budgets_of_a_model(void **state) {
    (void)state;
    json_t *j =
        RUN_JSON("profile", "--launch-heavy", "-m", "synthetic:tiny-bf16", "-r", "1", "-d", "40");
    const json_t *rows = json_object_get(j, "rows");
    assert_int_equal(json_array_size(rows), 9);
    assert_int_equal(number(j, "context"), 40);
    for (size_t i = 0; i < 9; i++) {
        const json_t *r = json_array_get(rows, i);
        bool fused = json_is_true(json_object_get(r, "fused"));
        assert_int_equal(number(r, "kernels"), fused ? 28 : 69);
        assert_true(number(r, "prefill_ms") > 0 && number(r, "ms") > 0);
    }
    assert_int_equal(number(json_array_get(rows, 7), "buffers"), 2); // 20/100, fused
    assert_true(json_is_true(json_object_get(j, "hashes_equal_over_budgets")));
    assert_true(json_is_true(json_object_get(j, "peaks_equal_over_budgets")));
    json_decref(j);
}

// On a GPU a prompt of 20,000 tokens too, on the CPU a short one: the same bits and the same peak
// for every budget.
static void budgets_of_a_long_prompt(void **state) {
    (void)state;
    const char *other = getenv("MX_TEST_DEVICE"), *depth = other ? "20000" : "160";
    static const double contexts[2][2] = {{128, 160}, {128, 20000}};
    const char *model = other ? "synthetic:launch-heavy-q8_0" : "synthetic:tiny-q8_0";
    const char *args[] = {
        "profile",  "--launch-heavy",      "-m", model, "-r", "1", "-d", depth, "-o", "json",
        "--device", other ? other : "cpu", NULL};
    int code = run(&out, &err, args), n = 0;
    if (code != 0) fail_msg("exit %d: %s", code, err.data ? err.data : "");
    for (char *line = out.data; *line; n++) {
        size_t len = strcspn(line, "\n");
        json_t *j = json_loadb(line, len, 0, NULL);
        assert_non_null(j);
        assert_true(n < 2 && number(j, "context") == contexts[other != NULL][n]);
        assert_int_equal(json_array_size(json_object_get(j, "rows")), 9);
        assert_true(json_is_true(json_object_get(j, "hashes_equal_over_budgets")));
        assert_true(json_is_true(json_object_get(j, "peaks_equal_over_budgets")));
        json_decref(j);
        line += len + (line[len] != 0);
    }
    assert_int_equal(n, 2);
}

static void many_sequences(void **state) {
    (void)state;
    for (int warm = 0; warm < 2; warm++) {
        json_t *j =
            RUN_JSON("bench", "-m", "synthetic:tiny-q4_1", "-p", "0", "-n", "48", "-d", "40", "-b",
                     "6", "-r", "4", warm ? "--warm-cache" : "--allow-fallback");
        const json_t *row = json_array_get(json_object_get(j, "rows"), 0);
        assert_null(json_object_get(row, "reason"));
        assert_int_equal(json_array_size(json_object_get(row, "tok_s")), 4);
        assert_int_equal(json_integer_value(json_object_get(row, "cached")), warm ? 32 : 0);
        json_decref(j);
    }
}

static void arms_of_settings(void **state) {
    (void)state;
    json_t *j = RUN_JSON("bench", "--ab", "--arm", " MLXCEL_EXACT=1  MLX_MAX_OPS_PER_BUFFER=9",
                         "-m", "synthetic:tiny-q4_1", "-p", "8", "-n", "8", "-r", "1");
    const json_t *arms = json_object_get(j, "arms"), *one = json_array_get(arms, 0);
    assert_int_equal(json_array_size(arms), 3);
    for (size_t i = 0; i < 3; i++) {
        const json_t *a = json_array_get(arms, i);
        bool same =
            json_equal(json_object_get(a, "logit_hash"), json_object_get(one, "logit_hash"));
        assert_int_equal(same, i < 2); // the last one computes otherwise
        assert_int_equal(json_is_true(json_object_get(a, "same_results")), same);
        assert_int_equal(number(a, "buffers_per_token"), i == 2 ? 3 : 1);
        assert_true(number(a, "decode_ms") > 0 && number(a, "prefill_ms") > 0);
        assert_true(number(a, "peak_bytes") > 0);
    }
    json_decref(j);
}

// However busy the machine is: the chunk is not measured, but an arm may choose it.
static void arms_have_one_chunk(void **state) {
    (void)state;
    json_t *j = RUN_JSON("bench", "--ab", "--arm", "MLXCEL_PREFILL_CHUNK=512", "--arm",
                         "MLXCEL_PREFILL_CHUNK=32", "-m", "synthetic:tiny-q4_1", "-p", "512", "-n",
                         "2", "-r", "2");
    const json_t *arms = json_object_get(j, "arms");
    double peak = number(json_array_get(arms, 0), "peak_bytes");
    assert_true(number(json_array_get(arms, 1), "peak_bytes") == peak);
    assert_true(number(json_array_get(arms, 2), "peak_bytes") == peak);
    assert_true(number(json_array_get(arms, 3), "peak_bytes") < peak);
    json_decref(j);
}

// On the CPU, and with MX_TEST_DEVICE=cuda on a GPU, whose memory a kernel reads.
static void a_bench_knows_its_roof(void **state) {
    (void)state;
    const char *other = getenv("MX_TEST_DEVICE");
    const char *device[2] = {"cpu", other};
    for (int i = 0; i < 2 && device[i]; i++) {
        json_t *j = RUN_JSON("bench", "-m", "synthetic:tiny-bf16", "-p", "0", "-n", "64", "-r", "1",
                             "-d", "16", "--device", device[i], "--allow-fallback");
        double rate = number(j, "read_gb_s");
        assert_true(rate > (i ? 100 : 0.1) && rate < 20000);
        const json_t *row = json_array_get(json_object_get(j, "rows"), 0);
        double tok_s = json_number_value(json_array_get(json_object_get(row, "tok_s"), 0));
        double share = tok_s * number(j, "bytes_per_token") / (rate * 1e9);
        assert_true(fabs(number(j, "roof_share") / share - 1) < 1e-6);
        assert_true(number(j, "load_s") > 0);
        json_decref(j);
    }
}

static void wrong_usage_is_named(void **state) {
    (void)state;
    static const struct {
        const char *args[8], *say;
    } bad[] = {
        {{"profile"}, "--launch-heavy"},
        {{"profile", "--chain", "3"}, "4 ops"},
        {{"profile", "--chain", "100001"}, "from 0 to 100000"},
        {{"profile", "--chain", "9", "--launch-heavy"}, "one of them"},
        {{"bench", "-m", "x", "--arm", "MLXCEL_EXACT=1"}, "--ab"},
        {{"bench", "-m", "x", "--ab", "--arm", "MLXCEL_EXCAT=1"}, "MLXCEL_EXCAT=1"},
        {{"bench", "-m", "x", "--ab", "--arm", "MLXCEL_EXACT"}, "NAME=VALUE"},
        {{"bench", "-m", "x", "--ab", "--arm", "MLXCEL_EXACT=1 MLXCEL_EXACT=0"}, "EXACT twice"},
        {{"bench", "-m", "x", "--ab", "--arm", "LLAMA_ARG_...=1"}, "NAME=VALUE"},
    };
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        assert_int_equal(run(&out, &err, bad[i].args), 2);
        assert_int_equal(out.n, 0);
        assert_non_null(strstr(err.data, bad[i].say));
    }
    const char *const none[] = {"profile", "-m", "synthetic:none-f16", NULL};
    assert_int_equal(run(&out, &err, none), 3);
    assert_non_null(strstr(err.data, "synthetic:GEOMETRY-FORMAT"));
}

static int set_up(void **state) {
    (void)state;
    mx_buf_init(&out, 0);
    mx_buf_init(&err, 0);
    setenv("MLXCEL_DEVICE", "cpu", 1);
    setenv("MLXCEL_THREADS", "1", 1);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_buf_free(&out);
    mx_buf_free(&err);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_is_the_same_in_any_buffers),
        cmocka_unit_test(parts_of_a_step),
        cmocka_unit_test(budgets_of_a_model),
        cmocka_unit_test(budgets_of_a_long_prompt),
        cmocka_unit_test(many_sequences),
        cmocka_unit_test(arms_of_settings),
        cmocka_unit_test(arms_have_one_chunk),
        cmocka_unit_test(a_bench_knows_its_roof),
        cmocka_unit_test(wrong_usage_is_named),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
