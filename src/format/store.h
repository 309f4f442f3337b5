// Where models live: turning what the user typed into a path; listing and removing stored models.
#ifndef MX_FORMAT_STORE_H
#define MX_FORMAT_STORE_H

#include "base/str.h"

typedef struct mx_store_entry {
    char *repo_id; // "owner/name"
    char *path;    // absolute
    uint64_t size_bytes;
    double modified; // seconds since 1970
    bool read_only;  // found in the Hugging Face cache, not ours to remove
} mx_store_entry;

// Cache root: MLXCEL_CACHE_DIR or $HOME/.cache/mlxcel. NULL when neither is set. mx_free it.
char *mx_cache_dir(void);
char *mx_models_dir(void); // MLXCEL_MODELS_DIR or <cache>/models

// Resolves a MODEL argument in this order: synthetic:NAME (itself); an existing path (file or
// folder); ./models/<name>; the store (<models>/<owner>/<name>, a folder that holds config.json or
// exactly one .gguf file, which is then the result); the Hugging Face cache (newest snapshot). A
// bare name means MLXCEL_DEFAULT_ORG/<name>; a bare name is also matched against the store's unique
// entry with that last part. models_dir NULL = mx_models_dir(). *path is mx_free'd by the caller.
// Errors: NOTFOUND, naming every place that was searched; INVALID for a URL or an ambiguous name.
mx_status mx_store_resolve(const char *model, const char *models_dir, char **path, mx_err *err);

// Every stored model, sorted by repo_id. Free with mx_store_free. An absent store is an empty list.
mx_status mx_store_list(const char *models_dir, mx_store_entry **entries, size_t *n, mx_err *err);
void mx_store_free(mx_store_entry *entries, size_t n);
// Removes a stored model's folder and its owner's folder when empty. Never follows links out of
// the store, never touches a read-only entry. Errors: NOTFOUND, DENIED, IO.
mx_status mx_store_remove(const char *models_dir, const char *repo_id, mx_err *err);

#endif
