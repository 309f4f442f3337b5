// sample: exact penalties, each filter against a plain reference, the order of the chain, seeds,
// the distribution of draws, odd rows.
#include "base/mem.h"
#include "sample/sample_int.h"
#include "support/sample_cases.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the two above
#include <cmocka.h>

enum { V = 16 };
static mx_sampler *small; // for rows of V

static int set_up(void **state) {
    (void)state;
    small = mx_sampler_open(V);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_sampler_close(small);
    return 0;
}

static int32_t pick(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h,
                    const float *row) {
    const mx_sample_history none = {0};
    mx_err err = {0};
    int32_t id = -1;
    assert_int_equal(mx_sample(s, p, h ? h : &none, row, &id, &err), MX_OK);
    return id;
}

// A row of numbers in [-scale, scale), with some equal ones.
static void random_row(float *row, int32_t n, uint32_t salt, float scale) {
    for (int32_t i = 0; i < n; i++) {
        double u = mx_random_uniform(salt, 7, (uint32_t)i, 3);
        row[i] = (float)floor((u * 2 - 1) * 64) / 64 * scale;
    }
}

// ---- Random numbers ----

static void philox_known_answers(void **state) {
    (void)state; // of the Random123 distribution, kat_vectors
    static const struct {
        uint32_t c[4], k[2], r[4];
    } t[] = {
        {{0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < MX_COUNT(t); i++) {
        uint32_t r[4];
        sample_philox(t[i].c, t[i].k, r);
        assert_memory_equal(r, t[i].r, sizeof r);
    }
    double u = (double)(0x6627e8d5e169c58dull >> 11) * 0x1p-53;
    assert_true(mx_random_uniform(0, 0, 0, 0) == u);
}

static void uniform_depends_on_every_coordinate(void **state) {
    (void)state;
    double u = mx_random_uniform(42, 1, 2, 3);
    assert_true(u == mx_random_uniform(42, 1, 2, 3) && u >= 0 && u < 1);
    assert_true(u != mx_random_uniform(43, 1, 2, 3));
    assert_true(u != mx_random_uniform(42 | 1ull << 40, 1, 2, 3));
    assert_true(u != mx_random_uniform(42, 2, 2, 3));
    assert_true(u != mx_random_uniform(42, 1, 3, 3));
    assert_true(u != mx_random_uniform(42, 1, 2, 4));
}

// ---- Penalties: the changed row, exactly ----

static void load(const float *row) {
    assert_true(sample_load(small, row));
}

static void repetition_sees_the_last_tokens_of_prompt_and_generated(void **state) {
    (void)state;
    float row[V] = {0};
    row[1] = row[3] = row[4] = 3, row[2] = -3;
    const int32_t prompt[] = {1, 2, 3}, generated[] = {2, 4};
    const mx_sample_history h = {
        .prompt = prompt, .n_prompt = 3, .generated = generated, .n_generated = 2};
    mx_sampling p;
    mx_sampling_init(&p);
    p.repeat_penalty = 1.5f, p.repeat_last_n = 3;
    load(row);
    sample_repetition(small, &p, &h);
    assert_true(small->row[1] == 3.0f);  // beyond the window: it is the last tokens that count
    assert_true(small->row[2] == -4.5f); // once, though twice in it; negative: multiplied
    assert_true(small->row[3] == 2.0f && small->row[4] == 2.0f);
    p.repeat_last_n = -1;
    load(row);
    sample_repetition(small, &p, &h);
    assert_true(small->row[1] == 2.0f);
    p.repeat_last_n = 0;
    load(row);
    sample_repetition(small, &p, &h);
    assert_memory_equal(small->row, row, sizeof row);
}

static void frequency_and_presence_see_generated_tokens_only(void **state) {
    (void)state;
    float row[V] = {0};
    row[1] = row[2] = row[4] = 3;
    const int32_t prompt[] = {1, 1, 2, 3}, generated[] = {2, 4, 2};
    const mx_sample_history h = {
        .prompt = prompt, .n_prompt = 4, .generated = generated, .n_generated = 3};
    mx_sampling p;
    mx_sampling_init(&p);
    p.presence_penalty = 0.25f, p.frequency_penalty = 0.5f;
    load(row);
    sample_frequency(small, &p, &h);
    assert_true(small->row[1] == 3.0f && small->row[3] == 0.0f);
    assert_true(small->row[2] == 3.0f - 2 * 0.5f - 0.25f);
    assert_true(small->row[4] == 3.0f - 0.5f - 0.25f);
    p.presence_penalty = -1, p.frequency_penalty = 0; // negative ones reward
    load(row);
    sample_frequency(small, &p, &h);
    assert_true(small->row[2] == 4.0f);
}

static void dry_row(const mx_sampling *p, const int32_t *prompt, size_t n, const int32_t *gen,
                    size_t n_gen) {
    const float row[V] = {0};
    const mx_sample_history h = {
        .prompt = prompt, .n_prompt = n, .generated = gen, .n_generated = n_gen};
    load(row);
    sample_dry(small, p, &h);
}

static void dry_penalises_what_goes_on_with_a_repetition(void **state) {
    (void)state;
    mx_sampling p;
    mx_sampling_init(&p);
    p.dry_multiplier = 0.5f, p.dry_base = 2, p.dry_allowed_length = 2, p.dry_last_n = -1;
    const int32_t prompt[] = {1, 2, 3, 4, 9, 2, 3, 7, 3, 8, 1}, gen[] = {2, 3};
    dry_row(&p, prompt, 11, gen, 2);
    assert_true(small->row[4] == -1.0f); // 1 2 3 came before: three tokens, 0.5 * 2^1
    assert_true(small->row[7] == -0.5f); // 2 3 came before: two tokens, 0.5 * 2^0
    assert_true(small->row[8] == 0.0f);  // only 3 came before
    p.dry_last_n = 6;                    // 7 3 8 1 2 3 … without the earlier ones
    dry_row(&p, prompt, 11, gen, 2);
    assert_true(small->row[4] == 0.0f && small->row[7] == 0.0f);
    p.dry_last_n = -1, p.dry_base = 0.5f; // below 1 means 1.75
    dry_row(&p, prompt, 11, gen, 2);
    assert_true(small->row[4] == -0.875f);
    const int32_t breaker = 2;
    p.dry_base = 2, p.dry_breakers = &breaker, p.n_dry_breakers = 1;
    dry_row(&p, prompt, 11, gen, 2);
    assert_true(small->row[4] == 0.0f && small->row[7] == 0.0f);
}

// The same for every short text over two letters, against the definition.
static void dry_matches_its_definition(void **state) {
    (void)state;
    mx_sampling p;
    mx_sampling_init(&p);
    p.dry_multiplier = 1, p.dry_base = 2, p.dry_allowed_length = 1, p.dry_last_n = -1;
    for (unsigned bits = 0; bits < 1u << 10; bits++) {
        int32_t x[10], longest[2] = {0};
        for (int i = 0; i < 10; i++) x[i] = bits >> i & 1;
        for (int end = 0; end < 9; end++) {
            int len = 0;
            while (len <= end && x[end - len] == x[9 - len]) len++;
            if (len > longest[x[end + 1]]) longest[x[end + 1]] = len;
        }
        dry_row(&p, x, 10, NULL, 0);
        for (int t = 0; t < 2; t++) {
            float want = longest[t] ? -(float)(1 << (longest[t] - 1)) : 0;
            assert_true(small->row[t] == want);
        }
    }
}

static void dry_of_a_long_history_is_fast(void **state) {
    (void)state;
    enum { N = 100000 };
    int32_t *same = mx_calloc(N, sizeof *same); // all equal: a quadratic search would take minutes
    mx_sampling p;
    mx_sampling_init(&p);
    p.dry_multiplier = 1, p.dry_last_n = -1;
    dry_row(&p, same, N, NULL, 0);
    assert_true(small->row[0] == -FLT_MAX); // huge, finite
    mx_free(same);
}

// ---- Bans, bias ----

static void bias_and_bans(void **state) {
    (void)state;
    float row[V] = {0};
    row[5] = 10, row[6] = 9, row[7] = 8;
    mx_sampling p;
    mx_sampling_init(&p);
    mx_logit_bias b[] = {{5, -100}, {7, 2}};
    p.bias = b, p.n_bias = 2;
    assert_int_equal(pick(small, &p, NULL, row), 7); // 5 banned, 7 at 10
    const int32_t banned[] = {7, 99, -1};
    const mx_sample_history h = {.banned = banned, .n_banned = 3};
    assert_int_equal(pick(small, &p, &h, row), 6);
    assert_true(row[5] == 10.0f); // the caller's row is as it was
    b[0] = (mx_logit_bias){3, 100};
    row[3] = -50;
    assert_int_equal(pick(small, &p, NULL, row), 3); // forced, though -50 + 100 is all it needs
    row[5] = 1000;
    assert_int_equal(pick(small, &p, NULL, row), 3); // forced, though 1000 is greater
    row[3] = -INFINITY;
    assert_int_equal(pick(small, &p, NULL, row), 3);
    b[0].id = 7, b[1] = (mx_logit_bias){6, 0.5f};
    assert_int_equal(pick(small, &p, &h, row), 5); // the forced one is banned: forcing is off
}

static void forcing_holds_at_any_temperature(void **state) {
    (void)state;
    float row[V];
    random_row(row, V, 5, 4);
    mx_logit_bias b = {11, 100};
    mx_sampling p;
    mx_sampling_init(&p);
    p.bias = &b, p.n_bias = 1, p.temperature = 50;
    for (uint64_t seed = 0; seed < 200; seed++) {
        p.seed = seed;
        assert_int_equal(pick(small, &p, NULL, row), 11);
    }
    b.bias = -100;
    for (uint64_t seed = 0; seed < 500; seed++) {
        p.seed = seed;
        assert_int_not_equal(pick(small, &p, NULL, row), 11);
    }
}

static void all_banned_is_an_error(void **state) {
    (void)state;
    float row[V] = {0};
    int32_t banned[V], id;
    for (int32_t i = 0; i < V; i++) banned[i] = i;
    const mx_sample_history h = {.banned = banned, .n_banned = V};
    mx_sampling p;
    mx_sampling_init(&p);
    mx_err err = {0};
    assert_int_equal(mx_sample(small, &p, &h, row, &id, &err), MX_INVALID);
    assert_non_null(strstr(err.msg, "banned"));
}

// ---- Filters against a plain reference ----

typedef struct plain { // kept[i]: token i may be drawn
    int32_t n;
    float logit[512];
    bool kept[512];
} plain;

static plain *sorting;
static double *sorting_key;

static int by_key(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sorting_key[x] != sorting_key[y]) return sorting_key[x] < sorting_key[y] ? -1 : 1;
    return x - y;
}

static double plain_prob(const plain *r, double *p) {
    double max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < r->n; i++) {
        if (r->kept[i] && (double)r->logit[i] > max) max = (double)r->logit[i];
    }
    for (int32_t i = 0; i < r->n; i++) {
        p[i] = r->kept[i] ? exp((double)r->logit[i] - max) : 0;
        sum += p[i];
    }
    for (int32_t i = 0; i < r->n; i++) p[i] /= sum;
    return sum;
}

