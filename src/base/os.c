// Linux facts and files. No state. Does not retry or cache: callers decide.
#include "base/os.h"

#include "base/mem.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static mx_status errno_status(int e) {
    return e == ENOENT || e == ENOTDIR ? MX_NOTFOUND
           : e == EACCES || e == EPERM ? MX_DENIED
                                       : MX_IO;
}

static mx_status open_regular(const char *path, int *fd, size_t *n_bytes, mx_err *err) {
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // NONBLOCK: a FIFO must not hang us
    if (*fd < 0) return mx_err_set(err, errno_status(errno), "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(*fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(*fd);
        return mx_err_set(err, MX_INVALID, "%s: not a regular file", path);
    }
    *n_bytes = (size_t)st.st_size;
    return MX_OK;
}

mx_status mx_file_open(mx_file *f, const char *path, mx_err *err) {
    *f = (mx_file){0};
    int fd;
    MX_TRY(open_regular(path, &fd, &f->n_bytes, err));
    if (f->n_bytes > 0) {
        void *p = mmap(NULL, f->n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            int e = errno;
            close(fd);
            return mx_err_set(err, MX_IO, "%s: mmap: %s", path, strerror(e));
        }
        f->data = p;
        f->fd = fd;
    } else {
        close(fd);
    }
    f->path = mx_strdup(path);
    return MX_OK;
}

void mx_file_close(mx_file *f) {
    if (f->data) {
        munmap((void *)(uintptr_t)f->data, f->n_bytes);
        close(f->fd);
    }
    mx_free(f->path);
    *f = (mx_file){0};
}

static size_t page_span(const mx_file *f, size_t offset, size_t n_bytes, size_t *start) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (offset >= f->n_bytes) return 0;
    if (n_bytes > f->n_bytes - offset) n_bytes = f->n_bytes - offset;
    *start = offset / page * page;
    return n_bytes + (offset - *start);
}

void mx_file_prefetch(const mx_file *f, size_t offset, size_t n_bytes) {
    size_t start = 0, n = page_span(f, offset, n_bytes, &start);
    if (n) madvise((void *)(uintptr_t)(f->data + start), n, MADV_WILLNEED);
}

void mx_file_populate(const mx_file *f, size_t offset, size_t n_bytes) {
    size_t start = 0, n = page_span(f, offset, n_bytes, &start);
    if (!n) return;
#ifdef MADV_POPULATE_READ
    if (madvise((void *)(uintptr_t)(f->data + start), n, MADV_POPULATE_READ) == 0) return;
#endif
    volatile unsigned char sink = 0;
    for (size_t i = 0; i < n; i += 4096) sink = (unsigned char)(sink ^ f->data[start + i]);
}

void mx_file_release(const mx_file *f, size_t offset, size_t n_bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), start = (offset + page - 1) / page * page;
    if (offset >= f->n_bytes) return;
    size_t end = offset + MX_MIN(n_bytes, f->n_bytes - offset);
    if (end != f->n_bytes) end = end / page * page;
    if (end > start) madvise((void *)(uintptr_t)(f->data + start), end - start, MADV_DONTNEED);
}

mx_status mx_read_file(const char *path, size_t max_bytes, char **out, size_t *n, mx_err *err) {
    int fd;
    size_t size;
    *out = NULL;
    MX_TRY(open_regular(path, &fd, &size, err));
    mx_status st = MX_OK;
    if (size > max_bytes) {
        st = mx_err_set(err, MX_TOOLARGE, "%s: %zu bytes, at most %zu are read", path, size,
                        max_bytes);
        goto out;
    }
    char *buf = mx_alloc(size + 1);
    size_t got = 0;
    while (got < size) {
        ssize_t r = read(fd, buf + got, size - got);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) {
            st = mx_err_set(err, MX_IO, "%s: read: %s", path,
                            r < 0 ? strerror(errno) : "file became shorter");
            mx_free(buf);
            goto out;
        }
        got += (size_t)r;
    }
    buf[size] = 0;
    *out = buf;
    if (n) *n = size;
out:
    close(fd);
    return st;
}

static bool write_all(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t r = write(fd, p, n);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) return false;
        p += r;
        n -= (size_t)r;
    }
    return true;
}

