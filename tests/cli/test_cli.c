// The program as a user meets it: exit codes, what goes to which stream, chats through pipes and on
// a terminal, signals, the store, broken models. Runs the built program on tiny models; a forced
// token (--logit-bias ID=100) makes its text known.
#include "backend/cuda/cuda.h"
#include "base/mem.h"
#include "support/tiny_model.h"

#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pty.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

enum { LIMIT_S = 20, MAX_ARGS = 40 };

static char *dir, *model, *chat_model, *store;

static const char chat_template[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

static int set_up(void **state) {
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

static int tear_down(void **state) {
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
static void set_args(const char *fmt, va_list ap) {
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

static void child_streams(const int in[2], const int out[2], const int err[2]) {
    dup2(in[0], 0);
    dup2(run_into ? open(run_into, O_WRONLY) : out[1], 1);
    dup2(err[1], 2);
    for (int fd = 3; fd < 64; fd++) close(fd);
}

// Starts it with three pipes.
static void start(process *p, const char *fmt, ...) {
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

static void take(int *fd, char *text, size_t cap, size_t *n) {
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
static bool read_for(process *p, double seconds, const char *text) {
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

static bool read_until(process *p, const char *text) {
    return read_for(p, LIMIT_S, text);
}

static void say(process *p, const char *text) {
    assert_int_equal(write(p->in, text, strlen(text)), strlen(text));
}

static void close_input(process *p) {
    if (p->in >= 0) close(p->in);
    p->in = -1;
}

// Reads the rest and the exit code; a process that does not end is killed and is a failure.
static void finish(process *p) {
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
static void run(process *p, const char *fmt, ...) {
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

static void expect(const process *p, int code, const char *out, const char *in_err) {
    if (p->code != code) fail_msg("exit code %d, expected %d: %s", p->code, code, p->err_text);
    if (out) assert_string_equal(p->out_text, out);
    if (in_err && !strstr(p->err_text, in_err)) fail_msg("no \"%s\" in: %s", in_err, p->err_text);
}

static process p;
#define FORCE_A "--logit-bias 65=100 --ignore-eos" // ids of the tiny model are bytes
#define FORCED  "AAAAAAAA"                         // eight of them

// ---- Exit codes and streams ----

static void usage_is_2_and_names_things(void **state) {
    (void)state;
    run(&p, "");
    expect(&p, 2, "", "Usage");
    run(&p, "servant");
    expect(&p, 2, "", "generate");
    run(&p, "generate -m %s -p x --nonsense", model);
    expect(&p, 2, "", "--nonsense");
    run(&p, "generate -m %s -p x --image a.png", model);
    expect(&p, 2, "", "--image");
    run(&p, "generate -m %s -p x --top-p 2", model);
    expect(&p, 2, "", "--top-p");
    run(&p, "generate -m %s -p x -c 2147483616", model);
    expect(&p, 2, "", "-c: expected an integer");
    run(&p, "generate -m %s -p x --kv-type q4_0", model);
    expect(&p, 2, "", "f16|f32");
    run(&p, "generate -m %s", model);
    expect(&p, 2, "", "-p TEXT");
    run(&p, "generate -p x");
    expect(&p, 2, "", "-m MODEL");
    run(&p, "generate -m %s -p x --logit-bias 99999=1", model);
    expect(&p, 2, "", "99999");
    run(&p, "generate -m %s -p %s", model, "\xff\xfe");
    expect(&p, 2, "", "UTF-8");
    run(&p, "arch nonsense");
    expect(&p, 2, "", "llama");
}

static void help_is_on_standard_output(void **state) {
    (void)state;
    static const char *const how[] = {"--help",     "-h",        "help",       "generate --help",
                                      "help bench", "--version", "--help-env", "--help-markdown"};
    for (size_t i = 0; i < MX_COUNT(how); i++) {
        run(&p, how[i]);
        expect(&p, 0, NULL, NULL);
        assert_true(p.n_out > 8 && p.n_err == 0);
    }
}

static void loading_errors_are_3(void **state) {
    (void)state;
    run(&p, "generate -m /nonexistent/model -p x");
    expect(&p, 3, "", "/nonexistent/model");
    run(&p, "bench -m /nonexistent/model --ab --arm MLXCEL_EXACT=1"); // by a process of its own
    expect(&p, 3, "", "/nonexistent/model");
    run(&p, "run no-such-model -p x");
    expect(&p, 3, "", "no-such-model");
    char *broken = mx_path_join(dir, "broken.gguf"), *text;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file(model, 1 << 26, &text, &n, &err), MX_OK);
    ckpt_write_file(broken, text, n - 1);
    static const char *const commands[] = {"generate -p x -m %s", "inspect -m %s", "run -p x %s",
                                           "bench -m %s"};
    for (size_t i = 0; i < MX_COUNT(commands); i++) {
        run(&p, commands[i], broken);
        expect(&p, 3, "", "broken.gguf");
    }
    ckpt_write_file(broken, text, 100);
    run(&p, "tokenize -m %s", broken);
    expect(&p, 3, "", "broken.gguf");
    ckpt_write_file(broken, "not a model at all", 18);
    run(&p, "inspect -m %s", broken);
    expect(&p, 3, "", "broken.gguf");
    env_name = "MLXCEL_MEMORY_LIMIT", env_value = "4K";
    run(&p, "generate -m %s -p x -n 1", model);
    expect(&p, 3, "", "DOES NOT FIT");
    env_name = "MLXCEL_MEMORY_LIMIT", env_value = "4K";
    run(&p, "generate -m %s -p x -n 1 --force", model);
    expect(&p, 0, NULL, NULL);
    mx_free(text);
    mx_free(broken);
}

// The named phases of a [TTFT] line are the whole, but for rounding.
static bool ttft_adds_up(const char *text) {
    const char *at = strstr(text, "[TTFT]");
    double setup, build, sample, eval, post, prefill, residual, load;
    unsigned long long bytes, tensors;
    if (!at || sscanf(at,
                      "[TTFT] prompt=%*d tok setup=%lfms build=%lfms sample=%lfms eval=%lfms "
                      "post=%lfms | prefill=%lfms residual=%lfms | upload bytes=%llu tensors=%llu "
                      "load=%lfms",
                      &setup, &build, &sample, &eval, &post, &prefill, &residual, &bytes, &tensors,
                      &load) != 10) {
        return false;
    }
    if (bytes < 1000 || tensors < 10 || load <= 0) return false;
    double rest = prefill - (setup + build + sample + eval + residual);
    return eval > 0 && rest > -0.06 && rest < 0.06;
}

static void the_text_is_all_of_standard_output(void **state) {
    (void)state;
    run(&p, "generate -m %s -p x -n 8 " FORCE_A, model);
    expect(&p, 0, FORCED, "Model loaded in ");
    static const char *const lines[] = {"Runtime device: ", "Loading model from ", "(resident: ",
                                        "Command buffers: ", "Memory estimate vs actual: "};
    for (size_t i = 0; i < MX_COUNT(lines); i++) assert_non_null(strstr(p.err_text, lines[i]));
    assert_null(strchr(p.err_text, '\033'));
    assert_null(strchr(p.err_text, '\r'));
    assert_null(strstr(p.err_text, "Max tokens"));
    run(&p, "generate -m %s -p x -n 8 -q " FORCE_A, model);
    expect(&p, 0, FORCED, NULL);
    assert_string_equal(p.err_text, "");
    run(&p, "generate -m %s -p x --ctx-size 16 " FORCE_A, model);
    expect(&p, 0, NULL, "Max tokens: unlimited (-1) -> 15 (model context window 16, prompt 1)");
    assert_int_equal(p.n_out, 15);
    assert_null(strstr(p.err_text, "Detected")); // the CPU was asked for, nobody the driver
    unsetenv("MLXCEL_DEVICE");
    run(&p, "generate -m %s -p x -n 2", model);
    setenv("MLXCEL_DEVICE", "cpu", 1);
    expect(&p, 0, NULL, " GPU(s).\n");
    bool blind = strstr(p.err_text, "built without CUDA and sees no GPU") != NULL;
    assert_int_equal(blind, !mx_cuda_archs()[0]);
    run(&p, "generate -m %s -p x -n 2 --profile", model);
    expect(&p, 0, NULL, "[TTFT] prompt=1 tok setup=");
    assert_true(ttft_adds_up(p.err_text));
    run(&p, "generate -m %s --profile --estimate-memory", model);
    expect(&p, 2, "", "--profile: --estimate-memory runs nothing");
    setenv("MLXCEL_PROFILE_TTFT", "", 1); // present is enough
    run(&p, "generate -m %s -p x -n 2 -q", model);
    expect(&p, 0, NULL, "[TTFT] prompt=1 tok setup=");
    run(&p, "bench -m %s -p 40 -n 0 -r 2", model);
    unsetenv("MLXCEL_PROFILE_TTFT");
    expect(&p, 0, NULL, "[TTFT] prompt=40 tok setup=0.00ms");
    assert_true(ttft_adds_up(p.err_text));
    assert_true(ttft_adds_up(strchr(p.err_text, '\n') + 1)); // one a measured pass
    run(&p, "generate -m %s -p x -n 2 --profile", model);
    expect(&p, 0, NULL, "[TTFT]");
    assert_non_null(strstr(p.err_text, "Slow paths: none"));
}

static void output_that_nobody_reads(void **state) {
    (void)state;
    start(&p, "generate -m %s -p x -q -n -1 --ctx-size 60000 " FORCE_A, model);
    close(p.out); // the reader left
    p.out = -1;
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_string_equal(p.err_text, "");
    run_into = "/dev/full"; // a device without room: not quiet
    run(&p, "--help");
    expect(&p, 1, "", "standard output: ");
}

// ---- JSON ----

static void json_of_generate(void **state) {
    (void)state;
    run(&p, "generate -m %s -p ab -n 3 --json -q --seed 5 --stop %s", chat_model, "never there");
    expect(&p, 0, NULL, NULL);
    json_error_t e;
    json_t *j = json_loads(p.out_text, 0, &e);
    assert_non_null(j);
    assert_true(json_is_string(json_object_get(j, "text")));
    assert_int_equal(json_array_size(json_object_get(j, "ids")), 3);
    // <|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n: 3 marks and 18 bytes
    json_t *prompt = json_object_get(j, "prompt_ids");
    assert_int_equal(json_array_size(prompt), 3 + 4 + 1 + 2 + 1 + 9 + 1);
    assert_int_equal(json_integer_value(json_array_get(prompt, 0)), TINY_IM_START);
    assert_string_equal(json_string_value(json_object_get(j, "finish_reason")), "length");
    static const char *const keys[] = {"cache_n",
                                       "prompt_n",
                                       "prompt_ms",
                                       "prompt_per_token_ms",
                                       "prompt_per_second",
                                       "predicted_n",
                                       "predicted_ms",
                                       "predicted_per_token_ms",
                                       "predicted_per_second"};
    json_t *t = json_object_get(j, "timings");
    for (size_t i = 0; i < MX_COUNT(keys); i++)
        assert_true(json_is_number(json_object_get(t, keys[i])));
    assert_int_equal(json_integer_value(json_object_get(t, "predicted_n")), 3);
    json_decref(j);
    run(&p, "generate -m %s -p ab -n 3 --json -q --no-chat-template", chat_model);
    j = json_loads(p.out_text, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(j, "prompt_ids")), 2);
    json_decref(j);
}

// A file's name is bytes: in JSON, what is no UTF-8 becomes U+FFFD.
static void json_of_a_path_that_is_no_text(void **state) {
    (void)state;
    char *sub = mx_path_join(dir, "st\xff/o/m"), *odd = mx_path_join(sub, "odd\xfe.gguf"), *text;
    char *models = mx_path_join(dir, "st\xff"), *file = mx_path_join(dir, "text");
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file(model, 1 << 26, &text, &n, &err), MX_OK);
    assert_int_equal(mx_mkdirs(sub, &err), MX_OK);
    ckpt_write_file(odd, text, n);
    ckpt_write_file(file, "some text", 9);
    static const char *const commands[] = {
        "inspect --json %s", "generate -q --json -p x -n 1 -m %s", "perplexity --json -m %s -f %s",
        "bench -o json -r 1 -p 1 -n 1 -m %s"};
    for (size_t i = 0; i < MX_COUNT(commands); i++) {
        run(&p, commands[i], odd, file);
        expect(&p, 0, NULL, NULL);
        json_t *j = json_loads(p.out_text, 0, NULL);
        assert_non_null(j);
        const char *path = json_string_value(json_object_get(j, i ? "model" : "path"));
        assert_non_null(path);
        assert_non_null(strstr(path, "odd\xef\xbf\xbd.gguf"));
        json_decref(j);
    }
    run(&p, "list --json --models-dir %s", models);
    json_t *j = json_loads(p.out_text, 0, NULL);
    assert_int_equal(json_array_size(j), 1);
    json_decref(j);
    mx_free(text);
    mx_free(file);
    mx_free(models);
    mx_free(odd);
    mx_free(sub);
}

static void texts_that_are_no_utf8(void **state) {
    (void)state;
    run(&p, "run %s --system %s", chat_model, "\xff"); // a chat too
    expect(&p, 2, "", "--system: not valid UTF-8");
    run(&p, "generate -m %s -p x --system %s", chat_model, "\xff");
    expect(&p, 2, "", "--system: not valid UTF-8");
    run(&p, "generate -m %s -p x -n 3 --json --stop %s", model, "\xbd");
    expect(&p, 2, "", "stop string 0 is not valid UTF-8");
}

// A model whose numbers overflow: an error at every way to ask it, not token 0 for ever.
static void a_model_without_finite_logits(void **state) {
    (void)state;
    char *broken = mx_path_join(dir, "nan.gguf"), *file = mx_path_join(dir, "text"), *text;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file(model, 1 << 26, &text, &n, &err), MX_OK);
    memset(text + n - 64 * sizeof(float), 0xff, 64 * sizeof(float)); // the last norm's weights
    ckpt_write_file(broken, text, n);
    ckpt_write_file(file, "some text", 9);
    run(&p, "generate -m %s -p x -n 3 -q", broken);
    expect(&p, 1, "", "no finite logit at position 0");
    run(&p, "generate -m %s -p x -n 3 -q -t 1", broken);
    expect(&p, 1, "", "no finite logit at position 0");
    run(&p, "perplexity -m %s -f %s", broken, file);
    expect(&p, 1, "", "no finite logit at position 0");
    start(&p, "perplexity -m %s --jsonl", broken);
    say(&p, "{\"ids\":[1,2,3]}\n");
    close_input(&p);
    finish(&p);
    expect(&p, 1, "{\"error\":\"no finite logit at position 0\"}\n", "1 lines");
    mx_free(text);
    mx_free(file);
    mx_free(broken);
}

static void numbers_in_the_environment_have_ranges(void **state) {
    (void)state;
    static const struct {
        const char *name, *value;
    } bad[] = {
        {"MLXCEL_PREFILL_CHUNK", "-1"},
        {"MLXCEL_PREFILL_CHUNK", "4294967296"},
        {"MLXCEL_THREADS", "-1"},
        {"MLXCEL_HEADROOM_FACTOR", "-1"},
        {"MLXCEL_HEADROOM_FACTOR", "1e300"},
        {"MLXCEL_ACTIVATION_MULT", "-0.5"},
        {"MLX_MAX_OPS_PER_BUFFER", "0"},
        {"MLX_MAX_MB_PER_BUFFER", "x"},
        {"MLXCEL_DECODE_MB_PER_BUFFER", "-1"},
        {"MLXCEL_MIN_OPS_PER_BUFFER", "-1"},
        {"MLXCEL_BUFFER_ACCOUNTING", "letters"},
        {"MLXCEL_BUFFER_DEFAULTS", "theirs"},
    };
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        env_name = bad[i].name, env_value = bad[i].value;
        run(&p, "generate -m %s -p x -n 8 -q " FORCE_A, model);
        char what[96];
        snprintf(what, sizeof what, "%s=%s is not a valid value", bad[i].name, bad[i].value);
        expect(&p, 0, FORCED, what);
    }
}

static void a_small_stack_limit(void **state) {
    (void)state;
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_STACK, &old), 0);
    small = old;
    small.rlim_cur = 128 << 10; // that of threads is not taken from it
    setrlimit(RLIMIT_STACK, &small);
    start(&p, "generate -m %s -p x -n 8 -q " FORCE_A, chat_model);
    setrlimit(RLIMIT_STACK, &old);
    close_input(&p);
    finish(&p);
    expect(&p, 0, FORCED, "");
}

static void a_model_file_that_becomes_shorter(void **state) {
    (void)state;
    char *shrinks = mx_path_join(dir, "shrinks.gguf"), *text;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file(model, 1 << 26, &text, &n, &err), MX_OK);
    ckpt_write_file(shrinks, text, n);
    env_name = "MLXCEL_WEIGHT_MATERIALIZATION", env_value = "lazy";
    start(&p, "run %s", shrinks);
    assert_true(read_until(&p, "no chat template"));
    assert_int_equal(truncate(shrinks, 4096), 0);
    say(&p, "hello\n");
    finish(&p);
    expect(&p, 1, "", "shorter while in use");
    mx_free(text);
    mx_free(shrinks);
}

static void input_without_an_end(void **state) {
    (void)state;
    run(&p, "generate -m %s -q -n 1 -f /dev/zero", model);
    expect(&p, 1, "", "/dev/zero: longer than a prompt can be");
}

// serve has a prompt cache; a KV budget holds both.
static void estimates_have_every_part(void **state) {
    (void)state;
    env_name = "MLXCEL_MEMORY_LIMIT", env_value = "100M";
    run(&p, "serve -m %s --port 0 --prompt-cache-bytes 200M", model);
    expect(&p, 3, "", "does not fit");
    assert_non_null(strstr(p.err_text, "Prompt cache:   200.00 MiB (209715200 bytes)"));
    env_name = "MLXCEL_MEMORY_LIMIT", env_value = "20M";
    run(&p, "serve -m %s --port 0 --prompt-cache-bytes 9M --kv-cache-budget 69M -c 65536", model);
    expect(&p, 3, "", "does not fit");
    assert_non_null(strstr(p.err_text, "KV cache:       64.00 MiB"));
    assert_non_null(strstr(p.err_text, "Prompt cache:   5.00 MiB"));
    run(&p, "inspect %s --device tpu", model);
    expect(&p, 2, "", "--device: expected cpu, cuda, cuda:N or gpu, got \"tpu\"");
    run(&p, "generate -m %s -p x --device cuda:x", model);
    expect(&p, 2, "", "got \"cuda:x\"");
    env_name = "MLXCEL_DEVICE", env_value = "tpu";
    run(&p, "generate -m %s -p x", model);
    expect(&p, 3, "", "device 'tpu'");
}

static void json_of_inspect_and_estimate(void **state) {
    (void)state;
    run(&p, "inspect %s", model);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "llama"));
    run(&p, "inspect -m %s --json", model);
    expect(&p, 0, NULL, NULL);
    json_t *j = json_loads(p.out_text, 0, NULL);
    assert_non_null(j);
    json_t *memory = json_object_get(j, "memory"), *config = json_object_get(j, "config");
    assert_string_equal(json_string_value(json_object_get(j, "family")), "llama");
    assert_int_equal(json_integer_value(json_object_get(config, "d_model")), 64);
    // 2 layers, keys and values, 2 heads of 16, 2 bytes, 8192 positions
    assert_int_equal(json_integer_value(json_object_get(memory, "kv_bytes_total")),
                     2 * 2 * 2 * 16 * 2 * 8192);
    static const char *const keys[] = {
        "weights_bytes",      "activation_bytes", "backend_inflight_bytes",
        "prompt_cache_bytes", "headroom_bytes",   "total_bytes",
        "budget_bytes"};
    for (size_t i = 0; i < MX_COUNT(keys); i++) {
        assert_true(json_is_integer(json_object_get(memory, keys[i])));
    }
    json_decref(j);
    run(&p, "generate -m %s --estimate-memory", model);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "=== Memory Estimate ==="));
    assert_non_null(strstr(p.out_text, "FITS: "));
}

