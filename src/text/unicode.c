// Unicode classes and normal forms that equal those of Hugging Face's tokenizers.
//
// State: one class byte per code point, made once from run lengths and constant after that.
// Does not know locales, grapheme clusters or scripts. The tables are generated (see
// tools/gen_unicode.py): the library's parts know different Unicode versions, and the ids must
// match all of them. Marks are put in order by a counting sort, since a mark run may be as long as
// the text (utf8proc takes quadratic time there).
#include "text/unicode_int.h"

#include "base/mem.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct class_gain {
    const char *name, *gain;
} class_gain;

#include "text/unicode_tables.def"

enum { CP_END = 0x110000 };

// Names of the categories in the order of unicode_runs.
static const char gc_names[][3] = {"Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd",
                                   "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm",
                                   "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co"};

static uint8_t classes[CP_END];
static uint32_t decomp_at[MX_COUNT(unicode_decomp)]; // offsets into unicode_pool
static pthread_once_t built = PTHREAD_ONCE_INIT;

static void add_ranges(const uint32_t *r, size_t n, uint8_t bit) {
    for (size_t i = 0; i + 1 < n; i += 2) {
        for (uint32_t c = r[i]; c <= r[i + 1]; c++) classes[c] |= bit;
    }
}

static void build_norm_bits(void) {
    uint32_t at = 0;
    for (size_t i = 0; i < MX_COUNT(unicode_decomp); i++) {
        decomp_at[i] = at;
        at += (unicode_decomp[i] >> 5 & 31) + (unicode_decomp[i] & 31);
        if (unicode_decomp[i] >> 5 & 31) classes[unicode_decomp[i] >> 10] |= UC_NORM;
    }
    CHECK(at == MX_COUNT(unicode_pool));
    // a primary composite is its own NFC
    for (size_t i = 0; i < MX_COUNT(unicode_compose); i += 3) {
        classes[unicode_compose[i + 2]] &= (uint8_t)~UC_NORM;
    }
    for (size_t i = 0; i < MX_COUNT(unicode_compose); i += 3) {
        classes[unicode_compose[i + 1]] |= UC_NORM;
    }
    for (size_t i = 0; i < MX_COUNT(unicode_ccc); i += 3) {
        for (uint32_t c = unicode_ccc[i]; c <= unicode_ccc[i + 1]; c++) classes[c] |= UC_NORM;
    }
    static const uint32_t jamo[] = {0x1161, 0x1175, 0x11a8, 0x11c2};
    add_ranges(jamo, MX_COUNT(jamo), UC_NORM);
}

static void build(void) {
    for (size_t i = 0; i < MX_COUNT(unicode_runs); i++) {
        uint32_t from = unicode_runs[i] >> 5;
        uint32_t to = i + 1 < MX_COUNT(unicode_runs) ? unicode_runs[i + 1] >> 5 : CP_END;
        char major = gc_names[unicode_runs[i] & 31][0];
        uint8_t bits = major == 'L' ? UC_LETTER : major == 'N' ? UC_NUMBER | UC_DIGIT : 0;
        if (bits) memset(classes + from, bits, to - from);
    }
    static const uint32_t spaces[] = {0x9,    0xd,    0x20,   0x20,   0x85,   0x85,   0xa0,
                                      0xa0,   0x1680, 0x1680, 0x2000, 0x200a, 0x2028, 0x2029,
                                      0x202f, 0x202f, 0x205f, 0x205f, 0x3000, 0x3000};
    add_ranges(spaces, MX_COUNT(spaces), UC_SPACE);
    add_ranges(unicode_numeric, MX_COUNT(unicode_numeric), UC_DIGIT);
    add_ranges(unicode_punct, MX_COUNT(unicode_punct), UC_PUNCT);
    add_ranges(unicode_word, MX_COUNT(unicode_word), UC_WORD);
    static const uint32_t joiners[] = {0x200c, 0x200d}; // words to the added-token rule only
    add_ranges(joiners, MX_COUNT(joiners), UC_WORD);
    build_norm_bits();
}

const uint8_t *unicode_classes(void) {
    pthread_once(&built, build);
    return classes;
}

