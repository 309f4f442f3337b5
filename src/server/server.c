// The life of the server: listen, load, serve, shut down. State: one srv, here.
//
// It listens before the model is loaded, so that /health can say so. Shutting down, it takes no new
// connections, lets generations end within the grace time, ends the others with an error, and
// returns. A load that is under way cannot be interrupted; the process ends without it.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// ---- Loading ----

static bool is_one_token(srv *s, const char *text) {
    int32_t *ids = NULL;
    size_t n = 0;
    mlxcel_error err;
    if (mlxcel_tokenize(s->engine, text, strlen(text), false, true, &ids, &n, &err) != 0)
        return false;
    mlxcel_free(ids);
    return n == 1;
}

static char *render(srv *s, const char *request) {
    char *prompt = NULL;
    int32_t *ids = NULL;
    size_t n;
    mlxcel_error err;
    if (mlxcel_apply_template(s->engine, request, &prompt, &ids, &n, &err) != 0) return NULL;
    mlxcel_free(ids);
    return prompt;
}

// A model thinks when <think> is one of its tokens, or its template asks enable_thinking.
static bool knows_thinking(srv *s) {
    if (is_one_token(s, "<think>")) return true;
    char *on = render(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                         "\"chat_template_kwargs\":{\"enable_thinking\":true}}");
    char *off = render(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                          "\"chat_template_kwargs\":{\"enable_thinking\":false}}");
    bool differ = on && off && strcmp(on, off) != 0;
    mlxcel_free(on);
    mlxcel_free(off);
    return differ;
}

static void say_loaded(const srv *s) {
    const mlxcel_info *i = &s->info;
    mx_log(MX_LOG_INFO, "model: %s (%s, %s, %.1f M parameters)", s->model_name, i->family,
           i->format, (double)i->n_params * 1e-6);
    mx_log(MX_LOG_INFO, "device: %s (%s), threads: %d", i->device, i->arch, i->n_threads);
    if (i->n_gpus >= 0) mx_log(MX_LOG_INFO, "Detected %d GPU(s).", i->n_gpus);
    if (i->capability[0]) mx_log(MX_LOG_INFO, "%s", i->capability);
    if (i->budget_rule[0]) mx_log(MX_LOG_INFO, "%s", i->budget_rule);
    mx_log(MX_LOG_INFO, "decode path: %s", i->decode_path);
    mx_log(MX_LOG_INFO,
           "KV: %s %s, %.2f GB pool, %llu bytes a token; context %d, batch %d, prefill chunk %d "
           "(%s), prompt cache %.2f GB",
           i->kv_storage, i->kv_type, (double)i->kv_pool_bytes * 1e-9,
           (unsigned long long)i->kv_token_bytes, i->ctx_size, i->max_batch, i->prefill_chunk,
           i->prefill_chunk_why, (double)s->c->engine.prefix_cache_bytes * 1e-9);
    mx_log(MX_LOG_INFO, "command buffers: prefill %s; decode %s; synchronous decode %s",
           i->budget_prefill, i->budget_decode, i->budget_decode_sync);
    mx_log(MX_LOG_INFO, "decode steps: %s", i->decode_steps);
    const mlxcel_sampling *d = &s->c->sampling;
    mx_log(MX_LOG_INFO,
           "sampling defaults: temperature %.6g, top_k %d, top_p %.6g, min_p %.6g, repeat_penalty "
           "%.6g; suggested by the model: %s",
           (double)d->temperature, d->top_k, (double)d->top_p, (double)d->min_p,
           (double)d->repeat_penalty, i->sampling[0] ? i->sampling : "nothing");
    if (!i->has_template)
        mx_log(MX_LOG_WARN, "the model has no chat template that can be used: "
                            "/v1/chat/completions answers 501, /v1/completions works");
    if (i->fallbacks[0]) mx_log(MX_LOG_WARN, "declined: %s", i->fallbacks);
    mx_log(MX_LOG_INFO, "Model loaded in %.3fs; ready at %s", i->load_s, s->address);
}

static void *load_main(void *arg) {
    srv *s = arg;
    mlxcel_error err = {0};
    if (mlxcel_open(&s->engine, &s->c->engine, &err) == 0) {
        mlxcel_get_info(s->engine, &s->info);
        mlxcel_suggest_sampling(s->engine, ~s->c->sampling_given, &s->config.sampling);
        s->knows_thinking = s->info.has_template && knows_thinking(s);
        s->has_mistral_calls = is_one_token(s, "[TOOL_CALLS]");
        s->has_python_tag = is_one_token(s, "<|python_tag|>");
        atomic_store(&s->ready, true); // who reads that it is ready may ask at once
        say_loaded(s);
    } else {
        mx_err_set(&s->load_err, (mx_status)err.status, "%s", err.message);
        atomic_store(&s->failed, true);
        uint64_t one = 1;
        ssize_t written = write(s->event_fd, &one, sizeof one);
        (void)written;
    }
    atomic_store(&s->load_ended, true);
    return NULL;
}

// ---- Names ----

