// The table of flags (flags.def): parser, help and docs/cli.md are made from it. No state.
#include "base/mem.h"
#include "cli/args.h"

#include <math.h>

#define ON(c)    (1u << CLI_##c)
#define TEXTUAL  (ON(RUN) | ON(GENERATE))
#define MEASURES (ON(BENCH) | ON(PROFILE))
#define ENGINE   (TEXTUAL | ON(PERPLEXITY) | MEASURES)
#define LOADS    (ENGINE | ON(SERVE) | ON(INSPECT) | ON(TOKENIZE) | ON(TEMPLATE))
#define STORE    (LOADS | ON(LIST) | ON(RM))
#define ALL      ((1u << CLI_COMMANDS) - 1)

// The field's offset; does not compile when the field is of another type than the row's kind.
#define AT(type, f)                                                                                \
    (offsetof(cli_options, f) + 0 * sizeof(_Generic(((cli_options *)0)->f, type : 1)))
#define BOOL(n, c, f, help)                                                                        \
    { n, c, CLI_FLAG, NULL, AT(bool, f), 0, 0, NULL, help }
#define TEXT(n, c, v, f, d, help)                                                                  \
    { n, c, CLI_TEXT, v, AT(const char *, f), 0, 0, d, help }
#define CHOICE(n, c, v, f, d, help)                                                                \
    { n, c, CLI_CHOICE, v, AT(const char *, f), 0, 0, d, help }
#define INT(n, c, f, lo, hi, d, help)                                                              \
    { n, c, CLI_INT, "N", AT(int32_t, f), lo, hi, d, help }
#define FLOAT(n, c, f, lo, hi, d, help)                                                            \
    { n, c, CLI_FLOAT, "F", AT(float, f), lo, hi, d, help }
#define REFUSED(n, c, why)                                                                         \
    { n, c, CLI_REFUSED, NULL, 0, 0, 0, NULL, why }
#define BIG      INT32_MAX
#define MOST_CTX (1 << 30) // positions are rounded up to pages in 32 bits
#define HTTP     ON(SERVE)

const cli_flag cli_flags[] = {
#include "cli/flags.def"
};
const size_t cli_n_flags = MX_COUNT(cli_flags);
