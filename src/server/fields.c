// The fields of generation requests: one table, one reader. A field that is unknown, or known and
// not supported, is refused by name: nothing is taken and ignored but what is documented to have no
// effect. A field that is null counts as absent. No state.
#include "server/server_int.h"

#include "base/mem.h"

#include <math.h>
#include <stdlib.h>

typedef enum field_kind {
    K_BOOL,
    K_INT,
    K_NUM,
    K_TOPK,
    K_MAX,
    K_STOP,
    K_SEED,
    K_BIAS,
    K_TEXT, // a string, not used
    K_ANY,  // not used
    K_OWN,  // read by the handler
    K_NEUTRAL
} field_kind;

typedef struct field {
    const char *name;
    int apis;
    field_kind kind;
    size_t place; // in gen_opts
    double min, max;
    const char *value; // K_NEUTRAL
    const char *help;
} field;

enum { CHAT = API_CHAT, TEXT = API_TEXT, NATIVE = API_NATIVE };
#define P(f)                                  offsetof(gen_opts, f)
#define FIELD(n, a, k, place, min, max, help) {n, a, k, place, min, max, NULL, help},
#define NEUTRAL(n, a, value, why)             {n, a, K_NEUTRAL, 0, 0, 0, value, why},
static const field fields[] = {
#include "server/fields.def"
};

enum { MAX_STOPS = 64, MAX_BIAS = 4096 };

void opts_init(gen_opts *o, const srv *s, api_kind api) {
    (void)api;
    *o = (gen_opts){.sampling = s->c->sampling,
                    .max_tokens = s->c->n_predict,
                    .n = 1,
                    .logprobs = -1,
                    .cache_prompt = true,
                    .reasoning_none = strcmp(s->c->reasoning_format, "none") == 0};
}

void opts_free(gen_opts *o) {
    mx_free(o->bias);
    for (size_t i = 0; i < o->n_stops; i++) mx_free(o->stops[i]);
    mx_free(o->stops);
}

// ---- Values ----

static bool bad(srv_req *q, const char *name, const char *expected) {
    req_error(q, 400, "invalid_value", name, "%s: expected %s", name, expected);
    return false;
}

static bool read_bool(srv_req *q, const field *f, const json_t *v, bool *out) {
    if (!json_is_boolean(v)) return bad(q, f->name, "true or false");
    *out = json_is_true(v);
    return true;
}

static bool read_number(srv_req *q, const field *f, const json_t *v, double *out) {
    bool whole = f->kind != K_NUM;
    double x = json_number_value(v);
    bool ok =
        json_is_number(v) && isfinite(x) && x >= f->min && x <= f->max && (!whole || x == floor(x));
    *out = x;
    if (ok) return true;
    char what[96];
    snprintf(what, sizeof what, "%s from %.9g to %.9g", whole ? "an integer" : "a number", f->min,
             f->max);
    return bad(q, f->name, what);
}

static bool read_max(srv_req *q, gen_opts *o, const field *f, const json_t *v, api_kind api) {
    double x = json_number_value(v);
    if (!json_is_number(v) || x != floor(x)) return bad(q, f->name, "an integer");
    if (x < -1 || (x == 0 && api == API_CHAT)) {
        return bad(q, f->name,
                   api == API_CHAT ? "an integer, 1 or more, or -1 for as many as fit"
                                   : "an integer, 0 or more, or -1 for as many as fit");
    }
    o->max_tokens = (int32_t)fmin(x, 1e9); // the engine ends at the context
    return true;
}

static bool add_stop(srv_req *q, gen_opts *o, const json_t *v) {
    if (!json_is_string(v) || json_string_length(v) == 0 || json_string_length(v) > 65536) {
        return bad(q, "stop", "a text that is not empty, or an array of those");
    }
    if (o->n_stops == MAX_STOPS) return bad(q, "stop", "at most 64 texts");
    o->stops = mx_realloc(o->stops, (o->n_stops + 1) * sizeof *o->stops);
    o->stops[o->n_stops++] = mx_strdup(json_string_value(v));
    return true;
}

