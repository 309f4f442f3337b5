// Pages, page tables, reference counts. Owned by the engine thread; no locks. Does not know what
// is stored in a page, nor which layers a model has: only groups.
#include "kv/kv.h"

#include "base/mem.h"

#include <string.h>

typedef struct pool {
    mx_buffer **k_buf, **v_buf; // per layer
    mx_tensor *k, *v;
    int32_t n_pages, n_free;
    int32_t *free_list; // stack
    int32_t *refs;      // per page
    int32_t max_logical;
} pool;

typedef struct seq {
    bool open;
    int32_t len;                     // committed positions
    int32_t reserved;                // logical pages that exist, from 0 (dropped ones count)
    int32_t first[MX_MAX_KV_GROUPS]; // first logical page still held
    int32_t *pages[MX_MAX_KV_GROUPS];
} seq;

struct mx_kv {
    mx_backend *backend;
    mx_kv_spec spec;
    pool pools[MX_MAX_KV_GROUPS];
    seq *seqs;
    void *bounce; // one page of one layer, made when the first page is copied
    size_t bounce_bytes;
};

bool mx_kv_choose(const char *word, bool several, bool shared, bool can_page, mx_kv_storage *out,
                  bool *declined) {
    bool by_name = strcmp(word, "paged") == 0, is_auto = strcmp(word, "auto") == 0;
    bool wanted = by_name || (is_auto && (several || shared));
    *out = wanted && can_page ? MX_KV_PAGED : MX_KV_DENSE;
    *declined = by_name && !can_page;
    return by_name || is_auto || strcmp(word, "dense") == 0;
}

static int32_t ceil_div(int32_t a, int32_t b) {
    return (a + b - 1) / b;
}

static int32_t page_tokens_of(const mx_kv_spec *s) {
    return s->storage == MX_KV_DENSE ? s->max_ctx : s->page_tokens;
}

static uint64_t group_token_bytes(const mx_kv_group *g) {
    uint64_t elem = g->codec == MX_F32 ? 4 : 2;
    return 2u * (uint64_t)g->n_layers * (uint64_t)g->n_kv_head * (uint64_t)g->head_dim * elem;
}

uint64_t mx_kv_token_bytes(const mx_kv_spec *spec) {
    uint64_t n = 0;
    for (int32_t g = 0; g < spec->n_groups; g++) n += group_token_bytes(&spec->groups[g]);
    return n;
}

// Pages that one sequence can hold at once in group g.
static int32_t pages_per_seq(const mx_kv_spec *s, int32_t g) {
    int32_t pt = page_tokens_of(s), full = ceil_div(s->max_ctx, pt);
    if (s->groups[g].window == 0 || s->storage == MX_KV_DENSE) return full;
    return MX_MIN(full, ceil_div(s->groups[g].window + s->max_chunk, pt) + 2);
}

// Pages that hold cache_bytes of shared prefixes (a page of every group together).
static int64_t cache_pages(const mx_kv_spec *s) {
    return (int64_t)(s->cache_bytes / ((uint64_t)page_tokens_of(s) * mx_kv_token_bytes(s)));
}

// Pages of group g in the pool: full need, scaled down to the budget.
static int32_t pool_pages(const mx_kv_spec *s, int32_t g) {
    int64_t want = (int64_t)pages_per_seq(s, g) * s->max_seqs + cache_pages(s);
    want = MX_MIN(want, (int64_t)INT32_MAX / page_tokens_of(s) / s->groups[g].n_kv_head);
    if (!s->budget_bytes) return (int32_t)want;
    double full = 0;
    for (int32_t i = 0; i < s->n_groups; i++) {
        double pages = (double)pages_per_seq(s, i) * s->max_seqs + (double)cache_pages(s);
        full += pages * page_tokens_of(s) * (double)group_token_bytes(&s->groups[i]);
    }
    if (full <= (double)s->budget_bytes) return (int32_t)want;
    return (int32_t)((double)want * ((double)s->budget_bytes / full));
}

uint64_t mx_kv_pool_bytes(const mx_kv_spec *s) {
    uint64_t n = 0;
    for (int32_t g = 0; g < s->n_groups; g++) {
        n += (uint64_t)pool_pages(s, g) * (uint64_t)page_tokens_of(s) *
             group_token_bytes(&s->groups[g]);
    }
    return n;
}

