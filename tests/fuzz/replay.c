// Replays a fuzz target without a fuzzer: main of the program replay_NAME gives
// LLVMFuzzerTestOneInput an empty input and every file of tests/fuzz/corpus/NAME/, and counts as
// one test. No state of its own.
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

int main(int argc, char **argv) {
    const char *name = argc > 0 ? strstr(argv[0], "replay_") : NULL;
    struct dirent **entries = NULL;
    char folder[512], path[1024];
    int n, failed = 0;
    if (!name) return fprintf(stderr, "the program's name is not replay_NAME\n"), 2;
    snprintf(folder, sizeof folder, "tests/fuzz/corpus/%s", name + strlen("replay_"));
    n = scandir(folder, &entries, not_hidden, alphasort);
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        printf("%s\n", path);
        fflush(stdout);
        failed |= replay_file(path);
        free(entries[i]);
    }
    free(entries);
    if (n <= 0) return printf("%s: no corpus\n", folder), 1;
    printf("[  PASSED  ] %d test(s).\n", failed ? 0 : 1);
    return failed ? 1 : 0;
}
