// Sizes that keep the source readable: lines of a function, of a file, of a public header, columns.
// Reads file names from standard input. Warnings are counted (V=1 in the environment lists them),
// failures are printed and make the exit status 1. No state but the two counters.
#include "ctext.h"

enum {
    FUNCTION_WARN = 60,
    FUNCTION_FAIL = 100,
    KERNEL_FAIL = 200, // src/backend/cpu/k_*.c and *.cu
    FILE_WARN = 500,
    FILE_FAIL = 1200,
    PUBLIC_HEADER_FAIL = 300, // include/
    COLUMNS = 100,
};

static int n_failed, n_warned;
static bool verbose;

static void complain(const ctext *t, int line, const char *what, const char *name, int size,
                     int warn, int fail) {
    if (size > fail) {
        printf("%s:%d: %s %s has %d lines, limit %d\n", t->path, line, what, name, size, fail);
        n_failed++;
    } else if (size > warn) {
        n_warned++;
        if (verbose)
            printf("%s:%d: warning: %s %s has %d lines\n", t->path, line, what, name, size);
    }
}

static bool is_kernel(const char *path) {
    const char *base = strrchr(path, '/');
    return ctext_ends_with(path, ".cu") || (base && ctext_starts_with(base, "/k_"));
}

// Preprocessor lines hold unbalanced braces: blank them, continuations too.
static void blank_directives(ctext *t) {
    bool start = true, inside = false;
    for (size_t i = 0; i < t->n; i++) {
        char c = t->code[i];
        if (start && c == '#') inside = true;
        if (c == '\n') {
            inside = inside && i > 0 && t->raw[i - 1] == '\\';
            start = true;
        } else {
            if (c != ' ' && c != '\t') start = false;
            if (inside) t->code[i] = ' ';
        }
    }
}

// The name in front of the parameter list that ends at code[end] == ')'.
static void name_of(const ctext *t, size_t end, char *name, size_t cap) {
    int depth = 0;
    size_t i = end, n = 0;
    for (;; i--) {
        if (t->code[i] == ')') depth++;
        if (t->code[i] == '(' && --depth == 0) break;
        if (i == 0) break;
    }
    while (i > 0 && strchr(" \t\n", t->code[i - 1])) i--;
    while (i > n && ctext_word_char(t->code[i - n - 1])) n++;
    snprintf(name, cap, "%.*s", (int)n, t->code + i - n);
}

// Is the brace at code[i], outside of functions, a function's? It follows ')' and no '='.
static bool opens_function(const ctext *t, size_t i, char *name, size_t cap) {
    size_t p = i;
    while (p > 0 && strchr(" \t\n", t->code[p - 1])) p--;
    if (p == 0 || t->code[p - 1] != ')') return false;
    for (size_t k = p; k-- > 0 && !strchr(";{}", t->code[k]);) {
        if (t->code[k] == '=') return false;
    }
    name_of(t, p - 1, name, cap);
    return true;
}

static void check_functions(ctext *t) {
    int line = 1, depth = 0, inside = 0, first = 0;
    char name[128] = "";
    blank_directives(t);
    for (size_t i = 0; i < t->n; i++) {
        char c = t->code[i];
        if (c == '\n') line++;
        if (c == '{') {
            depth++;
            if (!inside && opens_function(t, i, name, sizeof name)) inside = depth, first = line;
        }
        if (c == '}' && depth > 0) {
            if (inside == depth) {
                complain(t, first, "function", name, line - first + 1, FUNCTION_WARN,
                         is_kernel(t->path) ? KERNEL_FAIL : FUNCTION_FAIL);
                inside = 0;
            }
            depth--;
        }
    }
}

// Characters of the line at p, without a continuation's backslash and the blanks before it, which
// clang-format lines up.
static int columns(const char *p) {
    size_t n = strcspn(p, "\n");
    int count = 0;
    if (n > 0 && p[n - 1] == '\\') {
        for (n--; n > 0 && p[n - 1] == ' ';) n--;
    }
    for (size_t i = 0; i < n; i++) count += ((unsigned char)p[i] & 0xC0) != 0x80;
    return count;
}

static void check_columns(const ctext *t) {
    int line = 1;
    for (const char *p = t->raw; *p; line++) {
        if (columns(p) > COLUMNS) {
            printf("%s:%d: more than %d columns\n", t->path, line, COLUMNS);
            n_failed++;
        }
        p += strcspn(p, "\n");
        p += *p == '\n';
    }
}

static void check_lines(const ctext *t) {
    int lines = 0;
    for (size_t i = 0; i < t->n; i++) lines += t->raw[i] == '\n';
    bool header = ctext_starts_with(t->path, "include/");
    complain(t, 1, header ? "public header" : "file", "", lines,
             header ? PUBLIC_HEADER_FAIL : FILE_WARN, header ? PUBLIC_HEADER_FAIL : FILE_FAIL);
}

int main(void) {
    ctext t;
    verbose = getenv("V") != NULL;
    while (ctext_next(&t)) {
        check_columns(&t);
        check_lines(&t);
        check_functions(&t);
        ctext_free(&t);
    }
    printf("%d over a limit, %d long (over %d lines a function, %d a file)\n", n_failed, n_warned,
           FUNCTION_WARN, FILE_WARN);
    return n_failed > 0;
}
