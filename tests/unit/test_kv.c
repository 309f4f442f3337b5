// Sequence memory: pages, windows, sharing, truncation; nothing leaks, nothing is taken twice.
#include "kv/kv.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the five above
#include <cmocka.h>

static mx_status fake_alloc(mx_backend *b, mx_buffer **out, size_t n, mx_usage use, mx_err *err) {
    (void)b, (void)err;
    *out = mx_calloc(1, sizeof **out);
    **out = (mx_buffer){.n_bytes = n, .usage = use};
    return MX_OK;
}
static void fake_free(mx_backend *b, mx_buffer *buf) {
    (void)b;
    mx_free(buf);
}
// A page holds its number; the last write says from which page to which it went.
static mx_status fake_read(mx_backend *b, const mx_buffer *buf, size_t offset, void *dst, size_t n,
                           mx_err *err) {
    (void)b, (void)err, (void)buf;
    memset(dst, (int)(offset / n), n); // the page's number
    return MX_OK;
}
static int n_writes, last_from, last_to;
static mx_status fake_write(mx_backend *b, mx_buffer *buf, size_t offset, const void *src, size_t n,
                            mx_err *err) {
    (void)b, (void)err, (void)buf;
    n_writes++;
    last_from = *(const uint8_t *)src;
    last_to = (int)(offset / n);
    return MX_OK;
}
static const mx_backend_ops fake_ops = {
    .alloc = fake_alloc, .free = fake_free, .read = fake_read, .write = fake_write};
static mx_backend fake = {.ops = &fake_ops, .name = "fake"};

// Group 0: full attention; group 1: a window of 40 positions.
static const mx_kv_spec spec = {
    .groups = {{.n_layers = 2, .n_kv_head = 2, .head_dim = 8, .codec = MX_F16},
               {.n_layers = 3, .n_kv_head = 1, .head_dim = 8, .window = 40, .codec = MX_F32}},
    .n_groups = 2,
    .page_tokens = 16,
    .max_ctx = 256,
    .max_seqs = 3,
    .max_chunk = 32,
};

static mx_kv *open_kv(const mx_kv_spec *s) {
    mx_kv *kv;
    mx_err err = {0};
    assert_int_equal(mx_kv_open(&kv, &fake, s, &err), MX_OK);
    return kv;
}

static void grow(mx_kv *kv, int32_t seq, int32_t to) {
    mx_err err = {0};
    while (mx_kv_seq_len(kv, seq) < to) {
        int32_t next = MX_MIN(mx_kv_seq_len(kv, seq) + 32, to);
        assert_int_equal(mx_kv_reserve(kv, seq, next, &err), MX_OK);
        mx_kv_commit(kv, seq, next);
    }
}

static int32_t free_pages(mx_kv *kv, int32_t g) {
    mx_kv_stats st;
    mx_kv_get_stats(kv, &st);
    return st.free_pages[g];
}

static void bytes_follow_the_shapes(void **state) {
    (void)state;
    assert_int_equal(mx_kv_token_bytes(&spec), 2 * 2 * 2 * 8 * 2 + 2 * 3 * 1 * 8 * 4);
    mx_kv *kv = open_kv(&spec);
    mx_kv_stats st;
    mx_kv_get_stats(kv, &st);
    assert_int_equal(st.n_pages[0], 3 * 16);
    assert_int_equal(st.n_pages[1], 3 * (5 + 2)); // window + chunk in pages, and two
    mx_kv_close(kv);
}

static void windows_give_pages_back(void **state) {
    (void)state;
    mx_kv *kv = open_kv(&spec);
    int32_t s = mx_kv_seq_open(kv), before = free_pages(kv, 1);
    grow(kv, s, 200);
    assert_int_equal(free_pages(kv, 0), 48 - 13);
    // the next query (200) sees positions 161.. : pages 10, 11, 12
    assert_int_equal(before - free_pages(kv, 1), 3);
    assert_int_equal(mx_kv_page(kv, s, 1, 9), -1);
    assert_true(mx_kv_page(kv, s, 1, 10) >= 0);
    mx_kv_seq_close(kv, s);
    assert_int_equal(free_pages(kv, 1), before);
    assert_int_equal(free_pages(kv, 0), 48);
    mx_kv_close(kv);
}

static void an_empty_pool_takes_nothing(void **state) {
    (void)state;
    mx_kv_spec small = spec;
    small.n_groups = 1;
    small.budget_bytes = 17 * 16 * 128; // 17 pages
    mx_kv *kv = open_kv(&small);
    mx_err err = {0};
    int32_t a = mx_kv_seq_open(kv), b = mx_kv_seq_open(kv);
    grow(kv, a, 256);
    assert_int_equal(mx_kv_reserve(kv, b, 33, &err), MX_BUSY);
    assert_int_equal(free_pages(kv, 0), 1);
    assert_int_equal(mx_kv_reserve(kv, b, 16, &err), MX_OK);
    assert_int_equal(mx_kv_reserve(kv, a, 257, &err), MX_CONTEXT);
    mx_kv_close(kv);
    small.budget_bytes = 15 * 16 * 128;
    assert_int_equal(mx_kv_open(&kv, &fake, &small, &err), MX_NOMEM);
}

