// Which compiled code runs on which device: one row a rule.
#include "backend/cover.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

#define ALL "sm_80 sm_90a sm_100 sm_120 compute_80"

static const struct {
    const char *archs;
    int32_t major, minor;
    const char *want; // "": not covered
} rows[] = {
    {ALL, 8, 0, "sm_80"},
    {ALL, 8, 9, "sm_80"}, // a later minor version of the same major
    {ALL, 9, 0, "sm_90a"},
    {ALL, 10, 0, "sm_100"},
    {ALL, 10, 3, "sm_100"},
    {ALL, 11, 0, "compute_80"}, // the driver compiles
    {ALL, 12, 0, "sm_120"},
    {ALL, 12, 1, "sm_120"},
    {ALL, 7, 5, ""}, // before everything
    {"sm_90a", 9, 0, "sm_90a"},
    {"sm_90a", 10, 0, ""}, // a letter: that version alone
    {"sm_86", 8, 0, ""},   // an earlier minor version
    {"sm_86", 8, 9, "sm_86"},
    {"sm_80 sm_86", 8, 9, "sm_86"}, // the nearest
    {"compute_90a", 10, 0, ""},
    {"compute_80 compute_90", 10, 0, "compute_90"},
    {"", 9, 0, ""},
    {"  sm_90  ", 9, 0, "sm_90"},
    {"nonsense sm_ compute_ sm_x", 9, 0, ""},
};

static void every_row(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        char got[32];
        bool covered = mx_arch_cover(rows[i].archs, rows[i].major, rows[i].minor, got, sizeof got);
        if (strcmp(got, rows[i].want) != 0 || covered != (rows[i].want[0] != 0)) {
            fail_msg("%s on %d.%d: '%s', expected '%s'", rows[i].archs, rows[i].major,
                     rows[i].minor, got, rows[i].want);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_row)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
