// Chat templates: an interpreter for the Jinja that real templates use. It knows nothing of
// tokens; strings carry the origin of each span through every filter.
#ifndef MX_TEXT_JINJA_H
#define MX_TEXT_JINJA_H

#include "text/tokenizer.h"

#include <jansson.h>

typedef struct mx_template mx_template;

// Compiles source (copied). Errors: FORMAT or UNSUPPORTED, naming line and construct. trim_blocks
// and lstrip_blocks are on, as transformers sets them.
mx_status mx_template_open(mx_template **t, mx_str source, mx_err *err);
void mx_template_close(mx_template *t);

// Rendered text: spans in order, adjacent spans of one origin merged. Free with mx_rendered_free.
typedef struct mx_rendered {
    mx_span *spans;
    size_t n;
    mx_buf text; // the whole text; spans point into it
} mx_rendered;
void mx_rendered_free(mx_rendered *r);

typedef struct mx_template_vars {
    const json_t *messages;  // array
    const json_t *tools;     // array or NULL (none)
    const json_t *documents; // array or NULL
    const json_t *extra;     // object: chat_template_kwargs, or NULL; may replace bos_token and
                             // eos_token (untrusted then), but not messages, tools, documents or
                             // add_generation_prompt (INVALID)
    bool add_generation_prompt;
    const char *bos_token, *eos_token; // NULL = undefined
    double now_s;                      // for strftime_now; 0 = the present
} mx_template_vars;

// Renders. Bounds: output 16 MiB, 10 million steps, nesting 200: beyond is an error, not a hang.
// raise_exception in the template is INVALID with its text. Thread-safe on a compiled template.
// Text that comes from vars (messages, tools, documents, extra) is untrusted; bos_token, eos_token
// and the template's own literals are trusted.
mx_status mx_template_render(const mx_template *t, const mx_template_vars *vars, mx_rendered *out,
                             mx_err *err);

#endif
