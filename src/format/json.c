// Untrusted JSON: jansson behind a scan that bounds depth and widens integers. No state.
// Does not interpret what it parses.
//
// jansson recurses up to 2048 levels and stops at integers beyond 64 bits, which real
// tokenizer_config.json files hold. So one iterative pass over the text counts depth first, and
// for config files notes the integers that do not fit; those get ".0" appended in a copy.
#include "format/format_int.h"

enum { MAX_DEPTH = 128 };

typedef struct json_scan {
    const char *what;
    size_t *wide; // where each too large integer ends
    size_t n_wide, cap_wide;
    bool collect;
} json_scan;

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

// Past the string that opens at i, or n when it does not end.
static size_t skip_string(const char *s, size_t n, size_t i) {
    for (i++; i < n; i++) {
        if (s[i] == '\\') {
            i++;
        } else if (s[i] == '"') {
            return i + 1;
        }
    }
    return n;
}

static bool fits_i64(const char *digits, size_t n, bool negative) {
    static const char max[] = "9223372036854775807", min[] = "9223372036854775808";
    size_t top = sizeof max - 1;
    if (n != top) return n < top;
    return memcmp(digits, negative ? min : max, top) <= 0;
}

static void note_wide(json_scan *sc, size_t end) {
    if (sc->n_wide == sc->cap_wide) {
        sc->cap_wide = sc->cap_wide ? sc->cap_wide * 2 : 16;
        sc->wide = mx_realloc(sc->wide, sc->cap_wide * sizeof *sc->wide);
    }
    sc->wide[sc->n_wide++] = end;
}

// Past the number whose first digit is at i.
static size_t skip_number(json_scan *sc, const char *s, size_t n, size_t i) {
    size_t start = i;
    while (i < n && is_digit(s[i])) i++;
    bool integer = i == n || (s[i] != '.' && s[i] != 'e' && s[i] != 'E');
    if (integer) {
        bool negative = start > 0 && s[start - 1] == '-';
        if (sc->collect && !fits_i64(s + start, i - start, negative)) note_wide(sc, i);
        return i;
    }
    while (i < n && (is_digit(s[i]) || strchr(".eE+-", s[i]))) {
        if (!s[i]) break; // strchr finds the terminator
        i++;
    }
    return i;
}

static mx_status scan(json_scan *sc, const char *s, size_t n, mx_err *err) {
    int depth = 0;
    for (size_t i = 0; i < n;) {
        char c = s[i];
        if (c == '"') {
            i = skip_string(s, n, i);
            continue;
        }
        if (is_digit(c)) {
            i = skip_number(sc, s, n, i);
            continue;
        }
        if (c == '[' || c == '{') {
            if (++depth > MAX_DEPTH) {
                return mx_err_set(err, MX_FORMAT, "%s: JSON nested deeper than %d at byte %zu",
                                  sc->what, MAX_DEPTH, i);
            }
        } else if (c == ']' || c == '}') {
            depth--; // may go below zero: the parser says what is wrong
        }
        i++;
    }
    return MX_OK;
}

// A copy of the text in which every noted integer is a real. mx_free'd by the caller.
static char *widen(const json_scan *sc, const char *s, size_t n, size_t *out_n) {
    char *copy = mx_alloc(n + 2 * sc->n_wide), *p = copy;
    size_t from = 0;
    for (size_t k = 0; k < sc->n_wide; k++) {
        memcpy(p, s + from, sc->wide[k] - from);
        p += sc->wide[k] - from;
        memcpy(p, ".0", 2);
        p += 2;
        from = sc->wide[k];
    }
    memcpy(p, s + from, n - from);
    *out_n = (size_t)(p - copy) + (n - from);
    return copy;
}

json_t *mx_json_parse(const char *text, size_t n, size_t max_bytes, int flags, const char *what,
                      mx_err *err) {
    if (n > max_bytes) {
        mx_err_set(err, MX_TOOLARGE, "%s: %zu bytes of JSON, at most %zu are read", what, n,
                   max_bytes);
        return NULL;
    }
    json_scan sc = {.what = what, .collect = (flags & MX_JSON_CONFIG) != 0};
    json_t *root = NULL;
    char *copy = NULL;
    if (n == 0) {
        mx_err_set(err, MX_FORMAT, "%s: empty, expected JSON", what);
        goto out;
    }
    if (scan(&sc, text, n, err) != MX_OK) goto out;
    if (sc.n_wide) text = copy = widen(&sc, text, n, &n);
    size_t opts = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    if (flags & MX_JSON_VOCAB) opts |= JSON_ALLOW_NUL;
    json_error_t e;
    root = json_loadb(text, n, opts, &e);
    if (!root) {
        char buf[FORMAT_NAME_TEXT];
        bool nul = json_error_code(&e) == json_error_null_character ||
                   json_error_code(&e) == json_error_null_byte_in_key;
        const char *text_of = nul ? "NUL characters are not supported here" : e.text;
        mx_err_set(err, MX_FORMAT, "%s: line %d, column %d: %s", what, e.line, e.column,
                   format_show(mx_str_of(text_of), buf));
    }
out:
    mx_free(copy);
    mx_free(sc.wide);
    return root;
}

json_t *mx_json_load(const char *path, size_t max_bytes, int flags, mx_err *err) {
    char *text;
    size_t n;
    if (mx_read_file(path, max_bytes, &text, &n, err) != MX_OK) return NULL;
    json_t *root = mx_json_parse(text, n, max_bytes, flags, path, err);
    mx_free(text);
    return root;
}
