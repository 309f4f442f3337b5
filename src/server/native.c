// llama-server's own forms: /completion, /tokenize, /detokenize, /apply-template. And the prompts
// of /v1/completions, which take the same forms. State: none.
#include "server/server_int.h"

#include "base/mem.h"

#include <stdlib.h>

enum { MAX_PROMPTS = 256 };

// ---- Prompts ----

static bool bad(srv_req *q, const char *param, const char *why) {
    req_error(q, 400, "invalid_value", param, "%s", why);
    return false;
}

typedef struct id_list { // grows; handed over with mlxcel_free's allocator
    int32_t *v;
    size_t n, cap;
} id_list;

static void push_ids(id_list *l, const int32_t *v, size_t n) {
    if (l->n + n >= l->cap) {
        l->cap = (l->n + n + 1) * 2;
        l->v = mx_realloc(l->v, l->cap * sizeof *l->v);
    }
    if (n) memcpy(l->v + l->n, v, n * sizeof *v);
    l->n += n;
}

static bool push_text(gen *g, id_list *l, const json_t *v, bool first) {
    srv_req *q = g->q;
    int32_t *ids = NULL;
    size_t n = 0;
    mlxcel_error err = {0};
    if (mlxcel_tokenize(q->s->engine, json_string_value(v), json_string_length(v), first, true,
                        &ids, &n, &err) != 0) {
        req_fail(q, &err);
        return false;
    }
    // a text that begins with BOS does not get another one
    int32_t bos = q->s->info.bos;
    size_t skip = first && n > 1 && bos >= 0 && ids[0] == bos && ids[1] == bos;
    push_ids(l, ids + skip, n - skip);
    mlxcel_free(ids);
    return true;
}

static bool push_id(gen *g, id_list *l, const json_t *v) {
    json_int_t id = json_integer_value(v);
    int32_t n_vocab = g->q->s->info.n_vocab;
    if (!json_is_integer(v) || id < 0 || id >= n_vocab) {
        req_error(g->q, 400, "invalid_value", "prompt",
                  "prompt: expected texts or token ids from 0 to %d", n_vocab - 1);
        return false;
    }
    int32_t one = (int32_t)id;
    push_ids(l, &one, 1);
    return true;
}

// A text, or an array of ids and (native) texts.
static bool add_prompt(gen *g, const json_t *v) {
    id_list l = {0};
    size_t i;
    json_t *item;
    bool ok = json_is_string(v) || json_is_array(v);
    if (!ok) bad(g->q, "prompt", "prompt: expected a text, token ids, or an array of those");
    if (json_is_string(v)) {
        ok = push_text(g, &l, v, true);
    } else if (ok) {
        json_array_foreach(v, i, item) {
            if (!ok) break;
            bool text = json_is_string(item) && g->api == API_NATIVE;
            ok = text ? push_text(g, &l, item, i == 0) : push_id(g, &l, item);
        }
    }
    char *text = NULL;
    size_t n_text = 0;
    mlxcel_error err = {0};
    if (ok && json_is_string(v)) {
        text = mx_strdup(json_string_value(v));
        n_text = json_string_length(v);
    } else if (ok && mlxcel_detokenize(g->q->s->engine, l.v, l.n, false, &text, &n_text, &err)) {
        req_fail(g->q, &err);
        ok = false;
    }
    if (ok && l.n == 0) {
        ok = bad(g->q, "prompt", "Empty prompt: request has no input tokens to process");
    }
    if (ok) {
        gen_add_prompt(g, l.v, l.n, text, n_text);
        return true;
    }
    mx_free(l.v);
    mlxcel_free(text);
    return false;
}

// Several prompts: an array of texts, or of arrays. An array with a number is one prompt.
static bool is_batch(const json_t *v) {
    size_t i;
    json_t *item;
    if (!json_is_array(v) || json_array_size(v) == 0) return false;
    json_array_foreach(v, i, item) {
        if (json_is_number(item)) return false;
    }
    return true;
}

