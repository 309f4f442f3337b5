// The tokenizer of models that have none: one token a byte. Stateless; goes through the loader of
// tokenizer.json, so that it behaves like any other byte-level vocabulary.
#include "text/text_int.h"

// GPT-2's printable stand-ins: a byte that prints is itself, the others are numbered from 256.
static bool prints(uint32_t b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
}

mx_status mx_tokenizer_open_bytes(mx_tokenizer **t, mx_err *err) {
    mx_buf json;
    mx_buf_init(&json, 0);
    mx_buf_puts(&json, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
        char text[4];
        int n = mx_utf8_encode(prints(b) ? b : next++, text);
        mx_buf_json(&json, (mx_str){text, (size_t)n});
        mx_buf_printf(&json, ":%u%s", b, b < 255 ? "," : "}}");
    }
    mx_buf_puts(&json, ",\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                       "\"decoder\":{\"type\":\"ByteLevel\"}}");
    mx_status st = mx_tokenizer_open_json(t, (mx_str){json.data, json.n}, (mx_str){0}, err);
    mx_buf_free(&json);
    return st;
}
