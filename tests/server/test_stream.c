// Streams: framing, usage, stop texts, reasoning, tool calls, pings, late errors; a stream says
// what the whole answer says. The model is a script (support/script_model.h).
#include "support/served.h"

static const char chat_template[] =
    "{% if tools %}<tool_call>{{ tools[0].function.name }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}";

static const char think_template[] =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ '<think>\\n' }}";

static const script scripts[] = {
    {'A', "Hello O" SCRIPT_CUT " P" SCRIPT_CUT " Q and DE" SCRIPT_CUT "F?\n" SCRIPT_CUT
          "then lo" SCRIPT_CUT " \xe4\xb8" SCRIPT_CUT "\xad\xe6\x96\x87 end" SCRIPT_CUT
          ".." SCRIPT_CUT "bye"},
    {'T', "Let me look.\n<tool" SCRIPT_CUT "_call>{\"na" SCRIPT_CUT "me\":\"f\",\"arg" SCRIPT_CUT
          "uments\":{\"city\":" SCRIPT_CUT "\"Par" SCRIPT_CUT "is\"}}</to" SCRIPT_CUT
          "ol_call>\n" SCRIPT_CUT "<tool_call>{\"name\":\"g\"" SCRIPT_CUT
          ",\"arguments\":{}}</tool_call>"},
    {'\n', "internal reason" SCRIPT_CUT "ing\n</thi" SCRIPT_CUT "nk>\n\n{\"ans" SCRIPT_CUT
           "wer\":1} <think> stays"},
};

static const char whole[] = "Hello O P Q and DEF?\nthen lo \xe4\xb8\xad\xe6\x96\x87 end..bye";

static int set_up(void **state) {
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 8192, chat_template, "");
}

// ---- Reading streams ----

typedef struct answer {
    mx_buf content, reasoning, calls; // calls: "id-less name(args)" in order
    char finish[32];
    bool usage, done;
    long long prompt, completion;
    int n_roles, n_events, n_call_events;
} answer;

static void answer_free(answer *a) {
    mx_buf_free(&a->content);
    mx_buf_free(&a->reasoning);
    mx_buf_free(&a->calls);
}

static void add_calls(answer *a, const json_t *calls) {
    size_t i;
    json_t *c;
    json_array_foreach(calls, i, c) {
        const char *name = json_string_value(at(c, "function/name"));
        if (name) {
            mx_buf_printf(&a->calls, "%s%s ", a->calls.n ? "|" : "", name);
            assert_string_equal(text_at(c, "type"), "function");
            assert_true(strlen(text_at(c, "id")) >= 9);
        }
        mx_buf_puts(&a->calls, text_at(c, "function/arguments"));
    }
}

static void add_text(mx_buf *b, const json_t *v) {
    if (json_is_string(v)) mx_buf_add(b, json_string_value(v), json_string_length(v));
}

// Checks what every stream must keep and gathers it.
static answer read_stream(const json_t *events, bool chat) {
    answer a = {0};
    mx_buf_init(&a.content, 0), mx_buf_init(&a.reasoning, 0), mx_buf_init(&a.calls, 0);
    const char *id = text_at(json_array_get(events, 0), "id");
    size_t i;
    json_t *e;
    json_array_foreach(events, i, e) {
        assert_false(a.done);
        if (json_is_string(e)) {
            a.done = true;
            continue;
        }
        a.n_events++;
        assert_string_equal(text_at(e, "id"), id);
        assert_string_equal(text_at(e, "model"), "script");
        assert_int_equal(int_at(e, "created"), int_at(json_array_get(events, 0), "created"));
        if (at(e, "usage")) {
            assert_int_equal(json_array_size(at(e, "choices")), 0);
            a.usage = true;
            a.prompt = int_at(e, "usage/prompt_tokens");
            a.completion = int_at(e, "usage/completion_tokens");
            continue;
        }
        assert_false(a.usage); // it is the last one
        const json_t *d = at(e, "choices/0/delta");
        if (at(d, "role")) {
            assert_int_equal(a.n_events, 1);
            a.n_roles++;
        }
        assert_string_equal(a.finish, "");
        add_text(&a.content, chat ? at(d, "content") : at(e, "choices/0/text"));
        add_text(&a.reasoning, at(d, "reasoning_content"));
        add_calls(&a, at(d, "tool_calls"));
        a.n_call_events += json_array_size(at(d, "tool_calls")) > 0;
        const char *f = json_string_value(at(e, "choices/0/finish_reason"));
        if (f) snprintf(a.finish, sizeof a.finish, "%s", f);
    }
    assert_true(a.done);
    assert_int_equal(a.n_roles, chat);
    return a;
}

