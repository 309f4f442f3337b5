// Test support: the built program as a user runs it, on tiny models in a folder that is its home:
// by pipes, or with what a test gives it. State: what is below.
#ifndef TESTS_SUPPORT_PROGRAM_H
#define TESTS_SUPPORT_PROGRAM_H

#include "base/mem.h"
#include "support/tiny_model.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

enum { LIMIT_S = 20, MAX_ARGS = 40 };

static char *dir, *model, *chat_model, *store;

static const char chat_template[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

static inline int set_up(void **state) {
    (void)state;
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "tiny.gguf");
    chat_model = mx_path_join(dir, "chat.gguf");
    store = mx_path_join(dir, "store");
    tiny_write(model, &(tiny_opts){.max_ctx = 65536});
    tiny_write(chat_model, &(tiny_opts){.max_ctx = 65536, .chat_template = chat_template});
    setenv("HOME", dir, 1);
    setenv("MLXCEL_DEVICE", "cpu", 1);
    setenv("MLXCEL_THREADS", "1", 1);
    setenv("TERM", "xterm", 1);
    static const char *const unset[] = {
        "MLXCEL_LOG",   "MLXCEL_MODELS_DIR",   "MLXCEL_CACHE_DIR",       "HF_HOME",
        "HF_HUB_CACHE", "MLXCEL_PROFILE_TTFT", "MLXCEL_PRINT_TOKEN_IDS", "MLXCEL_MEMORY_LIMIT"};
    for (size_t i = 0; i < MX_COUNT(unset); i++) unsetenv(unset[i]);
    return 0;
}

static inline int tear_down(void **state) {
    (void)state;
    mx_free(model);
    mx_free(chat_model);
    mx_free(store);
    ckpt_remove_dir(dir);
    return 0;
}

// ---- Running the program ----

typedef struct process {
    pid_t pid;
    int in, out, err; // our ends; -1
    char out_text[1 << 17], err_text[1 << 15];
    size_t n_out, n_err;
    int code; // exit code, or 1000 + signal
} process;

static char *argv[MAX_ARGS];
static const char *run_into;             // standard output is this file instead of a pipe
static const char *env_name, *env_value; // set for the next process only

// printf-like words; %s is one word whatever it holds.
static inline void set_args(const char *fmt, va_list ap) {
    static char words[MAX_ARGS][1024];
    int n = 0;
    snprintf(words[n], sizeof words[n], "%s", MX_TEST_PROGRAM);
    argv[n] = words[n], n++;
    for (const char *p = fmt; *p;) {
        size_t len = strcspn(p, " ");
        if (len == 2 && p[0] == '%' && p[1] == 's') {
            snprintf(words[n], sizeof words[n], "%s", va_arg(ap, const char *));
        } else {
            snprintf(words[n], sizeof words[n], "%.*s", (int)len, p);
        }
        argv[n] = words[n], n++;
        p += len;
        p += strspn(p, " ");
    }
    argv[n] = NULL;
}

static inline void child_streams(const int in[2], const int out[2], const int err[2]) {
    dup2(in[0], 0);
    dup2(run_into ? open(run_into, O_WRONLY) : out[1], 1);
    dup2(err[1], 2);
    for (int fd = 3; fd < 64; fd++) close(fd);
}

// Starts it with three pipes.
static inline void start(process *p, const char *fmt, ...) {
    int in[2], out[2], err[2];
    va_list ap;
    va_start(ap, fmt);
    set_args(fmt, ap);
    va_end(ap);
    *p = (process){0};
    assert_int_equal(pipe(in) | pipe(out) | pipe(err), 0);
    p->pid = fork();
    if (p->pid == 0) {
        if (env_name) setenv(env_name, env_value, 1);
        child_streams(in, out, err);
        execv(argv[0], argv);
        _exit(127);
    }
    env_name = run_into = NULL;
    close(in[0]), close(out[1]), close(err[1]);
    p->in = in[1], p->out = out[0], p->err = err[0];
}

static inline void take(int *fd, char *text, size_t cap, size_t *n) {
    char sink[4096];
    bool room = *n + 1 < cap;
    ssize_t k = read(*fd, room ? text + *n : sink, room ? cap - *n - 1 : sizeof sink);
    if (k <= 0) {
        close(*fd);
        *fd = -1;
    } else if (room) {
        *n += (size_t)k;
    }
}

// Reads until `text` (NULL: the end) was seen on standard output or error. False after seconds.
static inline bool read_for(process *p, double seconds, const char *text) {
    double end = mx_now_s() + seconds;
    while (p->out >= 0 || p->err >= 0) {
        if (text && (strstr(p->out_text, text) || strstr(p->err_text, text))) return true;
        struct pollfd f[2] = {{p->out, POLLIN, 0}, {p->err, POLLIN, 0}};
        if (mx_now_s() > end) return false;
        poll(f, 2, 100);
        if (f[0].revents) take(&p->out, p->out_text, sizeof p->out_text, &p->n_out);
        if (f[1].revents) take(&p->err, p->err_text, sizeof p->err_text, &p->n_err);
    }
    return !text || strstr(p->out_text, text) || strstr(p->err_text, text);
}

static inline bool read_until(process *p, const char *text) {
    return read_for(p, LIMIT_S, text);
}

static inline void say(process *p, const char *text) {
    assert_int_equal(write(p->in, text, strlen(text)), strlen(text));
}

static inline void close_input(process *p) {
    if (p->in >= 0) close(p->in);
    p->in = -1;
}

// Reads the rest and the exit code; a process that does not end is killed and is a failure.
static inline void finish(process *p) {
    bool ended = read_until(p, NULL);
    if (!ended) kill(p->pid, SIGKILL);
    int status = 0;
    waitpid(p->pid, &status, 0);
    p->code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    close_input(p);
    if (p->out >= 0) close(p->out);
    if (p->err >= 0) close(p->err);
    if (!ended) fail_msg("%s did not end: %s", argv[1], p->err_text);
}

// Runs it with empty standard input.
static inline void run(process *p, const char *fmt, ...) {
    char line[512];
    va_list ap;
    snprintf(line, sizeof line, "%s", fmt);
    va_start(ap, fmt);
    const char *a[8];
    size_t n = 0;
    for (const char *s = strstr(fmt, "%s"); s; s = strstr(s + 2, "%s"))
        a[n++] = va_arg(ap, const char *);
    va_end(ap);
    while (n < 8) a[n++] = "";
    start(p, line, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    close_input(p);
    finish(p);
}

static inline void expect(const process *p, int code, const char *out, const char *in_err) {
    if (p->code != code) fail_msg("exit code %d, expected %d: %s", p->code, code, p->err_text);
    if (out) assert_string_equal(p->out_text, out);
    if (in_err && !strstr(p->err_text, in_err)) fail_msg("no \"%s\" in: %s", in_err, p->err_text);
}

static process p;
#define FORCE_A "--logit-bias 65=100 --ignore-eos" // ids of the tiny model are bytes
#define FORCED  "AAAAAAAA"                         // eight of them

static inline void pipe_through(const char *input, const char *fmt, const char *arg) {
    start(&p, fmt, arg);
    say(&p, input);
    close_input(&p);
    finish(&p);
}

#endif
