// A tokenizer from tokenizer.json and the files beside it.
//
// State: fills a new tokenizer; everything is copied out of the files. Does not read vocabulary
// and merges itself (vocab_json.c) nor the pipeline (load_pipeline.c). Order: model, pipeline,
// added tokens, then tokenizer_config.json for BOS, EOS and templates.
#include "text/load_int.h"

#include "base/mem.h"
#include "text/vocab_json_int.h"

enum { MAX_TOKENIZER = 512 << 20, MAX_CONFIG = 64 << 20, MAX_TEMPLATE = 4 << 20 };

// ---- small readers ----

mx_status load_bool(const json_t *o, const char *key, bool dflt, bool *out, mx_err *err) {
    const json_t *v = json_object_get(o, key);
    *out = dflt;
    if (!v || json_is_null(v)) return MX_OK;
    if (!json_is_boolean(v)) return mx_err_set(err, MX_FORMAT, "%s: not a boolean", key);
    *out = json_is_true(v);
    return MX_OK;
}

mx_str load_view(const json_t *v) {
    return (mx_str){json_string_value(v), json_string_length(v)};
}

mx_status load_string(const json_t *o, const char *key, mx_str *out, mx_err *err) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_string(v)) return mx_err_set(err, MX_FORMAT, "%s: missing or not a string", key);
    *out = load_view(v);
    return MX_OK;
}

// ---- the model ----

// An option that is not supported unless it is absent, null, false, 0 or "".
static mx_status refuse_option(const json_t *o, const char *key, mx_err *err) {
    const json_t *v = json_object_get(o, key);
    if (!v || json_is_null(v) || json_is_false(v)) return MX_OK;
    if (json_is_string(v) && json_string_length(v) == 0) return MX_OK;
    if (json_is_number(v) && json_number_value(v) == 0) return MX_OK;
    return mx_err_set(err, MX_UNSUPPORTED, "model.%s is not supported", key);
}

static mx_status load_model(mx_tokenizer *t, const json_t *model, const vocab_json *j,
                            mx_err *err) {
    if (!json_is_object(model)) return mx_err_set(err, MX_FORMAT, "model: missing");
    const json_t *type = json_object_get(model, "type");
    if (type && !json_is_null(type)) {
        if (!json_is_string(type)) return mx_err_set(err, MX_FORMAT, "model.type: not a string");
        if (!mx_str_is(load_view(type), "BPE")) {
            return mx_err_set(err, MX_UNSUPPORTED, "model.type '%.80s', only BPE is supported",
                              json_string_value(type));
        }
    }
    if (!j->vocab.p || json_object_size(json_object_get(model, "vocab"))) {
        return mx_err_set(err, MX_FORMAT, "model.vocab: missing or not an object");
    }
    if (!j->merges.p) return mx_err_set(err, MX_FORMAT, "model.merges: missing or not an array");
    static const char *const refused[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    for (size_t i = 0; i < MX_COUNT(refused); i++) MX_TRY(refuse_option(model, refused[i], err));
    MX_TRY(load_bool(model, "fuse_unk", false, &t->b.fuse_unk, err));
    MX_TRY(load_bool(model, "byte_fallback", false, &t->b.byte_fallback, err));
    MX_TRY(load_bool(model, "ignore_merges", false, &t->b.ignore_merges, err));
    MX_TRY(vocab_json_read(j, &t->v, err));
    bpe_init(&t->b, &t->v);
    const json_t *unk = json_object_get(model, "unk_token");
    if (json_is_string(unk)) {
        t->b.unk = vocab_find(&t->v, load_view(unk));
        if (t->b.unk < 0) {
            return mx_err_set(err, MX_FORMAT, "model.unk_token '%.80s' is not in the vocabulary",
                              json_string_value(unk));
        }
    } else if (unk && !json_is_null(unk)) {
        return mx_err_set(err, MX_FORMAT, "model.unk_token: not a string");
    }
    return vocab_json_merges(j, &t->b, err);
}

// ---- added tokens ----

static mx_status load_added(mx_tokenizer *t, const json_t *o, int64_t id, mx_err *err) {
    if (!json_is_object(o)) return mx_err_set(err, MX_FORMAT, "not an object");
    mx_str content;
    added_opts a;
    MX_TRY(load_string(o, "content", &content, err));
    MX_TRY(load_bool(o, "single_word", false, &a.single_word, err));
    MX_TRY(load_bool(o, "lstrip", false, &a.lstrip, err));
    MX_TRY(load_bool(o, "rstrip", false, &a.rstrip, err));
    MX_TRY(load_bool(o, "special", false, &a.special, err));
    MX_TRY(load_bool(o, "normalized", !a.special, &a.normalized, err));
    return tokenizer_add_token(t, id, content, a, err);
}

static mx_status load_added_list(mx_tokenizer *t, const json_t *list, mx_err *err) {
    if (!list || json_is_null(list)) return MX_OK;
    if (!json_is_array(list)) return mx_err_set(err, MX_FORMAT, "added_tokens: not an array");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i), *id = json_object_get(o, "id");
        mx_status st = MX_FORMAT;
        if (!json_is_integer(id)) {
            mx_err_set(err, MX_FORMAT, "id: missing or not an integer");
        } else {
            st = load_added(t, o, json_integer_value(id), err);
        }
        if (st != MX_OK) return mx_err_prefix(err, "added_tokens[%zu]", i);
    }
    return MX_OK;
}

