// The server as a client meets it: routes, refusals, limits, keys, fields and lengths. The model is
// a script (support/script_model.h), so what it says is known.
#include "support/served.h"

#include <sys/resource.h>

static const char chat_template[] =
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'raise' %}"
    "{{ raise_exception('no such system message') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% endfor %}";

static const script scripts[] = {
    {'A', "Hello " SCRIPT_CUT "wor" SCRIPT_CUT "ld!"},
};

static int set_up(void **state) {
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 256, chat_template, "--metrics --max-body 1M");
}

// ---- Routes ----

static void routes_answer(void **state) {
    (void)state;
    json_t *v = get_json(S, "/health", 200);
    assert_string_equal(text_at(v, "status"), "ok");
    json_decref(v);
    v = get_json(S, "/v1/models", 200);
    assert_string_equal(text_at(v, "data/0/id"), "script");
    json_decref(v);
    v = get_json(S, "/v1/models/script", 200);
    assert_string_equal(text_at(v, "object"), "model");
    json_decref(v);
    v = get_json(S, "/props", 200);
    assert_string_equal(text_at(v, "decode_path"), "native batched forward");
    assert_string_equal(text_at(v, "decode_steps"), "recorded op lists");
    assert_true(json_is_object(at(v, "slow_paths")));
    json_decref(v);
    v = get_json(S, "/slots", 200);
    assert_int_equal(json_array_size(v), 4);
    json_decref(v);
    v = get_json(S, "/v1/cache/stats", 200);
    assert_true(json_is_true(at(v, "enabled")));
    json_decref(v);
    v = post_json(S, "/v1/cache/reset", "", 200);
    json_decref(v);
    v = get_json(S, "/openapi.json", 200);
    assert_string_equal(text_at(v, "openapi"), "3.1.0");
    json_decref(v);
    reply r = get(S, "/");
    assert_int_equal(r.status, 200);
    assert_non_null(strstr(r.body.data, "<!doctype html>"));
    reply_free(&r);
    r = get(S, "/metrics");
    assert_int_equal(r.status, 200);
    assert_non_null(strstr(r.body.data, "\nllamacpp:prompt_tokens_total "));
    assert_non_null(strstr(r.body.data, "\nmlxcel_slots_total 4\n"));
    assert_non_null(strstr(r.body.data, "\nmlxcel_slow_path_total{path=\"host_sampling\"} 0\n"));
    reply_free(&r);
}

static void other_paths_and_methods_do_not(void **state) {
    (void)state;
    json_t *v = get_json(S, "/nothing", 404);
    assert_string_equal(text_at(v, "error/type"), "not_found_error");
    json_decref(v);
    v = get_json(S, "/v1/models/other", 404);
    assert_string_equal(text_at(v, "error/code"), "model_not_found");
    json_decref(v);
    reply r = ask_bytes(S, "DELETE", "/v1/models", NULL, NULL, 0);
    assert_int_equal(r.status, 405);
    assert_string_equal(reply_header(&r, "Allow"), "GET");
    reply_free(&r);
    json_decref(get_json(S, "/v1/chat/completions", 405));
    r = ask_bytes(S, "HEAD", "/health", NULL, NULL, 0);
    assert_int_equal(r.status, 200);
    assert_int_equal(r.body.n, 0);
    reply_free(&r);
}

static void request_ids_are_kept(void **state) {
    (void)state;
    reply r = ask_bytes(S, "GET", "/health", "X-Request-Id: my-id.1\r\n", NULL, 0);
    assert_string_equal(reply_header(&r, "X-Request-Id"), "my-id.1");
    reply_free(&r);
    r = ask_bytes(S, "GET", "/health", "X-Request-Id: a b\"\r\n", NULL, 0);
    assert_true(strncmp(reply_header(&r, "X-Request-Id"), "req_", 4) == 0);
    reply_free(&r);
}

// ---- Answers ----

static void a_chat(void **state) {
    (void)state;
    json_t *v = post_json(S, "/v1/chat/completions",
                          "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],"
                          "\"model\":\"whatever\",\"user\":\"me\",\"metadata\":{\"a\":1}}",
                          200);
    assert_string_equal(text_at(v, "object"), "chat.completion");
    assert_string_equal(text_at(v, "model"), "script");
    assert_string_equal(text_at(v, "choices/0/message/role"), "assistant");
    assert_string_equal(text_at(v, "choices/0/message/content"), "Hello world!");
    assert_string_equal(text_at(v, "choices/0/finish_reason"), "stop");
    assert_int_equal(int_at(v, "usage/completion_tokens"), 4); // with the end token
    assert_int_equal(int_at(v, "usage/prompt_tokens"), 7);     // <|im_start|>user\nA
    assert_int_equal(int_at(v, "usage/total_tokens"), 11);
    assert_int_equal(int_at(v, "usage/prompt_tokens_details/cached_tokens"), 0);
    json_decref(v);
}

static void a_completion(void **state) {
    (void)state;
    json_t *v =
        post_json(S, "/v1/completions",
                  "{\"prompt\":[\"xA\",[120,65]],\"n\":2,\"temperature\":0,\"echo\":true}", 200);
    assert_int_equal(json_array_size(at(v, "choices")), 4);
    assert_string_equal(text_at(v, "choices/0/text"), "xAHello world!");
    assert_string_equal(text_at(v, "choices/3/text"), "xAHello world!");
    assert_int_equal(int_at(v, "choices/3/index"), 3);
    assert_int_equal(int_at(v, "usage/prompt_tokens"), 4);
    assert_int_equal(int_at(v, "usage/completion_tokens"), 16);
    json_decref(v);
}

