// Chat requests to prompts: message normalisation, tool arguments, templates.
#ifndef MX_TEXT_CHAT_H
#define MX_TEXT_CHAT_H

#include "text/jinja.h"

// Brings OpenAI-style messages into the form templates expect, as a new json array (json_decref
// it): content null, missing, "" or [] are accepted when tool_calls exist; a list of text parts
// becomes one string when the template cannot take lists (keep_parts false);
// tool_calls[].function.arguments given as a JSON string is parsed into an object (INVALID when it
// is not JSON; "" means {}). Errors: INVALID, naming message index and field.
mx_status mx_chat_normalize(const json_t *messages, bool keep_parts, json_t **out, mx_err *err);

#endif
