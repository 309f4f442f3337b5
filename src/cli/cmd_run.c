// mlxcel run: one answer, or a chat. State of a chat: the messages so far.
//
// Standard output is what the model says; prompts and remarks go to standard error. Ctrl-C stops
// the reply; on an empty line, twice, it leaves. The end of the input leaves too.
#include "cli/cli.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>

static const char default_model[] = "HuggingFaceTB/SmolLM2-135M-Instruct";

typedef struct chat {
    const cli_options *o;
    cli_session s;
    json_t *messages;
    cli_lines *lines;
    mx_buf line, message;
} chat;

static void add_message(chat *c, const char *role, mx_str text) {
    json_t *m = json_pack("{s:s, s:s%}", "role", role, "content", text.n ? text.p : "", text.n);
    if (m) json_array_append_new(c->messages, m);
}

static void clear_chat(chat *c) {
    json_array_clear(c->messages);
    if (c->o->system) add_message(c, "system", mx_str_of(c->o->system));
}

static void say_speed(const chat *c, const mlxcel_timings *t) {
    if (!c->o->verbose) return;
    double decode =
        t->n_decoded > 1 && t->decode_ms > 0 ? (t->n_decoded - 1) * 1e3 / t->decode_ms : 0;
    double prompt = t->prompt_ms > 0 ? (t->n_prompt - t->n_cached) * 1e3 / t->prompt_ms : 0;
    cli_note("[%d prompt tokens, %.1f tok/s; %d generated, %.1f tok/s]", t->n_prompt, prompt,
             t->n_decoded, decode);
}

// ---- Prompts of a chat ----

static int template_ids(chat *c, cli_prompt *p, mlxcel_error *err) {
    json_t *all = json_pack("{s:O}", "messages", c->messages);
    char *request = json_dumps(all, JSON_COMPACT);
    int st = mlxcel_apply_template(c->s.engine, request, NULL, &p->ids, &p->n_ids, err);
    free(request);
    json_decref(all);
    return st;
}

// Without a template: one line for each message, and the assistant's name at the end. What was
// typed never becomes a control token.
static int fallback_ids(chat *c, cli_prompt *p, mlxcel_error *err) {
    mx_buf b;
    mx_buf_init(&b, 0);
    size_t i;
    json_t *m;
    json_array_foreach(c->messages, i, m) {
        const char *role = json_string_value(json_object_get(m, "role"));
        const json_t *text = json_object_get(m, "content");
        if (strcmp(role, "user") == 0)
            mx_buf_puts(&b, "User: ");
        else if (strcmp(role, "assistant") == 0)
            mx_buf_puts(&b, "Assistant: ");
        mx_buf_add(&b, json_string_value(text), json_string_length(text));
        mx_buf_puts(&b, "\n");
    }
    mx_buf_puts(&b, "Assistant:");
    int st = mlxcel_tokenize(c->s.engine, b.data, b.n, true, false, &p->ids, &p->n_ids, err);
    mx_buf_free(&b);
    return st;
}

// ---- One turn ----

static int request_reply(chat *c, cli_prompt *p, cli_reply *r, mlxcel_error *err) {
    bool plain = !c->s.info.has_template;
    const char **stops = mx_alloc((c->o->n_stops + 1) * sizeof *stops);
    size_t n = 0;
    for (; n < c->o->n_stops; n++) stops[n] = c->o->stops[n];
    if (plain) stops[n++] = "\nUser:";
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = p->ids, q.n_ids = p->n_ids;
    q.max_tokens = c->o->max_tokens;
    q.stops = stops, q.n_stops = n;
    cli_sampling(c->o, &q.sampling);
    int st = cli_reply_run(&c->s, &q, true, r, err);
    mx_free(stops);
    return st;
}

// Answers c->message. A message that fails is not kept.
static void answer(chat *c) {
    cli_prompt p = {0};
    cli_reply r = {0};
    mlxcel_error err = {0};
    size_t before = json_array_size(c->messages);
    mx_str text = {c->message.data, c->message.n};
    if (!mx_utf8_valid(text)) {
        cli_note("The message is not valid UTF-8.");
        return;
    }
    add_message(c, "user", text);
    int st = c->s.info.has_template ? template_ids(c, &p, &err) : fallback_ids(c, &p, &err);
    if (st == 0) st = request_reply(c, &p, &r, &err);
    if (st == 0) cli_outs("\n");
    if (cli_interrupted()) { // cleared only where it was acted upon: the next one may be there
        if (!cli_terminated()) cli_note("(interrupted)");
        cli_interrupt_clear();
    }
    if (st == 0) {
        add_message(c, "assistant", (mx_str){r.text.data, r.text.n});
        say_speed(c, &r.timings);
    } else {
        cli_note("%s%s", err.message, err.status == MX_CONTEXT ? "; /clear starts anew" : "");
        while (json_array_size(c->messages) > before) json_array_remove(c->messages, before);
    }
    cli_reply_free(&r);
    mlxcel_free(p.ids);
}

// ---- Lines ----

static const char help_text[] = "/clear    forget the conversation\n"
                                "/bye      leave (also Ctrl-D)\n"
                                "/?, /help this list\n"
                                "\"\"\"       begins and ends a message of several lines\n"
                                "Ctrl-C    stops the reply";

// True: leave.
static bool slash_command(chat *c) {
    const char *name = c->line.data;
    if (strcmp(name, "/bye") == 0) {
        cli_note("Bye!");
        return true;
    }
    if (strcmp(name, "/clear") == 0) {
        clear_chat(c);
        cli_note("Conversation cleared.");
    } else if (strcmp(name, "/?") == 0 || strcmp(name, "/help") == 0) {
        cli_note("%s", help_text);
    } else {
        cli_note("Unknown command: %s. Type /? for the list of commands.", name);
    }
    return false;
}

