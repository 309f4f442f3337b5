// mlxcel: run language models. THE boundary of the library; the server and the commands use it.
//
// An engine owns one model, its memory and one thread that does all the work. Callers submit
// requests from any thread and read each request's events; a request is one prompt and one or more
// choices. Everything returned is valid until the call that frees it is named. Units are in names.
//
// Thread safety: functions on an engine may be called from any thread; functions on one request
// from one thread at a time.
#ifndef MLXCEL_H
#define MLXCEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

const char *mlxcel_version(void);

// Status codes are those of src/base/err.h: 0 is success. http is the matching HTTP code.
typedef struct mlxcel_error {
    int status, http;
    char message[1024]; // what and where, one line
} mlxcel_error;

typedef struct mlxcel_engine mlxcel_engine;
typedef struct mlxcel_request mlxcel_request;

// ---- Opening -----------------------------------------------------------------------------------

typedef struct mlxcel_params { // zero means the default
    const char *model;         // path (file or folder) or "synthetic:NAME"; required. Names are
                               // resolved by the caller
    const char *device;        // "cpu", "cuda", "cuda:N"; NULL: MLXCEL_DEVICE, else cuda if there
    int32_t n_threads;         // 0: MLXCEL_THREADS, else what the machine computes well with
    int32_t ctx_size;          // positions of one request; 0: the model's, at most 8192
    int32_t max_batch;         // sequences decoded together; default 1 (command line), server more
    int32_t max_queue;         // requests waiting; default 32; one more is refused (BUSY)
    int32_t prefill_chunk;     // prompt tokens in one step; 0: MLXCEL_PREFILL_CHUNK, else measured
                               // so that a step takes 0.1 s, 32 to 2048
    int32_t prefill_grant_interval; // decode steps between prefill chunks under load; default 16
    const char *kv_storage;         // "auto", "paged", "dense"
    const char *kv_type;            // "f16" (default), "f32"
    uint64_t kv_budget_bytes;       // 0: room for max_batch full contexts
    uint64_t prefix_cache_bytes;    // 0: no prefix cache
    bool lazy_weights;              // else MLXCEL_WEIGHT_MATERIALIZATION decides
    bool exact;                     // float-exact products; else MLXCEL_EXACT decides
    bool deterministic;             // CUDA, else MLXCEL_DETERMINISTIC decides; the CPU always is
    bool skip_memory_check;
} mlxcel_params;

// Loads the model and starts the engine thread. Weights are resident when it returns (unless lazy).
// Errors: a file that is not there or malformed, an unsupported model, not enough memory.
int mlxcel_open(mlxcel_engine **e, const mlxcel_params *p, mlxcel_error *err);
// Cancels what runs, waits for the thread, frees everything. Requests must be freed before.
void mlxcel_close(mlxcel_engine *e);

typedef struct mlxcel_info {                  // strings live as long as the engine
    const char *model_path, *family, *format; // "llama", "gguf q4_1"
    const char *device, *arch;                // "AMD EPYC 9654", "avx512"
    const char *kv_storage, *kv_type;
    const char *decode_path;  // "native batched forward"
    const char *decode_steps; // "CUDA graphs", …: what is replayed for a token
    const char *fallbacks;    // one line each for what was asked for and declined; "" when nothing
    const char *budget_prefill, *budget_decode, *budget_decode_sync; // as logged
    const char *capability;  // CUDA: of the GPU, and what was compiled for it; else "", or that the
                             // program was built without CUDA
    const char *budget_rule; // a family's rule for the device that decided the budget; else ""
    int32_t n_gpus;          // that the driver offers; -1: not asked, the CPU was asked for
    const char *sampling;    // what the checkpoint suggests and where it says so; "" when nothing
    const char *prefill_chunk_why; // "measured: ..."
    int32_t n_threads, n_vocab, n_layers, ctx_size, ctx_train, max_batch, prefill_chunk;
    int32_t bos, eos; // -1: none
    bool has_template, exact, deterministic;
    uint64_t n_params, weight_bytes, kv_pool_bytes, kv_token_bytes; // temporaries: mlxcel_stats
    double load_s;
} mlxcel_info;
void mlxcel_get_info(const mlxcel_engine *e, mlxcel_info *out);

// ---- Text --------------------------------------------------------------------------------------

// Ids of a text; *ids is freed with mlxcel_free. add_special: what the model's tokenizer adds
// (BOS); parse_special: spellings of control tokens become those tokens.
int mlxcel_tokenize(mlxcel_engine *e, const char *text, size_t n_bytes, bool add_special,
                    bool parse_special, int32_t **ids, size_t *n_ids, mlxcel_error *err);
// Text of ids (NUL-terminated besides its length), freed with mlxcel_free.
int mlxcel_detokenize(mlxcel_engine *e, const int32_t *ids, size_t n_ids, bool skip_special,
                      char **text, size_t *n_bytes, mlxcel_error *err);
// Text of one token; not owned.
const char *mlxcel_piece(mlxcel_engine *e, int32_t id, size_t *n_bytes);

