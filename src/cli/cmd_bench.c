// mlxcel bench: prefill and decode speed, and how far decoding is from the rate at which this
// machine reads memory, measured in the same run. State: one bench.
//
// Requests go through the same boundary as everybody's. A decode repetition is timed from the
// moment when every sequence has its first token until the first one ends, so that all of it is
// decoding with all sequences. The engine says when a token was chosen, so that one reader after
// the other is enough.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct series {
    double *v;
    size_t n;
} series;

typedef struct bench_row {
    const char *test;
    int32_t n, depth, seqs;
    series tok_s, ms;
    int32_t cached;   // tokens of a prompt that came from the prefix cache, the least of all
    char reason[320]; // why there is no number, or which slow paths gave it; "" for neither
} bench_row;

typedef struct bench {
    const cli_options *o;
    cli_session s;
    mlxcel_stats before, after; // around the timed decode repetitions
    bench_row rows[2];
    int n_rows;
    double read_gb_s;
    uint64_t bytes_per_token, token_hash, logit_hash;
    bool unstable; // repetitions gave other tokens
    mlxcel_error err;
} bench;

// One sequence of a repetition.
typedef struct bench_seq {
    bench *b;
    int32_t *ids, n_ids, n_decode;
    bool hash;
    double *at; // (n_decode + 1) when each token came
    int32_t n_at;
    double depth_at, done_at; // when `depth` tokens were in, when all were
    int32_t depth_done;
    mlxcel_timings timings;
    uint64_t token_hash, logit_hash;
    mlxcel_error err;
    mlxcel_request *req;
} bench_seq;

static void push(series *s, double v) {
    s->v = mx_realloc(s->v, (s->n + 1) * sizeof *s->v);
    s->v[s->n++] = v;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// The value at share q of the sorted series; 0 when it is empty.
static double quantile(const series *s, double q) {
    if (s->n == 0) return 0;
    double *v = mx_alloc(s->n * sizeof *v);
    memcpy(v, s->v, s->n * sizeof *v);
    qsort(v, s->n, sizeof *v, by_value);
    double x = v[(size_t)(q * (double)(s->n - 1) + 0.5)];
    mx_free(v);
    return x;
}

// ---- One request ----

static void take_event(bench_seq *q, const mlxcel_event *ev) {
    double now = mx_now_s();
    switch (ev->kind) {
    case MLXCEL_EVENT_PROMPT:
        if (ev->n_prompt_done <= q->b->o->depth) {
            q->depth_at = now, q->depth_done = ev->n_prompt_done;
        }
        if (ev->n_prompt_done == ev->n_prompt) q->done_at = now;
        break;
    case MLXCEL_EVENT_TEXT:
        for (int32_t i = 0; i < ev->n_tokens && q->n_at <= q->n_decode; i++) {
            q->at[q->n_at++] = ev->tokens[i].time_s;
        }
        break;
    case MLXCEL_EVENT_DONE:
        q->timings = ev->timings;
        q->token_hash = ev->token_hash;
        q->logit_hash = ev->logit_hash;
        if (ev->finish == MLXCEL_FINISH_ERROR) q->err = ev->error;
        if (ev->finish == MLXCEL_FINISH_CANCEL) q->err.status = MX_CANCELLED;
        if (q->done_at == 0) q->done_at = now;
        break;
    case MLXCEL_EVENT_SCORE:
    case MLXCEL_EVENT_CHOICE: break;
    }
}

static void submit_seq(bench_seq *q) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = q->ids, p.n_ids = (size_t)q->n_ids;
    p.max_tokens = q->n_decode > 0 ? q->n_decode + 1 : 0;
    p.run_past_end = true;
    p.hash_logits = q->hash;
    p.cache_prompt = q->b->o->warm_cache;
    q->n_at = 0, q->done_at = 0;
    q->depth_at = mx_now_s(), q->depth_done = 0;
    q->req = NULL;
    mlxcel_submit(q->b->s.engine, &p, &q->req, &q->err);
}

