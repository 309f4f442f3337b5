// A tokenizer from GGUF metadata.
//
// State: fills a new tokenizer; everything is copied out of the file. Does not read the file
// (format/) nor use merges beyond handing them on. Keys, all under tokenizer.ggml.: model (gpt2:
// byte-level BPE with `merges` and `pre`; llama: SentencePiece BPE, whose order comes from
// `scores`), tokens, token_type, *_token_id, add_*. A file says nothing of normalisers or
// expressions; `pre` names them (pre_names.def).
#include "text/text_int.h"

#include "base/mem.h"

#include <math.h>

enum { PRE_NFC = 1, PRE_WHOLE = 2, PRE_BOS = 4 };
enum { TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4, TYPE_BYTE = 6 };
#define KEY "tokenizer.ggml."

#define RE_LLAMA3                                                                                  \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "                     \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define RE_QWEN2                                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "                          \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define RE_QWEN35                                                                                  \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "                  \
    "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER      "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define NOT_LETTER "[^\\r\\n\\p{L}\\p{N}]?"
#define CASE_TAIL  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SHORT      "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define RE_TEKKEN  NOT_LETTER UPPER "*" LOWER "+|" NOT_LETTER UPPER "+" LOWER "*|\\p{N}" CASE_TAIL
#define RE_GPT4O                                                                                   \
    NOT_LETTER UPPER "*" LOWER "+" SHORT "|" NOT_LETTER UPPER "+" LOWER "*" SHORT                  \
                     "|\\p{N}{1,3}" CASE_TAIL
#define RE_DEEPSEEK3                                                                               \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"           \
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// DeepSeek LLM's list of letters with case
#define CASED                                                                                      \
    "\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}"                       \
    "\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}"         \
    "\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}"                  \
    "\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"                       \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}"                 \
    "\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}"                 \
    "\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}"                 \
    "\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}"         \
    "\\x{1fbe}\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}"                           \
    "\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}"                 \
    "\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}"          \
    "\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}"                  \
    "\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}"         \
    "\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}"                  \
    "\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}"                 \
    "\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}"                 \
    "\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}"         \
    "\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"
#define CJK "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"

// Expressions applied one after the other, each isolating its matches. "" is the digits rule.
typedef enum split_id {
    SPLIT_GPT2,
    SPLIT_DIGITS_GPT2,
    SPLIT_LLAMA3,
    SPLIT_QWEN2,
    SPLIT_QWEN35,
    SPLIT_TEKKEN,
    SPLIT_GPT4O,
    SPLIT_DEEPSEEK3,
    SPLIT_DEEPSEEK_LLM,
    SPLIT_DEEPSEEK_CODER
} split_id;
enum { MAX_SPLITS = 7 };
static const char *const splits[][MAX_SPLITS] = {
    [SPLIT_GPT2] = {TEXT_RE_GPT2},
    [SPLIT_DIGITS_GPT2] = {"", TEXT_RE_GPT2},
    [SPLIT_LLAMA3] = {RE_LLAMA3},
    [SPLIT_QWEN2] = {RE_QWEN2},
    [SPLIT_QWEN35] = {RE_QWEN35},
    [SPLIT_TEKKEN] = {RE_TEKKEN},
    [SPLIT_GPT4O] = {RE_GPT4O},
    [SPLIT_DEEPSEEK3] = {"\\p{N}{1,3}", "[\\u4e00-\\u9fa5\\u3040-\\u309f\\u30a0-\\u30ff]+",
                         RE_DEEPSEEK3},
    [SPLIT_DEEPSEEK_LLM] = {"[\r\n]", "\\s?[A-Za-z" CASED "]+",
                            "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}"
                            "\\x{3000}-\\x{3002}]+",
                            "\\s+$", CJK, "\\p{N}+"},
    [SPLIT_DEEPSEEK_CODER] = {"[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", CJK, ""},
};
static const struct {
    const char *name;
    split_id split;
    int flags;
} pre_names[] = {
#define X(name, split, flags) {name, split, flags},
#include "text/pre_names.def"
#undef X
};