static mx_status alloc_layer(mx_kv *kv, const mx_kv_group *g, int32_t n_pages, mx_buffer **buf,
                             mx_tensor *t, mx_err *err) {
    size_t elem = g->codec == MX_F32 ? 4 : 2;
    size_t row = (size_t)page_tokens_of(&kv->spec) * (size_t)g->head_dim * elem;
    size_t n = (size_t)n_pages * (size_t)g->n_kv_head * row;
    MX_TRY(kv->backend->ops->alloc(kv->backend, buf, n, MX_USE_STATE, err));
    *t = (mx_tensor){.buf = *buf, .n_bytes = n, .kind = MX_T_STATE};
    t->n_rows = (int64_t)n_pages * g->n_kv_head * page_tokens_of(&kv->spec);
    t->n_cols = t->ld = g->head_dim;
    t->fmt = mx_wfmt_of(g->codec);
    return MX_OK;
}

static mx_status open_pool(mx_kv *kv, int32_t gi, mx_err *err) {
    const mx_kv_group *g = &kv->spec.groups[gi];
    pool *p = &kv->pools[gi];
    p->n_pages = p->n_free = pool_pages(&kv->spec, gi);
    p->max_logical = ceil_div(kv->spec.max_ctx, page_tokens_of(&kv->spec));
    size_t n = (size_t)g->n_layers;
    p->k_buf = mx_calloc(n, sizeof *p->k_buf);
    p->v_buf = mx_calloc(n, sizeof *p->v_buf);
    p->k = mx_calloc(n, sizeof *p->k);
    p->v = mx_calloc(n, sizeof *p->v);
    p->free_list = mx_calloc((size_t)p->n_pages, sizeof *p->free_list);
    p->refs = mx_calloc((size_t)p->n_pages, sizeof *p->refs);
    for (int32_t i = 0; i < p->n_pages; i++) p->free_list[i] = p->n_pages - 1 - i;
    for (size_t i = 0; i < n; i++) {
        MX_TRY(alloc_layer(kv, g, p->n_pages, &p->k_buf[i], &p->k[i], err));
        MX_TRY(alloc_layer(kv, g, p->n_pages, &p->v_buf[i], &p->v[i], err));
    }
    return MX_OK;
}

mx_status mx_kv_open(mx_kv **out, mx_backend *b, const mx_kv_spec *spec, mx_err *err) {
    *out = NULL;
    CHECK(spec->n_groups > 0 && spec->n_groups <= MX_MAX_KV_GROUPS && spec->max_seqs > 0);
    CHECK(spec->max_ctx > 0 && spec->max_chunk > 0);
    for (int32_t g = 0; g < spec->n_groups; g++) {
        if (pool_pages(spec, g) >= pages_per_seq(spec, g)) continue;
        return mx_err_set(
            err, MX_NOMEM,
            "KV cache: a context of %d tokens needs %llu bytes (%llu a token), the "
            "budget is %llu; lower --ctx-size or raise --kv-cache-budget",
            spec->max_ctx, (unsigned long long)(mx_kv_token_bytes(spec) * (uint64_t)spec->max_ctx),
            (unsigned long long)mx_kv_token_bytes(spec), (unsigned long long)spec->budget_bytes);
    }
    mx_kv *kv = mx_calloc(1, sizeof *kv);
    kv->backend = b;
    kv->spec = *spec;
    kv->seqs = mx_calloc((size_t)spec->max_seqs, sizeof *kv->seqs);
    mx_status st = MX_OK;
    for (int32_t g = 0; g < spec->n_groups && st == MX_OK; g++) st = open_pool(kv, g, err);
    kv->spec.page_tokens = page_tokens_of(spec);
    for (int32_t g = 0; g < spec->n_groups; g++) {
        const mx_kv_group *x = &spec->groups[g];
        size_t n = 4u * (size_t)x->n_kv_head * (size_t)kv->spec.page_tokens * (size_t)x->head_dim;
        kv->bounce_bytes = MX_MAX(kv->bounce_bytes, n);
    }
    for (int32_t i = 0; i < spec->max_seqs && st == MX_OK; i++) {
        for (int32_t g = 0; g < spec->n_groups; g++) {
            kv->seqs[i].pages[g] = mx_calloc((size_t)kv->pools[g].max_logical, sizeof(int32_t));
        }
    }
    if (st != MX_OK) {
        mx_kv_close(kv);
        return st;
    }
    *out = kv;
    return MX_OK;
}

