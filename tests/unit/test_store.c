// store: what a MODEL argument means, the list of stored models, and removal that stays inside.
#include "format/store.h"

#include "base/knobs.h"
#include "support/ckpt_writer.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
// cmocka.h needs the two above
#include <cmocka.h>

static char *home; // a folder of this test run: HOME, store and hub lie in it

static char *at(const char *relative) {
    return mx_path_join(home, relative);
}

static void put(const char *relative, const char *text) {
    char *path = at(relative), *slash = strrchr(path, '/');
    mx_err err = {0};
    *slash = 0;
    assert_int_equal(mx_mkdirs(path, &err), MX_OK);
    *slash = '/';
    ckpt_write_file(path, text, strlen(text));
    mx_free(path);
}

static bool there(const char *relative) {
    char *path = at(relative);
    struct stat s;
    bool yes = lstat(path, &s) == 0;
    mx_free(path);
    return yes;
}

static int set_up(void **state) {
    (void)state;
    home = ckpt_temp_dir();
    char *hf = at("hf");
    setenv("HOME", home, 1);
    setenv("HF_HOME", hf, 1);
    unsetenv("HF_HUB_CACHE");
    unsetenv("MLXCEL_CACHE_DIR");
    unsetenv("MLXCEL_MODELS_DIR");
    unsetenv("MLXCEL_DEFAULT_ORG");
    mx_knobs_reload();
    mx_free(hf);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    ckpt_remove_dir(home);
    return 0;
}

// Resolves and compares with a path below home; NULL: an error whose message holds `part`.
static void expect(const char *model, const char *relative, mx_status want, const char *part) {
    mx_err err = {0};
    char *path = NULL;
    mx_status st = mx_store_resolve(model, NULL, &path, &err);
    if (st != want) fail_msg("%s: status %s (%s)", model, mx_status_name(st), err.msg);
    if (relative) {
        char *full = at(relative);
        assert_string_equal(path, full);
        mx_free(full);
    } else {
        assert_null(path);
        if (!strstr(err.msg, part)) fail_msg("%s: \"%s\" lacks \"%s\"", model, err.msg, part);
    }
    mx_free(path);
}

static void folders_follow_the_environment(void **state) {
    (void)state;
    char *dir = mx_models_dir(), *want = at(".cache/mlxcel/models");
    assert_string_equal(dir, want);
    mx_free(dir);
    mx_free(want);
    setenv("MLXCEL_CACHE_DIR", "/c", 1);
    mx_knobs_reload();
    dir = mx_models_dir();
    assert_string_equal(dir, "/c/models");
    mx_free(dir);
    setenv("MLXCEL_MODELS_DIR", "/m", 1);
    mx_knobs_reload();
    dir = mx_models_dir();
    assert_string_equal(dir, "/m");
    mx_free(dir);
    unsetenv("MLXCEL_MODELS_DIR");
    unsetenv("MLXCEL_CACHE_DIR");
    unsetenv("HOME");
    mx_knobs_reload();
    assert_null(mx_models_dir());
    assert_null(mx_cache_dir());
    expect("owner/name", NULL, MX_NOTFOUND, "searched");
}

#define STORE ".cache/mlxcel/models/"

static void names_resolve_in_order(void **state) {
    (void)state;
    put(STORE "mlx-community/tiny/config.json", "{}");
    put(STORE "alice/other/config.json", "{}");
    put(STORE "bob/one/model.Q4_1.gguf", "x");
    put(STORE "bob/one/mmproj-model.gguf", "x");
    put(STORE "bob/two/a.gguf", "x");
    put(STORE "bob/two/b.gguf", "x");
    put(STORE "bob/mixed/config.json", "{}");
    put(STORE "bob/mixed/a.gguf", "x");
    put(STORE "bob/full/config.json", "{}");
    put(STORE "bob/full/a.gguf", "x");
    put(STORE "bob/full/model.safetensors", "x");
    put(STORE "carol/same/config.json", "{}");
    put(STORE "dave/same/config.json", "{}");
    expect("tiny", STORE "mlx-community/tiny", MX_OK, NULL);
    expect("mlx-community/tiny", STORE "mlx-community/tiny", MX_OK, NULL);
    expect("other", STORE "alice/other", MX_OK, NULL);
    expect("bob/one", STORE "bob/one/model.Q4_1.gguf", MX_OK, NULL);
    expect("bob/two", NULL, MX_INVALID, "2 .gguf files");
    expect("bob/mixed", STORE "bob/mixed/a.gguf", MX_OK, NULL);
    expect("bob/full", STORE "bob/full", MX_OK, NULL);
    expect("same", NULL, MX_INVALID, "carol/same or dave/same");
    expect("eve/none", NULL, MX_NOTFOUND, "models--eve--none");
    expect("none", NULL, MX_NOTFOUND, "mlx-community/none");
    char *path = at(STORE "bob/two/b.gguf"); // a path goes first
    expect(path, STORE "bob/two/b.gguf", MX_OK, NULL);
    mx_free(path);
    path = at(STORE "bob"); // exists, and is no model
    expect(path, NULL, MX_NOTFOUND, "neither config.json");
    mx_free(path);
}