static void rows_get_their_places(void **state) {
    (void)state;
    mx_kv *kv = open_kv(&spec);
    mx_step_caps caps = {.max_tok = 64, .max_range = 2, .max_out = 2, .n_vocab = 4};
    mx_kv_caps(kv, &caps);
    mx_step_layout l = mx_step_bind(&caps, NULL, NULL);
    char *block = mx_calloc(l.total_bytes, 1);
    mx_step_io io;
    mx_step_bind(&caps, block, &io);
    int32_t s = mx_kv_seq_open(kv);
    grow(kv, s, 30);
    mx_err err = {0};
    assert_int_equal(mx_kv_reserve(kv, s, 50, &err), MX_OK);
    mx_step_range r = {.first = 7, .n_tok = 20, .pos0 = 30};
    mx_kv_fill(kv, s, &r, 1, &caps, &io);
    for (int32_t i = 0; i < 20; i++) {
        int32_t pos = 30 + i, page = mx_kv_page(kv, s, 0, pos / 16);
        assert_int_equal(io.kv_slot[0][7 + i], page * 16 + pos % 16);
        assert_int_equal(io.page_table[0][16 + pos / 16], page);
    }
    mx_free(block);
    mx_kv_close(kv);
}

static void shared_pages_live_as_long_as_somebody_holds_them(void **state) {
    (void)state;
    mx_kv *kv = open_kv(&spec);
    int32_t a = mx_kv_seq_open(kv);
    grow(kv, a, 64);
    int32_t pages[2][4];
    for (int32_t g = 0; g < 2; g++) {
        for (int32_t i = 0; i < 4; i++) pages[g][i] = mx_kv_page(kv, a, g, i);
    }
    const int32_t *rows[2] = {pages[0], pages[1]};
    int32_t b = mx_kv_seq_open(kv);
    mx_kv_adopt(kv, b, rows, 4);
    assert_int_equal(mx_kv_seq_len(kv, b), 64);
    int32_t held = free_pages(kv, 0);
    mx_kv_seq_close(kv, a);
    assert_int_equal(free_pages(kv, 0), held);
    grow(kv, b, 80);
    assert_int_equal(mx_kv_page(kv, b, 0, 3), pages[0][3]);
    mx_kv_seq_close(kv, b);
    assert_int_equal(free_pages(kv, 0), 48);
    mx_kv_close(kv);
}

// Two that begin with the same positions share them until one writes; each keeps what was there.
static void a_shared_page_is_copied_before_it_is_written(void **state) {
    (void)state;
    mx_kv *kv = open_kv(&spec);
    mx_err err = {0};
    int32_t all[2] = {free_pages(kv, 0), free_pages(kv, 1)};
    int32_t a = mx_kv_seq_open(kv), b = mx_kv_seq_open(kv), c = mx_kv_seq_open(kv);
    grow(kv, a, 38); // two pages and six positions
    assert_false(mx_kv_tail_shared(kv, a));
    assert_true(mx_kv_fork(kv, a, b, 37));
    assert_true(mx_kv_fork(kv, a, c, 32)); // whole pages: nothing to copy
    assert_int_equal(mx_kv_seq_len(kv, b), 37);
    assert_int_equal(free_pages(kv, 0), all[0] - 3);
    int32_t shared = mx_kv_page(kv, a, 0, 2);
    assert_int_equal(mx_kv_page(kv, b, 0, 2), shared);
    assert_true(mx_kv_tail_shared(kv, a) && mx_kv_tail_shared(kv, b));
    assert_false(mx_kv_tail_shared(kv, c));
    n_writes = 0;
    assert_int_equal(mx_kv_reserve(kv, b, 38, &err), MX_OK);
    assert_int_equal(n_writes, 2 * 2 + 2 * 3); // K and V of two and of three layers
    int32_t own = mx_kv_page(kv, b, 1, 2);
    assert_true(last_to == own && last_from == mx_kv_page(kv, a, 1, 2) && last_from != own);
    assert_int_not_equal(mx_kv_page(kv, b, 0, 2), shared);
    assert_int_equal(mx_kv_page(kv, b, 0, 1), mx_kv_page(kv, a, 0, 1)); // full ones stay shared
    assert_false(mx_kv_tail_shared(kv, a));                             // it is a's alone now
    n_writes = 0;
    assert_int_equal(mx_kv_reserve(kv, a, 39, &err), MX_OK);
    assert_int_equal(mx_kv_reserve(kv, c, 33, &err), MX_OK);
    assert_int_equal(n_writes, 0);
    mx_kv_seq_close(kv, a);
    mx_kv_seq_close(kv, b);
    mx_kv_seq_close(kv, c);
    assert_int_equal(free_pages(kv, 0), all[0]);
    assert_int_equal(free_pages(kv, 1), all[1]);
    mx_kv_close(kv);
}

