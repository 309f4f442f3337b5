// Chat requests to prompts: message normalisation, tool arguments, templates.
#ifndef MX_TEXT_CHAT_H
#define MX_TEXT_CHAT_H

#include "text/jinja.h"

// Brings OpenAI-style messages into the form templates expect, as a new json array (json_decref
// it; it shares values with `messages`, which must not be changed meanwhile):
// - Fields that are null are left out.
// - content null, missing, "" or [] becomes "" when the message is an assistant's with tool_calls,
//   function_call or reasoning; without those, null and missing are errors and [] becomes "".
// - A list of text parts is checked, and becomes one string (parts joined without separator) when
//   the template cannot take lists (keep_parts false).
// - tool_calls[].function.arguments given as a JSON string is parsed into an object ("", blanks,
//   null and missing mean {}).
// - Reasoning given as reasoning_content, thinking or reasoning is there under the first two
//   names, as transformers passes it.
// Errors: INVALID, naming message index and field ("messages[2].tool_calls[0].function.arguments:
// ..."); values nested deeper than 128 are one.
mx_status mx_chat_normalize(const json_t *messages, bool keep_parts, json_t **out, mx_err *err);

#endif