static const char *text_of(const mx_buf *b) {
    return b->n ? b->data : "";
}

// The same request whole and as a stream; returns the stream's answer.
static answer both(const server *s, const char *path, const char *fields) {
    bool chat = strstr(path, "chat") != NULL;
    char body[2048];
    snprintf(body, sizeof body, "{%s}", fields);
    json_t *w = post_json(s, path, body, 200);
    snprintf(body, sizeof body, "{%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
             fields);
    json_t *events = post_stream(s, path, body);
    answer a = read_stream(events, chat);
    json_decref(events);
    const json_t *m = at(w, "choices/0/message");
    const json_t *content = chat ? at(m, "content") : at(w, "choices/0/text");
    assert_string_equal(text_of(&a.content),
                        json_is_string(content) ? json_string_value(content) : "");
    if (a.reasoning.n) assert_string_equal(text_of(&a.reasoning), text_at(m, "reasoning_content"));
    if (!a.reasoning.n) assert_null(at(m, "reasoning_content"));
    assert_string_equal(a.finish, text_at(w, "choices/0/finish_reason"));
    assert_int_equal(a.prompt, int_at(w, "usage/prompt_tokens"));
    assert_int_equal(a.completion, int_at(w, "usage/completion_tokens"));
    answer calls = {0};
    mx_buf_init(&calls.calls, 0);
    add_calls(&calls, at(m, "tool_calls"));
    assert_string_equal(text_of(&calls.calls), text_of(&a.calls));
    mx_buf_free(&calls.calls);
    json_decref(w);
    return a;
}

// ---- Tests ----

static void a_stream_is_the_whole_answer(void **state) {
    (void)state;
    answer a =
        both(S, "/v1/chat/completions", "\"messages\":[{\"role\":\"user\",\"content\":\"A\"}]");
    assert_string_equal(text_of(&a.content), whole);
    assert_string_equal(a.finish, "stop");
    answer_free(&a);
    a = both(S, "/v1/completions", "\"prompt\":\"A\",\"max_tokens\":2");
    assert_string_equal(text_of(&a.content), "Hello O P");
    assert_string_equal(a.finish, "length");
    answer_free(&a);
}

static void usage_only_when_asked(void **state) {
    (void)state;
    static const char *const fields[] = {"", ",\"stream_options\":{\"include_usage\":false}",
                                         ",\"stream_options\":{}", ",\"stream_options\":null"};
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"prompt\":\"A\",\"stream\":true%s}", fields[i]);
        json_t *e = post_stream(S, "/v1/completions", body);
        answer a = read_stream(e, false);
        assert_false(a.usage);
        answer_free(&a);
        json_decref(e);
    }
}

// UTF-8 cut between tokens never shows.
static void half_characters_are_held_back(void **state) {
    (void)state;
    for (int n = 1; n <= 9; n++) {
        char fields[64];
        snprintf(fields, sizeof fields, "\"prompt\":\"A\",\"max_tokens\":%d", n);
        answer a = both(S, "/v1/completions", fields);
        assert_true(mx_utf8_valid((mx_str){text_of(&a.content), a.content.n}));
        answer_free(&a);
    }
}

