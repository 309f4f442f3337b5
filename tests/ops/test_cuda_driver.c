// What is said when there is no GPU to be had: against a stand-in for the driver (stub_driver.c),
// each case in a process of its own, whose libcuda.so.1 it is. A build without CUDA skips.
#include "backend/cuda/cuda.h"
#include "engine/device.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka.h needs the first four
#include <cmocka.h>

#define STUB MX_TEST_BUILD_DATA "/stub-driver/libcuda.so.1"
#define OLD  MX_TEST_BUILD_DATA "/stub-driver-old/libcuda.so.1"

static const struct {
    const char *name, *lib; // NULL: the test's process without a stub
    const char *env[2], *value[2];
    const char *want;       // --device
    const char *message[3]; // parts of the error
} cases[] = {
    {"a word", STUB, {0}, {0}, "tpu", {"device 'tpu'", "cuda:N"}},
    {"no number", STUB, {0}, {0}, "cuda:x", {"device 'cuda:x'", "number"}},
    {"a negative number", STUB, {0}, {0}, "cuda:-1", {"device 'cuda:-1'", "number"}},
    {"before CUDA 12",
     OLD,
     {0},
     {0},
     "cuda",
     {"device cuda", "older than CUDA 12.0", "needs CUDA"}},
    {"a function is missing",
     STUB,
     {"STUB_MISSING"},
     {"cuLaunchKernelEx"},
     "cuda",
     {"cuLaunchKernelEx", "11.6", "needs a driver"}},
    {"an old version", STUB, {"STUB_VERSION"}, {"11080"}, "cuda", {"CUDA 11.8", "needs CUDA"}},
    {"no device", STUB, {"STUB_INIT"}, {"100"}, "gpu", {"device gpu", "no NVIDIA GPU"}},
    {"all devices hidden",
     STUB,
     {"STUB_INIT", "CUDA_VISIBLE_DEVICES"},
     {"100", ""},
     "cuda",
     {"no NVIDIA GPU is offered", "CUDA_VISIBLE_DEVICES is empty"}},
    {"some devices hidden",
     STUB,
     {"STUB_INIT", "CUDA_VISIBLE_DEVICES"},
     {"100", "7"},
     "cuda",
     {"no NVIDIA GPU is offered", "CUDA_VISIBLE_DEVICES is '7'"}},
    {"the driver fails", STUB, {"STUB_INIT"}, {"999"}, "cuda", {"cuInit", "stub"}},
    {"no such device", STUB, {"STUB_COUNT"}, {"2"}, "cuda:2", {"device cuda:2", "offers 2"}},
    {"no code for it",
     STUB,
     {"STUB_CC"},
     {"35"},
     "cuda:0",
     {"Stub GPU (sm_35)", "compiled for [", "before sm_80 are not supported"}},
    {"nobody asked: an old driver",
     STUB,
     {"STUB_VERSION"},
     {"11080"},
     "",
     {"CPU, declined: ", "CUDA 11.8", "needs CUDA"}},
    {"nobody asked: no code for it",
     STUB,
     {"STUB_CC"},
     {"35"},
     "",
     {"CPU, declined: ", "Stub GPU (sm_35)"}},
    {"nobody asked: no device", STUB, {"STUB_INIT"}, {"100"}, "", {"CPU, nothing declined"}},
};

static void set(const char *name, const char *value) {
    if (name) setenv(name, value, 1);
}

// In the child: the message of opening the device, to fd.
static void open_and_say(size_t i, int fd) {
    mx_backend *b = NULL;
    mx_err e = {0}, declined = {0};
    char opened[sizeof e.msg + 32] = "it opened";
    unsetenv("CUDA_VISIBLE_DEVICES");
    for (int k = 0; k < 2; k++) set(cases[i].env[k], cases[i].value[k]);
    mx_knobs_reload();
    void *lib = dlopen(cases[i].lib, RTLD_NOW | RTLD_GLOBAL); // found again by its name
    mx_device_options o = {.want = cases[i].want, .n_threads = 1, .declined = &declined};
    mx_status st = mx_device_open(&o, &b, &e);
    if (st == MX_OK && strcmp(b->name, "cpu") == 0) {
        bool any = declined.status != MX_OK;
        snprintf(opened, sizeof opened, "CPU, %s%s", any ? "declined: " : "nothing declined",
                 declined.msg);
    }
    const char *text = !lib ? dlerror() : st == MX_OK ? opened : e.msg;
    ssize_t n = write(fd, text, strlen(text) + 1);
    (void)n;
}

static void every_refusal_says_why(void **state) {
    (void)state;
    if (!mx_cuda_archs()[0]) {
        printf("skip: built without CUDA\n");
        skip();
    }
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        int fd[2], status;
        char text[1024] = "";
        assert_int_equal(pipe(fd), 0);
        pid_t pid = fork();
        if (pid == 0) {
            close(fd[0]);
            open_and_say(i, fd[1]);
            _exit(0);
        }
        close(fd[1]);
        ssize_t n = read(fd[0], text, sizeof text - 1);
        close(fd[0]);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (n <= 0 || status != 0)
            fail_msg("%s: nothing was said, status %d", cases[i].name, status);
        for (int k = 0; k < 3 && cases[i].message[k]; k++) {
            if (strstr(text, cases[i].message[k])) continue;
            fail_msg("%s: no \"%s\" in: %s", cases[i].name, cases[i].message[k], text);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_refusal_says_why)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
