// Memory: aborting small allocations, arenas, and the seal that proves a step allocates nothing.
#ifndef MX_BASE_MEM_H
#define MX_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// malloc family for small tables: abort with a message on failure. Free with mx_free.
// Calling any of them on a sealed thread is a bug (CHECK).
void *mx_alloc(size_t n_bytes);
void *mx_calloc(size_t n, size_t size); // checks n * size for overflow
void *mx_realloc(void *p, size_t n_bytes);
char *mx_strdup(const char *s);
void mx_free(void *p); // NULL is fine

// May fail: returns NULL when memory is short. For large, budgeted blocks. 64-byte aligned.
void *mx_alloc_large(size_t n_bytes);
void mx_free_large(void *p, size_t n_bytes);

// While sealed, the calling thread must not allocate through this header.
void mx_mem_seal(bool sealed);
bool mx_mem_sealed(void);

// Overflow-checked products and sums of sizes: true and *out set when the result fits.
static inline bool mx_mul_size(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool mx_add_size(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

// Arena: bump allocation, freed all at once. With a ceiling, mx_arena_alloc returns NULL when the
// ceiling would be passed (bytes asked for count, with padding); without (0) it aborts on OOM.
// Memory is zeroed. Not thread-safe.
typedef struct mx_arena_block mx_arena_block;
typedef struct mx_arena {
    mx_arena_block *head;
    size_t used_bytes;
    size_t ceiling_bytes;
} mx_arena;

void mx_arena_init(mx_arena *a, size_t ceiling_bytes);
void mx_arena_free(mx_arena *a);
void *mx_arena_alloc(mx_arena *a, size_t n_bytes); // 16-byte aligned
char *mx_arena_strndup(mx_arena *a, const char *s, size_t n);
#define MX_ARENA_NEW(a, type)      ((type *)mx_arena_alloc((a), sizeof(type)))
#define MX_ARENA_ARRAY(a, type, n) ((type *)mx_arena_alloc((a), sizeof(type) * (size_t)(n)))

#define MX_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MX_MIN(a, b)    ((a) < (b) ? (a) : (b))
#define MX_MAX(a, b)    ((a) > (b) ? (a) : (b))

#endif
