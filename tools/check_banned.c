// Words that may not be in the source, and the places that may have them all the same. Reads file
// names from standard input; prints each find and exits 1 when there is one. No state but a count.
#include "ctext.h"

typedef struct rule {
    const char *word;
    const char *where;   // only in paths with this prefix ("" = everywhere)
    const char *allowed; // not in paths with one of these prefixes, space between
    const char *why;
} rule;

// Looked for in C and CUDA code, outside comments and strings.
static const rule code_rules[] = {
    {"gets", "", "", "has no bound"},
    {"strcpy", "", "", "has no bound: use mx_buf or memcpy"},
    {"strcat", "", "", "has no bound: use mx_buf"},
    {"sprintf", "", "", "has no bound: use snprintf or mx_buf"},
    {"vsprintf", "", "", "has no bound: use vsnprintf"},
    {"strtok", "", "", "has hidden state"},
    {"atoi", "", "", "hides errors: use mx_parse_i64"},
    {"atof", "", "", "hides errors: use mx_parse_f64"},
    {"system", "", "tests/", "runs a shell"},
    {"popen", "", "tests/", "runs a shell"},
    {"getenv", "", "src/base/knobs.c tests/ tools/", "environment is read by base/knobs"},
    {"pthread_create", "src/", "src/base/os.c", "its stack depends on ulimit: use mx_thread_start"},
    {"exit", "src/", "src/cli/main.c", "only main ends the program"},
    {"_exit", "src/", "", "only main ends the program"},
    {"quick_exit", "src/", "", "only main ends the program"},
};

// Looked for in every file, comments and strings too.
static const rule text_rules[] = {
    {"TODO", "", "tools/check_banned.c tools/check_checks", "do it or write down why not"},
    {"FIXME", "", "tools/check_banned.c tools/check_checks", "do it or write down why not"},
    {"XXX", "", "tools/check_banned.c tools/check_checks", "do it or write down why not"},
};

// Paths of one machine, in every file: these followed by anything.
static const char *const machine_paths[] = {"/wo"
                                            "rk/",
                                            "/root/",
                                            ".."
                                            "/shared"};

static int n_found;

static bool has_prefix(const char *path, const char *prefixes) {
    for (const char *p = prefixes; *p; p += strspn(p, " ")) {
        size_t n = strcspn(p, " ");
        if (strncmp(path, p, n) == 0) return true;
        p += n;
    }
    return false;
}

static void found(const ctext *t, const char *at, const char *word, const char *why) {
    int line = 1;
    for (const char *p = t->raw; p < at; p++) line += *p == '\n';
    printf("%s:%d: %s: %s\n", t->path, line, word, why);
    n_found++;
}

// text is t->raw or t->code; call: only when '(' follows.
static void check_rule(const ctext *t, const char *text, const rule *r, bool call) {
    size_t n = strlen(r->word);
    if (!ctext_starts_with(t->path, r->where) || has_prefix(t->path, r->allowed)) return;
    for (const char *p = text; (p = strstr(p, r->word)); p += n) {
        bool member = p > text && (p[-1] == '.' || (p > text + 1 && p[-1] == '>' && p[-2] == '-'));
        bool word = (p == text || !ctext_word_char(p[-1])) && !ctext_word_char(p[n]);
        if (word && !(call && (member || p[n + strspn(p + n, " ")] != '('))) {
            found(t, t->raw + (p - text), r->word, r->why);
        }
    }
}

static void check_paths(const ctext *t) {
    if (has_prefix(t->path, "tools/check_banned.c tools/check_checks")) return;
    for (size_t i = 0; i < sizeof machine_paths / sizeof machine_paths[0]; i++) {
        const char *w = machine_paths[i];
        for (const char *p = t->raw; (p = strstr(p, w)); p += strlen(w)) {
            bool inner = p > t->raw && (ctext_word_char(p[-1]) || strchr(".-}", p[-1]));
            if (!inner) found(t, p, w, "a path of one machine");
        }
    }
}

// The sum of floats depends on the order of atomics, so device code has none. A call must show its
// integer type by a cast, for this check to see it: atomicAdd((unsigned *)p, 1u).
static void check_atomics(const ctext *t) {
    static const char *const integer[] = {"int", "unsigned", "int32_t", "uint32_t", "uint64_t"};
    for (const char *p = t->code; (p = strstr(p, "atomic")); p++) {
        size_t name = 0;
        while (ctext_word_char(p[name])) name++;
        if ((p > t->code && ctext_word_char(p[-1])) || p[name] != '(' || p[name + 1] == ')')
            continue;
        const char *cast = p + name + 1;
        cast += *cast == '(';
        bool ok = false;
        for (size_t i = 0; i < sizeof integer / sizeof integer[0]; i++) {
            size_t n = strlen(integer[i]);
            ok = ok || (cast[-1] == '(' && strncmp(cast, integer[i], n) == 0 &&
                        !ctext_word_char(cast[n]));
        }
        if (!ok) found(t, t->raw + (p - t->code), "atomic", "not visibly on integers");
    }
    for (const char *p = t->raw; (p = strstr(p, "red.")); p++) {
        size_t n = strcspn(p, " \n\"");
        if (n >= 4 && strncmp(p + n - 4, ".f32", 4) == 0) found(t, p, "red.f32", "a float atomic");
    }
}

int main(void) {
    ctext t;
    while (ctext_next(&t)) {
        bool cuda = ctext_ends_with(t.path, ".cu") || ctext_ends_with(t.path, ".cuh");
        bool code = cuda || ctext_ends_with(t.path, ".c") || ctext_ends_with(t.path, ".h") ||
                    ctext_ends_with(t.path, ".def");
        bool text = !memchr(t.raw, 0, t.n) && !ctext_starts_with(t.path, "tests/data/") &&
                    !ctext_starts_with(t.path, "tests/fuzz/corpus/");
        for (size_t i = 0; code && i < sizeof code_rules / sizeof code_rules[0]; i++) {
            check_rule(&t, t.code, &code_rules[i], true);
        }
        for (size_t i = 0; text && i < sizeof text_rules / sizeof text_rules[0]; i++) {
            check_rule(&t, t.raw, &text_rules[i], false);
        }
        if (text) check_paths(&t);
        if (cuda) check_atomics(&t);
        ctext_free(&t);
    }
    return n_found > 0;
}
