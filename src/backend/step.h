// One forward pass: its rows, and the fixed buffers through which everything that changes from step
// to step reaches the kernels.
#ifndef MX_BACKEND_STEP_H
#define MX_BACKEND_STEP_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

// Command-buffer phases (design: budgets are chosen by phase).
typedef enum mx_phase {
    MX_PHASE_PREFILL,
    MX_PHASE_DECODE,      // pipelined: the next step is submitted before the last token is read
    MX_PHASE_DECODE_SYNC, // penalties, masks, logprobs: the host reads before it submits
    MX_PHASES
} mx_phase;
const char *mx_phase_name(mx_phase p);

enum { MX_MAX_KV_GROUPS = 4 };

// Limits of every step of an engine, fixed when it is opened. They size the step buffers.
typedef struct mx_step_caps {
    int32_t max_tok;   // rows of one step
    int32_t max_range; // sequences in one step
    int32_t max_out;   // rows whose logits are computed
    int32_t max_edits; // changes of logits, of all rows together
    int32_t n_vocab;
    int32_t n_groups; // layer groups of the sequence state
    int32_t page_tokens[MX_MAX_KV_GROUPS];
    int32_t max_pages[MX_MAX_KV_GROUPS]; // of one sequence
} mx_step_caps;

// Rows [first, first + n_tok) of a step belong to one sequence; the first has position pos0.
// Rows of a step may differ in phase: prefill chunks and decode rows can share one.
typedef struct mx_step_range {
    int32_t seq; // the caller's handle; not read by backends
    int32_t first, n_tok, pos0;
    mx_phase phase;
} mx_step_range;

// Sampling of one output row on the device, as the host's sampler does it. A row with host = 1 is
// left alone by SAMPLE: the host reads its logits. CPU: greedy rows without edits only.
typedef struct mx_sample_row {
    float temperature, top_p, min_p; // temperature 0 = greedy
    int32_t top_k;                   // 0 = off
    uint64_t seed;
    uint32_t choice, pos; // counter of the random number: (seed, choice, pos)
    int32_t host;
    int32_t first_edit, n_edits;                               // of the step's edits; each id once
    float repeat_penalty, presence_penalty, frequency_penalty; // of the edits
} mx_sample_row;

// A logit that is changed before the row is sampled, in this order: bias is added (-inf: banned);
// repeated: divided by the row's repeat_penalty when positive, else multiplied; count > 0: minus
// frequency_penalty * count minus presence_penalty. The device's logits row is changed with it.
typedef struct mx_sample_edit {
    int32_t id;
    float bias;
    int32_t count, repeated;
} mx_sample_edit;

// Pointers into one step block (host or device: the same layout, see mx_step_layout).
typedef struct mx_step_io {
    // inputs, one contiguous region
    int32_t *ids;          // (max_tok) token; -1 - k: the token sampled for output row k of the
                           // step before (known to the device only)
    int32_t *pos;          // (max_tok) absolute position; 0 in padding rows
    int32_t *tok_range;    // (max_tok) range of the row; -1 in padding rows
    int32_t *range_first;  // (max_range + 1) first row of each range; last = true number of rows
    int32_t *range_pos0;   // (max_range)
    int32_t *range_len;    // (max_range) positions visible after this step = pos0 + n_tok
    int32_t *out_tok;      // (max_out) row of each output
    mx_sample_row *sample; // (max_out)
    int32_t *kv_slot[MX_MAX_KV_GROUPS]; // (max_tok) page * page_tokens + offset; -1 = do not write
    int32_t *page_table[MX_MAX_KV_GROUPS]; // (max_range, max_pages[g]) page of logical page
                                           // pos / page_tokens; -1 = dropped (behind the window)
    int32_t *counts; // [0] rows, [1] ranges, [2] outputs, [3] edits: true numbers of this step
    mx_sample_edit *edits; // (max_edits) of all rows; what lies past counts[3] need not be copied
    // results, one contiguous region
    int32_t *out_id;    // (max_out)
    float *out_logprob; // (max_out) of the sampled token, after edits, before temperature; NaN: no
                        // finite logit
    float *logits;      // (max_out, n_vocab)
} mx_step_io;

typedef struct mx_step_layout {
    size_t input_bytes;   // of the input region, from offset 0
    size_t edits_offset;  // in it; the edits are the last of it
    size_t result_offset; // start of the result region
    size_t logits_offset;
    size_t total_bytes;
} mx_step_layout;

// Computes the layout and, when io is given, binds its pointers to base. Every array is 64-byte
// aligned in the block.
mx_step_layout mx_step_bind(const mx_step_caps *caps, void *base, mx_step_io *io);

// The host's knowledge of one step: for costs, budgets, thread splits. Never enters a plan's key.
typedef struct mx_step_facts {
    mx_phase phase; // of the step: PREFILL when any range prefills
    int32_t n_tok;  // true rows
    int32_t n_rows; // rows the plan is recorded for (>= n_tok; a bucket on some backends)
    int32_t n_out;
    int32_t n_ranges;
    const mx_step_range *ranges; // (n_ranges)
} mx_step_facts;

// No sequence has more than one row: what a row sees beside itself is from earlier steps.
bool mx_step_one_row(const mx_step_facts *f);

#endif