static bool read_stop(srv_req *q, gen_opts *o, const json_t *v) {
    if (!json_is_array(v)) return add_stop(q, o, v);
    size_t i;
    json_t *item;
    json_array_foreach(v, i, item) {
        if (!add_stop(q, o, item)) return false;
    }
    return true;
}

static bool read_seed(srv_req *q, gen_opts *o, const json_t *v) {
    if (!json_is_integer(v)) return bad(q, "seed", "an integer");
    o->sampling.has_seed = json_integer_value(v) != -1;
    o->sampling.seed = (uint64_t)json_integer_value(v);
    return true;
}

static bool add_bias(srv_req *q, gen_opts *o, int64_t id, const json_t *v) {
    double b = json_is_false(v) ? -100 : json_number_value(v);
    if (!(json_is_number(v) || json_is_false(v)) || fabs(b) > 1e6) {
        return bad(q, "logit_bias", "numbers");
    }
    if (id < 0 || id >= q->s->info.n_vocab) {
        req_error(q, 400, "invalid_value", "logit_bias",
                  "logit_bias: there is no token %lld, the vocabulary has %d", (long long)id,
                  q->s->info.n_vocab);
        return false;
    }
    if (o->n_bias == MAX_BIAS) return bad(q, "logit_bias", "at most 4096 tokens");
    o->bias = mx_realloc(o->bias, (o->n_bias + 1) * sizeof *o->bias);
    o->bias[o->n_bias++] = (mlxcel_logit_bias){(int32_t)id, (float)b};
    return true;
}

// {"42": -1.5} or [[42, -1.5], ...]
static bool read_bias(srv_req *q, gen_opts *o, json_t *v) {
    size_t i;
    const char *key;
    json_t *item;
    if (json_is_array(v)) {
        json_array_foreach(v, i, item) {
            const json_t *id = json_array_get(item, 0);
            if (!json_is_integer(id) || json_array_size(item) != 2) {
                return bad(q, "logit_bias", "pairs of a token id and a number");
            }
            if (!add_bias(q, o, json_integer_value(id), json_array_get(item, 1))) return false;
        }
        return true;
    }
    if (!json_is_object(v)) return bad(q, "logit_bias", "an object");
    json_object_foreach(v, key, item) {
        int64_t id; // "+1" and "01" would be second names of a token
        bool plain = key[0] >= '0' && key[0] <= '9' && (key[0] != '0' || !key[1]);
        if (!plain || !mx_parse_i64(key, &id)) return bad(q, "logit_bias", "token ids as keys");
        if (!add_bias(q, o, id, item)) return false;
    }
    return true;
}

static bool read_neutral(srv_req *q, const field *f, const json_t *v) {
    json_t *same = json_loads(f->value, JSON_DECODE_ANY, NULL);
    bool equal = json_equal(same, v) || (json_is_number(same) && json_is_number(v) &&
                                         json_number_value(same) == json_number_value(v));
    json_decref(same);
    if (equal) return true;
    req_error(q, 400, "unsupported_parameter", f->name, "%s: %s is not supported", f->name,
              f->help);
    return false;
}

static bool read_field(srv_req *q, gen_opts *o, api_kind api, const field *f, json_t *v) {
    void *at = (char *)o + f->place;
    double x;
    switch (f->kind) {
    case K_BOOL: return read_bool(q, f, v, at);
    case K_INT:
    case K_TOPK:
        if (!read_number(q, f, v, &x)) return false;
        *(int32_t *)at = (int32_t)(f->kind == K_TOPK && x < 0 ? 0 : x);
        return true;
    case K_NUM:
        if (!read_number(q, f, v, &x)) return false;
        *(float *)at = (float)x;
        return true;
    case K_MAX: return read_max(q, o, f, v, api);
    case K_STOP: return read_stop(q, o, v);
    case K_SEED: return read_seed(q, o, v);
    case K_BIAS: return read_bias(q, o, v);
    case K_TEXT: return json_is_string(v) || bad(q, f->name, "a string");
    case K_NEUTRAL: return read_neutral(q, f, v);
    case K_ANY:
    case K_OWN: break;
    }
    return true;
}

