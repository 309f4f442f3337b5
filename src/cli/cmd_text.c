// mlxcel tokenize and template: JSON lines in, JSON lines out, without weights. State: the
// tokenizer of the call.
#include "cli/cli.h"

#include "base/mem.h"
#include "base/os.h"
#include "format/store.h"
#include "text/chat.h"
#include "text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_LINE_BYTES = 256 << 20 };

typedef struct text_tools {
    const cli_options *o;
    mx_weights w; // open while tok is, for GGUF
    bool gguf;
    mx_tokenizer *tok; // NULL: template without -m
    mx_template *model_template;
    mx_err template_err; // why there is none
} text_tools;

// ---- Opening ----

// The only .gguf file of a folder without tokenizer.json, else NULL. mx_free it.
static char *gguf_in(const char *dir) {
    char *json = mx_path_join(dir, "tokenizer.json"), *found = NULL;
    bool has_json = mx_path_exists(json);
    mx_free(json);
    char **names = NULL;
    size_t n = 0;
    mx_err err = {0};
    if (has_json || mx_list_dir(dir, &names, &n, &err) != MX_OK) return NULL;
    for (size_t i = 0; i < n; i++) {
        if (!mx_str_ends(mx_str_of(names[i]), mx_str_of(".gguf"))) continue;
        bool second = found != NULL;
        mx_free(found);
        found = second ? NULL : mx_path_join(dir, names[i]);
        if (second) break;
    }
    mx_free(names);
    return found;
}

static mx_status open_gguf(text_tools *t, const char *path, mx_err *err) {
    MX_TRY(mx_weights_open(&t->w, path, err));
    t->gguf = true;
    return mx_tokenizer_open_gguf(&t->tok, &t->w, err);
}

static mx_status open_tokenizer(text_tools *t, const char *path, mx_err *err) {
    if (!mx_path_is_dir(path)) {
        if (!mx_str_ends(mx_str_of(path), mx_str_of(".safetensors")))
            return open_gguf(t, path, err);
        const char *slash = strrchr(path, '/');
        char *dir = slash ? mx_strdup(path) : mx_strdup(".");
        if (slash) dir[slash - path] = 0;
        mx_status st = mx_tokenizer_open_dir(&t->tok, dir, err);
        mx_free(dir);
        return st;
    }
    char *gguf = gguf_in(path);
    mx_status st = gguf ? open_gguf(t, gguf, err) : mx_tokenizer_open_dir(&t->tok, path, err);
    mx_free(gguf);
    return st;
}

static int open_tools(text_tools *t, const cli_options *o) {
    char *path, *json = mx_path_join(o->model, "tokenizer.json");
    mx_err err = {0};
    mx_status st = mx_store_resolve(o->model, o->models_dir, &path, &err);
    if (st != MX_OK && mx_path_exists(json)) { // a tokenizer without a model is enough here
        path = mx_strdup(o->model);
        st = MX_OK;
    }
    mx_free(json);
    if (st == MX_OK) st = open_tokenizer(t, path, &err);
    mx_free(path);
    return st == MX_OK ? CLI_EXIT_OK : cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
}

static void close_tools(text_tools *t) {
    mx_template_close(t->model_template);
    mx_tokenizer_close(t->tok);
    if (t->gguf) mx_weights_close(&t->w);
}

// ---- Lines ----

typedef mx_status (*line_fn)(text_tools *t, const json_t *line, mx_buf *out, mx_err *err);

// Answers every line of standard input; a line that fails gets {"error":...}. *failed counts them.
static void each_line(text_tools *t, line_fn fn, int *failed) {
    mx_buf line, out;
    mx_buf_init(&line, MAX_LINE_BYTES);
    mx_buf_init(&out, 0);
    for (int n = 1; !cli_stdout_closed() && cli_file_line(stdin, &line); n++) {
        mx_err err = {0};
        char what[32];
        snprintf(what, sizeof what, "line %d", n);
        mx_buf_clear(&out);
        mx_status st = MX_TOOLARGE;
        json_t *j = NULL;
        if (line.full)
            mx_err_set(&err, st, "%s: longer than %d bytes", what, MAX_LINE_BYTES);
        else
            j = mx_json_parse(line.data, line.n, MAX_LINE_BYTES, MX_JSON_VOCAB, what, &err);
        if (j) st = fn(t, j, &out, &err);
        if (!j || st != MX_OK) {
            ++*failed;
            mx_buf_clear(&out);
            mx_buf_puts(&out, "{\"error\":");
            mx_buf_json(&out, mx_str_of(err.msg));
            mx_buf_putc(&out, '}');
        }
        mx_buf_putc(&out, '\n');
        cli_out(out.data, out.n);
        json_decref(j);
    }
    mx_buf_free(&line);
    mx_buf_free(&out);
}

static mx_status get_bool(const json_t *o, const char *key, bool dflt, bool *out, mx_err *err) {
    const json_t *v = json_object_get(o, key);
    *out = v && !json_is_null(v) ? json_is_true(v) : dflt;
    if (!v || json_is_boolean(v) || json_is_null(v)) return MX_OK;
    return mx_err_set(err, MX_INVALID, "%s: expected true or false", key);
}

