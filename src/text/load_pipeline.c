// The pipeline of a tokenizer.json: normalizer, pre-tokenizer, post-processor, decoder.
//
// State: fills the chains of a new tokenizer. Does not run them. Sequences are flattened, each type
// name has one reader; a type without a reader is refused by name.
#include "text/load_int.h"

#include "base/mem.h"

enum { MAX_OPS = 64 };

typedef struct pipe {
    mx_tokenizer *t;
    norm_op norm[MAX_OPS];
    pre_op pre[MAX_OPS];
    mx_err *err;
} pipe;

static mx_status unsupported(pipe *p, const char *what, const char *type) {
    return mx_err_set(p->err, MX_UNSUPPORTED, "%s '%.80s' is not supported", what, type);
}

// The member "type"; "" when absent.
static const char *type_of(const json_t *o) {
    const char *s = json_string_value(json_object_get(o, "type"));
    return s ? s : "";
}

static bool is(const char *a, const char *b) {
    return strcmp(a, b) == 0;
}

// Calls each on the members of a Sequence, or on v itself.
typedef mx_status (*read_fn)(pipe *p, const json_t *v);
static mx_status read_sequence(pipe *p, const json_t *v, const char *what, const char *members,
                               int depth, read_fn each) {
    if (!json_is_object(v)) return mx_err_set(p->err, MX_FORMAT, "%s: not an object", what);
    if (!is(type_of(v), "Sequence")) return each(p, v);
    const json_t *list = json_object_get(v, members);
    if (!json_is_array(list)) {
        return mx_err_set(p->err, MX_FORMAT, "%s: Sequence without %s", what, members);
    }
    if (depth > 8) return mx_err_set(p->err, MX_FORMAT, "%s: Sequence nested too deep", what);
    for (size_t i = 0; i < json_array_size(list); i++) {
        MX_TRY(read_sequence(p, json_array_get(list, i), what, members, depth + 1, each));
    }
    return MX_OK;
}

// {"String": s} or {"Regex": s}
static mx_status read_pattern(pipe *p, const json_t *o, pattern *out) {
    const json_t *v = json_object_get(o, "pattern");
    const json_t *s = json_object_get(v, "String"), *re = json_object_get(v, "Regex");
    if (json_is_string(s)) {
        if (!json_string_length(s)) return mx_err_set(p->err, MX_FORMAT, "pattern: empty");
        *out = pattern_string(&p->t->arena, load_view(s));
        return MX_OK;
    }
    if (json_is_string(re)) {
        return pattern_regex(out, &p->t->arena, load_view(re), false, p->err);
    }
    return mx_err_set(p->err, MX_FORMAT, "pattern: neither String nor Regex");
}

// ---- normalizers ----

static mx_status add_norm(pipe *p, norm_op op) {
    if (p->t->norm.n == MAX_OPS) {
        pattern_free(&op.pat);
        return mx_err_set(p->err, MX_TOOLARGE, "more than %d normalizers", MAX_OPS);
    }
    p->norm[p->t->norm.n++] = op;
    return MX_OK;
}

static mx_status read_norm(pipe *p, const json_t *v) {
    const char *type = type_of(v);
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    for (int i = 0; i < 4; i++) {
        if (is(type, forms[i])) {
            return add_norm(p, (norm_op){.kind = NORM_UNICODE, .form = (uc_form)i});
        }
    }
    norm_op op = {0};
    mx_str text;
    if (is(type, "Lowercase")) return add_norm(p, (norm_op){.kind = NORM_LOWERCASE});
    if (is(type, "ByteLevel")) return add_norm(p, (norm_op){.kind = NORM_BYTES});
    if (is(type, "Strip")) {
        op.kind = NORM_STRIP;
        MX_TRY(load_bool(v, "strip_left", true, &op.left, p->err));
        MX_TRY(load_bool(v, "strip_right", true, &op.right, p->err));
        return add_norm(p, op);
    }
    if (is(type, "Prepend")) {
        op.kind = NORM_PREPEND;
        MX_TRY(load_string(v, "prepend", &text, p->err));
        op.text = tokenizer_copy(p->t, text);
        return add_norm(p, op);
    }
    if (is(type, "Replace")) {
        op.kind = NORM_REPLACE;
        MX_TRY(load_string(v, "content", &text, p->err));
        op.text = tokenizer_copy(p->t, text);
        MX_TRY(read_pattern(p, v, &op.pat));
        return add_norm(p, op);
    }
    return unsupported(p, "normalizer", type);
}

// ---- pre-tokenizers ----

static mx_status add_pre(pipe *p, pre_op op) {
    if (p->t->pre.n == MAX_OPS) {
        pattern_free(&op.pat);
        return mx_err_set(p->err, MX_TOOLARGE, "more than %d pre-tokenizers", MAX_OPS);
    }
    p->pre[p->t->pre.n++] = op;
    return MX_OK;
}