static void a_native_completion(void **state) {
    (void)state;
    json_t *v = post_json(S, "/completion",
                          "{\"prompt\":\"xA\",\"stop\":[\"ld\"],\"return_tokens\":true}", 200);
    assert_string_equal(text_at(v, "content"), "Hello wor");
    assert_string_equal(text_at(v, "stop_type"), "word");
    assert_string_equal(text_at(v, "stopping_word"), "ld");
    assert_string_equal(text_at(v, "prompt"), "xA");
    assert_int_equal(int_at(v, "tokens_evaluated"), 2);
    assert_int_equal(json_array_size(at(v, "tokens")), 3);
    assert_int_equal(int_at(v, "timings/predicted_n"), 3);
    json_decref(v);
    v = post_json(
        S, "/completion",
        "{\"prompt\":[\"A\",\"xA\"],\"response_fields\":[\"content\",\"timings/cache_n\"]}", 200);
    assert_int_equal(json_array_size(v), 2);
    assert_int_equal(json_object_size(at(v, "1")), 2);
    assert_int_equal(int_at(v, "1/cache_n"), 0);
    json_decref(v);
    reply r = post(S, "/completion", "{\"prompt\":\"A\",\"stream\":true}");
    json_t *e = parse_events(&r.body);
    size_t n = json_array_size(e);
    assert_true(n >= 2); // no [DONE] in the native form
    assert_true(json_is_true(json_object_get(json_array_get(e, n - 1), "stop")));
    json_decref(e);
    reply_free(&r);
}

static void log_probabilities(void **state) {
    (void)state;
    json_t *v = post_json(S, "/v1/completions",
                          "{\"prompt\":\"bA\",\"max_tokens\":1,\"logprobs\":1,\"echo\":true}", 200);
    json_t *lp = at(v, "choices/0/logprobs");
    assert_int_equal(json_array_size(at(lp, "tokens")), 3);
    assert_true(json_is_null(at(lp, "token_logprobs/0")));
    assert_true(json_number_value(at(lp, "token_logprobs/1")) < -1);     // b is followed by b
    assert_true(json_number_value(at(lp, "token_logprobs/2")) > -0.001); // A by "Hello "
    assert_string_equal(text_at(lp, "tokens/2"), "Hello ");
    assert_int_equal(json_object_size(at(lp, "top_logprobs/2")), 1);
    json_decref(v);
    // scores only
    v = post_json(S, "/v1/completions",
                  "{\"prompt\":\"bb\",\"max_tokens\":0,\"logprobs\":0,\"echo\":true}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "bb");
    assert_int_equal(json_array_size(at(v, "choices/0/logprobs/tokens")), 2);
    assert_int_equal(int_at(v, "usage/completion_tokens"), 0);
    json_decref(v);
    v = post_json(S, "/v1/chat/completions",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],\"logprobs\":true,"
                  "\"top_logprobs\":1}",
                  200);
    assert_string_equal(text_at(v, "choices/0/logprobs/content/0/token"), "Hello ");
    assert_int_equal(json_array_size(at(v, "choices/0/logprobs/content/0/bytes")), 6);
    assert_int_equal(json_array_size(at(v, "choices/0/logprobs/content/0/top_logprobs")), 1);
    json_decref(v);
}

static void tokens_and_templates(void **state) {
    (void)state;
    json_t *v = post_json(S, "/tokenize", "{\"content\":\"A<|im_end|>\\u00e9\"}", 200);
    assert_int_equal(json_array_size(at(v, "tokens")), 4);
    assert_int_equal(int_at(v, "tokens/1"), TINY_IM_END);
    json_decref(v);
    v = post_json(S, "/tokenize", "{\"content\":\"\\u00e9\",\"with_pieces\":true}", 200);
    assert_int_equal(int_at(v, "tokens/0/piece/0"), 0xc3);
    json_decref(v);
    v = post_json(S, "/detokenize", "{\"tokens\":[72,105]}", 200);
    assert_string_equal(text_at(v, "content"), "Hi");
    json_decref(v);
    json_decref(post_json(S, "/detokenize", "{\"tokens\":[72,100000]}", 400));
    // as vLLM has it
    v = post_json(S, "/tokenize", "{\"prompt\":\"A<|endoftext|>\",\"add_special_tokens\":false}",
                  200);
    assert_int_equal(int_at(v, "count"), 2);
    assert_int_equal(int_at(v, "tokens/1"), TINY_EOS);
    assert_int_equal(int_at(v, "max_model_len"), 256);
    json_decref(v);
    json_decref(post_json(S, "/tokenize", "{\"prompt\":\"A\",\"content\":\"A\"}", 400));
    v = post_json(S, "/detokenize", "{\"tokens\":[72,105],\"model\":\"x\"}", 200);
    assert_string_equal(text_at(v, "prompt"), "Hi");
    json_decref(v);
    v = get_json(S, "/tokenizer_info", 200);
    assert_string_equal(text_at(v, "eos_token"), "<|endoftext|>");
    assert_true(json_is_null(at(v, "bos_token")));
    json_decref(v);
    v = post_json(S, "/apply-template", "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}",
                  200);
    assert_string_equal(text_at(v, "prompt"), "<|im_start|>user\nHi");
    json_decref(v);
}

// ---- Refusals ----

static void expect_refusal(const char *path, const char *body, size_t n) {
    reply r = ask_bytes(S, "POST", path, NULL, body, n);
    mx_str text = {r.body.n ? r.body.data : "", r.body.n};
    if (r.status != 400) fail_msg("%s %.300s: status %d: %s", path, body, r.status, text.p);
    assert_true(mx_utf8_valid(text));
    assert_true(strncmp(reply_header(&r, "Content-Type"), "application/json", 16) == 0);
    json_t *v = json_of(r, 400, body);
    json_t *e = at(v, "error");
    assert_true(json_is_string(at(e, "message")) && json_is_string(at(e, "type")));
    assert_non_null(at(e, "param"));
    assert_non_null(at(e, "code"));
    json_decref(v);
}