mx_status mx_write_file_atomic(const char *path, const void *data, size_t n, mx_err *err) {
    mx_buf tmp;
    mx_buf_init(&tmp, 8192);
    if (!mx_buf_printf(&tmp, "%s.tmp.%ld", path, (long)getpid())) {
        mx_buf_free(&tmp);
        return mx_err_set(err, MX_INVALID, "%s: path too long", path);
    }
    int fd = open(tmp.data, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    bool ok = fd >= 0 && write_all(fd, data, n) && fsync(fd) == 0;
    int e = errno;
    if (fd >= 0 && close(fd) != 0 && ok) {
        ok = false;
        e = errno;
    }
    if (ok && rename(tmp.data, path) != 0) {
        ok = false;
        e = errno;
    }
    mx_status st = MX_OK;
    if (!ok) {
        unlink(tmp.data);
        st = mx_err_set(err, errno_status(e), "%s: write: %s", path, strerror(e));
    }
    mx_buf_free(&tmp);
    return st;
}

bool mx_path_exists(const char *path) {
    return access(path, F_OK) == 0;
}

bool mx_path_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

mx_status mx_mkdirs(const char *path, mx_err *err) {
    char *copy = mx_strdup(path);
    mx_status st = MX_OK;
    for (char *p = copy + 1; st == MX_OK && *copy; p++) {
        if (*p != '/' && *p != 0) continue;
        char old = *p;
        *p = 0;
        if (mkdir(copy, 0755) != 0 && errno != EEXIST) {
            st = mx_err_set(err, errno_status(errno), "%s: mkdir: %s", copy, strerror(errno));
        }
        *p = old;
        if (!old) break;
    }
    mx_free(copy);
    if (st == MX_OK && !mx_path_is_dir(path)) {
        st = mx_err_set(err, MX_IO, "%s: exists and is not a folder", path);
    }
    return st;
}

char *mx_path_join(const char *dir, const char *name) {
    size_t a = strlen(dir), b = strlen(name);
    bool slash = a > 0 && dir[a - 1] != '/';
    char *p = mx_alloc(a + b + 2);
    memcpy(p, dir, a);
    if (slash) p[a++] = '/';
    memcpy(p + a, name, b + 1);
    return p;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

mx_status mx_list_dir(const char *path, char ***names, size_t *n, mx_err *err) {
    *names = NULL;
    *n = 0;
    DIR *d = opendir(path);
    if (!d) return mx_err_set(err, errno_status(errno), "%s: %s", path, strerror(errno));
    mx_buf text;
    mx_buf_init(&text, 0);
    size_t count = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        mx_buf_add(&text, e->d_name, strlen(e->d_name) + 1);
        count++;
    }
    closedir(d);
    char **list = mx_alloc(count * sizeof *list + text.n + 1);
    char *p = (char *)(list + count);
    if (text.n) memcpy(p, text.data, text.n);
    for (size_t i = 0; i < count; i++, p += strlen(p) + 1) list[i] = p;
    if (count) qsort(list, count, sizeof *list, by_name);
    mx_buf_free(&text);
    *names = list;
    *n = count;
    return MX_OK;
}

int mx_thread_start(pthread_t *out, void *(*fn)(void *), void *arg) {
    pthread_attr_t a;
    int e = pthread_attr_init(&a);
    if (e) return e;
    e = pthread_attr_setstacksize(&a, MX_THREAD_STACK_BYTES);
    if (!e) e = pthread_create(out, &a, fn, arg);
    pthread_attr_destroy(&a);
    return e;
}

static double clock_s(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void mx_share_free_memory(void) {
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
#endif
}

double mx_now_s(void) {
    return clock_s(CLOCK_MONOTONIC);
}

double mx_wall_s(void) {
    return clock_s(CLOCK_REALTIME);
}

void mx_sleep_s(double s) {
    if (s <= 0) return;
    struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

// First number after `key` in a small text file of the kernel, or dflt.
static uint64_t proc_number(const char *path, const char *key, uint64_t dflt) {
    char buf[8192];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return dflt;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0) return dflt;
    buf[n] = 0;
    const char *p = key ? strstr(buf, key) : buf;
    if (!p) return dflt;
    if (key) p += strlen(key);
    while (*p == ' ' || *p == '\t' || *p == ':') p++;
    return *p >= '0' && *p <= '9' ? strtoull(p, NULL, 10) : dflt;
}

uint64_t mx_mem_available_bytes(void) {
    uint64_t avail = proc_number("/proc/meminfo", "MemAvailable", 0) * 1024;
    uint64_t max = proc_number("/sys/fs/cgroup/memory.max", NULL, UINT64_MAX);
    uint64_t used = proc_number("/sys/fs/cgroup/memory.current", NULL, 0);
    if (max != UINT64_MAX && max > used && max - used < avail) avail = max - used;
    return avail;
}

uint64_t mx_mem_total_bytes(void) {
    return proc_number("/proc/meminfo", "MemTotal", 0) * 1024;
}

uint64_t mx_mem_rss_bytes(void) {
    return proc_number("/proc/self/status", "VmRSS", 0) * 1024;
}

uint64_t mx_mem_peak_rss_bytes(void) {
    return proc_number("/proc/self/status", "VmHWM", 0) * 1024;
}

int mx_cpu_affinity_count(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

// True when cpu is the first thread of its core (or the kernel does not say).
static bool first_of_core(int cpu) {
    char path[128];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    return proc_number(path, NULL, (uint64_t)cpu) == (uint64_t)cpu;
}

int mx_cpu_list(int *ids, int cap) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
    int n = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < CPU_SETSIZE && n < cap; i++) {
            if (CPU_ISSET(i, &set) && first_of_core(i) == (pass == 0)) ids[n++] = i;
        }
    }
    return n;
}

static int cgroup_quota_cpus(void) {
    char buf[64];
    int fd = open("/sys/fs/cgroup/cpu.max", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1 << 20;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0) return 1 << 20;
    buf[n] = 0;
    unsigned long long quota, period;
    if (sscanf(buf, "%llu %llu", &quota, &period) != 2 || !period) return 1 << 20;
    unsigned long long cpus = (quota + period - 1) / period;
    return cpus < 1 ? 1 : (int)MX_MIN(cpus, 1ull << 20);
}

int mx_cpu_default_threads(void) {
    int ids[CPU_SETSIZE];
    int n = mx_cpu_list(ids, CPU_SETSIZE), cores = 0;
    for (int i = 0; i < n; i++) cores += first_of_core(ids[i]);
    int t = MX_MIN(mx_cpu_affinity_count(), cgroup_quota_cpus());
    if (cores > 0) t = MX_MIN(t, cores);
    return t < 1 ? 1 : t;
}

void mx_cpu_model(char *out, size_t cap) {
    snprintf(out, cap, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f) return;
    char line[512];
    while (fgets(line, sizeof line, f)) {
        char *p = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !p) continue;
        p += 1 + (p[1] == ' ');
        p[strcspn(p, "\n")] = 0;
        snprintf(out, cap, "%s", p);
        break;
    }
    fclose(f);
}
