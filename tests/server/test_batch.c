// Requests of many prompts, and what is the same however many there are: order, counts, limits, the
// prompt cache. The model is a script (support/script_model.h).
#include "support/served.h"

#include <pthread.h>

enum { CTX = 256, LONG_BATCH = MX_TEST_SLOW > 1 ? 40 : 200 };

static int set_up(void **state) {
    static const script scripts[] = {{'A', "Hello " SCRIPT_CUT "wor" SCRIPT_CUT "ld!"},
                                     {'B', "Good " SCRIPT_CUT "bye"}};
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), CTX, NULL, "--max-queue-depth 8");
}

// {"prompt":["A","B","A",...]
static void put_prompts(mx_buf *b, int n) {
    mx_buf_puts(b, "{\"prompt\":[");
    for (int i = 0; i < n; i++) mx_buf_printf(b, "%s\"%d%c\"", i ? "," : "", i, i % 3 ? 'A' : 'B');
    mx_buf_putc(b, ']');
}

static json_t *ask_many(int n, const char *more, int status) {
    mx_buf b;
    mx_buf_init(&b, 0);
    put_prompts(&b, n);
    mx_buf_puts(&b, more);
    json_t *v = post_json(S, "/v1/completions", b.data, status);
    mx_buf_free(&b);
    return v;
}

// More than the queue has room for: they take turns, and are answered in their order.
static void many_prompts(void **state) {
    (void)state;
    json_t *v = ask_many(100, ",\"temperature\":0,\"n\":2}", 200);
    assert_int_equal(json_array_size(at(v, "choices")), 200);
    for (int i = 0; i < 200; i++) {
        const json_t *c = json_array_get(at(v, "choices"), (size_t)i);
        assert_int_equal(int_at(c, "index"), i);
        assert_string_equal(text_at(c, "text"), i / 2 % 3 ? "Hello world!" : "Good bye");
        assert_string_equal(text_at(c, "finish_reason"), "stop");
    }
    assert_int_equal(int_at(v, "usage/prompt_tokens"), 10 * 2 + 90 * 3);
    json_decref(v);
    // each of these is two requests of the engine
    v = ask_many(50, ",\"temperature\":0,\"max_tokens\":1,\"echo\":true,\"logprobs\":1}", 200);
    for (int i = 0; i < 50; i++) {
        char want[32];
        const json_t *c = json_array_get(at(v, "choices"), (size_t)i);
        snprintf(want, sizeof want, "%d%s", i, i % 3 ? "AHello " : "BGood ");
        assert_string_equal(text_at(c, "text"), want);
        assert_int_equal(json_array_size(at(c, "logprobs/tokens")), i < 10 ? 3 : 4);
    }
    json_decref(v);
}

static void many_prompts_in_a_stream(void **state) {
    (void)state;
    enum { N = 40 };
    mx_buf b, text[N];
    int ends[N] = {0};
    for (int i = 0; i < N; i++) mx_buf_init(&text[i], 0);
    mx_buf_init(&b, 0);
    put_prompts(&b, N);
    mx_buf_puts(&b, ",\"temperature\":0,\"stream\":true}");
    json_t *events = post_stream(S, "/v1/completions", b.data), *e;
    size_t k;
    json_array_foreach(events, k, e) {
        if (json_is_string(e)) continue;
        long long i = int_at(e, "choices/0/index");
        assert_true(i >= 0 && i < N && !ends[i]);
        mx_buf_puts(&text[i], text_at(e, "choices/0/text"));
        ends[i] += json_is_string(at(e, "choices/0/finish_reason"));
    }
    assert_true(json_is_string(json_array_get(events, json_array_size(events) - 1)));
    for (int i = 0; i < N; i++) {
        assert_int_equal(ends[i], 1);
        assert_string_equal(text[i].data, i % 3 ? "Hello world!" : "Good bye");
        mx_buf_free(&text[i]);
    }
    json_decref(events);
    mx_buf_free(&b);
}

static void too_many(void **state) {
    (void)state;
    json_decref(ask_many(256, ",\"n\":128}", 400));
    json_decref(ask_many(257, "}", 400));
}

// One that is too long fails all, wherever it stands.
static void one_bad_prompt(void **state) {
    (void)state;
    for (int where = 0; where < 60; where += 29) {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_puts(&b, "{\"prompt\":[");
        for (int i = 0; i < 60; i++) {
            mx_buf_puts(&b, i ? ",\"" : "\"");
            for (int k = 0; i == where && k < CTX; k++) mx_buf_putc(&b, 'x');
            mx_buf_puts(&b, "A\"");
        }
        mx_buf_puts(&b, "]}");
        json_t *v = post_json(S, "/v1/completions", b.data, 400);
        assert_string_equal(text_at(v, "error/code"), "context_length_exceeded");
        json_decref(v);
        mx_buf_free(&b);
    }
    json_decref(ask_many(3, "}", 200)); // as healthy as before
}

static void *long_batch(void *arg) {
    (void)arg;
    return ask_many(LONG_BATCH, ",\"ignore_eos\":true,\"max_tokens\":20}", 200);
}

// A request of many prompts leaves room in the queue.
static void others_are_served(void **state) {
    (void)state;
    pthread_t t;
    void *v = NULL;
    pthread_create(&t, NULL, long_batch, NULL);
    for (int i = 0; i < 10; i++) {
        json_t *one = post_json(S, "/v1/completions", "{\"prompt\":\"A\",\"temperature\":0}", 200);
        assert_string_equal(text_at(one, "choices/0/text"), "Hello world!");
        json_decref(one);
    }
    pthread_join(t, &v);
    assert_int_equal(json_array_size(at(v, "choices")), LONG_BATCH);
    json_decref(v);
}