static const char *const stop_sets[] = {"\"O P Q\"",
                                        "\"DE\"",
                                        "\"lo\"",
                                        "\"\\n\"",
                                        "\"Hello\"",
                                        "\"H\"",
                                        "\"\xe4\xb8\xad\"",
                                        "\"end.\"",
                                        "\"bye\"",
                                        "\"ye\"",
                                        "\".\"",
                                        "\"zzz\"",
                                        "\"O P R\"",
                                        "\"bye!\"",
                                        "[\"DE\",\"DEF\"]",
                                        "[\"DEF\",\"DE\"]",
                                        "[\"EF?\",\"DEF\"]",
                                        "[\"Q and\",\"P Q\"]",
                                        "[\"bye!\",\"..b\"]",
                                        "[\"x\",\"y\",\"z\"]",
                                        "\"?\\nthen\"",
                                        "\"\xe6\x96\x87 end\"",
                                        "[\" \",\"Hello O\"]",
                                        "\"P Q and DEF?\\nthen lo\"",
                                        "[\"F?\",\"?\"]",
                                        "\"..\"",
                                        "\"...\"",
                                        "\" \xe4\xb8\xad\xe6\x96\x87\"",
                                        "\"e\""};

// The text before the earliest match.
static void expected_text(const char *set, char *out, size_t cap, bool *found) {
    json_t *v = json_loads(set, JSON_DECODE_ANY, NULL);
    const char *best = NULL;
    for (size_t i = 0; i < (json_is_array(v) ? json_array_size(v) : 1); i++) {
        const char *stop = json_string_value(json_is_array(v) ? json_array_get(v, i) : v);
        const char *p = strstr(whole, stop);
        if (p && (!best || p < best)) best = p;
    }
    *found = best != NULL;
    snprintf(out, cap, "%.*s", best ? (int)(best - whole) : (int)strlen(whole), whole);
    json_decref(v);
}

// llama-server's form, whole and as a stream.
static void native_stop(const char *set, const char *want, bool found) {
    for (int stream = 0; stream < 2; stream++) {
        char body[512];
        snprintf(body, sizeof body, "{\"prompt\":\"A\",\"stop\":[%s],\"stream\":%s}",
                 set[0] == '[' ? strndupa(set + 1, strlen(set) - 2) : set,
                 stream ? "true" : "false");
        json_t *events = stream ? post_stream(S, "/completion", body)
                                : json_pack("[o]", post_json(S, "/completion", body, 200));
        mx_buf text;
        mx_buf_init(&text, 0);
        size_t i;
        json_t *e;
        json_array_foreach(events, i, e) add_text(&text, at(e, "content"));
        assert_string_equal(text_of(&text), want);
        const json_t *last = json_array_get(events, json_array_size(events) - 1);
        assert_string_equal(text_at(last, "stop_type"), found ? "word" : "eos");
        mx_buf_free(&text);
        json_decref(events);
    }
}

static void stop_texts(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(stop_sets); i++) {
        char want[256], fields[512];
        bool found;
        expected_text(stop_sets[i], want, sizeof want, &found);
        snprintf(fields, sizeof fields, "\"prompt\":\"A\",\"stop\":%s", stop_sets[i]);
        answer a = both(S, "/v1/completions", fields);
        if (strcmp(text_of(&a.content), want) != 0) {
            fail_msg("stop %s: \"%s\", expected \"%s\"", stop_sets[i], text_of(&a.content), want);
        }
        assert_string_equal(a.finish, "stop");
        answer_free(&a);
        snprintf(fields, sizeof fields,
                 "\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],"
                 "\"stop\":%s,\"max_tokens\":9",
                 stop_sets[i]);
        a = both(S, "/v1/chat/completions", fields);
        assert_string_equal(text_of(&a.content), want);
        assert_string_equal(a.finish, found ? "stop" : "length");
        answer_free(&a);
        native_stop(stop_sets[i], want, found);
    }
}

#define TOOLS   "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"
#define USER(c) "\"messages\":[{\"role\":\"user\",\"content\":\"" c "\"}]"

