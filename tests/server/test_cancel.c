// Clients that leave, signals, memory: after any of it the server is as it was. The model is a
// script (support/script_model.h); a prompt that ends with 'x' is answered by x for ever.
#include "support/served.h"

#include <pthread.h>

static const script scripts[] = {{'A', "Hello " SCRIPT_CUT "wor" SCRIPT_CUT "ld!"}};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CTX = 2048, SANITIZED = 1 };
#else
enum { CTX = 32768, SANITIZED = 0 };
#endif

static int set_up(void **state) {
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), CTX, NULL,
                         "--n-parallel 2 -c 32768 --prompt-cache-bytes 4M --no-request-log");
}

// ---- Helpers ----

static const char endless[] = "{\"prompt\":\"x\",\"max_tokens\":100000,\"stream\":%s}";

static int ask(const server *s, bool stream) {
    char body[128];
    snprintf(body, sizeof body, endless, stream ? "true" : "false");
    int fd = dial(s);
    assert_true(fd >= 0);
    send_request(fd, "POST", "/v1/completions", NULL, body, strlen(body));
    return fd;
}

// A prompt whose prefill takes a while.
static int ask_long(const server *s) {
    char *body = mx_alloc(CTX + 100);
    int n = snprintf(body, 100, "{\"stream\":true,\"cache_prompt\":false,\"prompt\":\"");
    memset(body + n, 'y', CTX - 100);
    n += CTX - 100;
    n += snprintf(body + n, 50, "x\"}");
    int fd = dial(s);
    assert_true(fd >= 0);
    send_request(fd, "POST", "/v1/completions", NULL, body, (size_t)n);
    mx_free(body);
    return fd;
}

static void wait_text(int fd, const char *what) {
    mx_buf b;
    mx_buf_init(&b, 0);
    char part[4096];
    while (!b.n || !strstr(b.data, what)) {
        ssize_t k = recv(fd, part, sizeof part, 0);
        if (k <= 0) fail_msg("no %s in %s", what, b.n ? b.data : "");
        mx_buf_add(&b, part, (size_t)k);
    }
    mx_buf_free(&b);
}

static long long counter(const server *s, const char *name) {
    json_t *v = get_json(s, "/v1/stats", 200);
    long long x = int_at(v, name);
    json_decref(v);
    return x;
}

static void wait_counter(const server *s, const char *name, long long want) {
    for (int i = 0; i < 500; i++) {
        if (counter(s, name) == want) return;
        mx_sleep_s(0.01);
    }
    fail_msg("%s is %lld, expected %lld", name, counter(s, name), want);
}

// Nothing runs, nothing waits, every page is free but those of the cache.
static void expect_idle(const server *s) {
    wait_counter(s, "running", 0);
    wait_counter(s, "queued", 0);
    json_decref(post_json(s, "/v1/cache/reset", "", 200));
    json_t *v = post_json(s, "/v1/completions",
                          "{\"prompt\":\"A\",\"cache_prompt\":false,\"temperature\":0}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "Hello world!");
    json_decref(v);
    wait_counter(s, "kv_pages_free", counter(s, "kv_pages"));
}

typedef enum leave { CLOSE, RESET, HALF } leave;

static void depart(int fd, leave how) {
    struct linger now = {1, 0};
    if (how == RESET) setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    if (how == HALF) {
        shutdown(fd, SHUT_WR);
        reply r = read_reply(fd); // the server closes
        reply_free(&r);
    }
    close(fd);
}

// ---- Clients that leave ----

static void while_decoding(void **state) {
    (void)state;
    for (int i = 0; i < 30; i++) {
        long long before = counter(S, "cancelled");
        bool stream = i & 1;
        int fd = ask(S, stream);
        if (stream)
            wait_text(fd, "data: ");
        else
            wait_counter(S, "running", 1);
        depart(fd, (leave)(i % 3));
        wait_counter(S, "running", 0);
        wait_counter(S, "cancelled", before + 1);
    }
    expect_idle(S);
}

static void while_queued(void **state) {
    (void)state;
    int a = ask(S, true), b = ask(S, true);
    wait_text(a, "data: ");
    wait_text(b, "data: ");
    long long before = counter(S, "cancelled");
    int c = ask(S, true), d = ask(S, false);
    wait_counter(S, "queued", 2);
    depart(c, CLOSE);
    depart(d, RESET);
    wait_counter(S, "cancelled", before + 2);
    assert_int_equal(counter(S, "running"), 2);
    depart(a, HALF);
    depart(b, CLOSE);
    expect_idle(S);
}

static void while_prefilling(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        long long before = counter(S, "cancelled");
        int fd = ask_long(S);
        wait_text(fd, "200 OK");
        wait_counter(S, "prefilling", 1);
        depart(fd, (leave)i);
        wait_counter(S, "cancelled", before + 1);
    }
    expect_idle(S);
}