static long long counter(const server *s, const char *name) {
    json_t *v = get_json(s, "/v1/stats", 200);
    long long x = int_at(v, name);
    json_decref(v);
    return x;
}

static int send_endless(const server *s) {
    mx_buf b;
    mx_buf_init(&b, 0);
    put_prompts(&b, 200);
    mx_buf_puts(&b, ",\"ignore_eos\":true,\"max_tokens\":240}");
    int fd = dial(s);
    assert_true(fd >= 0);
    send_request(fd, "POST", "/v1/completions", NULL, b.data, b.n);
    mx_buf_free(&b);
    return fd;
}

// What was not begun when the client left never begins.
static void leaving_a_batch(void **state) {
    (void)state;
    int fd = send_endless(S);
    for (int i = 0; i < 1000 && counter(S, "running") == 0; i++) mx_sleep_s(0.005);
    long long before = counter(S, "requests");
    close(fd);
    for (int i = 0; i < 1000 && counter(S, "running") + counter(S, "queued") > 0; i++) {
        mx_sleep_s(0.005);
    }
    assert_int_equal(counter(S, "running") + counter(S, "queued"), 0);
    assert_true(counter(S, "requests") < before + 100);
}

// All prompts have one time limit, those that wait too.
static void one_time_limit(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "--timeout 1 --n-parallel 1");
    double t = mx_now_s();
    int fd = send_endless(&s);
    reply r = read_reply(fd);
    close(fd);
    double took = mx_now_s() - t;
    json_t *v = json_of(r, 504, "a batch that takes too long");
    json_decref(v);
    assert_true(took > 0.9 && took < 2 + MX_TEST_SLOW);
    server_stop(&s);
}

// Four sequences that reach the end of the context in the same step.
static void the_edge_of_the_context_together(void **state) {
    (void)state;
    static const int spare[] = {1, 2, 32, 33};
    for (size_t i = 0; i < MX_COUNT(spare); i++) {
        char text[CTX + 1] = "", body[8 * CTX];
        memset(text, 'b', CTX - (size_t)spare[i]);
        snprintf(body, sizeof body,
                 "{\"prompt\":[\"%s\",\"%s\",\"%s\",\"%s\"],\"ignore_eos\":true}", text, text, text,
                 text);
        json_t *v = post_json(S, "/v1/completions", body, 200);
        for (size_t k = 0; k < 4; k++) {
            const json_t *c = json_array_get(at(v, "choices"), k);
            assert_string_equal(text_at(c, "finish_reason"), "length");
            assert_int_equal(strlen(text_at(c, "text")), spare[i]);
        }
        assert_int_equal(int_at(v, "usage/completion_tokens"), 4 * spare[i]);
        json_decref(v);
    }
}

// The same prompt four times at once, and then with its own answer behind it.
static void the_prompt_cache(void **state) {
    (void)state;
    for (int length = 31; length <= 97; length += 33) {
        char text[128] = "", body[900];
        memset(text, 'c', (size_t)length - 1);
        text[length - 1] = 'A';
        json_decref(post_json(S, "/v1/cache/reset", "", 200));
        for (int round = 0; round < 2; round++) {
            snprintf(body, sizeof body,
                     "{\"prompt\":[\"%s\",\"%s\",\"%s\",\"%s\"],\"temperature\":0}", text, text,
                     text, text);
            json_t *v = post_json(S, "/v1/completions", body, 200);
            for (size_t k = 0; k < 4; k++) {
                const json_t *c = json_array_get(at(v, "choices"), k);
                assert_string_equal(text_at(c, "text"), "Hello world!");
            }
            json_decref(v);
        }
        snprintf(body, sizeof body, "{\"prompt\":\"%sHello world!B\",\"temperature\":0}", text);
        json_t *v = post_json(S, "/v1/completions", body, 200);
        assert_string_equal(text_at(v, "choices/0/text"), "Good bye");
        assert_true(int_at(v, "usage/prompt_tokens_details/cached_tokens") >=
                    (length - 1) / 32 * 32);
        json_decref(v);
    }
}

// The bytes of the cache count everything and are kept to, also by prompts longer than all of it.
static void the_cache_keeps_to_its_bytes(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "--prompt-cache-bytes 64K");
    long long evictions = 0, most = 0;
    for (int i = 0; i < 120; i++) {
        char text[CTX] = "", body[CTX + 100];
        int n = i % 4 == 3 ? 250 : 40 + i % 80;
        for (int k = 0; k < n; k++) text[k] = (char)('c' + (i * 7 + k * (i % 11 + 1)) % 20);
        snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":1}", text);
        json_decref(post_json(&s, "/v1/completions", body, 200));
        json_t *v = get_json(&s, "/v1/cache/stats", 200);
        assert_true(int_at(v, "bytes") <= 64 << 10);
        assert_int_equal(int_at(v, "max_bytes"), 64 << 10);
        most = MX_MAX(most, int_at(v, "bytes"));
        evictions = int_at(v, "evictions");
        json_decref(v);
    }
    assert_true(most > 32 << 10 && evictions > 50); // it was used
    json_t *v = post_json(&s, "/v1/completions", "{\"prompt\":\"A\",\"temperature\":0}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "Hello world!");
    json_decref(v);
    server_stop(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_prompts),      cmocka_unit_test(many_prompts_in_a_stream),
        cmocka_unit_test(too_many),          cmocka_unit_test(one_bad_prompt),
        cmocka_unit_test(others_are_served), cmocka_unit_test(leaving_a_batch),
        cmocka_unit_test(one_time_limit),    cmocka_unit_test(the_edge_of_the_context_together),
        cmocka_unit_test(the_prompt_cache),  cmocka_unit_test(the_cache_keeps_to_its_bytes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
