// Conversations: every turn computes little more than what is new, and says what it says without
// the cache, alone or beside others, on models that see everything and on one with windows. Prompts
// and answers are token ids, so nothing is lost on the way.
#include "support/served.h"

#include <pthread.h>

enum { CTX = 1024, PAGE = 32, N_ANSWER = 12 };

static char *windowed, *plain; // models whose answers depend on all of the prompt

static int set_up(void **state) {
    static const script scripts[] = {{'A', "Hello!"}};
    (void)state;
    serve_scripts(scripts, MX_COUNT(scripts), 256, NULL, "");
    windowed = mx_path_join(dir, "windowed.gguf");
    plain = mx_path_join(dir, "plain.gguf");
    tiny_write(windowed, &(tiny_opts){.max_ctx = CTX, .n_layer = 4, .window = 48});
    tiny_write(plain, &(tiny_opts){.max_ctx = CTX});
    return 0;
}

static int take_down(void **state) {
    mx_free(windowed);
    mx_free(plain);
    return tear_down(state);
}

typedef struct talk {
    int ids[CTX];
    int n;
} talk;

static void say(talk *t, int n, unsigned seed) {
    for (int i = 0; i < n; i++) {
        seed = seed * 1103515245u + 12345u;
        t->ids[t->n++] = (int)((seed >> 16) % 250);
    }
}

// The whole reply, owned by the caller.
static json_t *answer(const server *s, const talk *t, int n, const char *more) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"prompt\":[");
    for (int i = 0; i < t->n; i++) mx_buf_printf(&b, "%s%d", i ? "," : "", t->ids[i]);
    mx_buf_printf(&b,
                  "],\"n_predict\":%d,\"temperature\":0,\"ignore_eos\":true,\"n_probs\":5,"
                  "\"return_tokens\":true%s}",
                  n, more);
    json_t *v = post_json(s, "/completion", b.data, 200);
    mx_buf_free(&b);
    return v;
}

// Tokens and log-probabilities, as text.
static char *numbers(const json_t *v) {
    json_t *pair = json_pack("[OO]", at(v, "tokens"), at(v, "completion_probabilities"));
    char *text = json_dumps(pair, JSON_COMPACT);
    json_decref(pair);
    assert_non_null(text);
    return text;
}

// Asks with the cache and without, expects the same, and puts the answer behind the prompt. Returns
// the tokens that came from the cache.
static int turn(const server *s, talk *t) {
    json_t *warm = answer(s, t, N_ANSWER, ""),
           *cold = answer(s, t, N_ANSWER, ",\"cache_prompt\":false");
    char *a = numbers(warm), *b = numbers(cold);
    assert_string_equal(a, b);
    assert_int_equal(int_at(cold, "timings/cache_n"), 0);
    assert_int_equal(json_array_size(at(warm, "tokens")), N_ANSWER);
    for (size_t i = 0; i < N_ANSWER; i++)
        t->ids[t->n++] = (int)json_integer_value(json_array_get(at(warm, "tokens"), i));
    int cached = (int)int_at(warm, "timings/cache_n");
    free(a), free(b);
    json_decref(warm);
    json_decref(cold);
    return cached;
}

static void a_turn_costs_what_is_new(void **state) {
    (void)state;
    const char *models[] = {plain, windowed};
    for (size_t m = 0; m < MX_COUNT(models); m++) {
        server s = {0};
        server_start(&s, dir, models[m], "--prompt-cache-bytes 16M -c 1024");
        talk t = {0};
        say(&t, 300, 1);
        assert_int_equal(turn(&s, &t), 0);
        for (unsigned k = 0; k < 5; k++) {
            int before = t.n;
            say(&t, 20 + (int)k * 7, k + 2);
            int n = t.n, cached = turn(&s, &t);
            if (n - cached > n - before + PAGE)
                fail_msg("model %zu, turn %u: %d of %d cached, %d are old", m, k, cached, n,
                         before);
        }
        server_stop(&s);
    }
}

