// cli, profile: slopes and paired differences from known times; budgets and repeats change neither
// results nor what is counted.
#include "cli/profile.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// cmocka.h needs these four
#include <cmocka.h>

static void slopes_come_from_times(void **state) {
    (void)state;
    double x[3] = {0, 1, 2}, y[3] = {10, 13, 16}, noisy[3] = {10, 14, 15};
    assert_true(fabs(prof_slope(x, y, 3) - 3) < 1e-12);
    assert_true(fabs(prof_slope(x, noisy, 3) - 2.5) < 1e-12);
    assert_true(prof_slope(y, y, 1) == 0);
    double same[2] = {1, 1};
    assert_true(prof_slope(same, y, 2) == 0);
}

static void differences_are_paired(void **state) {
    (void)state;
    // both arms drift by the same; b is 0.5 slower, in one round it was disturbed
    prof_series a = {0}, b = {0};
    for (int i = 0; i < 9; i++) {
        prof_push(&a, 10 + i);
        prof_push(&b, 10.5 + i + (i == 4 ? 100 : 0));
    }
    prof_diff d = prof_paired(&b, &a);
    assert_true(fabs(d.median - 0.5) < 1e-9 && d.spread < 1e-9);
    assert_true(prof_quantile(&a, 0.5) == 14 && prof_quantile(&a, 1) == 18);
    mx_free(a.v);
    mx_free(b.v);
    assert_true(prof_quantile(&(prof_series){0}, 0.5) == 0);
}

static void null_arms_say_what_a_difference_must_exceed(void **state) {
    (void)state;
    double medians[5] = {3, 1, 2.5, 1.5, 2};
    prof_diff d = prof_null(medians, 5);
    assert_true(d.median == 2 && d.spread == 2);
}

// Every order has every arm once; no arm comes after the same one all the time.
static void orders_are_random(void **state) {
    (void)state;
    enum { N = 20, ROUNDS = 30 };
    int after[N][N] = {{0}};
    for (uint32_t k = 0; k < ROUNDS; k++) {
        size_t order[N];
        bool seen[N] = {false};
        prof_order(order, N, k);
        for (size_t i = 0; i < N; i++) {
            assert_true(order[i] < N && !seen[order[i]]);
            seen[order[i]] = true;
            if (i) after[order[i]][order[i - 1]]++;
        }
    }
    for (size_t i = 0; i < N; i++) {
        for (size_t k = 0; k < N; k++) assert_true(after[i][k] < ROUNDS / 3);
    }
}

typedef struct fixture {
    cli_options o;
    prof_rig r;
    mx_step_facts facts;
} fixture;

static void open_model(fixture *f, const char *model) {
    mx_err err = {0};
    *f = (fixture){.o = {.device = "cpu", .threads = 1, .kv_storage = "auto"}};
    mx_kv_spec spec;
    mx_model_info info;
    assert_int_equal(prof_rig_open(&f->r, &f->o, &err), MX_OK);
    if (prof_rig_load(&f->r, model, &err) != MX_OK) fail_msg("%s", err.msg);
    mx_model_get_info(f->r.model, &info);
    assert_int_equal(prof_rig_kv_spec(&f->r, &f->o, 64, 2, &spec, &err), MX_OK);
    int32_t vocab = (int32_t)info.hp->n_vocab;
    assert_int_equal(prof_rig_steps(&f->r, &spec, 2, 16, vocab, &err), MX_OK);
    assert_int_equal(prof_rig_skip(&f->r, 40, &err), MX_OK);
    assert_int_equal(prof_rig_place(&f->r, 2, 1, true, MX_PHASE_DECODE, &f->facts, &err), MX_OK);
}

static mx_status record_model(prof_rig *r, void *arg, mx_enc *e, mx_err *err) {
    (void)arg;
    return mx_model_record(r->model, e, r->kv, 41, MX_OUTPUT_SAMPLE, err);
}

