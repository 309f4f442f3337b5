// Any bytes as a safetensors file: read, then every tensor of what was accepted is used.
#include "fuzz_weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void every_byte_is_used_once(const mx_weights *w) {
    uint64_t header;
    size_t sum = 0;
    memcpy(&header, w->files[0].data, 8);
    for (int32_t i = 0; i < w->n_tensors; i++) sum += w->tensors[i].n_bytes;
    CHECK(8 + header + sum == w->files[0].n_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    fuzz_open(safetensors_read, data, n_bytes, every_byte_is_used_once);
    return 0;
}