static const char *const malformed[] = {"",
                                        "null",
                                        "[]",
                                        "1",
                                        "\"x\"",
                                        "{",
                                        "{}",
                                        "{\"messages\"",
                                        "{\"a\":1}",
                                        "{'a':1}",
                                        "\xff\xfe",
                                        "{\"prompt\":\"\xc4\xe3\xba\xc3\"}",
                                        "{\"prompt\":\"\\ud800\"}",
                                        "{\"prompt\":\"a\\u0000b\"}",
                                        "{\"prompt\":\"A\",\"prompt\":\"B\"}",
                                        "{\"prompt\":null}",
                                        "{\"prompt\":5}",
                                        "{\"prompt\":{}}",
                                        "{\"prompt\":[]}",
                                        "{\"prompt\":\"\"}",
                                        "{\"prompt\":[\"\"]}",
                                        "{\"prompt\":[[]]}",
                                        "{\"prompt\":[1.5]}",
                                        "{\"prompt\":[-1]}",
                                        "{\"prompt\":[100000]}",
                                        "{\"prompt\":[true]}",
                                        "{\"prompt\":\"A\",\"stop\":5}",
                                        "{\"prompt\":\"A\",\"stop\":[\"\"]}",
                                        "{\"prompt\":\"A\",\"stop\":\"\"}",
                                        "{\"prompt\":\"A\",\"seed\":\"x\"}",
                                        "{\"prompt\":\"A\",\"temperature\":-1}",
                                        "{\"prompt\":\"A\",\"temperature\":\"hot\"}",
                                        "{\"prompt\":\"A\",\"top_p\":2}",
                                        "{\"prompt\":\"A\",\"top_k\":0.5}",
                                        "{\"prompt\":\"A\",\"logit_bias\":{\"x\":1}}",
                                        "{\"prompt\":\"A\",\"logit_bias\":{\"99999\":1}}",
                                        "{\"prompt\":\"A\",\"logit_bias\":[1]}",
                                        "{\"prompt\":\"A\",\"logit_bias\":{\"+1\":1}}",
                                        "{\"prompt\":\"A\",\"logit_bias\":{\"01\":1}}",
                                        "{\"prompt\":\"A\",\"logit_bias\":{\".1\":1}}",
                                        "{\"prompt\":\"A\",\"stream\":\"yes\"}",
                                        "{\"prompt\":\"A\",\"no_such_field\":1}",
                                        "{\"prompt\":\"A\",\"mirostat\":2}",
                                        "{\"prompt\":\"A\",\"grammar\":\"root ::= x\"}"};

static void malformed_bodies_are_400(void **state) {
    (void)state;
    static const char *const paths[] = {"/v1/completions", "/completion", "/v1/chat/completions"};
    for (size_t p = 0; p < MX_COUNT(paths); p++) {
        for (size_t i = 0; i < MX_COUNT(malformed); i++)
            expect_refusal(paths[p], malformed[i], strlen(malformed[i]));
    }
    static const char *const chat[] = {
        "{\"messages\":[]}",
        "{\"messages\":\"hi\"}",
        "{\"messages\":null}",
        "{\"messages\":[1]}",
        "{\"messages\":[{}]}",
        "{\"messages\":[{\"role\":\"boss\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":5}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"raise\"}]}"};
    for (size_t i = 0; i < MX_COUNT(chat); i++) {
        expect_refusal("/v1/chat/completions", chat[i], strlen(chat[i]));
    }
    static const char *const more[] = {
        "\"max_tokens\":0",
        "\"max_tokens\":-5",
        "\"max_tokens\":1.5",
        "\"max_completion_tokens\":0",
        "\"n\":0",
        "\"n\":1000",
        "\"top_logprobs\":1",
        "\"logprobs\":true,\"top_logprobs\":21",
        "\"response_format\":{\"type\":\"json_object\"}",
        "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}",
        "\"tool_choice\":\"required\"",
        "\"tool_choice\":\"maybe\"",
        "\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}",
        "\"tools\":{}",
        "\"tools\":[{}]",
        "\"tools\":[{\"type\":\"function\"}]",
        "\"functions\":[{}]",
        "\"modalities\":[\"audio\"]",
        "\"parallel_tool_calls\":false",
        "\"stream_options\":{\"include_usage\":true}",
        "\"stream\":true,\"stream_options\":{\"x\":1}",
        "\"chat_template_kwargs\":[]",
        "\"reasoning_format\":\"x\"",
        "\"cache_salt\":\"\""};
    for (size_t i = 0; i < MX_COUNT(more); i++) {
        for (int stream = 0; stream < 2; stream++) {
            if (stream && strstr(more[i], "stream")) continue;
            char body[512];
            snprintf(body, sizeof body,
                     "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],%s%s}", more[i],
                     stream ? ",\"stream\":true" : "");
            expect_refusal("/v1/chat/completions", body, strlen(body));
        }
    }
    expect_refusal("/completion", "{\"prompt\":\"A\0\"}", 15);
    a_chat(NULL); // as healthy as before
}

static void fields_of_templates_have_types(void **state) {
    (void)state;
    static const char *const of_template[] = {"\"tools\":5", "\"documents\":\"x\"",
                                              "\"add_generation_prompt\":1",
                                              "\"chat_template_kwargs\":[]"};
    static const char *const readers[] = {"/apply-template", "/v1/chat/completions",
                                          "/v1/chat/completions/input_tokens"};
    for (size_t i = 0; i < MX_COUNT(of_template) * MX_COUNT(readers); i++) {
        char body[200];
        snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],%s}",
                 of_template[i / MX_COUNT(readers)]);
        expect_refusal(readers[i % MX_COUNT(readers)], body, strlen(body));
    }
}

static void null_is_absent(void **state) {
    (void)state;
    json_decref(
        post_json(S, "/v1/chat/completions",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],\"max_tokens\":null,"
                  "\"temperature\":null,\"stop\":null,\"seed\":null,\"n\":null,"
                  "\"stream\":null,\"tools\":null,\"tool_choice\":null,\"logprobs\":null,"
                  "\"response_format\":null,\"logit_bias\":null,\"stream_options\":null}",
                  200));
}