static void tool_calls(void **state) {
    (void)state;
    answer a = both(S, "/v1/chat/completions", USER("T") "," TOOLS);
    assert_string_equal(text_of(&a.calls), "f {\"city\":\"Paris\"}|g {}");
    assert_string_equal(text_of(&a.content), "Let me look.");
    assert_string_equal(a.finish, "tool_calls");
    answer_free(&a);
    // cut in the middle of a call
    for (int n = 1; n <= 8; n++) {
        char fields[512];
        snprintf(fields, sizeof fields, USER("T") "," TOOLS ",\"max_tokens\":%d", n);
        a = both(S, "/v1/chat/completions", fields);
        assert_string_equal(a.finish, "length");
        answer_free(&a);
    }
    // no tools, or none wanted: text
    a = both(S, "/v1/chat/completions", USER("T"));
    assert_int_equal(a.calls.n, 0);
    assert_non_null(strstr(text_of(&a.content), "<tool_call>"));
    assert_string_equal(a.finish, "stop");
    answer_free(&a);
    a = both(S, "/v1/chat/completions", USER("T") "," TOOLS ",\"tool_choice\":\"none\"");
    assert_int_equal(a.calls.n, 0);
    answer_free(&a);
    // a turn goes back as it came
    json_t *v = post_json(S, "/v1/chat/completions", "{" USER("T") "," TOOLS "}", 200);
    json_t *m = json_incref(at(v, "choices/0/message"));
    json_t *next = json_pack("{s:[{s:s,s:s},o,{s:s,s:s,s:s},{s:s,s:s}],s:i}", "messages", "role",
                             "user", "content", "T", m, "role", "tool", "tool_call_id", "x",
                             "content", "sunny", "role", "user", "content", "A", "max_tokens", 3);
    char *body = json_dumps(next, 0);
    json_decref(post_json(S, "/v1/chat/completions", body, 200));
    free(body);
    json_decref(next);
    json_decref(v);
}

// A server with its own scripts and template, under the same name, so that answers name it alike.
static void start_beside(server *s, const char *folder, const script *list, size_t n,
                         const char *template) {
    mx_err err;
    char *sub = mx_path_join(dir, folder), *path = mx_path_join(sub, "script.gguf");
    assert_int_equal(mx_mkdirs(sub, &err), MX_OK);
    script_write(path, list, n, 1024, template);
    server_start(s, dir, path, "");
    mx_free(path);
    mx_free(sub);
}

// The forms of Mistral, Llama 3 with its tag and without: streamed as deltas as those of Hermes.
static void tool_calls_in_other_forms(void **state) {
    (void)state;
    static const script calls[] = {
        {'M', "[TOOL_CALLS]" SCRIPT_CUT "[{\"na" SCRIPT_CUT "me\": \"f\", \"argu" SCRIPT_CUT
              "ments\": {\"ci" SCRIPT_CUT "ty\": \"Par" SCRIPT_CUT
              "is\"}}, {\"name\": \"g\"" SCRIPT_CUT ", \"arguments\": {}}]"},
        {'L', "<|python_tag|>" SCRIPT_CUT "{\"name\": \"f\"," SCRIPT_CUT " \"param" SCRIPT_CUT
              "eters\": {\"city\"" SCRIPT_CUT ": \"Par" SCRIPT_CUT "is\"}" SCRIPT_CUT
              "}; {\"name\": \"g\"" SCRIPT_CUT ", \"parameters\": {}}"},
        {'N', "{\"name\"" SCRIPT_CUT ": \"f\", " SCRIPT_CUT "\"parameters\":" SCRIPT_CUT
              " {\"city\": " SCRIPT_CUT "\"Paris\"" SCRIPT_CUT "}}"},
        {'J', "{\"title\"" SCRIPT_CUT ": \"f\"}"},
    };
    static const struct {
        const char *user, *calls, *content;
    } cases[] = {{"M", "f {\"city\": \"Paris\"}|g {}", ""},
                 {"L", "f {\"city\": \"Paris\"}|g {}", ""},
                 {"N", "f {\"city\": \"Paris\"}", ""},
                 {"J", "", "{\"title\": \"f\"}"}};
    static const char mistral[] =
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools[0].function.name }}{% endif %}"
        "{% for m in messages %}[INST]{{ m.content }}{% endfor %}";
    static const char llama[] =
        "{% for m in messages %}<|start_header_id|>{{ m.role }}\n{{ m.content }}{% endfor %}";
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        server s = {0};
        start_beside(&s, cases[i].user, &calls[i], 1, i == 0 ? mistral : llama);
        int most = 0; // events with pieces of calls; a slow reader gets several tokens in one
        for (int n = 1; n <= 20; n++) {
            char fields[512];
            snprintf(fields, sizeof fields,
                     "\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"max_tokens\":%d,"
                     "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},"
                     "{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]",
                     cases[i].user, n);
            answer a = both(&s, "/v1/chat/completions", fields); // cut anywhere: the same, too
            if (n == 20) {
                assert_string_equal(text_of(&a.calls), cases[i].calls);
                assert_string_equal(text_of(&a.content), cases[i].content);
                assert_string_equal(a.finish, cases[i].calls[0] ? "tool_calls" : "stop");
            }
            most = MX_MAX(most, a.n_call_events);
            answer_free(&a);
        }
        assert_true(cases[i].calls[0] ? most >= 3 : most == 0);
        server_stop(&s);
    }
}

