// The table of flags: parser, help and docs/cli.md are made from it. No state.
#include "base/mem.h"
#include "cli/args.h"

#include <math.h>

#define ON(c)   (1u << CLI_##c)
#define TEXTUAL (ON(RUN) | ON(GENERATE))
#define ENGINE  (TEXTUAL | ON(PERPLEXITY) | ON(BENCH))
#define LOADS   (ENGINE | ON(INSPECT) | ON(TOKENIZE) | ON(TEMPLATE))
#define STORE   (LOADS | ON(LIST) | ON(RM))
#define ALL     ((1u << CLI_COMMANDS) - 1)

#define AT(f) offsetof(cli_options, f)
#define BOOL(n, c, f, help)                                                                        \
    { n, c, CLI_FLAG, NULL, AT(f), 0, 0, NULL, help }
#define TEXT(n, c, v, f, d, help)                                                                  \
    { n, c, CLI_TEXT, v, AT(f), 0, 0, d, help }
#define CHOICE(n, c, v, f, d, help)                                                                \
    { n, c, CLI_CHOICE, v, AT(f), 0, 0, d, help }
#define INT(n, c, f, lo, hi, d, help)                                                              \
    { n, c, CLI_INT, "N", AT(f), lo, hi, d, help }
#define FLOAT(n, c, f, lo, hi, d, help)                                                            \
    { n, c, CLI_FLOAT, "F", AT(f), lo, hi, d, help }
#define REFUSED(n, c, why)                                                                         \
    { n, c, CLI_REFUSED, NULL, 0, 0, 0, NULL, why }
#define BIG INT32_MAX

