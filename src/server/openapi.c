// The OpenAPI description and docs/server.md, both from the tables of routes and fields. No state.
#include "server/server_int.h"

#include "base/mem.h"

static const char schemas[] =
    "\"Any\":{\"description\":\"JSON\"},"
    "\"Text\":{\"type\":\"string\"},\"Page\":{\"type\":\"string\"},"
    "\"Health\":{\"type\":\"object\",\"required\":[\"status\"],\"properties\":{\"status\":{"
    "\"const\":"
    "\"ok\"}}},"
    "\"Model\":{\"type\":\"object\",\"required\":[\"id\",\"object\",\"created\",\"owned_by\"],"
    "\"properties\":{\"id\":{\"type\":\"string\"},\"object\":{\"const\":\"model\"},\"created\":{"
    "\"type\":\"integer\"},\"owned_by\":{\"type\":\"string\"},\"meta\":{\"type\":\"object\"}}},"
    "\"Models\":{\"type\":\"object\",\"required\":[\"object\",\"data\"],\"properties\":{\"object\":"
    "{"
    "\"const\":\"list\"},\"data\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/components/schemas/"
    "Model\"}}}},"
    "\"Error\":{\"type\":\"object\",\"required\":[\"error\"],\"properties\":{\"error\":{\"type\":"
    "\"object\",\"required\":[\"message\",\"type\",\"param\",\"code\"],\"properties\":{\"message\":"
    "{"
    "\"type\":\"string\"},\"type\":{\"type\":\"string\"},\"param\":{\"type\":[\"string\",\"null\"]}"
    ","
    "\"code\":{\"type\":[\"string\",\"integer\",\"null\"]}}}}},"
    "\"Messages\":{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"object\",\"required\":["
    "\"role\"],\"properties\":{\"role\":{\"enum\":[\"system\",\"developer\",\"user\",\"assistant\","
    "\"tool\"]},\"content\":{\"anyOf\":[{\"type\":[\"string\",\"null\"]},{\"type\":\"array\","
    "\"items\":{\"type\":\"object\",\"required\":[\"type\",\"text\"],\"properties\":{\"type\":{"
    "\"const\":\"text\"},\"text\":{\"type\":\"string\"}}}}]}}}},"
    "\"Prompt\":{\"anyOf\":[{\"type\":\"string\",\"minLength\":1},{\"type\":\"array\",\"minItems\":"
    "1,"
    "\"items\":{\"type\":\"string\",\"minLength\":1}},{\"type\":\"array\",\"minItems\":1,\"items\":"
    "{"
    "\"type\":\"integer\",\"minimum\":0}}]},"
    "\"TokenizeRequest\":{\"anyOf\":[{\"type\":\"object\",\"required\":[\"content\"],"
    "\"additionalProperties\":false,\"properties\":{\"content\":{\"type\":\"string\"},"
    "\"add_special\":{\"type\":\"boolean\"},\"parse_special\":{\"type\":\"boolean\"},"
    "\"with_pieces\":{\"type\":\"boolean\"},\"model\":{\"type\":\"string\"}}},"
    "{\"type\":\"object\",\"required\":[\"prompt\"],\"additionalProperties\":false,\"properties\":{"
    "\"prompt\":{\"type\":\"string\"},\"add_special_tokens\":{\"type\":\"boolean\"},\"model\":{"
    "\"type\":\"string\"}}}]},"
    "\"DetokenizeRequest\":{\"type\":\"object\",\"required\":[\"tokens\"],\"additionalProperties\":"
    "false,\"properties\":{\"tokens\":{\"type\":\"array\",\"items\":{\"type\":\"integer\","
    "\"minimum\":0}},\"model\":{\"type\":\"string\"}}},"
    "\"TemplateRequest\":{\"type\":\"object\",\"required\":[\"messages\"],\"additionalProperties\":"
    "false,\"properties\":{\"messages\":{\"$ref\":\"#/components/schemas/Messages\"},\"tools\":{"
    "\"type\":\"array\"},\"documents\":{\"type\":\"array\"},\"add_generation_prompt\":{\"type\":"
    "\"boolean\"},\"chat_template_kwargs\":{\"type\":\"object\"},\"chat_template\":{\"type\":"
    "\"string\"},\"model\":{\"type\":\"string\"}}}";