// Keeps the first tokens by key: at most k, and as soon as their probability reaches `share`.
static void plain_keep(plain *r, double *key, int32_t k, double share) {
    int32_t ids[512], n = 0, taken = 0;
    double p[512], got = 0;
    plain_prob(r, p);
    for (int32_t i = 0; i < r->n; i++) {
        if (r->kept[i]) ids[n++] = i;
        r->kept[i] = false;
    }
    sorting = r, sorting_key = key;
    qsort(ids, (size_t)n, sizeof *ids, by_key);
    while (taken < n && taken < k) {
        r->kept[ids[taken]] = true;
        got += p[ids[taken++]];
        if (got >= share - 1e-12) break;
    }
}

static void plain_top(plain *r, int32_t k, double share) {
    double key[512];
    for (int32_t i = 0; i < r->n; i++) key[i] = -(double)r->logit[i];
    plain_keep(r, key, k, share);
}

static void plain_typical(plain *r, double share) {
    double key[512], p[512], entropy = 0;
    plain_prob(r, p);
    for (int32_t i = 0; i < r->n; i++) {
        if (p[i] > 0) entropy -= p[i] * log(p[i]);
    }
    for (int32_t i = 0; i < r->n; i++) {
        // equal distances must tie although they were computed otherwise
        key[i] = r->kept[i] ? round(fabs(-log(p[i]) - entropy) * 1e9) : 0;
    }
    plain_keep(r, key, r->n, share);
}

