// Sampling that a checkpoint's publisher suggests. Pure functions of an open checkpoint; no state.
//
// One table has both spellings of each value. Files are not trusted: what is malformed is named in
// a warning and left out, for a wrong number here harms less than a model that does not load.
#include "engine/suggest.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct row {
    uint32_t bit;
    const char *name;        // of the request's field
    const char *json, *gguf; // keys; NULL: not there
    bool whole;
    double min, max; // as for requests
    size_t at;       // in mlxcel_sampling
} row;

#define ROW(bit, field, json, gguf, whole, min, max)                                               \
    { MLXCEL_SAMPLING_##bit, #field, json, gguf, whole, min, max, offsetof(mlxcel_sampling, field) }
static const row rows[] = {
    ROW(TEMPERATURE, temperature, "temperature", "temp", false, 0, 1e6),
    ROW(TOP_K, top_k, "top_k", "top_k", true, -1, 1e9),
    ROW(TOP_P, top_p, "top_p", "top_p", false, 0, 1),
    ROW(MIN_P, min_p, "min_p", "min_p", false, 0, 1),
    ROW(TYPICAL_P, typical_p, "typical_p", NULL, false, 0, 1),
    ROW(REPEAT_PENALTY, repeat_penalty, "repetition_penalty", "penalty_repeat", false, 1e-3, 1e3),
    ROW(REPEAT_LAST_N, repeat_last_n, NULL, "penalty_last_n", true, -1, 1e9),
    ROW(XTC_PROBABILITY, xtc_probability, NULL, "xtc_probability", false, 0, 1),
    ROW(XTC_THRESHOLD, xtc_threshold, NULL, "xtc_threshold", false, 0, 1),
};

static const char json_file[] = "generation_config.json";
static const char gguf_prefix[] = "general.sampling.";

// Settings that would change the text and are not applied, unless they have a value that means off.
static const char *const not_applied_json[] = {
    "num_beams",           "num_beam_groups",    "penalty_alpha",  "no_repeat_ngram_size",
    "epsilon_cutoff",      "eta_cutoff",         "bad_words_ids",  "encoder_repetition_penalty",
    "suppress_tokens",     "sequence_bias",      "guidance_scale", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id"};
static const char *const not_applied_gguf[] = {"mirostat", "sequence"};

// ---- One value ----

typedef struct found {
    bool there, number;
    double v;
} found;

static found find_json(const json_t *config, const char *key) {
    const json_t *v = json_object_get(config, key);
    if (!v || json_is_null(v)) return (found){0};
    return (found){true, json_is_number(v), json_number_value(v)};
}

static found find_gguf(const mx_weights *w, const char *key) {
    char name[64];
    snprintf(name, sizeof name, "%s%s", gguf_prefix, key);
    found f = {mx_gguf_find(w, name) != NULL, false, 0};
    int64_t i;
    if (mx_gguf_get_i64(w, name, &i)) {
        f.v = (double)i;
        f.number = true;
    } else {
        f.number = mx_gguf_get_f64(w, name, &f.v);
    }
    return f;
}

// False when there is none that can be used.
static bool read_row(const mx_weights *w, bool gguf, const row *r, mlxcel_sampling *s) {
    const char *key = gguf ? r->gguf : r->json;
    if (!key) return false;
    found f = gguf ? find_gguf(w, key) : find_json(w->generation_config, key);
    if (!f.there) return false;
    bool ok = f.number && isfinite(f.v) && f.v >= r->min && f.v <= r->max &&
              (!r->whole || f.v == floor(f.v));
    if (!ok) {
        mx_log(MX_LOG_WARN, "%s%s%s: expected %s from %.9g to %.9g; not used",
               gguf ? gguf_prefix : json_file, gguf ? "" : ": ", key,
               r->whole ? "an integer" : "a number", r->min, r->max);
        return false;
    }
    if (r->whole)
        *(int32_t *)((char *)s + r->at) = (int32_t)f.v;
    else
        *(float *)((char *)s + r->at) = (float)f.v;
    return true;
}

// ---- All of them ----

static bool is_off(const json_t *v) {
    if (!v || json_is_null(v) || json_is_false(v)) return true;
    if (json_is_number(v)) return json_number_value(v) == 0 || json_number_value(v) == 1;
    return (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static void say_not_applied(const mx_weights *w, bool gguf) {
    static const char text[] = "is not supported; not used";
    for (size_t i = 0; !gguf && i < MX_COUNT(not_applied_json); i++) {
        const char *key = not_applied_json[i];
        if (is_off(json_object_get(w->generation_config, key))) continue;
        mx_log(MX_LOG_WARN, "%s: %s %s", json_file, key, text);
    }
    for (size_t i = 0; gguf && i < MX_COUNT(not_applied_gguf); i++) {
        found f = find_gguf(w, not_applied_gguf[i]);
        if (f.there && !(f.number && f.v == 0))
            mx_log(MX_LOG_WARN, "%s%s %s", gguf_prefix, not_applied_gguf[i], text);
    }
}

static void describe(uint32_t bits, const mlxcel_sampling *s, const char *source, mx_buf *text) {
    const char *comma = "";
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        const row *r = &rows[i];
        if (!(bits & r->bit)) continue;
        const char *at = (const char *)s + r->at;
        double v = r->whole ? *(const int32_t *)at : (double)*(const float *)at;
        mx_buf_printf(text, "%s%s %.6g", comma, r->name, v);
        comma = ", ";
    }
    if (bits) mx_buf_printf(text, " (%s)", source);
}

// What the words of a generation_config.json mean beyond their own value.
static uint32_t complete_json(const json_t *config, uint32_t bits, mlxcel_sampling *s) {
    if (bits & MLXCEL_SAMPLING_REPEAT_PENALTY) { // there it looks at the whole text
        s->repeat_last_n = -1;
        bits |= MLXCEL_SAMPLING_REPEAT_LAST_N;
    }
    const json_t *sample = json_object_get(config, "do_sample");
    if (json_is_false(sample)) { // greedy, whatever the temperature says
        s->temperature = 0;
        bits |= MLXCEL_SAMPLING_TEMPERATURE;
    } else if (sample && !json_is_boolean(sample) && !json_is_null(sample)) {
        mx_log(MX_LOG_WARN, "%s: do_sample: expected true or false; not used", json_file);
    }
    return bits;
}

uint32_t engine_read_suggestions(const mx_weights *w, mlxcel_sampling *s, mx_buf *text) {
    bool gguf = w->container == MX_CONTAINER_GGUF;
    if (w->made || (!gguf && !w->generation_config)) return 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        if (read_row(w, gguf, &rows[i], s)) bits |= rows[i].bit;
    }
    if ((bits & MLXCEL_SAMPLING_TOP_K) && s->top_k < 0) s->top_k = 0; // both mean off
    if (!gguf) bits = complete_json(w->generation_config, bits, s);
    say_not_applied(w, gguf);
    describe(bits, s, gguf ? "the GGUF file" : json_file, text);
    return bits;
}

void engine_copy_suggestions(mlxcel_sampling *to, const mlxcel_sampling *from, uint32_t bits) {
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        const row *r = &rows[i];
        if (!(bits & r->bit)) continue;
        size_t n = r->whole ? sizeof(int32_t) : sizeof(float);
        memcpy((char *)to + r->at, (const char *)from + r->at, n);
    }
}
