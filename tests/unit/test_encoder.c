// The recorder with a backend that does nothing: plans by content, eviction, hazards, the arena,
// cuts and their reasons, sticky errors, expansions.
#include "backend/encoder.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the first four
#include <cmocka.h>

static int n_made, n_freed;
static bool fused_ok, no_memory;

static mx_status fake_alloc(mx_backend *b, mx_buffer **out, size_t n, mx_usage use, mx_err *err) {
    (void)b;
    if (no_memory) return mx_err_set(err, MX_NOMEM, "no memory");
    *out = mx_calloc(1, sizeof **out);
    **out = (mx_buffer){.n_bytes = n, .usage = use};
    return MX_OK;
}
static void fake_free(mx_backend *b, mx_buffer *buf) {
    (void)b;
    mx_free(buf);
}
static bool fake_supports(mx_backend *b, const mx_op *op, const mx_tensor *t) {
    (void)b, (void)t;
    return fused_ok || !mx_op_get((mx_op_kind)op->kind)->fused;
}
static mx_status fake_plan_make(mx_backend *b, mx_plan *p, mx_buffer *arena, mx_err *err) {
    (void)b, (void)err;
    assert_true(arena->n_bytes >= p->arena_bytes);
    n_made++;
    return MX_OK;
}
static void fake_plan_free(mx_backend *b, mx_plan *p) {
    (void)b, (void)p;
    n_freed++;
}
static const mx_backend_ops fake_ops = {.alloc = fake_alloc,
                                        .free = fake_free,
                                        .supports = fake_supports,
                                        .plan_make = fake_plan_make,
                                        .plan_free = fake_plan_free};
static mx_backend fake = {.ops = &fake_ops, .name = "fake"};

enum { D = 64, FF = 128 };
static mx_tensor norm_w, gate, up, down;

static int set_up(void **state) {
    (void)state;
    mx_tensor w = {.kind = MX_T_WEIGHT, .fmt = mx_wfmt_of(MX_F32)};
    norm_w = gate = down = w;
    norm_w.n_rows = 1;
    norm_w.n_cols = D;
    gate.n_rows = FF;
    gate.n_cols = D;
    gate.n_bytes = (size_t)4 << 20;
    up = gate;
    down.n_rows = D;
    down.n_cols = FF;
    down.n_bytes = (size_t)4 << 20;
    fused_ok = true, no_memory = false;
    n_made = n_freed = 0;
    return 0;
}

static mx_enc *open_enc(const char *max_ops, const char *max_mb, int32_t cap) {
    mx_budget_input in = {.env_max_ops = max_ops, .env_max_mb = max_mb, .env_min_ops = "0"};
    mx_budget b[MX_PHASES];
    mx_budget_choose(&in, b);
    return mx_enc_open(&fake, b, cap, true);
}

static void one_mlp(mx_enc *e, mx_tid x, mx_tid y, float eps) {
    mx_tid h = mx_enc_temp(e, mx_enc_tensor(e, x)->n_rows, FF);
    mx_enc_op(e,
              (mx_op){.kind = MX_OP_NORM_GLU,
                      .n_in = 4,
                      .n_out = 1,
                      .in = {x, mx_enc_use(e, &norm_w), mx_enc_use(e, &gate), mx_enc_use(e, &up)},
                      .out = {h},
                      .p.glu = {MX_ACT_SILU, eps}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL_ADD,
                         .n_in = 4,
                         .n_out = 1,
                         .in = {h, mx_enc_use(e, &down), MX_NONE, x},
                         .out = {y}});
}

// A step of `layers` blocks over n rows.
static mx_status try_record(mx_enc *e, mx_step_facts *f, int32_t n, int layers, float eps,
                            mx_plan **p) {
    *f = (mx_step_facts){.phase = MX_PHASE_DECODE, .n_tok = n, .n_rows = n, .n_out = n};
    mx_enc_begin(e, f);
    mx_tid x = mx_enc_temp(e, n, D);
    for (int i = 0; i < layers; i++) {
        mx_tid y = mx_enc_temp(e, n, D);
        mx_enc_label(e, (int16_t)i, MX_ROLE_MLP);
        one_mlp(e, x, y, eps);
        x = y;
    }
    mx_err err = {0};
    return mx_enc_end(e, p, &err);
}

