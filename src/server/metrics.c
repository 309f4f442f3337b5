// /metrics: counters of the engine and of the server in Prometheus' text form, by the table in
// metrics.def. State: the server's counters, under srv.lock.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <math.h>

static const double ttft_ms[] = {5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 60000};
static const double rate_s[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000};

void metrics_done(srv *s, const gen *g) {
    pthread_mutex_lock(&s->lock);
    s->m.seqs_ended += (uint64_t)g->n_jobs * (uint64_t)g->o.n;
    pthread_mutex_unlock(&s->lock);
    if (g->error.status != 0 || g->n_decoded == 0) return;
    const mlxcel_timings *t = &g->timings;
    double ttft = t->first_token_ms;
    double rate = t->decode_ms > 0 ? (t->n_decoded - 1) * 1e3 / t->decode_ms : 0;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < MX_COUNT(ttft_ms); i++) s->m.ttft_bucket[i] += ttft <= ttft_ms[i];
    s->m.ttft_count++;
    s->m.ttft_sum += ttft;
    if (t->n_decoded > 1) {
        for (size_t i = 0; i < MX_COUNT(rate_s); i++) s->m.rate_bucket[i] += rate <= rate_s[i];
        s->m.rate_count++;
        s->m.rate_sum += rate;
    }
    uint64_t n = (uint64_t)(g->n_prompt + g->n_decoded);
    if (n > s->m.n_tokens_max) s->m.n_tokens_max = n;
    pthread_mutex_unlock(&s->lock);
}

// Rates since the last time somebody asked.
static void update_window(srv *s, const mlxcel_stats *st) {
    double dp = st->prefill_s - s->m.window_prompt_s, dd = st->decode_s - s->m.window_decode_s;
    uint64_t np = st->prompt_tokens;
    s->m.prompt_rate = dp > 0 ? (double)(np - s->m.window_prompt) / dp : 0;
    s->m.decode_rate = dd > 0 ? (double)(st->decode_tokens - s->m.window_decode) / dd : 0;
    s->m.window_prompt = np;
    s->m.window_decode = st->decode_tokens;
    s->m.window_prompt_s = st->prefill_s;
    s->m.window_decode_s = st->decode_s;
}

// ---- Rows ----

static uint64_t n_steps(const mlxcel_stats *st) { // that decoded
    return st->steps_decode + st->steps_mixed;
}

static bool is_paged(const srv *s) {
    return strcmp(s->info.kv_storage, "paged") == 0;
}

static void put_head(mx_buf *b, const char *type, const char *name, const char *help) {
    mx_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

// last: the name of the row before.
static void put_metric(mx_buf *b, const char **last, const char *type, const char *name,
                       const char *labels, const char *help, double v) {
    if (isnan(v)) return;
    if (strcmp(*last, name) != 0) put_head(b, type, name, help);
    *last = name;
    mx_buf_printf(b, "%s%s %.15g\n", name, labels, v);
}

static void put_slow_paths(mx_buf *b, const char *name, const char *help, const mlxcel_stats *st) {
    put_head(b, "counter", name, help);
    for (int32_t i = 0; i < MLXCEL_SLOW_PATHS; i++) {
        mx_buf_printf(b, "%s{path=\"%s\"} %llu\n", name, mlxcel_slow_path(i, NULL),
                      (unsigned long long)st->slow[i]);
    }
}

static void put_histogram(mx_buf *b, const char *name, const char *help, const double *le,
                          const uint64_t *n, size_t k, uint64_t count, double sum) {
    put_head(b, "histogram", name, help);
    for (size_t i = 0; i < k; i++) {
        mx_buf_printf(b, "%s_bucket{le=\"%.10g\"} %llu\n", name, le[i], (unsigned long long)n[i]);
    }
    mx_buf_printf(b, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.15g\n%s_count %llu\n", name,
                  (unsigned long long)count, name, sum, name, (unsigned long long)count);
}

static void put_all(mx_buf *b, const srv *s, const mlxcel_stats *st) {
    const char *last = "";
#define METRIC(type, name, labels, help, value)                                                    \
    put_metric(b, &last, #type, name, labels, help, (double)(value));
#define SLOW_PATHS(name, help) put_slow_paths(b, name, help, st);
#define HISTOGRAM(name, help, le, of)                                                              \
    put_histogram(b, name, help, le, s->m.of##_bucket, MX_COUNT(le), s->m.of##_count,              \
                  s->m.of##_sum);
#include "server/metrics.def"
#undef METRIC
#undef SLOW_PATHS
#undef HISTOGRAM
}

void handle_metrics(srv_req *q) {
    srv *s = q->s;
    if (!s->c->metrics) {
        req_error(q, 501, NULL, NULL,
                  "This server does not support metrics endpoint. Start it with `--metrics`");
        return;
    }
    mlxcel_stats st;
    mlxcel_get_stats(s->engine, &st);
    mx_buf b;
    mx_buf_init(&b, 0);
    pthread_mutex_lock(&s->lock);
    update_window(s, &st);
    put_all(&b, s, &st);
    pthread_mutex_unlock(&s->lock);
    req_reply(q, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
}

void metrics_markdown(mx_buf *out) {
    static const struct {
        const char *type, *name, *labels, *help;
    } rows[] = {
#define METRIC(type, name, labels, help, value) {#type, name, labels, help},
#define SLOW_PATHS(name, help)                  {"counter", name, "{path=\"...\"}", help},
#define HISTOGRAM(name, help, le, of)           {"histogram", name, "", help},
#include "server/metrics.def"
    };
    mx_buf_puts(out, "| metric | type | |\n|---|---|---|\n");
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        mx_buf_printf(out, "| `%s%s` | %s | %s |\n", rows[i].name, rows[i].labels, rows[i].type,
                      rows[i].help);
    }
}
