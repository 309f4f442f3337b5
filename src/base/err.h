// Errors: one status list for the whole program, and a caller-owned message.
//
// A function that can fail because of input, devices or budgets returns mx_status and takes a
// `mx_err *` last. The message says what and where ("model.gguf: blk.3.attn_q.weight: shape
// (4096, 1024), expected (4096, 4096)"). Bugs are CHECK()s, always on.
#ifndef MX_BASE_ERR_H
#define MX_BASE_ERR_H

#include <stdarg.h>
#include <stdbool.h>

// X(name, http, text): the status, the HTTP code a server answers with, a short phrase.
#define MX_STATUS_LIST(X)                                                                          \
    X(OK, 200, "ok")                                                                               \
    X(INVALID, 400, "invalid argument")                                                            \
    X(FORMAT, 400, "malformed data")                                                               \
    X(UNSUPPORTED, 501, "not supported")                                                           \
    X(NOTFOUND, 404, "not found")                                                                  \
    X(DENIED, 401, "permission denied")                                                            \
    X(TOOLARGE, 413, "too large")                                                                  \
    X(CONTEXT, 400, "context length exceeded")                                                     \
    X(BUSY, 503, "busy")                                                                           \
    X(NOMEM, 503, "out of memory")                                                                 \
    X(TIMEOUT, 504, "timed out")                                                                   \
    X(CANCELLED, 499, "cancelled")                                                                 \
    X(IO, 500, "input/output error")                                                               \
    X(DEVICE, 500, "device error")                                                                 \
    X(INTERNAL, 500, "internal error")

typedef enum mx_status {
#define X(name, http, text) MX_##name,
    MX_STATUS_LIST(X)
#undef X
        MX_STATUS_COUNT
} mx_status;

#define MX_ERR_CAP 1024

// Owned by the caller; zero-initialised means "no error". msg is always NUL-terminated.
typedef struct mx_err {
    mx_status status;
    char msg[MX_ERR_CAP];
} mx_err;

// Sets status and message (truncated at MX_ERR_CAP - 1 bytes) and returns status. err may be NULL.
mx_status mx_err_set(mx_err *err, mx_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

// Puts "prefix: " in front of the present message; keeps the status, which it returns.
mx_status mx_err_prefix(mx_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

const char *mx_status_name(mx_status s); // "OK", "INVALID", …
const char *mx_status_text(mx_status s); // short phrase
int mx_status_http(mx_status s);

// Prints file, line and text to stderr and aborts. Never returns.
_Noreturn void mx_check_failed(const char *file, int line, const char *expr, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

// A condition that only a bug can break. Always compiled in.
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) mx_check_failed(__FILE__, __LINE__, #cond, " ");         \
    } while (0)
#define CHECKF(cond, ...)                                                                          \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) mx_check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)

// Returns the status of `call` from the present function unless it is MX_OK.
#define MX_TRY(call)                                                                               \
    do {                                                                                           \
        mx_status mx_try_status_ = (call);                                                         \
        if (mx_try_status_ != MX_OK) return mx_try_status_;                                        \
    } while (0)

// Log lines go to stderr, one line each, newline added. Levels are chosen by MLXCEL_LOG
// (error, warn, info, debug; default warn for commands, info for the server).
typedef enum mx_log_level { MX_LOG_ERROR, MX_LOG_WARN, MX_LOG_INFO, MX_LOG_DEBUG } mx_log_level;
void mx_log_set_level(mx_log_level level);
mx_log_level mx_log_get_level(void);
void mx_log(mx_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
