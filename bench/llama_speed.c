// Times llama.cpp through its library, as its own bench does: whole prompts in one batch, then
// decoding token by token, no sampling. Prints one JSON line: {"avg_ts": tokens a second}.
//   llama_speed MODEL THREADS N_PREFILL N_DECODE DEPTH     (one of the two counts is 0)
//   llama_speed MODEL quantize-q4_0 OUT.gguf               (requantises, for the Q4_0 baseline)
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static llama_token next_id(const struct llama_vocab *v, unsigned *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (llama_token)(*seed % (unsigned)llama_vocab_n_tokens(v));
}

// Runs n tokens as one prompt, in batches of 512.
static void prefill(struct llama_context *c, const struct llama_vocab *v, int n, unsigned *seed) {
    llama_token ids[512];
    for (int done = 0; done < n;) {
        int k = n - done < 512 ? n - done : 512;
        for (int i = 0; i < k; i++) ids[i] = next_id(v, seed);
        if (llama_decode(c, llama_batch_get_one(ids, k)) != 0) exit(1);
        done += k;
    }
    llama_synchronize(c);
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    llama_log_set(quiet, NULL);
    llama_backend_init();
    if (strcmp(argv[2], "quantize-q4_0") == 0) {
        struct llama_model_quantize_params q = llama_model_quantize_default_params();
        q.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
        q.allow_requantize = true;
        return (int)llama_model_quantize(argv[1], argv[3], &q);
    }
    int threads = (int)strtol(argv[2], NULL, 10), np = (int)strtol(argv[3], NULL, 10);
    int nd = (int)strtol(argv[4], NULL, 10), depth = (int)strtol(argv[5], NULL, 10);
    struct llama_model *m = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!m) return 1;
    const struct llama_vocab *v = llama_model_get_vocab(m);
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t)(np + nd + depth + 32);
    p.n_batch = p.n_ubatch = 512;
    p.n_threads = p.n_threads_batch = threads;
    struct llama_context *c = llama_init_from_model(m, p);
    unsigned seed = 1;
    prefill(c, v, np > 0 ? np : 8, &seed); // warm
    llama_memory_clear(llama_get_memory(c), false);
    if (depth > 0) prefill(c, v, depth, &seed);
    double t0 = now();
    if (np > 0) prefill(c, v, np, &seed);
    for (int i = 0; i < nd; i++) {
        llama_token id = next_id(v, &seed);
        if (llama_decode(c, llama_batch_get_one(&id, 1)) != 0) return 1;
        llama_synchronize(c);
    }
    printf("[{\"avg_ts\": %.3f}]\n", (double)(np + nd) / (now() - t0));
    return 0;
}