// What loading needs at hand.
typedef struct gguf_load {
    mx_tokenizer *t;
    const mx_weights *w;
    const mx_gguf_kv *tokens, *types, *scores, *merges;
    bool sentencepiece;
    mx_err *err;
} gguf_load;

// An array of the given element type, or NULL when the key is absent. count 0: any.
static mx_status get_array(gguf_load *g, const char *key, mx_gguf_type elem, uint64_t count,
                           const mx_gguf_kv **out) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    *out = mx_gguf_find(g->w, key);
    if (!*out) return MX_OK;
    if ((*out)->type != MX_GGUF_ARRAY || (*out)->elem_type != elem) {
        mx_gguf_type found = (*out)->type == MX_GGUF_ARRAY ? (*out)->elem_type : (*out)->type;
        return mx_err_set(g->err, MX_FORMAT, "%s: %s of %s, expected an array of %s", key,
                          (*out)->type == MX_GGUF_ARRAY ? "array" : "value", names[found],
                          names[elem]);
    }
    if (count && (*out)->n_elems != count) {
        return mx_err_set(g->err, MX_FORMAT, "%s: %llu elements, expected %llu (one a token)", key,
                          (unsigned long long)(*out)->n_elems, (unsigned long long)count);
    }
    return MX_OK;
}

static mx_status find_arrays(gguf_load *g) {
    MX_TRY(get_array(g, KEY "tokens", MX_GGUF_STRING, 0, &g->tokens));
    if (!g->tokens || !g->tokens->n_elems) {
        return mx_err_set(g->err, MX_FORMAT, KEY "tokens: missing or empty");
    }
    uint64_t n = g->tokens->n_elems;
    if (n > VOCAB_MAX_ID) {
        return mx_err_set(g->err, MX_TOOLARGE, KEY "tokens: %llu tokens, at most %d are read",
                          (unsigned long long)n, VOCAB_MAX_ID);
    }
    MX_TRY(get_array(g, KEY "token_type", MX_GGUF_I32, n, &g->types));
    MX_TRY(get_array(g, KEY "scores", MX_GGUF_F32, n, &g->scores));
    MX_TRY(get_array(g, KEY "merges", MX_GGUF_STRING, 0, &g->merges));
    if (g->sentencepiece) {
        if (!g->scores) return mx_err_set(g->err, MX_FORMAT, KEY "scores: missing");
    } else if (!g->merges) {
        return mx_err_set(g->err, MX_FORMAT, KEY "merges: missing");
    }
    return MX_OK;
}

static bool is_gemma(const gguf_load *g) {
    mx_str arch;
    return mx_gguf_get_str(g->w, "general.architecture", &arch) &&
           mx_str_starts(arch, mx_str_of("gemma"));
}

// Gemma's files spell runs of two and more spaces as they are, while the text has them as U+2581
// by the time it is merged.
static bool respell_spaces(mx_str s, mx_buf *out) {
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] != ' ') return false;
    }
    mx_buf_clear(out);
    for (size_t i = 0; i < s.n; i++) mx_buf_puts(out, "\xe2\x96\x81");
    return s.n > 0;
}

static mx_status load_tokens(gguf_load *g) {
    vocab *v = &g->t->v;
    uint64_t n = g->tokens->n_elems;
    size_t bytes = 0;
    for (uint64_t i = 0; i < n; i++) bytes += g->tokens->strings[i].n;
    vocab_reserve(v, (uint32_t)n, bytes + bytes / 2);
    bool gemma = g->sentencepiece && is_gemma(g);
    mx_buf spaces;
    mx_buf_init(&spaces, 0);
    mx_status st = MX_OK;
    for (uint64_t i = 0; st == MX_OK && i < n; i++) {
        mx_str s = g->tokens->strings[i];
        if (gemma && respell_spaces(s, &spaces)) s = (mx_str){spaces.data, spaces.n};
        if (!mx_utf8_valid(s)) {
            st = mx_err_set(g->err, MX_FORMAT, KEY "tokens[%llu]: not valid UTF-8",
                            (unsigned long long)i);
            break;
        }
        st = vocab_put(v, (int64_t)i, s, g->err);
        if (st != MX_OK) mx_err_prefix(g->err, KEY "tokens");
    }
    mx_buf_free(&spaces);
    return st;
}