// A number of the log's n-th line about a completion.
static long long logged(const server *s, int n, const char *name) {
    for (int i = 0; i < 500; i++, mx_sleep_s(0.01)) {
        char *log = server_log(s), *at = log;
        for (int k = 0; at && k <= n; k++) at = strstr(at + (k > 0), "POST /v1/completions ");
        long long x = -1;
        const char *v = at ? strstr(at, name) : NULL;
        bool whole = v && sscanf(v + strlen(name), "%lld", &x) == 1 && strchr(v, '\n');
        mx_free(log);
        if (whole) return x;
    }
    fail_msg("no %s in the log", name);
    return -1;
}

static void the_log_has_what_it_cost(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "-c 32768 --prefill-chunk-size 256 --prompt-cache-bytes 0");
    for (int i = 0; i < 2; i++) { // whole, stream
        long long before = counter(&s, "decode_tokens");
        int fd = ask(&s, i == 1);
        while (counter(&s, "decode_tokens") < before + 20) mx_sleep_s(0.002);
        depart(fd, CLOSE);
        assert_int_equal(logged(&s, i, "/completions "), 499);
        assert_int_equal(logged(&s, i, "prompt="), 1);
        assert_true(logged(&s, i, "generated=") >= 20);
        wait_counter(&s, "running", 0);
        long long all = counter(&s, "decode_tokens") - before;
        assert_true(logged(&s, i, "generated=") <= all + 1); // the first one is the prompt's
    }
    long long before = counter(&s, "prompt_tokens");
    int fd = ask_long(&s);
    while (counter(&s, "prompt_tokens") < before + 256) mx_sleep_s(0.002);
    depart(fd, CLOSE);
    long long cost = logged(&s, 2, "prompt=");
    wait_counter(&s, "running", 0);
    long long all = counter(&s, "prompt_tokens") - before;
    if (cost < 256 || cost > all || all - cost > 512) fail_msg("logged %lld of %lld", cost, all);
    assert_int_equal(logged(&s, 2, "generated="), 0);
    server_stop(&s);
}

// What was prefilled for a client that gave up is there for its next try.
static void the_next_try_goes_on(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "-c 32768 --prefill-chunk-size 256 --prompt-cache-bytes 64M");
    char *body = mx_alloc(CTX + 100);
    int n = snprintf(body, 100, "{\"max_tokens\":1,\"prompt\":\"");
    memset(body + n, 'y', CTX - 100);
    n += CTX - 100;
    n += snprintf(body + n, 50, "A\"}");
    int fd = dial(&s);
    send_request(fd, "POST", "/v1/completions", NULL, body, (size_t)n);
    for (int i = 0; i < 1000; i++) {
        json_t *v = get_json(&s, "/v1/cache/stats", 200);
        bool some = int_at(v, "bytes") > 0;
        json_decref(v);
        if (some) break;
        mx_sleep_s(0.005);
    }
    depart(fd, CLOSE);
    wait_counter(&s, "running", 0);
    json_t *v = post_json(&s, "/v1/completions", body, 200);
    assert_true(int_at(v, "usage/prompt_tokens_details/cached_tokens") >= 32);
    assert_string_equal(text_at(v, "choices/0/text"), "Hello ");
    long long whole = int_at(v, "usage/prompt_tokens");
    json_decref(v);
    assert_true(counter(&s, "prompt_tokens") <= whole + whole / 5); // little was done twice
    mx_free(body);
    server_stop(&s);
}