// A step of f in buffers of so many ops; the caller closes it.
static void make_arm(fixture *f, prof_arm *a, int32_t ops, bool fuse, prof_record record,
                     void *arg) {
    *a = (prof_arm){0};
    mx_budget budgets[MX_PHASES];
    mx_err err = {0};
    prof_budgets_of(ops, 0, budgets);
    prof_arm_open(&f->r, a, budgets, fuse);
    if (prof_arm_record(&f->r, a, &f->facts, record, arg, &err) != MX_OK) fail_msg("%s", err.msg);
}

static uint64_t hash_of(fixture *f, prof_arm *a) {
    mx_err err = {0};
    a->hash = 0;
    assert_int_equal(prof_arm_hash(&f->r, a, &err), MX_OK);
    return a->hash;
}

static void budgets_change_counts_only(void **state) {
    (void)state;
    fixture f;
    open_model(&f, "synthetic:tiny-affine4");
    static const int32_t sizes[] = {0, 100, 12, 11};
    for (int fuse = 0; fuse < 2; fuse++) {
        prof_arm first;
        make_arm(&f, &first, 0, fuse, record_model, NULL);
        uint64_t want = hash_of(&f, &first);
        int32_t n = first.plan->n_ops;
        for (size_t i = 0; i < MX_COUNT(sizes); i++) {
            prof_arm a;
            make_arm(&f, &a, sizes[i], fuse, record_model, NULL);
            int32_t per = sizes[i] ? sizes[i] + 1 : n; // the rule is "more than"
            assert_int_equal(a.plan->n_ops, n);
            assert_int_equal(a.plan->n_segs, (n + per - 1) / per);
            assert_int_equal(a.plan->arena_bytes, first.plan->arena_bytes);
            assert_int_equal(hash_of(&f, &a), want);
            prof_arm_close(&a);
        }
        prof_arm_close(&first);
    }
    prof_rig_close(&f.r);
}

typedef struct labelled {
    mx_tensor table;
    int16_t label;
} labelled;

static mx_status record_labelled(prof_rig *r, void *arg, mx_enc *e, mx_err *err) {
    const labelled *l = arg;
    (void)r;
    (void)err;
    mx_enc_label(e, l->label, MX_ROLE_OTHER);
    mx_tid x = mx_nn_embed(e, &l->table, 1), y = x;
    for (int i = 0; i < 30; i++) y = mx_nn_add(e, y, x);
    return MX_OK;
}

// Arms of one encoder: plans of their own, cut as each wants it, with all temporaries in the same
// places of the same arena.
static void joined_arms_have_the_same_addresses(void **state) {
    (void)state;
    fixture f;
    open_model(&f, "synthetic:tiny-q8_0");
    labelled l = {0};
    float values[64 * 64] = {0};
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 64, .n_cols = 64, .data = values};
    mx_err err = {0};
    assert_int_equal(f.r.b->ops->upload(f.r.b, &l.table, &v, &err), MX_OK);
    prof_arm first, a[3];
    memset(a, 0, sizeof a);
    make_arm(&f, &first, 0, true, record_labelled, &l);
    for (int i = 0; i < 3; i++) {
        mx_budget budgets[MX_PHASES];
        l.label = (int16_t)(i + 1);
        prof_budgets_of(i ? 10 : 0, 0, budgets);
        prof_arm_join(&a[i], &first, budgets);
        if (prof_arm_record(&f.r, &a[i], &f.facts, record_labelled, &l, &err) != MX_OK) {
            fail_msg("%s", err.msg);
        }
        assert_ptr_equal(a[i].enc, first.enc);
        assert_ptr_not_equal(a[i].plan, i ? a[i - 1].plan : first.plan);
        assert_int_equal(a[i].plan->n_segs, i ? 3 : 1);
        assert_int_equal(a[i].plan->n_tensors, first.plan->n_tensors);
        for (int32_t t = 0; t < first.plan->n_tensors; t++) {
            assert_int_equal(a[i].plan->tensors[t].offset, first.plan->tensors[t].offset);
        }
    }
    mx_enc_stats s;
    mx_enc_get_stats(first.enc, &s);
    assert_int_equal(s.plans_made, 4); // and none was dropped for another
    assert_int_equal(s.plan_evictions, 0);
    for (int i = 0; i < 3; i++) prof_arm_close(&a[i]);
    prof_arm_close(&first);
    f.r.b->ops->free(f.r.b, l.table.buf);
    prof_rig_close(&f.r);
}

