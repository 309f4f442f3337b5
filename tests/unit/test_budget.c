// The budget table: one row a rule.
#include "backend/budget.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the first four
#include <cmocka.h>

#define ANY    MX_BUDGET_UNLIMITED
#define CUDA   .device = MX_DEVICE_CUDA
#define MLX    .env_defaults = "mlx"
#define LAGUNA .family = "laguna", .n_routed_experts = 256

typedef struct row {
    const char *name;
    mx_budget_input in;
    int32_t ops[MX_PHASES], mb[MX_PHASES]; // prefill, decode, decode-sync
    int32_t min_ops;
    bool elements, dedup;
} row;

static const row rows[] = {
    {"nothing set: one buffer a step",
     {.device = MX_DEVICE_CPU},
     {ANY, ANY, ANY},
     {ANY, ANY, ANY},
     10,
     false,
     true},
    {"h200, nothing set", {CUDA, .cc_major = 9}, {ANY, ANY, ANY}, {ANY, ANY, ANY}, 10, false, true},
    {"explicit ops", {.env_max_ops = "50"}, {50, 50, 50}, {ANY, ANY, ANY}, 10, false, true},
    {"explicit mb pins every phase",
     {.env_max_mb = "40"},
     {ANY, ANY, ANY},
     {40, 40, 40},
     10,
     false,
     true},
    {"explicit mb turns the decode raise off",
     {.env_max_mb = "40", .env_decode_mb = "1000"},
     {ANY, ANY, ANY},
     {40, 40, 40},
     10,
     false,
     true},
    {"decode mb touches pipelined decode alone",
     {.env_decode_mb = "64"},
     {ANY, ANY, ANY},
     {ANY, 64, ANY},
     10,
     false,
     true},
    {"min ops",
     {.env_min_ops = "0", .env_max_mb = "1"},
     {ANY, ANY, ANY},
     {1, 1, 1},
     0,
     false,
     true},
    {"elements", {.env_accounting = "elements"}, {ANY, ANY, ANY}, {ANY, ANY, ANY}, 10, true, true},
    {"nonsense is ignored",
     {.env_max_ops = "many", .env_max_mb = "-3", .env_decode_mb = "x"},
     {ANY, ANY, ANY},
     {ANY, ANY, ANY},
     10,
     false,
     true},
    {"zero ops is ignored",
     {.env_max_ops = "0"},
     {ANY, ANY, ANY},
     {ANY, ANY, ANY},
     10,
     false,
     true},
    {"mlx a100", {CUDA, MLX, .cc_major = 8}, {20, 20, 20}, {400, 400, 400}, 0, true, false},
    {"mlx h100", {CUDA, MLX, .cc_major = 9}, {100, 100, 100}, {1000, 1000, 1000}, 0, true, false},
    {"mlx b200", {CUDA, MLX, .cc_major = 10}, {100, 100, 100}, {1000, 1000, 1000}, 0, true, false},
    {"mlx 12.0", {CUDA, MLX, .cc_major = 12}, {100, 100, 100}, {1000, 1000, 1000}, 0, true, false},
    {"mlx 12.1",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1},
     {20, 20, 20},
     {25, 25, 25},
     0,
     true,
     false},
    {"mlx 12.1 laguna",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA},
     {100, 100, 100},
     {1000, 1000, 1000},
     0,
     true,
     false},
    {"mlx 12.1 laguna without routed experts",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1, .family = "laguna", .n_routed_experts = 1},
     {20, 20, 20},
     {25, 25, 25},
     0,
     true,
     false},
    {"mlx 12.1 laguna, mb set by the user: only ops raised",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA, .env_max_mb = "25"},
     {100, 100, 100},
     {25, 25, 25},
     0,
     true,
     false},
    {"mlx 12.1 laguna, ops set by the user: only mb raised",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA, .env_max_ops = "30"},
     {30, 30, 30},
     {1000, 1000, 1000},
     0,
     true,
     false},
    {"mlx 12.0 laguna: the rule is of 12.1",
     {CUDA, MLX, .cc_major = 12, LAGUNA},
     {100, 100, 100},
     {1000, 1000, 1000},
     0,
     true,
     false},
    {"12.1 laguna without mlx: one buffer a step is more",
     {CUDA, .cc_major = 12, .cc_minor = 1, LAGUNA},
     {ANY, ANY, ANY},
     {ANY, ANY, ANY},
     10,
     false,
     true},
    {"mlx 10.3 is not listed",
     {CUDA, MLX, .cc_major = 10, .cc_minor = 3},
     {20, 20, 20},
     {100, 100, 100},
     0,
     true,
     false},
    {"mlx h100, both set by the user",
     {CUDA, MLX, .cc_major = 9, .env_max_ops = "7", .env_max_mb = "8"},
     {7, 7, 7},
     {8, 8, 8},
     0,
     true,
     false},
    {"mlx h100, decode mb",
     {CUDA, MLX, .cc_major = 9, .env_decode_mb = "2000"},
     {100, 100, 100},
     {1000, 2000, 1000},
     0,
     true,
     false},
    {"mlx h100, true bytes and a minimum",
     {CUDA, MLX, .cc_major = 9, .env_accounting = "bytes", .env_min_ops = "12"},
     {100, 100, 100},
     {1000, 1000, 1000},
     12,
     false,
     true},
    {"mlx 12.1 another family",
     {CUDA, MLX, .cc_major = 12, .cc_minor = 1, .family = "llama", .n_routed_experts = 8},
     {20, 20, 20},
     {25, 25, 25},
     0,
     true,
     false},
    {"mlx 8.9",
     {CUDA, MLX, .cc_major = 8, .cc_minor = 9},
     {20, 20, 20},
     {100, 100, 100},
     0,
     true,
     false},
    {"mlx m1 ultra: ops 1000, decode raise",
     {MLX, .apple_gen = 1, .apple_class = 'd'},
     {1000, 1000, 1000},
     {50, 1000, 50},
     0,
     true,
     true},
    {"mlx m4 base",
     {MLX, .apple_gen = 4, .apple_class = 'g'},
     {1000, 1000, 1000},
     {40, 1000, 40},
     0,
     true,
     true},
    {"mlx m5 max keeps mlx",
     {MLX, .apple_gen = 5, .apple_class = 's'},
     {50, 50, 50},
     {50, 50, 50},
     0,
     true,
     true},
    {"mlx m5 of a phone",
     {MLX, .apple_gen = 5, .apple_class = 'p'},
     {20, 20, 20},
     {40, 40, 40},
     0,
     true,
     true},
    {"mlx m1, decode raise off",
     {MLX, .apple_gen = 1, .apple_class = 's', .env_decode_mb = "off"},
     {1000, 1000, 1000},
     {50, 50, 50},
     0,
     true,
     true},
    {"mlx m1, user mb",
     {MLX, .apple_gen = 1, .apple_class = 's', .env_max_mb = "50"},
     {1000, 1000, 1000},
     {50, 50, 50},
     0,
     true,
     true},
};