// Control tokens and user-defined ones are found in the text as they are spelled.
static mx_status load_added(gguf_load *g) {
    mx_status st = MX_OK;
    for (uint64_t i = 0; st == MX_OK && g->types && i < g->types->n_elems; i++) {
        int64_t type = mx_gguf_array_i64(g->types, i);
        bool special = type == TYPE_CONTROL || (type == TYPE_UNKNOWN && g->sentencepiece);
        if (!special && type != TYPE_USER_DEFINED) continue;
        mx_str s = g->tokens->strings[i];
        if (vocab_find(&g->t->v, s) != (int64_t)i) continue; // respelled: an ordinary token now
        st = tokenizer_add_token(g->t, (int64_t)i, s, (added_opts){.special = special}, g->err);
        if (st != MX_OK) mx_err_prefix(g->err, KEY "token_type[%llu]", (unsigned long long)i);
    }
    return st;
}

// The id under a key; -1 when absent. A stop or start token is special whatever its type says.
static mx_status get_id(gguf_load *g, const char *key, bool special, int32_t *out) {
    int64_t id;
    *out = -1;
    if (!mx_gguf_find(g->w, key)) return MX_OK;
    if (!mx_gguf_get_i64(g->w, key, &id) || !vocab_has(&g->t->v, id)) {
        return mx_err_set(g->err, MX_FORMAT, "%s: not the id of one of the %u tokens", key,
                          g->t->v.n_tokens);
    }
    *out = (int32_t)id;
    if (!special || (g->t->v.flags[id] & TOK_SPECIAL)) return MX_OK;
    if (g->t->v.flags[id] & TOK_ADDED) {
        g->t->v.flags[id] |= TOK_SPECIAL;
        return MX_OK;
    }
    char copy[VOCAB_MAX_TOKEN];
    mx_str s = vocab_text(&g->t->v, (uint32_t)id);
    memcpy(copy, s.p, s.n);
    return tokenizer_add_token(g->t, id, (mx_str){copy, s.n}, (added_opts){.special = true},
                               g->err);
}

// A boolean; *out stays as it is when the key is absent.
static mx_status get_flag(gguf_load *g, const char *key, bool *out) {
    if (!mx_gguf_find(g->w, key) || mx_gguf_get_bool(g->w, key, out)) return MX_OK;
    return mx_err_set(g->err, MX_FORMAT, "%s: not a boolean", key);
}

static mx_status load_ids(gguf_load *g, bool bos_by_default) {
    mx_tokenizer *t = g->t;
    int32_t eot, eom, unk;
    MX_TRY(get_id(g, KEY "bos_token_id", true, &t->bos));
    MX_TRY(get_id(g, KEY "eos_token_id", true, &t->eos));
    MX_TRY(get_id(g, KEY "eot_token_id", true, &eot));
    MX_TRY(get_id(g, KEY "eom_token_id", true, &eom));
    MX_TRY(get_id(g, KEY "unknown_token_id", false, &unk));
    int32_t pad;
    MX_TRY(get_id(g, KEY "padding_token_id", false, &pad));
    if (g->sentencepiece) t->b.unk = unk;
    tokenizer_add_eos(t, t->eos);
    tokenizer_add_eos(t, eot);
    tokenizer_add_eos(t, eom);
    // files from before eot_token_id: the control tokens that end a turn in known templates
    static const char *const ends[] = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>",
                                       "<end_of_turn>"};
    for (size_t i = 0; eot < 0 && i < MX_COUNT(ends); i++) {
        int32_t id = vocab_find(&t->v, mx_str_of(ends[i]));
        if (id >= 0 && (t->v.flags[id] & TOK_SPECIAL)) tokenizer_add_eos(t, id);
    }
    bool add_bos = bos_by_default, add_eos = false;
    MX_TRY(get_flag(g, KEY "add_bos_token", &add_bos));
    MX_TRY(get_flag(g, KEY "add_eos_token", &add_eos));
    if (add_bos && t->bos >= 0) mx_ids_push(&t->prefix, t->bos);
    if (add_eos && t->eos >= 0) mx_ids_push(&t->suffix, t->eos);
    return MX_OK;
}

