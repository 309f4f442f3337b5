// The scheduling rule. Pure: no clock, no memory, no randomness.
//
// A chunk has at most prefill_chunk tokens, and with a cost model no more than fit into step_s: far
// into a prompt a token costs more, and the chunk is shorter, down to 16 tokens.
//
// Decode first: every decoding sequence gets its row in every step that decodes. Prompts run in
// chunks: with nothing decoding, at once; else in a step of their own after grant_interval decode
// steps, or (mixed) in every step, beside the decode rows, whose time the chunk then leaves them.
// Waiting sequences are admitted by priority, which rises with waiting, then by arrival; one that
// does not fit blocks those behind it, so that it is not starved by smaller ones.
#include "engine/sched.h"

#include "base/mem.h"

static int64_t pages(int64_t positions, int32_t page_tokens) {
    return (positions + page_tokens - 1) / page_tokens;
}

// New positions that running n tokens takes from the pool, in whole pages.
static int64_t positions_needed(const sched_state *s, const sched_seq *q, int32_t n) {
    int64_t before = pages(q->n_past, s->page_tokens), after = pages(q->n_past + n, s->page_tokens);
    return (after - before) * s->page_tokens;
}

static int64_t effective_priority(const sched_config *c, const sched_seq *q) {
    int64_t age = c->ageing_ticks > 0 ? q->wait_ticks / c->ageing_ticks : 0;
    return q->priority + age;
}

// The waiting sequence to admit next, or -1.
static int32_t first_waiting(const sched_config *c, const sched_state *s, const uint8_t *admit) {
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        const sched_seq *q = &s->seqs[i];
        if (q->phase != SCHED_WAITING || q->held || admit[i]) continue;
        if (best < 0) {
            best = i;
            continue;
        }
        int64_t a = effective_priority(c, q), b = effective_priority(c, &s->seqs[best]);
        if (a > b || (a == b && q->arrival < s->seqs[best].arrival)) best = i;
    }
    return best;
}

static int32_t last_arrived(const sched_state *s) {
    int32_t last = -1;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        if (s->seqs[i].phase == SCHED_WAITING) continue;
        if (last < 0 || s->seqs[i].arrival > s->seqs[last].arrival) last = i;
    }
    return last;
}

enum { CHUNK_UNIT = 16 }; // smallest chunk with a cost model, and what chunks are multiples of

double sched_chunk_s(const sched_cost *c, int32_t n_tok, int32_t n_past) {
    return n_tok * (c->token_s + n_past * c->pair_s);
}

int32_t sched_chunk_fit(const sched_cost *c, double left_s, int32_t n_past) {
    double one = sched_chunk_s(c, 1, n_past);
    if (one <= 0 || left_s / one >= INT32_MAX) return INT32_MAX;
    return left_s > 0 ? (int32_t)(left_s / one) : 0;
}

typedef struct picker {
    const sched_config *c;
    const sched_state *s;
    sched_decision d;
    int64_t free;
    double left_s; // of the step's time
    int32_t n_admitted;
    int32_t *n_tok;
    uint8_t *admit;
} picker;

// Decode rows; false when memory is short and somebody must be put back.
static bool pick_decodes(picker *p) {
    for (int32_t i = 0; i < p->s->n_seqs; i++) {
        const sched_seq *q = &p->s->seqs[i];
        if (q->phase != SCHED_DECODING) continue;
        int64_t need = positions_needed(p->s, q, 1);
        if (need > p->free) {
            int32_t victim = last_arrived(p->s);
            p->d.preempt = victim;
            return false;
        }
        p->free -= need;
        p->left_s -= sched_chunk_s(&p->c->cost, 1, q->n_past);
        p->n_tok[i] = 1;
        p->d.n_decode_rows++;
    }
    return true;
}

// Gives sequence i a piece of the chunk; returns the tokens taken.
static int32_t pick_chunk(picker *p, int32_t i, int32_t room) {
    const sched_seq *q = &p->s->seqs[i];
    int32_t n = MX_MIN(q->n_left, room);
    if (q->max_chunk > 0) n = MX_MIN(n, q->max_chunk);
    if (p->c->step_s > 0) {
        int32_t fit = sched_chunk_fit(&p->c->cost, p->left_s, q->n_past) / CHUNK_UNIT * CHUNK_UNIT;
        bool first = p->d.n_prefill_rows == 0; // a step that prefills takes something
        n = MX_MIN(n, first ? MX_MAX(fit, CHUNK_UNIT) : fit);
    }
    while (n > 0 && positions_needed(p->s, q, n) > p->free) n--;
    if (n <= 0) return 0;
    p->free -= positions_needed(p->s, q, n);
    p->n_tok[i] = n;
    p->d.n_prefill_rows += n;
    p->left_s -= sched_chunk_s(&p->c->cost, n, q->n_past);
    return n;
}

static void pick_prefills(picker *p) {
    int32_t room = MX_MIN(p->c->prefill_chunk, p->c->max_rows - p->d.n_decode_rows);
    for (;;) { // those already begun, oldest first
        int32_t next = -1;
        for (int32_t i = 0; i < p->s->n_seqs; i++) {
            const sched_seq *q = &p->s->seqs[i];
            if (q->phase != SCHED_PREFILLING || p->n_tok[i] > 0) continue;
            if (next < 0 || q->arrival < p->s->seqs[next].arrival) next = i;
        }
        if (next < 0 || room <= 0) break;
        int32_t n = pick_chunk(p, next, room);
        if (n == 0) return; // no memory or no time: nothing younger goes ahead of it
        room -= n;
    }
    while (room > 0 && p->n_admitted < p->c->max_batch) {
        int32_t i = first_waiting(p->c, p->s, p->admit);
        if (i < 0) break;
        // it enters only when its whole need fits beside what runs, or when nothing runs
        const sched_seq *q = &p->s->seqs[i];
        if (p->n_admitted > 0 && positions_needed(p->s, q, q->n_left + 1) > p->free) break;
        p->admit[i] = 1;
        p->n_admitted++;
        int32_t n = pick_chunk(p, i, room);
        if (n == 0) break;
        room -= n;
    }
}

sched_decision sched_decide(const sched_config *c, const sched_state *s, int32_t *n_tok,
                            uint8_t *admit) {
    picker p = {.c = c, .s = s, .free = s->free_positions, .n_tok = n_tok, .admit = admit};
    p.d.preempt = -1;
    p.left_s = c->step_s - c->cost.fixed_s;
    bool decoding = false, want_prefill = false;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        n_tok[i] = 0;
        admit[i] = 0;
        decoding |= s->seqs[i].phase == SCHED_DECODING;
        want_prefill |= s->seqs[i].phase != SCHED_DECODING && !s->seqs[i].held;
        p.n_admitted += s->seqs[i].phase != SCHED_WAITING;
    }
    bool granted = want_prefill && (!decoding || s->decode_ticks >= c->grant_interval);
    if (decoding && (c->mixed || !granted) && !pick_decodes(&p)) return p.d;
    if (granted || (want_prefill && c->mixed)) pick_prefills(&p);
    if (decoding && p.d.n_prefill_rows == 0 && p.d.n_decode_rows == 0 && !pick_decodes(&p)) {
        return p.d;
    }
    p.d.n_rows = p.d.n_prefill_rows + p.d.n_decode_rows;
    if (p.d.n_rows == 0 && p.n_admitted > 1) p.d.preempt = last_arrived(s); // memory deadlock
    return p.d;
}
