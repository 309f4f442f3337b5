// Inside the engine: requests, sequences, the thread that owns everything else.
#ifndef MX_ENGINE_INT_H
#define MX_ENGINE_INT_H

#include "backend/encoder.h"
#include "engine/sched.h"
#include "engine/stop.h"
#include "kv/kv.h"
#include "kv/prefix.h"
#include "mlxcel.h"
#include "model/model.h"
#include "sample/sample.h"
#include "text/chat.h"
#include "text/tokenizer.h"

#include <pthread.h>

// One queued event; owns its arrays. Text and tokens of events that were not read yet are merged.
typedef struct event_node {
    struct event_node *next;
    mlxcel_event ev;
    mx_buf text;
    mlxcel_token *tokens;
    mlxcel_top_logprob *tops; // n_tokens x n_top
    size_t cap_tokens;
} event_node;

// One choice of a request: a sequence. Engine thread only.
typedef struct eng_seq {
    mlxcel_request *req;
    int32_t choice;
    sched_phase phase;
    bool finished;
    int32_t kv;      // sequence id in the pool, -1
    int32_t *tokens; // prompt and generated; sized for the whole life at admission
    int32_t n_tokens, cap_tokens, n_prompt, n_past;
    int32_t n_score; // score requests: rows already reported
    int64_t wait_ticks;
    uint64_t arrival;
    mx_sampling sampling;
    mx_detok *detok;
    stop_matcher stop;
    mx_buf text; // scratch of one event
    uint64_t token_hash, logit_hash;
    int32_t out_row;  // output row in the present step, -1
    int32_t step_tok; // tokens in the present step
} eng_seq;

struct mlxcel_request {
    mlxcel_engine *engine;
    uint64_t id;
    // copies of the submitter's parameters
    mlxcel_request_params p;
    int32_t *ids;
    mx_logit_bias *bias;
    char **stops;
    // engine thread
    eng_seq *seqs;
    uint64_t salt;     // of the prefix index
    int32_t n_live;    // choices not finished
    bool started, led; // led: its other choices were let in
    mlxcel_timings t;
    double submitted_s, started_s, prefilled_s, first_s, deadline_s;
    mlxcel_finish first_finish;
    mx_err err;
    mlxcel_request *next; // in the mailbox or the engine's list
    // shared, under lock
    pthread_mutex_t lock;
    pthread_cond_t wake;
    event_node *head, *tail, *read; // read: the event handed out last
    bool done_read, cancelled, finished;
    int32_t refs; // submitter and engine
};

// A submitted step: its rows, until its tokens are read. Holds a reference to each request.
typedef struct flight_row {
    eng_seq *seq;
    mlxcel_request *req;
    int32_t n_tok, pos0;
    int32_t out_row, n_out; // n_out 0: no logits wanted
    bool host;              // the token is chosen on the host
    bool sync;              // how the next one is chosen depends on this one
    mx_sample_row sample;   // of its outputs
} flight_row;

typedef struct flight {
    bool open, decode_only;
    int32_t slot;
    mx_ticket ticket;
    flight_row *rows;
    int32_t n_rows, n_tok, n_out;
    double submitted_s;
} flight;

// How the size of a prefill step was chosen (chunk.c).
typedef struct chunk_rule {
    bool measure; // at load
    bool learn;   // from the steps of prompts
    sched_cost cost;
    double step_s, seconds; // of a step; of measuring
    const char *why;
    char text[160];
} chunk_rule;