// A file's own name for its mixture, and what most bytes are where that is something else.
static void formats_are_named(void **state) {
    (void)state;
    static const struct {
        mx_dtype type;
        uint32_t file_type;
        int32_t d_model;
        const char *format;
    } cases[] = {
        {MX_Q4_1, 3, 64, "gguf q4_1"},       {MX_Q4_1, 1024 + 3, 64, "gguf q4_1"},
        {MX_Q4_K, 15, 256, "gguf q4_k_m"},   {MX_Q8_0, 15, 64, "gguf q4_k_m, most bytes q8_0"},
        {MX_F32, 0, 64, "gguf f32"},         {MX_Q8_0, 9999, 1024, "gguf q8_0"},
        {MX_Q4_0, 0, 32, "gguf q4_0, mixed"}}; // its norms are f32, and many
    char *path = mx_path_join(dir, "format.gguf");
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        tiny_write(path, &(tiny_opts){.type = cases[i].type,
                                      .file_type = cases[i].file_type,
                                      .n_layer = cases[i].d_model == 32 ? 20 : 2,
                                      .d_model = cases[i].d_model,
                                      .d_ff = cases[i].d_model});
        run(&p, "inspect %s --json", path);
        expect(&p, 0, NULL, NULL);
        json_t *j = json_loads(p.out_text, 0, NULL);
        assert_string_equal(json_string_value(json_object_get(j, "format")), cases[i].format);
        json_decref(j);
    }
    mx_free(path);
}

