// Plans and steps: op lists become launches, decode plans become one graph a command buffer,
// steps run on one stream.
//
// A plan's launches are made once, against fixed addresses. Decode plans are captured into graphs
// with programmatic edges and replayed with no update. Prefill plans are launched one by one (their
// kernels are long). The head of a step copies the slot's host inputs into the one device block,
// the tail copies ids and logprobs back; all in stream order, so a slot may be filled while the
// step before runs. Owns the step block, slots and events.
#include "backend/cuda/cuda_int.h"

#include <string.h>

typedef struct cuda_plan {
    cuda_list list;
    int32_t *seg_first;  // (n_segs + 1) first item of each segment
    CUgraphExec *graphs; // NULL: launched one by one
    int32_t *seg_graph;  // (n_segs + 1) first graph of each segment
    int32_t n_segs, n_graphs;
} cuda_plan;

// A command buffer is launched as graphs of at most this many kernels, without a wait between: on
// an H200 a chain of 3,200 kernels takes 3.02 ms as one graph, 2.78 ms as 32.
enum { GRAPH_KERNELS = 100 };

mx_status cuda_run_item(cuda_backend *b, const cuda_item *it, const uint8_t *blob, bool overlap,
                        mx_err *err) {
    if (it->kind == CUDA_ITEM_LT) {
        cuda_lt_args a;
        memcpy(&a, blob + it->arg_offset, sizeof(a));
        return cuda_lt_run(b->lt, &a, b->stream, err);
    }
    CUlaunchAttribute at[2];
    uint32_t n_at = 0;
    if (overlap && b->overlap) {
        at[n_at].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        at[n_at++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (it->cluster > 1) {
        at[n_at].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        at[n_at].value.clusterDim.x = it->cluster;
        at[n_at].value.clusterDim.y = at[n_at].value.clusterDim.z = 1;
        n_at++;
    }
    CUlaunchConfig c = {.gridDimX = it->grid[0],
                        .gridDimY = it->grid[1],
                        .gridDimZ = it->grid[2],
                        .blockDimX = it->block,
                        .blockDimY = 1,
                        .blockDimZ = 1,
                        .sharedMemBytes = it->smem,
                        .hStream = b->stream,
                        .attrs = at,
                        .numAttrs = n_at};
    void *params[1];
    const void *arg = blob + it->arg_offset;
    memcpy(&params[0], &arg, sizeof(arg));
    b->count.kernel_launches++;
    return cuda_check(cuda_d.cuLaunchKernelEx(&c, it->fn, params, NULL), err, "kernel launch");
}

// Scratch of at least n bytes; earlier blocks stay, for earlier plans.
static mx_status scratch_of(cuda_backend *b, size_t n, CUdeviceptr *out, mx_err *err) {
    if (!b->scratch || b->scratch->n_bytes < n) {
        size_t size = MX_MAX(n, (size_t)1 << 20);
        CUdeviceptr p = 0;
        MX_TRY(cuda_take(b, size, &p, err));
        cuda_scratch *s = mx_alloc(sizeof(*s));
        *s = (cuda_scratch){.next = b->scratch, .base = p, .n_bytes = size};
        b->scratch = s;
    }
    *out = b->scratch->base;
    return MX_OK;
}

// A block that older plans use: freed when the backend is closed.
static void keep_block(cuda_backend *b, CUdeviceptr p) {
    cuda_scratch *s = mx_alloc(sizeof(*s)), **tail = &b->scratch;
    *s = (cuda_scratch){.base = p};
    while (*tail) tail = &(*tail)->next;
    *tail = s;
}

static mx_status tickets_of(cuda_backend *b, size_t n, CUdeviceptr *out, mx_err *err) {
    if (b->n_tickets < n) { // the old block joins the scratch list: older plans use it
        size_t size = MX_MAX(n * 4, (size_t)65536);
        CUdeviceptr p = 0;
        MX_TRY(cuda_take(b, size, &p, err));
        CUresult r = cuda_d.cuMemsetD8Async(p, 0, size, b->stream);
        if (r == CUDA_SUCCESS) r = cuda_d.cuStreamSynchronize(b->stream);
        if (r != CUDA_SUCCESS) cuda_d.cuMemFree(p);
        MX_TRY(cuda_check(r, err, "clearing memory"));
        if (b->tickets) keep_block(b, b->tickets);
        b->tickets = p;
        b->n_tickets = size / 4;
    }
    *out = b->tickets;
    return MX_OK;
}

static void lower_all(cuda_backend *b, const mx_plan *plan, CUdeviceptr arena, cuda_plan *p) {
    p->list.n_items = 0;
    p->list.n_blob = 0;
    memset(p->list.slow, 0, sizeof(p->list.slow));
    for (int32_t s = 0; s < plan->n_segs; s++) {
        p->seg_first[s] = p->list.n_items;
        int32_t i = plan->segs[s].first, end = i + plan->segs[s].n;
        while (i < end) {
            int32_t n = cuda_lower_turned(b, plan, i, end, arena, &p->list);
            if (n == 0) cuda_lower(b, plan, &plan->ops[i], arena, &p->list);
            i += MX_MAX(n, 1);
        }
    }
    p->seg_first[plan->n_segs] = p->list.n_items;
}

// Kernel numbers to functions, and their shared-memory limits.
static mx_status resolve(cuda_backend *b, cuda_list *l, mx_err *err) {
    for (int32_t i = 0; i < l->n_items; i++) {
        cuda_item *it = &l->items[i];
        if (it->kind != CUDA_ITEM_KERNEL) continue;
        MX_TRY(cuda_kernel_get(b, it->kernel, it->apart, &it->fn, err));
        int32_t *most = &b->fn_smem[it->apart][it->kernel];
        if ((int32_t)it->smem > *most) { // unasked, 48 KB with the static ones
            CUDA_TRY(cuda_d.cuFuncSetAttribute(
                         it->fn, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)it->smem),
                     err);
            *most = (int32_t)it->smem;
        }
    }
    return MX_OK;
}

static mx_status run_items(cuda_backend *b, const cuda_plan *p, int32_t first, int32_t end,
                           mx_err *err) {
    for (int32_t i = first; i < end; i++) {
        const cuda_item *it = &p->list.items[i];
        bool overlap = i > first && p->list.items[i - 1].kind == CUDA_ITEM_KERNEL;
        MX_TRY(cuda_run_item(b, it, p->list.blob, overlap, err));
    }
    return MX_OK;
}

static mx_status make_graph(cuda_backend *b, const cuda_plan *p, int32_t first, int32_t end,
                            CUgraphExec *out, mx_err *err) {
    CUgraph g = NULL;
    CUDA_TRY(cuda_d.cuStreamBeginCapture(b->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), err);
    mx_status s = run_items(b, p, first, end, err);
    CUresult r = cuda_d.cuStreamEndCapture(b->stream, &g);
    if (s == MX_OK) s = cuda_check(r, err, "graph capture");
    if (s == MX_OK) s = cuda_check(cuda_d.cuGraphInstantiateWithFlags(out, g, 0), err, "graph");
    if (g) cuda_d.cuGraphDestroy(g);
    MX_TRY(s);
    r = cuda_d.cuGraphUpload(*out, b->stream);
    if (r != CUDA_SUCCESS) cuda_d.cuGraphExecDestroy(*out);
    MX_TRY(cuda_check(r, err, "graph upload"));
    b->count.graphs_made++;
    return MX_OK;
}

static mx_status make_graphs(cuda_backend *b, cuda_plan *p, mx_err *err) {
    int32_t most = p->list.n_items / GRAPH_KERNELS + p->n_segs;
    p->graphs = mx_calloc((size_t)most, sizeof(*p->graphs));
    p->seg_graph = mx_calloc((size_t)p->n_segs + 1, sizeof(*p->seg_graph));
    for (int32_t s = 0; s < p->n_segs; s++) {
        p->seg_graph[s] = p->n_graphs;
        int32_t end = p->seg_first[s + 1];
        for (int32_t i = p->seg_first[s]; i < end; i += GRAPH_KERNELS) {
            CHECK(p->n_graphs < most);
            int32_t to = MX_MIN(i + GRAPH_KERNELS, end);
            MX_TRY(make_graph(b, p, i, to, &p->graphs[p->n_graphs], err));
            p->n_graphs++;
        }
    }
    p->seg_graph[p->n_segs] = p->n_graphs;
    return MX_OK;
}

static mx_status plan_build(cuda_backend *b, const mx_plan *plan, CUdeviceptr arena, cuda_plan *p,
                            mx_err *err) {
    cuda_list *l = &p->list;
    lower_all(b, plan, arena, p); // finds what is needed
    MX_TRY(scratch_of(b, l->scratch_bytes, &l->scratch, err));
    MX_TRY(tickets_of(b, l->n_tickets, &l->tickets, err));
    lower_all(b, plan, arena, p);
    MX_TRY(resolve(b, l, err));
    if (plan->phase == MX_PHASE_PREFILL || !b->graphs) return MX_OK;
    return make_graphs(b, p, err);
}

mx_status cuda_plan_make(mx_backend *base, mx_plan *plan, mx_buffer *arena, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CHECK(b->step);
    CUDA_TRY(cuda_use(b), err);
    MX_TRY(cuda_upload_close(b, err));
    cuda_plan *p = mx_calloc(1, sizeof(*p));
    p->n_segs = plan->n_segs;
    p->seg_first = mx_calloc((size_t)plan->n_segs + 1, sizeof(*p->seg_first));
    plan->handle = p;
    mx_status s = plan_build(b, plan, arena ? arena->device : 0, p, err);
    p->list.slow[MX_SLOW_NO_GRAPHS] = plan->phase != MX_PHASE_PREFILL && !b->graphs;
    for (int i = 0; i < MX_SLOW_COUNT; i++) plan->slow[i] += p->list.slow[i];
    if (s != MX_OK) cuda_plan_free(base, plan);
    return s;
}

void cuda_plan_free(mx_backend *base, mx_plan *plan) {
    cuda_plan *p = plan->handle;
    if (!p) return;
    cuda_use(cuda_of(base));
    if (p->graphs) cuda_d.cuStreamSynchronize(cuda_of(base)->stream);
    for (int32_t i = 0; i < p->n_graphs; i++) cuda_d.cuGraphExecDestroy(p->graphs[i]);
    mx_free(p->graphs);
    mx_free(p->seg_graph);
    mx_free(p->seg_first);
    mx_free(p->list.items);
    mx_free(p->list.blob);
    mx_free(p);
    plan->handle = NULL;
}

// ---- Steps ----

void cuda_step_free(cuda_backend *b) {
    if (b->step) cuda_d.cuMemFree(b->step);
    b->step = 0;
    for (int s = 0; s < MX_STEP_SLOTS; s++) {
        if (b->host[s]) cuda_d.cuMemFreeHost(b->host[s]);
        if (b->begin[s]) cuda_d.cuEventDestroy(b->begin[s]);
        if (b->end[s]) cuda_d.cuEventDestroy(b->end[s]);
        if (b->done[s]) cuda_d.cuEventDestroy(b->done[s]);
        b->host[s] = NULL, b->begin[s] = b->end[s] = b->done[s] = NULL;
    }
}

mx_status cuda_step_init(mx_backend *base, const mx_step_caps *caps, mx_step_io io[MX_STEP_SLOTS],
                         mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CUDA_TRY(cuda_use(b), err);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    cuda_step_free(b);
    b->caps = *caps;
    b->layout = mx_step_bind(caps, NULL, NULL);
    size_t n = b->layout.total_bytes;
    MX_TRY(cuda_take(b, n, &b->step, err));
    CUDA_TRY(cuda_d.cuMemsetD8Async(b->step, 0, n, b->stream), err);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    mx_step_bind(caps, (void *)(uintptr_t)b->step, &b->io);
    for (int s = 0; s < MX_STEP_SLOTS; s++) {
        CUresult r = cuda_d.cuMemHostAlloc(&b->host[s], n, CU_MEMHOSTALLOC_PORTABLE);
        MX_TRY(cuda_check(r, err, "pinned host memory for steps"));
        memset(b->host[s], 0, n);
        CUDA_TRY(cuda_d.cuEventCreate(&b->begin[s], CU_EVENT_DEFAULT), err);
        CUDA_TRY(cuda_d.cuEventCreate(&b->end[s], CU_EVENT_DEFAULT), err);
        CUDA_TRY(cuda_d.cuEventCreate(&b->done[s], CU_EVENT_DISABLE_TIMING), err);
        mx_step_bind(caps, b->host[s], &b->host_io[s]);
        b->slot_open[s] = false;
        io[s] = b->host_io[s];
    }
    return MX_OK;
}

static mx_status run_plan(cuda_backend *b, const cuda_plan *p, mx_err *err) {
    for (int32_t s = 0; s < p->n_segs; s++) {
        b->count.boundaries++;
        if (!p->graphs) MX_TRY(run_items(b, p, p->seg_first[s], p->seg_first[s + 1], err));
        for (int32_t i = p->graphs ? p->seg_graph[s] : 0; p->graphs && i < p->seg_graph[s + 1];
             i++) {
            CUDA_TRY(cuda_d.cuGraphLaunch(p->graphs[i], b->stream), err);
            b->count.graph_launches++;
        }
        if (b->wait_buffers) CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    }
    return MX_OK;
}

static mx_status start_step(cuda_backend *b, const mx_plan *plan, int32_t slot, mx_err *err) {
    const uint8_t *host = b->host[slot];
    int32_t n_edits = b->host_io[slot].counts[3];
    CHECK(n_edits >= 0 && n_edits <= b->caps.max_edits);
    size_t n_in = b->layout.edits_offset + (size_t)n_edits * sizeof(mx_sample_edit);
    CUDA_TRY(cuda_d.cuMemcpyHtoDAsync(b->step, host, n_in, b->stream), err);
    CUDA_TRY(cuda_d.cuEventRecord(b->begin[slot], b->stream), err);
    MX_TRY(run_plan(b, plan->handle, err));
    CUDA_TRY(cuda_d.cuEventRecord(b->end[slot], b->stream), err);
    size_t at = b->layout.result_offset;
    CUDA_TRY(cuda_d.cuMemcpyDtoHAsync((uint8_t *)b->host[slot] + at, b->step + at,
                                      b->layout.logits_offset - at, b->stream),
             err);
    CUDA_TRY(cuda_d.cuEventRecord(b->done[slot], b->stream), err);
    return MX_OK;
}

mx_status cuda_submit(mx_backend *base, mx_plan *plan, const mx_step_facts *facts, int32_t slot,
                      mx_ticket *out, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CHECK(slot >= 0 && slot < MX_STEP_SLOTS && !b->slot_open[slot] && plan->handle);
    CUDA_TRY(cuda_use(b), err);
    mx_status st = start_step(b, plan, slot, err);
    if (st != MX_OK) { // what was started reads and writes the slot, which may be filled again
        cuda_d.cuStreamSynchronize(b->stream);
        return st;
    }
    b->slot_open[slot] = true;
    b->slot_serial[slot] = ++b->serial;
    b->slot_out[slot] = facts->n_out;
    b->slot_bufs[slot] = plan->n_segs;
    b->slot_ops[slot] = plan->n_ops;
    *out = (mx_ticket){.slot = slot, .serial = b->serial};
    return MX_OK;
}

mx_status cuda_wait(mx_backend *base, mx_ticket t, bool block, bool logits, bool *done,
                    mx_run_stats *stats, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    if (done) *done = false;
    CHECK(t.slot >= 0 && t.slot < MX_STEP_SLOTS && t.serial == b->slot_serial[t.slot]);
    CUDA_TRY(cuda_use(b), err);
    CUresult r =
        block ? cuda_d.cuEventSynchronize(b->done[t.slot]) : cuda_d.cuEventQuery(b->done[t.slot]);
    if (r == CUDA_ERROR_NOT_READY) return MX_OK;
    b->slot_open[t.slot] = false;
    MX_TRY(cuda_check(r, err, "the step"));
    if (logits) {
        CHECK(t.serial == b->serial); // a later step has overwritten them
        size_t at = b->layout.logits_offset;
        size_t n = (size_t)b->slot_out[t.slot] * (size_t)b->caps.n_vocab * sizeof(float);
        CUDA_TRY(
            cuda_d.cuMemcpyDtoHAsync((uint8_t *)b->host[t.slot] + at, b->step + at, n, b->stream),
            err);
        CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    }
    if (stats) {
        float ms = 0;
        CUDA_TRY(cuda_d.cuEventElapsedTime(&ms, b->begin[t.slot], b->end[t.slot]), err);
        *stats = (mx_run_stats){
            .seconds = ms * 1e-3, .n_buffers = b->slot_bufs[t.slot], .n_ops = b->slot_ops[t.slot]};
    }
    if (done) *done = true;
    return MX_OK;
}
