#include "support/cuda_rig.h"

#include <stdio.h>

bool cuda_rigs_open(rig *rigs, int n, bool expand, bool deterministic, int32_t n_vocab) {
    for (int i = 0; i < n; i++) {
        mx_backend *b;
        mx_err e = {0};
        mx_cuda_options o = {.deterministic = deterministic};
        if (mx_cuda_open_with(&o, &b, &e) != MX_OK) {
            printf("skipped: %s\n", e.msg);
            while (i-- > 0) rig_close(&rigs[i]);
            return false;
        }
        rig_open_on(&rigs[i], b, i == 0 || !expand, n_vocab);
    }
    return true;
}