// clang-format off
const cli_flag cli_flags[] = {
    // what to run
    TEXT("-m, --model", LOADS, "MODEL", model, NULL, "a .gguf file, a folder of safetensors, or a name in the store"),
    TEXT("--models-dir", STORE, "DIR", models_dir, NULL, "the model store (default: MLXCEL_MODELS_DIR, else <cache>/models)"),
    TEXT("-p, --prompt", TEXTUAL, "TEXT", prompt, NULL, "the prompt; run without one is a chat"),
    TEXT("-f, --file", ON(GENERATE), "FILE", file, NULL, "read the prompt from a file; - is standard input"),
    TEXT("--system", TEXTUAL, "TEXT", system, NULL, "system message of the chat template"),
    BOOL("--no-chat-template", TEXTUAL, no_template, "continue the text as it is, with BOS where the model has one"),
    INT("-n, --max-tokens, --n-predict", TEXTUAL, max_tokens, -1, BIG, "-1", "tokens to generate; -1: until the model ends or the context is full"),
    {"--stop", TEXTUAL, CLI_TEXTS, "TEXT", AT(stops), 0, 0, NULL, "end at this text, which is not printed; may be repeated"},
    BOOL("--ignore-eos", TEXTUAL, ignore_eos, "go on past the model's end tokens"),
    // sampling
    FLOAT("-t, --temp, --temperature", TEXTUAL, temperature, 0, 1e6, "0", "0 takes the most likely token"),
    INT("--top-k", TEXTUAL, top_k, 0, BIG, "0", "choose among the k most likely; 0: off"),
    FLOAT("--top-p", TEXTUAL, top_p, 0, 1, "1", "choose among the most likely that reach this probability; 1: off"),
    FLOAT("--min-p", TEXTUAL, min_p, 0, 1, "0", "drop what is less likely than this share of the most likely; 0: off"),
    FLOAT("--typical-p", TEXTUAL, typical_p, 0, 1, "1", "locally typical sampling; 1: off"),
    FLOAT("--top-n-sigma", TEXTUAL, top_n_sigma, -1e6, 1e6, "-1", "keep logits within n standard deviations of the greatest; negative: off"),
    FLOAT("--repetition-penalty, --repeat-penalty", TEXTUAL, repeat_penalty, 1e-3, 1e3, "1", "of tokens in the prompt or generated; 1: off"),
    INT("--repeat-last-n", TEXTUAL, repeat_last_n, -1, BIG, "64", "how many last tokens it looks at; -1: all"),
    FLOAT("--presence-penalty", TEXTUAL, presence_penalty, -100, 100, "0", "subtracted once for each generated token"),
    FLOAT("--frequency-penalty", TEXTUAL, frequency_penalty, -100, 100, "0", "subtracted for each time a token was generated"),
    FLOAT("--dry-multiplier", TEXTUAL, dry_multiplier, 0, 1e3, "0", "penalty of tokens that go on with a repetition; 0: off"),
    FLOAT("--dry-base", TEXTUAL, dry_base, 0, 1e3, "1.75", "its growth with the length of the repetition"),
    INT("--dry-allowed-length", TEXTUAL, dry_allowed_length, 0, BIG, "2", "repetitions up to this length are free"),
    INT("--dry-last-n, --dry-penalty-last-n", TEXTUAL, dry_last_n, -1, BIG, "64", "how many last tokens it looks at; -1: all"),
    FLOAT("--xtc-probability", TEXTUAL, xtc_probability, 0, 1, "0", "how often the most likely tokens are left out; 0: off"),
    FLOAT("--xtc-threshold", TEXTUAL, xtc_threshold, 0, 1, "0.1", "tokens with at least this probability are"),
    {"--seed", TEXTUAL, CLI_SEED, "N", AT(seed), 0, 0, NULL, "of the random numbers; default: another one each time"},
    {"--logit-bias", TEXTUAL, CLI_BIAS, "ID=BIAS", AT(bias), 0, 0, NULL, "added to a token's logit; -100 bans, 100 forces; may be repeated"},
    // machine
    INT("-c, --ctx-size", TEXTUAL, ctx_size, 0, BIG, "0", "positions of one conversation; 0: the model's, at most 8192"),
    INT("-c, --ctx-size", ON(PERPLEXITY), ctx_size, 0, BIG, "0", "tokens in one window; 0: 512, with --jsonl the model's, at most 8192"),
    CHOICE("--device", ENGINE, "cpu|cuda|gpu", device, NULL, "default: MLXCEL_DEVICE, else cuda when there is one"),
    INT("--threads", TEXTUAL | ON(PERPLEXITY), threads, 0, 1024, "0", "0: MLXCEL_THREADS, else what the machine computes well with"),
    INT("-t, --threads", ON(BENCH), threads, 0, 1024, "0", "0: MLXCEL_THREADS, else what the machine computes well with"),
    CHOICE("--kv-type", ENGINE | ON(INSPECT), "f16|f32", kv_type, NULL, "numbers of the KV cache; default f16, with MLXCEL_EXACT f32"),
    CHOICE("--kv-storage", ENGINE, "auto|paged|dense", kv_storage, "auto", "how the KV cache is laid out"),
    INT("--prefill-chunk", ENGINE, prefill_chunk, 0, BIG, "0", "prompt tokens in one step; 0: MLXCEL_PREFILL_CHUNK, else 512"),
    BOOL("--force, --no-memory-check", ENGINE, force, "load even if the memory estimate does not fit"),
    BOOL("--estimate-memory", ON(GENERATE), estimate, "print the memory estimate and load nothing"),
    // output
    BOOL("--profile", ON(GENERATE), profile, "print the [TTFT] line"),
    BOOL("--json", ON(GENERATE), json, "print one JSON object: text, ids, prompt_ids, finish_reason, timings"),
    BOOL("--json", ON(INSPECT) | ON(LIST) | ON(PERPLEXITY), json, "print JSON"),
    BOOL("-v, --verbose", ON(RUN), verbose, "say on stderr what is loaded and how fast it went"),
    BOOL("-q, --quiet", ON(GENERATE), quiet, "nothing on stderr but errors"),
    // inspect
    INT("-n, --max-tokens", ON(INSPECT), max_tokens, 1, BIG, "8192", "context of the memory estimate"),
    INT("--batch", ON(INSPECT), batch, 1, 4096, "1", "sequences of the memory estimate"),
    // list, rm
    BOOL("-q, --quiet", ON(LIST), quiet, "names only"),
    BOOL("-v, --verbose", ON(LIST), verbose, "paths too"),
    CHOICE("--sort", ON(LIST), "name|size|modified", sort, "name", "order"),
    BOOL("-y, --yes", ON(RM), yes, "do not ask"),
    // tokenize
    BOOL("--decode", ON(TOKENIZE), decode, "lines are {\"ids\":[...]}, answers {\"text\":...}"),
    // perplexity
    TEXT("-f, --file", ON(PERPLEXITY), "FILE", file, NULL, "the text; - is standard input"),
    BOOL("--jsonl", ON(PERPLEXITY), jsonl, "score lines {\"ids\":[...]} or {\"text\":...} from FILE or standard input"),
    INT("--logprobs", ON(PERPLEXITY), logprobs, 0, 100, "0", "with --jsonl: the k most likely tokens at each position"),
    // bench
    INT("-p, --n-prefill", ON(BENCH), n_prefill, 0, BIG, "512", "prompt tokens of the prefill row; 0 leaves it out"),
    INT("-n, --n-decode", ON(BENCH), n_decode, 0, BIG, "128", "tokens of the decode row; 0 leaves it out"),
    INT("-d, --depth", ON(BENCH), depth, 0, BIG, "0", "tokens already in the context"),
    INT("-b, --n-seqs", ON(BENCH), n_seqs, 1, 1024, "1", "sequences decoded together"),
    INT("-r, --reps", ON(BENCH), reps, 1, 1000, "5", "repetitions"),
    CHOICE("-o, --output", ON(BENCH), "table|json", output, "table", "form of the result"),
    BOOL("--allow-fallback", ON(BENCH), allow_fallback, "exit 0 even if something asked for was declined"),
    BOOL("-h, --help", ALL, help, "this text"),
    // known to other programs of this kind; ignoring one would be worse than refusing it
    REFUSED("--image, --audio, --video, --fps", TEXTUAL, "images, sound and video are not supported"),
    REFUSED("--draft-model, --num-draft-tokens, --draft-kind, --draft-block-size, --prompt-lookup", TEXTUAL, "speculative decoding is not supported"),
    REFUSED("--adapter, --lora", TEXTUAL, "adapters are not supported"),
    REFUSED("--revision", ON(RUN), "models are not downloaded"),
    REFUSED("--tp-size, --tp-moe-mode, --pp-size, --pp-layers, --pp-micro-batch-size", TEXTUAL, "several devices are not supported"),
    REFUSED("--show-reasoning", TEXTUAL, "reasoning is not told apart from the answer"),
    REFUSED("--recommend-quant", ON(GENERATE), "recommending a quantisation is not supported"),
    REFUSED("--quant", ON(INSPECT), "estimates for another quantisation are not supported"),
    REFUSED("--tokenize, --tokenize-whole", ON(INSPECT), "counting tokens is `mlxcel tokenize`; it is not a flag"),
};
// clang-format on
const size_t cli_n_flags = MX_COUNT(cli_flags);
