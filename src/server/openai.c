// The OpenAI forms: /v1/chat/completions and /v1/completions, whole and as streams. State: none.
// Every event is "data: {json}\n\n"; a stream ends with usage when it was asked for, and [DONE].
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <math.h>
#include <stdlib.h>

// ---- Requests ----

static bool bad(srv_req *q, const char *param, const char *why) {
    req_error(q, 400, "invalid_value", param, "%s", why);
    return false;
}

bool template_fields(srv_req *q) {
    static const struct {
        const char *name, *expected;
        json_type type;
    } fields[] = {{"tools", "an array", JSON_ARRAY},
                  {"documents", "an array", JSON_ARRAY},
                  {"chat_template_kwargs", "an object", JSON_OBJECT},
                  {"chat_template", "a text", JSON_STRING},
                  {"add_generation_prompt", "true or false", JSON_TRUE}};
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        const json_t *v = json_object_get(q->json, fields[i].name);
        if (!v || json_is_null(v) || json_typeof(v) == fields[i].type) continue;
        if (fields[i].type == JSON_TRUE && json_is_false(v)) continue;
        req_error(q, 400, "invalid_value", fields[i].name, "%s: expected %s", fields[i].name,
                  fields[i].expected);
        return false;
    }
    return true;
}

static bool check_messages(srv_req *q) {
    static const char *const roles[] = {"system", "user",      "assistant",
                                        "tool",   "developer", "function"};
    json_t *m = json_object_get(q->json, "messages"), *item;
    size_t i;
    if (!json_is_array(m) || json_array_size(m) == 0) {
        return bad(q, "messages", "messages: expected an array of messages, at least one");
    }
    json_array_foreach(m, i, item) {
        const char *role = json_string_value(json_object_get(item, "role"));
        bool known = false;
        for (size_t k = 0; role && k < MX_COUNT(roles); k++) known |= strcmp(role, roles[k]) == 0;
        if (!known) {
            req_error(q, 400, "invalid_value", "messages",
                      "messages[%zu].role: expected system, developer, user, assistant or tool", i);
            return false;
        }
        // templates know the older name
        if (strcmp(role, "developer") == 0)
            json_object_set_new(item, "role", json_string("system"));
    }
    return true;
}

static bool check_tools(gen *g) {
    srv_req *q = g->q;
    json_t *tools = json_object_get(q->json, "tools"), *item;
    const json_t *choice = json_object_get(q->json, "tool_choice");
    size_t i;
    if (json_is_object(choice) ||
        (json_is_string(choice) && strcmp(json_string_value(choice), "required") == 0)) {
        req_error(q, 400, "unsupported_parameter", "tool_choice",
                  "tool_choice: a call that is required or named is not supported; expected auto "
                  "or none");
        return false;
    }
    bool none = json_is_string(choice) && strcmp(json_string_value(choice), "none") == 0;
    if (choice && !json_is_null(choice) && !none &&
        !(json_is_string(choice) && strcmp(json_string_value(choice), "auto") == 0)) {
        return bad(q, "tool_choice", "tool_choice: expected auto or none");
    }
    if (!tools || json_is_null(tools)) return true;
    json_array_foreach(tools, i, item) {
        const char *type = json_string_value(json_object_get(item, "type"));
        const json_t *f = json_object_get(item, "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        if (!type || strcmp(type, "function") != 0 || !name || !name[0]) {
            req_error(q, 400, "invalid_value", "tools",
                      "tools[%zu]: expected {\"type\":\"function\",\"function\":{\"name\":...}}",
                      i);
            return false;
        }
    }
    if (!none && json_array_size(tools) > 0) g->tools = tools;
    return true;
}

static bool merge_kwargs(gen *g, json_t *out) {
    srv_req *q = g->q;
    json_t *own = json_object_get(q->json, "chat_template_kwargs");
    json_t *effort = json_object_get(q->json, "reasoning_effort");
    if (q->s->template_kwargs) json_object_update(out, q->s->template_kwargs);
    if (json_is_string(effort))
        json_object_set(out, "reasoning_effort", effort);
    else if (effort && !json_is_null(effort))
        return bad(q, "reasoning_effort", "reasoning_effort: expected a text");
    if (json_is_object(own)) json_object_update(out, own);
    return true;
}

