// The program as a user meets it: exit codes, what goes to which stream, JSON, files, the store,
// broken models. Runs the built program on tiny models; a forced token (--logit-bias ID=100) makes
// its text known. Chats, signals and terminals are in test_chat.c.
#include "backend/cuda/cuda.h"
#include "support/program.h"

#include <jansson.h>
#include <sys/resource.h>
#include <sys/stat.h>

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
        cmocka_unit_test(list_and_remove),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