static mx_status read_behavior(pipe *p, const json_t *v, pre_behavior *out) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const json_t *b = json_object_get(v, "behavior");
    if (!b) return MX_OK; // what the caller set
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        if (json_is_string(b) && is(json_string_value(b), names[i])) {
            *out = (pre_behavior)i;
            return MX_OK;
        }
    }
    return mx_err_set(p->err, MX_FORMAT, "pre_tokenizer: behavior is none of the five");
}

static mx_status read_split(pipe *p, const json_t *v) {
    pre_op op = {.kind = PRE_SPLIT};
    if (!json_object_get(v, "behavior")) {
        return mx_err_set(p->err, MX_FORMAT, "pre_tokenizer Split: behavior: missing");
    }
    MX_TRY(read_behavior(p, v, &op.behavior));
    MX_TRY(load_bool(v, "invert", false, &op.invert, p->err));
    MX_TRY(read_pattern(p, v, &op.pat));
    return add_pre(p, op);
}

static mx_status read_byte_level(pipe *p, const json_t *v) {
    pre_op op = {.kind = PRE_BYTES, .behavior = PRE_ISOLATED};
    MX_TRY(load_bool(v, "add_prefix_space", true, &op.prefix_space, p->err));
    MX_TRY(load_bool(v, "use_regex", true, &op.use_regex, p->err));
    if (op.use_regex) {
        MX_TRY(pattern_regex(&op.pat, &p->t->arena, mx_str_of(TEXT_RE_GPT2), false, p->err));
    }
    return add_pre(p, op);
}

static mx_status read_prepend_scheme(pipe *p, const json_t *v, pre_prepend *out) {
    static const char *const names[] = {"never", "always", "first"};
    const json_t *s = json_object_get(v, "prepend_scheme");
    bool old = true; // files from before prepend_scheme
    MX_TRY(load_bool(v, "add_prefix_space", true, &old, p->err));
    *out = old ? PRE_ALWAYS : PRE_NEVER;
    if (!s) return MX_OK;
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        if (json_is_string(s) && is(json_string_value(s), names[i])) {
            *out = (pre_prepend)i;
            return MX_OK;
        }
    }
    return mx_err_set(p->err, MX_FORMAT, "Metaspace: prepend_scheme is none of the three");
}

static mx_status read_metaspace(pipe *p, const json_t *v) {
    pre_op op = {.kind = PRE_METASPACE};
    mx_str mark;
    bool split;
    MX_TRY(load_string(v, "replacement", &mark, p->err));
    if (!mark.n) return mx_err_set(p->err, MX_FORMAT, "Metaspace: replacement: empty");
    MX_TRY(read_prepend_scheme(p, v, &op.prepend));
    MX_TRY(load_bool(v, "split", true, &split, p->err));
    op.replacement = tokenizer_copy(p->t, mark);
    MX_TRY(add_pre(p, op));
    if (!split) return MX_OK;
    return add_pre(p, (pre_op){.kind = PRE_SPLIT,
                               .behavior = PRE_MERGED_WITH_NEXT,
                               .pat = pattern_string(&p->t->arena, mark)});
}

static pre_op class_split(uint8_t mask, pre_behavior behavior) {
    return (pre_op){.kind = PRE_SPLIT, .behavior = behavior, .pat = pattern_class(mask)};
}

static mx_status read_pre(pipe *p, const json_t *v) {
    const char *type = type_of(v);
    if (is(type, "Split")) return read_split(p, v);
    if (is(type, "ByteLevel")) return read_byte_level(p, v);
    if (is(type, "Metaspace")) return read_metaspace(p, v);
    if (is(type, "WhitespaceSplit")) return add_pre(p, class_split(UC_SPACE, PRE_REMOVED));
    if (is(type, "Digits")) {
        bool one;
        MX_TRY(load_bool(v, "individual_digits", false, &one, p->err));
        return add_pre(p, class_split(UC_DIGIT, one ? PRE_ISOLATED : PRE_CONTIGUOUS));
    }
    if (is(type, "Punctuation")) {
        pre_op op = class_split(UC_PUNCT, PRE_ISOLATED);
        MX_TRY(read_behavior(p, v, &op.behavior));
        return add_pre(p, op);
    }
    if (is(type, "BertPreTokenizer")) {
        MX_TRY(add_pre(p, class_split(UC_SPACE, PRE_REMOVED)));
        return add_pre(p, class_split(UC_PUNCT, PRE_ISOLATED));
    }
    if (is(type, "CharDelimiterSplit")) {
        mx_str s;
        MX_TRY(load_string(v, "delimiter", &s, p->err));
        if (!s.n) return mx_err_set(p->err, MX_FORMAT, "delimiter: empty");
        return add_pre(p, (pre_op){.kind = PRE_SPLIT, .pat = pattern_string(&p->t->arena, s)});
    }
    if (is(type, "Whitespace")) {
        pre_op op = {.kind = PRE_SPLIT, .behavior = PRE_REMOVED, .invert = true};
        MX_TRY(pattern_regex(&op.pat, &p->t->arena, mx_str_of("\\w+|[^\\w\\s]+"), false, p->err));
        return add_pre(p, op);
    }
    return unsupported(p, "pre_tokenizer", type);
}