static bool check_reasoning_format(gen *g) {
    const json_t *v = json_object_get(g->q->json, "reasoning_format");
    const char *f = json_string_value(v);
    if (!v || json_is_null(v)) return true;
    if (f && strcmp(f, "none") == 0)
        g->o.reasoning_none = true;
    else if (f && (strcmp(f, "auto") == 0 || strcmp(f, "deepseek") == 0))
        g->o.reasoning_none = false;
    else
        return bad(g->q, "reasoning_format", "reasoning_format: expected auto, deepseek or none");
    return true;
}

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), k = strlen(end);
    while (n && strchr(" \n\r\t", s[n - 1])) n--;
    return n >= k && memcmp(s + n - k, end, k) == 0;
}

// Where the reasoning starts follows from the prompt: open, closed already, or the model's choice.
static void choose_thinking(gen *g, const char *prompt, const json_t *kwargs) {
    g->think_inside = ends_with(prompt, "<think>");
    bool off =
        ends_with(prompt, "</think>") || json_is_false(json_object_get(kwargs, "enable_thinking"));
    g->think_on = !g->o.reasoning_none && (g->think_inside || (g->q->s->knows_thinking && !off));
}

static void choose_tools(gen *g, const char *prompt) {
    const srv *s = g->q->s;
    if (!g->tools) return;
    g->tool_format = TOOLS_HERMES;
    if (strstr(prompt, "<tool_call>")) return;
    if (s->has_mistral_calls || strstr(prompt, "[AVAILABLE_TOOLS]"))
        g->tool_format = TOOLS_MISTRAL;
    else if (s->has_python_tag || strstr(prompt, "<|start_header_id|>"))
        g->tool_format = TOOLS_LLAMA;
    g->o.show_special = g->tool_format != TOOLS_HERMES; // their marks are control tokens
}

json_t *chat_template_request(srv_req *q, const json_t *tools, json_t *kwargs) {
    static const char *const passed[] = {"messages", "documents", "add_generation_prompt",
                                         "chat_template"};
    json_t *r = json_object();
    for (size_t i = 0; i < MX_COUNT(passed); i++) {
        json_t *v = json_object_get(q->json, passed[i]);
        if (v && !json_is_null(v)) json_object_set(r, passed[i], v);
    }
    if (tools) json_object_set(r, "tools", (json_t *)(uintptr_t)tools);
    if (json_object_size(kwargs)) json_object_set(r, "chat_template_kwargs", kwargs);
    return r;
}

static bool make_chat_prompt(gen *g, json_t *kwargs) {
    srv_req *q = g->q;
    json_t *r = chat_template_request(q, g->tools, kwargs);
    char *text = json_dumps(r, JSON_COMPACT), *prompt = NULL;
    json_decref(r);
    int32_t *ids = NULL;
    size_t n = 0;
    mlxcel_error err = {0};
    int st = mlxcel_apply_template(q->s->engine, text, &prompt, &ids, &n, &err);
    free(text);
    if (st != 0) {
        req_fail(q, &err);
        return false;
    }
    choose_thinking(g, prompt, kwargs);
    choose_tools(g, prompt);
    gen_add_prompt(g, ids, n, prompt, strlen(prompt));
    return true;
}

static bool read_chat(gen *g, json_t *kwargs) {
    return opts_read(&g->o, g->q, API_CHAT) && template_fields(g->q) && check_messages(g->q) &&
           check_tools(g) && check_reasoning_format(g) && merge_kwargs(g, kwargs) &&
           make_chat_prompt(g, kwargs);
}

void handle_chat(srv_req *q) {
    gen *g = gen_new(q, API_CHAT);
    json_t *kwargs = json_object();
    bool ok = read_chat(g, kwargs);
    json_decref(kwargs);
    if (ok)
        gen_start(g);
    else
        gen_free(g);
}

void handle_count(srv_req *q) {
    gen *g = gen_new(q, API_CHAT);
    json_t *kwargs = json_object();
    if (read_chat(g, kwargs)) {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_printf(&b, "{\"object\":\"response.input_tokens\",\"input_tokens\":%zu}",
                      g->jobs[0].n_ids);
        req_reply_json(q, 200, &b);
    }
    json_decref(kwargs);
    gen_free(g);
}

// ---- Pieces of answers ----