static void reasoning(void **state) {
    (void)state;
    server s = {0};
    start_beside(&s, "think", scripts, MX_COUNT(scripts), think_template);
    answer a = both(&s, "/v1/chat/completions", USER("x"));
    assert_string_equal(text_of(&a.reasoning), "internal reasoning");
    assert_string_equal(text_of(&a.content), "{\"answer\":1} <think> stays");
    answer_free(&a);
    // a budget that reasoning uses up
    a = both(&s, "/v1/chat/completions", USER("x") ",\"max_tokens\":2");
    assert_string_equal(a.finish, "length");
    assert_int_equal(a.completion, 2);
    assert_int_equal(a.content.n, 0);
    answer_free(&a);
    a = both(&s, "/v1/chat/completions", USER("x") ",\"reasoning_format\":\"none\"");
    assert_int_equal(a.reasoning.n, 0);
    assert_non_null(strstr(text_of(&a.content), "</think>"));
    answer_free(&a);
    // stops are for the answer
    static const char *const stops[][2] = {{"reason", "{\"answer\":1} <think> stays"},
                                           {"\\n", "{\"answer\":1} <think> stays"},
                                           {"</think>", "{\"answer\":1} <think> stays"},
                                           {"ans", "{\""},
                                           {"{", ""},
                                           {"think", "{\"answer\":1} <"}};
    for (size_t i = 0; i < MX_COUNT(stops); i++) {
        char fields[256];
        snprintf(fields, sizeof fields, USER("x") ",\"stop\":\"%s\"", stops[i][0]);
        a = both(&s, "/v1/chat/completions", fields);
        assert_string_equal(text_of(&a.reasoning), "internal reasoning");
        assert_string_equal(text_of(&a.content), stops[i][1]);
        assert_string_equal(a.finish, "stop");
        answer_free(&a);
    }
    a = both(&s, "/v1/chat/completions",
             USER("x") ",\"reasoning_format\":\"none\",\"stop\":\"reason\"");
    assert_string_equal(text_of(&a.content), "internal ");
    answer_free(&a);
    server_stop(&s);
}