static bool add_prompts(gen *g) {
    json_t *v = json_object_get(g->q->json, "prompt"), *item;
    size_t i;
    if (!v || json_is_null(v)) return bad(g->q, "prompt", "prompt: missing");
    g->is_list = is_batch(v);
    if (!g->is_list) return add_prompt(g, v);
    if (json_array_size(v) > MAX_PROMPTS) return bad(g->q, "prompt", "prompt: at most 256 of them");
    json_array_foreach(v, i, item) {
        if (!add_prompt(g, item)) return false;
    }
    return true;
}

void handle_text(srv_req *q) {
    gen *g = gen_new(q, API_TEXT);
    if (opts_read(&g->o, q, API_TEXT) && add_prompts(g))
        gen_start(g);
    else
        gen_free(g);
}

static bool read_native(gen *g) {
    const json_t *t = json_object_get(g->q->json, "t_max_predict_ms");
    const json_t *f = json_object_get(g->q->json, "response_fields");
    if (t && !json_is_null(t)) {
        if (!json_is_number(t) || json_number_value(t) < 0) {
            return bad(g->q, "t_max_predict_ms", "t_max_predict_ms: expected a number, 0 or more");
        }
        g->predict_s = json_number_value(t) * 1e-3;
    }
    bool names = !f || json_is_null(f) || json_is_array(f);
    for (size_t i = 0; i < json_array_size(f); i++)
        names = names && json_is_string(json_array_get(f, i));
    if (!names) return bad(g->q, "response_fields", "response_fields: expected an array of names");
    return true;
}

void handle_native(srv_req *q) {
    gen *g = gen_new(q, API_NATIVE);
    bool ok = opts_read(&g->o, q, API_NATIVE) && read_native(g) && add_prompts(g);
    if (ok)
        gen_start(g);
    else
        gen_free(g);
}

// ---- Answers ----

