// What a device offers. A backend never learns which model family it runs.
#ifndef MX_BACKEND_BACKEND_H
#define MX_BACKEND_BACKEND_H

#include "backend/op.h"

typedef struct mx_backend mx_backend;

typedef enum mx_device_kind { MX_DEVICE_CPU, MX_DEVICE_CUDA } mx_device_kind;

typedef struct mx_backend_facts {
    mx_device_kind kind;
    char device[128]; // "AMD EPYC 9654", "NVIDIA H200"
    char arch[32];    // CPU: instruction set in use (scalar, avx2, …); CUDA: sm_90
    int32_t cc_major, cc_minor;
    const char *compiled; // CUDA: what the program has code for, "sm_80 sm_90a compute_80"
    int32_t n_threads;    // CPU
    int32_t n_sm;         // CUDA
    uint64_t memory_bytes, available_bytes;
    uint64_t upload_bytes; // of it, taken while weights are loaded
    bool host_memory;      // buffers are host memory: map works, nothing is copied
    bool graphs;           // decode plans are graphs of the device, replayed with no update
    bool bucket_rows;      // plans are recorded for row buckets, not exact rows
    // A row's result depends on its own sequence only: not on other rows, their number, or how the
    // sequence was cut into steps.
    bool deterministic;
    bool reads_files; // upload reads views of files by itself, until upload_end, and undoes `pairs`
} mx_backend_facts;

// Rows a plan is recorded for: n itself, or the next bucket (1..8, then 16, 32, 64, then
// multiples of 128) when facts->bucket_rows.
int32_t mx_row_bucket(const mx_backend_facts *facts, int32_t n);
// Least power of two >= n, at least 256.
int32_t mx_ctx_bucket(int32_t n);

// Storage. Fields are the backend's to fill; host is NULL when the host cannot see it.
struct mx_buffer {
    size_t n_bytes;
    void *host;
    uint64_t device; // device address (CUDA), else 0
    int32_t usage;
    bool borrowed; // host memory that belongs to somebody else (a mapped file)
};
typedef enum mx_usage { MX_USE_WEIGHT, MX_USE_STATE, MX_USE_ARENA, MX_USE_STEP } mx_usage;

enum { MX_STEP_SLOTS = 2 };

// A submitted step. A host never writes a slot whose ticket is open.
typedef struct mx_ticket {
    int32_t slot;
    uint64_t serial; // 0 = none
} mx_ticket;

typedef struct mx_run_stats { // of one finished step
    double seconds;           // device time when known, else wall time
    int32_t n_buffers, n_ops;
} mx_run_stats;

// One device. All functions but close are called from the engine thread only.
typedef struct mx_backend_ops {
    void (*facts)(mx_backend *b, mx_backend_facts *out);
    // Zeroed memory. NOMEM carries the arithmetic.
    mx_status (*alloc)(mx_backend *b, mx_buffer **out, size_t n_bytes, mx_usage use, mx_err *err);
    void (*free)(mx_backend *b, mx_buffer *buf);
    // Makes a resident weight tensor from its checkpoint form; chooses the layout, copies, frees
    // nothing of w. Matrices that only EMBED and plain reads use may stay in ROWS.
    mx_status (*upload)(mx_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err);
    // Ends what upload started: reading of files (facts.reads_files), and with the first error of
    // that. Before the first step with the tensors, and after a failed upload. NULL: upload ends
    // everything itself.
    mx_status (*upload_end)(mx_backend *b, mx_err *err);
    mx_status (*write)(mx_backend *b, mx_buffer *buf, size_t offset, const void *src, size_t n,
                       mx_err *err);
    mx_status (*read)(mx_backend *b, const mx_buffer *buf, size_t offset, void *dst, size_t n,
                      mx_err *err);
    // True when the op runs as it is; a fused op that is not supported is expanded.
    bool (*supports)(mx_backend *b, const mx_op *op, const mx_tensor *tensors);
    // Candidate kernels for an op, for the tuner: returns the count, names by index (0 = default).
    int32_t (*variants)(mx_backend *b, const mx_op *op, const mx_tensor *tensors,
                        const char **names, int32_t cap);
    // Allocates the step blocks: io[s] are the host pointers of slot s. Called once, and again
    // after caps change (no step in flight).
    mx_status (*step_init)(mx_backend *b, const mx_step_caps *caps, mx_step_io io[MX_STEP_SLOTS],
                           mx_err *err);
    // Prepares a plan (graphs, thread splits) against the arena it will run in.
    mx_status (*plan_make)(mx_backend *b, mx_plan *plan, mx_buffer *arena, mx_err *err);
    void (*plan_free)(mx_backend *b, mx_plan *plan);
    // Starts the step in slot; facts are of this step. The CPU completes before it returns.
    mx_status (*submit)(mx_backend *b, mx_plan *plan, const mx_step_facts *facts, int32_t slot,
                        mx_ticket *out, mx_err *err);
    // Waits (or asks, block = false: *done tells) until the ticket's out_id and out_logprob are in
    // the slot's host block. With logits true, the logits rows too.
    mx_status (*wait)(mx_backend *b, mx_ticket t, bool block, bool logits, bool *done,
                      mx_run_stats *stats, mx_err *err);
    // For measurements. Whether the host waits for the device after every command buffer (off at
    // first). NULL: a step is complete when submit returns, there is nothing to wait for.
    void (*wait_buffers)(mx_backend *b, bool on);
    // Bytes a second that the device reads from its own memory, measured now. NULL: host memory.
    mx_status (*read_rate)(mx_backend *b, double *bytes_per_s, mx_err *err);
    void (*close)(mx_backend *b);
} mx_backend_ops;

struct mx_backend {
    const mx_backend_ops *ops;
    const char *name; // "cpu", "cuda"
};

#endif