static void plain_min_p(plain *r, double share) {
    double p[512], max = 0;
    plain_prob(r, p);
    for (int32_t i = 0; i < r->n; i++) max = p[i] > max ? p[i] : max;
    for (int32_t i = 0; i < r->n; i++) r->kept[i] &= p[i] >= share * max * (1 - 1e-12);
}

static void plain_sigma(plain *r, double n) {
    double mean = 0, var = 0, max = -INFINITY, count = 0;
    for (int32_t i = 0; i < r->n; i++) {
        if (!r->kept[i]) continue;
        mean += (double)r->logit[i], count++;
        if ((double)r->logit[i] > max) max = (double)r->logit[i];
    }
    mean /= count;
    for (int32_t i = 0; i < r->n; i++) {
        if (r->kept[i]) var += ((double)r->logit[i] - mean) * ((double)r->logit[i] - mean);
    }
    double low = max - n * sqrt(var / count);
    for (int32_t i = 0; i < r->n; i++) r->kept[i] &= (double)r->logit[i] >= low - 1e-9;
}

static void plain_xtc(plain *r, double threshold) {
    double p[512];
    int32_t least = -1, n = 0;
    plain_prob(r, p);
    for (int32_t i = 0; i < r->n; i++) {
        if (p[i] < threshold * (1 - 1e-12) || !r->kept[i]) continue;
        n++;
        if (least < 0 || r->logit[i] <= r->logit[least]) least = i;
    }
    for (int32_t i = 0; i < r->n && n >= 2; i++) {
        if (p[i] >= threshold * (1 - 1e-12) && i != least) r->kept[i] = false;
    }
}

