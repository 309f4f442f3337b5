// The server's start and its end: flags that it refuses, places it cannot listen at, signals that
// come early, what it says about the model.
#include "support/served.h"

static int set_up(void **state) {
    static const script scripts[] = {{'A', "Hello!"}};
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 256, NULL, "");
}

// ---- Flags ----

// Refused with 2 and a message that has `names`.
static void refused(const char *args, const char *names) {
    server s = {0};
    server_spawn(&s, dir, model, args);
    int code = server_end(&s, 20);
    char *log = server_log(&s);
    if (code != 2 || !strstr(log, names)) fail_msg("%s: exit code %d: %s", args, code, log);
    mx_free(log);
}

static void bad_flags(void **state) {
    (void)state;
    static const char *const args[][2] = {
        {"--flash-attn on", "--flash-attn"},
        {"--port 99999", "--port"},
        {"--kv-cache-budget x", "--kv-cache-budget"},
        {"-ctk f16 -ctv f32", "--cache-type-v"},
        {"--ssl-key-file x", "--ssl-cert-file"},
        {"--host no.such.host.invalid", "--host"},
        {"-ngl 99", "-ngl"},
        {"--n-parallel 0", "--n-parallel"},
        {"--chat-template-kwargs [1]", "--chat-template-kwargs"},
    };
    for (size_t i = 0; i < MX_COUNT(args); i++) refused(args[i][0], args[i][1]);
    server s = {0};
    server_spawn(&s, dir, "missing.gguf", "");
    assert_int_equal(server_end(&s, 20), 3);
}

static void texts_of_flags(void **state) {
    (void)state;
    static const char *const args[] = {"--cors-origins=ui.example",
                                       "--cors-origins=https://a,b",
                                       "--cors-origins=https://",
                                       "--cors-origins=https://a/",
                                       "--api-prefix=x/",
                                       "--api-prefix=llm",
                                       "--api-prefix=/llm/",
                                       "--api-prefix=/",
                                       "--api-prefix=/a//b",
                                       "--api-prefix=/a\tb",
                                       "--api-prefix=/..",
                                       "--api-prefix=/a/../b",
                                       "--api-prefix=/.",
                                       "--api-prefix=/a%20",
                                       "--api-prefix=/\xc3\xa9",
                                       "--api-prefix=/a?b",
                                       "--api-key=",
                                       "--api-key=,",
                                       "--api-key=a,,b",
                                       "--api-key=secret\x01",
                                       "--api-key=\"secret",
                                       "--api-key=secret\xc3\xa9",
                                       "--alias=",
                                       "--alias=,a",
                                       "--alias=a,",
                                       "--alias=a\x1b[2J",
                                       "--alias=a\x7f",
                                       "--alias=a\xff",
                                       "--reasoning-alias-field=",
                                       "--reasoning-alias-field=content",
                                       "--reasoning-alias-field=reasoning_content",
                                       "--reasoning-alias-field=a\"b",
                                       "--reasoning-alias-field=a\nb",
                                       "--reasoning-alias-field=1a"};
    for (size_t i = 0; i < MX_COUNT(args); i++) {
        char flag[64];
        snprintf(flag, sizeof flag, "%.*s", (int)strcspn(args[i], "="), args[i]);
        refused(args[i], flag);
    }
    setenv("LLAMA_API_KEY", "secret\x02", 1);
    refused("", "LLAMA_API_KEY");
    setenv("LLAMA_API_KEY", " , ", 1);
    refused("", "LLAMA_API_KEY: no key");
    unsetenv("LLAMA_API_KEY");
}

static void expect_props(const server *s, long long slots, long long ctx, long long chunk) {
    json_t *v = get_json(s, "/props", 200);
    assert_int_equal(int_at(v, "total_slots"), slots);
    assert_int_equal(int_at(v, "default_generation_settings/n_ctx"), ctx);
    assert_int_equal(int_at(v, "prefill_chunk"), chunk);
    assert_string_equal(text_at(v, "kv_storage"), "paged");
    assert_true(int_at(v, "kv_pool_bytes") <= 1 << 20);
    json_decref(v);
    json_decref(get_json(s, "/slots", 501));
    reply r = get(s, "/metrics");
    assert_int_equal(r.status, 200);
    reply_free(&r);
}

// As mlxcel-server, with the scheduler's settings in variables; a flag wins.
static void the_other_name_and_variables(void **state) {
    (void)state;
    static const char *const variables[][2] = {{"LLAMA_ARG_N_PARALLEL", "3"},
                                               {"LLAMA_ARG_MAX_BATCH_SIZE", "2"},
                                               {"LLAMA_ARG_CTX_SIZE", "200"},
                                               {"LLAMA_ARG_UBATCH", "64"},
                                               {"LLAMA_ARG_BATCH", "40"},
                                               {"LLAMA_ARG_PREFILL_GRANT_INTERVAL", "3"},
                                               {"LLAMA_ARG_MAX_QUEUE_DEPTH", "7"},
                                               {"LLAMA_ARG_KV_CACHE_BUDGET", "1M"},
                                               {"LLAMA_ARG_DECODE_STORAGE_BACKEND", "paged"},
                                               {"LLAMA_ARG_NO_ENDPOINT_SLOTS", "1"},
                                               {"LLAMA_ARG_ENDPOINT_METRICS", "1"}};
    char *name = mx_path_join(dir, "mlxcel-server"), *target = realpath(MX_TEST_PROGRAM, NULL);
    assert_int_equal(symlink(target, name), 0);
    for (size_t i = 0; i < MX_COUNT(variables); i++) setenv(variables[i][0], variables[i][1], 1);
    server s = {.program = name};
    server_start(&s, dir, model, "");
    expect_props(&s, 2, 200, 40);
    server_stop(&s);
    server_start(&s, dir, model, "--n-parallel 1 -c 100 --prefill-chunk-size 72");
    expect_props(&s, 1, 100, 72);
    server_stop(&s);
    setenv("LLAMA_ARG_MAX_QUEUE_DEPTH", "x", 1);
    server_spawn(&s, dir, model, "");
    assert_int_equal(server_end(&s, 20), 2);
    for (size_t i = 0; i < MX_COUNT(variables); i++) unsetenv(variables[i][0]);
    mx_free(name);
    free(target);
}

