// The page at /: web/index.html as it is, in the binary. No state.
#include "server/server_int.h"

extern const char web_page_begin[], web_page_end[];
__asm__(".section .rodata\n"
        "web_page_begin: .incbin \"web/index.html\"\n"
        "web_page_end: .byte 0\n"
        ".text\n");

void handle_page(srv_req *q) {
    req_reply_static(q, "text/html; charset=utf-8", web_page_begin,
                     (size_t)(web_page_end - web_page_begin));
}