void sampling_json(mx_buf *b, const mlxcel_sampling *s) {
    mx_buf_printf(b,
                  "\"temperature\":%.7g,\"top_k\":%d,\"top_p\":%.7g,\"min_p\":%.7g,"
                  "\"typical_p\":%.7g,\"top_n_sigma\":%.7g,\"xtc_probability\":%.7g,"
                  "\"xtc_threshold\":%.7g,\"repeat_last_n\":%d,\"repeat_penalty\":%.7g,"
                  "\"presence_penalty\":%.7g,\"frequency_penalty\":%.7g,\"dry_multiplier\":%.7g,"
                  "\"dry_base\":%.7g,\"dry_allowed_length\":%d,\"dry_penalty_last_n\":%d,"
                  "\"ignore_eos\":%s,\"min_tokens\":%d",
                  (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p,
                  (double)s->typical_p, (double)s->top_n_sigma, (double)s->xtc_probability,
                  (double)s->xtc_threshold, s->repeat_last_n, (double)s->repeat_penalty,
                  (double)s->presence_penalty, (double)s->frequency_penalty,
                  (double)s->dry_multiplier, (double)s->dry_base, s->dry_allowed_length,
                  s->dry_last_n, s->ignore_eos ? "true" : "false", s->min_tokens);
}

static void put_settings(const gen *g, const gen_choice *c, mx_buf *b) {
    mx_buf_printf(b, "{\"n_predict\":%d,\"seed\":%llu,", g->o.max_tokens,
                  (unsigned long long)c->seed);
    sampling_json(b, &g->o.sampling);
    mx_buf_printf(b, ",\"stream\":%s,\"n_probs\":%d,\"stop\":[", g->o.stream ? "true" : "false",
                  MX_MAX(g->o.logprobs, 0));
    for (size_t i = 0; i < g->o.n_stops; i++) {
        if (i) mx_buf_putc(b, ',');
        mx_buf_json(b, mx_str_of(g->o.stops[i]));
    }
    mx_buf_puts(b, "]}");
}

static void put_ids(gen_choice *c, mx_buf *b) {
    mx_buf_puts(b, ",\"tokens\":[");
    for (size_t i = 0; i < c->n_ids; i++) mx_buf_printf(b, "%s%d", i ? "," : "", c->ids[i]);
    mx_buf_putc(b, ']');
    c->n_ids = 0;
}

static void put_probs(gen_choice *c, mx_buf *b) {
    if (!c->g->o.want_logprobs) return;
    mx_buf_printf(b, ",\"completion_probabilities\":[%s]", c->probs.n ? c->probs.data : "");
    mx_buf_clear(&c->probs);
}

void native_emit(gen_choice *c, mx_str text) {
    mx_buf *b = &c->g->q->out;
    mx_buf_printf(b, "data: {\"index\":%d,\"content\":", c->index);
    mx_buf_json(b, text);
    put_ids(c, b);
    mx_buf_printf(b,
                  ",\"stop\":false,\"id_slot\":-1,\"tokens_predicted\":%zu,"
                  "\"tokens_evaluated\":%zu",
                  c->n_total, c->job->n_ids);
    put_probs(c, b);
    live_timings(c, b);
    mx_buf_puts(b, "}\n\n");
}

static const char *stop_type(const gen_choice *c) {
    switch (c->finish) {
    case MLXCEL_FINISH_EOS: return "eos";
    case MLXCEL_FINISH_STOP: return "word";
    case MLXCEL_FINISH_LENGTH: return "limit";
    default: return "none";
    }
}

static void put_result(gen_choice *c, const mlxcel_timings *t, mx_buf *b) {
    gen *g = c->g;
    gen_job *j = c->job;
    bool line = c->text.n && memchr(c->text.data, '\n', c->text.n);
    mx_buf_printf(b, "{\"index\":%d,\"content\":", c->index);
    mx_buf_json(b, (mx_str){c->text.data, c->text.n});
    put_ids(c, b);
    mx_buf_puts(b, ",\"id_slot\":-1,\"stop\":true,\"model\":");
    mx_buf_json(b, mx_str_of(g->q->s->model_name));
    mx_buf_printf(b, ",\"tokens_predicted\":%d,\"tokens_evaluated\":%zu,\"generation_settings\":",
                  t->n_decoded, j->n_ids);
    put_settings(g, c, b);
    mx_buf_puts(b, ",\"prompt\":");
    mx_buf_json(b, (mx_str){j->text, j->n_text});
    mx_buf_printf(b,
                  ",\"has_new_line\":%s,\"truncated\":false,\"stop_type\":\"%s\","
                  "\"stopping_word\":",
                  line ? "true" : "false", stop_type(c));
    mx_buf_json(b, mx_str_of(c->stop_word ? c->stop_word : ""));
    mx_buf_printf(b, ",\"tokens_cached\":%d,\"timings\":", t->n_cached);
    timings_json(b, t);
    put_probs(c, b);
    mx_buf_putc(b, '}');
}

// Keeps the keys that response_fields names ("a/b" is b of a); appends the object to out.
static void project(gen *g, const mx_buf *whole, mx_buf *out) {
    const json_t *names = json_object_get(g->q->json, "response_fields");
    if (!json_is_array(names) || json_array_size(names) == 0) {
        mx_buf_add(out, whole->data, whole->n);
        return;
    }
    json_t *all = json_loadb(whole->data, whole->n, 0, NULL), *kept = json_object();
    for (size_t i = 0; i < json_array_size(names); i++) {
        const char *name = json_string_value(json_array_get(names, i));
        if (!name) continue;
        const char *slash = strchr(name, '/'), *last = slash ? slash + 1 : name;
        char first[128];
        snprintf(first, sizeof first, "%.*s", slash ? (int)MX_MIN(slash - name, 127) : 127, name);
        json_t *v = json_object_get(all, first);
        if (slash) v = json_object_get(v, last);
        if (v) json_object_set(kept, last, v);
    }
    char *text = json_dumps(kept, JSON_COMPACT);
    mx_buf_puts(out, text ? text : "{}");
    free(text);
    json_decref(kept);
    json_decref(all);
}

static void put_projected(gen_choice *c, const mlxcel_timings *t, mx_buf *out) {
    mx_buf b;
    mx_buf_init(&b, 0);
    put_result(c, t, &b);
    project(c->g, &b, out);
    mx_buf_free(&b);
}

void native_emit_end(gen_choice *c, const mlxcel_timings *t) {
    mx_buf *b = &c->g->q->out;
    mx_buf_puts(b, "data: ");
    put_projected(c, t, b);
    mx_buf_puts(b, "\n\n");
}

void native_reply(gen *g, mx_buf *out) {
    if (g->is_list) mx_buf_putc(out, '[');
    for (int32_t i = 0; i < g->n_jobs; i++) {
        if (i) mx_buf_putc(out, ',');
        put_projected(&g->jobs[i].choices[0], &g->jobs[i].timings, out);
    }
    if (g->is_list) mx_buf_putc(out, ']');
}

// ---- Text and tokens ----

// Only these fields; `names` ends with NULL.
static bool only_fields(srv_req *q, const char *const *names) {
    const char *key;
    json_t *v;
    json_object_foreach(q->json, key, v) {
        bool known = false;
        for (size_t i = 0; names[i]; i++) known |= strcmp(names[i], key) == 0;
        if (known) continue;
        req_error(q, 400, "unknown_parameter", NULL, "there is no field \"%.100s\" here", key);
        return false;
    }
    return true;
}

static bool get_bool(srv_req *q, const char *name, bool dflt, bool *out) {
    const json_t *v = json_object_get(q->json, name);
    *out = json_is_boolean(v) ? json_is_true(v) : dflt;
    if (!v || json_is_null(v) || json_is_boolean(v)) return true;
    req_error(q, 400, "invalid_value", name, "%s: expected true or false", name);
    return false;
}

static void put_piece(srv_req *q, mx_buf *b, int32_t id) {
    mx_str s;
    s.p = mlxcel_piece(q->s->engine, id, &s.n);
    mx_buf_printf(b, "{\"id\":%d,\"piece\":", id);
    if (mx_utf8_valid(s)) {
        mx_buf_json(b, s);
    } else {
        for (size_t i = 0; i < s.n; i++) {
            mx_buf_printf(b, "%c%u", i ? ',' : '[', (unsigned)(unsigned char)s.p[i]);
        }
        mx_buf_putc(b, ']');
    }
    mx_buf_putc(b, '}');
}

// Two forms: llama-server's {"content", "add_special"} and vLLM's {"prompt", "add_special_tokens"},
// which lm-eval speaks. They differ in their default, and the second one's answer has the count.
void handle_tokenize(srv_req *q) {
    static const char *const names[] = {"content",     "add_special", "parse_special",
                                        "with_pieces", "model",       NULL};
    static const char *const other[] = {"prompt", "add_special_tokens", "model", NULL};
    bool is_other = json_object_get(q->json, "prompt") != NULL;
    const char *key = is_other ? "prompt" : "content";
    const json_t *text = json_object_get(q->json, key);
    bool add, parse, pieces;
    if (!only_fields(q, is_other ? other : names) ||
        !get_bool(q, is_other ? "add_special_tokens" : "add_special", is_other, &add) ||
        !get_bool(q, "parse_special", true, &parse) || !get_bool(q, "with_pieces", false, &pieces))
        return;
    if (!json_is_string(text)) {
        req_error(q, 400, "invalid_value", key, "%s: expected a text", key);
        return;
    }
    int32_t *ids = NULL;
    size_t n = 0;
    mlxcel_error err = {0};
    if (mlxcel_tokenize(q->s->engine, json_string_value(text), json_string_length(text), add, parse,
                        &ids, &n, &err) != 0) {
        req_fail(q, &err);
        return;
    }
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"tokens\":[");
    for (size_t i = 0; i < n; i++) {
        if (i) mx_buf_putc(&b, ',');
        if (pieces)
            put_piece(q, &b, ids[i]);
        else
            mx_buf_printf(&b, "%d", ids[i]);
    }
    mx_buf_putc(&b, ']');
    if (is_other) {
        mx_buf_printf(&b, ",\"count\":%zu,\"max_model_len\":%d", n, q->s->info.ctx_size);
    }
    mx_buf_putc(&b, '}');
    mlxcel_free(ids);
    req_reply_json(q, 200, &b);
}