static void json_of_bench(void **state) {
    (void)state;
    run(&p, "bench -m %s -p 16 -n 300 -r 2 -d 8 -o json", model);
    expect(&p, 0, NULL, NULL);
    json_t *j = json_loads(p.out_text, 0, NULL), *rows = json_object_get(j, "rows");
    assert_int_equal(json_array_size(rows), 2);
    assert_int_equal(json_array_size(json_object_get(json_array_get(rows, 1), "tok_s")), 2);
    assert_true(json_is_number(json_object_get(j, "read_gb_s")));
    assert_int_equal(strlen(json_string_value(json_object_get(j, "token_hash"))), 16);
    assert_int_equal(json_array_size(json_object_get(j, "fallbacks")), 0);
    assert_true(json_number_value(json_object_get(j, "buffers_per_token")) >= 1);
    char *first = mx_strdup(json_string_value(json_object_get(j, "logit_hash")));
    json_decref(j);
    // on a busy machine one of three may be done before another begins: a row without a number
    run(&p, "bench -m %s -p 0 -n 300 -r 1 -d 8 -b 3 -o json --allow-fallback", model);
    expect(&p, 0, NULL, NULL);
    j = json_loads(p.out_text, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(j, "rows")), 1);
    assert_string_equal(json_string_value(json_object_get(j, "logit_hash")), first);
    mx_free(first);
    json_decref(j);
}