// ---- decoders ----

static mx_status add_dec(pipe *p, dec_op op) {
    if (p->t->n_dec == DEC_MAX_OPS) {
        return mx_err_set(p->err, MX_TOOLARGE, "more than %d decoders", DEC_MAX_OPS);
    }
    p->t->dec[p->t->n_dec++] = op;
    return MX_OK;
}

static mx_status read_dec_replace(pipe *p, const json_t *v) {
    const json_t *s = json_object_get(json_object_get(v, "pattern"), "String");
    mx_str to;
    if (!json_is_string(s)) return unsupported(p, "decoder Replace with a pattern of", "Regex");
    if (!json_string_length(s)) return mx_err_set(p->err, MX_FORMAT, "decoder Replace: empty");
    MX_TRY(load_string(v, "content", &to, p->err));
    return add_dec(p, (dec_op){.kind = DEC_REPLACE,
                               .from = tokenizer_copy(p->t, load_view(s)),
                               .to = tokenizer_copy(p->t, to)});
}

static mx_status read_dec_strip(pipe *p, const json_t *v) {
    mx_str c;
    const json_t *l = json_object_get(v, "start"), *r = json_object_get(v, "stop");
    MX_TRY(load_string(v, "content", &c, p->err));
    bool fits = json_is_integer(l) && json_is_integer(r);
    json_int_t left = json_integer_value(l), right = json_integer_value(r);
    if (!fits || left < 0 || right < 0 || left > 1000 || right > 1000 || !c.n ||
        unicode_len(c.p[0]) != c.n) {
        return mx_err_set(p->err, MX_FORMAT, "decoder Strip: content, start or stop");
    }
    return add_dec(p, (dec_op){.kind = DEC_STRIP,
                               .from = tokenizer_copy(p->t, c),
                               .left = (uint32_t)left,
                               .right = (uint32_t)right});
}

static mx_status read_dec(pipe *p, const json_t *v) {
    const char *type = type_of(v);
    if (is(type, "ByteLevel")) return add_dec(p, (dec_op){.kind = DEC_BYTES});
    if (is(type, "ByteFallback")) return add_dec(p, (dec_op){.kind = DEC_BYTE_FALLBACK});
    if (is(type, "Fuse")) return add_dec(p, (dec_op){.kind = DEC_FUSE});
    if (is(type, "Replace")) return read_dec_replace(p, v);
    if (is(type, "Strip")) return read_dec_strip(p, v);
    if (is(type, "Metaspace")) {
        mx_str mark;
        pre_prepend scheme;
        MX_TRY(load_string(v, "replacement", &mark, p->err));
        if (!mark.n) return mx_err_set(p->err, MX_FORMAT, "Metaspace: replacement: empty");
        MX_TRY(read_prepend_scheme(p, v, &scheme));
        return add_dec(p, (dec_op){.kind = DEC_METASPACE,
                                   .from = tokenizer_copy(p->t, mark),
                                   .drop_first = scheme != PRE_NEVER});
    }
    return unsupported(p, "decoder", type);
}

// What can be decoded as a stream: the operations a token at a time come first, behind a Fuse only
// those that need not see the whole text.
static mx_status check_decoders(pipe *p) {
    const dec_op *d = p->t->dec;
    bool fused = false, bytes = false;
    for (size_t i = 0; i < p->t->n_dec; i++) {
        bool ok = true;
        switch (d[i].kind) {
        case DEC_FUSE: fused = true; break;
        case DEC_STRIP: ok = !bytes && (!fused || d[i - 1].kind == DEC_FUSE); break;
        case DEC_REPLACE:
            ok = !bytes && (!fused || unicode_len(d[i].from.p[0]) == d[i].from.n);
            break;
        case DEC_BYTES:
            ok = !bytes && !fused;
            bytes = true;
            break;
        default: ok = !fused && !bytes;
        }
        if (!ok) {
            return mx_err_set(p->err, MX_UNSUPPORTED,
                              "decoder: operation %zu of the Sequence at this place", i);
        }
    }
    return MX_OK;
}

