// The tokenizer: text to ids, in the order Hugging Face's tokenizers does it.
//
// State: struct mx_tokenizer, constant after loading; an encode call owns its working memory. Does
// not read files (load_json.c, load_gguf.c) nor decode (detok.c). Steps: added tokens are cut out
// of the text; what lies between is normalised, searched for normalised added tokens, split into
// pieces, and each piece is merged. Text of different trust is one text all along; trust only
// decides which added tokens may be seen.
#include "text/text_int.h"

#include "base/mem.h"

#include <stdlib.h>

enum { MAX_TEXT = 256 << 20 };

mx_tokenizer *tokenizer_new(void) {
    mx_tokenizer *t = mx_calloc(1, sizeof *t);
    t->bos = t->eos = t->b.unk = -1;
    mx_arena_init(&t->arena, 0);
    return t;
}

void mx_tokenizer_close(mx_tokenizer *t) {
    if (!t) return;
    bpe_free(&t->b);
    vocab_free(&t->v);
    norm_free(&t->norm);
    pre_free(&t->pre);
    added_free(&t->raw);
    added_free(&t->normal);
    added_free(&t->strict);
    mx_free(t->prefix.v);
    mx_free(t->suffix.v);
    mx_free(t->eos_ids.v);
    mx_arena_free(&t->arena);
    mx_free(t);
}

mx_str tokenizer_copy(mx_tokenizer *t, mx_str s) {
    return (mx_str){mx_arena_strndup(&t->arena, s.p, s.n), s.n};
}

void mx_ids_push(mx_ids *ids, int32_t id) {
    if (ids->n == ids->cap) {
        ids->cap = ids->cap ? ids->cap * 2 : 64;
        ids->v = mx_realloc(ids->v, ids->cap * sizeof *ids->v);
    }
    ids->v[ids->n++] = id;
}

// ---- building ----

mx_status tokenizer_add_token(mx_tokenizer *t, int64_t id, mx_str text, added_opts o, mx_err *err) {
    if (!mx_utf8_valid(text)) return mx_err_set(err, MX_FORMAT, "content is not valid UTF-8");
    int32_t known = vocab_find(&t->v, text);
    if (known >= 0 && known != id) {
        return mx_err_set(err, MX_FORMAT, "'%.*s' has id %lld here and %d in the vocabulary",
                          (int)MX_MIN(text.n, 80u), text.p, (long long)id, known);
    }
    if (known < 0) {
        MX_TRY(vocab_put(&t->v, id, text, err));
        t->v.flags[id] |= TOK_OUTSIDE;
    }
    if (t->v.flags[id] & TOK_ADDED) {
        return mx_err_set(err, MX_FORMAT, "'%.*s' is listed twice", (int)MX_MIN(text.n, 80u),
                          text.p);
    }
    t->v.flags[id] |= (uint8_t)(TOK_ADDED | (o.special ? TOK_SPECIAL : 0));
    added_token a = {.match = tokenizer_copy(t, text),
                     .id = (int32_t)id,
                     .single_word = o.single_word,
                     .lstrip = o.lstrip,
                     .rstrip = o.rstrip};
    added_add(o.normalized ? &t->normal : &t->raw, a);
    return MX_OK;
}

void tokenizer_add_template(mx_tokenizer *t, mx_str name, mx_str text) {
    for (size_t i = 0; i < t->n_templates; i++) {
        if (mx_str_eq(t->templates[i].name, name)) return;
    }
    text_template *v = MX_ARENA_ARRAY(&t->arena, text_template, t->n_templates + 1);
    if (t->n_templates) memcpy(v, t->templates, t->n_templates * sizeof *v);
    v[t->n_templates++] = (text_template){tokenizer_copy(t, name), tokenizer_copy(t, text)};
    t->templates = v;
}

void tokenizer_add_eos(mx_tokenizer *t, int64_t id) {
    if (!vocab_has(&t->v, id)) return;
    for (size_t i = 0; i < t->eos_ids.n; i++) {
        if (t->eos_ids.v[i] == id) return;
    }
    mx_ids_push(&t->eos_ids, (int32_t)id);
}

