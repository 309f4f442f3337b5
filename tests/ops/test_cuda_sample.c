// Sampling on the GPU against the host's sampler: the same token for the same row, settings,
// history and seed. Without a GPU the program says why and passes.
#include "support/cuda_rig.h"
#include "support/sample_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { ROWS = 4, MAX_VOCAB = 128256 };

static rig device;
static bool have;

static int open_rig(void **state) {
    (void)state;
    have = cuda_rigs_open(&device, 1, false, false, 64);
    return 0;
}

static int close_rig(void **state) {
    (void)state;
    if (have) rig_close(&device);
    return 0;
}

// One step of ROWS cases; ids they give on the device.
static void run_cases(sample_case *c, mx_sampler *s, const float *rows, int32_t *ids) {
    rig *r = &device;
    int32_t seq = 0, pos = 0, n = ROWS, used = 0;
    mx_step_io *io = &r->io[r->slot];
    const mx_tensor *x = rig_tensor(r, ROWS, c[0].n_vocab, rows);
    rig_begin(r, 1, &seq, &pos, &n, ROWS, 1);
    for (int i = 0; i < ROWS; i++) {
        mx_sample_plan plan;
        assert_true(mx_sample_on_device(s, &c[i].p, &c[i].h, io->edits + used, RIG_MAX_EDITS - used,
                                        &plan));
        io->sample[i] = plan.row;
        io->sample[i].first_edit = used;
        used += plan.n_edits;
    }
    io->counts[3] = used;
    rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &x, 0, NULL);
    rig_run(r);
    for (int i = 0; i < ROWS; i++) ids[i] = io->out_id[i];
    rig_reset(r);
}

static int compare(int32_t n_vocab, uint32_t first, int n_steps) {
    static sample_case c[ROWS];
    mx_sampler *s = mx_sampler_open(n_vocab);
    float *rows = mx_alloc(sizeof *rows * (size_t)(ROWS * n_vocab));
    int wrong = 0;
    for (int k = 0; k < n_steps; k++) {
        int32_t ids[ROWS];
        for (int i = 0; i < ROWS; i++) {
            sample_case_make(&c[i], first + (uint32_t)(k * ROWS + i), n_vocab);
            sample_case_row(&c[i], rows + (int64_t)i * n_vocab);
        }
        run_cases(c, s, rows, ids);
        for (int i = 0; i < ROWS; i++) {
            mx_err e = {0};
            int32_t want = -1;
            mx_status st = mx_sample(s, &c[i].p, &c[i].h, rows + (int64_t)i * n_vocab, &want, &e);
            if (st != MX_OK || ids[i] == want) continue; // every token banned: any id
            wrong++;
            print_message("vocabulary %d, case %u: %d, host %d; temperature %g top_k %d top_p %g "
                          "min_p %g\n",
                          n_vocab, c[i].salt, ids[i], want, (double)c[i].p.temperature,
                          c[i].p.top_k, (double)c[i].p.top_p, (double)c[i].p.min_p);
        }
    }
    mx_free(rows);
    mx_sampler_close(s);
    return wrong;
}

static void tokens_are_the_hosts(void **state) {
    (void)state;
    if (!have) skip();
    static const int32_t vocabs[] = {2, 7, 31, 257, 2048, 2049, 5000, 32000, MAX_VOCAB};
    int wrong = 0;
    for (size_t i = 0; i < MX_COUNT(vocabs); i++) {
        wrong += compare(vocabs[i], (uint32_t)(1000 * (i + 1)), vocabs[i] < 10000 ? 100 : 25);
    }
    if (wrong) fail_msg("%d tokens differ from the host's", wrong);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(tokens_are_the_hosts)};
    return cmocka_run_group_tests(tests, open_rig, close_rig);
}
