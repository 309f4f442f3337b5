// The table of commands, what is printed from the tables (help, docs/cli.md), and dispatch. No
// state.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "server/server.h"

#include <stdio.h>

static int help_command(const cli_options *o);

// clang-format off
const cli_command cli_commands[CLI_COMMANDS] = {
    [CLI_RUN] = {"run", NULL, "MODEL", false, cli_run,
        "answer a prompt, or chat",
        "With -p: one answer. Without: a chat, line by line from standard input.\n"
        "MODEL defaults to HuggingFaceTB/SmolLM2-135M-Instruct."},
    [CLI_GENERATE] = {"generate", "gen", NULL, false, cli_generate,
        "generate text from a prompt",
        "The text goes to standard output, everything else to standard error. With a chat\n"
        "template in the model the prompt is one user message, else it is continued."},
    [CLI_SERVE] = {"serve", NULL, NULL, false, cli_serve,
        "answer OpenAI's and llama-server's routes over HTTP",
        "Flags may also be given as LLAMA_ARG_ variables, --top-k 5 as LLAMA_ARG_TOP_K=5;\n"
        "a flag on the command line wins. The program called as mlxcel-server is this command.\n"
        "Routes and rules: docs/server.md."},
    [CLI_INSPECT] = {"inspect", NULL, "MODEL", false, cli_inspect,
        "what is in a model, and what it will need", NULL},
    [CLI_LIST] = {"list", "ls", NULL, false, cli_list,
        "models in the store", NULL},
    [CLI_RM] = {"rm", NULL, "REPO", true, cli_rm,
        "remove a model from the store", NULL},
    [CLI_ARCH] = {"arch", "supported", "FAMILY", false, cli_arch,
        "supported families, or the layers of one", NULL},
    [CLI_TOKENIZE] = {"tokenize", NULL, NULL, false, cli_tokenize,
        "texts to token ids and back, as JSON lines",
        "Reads {\"text\":...,\"add_special\":false,\"parse_special\":true}, writes\n"
        "{\"ids\":[...]}. No weights are read: a folder with only tokenizer.json and\n"
        "tokenizer_config.json will do."},
    [CLI_TEMPLATE] = {"template", NULL, NULL, false, cli_template,
        "chat requests to prompts, as JSON lines",
        "Reads {\"messages\":[...]} with optional tools, documents, add_generation_prompt,\n"
        "chat_template_kwargs, template, bos_token, eos_token; writes {\"prompt\":...} or\n"
        "{\"error\":...}. No weights are read; -m may be left out when every line has a\n"
        "template."},
    [CLI_PERPLEXITY] = {"perplexity", NULL, NULL, false, cli_perplexity,
        "how well a model predicts a text",
        "The text is cut into windows of --ctx-size tokens (each begins with BOS where the model\n"
        "has one); every token after a window's first counts."},
    [CLI_BENCH] = {"bench", NULL, NULL, false, cli_bench,
        "measure prefill and decode against the machine's read rate", NULL},
    [CLI_PROFILE] = {"profile", NULL, NULL, false, cli_profile,
        "what a decoded token spends its time on, and what command buffers cost",
        "With -m: milliseconds of attention, MLP, head and so on, each the slope of a step's time\n"
        "over repeats of that part. --chain and --launch-heavy measure command buffers. Arms run\n"
        "in turns, and one of them twice (the null arm). See docs/profile.md."},
    [CLI_HELP] = {"help", NULL, "COMMAND", false, help_command,
        "this text, or that of a command", NULL},
};
// clang-format on

// ---- Messages ----

static int say(const cli_options *o, int code, const char *fmt, va_list ap) {
    char text[MX_ERR_CAP + 256];
    vsnprintf(text, sizeof text, fmt, ap);
    cli_note("mlxcel %s: %s", cli_commands[o->command].name, text);
    return code;
}

int cli_fail(const cli_options *o, cli_exit code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(o, code, fmt, ap);
    va_end(ap);
    return code;
}

int cli_usage(const cli_options *o, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    say(o, CLI_EXIT_USAGE, fmt, ap);
    va_end(ap);
    cli_note("Try `mlxcel %s --help`.", cli_commands[o->command].name);
    return CLI_EXIT_USAGE;
}

// ---- Help ----

static bool of_command(const cli_flag *f, const cli_command *c) {
    return (f->commands >> (c - cli_commands) & 1u) && f->kind != CLI_REFUSED;
}