// Reads all events of one of n sequences; an interruption ends them all.
static void read_seq(bench_seq *q, bench_seq *all, int32_t n) {
    mlxcel_event ev = {0};
    for (bool cancelled = false; q->req && ev.kind != MLXCEL_EVENT_DONE;) {
        bool got = mlxcel_next_event(q->req, 0.1, &ev);
        if (!cancelled && cli_interrupted()) {
            for (int32_t i = 0; i < n; i++) {
                if (all[i].req) mlxcel_cancel(all[i].req);
            }
            cancelled = true;
        }
        if (got)
            take_event(q, &ev);
        else
            ev.kind = MLXCEL_EVENT_PROMPT;
    }
    mlxcel_request_free(q->req);
    q->req = NULL;
}

// Token ids that no two sequences share from their second on.
static void fill_prompt(bench_seq *q, uint32_t salt) {
    const mlxcel_info *i = &q->b->s.info;
    for (int32_t k = 0; k < q->n_ids; k++) {
        uint32_t key[2] = {salt, (uint32_t)k};
        q->ids[k] = (int32_t)(mx_hash64(key, sizeof key, 1) % (uint64_t)i->n_vocab);
    }
    if (i->bos >= 0) q->ids[0] = i->bos;
}

static bench_seq *open_seqs(bench *b, int32_t n_seqs, int32_t n_ids, int32_t n_decode) {
    bench_seq *q = mx_calloc((size_t)n_seqs, sizeof *q);
    for (int32_t i = 0; i < n_seqs; i++) {
        q[i] = (bench_seq){.b = b, .n_ids = n_ids, .n_decode = n_decode};
        q[i].ids = mx_alloc((size_t)n_ids * sizeof *q[i].ids);
        q[i].at = mx_calloc((size_t)n_decode + 1, sizeof *q[i].at);
        fill_prompt(&q[i], (uint32_t)i);
    }
    return q;
}

static void close_seqs(bench_seq *q, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        mx_free(q[i].ids);
        mx_free(q[i].at);
    }
    mx_free(q);
}

// All at once. False on an error, which is in b->err.
static bool run_seqs(bench *b, bench_seq *q, int32_t n) {
    for (int32_t i = 0; i < n; i++) submit_seq(&q[i]);
    for (int32_t i = 0; i < n; i++) read_seq(&q[i], q, n);
    for (int32_t i = 0; i < n; i++) {
        if (q[i].err.status != 0) b->err = q[i].err;
    }
    // a run that ended before it was cancelled: the next one must not begin
    if (b->err.status == 0 && cli_interrupted()) b->err.status = MX_CANCELLED;
    return b->err.status == 0;
}

// ---- Rows ----

// A number that slow paths gave is not the speed of what was asked for: the row says so.
static void note_slow_paths(bench_row *row, const mlxcel_stats *before, const mlxcel_stats *after) {
    char text[300];
    cli_slow_text(before, after, text, sizeof text);
    if (text[0] && !row->reason[0]) snprintf(row->reason, sizeof row->reason, "slow: %s", text);
}

static bool bench_prefill(bench *b, bench_row *row) {
    bench_seq *q = open_seqs(b, 1, row->depth + row->n, 0);
    mlxcel_stats before, after;
    mlxcel_get_stats(b->s.engine, &before);
    bool ok = run_seqs(b, q, 1); // warm-up
    for (int32_t i = 0; ok && i < b->o->reps; i++) {
        ok = run_seqs(b, q, 1);
        if (!ok) break;
        if (mx_knob_is_set(MX_KNOB_PROFILE_TTFT)) cli_say_ttft(&b->s, &q->timings, 0, 0);
        // with a depth: from the last step that ended within it
        double s = row->depth ? q->done_at - q->depth_at : q->timings.prompt_ms * 1e-3;
        int32_t n = row->depth ? row->depth + row->n - q->depth_done : row->n;
        push(&row->tok_s, n / s);
        push(&row->ms, s * 1e3);
    }
    mlxcel_get_stats(b->s.engine, &after);
    note_slow_paths(row, &before, &after);
    close_seqs(q, 1);
    return ok;
}

static void time_one(bench_row *row, const bench_seq *q) {
    for (int32_t k = 1; k < q->n_at; k++) push(&row->ms, (q->at[k] - q->at[k - 1]) * 1e3);
    push(&row->tok_s, (q->timings.n_decoded - 1) / (q->timings.decode_ms * 1e-3));
}

