// Any bytes as JSON under each set of flags: what is accepted is no deeper than the limit and, when
// written and read again, the same value.
#include "format/weights.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int depth_of(json_t *v) {
    int deepest = 0, d;
    size_t i;
    const char *key;
    json_t *item;
    if (json_is_object(v)) {
        json_object_foreach(v, key, item) deepest = (d = depth_of(item)) > deepest ? d : deepest;
        return deepest + 1;
    }
    if (!json_is_array(v)) return 0;
    json_array_foreach(v, i, item) deepest = (d = depth_of(item)) > deepest ? d : deepest;
    return deepest + 1;
}

static void parse(const char *text, size_t n, int flags) {
    mx_err err = {0};
    json_t *v = mx_json_parse(text, n, 1 << 20, flags, "fuzz", &err);
    if (!v) {
        CHECK(err.status != MX_OK && strncmp(err.msg, "fuzz: ", 6) == 0);
        return;
    }
    CHECK(depth_of(v) <= 128);
    char *out = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    CHECK(out != NULL);
    json_t *again = mx_json_parse(out, strlen(out), 8 << 20, flags, "again", &err);
    CHECKF(again != NULL, "%s", err.msg);
    CHECK(json_equal(v, again));
    json_decref(again);
    json_decref(v);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static const int flags[] = {MX_JSON_STRICT, MX_JSON_CONFIG, MX_JSON_VOCAB};
    for (size_t i = 0; i < MX_COUNT(flags); i++) parse((const char *)data, n_bytes, flags[i]);
    return 0;
}