// ---- tokenizer_config.json ----

// Tokens that only the configuration lists.
static mx_status load_added_decoder(mx_tokenizer *t, const json_t *config, mx_err *err) {
    json_t *map = json_object_get(config, "added_tokens_decoder"), *o;
    if (!map || json_is_null(map)) return MX_OK;
    if (!json_is_object(map)) {
        return mx_err_set(err, MX_FORMAT, "added_tokens_decoder: not an object");
    }
    const char *key;
    json_object_foreach(map, key, o) {
        int64_t id;
        mx_status st;
        if (!mx_parse_i64(key, &id)) {
            st = mx_err_set(err, MX_FORMAT, "not an id");
        } else if (vocab_has(&t->v, id) && (t->v.flags[id] & TOK_ADDED)) {
            continue;
        } else {
            st = load_added(t, o, id, err);
        }
        if (st != MX_OK) return mx_err_prefix(err, "added_tokens_decoder[%.40s]", key);
    }
    return MX_OK;
}

// The id of "bos_token": "text" or {"content": "text"}; -1 when there is none.
static mx_status load_named(const mx_tokenizer *t, const json_t *config, const char *key,
                            int32_t *id, mx_err *err) {
    const json_t *v = json_object_get(config, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    if (!v || json_is_null(v)) return MX_OK;
    if (!json_is_string(v)) return mx_err_set(err, MX_FORMAT, "%s: not a string", key);
    *id = vocab_find(&t->v, load_view(v));
    if (*id < 0) {
        return mx_err_set(err, MX_FORMAT, "%s '%.80s' is no token", key, json_string_value(v));
    }
    return MX_OK;
}

static mx_status load_template_value(mx_tokenizer *t, const json_t *v, mx_err *err) {
    if (!v || json_is_null(v)) return MX_OK;
    if (json_is_string(v)) {
        tokenizer_add_template(t, (mx_str){"", 0}, load_view(v));
        return MX_OK;
    }
    if (!json_is_array(v)) {
        return mx_err_set(err, MX_FORMAT, "chat_template: not a string and not a list");
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        mx_str name, text;
        const json_t *o = json_array_get(v, i);
        if (load_string(o, "name", &name, err) != MX_OK ||
            load_string(o, "template", &text, err) != MX_OK) {
            return mx_err_prefix(err, "chat_template[%zu]", i);
        }
        if (mx_str_is(name, "default")) name = (mx_str){"", 0};
        tokenizer_add_template(t, name, text);
    }
    return MX_OK;
}

// add_bos_token and its twin: said explicitly, they win over the post-processor.
static void set_bos(mx_tokenizer *t, bool add) {
    bool there = mx_tokenizer_adds_bos(t);
    if (t->bos < 0 || there == add) return;
    if (add) {
        mx_ids_push(&t->prefix, 0);
        memmove(t->prefix.v + 1, t->prefix.v, (t->prefix.n - 1) * sizeof *t->prefix.v);
        t->prefix.v[0] = t->bos;
    } else {
        t->prefix.n--;
        memmove(t->prefix.v, t->prefix.v + 1, t->prefix.n * sizeof *t->prefix.v);
    }
}

static void set_eos(mx_tokenizer *t, bool add) {
    bool there = t->suffix.n && t->suffix.v[t->suffix.n - 1] == t->eos;
    if (t->eos < 0 || there == add) return;
    if (add)
        mx_ids_push(&t->suffix, t->eos);
    else
        t->suffix.n--;
}

static mx_status load_config(mx_tokenizer *t, const json_t *config, mx_err *err) {
    if (!json_is_object(config)) return mx_err_set(err, MX_FORMAT, "not an object");
    MX_TRY(load_added_decoder(t, config, err));
    MX_TRY(load_named(t, config, "bos_token", &t->bos, err));
    MX_TRY(load_named(t, config, "eos_token", &t->eos, err));
    MX_TRY(load_template_value(t, json_object_get(config, "chat_template"), err));
    const json_t *bos = json_object_get(config, "add_bos_token");
    const json_t *eos = json_object_get(config, "add_eos_token");
    if (json_is_boolean(bos)) set_bos(t, json_is_true(bos));
    if (json_is_boolean(eos)) set_eos(t, json_is_true(eos));
    return MX_OK;
}

// ---- putting it together ----

static mx_status load_tokenizer(mx_tokenizer *t, mx_str text, mx_err *err) {
    vocab_json j;
    json_t *root = NULL;
    mx_status st = vocab_json_cut(text, &j, err);
    if (st != MX_OK) goto out;
    root = mx_json_parse(j.rest.data ? j.rest.data : "", j.rest.n, MAX_CONFIG,
                         MX_JSON_VOCAB | MX_JSON_CONFIG, "JSON", err);
    if (!root) {
        st = err ? err->status : MX_FORMAT;
        goto out;
    }
    st = load_model(t, json_object_get(root, "model"), &j, err);
    if (st == MX_OK) st = load_pipeline(t, root, err);
    if (st == MX_OK) st = load_added_list(t, json_object_get(root, "added_tokens"), err);
    if (st == MX_OK) st = load_post_processor(t, json_object_get(root, "post_processor"), err);
out:
    json_decref(root);
    mx_buf_free(&j.rest);
    return st;
}

static mx_status load_config_text(mx_tokenizer *t, mx_str text, mx_err *err) {
    json_t *config = mx_json_parse(text.p, text.n, MAX_CONFIG, MX_JSON_CONFIG, "JSON", err);
    if (!config) return err ? err->status : MX_FORMAT;
    mx_status st = load_config(t, config, err);
    json_decref(config);
    return st;
}

static mx_status finish(mx_tokenizer *t, mx_err *err) {
    // a tokenizer.json alone: what it puts in front is BOS
    if (t->bos < 0 && t->prefix.n) t->bos = t->prefix.v[0];
    tokenizer_add_eos(t, t->eos);
    return tokenizer_finish(t, err);
}

mx_status mx_tokenizer_open_json(mx_tokenizer **out, mx_str json, mx_str config, mx_err *err) {
    mx_err local = {0};
    if (!err) err = &local;
    *out = NULL;
    mx_tokenizer *t = tokenizer_new();
    mx_status st = load_tokenizer(t, json, err);
    if (st != MX_OK) {
        mx_err_prefix(err, "tokenizer.json");
    } else if (config.p) {
        st = load_config_text(t, config, err);
        if (st != MX_OK) mx_err_prefix(err, "tokenizer_config.json");
    }
    if (st == MX_OK) {
        st = finish(t, err);
        if (st != MX_OK) mx_err_prefix(err, "tokenizer.json");
    }
    if (st != MX_OK) {
        mx_tokenizer_close(t);
        return st;
    }
    *out = t;
    return MX_OK;
}

// ---- folders ----

// Reads dir/name when it is there; *out is mx_free'd by the caller, NULL when it is absent.
static mx_status read_beside(const char *dir, const char *name, size_t max, char **out, size_t *n,
                             mx_err *err) {
    char *path = mx_path_join(dir, name);
    *out = NULL;
    mx_status st = mx_path_exists(path) ? mx_read_file(path, max, out, n, err) : MX_OK;
    mx_free(path);
    return st;
}

static mx_status load_template_file(mx_tokenizer *t, const char *dir, const char *file, mx_str name,
                                    mx_err *err) {
    char *text;
    size_t n = 0;
    MX_TRY(read_beside(dir, file, MAX_TEMPLATE, &text, &n, err));
    if (!text) return MX_OK;
    mx_status st = MX_OK;
    if (mx_utf8_valid((mx_str){text, n}))
        tokenizer_add_template(t, name, (mx_str){text, n});
    else
        st = mx_err_set(err, MX_FORMAT, "%s/%s: not valid UTF-8", dir, file);
    mx_free(text);
    return st;
}

// chat_template.jinja and additional_chat_templates/NAME.jinja
static mx_status load_template_files(mx_tokenizer *t, const char *dir, mx_err *err) {
    MX_TRY(load_template_file(t, dir, "chat_template.jinja", (mx_str){"", 0}, err));
    char *sub = mx_path_join(dir, "additional_chat_templates"), **names = NULL;
    size_t n = 0;
    mx_status st = mx_path_is_dir(sub) ? mx_list_dir(sub, &names, &n, err) : MX_OK;
    for (size_t i = 0; st == MX_OK && i < n; i++) {
        mx_str name = mx_str_of(names[i]), ext = mx_str_of(".jinja");
        if (!mx_str_ends(name, ext)) continue;
        st = load_template_file(t, sub, names[i], (mx_str){name.p, name.n - ext.n}, err);
    }
    mx_free(names);
    mx_free(sub);
    return st;
}

// A JSON file beside tokenizer.json, when it is there.
static mx_status load_json_beside(const char *dir, const char *name, json_t **out, mx_err *err) {
    char *path = mx_path_join(dir, name);
    *out = NULL;
    mx_status st = MX_OK;
    if (mx_path_exists(path)) {
        *out = mx_json_load(path, MAX_CONFIG, MX_JSON_CONFIG, err);
        if (!*out) st = err->status;
    }
    mx_free(path);
    return st;
}

static mx_status load_beside(mx_tokenizer *t, const char *dir, mx_err *err) {
    json_t *config = NULL, *map = NULL, *tmpl = NULL;
    mx_status st = load_template_files(t, dir, err);
    if (st == MX_OK) st = load_json_beside(dir, "tokenizer_config.json", &config, err);
    if (st == MX_OK && config) {
        st = load_config(t, config, err);
        if (st != MX_OK) mx_err_prefix(err, "%s/tokenizer_config.json", dir);
    }
    if (st == MX_OK && (t->bos < 0 || t->eos < 0)) {
        st = load_json_beside(dir, "special_tokens_map.json", &map, err);
    }
    if (map && st == MX_OK) {
        if (t->bos < 0) st = load_named(t, map, "bos_token", &t->bos, err);
        if (st == MX_OK && t->eos < 0) st = load_named(t, map, "eos_token", &t->eos, err);
        if (st != MX_OK) mx_err_prefix(err, "%s/special_tokens_map.json", dir);
    }
    if (st == MX_OK) st = load_json_beside(dir, "chat_template.json", &tmpl, err);
    if (tmpl && st == MX_OK) {
        st = load_template_value(t, json_object_get(tmpl, "chat_template"), err);
        if (st != MX_OK) mx_err_prefix(err, "%s/chat_template.json", dir);
    }
    json_decref(config);
    json_decref(map);
    json_decref(tmpl);
    return st;
}

mx_status mx_tokenizer_open_dir(mx_tokenizer **out, const char *dir, mx_err *err) {
    mx_err local = {0};
    if (!err) err = &local;
    *out = NULL;
    char *path = mx_path_join(dir, "tokenizer.json");
    mx_file f = {0};
    mx_tokenizer *t = NULL;
    mx_status st = mx_file_open(&f, path, err);
    if (st != MX_OK) goto out;
    if (f.n_bytes > MAX_TOKENIZER) {
        st = mx_err_set(err, MX_TOOLARGE, "%s: %zu bytes, at most %d are read", path, f.n_bytes,
                        MAX_TOKENIZER);
        goto out;
    }
    t = tokenizer_new();
    st = load_tokenizer(t, (mx_str){(const char *)f.data, f.n_bytes}, err);
    if (st != MX_OK) {
        mx_err_prefix(err, "%s", path);
        goto out;
    }
    st = load_beside(t, dir, err);
    if (st != MX_OK) goto out;
    st = finish(t, err);
    if (st != MX_OK) mx_err_prefix(err, "%s", path);
out:
    mx_file_close(&f);
    mx_free(path);
    if (st != MX_OK) {
        mx_tokenizer_close(t);
        return st;
    }
    *out = t;
    return MX_OK;
}