static mx_plan *record(mx_enc *e, mx_step_facts *f, int32_t n, int layers, float eps) {
    mx_plan *p = NULL;
    assert_int_equal(try_record(e, f, n, layers, eps, &p), MX_OK);
    return p;
}

// A larger step that finds no memory leaves the plans there are, and what they use.
static void a_step_without_memory_costs_no_other(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f;
    mx_plan *p, *first = record(e, &f, 3, 2, 1e-6f);
    no_memory = true;
    assert_int_equal(try_record(e, &f, 300, 2, 1e-6f, &p), MX_NOMEM);
    assert_ptr_equal(record(e, &f, 3, 2, 1e-6f), first);
    assert_int_equal(n_made, 1);
    assert_int_equal(n_freed, 0);
    no_memory = false;
    record(e, &f, 300, 2, 1e-6f);
    assert_int_equal(n_made, 2);
    mx_enc_close(e);
}

static void equal_recordings_share_a_plan(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f;
    mx_plan *a = record(e, &f, 1, 3, 1e-5f);
    assert_ptr_equal(record(e, &f, 1, 3, 1e-5f), a);
    assert_ptr_not_equal(record(e, &f, 2, 3, 1e-5f), a); // rows
    assert_ptr_not_equal(record(e, &f, 1, 2, 1e-5f), a); // ops
    assert_ptr_not_equal(record(e, &f, 1, 3, 2e-5f), a); // a parameter
    assert_int_equal(n_made, 4);
    mx_enc_close(e);
    assert_int_equal(n_freed, 4);
}

// What is freed and allocated again may be described by a struct at the same place.
static void a_plan_is_of_the_memory_of_its_buffers(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_buffer buf = {.n_bytes = 4096, .device = 0x1000};
    mx_step_facts f;
    gate.buf = &buf;
    const mx_plan *first = record(e, &f, 3, 2, 1e-6f);
    assert_ptr_equal(record(e, &f, 3, 2, 1e-6f), first);
    buf.device = 0x2000;
    assert_ptr_not_equal(record(e, &f, 3, 2, 1e-6f), first);
    buf.device = 0x1000;
    assert_ptr_equal(record(e, &f, 3, 2, 1e-6f), first);
    buf = (mx_buffer){.n_bytes = 4096, .host = &f};
    record(e, &f, 3, 2, 1e-6f);
    buf.host = e;
    record(e, &f, 3, 2, 1e-6f);
    assert_int_equal(n_made, 4);
    mx_enc_close(e);
}

static void ten_thousand_shapes_through_two_places(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 2);
    mx_step_facts f;
    record(e, &f, 10000, 1, 1e-5f); // the arena's size
    for (int32_t i = 1; i <= 9999; i++) record(e, &f, i, 1, 1e-5f);
    mx_enc_stats s;
    mx_enc_get_stats(e, &s);
    assert_int_equal(s.plans_made, 10000);
    assert_int_equal(s.plan_evictions, 9998);
    assert_int_equal(n_made - n_freed, 2);
    mx_enc_close(e);
}

static void what_was_not_used_for_longest_goes(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 2);
    mx_step_facts f;
    mx_enc_stats s;
    record(e, &f, 9, 1, 1e-5f);
    record(e, &f, 1, 1, 1e-5f);
    record(e, &f, 9, 1, 1e-5f);
    record(e, &f, 2, 1, 1e-5f); // in place of 1
    record(e, &f, 9, 1, 1e-5f);
    assert_int_equal(n_made, 3);
    record(e, &f, 1, 1, 1e-5f); // in place of 2
    assert_int_equal(n_made, 4);
    record(e, &f, 9, 1, 1e-5f);
    mx_enc_get_stats(e, &s);
    assert_int_equal(s.plan_hits, 3);
    assert_int_equal(s.plan_evictions, 2);
    mx_enc_close(e);
    e = open_enc(NULL, NULL, 0); // one place at least
    for (int32_t i = 0; i < 6; i++) record(e, &f, 2 - i % 2, 1, 1e-5f);
    mx_enc_close(e);
    assert_int_equal(n_made, n_freed);
}