static mx_status read_all(pipe *p, const json_t *root) {
    const json_t *v = json_object_get(root, "normalizer");
    if (v && !json_is_null(v)) {
        MX_TRY(read_sequence(p, v, "normalizer", "normalizers", 0, read_norm));
    }
    v = json_object_get(root, "pre_tokenizer");
    if (v && !json_is_null(v)) {
        MX_TRY(read_sequence(p, v, "pre_tokenizer", "pretokenizers", 0, read_pre));
    }
    v = json_object_get(root, "decoder");
    p->t->join_with_spaces = !v || json_is_null(v);
    if (!p->t->join_with_spaces) {
        MX_TRY(read_sequence(p, v, "decoder", "decoders", 0, read_dec));
    }
    return check_decoders(p);
}

mx_status load_pipeline(mx_tokenizer *t, const json_t *root, mx_err *err) {
    pipe *p = mx_calloc(1, sizeof *p);
    p->t = t;
    p->err = err;
    mx_status st = read_all(p, root);
    // also on error: closing the tokenizer frees what was compiled
    t->norm.ops = MX_ARENA_ARRAY(&t->arena, norm_op, t->norm.n + 1);
    memcpy(t->norm.ops, p->norm, t->norm.n * sizeof *p->norm);
    t->pre.ops = MX_ARENA_ARRAY(&t->arena, pre_op, t->pre.n + 1);
    memcpy(t->pre.ops, p->pre, t->pre.n * sizeof *p->pre);
    mx_free(p);
    return st;
}

// ---- post-processors ----

static mx_status push_known(mx_tokenizer *t, mx_ids *ids, const json_t *id, mx_err *err) {
    if (!json_is_integer(id) || !vocab_has(&t->v, json_integer_value(id))) {
        return mx_err_set(err, MX_FORMAT, "post_processor: a special token's id is no token");
    }
    mx_ids_push(ids, (int32_t)json_integer_value(id));
    return MX_OK;
}

static mx_status read_template(mx_tokenizer *t, const json_t *v, mx_err *err) {
    const json_t *single = json_object_get(v, "single");
    const json_t *known = json_object_get(v, "special_tokens");
    if (!json_is_array(single)) {
        return mx_err_set(err, MX_FORMAT, "TemplateProcessing: single: not an array");
    }
    size_t n_seq = 0;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const json_t *name = json_object_get(json_object_get(item, "SpecialToken"), "id");
        if (json_object_get(item, "Sequence")) {
            n_seq++;
            continue;
        }
        if (!json_is_string(name)) {
            return mx_err_set(err, MX_FORMAT, "TemplateProcessing: single[%zu]", i);
        }
        const json_t *ids = json_object_get(json_object_get(known, json_string_value(name)), "ids");
        if (!json_is_array(ids)) {
            return mx_err_set(err, MX_FORMAT,
                              "TemplateProcessing: special token '%.80s' has no ids",
                              json_string_value(name));
        }
        for (size_t k = 0; k < json_array_size(ids); k++) {
            MX_TRY(push_known(t, n_seq ? &t->suffix : &t->prefix, json_array_get(ids, k), err));
        }
    }
    if (n_seq != 1) {
        return mx_err_set(err, MX_UNSUPPORTED, "TemplateProcessing: single holds %zu sequences",
                          n_seq);
    }
    return MX_OK;
}

// {"sep": [text, id], "cls": [text, id]}
static mx_status read_cls_sep(mx_tokenizer *t, const json_t *v, mx_err *err) {
    MX_TRY(push_known(t, &t->prefix, json_array_get(json_object_get(v, "cls"), 1), err));
    return push_known(t, &t->suffix, json_array_get(json_object_get(v, "sep"), 1), err);
}

static mx_status read_post(mx_tokenizer *t, const json_t *v, int depth, mx_err *err) {
    if (!json_is_object(v)) return mx_err_set(err, MX_FORMAT, "post_processor: not an object");
    const char *type = type_of(v);
    if (is(type, "ByteLevel")) return MX_OK; // offsets only
    bool around = is(type, "TemplateProcessing") || is(type, "BertProcessing") ||
                  is(type, "RobertaProcessing");
    if (around && (t->prefix.n || t->suffix.n)) {
        return mx_err_set(err, MX_UNSUPPORTED, "post_processor: two that add tokens");
    }
    if (is(type, "TemplateProcessing")) return read_template(t, v, err);
    if (around) return read_cls_sep(t, v, err);
    const json_t *list = json_object_get(v, "processors");
    if (!is(type, "Sequence") || !json_is_array(list) || depth > 8) {
        return mx_err_set(err, MX_UNSUPPORTED, "post_processor '%.80s' is not supported", type);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        MX_TRY(read_post(t, json_array_get(list, i), depth + 1, err));
    }
    return MX_OK;
}

mx_status load_post_processor(mx_tokenizer *t, const json_t *v, mx_err *err) {
    return !v || json_is_null(v) ? MX_OK : read_post(t, v, 0, err);
}