// "--top-k N (0): …", wrapped behind the flag's own column.
static void help_flag(const cli_flag *f, mx_buf *out) {
    enum { COLUMN = 32 };
    size_t start = out->n;
    mx_buf_printf(out, "  %s", f->names);
    if (f->value) mx_buf_printf(out, " %s", f->value);
    size_t width = out->n - start;
    if (width >= COLUMN) mx_buf_putc(out, '\n'), width = 0;
    while (width++ < COLUMN) mx_buf_putc(out, ' ');
    mx_buf_puts(out, f->help);
    if (f->dflt) mx_buf_printf(out, " (%s)", f->dflt);
    mx_buf_putc(out, '\n');
}

static void help_usage(const cli_command *c, mx_buf *out) {
    mx_buf_printf(out, "mlxcel %s", c->name);
    if (c->positional) {
        mx_buf_printf(out, c->positional_required ? " %s" : " [%s]", c->positional);
    }
    mx_buf_puts(out, " [flags]");
}

static void help_of_command(const cli_command *c, mx_buf *out) {
    mx_buf_puts(out, "Usage: ");
    help_usage(c, out);
    mx_buf_printf(out, "\n%s%s\n%s\n", c->alias ? "Also: mlxcel " : "", c->alias ? c->alias : "",
                  c->help);
    if (c->text) mx_buf_printf(out, "%s\n", c->text);
    mx_buf_puts(out, "\nFlags (--flag VALUE or --flag=VALUE; defaults in parentheses):\n");
    for (size_t i = 0; i < cli_n_flags; i++) {
        if (of_command(&cli_flags[i], c)) help_flag(&cli_flags[i], out);
    }
}

static const char exit_codes[] = "0 done, 1 failed while running, 2 wrong usage, "
                                 "3 the model could not be loaded, 130 interrupted";

void cli_help(const cli_command *c, mx_buf *out) {
    if (c) {
        help_of_command(c, out);
        return;
    }
    mx_buf_puts(out, "mlxcel runs language models.\n\nUsage: mlxcel COMMAND [flags]\n\n");
    for (size_t i = 0; i < CLI_COMMANDS; i++) {
        char names[64];
        const cli_command *k = &cli_commands[i];
        snprintf(names, sizeof names, "%s%s%s", k->name, k->alias ? ", " : "",
                 k->alias ? k->alias : "");
        mx_buf_printf(out, "  %-18s%s\n", names, k->help);
    }
    mx_buf_printf(out,
                  "\n  --version         print the version\n"
                  "  --help-env        environment variables\n"
                  "  --help-markdown   all of this as docs/cli.md\n"
                  "  --help-server     the server's routes and fields as docs/server.md\n"
                  "\nExit codes: %s.\n",
                  exit_codes);
}

static void markdown_cell(const char *s, mx_buf *out) {
    for (; *s; s++) {
        if (*s == '|' || *s == '<') mx_buf_putc(out, '\\');
        mx_buf_putc(out, *s);
    }
}

static void markdown_flag(const cli_flag *f, mx_buf *out) {
    mx_buf_puts(out, "| `");
    markdown_cell(f->names, out);
    if (f->value) mx_buf_putc(out, ' '), markdown_cell(f->value, out);
    mx_buf_puts(out, "` | ");
    if (f->dflt) mx_buf_printf(out, "`%s`", f->dflt);
    mx_buf_puts(out, " | ");
    markdown_cell(f->help, out);
    mx_buf_puts(out, " |\n");
}

void cli_markdown(mx_buf *out) {
    mx_buf_printf(out,
                  "# Command line\n\n"
                  "Made by `mlxcel --help-markdown` from the tables in `src/cli/flags.c` and "
                  "`src/cli/commands.c`\n(`make docs`); do not edit.\n\n"
                  "Standard output is the result and nothing else; messages go to standard error, "
                  "bars and\nediting only to a terminal. Exit codes: %s.\n"
                  "Flags are written `--flag VALUE` or `--flag=VALUE`; an unknown flag is an "
                  "error.\n",
                  exit_codes);
    for (size_t i = 0; i < CLI_COMMANDS; i++) {
        const cli_command *c = &cli_commands[i];
        mx_buf_printf(out, "\n## mlxcel %s\n\n", c->name);
        mx_buf_putc(out, '`');
        help_usage(c, out);
        mx_buf_printf(out, "`%s%s%s: %s.", c->alias ? ", also `" : "", c->alias ? c->alias : "",
                      c->alias ? "`" : "", c->help);
        if (c->text) mx_buf_printf(out, "\n%s", c->text);
        mx_buf_puts(out, "\n\n| flag | default | meaning |\n|---|---|---|\n");
        for (size_t k = 0; k < cli_n_flags; k++) {
            if (of_command(&cli_flags[k], c)) markdown_flag(&cli_flags[k], out);
        }
    }
}

