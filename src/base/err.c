// Statuses, messages, log lines. Owns one piece of global state: the log level.
// Does not exit: only CHECK failures end the process, by abort().
#include "base/err.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    const char *text;
    int http;
} statuses[] = {
#define X(name, http, text) {#name, text, http},
    MX_STATUS_LIST(X)
#undef X
};

static _Atomic int log_level = MX_LOG_WARN;

const char *mx_status_name(mx_status s) {
    return (unsigned)s < MX_STATUS_COUNT ? statuses[s].name : "?";
}

const char *mx_status_text(mx_status s) {
    return (unsigned)s < MX_STATUS_COUNT ? statuses[s].text : "?";
}

int mx_status_http(mx_status s) {
    return (unsigned)s < MX_STATUS_COUNT ? statuses[s].http : 500;
}

mx_status mx_err_set(mx_err *err, mx_status status, const char *fmt, ...) {
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->status = status;
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
    }
    return status;
}

mx_status mx_err_prefix(mx_err *err, const char *fmt, ...) {
    if (!err) return MX_INTERNAL;
    char old[MX_ERR_CAP], text[2 * MX_ERR_CAP];
    memcpy(old, err->msg, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, MX_ERR_CAP, fmt, ap);
    va_end(ap);
    size_t n = strlen(text);
    snprintf(text + n, sizeof text - n, ": %s", old);
    memcpy(err->msg, text, sizeof err->msg);
    err->msg[sizeof err->msg - 1] = 0;
    return err->status;
}

void mx_check_failed(const char *file, int line, const char *expr, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fprintf(stderr, "mlxcel: %s:%d: check failed: %s %s\n", file, line, expr, text);
    fflush(stderr);
    abort();
}

void mx_log_set_level(mx_log_level level) {
    atomic_store(&log_level, (int)level);
}

mx_log_level mx_log_get_level(void) {
    return (mx_log_level)atomic_load(&log_level);
}

void mx_log(mx_log_level level, const char *fmt, ...) {
    if ((int)level > atomic_load(&log_level)) return;
    static const char *const tags[] = {"error: ", "warning: ", "", "debug: "};
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s%s\n", tags[level], line); // one call, so lines of two threads do not mix
}
