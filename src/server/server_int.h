// What the server's files share. One srv per process, one srv_req per HTTP request; a request
// belongs to the HTTP thread that reads its connection, but for what `lock` and the registry guard.
#ifndef MX_SERVER_INT_H
#define MX_SERVER_INT_H

#include "server/server.h"

#include <jansson.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

typedef struct srv srv;
typedef struct srv_req srv_req;
typedef struct srv_conn srv_conn;
typedef struct gen gen;

// ---- Routes ----

enum {
    ROUTE_PUBLIC = 1,  // no key needed
    ROUTE_ENGINE = 2,  // 503 until the model is loaded
    ROUTE_BODY = 4,    // a JSON object is read
    ROUTE_ALIAS = 8,   // another spelling of a documented route
    ROUTE_PREFIX = 16, // the rest of the path is an argument
    ROUTE_GEN = 32,    // generates; counted against the queue
    ROUTE_NONE = 64    // known elsewhere, not here: an error that says so, whatever the method
};

typedef struct srv_route {
    const char *method, *path;
    int flags;
    void (*handle)(srv_req *q); // answers, or starts a generation (q->gen)
    const char *id, *summary;
    const char *request, *response; // names of schemas of the OpenAPI description; NULL: none
} srv_route;

extern const srv_route srv_routes[];
extern const size_t srv_n_routes;
// The route, or NULL; *allow (cap bytes) then lists the methods the path has ("" when unknown).
const srv_route *route_find(const srv *s, const char *method, const char *path, const char **arg,
                            char *allow, size_t cap);

// ---- Server ----

struct srv {
    const mx_server_config *c; // = &config
    mx_server_config config;
    mlxcel_engine *engine; // set once; read after `ready`
    mlxcel_info info;
    char *model_path;
    char *model_name;  // of answers
    char *model_names; // aliases after the first, comma-separated
    atomic_bool ready, stopping, aborting, failed, load_ended;
    mx_err load_err;
    struct MHD_Daemon *daemon;
    int listen_fd;
    bool is_unix, is_tls;
    uint64_t socket_dev, socket_ino; // of a unix socket's file
    char *address;                   // "http://127.0.0.1:8080"
    char **keys;
    size_t n_keys;
    double started_wall_s, started_s;
    bool knows_thinking, has_mistral_calls, has_python_tag;
    json_t *template_kwargs;
    // registry of requests: the watcher walks it
    pthread_mutex_t lock;
    pthread_cond_t drained;
    srv_req *first;
    int32_t n_generating;
    srv_req *lane_first, *lane_last; // the slow lane's queue
    bool lane_stop, lane_left;       // left: it still runs when the server ends
    pthread_cond_t lane_wake;
    pthread_t lane;
    atomic_size_t body_bytes; // of all requests together
    srv_conn *conns;
    int32_t n_conns;
    int wake_fd, epoll_fd; // watcher
    bool watch_ends;       // under srv.lock
    int event_fd;          // the loader failed
    pthread_t watcher, loader;
    uint64_t next_id;
    // counters of /metrics that the engine does not keep; under lock
    struct {
        uint64_t http_total, rejected_busy, rejected_invalid, disconnects;
        uint64_t seqs_started, seqs_ended;
        uint64_t ttft_bucket[12], rate_bucket[12], ttft_count, rate_count;
        double ttft_sum, rate_sum;
        uint64_t n_tokens_max;
        double window_s;
        uint64_t window_prompt, window_decode;
        double window_prompt_s, window_decode_s;
        double prompt_rate, decode_rate;
    } m;
};