// ---- JSON lines ----

static void pipe_through(const char *input, const char *fmt, const char *arg) {
    start(&p, fmt, arg);
    say(&p, input);
    close_input(&p);
    finish(&p);
}

static void tokenize_lines(void **state) {
    (void)state;
    pipe_through("{\"text\":\"ab\"}\n{\"text\":\"<|im_end|>\"}\n"
                 "{\"text\":\"<|im_end|>\",\"parse_special\":false}",
                 "tokenize -m %s", model);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "{\"ids\":[97,98]}\n{\"ids\":[258]}\n{\"ids\":[60,"));
    pipe_through("{\"ids\":[97,258,98]}\n", "tokenize --decode -m %s", model);
    expect(&p, 0, "{\"text\":\"a<|im_end|>b\"}\n", NULL);
    pipe_through("nonsense\n{\"text\":1}\n{\"text\":\"a\"}\n", "tokenize -m %s", model);
    expect(&p, 1, NULL, "2 lines");
    assert_non_null(strstr(p.out_text, "{\"ids\":[97]}\n"));
    assert_non_null(strstr(p.out_text, "{\"error\":"));
}

// A folder without a model will do.
static void tokenizer_only(void **state) {
    (void)state;
    static const char json[] =
        "{\"version\":\"1.0\",\"added_tokens\":[],\"normalizer\":null,\"pre_tokenizer\":"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
        "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
        "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}}";
    static const char config[] = "{\"chat_template\":\"[{{ messages[0].content }}]\"}";
    char *folder = mx_path_join(dir, "only"), *path = mx_path_join(folder, "tokenizer.json"),
         *config_path = mx_path_join(folder, "tokenizer_config.json");
    assert_int_equal(mkdir(folder, 0700), 0);
    ckpt_write_file(path, json, sizeof json - 1);
    ckpt_write_file(config_path, config, sizeof config - 1);
    pipe_through("{\"text\":\"bab\"}\n", "tokenize -m %s", folder);
    expect(&p, 0, "{\"ids\":[1,2]}\n", NULL);
    pipe_through("{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}\n", "template -m %s",
                 folder);
    expect(&p, 0, "{\"prompt\":\"[hi]\"}\n", NULL);
    run(&p, "generate -p x -m %s", folder);
    expect(&p, 3, "", "config.json");
    mx_free(folder);
    mx_free(path);
    mx_free(config_path);
}

