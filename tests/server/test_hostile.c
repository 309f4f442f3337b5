// Clients that do not speak HTTP, or mean harm: what is malformed is refused or closed at once, who
// is slow loses the connection, and everybody else is served meanwhile.
#include "support/served.h"

#include <poll.h>
#include <sys/resource.h>

enum { IDLE_S = 1 };

static int set_up(void **state) {
    static const script scripts[] = {{'A', "Hello " SCRIPT_CUT "world!"}};
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 256, "{{ messages[0].content }}",
                         "--max-body 64K --idle-timeout 30");
}

static void still_serves(void) {
    json_t *v = get_json(S, "/health", 200);
    json_decref(v);
}

static reply ask_raw(const char *p, size_t n) {
    int fd = dial(S);
    assert_true(fd >= 0);
    send_all(fd, p, n);
    reply r = read_reply(fd);
    close(fd);
    return r;
}

#define GET_HEAD  "GET /health HTTP/1.1\r\nHost: localhost\r\n"
#define POST_HEAD "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
#define END       "Connection: close\r\n\r\n"

// libmicrohttpd 1.0 answers some of them itself, with its own page.
static bool is_the_librarys(const reply *r) {
    const char *type = reply_header(r, "Content-Type");
    return r->status == 400 && r->whole && (!type || strstr(type, "html"));
}

static void malformed_heads_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *head;
        int status;
        const char *word;
        bool by_library; // perhaps
    } cases[] = {
        {"GET /health HTTP/1.1\r\n" END, 400, "Host", true},
        {GET_HEAD "Host: other\r\n" END, 400, "Host", false},
        {"GET /health HTTP/1.1\r\nHost: a b\r\n" END, 400, "Host", false},
        {"GET /health HTTP/1.1\r\nHost: localhost/x\r\n" END, 400, "Host", false},
        {"GET /health HTTP/1.1\r\nHost: x@localhost\r\n" END, 400, "Host", false},
        {GET_HEAD "Transfer-Encoding : chunked\r\n" END, 400, "name", true},
        {GET_HEAD "X\x01Y: z\r\n" END, 400, "name", false},
        {GET_HEAD "X: a\x02\r\n" END, 400, "value", false},
        {POST_HEAD "Transfer-Encoding: gzip\r\n" END "{}", 501, "chunked", true},
        {POST_HEAD "Transfer-Encoding: gzip, chunked\r\n" END "0\r\n\r\n", 501, "chunked", true},
        {POST_HEAD "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n" END "0\r\n\r\n", 400,
         "one", false},
        {POST_HEAD "Content-Length: 2\r\nContent-Length: 3\r\n" END "{}", 400, "one", false},
        {POST_HEAD "Content-Length: 1000000000000\r\n" END "{}", 413, "large", false},
        {"BREW /health HTTP/1.1\r\nHost: localhost\r\n" END, 405, "takes GET", false},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        reply r = ask_raw(cases[i].head, strlen(cases[i].head));
        const char *closes = r.status ? reply_header(&r, "Connection") : NULL;
        if (!closes || strcasecmp(closes, "close") != 0) fail_msg("%s: stays open", cases[i].head);
        if (cases[i].by_library && is_the_librarys(&r)) {
            reply_free(&r);
            continue;
        }
        json_t *v = json_of(r, cases[i].status, cases[i].head);
        if (!strstr(text_at(v, "error/message"), cases[i].word))
            fail_msg("%s: %s", cases[i].head, text_at(v, "error/message"));
        json_decref(v);
    }
    // a second request behind a refused one is not read
    static const char two[] = GET_HEAD "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
                                       "0\r\n\r\n" GET_HEAD END;
    reply r = ask_raw(two, sizeof two - 1);
    json_decref(json_of(r, 400, "two"));
    still_serves();
}