// Renders a chat request with the model's template. request_json: an object with "messages" and
// optionally "tools", "documents", "add_generation_prompt" (true), "chat_template_kwargs",
// "chat_template" (replaces the model's). Markup in message content never becomes a control token.
// *prompt (may be NULL) and *ids are freed with mlxcel_free.
int mlxcel_apply_template(mlxcel_engine *e, const char *request_json, char **prompt, int32_t **ids,
                          size_t *n_ids, mlxcel_error *err);
void mlxcel_free(void *p);

// ---- Requests ----------------------------------------------------------------------------------

typedef struct mlxcel_logit_bias {
    int32_t id;
    float bias; // added; -100 or less bans, +100 or more forces
} mlxcel_logit_bias;

// Order: bias, repetition, DRY, frequency and presence, top_n_sigma, typical_p, top_k, top_p,
// min_p, XTC, temperature, draw. Zero-initialised plus mlxcel_sampling_init gives greedy.
typedef struct mlxcel_sampling {
    float temperature;     // 0: greedy
    int32_t top_k;         // 0: off
    float top_p;           // 1: off
    float min_p;           // 0: off
    float typical_p;       // 1: off
    float top_n_sigma;     // < 0: off
    float repeat_penalty;  // 1: off; over prompt and generated, last repeat_last_n tokens
    int32_t repeat_last_n; // -1: the context
    float presence_penalty, frequency_penalty; // over generated tokens
    float dry_multiplier, dry_base;            // multiplier 0: off
    int32_t dry_allowed_length, dry_last_n;
    float xtc_probability, xtc_threshold;
    uint64_t seed; // with has_seed; else drawn by the engine, reported in the done event
    bool has_seed;
    bool ignore_eos;
    int32_t min_tokens; // end tokens are masked before
    const mlxcel_logit_bias *bias;
    size_t n_bias;
} mlxcel_sampling;
void mlxcel_sampling_init(mlxcel_sampling *s);

// Fields that a checkpoint may suggest a value for (generation_config.json, general.sampling.* of a
// GGUF file).
enum {
    MLXCEL_SAMPLING_TEMPERATURE = 1,
    MLXCEL_SAMPLING_TOP_K = 2,
    MLXCEL_SAMPLING_TOP_P = 4,
    MLXCEL_SAMPLING_MIN_P = 8,
    MLXCEL_SAMPLING_TYPICAL_P = 16,
    MLXCEL_SAMPLING_REPEAT_PENALTY = 32,
    MLXCEL_SAMPLING_REPEAT_LAST_N = 64,
    MLXCEL_SAMPLING_XTC_PROBABILITY = 128,
    MLXCEL_SAMPLING_XTC_THRESHOLD = 256
};
// Writes what the model's checkpoint suggests for the fields of `which` to s; returns those it
// wrote. The engine applies nothing by itself.
uint32_t mlxcel_suggest_sampling(const mlxcel_engine *e, uint32_t which, mlxcel_sampling *s);

typedef enum mlxcel_priority {
    MLXCEL_PRIORITY_NORMAL,
    MLXCEL_PRIORITY_HIGH,
    MLXCEL_PRIORITY_LOW
} mlxcel_priority;

typedef enum mlxcel_event_kind {
    MLXCEL_EVENT_PROMPT, // n_prompt_done of n_prompt tokens are prefilled
    MLXCEL_EVENT_TEXT,   // new tokens and the text they release; text may be empty, never cut UTF-8
    MLXCEL_EVENT_SCORE,  // score requests: tokens 1.. of the prompt, in order, several events
    MLXCEL_EVENT_CHOICE, // a choice ended: finish, its counts
    MLXCEL_EVENT_DONE    // the last one: finish of choice 0, usage, timings; or an error
} mlxcel_event_kind;

typedef struct mlxcel_request_params {
    const int32_t *ids; // the prompt; copied
    size_t n_ids;
    mlxcel_sampling sampling;
    int32_t max_tokens;       // per choice; < 0: until the context is full; 0: prefill only
    int32_t n_choices;        // default 1
    const char *const *stops; // stop strings, copied
    size_t n_stops;
    // Reasoning, in which no stop string is looked for: from the first tag, with which the text has
    // to begin (NULL: the prompt has opened it), to the second one (NULL: there is none). Not
    // copied.
    const char *reasoning_open, *reasoning_close;
    int32_t n_logprobs;     // -1: none; k >= 0: of the token, and of the k most likely
    bool show_special;      // text of control tokens is part of the text
    bool score;             // no generation: log-probability of each prompt token after the first
    bool run_past_end;      // end tokens are ordinary tokens (benchmarks)
    bool hash_logits;       // done event carries a hash of every logits row sampled from
    bool cache_prompt;      // may use and feed the prefix cache
    const char *cache_salt; // prefixes are shared within one salt only; NULL is one too
    mlxcel_priority priority;
    double timeout_s; // of the whole request, then an error; 0: none
    double predict_s; // from the first token on, then choices end as LENGTH; 0: none
    // Called on the engine thread when an event of this kind was queued; must not block nor call
    // the engine, but for mlxcel_cancel of another request.
    void (*notify)(void *user, mlxcel_event_kind kind);
    void *user;
} mlxcel_request_params;
void mlxcel_request_params_init(mlxcel_request_params *p); // greedy, one choice, no logprobs