static void choices_in_one_stream(void **state) {
    (void)state;
    json_t *events =
        post_stream(S, "/v1/chat/completions", "{" USER("A") ",\"n\":3,\"stream\":true}");
    mx_buf text[3];
    int roles[3] = {0}, ends[3] = {0};
    for (int i = 0; i < 3; i++) mx_buf_init(&text[i], 0);
    size_t i;
    json_t *e;
    json_array_foreach(events, i, e) {
        if (json_is_string(e)) continue;
        long long k = int_at(e, "choices/0/index");
        assert_true(k >= 0 && k < 3 && !ends[k]);
        roles[k] += at(e, "choices/0/delta/role") != NULL;
        ends[k] += json_is_string(at(e, "choices/0/finish_reason"));
        add_text(&text[k], at(e, "choices/0/delta/content"));
    }
    for (int k = 0; k < 3; k++) {
        assert_string_equal(text_of(&text[k]), whole);
        assert_int_equal(roles[k], 1);
        assert_int_equal(ends[k], 1);
        mx_buf_free(&text[k]);
    }
    json_decref(events);
}

// ---- Time ----

static int open_stream(const server *s, const char *body) {
    int fd = dial(s);
    send_request(fd, "POST", "/v1/completions", NULL, body, strlen(body));
    return fd;
}

static bool read_until(int fd, mx_buf *b, const char *what) {
    char part[4096];
    while (!b->n || !strstr(b->data, what)) {
        ssize_t k = recv(fd, part, sizeof part, 0);
        if (k <= 0) return false;
        mx_buf_add(b, part, (size_t)k);
    }
    return true;
}

// One place, taken; the next request has its headers at once, and pings while it waits.
static void headers_come_at_once_and_pings(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model,
                 "-c 32768 --n-parallel 1 --sse-ping-interval 1 --max-queue-depth 1");
    static const char endless[] = "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":32000}";
    mx_buf first, second;
    mx_buf_init(&first, 0), mx_buf_init(&second, 0);
    int a = open_stream(&s, endless);
    assert_true(read_until(a, &first, "data: "));
    double t = mx_now_s();
    int b = open_stream(&s, "{\"prompt\":\"A\",\"stream\":true}");
    assert_true(read_until(b, &second, "\r\n\r\n"));
    assert_true(mx_now_s() - t < 0.5);
    // the queue is full now
    reply r = post(&s, "/v1/completions", "{\"prompt\":\"A\"}");
    if (r.status == 503) assert_string_equal(reply_header(&r, "Retry-After"), "1");
    json_decref(json_of(r, 503, "one request too many"));
    json_t *slots = get_json(&s, "/slots?fail_on_no_slot=1", 503);
    json_decref(slots);
    bool pinged = read_until(b, &second, ": ping\n\n") && !strstr(second.data, "[DONE]");
    close(a); // it leaves: the second one runs
    assert_true(read_until(b, &second, "[DONE]"));
    assert_true(pinged);
    close(b);
    mx_buf_free(&first);
    mx_buf_free(&second);
    server_stop(&s);
}

// Signs of life while a slow prompt is computed; they change nothing of the text. Longer prompts
// until one is slow enough for a sign after the first step. Returns how many there were.
static int signs_of_life(const server *s, const char *path, const char *style, mx_buf *text) {
    static int n = 400;
    bool chat = strstr(path, "chat") != NULL, native = path[1] == 'c', progress = style[0] == 'p';
    mx_buf body;
    mx_buf_init(&body, 0);
    int n_signs = 0;
    for (; n < 8000 && n_signs == 0; n += n_signs ? 0 : n / 2) {
        mx_buf_clear(&body);
        mx_buf_clear(text);
        mx_buf_printf(&body, "{\"cache_prompt\":false,\"temperature\":0,\"stream\":true,%s",
                      chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"" : "\"prompt\":\"");
        for (int i = 0; i < n; i++) mx_buf_putc(&body, 'y');
        mx_buf_puts(&body, chat ? "A\"}]}" : "A\"}");
        json_t *events = post_stream(s, path, body.data), *e;
        size_t i;
        json_array_foreach(events, i, e) {
            const json_t *t = native ? at(e, "content")
                              : chat ? at(e, "choices/0/delta/content")
                                     : at(e, "choices/0/text");
            add_text(text, t);
            assert_true(!at(e, "prompt_progress") || (progress && json_string_length(t) == 0));
            if (!progress) n_signs += text->n == 0 && i > 0 && json_string_length(t) == 0;
            if (!at(e, "prompt_progress")) continue;
            assert_int_equal(int_at(e, "prompt_progress/cache"), 0);
            long long done = int_at(e, "prompt_progress/processed");
            assert_true(done <= int_at(e, "prompt_progress/total"));
            assert_true(int_at(e, "prompt_progress/total") > n);
            assert_true(int_at(e, "prompt_progress/time_ms") >= 500);
            n_signs += done > 0;
        }
        json_decref(events);
    }
    mx_buf_free(&body);
    return n_signs;
}