static void every_row_of_the_table(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        mx_budget b[MX_PHASES];
        mx_budget_choose(&rows[i].in, b);
        for (int p = 0; p < MX_PHASES; p++) {
            bool ok = b[p].max_ops == rows[i].ops[p] && b[p].max_mb == rows[i].mb[p] &&
                      b[p].min_ops == rows[i].min_ops && b[p].elements == rows[i].elements &&
                      b[p].dedup == rows[i].dedup;
            if (!ok) {
                fail_msg("%s: phase %d: ops %d mb %d min %d elements %d dedup %d", rows[i].name, p,
                         b[p].max_ops, b[p].max_mb, b[p].min_ops, b[p].elements, b[p].dedup);
            }
        }
    }
}

// off, false, no and 0 all switch the decode raise off.
static void every_word_for_off(void **state) {
    (void)state;
    static const char *const words[] = {"0", "off", "false", "no", "OFF"};
    for (size_t i = 0; i < MX_COUNT(words); i++) {
        mx_budget_input in = {MLX, .apple_gen = 2, .apple_class = 'd', .env_decode_mb = words[i]};
        mx_budget b[MX_PHASES];
        mx_budget_choose(&in, b);
        assert_int_equal(b[MX_PHASE_DECODE].max_mb, 50);
    }
}

static void the_line_of_the_family_rule(void **state) {
    (void)state;
    static const struct {
        mx_budget_input in;
        const char *want; // a part; "": no line
    } cases[] = {
        {{CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA},
         "CUDA graph budget: MLX_MAX_OPS_PER_BUFFER=100 MLX_MAX_MB_PER_BUFFER=1000 applied for "
         "model_type laguna on sm_121 (#1798); an operator-set value wins per variable"},
        {{CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA, .env_max_ops = "9"},
         "CUDA graph budget: MLX_MAX_MB_PER_BUFFER=1000 applied"},
        {{CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA, .env_max_mb = "9"},
         "CUDA graph budget: MLX_MAX_OPS_PER_BUFFER=100 applied"},
        {{CUDA, MLX, .cc_major = 12, .cc_minor = 1, LAGUNA, .env_max_ops = "9", .env_max_mb = "9"},
         ""},
        {{CUDA, .cc_major = 12, .cc_minor = 1, LAGUNA}, ""},
        {{CUDA, MLX, .cc_major = 9, LAGUNA}, ""},
        {{CUDA, MLX, .cc_major = 12, .cc_minor = 1, .family = "llama", .n_routed_experts = 8}, ""},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        char line[256];
        mx_budget_rule_text(&cases[i].in, line, sizeof line);
        if (cases[i].want[0])
            assert_non_null(strstr(line, cases[i].want));
        else
            assert_string_equal(line, "");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_row_of_the_table),
                                       cmocka_unit_test(every_word_for_off),
                                       cmocka_unit_test(the_line_of_the_family_rule)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