// vLLM's form: which tokens begin and end a text, for clients that send token ids.
void handle_tokenizer_info(srv_req *q) {
    const int32_t ids[] = {q->s->info.bos, q->s->info.eos};
    static const char *const names[] = {"bos_token", "eos_token"};
    mx_buf b;
    mx_buf_init(&b, 0);
    for (size_t i = 0; i < MX_COUNT(ids); i++) {
        mx_str s = {NULL, 0};
        if (ids[i] >= 0) s.p = mlxcel_piece(q->s->engine, ids[i], &s.n);
        mx_buf_printf(&b, "%s\"%s\":", i ? "," : "{", names[i]);
        if (s.p)
            mx_buf_json(&b, s);
        else
            mx_buf_puts(&b, "null");
    }
    mx_buf_printf(&b, ",\"vocab_size\":%d,\"model_max_length\":%d}", q->s->info.n_vocab,
                  q->s->info.ctx_size);
    req_reply_json(q, 200, &b);
}

void handle_detokenize(srv_req *q) {
    static const char *const names[] = {"tokens", "model", NULL};
    json_t *list = json_object_get(q->json, "tokens"), *item;
    size_t i, n = json_array_size(list), n_text = 0;
    if (!only_fields(q, names)) return;
    int32_t *ids = mx_calloc(n + 1, sizeof *ids);
    bool ok = json_is_array(list);
    json_array_foreach(list, i, item) {
        json_int_t id = json_integer_value(item);
        ok = ok && json_is_integer(item) && id >= 0 && id < q->s->info.n_vocab;
        ids[i] = (int32_t)(ok ? id : 0);
    }
    char *text = NULL;
    mlxcel_error err = {0};
    if (!ok) {
        bad(q, "tokens", "tokens: expected an array of token ids");
    } else if (mlxcel_detokenize(q->s->engine, ids, n, false, &text, &n_text, &err) != 0) {
        req_fail(q, &err);
    } else {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_puts(&b, "{\"content\":");
        mx_buf_json(&b, (mx_str){text, n_text});
        mx_buf_puts(&b, ",\"prompt\":"); // its name in vLLM's form
        mx_buf_json(&b, (mx_str){text, n_text});
        mx_buf_putc(&b, '}');
        req_reply_json(q, 200, &b);
    }
    mlxcel_free(text);
    mx_free(ids);
}