struct srv_req {
    srv *s;
    struct MHD_Connection *conn;
    uint64_t number; // of this request, never 0
    const srv_route *route;
    const char *arg;  // rest of the path of a ROUTE_PREFIX
    char *uri;        // as sent
    const char *path; // of it, decoded; the library's
    size_t n_counted; // in srv.body_bytes
    bool no_room;     // bodies of other requests take all that may be taken
    size_t n_dropped; // of a body that is too large
    char id[48];      // of X-Request-Id
    double started_s;
    mx_buf body;
    bool begun, too_large, answered, watched, preflight;
    bool must_close; // the connection ends with the answer
    bool is_busy;    // refused for want of room
    bool in_lane;    // read, or being read, by the slow lane
    srv_req *lane_next;
    struct MHD_Response *kept; // the slow lane's answer
    int verdict;               // of the gate
    char allow[64];            // methods of the path when the route is NULL
    int status;                // sent
    const char *origin;        // Access-Control-Allow-Origin to answer, or NULL
    json_t *json;
    gen *gen;
    size_t sent_bytes;
    // streams
    mx_buf out;
    size_t out_pos;
    bool ended;
    // shared with the engine thread and the watcher
    pthread_mutex_t lock;
    bool suspended, wake, gone, ping, streaming;
    bool late;                   // text waits until sse_gather_ms after sent_s are over
    double last_write_s, sent_s; // of anything; of what the engine gave
    int fd;                      // this and the following: under srv.lock
    bool is_quiet;
    srv_req *prev, *next;
};

// ---- config.c ----

// Refuses what cannot be; loads keys and the template's variables. Errors: INVALID, IO.
mx_status config_check(srv *s, mx_err *err);

// ---- http.c ----