static void same_set(const mx_sampler *s, const plain *r) {
    int32_t n = 0;
    for (int32_t i = 0; i < r->n; i++) {
        if (!r->kept[i]) continue;
        assert_true(n < s->n);
        assert_int_equal(s->cand[n].id, i);
        assert_true(s->cand[n++].logit == r->logit[i]);
    }
    assert_int_equal(n, s->n);
    assert_true(n > 0);
}

static void both(mx_sampler *s, plain *r, int link, double share, int32_t k) {
    switch (link) {
    case 0: sample_top_k(s, k), plain_top(r, k, 2); break;
    case 1: sample_top_p(s, share), plain_top(r, r->n, share); break;
    case 2: sample_min_p(s, share), plain_min_p(r, share); break;
    case 3: sample_typical(s, share), plain_typical(r, share); break;
    case 4: sample_top_n_sigma(s, share * 4), plain_sigma(r, share * 4); break;
    default: sample_xtc(s, share / 8), plain_xtc(r, share / 8); break;
    }
}

static void filters_match_plain_ones(void **state) {
    (void)state;
    static const int32_t sizes[] = {1, 2, 3, 17, 130, 512};
    for (size_t at = 0; at < MX_COUNT(sizes); at++) {
        mx_sampler *s = mx_sampler_open(sizes[at]);
        for (uint32_t t = 0; t < 240; t++) {
            plain r = {.n = sizes[at]};
            random_row(r.logit, r.n, t * 8 + (uint32_t)at, 1.0f + (float)(t % 5));
            for (int32_t i = 0; i < r.n; i++) r.kept[i] = true;
            memcpy(s->row, r.logit, (size_t)r.n * sizeof(float));
            sample_collect(s);
            double share = mx_random_uniform(t, 0, 0, 0);
            int32_t k = 1 + (int32_t)(t * 7 % 100);
            both(s, &r, (int)(t % 6), share, k); // one link, then another on what it left
            same_set(s, &r);
            both(s, &r, (int)(t / 6 % 6), share, k);
            same_set(s, &r);
        }
        mx_sampler_close(s);
    }
}

static void ranking_is_a_sort(void **state) {
    (void)state;
    enum { N = 20000 };
    sample_item *a = mx_calloc(N, sizeof *a), *b = mx_calloc(N, sizeof *b);
    static const int32_t ms[] = {1, 2, 40, 1024, 1025, 5000, N - 1, N};
    for (int shape = 0; shape < 4; shape++) {
        for (int32_t i = 0; i < N; i++) {
            double u = mx_random_uniform(1, 0, (uint32_t)i, 0);
            double keys[] = {u, floor(u * 8), i, -i};
            a[i] = (sample_item){keys[shape], i, i};
        }
        memcpy(b, a, N * sizeof *a);
        sample_order(b, N, N);
        for (int32_t i = 1; i < N; i++) {
            assert_true(b[i - 1].key < b[i].key ||
                        (b[i - 1].key == b[i].key && b[i - 1].id < b[i].id));
        }
        for (size_t m = 0; m < MX_COUNT(ms); m++) {
            sample_item *c = mx_calloc(N, sizeof *c);
            memcpy(c, a, N * sizeof *a);
            sample_order(c, N, ms[m]);
            for (int32_t i = 0; i < ms[m]; i++) assert_int_equal(c[i].id, b[i].id);
            mx_free(c);
        }
    }
    mx_free(a);
    mx_free(b);
}