// A folder with good small files, one of which is `name` with arrays in arrays; a header of
// safetensors has its length in front.
static void write_deep(const char *folder, const char *name, int depth) {
    static const char *const good[][2] = {
        {"config.json", "{\"model_type\":\"llama\",\"hidden_size\":64,\"num_attention_heads\":4,"
                        "\"num_hidden_layers\":1,\"intermediate_size\":96,\"vocab_size\":272,"
                        "\"rms_norm_eps\":1e-5}"},
        {"tokenizer.json", "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}"},
        {"model.safetensors", "\2\0\0\0\0\0\0\0{}"},
    };
    mkdir(folder, 0700);
    for (size_t i = 0; i < MX_COUNT(good); i++) {
        char *path = mx_path_join(folder, good[i][0]);
        ckpt_write_file(path, good[i][1], i == 2 ? 10 : strlen(good[i][1]));
        mx_free(path);
    }
    mx_buf b;
    mx_buf_init(&b, 0);
    bool header = strcmp(name, "model.safetensors") == 0;
    uint64_t n = (uint64_t)depth * 2 + 6;
    if (header) mx_buf_add(&b, (const char *)&n, sizeof n);
    mx_buf_puts(&b, "{\"x\":");
    for (int i = 0; i < depth; i++) mx_buf_putc(&b, '[');
    for (int i = 0; i < depth; i++) mx_buf_putc(&b, ']');
    mx_buf_putc(&b, '}');
    char *path = mx_path_join(folder, name);
    ckpt_write_file(path, b.data, b.n);
    mx_free(path);
    mx_buf_free(&b);
}

