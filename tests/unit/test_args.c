// The command line's tables and their parser: values, ranges, spellings, errors that name the flag;
// no flag twice for one command; docs/cli.md as the tables say.
#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "cli/cli.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

enum { MAX_ARGS = 24 };

// Parses words (separated by blanks; '~' stands for an empty word) for a command.
static mx_status parse(cli_options *o, const char *command, const char *words, mx_err *err) {
    static char text[512];
    static char *argv[MAX_ARGS];
    int argc = 0;
    snprintf(text, sizeof text, "%s", words);
    for (char *p = text; *p && argc < MAX_ARGS;) {
        p += strspn(p, " ");
        if (!*p) break;
        argv[argc++] = p;
        p += strcspn(p, " ");
        if (*p) *p++ = 0;
    }
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "~") == 0) argv[i][0] = 0;
    }
    *err = (mx_err){0};
    return cli_parse(o, cli_find_command(command), argc, argv, err);
}

static cli_options good(const char *command, const char *words) {
    cli_options o;
    mx_err err;
    if (parse(&o, command, words, &err) != MX_OK) fail_msg("%s %s: %s", command, words, err.msg);
    return o;
}

// The message must hold every word of `parts`.
static void bad(const char *command, const char *words, const char *part1, const char *part2) {
    cli_options o;
    mx_err err;
    assert_int_equal(parse(&o, command, words, &err), MX_INVALID);
    if (!strstr(err.msg, part1) || !strstr(err.msg, part2)) {
        fail_msg("%s %s: \"%s\" lacks \"%s\" or \"%s\"", command, words, err.msg, part1, part2);
    }
    cli_options_free(&o);
}

static void defaults_come_from_the_table(void **state) {
    (void)state;
    cli_options o = good("generate", "");
    assert_int_equal(o.max_tokens, -1);
    assert_true(o.temperature == 0 && o.top_p == 1 && o.repeat_penalty == 1 && o.min_p == 0);
    assert_true(o.dry_base == 1.75f && o.dry_allowed_length == 2 && o.dry_last_n == 64);
    assert_false(o.has_seed);
    assert_null(o.prompt);
    assert_string_equal(o.kv_storage, "auto");
    cli_options_free(&o);
    o = good("bench", "");
    assert_int_equal(o.n_prefill, 512);
    assert_int_equal(o.n_decode, 128);
    assert_int_equal(o.reps, 5);
    assert_string_equal(o.output, "table");
    o = good("inspect", "");
    assert_int_equal(o.max_tokens, 8192);
}

static void both_spellings_and_aliases(void **state) {
    (void)state;
    cli_options o = good("gen", "-m a --prompt=b=c --temp 0.5 --n-predict=7 --top-k 40");
    assert_string_equal(o.model, "a");
    assert_string_equal(o.prompt, "b=c");
    assert_true(o.temperature == 0.5f);
    assert_int_equal(o.max_tokens, 7);
    assert_int_equal(o.top_k, 40);
    o = good("generate", "-t 1 --temperature 2 -n -1");
    assert_true(o.temperature == 2 && o.max_tokens == -1); // the later one counts
    o = good("bench", "-t 3");
    assert_int_equal(o.threads, 3); // a letter means what it means for this command
    o = good("generate", "--no-memory-check");
    assert_true(o.force);
    o = good("generate", "-p ~");
    assert_string_equal(o.prompt, "");
    o = good("generate", "-p -foo"); // no flag: a text that starts with a dash
    assert_string_equal(o.prompt, "-foo");
    o = good("generate", "--prompt=-n");
    assert_string_equal(o.prompt, "-n");
}

static void repeated_flags_add_up(void **state) {
    (void)state;
    cli_options o =
        good("generate", "--stop a --stop=b --logit-bias 5=-100 --logit-bias=6=1.5 --seed 0");
    assert_int_equal(o.n_stops, 2);
    assert_string_equal(o.stops[1], "b");
    assert_int_equal(o.n_bias, 2);
    assert_true(o.bias[0].id == 5 && o.bias[0].bias == -100 && o.bias[1].bias == 1.5f);
    assert_true(o.has_seed && o.seed == 0);
    cli_options_free(&o);
    o = good("generate", "--seed 18446744073709551615");
    assert_true(o.seed == UINT64_MAX);
}