// ---- The chain ----

// Which of the tokens 0..3 are drawn over many seeds, as bits.
static unsigned drawn(const mx_sampling *p, const float *row) {
    unsigned set = 0;
    mx_sampling q = *p;
    for (q.seed = 0; q.seed < 400; q.seed++) set |= 1u << pick(small, &q, NULL, row);
    return set;
}

static void links_are_in_order(void **state) {
    (void)state;
    float row[V];
    for (int i = 0; i < V; i++) row[i] = -60;
    const double prob[] = {0.4, 0.3, 0.2, 0.1};
    for (int i = 0; i < 4; i++) row[i] = (float)log(prob[i]);
    mx_sampling p;
    mx_sampling_init(&p);
    p.temperature = 1;
    assert_int_equal(drawn(&p, row), 0xf);
    // top_p counts shares of what top_k left: 0.4 of 0.7 is 0.571 and enough for 0.5. Before top_k
    // it would take two.
    p.top_k = 2, p.top_p = 0.5f;
    assert_int_equal(drawn(&p, row), 0x1);
    // The temperature comes last: at 10 all would be about equal and top_p would keep more.
    p.top_k = 0, p.top_p = 0.6f, p.temperature = 10;
    assert_int_equal(drawn(&p, row), 0x3);
    // min_p sees the untempered distribution: 0.5 * 0.4 keeps 0.4, 0.3, 0.2.
    p.top_p = 1, p.min_p = 0.45f;
    assert_int_equal(drawn(&p, row), 0x7);
    // XTC sees what is left: after top_k 2 both are above 0.42, before it none but 0 is.
    p.min_p = 0, p.top_k = 2, p.xtc_probability = 1, p.xtc_threshold = 0.42f;
    assert_int_equal(drawn(&p, row), 0x2);
    // Penalties come before filters: token 0 falls behind 1.
    mx_sampling_init(&p);
    p.temperature = 1, p.top_k = 1, p.repeat_penalty = 3;
    const int32_t prompt = 0;
    const mx_sample_history h = {.prompt = &prompt, .n_prompt = 1};
    assert_int_equal(pick(small, &p, &h, row), 1);
}

static void bias_comes_before_the_repetition_penalty(void **state) {
    (void)state;
    float row[V] = {0};
    row[1] = 1, row[2] = 2.1f;
    const mx_logit_bias b = {1, 2};
    const int32_t prompt = 1;
    const mx_sample_history h = {.prompt = &prompt, .n_prompt = 1};
    mx_sampling p;
    mx_sampling_init(&p);
    p.bias = &b, p.n_bias = 1, p.repeat_penalty = 2;
    assert_int_equal(pick(small, &p, &h, row), 2); // (1 + 2) / 2; the other order gives 2.5
    p.repeat_penalty = 1.4f;
    assert_int_equal(pick(small, &p, &h, row), 1);
}

static void xtc_happens_with_its_probability(void **state) {
    (void)state;
    float row[V];
    for (int i = 0; i < V; i++) row[i] = -60;
    row[0] = row[1] = 0;
    mx_sampling p;
    mx_sampling_init(&p);
    p.temperature = 1, p.xtc_probability = 0.5f;
    int zero = 0; // XTC removes 0 half of the time, else a fair draw: a quarter of all
    for (p.seed = 0; p.seed < 4000; p.seed++) zero += pick(small, &p, NULL, row) == 0;
    assert_in_range(zero, 880, 1120);
}

// ---- Seeds ----

static void seeds_decide(void **state) {
    (void)state;
    float row[V];
    random_row(row, V, 9, 0.5f);
    mx_sampling p;
    mx_sampling_init(&p);
    p.temperature = 1.5f, p.seed = 42;
    int32_t a[64], b[64];
    int same_seed = 0, other_seed = 0, other_choice = 0, other_position = 0;
    mx_sampler *fresh = mx_sampler_open(V);
    for (size_t i = 0; i < 64; i++) {
        const int32_t gen[64] = {0};
        const mx_sample_history h = {.generated = gen, .n_generated = i};
        a[i] = pick(small, &p, &h, row);
        mx_sampling q = p;
        q.seed = 43;
        b[i] = pick(small, &q, &h, row); // what else is drawn in between does not matter
        same_seed += pick(fresh, &p, &h, row) == a[i];
        other_seed += b[i] == a[i];
        q = p, q.choice = 1;
        other_choice += pick(small, &q, &h, row) == a[i];
        other_position += i > 0 && a[i] == a[i - 1];
    }
    mx_sampler_close(fresh);
    assert_int_equal(same_seed, 64);
    assert_in_range(other_seed, 0, 20);
    assert_in_range(other_choice, 0, 20);
    assert_in_range(other_position, 0, 20);
}