void timings_json(mx_buf *out, const mlxcel_timings *t) {
    int32_t n = t->n_prompt - t->n_cached, k = MX_MAX(t->n_decoded - 1, 0);
    double per_prompt = n > 0 ? t->prompt_ms / n : 0, per_token = k > 0 ? t->decode_ms / k : 0;
    mx_buf_printf(out,
                  "{\"cache_n\":%d,\"prompt_n\":%d,\"prompt_ms\":%.3f,\"prompt_per_token_ms\":%.4f,"
                  "\"prompt_per_second\":%.3f,\"predicted_n\":%d,\"predicted_ms\":%.3f,"
                  "\"predicted_per_token_ms\":%.4f,\"predicted_per_second\":%.3f,\"queue_ms\":%.3f,"
                  "\"first_token_ms\":%.3f}",
                  t->n_cached, n, t->prompt_ms, per_prompt, per_prompt > 0 ? 1e3 / per_prompt : 0,
                  t->n_decoded, t->decode_ms, per_token, per_token > 0 ? 1e3 / per_token : 0,
                  t->queue_ms, t->first_token_ms);
}

static void put_progress(const gen_choice *c, mx_buf *out) {
    const gen_job *j = c->job;
    mx_buf_printf(out,
                  ",\"prompt_progress\":{\"total\":%zu,\"cache\":%d,\"processed\":%d,"
                  "\"time_ms\":%.0f}",
                  j->n_ids, j->n_cached, j->n_prefilled, (mx_now_s() - c->g->started_s) * 1e3);
}

void live_timings(const gen_choice *c, mx_buf *out) {
    if (c->g->tells_progress) put_progress(c, out);
    if (!c->g->o.timings || c->live.n_decoded == 0) return;
    mx_buf_puts(out, ",\"timings\":");
    timings_json(out, &c->live);
}

static void usage_json(const gen *g, mx_buf *out) {
    mx_buf_printf(out,
                  "\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d,"
                  "\"prompt_tokens_details\":{\"cached_tokens\":%d}}",
                  g->n_prompt, g->n_decoded, g->n_prompt + g->n_decoded, g->n_cached);
}

static const char *finish_name(const gen_choice *c) {
    if (c->finish == MLXCEL_FINISH_LENGTH) return "length";
    return c->n_calls > 0 ? "tool_calls" : "stop";
}

static void comma(mx_buf *b) {
    if (b->n) mx_buf_putc(b, ',');
}

static void put_bytes(mx_buf *b, mx_str s) {
    mx_buf_putc(b, '[');
    for (size_t i = 0; i < s.n; i++) {
        mx_buf_printf(b, "%s%u", i ? "," : "", (unsigned)(unsigned char)s.p[i]);
    }
    mx_buf_putc(b, ']');
}

static mx_str piece_of(gen_choice *c, int32_t id) {
    mx_str s;
    s.p = mlxcel_piece(c->g->q->s->engine, id, &s.n);
    return s;
}

// JSON has no infinity: what cannot happen gets a number that says so
static void put_logprob(mx_buf *b, float x) {
    mx_buf_printf(b, "%.8g", isfinite(x) ? (double)x : -9999.0);
}

static void put_entry(gen_choice *c, mx_buf *b, int32_t id, float logprob) {
    mx_str s = piece_of(c, id);
    bool native = c->g->api == API_NATIVE;
    mx_buf_putc(b, '{');
    if (native) mx_buf_printf(b, "\"id\":%d,", id);
    mx_buf_puts(b, "\"token\":");
    mx_buf_json(b, s);
    mx_buf_puts(b, ",\"logprob\":");
    put_logprob(b, logprob);
    mx_buf_puts(b, ",\"bytes\":");
    put_bytes(b, s);
}

static size_t count_chars(mx_str s) {
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.p[i] & 0xc0) != 0x80;
    return n;
}

// A token's text; of one that is not UTF-8 its bytes, as "bytes:\\xe4", so that two such differ.
static void put_piece(mx_buf *b, mx_str s) {
    if (mx_utf8_valid(s)) {
        mx_buf_json(b, s);
        return;
    }
    mx_buf_puts(b, "\"bytes:");
    for (size_t i = 0; i < s.n; i++) mx_buf_printf(b, "\\\\x%02x", (unsigned char)s.p[i]);
    mx_buf_putc(b, '"');
}

static bool same_before(gen_choice *c, const mlxcel_token *t, int32_t i) {
    for (int32_t k = 0; k < i; k++) {
        if (mx_str_eq(piece_of(c, t->top[k].id), piece_of(c, t->top[i].id))) return true;
    }
    return false;
}