static const int error_codes[] = {400, 401, 403, 404, 405, 413, 414, 431, 500, 501, 503, 504};

static void put_request_schema(mx_buf *b, const char *name, const char *required, api_kind api) {
    mx_buf_printf(b,
                  ",\"%s\":{\"type\":\"object\",\"required\":[\"%s\"],\"additionalProperties\":"
                  "false,\"properties\":{",
                  name, required);
    fields_schema(b, api);
    mx_buf_puts(b, "}}");
}

static const char *content_type(const srv_route *r) {
    if (r->response && strcmp(r->response, "Page") == 0) return "text/html";
    if (r->response && strcmp(r->response, "Text") == 0) return "text/plain";
    return "application/json";
}

static void put_operation(mx_buf *b, const srv_route *r) {
    const char *method = strcmp(r->method, "GET") == 0 ? "get" : "post";
    mx_buf_printf(b, "\"%s\":{\"operationId\":\"%s\",\"summary\":", method, r->id);
    mx_buf_json(b, mx_str_of(r->summary));
    if (r->flags & ROUTE_PREFIX) {
        mx_buf_puts(b, ",\"parameters\":[{\"name\":\"id\",\"in\":\"path\",\"required\":true,"
                       "\"schema\":{\"type\":\"string\",\"minLength\":1}}]");
    }
    if (r->request) {
        mx_buf_printf(b,
                      ",\"requestBody\":{\"required\":true,\"content\":{\"application/json\":{"
                      "\"schema\":{\"$ref\":\"#/components/schemas/%s\"}}}}",
                      r->request);
    }
    mx_buf_printf(b,
                  ",\"responses\":{\"200\":{\"description\":\"done\",\"content\":{\"%s\":{"
                  "\"schema\":{\"$ref\":\"#/components/schemas/%s\"}}",
                  content_type(r), r->response);
    if (r->flags & ROUTE_GEN) {
        mx_buf_puts(b, ",\"text/event-stream\":{}");
    }
    mx_buf_puts(b, "}}");
    for (size_t i = 0; i < MX_COUNT(error_codes); i++) {
        mx_buf_printf(b, ",\"%d\":{\"$ref\":\"#/components/responses/Error\"}", error_codes[i]);
    }
    mx_buf_printf(b, "}%s}", r->flags & ROUTE_PUBLIC ? ",\"security\":[{}]" : "");
}

void mx_server_openapi(mx_buf *b) {
    mx_buf_puts(
        b, "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"mlxcel\",\"version\":\"" MLXCEL_VERSION
           "\"},\"security\":[{},{\"key\":[]},{\"header\":[]}],\"paths\":{");
    for (size_t i = 0; i < srv_n_routes; i++) {
        const srv_route *r = &srv_routes[i];
        if (r->flags & ROUTE_NONE) continue; // these are behind the others
        mx_buf_printf(b, "%s\"%s%s\":{", i ? "," : "", r->path,
                      r->flags & ROUTE_PREFIX ? "{id}" : "");
        put_operation(b, r);
        mx_buf_putc(b, '}');
    }
    mx_buf_puts(b,
                "},\"components\":{\"securitySchemes\":{\"key\":{\"type\":\"http\",\"scheme\":"
                "\"bearer\"},\"header\":{\"type\":\"apiKey\",\"in\":\"header\",\"name\":"
                "\"X-Api-Key\"}},\"responses\":{\"Error\":{\"description\":\"refused or failed\","
                "\"content\":{\"application/json\":{\"schema\":{\"$ref\":\"#/components/schemas/"
                "Error\"}}}}},\"schemas\":{");
    mx_buf_puts(b, schemas);
    put_request_schema(b, "ChatRequest", "messages", API_CHAT);
    put_request_schema(b, "CompletionRequest", "prompt", API_TEXT);
    put_request_schema(b, "NativeRequest", "prompt", API_NATIVE);
    mx_buf_puts(b, "}}}");
}