static void draws_follow_the_distribution(void **state) {
    (void)state;
    float row[V];
    double p[V], sum = 0, chi = 0;
    enum { DRAWS = 20000 };
    random_row(row, V, 21, 2);
    mx_sampling s;
    mx_sampling_init(&s);
    s.temperature = 0.7f;
    for (int i = 0; i < V; i++) sum += p[i] = exp((double)row[i] / (double)s.temperature);
    int count[V] = {0};
    for (s.seed = 0; s.seed < DRAWS; s.seed++) count[pick(small, &s, NULL, row)]++;
    for (int i = 0; i < V; i++) {
        double want = p[i] / sum * DRAWS;
        chi += (count[i] - want) * (count[i] - want) / want;
    }
    assert_true(chi < 37.7); // 15 degrees of freedom, 0.1 %
    assert_true(chi > 3.0);  // and not suspiciously even
}

// ---- Odd rows ----

static void odd_rows(void **state) {
    (void)state;
    mx_sampling p;
    mx_sampling_init(&p);
    float row[V];
    mx_err err = {0};
    int32_t id;
    const mx_sample_history none = {0};
    for (int i = 0; i < V; i++) row[i] = NAN;
    assert_int_equal(mx_sample(small, &p, &none, row, &id, &err), MX_INTERNAL);
    for (int i = 0; i < V; i++) row[i] = -INFINITY;
    assert_int_equal(mx_sample(small, &p, &none, row, &id, &err), MX_INTERNAL);
    row[4] = -5, row[9] = NAN;
    for (int t = 0; t < 2; t++, p.temperature = 1) {
        assert_int_equal(pick(small, &p, NULL, row), 4); // the only one, greedy and drawn
    }
    row[9] = INFINITY;
    assert_int_equal(pick(small, &p, NULL, row), 9);
    p.typical_p = 0, p.top_p = 0, p.min_p = 1, p.top_k = 5, p.top_n_sigma = 0;
    assert_int_equal(pick(small, &p, NULL, row), 9); // the strictest filters leave one
    float one = 3;
    mx_sampler *s = mx_sampler_open(1);
    assert_int_equal(pick(s, &p, NULL, &one), 0);
    mx_sampler_close(s);
}

static void equal_logits_rank_by_id(void **state) {
    (void)state;
    float row[V] = {0};
    mx_sampling p;
    mx_sampling_init(&p);
    assert_int_equal(pick(small, &p, NULL, row), 0);
    row[3] = row[7] = 1;
    assert_int_equal(pick(small, &p, NULL, row), 3);
    p.temperature = 1, p.top_k = 3; // 3, 7 and of the equal rest the first
    assert_int_equal(drawn(&p, row), 1u << 3 | 1u << 7 | 1u << 0);
}

static void extreme_temperatures(void **state) {
    (void)state;
    float row[V] = {0};
    row[6] = 1e-3f;
    mx_sampling p;
    mx_sampling_init(&p);
    p.temperature = 1e-30f;
    for (p.seed = 0; p.seed < 50; p.seed++) assert_int_equal(pick(small, &p, NULL, row), 6);
    p.temperature = FLT_MAX;
    unsigned all = drawn(&p, row);
    assert_int_equal(all, 0xffff);
}

static void large_vocabularies(void **state) {
    (void)state;
    enum { N = 262144 };
    float *row = mx_calloc(N, sizeof *row);
    random_row(row, N, 3, 8);
    mx_sampler *s = mx_sampler_open(N);
    mx_sampling p;
    mx_sampling_init(&p);
    p.temperature = 1, p.top_k = 40, p.top_p = 0.95f, p.min_p = 0.05f;
    float least = 0;
    for (p.seed = 0; p.seed < 3; p.seed++) least = fminf(least, row[pick(s, &p, NULL, row)] - 8);
    assert_true(least > -0.5f);
    p.top_k = 0, p.typical_p = 0.9f;
    pick(s, &p, NULL, row);
    mx_sampler_close(s);
    mx_free(row);
}