// /v1/completions: parallel lists; n_top < 0 is the first token of a prompt, which has no value.
static void add_lists(gen_choice *c, const mlxcel_token *t) {
    mx_str s = piece_of(c, t->id);
    comma(&c->probs);
    put_piece(&c->probs, s);
    comma(&c->offsets);
    mx_buf_printf(&c->offsets, "%zu", c->n_chars);
    c->n_chars += count_chars(s);
    comma(&c->values);
    comma(&c->tops);
    if (t->n_top < 0) {
        mx_buf_puts(&c->values, "null");
        mx_buf_puts(&c->tops, "null");
        return;
    }
    put_logprob(&c->values, t->logprob);
    mx_buf_putc(&c->tops, '{');
    for (int32_t i = 0; i < t->n_top; i++) {
        if (same_before(c, t, i)) continue;
        if (i) mx_buf_putc(&c->tops, ',');
        put_piece(&c->tops, piece_of(c, t->top[i].id));
        mx_buf_putc(&c->tops, ':');
        put_logprob(&c->tops, t->top[i].logprob);
    }
    mx_buf_putc(&c->tops, '}');
}

void probs_add(gen_choice *c, const mlxcel_token *t) {
    if (c->g->api == API_TEXT) {
        add_lists(c, t);
        return;
    }
    mx_buf *b = &c->probs;
    comma(b);
    put_entry(c, b, t->id, t->logprob);
    mx_buf_puts(b, ",\"top_logprobs\":[");
    for (int32_t i = 0; i < t->n_top; i++) {
        if (i) mx_buf_putc(b, ',');
        put_entry(c, b, t->top[i].id, t->top[i].logprob);
        mx_buf_putc(b, '}');
    }
    mx_buf_puts(b, "]}");
}

static void put_logprobs(gen_choice *c, mx_buf *out) {
    if (!c->g->o.want_logprobs) return;
    const char *probs = c->probs.n ? c->probs.data : "";
    if (c->g->api == API_CHAT) {
        mx_buf_printf(out, ",\"logprobs\":{\"content\":[%s],\"refusal\":null}", probs);
    } else {
        mx_buf_printf(out,
                      ",\"logprobs\":{\"tokens\":[%s],\"token_logprobs\":[%s],"
                      "\"top_logprobs\":[%s],\"text_offset\":[%s]}",
                      probs, c->values.n ? c->values.data : "", c->tops.n ? c->tops.data : "",
                      c->offsets.n ? c->offsets.data : "");
    }
    mx_buf_clear(&c->probs);
    mx_buf_clear(&c->values);
    mx_buf_clear(&c->tops);
    mx_buf_clear(&c->offsets);
}

// ---- Streams ----

static mx_buf *begin_event(const gen *g) {
    mx_buf *b = &g->q->out;
    mx_buf_printf(b, "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", g->id,
                  g->api == API_CHAT ? "chat.completion.chunk" : "text_completion", g->created);
    mx_buf_json(b, mx_str_of(g->q->s->model_name));
    mx_buf_puts(b, ",\"system_fingerprint\":\"mlxcel-" MLXCEL_VERSION "\",\"choices\":[");
    return b;
}

static void end_event(const gen_choice *c, mx_buf *b) {
    mx_buf_putc(b, ']');
    live_timings(c, b);
    mx_buf_puts(b, "}\n\n");
}

static mx_buf *begin_delta(gen_choice *c) {
    mx_buf *b = begin_event(c->g);
    mx_buf_printf(b, "{\"index\":%d,\"delta\":{", c->index);
    return b;
}

static void begin_chat(gen_choice *c) {
    if (c->begun) return;
    c->begun = true;
    mx_buf *b = begin_delta(c);
    mx_buf_puts(b, "\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}");
    end_event(c, b);
}

void chat_emit(gen_choice *c, const char *key, mx_str text) {
    begin_chat(c);
    mx_buf *b = begin_delta(c);
    const char *alias = c->g->q->s->c->reasoning_alias;
    mx_buf_printf(b, "\"%s\":", key);
    mx_buf_json(b, text);
    if (strcmp(key, "content") != 0 && strcmp(alias, "none") != 0) {
        mx_buf_printf(b, ",\"%s\":", alias);
        mx_buf_json(b, text);
    }
    mx_buf_putc(b, '}');
    put_logprobs(c, b);
    mx_buf_puts(b, ",\"finish_reason\":null}");
    end_event(c, b);
}

void chat_emit_call(gen_choice *c, int index, const gen_call *call, mx_str args) {
    begin_chat(c);
    mx_buf *b = begin_delta(c);
    mx_buf_printf(b, "\"tool_calls\":[{\"index\":%d", index);
    if (call) {
        mx_buf_printf(b, ",\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", call->id);
        mx_buf_json(b, (mx_str){call->name.data, call->name.n});
        mx_buf_puts(b, ",\"arguments\":");
    } else {
        mx_buf_puts(b, ",\"function\":{\"arguments\":");
    }
    mx_buf_json(b, args);
    mx_buf_puts(b, "}}]}");
    put_logprobs(c, b);
    mx_buf_puts(b, ",\"finish_reason\":null}");
    end_event(c, b);
}

