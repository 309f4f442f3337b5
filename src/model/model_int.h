// Inside the model module: the bound weights.
#ifndef MX_MODEL_INT_H
#define MX_MODEL_INT_H

#include "model/model.h"

// A weight found in the checkpoint and checked; resident once tensor.buf is set.
typedef struct bound_weight {
    bool present, resident;
    bool fresh;    // its upload was started, and not ended by model_end_uploads
    mx_wview view; // in the mapping
    uint8_t fix;
    mx_tensor tensor;
    void *copy; // reordered rows that the backend borrows, or NULL
    size_t copy_bytes;
} bound_weight;

struct mx_model {
    mx_backend *backend;
    const mx_weights *weights;
    const mx_family *family;
    mx_hparams hp;
    mx_layer_spec *specs; // (n_layer)
    bound_weight globals[MX_W_GLOBALS];
    bound_weight *layers;  // (n_layer, MX_W_SLOTS - MX_W_GLOBALS)
    mx_tensor inv_freq[2]; // full, local
    bool has_local_rope;
    bool reads_files; // of the backend's facts
    int32_t n_fresh;
    float embed_scale;
    mx_kv_group groups[MX_MAX_KV_GROUPS];
    int32_t n_groups;
    const char **towers;
    int32_t n_towers;
    mx_load_stats load;
    uint64_t n_params, weight_bytes;
    struct {
        mx_wfmt fmt;
        uint64_t bytes;
    } formats[16]; // of its weights; more than so many are not told apart
    int32_t n_formats;
    mx_arena arena;
};

static inline bound_weight *model_weight(mx_model *m, int32_t il, mx_slot slot) {
    if (slot < MX_W_GLOBALS) return &m->globals[slot];
    return &m->layers[(size_t)il * (MX_W_SLOTS - MX_W_GLOBALS) + (size_t)(slot - MX_W_GLOBALS)];
}

// bind.c: finds and checks every weight; nothing is read but shapes.
mx_status model_bind(mx_model *m, mx_err *err);
// load.c: makes one weight resident (canonical form, upload).
mx_status model_materialize(mx_model *m, bound_weight *w, mx_err *err);
// Its upload may go on until model_end_uploads, which takes back every weight since its last call
// when one of them failed.
mx_status model_end_uploads(mx_model *m, mx_err *err);
mx_status model_load_all(mx_model *m, mx_err *err);
mx_status model_make_rope(mx_model *m, mx_err *err);

#endif