static void temporaries_reuse_memory_and_budgets_do_not_matter(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f;
    size_t two = record(e, &f, 4, 2, 1e-5f)->arena_bytes;
    mx_plan *p = record(e, &f, 4, 40, 1e-5f);
    assert_true(p->arena_bytes <= two + 4 * FF * sizeof(float));
    for (int32_t i = 0; i < p->n_ops; i++) { // an output never overlaps an input of its op
        const mx_tensor *y = &p->tensors[p->ops[i].out[0]];
        for (int k = 0; k < p->ops[i].n_in; k++) {
            if (p->ops[i].in[k] == MX_NONE) continue;
            const mx_tensor *x = &p->tensors[p->ops[i].in[k]];
            if (x->kind != MX_T_TEMP) continue;
            assert_true(x->offset + x->n_bytes <= y->offset || y->offset + y->n_bytes <= x->offset);
        }
    }
    size_t want = p->arena_bytes;
    mx_enc_close(e);
    e = open_enc("1", "1", 8);
    assert_int_equal(record(e, &f, 4, 40, 1e-5f)->arena_bytes, want);
    mx_enc_close(e);
}

static void dependent_ops_wait_independent_ones_do_not(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f = {.phase = MX_PHASE_DECODE, .n_tok = 1, .n_rows = 1, .n_out = 1};
    mx_enc_begin(e, &f);
    mx_tid a = mx_enc_temp(e, 1, D), b = mx_enc_temp(e, 1, D), c = mx_enc_temp(e, 1, D),
           d = mx_enc_temp(e, 1, D);
    mx_op copy = {.kind = MX_OP_COPY, .n_in = 1, .n_out = 1};
    mx_tid pairs[3][2] = {{a, b}, {a, c}, {b, d}};
    for (int i = 0; i < 3; i++) {
        copy.in[0] = pairs[i][0];
        copy.out[0] = pairs[i][1];
        mx_enc_op(e, copy);
    }
    mx_op last = {
        .kind = MX_OP_ADD, .n_in = 2, .n_out = 1, .in = {c, d}, .out = {mx_enc_temp(e, 1, D)}};
    mx_enc_op(e, last);
    mx_plan *p;
    mx_err err = {0};
    assert_int_equal(mx_enc_end(e, &p, &err), MX_OK);
    assert_int_equal(p->ops[1].flags & MX_OPF_BARRIER, 0);
    assert_int_equal(p->ops[2].flags & MX_OPF_BARRIER, MX_OPF_BARRIER);
    assert_int_equal(p->ops[3].flags & MX_OPF_BARRIER, MX_OPF_BARRIER);
    assert_int_equal(p->n_barriers, 2);
    mx_enc_close(e);
}

static void cuts_follow_the_rule_and_say_why(void **state) {
    (void)state;
    mx_step_facts f;
    mx_enc *e = open_enc("3", NULL, 8); // more than 3: after the 4th op
    mx_plan *p = record(e, &f, 1, 5, 1e-5f);
    assert_int_equal(p->n_segs, 3);
    assert_int_equal(p->segs[0].n, 4);
    assert_int_equal(p->segs[0].reason, MX_COMMIT_OPS);
    assert_int_equal(p->segs[2].n, 2);
    assert_int_equal(p->segs[2].reason, MX_COMMIT_END);
    mx_enc_close(e);
    e = open_enc(NULL, "10", 8); // 12 MiB of weights a block, each counted once in a buffer
    p = record(e, &f, 1, 5, 1e-5f);
    assert_int_equal(p->segs[0].n, 2);
    assert_int_equal(p->segs[0].reason, MX_COMMIT_BYTES);
    mx_enc_close(e);
    e = open_enc(NULL, "13", 8); // the same weights again are not new
    assert_int_equal(record(e, &f, 1, 5, 1e-5f)->n_segs, 1);
    mx_enc_close(e);
}

static void fused_ops_expand_where_they_are_not_supported(void **state) {
    (void)state;
    fused_ok = false;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f;
    mx_plan *p = record(e, &f, 1, 1, 1e-5f);
    static const mx_op_kind want[] = {MX_OP_RMS_NORM, MX_OP_MATMUL, MX_OP_MATMUL,
                                      MX_OP_GLU,      MX_OP_MATMUL, MX_OP_ADD};
    assert_int_equal(p->n_ops, MX_COUNT(want));
    for (size_t i = 0; i < MX_COUNT(want); i++) assert_int_equal(p->ops[i].kind, want[i]);
    assert_int_equal(p->slow[MX_SLOW_EXPANDED], 2);
    mx_enc_close(e);
}