// Row of the sorted table (stride numbers a row) whose first number is the last one <= key; -1
// when all are greater.
static ptrdiff_t find_row(const uint32_t *t, size_t rows, size_t stride, uint32_t key) {
    size_t lo = 0, hi = rows;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (t[mid * stride] <= key)
            lo = mid + 1;
        else
            hi = mid;
    }
    return (ptrdiff_t)lo - 1;
}

static uint32_t ccc_of(uint32_t c) {
    if (!(classes[c] & UC_NORM)) return 0;
    ptrdiff_t i = find_row(unicode_ccc, MX_COUNT(unicode_ccc) / 3, 3, c);
    if (i < 0 || c > unicode_ccc[i * 3 + 1]) return 0;
    return unicode_ccc[i * 3 + 2];
}

// Code points with their combining class in the top byte.
typedef struct cp_list {
    uint32_t *v;
    size_t n, cap;
} cp_list;

static void push(cp_list *l, uint32_t c) {
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 256;
        l->v = mx_realloc(l->v, l->cap * sizeof *l->v);
    }
    l->v[l->n++] = c;
}

static uint32_t cp_of(uint32_t v) {
    return v & 0xffffff;
}

enum {
    S_BASE = 0xac00,
    L_BASE = 0x1100,
    V_BASE = 0x1161,
    T_BASE = 0x11a7,
    L_COUNT = 19,
    V_COUNT = 21,
    T_COUNT = 28,
    S_COUNT = L_COUNT * V_COUNT * T_COUNT
};

static void decompose(cp_list *l, uint32_t c, bool compat) {
    if (c < 0xa0) {
        push(l, c);
        return;
    }
    if (c - S_BASE < S_COUNT) {
        uint32_t s = c - S_BASE;
        push(l, L_BASE + s / (V_COUNT * T_COUNT));
        push(l, V_BASE + s % (V_COUNT * T_COUNT) / T_COUNT);
        if (s % T_COUNT) push(l, T_BASE + s % T_COUNT);
        return;
    }
    ptrdiff_t i = find_row(unicode_decomp, MX_COUNT(unicode_decomp), 1, c << 10 | 0x3ff);
    uint32_t row = i < 0 ? 0 : unicode_decomp[i], n_canon = row >> 5 & 31, n_compat = row & 31;
    if (row >> 10 != c || (!n_canon && !compat)) {
        push(l, c | ccc_of(c) << 24);
        return;
    }
    const uint32_t *p = unicode_pool + decomp_at[i];
    uint32_t n = n_canon;
    if (compat && n_compat) {
        p += n_canon;
        n = n_compat;
    }
    for (uint32_t k = 0; k < n; k++) push(l, p[k] | ccc_of(p[k]) << 24);
}

// Stable order by combining class of v[0..n), all of class > 0.
static void sort_marks(uint32_t *v, size_t n) {
    if (n < 24) {
        for (size_t i = 1; i < n; i++) {
            uint32_t x = v[i];
            size_t k = i;
            for (; k > 0 && v[k - 1] >> 24 > x >> 24; k--) v[k] = v[k - 1];
            v[k] = x;
        }
        return;
    }
    size_t at[257] = {0};
    for (size_t i = 0; i < n; i++) at[(v[i] >> 24) + 1]++;
    for (size_t i = 1; i < 257; i++) at[i] += at[i - 1];
    uint32_t *sorted = mx_alloc(n * sizeof *sorted);
    for (size_t i = 0; i < n; i++) sorted[at[v[i] >> 24]++] = v[i];
    memcpy(v, sorted, n * sizeof *v);
    mx_free(sorted);
}

static void order_marks(cp_list *l) {
    for (size_t i = 0; i < l->n;) {
        if (!(l->v[i] >> 24)) {
            i++;
            continue;
        }
        size_t from = i;
        while (i < l->n && l->v[i] >> 24) i++;
        if (i - from > 1) sort_marks(l->v + from, i - from);
    }
}

