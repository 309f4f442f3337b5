// What the program asks of the operating system: files, time, memory, processors.
#ifndef MX_BASE_OS_H
#define MX_BASE_OS_H

#include "base/str.h"

#include <pthread.h>

// Read-only mapping of a whole file. data is NULL only for an empty file.
typedef struct mx_file {
    const unsigned char *data;
    size_t n_bytes;
    char *path; // owned copy, for messages
    int fd;     // open for reading while data is not NULL, so that bytes can be read unmapped
} mx_file;

// Errors: NOTFOUND, DENIED, IO, INVALID (a directory, a device); the message names the path.
mx_status mx_file_open(mx_file *f, const char *path, mx_err *err);
void mx_file_close(mx_file *f);
// Asks the kernel to read the range now (asynchronously). Range is clamped.
void mx_file_prefetch(const mx_file *f, size_t offset, size_t n_bytes);
// Touches every page of the range so that it is resident when the call returns.
void mx_file_populate(const mx_file *f, size_t offset, size_t n_bytes);
// Gives back the whole pages of the range; reading them again reads the file again.
void mx_file_release(const mx_file *f, size_t offset, size_t n_bytes);

// Reads a whole file of at most max_bytes into memory; *out is mx_free'd by the caller and
// NUL-terminated. Errors as mx_file_open, TOOLARGE.
mx_status mx_read_file(const char *path, size_t max_bytes, char **out, size_t *n, mx_err *err);
// Writes path through a temporary file in the same folder and a rename: the old or the new
// content is there, never a part.
mx_status mx_write_file_atomic(const char *path, const void *data, size_t n, mx_err *err);
bool mx_path_exists(const char *path);
bool mx_path_is_dir(const char *path);
mx_status mx_mkdirs(const char *path, mx_err *err); // like mkdir -p, mode 0755
// dir + "/" + name, mx_free'd by the caller.
char *mx_path_join(const char *dir, const char *name);
// Sorted names in a folder (without . and ..); the array and the names are one mx_free block.
mx_status mx_list_dir(const char *path, char ***names, size_t *n, mx_err *err);

enum { MX_THREAD_STACK_BYTES = 2 << 20 };
// pthread_create with a stack of our own size, whatever `ulimit -s` is. 0 or an errno.
int mx_thread_start(pthread_t *out, void *(*fn)(void *), void *arg);

// Threads share one pool of freed memory from now on, where the C library keeps one a thread: a
// process of many short requests stays at the size it needs.
void mx_share_free_memory(void);

double mx_now_s(void);  // monotonic
double mx_wall_s(void); // since 1970
void mx_sleep_s(double s);

uint64_t mx_mem_available_bytes(void); // MemAvailable, capped by the cgroup's limit
uint64_t mx_mem_total_bytes(void);
uint64_t mx_mem_rss_bytes(void);
uint64_t mx_mem_peak_rss_bytes(void);

// Threads that compute well here: min(affinity, cgroup quota rounded up, physical cores), >= 1.
int mx_cpu_default_threads(void);
int mx_cpu_affinity_count(void);
// CPU ids of this process's affinity mask, one per physical core first. Returns how many (<= cap).
int mx_cpu_list(int *ids, int cap);
// Model name from /proc/cpuinfo or "unknown".
void mx_cpu_model(char *out, size_t cap);

#endif
