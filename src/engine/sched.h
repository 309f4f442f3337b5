// What runs in the next step: a pure function of the scheduler's state.
#ifndef MX_ENGINE_SCHED_H
#define MX_ENGINE_SCHED_H

#include <stdbool.h>
#include <stdint.h>

typedef enum sched_phase {
    SCHED_WAITING,    // not admitted: holds no memory
    SCHED_PREFILLING, // admitted; more than one token to run before it can decode
    SCHED_DECODING    // admitted; exactly one token to run
} sched_phase;

typedef struct sched_seq {
    sched_phase phase;
    int32_t n_left;     // tokens still to run (prompt, or recompute after preemption)
    int32_t n_past;     // tokens whose state exists
    int32_t priority;   // 0 low, 1 normal, 2 high
    uint64_t arrival;   // ticket number: lower came first
    int64_t wait_ticks; // steps spent waiting, for ageing
    bool held;          // waiting for another of its request: not to be admitted yet
    int32_t max_chunk; // at most this many of its tokens in one step (score requests), 0 = no limit
} sched_seq;

// What a prefill step is expected to take: fixed_s, token_s for each of its tokens, pair_s for each
// token and position before its chunk that it looks at. Zeros: not known.
typedef struct sched_cost {
    double fixed_s, token_s, pair_s;
} sched_cost;

typedef struct sched_config {
    int32_t max_batch;     // admitted sequences at once
    int32_t prefill_chunk; // prompt tokens in one step, all sequences together
    int32_t
        grant_interval; // decode steps between prefill steps while sequences decode; 0 = every step
    bool mixed;         // every step prefills, beside its decode rows; no interval
    int32_t ageing_ticks; // waiting this long raises the priority by one
    int32_t max_rows;     // of a step
    sched_cost cost;      // with step_s: chunks far into a prompt are smaller, in multiples of 16,
    double step_s;        // so that a step takes no longer than this; 0 = no limit
} sched_config;

typedef struct sched_state {
    const sched_seq *seqs;
    int32_t n_seqs;
    int32_t decode_ticks;   // decode-only steps since the last prefill
    int64_t free_positions; // positions that the state's pool can still take
    int32_t page_tokens;
} sched_state;

// Rows of the next step: n_tok[i] tokens of sequence i (0 = not in it). admit[i]: a waiting
// sequence enters (its n_tok may be 0 when the chunk is used up). preempt: index of a sequence to
// put back because decoding rows need memory, or -1. The caller applies preempt and asks again.
typedef struct sched_decision {
    int32_t n_rows, n_prefill_rows, n_decode_rows;
    int32_t preempt;
} sched_decision;

// Tokens of one sequence, n_past positions in, that fit into left_s seconds.
int32_t sched_chunk_fit(const sched_cost *c, double left_s, int32_t n_past);
double sched_chunk_s(const sched_cost *c, int32_t n_tok, int32_t n_past); // without fixed_s

sched_decision sched_decide(const sched_config *c, const sched_state *s, int32_t *n_tok,
                            uint8_t *admit);

#endif