void handle_template(srv_req *q) {
    static const char *const names[] = {
        "messages",      "tools", "documents", "add_generation_prompt", "chat_template_kwargs",
        "chat_template", "model", NULL};
    if (!only_fields(q, names) || !template_fields(q)) return;
    json_t *own = json_object_get(q->json, "chat_template_kwargs");
    const json_t *tools = json_object_get(q->json, "tools");
    json_t *kwargs = json_object();
    if (q->s->template_kwargs) json_object_update(kwargs, q->s->template_kwargs);
    if (json_is_object(own)) json_object_update(kwargs, own);
    json_t *r = chat_template_request(q, json_array_size(tools) ? tools : NULL, kwargs);
    char *text = json_dumps(r, JSON_COMPACT), *prompt = NULL;
    json_decref(r);
    json_decref(kwargs);
    int32_t *ids = NULL;
    size_t n;
    mlxcel_error err = {0};
    if (mlxcel_apply_template(q->s->engine, text, &prompt, &ids, &n, &err) != 0) {
        req_fail(q, &err);
    } else {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_puts(&b, "{\"prompt\":");
        mx_buf_json(&b, mx_str_of(prompt));
        mx_buf_putc(&b, '}');
        req_reply_json(q, 200, &b);
    }
    free(text);
    mlxcel_free(prompt);
    mlxcel_free(ids);
}