// A request half sent, a body that never comes: nothing of it reaches the engine.
static void while_sending(void **state) {
    (void)state;
    static const char part[] = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                               "Content-Length: 1000\r\n\r\n{\"prompt\":";
    for (int i = 0; i < 20; i++) {
        int fd = dial(S);
        send_all(fd, part, (size_t)(i * 5) < sizeof part ? (size_t)(i * 5) : sizeof part - 1);
        depart(fd, i % 2 ? CLOSE : RESET);
    }
    expect_idle(S);
}

// Requests one after the other on one connection.
static void one_connection_many_requests(void **state) {
    (void)state;
    int fd = dial(S);
    static const char body[] = "{\"prompt\":\"A\",\"stream\":true}";
    char request[256];
    int n = snprintf(request, sizeof request,
                     "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n"
                     "\r\n%s",
                     sizeof body - 1, body);
    for (int i = 0; i < 20; i++) {
        send_all(fd, request, (size_t)n);
        wait_text(fd, "[DONE]\n\n\r\n0\r\n\r\n");
    }
    close(fd);
    expect_idle(S);
}

// ---- Many at once ----

enum { N_PROMPTS = 16 };

typedef struct client {
    const server *s;
    char body[1200];
    char *solo;
    int n_wrong;
} client;

static char *text_for(const server *s, const char *body) {
    reply r = post(s, "/v1/completions", body);
    json_t *v = json_loadb(r.body.n ? r.body.data : "", r.body.n, JSON_ALLOW_NUL, NULL);
    const json_t *t = at(v, "choices/0/text");
    char *out = mx_strdup(json_is_string(t) ? json_string_value(t) : "(no answer)");
    json_decref(v);
    reply_free(&r);
    return out;
}

static void *client_main(void *arg) {
    client *c = arg;
    for (int i = 0; i < 3; i++) {
        char *t = text_for(c->s, c->body);
        c->n_wrong += strcmp(t, c->solo) != 0;
        mx_free(t);
    }
    return NULL;
}

// Prompts of many lengths on a model whose answers depend on all of the prompt: nobody's answer
// changes because of others, cold or cached.
static void answers_are_the_solo_ones(void **state) {
    (void)state;
    static client c[N_PROMPTS];
    server s = {0};
    char *tiny = mx_path_join(dir, "tiny.gguf");
    tiny_write(tiny, &(tiny_opts){.max_ctx = 1024});
    server_start(&s, dir, tiny, "--n-parallel 8");
    for (int i = 0; i < N_PROMPTS; i++) {
        char prompt[800] = "";
        for (int k = 0; k < 5 + i * 43; k++) prompt[k] = (char)('a' + (k * (i + 3) + k / 7) % 26);
        snprintf(c[i].body, sizeof c[i].body,
                 "{\"prompt\":\"%s\",\"temperature\":%d,\"seed\":%d,\"max_tokens\":24,"
                 "\"ignore_eos\":true}",
                 prompt, i % 2 * 3, i); // half of them greedy, half drawn
        c[i].s = &s;
        c[i].solo = text_for(&s, c[i].body);
    }
    json_decref(post_json(&s, "/v1/cache/reset", "", 200));
    pthread_t t[N_PROMPTS];
    for (int i = 0; i < N_PROMPTS; i++) pthread_create(&t[i], NULL, client_main, &c[i]);
    for (int i = 0; i < N_PROMPTS; i++) {
        pthread_join(t[i], NULL);
        assert_true(strlen(c[i].solo) > 0 && strcmp(c[i].solo, "(no answer)") != 0);
        assert_int_equal(c[i].n_wrong, 0);
        mx_free(c[i].solo);
    }
    server_stop(&s);
    mx_free(tiny);
}

// ---- Memory ----

static long long resident_kb(pid_t pid) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *f = fopen(path, "r");
    long long anon = 0, swap = 0;
    while (f && fgets(line, sizeof line, f)) {
        sscanf(line, "RssAnon: %lld", &anon);
        sscanf(line, "VmSwap: %lld", &swap);
    }
    if (f) fclose(f);
    return anon + swap;
}

static void mixed_requests(int n) {
    for (int i = 0; i < n; i++) {
        reply r;
        switch (i % 4) {
        case 0: r = post(S, "/v1/completions", "{\"prompt\":\"A\"}"); break;
        case 1: r = post(S, "/v1/completions", "{\"prompt\":5}"); break;
        case 2:
            r = post(S, "/completion", "{\"prompt\":\"A\",\"stream\":true,\"n_probs\":3}");
            break;
        default: {
            int fd = ask(S, i & 8);
            if (i & 8) wait_text(fd, "data: ");
            depart(fd, CLOSE);
            continue;
        }
        }
        assert_true(r.status == 200 || r.status == 400);
        reply_free(&r);
    }
    expect_idle(S);
}

