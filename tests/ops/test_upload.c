// Uploads of the CUDA backend against a driver that is this file: memory, two streams that run
// late, and a "packing kernel" that writes a hash of every raw row it sees. Needs no GPU.
#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

#ifdef MX_TEST_CUDA_HOST
#include "backend/cuda/cuda_int.h"

// ---- The driver --------------------------------------------------------------------------------

enum { MAX_OPS = 20000, MAX_BLOCKS = 400, MAX_EVENTS = 200 };

typedef struct event {
    uint64_t recorded, done; // serial numbers of records
    bool live;
} event;

typedef enum op_kind { OP_COPY, OP_RECORD, OP_WAIT, OP_PACK } op_kind;

typedef struct op {
    op_kind kind;
    uint8_t *dst;
    const uint8_t *src;
    size_t n;
    event *ev;
    uint64_t serial;
    k_pack pack;
} op;

typedef struct stream {
    op ops[MAX_OPS];
    size_t n, run;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream streams[2];
static event events[MAX_EVENTS];
static struct {
    uint8_t *p;
    size_t n;
} blocks[MAX_BLOCKS];
static size_t n_blocks;
static uint8_t *pinned; // registered memory
static size_t n_pinned;
static int n_calls, fail_call; // the call that fails, from 1; 0: none
static const char *failed;     // its name

static bool fails(const char *name) {
    if (++n_calls != fail_call) return false;
    failed = name;
    return true;
}

static bool in_block(const void *p, size_t n) {
    const uint8_t *q = p;
    for (size_t i = 0; i < n_blocks; i++) {
        if (q >= blocks[i].p && n <= blocks[i].n && q - blocks[i].p <= (long)(blocks[i].n - n))
            return true;
    }
    return false;
}

static uint64_t hash_bytes(uint64_t h, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    return h;
}

static const uint64_t hash_seed = 0xcbf29ce484222325ull;

static uint8_t *host(CUdeviceptr p) {
    return (uint8_t *)(uintptr_t)p;
}

// Row r's hash lies at the beginning of its strip, r % 16 words in.
static void run_pack(const k_pack *a) {
    int64_t strips = (a->n_rows + 15) / 16;
    size_t strip_bytes = (size_t)(a->n_words * 4 / strips);
    assert_true(in_block(host(a->data), (size_t)(a->n_rows * a->row_bytes)));
    assert_true(in_block(host(a->out), (size_t)a->n_words * 4));
    for (int64_t r = 0; r < a->n_rows; r++) {
        uint64_t h = hash_bytes(hash_seed, host(a->data) + r * a->row_bytes, (size_t)a->row_bytes);
        size_t s = (size_t)a->scale_row_bytes;
        h = hash_bytes(h, host(a->scales) + (size_t)r * s, s);
        h = hash_bytes(h, host(a->biases) + (size_t)r * s, s);
        memcpy(host(a->out) + (size_t)(r / 16) * strip_bytes + (size_t)(r % 16) * 8, &h, 8);
    }
}

// One op of the stream, when it may run.
static bool run_one(stream *s) {
    if (s->run == s->n) return false;
    op *o = &s->ops[s->run];
    if (o->kind == OP_WAIT && o->ev->done < o->serial) return false;
    if (o->kind == OP_COPY) {
        assert_true(in_block(o->dst, o->n));
        memcpy(o->dst, o->src, o->n);
    }
    if (o->kind == OP_PACK) run_pack(&o->pack);
    if (o->kind == OP_RECORD) o->ev->done = MX_MAX(o->ev->done, o->serial);
    s->run++;
    return true;
}

static void run_stream(stream *s) {
    while (s->run < s->n) {
        if (!run_one(s)) assert_true(run_one(&streams[s == streams])); // else a deadlock
    }
}

static stream *stream_of(CUstream s) {
    return &streams[(uintptr_t)s - 1];
}

static op *push(CUstream s, op_kind kind) {
    stream *t = stream_of(s);
    assert_true(t->n < MAX_OPS);
    t->ops[t->n] = (op){.kind = kind};
    return &t->ops[t->n++];
}

#define BEGIN(name)                                                                                \
    pthread_mutex_lock(&lock);                                                                     \
    if (fails(name)) {                                                                             \
        pthread_mutex_unlock(&lock);                                                               \
        return CUDA_ERROR_UNKNOWN;                                                                 \
    }
#define END                                                                                        \
    pthread_mutex_unlock(&lock);                                                                   \
    return CUDA_SUCCESS

static CUresult CUDAAPI set_current(CUcontext c) {
    (void)c;
    BEGIN("cuCtxSetCurrent");
    END;
}

static CUresult CUDAAPI mem_alloc(CUdeviceptr *p, size_t n) {
    pthread_mutex_lock(&lock);
    bool bad = fails("cuMemAlloc");
    if (!bad) {
        assert_true(n_blocks < MAX_BLOCKS);
        uint8_t *q = calloc(1, n);
        assert_non_null(q);
        blocks[n_blocks].p = q;
        blocks[n_blocks++].n = n;
        *p = (CUdeviceptr)(uintptr_t)q;
    }
    pthread_mutex_unlock(&lock);
    return bad ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_free(CUdeviceptr p) {
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (i < n_blocks && blocks[i].p != host(p)) i++;
    assert_true(i < n_blocks);
    for (int s = 0; s < 2; s++) run_stream(&streams[s]); // as the driver does
    free(blocks[i].p);
    blocks[i] = blocks[--n_blocks];
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_info(size_t *a, size_t *b) {
    *a = *b = 1;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI host_register(void *p, size_t n, unsigned flags) {
    (void)flags;
    BEGIN("cuMemHostRegister");
    assert_null(pinned);
    pinned = p;
    n_pinned = n;
    END;
}

static CUresult CUDAAPI host_unregister(void *p) {
    pthread_mutex_lock(&lock);
    assert_ptr_equal(p, pinned);
    pinned = NULL;
    END;
}

static CUresult CUDAAPI copy_in(CUdeviceptr dst, const void *src, size_t n, CUstream s) {
    BEGIN("cuMemcpyHtoDAsync");
    op *o = push(s, OP_COPY);
    o->dst = host(dst);
    o->src = src;
    o->n = n;
    const uint8_t *q = src;
    if (!pinned || q < pinned || q >= pinned + n_pinned) run_stream(stream_of(s)); // pageable
    END;
}

static CUresult CUDAAPI stream_sync(CUstream s) {
    BEGIN("cuStreamSynchronize");
    run_stream(stream_of(s));
    END;
}

static CUresult CUDAAPI stream_wait(CUstream s, CUevent e, unsigned flags) {
    (void)flags;
    BEGIN("cuStreamWaitEvent");
    event *ev = (event *)(void *)e;
    assert_true(ev->live);
    op *o = push(s, OP_WAIT);
    o->ev = ev;
    o->serial = ev->recorded;
    END;
}

static CUresult CUDAAPI event_create(CUevent *e, unsigned flags) {
    (void)flags;
    BEGIN("cuEventCreate");
    size_t i = 0;
    while (i < MAX_EVENTS && events[i].live) i++;
    assert_true(i < MAX_EVENTS);
    events[i] = (event){.live = true};
    *e = (CUevent)(void *)&events[i];
    END;
}

static CUresult CUDAAPI event_destroy(CUevent e) {
    pthread_mutex_lock(&lock);
    event *ev = (event *)(void *)e;
    assert_true(ev->live && ev->done == ev->recorded);
    ev->live = false;
    END;
}

static CUresult CUDAAPI event_record(CUevent e, CUstream s) {
    BEGIN("cuEventRecord");
    op *o = push(s, OP_RECORD);
    o->ev = (event *)(void *)e;
    o->serial = ++o->ev->recorded;
    END;
}

// Both streams move on by at most one op, so that transfers end late.
static CUresult CUDAAPI event_query(CUevent e) {
    pthread_mutex_lock(&lock);
    event *ev = (event *)(void *)e;
    bool done = ev->done == ev->recorded;
    if (!done) {
        bool moved = run_one(&streams[1]);
        assert_true(run_one(&streams[0]) || moved || ev->done == ev->recorded);
    }
    pthread_mutex_unlock(&lock);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult CUDAAPI launch(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    (void)f, (void)extra;
    BEGIN("cuLaunchKernelEx");
    op *o = push(c->hStream, OP_PACK);
    memcpy(&o->pack, params[0], sizeof o->pack);
    END;
}

static CUresult CUDAAPI error_text(CUresult r, const char **text) {
    (void)r;
    *text = "made up";
    return CUDA_SUCCESS;
}

static void install_driver(void) {
    cuda_d.cuCtxSetCurrent = set_current;
    cuda_d.cuMemAlloc = mem_alloc;
    cuda_d.cuMemFree = mem_free;
    cuda_d.cuMemGetInfo = mem_info;
    cuda_d.cuMemHostRegister = host_register;
    cuda_d.cuMemHostUnregister = host_unregister;
    cuda_d.cuMemcpyHtoDAsync = copy_in;
    cuda_d.cuStreamSynchronize = stream_sync;
    cuda_d.cuStreamWaitEvent = stream_wait;
    cuda_d.cuEventCreate = event_create;
    cuda_d.cuEventDestroy = event_destroy;
    cuda_d.cuEventRecord = event_record;
    cuda_d.cuEventQuery = event_query;
    cuda_d.cuLaunchKernelEx = launch;
    cuda_d.cuGetErrorName = error_text;
    cuda_d.cuGetErrorString = error_text;
}

// ---- Weights -----------------------------------------------------------------------------------

enum { FILE_BYTES = 3 << 20, N_WEIGHTS = 60, PAIRS = 32 };

typedef struct rig {
    cuda_backend *b;
    uint8_t *bytes; // of the file
    mx_file file;
    char path[64];
    mx_wview view[N_WEIGHTS];
    mx_tensor t[N_WEIGHTS];
} rig;

static uint64_t seed;
static size_t random_below(size_t n) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (size_t)(seed >> 33) % n;
}

// A weight whose planes are somewhere in the file (or in its copy in memory).
static mx_wview random_view(const rig *r, int i) {
    static const mx_wfmt formats[] = {{MX_BF16, 0, 0, 0}, {MX_AFFINE, 4, 64, MX_BF16},
                                      {MX_Q4_1, 0, 0, 0}, {MX_F32, 0, 0, 0},
                                      {MX_Q6_K, 0, 0, 0}, {MX_AFFINE, 3, 64, MX_F16}};
    bool vector = i % 6 == 5, file = i % 7 != 6;
    mx_wview v = {.fmt = vector ? mx_wfmt_of(MX_F32) : formats[random_below(MX_COUNT(formats))],
                  .n_rows = vector ? 1 : (int64_t)random_below(5) * 64 + 64,
                  .n_cols = (int64_t)(random_below(4) + 1) * 256};
    if (!vector && i % 3 == 0) v.n_rows -= (int64_t)random_below(30);
    if (!vector && i % 4 == 0) v.pairs = PAIRS, v.n_rows = (v.n_rows + 31) / 32 * 32;
    const uint8_t *base = file ? r->file.data : r->bytes;
    v.data = base + random_below(FILE_BYTES / 2) / 4 * 4;
    v.scales = base + random_below(FILE_BYTES / 2);
    v.biases = base + random_below(FILE_BYTES / 2);
    if (file) v.files = &r->file, v.n_files = 1;
    return v;
}

static rig *rig_open(uint64_t s) {
    rig *r = mx_calloc(1, sizeof *r);
    mx_err e = {0};
    install_driver();
    memset(streams, 0, sizeof streams);
    n_calls = fail_call = 0;
    failed = NULL;
    seed = s;
    r->bytes = mx_alloc(FILE_BYTES);
    for (size_t i = 0; i < FILE_BYTES / 4; i++) { // floats near 1, for the vectors
        float f = (float)random_below(1000) * 0.001f;
        memcpy(r->bytes + i * 4, &f, 4);
    }
    const char *folder = getenv("TMPDIR");
    snprintf(r->path, sizeof r->path, "%s/mlxcel-upload-%ld", folder ? folder : "/tmp",
             (long)getpid());
    FILE *f = fopen(r->path, "wb");
    assert_true(f && fwrite(r->bytes, 1, FILE_BYTES, f) == FILE_BYTES && fclose(f) == 0);
    assert_int_equal(mx_file_open(&r->file, r->path, &e), MX_OK);
    cuda_backend *b = r->b = mx_calloc(1, sizeof *b);
    b->stream = (CUstream)(uintptr_t)1;
    b->copy = (CUstream)(uintptr_t)2;
    b->n_sm = 4;
    for (int k = 0; k < CK_COUNT; k++) b->fn[0][k] = (CUfunction)(uintptr_t)(k + 1);
    b->count.pinned = true;
    b->ring_shape = (mx_feed_shape){.n_readers = 5, .n_slots = 7, .slot_bytes = 16384};
    b->stage_bytes = 300000;
    for (int i = 0; i < N_WEIGHTS; i++) r->view[i] = random_view(r, i);
    return r;
}

static mx_status load(rig *r, mx_err *err) {
    for (int i = 0; i < N_WEIGHTS; i++) {
        MX_TRY(cuda_upload(&r->b->base, &r->t[i], &r->view[i], err));
    }
    return cuda_upload_end(&r->b->base, err);
}

static void drop(rig *r) {
    for (int i = 0; i < N_WEIGHTS; i++) {
        cuda_free(&r->b->base, r->t[i].buf);
        r->t[i] = (mx_tensor){0};
    }
}

static void rig_close(rig *r) {
    cuda_ring_close(r->b);
    cuda_stage_free(r->b);
    assert_int_equal(n_blocks, 0);
    assert_null(pinned);
    for (int i = 0; i < MAX_EVENTS; i++) assert_false(events[i].live);
    mx_file_close(&r->file);
    unlink(r->path);
    mx_free(r->b);
    mx_free(r->bytes);
    mx_free(r);
}

// Of plane `src` with rows of n bytes, where row r of the weight is stored.
static const uint8_t *stored_row(const mx_wview *v, const void *src, size_t n, int64_t r) {
    int64_t in = v->pairs ? r % v->pairs : 0, half = v->pairs / 2, from = r;
    if (v->pairs) from = r - in + (in < half ? 2 * in : 2 * (in - half) + 1);
    return (const uint8_t *)src + (size_t)from * n;
}

static void check_weight(const mx_wview *v, const mx_tensor *t) {
    size_t code, all;
    assert_true(mx_wfmt_code_bytes(v->fmt, v->n_cols, &code) &&
                mx_wfmt_row_bytes(v->fmt, v->n_cols, &all));
    size_t scale = v->fmt.dtype == MX_AFFINE ? (all - code) / 2 : 0;
    const uint8_t *got = host(t->buf->device);
    if (v->n_rows == 1) {
        assert_memory_equal(got, v->data, code);
        return;
    }
    size_t strip = t->layout == MX_LAYOUT_PACKED ? t->n_bytes / (size_t)((v->n_rows + 15) / 16) : 0;
    for (int64_t r = 0; r < v->n_rows; r++) {
        const uint8_t *d = stored_row(v, v->data, code, r);
        const uint8_t *s = stored_row(v, v->scales, scale, r);
        const uint8_t *b = stored_row(v, v->biases, scale, r);
        if (strip) {
            uint64_t h = hash_bytes(hash_seed, d, code), have;
            h = hash_bytes(hash_bytes(h, s, scale), b, scale);
            memcpy(&have, got + (size_t)(r / 16) * strip + (size_t)(r % 16) * 8, 8);
            assert_true(h == have);
        } else {
            assert_memory_equal(got + (size_t)r * code, d, code);
            assert_memory_equal(got + t->scales_offset + (size_t)r * scale, s, scale);
            assert_memory_equal(got + t->biases_offset + (size_t)r * scale, b, scale);
        }
    }
}

// ---- Tests -------------------------------------------------------------------------------------

static void every_weight_arrives(void **state) {
    (void)state;
    for (int k = 0; k < 6; k++) {
        rig *r = rig_open((uint64_t)k + 1);
        mx_err e = {0};
        if (k == 4) r->b->ring_shape = (mx_feed_shape){1, 2, 8192};
        if (k == 5) { // the pageable path takes no views of files and no pairs
            r->b->count.pinned = false;
            for (int i = 0; i < N_WEIGHTS; i++) r->view[i].pairs = 0;
        }
        mx_status st = load(r, &e);
        if (st != MX_OK) fail_msg("%s", e.msg);
        for (int i = 0; i < N_WEIGHTS; i++) check_weight(&r->view[i], &r->t[i]);
        mx_cuda_counters c = r->b->count;
        cuda_ring_count(r->b, &c);
        assert_int_equal(c.uploads, N_WEIGHTS);
        assert_true(c.upload_bytes > 1000000);
        drop(r);
        rig_close(r);
    }
}

// After upload has returned, bytes of memory are not read any more.
static void memory_is_read_before_upload_returns(void **state) {
    (void)state;
    rig *r = rig_open(3);
    mx_err e = {0};
    size_t n = 64 * 512 * 2;
    uint8_t *mine = mx_alloc(n), *copy = mx_alloc(n);
    for (size_t i = 0; i < n; i++) mine[i] = copy[i] = (uint8_t)random_below(256);
    mx_wview v = {.fmt = mx_wfmt_of(MX_BF16), .n_rows = 64, .n_cols = 512, .data = mine};
    assert_int_equal(cuda_upload(&r->b->base, &r->t[0], &v, &e), MX_OK);
    memset(mine, 0, n);
    assert_int_equal(cuda_upload_end(&r->b->base, &e), MX_OK);
    v.data = copy;
    check_weight(&v, &r->t[0]);
    drop(r);
    mx_free(mine);
    mx_free(copy);
    rig_close(r);
}

static void the_ring_fits_the_load(void **state) {
    (void)state;
    static const struct {
        uint64_t n_bytes;
        size_t row, slot;
    } cases[] = {
        {1000, 1000, 256 << 10},                  // the least
        {84000000, 2000, 512 << 10},              // a small model: a quarter of it at most
        {84000000, 600000, 768 << 10},            // a slot holds a row
        {512u << 20, 1000, 4 << 20},              // from here on all of it
        {16ull << 30, 1000, 4 << 20},             //
        {1000, (size_t)64 << 20, (size_t)4 << 20} // rows may be cut
    };
    mx_feed_shape most = {.n_readers = 12, .n_slots = 32, .slot_bytes = 4 << 20};
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        mx_feed_shape s = cuda_ring_fit(&most, cases[i].n_bytes, cases[i].row);
        assert_int_equal(s.slot_bytes, cases[i].slot);
        assert_true(s.n_slots == 32 && s.n_readers == 12);
    }
}

// A weight that the ring is too small for comes after others that are under way: all arrive.
static void the_ring_grows(void **state) {
    (void)state;
    rig *r = rig_open(4);
    r->b->ring_shape.slot_bytes = 4 << 20;
    mx_err e = {0};
    int n = 10;
    for (int i = 0; i < n; i++) {
        if (i == 5) {
            r->view[i] = (mx_wview){.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = 75000};
            r->view[i].data = r->bytes;
        }
        assert_int_equal(cuda_upload(&r->b->base, &r->t[i], &r->view[i], &e), MX_OK);
        assert_int_equal(cuda_ring_slot_bytes(r->b), i < 5 ? 256 << 10 : 512 << 10);
    }
    assert_int_equal(cuda_upload_end(&r->b->base, &e), MX_OK);
    assert_null(r->b->stage); // given back
    for (int i = 0; i < n; i++) check_weight(&r->view[i], &r->t[i]);
    drop(r);
    rig_close(r);
}

// MLXCEL_WEIGHT_MATERIALIZATION=lazy: weights come in rounds, at the first step that needs them; a
// plan is made after each, which gives the ring back.
static void weights_come_lazily(void **state) {
    (void)state;
    rig *r = rig_open(6);
    mx_err e = {0};
    for (int first = 0, n; first < N_WEIGHTS; first += n) {
        n = MX_MIN(7, N_WEIGHTS - first);
        for (int i = first; i < first + n; i++) {
            assert_int_equal(cuda_upload(&r->b->base, &r->t[i], &r->view[i], &e), MX_OK);
        }
        assert_int_equal(cuda_upload_end(&r->b->base, &e), MX_OK);
        for (int i = 0; i < first + n; i++) check_weight(&r->view[i], &r->t[i]);
        if (first % 2 == 0) assert_int_equal(cuda_upload_close(r->b, &e), MX_OK);
        if (first % 2 == 0) assert_true(!pinned && !r->b->ring && !r->b->stage);
    }
    mx_cuda_counters c = r->b->count;
    cuda_ring_count(r->b, &c);
    assert_int_equal(c.uploads, N_WEIGHTS); // counters go on over rounds
    assert_true(c.upload_bytes > 1000000);
    drop(r);
    rig_close(r);
}

// The k-th call of the driver fails, for every k: an error with a message, no leak, no hang, and
// the next load is complete.
static void a_failed_call_is_an_error_and_leaves_nothing(void **state) {
    (void)state;
    int k = 1, step = 1;
    for (; k < 100000; k += step) {
        rig *r = rig_open(9);
        mx_err e = {0};
        fail_call = k;
        mx_status st = load(r, &e);
        fail_call = 0;
        if (!failed) { // there are not so many calls
            assert_int_equal(st, MX_OK);
            drop(r);
            rig_close(r);
            break;
        }
        if (st == MX_OK) fail_msg("call %d, %s, failed unseen", k, failed);
        assert_true(e.status == st && e.msg[0]);
        assert_int_equal(st, strcmp(failed, "cuMemAlloc") == 0 ? MX_NOMEM : MX_DEVICE);
        drop(r);
        cuda_upload_end(&r->b->base, &e); // takes back what it still had to say
        st = load(r, &e);
        if (st != MX_OK) fail_msg("after call %d, %s: %s", k, failed, e.msg);
        for (int i = 0; i < N_WEIGHTS; i++) check_weight(&r->view[i], &r->t[i]);
        drop(r);
        rig_close(r);
        step = MX_TEST_SLOW > 1 ? 19 : k < 100 ? 1 : 37;
    }
    assert_true(k > 200);
}

static void a_file_that_became_shorter_is_an_error(void **state) {
    (void)state;
    rig *r = rig_open(5);
    mx_err e = {0};
    assert_int_equal(truncate(r->path, 4096), 0);
    assert_int_equal(load(r, &e), MX_IO);
    assert_non_null(strstr(e.msg, "became shorter"));
    drop(r);
    rig_close(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_weight_arrives),
        cmocka_unit_test(memory_is_read_before_upload_returns),
        cmocka_unit_test(the_ring_fits_the_load),
        cmocka_unit_test(the_ring_grows),
        cmocka_unit_test(weights_come_lazily),
        cmocka_unit_test(a_failed_call_is_an_error_and_leaves_nothing),
        cmocka_unit_test(a_file_that_became_shorter_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void uploads(void **state) {
    (void)state;
    printf("skip: built without CUDA\n");
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(uploads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
