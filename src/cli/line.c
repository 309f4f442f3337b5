// Lines from standard input: with editing and history on a terminal (libedit), plain otherwise; and
// whole files. State: one cli_lines.
//
// Ctrl-C must cancel a line. libedit retries an interrupted read, so it gets its characters from
// here: one poll on the terminal and on the pipe of the signal handler, then UTF-8 decoding.
#include "cli/cli.h"

#include "base/mem.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <wchar.h>

struct cli_lines {
    EditLine *edit; // NULL: not a terminal
    History *history;
    const char *prompt;
    bool interrupted;
    char buf[4096]; // read and not yet handed out
    size_t at, n;
};

// Waits for input. False at the end of it, or after a signal (interrupted is set then).
static bool fill(cli_lines *l) {
    while (l->at == l->n) {
        struct pollfd p[2] = {{STDIN_FILENO, POLLIN, 0}, {cli_signal_fd(), POLLIN, 0}};
        int ready = cli_interrupted() ? 0 : poll(p, 2, -1);
        if (cli_interrupted()) {
            l->interrupted = true;
            return false;
        }
        if (ready < 0 && errno != EINTR) return false;
        if (ready <= 0 || p[0].revents == 0) continue;
        ssize_t k = read(STDIN_FILENO, l->buf, sizeof l->buf);
        if (k == 0 || (k < 0 && errno != EINTR && errno != EAGAIN)) return false;
        l->at = 0, l->n = k > 0 ? (size_t)k : 0;
    }
    return true;
}

// ---- Terminal ----

static int get_char(EditLine *e, wchar_t *out) {
    cli_lines *l = NULL;
    el_get(e, EL_CLIENTDATA, &l);
    char utf8[4];
    size_t n = 0;
    uint32_t cp;
    while (n < sizeof utf8) {
        if (!fill(l)) return l->interrupted ? -1 : 0;
        utf8[n++] = l->buf[l->at++];
        if (mx_utf8_decode(utf8, n, &cp) == (int)n) {
            // Ctrl-D of before the editor had the terminal comes as a zero
            *out = cp ? (wchar_t)cp : 4;
            return 1;
        }
        if (((unsigned char)utf8[0] & 0xc0) != 0xc0) break;
    }
    *out = 0xfffd;
    return 1;
}

static char *get_prompt(EditLine *e) {
    cli_lines *l = NULL;
    el_get(e, EL_CLIENTDATA, &l);
    static char text[16];
    snprintf(text, sizeof text, "%s", l->prompt);
    return text;
}

static void open_editor(cli_lines *l) {
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    l->edit = el_init("mlxcel", stdin, stderr, stderr);
    if (!l->edit) return;
    HistEvent ev;
    l->history = history_init();
    el_set(l->edit, EL_CLIENTDATA, l);
    el_set(l->edit, EL_PROMPT, get_prompt);
    el_set(l->edit, EL_EDITOR, "emacs");
    el_set(l->edit, EL_SIGNAL, 0);
    el_set(l->edit, EL_GETCFN, get_char);
    if (!l->history) return;
    history(l->history, &ev, H_SETSIZE, 500);
    history(l->history, &ev, H_SETUNIQUE, 1);
    el_set(l->edit, EL_HIST, history, l->history);
}

static cli_line_result read_edited(cli_lines *l, const char *prompt, mx_buf *out) {
    int n = 0;
    l->prompt = prompt;
    l->interrupted = false;
    const char *line = el_gets(l->edit, &n);
    if (l->interrupted) {
        el_reset(l->edit);
        fputc('\n', stderr);
        return CLI_LINE_INTERRUPTED;
    }
    if (!line || n <= 0) return CLI_LINE_END;
    HistEvent ev;
    if (l->history && line[0] != '\n') history(l->history, &ev, H_ENTER, line);
    size_t len = strlen(line);
    if (len && line[len - 1] == '\n') len--;
    mx_buf_add(out, line, len);
    return CLI_LINE_OK;
}

// ---- Anything else ----

static cli_line_result read_plain(cli_lines *l, mx_buf *out) {
    l->interrupted = false;
    bool any = false;
    while (fill(l)) {
        any = true;
        char *start = l->buf + l->at, *end = memchr(start, '\n', l->n - l->at);
        size_t n = end ? (size_t)(end - start) : l->n - l->at;
        mx_buf_add(out, start, n);
        l->at += n + (end != NULL);
        if (end) return CLI_LINE_OK;
    }
    if (l->interrupted) return CLI_LINE_INTERRUPTED;
    return any ? CLI_LINE_OK : CLI_LINE_END;
}

cli_lines *cli_lines_open(void) {
    cli_lines *l = mx_calloc(1, sizeof *l);
    if (cli_in_is_terminal() && cli_err_is_terminal()) open_editor(l);
    return l;
}

void cli_lines_close(cli_lines *l) {
    if (!l) return;
    if (l->edit) el_end(l->edit);
    if (l->history) history_end(l->history);
    mx_free(l);
}

cli_line_result cli_lines_read(cli_lines *l, const char *prompt, mx_buf *out) {
    mx_buf_clear(out);
    return l->edit ? read_edited(l, prompt, out) : read_plain(l, out);
}

// ---- Files ----

bool cli_file_line(FILE *f, mx_buf *out) {
    mx_buf_clear(out);
    int c;
    bool any = false;
    while ((c = getc(f)) != EOF) {
        any = true;
        if (c == '\n') break;
        mx_buf_putc(out, (char)c);
    }
    return any;
}

mx_status cli_read_all(const char *path, mx_buf *out, mx_err *err) {
    bool standard = strcmp(path, "-") == 0;
    FILE *f = standard ? stdin : fopen(path, "rb");
    if (!f) return mx_err_set(err, MX_NOTFOUND, "%s: %s", path, strerror(errno));
    char part[65536];
    size_t n;
    mx_status st = MX_OK;
    while (!out->full && (n = fread(part, 1, sizeof part, f)) > 0) mx_buf_add(out, part, n);
    if (ferror(f))
        st = mx_err_set(err, MX_IO, "%s: %s", path, strerror(errno));
    else if (out->full)
        st = mx_err_set(err, MX_TOOLARGE, "%s: longer than a prompt can be", path);
    if (!standard) fclose(f);
    return st;
}
