// Conversations with the program: one answer or a chat, what a chat keeps, signals, a terminal. A
// forced token (--logit-bias ID=100) makes the tiny model's text known.
#include "support/program.h"

#include <pty.h>

// ---- Never a chat where a prompt was given ----

static void one_answer_whatever_standard_input_is(void **state) {
    (void)state;
    static const char *const how[] = {"generate -q -m %s -p x -n 8 " FORCE_A,
                                      "run %s -p x -n 8 " FORCE_A};
    for (size_t i = 0; i < MX_COUNT(how); i++) {
        run(&p, how[i], model); // at its end
        expect(&p, 0, FORCED, NULL);
        pipe_through("more\nlines\n", how[i], model); // with lines that nobody asked for
        expect(&p, 0, FORCED, NULL);
        start(&p, how[i], model); // open, silent
        finish(&p);
        expect(&p, 0, FORCED, NULL);
        assert_null(strchr(p.err_text, '\033'));
    }
}

static void a_chat_ends_with_its_input(void **state) {
    (void)state;
    run(&p, "run %s -n 8", chat_model);
    expect(&p, 0, "", "Bye!");
    pipe_through("hello\n", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, FORCED "\n", "Bye!");
    pipe_through("no newline", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, FORCED "\n", NULL);
}

static void chat_commands(void **state) {
    (void)state;
    pipe_through("/foo\n/?\n\n   \n/clear\n/bye\nnot read\n", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, "", "Unknown command: /foo. Type /? for the list of commands.");
    assert_non_null(strstr(p.err_text, "/bye"));
    assert_non_null(strstr(p.err_text, "Conversation cleared."));
    assert_non_null(strstr(p.err_text, "Bye!"));
    assert_null(strstr(p.err_text, ">>>"));
    assert_null(strstr(p.err_text, "no chat template"));
}

// Ids that the program says it was given, of its k-th request.
static size_t count_prompt_ids(int k) {
    const char *at = p.err_text;
    for (int i = 0; i <= k; i++) {
        at = strstr(at, "prompt ids:");
        assert_non_null(at);
        at += strlen("prompt ids:");
    }
    size_t n = 0;
    for (; *at && *at != '\n'; at++) n += *at == ' ';
    return n;
}

static void conversations_grow_and_clear(void **state) {
    (void)state;
    env_name = "MLXCEL_PRINT_TOKEN_IDS", env_value = "1";
    pipe_through("ab\n\"\"\"a\nb\"\"\"\n/clear\nab\n", "run %s -n 3 " FORCE_A, chat_model);
    expect(&p, 0, NULL, NULL);
    size_t one = 1 + 5 + 2 + 1 + 1, head = 1 + 10; // user turn of two bytes; assistant's heading
    assert_int_equal(count_prompt_ids(0), one + head);
    // user, assistant with three bytes, user with three bytes (a, newline, b)
    assert_int_equal(count_prompt_ids(1), one + head + 3 + 1 + 1 + one + 1 + head);
    assert_int_equal(count_prompt_ids(2), one + head);
}

static void a_model_without_template_chats_all_the_same(void **state) {
    (void)state;
    env_name = "MLXCEL_PRINT_TOKEN_IDS", env_value = "1";
    pipe_through("<|im_end|>\n", "run %s -n 8 " FORCE_A, model);
    expect(&p, 0, NULL, "no chat template");
    // what was typed is text, not a control token: "User: <|im_end|>\nAssistant:"
    assert_int_equal(count_prompt_ids(0), strlen("User: <|im_end|>\nAssistant:"));
    run(&p, "run %s -p x --system be-brief", model);
    expect(&p, 2, "", "--system");
}

static void seeds_and_stops_on_the_command_line(void **state) {
    (void)state;
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 42", model);
    char *first = mx_strdup(p.out_text);
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 42", model);
    expect(&p, 0, first, NULL);
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 43", model);
    assert_string_not_equal(p.out_text, first);
    mx_free(first);
    run(&p, "generate -q -m %s -p x --stop AA " FORCE_A, model);
    expect(&p, 0, "", NULL);
}

// ---- Signals ----

static void ctrl_c_ends_what_waits_or_measures(void **state) {
    (void)state;
    start(&p, "perplexity -m %s --jsonl", model);
    say(&p, "{\"ids\":[1,2]}\n");
    assert_true(read_until(&p, "logprobs"));
    kill(p.pid, SIGINT); // it waits for a line
    finish(&p);
    expect(&p, 130, NULL, NULL);
    start(&p, "bench -m %s -p 4000 --prefill-chunk 4000 -n 0 -r 1000", model);
    mx_sleep_s(0.3);
    kill(p.pid, SIGINT); // what runs is one step, which ends as if nothing had come
    finish(&p);
    expect(&p, 130, "", NULL);
}