// False when they were never all running at once.
static bool time_several(bench_row *row, const bench_seq *q) {
    double from = 0, until = 0, n = 0;
    for (int32_t i = 0; i < row->seqs; i++) {
        double first = q[i].at[0], last = q[i].at[q[i].n_at - 1];
        if (i == 0 || first > from) from = first;
        if (i == 0 || last < until) until = last;
    }
    for (int32_t i = 0; i < row->seqs; i++) {
        for (int32_t k = 0; k < q[i].n_at; k++) {
            if (q[i].at[k] <= from || q[i].at[k] > until) continue;
            n++;
            push(&row->ms, (q[i].at[k] - q[i].at[k - 1]) * 1e3);
        }
    }
    if (until <= from || n == 0) return false;
    push(&row->tok_s, n / (until - from));
    return true;
}

// One repetition with several sequences. One that began late, because this thread had to wait for a
// processor, is no reason to decline: again, some times.
static bool run_several(bench *b, bench_row *row, bench_seq *q) {
    for (int i = 0; i < 5; i++) {
        if (!run_seqs(b, q, row->seqs)) return false;
        if (time_several(row, q)) return true;
    }
    snprintf(row->reason, sizeof row->reason,
             "the first of %d sequences ended before the last began: a larger -n, or --warm-cache",
             row->seqs);
    return true;
}

// With --warm-cache: every prompt must have come from the cache.
static void note_cached(bench *b, bench_row *row, const bench_seq *q) {
    row->cached = q[0].timings.n_cached;
    for (int32_t i = 1; i < row->seqs; i++) {
        row->cached = MX_MIN(row->cached, q[i].timings.n_cached);
    }
    if (b->o->warm_cache && row->cached == 0) {
        snprintf(row->reason, sizeof row->reason,
                 "--warm-cache: no page of a prompt was cached; -d has to be 33 or more");
    }
}

static bool bench_decode(bench *b, bench_row *row) {
    bench_seq *q = open_seqs(b, row->seqs, MX_MAX(row->depth, 1), row->n);
    bool ok = run_seqs(b, q, row->seqs); // warm-up
    mlxcel_get_stats(b->s.engine, &b->before);
    for (int32_t i = 0; ok && i < b->o->reps; i++) {
        uint64_t hash = q->token_hash;
        ok = row->seqs > 1 ? run_several(b, row, q) : run_seqs(b, q, 1);
        b->unstable |= ok && q->token_hash != hash;
        if (ok && row->seqs == 1) time_one(row, q);
        if (ok) note_cached(b, row, q);
    }
    mlxcel_get_stats(b->s.engine, &b->after);
    note_slow_paths(row, &b->before, &b->after);
    close_seqs(q, row->seqs);
    return ok;
}

// Hashes of tokens and logits, from a pass that is not timed.
static bool bench_hash(bench *b) {
    bench_seq *q = open_seqs(b, 1, MX_MAX(b->o->depth, 1), MX_MAX(b->o->n_decode, 1));
    q->hash = true;
    bool ok = run_seqs(b, q, 1);
    b->token_hash = q->token_hash;
    b->logit_hash = q->logit_hash;
    close_seqs(q, 1);
    return ok;
}

static bool on_gpu(const bench *b) {
    return strncmp(b->s.info.arch, "sm_", 3) == 0;
}

// A GPU's own memory, read by a kernel. The engine, which has nothing to do, keeps its handle.
static mx_status gpu_rate(const bench *b, double *gb_s, mx_err *err) {
    mx_backend *dev;
    mx_device_options o = {.want = b->o->device};
    MX_TRY(mx_device_open(&o, &dev, err));
    double rate = 0;
    mx_status st = dev->ops->read_rate ? dev->ops->read_rate(dev, &rate, err) : MX_OK;
    dev->ops->close(dev);
    *gb_s = rate * 1e-9;
    return st == MX_OK ? st : mx_err_prefix(err, "read rate");
}

// The better of two measurements, before and after the rows; a GPU's memory has no other users and
// is measured once. False on an error, which is in b->err.
static bool measure_roof(bench *b) {
    mx_err err = {0};
    double gb_s = 0;
    if (on_gpu(b) && b->read_gb_s > 0) return true;
    if (!on_gpu(b))
        gb_s = cli_read_rate(b->s.info.weight_bytes, b->s.info.n_threads);
    else if (gpu_rate(b, &gb_s, &err) != MX_OK) {
        b->err.status = err.status;
        snprintf(b->err.message, sizeof b->err.message, "%s", err.msg);
        return false;
    }
    b->read_gb_s = MX_MAX(b->read_gb_s, gb_s);
    return true;
}