void handle_openapi(srv_req *q) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_server_openapi(&b);
    req_reply_json(q, 200, &b);
}

// ---- docs/server.md ----

static const char intro[] =
    "# Server\n\n"
    "Made by `mlxcel --help-server` from the tables in `src/server` (`make docs`); do not edit.\n\n"
    "`mlxcel serve -m MODEL` listens on http://127.0.0.1:8080, loads the model and answers "
    "OpenAI's "
    "and llama-server's\nroutes. The binary also answers to the name `mlxcel-server`. Flags: "
    "[cli.md](cli.md). It listens before the model is\nloaded; until then `/health` and everything "
    "that needs the model answer 503.\n\n";

static const char prose[] =
    "\n## Rules\n\n"
    "- **Fields.** A field that is not in the tables below, or has a value that is not supported, "
    "is "
    "refused with 400 and its\n  name. `null` counts as absent. Nothing is taken and ignored, but "
    "for "
    "the fields marked *not used*.\n"
    "- **Model name.** One model is served; `model` may be anything, the answer carries the real "
    "name. `/v1/models/NAME` of\n  another name is 404.\n"
    "- **Sampling.** What a request does not say is taken from the flags of the command line, then "
    "from what the model\n  suggests (below), then from llama-server's defaults: temperature 0.8, "
    "top_k 40, top_p 0.95, min_p 0.05. `/props` and the\n  log of the start show what counts. "
    "Log-probabilities are those of the unmodified distribution. A request with a seed\n  gives "
    "the "
    "same text whatever runs beside it.\n"
    "- **What a model suggests.** Of `generation_config.json`: `temperature`, `top_k`, `top_p`, "
    "`min_p`, `typical_p`,\n  `repetition_penalty` (over the whole text), and `do_sample` false, "
    "which means temperature 0; of a GGUF file the keys\n  `temp`, `top_k`, `top_p`, `min_p`, "
    "`xtc_probability`, `xtc_threshold`, `penalty_last_n` and `penalty_repeat` of\n  "
    "`general.sampling`. A value that is malformed or out of range, or a setting that is not "
    "supported, is named in a\n  warning and not used; lengths such as `max_new_tokens` are not "
    "read. End tokens are those of all files together.\n  `mlxcel run` and `generate` are greedy "
    "unless flags say otherwise.\n"
    "- **Lengths.** A prompt longer than the context is 400 with code `context_length_exceeded`. "
    "`max_tokens` beyond the context\n  is cut to it (finish_reason `length`). `--ctx-size` bounds "
    "one request and is not divided by the number of places.\n  Two names of one setting, as "
    "`max_tokens` and `n_predict`, with different values are 400, and so are more "
    "`min_tokens`\n  than may be generated.\n"
    "- **Streams.** Every event is `data: {json}` and an empty line. The first delta of a choice "
    "has "
    "the role. With\n  `stream_options.include_usage` one last event has empty choices and the "
    "usage; "
    "otherwise there is no usage. A stream\n  that succeeded ends with `data: [DONE]` (native ones "
    "do not), one that failed with `data: {\"error\":...}`. Headers\n  are sent once the request "
    "is "
    "accepted; a comment `: ping` follows when nothing was sent for `--sse-ping-interval`. For "
    "clients that\n  wait for events only, `--sse-ping-style` makes it an event without text, or "
    "one with `prompt_progress`\n  too: `total` tokens of the prompt, `processed` ones, of them "
    "from the `cache`, and `time_ms`.\n"
    "  Tokens that follow each other faster than `--sse-gather-ms` (16) come together in one "
    "event; "
    "with 0 each comes by\n  itself, as long as the client keeps up.\n"
    "- **Clients that leave.** Closing the connection ends the request within one step, wherever "
    "it "
    "is. Shutting down the\n  writing side of the connection counts as leaving.\n"
    "- **lm-eval.** `--model local-completions --model_args model=NAME,"
    "base_url=http://127.0.0.1:8080/v1/completions`\n  needs no tokenizer of its own: "
    "`/tokenizer_info`, "
    "`/tokenize` and `/detokenize` answer vLLM's form too, where special tokens\n  are added "
    "unless "
    "`add_special_tokens` is false. `echo` with `logprobs` scores the prompt, with `max_tokens` 0 "
    "only that.\n"
    "- **Stop texts.** The earliest match wins; no byte of it is sent. In reasoning none is\n"
    "  looked for, unless it is part of the text (`reasoning_format` none).\n"
    "- **Reasoning.** `<think>...</think>` at the beginning of an answer becomes "
    "`reasoning_content` "
    "(and `reasoning`), if the\n  prompt opened it or the model knows it. A `<think>` later, or "
    "with "
    "`enable_thinking` false, is text.\n"
    "- **Tools.** Calls in the forms of Hermes and Qwen, Llama 3 and Mistral are read and streamed "
    "as "
    "deltas. `finish_reason` is\n  `tool_calls` exactly if there is a call. `tool_choice` `none` "
    "leaves the tools out of the prompt; `required` and a name\n  are refused.\n"
    "- **Queue.** When `--max-queue-depth` requests wait, the next one is 503 with `Retry-After`. "
    "The header `X-Priority`\n  (high, normal, low) chooses the lane. Of a request with many "
    "prompts only as many are in the queue as there are places\n  (`--n-parallel`); the others "
    "wait "
    "for them, within one time limit.\n"
    "- **Prompts beside answers.** While sequences decode, a step that prefills follows every "
    "`--prefill-grant-interval` steps\n  that decode, so a running stream waits for one prefill "
    "step at most. Unless `--prefill-chunk-size` says otherwise, that\n  step takes as many tokens "
    "as were measured to take 0.1 s while loading (32 to 2,048; far into a prompt fewer, 16 at "
    "least); the\n  "
    "log and `/props` say how many and why. `MLXCEL_MIXED_STEP=1` puts a chunk into every step "
    "instead: first tokens come\n  earlier, running streams slow down to one token a chunk. On a "
    "CPU answers depend on none of this.\n"
    "- **Storage.** `--decode-storage-backend auto` keeps sequences in pages when more than one "
    "can "
    "run or prompts are cached,\n  else in one piece. Every family and format served today can be "
    "paged; where one cannot, `paged` is declined with a line\n  in the log and counted by "
    "`mlxcel_decode_storage_fallbacks_total`. In pages, `n` answers compute their prompt once; a "
    "page\n  that several hold is copied before one of them writes to it.\n"
    "- **Keys.** `Authorization: Bearer KEY` or `X-Api-Key: KEY`. `/`, `/health` and "
    "`/openapi.json` need none.\n"
    "- **Browsers.** No other origin may read answers unless `--cors-origins` names it. On a "
    "loopback address only requests\n  whose Host is an address, `localhost` or in "
    "`--allowed-hosts` are served. Preflights need no key.\n"
    "- **Limits.** Bodies to `--max-body` bytes, JSON to 100 levels, no key twice, no NUL in "
    "texts. "
    "A request ends after\n  `--timeout` seconds with 504 `server_timeout`, in a stream with an "
    "error event.\n"
    "- **Chat** needs a template in the model (`has_chat_template` of `/props`); without one it is "
    "501, and\n  `/v1/completions` remains.\n"
    "- **Errors** are `{\"error\": {\"message\", \"type\", \"param\", \"code\"}}`; the message "
    "names the field.\n"
    "- **Cache hits** are whole pages of 32 tokens.\n"
    "- **Slow requests.** Bodies over 64 KiB, and templates of `/apply-template`, are read by a "
    "thread of "
    "their own, one after the\n  other; what else is asked is answered meanwhile.\n"
    "- **Connections.** At most 1024; when most places are taken, those idle longest are closed. A "
    "request must have arrived\n  within `--idle-timeout`, a longer body at 4 KiB/s on average. "
    "Addresses to 16 KiB (else 414), headers to 64 KiB (431).\n"
    "- **Malformed HTTP.** Two Host or length headers, a length beside a transfer coding, another "
    "coding than chunked (501),\n  names or values with characters that are not allowed: an error, "
    "and the connection ends. Some requests never\n  reach this program's code: the HTTP "
    "library answers a bad request line, a header without a colon, heads beyond\n  256 KiB, a "
    "Content-Length that is no number and malformed chunks with a short HTML page (400, 413, 414, "
    "431, 505) and\n  closes; since its version 1.0 also a missing Host, a blank before a header's "
    "colon and another coding than chunked (all 400).\n  What does not look like HTTP at all, or "
    "has thousands of query arguments, it closes without an answer.\n"
    "- **Bounds of one request.** 256 prompts, 128 answers to each, 256 answers in all, 64 stop "
    "texts "
    "of 64 KiB, 4096 biases. Bodies\n  of all requests together may be 8 times `--max-body`; one "
    "more "
    "is 503.\n"
    "- **Logs** have method, route, status, time, request id and counts, never texts; of a client "
    "that left (status 499) the\n  counts until then. `X-Request-Id` is taken from the request if "
    "it is plain.\n"
    "- **Shutting down.** SIGINT or SIGTERM: no new connections, what runs has the grace time, "
    "then "
    "ends with an error; exit 0.\n  A second signal ends the process at once. Where SIGINT was "
    "ignored at the start (`&` in a script) "
    "it stays so: use SIGTERM.\n";

