// Standard streams and signals. State: process-wide, in this file: what signals came, whether
// standard output still takes text.
//
// A reader that leaves (EPIPE) ends the output quietly; any other failure is reported once, at the
// end. While a model loads nobody watches the flag, so a signal ends the process at once; while
// text is generated it only sets the flag and wakes whoever waits on the pipe. SIGBUS ends it too,
// with a message.
#include "cli/cli.h"

#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static void (*end_process)(int code);
static atomic_int n_signals;
static atomic_bool is_deferred, is_terminated;
static int wake_pipe[2] = {-1, -1};
static int out_error; // errno of the first failed write

static void on_signal(int sig) {
    int saved = errno;
    if (sig == SIGTERM) atomic_store(&is_terminated, true);
    int n = atomic_fetch_add(&n_signals, 1) + 1;
    if (end_process && (!atomic_load(&is_deferred) || n >= 3)) end_process(CLI_EXIT_INTERRUPTED);
    ssize_t written = write(wake_pipe[1], "", 1); // a full pipe wakes as well
    (void)written;
    errno = saved;
}

// Model files are mapped; one that becomes shorter under us leaves pages that cannot be read.
static void on_bus_error(int sig) {
    (void)sig;
    static const char text[] = "mlxcel: a model file cannot be read any more; did it become "
                               "shorter while in use?\n";
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    end_process(atomic_load(&is_deferred) ? CLI_EXIT_RUN : CLI_EXIT_LOAD);
}

// A model file must not become descriptor 1.
static void open_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
        int null = open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);
        if (null >= 0 && null != fd) {
            dup2(null, fd);
            close(null);
        }
    }
}

void cli_term_init(void (*end_now)(int code)) {
    open_standard_streams();
    end_process = end_now;
    CHECK(pipe2(wake_pipe, O_CLOEXEC | O_NONBLOCK) == 0);
    struct sigaction a = {.sa_handler = on_signal}; // no SA_RESTART: reads return
    sigemptyset(&a.sa_mask);
    struct sigaction old;
    // nohup and background shells ignore SIGINT: it stays ignored
    if (sigaction(SIGINT, NULL, &old) == 0 && old.sa_handler != SIG_IGN)
        sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    signal(SIGPIPE, SIG_IGN);
    struct sigaction bus = {.sa_handler = on_bus_error};
    sigemptyset(&bus.sa_mask);
    if (end_process) sigaction(SIGBUS, &bus, NULL);
}

bool cli_signals_defer(bool deferred) {
    return atomic_exchange(&is_deferred, deferred);
}

bool cli_interrupted(void) {
    return atomic_load(&n_signals) > 0;
}

bool cli_terminated(void) {
    return atomic_load(&is_terminated);
}

void cli_interrupt_clear(void) {
    char sink[64];
    while (read(wake_pipe[0], sink, sizeof sink) > 0) continue;
    if (!cli_terminated()) atomic_store(&n_signals, 0);
}

int cli_signal_fd(void) {
    return wake_pipe[0];
}

// ---- Output ----

bool cli_out(const void *p, size_t n) {
    const char *at = p;
    while (n > 0 && !out_error) {
        ssize_t k = write(STDOUT_FILENO, at, n);
        if (k >= 0)
            at += k, n -= (size_t)k;
        else if (errno != EINTR)
            out_error = errno;
    }
    return !out_error;
}

bool cli_outs(const char *s) {
    return cli_out(s, strlen(s));
}

bool cli_stdout_closed(void) {
    return out_error != 0;
}

int cli_finish(int code) {
    if (!out_error || out_error == EPIPE) return code;
    cli_note("mlxcel: standard output: %s", strerror(out_error));
    return code == CLI_EXIT_OK ? CLI_EXIT_RUN : code;
}

bool cli_err_is_terminal(void) {
    return isatty(STDERR_FILENO) == 1;
}
bool cli_out_is_terminal(void) {
    return isatty(STDOUT_FILENO) == 1;
}
bool cli_in_is_terminal(void) {
    return isatty(STDIN_FILENO) == 1;
}

void cli_note(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    fflush(stderr);
}
