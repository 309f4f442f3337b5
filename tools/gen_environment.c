// Prints docs/environment.md from the table of environment variables, src/base/knobs.def.
#include <stdio.h>

static const struct {
    const char *name, *kind, *dflt, *help;
} knobs[] = {
#define KNOB(id, name, kind, dflt, help) {name, #kind, dflt, help},
#include "base/knobs.def"
#undef KNOB
};

// '|' would end the cell, '<' would be markup.
static void print_cell(const char *s) {
    for (; *s; s++) {
        if (*s == '|' || *s == '<') putchar('\\');
        putchar(*s);
    }
}

int main(void) {
    puts(
        "# Environment variables\n\n"
        "Made from `src/base/knobs.def` by `make docs`; do not edit. Values are read once, at the\n"
        "first use. Most malformed values are reported once and the default is used; devices,\n"
        "instruction sets, lazy weights and LLAMA_ARG_* that cannot be met are errors. Kinds: FLAG "
        "(empty,\n"
        "`0`, `false`, `off`, `no` are off, anything else on), PRESENT (set at all is on), INT, "
        "FLOAT,\n"
        "SIZE (bytes, as `1.5G`), TEXT.\n\n"
        "| name | kind | default | meaning |\n|---|---|---|---|");
    for (size_t i = 0; i < sizeof knobs / sizeof knobs[0]; i++) {
        const char *q = knobs[i].dflt[0] ? "`" : "";
        printf("| `%s` | %s | %s%s%s | ", knobs[i].name, knobs[i].kind, q, knobs[i].dflt, q);
        print_cell(knobs[i].help);
        puts(" |");
    }
    return 0;
}
