// The program's entry, and the only place that ends the process.
#include "cli/cli.h"

#include <stdlib.h>

static void end_now(int code) {
    _Exit(code);
}

int main(int argc, char **argv) {
    return mx_cli_main(argc, argv, end_now);
}