static void pings_of_other_styles(void **state) {
    (void)state;
    static const char *const paths[] = {"/v1/completions", "/completion", "/v1/chat/completions"};
    static const char *const styles[] = {"delta", "progress"};
    setenv("MLXCEL_CPU_ISA", "scalar", 1);
    for (size_t i = 0; i < MX_COUNT(styles); i++) {
        server s = {0};
        char args[200];
        snprintf(args, sizeof args,
                 "--sse-ping-interval 1 --sse-ping-style %s --prefill-chunk-size 64", styles[i]);
        server_start(&s, dir, model, args);
        for (size_t k = 0; k < MX_COUNT(paths); k++) {
            if ((k == 2) != (i == 0)) continue; // each form once is enough
            mx_buf text;
            mx_buf_init(&text, 0);
            assert_true(signs_of_life(&s, paths[k], styles[i], &text) > 0);
            assert_string_equal(text_of(&text), whole);
            mx_buf_free(&text);
        }
        server_stop(&s);
    }
    unsetenv("MLXCEL_CPU_ISA");
}

// A sign of life takes along the scores that came so far; none comes twice.
static void scores_beside_pings(void **state) {
    (void)state;
    setenv("MLXCEL_CPU_ISA", "scalar", 1);
    server s = {0};
    server_start(&s, dir, model,
                 "--sse-ping-interval 1 --sse-ping-style delta --prefill-chunk-size 64");
    mx_buf body;
    mx_buf_init(&body, 0);
    bool early = false;
    for (size_t n = 400; n < 8000 && !early; n += n / 2) {
        mx_buf_clear(&body);
        mx_buf_puts(&body,
                    "{\"max_tokens\":0,\"echo\":true,\"logprobs\":0,\"stream\":true,\"prompt\":\"");
        for (size_t i = 0; i < n; i++) mx_buf_putc(&body, 'y');
        mx_buf_puts(&body, "\"}");
        json_t *events = post_stream(&s, "/v1/completions", body.data), *e, *v;
        size_t i, k, n_values = 0, n_null = 0;
        json_array_foreach(events, i, e) {
            json_t *values = at(e, "choices/0/logprobs/token_logprobs");
            json_array_foreach(values, k, v) n_null += json_is_null(v);
            n_values += json_array_size(values);
            early |= n_values > 0 && n_values < n;
        }
        assert_int_equal(n_values, n);
        assert_int_equal(n_null, 1); // nothing precedes the first token
        json_decref(events);
    }
    assert_true(early);
    mx_buf_free(&body);
    server_stop(&s);
    unsetenv("MLXCEL_CPU_ISA");
}

// An error after the headers is an event like the others, and nothing follows.
static void late_errors_are_events(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "--n-parallel 1 --timeout 1");
    int a = open_stream(&s, "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":8000}");
    int b = open_stream(&s, "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":8000}");
    int c = open_stream(&s, "{\"prompt\":\"x\",\"max_tokens\":8000}");
    int fds[] = {a, b, c};
    int timed_out = 0;
    for (int i = 0; i < 3; i++) {
        reply r = read_reply(fds[i]);
        close(fds[i]);
        if (i == 2) {
            timed_out += r.status == 504;
            assert_true(r.status == 504 || r.status == 200);
            reply_free(&r);
            continue;
        }
        assert_true(r.whole);
        json_t *e = parse_events(&r.body);
        const json_t *last = json_array_get(e, json_array_size(e) - 1);
        if (!json_is_string(last)) {
            assert_string_equal(text_at(last, "error/code"), "server_timeout");
            assert_string_equal(text_at(last, "error/type"), "server_timeout");
            timed_out++;
        }
        json_decref(e);
        reply_free(&r);
    }
    assert_true(timed_out > 0);
    server_stop(&s);
}