static void bodies_have_limits(void **state) {
    (void)state;
    size_t n = (1 << 20) + 100;
    char *big = mx_alloc(n);
    memset(big, ' ', n);
    reply r = ask_bytes(S, "POST", "/v1/completions", NULL, big, n);
    // what is still being sent may meet a closed connection
    assert_true(r.status == 413 || r.status == 0);
    reply_free(&r);
    int fd = dial(S);
    static const char head[] =
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        "Transfer-Encoding: chunked\r\n\r\n";
    send_all(fd, head, sizeof head - 1);
    for (int i = 0; i < 20; i++) {
        send_all(fd, "10000\r\n", 7);
        send_all(fd, big, 0x10000);
        send_all(fd, "\r\n", 2);
    }
    send_all(fd, "0\r\n\r\n", 5);
    r = read_reply(fd);
    close(fd);
    json_decref(json_of(r, 413, "a chunked body"));
    mx_free(big);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"prompt\":\"A\",\"x\":");
    for (int i = 0; i < 100000; i++) mx_buf_putc(&b, '[');
    expect_refusal("/v1/completions", b.data, b.n);
    mx_buf_free(&b);
}

// ---- Lengths ----

static void lengths(void **state) {
    (void)state;
    json_t *v = post_json(S, "/v1/completions", "{\"prompt\":\"b\",\"max_tokens\":5}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "bbbbb");
    assert_string_equal(text_at(v, "choices/0/finish_reason"), "length");
    json_decref(v);
    v = post_json(S, "/v1/completions", "{\"prompt\":\"b\",\"max_tokens\":0}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "");
    json_decref(v);
    v = post_json(S, "/v1/completions", "{\"prompt\":\"b\",\"max_tokens\":100000000}", 200);
    assert_string_equal(text_at(v, "choices/0/finish_reason"), "length");
    assert_int_equal(int_at(v, "usage/total_tokens"), 256); // the context
    json_decref(v);
    v = post_json(S, "/v1/chat/completions",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"b\"}],"
                  "\"max_completion_tokens\":3}",
                  200);
    assert_string_equal(text_at(v, "choices/0/message/content"), "bbb");
    json_decref(v);
}

static void two_names_of_one_setting(void **state) {
    (void)state;
    static const struct {
        const char *path, *fields, *a, *b; // names of the refusal, or none
    } cases[] = {
        {"/v1/chat/completions", "\"max_tokens\":3,\"max_completion_tokens\":4", "max_tokens",
         "max_completion_tokens"},
        {"/v1/chat/completions", "\"n_predict\":3,\"max_completion_tokens\":4",
         "max_completion_tokens", "n_predict"},
        {"/v1/completions", "\"n_predict\":3,\"max_tokens\":4", "max_tokens", "n_predict"},
        {"/completion", "\"n_predict\":3,\"max_tokens\":-1", "max_tokens", "n_predict"},
        {"/completion", "\"repeat_penalty\":1.5,\"repetition_penalty\":1", "repeat_penalty",
         "repetition_penalty"},
        {"/completion", "\"max_tokens\":3,\"min_tokens\":4", "min_tokens", "3 tokens"},
        {"/completion", "\"n_predict\":3,\"max_tokens\":3,\"min_tokens\":3", NULL, NULL},
        {"/completion", "\"n_predict\":3,\"max_tokens\":null,\"id_slot\":1,\"n_keep\":2", NULL,
         NULL},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        char body[300];
        bool chat = strstr(cases[i].path, "chat") != NULL;
        snprintf(body, sizeof body, "{%s,%s}",
                 chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"b\"}]" : "\"prompt\":\"b\"",
                 cases[i].fields);
        json_t *v = post_json(S, cases[i].path, body, cases[i].a ? 400 : 200);
        if (cases[i].a) {
            assert_non_null(strstr(text_at(v, "error/message"), cases[i].a));
            assert_non_null(strstr(text_at(v, "error/message"), cases[i].b));
        } else {
            assert_string_equal(text_at(v, "content"), "bbb");
        }
        json_decref(v);
    }
    json_t *v =
        post_json(S, "/completion", "{\"prompt\":\"b\",\"seed\":99999999999999999999}", 400);
    assert_string_equal(text_at(v, "error/param"), "seed");
    assert_non_null(strstr(text_at(v, "error/message"), "seed: a number is too large"));
    json_decref(v);
}

static void the_edge_of_the_context(void **state) {
    (void)state;
    static const int spare[] = {1, 2, 32, 33};
    for (size_t i = 0; i < MX_COUNT(spare); i++) {
        char text[300] = "", body[800];
        memset(text, 'b', 256 - (size_t)spare[i]);
        snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"ignore_eos\":true}", text);
        json_t *v = post_json(S, "/v1/completions", body, 200);
        assert_string_equal(text_at(v, "choices/0/finish_reason"), "length");
        assert_int_equal(int_at(v, "usage/completion_tokens"), spare[i]);
        json_decref(v);
    }
    char text[300] = "", body[400];
    memset(text, 'b', 256);
    snprintf(body, sizeof body, "{\"prompt\":\"%s\"}", text);
    json_t *v = post_json(S, "/v1/completions", body, 400);
    assert_string_equal(text_at(v, "error/code"), "context_length_exceeded");
    json_decref(v);
}

// ---- Sampling ----

static char *sample(const char *more) {
    char body[256];
    snprintf(body, sizeof body,
             "{\"prompt\":\"A\",\"temperature\":30,\"top_k\":0,\"top_p\":1,\"min_p\":0,"
             "\"max_tokens\":12,\"ignore_eos\":true%s}",
             more);
    json_t *v = post_json(S, "/v1/completions", body, 200);
    mx_buf b;
    mx_buf_init(&b, 0);
    for (size_t i = 0; i < json_array_size(at(v, "choices")); i++) {
        mx_buf_printf(&b, "%s|", text_at(json_array_get(at(v, "choices"), i), "text"));
    }
    json_decref(v);
    return mx_buf_take(&b);
}

static void seeds(void **state) {
    (void)state;
    char *a = sample(",\"seed\":42"), *b = sample(",\"seed\":42"), *c = sample(",\"seed\":43");
    assert_string_equal(a, b);
    assert_string_not_equal(a, c);
    char *three = sample(",\"seed\":42,\"n\":3"), *again = sample(",\"seed\":42,\"n\":3");
    assert_string_equal(three, again);
    assert_true(strncmp(three, a, strlen(a)) == 0); // the first choice is the single one
    const char *second = three + strlen(a), *third = strchr(second, '|') + 1;
    size_t n_second = (size_t)(third - second);
    assert_true(strncmp(three, second, n_second) != 0 && strncmp(second, third, n_second) != 0);
    char *none = sample(""), *other = sample("");
    assert_string_not_equal(none, other);
    char *texts[] = {a, b, c, three, again, none, other};
    for (size_t i = 0; i < MX_COUNT(texts); i++) mx_free(texts[i]);
}

// The token that follows has a logit of about 32 and all others 0, so a penalty shows by how often
// it comes: subtracted once (presence, and only once it was generated), each time (frequency), or
// as a factor, which is none when the prompt's last tokens are not looked at.
static void penalties(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        int n; // tokens before another one comes; 0: none does
    } cases[] = {
        {"\"repeat_penalty\":1", 0},
        {"\"presence_penalty\":1", 0},
        {"\"presence_penalty\":-1", 0},
        {"\"presence_penalty\":31", 0},
        {"\"presence_penalty\":33", 1},
        {"\"frequency_penalty\":1", 32},
        {"\"frequency_penalty\":3", 11},
        {"\"frequency_penalty\":33", 1},
        {"\"frequency_penalty\":3,\"presence_penalty\":20", 4},
        {"\"repeat_penalty\":100,\"logit_bias\":{\"33\":1}", -1},
        {"\"repeat_penalty\":100,\"repeat_last_n\":0,\"logit_bias\":{\"33\":1}", 0},
        {"\"dry_multiplier\":40,\"dry_allowed_length\":3", 3},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"prompt\":\"b\",\"max_tokens\":50,\"temperature\":0,%s}",
                 cases[i].fields);
        json_t *v = post_json(S, "/v1/completions", body, 200);
        const char *text = text_at(v, "choices/0/text");
        int n = (int)strspn(text, "b"), want = cases[i].n < 0 ? 0 : cases[i].n ? cases[i].n : 50;
        if (n != want) fail_msg("%s: %d, expected %d: %s", cases[i].fields, n, want, text);
        json_decref(v);
    }
}