static void ctrl_c_ends_a_generation_with_130(void **state) {
    (void)state;
    for (int s = 0; s < 2; s++) {
        start(&p, "generate -q -m %s -p x --ctx-size 60000 " FORCE_A, model);
        assert_true(read_until(&p, "AA"));
        kill(p.pid, s ? SIGTERM : SIGINT);
        finish(&p);
        assert_int_equal(p.code, 130);
        assert_true(p.n_out >= 2 && strspn(p.out_text, "A") == p.n_out);
    }
}

static void ctrl_c_stops_the_reply_not_the_chat(void **state) {
    (void)state;
    start(&p, "run %s --ctx-size 60000 " FORCE_A, chat_model);
    say(&p, "hello\n");
    assert_true(read_until(&p, "AA"));
    kill(p.pid, SIGINT);
    assert_true(read_until(&p, "(interrupted)"));
    say(&p, "/bye\n");
    finish(&p);
    expect(&p, 0, NULL, "Bye!");
    start(&p, "run %s -n 4 " FORCE_A, chat_model); // while it waits for a line
    say(&p, "/clear\n");
    assert_true(read_until(&p, "cleared"));
    kill(p.pid, SIGINT);
    finish(&p);
    assert_int_equal(p.code, 130);
}

// ---- On a terminal ----

static void start_on_terminal(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    set_args(fmt, ap);
    va_end(ap);
    p = (process){.err = -1};
    int fd;
    p.pid = forkpty(&fd, NULL, NULL, NULL);
    if (p.pid == 0) {
        execv(argv[0], argv);
        _exit(127);
    }
    p.out = fd;
    p.in = dup(fd);
}

static void a_chat_on_a_terminal(void **state) {
    (void)state;
    start_on_terminal("run %s -n 8 " FORCE_A, chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "/fooX\x7f\r"); // edited: the last letter is taken back
    assert_true(read_until(&p, "Unknown command: /foo. "));
    say(&p, "\"\"\"one\r");
    assert_true(read_until(&p, "... "));
    say(&p, "two\"\"\"\r");
    assert_true(read_until(&p, FORCED));
    // the next prompt, so that Ctrl-C meets the line and not the end of the reply
    const char *reply = strstr(p.out_text, FORCED);
    for (int i = 0; i < 200 && !strstr(reply, ">>> "); i++) read_for(&p, 0.1, "no such text");
    say(&p, "half a line\x03"); // Ctrl-C: gone
    assert_true(read_until(&p, "leaves)"));
    // Ctrl-D, again when it came before the line editor had the terminal
    for (int i = 0; i < 50 && !strstr(p.out_text, "Bye!"); i++) {
        say(&p, "\x04");
        read_for(&p, 0.2, "Bye!");
    }
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
}

// Ctrl-D that is typed while the reply runs, when the editor has not got the terminal.
static void ctrl_d_typed_ahead_leaves(void **state) {
    (void)state;
    start_on_terminal("run %s -n 2000 " FORCE_A, chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "x\r");
    assert_true(read_until(&p, FORCED));
    say(&p, "\x04");
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
}

static void two_ctrl_c_leave(void **state) {
    (void)state;
    start_on_terminal("run %s -n 8", chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "\x03");
    assert_true(read_until(&p, "leaves)"));
    say(&p, "\x03");
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
    start_on_terminal("run %s -p x -n 8 " FORCE_A, chat_model); // a prompt: no chat here either
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_null(strstr(p.out_text, ">>>"));
    assert_non_null(strstr(p.out_text, FORCED));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_answer_whatever_standard_input_is),
        cmocka_unit_test(a_chat_ends_with_its_input),
        cmocka_unit_test(chat_commands),
        cmocka_unit_test(conversations_grow_and_clear),
        cmocka_unit_test(a_model_without_template_chats_all_the_same),
        cmocka_unit_test(seeds_and_stops_on_the_command_line),
        cmocka_unit_test(ctrl_c_ends_what_waits_or_measures),
        cmocka_unit_test(ctrl_c_ends_a_generation_with_130),
        cmocka_unit_test(ctrl_c_stops_the_reply_not_the_chat),
        cmocka_unit_test(a_chat_on_a_terminal),
        cmocka_unit_test(ctrl_d_typed_ahead_leaves),
        cmocka_unit_test(two_ctrl_c_leave),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
