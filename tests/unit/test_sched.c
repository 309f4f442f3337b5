// The scheduling rule on hand-made states.
#include "engine/sched.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { N = 8 };

static int32_t n_tok[N];
static uint8_t admit[N];
static const sched_config config = {.max_batch = 4,
                                    .prefill_chunk = 512,
                                    .grant_interval = 16,
                                    .ageing_ticks = 10,
                                    .max_rows = 516};

static sched_decision ask(const sched_config *c, const sched_seq *seqs, int32_t n, int32_t ticks,
                          int64_t free_positions) {
    sched_state s = {seqs, n, ticks, free_positions, 32};
    return sched_decide(c, &s, n_tok, admit);
}

static sched_seq waiting(int32_t n, uint64_t arrival) {
    return (sched_seq){.phase = SCHED_WAITING, .n_left = n, .priority = 1, .arrival = arrival};
}

static sched_seq decoding(int32_t past, uint64_t arrival) {
    return (sched_seq){
        .phase = SCHED_DECODING, .n_left = 1, .n_past = past, .priority = 1, .arrival = arrival};
}

static void an_idle_engine_has_no_rows(void **state) {
    (void)state;
    sched_decision d = ask(&config, NULL, 0, 0, 1000);
    assert_int_equal(d.n_rows, 0);
    assert_int_equal(d.preempt, -1);
}

static void a_prompt_runs_in_chunks_when_nothing_decodes(void **state) {
    (void)state;
    sched_seq q[] = {waiting(1000, 0)};
    sched_decision d = ask(&config, q, 1, 0, 8192);
    assert_int_equal(admit[0], 1);
    assert_int_equal(n_tok[0], 512);
    assert_int_equal(d.n_prefill_rows, 512);
}

static void short_prompts_share_a_chunk(void **state) {
    (void)state;
    sched_seq q[] = {waiting(100, 0), waiting(200, 1), waiting(300, 2)};
    ask(&config, q, 3, 0, 8192);
    assert_int_equal(n_tok[0], 100);
    assert_int_equal(n_tok[1], 200);
    assert_int_equal(n_tok[2], 212);
}

static void decodes_go_first_until_the_grant(void **state) {
    (void)state;
    sched_seq q[] = {decoding(40, 0), waiting(1000, 1)};
    sched_decision d = ask(&config, q, 2, 15, 8192);
    assert_int_equal(d.n_decode_rows, 1);
    assert_int_equal(d.n_prefill_rows, 0);
    assert_int_equal(admit[1], 0);
    d = ask(&config, q, 2, 16, 8192);
    assert_int_equal(d.n_decode_rows, 0);
    assert_int_equal(d.n_prefill_rows, 512);
}

static void a_mixed_step_holds_both(void **state) {
    (void)state;
    sched_config c = config;
    c.mixed = true;
    sched_seq q[] = {decoding(40, 0), waiting(1000, 1)};
    sched_decision d = ask(&c, q, 2, 0, 8192); // without an interval
    assert_int_equal(d.n_decode_rows, 1);
    assert_int_equal(d.n_prefill_rows, 512);
    assert_int_equal(d.n_rows, 513);
    // the chunk leaves the decode row its time
    c.cost = (sched_cost){.token_s = 0.001, .pair_s = 0.0004};
    c.step_s = 0.1;
    d = ask(&c, q, 2, 0, 8192); // 17 ms for the row, 83 for the chunk
    assert_int_equal(d.n_prefill_rows, 80);
}

static void priority_then_arrival_and_waiting_raises_it(void **state) {
    (void)state;
    sched_config c = config;
    c.max_batch = 1;
    sched_seq q[] = {waiting(10, 0), waiting(10, 1), waiting(10, 2)};
    q[2].priority = 2;
    ask(&c, q, 3, 0, 8192);
    assert_int_equal(admit[2], 1);
    assert_int_equal(admit[0], 0);
    q[0].priority = 0;
    q[0].wait_ticks = 30; // low, but three steps older than high
    ask(&c, q, 3, 0, 8192);
    assert_int_equal(admit[0], 1);
}

static void the_batch_is_bounded(void **state) {
    (void)state;
    sched_seq q[6];
    for (uint64_t i = 0; i < 6; i++) q[i] = waiting(10, i);
    ask(&config, q, 6, 0, 8192);
    int n = 0;
    for (int i = 0; i < 6; i++) n += admit[i];
    assert_int_equal(n, 4);
}

