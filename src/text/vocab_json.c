// The two large parts of a tokenizer.json, read without building a tree.
//
// No state. Does not interpret the rest of the file (load_json.c). A tokenizer.json is nearly all
// vocabulary and merges: jansson takes 0.65 s for Llama 3's, 1.9 s for Gemma 3's. So both values
// are cut out first, the rest goes to the ordinary parser with {} and [] in their places, and the
// cut parts are read here, strictly, straight into their tables (0.1 s and 0.3 s).
#include "text/vocab_json_int.h"

#include "base/mem.h"

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t skip_spaces(mx_str s, size_t i) {
    while (i < s.n && is_space(s.p[i])) i++;
    return i;
}

// Past the string that opens at i, or s.n when it does not close.
static size_t skip_string(mx_str s, size_t i) {
    for (i++; i < s.n; i++) {
        if (s.p[i] == '\\')
            i++;
        else if (s.p[i] == '"')
            return i + 1;
    }
    return s.n;
}

// Past the object or array that opens at i, or 0 when it does not close.
static size_t skip_value(mx_str s, size_t i) {
    int64_t depth = 0;
    while (i < s.n) {
        char c = s.p[i];
        if (c == '"') {
            i = skip_string(s, i);
            continue;
        }
        if (c == '{' || c == '[') depth++;
        if ((c == '}' || c == ']') && --depth == 0) return i + 1;
        i++;
    }
    return 0;
}

// If the string at [from, to) is a key that is followed by an object or array, where that begins.
static size_t value_of_key(mx_str s, size_t to) {
    size_t i = skip_spaces(s, to);
    if (i >= s.n || s.p[i] != ':') return 0;
    i = skip_spaces(s, i + 1);
    return i < s.n && (s.p[i] == '{' || s.p[i] == '[') ? i : 0;
}

mx_status vocab_json_cut(mx_str s, vocab_json *out, mx_err *err) {
    *out = (vocab_json){0};
    mx_buf_init(&out->rest, 0);
    size_t i = 0, copied = 0;
    int64_t depth = 0;
    bool in_model = false;
    while (i < s.n) {
        char c = s.p[i];
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        if (c != '"') {
            i++;
            continue;
        }
        size_t end = skip_string(s, i);
        mx_str key = {s.p + i, end - i};
        i = end;
        if (depth != 1 && !(depth == 2 && in_model)) continue;
        size_t at = value_of_key(s, end);
        if (depth == 1) {
            if (at) in_model = mx_str_is(key, "\"model\"") && s.p[at] == '{';
            continue;
        }
        bool tokens = mx_str_is(key, "\"vocab\""), merges = mx_str_is(key, "\"merges\"");
        if (!at || !(tokens || merges)) continue;
        size_t close = skip_value(s, at);
        if (!close) return mx_err_set(err, MX_FORMAT, "model: JSON ends inside a value");
        mx_str *part = tokens ? &out->vocab : &out->merges;
        if (part->p) {
            return mx_err_set(err, MX_FORMAT, "model: %.*s is there twice", (int)key.n, key.p);
        }
        *part = (mx_str){s.p + at, close - at};
        mx_buf_add(&out->rest, s.p + copied, at - copied);
        mx_buf_puts(&out->rest, s.p[at] == '{' ? "{}" : "[]");
        i = copied = close;
    }
    mx_buf_add(&out->rest, s.p + copied, s.n - copied);
    if (out->rest.full) return mx_err_set(err, MX_TOOLARGE, "too large");
    return MX_OK;
}

// ---- strict reading ----

typedef struct cursor {
    mx_str s;
    size_t i;
    const char *what; // name of the part, for messages
    mx_err *err;
} cursor;

static mx_status bad(const cursor *c, const char *why) {
    return mx_err_set(c->err, MX_FORMAT, "%s: %s at byte %zu", c->what, why, c->i);
}

static bool take(cursor *c, char ch) {
    c->i = skip_spaces(c->s, c->i);
    if (c->i >= c->s.n || c->s.p[c->i] != ch) return false;
    c->i++;
    return true;
}

static int hex4(mx_str s, size_t i) {
    int v = 0;
    for (size_t k = i; k < i + 4; k++) {
        if (k >= s.n) return -1;
        char d = s.p[k], l = d | 0x20;
        int x = d >= '0' && d <= '9' ? d - '0' : l >= 'a' && l <= 'f' ? l - 'a' + 10 : -1;
        if (x < 0) return -1;
        v = v << 4 | x;
    }
    return v;
}

// The escape behind the backslash at c->i - 1, appended to buf (room for 4 bytes is certain).
static mx_status read_escape(cursor *c, char *buf, size_t *n) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char e = c->i < c->s.n ? c->s.p[c->i] : 0;
    const char *k = e ? strchr(from, e) : NULL;
    if (k) {
        buf[(*n)++] = to[k - from];
        c->i++;
        return MX_OK;
    }
    int hi = e == 'u' ? hex4(c->s, c->i + 1) : -1;
    if (hi < 0) return bad(c, "invalid escape");
    c->i += 5;
    uint32_t cp = (uint32_t)hi;
    if (cp >= 0xd800 && cp < 0xdc00) {
        mx_str rest = {c->s.p + c->i, c->s.n - c->i};
        int lo = mx_str_starts(rest, mx_str_of("\\u")) ? hex4(c->s, c->i + 2) : -1;
        if (lo < 0xdc00 || lo > 0xdfff) return bad(c, "half a surrogate pair");
        cp = 0x10000 + ((cp & 0x3ff) << 10 | ((uint32_t)lo & 0x3ff));
        c->i += 6;
    } else if (cp >= 0xdc00 && cp <= 0xdfff) {
        return bad(c, "half a surrogate pair");
    }
    *n += (size_t)mx_utf8_encode(cp, buf + *n);
    return MX_OK;
}