static mx_status load_merges(gguf_load *g) {
    bpe_reserve_rules(&g->t->b, MX_MIN(g->merges->n_elems, (uint64_t)VOCAB_MAX_ID));
    if (g->merges->n_elems > VOCAB_MAX_ID) {
        return mx_err_set(g->err, MX_TOOLARGE, KEY "merges: %llu rules, at most %d are read",
                          (unsigned long long)g->merges->n_elems, VOCAB_MAX_ID);
    }
    for (uint64_t i = 0; i < g->merges->n_elems; i++) {
        mx_str m = g->merges->strings[i];
        const char *sp = m.n > 1 ? memchr(m.p + 1, ' ', m.n - 1) : NULL; // a part may be a space
        mx_status st = MX_FORMAT;
        if (!sp) {
            mx_err_set(g->err, MX_FORMAT, "not two parts with a space between");
        } else {
            mx_str left = {m.p, (size_t)(sp - m.p)}, right = {sp + 1, m.n - left.n - 1};
            st = bpe_add_rule(&g->t->b, left, right, (uint32_t)i, g->err);
        }
        if (st != MX_OK) {
            return mx_err_prefix(g->err, KEY "merges[%llu]", (unsigned long long)i);
        }
    }
    return MX_OK;
}

static mx_status load_scores(gguf_load *g) {
    mx_tokenizer *t = g->t;
    if (is_gemma(g)) {
        bpe_use_id_order(&t->b);
        return MX_OK;
    }
    float *scores = mx_alloc(g->scores->n_elems * sizeof *scores);
    memcpy(scores, g->scores->data, g->scores->n_elems * sizeof *scores);
    mx_status st = MX_OK;
    for (uint64_t i = 0; st == MX_OK && i < g->scores->n_elems; i++) {
        if (isnan(scores[i])) {
            st = mx_err_set(g->err, MX_FORMAT, KEY "scores[%llu]: not a number",
                            (unsigned long long)i);
        }
    }
    if (st == MX_OK) bpe_use_scores(&t->b, scores);
    mx_free(scores);
    return st;
}

static mx_status load_sentencepiece(gguf_load *g) {
    mx_tokenizer *t = g->t;
    bool space_prefix = true;
    MX_TRY(get_flag(g, KEY "add_space_prefix", &space_prefix));
    MX_TRY(load_ids(g, true));
    if (t->b.unk < 0) t->b.unk = vocab_find(&t->v, mx_str_of("<unk>"));
    t->b.fuse_unk = t->b.byte_fallback = true;
    mx_str mark = mx_str_of("\xe2\x96\x81"), space = mx_str_of(" ");
    norm_op *ops = MX_ARENA_ARRAY(&t->arena, norm_op, 2);
    size_t n = 0;
    if (space_prefix) ops[n++] = (norm_op){.kind = NORM_PREPEND, .text = mark};
    ops[n++] =
        (norm_op){.kind = NORM_REPLACE, .text = mark, .pat = pattern_string(&t->arena, space)};
    t->norm = (norm_chain){ops, n};
    t->dec[t->n_dec++] = (dec_op){.kind = DEC_REPLACE, .from = mark, .to = space};
    t->dec[t->n_dec++] = (dec_op){.kind = DEC_BYTE_FALLBACK};
    t->dec[t->n_dec++] = (dec_op){.kind = DEC_FUSE};
    if (space_prefix) t->dec[t->n_dec++] = (dec_op){.kind = DEC_STRIP, .from = space, .left = 1};
    return g->merges ? load_merges(g) : load_scores(g);
}