static void slow_paths_are_counted(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f;
    mx_plan *p = record(e, &f, 1, 2, 1e-5f);
    assert_int_equal(p->slow[MX_SLOW_ROWS], 6); // gate, up, down of two layers
    assert_int_equal(p->slow[MX_SLOW_EXPANDED], 0);
    gate.layout = MX_LAYOUT_PACKED;
    p = record(e, &f, 1, 2, 1e-5f);
    assert_int_equal(p->slow[MX_SLOW_ROWS], 4);
    up.layout = down.layout = MX_LAYOUT_PACKED;
    p = record(e, &f, 1, 2, 1e-5f);
    for (int i = 0; i < MX_SLOW_COUNT; i++) assert_int_equal(p->slow[i], 0);
    mx_enc_close(e);
}

static void the_first_error_stays(void **state) {
    (void)state;
    mx_enc *e = open_enc(NULL, NULL, 8);
    mx_step_facts f = {.phase = MX_PHASE_DECODE, .n_tok = 1, .n_rows = 1, .n_out = 1};
    mx_enc_begin(e, &f);
    mx_tid a = mx_enc_temp(e, 1, D), b = mx_enc_temp(e, 1, FF);
    mx_enc_label(e, 7, MX_ROLE_MLP);
    mx_enc_op(e, (mx_op){.kind = MX_OP_ADD, .n_in = 2, .n_out = 1, .in = {a, b}, .out = {a}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_COPY, .n_in = 1, .n_out = 1, .in = {a}, .out = {a}});
    mx_plan *p;
    mx_err err = {0};
    assert_int_equal(mx_enc_end(e, &p, &err), MX_INTERNAL);
    assert_non_null(strstr(err.msg, "layer 7"));
    assert_non_null(strstr(err.msg, "add"));
    assert_non_null(strstr(err.msg, "(1, 128)"));
    mx_enc_close(e);
}

static void costs_count_what_is_read(void **state) {
    (void)state;
    mx_step_range r[2] = {{.first = 0, .n_tok = 1, .pos0 = 999},
                          {.first = 1, .n_tok = 4, .pos0 = 0}};
    mx_step_facts f = {.n_tok = 5, .n_rows = 8, .n_ranges = 2, .ranges = r};
    mx_tensor t[3] = {{.kind = MX_T_TEMP, .n_rows = 8, .n_cols = 128},
                      {.kind = MX_T_STATE, .fmt = {.dtype = MX_F16}, .n_cols = 32},
                      {.kind = MX_T_TEMP, .n_rows = 8, .n_cols = 128}};
    mx_op op = {.kind = MX_OP_ATTN, .n_in = 3, .n_out = 1, .in = {0, 1, 1}, .out = {2}};
    op.p.attn.n_head = 4;
    op.p.attn.n_kv_head = 2;
    op.p.attn.head_dim = 32;
    double kv = 2.0 * (1000 + 4) * 2 * 32 * 2; // K and V, positions, heads, dim, bytes
    assert_true(mx_op_cost(&op, t, &f).read_bytes == kv + 5 * 128 * 4);
    op.p.attn.window = 100;
    kv = 2.0 * (100 + 4) * 2 * 32 * 2;
    assert_true(mx_op_cost(&op, t, &f).read_bytes == kv + 5 * 128 * 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(equal_recordings_share_a_plan, set_up),
        cmocka_unit_test_setup(a_plan_is_of_the_memory_of_its_buffers, set_up),
        cmocka_unit_test_setup(a_step_without_memory_costs_no_other, set_up),
        cmocka_unit_test_setup(ten_thousand_shapes_through_two_places, set_up),
        cmocka_unit_test_setup(what_was_not_used_for_longest_goes, set_up),
        cmocka_unit_test_setup(temporaries_reuse_memory_and_budgets_do_not_matter, set_up),
        cmocka_unit_test_setup(dependent_ops_wait_independent_ones_do_not, set_up),
        cmocka_unit_test_setup(cuts_follow_the_rule_and_say_why, set_up),
        cmocka_unit_test_setup(fused_ops_expand_where_they_are_not_supported, set_up),
        cmocka_unit_test_setup(slow_paths_are_counted, set_up),
        cmocka_unit_test_setup(the_first_error_stays, set_up),
        cmocka_unit_test_setup(costs_count_what_is_read, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