// HTML tags that vocabularies list as tokens (Gemma does): they are text, not control.
static bool is_html_tag(mx_str s) {
    static const char *const tags[] = {
        "table", "caption", "thead", "tbody", "tfoot",      "tr",     "th",   "td",  "h1",   "h2",
        "h3",    "h4",      "h5",    "h6",    "blockquote", "strong", "em",   "b",   "i",    "u",
        "s",     "sub",     "sup",   "code",  "a",          "html",   "body", "img", "span", "bbox",
        "ul",    "ol",      "li",    "div",   "iframe",     "footer", "p",    "pre", "br",   "hr"};
    if (s.n < 3) return false;
    mx_str name = {s.p + 1, s.n - 2};
    if (name.p[0] == '/') name = (mx_str){name.p + 1, name.n - 1};
    for (size_t i = 0; i < MX_COUNT(tags); i++) {
        if (mx_str_is(name, tags[i])) return true;
    }
    return false;
}

// Whether untrusted text must never become this added token: control tokens, what a chat template
// speaks of, and what has the look of markup.
static bool is_markup(const mx_tokenizer *t, uint32_t id, mx_str s) {
    if (t->v.flags[id] & TOK_SPECIAL) return true;
    if (s.n < 2) return false;
    char a = s.p[0], z = s.p[s.n - 1];
    bool tag = (a == '<' && z == '>') || (a == '[' && z == ']');
    if (s.p[1] == '|' || s.p[s.n - 2] == '|') tag = tag || a == '<' || z == '>';
    if (tag) return !is_html_tag(s);
    bool word = false; // runs of blanks and the like are text even when a template holds them
    for (size_t i = 0; i < s.n; i++) word |= (s.p[i] | 0x20) >= 'a' && (s.p[i] | 0x20) <= 'z';
    for (size_t i = 0; word && i < t->n_templates; i++) {
        mx_str text = t->templates[i].text;
        if (memmem(text.p, text.n, s.p, s.n)) return true;
    }
    return false;
}

static mx_status normalise_content(mx_tokenizer *t, added_token *a, mx_err *err) {
    mx_buf tmp[2];
    mx_buf_init(&tmp[0], 0);
    mx_buf_init(&tmp[1], 0);
    pattern_work w = {0};
    mx_str form;
    mx_status st = norm_run(&t->norm, &w, a->match, tmp, &form, err);
    if (st == MX_OK && form.n == 0) {
        st = mx_err_set(err, MX_UNSUPPORTED, "added token '%.*s' is empty when normalised",
                        (int)MX_MIN(a->match.n, 80u), a->match.p);
    }
    if (st == MX_OK) a->match = tokenizer_copy(t, form);
    pattern_work_free(&w);
    mx_buf_free(&tmp[0]);
    mx_buf_free(&tmp[1]);
    return st;
}

static void mark_markup(mx_tokenizer *t, added_set *s) {
    for (size_t i = 0; i < s->n; i++) {
        added_token *a = &s->items[i];
        a->markup = is_markup(t, (uint32_t)a->id, a->match);
        if (a->markup) t->v.flags[a->id] |= TOK_MARKUP;
    }
}

mx_status tokenizer_finish(mx_tokenizer *t, mx_err *err) {
    mark_markup(t, &t->raw);
    mark_markup(t, &t->normal);
    bool any = false;
    for (size_t i = 0; i < t->normal.n; i++) any |= t->normal.items[i].markup;
    if (any) {
        for (size_t i = 0; i < t->raw.n; i++) added_add(&t->strict, t->raw.items[i]);
        for (size_t i = 0; i < t->normal.n; i++) {
            if (t->normal.items[i].markup) added_add(&t->strict, t->normal.items[i]);
        }
    }
    for (size_t i = 0; i < t->normal.n; i++) {
        MX_TRY(normalise_content(t, &t->normal.items[i], err));
    }
    detok_note_shown(t);
    added_sort(&t->raw);
    added_sort(&t->normal);
    added_sort(&t->strict);
    bpe_drop_markup(&t->b);
    detok_make_pieces(t);
    return MX_OK;
}