// Events carry how far it is, when that was asked for, and not otherwise.
static void timings_in_every_event(void **state) {
    (void)state;
    static const char *const paths[] = {"/v1/completions", "/v1/chat/completions", "/completion"};
    static const char *const starts[] = {"{\"prompt\":\"A\"", "{" USER("A"), "{\"prompt\":\"A\""};
    for (int i = 0; i < 6; i++) {
        bool wanted = i % 2;
        char body[256];
        snprintf(body, sizeof body,
                 "%s,\"stream\":true,\"temperature\":0,\"timings_per_token\":%s}", starts[i / 2],
                 wanted ? "true" : "false");
        json_t *events = post_stream(S, paths[i / 2], body), *e;
        size_t k;
        long long last = 0;
        int n = 0;
        json_array_foreach(events, k, e) {
            const char *key = i / 2 == 1 ? "choices/0/delta/content"
                              : i / 2    ? "content"
                                         : "choices/0/text";
            bool text = json_string_length(at(e, key)) > 0 && !json_is_true(at(e, "stop"));
            if (!text) continue;
            n++;
            assert_int_equal(at(e, "timings") != NULL, wanted);
            if (wanted) assert_true(int_at(e, "timings/predicted_n") > last);
            last = int_at(e, "timings/predicted_n");
        }
        assert_true(n > 0);
        json_decref(events);
    }
}

// Text events of an answer by a server with these flags; it comes without waiting for the flag's
// time.
static int text_events(const char *flags) {
    server s = {0};
    server_start(&s, dir, model, flags);
    double start = mx_now_s();
    json_t *events = post_stream(&s, "/v1/completions",
                                 "{\"prompt\":\"A\",\"temperature\":0,\"stream\":true}"),
           *e;
    double seconds = mx_now_s() - start;
    size_t i;
    int n = 0;
    mx_buf text;
    mx_buf_init(&text, 0);
    json_array_foreach(events, i, e) {
        const json_t *t = at(e, "choices/0/text");
        n += json_string_length(t) > 0;
        add_text(&text, t);
    }
    assert_string_equal(text_of(&text), whole);
    assert_true(seconds < 0.9); // of the flag's second
    mx_buf_free(&text);
    json_decref(events);
    server_stop(&s);
    return n;
}

// The first token goes out at once, the others when the time is over or the answer ends. Without a
// time every token is an event, as far as the writer is as fast as the model: in one of many tries.
static void fast_tokens_are_gathered(void **state) {
    (void)state;
    int n = text_events("--sse-gather-ms 1000"), each = 0;
    assert_true(n >= 1 && n <= 3);
    for (int i = 0; i < 20 && each <= 3; i++) each = text_events("--sse-gather-ms 0");
    assert_true(each > 3);
    print_message("%d text events, %d when gathered\n", each, n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_tokens_are_gathered),
        cmocka_unit_test(a_stream_is_the_whole_answer),
        cmocka_unit_test(usage_only_when_asked),
        cmocka_unit_test(half_characters_are_held_back),
        cmocka_unit_test(stop_texts),
        cmocka_unit_test(tool_calls),
        cmocka_unit_test(tool_calls_in_other_forms),
        cmocka_unit_test(reasoning),
        cmocka_unit_test(choices_in_one_stream),
        cmocka_unit_test(headers_come_at_once_and_pings),
        cmocka_unit_test(pings_of_other_styles),
        cmocka_unit_test(scores_beside_pings),
        cmocka_unit_test(late_errors_are_events),
        cmocka_unit_test(timings_in_every_event),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