// "a, b" without the blanks beside commas.
static char *without_blanks(const char *names) {
    char *out = mx_strdup(names), *to = out;
    for (const char *p = names; *p;) {
        p += strspn(p, " ");
        size_t n = strcspn(p, ","), keep = n;
        while (keep && p[keep - 1] == ' ') keep--;
        memmove(to, p, keep);
        to += keep;
        p += n;
        if (*p) *to++ = *p++;
    }
    *to = 0;
    return out;
}

static void set_names(srv *s) {
    const char *alias = s->c->alias;
    if (alias && alias[0]) {
        s->model_name = without_blanks(alias);
        size_t n = strcspn(s->model_name, ",");
        s->model_names = mx_strdup(s->model_name[n] ? s->model_name + n + 1 : "");
        s->model_name[n] = 0;
        return;
    }
    const char *path = s->c->engine.model, *end = path + strlen(path);
    while (end > path + 1 && end[-1] == '/') end--;
    const char *start = end;
    while (start > path && start[-1] != '/') start--;
    size_t n = (size_t)(end - start);
    if (n > 5 && strncmp(end - 5, ".gguf", 5) == 0) n -= 5;
    s->model_name = mx_strdup(start);
    s->model_name[n] = 0;
    s->model_names = mx_strdup("");
}

// ---- Life ----

static mx_status start(srv *s, mx_err *err) {
    MX_TRY(config_check(s, err));
    conn_allow_files();
    MX_TRY(http_listen(s, err));
    MX_TRY(watch_start(s, err));
    mx_status st = lane_start(s, err);
    if (st == MX_OK && (st = http_start(s, err)) != MX_OK) lane_stop(s, 60);
    if (st != MX_OK) {
        watch_stop(s);
        return st;
    }
    mx_log(MX_LOG_INFO, "listening on %s%s", s->address,
           s->n_keys ? " (an API key is needed)" : "");
    if (mx_thread_start(&s->loader, load_main, s) != 0) {
        return mx_err_set(err, MX_INTERNAL, "cannot start the loading thread");
    }
    return MX_OK;
}

static void wait_drained(srv *s, double seconds) {
    double until = mx_now_s() + seconds;
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_mutex_lock(&s->lock);
    while (s->n_generating > 0 && pthread_cond_timedwait(&s->drained, &s->lock, &t) == 0) continue;
    pthread_mutex_unlock(&s->lock);
}

static void wake_all(srv *s) {
    pthread_mutex_lock(&s->lock);
    for (srv_req *q = s->first; q; q = q->next) req_wake(q);
    pthread_mutex_unlock(&s->lock);
}

static void stop(srv *s) {
    atomic_store(&s->stopping, true);
    if (s->c->on_stopping) s->c->on_stopping();
    MHD_socket fd = MHD_quiesce_daemon(s->daemon);
    // nobody connects any more; an HTTP thread may be about to accept, so it is closed later
    if (fd != MHD_INVALID_SOCKET) shutdown(fd, SHUT_RDWR);
    if (!atomic_load(&s->failed)) mx_log(MX_LOG_INFO, "shutting down");
    wait_drained(s, s->c->grace_s);
    atomic_store(&s->aborting, true);
    wake_all(s);
    wait_drained(s, 0.5);
    if (!lane_stop(s, 0.5)) { // its connection is suspended, so the HTTP threads cannot be stopped
        s->lane_left = true;
        http_unlink_socket(s);
        return;
    }
    http_stop(s);
    if (fd != MHD_INVALID_SOCKET) close(fd);
    watch_stop(s);
}

static void serve(srv *s) {
    struct pollfd fds[2] = {{s->c->stop_fd, POLLIN, 0}, {s->event_fd, POLLIN, 0}};
    while (poll(fds, 2, -1) < 0 && errno == EINTR) continue;
}

static void free_srv(srv *s) {
    if (s->engine) mlxcel_close(s->engine);
    gate_free(s);
    json_decref(s->template_kwargs);
    if (s->event_fd >= 0) close(s->event_fd);
    mx_free(s->model_path);
    mx_free(s->model_name);
    mx_free(s->model_names);
    mx_free(s->address);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->drained);
    mx_free(s);
}

mx_status mx_server_run(const mx_server_config *c, bool *loading, mx_err *err) {
    srv *s = mx_calloc(1, sizeof *s);
    s->config = *c;
    s->c = &s->config;
    s->config.engine.model = s->model_path = mx_strdup(c->engine.model); // a load outlives the call
    s->started_wall_s = mx_wall_s();
    s->started_s = mx_now_s();
    s->listen_fd = -1;
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t attr; // a clock that is set must not change the grace time
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->drained, &attr);
    pthread_condattr_destroy(&attr);
    set_names(s);
    *loading = false;
    mx_status st = start(s, err);
    if (st != MX_OK) {
        free_srv(s);
        return st;
    }
    serve(s);
    stop(s);
    if (!atomic_load(&s->load_ended)) {
        pthread_detach(s->loader); // it cannot be interrupted, and ends with the process
        return MX_OK;
    }
    pthread_join(s->loader, NULL);
    if (s->lane_left) { // neither can this one
        pthread_detach(s->lane);
        return MX_OK;
    }
    if (atomic_load(&s->failed)) {
        *loading = true;
        *err = s->load_err;
        st = s->load_err.status;
    }
    free_srv(s);
    return st;
}