static void biases(void **state) {
    (void)state;
    json_t *v = post_json(S, "/v1/completions",
                          "{\"prompt\":\"A\",\"max_tokens\":3,\"logit_bias\":{\"120\":100}}", 200);
    assert_string_equal(text_at(v, "choices/0/text"), "xxx");
    json_decref(v);
    // min_tokens: the script ends after 3 tokens and goes on when it may not
    v = post_json(S, "/v1/completions", "{\"prompt\":\"A\",\"min_tokens\":6,\"temperature\":0}",
                  200);
    assert_true(int_at(v, "usage/completion_tokens") >= 6);
    json_decref(v);
}

// ---- Prompt cache ----

static void the_same_prompt_again(void **state) {
    (void)state;
    static const int lengths_of[] = {1, 31, 32, 33, 96};
    json_decref(post_json(S, "/v1/cache/reset", "", 200));
    for (size_t i = 0; i < MX_COUNT(lengths_of); i++) {
        char text[128] = "", body[256];
        memset(text, 'c', (size_t)lengths_of[i] - 1);
        text[lengths_of[i] - 1] = 'A';
        snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"temperature\":0}", text);
        for (int k = 0; k < 5; k++) {
            json_t *v = post_json(S, "/v1/completions", body, 200);
            assert_string_equal(text_at(v, "choices/0/text"), "Hello world!");
            long long cached = int_at(v, "usage/prompt_tokens_details/cached_tokens");
            assert_true(cached < lengths_of[i]); // one token at least is computed
            if (k > 0 && lengths_of[i] > 64) assert_true(cached >= 64);
            json_decref(v);
        }
    }
}

static void salts_keep_prompts_apart(void **state) {
    (void)state;
    char text[129] = "", body[300];
    memset(text, 'd', 128);
    static const char *const salts[] = {"one", "two", "one"};
    for (int i = 0; i < 3; i++) {
        snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":2,\"cache_salt\":\"%s\"}",
                 text, salts[i]);
        json_t *v = post_json(S, "/v1/completions", body, 200);
        long long cached = int_at(v, "usage/prompt_tokens_details/cached_tokens");
        assert_int_equal(cached > 0, i == 2);
        json_decref(v);
    }
}

// ---- Keys, origins, hosts ----

static int status_of(const server *s, const char *method, const char *path, const char *headers) {
    const char *body = strcmp(method, "POST") == 0 ? "{\"prompt\":\"A\"}" : NULL;
    reply r = ask_bytes(s, method, path, headers, body, body ? strlen(body) : 0);
    int status = r.status;
    reply_free(&r);
    return status;
}