// Every JSON file of a checkpoint, as deep as somebody likes: an error that names it, at once.
static void deep_files_are_refused(void **state) {
    (void)state;
    static const char *const files[][2] = {{"config.json", "inspect -m %s"},
                                           {"generation_config.json", "generate -p x -m %s"},
                                           {"model.safetensors", "inspect -m %s"},
                                           {"tokenizer.json", "tokenize -m %s"},
                                           {"tokenizer_config.json", "tokenize -m %s"}};
    for (size_t i = 0; i < MX_COUNT(files); i++) {
        for (int depth = 1000; depth <= 1000000; depth *= 1000) {
            char *folder = mx_path_join(dir, "deep");
            write_deep(folder, files[i][0], depth);
            run(&p, files[i][1], folder);
            expect(&p, 3, "", files[i][0]);
            assert_true(strstr(p.err_text, "nested deeper") || strstr(p.err_text, "not an object"));
            ckpt_remove_dir(folder);
        }
    }
}

static void template_lines(void **state) {
    (void)state;
    pipe_through("{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}\n", "template -m %s",
                 chat_model);
    expect(&p, 0, "{\"prompt\":\"<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n\"}\n",
           NULL);
    pipe_through(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
        "\"template\":\"{{ bos_token }}{{ messages[0].content }}\",\"bos_token\":\"<s>\"}\n"
        "{\"messages\":[],\"template\":\"{{ raise_exception('no') }}\"}\n",
        "%s", "template");
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "{\"prompt\":\"<s>hi\"}\n{\"error\":"));
}

static void perplexity_lines_and_text(void **state) {
    (void)state;
    pipe_through("{\"ids\":[97,98,99]}\n{\"ids\":[5]}\n", "perplexity -m %s --jsonl --logprobs 2",
                 model);
    expect(&p, 0, NULL, NULL);
    json_t *j = json_loads(p.out_text, JSON_DISABLE_EOF_CHECK, NULL);
    json_t *lp = json_object_get(j, "logprobs"), *top = json_object_get(j, "top");
    assert_int_equal(json_array_size(lp), 3);
    assert_true(json_is_null(json_array_get(lp, 0)));
    assert_true(json_number_value(json_array_get(lp, 2)) < 0);
    assert_int_equal(json_array_size(json_array_get(top, 1)), 2);
    json_decref(j);
    assert_non_null(strstr(p.out_text, "\n{\"ids\":[5],\"logprobs\":[null],\"top\":[null]}\n"));
    char *file = mx_path_join(dir, "text.txt");
    ckpt_write_file(file, "abcdefghij", 10);
    run(&p, "perplexity -m %s -f %s --ctx-size 4 --json", model, file);
    expect(&p, 0, NULL, NULL);
    j = json_loads(p.out_text, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(j, "tokens")), 3 + 3 + 1);
    assert_int_equal(json_integer_value(json_object_get(j, "windows")), 3);
    assert_true(json_number_value(json_object_get(j, "perplexity")) > 1);
    json_decref(j);
    mx_free(file);
}

static void the_prompt_may_come_from_a_file(void **state) {
    (void)state;
    pipe_through("abc", "generate -m %s -f - -n 1 --json -q", model);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "\"prompt_ids\":[97,98,99]"));
    run(&p, "generate -m %s -p x -f -", model);
    expect(&p, 2, "", "one of them");
    run(&p, "generate -m %s -f /nonexistent/file", model);
    expect(&p, 1, "", "/nonexistent/file");
    run(&p, "generate -m %s -p %s -n 1", model, "");
    expect(&p, 2, "", "empty");
    run(&p, "generate -m %s -p abcdefghijklmnopqrst --ctx-size 16", model);
    expect(&p, 1, "", "context");
}

// ---- Never a chat where a prompt was given ----

static void one_answer_whatever_standard_input_is(void **state) {
    (void)state;
    static const char *const how[] = {"generate -q -m %s -p x -n 8 " FORCE_A,
                                      "run %s -p x -n 8 " FORCE_A};
    for (size_t i = 0; i < MX_COUNT(how); i++) {
        run(&p, how[i], model); // at its end
        expect(&p, 0, FORCED, NULL);
        pipe_through("more\nlines\n", how[i], model); // with lines that nobody asked for
        expect(&p, 0, FORCED, NULL);
        start(&p, how[i], model); // open, silent
        finish(&p);
        expect(&p, 0, FORCED, NULL);
        assert_null(strchr(p.err_text, '\033'));
    }
}

static void a_chat_ends_with_its_input(void **state) {
    (void)state;
    run(&p, "run %s -n 8", chat_model);
    expect(&p, 0, "", "Bye!");
    pipe_through("hello\n", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, FORCED "\n", "Bye!");
    pipe_through("no newline", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, FORCED "\n", NULL);
}

static void chat_commands(void **state) {
    (void)state;
    pipe_through("/foo\n/?\n\n   \n/clear\n/bye\nnot read\n", "run %s -n 8 " FORCE_A, chat_model);
    expect(&p, 0, "", "Unknown command: /foo. Type /? for the list of commands.");
    assert_non_null(strstr(p.err_text, "/bye"));
    assert_non_null(strstr(p.err_text, "Conversation cleared."));
    assert_non_null(strstr(p.err_text, "Bye!"));
    assert_null(strstr(p.err_text, ">>>"));
    assert_null(strstr(p.err_text, "no chat template"));
}