static void close_pool(mx_kv *kv, int32_t gi) {
    pool *p = &kv->pools[gi];
    for (int32_t i = 0; p->k_buf && i < kv->spec.groups[gi].n_layers; i++) {
        if (p->k_buf[i]) kv->backend->ops->free(kv->backend, p->k_buf[i]);
        if (p->v_buf[i]) kv->backend->ops->free(kv->backend, p->v_buf[i]);
    }
    mx_free(p->k_buf);
    mx_free(p->v_buf);
    mx_free(p->k);
    mx_free(p->v);
    mx_free(p->free_list);
    mx_free(p->refs);
}

void mx_kv_close(mx_kv *kv) {
    if (!kv) return;
    for (int32_t g = 0; g < kv->spec.n_groups; g++) close_pool(kv, g);
    for (int32_t i = 0; i < kv->spec.max_seqs; i++) {
        for (int32_t g = 0; g < kv->spec.n_groups; g++) mx_free(kv->seqs[i].pages[g]);
    }
    mx_free(kv->seqs);
    mx_free(kv->bounce);
    mx_free(kv);
}

const mx_kv_spec *mx_kv_get_spec(const mx_kv *kv) {
    return &kv->spec;
}

void mx_kv_caps(const mx_kv *kv, mx_step_caps *caps) {
    caps->n_groups = kv->spec.n_groups;
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        caps->page_tokens[g] = kv->spec.page_tokens;
        caps->max_pages[g] = kv->pools[g].max_logical;
    }
}

const mx_tensor *mx_kv_k(const mx_kv *kv, int32_t group, int32_t layer) {
    return &kv->pools[group].k[layer];
}

const mx_tensor *mx_kv_v(const mx_kv *kv, int32_t group, int32_t layer) {
    return &kv->pools[group].v[layer];
}

// ---- Pages -----------------------------------------------------------------------------------

static int32_t take_page(pool *p) {
    int32_t page = p->free_list[--p->n_free];
    p->refs[page] = 1;
    return page;
}

void mx_kv_page_ref(mx_kv *kv, int32_t group, int32_t page) {
    CHECK(kv->pools[group].refs[page] > 0);
    kv->pools[group].refs[page]++;
}

int32_t mx_kv_page_refs(const mx_kv *kv, int32_t group, int32_t page) {
    return kv->pools[group].refs[page];
}

void mx_kv_page_unref(mx_kv *kv, int32_t group, int32_t page) {
    pool *p = &kv->pools[group];
    CHECK(p->refs[page] > 0);
    if (--p->refs[page] == 0) p->free_list[p->n_free++] = page;
}

int32_t mx_kv_page(const mx_kv *kv, int32_t id, int32_t group, int32_t i) {
    const seq *s = &kv->seqs[id];
    return i < s->first[group] || i >= s->reserved ? -1 : s->pages[group][i];
}

// ---- Sequences -------------------------------------------------------------------------------

int32_t mx_kv_seq_open(mx_kv *kv) {
    for (int32_t i = 0; i < kv->spec.max_seqs; i++) {
        seq *s = &kv->seqs[i];
        if (s->open) continue;
        s->open = true;
        s->len = s->reserved = 0;
        memset(s->first, 0, sizeof s->first);
        return i;
    }
    return -1;
}

// Drops logical pages [from, to) of group g.
static void drop_pages(mx_kv *kv, seq *s, int32_t g, int32_t from, int32_t to) {
    for (int32_t i = from; i < to; i++) {
        if (s->pages[g][i] >= 0) mx_kv_page_unref(kv, g, s->pages[g][i]);
        s->pages[g][i] = -1;
    }
}

void mx_kv_seq_close(mx_kv *kv, int32_t id) {
    seq *s = &kv->seqs[id];
    CHECK(s->open);
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        drop_pages(kv, s, g, s->first[g], s->reserved);
    }
    s->open = false;
}