// A string token. *out is a view into the text, or into buf when there are escapes.
static mx_status read_string(cursor *c, char buf[VOCAB_MAX_TOKEN + 4], mx_str *out) {
    if (!take(c, '"')) return bad(c, "a string was expected");
    size_t from = c->i, n = 0;
    bool copied = false;
    for (;; c->i++) {
        if (c->i >= c->s.n) return bad(c, "a string does not end");
        char ch = c->s.p[c->i];
        if (ch == '"') break;
        if ((unsigned char)ch < 0x20) return bad(c, "a control character in a string");
        if (c->i - from > 8u * VOCAB_MAX_TOKEN || n > VOCAB_MAX_TOKEN) {
            return bad(c, "a string is too long for a token");
        }
        if (ch == '\\') {
            if (!copied) {
                n = MX_MIN(c->i - from, (size_t)VOCAB_MAX_TOKEN);
                memcpy(buf, c->s.p + from, n);
                copied = true;
            }
            c->i++;
            MX_TRY(read_escape(c, buf, &n));
            c->i--; // the loop steps on
        } else if (copied) {
            buf[n++] = ch;
        }
    }
    *out = copied ? (mx_str){buf, n} : (mx_str){c->s.p + from, c->i - from};
    c->i++;
    if (!mx_utf8_valid(*out)) return bad(c, "invalid UTF-8");
    return MX_OK;
}

static mx_status read_id(cursor *c, int64_t *out) {
    c->i = skip_spaces(c->s, c->i);
    size_t from = c->i;
    int64_t v = 0;
    while (c->i < c->s.n && c->s.p[c->i] >= '0' && c->s.p[c->i] <= '9' && c->i - from < 11) {
        v = v * 10 + (c->s.p[c->i++] - '0');
    }
    char next = c->i < c->s.n ? c->s.p[c->i] : 0;
    bool ends = is_space(next) || next == ',' || next == '}';
    if (c->i == from || !ends || (c->s.p[from] == '0' && c->i - from > 1)) {
        return bad(c, "an id was expected");
    }
    *out = v;
    return MX_OK;
}

mx_status vocab_json_read(const vocab_json *j, vocab *v, mx_err *err) {
    cursor c = {.s = j->vocab, .what = "model.vocab", .err = err};
    char buf[VOCAB_MAX_TOKEN + 4];
    vocab_reserve(v, (uint32_t)MX_MIN(j->vocab.n / 16, (size_t)VOCAB_MAX_ID), j->vocab.n);
    if (!take(&c, '{')) return bad(&c, "an object was expected");
    if (take(&c, '}')) return MX_OK;
    do {
        mx_str token;
        int64_t id = -1;
        MX_TRY(read_string(&c, buf, &token));
        if (!take(&c, ':')) return bad(&c, "':' was expected");
        MX_TRY(read_id(&c, &id));
        if (vocab_put(v, id, token, err) != MX_OK) return mx_err_prefix(err, "model.vocab");
    } while (take(&c, ','));
    return take(&c, '}') ? MX_OK : bad(&c, "',' or '}' was expected");
}

// One rule: "left right" or ["left", "right"].
static mx_status read_rule(cursor *c, bpe *b, uint32_t rank) {
    char buf[VOCAB_MAX_TOKEN + 4], buf2[VOCAB_MAX_TOKEN + 4];
    mx_str left, right;
    if (take(c, '[')) {
        MX_TRY(read_string(c, buf, &left));
        if (!take(c, ',')) return bad(c, "',' was expected");
        MX_TRY(read_string(c, buf2, &right));
        if (!take(c, ']')) return bad(c, "']' was expected");
    } else {
        mx_str both;
        MX_TRY(read_string(c, buf, &both));
        const char *sp = both.n ? memchr(both.p, ' ', both.n) : NULL;
        left = (mx_str){both.p, sp ? (size_t)(sp - both.p) : 0};
        right = (mx_str){sp ? sp + 1 : both.p, sp ? both.n - left.n - 1 : 0};
        if (!sp || (right.n && memchr(right.p, ' ', right.n))) {
            return bad(c, "a merge is not two parts with a space between");
        }
    }
    if (bpe_add_rule(b, left, right, rank, c->err) != MX_OK) {
        return mx_err_prefix(c->err, "model.merges[%u]", rank);
    }
    return MX_OK;
}

mx_status vocab_json_merges(const vocab_json *j, bpe *b, mx_err *err) {
    cursor c = {.s = j->merges, .what = "model.merges", .err = err};
    if (!take(&c, '[')) return bad(&c, "an array was expected");
    if (take(&c, ']')) return MX_OK;
    bpe_reserve_rules(b, MX_MIN(j->merges.n / 20, (size_t)VOCAB_MAX_ID));
    uint32_t rank = 0;
    do {
        if (rank > VOCAB_MAX_ID) return bad(&c, "too many merges");
        MX_TRY(read_rule(&c, b, rank++));
    } while (take(&c, ','));
    return take(&c, ']') ? MX_OK : bad(&c, "',' or ']' was expected");
}