// Ids that the program says it was given, of its k-th request.
static size_t count_prompt_ids(int k) {
    const char *at = p.err_text;
    for (int i = 0; i <= k; i++) {
        at = strstr(at, "prompt ids:");
        assert_non_null(at);
        at += strlen("prompt ids:");
    }
    size_t n = 0;
    for (; *at && *at != '\n'; at++) n += *at == ' ';
    return n;
}

static void conversations_grow_and_clear(void **state) {
    (void)state;
    env_name = "MLXCEL_PRINT_TOKEN_IDS", env_value = "1";
    pipe_through("ab\n\"\"\"a\nb\"\"\"\n/clear\nab\n", "run %s -n 3 " FORCE_A, chat_model);
    expect(&p, 0, NULL, NULL);
    size_t one = 1 + 5 + 2 + 1 + 1, head = 1 + 10; // user turn of two bytes; assistant's heading
    assert_int_equal(count_prompt_ids(0), one + head);
    // user, assistant with three bytes, user with three bytes (a, newline, b)
    assert_int_equal(count_prompt_ids(1), one + head + 3 + 1 + 1 + one + 1 + head);
    assert_int_equal(count_prompt_ids(2), one + head);
}

static void a_model_without_template_chats_all_the_same(void **state) {
    (void)state;
    env_name = "MLXCEL_PRINT_TOKEN_IDS", env_value = "1";
    pipe_through("<|im_end|>\n", "run %s -n 8 " FORCE_A, model);
    expect(&p, 0, NULL, "no chat template");
    // what was typed is text, not a control token: "User: <|im_end|>\nAssistant:"
    assert_int_equal(count_prompt_ids(0), strlen("User: <|im_end|>\nAssistant:"));
    run(&p, "run %s -p x --system be-brief", model);
    expect(&p, 2, "", "--system");
}

static void seeds_and_stops_on_the_command_line(void **state) {
    (void)state;
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 42", model);
    char *first = mx_strdup(p.out_text);
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 42", model);
    expect(&p, 0, first, NULL);
    run(&p, "generate -q -m %s -p x -n 24 -t 1.5 --seed 43", model);
    assert_string_not_equal(p.out_text, first);
    mx_free(first);
    run(&p, "generate -q -m %s -p x --stop AA " FORCE_A, model);
    expect(&p, 0, "", NULL);
}

// ---- Signals ----

static void ctrl_c_ends_what_waits_or_measures(void **state) {
    (void)state;
    start(&p, "perplexity -m %s --jsonl", model);
    say(&p, "{\"ids\":[1,2]}\n");
    assert_true(read_until(&p, "logprobs"));
    kill(p.pid, SIGINT); // it waits for a line
    finish(&p);
    expect(&p, 130, NULL, NULL);
    start(&p, "bench -m %s -p 4000 --prefill-chunk 4000 -n 0 -r 1000", model);
    mx_sleep_s(0.3);
    kill(p.pid, SIGINT); // what runs is one step, which ends as if nothing had come
    finish(&p);
    expect(&p, 130, "", NULL);
}

static void ctrl_c_ends_a_generation_with_130(void **state) {
    (void)state;
    for (int s = 0; s < 2; s++) {
        start(&p, "generate -q -m %s -p x --ctx-size 60000 " FORCE_A, model);
        assert_true(read_until(&p, "AA"));
        kill(p.pid, s ? SIGTERM : SIGINT);
        finish(&p);
        assert_int_equal(p.code, 130);
        assert_true(p.n_out >= 2 && strspn(p.out_text, "A") == p.n_out);
    }
}

static void ctrl_c_stops_the_reply_not_the_chat(void **state) {
    (void)state;
    start(&p, "run %s --ctx-size 60000 " FORCE_A, chat_model);
    say(&p, "hello\n");
    assert_true(read_until(&p, "AA"));
    kill(p.pid, SIGINT);
    assert_true(read_until(&p, "(interrupted)"));
    say(&p, "/bye\n");
    finish(&p);
    expect(&p, 0, NULL, "Bye!");
    start(&p, "run %s -n 4 " FORCE_A, chat_model); // while it waits for a line
    say(&p, "/clear\n");
    assert_true(read_until(&p, "cleared"));
    kill(p.pid, SIGINT);
    finish(&p);
    assert_int_equal(p.code, 130);
}

// ---- On a terminal ----

static void start_on_terminal(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    set_args(fmt, ap);
    va_end(ap);
    p = (process){.err = -1};
    int fd;
    p.pid = forkpty(&fd, NULL, NULL, NULL);
    if (p.pid == 0) {
        execv(argv[0], argv);
        _exit(127);
    }
    p.out = fd;
    p.in = dup(fd);
}

static void a_chat_on_a_terminal(void **state) {
    (void)state;
    start_on_terminal("run %s -n 8 " FORCE_A, chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "/fooX\x7f\r"); // edited: the last letter is taken back
    assert_true(read_until(&p, "Unknown command: /foo. "));
    say(&p, "\"\"\"one\r");
    assert_true(read_until(&p, "... "));
    say(&p, "two\"\"\"\r");
    assert_true(read_until(&p, FORCED));
    // the next prompt, so that Ctrl-C meets the line and not the end of the reply
    const char *reply = strstr(p.out_text, FORCED);
    for (int i = 0; i < 200 && !strstr(reply, ">>> "); i++) read_for(&p, 0.1, "no such text");
    say(&p, "half a line\x03"); // Ctrl-C: gone
    assert_true(read_until(&p, "leaves)"));
    // Ctrl-D, again when it came before the line editor had the terminal
    for (int i = 0; i < 50 && !strstr(p.out_text, "Bye!"); i++) {
        say(&p, "\x04");
        read_for(&p, 0.2, "Bye!");
    }
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
}

