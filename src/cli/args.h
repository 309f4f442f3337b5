// The command line as tables: commands, flags, and what parsing leaves behind. Help, docs/cli.md
// and the parser read the same rows.
#ifndef MX_CLI_ARGS_H
#define MX_CLI_ARGS_H

#include "base/err.h"
#include "mlxcel.h"

#include <stddef.h>
#include <stdint.h>

typedef enum cli_command_id {
    CLI_RUN,
    CLI_GENERATE,
    CLI_SERVE,
    CLI_INSPECT,
    CLI_LIST,
    CLI_RM,
    CLI_ARCH,
    CLI_TOKENIZE,
    CLI_TEMPLATE,
    CLI_PERPLEXITY,
    CLI_BENCH,
    CLI_PROFILE,
    CLI_HELP,
    CLI_COMMANDS
} cli_command_id;

// Every value a flag can set. Zeroed, then the rows' defaults for the command, then the arguments.
typedef struct cli_options {
    cli_command_id command;
    const char *model, *models_dir, *prompt, *file, *system;
    const char *device, *kv_type, *kv_storage, *output, *sort;
    const char **stops; // owned
    size_t n_stops;
    mlxcel_logit_bias *bias; // owned
    size_t n_bias;
    const char *positional; // MODEL, REPO, FAMILY or COMMAND; NULL when absent
    int32_t max_tokens, ctx_size, threads, prefill_chunk;
    int32_t top_k, repeat_last_n, dry_allowed_length, dry_last_n;
    int32_t n_prefill, n_decode, depth, n_seqs, reps, batch, logprobs;
    float temperature, top_p, min_p, typical_p, top_n_sigma;
    float repeat_penalty, presence_penalty, frequency_penalty;
    float dry_multiplier, dry_base, xtc_probability, xtc_threshold;
    uint64_t seed;
    bool has_seed, help;
    bool json, quiet, verbose, yes, force, profile, estimate, no_template, ignore_eos;
    bool decode, jsonl, allow_fallback, warm_cache, deterministic;
    // profile, bench
    int32_t chain;
    bool launch_heavy, ops, ab;
    const char **arms; // owned
    size_t n_arms;
    // serve
    const char *host, *alias, *api_prefix, *api_key, *api_key_file, *cors_origins, *allowed_hosts;
    const char *ssl_key_file, *ssl_cert_file, *reasoning_format, *reasoning_alias, *template_kwargs;
    const char *kv_budget, *cache_type_k, *cache_type_v, *prompt_cache, *max_body;
    int32_t port, parallel, max_batch, batch_size, ubatch_size, grant_interval, queue_depth;
    int32_t threads_http, sse_ping, timeout_s, idle_timeout_s;
    int32_t sse_gather;
    const char *sse_ping_style;
    float grace_s;
    bool metrics, no_slots, no_web, reuse_port, no_request_log, no_prompt_cache, as_always;
    uint64_t given[4]; // bit per row of the table: set by an argument or the environment
} cli_options;

typedef enum cli_kind {
    CLI_FLAG,    // bool, no value
    CLI_INT,     // int32_t from min to max
    CLI_FLOAT,   // float from min to max
    CLI_SEED,    // uint64_t; sets has_seed
    CLI_TEXT,    // const char *
    CLI_CHOICE,  // const char *, one of `value` (words separated by '|')
    CLI_TEXTS,   // stops or arms: may be repeated
    CLI_BIAS,    // bias: ID=NUMBER, may be repeated
    CLI_REFUSED, // known elsewhere, not in this build: an error that says so
} cli_kind;

typedef struct cli_flag {
    const char *names; // "-m, --model"
    uint32_t commands; // bit per command
    cli_kind kind;
    const char *value; // what help calls the value; CLI_CHOICE: the words
    size_t offset;     // in cli_options
    double min, max;
    const char *dflt; // parsed like an argument; NULL: none
    const char *help; // CLI_REFUSED: what is not supported
} cli_flag;

extern const cli_flag cli_flags[];
extern const size_t cli_n_flags;

typedef struct cli_command {
    const char *name, *alias; // alias may be NULL
    const char *positional;   // "MODEL" or NULL
    bool positional_required;
    int (*run)(const cli_options *o); // returns an exit code
    const char *help;                 // one line
    const char *text;                 // more, or NULL
} cli_command;

extern const cli_command cli_commands[CLI_COMMANDS];

// By name or alias; NULL when there is none.
const cli_command *cli_find_command(const char *name);

// Reads the arguments after the command's name. Errors (INVALID) name the flag and what was
// expected. Free with cli_options_free also after an error. Strings point into argv.
mx_status cli_parse(cli_options *o, const cli_command *c, int argc, char *const *argv, mx_err *err);
void cli_options_free(cli_options *o);

// True when an argument or the environment set the field at this offset of cli_options.
bool cli_is_given(const cli_options *o, size_t offset);

// True when one of the flag's spellings is `name` (n bytes).
bool cli_flag_is(const cli_flag *f, const char *name, size_t n);

#endif
