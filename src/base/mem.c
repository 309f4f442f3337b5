// Aborting allocator wrappers, arenas, the allocation seal. State: one thread-local flag.
// Large blocks are mmap'ed so that budgets are visible to the system and huge pages can apply.
#include "base/mem.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ARENA_BLOCK = 64 * 1024, HUGE = 2 * 1024 * 1024 };

struct mx_arena_block {
    mx_arena_block *next;
    size_t cap, used;
    _Alignas(16) char data[];
};

static _Thread_local bool sealed_thread;

void mx_mem_seal(bool sealed) {
    sealed_thread = sealed;
}

bool mx_mem_sealed(void) {
    return sealed_thread;
}

void *mx_alloc(size_t n_bytes) {
    CHECKF(!sealed_thread, "allocation of %zu bytes in a sealed step", n_bytes);
    void *p = malloc(n_bytes ? n_bytes : 1);
    CHECKF(p != NULL, "out of memory (%zu bytes)", n_bytes);
    return p;
}

void *mx_calloc(size_t n, size_t size) {
    CHECKF(!sealed_thread, "allocation of %zu x %zu bytes in a sealed step", n, size);
    void *p = calloc(n ? n : 1, size ? size : 1);
    CHECKF(p != NULL, "out of memory (%zu x %zu bytes)", n, size);
    return p;
}

void *mx_realloc(void *old, size_t n_bytes) {
    CHECKF(!sealed_thread, "reallocation to %zu bytes in a sealed step", n_bytes);
    void *p = realloc(old, n_bytes ? n_bytes : 1);
    CHECKF(p != NULL, "out of memory (%zu bytes)", n_bytes);
    return p;
}

char *mx_strdup(const char *s) {
    size_t n = strlen(s) + 1;
    char *p = mx_alloc(n);
    memcpy(p, s, n);
    return p;
}

void mx_free(void *p) {
    free(p);
}

void *mx_alloc_large(size_t n_bytes) {
    CHECKF(!sealed_thread, "allocation of %zu bytes in a sealed step", n_bytes);
    if (n_bytes == 0) n_bytes = 1;
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (n_bytes >= HUGE) madvise(p, n_bytes, MADV_HUGEPAGE);
    return p;
}

void mx_free_large(void *p, size_t n_bytes) {
    if (p) munmap(p, n_bytes ? n_bytes : 1);
}

void mx_arena_init(mx_arena *a, size_t ceiling_bytes) {
    *a = (mx_arena){.ceiling_bytes = ceiling_bytes};
}

void mx_arena_free(mx_arena *a) {
    for (mx_arena_block *b = a->head; b;) {
        mx_arena_block *next = b->next;
        free(b);
        b = next;
    }
    *a = (mx_arena){.ceiling_bytes = a->ceiling_bytes};
}

void *mx_arena_alloc(mx_arena *a, size_t n_bytes) {
    CHECKF(n_bytes <= SIZE_MAX / 2, "arena request of %zu bytes", n_bytes);
    n_bytes = (n_bytes + 15) & ~(size_t)15;
    if (a->ceiling_bytes && n_bytes > a->ceiling_bytes - a->used_bytes) return NULL;
    mx_arena_block *b = a->head;
    if (!b || b->cap - b->used < n_bytes) {
        size_t cap = MX_MAX(n_bytes, (size_t)ARENA_BLOCK);
        b = mx_calloc(1, sizeof *b + cap);
        b->cap = cap;
        b->next = a->head;
        a->head = b;
    }
    void *p = b->data + b->used;
    b->used += n_bytes;
    a->used_bytes += n_bytes;
    return p;
}

char *mx_arena_strndup(mx_arena *a, const char *s, size_t n) {
    char *p = mx_arena_alloc(a, n + 1);
    if (p) memcpy(p, s, n);
    return p;
}
