// The boundary: open, close, text, info, statistics. Runs on callers' threads; what the engine
// thread owns is reached through the mailbox only.
#include "engine/engine_int.h"

#include "base/mem.h"
#include "engine/suggest.h"

#include <string.h>

const char *mlxcel_version(void) {
    return MLXCEL_VERSION;
}

void mlxcel_free(void *p) {
    mx_free(p);
}

static void apply_defaults(mlxcel_params *p) {
    if (p->max_batch <= 0) p->max_batch = 1;
    if (p->max_queue <= 0) p->max_queue = 32;
    if (p->prefill_grant_interval <= 0) p->prefill_grant_interval = 16;
}

static mlxcel_engine *new_engine(const mlxcel_params *p) {
    mlxcel_engine *e = mx_calloc(1, sizeof *e);
    e->params = *p;
    apply_defaults(&e->params);
    e->model_path = mx_strdup(p->model);
    e->params.model = e->model_path;
    e->seed_state = (uint64_t)(mx_wall_s() * 1e6);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    pthread_cond_init(&e->ready, NULL);
    return e;
}

static void free_engine(mlxcel_engine *e) {
    mx_template_close(e->tmpl);
    mx_tokenizer_close(e->tok);
    mx_free(e->eos_ids);
    if (e->weights_open) mx_weights_close(&e->weights);
    for (size_t i = 0; i < MX_COUNT(e->info_text); i++) mx_free(e->info_text[i]);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->ready);
    mx_free(e->model_path);
    mx_free(e);
}

static void stop_thread(mlxcel_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
}

static mx_status wait_loaded(mlxcel_engine *e, mx_err *err) {
    pthread_mutex_lock(&e->lock);
    while (!e->is_ready) pthread_cond_wait(&e->ready, &e->lock);
    pthread_mutex_unlock(&e->lock);
    if (e->open_err.status != MX_OK) *err = e->open_err;
    return e->open_err.status;
}

static mx_status open_engine(mlxcel_engine *e, mx_err *err) {
    MX_TRY(mx_weights_open(&e->weights, e->model_path, err));
    e->weights_open = true;
    if (mx_thread_start(&e->thread, engine_main, e) != 0) {
        return mx_err_set(err, MX_INTERNAL, "cannot start the engine thread");
    }
    mx_status text = engine_load_text(e, err); // beside the weights
    mx_err model_err = {0};
    mx_status model = wait_loaded(e, &model_err);
    if (model != MX_OK) *err = model_err;
    mx_status st = model != MX_OK ? model : text;
    if (st == MX_OK && mx_tokenizer_n_vocab(e->tok) > e->info.n_vocab) {
        mx_log(MX_LOG_DEBUG, "the tokenizer knows %d tokens, the model %d",
               mx_tokenizer_n_vocab(e->tok), e->info.n_vocab);
    }
    if (st != MX_OK) stop_thread(e);
    return st;
}

int mlxcel_open(mlxcel_engine **out, const mlxcel_params *p, mlxcel_error *error) {
    mx_err err = {0};
    *out = NULL;
    if (!p->model || !p->model[0]) {
        mx_err_set(&err, MX_INVALID, "no model was named");
        engine_error_out(error, &err);
        return err.status;
    }
    mlxcel_engine *e = new_engine(p);
    mx_status st = open_engine(e, &err);
    if (st != MX_OK) {
        err.status = st;
        engine_error_out(error, &err);
        free_engine(e);
        return (int)st;
    }
    e->info.bos = mx_tokenizer_bos(e->tok);
    e->info.eos = e->n_eos > 0 ? e->eos_ids[0] : -1;
    e->info.has_template = e->tmpl != NULL;
    e->info.sampling = e->info_text[4];
    *out = e;
    return MX_OK;
}

void mlxcel_close(mlxcel_engine *e) {
    if (!e) return;
    stop_thread(e);
    free_engine(e);
}

void mlxcel_get_info(const mlxcel_engine *e, mlxcel_info *out) {
    *out = e->info;
}

uint32_t mlxcel_suggest_sampling(const mlxcel_engine *e, uint32_t which, mlxcel_sampling *s) {
    uint32_t bits = which & e->suggested_bits;
    engine_copy_suggestions(s, &e->suggested, bits);
    return bits;
}

_Static_assert((int)MLXCEL_SLOW_PATHS == (int)MX_SLOW_COUNT, "mlxcel.h counts slow.def");

const char *mlxcel_slow_path(int32_t i, const char **what) {
    if (i < 0 || i >= MX_SLOW_COUNT) return NULL;
    if (what) *what = mx_slow_what((mx_slow)i);
    return mx_slow_name((mx_slow)i);
}

void mlxcel_get_stats(mlxcel_engine *e, mlxcel_stats *out) {
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    pthread_mutex_unlock(&e->lock);
}

