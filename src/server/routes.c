// The table of routes: dispatch, docs/server.md and the OpenAPI description are made from it. No
// state.
#include "server/server_int.h"

#include "base/mem.h"

#include <stdio.h>

enum {
    OPEN = ROUTE_PUBLIC,
    ASK = ROUTE_ENGINE,
    POST = ROUTE_ENGINE | ROUTE_BODY,
    GEN = ROUTE_ENGINE | ROUTE_BODY | ROUTE_GEN,
    NONE = ROUTE_NONE
};

const srv_route srv_routes[] = {
#include "server/routes.def"
};
const size_t srv_n_routes = MX_COUNT(srv_routes);

void handle_unsupported(srv_req *q) {
    req_error(q, 501, "not_supported", NULL, "%.100s: %s is not supported", q->route->path,
              q->route->summary);
}

void handle_disabled(srv_req *q) {
    req_error(q, 403, "feature_disabled", NULL, "this feature is disabled");
}

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
        if (strcmp(r->method, method) == 0 || (r->flags & ROUTE_NONE)) return r;
        size_t used = strlen(allow);
        snprintf(allow + used, cap - used, "%s%s", used ? ", " : "", r->method);
    }
    *arg = NULL;
    return NULL;
}
