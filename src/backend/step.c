// The layout of a step block, shared by host and devices. No state.
#include "backend/step.h"

#include "backend/backend.h"

enum { ALIGN = 64 };

const char *mx_phase_name(mx_phase p) {
    static const char *const names[] = {"prefill", "decode", "decode-sync"};
    return (unsigned)p < MX_PHASES ? names[p] : "?";
}

// Reserves n elements of size bytes at the cursor and returns their address in base (or NULL).
static void *place(char *base, size_t *cursor, size_t n, size_t size) {
    void *p = base ? base + *cursor : NULL;
    *cursor += (n * size + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

mx_step_layout mx_step_bind(const mx_step_caps *caps, void *base, mx_step_io *io) {
    CHECK(caps->n_groups >= 0 && caps->n_groups <= MX_MAX_KV_GROUPS);
    size_t tok = (size_t)caps->max_tok, range = (size_t)caps->max_range,
           out = (size_t)caps->max_out;
    mx_step_io s = {0};
    mx_step_layout l = {0};
    size_t at = 0;
    s.counts = place(base, &at, 4, sizeof(int32_t));
    s.ids = place(base, &at, tok, sizeof(int32_t));
    s.pos = place(base, &at, tok, sizeof(int32_t));
    s.tok_range = place(base, &at, tok, sizeof(int32_t));
    s.range_first = place(base, &at, range + 1, sizeof(int32_t));
    s.range_pos0 = place(base, &at, range, sizeof(int32_t));
    s.range_len = place(base, &at, range, sizeof(int32_t));
    s.out_tok = place(base, &at, out, sizeof(int32_t));
    s.sample = place(base, &at, out, sizeof(mx_sample_row));
    for (int g = 0; g < caps->n_groups; g++) {
        s.kv_slot[g] = place(base, &at, tok, sizeof(int32_t));
        s.page_table[g] = place(base, &at, range * (size_t)caps->max_pages[g], sizeof(int32_t));
    }
    l.edits_offset = at;
    s.edits = place(base, &at, (size_t)caps->max_edits, sizeof(mx_sample_edit));
    l.input_bytes = at;
    l.result_offset = at;
    s.out_id = place(base, &at, out, sizeof(int32_t));
    s.out_logprob = place(base, &at, out, sizeof(float));
    l.logits_offset = at;
    s.logits = place(base, &at, out * (size_t)caps->n_vocab, sizeof(float));
    l.total_bytes = at;
    if (io) *io = s;
    return l;
}

int32_t mx_row_bucket(const mx_backend_facts *facts, int32_t n) {
    if (!facts->bucket_rows || n <= 8) return n;
    if (n > 64) return (n + 127) / 128 * 128;
    int32_t b = 16;
    while (b < n) b *= 2;
    return b;
}

bool mx_step_one_row(const mx_step_facts *f) {
    for (int32_t i = 0; i < f->n_ranges; i++) {
        if (f->ranges[i].n_tok > 1) return false;
    }
    return true;
}

int32_t mx_ctx_bucket(int32_t n) {
    int32_t b = 256;
    while (b < n && b < (1 << 30)) b *= 2;
    return b;
}