static void help_environment(mx_buf *out) {
    for (int k = 0; k < MX_KNOB_COUNT; k++) {
        const mx_knob_info *i = mx_knob_info_get((mx_knob)k);
        mx_buf_printf(out, "%s%s%s\n    %s\n", i->name, i->dflt[0] ? " = " : "", i->dflt, i->help);
    }
}

static int print(mx_buf *text, int code) {
    cli_out(text->data, text->n);
    mx_buf_free(text);
    return code;
}

static int help_command(const cli_options *o) {
    const cli_command *c = o->positional ? cli_find_command(o->positional) : NULL;
    if (o->positional && !c) return cli_usage(o, "unknown command \"%s\"", o->positional);
    mx_buf b;
    mx_buf_init(&b, 0);
    cli_help(c, &b);
    return print(&b, CLI_EXIT_OK);
}

// ---- Dispatch ----

static int no_command(const char *name) {
    mx_buf b;
    mx_buf_init(&b, 0);
    if (name) {
        mx_buf_printf(&b, "mlxcel: unknown command \"%s\"; commands are", name);
        for (size_t i = 0; i < CLI_COMMANDS; i++) {
            mx_buf_printf(&b, "%s %s", i ? "," : "", cli_commands[i].name);
        }
    } else {
        cli_help(NULL, &b);
    }
    cli_note("%s", b.data);
    mx_buf_free(&b);
    return CLI_EXIT_USAGE;
}

// Flags that stand where a command would. Returns -1 when `arg` is none of them.
static int global_flag(const char *arg) {
    mx_buf b;
    mx_buf_init(&b, 0);
    if (strcmp(arg, "--version") == 0)
        mx_buf_printf(&b, "mlxcel %s\n", MLXCEL_VERSION);
    else if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0)
        cli_help(NULL, &b);
    else if (strcmp(arg, "--help-env") == 0)
        help_environment(&b);
    else if (strcmp(arg, "--help-markdown") == 0)
        cli_markdown(&b);
    else if (strcmp(arg, "--help-server") == 0)
        mx_server_markdown(&b);
    int code = b.n ? CLI_EXIT_OK : -1;
    return print(&b, code);
}

static void set_log_level(void) {
    static const char *const names[] = {"error", "warn", "info", "debug"};
    const char *want = mx_knob_text(MX_KNOB_LOG);
    if (!want[0]) return;
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        if (strcmp(want, names[i]) == 0) {
            mx_log_set_level((mx_log_level)i);
            return;
        }
    }
    mx_log(MX_LOG_WARN, "MLXCEL_LOG=%s: expected error, warn, info or debug", want);
}

static int run_command(const cli_command *c, int argc, char *const *argv) {
    cli_options o;
    mx_err err = {0};
    int code;
    if (cli_parse(&o, c, argc, argv, &err) != MX_OK) {
        code = cli_usage(&o, "%s", err.msg);
    } else if (o.help) {
        mx_buf b;
        mx_buf_init(&b, 0);
        cli_help(c, &b);
        code = print(&b, CLI_EXIT_OK);
    } else {
        code = c->run(&o);
    }
    cli_options_free(&o);
    return code;
}

int mx_cli_main(int argc, char *const *argv, void (*end_now)(int code)) {
    bool is_server = argc > 0 && mx_str_ends(mx_str_of(argv[0]), mx_str_of("mlxcel-server"));
    bool serves = is_server || (argc > 1 && strcmp(argv[1], cli_commands[CLI_SERVE].name) == 0);
    cli_signals_defer(serves); // a server ends with 0, however early it is asked to
    cli_term_init(end_now);
    set_log_level();
    if (is_server && argc == 2 && strcmp(argv[1], "--version") == 0) {
        return cli_finish(global_flag(argv[1]));
    }
    if (is_server) {
        return cli_finish(run_command(&cli_commands[CLI_SERVE], argc - 1, argv + 1));
    }
    if (argc < 2) return no_command(NULL);
    if (argv[1][0] == '-') {
        int code = argc == 2 ? global_flag(argv[1]) : -1;
        if (code >= 0) return cli_finish(code);
    }
    const cli_command *c = cli_find_command(argv[1]);
    if (!c) return no_command(argv[1]);
    return cli_finish(run_command(c, argc - 2, argv + 2));
}
