// The same dump from llama.cpp (its headers and library): llama_logits MODEL IDS.txt OUT.f32
// [THREADS]
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    enum { CAP = 4096 };
    static llama_token ids[CAP];
    int n = 0;
    FILE *f = fopen(argv[2], "r");
    while (f && n < CAP && fscanf(f, "%d", &ids[n]) == 1) n++;
    if (f) fclose(f);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    struct llama_model *m = llama_model_load_from_file(argv[1], mp);
    if (!m) return 1;
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t)n + 8;
    cp.n_batch = cp.n_ubatch = (uint32_t)n;
    cp.n_threads = cp.n_threads_batch = argc > 4 ? (int)strtol(argv[4], NULL, 10) : 2;
    struct llama_context *c = llama_init_from_model(m, cp);
    struct llama_batch b = llama_batch_init(n, 0, 1);
    b.n_tokens = n;
    for (int i = 0; i < n; i++) {
        b.token[i] = ids[i];
        b.pos[i] = i;
        b.n_seq_id[i] = 1;
        b.seq_id[i][0] = 0;
        b.logits[i] = 1;
    }
    if (llama_decode(c, b) != 0) return 1;
    size_t v = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(m));
    f = fopen(argv[3], "wb");
    for (int i = 0; f && i < n; i++) fwrite(llama_get_logits_ith(c, i), sizeof(float), v, f);
    return f && fclose(f) == 0 ? 0 : 1;
}