static void what_does_not_fit_waits_and_is_not_overtaken(void **state) {
    (void)state;
    sched_config c = config;
    c.grant_interval = 0;
    sched_seq q[] = {decoding(40, 0), waiting(400, 1), waiting(10, 2)};
    sched_decision d = ask(&c, q, 3, 0, 256);
    assert_int_equal(admit[1], 0);
    assert_int_equal(admit[2], 0);
    assert_int_equal(d.n_decode_rows, 1);
}

static void without_memory_the_last_arrival_is_put_back(void **state) {
    (void)state;
    sched_seq q[] = {decoding(64, 5), decoding(64, 9), decoding(33, 7)};
    sched_decision d = ask(&config, q, 3, 0, 32); // two need a page, one is free
    assert_int_equal(d.preempt, 1);
}

static void every_prompt_ends_within_its_bound(void **state) {
    (void)state;
    // C chunks beside decodes end within C * (interval + 1) steps
    sched_seq q[] = {decoding(40, 0), waiting(512 * 3, 1)};
    int32_t ticks = 0, steps = 0;
    while (q[1].n_left > 0) {
        sched_decision d = ask(&config, q, 2, ticks, 1 << 20);
        ticks = d.n_prefill_rows ? 0 : ticks + 1;
        q[1].n_left -= n_tok[1];
        q[1].n_past += n_tok[1];
        if (admit[1]) q[1].phase = SCHED_PREFILLING;
        steps++;
        assert_true(steps <= 3 * 17);
    }
}

// With a cost model a chunk shrinks with its depth, so that every step keeps to its time.
static void a_chunk_far_into_a_prompt_is_shorter(void **state) {
    (void)state;
    sched_config c = config;
    c.cost = (sched_cost){.fixed_s = 0.004, .token_s = 0.0003, .pair_s = 1e-7};
    c.step_s = 0.1;
    c.prefill_chunk = 320; // what takes 0.1 s at the beginning
    sched_seq q[] = {waiting(8000, 0)};
    int32_t last = INT32_MAX;
    while (q[0].n_left > 0) {
        ask(&c, q, 1, 0, 1 << 20);
        double s = c.cost.fixed_s + sched_chunk_s(&c.cost, n_tok[0], q[0].n_past);
        assert_true(n_tok[0] >= 16 || n_tok[0] == q[0].n_left);
        assert_true(s <= c.step_s || n_tok[0] == 16);
        assert_true(n_tok[0] <= last);
        if (q[0].n_past == 0) assert_int_equal(n_tok[0], 320);
        last = n_tok[0];
        q[0].n_left -= n_tok[0];
        q[0].n_past += n_tok[0];
        q[0].phase = SCHED_PREFILLING;
    }
    assert_true(last < 128);
}

static void prompts_share_the_time_of_a_step(void **state) {
    (void)state;
    sched_config c = config;
    c.cost = (sched_cost){.token_s = 0.001};
    c.step_s = 0.1;
    sched_seq q[] = {waiting(40, 0), waiting(40, 1), waiting(40, 2)};
    q[0].phase = SCHED_PREFILLING;
    sched_decision d = ask(&c, q, 3, 0, 1 << 20);
    assert_int_equal(d.n_prefill_rows, 40 + 40 + 16); // 20 ms are left, in units of 16
    assert_int_equal(n_tok[2], 16);
    c.cost.token_s = 1; // nothing fits: one chunk of the least size
    d = ask(&c, q, 3, 0, 1 << 20);
    assert_int_equal(d.n_prefill_rows, 16);
    assert_int_equal(n_tok[0], 16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_idle_engine_has_no_rows),
        cmocka_unit_test(a_prompt_runs_in_chunks_when_nothing_decodes),
        cmocka_unit_test(short_prompts_share_a_chunk),
        cmocka_unit_test(decodes_go_first_until_the_grant),
        cmocka_unit_test(a_mixed_step_holds_both),
        cmocka_unit_test(priority_then_arrival_and_waiting_raises_it),
        cmocka_unit_test(the_batch_is_bounded),
        cmocka_unit_test(what_does_not_fit_waits_and_is_not_overtaken),
        cmocka_unit_test(without_memory_the_last_arrival_is_put_back),
        cmocka_unit_test(every_prompt_ends_within_its_bound),
        cmocka_unit_test(a_chunk_far_into_a_prompt_is_shorter),
        cmocka_unit_test(prompts_share_the_time_of_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
