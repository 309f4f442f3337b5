// Sequence memory: pools of pages per layer group, sequences as page tables.
//
// A sequence owns one page table per layer group (full attention, sliding window), each group with
// its codec. A page holds page_tokens positions of one layer group, in every layer of the group:
// state tensors have the shape (n_pages, n_kv_head, page_tokens, head_dim). Dense storage is the
// same thing with one page as long as the context, so kernels know one form only.
#ifndef MX_KV_KV_H
#define MX_KV_KV_H

#include "backend/backend.h"

typedef struct mx_kv mx_kv;

typedef enum mx_kv_storage { MX_KV_PAGED, MX_KV_DENSE } mx_kv_storage;

typedef struct mx_kv_group {
    int32_t n_layers, n_kv_head, head_dim;
    int32_t window; // 0 = full; pages wholly behind the window are given back
    mx_dtype codec; // F16 or F32
} mx_kv_group;

typedef struct mx_kv_spec {
    mx_kv_group groups[MX_MAX_KV_GROUPS];
    int32_t n_groups;
    mx_kv_storage storage;
    int32_t page_tokens;   // paged; a power of two (32)
    int32_t max_ctx;       // positions of one sequence
    int32_t max_seqs;      // sequences at once
    int32_t max_chunk;     // rows that one sequence may add in a step
    uint64_t cache_bytes;  // room for shared pages beyond the sequences' own
    uint64_t budget_bytes; // 0 = room for max_seqs full contexts; else the pool is cut to it
} mx_kv_spec;

// The storage for a word: "paged", "dense", or "auto": paged for several sequences or when prefixes
// are shared, if the family can. *declined: paged was asked for by name and cannot be had. False:
// another word.
bool mx_kv_choose(const char *word, bool several, bool shared, bool can_page, mx_kv_storage *out,
                  bool *declined);

// Bytes that one position costs while every group keeps it, and the pool's whole size.
uint64_t mx_kv_token_bytes(const mx_kv_spec *spec);
uint64_t mx_kv_pool_bytes(const mx_kv_spec *spec);

// Allocates the pool. NOMEM (with the arithmetic) when the budget does not hold one context.
mx_status mx_kv_open(mx_kv **kv, mx_backend *b, const mx_kv_spec *spec, mx_err *err);
void mx_kv_close(mx_kv *kv);
const mx_kv_spec *mx_kv_get_spec(const mx_kv *kv); // page_tokens resolved (dense: the context)
// Fills the group fields of step caps.
void mx_kv_caps(const mx_kv *kv, mx_step_caps *caps);

// State tensors of one layer of a group; valid while kv is open.
const mx_tensor *mx_kv_k(const mx_kv *kv, int32_t group, int32_t layer);
const mx_tensor *mx_kv_v(const mx_kv *kv, int32_t group, int32_t layer);

// A new, empty sequence: its id, or -1 when max_seqs are open.
int32_t mx_kv_seq_open(mx_kv *kv);
void mx_kv_seq_close(mx_kv *kv, int32_t seq);
int32_t mx_kv_seq_len(const mx_kv *kv, int32_t seq);
// Makes room for positions up to new_len (exclusive), in pages of its own from the present length
// on. BUSY when the pool is empty: nothing was taken then. CONTEXT when new_len > max_ctx.
mx_status mx_kv_reserve(mx_kv *kv, int32_t seq, int32_t new_len, mx_err *err);
// The sequence now holds len positions (<= reserved). Gives back pages behind windows.
void mx_kv_commit(mx_kv *kv, int32_t seq, int32_t len);
// Takes back positions >= len (a row found finished, a rejected draft). Window groups can only go
// back by what they still hold: false when they cannot, and nothing changes.
bool mx_kv_truncate(mx_kv *kv, int32_t seq, int32_t len);
// Writes kv_slot of rows [first, first + n_tok) and the page-table row of a range into io.
void mx_kv_fill(const mx_kv *kv, int32_t seq, const mx_step_range *range, int32_t range_index,
                const mx_step_caps *caps, mx_step_io *io);

// Sharing. Pages are reference-counted; a page that others hold too is copied before it is written
// to (mx_kv_reserve).
// Page of logical page i in a group, or -1 when dropped or absent.
int32_t mx_kv_page(const mx_kv *kv, int32_t seq, int32_t group, int32_t i);
void mx_kv_page_ref(mx_kv *kv, int32_t group, int32_t page);
int32_t mx_kv_page_refs(const mx_kv *kv, int32_t group, int32_t page);
void mx_kv_page_unref(mx_kv *kv, int32_t group, int32_t page);
// Starts an empty sequence from shared pages: for each group, pages[g][0..n_pages) (entries -1
// where a window has passed); each gets a reference. Length becomes n_pages * page_tokens.
void mx_kv_adopt(mx_kv *kv, int32_t seq, const int32_t *const *pages, int32_t n_pages);

// Starts the empty sequence dst from the first len positions of src, the page that len is within
// included. False, and nothing changed: dense storage, or a window of src has passed some of them.
bool mx_kv_fork(mx_kv *kv, int32_t src, int32_t dst, int32_t len);
// True when the next position goes into a page that others hold too: reserving takes a page more.
bool mx_kv_tail_shared(const mx_kv *kv, int32_t seq);

typedef struct mx_kv_stats {
    int32_t n_pages[MX_MAX_KV_GROUPS], free_pages[MX_MAX_KV_GROUPS];
    int32_t n_seqs;
    uint64_t pool_bytes, used_bytes;
} mx_kv_stats;
void mx_kv_get_stats(const mx_kv *kv, mx_kv_stats *out);

#endif