struct mlxcel_engine {
    mlxcel_params params;
    char *model_path;
    // loaded once, read by all threads
    mx_weights weights;
    bool weights_open;
    mx_tokenizer *tok;
    mx_template *tmpl;
    int32_t *eos_ids;
    int32_t n_eos;
    mlxcel_sampling suggested; // its fields of suggested_bits are the checkpoint's
    uint32_t suggested_bits;
    // engine thread
    mx_backend *backend;
    mx_backend_facts facts;
    mx_model *model;
    mx_kv *kv;
    mx_prefix *prefix; // NULL: off
    mx_enc *enc;
    mx_sampler *sampler;
    mx_budget budgets[MX_PHASES];
    mx_step_caps caps;
    mx_step_io io[MX_STEP_SLOTS];
    flight flights[MX_STEP_SLOTS];
    bool pipeline;         // the next step may be submitted before the last token is read
    bool device_sampling;  // MLXCEL_DEVICE_SAMPLING
    mx_err gpu_declined;   // why a GPU that is there is not used; MX_OK: it is, or there is none
    bool storage_declined; // paged was asked for and is not there
    sched_config sched;
    chunk_rule chunk;
    int32_t decode_ticks;
    int32_t *row_tok; // scratch of the scheduler
    uint8_t *row_admit;
    sched_seq *row_seq;
    eng_seq **running; // every live sequence, waiting ones included
    int32_t n_running, cap_running;
    mx_step_range *ranges;
    int32_t *dry_breakers; // NULL until a request asks
    size_t n_dry_breakers;
    uint64_t arrivals, seed_state;
    uint64_t n_host_sampled; // tokens chosen on the host, the logits being elsewhere
    // shared, under lock
    pthread_mutex_t lock;
    pthread_cond_t wake, ready;
    mlxcel_request *mail_head, *mail_tail;
    mlxcel_request *requests; // taken in, not finished (engine thread's list; length below)
    int32_t n_open;           // submitted and not finished
    bool stop, is_ready, reset_cache;
    mx_err open_err;
    mlxcel_stats stats;
    mlxcel_info info;
    char *info_text[12];
    pthread_t thread;
    uint64_t next_id;
};

// open.c: loading, on the engine thread; fills info.
mx_status engine_load(mlxcel_engine *e, mx_err *err);
void engine_unload(mlxcel_engine *e);
mx_status engine_load_text(mlxcel_engine *e, mx_err *err); // tokenizer, template, end ids
// Sequence memory, encoder and step buffers; closed again by the other.
mx_status engine_open_steps(mlxcel_engine *e, const mx_kv_spec *spec, int32_t n_vocab, mx_err *err);
void engine_close_steps(mlxcel_engine *e);

// chunk.c: how many prompt tokens a step takes.
void chunk_choose(mlxcel_engine *e); // params.prefill_chunk: the number, or the most when measured
// Measures with real steps on memory of its own; params.prefill_chunk becomes the number.
mx_status chunk_measure(mlxcel_engine *e, const mx_kv_spec *spec, int32_t n_vocab, mx_err *err);
void chunk_learn(mlxcel_engine *e, int32_t n_tok, double dt); // after a step that only prefilled

// core.c: the thread.
void *engine_main(void *engine);
void request_fail(mlxcel_engine *e, mlxcel_request *r, const mx_err *err); // ends every choice

// step.c: one forward pass.
typedef struct step_pick { // what a sequence contributes
    eng_seq *seq;
    int32_t n_tok;
    int32_t from_row; // >= 0: its token is the one sampled for that output row of the step before
} step_pick;
// Builds, records and submits; the flight is open afterwards. Sequences' n_past already counts the
// step. On error nothing was submitted.
mx_status step_submit(mlxcel_engine *e, flight *f, const step_pick *picks, int32_t n, mx_err *err);
// Waits for the flight and hands out its tokens and scores.
// Whether the device works, from how its last step ended.
void step_note(mlxcel_engine *e, mx_status st);
mx_status step_finish(mlxcel_engine *e, flight *f, mx_err *err);

// request.c: events and lifetime. Called on the engine thread.
event_node *request_event(mlxcel_request *r, mlxcel_event_kind kind, int32_t choice);
void request_post(mlxcel_request *r, event_node *n); // queues and notifies
void request_release(mlxcel_request *r);             // drops one reference
void request_done(mlxcel_request *r);                // posts DONE, once
void engine_error_out(mlxcel_error *out, const mx_err *err);

// emit.c: from a sampled token to text events and finish. Engine thread.
mx_status seq_open(mlxcel_engine *e, mlxcel_request *r, int32_t choice, mx_err *err);
void seq_close(mlxcel_engine *e, eng_seq *s);
// Takes the token sampled after all of s->tokens ran. logits may be NULL when nothing needs them.
void seq_accept(mlxcel_engine *e, eng_seq *s, int32_t id, const float *logits);
void seq_finish(mlxcel_engine *e, eng_seq *s, mlxcel_finish f, const char *stop_word);
// Ends the sequence with an error: the model said nothing at this position.
void seq_fail_row(mlxcel_engine *e, eng_seq *s, int32_t pos);
void seq_score(mlxcel_engine *e, eng_seq *s, int32_t first_pos, int32_t n, const float *logits);
// Its token is chosen on the host, whatever the device can do: its logits are wanted there.
bool seq_wants_logits(const eng_seq *s);
// What its next token is chosen by, n_ahead tokens being known to the device only.
mx_sample_history seq_history(const mlxcel_engine *e, const eng_seq *s, int32_t n_ahead);

#endif