static void keys_are_asked_for(void **state) {
    (void)state;
    server s = {0};
    char *file = mx_path_join(dir, "keys");
    mx_err err;
    assert_int_equal(mx_write_file_atomic(file, "# keys\nfile-key\n", 16, &err), MX_OK);
    char args[600];
    snprintf(args, sizeof args,
             "--api-key one,two --api-key-file %s --api-prefix /llm --alias m,n "
             "--cors-origins https://ui.example --allowed-hosts my.host",
             file);
    server_start(&s, dir, model, args);
    assert_int_equal(status_of(&s, "GET", "/llm/health", NULL), 200);
    assert_int_equal(status_of(&s, "GET", "/llm/", NULL), 200);
    assert_int_equal(status_of(&s, "GET", "/health", NULL), 401);
    assert_int_equal(status_of(&s, "GET", "/llm/props", NULL), 401);
    assert_int_equal(status_of(&s, "POST", "/llm/v1/completions", NULL), 401);
    assert_int_equal(status_of(&s, "POST", "/llm/v1/completions", "X-Api-Key: on\r\n"), 401);
    static const char *const good[] = {"X-Api-Key: one\r\n", "Authorization: Bearer two\r\n",
                                       "authorization: bearer file-key\r\n"};
    for (size_t i = 0; i < MX_COUNT(good); i++) {
        assert_int_equal(status_of(&s, "POST", "/llm/v1/completions", good[i]), 200);
    }
    assert_int_equal(status_of(&s, "GET", "/llm/v1/models/n", good[0]), 200);
    // a preflight has no key; only the origin that was named is let in
    reply r = ask_bytes(&s, "OPTIONS", "/llm/v1/completions",
                        "Origin: https://ui.example\r\nAccess-Control-Request-Method: POST\r\n"
                        "Access-Control-Request-Headers: authorization\r\n",
                        NULL, 0);
    assert_int_equal(r.status, 204);
    assert_string_equal(reply_header(&r, "Access-Control-Allow-Origin"), "https://ui.example");
    assert_string_equal(reply_header(&r, "Access-Control-Allow-Headers"), "authorization");
    reply_free(&r);
    r = ask_bytes(&s, "GET", "/llm/health", "Origin: https://evil.example\r\n", NULL, 0);
    assert_null(reply_header(&r, "Access-Control-Allow-Origin"));
    reply_free(&r);
    // errors carry the same headers
    r = ask_bytes(&s, "GET", "/llm/props", "Origin: https://ui.example\r\n", NULL, 0);
    assert_int_equal(r.status, 401);
    assert_string_equal(reply_header(&r, "Access-Control-Allow-Origin"), "https://ui.example");
    reply_free(&r);
    char *log = server_log(&s);
    assert_null(strstr(log, "file-key"));
    mx_free(log);
    server_stop(&s);
    mx_free(file);
}

// One cell of the matrix: who asks, with which key, what.
static void cell(const server *s, const char *origin, bool allowed, const char *key, int what) {
    static const struct {
        const char *method, *path, *body;
        int status; // with the key
        bool open;  // without one too
    } asks[] = {
        {"OPTIONS", "/v1/completions", NULL, 204, true},
        {"GET", "/health", NULL, 200, true},
        {"GET", "/props", NULL, 200, false},
        {"GET", "/nothing", NULL, 404, false},
        {"DELETE", "/props", NULL, 405, false},
        {"POST", "/v1/completions", "{\"prompt\":\"A\"}", 200, false},
        {"POST", "/v1/completions", "{\"prompt\":\"A\",\"stream\":true}", 200, false},
        {"POST", "/v1/completions", "{\"prompt\":5}", 400, false},
        {"POST", "/v1/embeddings", "{}", 501, false},
    };
    assert_true(what < (int)MX_COUNT(asks));
    char headers[300] = "Access-Control-Request-Method: POST\r\n";
    if (origin) snprintf(headers + strlen(headers), 100, "Origin: %s\r\n", origin);
    if (key) snprintf(headers + strlen(headers), 100, "Authorization: Bearer %s\r\n", key);
    const char *body = asks[what].body;
    reply r =
        ask_bytes(s, asks[what].method, asks[what].path, headers, body, body ? strlen(body) : 0);
    bool let_in = asks[what].open || (key && strcmp(key, "right") == 0);
    int want = let_in ? asks[what].status : 401;
    const char *got = reply_header(&r, "Access-Control-Allow-Origin");
    bool same = got ? allowed && strcmp(got, origin) == 0 : !allowed;
    if (r.status != want || !same) {
        fail_msg("%s %s from %s with %s: %d, expected %d, origin %s", asks[what].method,
                 asks[what].path, origin, key, r.status, want, got);
    }
    if (allowed && what == 0) // before the browser sends a key
        assert_non_null(strstr(reply_header(&r, "Access-Control-Allow-Methods"), "POST"));
    assert_null(reply_header(&r, "Access-Control-Allow-Credentials"));
    reply_free(&r);
}

static void origins_keys_and_methods(void **state) {
    (void)state;
    static const struct {
        const char *origin;
        bool by_default, named;
    } origins[] = {{NULL, false, false},
                   {"https://ui.example", false, true},
                   {"https://ui.example.evil", false, false},
                   {"http://ui.example", false, false},
                   {"https://evil.example", false, false},
                   {"null", false, false},
                   {"http://localhost:3000", true, false},
                   {"http://127.0.0.1", true, false},
                   {"http://localhost.evil.example", false, false}};
    static const char *const keys[] = {NULL, "right", "wrong"};
    static const char *const args[] = {"--api-key right",
                                       "--api-key right --cors-origins https://ui.example"};
    for (size_t a = 0; a < MX_COUNT(args); a++) {
        server s = {0};
        server_start(&s, dir, model, args[a]);
        for (size_t i = 0; i < MX_COUNT(origins) * MX_COUNT(keys) * 9; i++) {
            size_t o = i / 27;
            cell(&s, origins[o].origin, a ? origins[o].named : origins[o].by_default,
                 keys[i / 9 % 3], (int)(i % 9));
        }
        server_stop(&s);
    }
}

