# The HTTP server: its library, and the page that is part of the binary.
LDLIBS += $(call static,microhttpd) -lgnutls
$(B)/obj/src/server/page.o: web/index.html