static void forks_and_copies_that_cannot_be(void **state) {
    (void)state;
    mx_err err = {0};
    mx_kv *kv = open_kv(&spec);
    int32_t a = mx_kv_seq_open(kv), b = mx_kv_seq_open(kv);
    grow(kv, a, 120);
    assert_false(mx_kv_fork(kv, a, b, 60)); // the window has passed what b would see
    assert_int_equal(mx_kv_seq_len(kv, b), 0);
    assert_true(mx_kv_fork(kv, a, b, 119));
    mx_kv_close(kv);
    mx_kv_spec tight = spec; // one context of 256, shared by all
    tight.n_groups = 1;
    tight.budget_bytes = 256 * mx_kv_token_bytes(&tight);
    kv = open_kv(&tight);
    a = mx_kv_seq_open(kv), b = mx_kv_seq_open(kv);
    grow(kv, a, 250);
    assert_true(mx_kv_fork(kv, a, b, 250));
    assert_int_equal(free_pages(kv, 0), 0);
    assert_int_equal(mx_kv_reserve(kv, b, 251, &err), MX_BUSY); // no page to copy to
    assert_true(mx_kv_tail_shared(kv, b));
    mx_kv_seq_close(kv, a);
    assert_int_equal(mx_kv_reserve(kv, b, 251, &err), MX_OK); // alone, it needs none
    mx_kv_close(kv);
    mx_kv_spec dense = spec;
    dense.storage = MX_KV_DENSE;
    kv = open_kv(&dense);
    a = mx_kv_seq_open(kv), b = mx_kv_seq_open(kv);
    grow(kv, a, 40);
    assert_false(mx_kv_fork(kv, a, b, 40));
    mx_kv_close(kv);
}

static void storage_follows_the_word_and_the_use(void **state) {
    (void)state;
    static const struct {
        const char *word;
        bool several, shared, can_page;
        mx_kv_storage want;
        bool declined;
    } rows[] = {
        {"auto", false, false, true, MX_KV_DENSE, false},  // one sequence
        {"auto", true, false, true, MX_KV_PAGED, false},   // a batch
        {"auto", false, true, true, MX_KV_PAGED, false},   // a prefix cache
        {"auto", true, true, false, MX_KV_DENSE, false},   // nobody asked for pages by name
        {"paged", false, false, true, MX_KV_PAGED, false}, // asked for
        {"paged", true, false, false, MX_KV_DENSE, true},  // and cannot be had
        {"dense", true, true, true, MX_KV_DENSE, false},
    };
    mx_kv_storage got;
    bool declined;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        assert_true(mx_kv_choose(rows[i].word, rows[i].several, rows[i].shared, rows[i].can_page,
                                 &got, &declined));
        assert_int_equal(got, rows[i].want);
        assert_int_equal(declined, rows[i].declined);
    }
    assert_false(mx_kv_choose("pagedd", true, false, true, &got, &declined));
}

static void truncation_stops_where_the_window_has_passed(void **state) {
    (void)state;
    mx_kv *kv = open_kv(&spec);
    int32_t s = mx_kv_seq_open(kv);
    grow(kv, s, 200);
    assert_false(mx_kv_truncate(kv, s, 100)); // the window's pages are gone
    assert_int_equal(mx_kv_seq_len(kv, s), 200);
    assert_true(mx_kv_truncate(kv, s, 199));
    assert_int_equal(mx_kv_seq_len(kv, s), 199);
    mx_kv_seq_close(kv, s);
    assert_int_equal(free_pages(kv, 0), 48);
    mx_kv_close(kv);
}

static void dense_storage_is_one_page(void **state) {
    (void)state;
    mx_kv_spec d = spec;
    d.storage = MX_KV_DENSE;
    mx_kv *kv = open_kv(&d);
    assert_int_equal(mx_kv_get_spec(kv)->page_tokens, 256);
    int32_t s = mx_kv_seq_open(kv);
    grow(kv, s, 256);
    assert_int_equal(free_pages(kv, 0), 2);
    assert_true(mx_kv_page(kv, s, 1, 0) >= 0); // dense keeps what the window has passed
    mx_kv_close(kv);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_follow_the_shapes),
        cmocka_unit_test(windows_give_pages_back),
        cmocka_unit_test(an_empty_pool_takes_nothing),
        cmocka_unit_test(rows_get_their_places),
        cmocka_unit_test(shared_pages_live_as_long_as_somebody_holds_them),
        cmocka_unit_test(a_shared_page_is_copied_before_it_is_written),
        cmocka_unit_test(forks_and_copies_that_cannot_be),
        cmocka_unit_test(storage_follows_the_word_and_the_use),
        cmocka_unit_test(truncation_stops_where_the_window_has_passed),
        cmocka_unit_test(dense_storage_is_one_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