static void strange_names_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *name;
        mx_status want;
        const char *part;
    } bad[] = {
        {"", MX_INVALID, "empty"},
        {"https://huggingface.co/a/b", MX_INVALID, "URL"},
        {"http://x/y.gguf", MX_INVALID, "URL"},
        {"../up", MX_NOTFOUND, "no such file"},
        {"a/../b", MX_NOTFOUND, "no such file"},
        {"a/..", MX_INVALID, "not a model name"},
        {"a/b/c", MX_NOTFOUND, "no such file"},
        {"/no/such", MX_NOTFOUND, "no such file"},
        {"nothing.gguf", MX_NOTFOUND, "no such file"},
        {"a b", MX_INVALID, "not a model name"},
        {"a/-b", MX_INVALID, "not a model name"},
        {"a/b\n", MX_INVALID, "not a model name"},
        {"a/", MX_INVALID, "not a model name"},
    };
    for (size_t i = 0; i < MX_COUNT(bad); i++) expect(bad[i].name, NULL, bad[i].want, bad[i].part);
}

static void set_time(const char *relative, time_t seconds) {
    char *path = at(relative);
    struct timespec t[2] = {{.tv_sec = seconds}, {.tv_sec = seconds}};
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
    mx_free(path);
}

#define HUB "hf/hub/models--owner--name/"

static void make_hub(void) {
    put(HUB "blobs/abc", "{}");
    put(HUB "blobs/def", "12345678");
    put(HUB "snapshots/0old/config.json", "{}");
    put(HUB "snapshots/1new/keep", "");
    put(HUB "snapshots/2part/README.md", "no model here");
    char *link = at(HUB "snapshots/1new/config.json");
    assert_int_equal(symlink("../../blobs/abc", link), 0);
    mx_free(link);
    link = at(HUB "snapshots/1new/model.safetensors");
    assert_int_equal(symlink("../../blobs/def", link), 0);
    mx_free(link);
    set_time(HUB "snapshots/0old", 1000);
    set_time(HUB "snapshots/1new", 2000);
    set_time(HUB "snapshots/2part", 3000);
}

static void newest_snapshot_of_the_hub_is_found(void **state) {
    (void)state;
    make_hub();
    expect("owner/name", HUB "snapshots/1new", MX_OK, NULL);
    set_time(HUB "snapshots/0old", 2500);
    expect("owner/name", HUB "snapshots/0old", MX_OK, NULL);
    put(STORE "owner/name/config.json", "{}"); // the store goes before
    expect("owner/name", STORE "owner/name", MX_OK, NULL);
}

static void list_holds_store_and_hub(void **state) {
    (void)state;
    mx_store_entry *e;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_store_list(NULL, &e, &n, &err), MX_OK);
    assert_int_equal(n, 0); // neither exists
    mx_store_free(e, n);
    make_hub();
    put(STORE "zoe/big/config.json", "{}");
    put(STORE "zoe/big/sub/model.bin", "0123456789");
    put(STORE "zoe/partial/README.md", "no model");
    put(STORE "adam/m/a.gguf", "xyz");
    set_time(STORE "adam/m/a.gguf", 12345);
    assert_int_equal(mx_store_list(NULL, &e, &n, &err), MX_OK);
    assert_int_equal(n, 3);
    assert_string_equal(e[0].repo_id, "adam/m");
    assert_true(e[0].size_bytes == 3 && e[0].modified == 12345 && !e[0].read_only);
    assert_string_equal(e[1].repo_id, "owner/name");
    assert_true(e[1].size_bytes == 10 && e[1].read_only && e[1].path[0] == '/');
    assert_string_equal(e[2].repo_id, "zoe/big");
    assert_int_equal(e[2].size_bytes, 12);
    mx_store_free(e, n);
}