static int with_host(const char *host) {
    char request[256];
    int fd = dial(S);
    snprintf(request, sizeof request,
             "GET /props HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host);
    send_all(fd, request, strlen(request));
    reply r = read_reply(fd);
    close(fd);
    int status = r.status;
    reply_free(&r);
    return status;
}

static void other_names_are_not_served(void **state) {
    (void)state;
    assert_int_equal(with_host("127.0.0.1:8080"), 200);
    assert_int_equal(with_host("localhost"), 200);
    assert_int_equal(with_host("[::1]:1"), 200);
    assert_int_equal(with_host("evil.example"), 403);
    assert_int_equal(with_host("localhost.evil.example"), 403);
    assert_int_equal(with_host("127.0.0.1.evil.example"), 403);
}

static void a_unix_socket(void **state) {
    (void)state;
    server s = {0};
    char args[200];
    snprintf(s.sock, sizeof s.sock, "%s/s.sock", dir);
    snprintf(args, sizeof args, "--host %s --no-slots --no-web", s.sock);
    server_start(&s, dir, model, args);
    json_decref(post_json(&s, "/v1/completions", "{\"prompt\":\"A\"}", 200));
    json_decref(get_json(&s, "/slots", 501));
    json_decref(get_json(&s, "/metrics", 501));
    json_decref(get_json(&s, "/", 404));
    // a server that was killed leaves its socket; the next one takes it
    kill(s.pid, SIGKILL);
    server_end(&s, 5);
    server_start(&s, dir, model, args);
    json_decref(get_json(&s, "/health", 200));
    server_stop(&s);
    assert_false(mx_path_exists(s.sock));
    // a file that is no socket stays as it is
    mx_err err;
    assert_int_equal(mx_write_file_atomic(s.sock, "mine", 4, &err), MX_OK);
    server_spawn(&s, dir, model, args);
    assert_int_equal(server_end(&s, 20), 1);
    char *text;
    size_t n;
    assert_int_equal(mx_read_file(s.sock, 99, &text, &n, &err), MX_OK);
    assert_int_equal(n, 4);
    mx_free(text);
    unlink(s.sock);
}

static void a_time_for_prediction_ends_the_answer(void **state) {
    (void)state;
    json_t *v = post_json(S, "/completion",
                          "{\"prompt\":\"A\",\"n_predict\":200,\"ignore_eos\":true,"
                          "\"t_max_predict_ms\":1e-6}",
                          200);
    assert_int_equal(json_integer_value(at(v, "tokens_predicted")), 1);
    assert_string_equal(text_at(v, "stop_type"), "limit");
    json_decref(v);
}

static void logs_have_no_texts(void **state) {
    (void)state;
    json_decref(post_json(S, "/v1/completions", "{\"prompt\":\"secretA\"}", 200));
    char *log = server_log(S);
    assert_non_null(strstr(log, "decode path: native batched forward"));
    assert_non_null(strstr(log, "POST /v1/completions 200"));
    assert_null(strstr(log, "secret"));
    assert_null(strstr(log, "no chat template"));
    assert_null(strstr(log, "Hello"));
    mx_free(log);
}

static double setting(server *s, const char *body, const char *name) {
    json_t *v = body ? post_json(s, "/completion", body, 200) : get_json(s, "/props", 200);
    char path[96];
    snprintf(path, sizeof path, "%s/%s",
             body ? "generation_settings" : "default_generation_settings", name);
    json_t *x = at(v, path);
    assert_true(json_is_number(x));
    double out = json_number_value(x);
    json_decref(v);
    return out;
}

// A request wins over a flag, a flag over the model, the model over what is built in.
static void defaults_of_the_model(void **state) {
    (void)state;
    char *tiny = mx_path_join(dir, "suggests.gguf");
    tiny_write(tiny, &(tiny_opts){.suggests = true});
    server s = {0};
    setenv("LLAMA_ARG_N_PREDICT", "2", 1);
    server_start(&s, dir, tiny, "--top-p 0.5");
    assert_true(setting(&s, NULL, "temperature") == 0.25);
    assert_int_equal(setting(&s, NULL, "top_k"), 33);
    assert_true(setting(&s, NULL, "top_p") == 0.5);
    assert_true(setting(&s, NULL, "min_p") == 0.05);
    json_t *v = get_json(&s, "/props", 200);
    assert_string_equal(text_at(v, "sampling_suggested"),
                        "temperature 0.25, top_k 33 (the GGUF file)");
    json_decref(v);
    static const char plain[] = "{\"prompt\":\"x\"}";
    static const char own[] = "{\"prompt\":\"x\",\"temperature\":0.75}";
    assert_true(setting(&s, plain, "temperature") == 0.25);
    assert_true(setting(&s, own, "temperature") == 0.75);
    assert_int_equal(setting(&s, own, "top_k"), 33);
    char *log = server_log(&s);
    assert_non_null(strstr(log, "general.sampling.min_p: expected a number from 0 to 1; not used"));
    assert_non_null(strstr(log, "suggested by the model: temperature 0.25, top_k 33"));
    mx_free(log);
    server_stop(&s);
    server_start(&s, dir, tiny, "--temp 1.5 --top-k 0");
    assert_true(setting(&s, NULL, "temperature") == 1.5);
    assert_int_equal(setting(&s, NULL, "top_k"), 0);
    server_stop(&s);
    unsetenv("LLAMA_ARG_N_PREDICT");
    mx_free(tiny);
}

// Its threads do not take the size of their stacks from whoever started it.
static void a_small_stack_limit(void **state) {
    (void)state;
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_STACK, &before), 0);
    small = before;
    small.rlim_cur = 64 << 10;
    assert_int_equal(setrlimit(RLIMIT_STACK, &small), 0);
    server s = {0};
    server_start(&s, dir, model, "");
    setrlimit(RLIMIT_STACK, &before);
    // calls and conditions nested as deep as templates may: hundreds of frames
    json_t *v =
        post_json(&s, "/apply-template",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],\"chat_template\":\""
                  "{% macro f(n) %}{% if n %}{% if n %}{% if n %}{% for i in [1] %}"
                  "{{ (n|string + '.') + f(n - 1) }}"
                  "{% endfor %}{% endif %}{% endif %}{% endif %}{% endmacro %}"
                  "{{ f(120) }}\"}",
                  200);
    assert_int_equal(strlen(text_at(v, "prompt")), 372);
    json_decref(v);
    server_stop(&s);
}

