// One forward pass on the engine thread: rows into the step block, recording, submission, and what
// comes back. Knows sequences and the model; not who is chosen nor why.
#include "engine/engine_int.h"

#include "base/mem.h"

#include <math.h>
#include <string.h>

// Outputs that a pick wants: every row of a score request, else the last row once all known tokens
// have run.
static int32_t outputs_of(const step_pick *p) {
    const mlxcel_request *r = p->seq->req;
    if (r->p.score) return p->n_tok;
    bool complete = p->from_row >= 0 || p->seq->n_past + p->n_tok == p->seq->n_tokens;
    return complete && r->p.max_tokens != 0 ? 1 : 0;
}

static mx_phase phase_of(const step_pick *p, const flight_row *row) {
    bool decode = p->n_tok == 1 && p->seq->n_past >= p->seq->n_prompt;
    if (!decode) return MX_PHASE_PREFILL;
    return row->host || row->sync ? MX_PHASE_DECODE_SYNC : MX_PHASE_DECODE;
}

// Where the row's token is chosen, and by what. A device whose memory the host shares chooses
// greedy tokens only: the host reads the logits where they are.
static void choose_sampling(mlxcel_engine *e, mx_step_io *io, flight_row *row, const step_pick *p) {
    eng_seq *s = p->seq;
    int32_t used = io->counts[3], left = e->caps.max_edits - used;
    row->sync = false;
    row->host = seq_wants_logits(s) || !e->device_sampling;
    row->sample = (mx_sample_row){.host = 1};
    if (row->host || row->n_out == 0) return;
    mx_sample_plan plan;
    mx_sample_history h = seq_history(e, s, p->from_row >= 0 ? 1 : 0);
    row->host = !mx_sample_on_device(e->sampler, &s->sampling, &h, io->edits + used, left, &plan);
    if (e->facts.host_memory) row->host |= plan.row.temperature > 0 || plan.n_edits > 0;
    if (row->host) return;
    CHECK(!plan.steps_on || p->from_row < 0);
    row->sync = plan.steps_on;
    row->sample = plan.row;
    row->sample.first_edit = used;
    io->counts[3] = used + plan.n_edits;
}

// The phase of the whole: the most demanding row's.
static mx_phase step_phase(const mx_step_range *ranges, int32_t n) {
    mx_phase p = MX_PHASE_DECODE;
    for (int32_t i = 0; i < n; i++) {
        if (ranges[i].phase == MX_PHASE_PREFILL) return MX_PHASE_PREFILL;
        if (ranges[i].phase == MX_PHASE_DECODE_SYNC) p = MX_PHASE_DECODE_SYNC;
    }
    return p;
}

static void fill_rows(mlxcel_engine *e, mx_step_io *io, const step_pick *p, const mx_step_range *g,
                      int32_t index) {
    for (int32_t i = 0; i < p->n_tok; i++) {
        int32_t row = g->first + i;
        io->ids[row] = p->from_row >= 0 ? -1 - p->from_row : p->seq->tokens[g->pos0 + i];
        io->pos[row] = g->pos0 + i;
        io->tok_range[row] = index;
    }
    io->range_first[index] = g->first;
    io->range_pos0[index] = g->pos0;
    io->range_len[index] = g->pos0 + g->n_tok;
    mx_kv_fill(e->kv, p->seq->kv, g, index, &e->caps, io);
}

static void fill_outputs(mx_step_io *io, const flight_row *row, const mx_step_range *g) {
    for (int32_t i = 0; i < row->n_out; i++) {
        int32_t out = row->out_row + i;
        io->out_tok[out] = g->first + g->n_tok - row->n_out + i;
        io->sample[out] = row->sample;
    }
}

// Rows that pad the plan's shape: no range, no write.
static void fill_padding(mlxcel_engine *e, mx_step_io *io, int32_t from, int32_t to) {
    for (int32_t row = from; row < to; row++) {
        io->ids[row] = io->pos[row] = 0;
        io->tok_range[row] = -1;
        for (int32_t g = 0; g < e->caps.n_groups; g++) io->kv_slot[g][row] = -1;
    }
}

static mx_status reserve_all(mlxcel_engine *e, const step_pick *picks, int32_t n, mx_err *err) {
    for (int32_t i = 0; i < n; i++) {
        const eng_seq *s = picks[i].seq;
        int32_t len = s->n_past + picks[i].n_tok;
        mx_status st = mx_kv_reserve(e->kv, s->kv, len, err);
        if (st == MX_BUSY && e->prefix) {
            int32_t pt = e->caps.page_tokens[0];
            mx_prefix_make_room(e->prefix, (len + pt - 1) / pt - s->n_past / pt + 1);
            st = mx_kv_reserve(e->kv, s->kv, len, err);
        }
        MX_TRY(st);
    }
    return MX_OK;
}

