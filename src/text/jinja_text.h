// Text functions shared by string methods and filters of the template interpreter.
#ifndef MX_TEXT_JINJA_TEXT_H
#define MX_TEXT_JINJA_TEXT_H

#include "text/jinja_int.h"

typedef enum jcase {
    JCASE_UPPER,
    JCASE_LOWER,
    JCASE_SWAP,
    JCASE_CAPITALIZE,
    JCASE_TITLE,       // str.title
    JCASE_FILTER_TITLE // the title filter: words begin after blanks, '-' and opening brackets
} jcase;
const jstr *jinja_text_case(jrt *r, const jstr *s, jcase how);

// chars NULL: blanks.
const jstr *jinja_text_strip(jrt *r, const jstr *s, const jstr *chars, bool left, bool right);
// sep NULL: at blanks. max < 0: no limit. right: count from the end.
jlist *jinja_text_split(jrt *r, const jstr *s, const jstr *sep, int64_t max, bool right);
jlist *jinja_text_lines(jrt *r, const jstr *s, bool keep_ends);
const jstr *jinja_text_replace(jrt *r, const jstr *s, const jstr *old, const jstr *new,
                               int64_t max);
// strict: every item must be text (str.join); otherwise items are printed.
const jstr *jinja_text_join(jrt *r, const jstr *sep, jiter it, bool strict);
const jstr *jinja_text_pad(jrt *r, const jstr *s, int64_t width, const jstr *fill, char align);
const jstr *jinja_text_escape(jrt *r, const jstr *s); // HTML; the result is marked safe
const jstr *jinja_text_markup(jrt *r, const jstr *s); // s marked safe

typedef enum jclass {
    JCLASS_ALPHA,
    JCLASS_ALNUM,
    JCLASS_DIGIT,
    JCLASS_NUMERIC,
    JCLASS_SPACE,
    JCLASS_UPPER,
    JCLASS_LOWER,
    JCLASS_TITLE,
    JCLASS_ASCII,
    JCLASS_NAME
} jclass;
bool jinja_text_all(jrt *r, const jstr *s, jclass how); // str.isalpha and its kin

#endif