// Bytes read for one token of one sequence: its share of the weights, and its state.
static mx_status count_bytes(bench *b, mx_err *err) {
    mx_weights w;
    MX_TRY(mx_weights_open(&w, b->s.path, err));
    uint64_t weights = cli_weight_read_bytes(&w);
    int64_t ctx = (int64_t)b->o->depth + b->o->n_decode / 2 + 1;
    uint64_t kv = cli_kv_bytes(&w, ctx, strcmp(b->s.info.kv_type, "f32") == 0, err);
    b->bytes_per_token = weights / (uint64_t)b->o->n_seqs + kv;
    mx_weights_close(&w);
    return err->status;
}

static bool measure(bench *b) {
    const cli_options *o = b->o;
    if (!measure_roof(b)) return false;
    if (o->n_prefill > 0) {
        b->rows[b->n_rows] =
            (bench_row){.test = "prefill", .n = o->n_prefill, .depth = o->depth, .seqs = 1};
        if (!bench_prefill(b, &b->rows[b->n_rows++])) return false;
    }
    if (o->n_decode > 0) {
        b->rows[b->n_rows] =
            (bench_row){.test = "decode", .n = o->n_decode, .depth = o->depth, .seqs = o->n_seqs};
        if (!bench_decode(b, &b->rows[b->n_rows++])) return false;
    }
    return bench_hash(b) && measure_roof(b);
}

// ---- Results ----

static const bench_row *decode_row(const bench *b) {
    const bench_row *r = b->n_rows ? &b->rows[b->n_rows - 1] : NULL;
    return r && strcmp(r->test, "decode") == 0 && r->tok_s.n ? r : NULL;
}

// Share of the decode time that reading at the measured rate would take; 0 when not known.
static double roof_share(const bench *b) {
    const bench_row *r = decode_row(b);
    if (!r || r->reason[0] || b->read_gb_s == 0) return 0;
    return quantile(&r->tok_s, 0.5) * (double)b->bytes_per_token / (b->read_gb_s * 1e9);
}

static double buffers_per_token(const bench *b) {
    double steps = (double)(b->after.steps_decode - b->before.steps_decode);
    return steps > 0 ? (double)(b->after.buffers_decode - b->before.buffers_decode) / steps : 0;
}

// What takes most of a token's time: reading weights, reading state, or everything else.
static void largest_cost(const bench *b, char *out, size_t cap) {
    const bench_row *r = decode_row(b);
    out[0] = 0;
    if (!r || b->read_gb_s == 0) return;
    double rate = b->read_gb_s * 1e9, token = 1 / quantile(&r->tok_s, 0.5);
    double all = (double)b->bytes_per_token / rate;
    double weights = (double)(b->s.info.weight_bytes / (uint64_t)r->seqs) / rate;
    if (weights > all) weights = all;
    double other = token - all, state = all - weights;
    const char *name = "reading weights";
    double most = weights;
    if (state > most) most = state, name = "reading the KV cache";
    if (other > most) most = other, name = "computing and waiting beyond the reads";
    snprintf(out, cap, "%s, %.3f of %.3f ms a token", name, most * 1e3, token * 1e3);
}

static bool declined(const bench *b) {
    bool any = b->s.info.fallbacks[0] != 0 || b->unstable;
    for (int i = 0; i < b->n_rows; i++) any |= b->rows[i].reason[0] != 0;
    return any;
}

static json_t *fallbacks_json(const bench *b) {
    json_t *all = json_array();
    for (const char *p = b->s.info.fallbacks; *p;) {
        size_t n = strcspn(p, "\n");
        json_array_append_new(all, json_stringn(p, n));
        p += n + (p[n] == '\n');
    }
    for (int i = 0; i < b->n_rows; i++) {
        if (b->rows[i].reason[0]) json_array_append_new(all, json_string(b->rows[i].reason));
    }
    if (b->unstable) json_array_append_new(all, json_string("repetitions gave other tokens"));
    return all;
}