static void remove_takes_folder_and_empty_owner(void **state) {
    (void)state;
    mx_err err = {0};
    put(STORE "bob/one/config.json", "{}");
    put(STORE "bob/one/sub/deep/file", "x");
    put(STORE "bob/two/config.json", "{}");
    put(STORE "mlx-community/tiny/config.json", "{}");
    assert_int_equal(mx_store_remove(NULL, "bob/one", &err), MX_OK);
    assert_false(there(STORE "bob/one"));
    assert_true(there(STORE "bob/two/config.json"));
    assert_int_equal(mx_store_remove(NULL, "two", &err), MX_OK); // the unique last part
    assert_false(there(STORE "bob"));
    assert_int_equal(mx_store_remove(NULL, "tiny", &err), MX_OK);
    assert_true(there(STORE));
    assert_int_equal(mx_store_remove(NULL, "tiny", &err), MX_NOTFOUND);
    assert_int_equal(mx_store_remove(NULL, "bob/one", &err), MX_NOTFOUND);
}

static void make_link(const char *target, const char *relative) {
    char *link = at(relative), *full = at(target);
    assert_int_equal(symlink(full, link), 0);
    mx_free(full);
    mx_free(link);
}

static void remove_never_leaves_the_store(void **state) {
    (void)state;
    mx_err err = {0};
    put("outside/precious/config.json", "{}");
    put(STORE "bob/one/config.json", "{}");
    make_link("outside/precious", STORE "bob/one/link"); // a link inside a model
    make_link("outside/precious", STORE "bob/linked");   // a model that is a link
    make_link("outside", STORE "mallory");               // an owner that is a link
    make_link("outside/precious/config.json", STORE "bob/one/file");
    assert_int_equal(mx_store_remove(NULL, "bob/one", &err), MX_OK);
    assert_int_equal(mx_store_remove(NULL, "bob/linked", &err), MX_OK);
    assert_false(there(STORE "bob"));
    assert_int_equal(mx_store_remove(NULL, "mallory/precious", &err), MX_DENIED);
    assert_true(there(STORE "mallory"));
    static const char *const bad[] = {"..",       "../outside",          "bob/..", "bob/../../..",
                                      "/outside", "../../../../outside", ".",      "bob/"};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        assert_int_equal(mx_store_remove(NULL, bad[i], &err), MX_INVALID);
    }
    assert_true(there("outside/precious/config.json"));
}

static void the_default_owner_is_a_name(void **state) {
    (void)state;
    mx_err err = {0};
    put("outside/precious/model.gguf", "x");
    put(".cache/mlxcel/models/a/b.gguf", "x");
    static const char *const bad[] = {"..", "../../../outside", "/", "a/b", ".", "-a", "a b"};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        setenv("MLXCEL_DEFAULT_ORG", bad[i], 1);
        mx_knobs_reload();
        assert_int_equal(mx_store_remove(NULL, "precious", &err), MX_INVALID);
        assert_non_null(strstr(err.msg, "MLXCEL_DEFAULT_ORG"));
        char *path;
        assert_int_equal(mx_store_resolve("precious", NULL, &path, &err), MX_INVALID);
        assert_null(path);
    }
    unsetenv("MLXCEL_DEFAULT_ORG");
    mx_knobs_reload();
    assert_true(there("outside/precious/model.gguf"));
}

static void hub_models_are_not_removed(void **state) {
    (void)state;
    mx_err err = {0};
    make_hub();
    assert_int_equal(mx_store_remove(NULL, "owner/name", &err), MX_DENIED);
    assert_non_null(strstr(err.msg, "Hugging Face"));
    assert_true(there(HUB "snapshots/1new/config.json"));
    put(STORE "owner/name/config.json", "{}"); // the store's own copy goes, the hub's stays
    assert_int_equal(mx_store_remove(NULL, "owner/name", &err), MX_OK);
    assert_true(there(HUB "blobs/def"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define CASE(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
        CASE(folders_follow_the_environment), CASE(names_resolve_in_order),
        CASE(strange_names_are_refused),      CASE(newest_snapshot_of_the_hub_is_found),
        CASE(list_holds_store_and_hub),       CASE(remove_takes_folder_and_empty_owner),
        CASE(remove_never_leaves_the_store),  CASE(the_default_owner_is_a_name),
        CASE(hub_models_are_not_removed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
