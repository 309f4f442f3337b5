// Stop strings over a stream of text: the earliest match wins, text before it is released, a tail
// that may become a match is held back. In reasoning before the answer none is looked for.
#ifndef MX_ENGINE_STOP_H
#define MX_ENGINE_STOP_H

#include "base/str.h"

typedef struct stop_matcher {
    const char *const *stops; // not owned
    size_t n_stops;
    mx_buf held; // text not yet released
    int mode;    // where in the reasoning it is
    const char *open, *close;
    size_t n_blanks, n_tag; // at the beginning of held; of the closing tag, seen
} stop_matcher;

void stop_init(stop_matcher *m, const char *const *stops, size_t n_stops);
void stop_free(stop_matcher *m);
// Before any text: reasoning is what stands between the tags, blanks around them included. The
// text has to begin with it; open NULL: it begins inside. A tag's first byte is in it once.
void stop_skip_reasoning(stop_matcher *m, const char *open, const char *close);
// Adds text; appends what may be released to out. Returns the index of the stop that matched (held
// text is dropped then), or -1.
int stop_push(stop_matcher *m, mx_str text, mx_buf *out);
// The end: releases the held tail. The same result.
int stop_flush(stop_matcher *m, mx_buf *out);

#endif
