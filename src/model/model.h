// A model: a family's tables bound to resident weights, and the recording of its forward pass.
#ifndef MX_MODEL_MODEL_H
#define MX_MODEL_MODEL_H

#include "model/family.h"

typedef struct mx_model mx_model;

typedef struct mx_model_info {
    const mx_family *family;
    const mx_hparams *hp;
    char format[64];       // "gguf q4_1", "gguf q4_k_m, most bytes q8_0", "safetensors bf16, mixed"
    uint64_t weight_bytes; // resident
    uint64_t n_params;
    int32_t n_kv_groups;
    int32_t n_towers;         // tower tensors listed and not read
    const char *model_type;   // of the checkpoint; the family's name when it says none
    int32_t n_routed_experts; // 0: none
} mx_model_info;

typedef struct mx_load_stats {
    int32_t n_tensors;
    uint64_t bytes;
    double seconds;
} mx_load_stats;

// Checks every tensor of the checkpoint against the family's table, then makes the generation
// weights resident on b (eager), or only checks them (lazy: resident at first use). w must stay
// open while the model is. Errors: FORMAT (tensor, expected and found shape; an unknown tensor by
// name; quantisation in config and shapes that disagree), UNSUPPORTED, NOMEM.
mx_status mx_model_open(mx_model **m, mx_backend *b, const mx_weights *w, bool lazy, mx_err *err);
// Makes the weights of a model that was opened lazily resident. NOMEM, IO, DEVICE.
mx_status mx_model_load(mx_model *m, mx_err *err);
void mx_model_close(mx_model *m);
void mx_model_get_info(const mx_model *m, mx_model_info *out);
void mx_model_get_load_stats(const mx_model *m, mx_load_stats *out);
// Fills groups and n_groups of spec with this model's layer groups.
void mx_model_kv_groups(const mx_model *m, mx_dtype codec, mx_kv_spec *spec);
// Names of tower tensors (vision, audio), which are listed and not read: the i-th, or NULL.
const char *mx_model_tower(const mx_model *m, int32_t i);

typedef enum mx_output { MX_OUTPUT_LOGITS, MX_OUTPUT_SAMPLE } mx_output;

// Records one forward pass of the step described by the encoder's facts (between mx_enc_begin and
// mx_enc_end). max_len: longest visible context of the step. With MX_OUTPUT_SAMPLE a SAMPLE op
// follows the logits. A lazy model makes missing weights resident first; its error is returned.
mx_status mx_model_record(mx_model *m, mx_enc *e, const mx_kv *kv, int32_t max_len,
                          mx_output output, mx_err *err);

// Prints one line a layer from the family's table with a small config ("arch").
void mx_family_print(const mx_family *f, mx_buf *out);

#endif