// One talk, another one, the first again; in long and short chunks, in each type of the cache.
static void talks_in_turns(void **state) {
    (void)state;
    static const char *const args[] = {"", "-ctk f32 --prefill-chunk-size 32",
                                       "--prefill-chunk-size 48", "-ctk f32"};
    const char *models[] = {plain, windowed};
    for (size_t i = 0; i < MX_COUNT(models) * MX_COUNT(args); i++) {
        char line[200];
        server s = {0};
        snprintf(line, sizeof line, "--prompt-cache-bytes 16M %s", args[i / 2]);
        server_start(&s, dir, models[i % 2], line);
        talk a = {0}, b = {0};
        say(&a, 150, 10);
        say(&b, 260, 20);
        for (unsigned k = 0; k < 3; k++) {
            int cached = turn(&s, &a);
            assert_true(k == 0 ? cached == 0 : cached >= 150 / PAGE * PAGE);
            cached = turn(&s, &b);
            assert_true(k == 0 ? cached == 0 : cached >= 260 / PAGE * PAGE);
            say(&a, 9, 30 + k);
            say(&b, 40, 40 + k);
        }
        server_stop(&s);
    }
}

// ---- Many at once ----

enum { N_TALKS = 16 };

typedef struct client {
    const server *s;
    talk t;
    char *solo;
    int n_wrong;
} client;

static void *client_main(void *arg) {
    client *c = arg;
    for (int i = 0; i < 2; i++) {
        json_t *v = answer(c->s, &c->t, N_ANSWER, "");
        char *now = numbers(v);
        c->n_wrong += strcmp(now, c->solo) != 0;
        free(now);
        json_decref(v);
    }
    return NULL;
}

// Lengths from 5 to 700, twice, so that the second round comes from the cache.
static void many_talks_keep_their_numbers(void **state) {
    (void)state;
    static client c[N_TALKS];
    const char *models[] = {plain, windowed};
    for (size_t m = 0; m < MX_COUNT(models); m++) {
        server s = {0};
        server_start(&s, dir, models[m], "--n-parallel 8 --prompt-cache-bytes 16M");
        for (int i = 0; i < N_TALKS; i++) {
            c[i] = (client){.s = &s};
            say(&c[i].t, 5 + i * 695 / (N_TALKS - 1), 100 + (unsigned)i);
            json_t *v = answer(&s, &c[i].t, N_ANSWER, ",\"cache_prompt\":false");
            c[i].solo = numbers(v);
            json_decref(v);
            if (i > 0) assert_string_not_equal(c[i].solo, c[i - 1].solo);
        }
        pthread_t t[N_TALKS];
        for (int i = 0; i < N_TALKS; i++) pthread_create(&t[i], NULL, client_main, &c[i]);
        for (int i = 0; i < N_TALKS; i++) {
            pthread_join(t[i], NULL);
            if (c[i].n_wrong) fail_msg("model %zu, talk %d: %d wrong", m, i, c[i].n_wrong);
            free(c[i].solo);
        }
        json_t *v = get_json(&s, "/v1/cache/stats", 200);
        assert_true(int_at(v, "hits") >= N_TALKS - 2);
        json_decref(v);
        server_stop(&s);
    }
}

static void *to_the_end(void *arg) {
    client *c = arg;
    json_t *v = answer(c->s, &c->t, 1000, ",\"cache_prompt\":false");
    c->n_wrong = strcmp(text_at(v, "stop_type"), "limit") != 0 ||
                 (int)json_array_size(at(v, "tokens")) != CTX - c->t.n;
    c->solo = numbers(v);
    json_decref(v);
    return NULL;
}

// Four sequences with windows that reach the end of the context together say what one says.
static void the_end_of_the_context(void **state) {
    (void)state;
    static const int spare[] = {1, 2, PAGE, PAGE + 1};
    server s = {0};
    server_start(&s, dir, windowed, "--n-parallel 4 -c 1024");
    for (size_t i = 0; i < MX_COUNT(spare); i++) {
        static client c[5];
        pthread_t t[4];
        for (int k = 0; k < 5; k++) {
            c[k] = (client){.s = &s};
            say(&c[k].t, CTX - spare[i], 7);
        }
        to_the_end(&c[4]);
        for (int k = 0; k < 4; k++) pthread_create(&t[k], NULL, to_the_end, &c[k]);
        for (int k = 0; k < 4; k++) {
            pthread_join(t[k], NULL);
            assert_int_equal(c[k].n_wrong + c[4].n_wrong, 0);
            assert_string_equal(c[k].solo, c[4].solo);
            free(c[k].solo);
        }
        free(c[4].solo);
    }
    server_stop(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_costs_what_is_new),
        cmocka_unit_test(talks_in_turns),
        cmocka_unit_test(many_talks_keep_their_numbers),
        cmocka_unit_test(the_end_of_the_context),
    };
    return cmocka_run_group_tests(tests, set_up, take_down);
}