static mx_status load_byte_level(gguf_load *g) {
    mx_tokenizer *t = g->t;
    mx_str pre = mx_str_of("default");
    if (mx_gguf_find(g->w, KEY "pre") && !mx_gguf_get_str(g->w, KEY "pre", &pre)) {
        return mx_err_set(g->err, MX_FORMAT, KEY "pre: not a string");
    }
    size_t k = 0;
    while (k < MX_COUNT(pre_names) && !mx_str_is(pre, pre_names[k].name)) k++;
    if (k == MX_COUNT(pre_names)) {
        return mx_err_set(g->err, MX_UNSUPPORTED, KEY "pre: unknown pre-tokenizer '%.*s'",
                          (int)MX_MIN(pre.n, 80u), pre.p);
    }
    int flags = pre_names[k].flags;
    MX_TRY(load_ids(g, flags & PRE_BOS));
    t->b.ignore_merges = flags & PRE_WHOLE;
    if (flags & PRE_NFC) {
        norm_op *op = MX_ARENA_NEW(&t->arena, norm_op);
        *op = (norm_op){.kind = NORM_UNICODE, .form = UC_NFC};
        t->norm = (norm_chain){op, 1};
    }
    const char *const *re = splits[pre_names[k].split];
    t->pre.ops = MX_ARENA_ARRAY(&t->arena, pre_op, MAX_SPLITS + 1);
    for (; re[t->pre.n]; t->pre.n++) {
        pre_op *op = &t->pre.ops[t->pre.n];
        *op = (pre_op){.kind = PRE_SPLIT, .behavior = PRE_ISOLATED};
        if (re[t->pre.n][0]) {
            MX_TRY(pattern_regex(&op->pat, &t->arena, mx_str_of(re[t->pre.n]), false, g->err));
        } else {
            op->pat = pattern_class(UC_DIGIT);
        }
    }
    t->pre.ops[t->pre.n++] = (pre_op){.kind = PRE_BYTES};
    t->dec[t->n_dec++] = (dec_op){.kind = DEC_BYTES};
    return load_merges(g);
}

static mx_status load_templates(gguf_load *g) {
    static const char prefix[] = "tokenizer.chat_template";
    for (int32_t i = 0; i < g->w->n_kv; i++) {
        const mx_gguf_kv *kv = &g->w->kv[i];
        if (!mx_str_starts(kv->key, mx_str_of(prefix))) continue;
        mx_str name = {kv->key.p + sizeof prefix - 1, kv->key.n - (sizeof prefix - 1)};
        if (name.n && name.p[0] != '.') continue; // tokenizer.chat_templates lists the names
        if (kv->type != MX_GGUF_STRING || !mx_utf8_valid(kv->v.s)) {
            return mx_err_set(g->err, MX_FORMAT, "%.*s: not a string of valid UTF-8",
                              (int)MX_MIN(kv->key.n, 80u), kv->key.p);
        }
        if (name.n) name = (mx_str){name.p + 1, name.n - 1};
        tokenizer_add_template(g->t, name, kv->v.s);
    }
    return MX_OK;
}

static mx_status load_all(gguf_load *g) {
    mx_str model;
    if (!mx_gguf_get_str(g->w, KEY "model", &model)) {
        return mx_err_set(g->err, MX_FORMAT, KEY "model: missing or not a string");
    }
    g->sentencepiece = mx_str_is(model, "llama");
    if (!g->sentencepiece && !mx_str_is(model, "gpt2")) {
        return mx_err_set(g->err, MX_UNSUPPORTED,
                          KEY "model: '%.*s', only gpt2 and llama are supported",
                          (int)MX_MIN(model.n, 80u), model.p);
    }
    MX_TRY(find_arrays(g));
    MX_TRY(load_tokens(g));
    bpe_init(&g->t->b, &g->t->v);
    MX_TRY(load_added(g));
    MX_TRY(g->sentencepiece ? load_sentencepiece(g) : load_byte_level(g));
    MX_TRY(load_templates(g));
    return tokenizer_finish(g->t, g->err);
}

mx_status mx_tokenizer_open_gguf(mx_tokenizer **t, const mx_weights *w, mx_err *err) {
    *t = NULL;
    mx_str model;
    if (mx_gguf_get_str(w, KEY "model", &model) && mx_str_is(model, "no_vocab")) {
        mx_log(MX_LOG_WARN, "%s has no vocabulary: texts are bytes, one a token",
               w->path ? w->path : "GGUF");
        return mx_tokenizer_open_bytes(t, err);
    }
    gguf_load g = {.t = tokenizer_new(), .w = w, .err = err};
    mx_status st = load_all(&g);
    if (st != MX_OK) {
        mx_tokenizer_close(g.t);
        return mx_err_prefix(err, "%s", w->path ? w->path : "GGUF");
    }
    *t = g.t;
    return MX_OK;
}
