// Environment variables: read once into a table. State: that table, guarded by one mutex.
#include "base/knobs.h"

#include "base/mem.h"

#include <pthread.h>
#include <stdlib.h>
#include <strings.h>

static const mx_knob_info infos[] = {
#define KNOB(id, name, kind, dflt, help) {name, dflt, help, MX_KNOB_##kind},
#include "base/knobs.def"
#undef KNOB
};

static struct {
    pthread_mutex_t lock;
    bool loaded;
    bool warned[MX_KNOB_COUNT];
    char *value[MX_KNOB_COUNT];
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

const mx_knob_info *mx_knob_info_get(mx_knob k) {
    return &infos[k];
}

static void load_all(void) {
    for (int i = 0; i < MX_KNOB_COUNT; i++) {
        const char *v = getenv(infos[i].name); // the only getenv of the program
        mx_free(table.value[i]);
        table.value[i] = v ? mx_strdup(v) : NULL;
        table.warned[i] = false;
    }
    table.loaded = true;
}

static const char *value_of(mx_knob k) {
    pthread_mutex_lock(&table.lock);
    if (!table.loaded) load_all();
    const char *v = table.value[k];
    pthread_mutex_unlock(&table.lock);
    return v;
}

void mx_knobs_reload(void) {
    pthread_mutex_lock(&table.lock);
    load_all();
    pthread_mutex_unlock(&table.lock);
}

void mx_knob_warn(mx_knob k) {
    const char *v = value_of(k);
    CHECK(v != NULL);
    pthread_mutex_lock(&table.lock);
    bool first = !table.warned[k];
    table.warned[k] = true;
    pthread_mutex_unlock(&table.lock);
    if (first) {
        mx_log(MX_LOG_WARN, "%s=%s is not a valid value; using %s", infos[k].name, v,
               infos[k].dflt[0] ? infos[k].dflt : "the default");
    }
}

const char *mx_knob_raw(mx_knob k) {
    const char *v = value_of(k);
    return v && v[0] ? v : NULL;
}

bool mx_knob_is_set(mx_knob k) {
    return infos[k].kind == MX_KNOB_PRESENT ? value_of(k) != NULL : mx_knob_raw(k) != NULL;
}

bool mx_knob_text_is_on(const char *v) {
    return v && v[0] && strcmp(v, "0") != 0 && strcasecmp(v, "false") != 0 &&
           strcasecmp(v, "off") != 0 && strcasecmp(v, "no") != 0;
}

bool mx_knob_flag(mx_knob k) {
    if (infos[k].kind == MX_KNOB_PRESENT) return value_of(k) != NULL;
    const char *v = mx_knob_raw(k);
    return mx_knob_text_is_on(v ? v : infos[k].dflt);
}

const char *mx_knob_text(mx_knob k) {
    const char *v = mx_knob_raw(k);
    return v ? v : infos[k].dflt;
}

int64_t mx_knob_int(mx_knob k, int64_t if_unset) {
    int64_t x;
    const char *v = mx_knob_raw(k);
    if (v && mx_parse_i64(v, &x) && x >= 0 && x <= INT32_MAX) return x;
    if (v) mx_knob_warn(k);
    return mx_parse_i64(infos[k].dflt, &x) ? x : if_unset;
}

double mx_knob_float(mx_knob k) {
    double x;
    const char *v = mx_knob_raw(k);
    if (v && mx_parse_f64(v, &x) && x > 0 && x <= 1e6) return x;
    if (v) mx_knob_warn(k);
    return mx_parse_f64(infos[k].dflt, &x) ? x : 0.0;
}

uint64_t mx_knob_size(mx_knob k, uint64_t if_unset) {
    uint64_t x;
    const char *v = mx_knob_raw(k);
    if (v && (strcasecmp(v, "none") == 0 || strcmp(v, "0") == 0)) return if_unset;
    if (v && mx_parse_size(v, &x)) return x;
    if (v) mx_knob_warn(k);
    return mx_parse_size(infos[k].dflt, &x) ? x : if_unset;
}

static bool in_table(const char *name, size_t n) {
    for (size_t i = 0; i < MX_COUNT(infos); i++) {
        if (strlen(infos[i].name) == n && memcmp(infos[i].name, name, n) == 0) return true;
    }
    return false;
}

const char *mx_knob_other(const char *prefix, size_t *at) {
    extern char **environ;
    while (environ[*at]) {
        const char *pair = environ[(*at)++];
        size_t n = strcspn(pair, "=");
        if (strncmp(pair, prefix, strlen(prefix)) == 0 && pair[n] && !in_table(pair, n))
            return pair;
    }
    return NULL;
}