mx_status http_listen(srv *s, mx_err *err);
mx_status http_start(srv *s, mx_err *err);
void http_stop(srv *s);
void http_unlink_socket(const srv *s);
void req_wake(srv_req *q); // resumes its connection; any thread
// The engine's notify: the same, but that text waits until some time has passed since the last was
// sent: every write wakes a thread here and one of the client's, which compute threads pay for.
void req_event(void *q, mlxcel_event_kind kind);
void req_late(srv_req *q, double now); // the watcher's part of it
void req_read(srv_req *q);             // its body, and what its handler does: an answer, or q->gen
// One answer with a body of a content type. Takes body's contents.
void req_reply(srv_req *q, int status, const char *type, mx_buf *body);
void req_reply_json(srv_req *q, int status, mx_buf *body);
void req_reply_static(srv_req *q, const char *type, const void *data, size_t n);
// {"error":{message,type,param,code}}; type and code follow from the status.
void req_error(srv_req *q, int status, const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
void req_fail(srv_req *q, const mlxcel_error *e);
void error_body(mx_buf *out, int status, const char *code, const char *param, const char *message);
const char *error_code_of(const mlxcel_error *e); // "context_length_exceeded", ... or NULL
void req_log(const srv_req *q);

// ---- head.c: what HTTP does not allow ----

// False: answered with an error, and the connection will be closed.
bool head_check(srv_req *q, const char *uri, const char *version);
// The path of a request's address, also of one that names a scheme and a host.
const char *head_path(const char *uri);

// ---- conn.c: connections that are slow or idle ----

enum { SRV_MAX_CONNS = 1024 };
void conn_changed(void *server, struct MHD_Connection *conn, void **context,
                  enum MHD_ConnectionNotificationCode what); // the library's callback
void conn_took(srv_req *q, size_t n);                        // n more bytes of its body
void conn_set_busy(srv_req *q, bool busy); // its request is complete; its answer is
void conn_sweep(srv *s, double now);       // under srv.lock
void conn_allow_files(void);               // raises the limit of open files

// ---- lane.c: requests that take long to read ----

mx_status lane_start(srv *s, mx_err *err);
// Answers those that wait in it. False: it did not end in time; what it reads cannot be
// interrupted.
bool lane_stop(srv *s, double seconds);
// Suspends the connection and has the request read by the lane's thread.
void lane_put(srv_req *q);

// ---- watch.c: who left, who needs a ping ----

mx_status watch_start(srv *s, mx_err *err);
void watch_stop(srv *s);
void watch_add(srv_req *q);
void watch_quiet(srv_req *q); // its answer is complete: leaving is no news any more
void watch_remove(srv_req *q);

// ---- gate.c: keys, origins, host names ----

mx_status gate_load_keys(srv *s, mx_err *err);
void gate_free(srv *s);
int gate_verdict(srv_req *q); // 200, 401 or 403; sets q->origin
void gate_refuse(srv_req *q, int verdict);
void gate_preflight(srv_req *q);
void gate_headers(const srv_req *q, struct MHD_Response *r);

// ---- json.c ----

enum { JSON_DEPTH = 100, JSON_FIELD = 64 };
// Parses a request body: depth at most JSON_DEPTH, no duplicate keys, no NUL, an object. field is
// the key at the top level that an error is about, "" where that is not known.
json_t *json_read(const char *p, size_t n, mx_err *err, char field[JSON_FIELD]);

// ---- Request fields (fields.c) ----

typedef enum api_kind { API_CHAT = 1, API_TEXT = 2, API_NATIVE = 4 } api_kind;

typedef enum tool_format { TOOLS_NONE, TOOLS_HERMES, TOOLS_MISTRAL, TOOLS_LLAMA } tool_format;

typedef struct gen_opts {
    mlxcel_sampling sampling;
    mlxcel_logit_bias *bias; // owned
    char **stops;            // owned
    size_t n_stops;
    int32_t max_tokens;  // < 0: the context
    int32_t n, logprobs; // logprobs -1: none
    bool stream, include_usage, echo, show_special, cache_prompt, return_tokens;
    bool timings, want_logprobs;
    bool reasoning_none;
    int32_t ignored;        // fields without effect are read into it
    const char *cache_salt; // of the request's JSON
    size_t n_bias;
} gen_opts;

void opts_init(gen_opts *o, const srv *s, api_kind api);
void opts_free(gen_opts *o);
// Reads every field of the body; refuses what is unknown or not supported, by name. False:
// answered.
bool opts_read(gen_opts *o, srv_req *q, api_kind api);
void fields_markdown(mx_buf *out, api_kind api);
void fields_schema(mx_buf *out, api_kind api); // properties of an OpenAPI object

// ---- Parsers of generated text ----

// Splits "<think>...</think>answer". Fed in pieces of any size; what comes out does not depend on
// where the text was cut. Blanks around both parts are dropped.
typedef struct think_parser {
    int mode;
    mx_buf held;
    size_t blanks; // that held begins with
} think_parser;
extern const char think_open_tag[8], think_close_tag[9];
void think_init(think_parser *p, bool enabled, bool inside); // inside: the prompt opened it
void think_push(think_parser *p, mx_str in, mx_buf *reasoning, mx_buf *content);
void think_end(think_parser *p, mx_buf *reasoning, mx_buf *content);
void think_free(think_parser *p);

typedef struct tool_sink {
    void *user;
    void (*content)(void *user, mx_str text);
    void (*begin)(void *user, int index, mx_str name);
    void (*args)(void *user, int index, mx_str piece); // of the JSON text of the arguments
} tool_sink;

typedef struct call_scan { // one {"name":..., "arguments":...}
    int phase, depth, target;
    bool in_string, escape, has_name, begun, args_text;
    mx_buf raw, key, name, args;
} call_scan;

typedef struct tool_parser {
    tool_format format;
    int mode, n_calls;
    bool known_only;
    const json_t *tools;
    mx_buf held, content, args;
    size_t blanks; // that held begins with, in text
    call_scan call;
    const tool_sink *sink;
} tool_parser;
// tools: the request's array; the Llama form takes only calls of functions that are in it.
void tools_init(tool_parser *p, tool_format f, const json_t *tools);
void tools_push(tool_parser *p, mx_str in, const tool_sink *sink);
void tools_end(tool_parser *p, const tool_sink *sink);
void tools_free(tool_parser *p);

// ---- Generation (gen.c) ----

typedef struct gen_call { // a tool call
    char id[32];
    mx_buf name, args;
} gen_call;

typedef struct gen_job gen_job;

typedef struct gen_choice {
    gen *g;
    gen_job *job;
    int32_t index; // in the answer
    mx_buf text, reasoning;
    // JSON items, comma-separated, of tokens not yet sent (of all when nothing streams): chat's
    // entries or token texts; the others are the lists of /v1/completions
    mx_buf probs, values, tops, offsets;
    int32_t *ids;        // as above
    mlxcel_timings live; // so far
    size_t n_ids, cap_ids, n_total, n_chars;
    bool begun, ended;
    mlxcel_finish finish;
    char *stop_word;
    think_parser think;
    tool_parser tools;
    gen_call *calls;
    int32_t n_calls;
    uint64_t seed;
} gen_choice;

struct gen_job {  // one prompt
    int32_t *ids; // mlxcel_free
    size_t n_ids;
    char *text; // of the prompt; mlxcel_free
    size_t n_text;
    mlxcel_request *score, *run;
    bool scored, score_done, run_done; // scored: its first token's entry was made
    int32_t n_prefilled, n_cached;     // of its prompt, so far
    gen_choice *choices;               // o.n
    mlxcel_timings timings;
};

struct gen {
    srv_req *q;
    api_kind api;
    gen_opts o;
    gen_job *jobs;
    int32_t n_jobs, n_submitted; // the first n_submitted jobs are the engine's
    double started_s;
    bool is_list; // native: answers are an array
    char id[48];
    long long created;
    bool done, submitted;
    tool_format tool_format;
    const json_t *tools;
    bool think_on, think_inside;
    bool tells_progress; // the event that is being written does
    double timeout_s, predict_s;
    mlxcel_priority priority;
    int32_t n_prompt, n_cached, n_decoded;
    mlxcel_timings timings; // of the first prompt
    mlxcel_error error;     // status != 0: failed
};

gen *gen_new(srv_req *q, api_kind api);
void gen_free(gen *g);
// Takes over ids and text (both mlxcel_free).
void gen_add_prompt(gen *g, int32_t *ids, size_t n_ids, char *text, size_t n_text);
// Submits all; q->gen is g then. False: answered with an error, g freed.
bool gen_start(gen *g);
// Reads what came. Streams are appended to q->out; sets g->done at the end.
void gen_pump(gen *g);
void gen_ping(gen *g); // appends a sign of life to q->out
void gen_cancel(gen *g);
// Nobody waits for it any more: cancels it, and adds up what its prompts have cost so far.
void gen_leave(gen *g);
// The whole answer of a request that does not stream.
void gen_reply(gen *g);

// openai.c, native.c: the forms. The *_emit functions append an event to q->out; they take what is
// pending in c->probs and so on.
void chat_emit(gen_choice *c, const char *key, mx_str text);
void chat_emit_call(gen_choice *c, int index, const gen_call *begins, mx_str args);
void chat_emit_end(gen_choice *c, const mlxcel_timings *t);
void text_emit(gen_choice *c, mx_str text);
void text_emit_end(gen_choice *c, const mlxcel_timings *t);
void openai_stream_end(gen *g);
void openai_reply(gen *g, mx_buf *out);
void native_emit(gen_choice *c, mx_str text);
void native_emit_end(gen_choice *c, const mlxcel_timings *t);
void native_reply(gen *g, mx_buf *out);
void timings_json(mx_buf *out, const mlxcel_timings *t);   // the object
void live_timings(const gen_choice *c, mx_buf *out);       // the pairs that events have
void sampling_json(mx_buf *out, const mlxcel_sampling *s); // pairs, without the braces
void probs_add(gen_choice *c, const mlxcel_token *t);      // into c->probs, c->values, ...

// The types of the fields that templates see; false: answered.
bool template_fields(srv_req *q);
// {"messages":..., "tools":..., ...} for mlxcel_apply_template, from a request's body.
json_t *chat_template_request(srv_req *q, const json_t *tools, json_t *kwargs);

// handlers
void handle_chat(srv_req *q);
void handle_text(srv_req *q);
void handle_native(srv_req *q);
void handle_tokenize(srv_req *q);
void handle_detokenize(srv_req *q);
void handle_template(srv_req *q);
void handle_tokenizer_info(srv_req *q);
void handle_health(srv_req *q);
void handle_models(srv_req *q);
void handle_model(srv_req *q);
void handle_props(srv_req *q);
void handle_slots(srv_req *q);
void handle_metrics(srv_req *q);
void handle_cache_stats(srv_req *q);
void handle_cache_reset(srv_req *q);
void handle_stats(srv_req *q);
void handle_page(srv_req *q);
void handle_openapi(srv_req *q);
void handle_count(srv_req *q);
void handle_unsupported(srv_req *q);
void handle_disabled(srv_req *q);

// metrics.c
void metrics_done(srv *s, const gen *g); // a generation ended
void metrics_markdown(mx_buf *out);

#endif