static void heads_have_limits(void **state) {
    (void)state;
    static const struct {
        int uri, header, status;
    } cases[] = {{16000, 10, 404}, {17000, 10, 414},  {200000, 10, 414}, {10, 64000, 404},
                 {10, 66000, 431}, {10, 200000, 431}, {10, 300000, 431}, {300000, 10, 414}};
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_puts(&b, "GET /");
        for (int k = 0; k < cases[i].uri; k++) mx_buf_putc(&b, 'u');
        mx_buf_puts(&b, " HTTP/1.1\r\nHost: localhost\r\nX: ");
        for (int k = 0; k < cases[i].header; k++) mx_buf_putc(&b, 'h');
        mx_buf_puts(&b, "\r\n" END);
        reply r = ask_raw(b.data, b.n);
        assert_int_equal(r.status, cases[i].status);
        mx_buf_free(&b);
        reply_free(&r);
    }
    still_serves();
}

// What the library refuses by itself has its own page; the connection ends, quickly.
static void no_http_is_closed(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        int status; // 0: nothing
    } cases[] = {
        {"\x16\x03\x01\x02\x01\x01\x01\x01\xfc\x03\x03\r\n\r\n", 0},
        {"GET\r\n\r\n", 0},
        {"GET /health\r\n\r\n", 400},
        {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
        {GET_HEAD "no colon\r\n" END, 400},
        {POST_HEAD "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400},
        {POST_HEAD "Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n", 400},
        {POST_HEAD "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}\r\n", 413},
        {POST_HEAD "Content-Length: -3\r\n\r\n{}", 400},
        {POST_HEAD "Content-Length: 99999999999999999999999\r\n\r\n{}", 413},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        double t = mx_now_s();
        reply r = ask_raw(cases[i].bytes, strlen(cases[i].bytes));
        if (r.status != cases[i].status) fail_msg("%s: %d", cases[i].bytes, r.status);
        assert_true(mx_now_s() - t < 5 * MX_TEST_SLOW);
        reply_free(&r);
    }
    still_serves();
}

static void an_address_with_a_host_is_a_path(void **state) {
    (void)state;
    static const char *const same[] = {
        "GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n" END,
        "GET /health HTTP/1.0\r\n\r\n"};
    for (size_t i = 0; i < MX_COUNT(same); i++)
        json_decref(json_of(ask_raw(same[i], strlen(same[i])), 200, same[i]));
    static const char other[] = "GET http://localhost HTTP/1.1\r\nHost: localhost\r\n" END;
    reply r = ask_raw(other, sizeof other - 1);
    assert_int_equal(r.status, 200); // the page
    reply_free(&r);
}

// Sends a byte every tenth of a second; the seconds until the server closes.
static double drip(const server *s, const char *first, const char *drops) {
    int fd = dial(s);
    assert_true(fd >= 0);
    double t = mx_now_s();
    send_all(fd, first, strlen(first));
    for (size_t i = 0; mx_now_s() - t < 20 * MX_TEST_SLOW; i++) {
        struct pollfd p = {fd, POLLIN, 0};
        char c;
        if (poll(&p, 1, 100) == 1 && recv(fd, &c, 1, 0) <= 0) break;
        if (send(fd, &drops[i % strlen(drops)], 1, MSG_NOSIGNAL) != 1) break;
    }
    close(fd);
    return mx_now_s() - t;
}

static void slow_requests_lose_the_connection(void **state) {
    (void)state;
    static const char *const heads[] = {
        "GET /health", GET_HEAD "X: ", POST_HEAD "Content-Length: 60000\r\n\r\n{\"content\":\""};
    server slow = {0};
    server_start(&slow, dir, model, "--idle-timeout 1");
    for (size_t i = 0; i < MX_COUNT(heads); i++) {
        double s = drip(&slow, heads[i], "a");
        if (s < IDLE_S * 0.9 || s > 10 * MX_TEST_SLOW)
            fail_msg("%s: closed after %g s", heads[i], s);
    }
    server_stop(&slow);
}

// A body that has no end is not read for ever.
static void a_body_without_end(void **state) {
    (void)state;
    int fd = dial(S);
    static const char head[] = POST_HEAD "Transfer-Encoding: chunked\r\n\r\n";
    static char chunk[8 + 4096 + 2] = "001000\r\n";
    memset(chunk + 8, ' ', 4096);
    memcpy(chunk + 8 + 4096, "\r\n", 2);
    send_all(fd, head, sizeof head - 1);
    size_t sent = 0;
    while (sent < (64 << 20)) {
        ssize_t k = send(fd, chunk, sizeof chunk, MSG_NOSIGNAL);
        if (k <= 0) break;
        sent += (size_t)k;
    }
    assert_true(sent < (32 << 20)); // what the sockets hold comes on top of the limit
    close(fd);
    still_serves();
}

// More idle connections than there are places: a new one finds room.
static void a_crowd_of_idle_connections(void **state) {
    (void)state;
    enum { CROWD = 1100 };
    struct rlimit r;
    getrlimit(RLIMIT_NOFILE, &r);
    r.rlim_cur = MX_MIN(r.rlim_max, (rlim_t)(CROWD + 100));
    setrlimit(RLIMIT_NOFILE, &r);
    if (r.rlim_cur < CROWD + 100) {
        print_message("skip: too few files may be open\n");
        skip();
    }
    server s = {0};
    server_start(&s, dir, model, "--idle-timeout 600");
    static int fds[CROWD];
    for (int i = 0; i < CROWD; i++) fds[i] = dial(&s);
    double t = mx_now_s();
    json_t *v = get_json(&s, "/health", 200);
    json_decref(v);
    assert_true(mx_now_s() - t < 10 * MX_TEST_SLOW);
    for (int i = 0; i < CROWD; i++) {
        if (fds[i] >= 0) close(fds[i]);
    }
    server_stop(&s);
}

static void pipelined_requests_are_answered_in_order(void **state) {
    (void)state;
    int fd = dial(S);
    mx_buf b;
    mx_buf_init(&b, 0);
    for (int i = 0; i < 20; i++) {
        static const char body[] = "{\"prompt\":\"xA\",\"temperature\":0,\"cache_prompt\":false}";
        mx_buf_printf(&b,
                      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: id%d\r\n%s"
                      "Content-Length: %zu\r\n\r\n%s",
                      i, i == 19 ? "Connection: close\r\n" : "", sizeof body - 1, body);
    }
    send_all(fd, b.data, b.n);
    mx_buf_clear(&b);
    char part[4096];
    ssize_t k;
    while ((k = recv(fd, part, sizeof part, 0)) > 0) mx_buf_add(&b, part, (size_t)k);
    close(fd);
    const char *p = b.data;
    for (int i = 0; i < 20; i++) {
        char want[32];
        snprintf(want, sizeof want, "X-Request-Id: id%d\r\n", i);
        p = strstr(p, want);
        if (!p) fail_msg("no answer %d", i);
        p = strstr(p, "Hello world!");
        assert_non_null(p);
    }
    mx_buf_free(&b);
}

// One thread serves connections, and is not held up by a request that is slow to read.
static void slow_requests_stall_nobody(void **state) {
    (void)state;
    server s = {0};
    server_start(&s, dir, model, "--threads-http 1");
    static const char slow[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],\"chat_template\":\""
        "{% for i in range(3000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}done\"}";
    int fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = dial(&s);
        send_request(fds[i], "POST", "/apply-template", NULL, slow, sizeof slow - 1);
    }
    mx_sleep_s(0.05);
    for (int i = 0; i < 3; i++) {
        json_t *v = post_json(&s, "/v1/completions", "{\"prompt\":\"xA\",\"temperature\":0}", 200);
        json_decref(v);
    }
    struct pollfd last = {fds[2], POLLIN, 0};
    assert_int_equal(poll(&last, 1, 0), 0); // it has not ended yet
    for (int i = 0; i < 3; i++) {
        json_t *v = json_of(read_reply(fds[i]), 200, "a slow template");
        assert_string_equal(text_at(v, "prompt"), "done");
        json_decref(v);
        close(fds[i]);
    }
    // a long body goes the same way, and may generate, stream, or be wrong
    mx_buf b;
    mx_buf_init(&b, 0);
    for (int kind = 0; kind < 3; kind++) {
        mx_buf_clear(&b);
        mx_buf_printf(&b, "{\"prompt\":\"xA\",\"temperature\":0,\"stream\":%s,\"%s\":\"",
                      kind == 1 ? "true" : "false", kind == 2 ? "wrong" : "user");
        for (int i = 0; i < 100000; i++) mx_buf_putc(&b, 'u');
        mx_buf_puts(&b, "\"}");
        reply r = post(&s, "/v1/completions", b.data);
        assert_int_equal(r.status, kind == 2 ? 400 : 200);
        assert_true(r.whole);
        assert_non_null(strstr(r.body.data, kind == 2   ? "wrong"
                                            : kind == 1 ? "[DONE]"
                                                        : "Hello world!"));
        reply_free(&r);
    }
    mx_buf_free(&b);
    // ending does not wait for one that is read
    static const char slowest[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"A\"}],\"chat_template\":\""
        "{% for i in range(4000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}\"}";
    double t = mx_now_s();
    int fd = dial(&s);
    send_request(fd, "POST", "/apply-template", NULL, slowest, sizeof slowest - 1);
    json_decref(json_of(read_reply(fd), 200, "the slowest template"));
    double whole = mx_now_s() - t;
    close(fd);
    int many[20];
    for (int i = 0; i < 20; i++) {
        many[i] = dial(&s);
        send_request(many[i], "POST", "/apply-template", NULL, slowest, sizeof slowest - 1);
    }
    mx_sleep_s(0.05);
    kill(s.pid, SIGTERM);
    assert_int_equal(server_end(&s, 3 + whole * 10), 0);
    for (int i = 0; i < 20; i++) close(many[i]);
}

// Sends long bodies from all clients but for the last byte, waits, and sends that. How many of them
// were told that there is no room.
static int send_long_bodies(const char *body, size_t n, double wait_s) {
    enum { CLIENTS = 12 };
    int fds[CLIENTS], busy = 0;
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = dial(S);
        char head[256];
        int k = snprintf(head, sizeof head,
                         POST_HEAD "Connection: close\r\nContent-Length: %zu\r\n\r\n", n);
        send_all(fds[i], head, (size_t)k);
        send_all(fds[i], body, n - 1);
    }
    mx_sleep_s(wait_s);
    for (int i = 0; i < CLIENTS; i++) send_all(fds[i], body + n - 1, 1);
    for (int i = 0; i < CLIENTS; i++) {
        reply r = read_reply(fds[i]);
        assert_true(r.status == 200 || r.status == 503);
        busy += r.status == 503;
        if (r.status == 503) assert_string_equal(reply_header(&r, "Retry-After"), "1");
        reply_free(&r);
        close(fds[i]);
    }
    assert_true(busy < CLIENTS);
    return busy;
}

// Bodies of many requests together are bounded.
static void many_long_bodies(void **state) {
    (void)state;
    static char body[60001];
    memset(body, ' ', sizeof body - 1);
    memcpy(body, "{\"content\":\"abc\"}", 17);
    double wait_s = 0.1;
    while (send_long_bodies(body, sizeof body - 1, wait_s) == 0) {
        wait_s *= 2; // they had not arrived all
        assert_true(wait_s < 10);
    }
    json_decref(post_json(S, "/tokenize", body, 200)); // the room is free again
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(malformed_heads_are_refused),
        cmocka_unit_test(heads_have_limits),
        cmocka_unit_test(no_http_is_closed),
        cmocka_unit_test(an_address_with_a_host_is_a_path),
        cmocka_unit_test(slow_requests_lose_the_connection),
        cmocka_unit_test(a_body_without_end),
        cmocka_unit_test(a_crowd_of_idle_connections),
        cmocka_unit_test(many_long_bodies),
        cmocka_unit_test(slow_requests_stall_nobody),
        cmocka_unit_test(pipelined_requests_are_answered_in_order),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