static json_t *row_json(const bench_row *r) {
    json_t *rates = json_array();
    for (size_t i = 0; i < r->tok_s.n; i++) json_array_append_new(rates, json_real(r->tok_s.v[i]));
    json_t *j = json_pack("{s:s, s:i, s:i, s:i, s:o, s:{s:f, s:f, s:f}}", "test", r->test, "n",
                          r->n, "depth", r->depth, "seqs", r->seqs, "tok_s", rates, "ms", "p50",
                          quantile(&r->ms, 0.5), "p90", quantile(&r->ms, 0.9), "p99",
                          quantile(&r->ms, 0.99));
    if (r->cached) json_object_set_new(j, "cached", json_integer(r->cached));
    if (r->reason[0]) json_object_set_new(j, "reason", json_string(r->reason));
    return j;
}

static void set_hash(json_t *j, const char *key, uint64_t h) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
    json_object_set_new(j, key, json_string(text));
}

static void print_json(const bench *b) {
    const mlxcel_info *i = &b->s.info;
    char kv[64], cost[160];
    snprintf(kv, sizeof kv, "%s %s", i->kv_type, i->kv_storage);
    largest_cost(b, cost, sizeof cost);
    json_t *rows = json_array();
    for (int k = 0; k < b->n_rows; k++) json_array_append_new(rows, row_json(&b->rows[k]));
    json_t *j = json_pack("{s:s, s:o, s:s, s:s, s:s, s:i, s:s, s:o, s:I, s:I, s:f, s:o}", "version",
                          mlxcel_version(), "model", cli_json_text(b->s.path), "format", i->format,
                          "device", i->device, "arch", i->arch, "threads", i->n_threads, "kv", kv,
                          "rows", rows, "bytes_per_token", (json_int_t)b->bytes_per_token,
                          "peak_bytes", (json_int_t)b->after.peak_bytes, "buffers_per_token",
                          buffers_per_token(b), "fallbacks", fallbacks_json(b));
    CHECK(j != NULL);
    json_object_set_new(j, "load_s", json_real(i->load_s));
    bool roof = b->read_gb_s > 0;
    json_object_set_new(j, "read_gb_s", roof ? json_real(b->read_gb_s) : json_null());
    json_object_set_new(j, "roof_share",
                        roof_share(b) > 0 ? json_real(roof_share(b)) : json_null());
    json_object_set_new(j, "deterministic", json_boolean(i->deterministic));
    json_object_set_new(j, "largest_cost", cost[0] ? json_string(cost) : json_null());
    set_hash(j, "token_hash", b->token_hash);
    set_hash(j, "logit_hash", b->logit_hash);
    char *text = json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(9));
    cli_outs(text);
    cli_outs("\n");
    free(text);
    json_decref(j);
}

static void print_row(const bench_row *r, mx_buf *out) {
    mx_buf_printf(out, "%-8s %6d %7d %5d ", r->test, r->n, r->depth, r->seqs);
    if (r->tok_s.n == 0) {
        mx_buf_printf(out, "  %s\n", r->reason);
        return;
    }
    mx_buf_printf(out, "%10.1f %9.1f %9.1f %9.3f %9.3f %9.3f  %s\n", quantile(&r->tok_s, 0.5),
                  quantile(&r->tok_s, 0), quantile(&r->tok_s, 1), quantile(&r->ms, 0.5),
                  quantile(&r->ms, 0.9), quantile(&r->ms, 0.99), r->reason[0] ? r->reason : "-");
}