// Full pages whose tokens are known go into the prefix index, before a window drops them.
static void store_prefix(mlxcel_engine *e, const eng_seq *s) {
    if (!e->prefix || !s->req->p.cache_prompt || s->req->p.score) return;
    int32_t known = MX_MIN(s->n_past, s->n_tokens), pt = e->caps.page_tokens[0];
    int32_t before = mx_kv_seq_len(e->kv, s->kv);
    if (known / pt > before / pt || known % pt == 0) {
        mx_prefix_store(e->prefix, s->req->salt, s->tokens, known, s->kv);
    }
}

static void hold(flight_row *row, const step_pick *p) {
    row->seq = p->seq;
    row->req = p->seq->req;
    row->n_tok = p->n_tok;
    row->pos0 = p->seq->n_past;
    pthread_mutex_lock(&row->req->lock);
    row->req->refs++;
    pthread_mutex_unlock(&row->req->lock);
}

static void release_rows(flight *f) {
    for (int32_t i = 0; i < f->n_rows; i++) request_release(f->rows[i].req);
    f->n_rows = 0;
    f->open = false;
}

// Rows and step block of the flight; returns the longest visible context.
static int32_t lay_out(mlxcel_engine *e, flight *f, const step_pick *picks, int32_t n) {
    mx_step_io *io = &e->io[f->slot];
    int32_t max_len = 1;
    io->counts[3] = 0;
    f->n_rows = f->n_tok = f->n_out = 0;
    f->decode_only = true;
    for (int32_t i = 0; i < n; i++) {
        flight_row *row = &f->rows[f->n_rows++];
        hold(row, &picks[i]);
        mx_step_range *g = &e->ranges[i];
        *g = (mx_step_range){
            .seq = picks[i].seq->kv, .first = f->n_tok, .n_tok = picks[i].n_tok, .pos0 = row->pos0};
        row->n_out = outputs_of(&picks[i]);
        row->out_row = f->n_out;
        choose_sampling(e, io, row, &picks[i]);
        g->phase = phase_of(&picks[i], row);
        fill_rows(e, io, &picks[i], g, i);
        fill_outputs(io, row, g);
        f->n_tok += g->n_tok;
        f->n_out += row->n_out;
        f->decode_only = f->decode_only && g->phase != MX_PHASE_PREFILL;
        max_len = MX_MAX(max_len, g->pos0 + g->n_tok);
    }
    io->range_first[n] = f->n_tok;
    io->counts[0] = f->n_tok;
    io->counts[1] = n;
    io->counts[2] = f->n_out;
    return max_len;
}

static mx_status record(mlxcel_engine *e, const mx_step_facts *facts, int32_t max_len,
                        mx_plan **plan, mx_err *err) {
    mx_enc_begin(e->enc, facts);
    MX_TRY(mx_model_record(e->model, e->enc, e->kv, max_len, MX_OUTPUT_SAMPLE, err));
    return mx_enc_end(e->enc, plan, err);
}

mx_status step_submit(mlxcel_engine *e, flight *f, const step_pick *picks, int32_t n, mx_err *err) {
    CHECK(!f->open && n > 0 && n <= e->caps.max_range);
    MX_TRY(reserve_all(e, picks, n, err));
    int32_t max_len = lay_out(e, f, picks, n);
    CHECK(f->n_tok <= e->caps.max_tok && f->n_out <= e->caps.max_out);
    mx_step_facts facts = {.phase = step_phase(e->ranges, n),
                           .n_tok = f->n_tok,
                           .n_rows = mx_row_bucket(&e->facts, f->n_tok),
                           .n_out = f->n_out,
                           .n_ranges = n,
                           .ranges = e->ranges};
    fill_padding(e, &e->io[f->slot], f->n_tok, facts.n_rows);
    mx_plan *plan;
    mx_status st = record(e, &facts, max_len, &plan, err);
    f->submitted_s = mx_now_s();
    if (st == MX_OK) {
        mx_mem_seal(true);
        st = mx_enc_submit(e->enc, plan, f->slot, &f->ticket, err);
        mx_mem_seal(false);
    }
    if (st != MX_OK) {
        release_rows(f);
        return st;
    }
    f->open = true;
    for (int32_t i = 0; i < n; i++) {
        picks[i].seq->n_past += picks[i].n_tok;
        store_prefix(e, picks[i].seq);
        mx_kv_commit(e->kv, picks[i].seq->kv, picks[i].seq->n_past);
    }
    return MX_OK;
}