void mlxcel_cache_reset(mlxcel_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->reset_cache = true;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

// ---- Text --------------------------------------------------------------------------------------

int mlxcel_tokenize(mlxcel_engine *e, const char *text, size_t n_bytes, bool add_special,
                    bool parse_special, int32_t **ids, size_t *n_ids, mlxcel_error *error) {
    mx_ids out = {0};
    mx_err err = {0};
    mx_encode_opts opts = {add_special, parse_special};
    mx_status st = mx_tokenizer_encode(e->tok, (mx_str){text, n_bytes}, opts, &out, &err);
    if (st != MX_OK) {
        mx_free(out.v);
        engine_error_out(error, &err);
        return (int)st;
    }
    *ids = out.v ? out.v : mx_calloc(1, sizeof **ids);
    *n_ids = out.n;
    return MX_OK;
}

int mlxcel_detokenize(mlxcel_engine *e, const int32_t *ids, size_t n_ids, bool skip_special,
                      char **text, size_t *n_bytes, mlxcel_error *error) {
    mx_buf out;
    mx_buf_init(&out, 0);
    mx_err err = {0};
    for (size_t i = 0; i < n_ids; i++) {
        if (ids[i] >= 0 && ids[i] < e->info.n_vocab) continue;
        mx_err_set(&err, MX_INVALID, "token %zu is %d, the vocabulary has %d", i, ids[i],
                   e->info.n_vocab);
        engine_error_out(error, &err);
        return err.status;
    }
    mx_tokenizer_decode(e->tok, ids, n_ids, skip_special, &out);
    if (n_bytes) *n_bytes = out.n;
    *text = mx_buf_take(&out);
    return MX_OK;
}

const char *mlxcel_piece(mlxcel_engine *e, int32_t id, size_t *n_bytes) {
    mx_str s = mx_tokenizer_piece(e->tok, id);
    *n_bytes = s.n;
    return s.p ? s.p : "";
}

// ---- Templates ---------------------------------------------------------------------------------

static const char *token_text(mlxcel_engine *e, int32_t id, char *buf, size_t cap) {
    if (id < 0) return NULL;
    mx_str s = mx_tokenizer_piece(e->tok, id);
    if (!s.p || s.n >= cap) return NULL;
    memcpy(buf, s.p, s.n);
    buf[s.n] = 0;
    return buf;
}

static mx_status render(mlxcel_engine *e, const mx_template *t, const json_t *req, mx_rendered *out,
                        mx_err *err) {
    char bos[256], eos[256];
    json_t *messages = NULL;
    MX_TRY(mx_chat_normalize(json_object_get(req, "messages"), false, &messages, err));
    const json_t *gen = json_object_get(req, "add_generation_prompt");
    const json_t *tools = json_object_get(req, "tools"), *docs = json_object_get(req, "documents");
    const json_t *extra = json_object_get(req, "chat_template_kwargs");
    mx_template_vars v = {.messages = messages,
                          .tools = json_is_array(tools) && json_array_size(tools) ? tools : NULL,
                          .documents = json_is_array(docs) && json_array_size(docs) ? docs : NULL,
                          .extra = json_is_object(extra) ? extra : NULL,
                          .add_generation_prompt = !json_is_false(gen),
                          .bos_token = token_text(e, e->info.bos, bos, sizeof bos),
                          .eos_token = token_text(e, mx_tokenizer_eos(e->tok), eos, sizeof eos)};
    mx_status st = mx_template_render(t, &v, out, err);
    json_decref(messages);
    return st;
}

static mx_status apply_template(mlxcel_engine *e, const json_t *req, char **prompt, mx_ids *ids,
                                mx_err *err) {
    const json_t *own = json_object_get(req, "chat_template");
    mx_template *other = NULL;
    if (json_is_string(own)) {
        mx_str source = {json_string_value(own), json_string_length(own)};
        MX_TRY(mx_template_open(&other, source, err));
    }
    const mx_template *t = other ? other : e->tmpl;
    mx_rendered r = {0};
    mx_status st = t ? render(e, t, req, &r, err)
                     : mx_err_set(err, MX_UNSUPPORTED, "the model has no chat template");
    if (st == MX_OK) st = mx_tokenizer_encode_spans(e->tok, r.spans, r.n, ids, err);
    if (st == MX_OK && prompt) {
        *prompt = mx_alloc(r.text.n + 1);
        if (r.text.n) memcpy(*prompt, r.text.data, r.text.n);
        (*prompt)[r.text.n] = 0;
    }
    mx_rendered_free(&r);
    mx_template_close(other);
    return st;
}

int mlxcel_apply_template(mlxcel_engine *e, const char *request_json, char **prompt, int32_t **ids,
                          size_t *n_ids, mlxcel_error *error) {
    mx_err err = {0};
    mx_ids out = {0};
    size_t n = strlen(request_json);
    json_t *req =
        mx_json_parse(request_json, n, (size_t)64 << 20, MX_JSON_STRICT, "chat request", &err);
    if (!req) {
        engine_error_out(error, &err);
        return (int)err.status;
    }
    mx_status st = apply_template(e, req, prompt, &out, &err);
    json_decref(req);
    if (st != MX_OK) {
        mx_free(out.v);
        engine_error_out(error, &err);
        return (int)st;
    }
    *ids = out.v ? out.v : mx_calloc(1, sizeof **ids);
    *n_ids = out.n;
    return MX_OK;
}