static void routes_of_others_are_named(void **state) {
    (void)state;
    static const char *const paths[] = {
        "/v1/embeddings", "/v1/responses",        "/v1/responses/x/cancel", "/v1/messages",
        "/infill",        "/slots/0?action=save", "/lora-adapters",         "/v1/audio/speech"};
    for (size_t i = 0; i < MX_COUNT(paths); i++) {
        json_t *v = post_json(S, paths[i], "{\"input\":\"x\"}", 501);
        assert_string_equal(text_at(v, "error/type"), "not_supported_error");
        assert_non_null(strstr(text_at(v, "error/message"), "is not supported"));
        json_decref(v);
        reply r = get(S, paths[i]);
        const char *retry = reply_header(&r, "X-Should-Retry");
        assert_true(retry && strcmp(retry, "false") == 0);
        json_decref(json_of(r, 501, paths[i]));
    }
    json_t *v = get_json(S, "/tools", 403);
    assert_string_equal(text_at(v, "error/type"), "feature_disabled");
    assert_string_equal(text_at(v, "error/message"), "this feature is disabled");
    json_decref(v);
}

static void tokens_are_counted(void **state) {
    (void)state;
    static const char path[] = "/v1/chat/completions/input_tokens";
    json_t *v = post_json(S, path, "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}]}", 200);
    assert_int_equal(int_at(v, "input_tokens"), 7); // <|im_start|>user\nA
    json_decref(v);
    json_decref(post_json(S, path, "{\"messages\":[]}", 400));
    json_decref(post_json(S, path, "{}", 400));
}

// What is reported of a stop text is all of it.
static void long_stop_texts(void **state) {
    (void)state;
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"prompt\":\"xA\",\"echo\":false,\"stop\":[\"");
    for (int i = 0; i < 3000; i++) mx_buf_puts(&b, "é");
    mx_buf_puts(&b, "\",\"ld!\"]}");
    json_decref(post_json(S, "/completion", b.data, 400)); // echo is not llama-server's
    mx_buf_clear(&b);
    mx_buf_puts(&b, "{\"prompt\":\"qq\",\"temperature\":0,\"n_predict\":250,\"stop\":\"");
    for (int i = 0; i < 200; i++) mx_buf_putc(&b, 'q');
    mx_buf_puts(&b, "\"}");
    json_t *v = post_json(S, "/completion", b.data, 200);
    assert_string_equal(text_at(v, "stop_type"), "word");
    assert_int_equal(strlen(text_at(v, "stopping_word")), 200);
    json_decref(v);
    mx_buf_free(&b);
}

static void what_templates_see_has_types(void **state) {
    (void)state;
    static const char *const wrong[] = {"\"tools\":{}", "\"documents\":{}",
                                        "\"chat_template_kwargs\":[]", "\"tools\":\"x\"",
                                        "\"documents\":[1],\"add_generation_prompt\":1"};
    for (size_t i = 0; i < MX_COUNT(wrong); i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],%s}",
                 wrong[i]);
        json_t *v = post_json(S, "/v1/chat/completions", body, 400);
        assert_non_null(strstr(wrong[i], text_at(v, "error/param")));
        json_decref(v);
        json_decref(post_json(S, "/apply-template", body, 400));
    }
    json_decref(post_json(S, "/completion", "{\"prompt\":\"xA\",\"response_fields\":[1]}", 400));
    json_decref(post_json(S, "/apply-template", "{\"messages\":[],\"chat_template\":1}", 400));
}

// Many prompts, many answers to each: not both.
static void answers_are_bounded(void **state) {
    (void)state;
    json_t *v = post_json(S, "/v1/completions",
                          "{\"prompt\":[\"xA\",\"xA\",\"xA\"],\"n\":86,\"max_tokens\":1}", 400);
    assert_string_equal(text_at(v, "error/param"), "n");
    json_decref(v);
    v = post_json(S, "/v1/completions", "{\"prompt\":\"xA\",\"n\":128,\"max_tokens\":1}", 200);
    assert_int_equal(json_array_size(at(v, "choices")), 128);
    json_decref(v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routes_answer),
        cmocka_unit_test(other_paths_and_methods_do_not),
        cmocka_unit_test(request_ids_are_kept),
        cmocka_unit_test(a_chat),
        cmocka_unit_test(a_completion),
        cmocka_unit_test(a_native_completion),
        cmocka_unit_test(log_probabilities),
        cmocka_unit_test(tokens_and_templates),
        cmocka_unit_test(malformed_bodies_are_400),
        cmocka_unit_test(fields_of_templates_have_types),
        cmocka_unit_test(null_is_absent),
        cmocka_unit_test(bodies_have_limits),
        cmocka_unit_test(lengths),
        cmocka_unit_test(two_names_of_one_setting),
        cmocka_unit_test(the_edge_of_the_context),
        cmocka_unit_test(seeds),
        cmocka_unit_test(penalties),
        cmocka_unit_test(biases),
        cmocka_unit_test(the_same_prompt_again),
        cmocka_unit_test(salts_keep_prompts_apart),
        cmocka_unit_test(keys_are_asked_for),
        cmocka_unit_test(origins_keys_and_methods),
        cmocka_unit_test(other_names_are_not_served),
        cmocka_unit_test(a_unix_socket),
        cmocka_unit_test(a_time_for_prediction_ends_the_answer),
        cmocka_unit_test(logs_have_no_texts),
        cmocka_unit_test(routes_of_others_are_named),
        cmocka_unit_test(tokens_are_counted),
        cmocka_unit_test(long_stop_texts),
        cmocka_unit_test(what_templates_see_has_types),
        cmocka_unit_test(answers_are_bounded),
        cmocka_unit_test(defaults_of_the_model),
        cmocka_unit_test(a_small_stack_limit),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