// The message that began with `"""` on c->line, through the line that ends with it.
static cli_line_result read_block(chat *c) {
    mx_str rest = {c->line.data + 3, c->line.n - 3}, mark = mx_str_of("\"\"\"");
    while (!mx_str_ends(rest, mark)) {
        mx_buf_add(&c->message, rest.p, rest.n);
        mx_buf_putc(&c->message, '\n');
        cli_line_result got = cli_lines_read(c->lines, "... ", &c->line);
        if (got != CLI_LINE_OK) return got;
        rest = (mx_str){c->line.n ? c->line.data : "", c->line.n};
    }
    mx_buf_add(&c->message, rest.p, rest.n - 3);
    return CLI_LINE_OK;
}

static bool is_blank(const mx_buf *b) {
    for (size_t i = 0; i < b->n; i++) {
        if (!strchr(" \t\r\n", b->data[i])) return false;
    }
    return true;
}

// Reads and does one message or command. False: the chat is over.
static bool turn(chat *c, cli_line_result *got) {
    mx_buf_clear(&c->message);
    *got = cli_lines_read(c->lines, ">>> ", &c->line);
    if (*got == CLI_LINE_OK && c->line.n && c->line.data[c->line.n - 1] == '\r') {
        c->line.data[--c->line.n] = 0;
    }
    if (*got == CLI_LINE_OK && c->line.n && c->line.data[0] == '/') return !slash_command(c);
    if (*got == CLI_LINE_OK &&
        mx_str_starts((mx_str){c->line.data, c->line.n}, mx_str_of("\"\"\""))) {
        *got = read_block(c);
    } else if (*got == CLI_LINE_OK && c->line.n) {
        mx_buf_add(&c->message, c->line.data, c->line.n);
    }
    if (*got == CLI_LINE_END) cli_note("Bye!");
    if (*got == CLI_LINE_OK && !is_blank(&c->message)) answer(c);
    return *got != CLI_LINE_END && !cli_stdout_closed();
}

static int chat_loop(chat *c) {
    bool terminal = cli_in_is_terminal(), armed = false;
    cli_line_result got;
    cli_signals_defer(true);
    while (turn(c, &got)) {
        if (cli_terminated() || (got == CLI_LINE_INTERRUPTED && !terminal)) {
            return CLI_EXIT_INTERRUPTED;
        }
        if (got == CLI_LINE_INTERRUPTED) cli_interrupt_clear();
        if (got == CLI_LINE_INTERRUPTED && armed) {
            cli_note("Bye!");
            return CLI_EXIT_OK;
        }
        armed = got == CLI_LINE_INTERRUPTED;
        if (armed) cli_note("(Ctrl-C again or Ctrl-D leaves)");
    }
    return cli_terminated() ? CLI_EXIT_INTERRUPTED : CLI_EXIT_OK;
}

static int run_chat(chat *c) {
    c->messages = json_array();
    clear_chat(c);
    mx_buf_init(&c->line, 64u << 20);
    mx_buf_init(&c->message, 64u << 20);
    if (!c->s.info.has_template) {
        cli_note("Note: this model has no chat template; lines are marked User: and Assistant:.");
    }
    c->lines = cli_lines_open();
    if (cli_in_is_terminal() && cli_err_is_terminal())
        cli_note("Type /? for the list of commands.");
    int code = chat_loop(c);
    cli_lines_close(c->lines);
    mx_buf_free(&c->line);
    mx_buf_free(&c->message);
    json_decref(c->messages);
    return code;
}

static int one_answer(chat *c) {
    cli_prompt p = {0};
    cli_reply r = {0};
    mlxcel_error err = {0};
    int st = cli_prompt_make(&c->s, c->o, mx_str_of(c->o->prompt), &p, &err);
    if (st == 0) {
        mlxcel_request_params q;
        mlxcel_request_params_init(&q);
        q.ids = p.ids, q.n_ids = p.n_ids;
        q.max_tokens = c->o->max_tokens;
        q.stops = (const char *const *)c->o->stops, q.n_stops = c->o->n_stops;
        cli_sampling(c->o, &q.sampling);
        st = cli_reply_run(&c->s, &q, true, &r, &err);
    }
    if (st == 0 && cli_out_is_terminal()) cli_outs("\n");
    if (st == 0) say_speed(c, &r.timings);
    int code = r.interrupted ? CLI_EXIT_INTERRUPTED : CLI_EXIT_OK;
    if (st != 0) {
        code = err.status == MX_INVALID ? CLI_EXIT_USAGE : CLI_EXIT_RUN;
        cli_fail(c->o, code, "%s", err.message);
    }
    cli_reply_free(&r);
    mlxcel_free(p.ids);
    return code;
}

int cli_run(const cli_options *o) {
    if (o->positional && o->model) return cli_usage(o, "MODEL and -m: expected one of them");
    if (!o->prompt && o->no_template) {
        return cli_usage(o, "--no-chat-template: a chat needs -p to be a text that is continued");
    }
    if (cli_check_system(o) != CLI_EXIT_OK) return CLI_EXIT_USAGE;
    const char *model = o->positional ? o->positional : o->model ? o->model : default_model;
    chat c = {.o = o};
    int code = cli_session_open(&c.s, o, model, (mlxcel_params){0}, o->verbose);
    if (code == CLI_EXIT_OK) code = o->prompt ? one_answer(&c) : run_chat(&c);
    cli_session_close(&c.s);
    return code;
}