static void put_end(gen_choice *c, mx_buf *b, const mlxcel_timings *t) {
    mx_buf_printf(b, ",\"finish_reason\":\"%s\"}],\"timings\":", finish_name(c));
    timings_json(b, t);
    mx_buf_puts(b, "}\n\n");
}

void chat_emit_end(gen_choice *c, const mlxcel_timings *t) {
    begin_chat(c);
    mx_buf *b = begin_delta(c);
    mx_buf_putc(b, '}');
    put_end(c, b, t);
}

void text_emit(gen_choice *c, mx_str text) {
    mx_buf *b = begin_event(c->g);
    mx_buf_printf(b, "{\"index\":%d,\"text\":", c->index);
    mx_buf_json(b, text);
    put_logprobs(c, b);
    mx_buf_puts(b, ",\"finish_reason\":null}");
    end_event(c, b);
}

void text_emit_end(gen_choice *c, const mlxcel_timings *t) {
    mx_buf *b = begin_event(c->g);
    mx_buf_printf(b, "{\"index\":%d,\"text\":\"\"", c->index);
    put_end(c, b, t);
}

void openai_stream_end(gen *g) {
    if (g->o.include_usage) {
        mx_buf *b = begin_event(g);
        mx_buf_puts(b, "],");
        usage_json(g, b);
        mx_buf_puts(b, "}\n\n");
    }
    mx_buf_puts(&g->q->out, "data: [DONE]\n\n");
}

// ---- Whole answers ----

static void put_message(gen_choice *c, mx_buf *b) {
    const char *alias = c->g->q->s->c->reasoning_alias;
    mx_buf_puts(b, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (c->text.n == 0 && c->n_calls > 0)
        mx_buf_puts(b, "null");
    else
        mx_buf_json(b, (mx_str){c->text.data, c->text.n});
    if (c->reasoning.n) {
        mx_buf_puts(b, ",\"reasoning_content\":");
        mx_buf_json(b, (mx_str){c->reasoning.data, c->reasoning.n});
        if (strcmp(alias, "none") != 0) {
            mx_buf_printf(b, ",\"%s\":", alias);
            mx_buf_json(b, (mx_str){c->reasoning.data, c->reasoning.n});
        }
    }
    for (int32_t i = 0; i < c->n_calls; i++) {
        const gen_call *k = &c->calls[i];
        mx_buf_puts(b, i ? "," : ",\"tool_calls\":[");
        mx_buf_printf(b, "{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", k->id);
        mx_buf_json(b, (mx_str){k->name.data, k->name.n});
        mx_buf_puts(b, ",\"arguments\":");
        mx_buf_json(b, (mx_str){k->args.data, k->args.n});
        mx_buf_puts(b, "}}");
    }
    mx_buf_puts(b, c->n_calls ? "]}" : "}");
}

static void put_choice(gen_choice *c, mx_buf *b) {
    mx_buf_printf(b, "{\"index\":%d,", c->index);
    if (c->g->api == API_CHAT) {
        put_message(c, b);
    } else {
        mx_buf_puts(b, "\"text\":");
        mx_buf_json(b, (mx_str){c->text.data, c->text.n});
    }
    if (c->g->o.want_logprobs)
        put_logprobs(c, b);
    else
        mx_buf_puts(b, ",\"logprobs\":null");
    mx_buf_printf(b, ",\"finish_reason\":\"%s\"}", finish_name(c));
}

void openai_reply(gen *g, mx_buf *b) {
    mx_buf_printf(b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", g->id,
                  g->api == API_CHAT ? "chat.completion" : "text_completion", g->created);
    mx_buf_json(b, mx_str_of(g->q->s->model_name));
    mx_buf_puts(b, ",\"system_fingerprint\":\"mlxcel-" MLXCEL_VERSION "\",\"choices\":[");
    for (int32_t i = 0; i < g->n_jobs; i++) {
        for (int32_t k = 0; k < g->o.n; k++) {
            if (i || k) mx_buf_putc(b, ',');
            put_choice(&g->jobs[i].choices[k], b);
        }
    }
    mx_buf_puts(b, "],");
    usage_json(g, b);
    mx_buf_puts(b, ",\"timings\":");
    timings_json(b, &g->timings);
    mx_buf_putc(b, '}');
}