static mx_status encode_line(text_tools *t, const json_t *line, mx_buf *out, mx_err *err) {
    const json_t *text = json_object_get(line, "text");
    mx_encode_opts opts;
    if (!json_is_string(text)) return mx_err_set(err, MX_INVALID, "text: expected a string");
    MX_TRY(get_bool(line, "add_special", false, &opts.add_special, err));
    MX_TRY(get_bool(line, "parse_special", true, &opts.parse_special, err));
    mx_ids ids = {0};
    mx_str s = {json_string_value(text), json_string_length(text)};
    mx_status st = mx_tokenizer_encode(t->tok, s, opts, &ids, err);
    mx_buf_puts(out, "{\"ids\":[");
    for (size_t i = 0; i < ids.n; i++) mx_buf_printf(out, "%s%d", i ? "," : "", ids.v[i]);
    mx_buf_puts(out, "]}");
    mx_free(ids.v);
    return st;
}

static mx_status decode_line(text_tools *t, const json_t *line, mx_buf *out, mx_err *err) {
    const json_t *list = json_object_get(line, "ids");
    if (!json_is_array(list)) return mx_err_set(err, MX_INVALID, "ids: expected an array");
    mx_ids ids = {0};
    mx_status st = MX_OK;
    for (size_t i = 0; st == MX_OK && i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id >= 0 && id < mx_tokenizer_n_vocab(t->tok))
            mx_ids_push(&ids, (int32_t)id);
        else
            st = mx_err_set(err, MX_INVALID, "ids[%zu]: expected an id below %d", i,
                            mx_tokenizer_n_vocab(t->tok));
    }
    mx_buf text;
    mx_buf_init(&text, 0);
    if (st == MX_OK) mx_tokenizer_decode(t->tok, ids.v, ids.n, false, &text);
    mx_buf_puts(out, "{\"text\":");
    mx_buf_json(out, (mx_str){text.n ? text.data : "", text.n});
    mx_buf_putc(out, '}');
    mx_buf_free(&text);
    mx_free(ids.v);
    return st;
}

int cli_tokenize(const cli_options *o) {
    if (!o->model) return cli_usage(o, "expected a model: -m MODEL");
    text_tools t = {.o = o};
    int failed = 0, code = open_tools(&t, o);
    if (code == CLI_EXIT_OK) each_line(&t, o->decode ? decode_line : encode_line, &failed);
    if (failed) code = cli_fail(o, CLI_EXIT_RUN, "%d lines could not be answered", failed);
    close_tools(&t);
    return code;
}

// ---- template ----

// A line's own string, else the model's token as text. NULL: undefined.
static const char *token_text(const text_tools *t, const json_t *line, const char *key, int32_t id,
                              mx_buf *hold) {
    const json_t *own = json_object_get(line, key);
    if (json_is_string(own)) return json_string_value(own);
    if (!t->tok || id < 0) return NULL;
    mx_str s = mx_tokenizer_piece(t->tok, id);
    mx_buf_clear(hold);
    mx_buf_add(hold, s.p, s.n);
    return hold->data;
}

static const json_t *array_or_null(const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    return json_is_array(v) && json_array_size(v) ? v : NULL;
}

static mx_status render_line(const text_tools *t, const mx_template *tp, const json_t *line,
                             mx_rendered *r, mx_err *err) {
    mx_buf bos, eos;
    mx_buf_init(&bos, 0);
    mx_buf_init(&eos, 0);
    json_t *messages = NULL;
    mx_template_vars v = {
        .tools = array_or_null(line, "tools"),
        .documents = array_or_null(line, "documents"),
        .extra = json_object_get(line, "chat_template_kwargs"),
        .bos_token = token_text(t, line, "bos_token", t->tok ? mx_tokenizer_bos(t->tok) : -1, &bos),
        .eos_token =
            token_text(t, line, "eos_token", t->tok ? mx_tokenizer_eos(t->tok) : -1, &eos)};
    if (!json_is_object(v.extra)) v.extra = NULL;
    mx_status st = get_bool(line, "add_generation_prompt", true, &v.add_generation_prompt, err);
    if (st == MX_OK) {
        st = mx_chat_normalize(json_object_get(line, "messages"), false, &messages, err);
    }
    v.messages = messages;
    if (st == MX_OK) st = mx_template_render(tp, &v, r, err);
    json_decref(messages);
    mx_buf_free(&bos);
    mx_buf_free(&eos);
    return st;
}

static mx_status template_line(text_tools *t, const json_t *line, mx_buf *out, mx_err *err) {
    const json_t *own = json_object_get(line, "template");
    mx_template *inline_template = NULL;
    if (json_is_string(own)) {
        mx_str source = {json_string_value(own), json_string_length(own)};
        MX_TRY(mx_template_open(&inline_template, source, err));
    } else if (!t->model_template) {
        *err = t->template_err;
        return err->status;
    }
    mx_rendered r = {0};
    mx_status st =
        render_line(t, inline_template ? inline_template : t->model_template, line, &r, err);
    if (st == MX_OK) {
        mx_buf_puts(out, "{\"prompt\":");
        mx_buf_json(out, (mx_str){r.text.n ? r.text.data : "", r.text.n});
        mx_buf_putc(out, '}');
    }
    mx_rendered_free(&r);
    mx_template_close(inline_template);
    return st;
}

int cli_template(const cli_options *o) {
    text_tools t = {.o = o};
    int failed = 0, code = o->model ? open_tools(&t, o) : CLI_EXIT_OK;
    if (code != CLI_EXIT_OK) {
        close_tools(&t);
        return code;
    }
    mx_str source = t.tok ? mx_tokenizer_template(t.tok, NULL) : (mx_str){0};
    if (source.n)
        mx_template_open(&t.model_template, source, &t.template_err);
    else {
        mx_err_set(&t.template_err, MX_UNSUPPORTED,
                   o->model ? "the model has no chat template" : "no model and no template");
    }
    each_line(&t, template_line, &failed);
    close_tools(&t);
    return CLI_EXIT_OK; // the answer to a bad line is the error
}