// ---- Log-probabilities, checks ----

static void logprobs(void **state) {
    (void)state;
    float row[V], lp, top[V + 2];
    int32_t ids[V + 2];
    for (int i = 0; i < V; i++) row[i] = -INFINITY;
    row[2] = (float)log(0.5), row[5] = row[3] = (float)log(0.25), row[7] = NAN;
    mx_logprobs(small, row, 5, &lp, V + 2, ids, top);
    assert_true(fabsf(lp - (float)log(0.25)) < 1e-6f);
    assert_int_equal(ids[0], 2);
    assert_int_equal(ids[1], 3); // of equal ones the smaller id
    assert_int_equal(ids[2], 5);
    assert_true(fabsf(top[0] - (float)log(0.5)) < 1e-6f && top[1] == lp && top[2] == lp);
    assert_int_equal(ids[3], -1);
    assert_true(top[3] == -INFINITY && ids[V + 1] == -1);
    mx_logprobs(small, row, 7, &lp, 0, NULL, NULL);
    assert_true(lp == -INFINITY);
}

static void checks_name_the_field(void **state) {
    (void)state;
    mx_sampling ok, p;
    mx_err err = {0};
    mx_sampling_init(&ok);
    assert_int_equal(mx_sampling_check(&ok, V, &err), MX_OK);
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        p = ok;                                                                                    \
        p.field = value;                                                                           \
        assert_int_equal(mx_sampling_check(&p, V, &err), MX_INVALID);                              \
        assert_non_null(strstr(err.msg, #field));                                                  \
    } while (0)
    REFUSED(temperature, -0.1f);
    REFUSED(temperature, NAN);
    REFUSED(top_p, 1.5f);
    REFUSED(min_p, -1);
    REFUSED(typical_p, 2);
    REFUSED(repeat_penalty, 0);
    REFUSED(presence_penalty, INFINITY);
    REFUSED(xtc_probability, 1.1f);
    REFUSED(top_k, -1);
    REFUSED(repeat_last_n, -2);
    REFUSED(dry_last_n, -2);
    p = ok;
    mx_logit_bias b = {V, 1};
    p.bias = &b, p.n_bias = 1;
    assert_int_equal(mx_sampling_check(&p, V, &err), MX_INVALID);
    assert_non_null(strstr(err.msg, "16"));
    b.id = V - 1;
    assert_int_equal(mx_sampling_check(&p, V, &err), MX_OK);
    b.bias = NAN;
    assert_int_equal(mx_sampling_check(&p, V, &err), MX_INVALID);
}

// ---- What a device is told ----

static float clamped(double v) {
    return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : (float)v;
}

// An edit as backend/step.h describes it.
static float edited(float l, const mx_sample_edit *e, const mx_sample_row *r) {
    l = isnan(l) ? -INFINITY : l > FLT_MAX ? FLT_MAX : l;
    if (e->bias == -INFINITY || l == -INFINITY) return -INFINITY;
    l = clamped((double)l + (double)e->bias);
    double penalty = (double)r->repeat_penalty;
    if (e->repeated) l = clamped(l > 0 ? (double)l / penalty : (double)l * penalty);
    double less = (double)r->frequency_penalty * e->count;
    if (e->count) l = clamped((double)l - less - (double)r->presence_penalty);
    return l;
}

// The edited row without a history gives the token of the row with it.
static void edits_say_what_the_chain_does(void **state) {
    (void)state;
    enum { N = 300, CASES = 600 };
    mx_sampler *s = mx_sampler_open(N);
    int n_edited = 0;
    for (uint32_t k = 0; k < CASES; k++) {
        static sample_case c;
        float row[N], changed[N];
        mx_sample_edit edits[256];
        mx_sample_plan plan;
        sample_case_make(&c, k + 1, N);
        sample_case_row(&c, row);
        int32_t want = pick(s, &c.p, &c.h, row);
        assert_true(mx_sample_on_device(s, &c.p, &c.h, edits, MX_COUNT(edits), &plan));
        assert_int_equal(plan.n_edits, plan.row.n_edits);
        memcpy(changed, row, sizeof row);
        for (int32_t i = 0; i < plan.n_edits; i++) {
            const mx_sample_edit *e = &edits[i];
            changed[e->id] = edited(row[e->id], e, &plan.row);
            n_edited += changed[e->id] != row[e->id];
        }
        mx_sampling p;
        mx_sampling_init(&p);
        p.temperature = plan.row.temperature;
        p.top_k = plan.row.top_k;
        p.top_p = plan.row.top_p;
        p.min_p = plan.row.min_p;
        p.seed = plan.row.seed;
        p.choice = plan.row.choice;
        mx_sample_history h = {.n_generated = plan.row.pos};
        assert_int_equal(pick(s, &p, &h, changed), want);
    }
    assert_true(n_edited > 10 * CASES);
    mx_sampler_close(s);
}

static void what_a_device_cannot_do(void **state) {
    (void)state;
    mx_sample_edit edits[4];
    mx_sample_plan plan;
    int32_t text[] = {1, 2, 3, 4, 5, 1, 2};
    mx_sample_history h = {.prompt = text, .n_prompt = 5, .generated = text + 5, .n_generated = 2};
    mx_logit_bias b[2] = {{3, 1}, {3, 2}};
    mx_sampling ok, p;
    mx_sampling_init(&ok);
#define DEVICE(yes, change)                                                                        \
    do {                                                                                           \
        p = ok;                                                                                    \
        change;                                                                                    \
        assert_int_equal(mx_sample_on_device(small, &p, &h, edits, 4, &plan), yes);                \
    } while (0)
    DEVICE(true, (void)0);
    assert_true(plan.row.temperature == 0 && plan.n_edits == 0 && !plan.steps_on);
    DEVICE(true, (p.temperature = 1, p.top_k = 1));
    assert_true(plan.row.temperature == 0);
    DEVICE(true, p.typical_p = 0.5f); // greedy: filters play no part
    DEVICE(false, (p.temperature = 1, p.typical_p = 0.5f));
    DEVICE(false, (p.temperature = 1, p.top_n_sigma = 1));
    DEVICE(false, (p.temperature = 1, p.xtc_probability = 0.5f));
    DEVICE(false, p.dry_multiplier = 1);
    DEVICE(true, (p.dry_multiplier = 1, p.dry_last_n = 0));
    DEVICE(true, (p.bias = b, p.n_bias = 1));
    assert_true(plan.n_edits == 1 && !plan.steps_on);
    DEVICE(false, (p.bias = b, p.n_bias = 2)); // twice the same
    b[0].bias = 100;
    DEVICE(false, (p.bias = b, p.n_bias = 1)); // forces
    DEVICE(true, p.frequency_penalty = 1);
    assert_true(plan.n_edits == 2 && plan.steps_on && edits[0].count == 1);
    DEVICE(false, p.repeat_penalty = 2); // five ids, four places
    DEVICE(true, (p.repeat_penalty = 2, p.repeat_last_n = 4));
    assert_true(plan.n_edits == 4 && plan.steps_on && edits[0].repeated);
    DEVICE(true, (p.repeat_penalty = 2, p.repeat_last_n = 0));
    assert_false(plan.steps_on);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(uniform_depends_on_every_coordinate),
        cmocka_unit_test(repetition_sees_the_last_tokens_of_prompt_and_generated),
        cmocka_unit_test(frequency_and_presence_see_generated_tokens_only),
        cmocka_unit_test(dry_penalises_what_goes_on_with_a_repetition),
        cmocka_unit_test(dry_matches_its_definition),
        cmocka_unit_test(dry_of_a_long_history_is_fast),
        cmocka_unit_test(bias_and_bans),
        cmocka_unit_test(forcing_holds_at_any_temperature),
        cmocka_unit_test(all_banned_is_an_error),
        cmocka_unit_test(filters_match_plain_ones),
        cmocka_unit_test(ranking_is_a_sort),
        cmocka_unit_test(links_are_in_order),
        cmocka_unit_test(bias_comes_before_the_repetition_penalty),
        cmocka_unit_test(xtc_happens_with_its_probability),
        cmocka_unit_test(seeds_decide),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(odd_rows),
        cmocka_unit_test(equal_logits_rank_by_id),
        cmocka_unit_test(extreme_temperatures),
        cmocka_unit_test(large_vocabularies),
        cmocka_unit_test(logprobs),
        cmocka_unit_test(checks_name_the_field),
        cmocka_unit_test(edits_say_what_the_chain_does),
        cmocka_unit_test(what_a_device_cannot_do),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