// Queues a request. Errors: CONTEXT (prompt longer than ctx_size), INVALID, BUSY (queue full).
// Free with mlxcel_request_free.
int mlxcel_submit(mlxcel_engine *e, const mlxcel_request_params *p, mlxcel_request **r,
                  mlxcel_error *err);
// Stops it wherever it is (queued, prefilling, decoding), within a step. A done event follows.
void mlxcel_cancel(mlxcel_request *r);
void mlxcel_request_free(mlxcel_request *r); // cancels first when it is not done
uint64_t mlxcel_request_id(const mlxcel_request *r);

typedef struct mlxcel_top_logprob {
    int32_t id;
    float logprob; // natural log, of the unmodified distribution
} mlxcel_top_logprob;

typedef struct mlxcel_token {
    int32_t id;
    float logprob; // when asked for
    const mlxcel_top_logprob *top;
    int32_t n_top;
    double time_s; // when a generated token was chosen, on the monotonic clock
} mlxcel_token;

typedef enum mlxcel_finish {
    MLXCEL_FINISH_NONE,
    MLXCEL_FINISH_EOS,
    MLXCEL_FINISH_STOP,   // a stop string
    MLXCEL_FINISH_LENGTH, // max_tokens, predict_s or the context
    MLXCEL_FINISH_CANCEL,
    MLXCEL_FINISH_ERROR
} mlxcel_finish;
const char *mlxcel_finish_name(mlxcel_finish f); // "stop", "stop", "length", "cancelled", "error"

typedef struct mlxcel_timings {
    double queue_ms, prompt_ms, first_token_ms, decode_ms; // decode: from the first token on
    int32_t n_prompt, n_cached, n_decoded;
} mlxcel_timings;

typedef struct mlxcel_event { // pointers valid until the next call on this request
    mlxcel_event_kind kind;
    int32_t choice;
    const char *text;
    size_t n_text;
    const mlxcel_token *tokens;
    int32_t n_tokens;
    int32_t n_prompt_done, n_prompt;
    mlxcel_finish finish;
    const char *stop_word; // finish STOP
    uint64_t seed, token_hash, logit_hash;
    mlxcel_timings timings; // PROMPT; TEXT with tokens: so far, of this choice
    mlxcel_error error;     // DONE with finish ERROR
} mlxcel_event;

// The next event. Waits up to timeout_s (< 0: for ever, 0: not at all). Returns false when none
// came. After DONE there is none.
bool mlxcel_next_event(mlxcel_request *r, double timeout_s, mlxcel_event *out);

// ---- What it does, what it costs ---------------------------------------------------------------

// Slow paths, which are taken when a fast one does not apply: name and what is counted; NULL past
// the last.
enum { MLXCEL_SLOW_PATHS = 8 };
const char *mlxcel_slow_path(int32_t i, const char **what);

typedef struct mlxcel_stats { // since open
    uint64_t n_requests, n_cancelled, n_errors, n_rejected;
    // computed; taken from the prompt cache instead; rows of steps that decoded; tokens chosen (the
    // first of an answer comes from the prompt's last step)
    uint64_t prompt_tokens, prompt_tokens_cached, decode_tokens, generated_tokens;
    uint64_t steps_prefill, steps_decode, steps_decode_pipelined, steps_mixed, preemptions;
    uint64_t prefill_grants; // prefill steps while others decoded
    double prefill_s, decode_s;
    int32_t n_running, n_queued, n_prefilling;
    int32_t
        n_failed_steps; // the last ones, when the device failed in all of them; 0 once one works
    uint64_t plans_made, plan_hits, plan_evictions;
    uint64_t buffers_prefill, buffers_decode; // command buffers
    uint64_t commits_ops, commits_bytes, commits_end, commits_sync;
    uint64_t kv_pages, kv_pages_free, kv_page_tokens, kv_pool_bytes, kv_used_bytes;
    uint64_t cache_hits, cache_misses, cache_tokens, cache_evictions, cache_bytes, cache_entries;
    uint64_t arena_bytes, peak_bytes; // high-water mark of arena and state
    uint64_t storage_fallbacks;
    uint64_t slow[MLXCEL_SLOW_PATHS];      // times each slow path was taken
    uint64_t upload_tensors, upload_bytes; // weights made resident
    // Of a GPU's loading: its readers' sums (reading, waiting for transfers); making the pinned
    // ring, taking device memory, all of it, by the loading thread.
    double upload_read_s, upload_wait_s, upload_ring_s, upload_alloc_s, upload_total_s;
    bool upload_pinned;
} mlxcel_stats;
void mlxcel_get_stats(mlxcel_engine *e, mlxcel_stats *out);
void mlxcel_cache_reset(mlxcel_engine *e);

#ifdef __cplusplus
}
#endif
#endif