static void positionals(void **state) {
    (void)state;
    assert_string_equal(good("run", "model -p x").positional, "model");
    assert_null(good("run", "").positional);
    assert_string_equal(good("run", "-- --odd").positional, "--odd");
    assert_string_equal(good("run", "-").positional, "-");
    bad("run", "a b", "\"b\"", "unexpected");
    bad("generate", "a", "\"a\"", "unexpected");
    bad("rm", "", "REPO", "expected");
    bad("rm", "~", "REPO", "empty");
}

static void errors_name_flag_and_expectation(void **state) {
    (void)state;
    bad("generate", "--nonsense", "--nonsense", "unknown");
    bad("generate", "--nonsense=3", "--nonsense", "unknown");
    bad("generate", "-x", "-x", "generate");
    bad("generate", "--top-p 1.5", "--top-p", "from 0 to 1");
    bad("generate", "--top-p=nan", "--top-p", "from 0 to 1");
    bad("generate", "--top-p x", "\"x\"", "a number");
    bad("generate", "--top-p", "--top-p", "expected F");
    bad("generate", "-n 1.5", "-n", "an integer, -1 or more");
    bad("generate", "-n -2", "-n", "-1 or more");
    bad("generate", "-n 99999999999", "-n", "-1 or more");
    bad("generate", "-n ~", "-n", "an integer");
    bad("generate", "--kv-type q4_0", "--kv-type", "f16|f32");
    bad("generate", "--kv-type f", "--kv-type", "f16|f32");
    bad("generate", "--seed -1", "--seed", "0 or more");
    bad("generate", "--logit-bias 5", "--logit-bias", "ID=BIAS");
    bad("generate", "--logit-bias x=1", "--logit-bias", "ID=BIAS");
    bad("generate", "--logit-bias -1=1", "--logit-bias", "ID=BIAS");
    bad("generate", "--logit-bias +1=1", "--logit-bias", "ID=BIAS");
    bad("generate", "--stop ~", "--stop", "not empty");
    bad("generate", "--json=1", "--json", "no value");
    bad("generate", "-p -n", "-p", "-p=-n");
    bad("generate", "-m --json", "-m", "--json");
    bad("run", "--estimate-memory", "--estimate-memory", "run");
    bad("list", "--sort age", "--sort", "name|size|modified");
    bad("bench", "-r 0", "-r", "from 1 to 1000");
}

// Flags of other programs that would change the answer are refused by name.
static void what_is_not_there_is_refused(void **state) {
    (void)state;
    static const char *const flags[] = {
        "--image x",        "--audio=x",        "--draft-model m", "--num-draft-tokens 3",
        "--prompt-lookup",  "--adapter a",      "--tp-size 2",     "--pp-size=2",
        "--show-reasoning", "--draft-kind mtp", "--tp-moe-mode x", "--fps 2"};
    for (size_t i = 0; i < MX_COUNT(flags); i++) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(flags[i], " ="), flags[i]);
        bad("generate", flags[i], name, "in this version");
        bad("run", flags[i], name, "in this version");
    }
}

// LLAMA_ARG_ variables are flags: taken between the default and the argument, or refused by name.
static void variables_are_flags(void **state) {
    (void)state;
    static const struct {
        const char *name, *value, *part1, *part2;
    } wrong[] = {
        {"LLAMA_ARG_TOP_K", "x", "LLAMA_ARG_TOP_K", "integer"},
        {"LLAMA_ARG_FLASH_ATTN", "on", "LLAMA_ARG_FLASH_ATTN", "attention"},
        {"LLAMA_ARG_N_GPU_LAYERS", "99", "LLAMA_ARG_N_GPU_LAYERS", "device"},
        {"LLAMA_ARG_NO_SUCH_THING", "1", "LLAMA_ARG_NO_SUCH_THING", "--no-such-thing"},
        {"LLAMA_ARG_CACHE_PROMPT", "0", "LLAMA_ARG_CACHE_PROMPT", "turned off"},
        {"LLAMA_ARG_ENDPOINT_PROPS", "1", "LLAMA_ARG_ENDPOINT_PROPS", "not supported"},
    };
    for (size_t i = 0; i < MX_COUNT(wrong); i++) {
        setenv(wrong[i].name, wrong[i].value, 1);
        mx_knobs_reload();
        bad("serve", "", wrong[i].part1, wrong[i].part2);
        cli_options o = good("generate", ""); // of the server only
        cli_options_free(&o);
        unsetenv(wrong[i].name);
    }
    setenv("LLAMA_ARG_TOP_K", "7", 1);
    setenv("LLAMA_ARG_MIN_P", "0.5", 1);
    setenv("LLAMA_ARG_REUSE_PORT", "1", 1);
    setenv("LLAMA_ARG_NO_WEBUI", "off", 1);
    setenv("LLAMA_ARG_FLASH_ATTN", "0", 1); // refused only when it asks for something
    setenv("LLAMA_ARG_ENDPOINT_SLOTS", "0", 1);
    mx_knobs_reload();
    cli_options o = good("serve", "-t 3 --offline");
    assert_int_equal(o.threads, 3);
    cli_options_free(&o);
    bad("serve", "-kvu", "-kvu", "one implementation");
    bad("serve", "--list-devices", "--list-devices", "--device");
    o = good("serve", "--min-p 0.25");
    assert_true(o.top_k == 7 && o.min_p == 0.25f && o.reuse_port && !o.no_web && o.no_slots);
    assert_true(cli_is_given(&o, offsetof(cli_options, top_k)));
    assert_false(cli_is_given(&o, offsetof(cli_options, top_p)));
    cli_options_free(&o);
    unsetenv("LLAMA_ARG_TOP_K"), unsetenv("LLAMA_ARG_MIN_P"), unsetenv("LLAMA_ARG_REUSE_PORT");
    unsetenv("LLAMA_ARG_NO_WEBUI"), unsetenv("LLAMA_ARG_FLASH_ATTN");
    unsetenv("LLAMA_ARG_ENDPOINT_SLOTS");
    mx_knobs_reload();
}