static const field *find_field(const char *name, api_kind api) {
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        if ((fields[i].apis & (int)api) && strcmp(fields[i].name, name) == 0) return &fields[i];
    }
    return NULL;
}

// ---- What fits together ----

static bool read_stream_options(srv_req *q, gen_opts *o) {
    json_t *v = json_object_get(q->json, "stream_options"), *item;
    const char *key;
    if (!v || json_is_null(v)) return true;
    if (!json_is_object(v)) return bad(q, "stream_options", "an object");
    if (!o->stream) {
        req_error(q, 400, "invalid_value", "stream_options",
                  "stream_options: only with stream set to true");
        return false;
    }
    json_object_foreach(v, key, item) {
        bool usage = strcmp(key, "include_usage") == 0;
        if (!usage && strcmp(key, "include_obfuscation") != 0) {
            return bad(q, "stream_options", "include_usage only");
        }
        if (!json_is_boolean(item)) return bad(q, "stream_options", "true or false");
        if (usage) o->include_usage = json_is_true(item);
    }
    return true;
}

static bool read_logprobs(srv_req *q, gen_opts *o, api_kind api) {
    if (api == API_CHAT) {
        if (o->logprobs > 0 && !o->want_logprobs) {
            req_error(q, 400, "invalid_value", "top_logprobs",
                      "top_logprobs: only with logprobs set to true");
            return false;
        }
        o->logprobs = o->want_logprobs ? MX_MAX(o->logprobs, 0) : -1;
    } else if (api == API_TEXT) {
        o->want_logprobs = o->logprobs >= 0;
    } else {
        if (o->logprobs == 0) o->logprobs = -1;
        o->want_logprobs = o->logprobs > 0;
    }
    return true;
}

static bool read_salt(srv_req *q, gen_opts *o) {
    const json_t *v = json_object_get(q->json, "cache_salt");
    if (!v || json_is_null(v)) return true;
    if (!json_is_string(v) || json_string_length(v) == 0) {
        return bad(q, "cache_salt", "a text that is not empty");
    }
    o->cache_salt = json_string_value(v);
    return true;
}

static bool is_number(const field *f) {
    return f->kind == K_INT || f->kind == K_NUM || f->kind == K_MAX;
}

// Two names of one setting, as max_tokens and n_predict, may not have two values.
static bool check_names(srv_req *q, api_kind api) {
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        const field *a = &fields[i];
        const json_t *v = json_object_get(q->json, a->name);
        if (!(a->apis & (int)api) || !is_number(a) || !json_is_number(v)) continue;
        for (size_t k = i + 1; k < MX_COUNT(fields); k++) {
            const field *b = &fields[k];
            const json_t *w = json_object_get(q->json, b->name);
            bool same = (b->apis & (int)api) && is_number(b) && b->place == a->place &&
                        b->place != P(ignored) && json_is_number(w);
            if (!same || json_number_value(v) == json_number_value(w)) continue;
            req_error(q, 400, "invalid_value", b->name,
                      "%s and %s have different values, but are names of the same", a->name,
                      b->name);
            return false;
        }
    }
    return true;
}

static bool check_lengths(srv_req *q, const gen_opts *o) {
    if (o->max_tokens < 0 || o->sampling.min_tokens <= o->max_tokens) return true;
    req_error(q, 400, "invalid_value", "min_tokens",
              "min_tokens: %d is more than the %d tokens that may be generated",
              o->sampling.min_tokens, o->max_tokens);
    return false;
}

