// The table of routes: dispatch, docs/server.md and the OpenAPI description are made from it. No
// state.
#include "server/server_int.h"

#include "base/mem.h"

#include <stdio.h>

enum {
    OPEN = ROUTE_PUBLIC,
    ASK = ROUTE_ENGINE,
    POST = ROUTE_ENGINE | ROUTE_BODY,
    GEN = ROUTE_ENGINE | ROUTE_BODY | ROUTE_GEN
};

// clang-format off
const srv_route srv_routes[] = {
    {"GET", "/", OPEN, handle_page, "page", "a page to chat with the model", NULL, "Page"},
    {"GET", "/health", OPEN, handle_health, "health", "200 when the model is loaded, 503 before", NULL, "Health"},
    {"GET", "/v1/health", OPEN | ROUTE_ALIAS, handle_health, "healthV1", "as /health", NULL, "Health"},
    {"GET", "/openapi.json", OPEN, handle_openapi, "openapi", "this description", NULL, "Any"},
    {"GET", "/v1/models", ASK, handle_models, "listModels", "the model, under each of its names", NULL, "Models"},
    {"GET", "/models", ASK | ROUTE_ALIAS, handle_models, "listModelsShort", "as /v1/models", NULL, "Models"},
    {"GET", "/v1/models/", ASK | ROUTE_PREFIX, handle_model, "getModel", "one model", NULL, "Model"},
    {"POST", "/v1/chat/completions", GEN, handle_chat, "chat", "an answer to a conversation", "ChatRequest", "Any"},
    {"POST", "/chat/completions", GEN | ROUTE_ALIAS, handle_chat, "chatShort", "as /v1/chat/completions", "ChatRequest", "Any"},
    {"POST", "/v1/completions", GEN, handle_text, "completions", "the continuation of a text", "CompletionRequest", "Any"},
    {"POST", "/completion", GEN, handle_native, "completion", "the continuation of a text, llama-server's form", "NativeRequest", "Any"},
    {"POST", "/completions", GEN | ROUTE_ALIAS, handle_native, "completionPlural", "as /completion", "NativeRequest", "Any"},
    {"POST", "/tokenize", POST, handle_tokenize, "tokenize", "token ids of a text", "TokenizeRequest", "Any"},
    {"POST", "/detokenize", POST, handle_detokenize, "detokenize", "text of token ids", "DetokenizeRequest", "Any"},
    {"POST", "/apply-template", POST, handle_template, "applyTemplate", "the prompt of a conversation", "TemplateRequest", "Any"},
    {"GET", "/props", ASK, handle_props, "props", "what runs: model, context, defaults", NULL, "Any"},
    {"GET", "/slots", ASK, handle_slots, "slots", "places in the batch and how many are taken", NULL, "Any"},
    {"GET", "/metrics", ASK, handle_metrics, "metrics", "counters in Prometheus' text form (with --metrics)", NULL, "Text"},
    {"GET", "/v1/stats", ASK, handle_stats, "stats", "the engine's counters as one JSON object", NULL, "Any"},
    {"GET", "/v1/cache/stats", ASK, handle_cache_stats, "cacheStats", "the prompt cache: hits, bytes, entries", NULL, "Any"},
    {"POST", "/v1/cache/reset", ASK, handle_cache_reset, "cacheReset", "forget all cached prompts", NULL, "Any"},
};
// clang-format on
const size_t srv_n_routes = MX_COUNT(srv_routes);

static bool path_matches(const srv_route *r, const char *path, const char **arg) {
    size_t n = strlen(r->path);
    *arg = NULL;
    if (!(r->flags & ROUTE_PREFIX)) return strcmp(r->path, path) == 0;
    if (strncmp(r->path, path, n) != 0 || !path[n]) return false;
    *arg = path + n;
    return true;
}

const srv_route *route_find(const srv *s, const char *method, const char *path, const char **arg,
                            char *allow, size_t cap) {
    size_t n = strlen(s->c->api_prefix);
    allow[0] = 0;
    *arg = NULL;
    if (strncmp(path, s->c->api_prefix, n) != 0) return NULL;
    path += n;
    if (!path[0]) path = "/";
    for (size_t i = 0; i < srv_n_routes; i++) {
        const srv_route *r = &srv_routes[i];
        if (r->handle == handle_page && s->c->no_web) continue;
        if (!path_matches(r, path, arg)) continue;
        if (strcmp(r->method, method) == 0) return r;
        size_t used = strlen(allow);
        snprintf(allow + used, cap - used, "%s%s", used ? ", " : "", r->method);
    }
    *arg = NULL;
    return NULL;
}