static void help_stops_parsing(void **state) {
    (void)state;
    assert_true(good("rm", "--help").help);
    assert_true(good("generate", "-m a -h --nonsense").help);
}

// Every command's flags have different spellings, and texts for help.
static void tables_are_sound(void **state) {
    (void)state;
    for (size_t c = 0; c < CLI_COMMANDS; c++) {
        assert_non_null(cli_commands[c].name);
        assert_non_null(cli_commands[c].run);
        assert_non_null(cli_commands[c].help);
        for (size_t i = 0; i < cli_n_flags; i++) {
            const cli_flag *f = &cli_flags[i];
            assert_true(f->help && f->help[0] && f->commands);
            if (!(f->commands >> c & 1u)) continue;
            for (const char *p = f->names; *p;) {
                size_t n = strcspn(p, ","), hits = 0;
                assert_true(n >= 2 && p[0] == '-' && (p[1] == '-' || n <= 6)); // -np
                for (size_t k = 0; k < cli_n_flags; k++) {
                    hits += (cli_flags[k].commands >> c & 1u) && cli_flag_is(&cli_flags[k], p, n);
                }
                if (hits != 1)
                    fail_msg("%s: %.*s is there %zu times", cli_commands[c].name, (int)n, p, hits);
                p += n;
                p += strspn(p, ", ");
            }
        }
    }
}

static void help_shows_every_flag(void **state) {
    (void)state;
    mx_buf b;
    mx_buf_init(&b, 0);
    cli_help(cli_find_command("generate"), &b);
    for (size_t i = 0; i < cli_n_flags; i++) {
        const cli_flag *f = &cli_flags[i];
        if (!(f->commands >> CLI_GENERATE & 1u)) continue;
        bool shown = strstr(b.data, f->help) != NULL;
        assert_int_equal(shown, f->kind != CLI_REFUSED);
    }
    mx_buf_clear(&b);
    cli_help(NULL, &b);
    for (size_t c = 0; c < CLI_COMMANDS; c++) assert_non_null(strstr(b.data, cli_commands[c].help));
    mx_buf_free(&b);
}

static void the_document_is_up_to_date(void **state) {
    (void)state;
    char *file;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file("docs/cli.md", 1 << 20, &file, &n, &err), MX_OK);
    mx_buf b;
    mx_buf_init(&b, 0);
    cli_markdown(&b);
    if (b.n != n || memcmp(b.data, file, n) != 0) fail_msg("docs/cli.md: run `make docs`");
    mx_buf_free(&b);
    mx_free(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_come_from_the_table),
        cmocka_unit_test(both_spellings_and_aliases),
        cmocka_unit_test(repeated_flags_add_up),
        cmocka_unit_test(positionals),
        cmocka_unit_test(errors_name_flag_and_expectation),
        cmocka_unit_test(what_is_not_there_is_refused),
        cmocka_unit_test(variables_are_flags),
        cmocka_unit_test(help_stops_parsing),
        cmocka_unit_test(tables_are_sound),
        cmocka_unit_test(help_shows_every_flag),
        cmocka_unit_test(the_document_is_up_to_date),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