static void memory_stays(void **state) {
    (void)state;
    if (SANITIZED) {
        print_message("skipped: sanitizers keep freed memory; leaks show when the server ends\n");
        mixed_requests(100);
        return;
    }
    mixed_requests(400);
    long long before = resident_kb(S->pid);
    mixed_requests(800);
    long long grown = resident_kb(S->pid) - before;
    if (grown > 1024) fail_msg("%lld KiB more after 800 requests", grown);
}

// ---- Signals ----

typedef enum phase { IDLE, LOADING, PREFILL, DECODE } phase;

static void shutdown_in(phase p, int sig) {
    server s = {0};
    // the step with the last token computes its layer's attention for all its rows: a short one
    server_spawn(&s, dir, model, "-c 32768 --prompt-cache-bytes 0 --prefill-chunk-size 256");
    int fd = -1;
    if (p == LOADING) {
        assert_true(server_wait(&s, "listening on"));
    } else {
        assert_true(server_wait(&s, "ready at"));
        if (p != IDLE) fd = p == PREFILL ? ask_long(&s) : ask(&s, true);
        if (p == PREFILL) wait_text(fd, "200 OK");
        if (p == DECODE) wait_text(fd, "data: ");
    }
    double t = mx_now_s();
    kill(s.pid, sig);
    if (fd >= 0) { // what runs ends with an error, or ends
        reply r = read_reply(fd);
        reply_free(&r);
        close(fd);
    }
    int code = server_end(&s, 40);
    double took = mx_now_s() - t;
    if (code != 0 || took > (SANITIZED ? 30 : 3))
        fail_msg("phase %d: exit code %d after %.1f s", p, code, took);
    // the port is free
    int again = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)s.port)};
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    setsockopt(again, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    assert_int_equal(bind(again, (struct sockaddr *)&a, sizeof a), 0);
    close(again);
}

static void signals_end_it(void **state) {
    (void)state;
    for (int p = IDLE; p <= DECODE; p++) {
        shutdown_in((phase)p, SIGTERM);
        shutdown_in((phase)p, SIGINT);
    }
}

static void the_second_signal_is_at_once(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "-c 32768 --shutdown-grace 60");
    int fd = ask(&s, true);
    wait_text(fd, "data: ");
    kill(s.pid, SIGTERM);
    assert_true(server_wait(&s, "shutting down"));
    assert_int_equal(server_end(&s, 0.2), -1); // it waits for the stream
    double t = mx_now_s();
    kill(s.pid, SIGTERM);
    assert_int_equal(server_end(&s, 5), 130);
    assert_true(mx_now_s() - t < 1);
    close(fd);
}

// A stream that is short enough ends well within the grace time.
static void the_grace_time_is_given(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "-c 32768 --shutdown-grace 20");
    int fd = dial(&s);
    char body[100];
    int n = snprintf(body, sizeof body, "{\"prompt\":\"x\",\"max_tokens\":%d,\"stream\":true}",
                     SANITIZED ? 100 : 1000);
    send_request(fd, "POST", "/v1/completions", NULL, body, (size_t)n);
    mx_sleep_s(0.05);
    kill(s.pid, SIGTERM);
    reply r = read_reply(fd);
    close(fd);
    assert_true(r.whole);
    assert_non_null(strstr(r.body.data, "[DONE]"));
    reply_free(&r);
    assert_int_equal(server_end(&s, 10), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(while_decoding),
        cmocka_unit_test(while_queued),
        cmocka_unit_test(while_prefilling),
        cmocka_unit_test(the_log_has_what_it_cost),
        cmocka_unit_test(the_next_try_goes_on),
        cmocka_unit_test(while_sending),
        cmocka_unit_test(one_connection_many_requests),
        cmocka_unit_test(answers_are_the_solo_ones),
        cmocka_unit_test(memory_stays),
        cmocka_unit_test(signals_end_it),
        cmocka_unit_test(the_second_signal_is_at_once),
        cmocka_unit_test(the_grace_time_is_given),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