// ---- What comes back -------------------------------------------------------------------------

static void choose_on_host(mlxcel_engine *e, eng_seq *s, const float *logits) {
    mx_sample_history h = seq_history(e, s, 0);
    int32_t id;
    mx_err err = {0};
    e->n_host_sampled += !e->facts.host_memory;
    if (mx_sample(e->sampler, &s->sampling, &h, logits, &id, &err) != MX_OK) {
        s->req->err = err;
        seq_finish(e, s, MLXCEL_FINISH_ERROR, NULL);
        return;
    }
    seq_accept(e, s, id, logits);
}

static void note_prompt(eng_seq *s) {
    mlxcel_request *r = s->req;
    if (s->n_past < s->n_prompt || r->prefilled_s == 0) {
        event_node *n = request_event(r, MLXCEL_EVENT_PROMPT, s->choice);
        n->ev.n_prompt = s->n_prompt;
        n->ev.n_prompt_done = MX_MIN(s->n_past, s->n_prompt);
        n->ev.timings = r->t;
        request_post(r, n);
    }
    if (s->n_past >= s->n_prompt && r->prefilled_s == 0) {
        r->prefilled_s = mx_now_s();
        r->t.prompt_ms = (r->prefilled_s - r->started_s) * 1e3;
    }
}

static void finish_row(mlxcel_engine *e, const flight *f, const flight_row *row) {
    eng_seq *s = row->seq;
    if (s->finished) return; // ended one step ago: its row was a no-op
    const mx_step_io *io = &e->io[f->slot];
    const float *logits = io->logits + (size_t)row->out_row * (size_t)e->info.n_vocab;
    note_prompt(s);
    if (s->req->p.score) {
        seq_score(e, s, row->pos0, row->n_out, logits);
        if (s->n_past >= s->n_prompt) seq_finish(e, s, MLXCEL_FINISH_LENGTH, NULL);
    } else if (row->n_out > 0 && row->host) {
        choose_on_host(e, s, logits);
    } else if (row->n_out > 0 && isnan(io->out_logprob[row->out_row])) {
        seq_fail_row(e, s, s->n_tokens - s->n_prompt); // the id is a placeholder
    } else if (row->n_out > 0) {
        seq_accept(e, s, io->out_id[row->out_row], NULL);
    } else if (s->n_past >= s->n_tokens) {
        seq_finish(e, s, MLXCEL_FINISH_LENGTH, NULL); // max_tokens 0: prefill only
    }
}

static void count_step(mlxcel_engine *e, const flight *f) {
    double dt = mx_now_s() - f->submitted_s;
    bool decodes = false;
    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < f->n_rows; i++) {
        const flight_row *r = &f->rows[i];
        decodes |= r->pos0 >= r->seq->n_prompt;
        if (r->pos0 >= r->seq->n_prompt)
            e->stats.decode_tokens += (uint64_t)r->n_tok;
        else
            e->stats.prompt_tokens += (uint64_t)r->n_tok;
    }
    if (f->decode_only) {
        e->stats.steps_decode++;
        e->stats.decode_s += dt;
    } else {
        e->stats.steps_prefill++;
        e->stats.steps_mixed += decodes;
        e->stats.prefill_s += dt;
    }
    pthread_mutex_unlock(&e->lock);
    if (!f->decode_only) chunk_learn(e, f->n_tok, dt);
}

void step_note(mlxcel_engine *e, mx_status st) {
    pthread_mutex_lock(&e->lock);
    if (st == MX_OK)
        e->stats.n_failed_steps = 0;
    else if (st == MX_DEVICE && e->stats.n_failed_steps < INT32_MAX)
        e->stats.n_failed_steps++;
    pthread_mutex_unlock(&e->lock);
}

mx_status step_finish(mlxcel_engine *e, flight *f, mx_err *err) {
    bool logits = false, done;
    for (int32_t i = 0; i < f->n_rows; i++) logits |= f->rows[i].host && f->rows[i].n_out > 0;
    mx_run_stats run;
    mx_status st = e->backend->ops->wait(e->backend, f->ticket, true, logits, &done, &run, err);
    step_note(e, st);
    if (st == MX_OK) {
        count_step(e, f);
        for (int32_t i = 0; i < f->n_rows; i++) finish_row(e, f, &f->rows[i]);
    } else { // ends the requests that were in it; others go on
        for (int32_t i = 0; i < f->n_rows; i++) request_fail(e, f->rows[i].req, err);
    }
    release_rows(f);
    return st;
}