// ---- encoding ----

// One encode call.
typedef struct encoder {
    const mx_tokenizer *t;
    const trust *tr;
    mx_ids *out;
    mx_err *err;
    mx_buf norm[2];
    pattern_work norm_work;
    pre_work pre;
    bpe_work bpe;
} encoder;

static void encoder_init(encoder *e, const mx_tokenizer *t, mx_ids *out, mx_err *err) {
    *e = (encoder){.t = t, .out = out, .err = err};
    mx_buf_init(&e->norm[0], 0);
    mx_buf_init(&e->norm[1], 0);
    pre_work_init(&e->pre);
}

static void encoder_free(encoder *e) {
    mx_buf_free(&e->norm[0]);
    mx_buf_free(&e->norm[1]);
    pattern_work_free(&e->norm_work);
    pre_work_free(&e->pre);
    bpe_work_free(&e->bpe);
}

static mx_status encode_plain(encoder *e, mx_str text, bool at_zero) {
    if (text.n == 0) return MX_OK;
    MX_TRY(pre_run(&e->t->pre, &e->pre, text, at_zero, e->err));
    for (size_t i = 0; i < e->pre.n; i++) {
        pre_piece p = e->pre.pieces[i];
        bpe_encode(&e->t->b, &e->bpe, (mx_str){e->pre.text.p + p.at, p.n}, e->out);
    }
    return MX_OK;
}

// Text between added tokens of the first kind.
static mx_status encode_between(encoder *e, mx_str text, bool at_zero) {
    if (text.n == 0) return MX_OK;
    MX_TRY(norm_run(&e->t->norm, &e->norm_work, text, e->norm, &text, e->err));
    static const trust nothing = {.none = true};
    size_t from = 0;
    added_hit hit = {0};
    while (added_find(&e->t->normal, text, hit.next, from, e->tr ? &nothing : NULL, &hit)) {
        if (hit.start > from) {
            MX_TRY(
                encode_plain(e, (mx_str){text.p + from, hit.start - from}, at_zero && from == 0));
        }
        mx_ids_push(e->out, hit.id);
        from = hit.end;
    }
    return encode_plain(e, (mx_str){text.p + from, text.n - from}, at_zero && from == 0);
}

static mx_status encode_all(encoder *e, mx_str text) {
    const added_set *s = e->tr && e->t->strict.n ? &e->t->strict : &e->t->raw;
    size_t from = 0;
    added_hit hit = {0};
    while (added_find(s, text, hit.next, from, e->tr, &hit)) {
        if (hit.start > from) {
            MX_TRY(encode_between(e, (mx_str){text.p + from, hit.start - from}, from == 0));
        }
        mx_ids_push(e->out, hit.id);
        from = hit.end;
    }
    return encode_between(e, (mx_str){text.p + from, text.n - from}, from == 0);
}

static mx_status check_text(mx_str text, mx_err *err) {
    if (text.n > MAX_TEXT) {
        return mx_err_set(err, MX_TOOLARGE, "text of %zu bytes, at most %d are tokenised", text.n,
                          MAX_TEXT);
    }
    if (!mx_utf8_valid(text)) return mx_err_set(err, MX_INVALID, "text is not valid UTF-8");
    return MX_OK;
}

mx_status mx_tokenizer_encode(const mx_tokenizer *t, mx_str text, mx_encode_opts opts, mx_ids *out,
                              mx_err *err) {
    MX_TRY(check_text(text, err));
    size_t n = out->n;
    for (size_t i = 0; opts.add_special && i < t->prefix.n; i++) mx_ids_push(out, t->prefix.v[i]);
    size_t body = out->n;
    encoder e;
    encoder_init(&e, t, out, err);
    static const trust nothing = {.none = true};
    if (!opts.parse_special) e.tr = &nothing;
    mx_status st = encode_all(&e, text);
    encoder_free(&e);
    if (st != MX_OK) {
        out->n = n;
        return st;
    }
    // a text that spells BOS itself keeps its own
    if (body > n && out->n > body && out->v[body] == t->bos && out->v[body - 1] == t->bos) {
        memmove(out->v + body - 1, out->v + body, (out->n - body) * sizeof *out->v);
        out->n--;
    }
    for (size_t i = 0; opts.add_special && i < t->suffix.n; i++) mx_ids_push(out, t->suffix.v[i]);
    return MX_OK;
}