static void check_part(fixture *f, const prof_list *list, const prof_arm *base, prof_part part) {
    prof_cost cost = prof_part_cost(base->plan, part, -1, &f->facts);
    for (int32_t k = 1; k <= 2 && cost.n_ops > 0; k++) {
        prof_repeat p = {.list = list, .part = part, .kind = -1, .k = k, .of = 2};
        prof_arm a;
        make_arm(f, &a, 0, true, prof_repeat_record, &p);
        assert_int_equal(p.n_extra, k * p.n_runs);
        int32_t more = part == PROF_NORM ? p.n_extra : k * cost.n_ops;
        assert_int_equal(a.plan->n_ops, base->plan->n_ops + more);
        if (part == PROF_ATTENTION || part == PROF_MLP) assert_int_equal(p.n_runs, 4);
        if (part == PROF_HEAD || part == PROF_SAMPLE) assert_int_equal(p.n_runs, 1);
        assert_int_equal(hash_of(f, &a), base->hash);
        prof_arm_close(&a);
    }
}

static void repeats_do_not_change_the_step(void **state) {
    (void)state;
    fixture f;
    open_model(&f, "synthetic:tiny-q8_0");
    for (int fuse = 0; fuse < 2; fuse++) {
        prof_arm base;
        make_arm(&f, &base, 0, fuse, record_model, NULL);
        hash_of(&f, &base);
        prof_list list;
        prof_list_copy(&list, base.plan);
        for (int p = 0; p < PROF_PARTS; p++) check_part(&f, &list, &base, (prof_part)p);
        prof_repeat deeper = {
            .list = &list, .part = PROF_MLP, .kind = -1, .k = 3, .of = 3, .live = true};
        prof_arm a;
        make_arm(&f, &a, 0, fuse, prof_repeat_record, &deeper);
        assert_int_not_equal(hash_of(&f, &a), base.hash); // here the repeats count
        prof_arm_close(&a);
        prof_list_free(&list);
        prof_arm_close(&base);
    }
    prof_rig_close(&f.r);
}

static void costs_add_up(void **state) {
    (void)state;
    fixture f;
    open_model(&f, "synthetic:tiny-bf16");
    prof_arm base;
    make_arm(&f, &base, 0, true, record_model, NULL);
    int32_t n = 0;
    double bytes = 0, all = 0;
    for (int p = 0; p < PROF_NORM; p++) {
        prof_cost c = prof_part_cost(base.plan, (prof_part)p, -1, &f.facts);
        n += c.n_ops;
        bytes += c.read_bytes;
    }
    for (int32_t i = 0; i < base.plan->n_ops; i++) {
        all += mx_op_cost(&base.plan->ops[i], base.plan->tensors, &f.facts).read_bytes;
    }
    assert_int_equal(n, base.plan->n_ops);
    assert_true(fabs(bytes - all) < 1);
    prof_arm_close(&base);
    prof_rig_close(&f.r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slopes_come_from_times),
        cmocka_unit_test(differences_are_paired),
        cmocka_unit_test(null_arms_say_what_a_difference_must_exceed),
        cmocka_unit_test(orders_are_random),
        cmocka_unit_test(budgets_change_counts_only),
        cmocka_unit_test(joined_arms_have_the_same_addresses),
        cmocka_unit_test(repeats_do_not_change_the_step),
        cmocka_unit_test(costs_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
