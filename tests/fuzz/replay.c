// Replays a fuzz target without a fuzzer: main gives LLVMFuzzerTestOneInput every file of
// tests/fuzz/corpus/FUZZ_NAME/, and an empty input, and counts as one test. No state of its own.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int not_hidden(const struct dirent *d) {
    return d->d_name[0] != '.';
}

static int replay_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0) return fprintf(stderr, "%s: cannot be read\n", path), -1;
    long n = ftell(f);
    rewind(f);
    // exactly n bytes, so that AddressSanitizer sees one read past the end
    uint8_t *data = n >= 0 ? malloc(n > 0 ? (size_t)n : 1) : NULL;
    int ok = data && fread(data, 1, (size_t)n, f) == (size_t)n;
    fclose(f);
    if (ok)
        LLVMFuzzerTestOneInput(data, (size_t)n);
    else
        fprintf(stderr, "%s: cannot be read\n", path);
    free(data);
    return ok ? 0 : -1;
}

int main(void) {
    const char *folder = "tests/fuzz/corpus/" FUZZ_NAME;
    struct dirent **entries = NULL;
    int n = scandir(folder, &entries, not_hidden, alphasort), failed = 0;
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 0; i < n; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        printf("%s\n", path);
        fflush(stdout);
        failed |= replay_file(path);
        free(entries[i]);
    }
    free(entries);
    if (n <= 0) return printf("%s: no corpus\n 1 FAILED TEST(S)\n", folder), 1;
    printf("[  PASSED  ] %d test(s).\n", failed ? 0 : 1);
    return failed ? 1 : 0;
}
