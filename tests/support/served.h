// Test support: the server that the tests of one program share, on a model that follows scripts
// (support/script_model.h), in a folder that is its home. State: what is below.
#ifndef TESTS_SUPPORT_SERVED_H
#define TESTS_SUPPORT_SERVED_H

#include "support/http_client.h"
#include "support/script_model.h"

static char *dir, *model; // a folder that is removed at the end, the model in it
static server main_server;
#define S (&main_server)

// For the test's set_up: writes the model (max_ctx and chat_template are its own) and serves it.
static inline int serve_scripts(const script *scripts, size_t n_scripts, int32_t max_ctx,
                                const char *chat_template, const char *args) {
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "script.gguf");
    script_write(model, scripts, n_scripts, max_ctx, chat_template);
    setenv("HOME", dir, 1);
    setenv("MLXCEL_DEVICE", "cpu", 1);
    setenv("MLXCEL_THREADS", "1", 1);
    unsetenv("MLXCEL_LOG");
    unsetenv("LLAMA_API_KEY");
    server_start(S, dir, model, args);
    return 0;
}

static inline int tear_down(void **state) {
    (void)state;
    server_stop(S);
    mx_free(model);
    ckpt_remove_dir(dir);
    return 0;
}

#endif
