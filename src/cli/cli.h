// What the commands share: exit codes, output, signals, opening a model, one reply.
#ifndef MX_CLI_CLI_H
#define MX_CLI_CLI_H

#include "base/str.h"
#include "cli/args.h"
#include "format/weights.h"

typedef enum cli_exit {
    CLI_EXIT_OK = 0,
    CLI_EXIT_RUN = 1,          // something failed while it ran
    CLI_EXIT_USAGE = 2,        // the command line
    CLI_EXIT_LOAD = 3,         // the model could not be found, read or loaded
    CLI_EXIT_INTERRUPTED = 130 // by SIGINT or SIGTERM
} cli_exit;

// The whole program: finds the command, parses, runs. end_now ends the process at once, from a
// signal handler. Returns the exit code.
int mx_cli_main(int argc, char *const *argv, void (*end_now)(int code));

// ---- commands.c ----

int cli_usage(const cli_options *o, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
// Prints "mlxcel COMMAND: message" and returns code.
int cli_fail(const cli_options *o, cli_exit code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void cli_help(const cli_command *c, mx_buf *out); // NULL: of the program
void cli_markdown(mx_buf *out);                   // docs/cli.md

int cli_run(const cli_options *o);
int cli_generate(const cli_options *o);
int cli_serve(const cli_options *o);
int cli_inspect(const cli_options *o);
int cli_list(const cli_options *o);
int cli_rm(const cli_options *o);
int cli_arch(const cli_options *o);
int cli_tokenize(const cli_options *o);
int cli_template(const cli_options *o);
int cli_perplexity(const cli_options *o);
int cli_bench(const cli_options *o);
int cli_bench_ab(const cli_options *o); // bench_ab.c
int cli_profile(const cli_options *o);

// ---- term.c: standard streams and signals. Process-wide state ----

// Makes sure that descriptors 0..2 are open, ignores SIGPIPE, catches SIGINT and SIGTERM.
void cli_term_init(void (*end_now)(int code));
// While deferred, a signal sets a flag; otherwise (at first, but for serve) it ends the process
// with 130. A third signal that nobody has cleared ends it too. Returns what it was before.
bool cli_signals_defer(bool deferred);
bool cli_interrupted(void); // SIGINT or SIGTERM since the last clear
bool cli_terminated(void);  // SIGTERM: not to be cleared
void cli_interrupt_clear(void);
int cli_signal_fd(void); // becomes readable when a signal came

// Writes to standard output, unbuffered. False when it is closed or failed; stays so.
bool cli_out(const void *p, size_t n);
bool cli_outs(const char *s);
// The exit code that counts: code, or RUN with a message when writing failed for another reason
// than a reader that left.
int cli_finish(int code);
bool cli_stdout_closed(void);
bool cli_err_is_terminal(void);
bool cli_out_is_terminal(void);
bool cli_in_is_terminal(void);
// One line on standard error.
void cli_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

// ---- line.c: lines from standard input ----

typedef enum cli_line_result { CLI_LINE_OK, CLI_LINE_END, CLI_LINE_INTERRUPTED } cli_line_result;
typedef struct cli_lines cli_lines;
// With line editing and history when standard input and standard error are terminals.
cli_lines *cli_lines_open(void);
void cli_lines_close(cli_lines *l);
// The next line without its newline into out (cleared first). prompt is shown on a terminal only.
cli_line_result cli_lines_read(cli_lines *l, const char *prompt, mx_buf *out);
// Lines of a file, of any length. False at the end.
bool cli_file_line(FILE *f, mx_buf *out);
// A whole file, or standard input for "-".
mx_status cli_read_all(const char *path, mx_buf *out, mx_err *err);

// ---- session.c: models, requests ----

// Values of JSON answers, new references. Text: what is no UTF-8 becomes U+FFFD. Number: null when
// it is not finite.
json_t *cli_json_text(const char *s);
// The slow paths taken from `before` (NULL: open) to `after`, "name count, name count"; "" for
// none.
void cli_slow_text(const mlxcel_stats *before, const mlxcel_stats *after, char *out, size_t cap);
json_t *cli_json_number(double v);
// 2 after saying so when the system message is not UTF-8.
int cli_check_system(const cli_options *o);

// MODEL argument to a path (mx_free it). On failure prints why and returns false.
bool cli_resolve(const cli_options *o, const char *model, char **path);

typedef struct cli_session {
    mlxcel_engine *engine;
    mlxcel_info info;
    char *path;
} cli_session;
// Loads the model of o; said: print the loading lines. Extra engine parameters are in p (model,
// device, threads, KV and context are filled from o). Returns an exit code.
int cli_session_open(cli_session *s, const cli_options *o, const char *model, mlxcel_params p,
                     bool said);
void cli_session_close(cli_session *s);

void cli_sampling(const cli_options *o, mlxcel_sampling *out);

typedef struct cli_reply {
    mx_buf text;
    int32_t *ids; // owned
    size_t n_ids;
    mlxcel_finish finish;
    char *stop_word; // owned; NULL
    uint64_t seed;
    mlxcel_timings timings;
    bool interrupted;
} cli_reply;
void cli_reply_free(cli_reply *r);

typedef struct cli_prompt { // ids and what remains of the context after them
    int32_t *ids;           // mlxcel_free
    size_t n_ids;
} cli_prompt;

// The [TTFT] line: phases until the first token. setup: template and tokenizer; build: the wait
// before the first step; eval: the prompt's steps (plans are recorded in them); sample: choosing
// the token; post: what follows the reply.
void cli_say_ttft(const cli_session *s, const mlxcel_timings *t, double setup_ms, double post_ms);

// Runs one request; stream: text goes to standard output as it comes (and is kept too). Stops when
// a signal comes or standard output closes. Errors are the engine's.
int cli_reply_run(cli_session *s, const mlxcel_request_params *p, bool stream, cli_reply *out,
                  mlxcel_error *err);

// One user message (and the system message of o) through the template, or the text as it is.
int cli_prompt_make(cli_session *s, const cli_options *o, mx_str text, cli_prompt *out,
                    mlxcel_error *err);

// ---- estimate.c: what a model will need ----

typedef struct cli_estimate {
    uint64_t weights_bytes, kv_bytes, kv_token_bytes, activation_bytes, overhead_bytes;
    uint64_t cache_bytes;   // cached prompts, beside kv_bytes
    uint64_t staging_bytes; // of a GPU's loading, beyond what KV and activations take afterwards
    uint64_t total_bytes, budget_bytes;
    char device[128]; // whose memory the budget is; "" the host's
    int64_t ctx;      // rounded up to 256
    int64_t batch;
    double factor;
    bool fits, limited; // limited: MLXCEL_MEMORY_LIMIT is below what is free
    char quant[64];     // element types of most bytes
    const char *kv_type;
} cli_estimate;
typedef struct cli_estimate_for {
    int64_t ctx, batch; // ctx 0: the model's, at most 8192
    const char *kv_type;
    uint64_t kv_budget_bytes; // 0: room for batch full contexts; else KV and cached prompts in it
    uint64_t cache_bytes;
} cli_estimate_for;
// Compared with the host's memory.
mx_status cli_estimate_make(cli_estimate *e, const mx_weights *w, const cli_estimate_for *what,
                            mx_err *err);
// Compared with the GPU's, if `device` (as in --device) is one: it is opened for that.
mx_status cli_estimate_device(cli_estimate *e, const char *device, mx_err *err);
void cli_estimate_banner(const cli_estimate *e, const char *model, mx_buf *out);
json_t *cli_estimate_json(const cli_estimate *e);
// "1.23 GiB (N bytes)"
void cli_size_text(uint64_t bytes, mx_buf *out);
// Bytes of KV state that a token at this depth reads.
uint64_t cli_kv_bytes(const mx_weights *w, int64_t ctx, bool f32, mx_err *err);
// Weight bytes that one decoded token reads: all but an embedding table that is not the head.
uint64_t cli_weight_read_bytes(const mx_weights *w);

// ---- read_rate.c ----

// GB/s (10^9) that n_threads threads read from an array of n_bytes, four streams each; 0 when there
// is not memory for it.
double cli_read_rate(uint64_t n_bytes, int n_threads);

#endif