// Joins the spans and lists the untrusted ranges. False when they are too long.
static bool join_spans(const mx_span *spans, size_t n, mx_buf *text, trust *tr) {
    tr->untrusted = mx_calloc(n ? n : 1, sizeof *tr->untrusted);
    for (size_t i = 0; i < n; i++) {
        size_t at = text->n;
        if (!mx_buf_add(text, spans[i].text.p, spans[i].text.n)) return false;
        if (spans[i].trusted || spans[i].text.n == 0) continue;
        if (tr->n && tr->untrusted[tr->n - 1].end == at) {
            tr->untrusted[tr->n - 1].end = text->n;
        } else {
            tr->untrusted[tr->n++] = (text_range){at, text->n};
        }
    }
    return true;
}

mx_status mx_tokenizer_encode_spans(const mx_tokenizer *t, const mx_span *spans, size_t n,
                                    mx_ids *out, mx_err *err) {
    mx_buf text;
    mx_buf_init(&text, (size_t)MAX_TEXT + 1);
    trust tr = {0};
    size_t n_out = out->n;
    encoder e;
    encoder_init(&e, t, out, err);
    mx_status st;
    if (!join_spans(spans, n, &text, &tr)) {
        st = mx_err_set(err, MX_TOOLARGE, "prompt of more than %d bytes", MAX_TEXT);
        goto out;
    }
    mx_str whole = {text.data ? text.data : "", text.n};
    st = check_text(whole, err);
    if (st != MX_OK) goto out;
    if (tr.n) e.tr = &tr; // all trusted: the same as plain encoding
    st = encode_all(&e, whole);
out:
    if (st != MX_OK) out->n = n_out;
    encoder_free(&e);
    mx_free(tr.untrusted);
    mx_buf_free(&text);
    return st;
}

// ---- questions ----

int32_t mx_tokenizer_n_vocab(const mx_tokenizer *t) {
    return (int32_t)t->v.n;
}

int32_t mx_tokenizer_bos(const mx_tokenizer *t) {
    return t->bos;
}

int32_t mx_tokenizer_eos(const mx_tokenizer *t) {
    return t->eos;
}

int32_t mx_tokenizer_eos_ids(const mx_tokenizer *t, int32_t *ids, int32_t cap) {
    for (size_t i = 0; i < t->eos_ids.n && (int32_t)i < cap; i++) ids[i] = t->eos_ids.v[i];
    return (int32_t)t->eos_ids.n;
}

bool mx_tokenizer_adds_bos(const mx_tokenizer *t) {
    return t->bos >= 0 && t->prefix.n > 0 && t->prefix.v[0] == t->bos;
}

mx_str mx_tokenizer_piece(const mx_tokenizer *t, int32_t id) {
    if (!vocab_has(&t->v, id)) return (mx_str){"", 0};
    return vocab_piece(&t->v, (uint32_t)id);
}

bool mx_tokenizer_is_special(const mx_tokenizer *t, int32_t id) {
    return vocab_has(&t->v, id) && (t->v.flags[id] & TOK_SPECIAL);
}

mx_str mx_tokenizer_template(const mx_tokenizer *t, const char *name) {
    mx_str want = mx_str_of(name ? name : "");
    if (mx_str_is(want, "default")) want = (mx_str){"", 0};
    for (size_t i = 0; i < t->n_templates; i++) {
        if (mx_str_eq(t->templates[i].name, want)) return t->templates[i].text;
    }
    return (mx_str){"", 0};
}