static void names_may_have_blanks_beside_commas(void **state) {
    (void)state;
    server s = {0};
    setenv("LLAMA_ARG_ALIAS", " a , b b,c", 1);
    server_start(&s, dir, model, "--cors-origins=https://a:1,*,loopback");
    unsetenv("LLAMA_ARG_ALIAS");
    json_t *v = get_json(&s, "/v1/models", 200);
    assert_string_equal(text_at(v, "data/0/id"), "a");
    assert_string_equal(text_at(v, "data/1/id"), "b b");
    assert_string_equal(text_at(v, "data/2/id"), "c");
    json_decref(v);
    server_stop(&s);
}

static void keys_are_not_shown(void **state) {
    (void)state;
    server s = {0};
    server_spawn(&s, dir, model, "--api-key=secret\x01");
    assert_int_equal(server_end(&s, 20), 2);
    char *log = server_log(&s);
    assert_null(strstr(log, "secret"));
    mx_free(log);
}

static void files_of_keys(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t n;
    } files[] = {{"a\0bcd\n", 6}, {"key\nk\x1b\n", 7}, {"# none\n\n", 8}, {"", 0}};
    char *file = mx_path_join(dir, "keys-bad"), args[300];
    snprintf(args, sizeof args, "--api-key-file %s", file);
    for (size_t i = 0; i < MX_COUNT(files); i++) {
        mx_err err;
        assert_int_equal(mx_write_file_atomic(file, files[i].text, files[i].n, &err), MX_OK);
        refused(args, "--api-key-file");
    }
    mx_free(file);
}

// ---- The socket ----

// The path has an owner that is stopped, and nobody else fits into its queue.
static void a_socket_that_does_not_accept(void **state) {
    (void)state;
    server first = {0}, second = {0};
    char args[200];
    snprintf(first.sock, sizeof first.sock, "%s/stopped.sock", dir);
    second = first;
    snprintf(args, sizeof args, "--host %s", first.sock);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, first.sock, sizeof first.sock);
    int owner = socket(AF_UNIX, SOCK_STREAM, 0), clients[8];
    assert_int_equal(bind(owner, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(owner, 1), 0);
    int n = 0, full = 0;
    while (n < 8 && !full) {
        clients[n] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        full = connect(clients[n++], (struct sockaddr *)&a, sizeof a) != 0;
    }
    assert_true(full);
    server_spawn(&second, dir, model, args);
    assert_int_equal(server_end(&second, 20), 1);
    char *log = server_log(&second);
    assert_non_null(strstr(log, "stopped.sock"));
    assert_non_null(strstr(log, "accepts no connection"));
    mx_free(log);
    assert_true(mx_path_exists(first.sock));
    for (int i = 0; i < n; i++) close(clients[i]);
    close(owner);
    unlink(first.sock);
}

static void a_socket_of_another_server(void **state) {
    (void)state;
    server first = {0}, second = {0};
    char args[200];
    snprintf(first.sock, sizeof first.sock, "%s/two.sock", dir);
    second = first;
    snprintf(args, sizeof args, "--host %s", first.sock);
    server_start(&first, dir, model, args);
    server_spawn(&second, dir, model, args);
    assert_int_equal(server_end(&second, 20), 1);
    json_decref(get_json(&first, "/health", 200));
    server_stop(&first);
}

// ---- Signals ----

// However early SIGTERM comes, it ends as later; before the program runs it is the kernel's.
static void sigterm_at_once(void **state) {
    (void)state;
    bool seen = false;
    for (int i = 0; i < 60; i++) {
        server s = {0};
        server_spawn(&s, dir, model, "");
        mx_sleep_s(0.0005 * i * MX_TEST_SLOW);
        kill(s.pid, SIGTERM);
        int code = server_end(&s, 20);
        if (code != 0 && code != 1000 + SIGTERM) fail_msg("after %d: exit code %d", i, code);
        seen |= code == 0;
    }
    assert_true(seen);
}

// ---- What it says ----

static void a_model_without_template_is_warned_about(void **state) {
    (void)state;
    char *log = server_log(S);
    assert_non_null(strstr(log, "the model has no chat template"));
    mx_free(log);
    json_decref(post_json(S, "/v1/chat/completions",
                          "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}]}", 501));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_flags),
        cmocka_unit_test(texts_of_flags),
        cmocka_unit_test(the_other_name_and_variables),
        cmocka_unit_test(names_may_have_blanks_beside_commas),
        cmocka_unit_test(keys_are_not_shown),
        cmocka_unit_test(files_of_keys),
        cmocka_unit_test(a_socket_that_does_not_accept),
        cmocka_unit_test(a_socket_of_another_server),
        cmocka_unit_test(sigterm_at_once),
        cmocka_unit_test(a_model_without_template_is_warned_about),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