static void print_table(const bench *b) {
    const mlxcel_info *i = &b->s.info;
    char cost[160];
    largest_cost(b, cost, sizeof cost);
    mx_buf t;
    mx_buf_init(&t, 0);
    mx_buf_printf(&t, "mlxcel %s, %s\n%s, %s, %d threads, KV %s %s\n\n", mlxcel_version(),
                  b->s.path, i->format, i->device, i->n_threads, i->kv_type, i->kv_storage);
    mx_buf_printf(&t, "%-8s %6s %7s %5s %10s %9s %9s %9s %9s %9s  %s\n", "test", "n", "depth",
                  "seqs", "tok/s", "min", "max", "p50 ms", "p90 ms", "p99 ms", "fallback");
    for (int k = 0; k < b->n_rows; k++) print_row(&b->rows[k], &t);
    mx_buf_puts(&t, "\nbytes a token:   ");
    cli_size_text(b->bytes_per_token, &t);
    mx_buf_puts(&t, "\npeak memory:     ");
    cli_size_text(b->after.peak_bytes, &t);
    mx_buf_printf(&t, " beside the weights\nbuffers a token: %.2f\n", buffers_per_token(b));
    if (b->read_gb_s > 0) {
        mx_buf_printf(&t, "read rate:       %.2f GB/s", b->read_gb_s);
        if (!on_gpu(b)) mx_buf_printf(&t, " by %d threads", i->n_threads);
        mx_buf_puts(&t, "\n");
    }
    if (roof_share(b) > 0) {
        mx_buf_printf(&t, "decode:          %.0f %% of that rate; largest cost: %s\n",
                      roof_share(b) * 100, cost);
    }
    mx_buf_printf(&t, "hashes:          tokens %016llx, logits %016llx\n",
                  (unsigned long long)b->token_hash, (unsigned long long)b->logit_hash);
    if (i->fallbacks[0]) mx_buf_printf(&t, "declined:        %s\n", i->fallbacks);
    if (b->unstable) mx_buf_puts(&t, "declined:        repetitions gave other tokens\n");
    cli_out(t.data, t.n);
    mx_buf_free(&t);
}

static int run_bench(bench *b) {
    const cli_options *o = b->o;
    mx_err err = {0};
    bool before = cli_signals_defer(true);
    bool ok = measure(b);
    cli_signals_defer(before);
    if (cli_interrupted()) return CLI_EXIT_INTERRUPTED;
    if (!ok) return cli_fail(o, CLI_EXIT_RUN, "%s", b->err.message);
    if (count_bytes(b, &err) != MX_OK) return cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    if (b->n_rows == 0 || strcmp(b->rows[b->n_rows - 1].test, "decode") != 0) {
        mlxcel_get_stats(b->s.engine, &b->after);
        b->before = b->after;
    }
    if (strcmp(o->output, "json") == 0)
        print_json(b);
    else
        print_table(b);
    if (!declined(b) || o->allow_fallback) return CLI_EXIT_OK;
    return cli_fail(o, CLI_EXIT_RUN, "something was declined (see the result); --allow-fallback");
}

// A cache that holds every sequence twice: prompts, and what was generated.
static int cache_size(const cli_options *o, int32_t ctx, uint64_t *n_bytes) {
    char *path;
    if (!cli_resolve(o, o->model, &path)) return CLI_EXIT_LOAD;
    mx_weights w;
    mx_err err = {0};
    mx_status st = mx_weights_open(&w, path, &err);
    if (st == MX_OK) {
        bool f32 = o->kv_type && strcmp(o->kv_type, "f32") == 0;
        *n_bytes = 2 * (uint64_t)o->n_seqs * cli_kv_bytes(&w, ctx, f32, &err);
        st = err.status;
        mx_weights_close(&w);
    }
    mx_free(path);
    return st == MX_OK ? CLI_EXIT_OK : cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
}

int cli_bench(const cli_options *o) {
    if (!o->model) return cli_usage(o, "expected a model: -m MODEL");
    if (o->n_prefill == 0 && o->n_decode == 0) {
        return cli_usage(o, "-p 0 and -n 0: nothing to measure");
    }
    int64_t most = (int64_t)o->depth + MX_MAX(o->n_prefill, o->n_decode + 1) + 2;
    if (most > INT32_MAX / 2) return cli_usage(o, "-d: more than a context can hold");
    if (o->n_arms && !o->ab) return cli_usage(o, "--arm belongs to --ab");
    if (o->ab) return cli_bench_ab(o);
    bench b = {.o = o};
    mlxcel_params p = {.max_batch = o->n_seqs,
                       .max_queue = o->n_seqs,
                       .prefill_grant_interval = 1, // those that wait begin soon
                       .ctx_size = (int32_t)((most + 255) / 256 * 256)};
    int code = o->warm_cache ? cache_size(o, p.ctx_size, &p.prefix_cache_bytes) : CLI_EXIT_OK;
    if (code == CLI_EXIT_OK) code = cli_session_open(&b.s, o, o->model, p, false);
    if (code == CLI_EXIT_OK) code = run_bench(&b);
    for (int i = 0; i < b.n_rows; i++) {
        mx_free(b.rows[i].tok_s.v);
        mx_free(b.rows[i].ms.v);
    }
    cli_session_close(&b.s);
    return code;
}
