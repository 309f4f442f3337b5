// mlxcel profile: which of the three measurements is asked for. Stateless.
#include "cli/profile.h"

int cli_profile(const cli_options *o) {
    if (o->chain > 0 && o->launch_heavy) {
        return cli_usage(o, "--chain and --launch-heavy are two measurements: one of them");
    }
    if (o->chain > 0 && o->model) return cli_usage(o, "--chain has no model");
    if (o->chain > 0 && o->chain < 4) return cli_usage(o, "--chain: at least 4 ops");
    if (o->chain > 0) return prof_chain(o);
    if (o->launch_heavy) return prof_launch(o);
    if (!o->model) return cli_usage(o, "expected -m MODEL, --chain or --launch-heavy");
    if (o->depth > INT32_MAX / 4) return cli_usage(o, "-d: more than a context can hold");
    return prof_segments(o);
}
