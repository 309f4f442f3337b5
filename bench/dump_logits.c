// Writes the logits of every position of a token file, teacher-forced: for comparisons of
// distributions (bench/kl.py). Usage: dump_logits MODEL IDS.txt OUT.f32 ; one line of ids.
// Built by hand: see bench/README.md.
#include "backend/cpu/cpu.h"
#include "backend/encoder.h"
#include "base/knobs.h"
#include "base/mem.h"
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>

static int32_t read_ids(const char *path, int32_t *ids, int32_t cap) {
    FILE *f = fopen(path, "r");
    int32_t n = 0;
    while (f && n < cap && fscanf(f, "%d", &ids[n]) == 1) n++;
    if (f) fclose(f);
    return n;
}

static void must(mx_status st, const mx_err *err) {
    if (st == MX_OK) return;
    fprintf(stderr, "dump_logits: %s\n", err->msg);
    abort();
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: dump_logits MODEL IDS.txt OUT.f32\n");
        return 2;
    }
    enum { CAP = 4096 };
    static int32_t ids[CAP];
    int32_t n = read_ids(argv[2], ids, CAP);
    mx_err err = {0};
    mx_weights w;
    mx_backend *b;
    mx_model *m;
    mx_kv *kv;
    mx_step_io io[MX_STEP_SLOTS];
    must(mx_weights_open(&w, argv[1], &err), &err);
    must(mx_cpu_open(0, &b, &err), &err);
    must(mx_model_open(&m, b, &w, false, &err), &err);
    mx_model_info info;
    mx_model_get_info(m, &info);
    mx_kv_spec spec = {.page_tokens = 32, .max_ctx = n, .max_seqs = 1, .max_chunk = n};
    mx_model_kv_groups(m, mx_knob_flag(MX_KNOB_EXACT) ? MX_F32 : MX_F16, &spec);
    must(mx_kv_open(&kv, b, &spec, &err), &err);
    mx_step_caps caps = {
        .max_tok = n, .max_range = 1, .max_out = n, .n_vocab = (int32_t)info.hp->n_vocab};
    mx_kv_caps(kv, &caps);
    must(b->ops->step_init(b, &caps, io, &err), &err);
    mx_budget_input in = {.device = MX_DEVICE_CPU};
    mx_budget budget[MX_PHASES];
    mx_budget_choose(&in, budget);
    mx_enc *e = mx_enc_open(b, budget, 4, true);
    int32_t seq = mx_kv_seq_open(kv);
    must(mx_kv_reserve(kv, seq, n, &err), &err);
    mx_step_range r = {.seq = seq, .n_tok = n, .phase = MX_PHASE_PREFILL};
    mx_kv_fill(kv, seq, &r, 0, &caps, &io[0]);
    for (int32_t i = 0; i < n; i++) {
        io[0].ids[i] = ids[i];
        io[0].pos[i] = io[0].out_tok[i] = i;
        io[0].tok_range[i] = 0;
        io[0].sample[i] = (mx_sample_row){.host = 1};
    }
    io[0].range_first[0] = io[0].range_pos0[0] = 0;
    io[0].range_first[1] = io[0].range_len[0] = n;
    io[0].counts[0] = io[0].counts[2] = n;
    io[0].counts[1] = 1;
    mx_step_facts facts = {.phase = MX_PHASE_PREFILL,
                           .n_tok = n,
                           .n_rows = n,
                           .n_out = n,
                           .n_ranges = 1,
                           .ranges = &r};
    mx_plan *plan;
    mx_ticket t;
    bool done;
    mx_run_stats run;
    mx_enc_begin(e, &facts);
    must(mx_model_record(m, e, kv, n, MX_OUTPUT_LOGITS, &err), &err);
    must(mx_enc_end(e, &plan, &err), &err);
    must(mx_enc_submit(e, plan, 0, &t, &err), &err);
    must(b->ops->wait(b, t, true, true, &done, &run, &err), &err);
    FILE *f = fopen(argv[3], "wb");
    size_t count = (size_t)n * (size_t)caps.n_vocab;
    if (!f || fwrite(io[0].logits, sizeof(float), count, f) != count || fclose(f) != 0) abort();
    return 0;
}