bool opts_read(gen_opts *o, srv_req *q, api_kind api) {
    const char *key;
    json_t *v;
    json_object_foreach(q->json, key, v) {
        const field *f = find_field(key, api);
        if (!f) {
            req_error(q, 400, "unknown_parameter", mx_utf8_valid(mx_str_of(key)) ? key : NULL,
                      "there is no field \"%.100s\" here", key);
            return false;
        }
        if (!json_is_null(v) && !read_field(q, o, api, f, v)) return false;
    }
    o->sampling.bias = o->bias;
    o->sampling.n_bias = o->n_bias;
    return check_names(q, api) && check_lengths(q, o) && read_stream_options(q, o) &&
           read_logprobs(q, o, api) && read_salt(q, o);
}

// ---- Tables ----

void fields_markdown(mx_buf *out, api_kind api) {
    mx_buf_puts(out, "| field | meaning |\n|---|---|\n");
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        const field *f = &fields[i];
        if (!(f->apis & (int)api)) continue;
        if (f->kind == K_NEUTRAL)
            mx_buf_printf(out, "| `%s` | only `%s`: %s is not supported |\n", f->name, f->value,
                          f->help);
        else
            mx_buf_printf(out, "| `%s` | %s |\n", f->name, f->help);
    }
}

static void schema_of(mx_buf *out, const field *f, api_kind api) {
    static const char text[] = "{\"type\":\"string\"}";
    switch (f->kind) {
    case K_BOOL: mx_buf_puts(out, "{\"type\":[\"boolean\",\"null\"]"); break;
    case K_INT:
    case K_TOPK:
        mx_buf_printf(out, "{\"type\":[\"integer\",\"null\"],\"minimum\":%.0f,\"maximum\":%.0f",
                      f->min, f->max);
        break;
    case K_NUM:
        mx_buf_printf(out, "{\"type\":[\"number\",\"null\"],\"minimum\":%.9g,\"maximum\":%.9g",
                      f->min, f->max);
        break;
    case K_MAX:
        mx_buf_printf(out, "{\"type\":[\"integer\",\"null\"],\"minimum\":-1%s",
                      api == API_CHAT ? ",\"not\":{\"const\":0}" : "");
        break;
    case K_STOP:
        mx_buf_printf(out,
                      "{\"anyOf\":[{\"type\":\"null\"},%s,{\"type\":\"array\",\"items\":%s,"
                      "\"maxItems\":64}]",
                      text, text);
        break;
    case K_SEED: mx_buf_puts(out, "{\"type\":[\"integer\",\"null\"]"); break;
    case K_BIAS: mx_buf_puts(out, "{\"type\":[\"object\",\"array\",\"null\"]"); break;
    case K_TEXT: mx_buf_puts(out, "{\"type\":[\"string\",\"null\"]"); break;
    case K_NEUTRAL: mx_buf_printf(out, "{\"enum\":[%s,null]", f->value); break;
    case K_ANY: mx_buf_puts(out, "{\"x-any\":true"); break;
    case K_OWN:
        if (strcmp(f->name, "messages") == 0)
            mx_buf_puts(out, "{\"$ref\":\"#/components/schemas/Messages\"");
        else if (strcmp(f->name, "prompt") == 0)
            mx_buf_puts(out, "{\"$ref\":\"#/components/schemas/Prompt\"");
        else
            mx_buf_puts(out, "{\"x-any\":true");
        break;
    }
    mx_buf_puts(out, ",\"description\":");
    mx_buf_json(out, mx_str_of(f->help));
    mx_buf_putc(out, '}');
}

void fields_schema(mx_buf *out, api_kind api) {
    bool first = true;
    for (size_t i = 0; i < MX_COUNT(fields); i++) {
        if (!(fields[i].apis & (int)api)) continue;
        if (!first) mx_buf_putc(out, ',');
        first = false;
        mx_buf_printf(out, "\"%s\":", fields[i].name);
        schema_of(out, &fields[i], api);
    }
}
