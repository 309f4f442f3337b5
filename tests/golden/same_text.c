// same_text MODEL [DEVICE]: by hand, for real models and a GPU (make check-text MODEL=…). A model's
// greedy text is the same on the CPU and on DEVICE (cuda) in the float-exact mode: 128 tokens for
// each of a few prompts. Sums have another order there, so tokens may part where two are about as
// likely: when the CPU's logits of the two are less than 0.05 apart. DEVICE chooses its tokens as
// it does for anybody, without log-probabilities; the CPU's are asked for.
#include "base/knobs.h"
#include "base/mem.h"
#include "mlxcel.h"

#include <stdio.h>
#include <stdlib.h>

enum { N_TOKENS = 128, N_TOP = 20 };
static const double limit = 0.05;

static const char *const prompts[] = {
    "The capital of France is",        "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",         "Water boils at 100 degrees because",
    "A list of fruits:\n1. apple\n2.", "In 1969, people first",
};

typedef struct answer {
    int32_t ids[N_TOKENS], n;
    mlxcel_top_logprob top[N_TOKENS][N_TOP];
} answer;

static mlxcel_engine *open_engine(const char *path, const char *device) {
    mlxcel_params p = {.model = path, .device = device, .ctx_size = 512, .exact = true};
    mlxcel_engine *e = NULL;
    mlxcel_error err = {0};
    CHECKF(mlxcel_open(&e, &p, &err) == 0, "%s", err.message);
    mlxcel_info info;
    mlxcel_get_info(e, &info);
    printf("%s: %s (%s), exact %s\n", device, info.device, info.arch, info.exact ? "yes" : "no");
    CHECKF(info.exact, "%s: not in the float-exact mode", device);
    return e;
}

static void run(mlxcel_engine *e, const int32_t *ids, size_t n, bool with_top, answer *a) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.max_tokens = N_TOKENS;
    p.sampling.ignore_eos = true;
    if (with_top) p.n_logprobs = N_TOP;
    mlxcel_request *r;
    mlxcel_error err = {0};
    CHECKF(mlxcel_submit(e, &p, &r, &err) == 0, "%s", err.message);
    mlxcel_event ev;
    a->n = 0;
    while (mlxcel_next_event(r, -1, &ev)) {
        for (int32_t i = 0; ev.kind == MLXCEL_EVENT_TEXT && i < ev.n_tokens; i++) {
            CHECK(a->n < N_TOKENS && (!with_top || ev.tokens[i].n_top == N_TOP));
            if (with_top) memcpy(a->top[a->n], ev.tokens[i].top, sizeof a->top[0]);
            a->ids[a->n++] = ev.tokens[i].id;
        }
        if (ev.kind != MLXCEL_EVENT_DONE) continue;
        CHECKF(ev.error.status == 0, "%s", ev.error.message);
    }
    mlxcel_request_free(r);
    CHECKF(a->n == N_TOKENS, "%d tokens", a->n);
}

// How much more likely than `id` the first is; more than is known when it is not in the list.
static double gap_to(const mlxcel_top_logprob *top, int32_t id) {
    int k = 0;
    while (k < N_TOP - 1 && top[k].id != id) k++;
    double gap = (double)top[0].logprob - (double)top[k].logprob;
    return top[k].id == id ? gap : gap + limit;
}

// Whether it is as it should be.
static bool compare(mlxcel_engine *cpu, mlxcel_engine *other, size_t p) {
    static answer x, y;
    int32_t *ids;
    size_t n;
    mlxcel_error err = {0};
    CHECKF(mlxcel_tokenize(cpu, prompts[p], strlen(prompts[p]), true, false, &ids, &n, &err) == 0,
           "%s", err.message);
    run(cpu, ids, n, true, &x);
    run(other, ids, n, false, &y);
    mlxcel_free(ids);
    int32_t i = 0;
    while (i < N_TOKENS && x.ids[i] == y.ids[i]) i++;
    if (i == N_TOKENS) {
        printf("prompt %zu: %d tokens, the same\n", p, i);
        return true;
    }
    double gap = gap_to(x.top[i], y.ids[i]);
    printf("prompt %zu: token %d is %d on the CPU and %d there, logits %.4f apart: %s\n", p, i,
           x.ids[i], y.ids[i], gap, gap < limit ? "about as likely" : "DIFFERENT");
    return gap < limit;
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "same_text MODEL [DEVICE]\n");
        return 2;
    }
    mx_log_set_level(MX_LOG_WARN);
    mlxcel_engine *cpu = open_engine(argv[1], "cpu");
    mlxcel_engine *other = open_engine(argv[1], argc == 3 ? argv[2] : "cuda");
    int bad = 0;
    for (size_t i = 0; i < MX_COUNT(prompts); i++) bad += !compare(cpu, other, i);
    mlxcel_close(cpu);
    mlxcel_close(other);
    printf("%d of %zu prompts differ\n", bad, MX_COUNT(prompts));
    return bad ? 1 : 0;
}