int32_t mx_kv_seq_len(const mx_kv *kv, int32_t id) {
    return kv->seqs[id].len;
}

// ---- Copy on write ---------------------------------------------------------------------------

// The page of group g that the next position goes into, when others hold it too; else -1.
static int32_t shared_tail(const mx_kv *kv, const seq *s, int32_t g) {
    int32_t i = s->len / kv->spec.page_tokens;
    if (i >= s->reserved || i < s->first[g] || s->pages[g][i] < 0) return -1;
    return kv->pools[g].refs[s->pages[g][i]] > 1 ? s->pages[g][i] : -1;
}

bool mx_kv_tail_shared(const mx_kv *kv, int32_t id) {
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        if (shared_tail(kv, &kv->seqs[id], g) >= 0) return true;
    }
    return false;
}

static mx_status copy_page(mx_kv *kv, int32_t gi, int32_t from, int32_t to, mx_err *err) {
    const mx_kv_group *g = &kv->spec.groups[gi];
    size_t elem = g->codec == MX_F32 ? 4 : 2;
    size_t n = (size_t)g->n_kv_head * (size_t)kv->spec.page_tokens * (size_t)g->head_dim * elem;
    if (!kv->bounce) kv->bounce = mx_alloc(kv->bounce_bytes);
    CHECK(n <= kv->bounce_bytes);
    const mx_backend_ops *ops = kv->backend->ops;
    for (int32_t il = 0; il < g->n_layers; il++) {
        mx_buffer *bufs[] = {kv->pools[gi].k_buf[il], kv->pools[gi].v_buf[il]};
        for (int i = 0; i < 2; i++) {
            MX_TRY(ops->read(kv->backend, bufs[i], (size_t)from * n, kv->bounce, n, err));
            MX_TRY(ops->write(kv->backend, bufs[i], (size_t)to * n, kv->bounce, n, err));
        }
    }
    return MX_OK;
}

// Gives the sequence a page of its own where it is about to write; there is one free.
static mx_status own_tail(mx_kv *kv, seq *s, int32_t g, mx_err *err) {
    int32_t page = shared_tail(kv, s, g);
    if (page < 0) return MX_OK;
    int32_t own = take_page(&kv->pools[g]);
    mx_status st = copy_page(kv, g, page, own, err);
    mx_kv_page_unref(kv, g, st == MX_OK ? page : own);
    if (st == MX_OK) s->pages[g][s->len / kv->spec.page_tokens] = own;
    return st;
}

mx_status mx_kv_reserve(mx_kv *kv, int32_t id, int32_t new_len, mx_err *err) {
    seq *s = &kv->seqs[id];
    CHECK(s->open);
    if (new_len > kv->spec.max_ctx) {
        return mx_err_set(err, MX_CONTEXT,
                          "request (%d tokens) exceeds the available context size (%d tokens), "
                          "try increasing it",
                          new_len, kv->spec.max_ctx);
    }
    int32_t need = MX_MAX(ceil_div(new_len, kv->spec.page_tokens), s->reserved);
    for (int32_t g = 0; g < kv->spec.n_groups && new_len > s->len; g++) {
        int32_t more = need - s->reserved + (shared_tail(kv, s, g) >= 0);
        if (kv->pools[g].n_free >= more) continue;
        return mx_err_set(err, MX_BUSY, "KV cache: %d pages needed, %d free", more,
                          kv->pools[g].n_free);
    }
    for (int32_t g = 0; g < kv->spec.n_groups && new_len > s->len; g++) {
        MX_TRY(own_tail(kv, s, g, err));
    }
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        for (int32_t i = s->reserved; i < need; i++) s->pages[g][i] = take_page(&kv->pools[g]);
    }
    s->reserved = need;
    return MX_OK;
}

void mx_kv_commit(mx_kv *kv, int32_t id, int32_t len) {
    seq *s = &kv->seqs[id];
    CHECK(s->open && len <= s->reserved * kv->spec.page_tokens);
    s->len = len;
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        int32_t window = kv->spec.groups[g].window;
        if (window == 0) continue;
        // the next query, at position len, sees positions > len - window
        int32_t keep = (len - window + 1) / kv->spec.page_tokens;
        if (len - window + 1 <= 0 || keep <= s->first[g]) continue;
        keep = MX_MIN(keep, s->reserved);
        drop_pages(kv, s, g, s->first[g], keep);
        s->first[g] = keep;
    }
}

