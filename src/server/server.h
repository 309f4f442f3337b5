// The HTTP server: one engine, many clients. The command line fills a configuration and runs it.
#ifndef MX_SERVER_SERVER_H
#define MX_SERVER_SERVER_H

#include "base/err.h"
#include "base/str.h"
#include "mlxcel.h"

typedef struct mx_server_config {
    mlxcel_params engine;
    const char *host; // address, name, or a path that ends in .sock
    int32_t port;     // 0: one that is free
    const char *alias;
    const char *api_prefix; // "" or "/x"
    const char *api_keys;   // comma-separated; NULL: none
    const char *api_key_file;
    const char *env_api_key;                     // one more key, from the environment
    const char *cors_origins;                    // "*", or comma-separated origins, or "" for none
    const char *allowed_hosts;                   // comma-separated; "*": any
    const char *ssl_key_file, *ssl_cert_file;    // both or none
    const char *reasoning_format;                // "auto", "deepseek", "none"
    const char *reasoning_alias;                 // second name of reasoning_content, or "none"
    const char *chat_template_kwargs;            // JSON object, or NULL
    int32_t threads_http;                        // <= 0: 2
    int32_t sse_ping_s;                          // < 0: off
    int32_t sse_gather_ms;                       // 0: off
    const char *sse_ping_style;                  // "comment", "delta", "progress"
    int32_t timeout_s, idle_timeout_s, max_body; // max_body in bytes
    double grace_s;                              // of shutdown
    bool metrics, slots, props_post, no_web, reuse_port, log_requests;
    mlxcel_sampling sampling; // defaults of requests; the checkpoint's suggestions replace its
                              // fields, but for those of sampling_given
    uint32_t sampling_given;  // MLXCEL_SAMPLING_* bits
    int32_t n_predict;        // default of max_tokens; < 0: until the context is full
    // Waits for a signal: returns when the file descriptor becomes readable.
    int stop_fd;
    void (*on_stopping)(void); // called once when shutdown begins
} mx_server_config;

// Listens, loads the model, serves until stop_fd is readable, then shuts down within the grace
// time. Errors: INVALID (configuration), IO (cannot listen), and the engine's; *loading tells
// whether the model was what failed. Strings of the configuration must live as long.
mx_status mx_server_run(const mx_server_config *c, bool *loading, mx_err *err);

// docs/server.md from the tables of routes and fields, and the OpenAPI description.
void mx_server_markdown(mx_buf *out);
void mx_server_openapi(mx_buf *out);

#endif