// Ctrl-D that is typed while the reply runs, when the editor has not got the terminal.
static void ctrl_d_typed_ahead_leaves(void **state) {
    (void)state;
    start_on_terminal("run %s -n 2000 " FORCE_A, chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "x\r");
    assert_true(read_until(&p, FORCED));
    say(&p, "\x04");
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
}

static void two_ctrl_c_leave(void **state) {
    (void)state;
    start_on_terminal("run %s -n 8", chat_model);
    assert_true(read_until(&p, ">>> "));
    say(&p, "\x03");
    assert_true(read_until(&p, "leaves)"));
    say(&p, "\x03");
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_non_null(strstr(p.out_text, "Bye!"));
    start_on_terminal("run %s -p x -n 8 " FORCE_A, chat_model); // a prompt: no chat here either
    finish(&p);
    expect(&p, 0, NULL, NULL);
    assert_null(strstr(p.out_text, ">>>"));
    assert_non_null(strstr(p.out_text, FORCED));
}

// ---- The store ----

static void list_and_remove(void **state) {
    (void)state;
    char *folder = mx_path_join(store, "some/one"), *file = mx_path_join(folder, "m.gguf");
    mx_err err = {0};
    assert_int_equal(mx_mkdirs(folder, &err), MX_OK);
    tiny_write(file, &(tiny_opts){0});
    run(&p, "list --models-dir %s -q -v", store);
    expect(&p, 2, "", "--verbose and --quiet");
    run(&p, "list --models-dir %s --json", store);
    expect(&p, 0, NULL, NULL);
    json_t *j = json_loads(p.out_text, 0, NULL), *e = json_array_get(j, 0);
    assert_int_equal(json_array_size(j), 1);
    assert_string_equal(json_string_value(json_object_get(e, "repo_id")), "some/one");
    assert_true(json_integer_value(json_object_get(e, "size_bytes")) > 1000);
    assert_non_null(json_string_value(json_object_get(e, "path")));
    assert_true(json_is_integer(json_object_get(e, "modified")));
    json_decref(j);
    run(&p, "ls -q --models-dir %s", store);
    expect(&p, 0, "some/one\n", NULL);
    run(&p, "run some/one --models-dir %s -p x -n 2", store);
    expect(&p, 0, NULL, NULL);
    run(&p, "rm some/one --models-dir %s", store);
    expect(&p, 2, "", "--yes");
    assert_true(mx_path_exists(file));
    run(&p, "rm some/other -y --models-dir %s", store);
    expect(&p, 1, "", "some/other");
    run(&p, "rm some/one -y --models-dir %s", store);
    expect(&p, 0, "", "Removed some/one");
    assert_false(mx_path_exists(file));
    run(&p, "list --models-dir %s --json", store);
    expect(&p, 0, "[]\n", NULL);
    mx_free(folder);
    mx_free(file);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usage_is_2_and_names_things),
        cmocka_unit_test(help_is_on_standard_output),
        cmocka_unit_test(loading_errors_are_3),
        cmocka_unit_test(the_text_is_all_of_standard_output),
        cmocka_unit_test(output_that_nobody_reads),
        cmocka_unit_test(json_of_generate),
        cmocka_unit_test(json_of_inspect_and_estimate),
        cmocka_unit_test(estimates_have_every_part),
        cmocka_unit_test(json_of_a_path_that_is_no_text),
        cmocka_unit_test(texts_that_are_no_utf8),
        cmocka_unit_test(a_model_without_finite_logits),
        cmocka_unit_test(numbers_in_the_environment_have_ranges),
        cmocka_unit_test(a_small_stack_limit),
        cmocka_unit_test(a_model_file_that_becomes_shorter),
        cmocka_unit_test(input_without_an_end),
        cmocka_unit_test(formats_are_named),
        cmocka_unit_test(json_of_bench),
        cmocka_unit_test(tokenize_lines),
        cmocka_unit_test(tokenizer_only),
        cmocka_unit_test(deep_files_are_refused),
        cmocka_unit_test(template_lines),
        cmocka_unit_test(perplexity_lines_and_text),
        cmocka_unit_test(the_prompt_may_come_from_a_file),
        cmocka_unit_test(one_answer_whatever_standard_input_is),
        cmocka_unit_test(a_chat_ends_with_its_input),
        cmocka_unit_test(chat_commands),
        cmocka_unit_test(conversations_grow_and_clear),
        cmocka_unit_test(a_model_without_template_chats_all_the_same),
        cmocka_unit_test(seeds_and_stops_on_the_command_line),
        cmocka_unit_test(ctrl_c_ends_what_waits_or_measures),
        cmocka_unit_test(ctrl_c_ends_a_generation_with_130),
        cmocka_unit_test(ctrl_c_stops_the_reply_not_the_chat),
        cmocka_unit_test(a_chat_on_a_terminal),
        cmocka_unit_test(ctrl_d_typed_ahead_leaves),
        cmocka_unit_test(two_ctrl_c_leave),
        cmocka_unit_test(list_and_remove),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