bool mx_kv_truncate(mx_kv *kv, int32_t id, int32_t len) {
    seq *s = &kv->seqs[id];
    CHECK(s->open && len >= 0 && len <= s->len);
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        int32_t window = kv->spec.groups[g].window;
        int32_t oldest = window ? MX_MAX(0, len - window + 1) : 0;
        if (s->first[g] > oldest / kv->spec.page_tokens) return false;
    }
    int32_t keep = ceil_div(len, kv->spec.page_tokens);
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        drop_pages(kv, s, g, MX_MAX(keep, s->first[g]), s->reserved);
        s->first[g] = MX_MIN(s->first[g], keep);
    }
    s->reserved = keep;
    s->len = len;
    return true;
}

void mx_kv_fill(const mx_kv *kv, int32_t id, const mx_step_range *r, int32_t range_index,
                const mx_step_caps *caps, mx_step_io *io) {
    const seq *s = &kv->seqs[id];
    int32_t pt = kv->spec.page_tokens;
    CHECK(s->open && r->pos0 + r->n_tok <= s->reserved * pt);
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        for (int32_t i = 0; i < r->n_tok; i++) {
            int32_t pos = r->pos0 + i, page = s->pages[g][pos / pt];
            io->kv_slot[g][r->first + i] = page * pt + pos % pt;
        }
        int32_t *row = io->page_table[g] + (size_t)range_index * (size_t)caps->max_pages[g];
        for (int32_t i = 0; i < s->reserved; i++) row[i] = i < s->first[g] ? -1 : s->pages[g][i];
    }
}

void mx_kv_adopt(mx_kv *kv, int32_t id, const int32_t *const *pages, int32_t n_pages) {
    seq *s = &kv->seqs[id];
    CHECK(s->open && s->len == 0 && s->reserved == 0);
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        int32_t first = 0;
        for (int32_t i = 0; i < n_pages; i++) {
            s->pages[g][i] = pages[g][i];
            if (pages[g][i] >= 0)
                mx_kv_page_ref(kv, g, pages[g][i]);
            else
                first = i + 1;
        }
        s->first[g] = first;
    }
    s->reserved = n_pages;
    s->len = n_pages * kv->spec.page_tokens;
}

bool mx_kv_fork(mx_kv *kv, int32_t src, int32_t dst, int32_t len) {
    const seq *from = &kv->seqs[src];
    seq *to = &kv->seqs[dst];
    CHECK(from->open && to->open && to->reserved == 0 && len >= 0 && len <= from->len);
    if (kv->spec.storage == MX_KV_DENSE) return false;
    int32_t n = ceil_div(len, kv->spec.page_tokens), first[MX_MAX_KV_GROUPS];
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        int32_t window = kv->spec.groups[g].window;
        first[g] = window ? MX_MAX(0, len - window + 1) / kv->spec.page_tokens : 0;
        if (from->first[g] > first[g]) return false;
    }
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        to->first[g] = MX_MIN(first[g], n);
        for (int32_t i = 0; i < n; i++) {
            to->pages[g][i] = i < to->first[g] ? -1 : from->pages[g][i];
            if (to->pages[g][i] >= 0) mx_kv_page_ref(kv, g, to->pages[g][i]);
        }
    }
    to->reserved = n;
    to->len = len;
    return true;
}

void mx_kv_get_stats(const mx_kv *kv, mx_kv_stats *out) {
    *out = (mx_kv_stats){.pool_bytes = mx_kv_pool_bytes(&kv->spec)};
    for (int32_t g = 0; g < kv->spec.n_groups; g++) {
        const pool *p = &kv->pools[g];
        out->n_pages[g] = p->n_pages;
        out->free_pages[g] = p->n_free;
        out->used_bytes += (uint64_t)(p->n_pages - p->n_free) * (uint64_t)kv->spec.page_tokens *
                           group_token_bytes(&kv->spec.groups[g]);
    }
    for (int32_t i = 0; i < kv->spec.max_seqs; i++) out->n_seqs += kv->seqs[i].open;
}