void mx_server_markdown(mx_buf *b) {
    static const char *const titles[] = {"/v1/chat/completions", "/v1/completions", "/completion"};
    static const api_kind apis[] = {API_CHAT, API_TEXT, API_NATIVE};
    mx_buf_puts(b, intro);
    mx_buf_puts(b, "## Routes\n\n| route | needs a key | |\n|---|---|---|\n");
    for (size_t i = 0; i < srv_n_routes; i++) {
        const srv_route *r = &srv_routes[i];
        if (r->flags & ROUTE_NONE) continue;
        mx_buf_printf(b, "| `%s %s%s` | %s | %s |\n", r->method, r->path,
                      r->flags & ROUTE_PREFIX ? "NAME" : "", r->flags & ROUTE_PUBLIC ? "no" : "yes",
                      r->summary);
    }
    mx_buf_puts(b, "\nRoutes of other servers that are answered with an error, 501 or 403:\n\n");
    for (size_t i = 0; i < srv_n_routes; i++) {
        const srv_route *r = &srv_routes[i];
        if (r->flags & ROUTE_NONE)
            mx_buf_printf(b, "- `%s%s`: %s\n", r->path, r->flags & ROUTE_PREFIX ? "..." : "",
                          r->summary);
    }
    mx_buf_puts(b, prose);
    for (size_t i = 0; i < MX_COUNT(apis); i++) {
        mx_buf_printf(b, "\n## Fields of %s\n\n", titles[i]);
        fields_markdown(b, apis[i]);
    }
    mx_buf_puts(b, "\n## Metrics\n\nOf `/metrics`, with `--metrics`. `/v1/stats` has the engine's "
                   "as JSON, always.\n\n");
    metrics_markdown(b);
}