// The primary composite of a and b, or 0.
static uint32_t composite(uint32_t a, uint32_t b) {
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT) {
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    }
    if (a - S_BASE < S_COUNT && (a - S_BASE) % T_COUNT == 0 && b > T_BASE && b < T_BASE + T_COUNT) {
        return a + (b - T_BASE);
    }
    if (!(classes[b] & UC_NORM)) return 0;
    size_t lo = 0, hi = MX_COUNT(unicode_compose) / 3;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        const uint32_t *t = unicode_compose + mid * 3;
        if (t[0] == a && t[1] == b) return t[2];
        if (t[0] < a || (t[0] == a && t[1] < b))
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

// Canonical composition in place.
static void compose(cp_list *l) {
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last_ccc = 0; // of what was kept after the starter
    for (size_t i = 0; i < l->n; i++) {
        uint32_t v = l->v[i], ccc = v >> 24;
        bool adjacent = starter != SIZE_MAX && starter + 1 == out;
        if (starter != SIZE_MAX && (adjacent || last_ccc < ccc)) {
            uint32_t c = composite(cp_of(l->v[starter]), cp_of(v));
            if (c) {
                l->v[starter] = c;
                continue;
            }
        }
        if (!ccc) starter = out;
        last_ccc = ccc;
        l->v[out++] = v;
    }
    l->n = out;
}

static bool stays(uc_form form, mx_str text) {
    const uint8_t *cls = unicode_classes();
    for (size_t i = 0; i < text.n;) {
        if ((signed char)text.p[i] >= 0) {
            i++;
            continue;
        }
        if (form != UC_NFC || cls[unicode_next(text.p, &i)] & UC_NORM) return false;
    }
    return true;
}

void unicode_normalize(uc_form form, mx_str text, mx_buf *out) {
    if (stays(form, text)) {
        mx_buf_add(out, text.p, text.n);
        return;
    }
    cp_list l = {0};
    for (size_t i = 0; i < text.n;) {
        decompose(&l, unicode_next(text.p, &i), form == UC_NFKC || form == UC_NFKD);
    }
    order_marks(&l);
    if (form == UC_NFC || form == UC_NFKC) compose(&l);
    for (size_t i = 0; i < l.n; i++) mx_buf_utf8(out, cp_of(l.v[i]));
    mx_free(l.v);
}

void unicode_lower(mx_str text, mx_buf *out) {
    for (size_t i = 0; i < text.n;) {
        size_t from = i;
        uint32_t c = unicode_next(text.p, &i);
        ptrdiff_t r = find_row(unicode_lower_map, MX_COUNT(unicode_lower_map) / 3, 3, c);
        if (r < 0 || unicode_lower_map[r * 3] != c) {
            mx_buf_add(out, text.p + from, i - from);
            continue;
        }
        mx_buf_utf8(out, unicode_lower_map[r * 3 + 1]);
        if (unicode_lower_map[r * 3 + 2]) mx_buf_utf8(out, unicode_lower_map[r * 3 + 2]);
    }
}

// Every range of the categories whose name begins with `name`, spelled out.
static bool spell_ranges(mx_str name, mx_buf *out) {
    bool found = false;
    for (size_t i = 0; i < MX_COUNT(unicode_runs); i++) {
        const char *gc = gc_names[unicode_runs[i] & 31];
        if (!mx_str_starts(mx_str_of(gc), name) || strcmp(gc, "Cs") == 0) continue;
        uint32_t from = unicode_runs[i] >> 5;
        uint32_t to = i + 1 < MX_COUNT(unicode_runs) ? unicode_runs[i + 1] >> 5 : CP_END;
        mx_buf_printf(out, "\\x{%x}-\\x{%x}", from, to - 1);
        found = true;
    }
    return found;
}

bool unicode_class_text(mx_str name, mx_buf *out) {
    if (name.n == 0 || name.n > 2) return false;
    if (mx_str_is(name, "\\w")) {
        for (size_t i = 0; i < MX_COUNT(unicode_word); i += 2) {
            mx_buf_printf(out, "\\x{%x}-\\x{%x}", unicode_word[i], unicode_word[i + 1]);
        }
        return true;
    }
    for (size_t i = 0; i < MX_COUNT(unicode_gains); i++) {
        if (!mx_str_is(name, unicode_gains[i].name)) continue;
        mx_buf_printf(out, "\\p{%s}%s", unicode_gains[i].name, unicode_gains[i].gain);
        return true;
    }
    return spell_ranges(name, out);
}
