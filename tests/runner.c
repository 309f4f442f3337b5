// Runs test programs and checks, and says how it went. State: one table of jobs, in main.
//
//   runner [--slow N] [--logs DIR] PROGRAM... NAME=COMMAND...
//
// Every job is a process in its own process group with a time limit (times N with --slow); the
// group is killed when the job ends, so that nothing it started stays behind. As many jobs run at
// once as there are processors. Output goes to a file in DIR and is shown only when the job fails.
// Counts come from cmocka's own closing lines; a command that prints none counts as one test: exit
// status 0 passed, 77 skipped, any other failed. The last line is "N passed, N failed[, N
// skipped]". The exit status is 0 only when no test failed and at least one passed. It does not
// build anything.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_SKIPPED = 77, SLOWEST = 5 };

// Jobs that may take longer than the usual limit, by the end of their name.
static const struct {
    const char *name;
    int seconds;
} limits[] = {
    {"format", 120},
};

typedef struct options {
    int slow, limit_s;
    const char *logs;
} options;

typedef struct job {
    char name[256];      // as printed; a program's is its path from tests/ on
    const char *program; // its path, or NULL and
    const char *command; // a line for the shell
    char log[512];
    pid_t pid; // 0 before the start and after the end
    double start_s, seconds;
    int limit_s, wait_status;
    bool timed_out;
    int passed, failed, skipped;
} job;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

static void job_init(job *j, const char *arg, const options *opt) {
    const char *eq = strchr(arg, '='), *in_tests = strstr(arg, "tests/");
    *j = (job){.limit_s = opt->limit_s};
    if (eq) {
        snprintf(j->name, sizeof j->name, "%.*s", (int)(eq - arg), arg);
        j->command = eq + 1;
    } else {
        snprintf(j->name, sizeof j->name, "%s", in_tests ? in_tests + 6 : arg);
        j->program = arg;
    }
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        if (ends_with(j->name, limits[i].name)) j->limit_s = limits[i].seconds;
    }
    j->limit_s *= opt->slow;
    snprintf(j->log, sizeof j->log, "%s/%s.log", opt->logs, j->name);
    for (char *p = j->log + strlen(opt->logs) + 1; *p; p++) {
        if (*p == '/') *p = '-';
    }
}

_Noreturn static void become(const job *j, const sigset_t *old) {
    // a job in the background of a script inherits these ignored
    signal(SIGINT, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, old, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // ThreadSanitizer of gcc 12 fails where addresses are very random; refused in some containers.
    personality((unsigned long)personality(0xffffffff) | ADDR_NO_RANDOMIZE);
    int in = open("/dev/null", O_RDONLY);
    int out = open(j->log, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(126);
    close(in);
    close(out);
    if (j->command)
        execl("/bin/sh", "sh", "-c", j->command, (char *)NULL);
    else
        execl(j->program, j->program, (char *)NULL);
    fprintf(stderr, "%s: %s (did it compile?)\n", j->program, strerror(errno));
    _exit(127);
}

static bool job_start(job *j, const sigset_t *old) {
    j->start_s = now_s();
    j->pid = fork();
    if (j->pid == 0) become(j, old);
    if (j->pid > 0) setpgid(j->pid, j->pid);
    return j->pid > 0;
}

// The N of "MARK N test(s)"; newer versions of cmocka name the group before it: "MARK NAME: N
// test(s)".
static bool read_count(const char *line, const char *mark, int *n) {
    size_t k = strlen(mark);
    int end = 0;
    if (strncmp(line, mark, k) != 0) return false;
    line += k;
    for (const char *p; (p = strstr(line, ": "));) line = p + 2;
    return sscanf(line, " %d test(s)%n", n, &end) == 1 && end;
}

// Adds N of lines such as "[  PASSED  ] N test(s)." and " N FAILED TEST(S)".
static bool count_line(job *j, const char *line) {
    int n, end = 0;
    if (read_count(line, "[  PASSED  ]", &n))
        j->passed += n;
    else if (read_count(line, "[  SKIPPED ]", &n))
        j->skipped += n;
    else if (sscanf(line, " %d FAILED TEST(S)%n", &n, &end) == 1 && end)
        j->failed += n;
    else
        return false;
    return true;
}

static void count_results(job *j) {
    bool counted = false;
    bool ok = WIFEXITED(j->wait_status) && WEXITSTATUS(j->wait_status) == 0 && !j->timed_out;
    bool skip = WIFEXITED(j->wait_status) && WEXITSTATUS(j->wait_status) == EXIT_SKIPPED;
    FILE *f = fopen(j->log, "r");
    char line[4096];
    while (f && fgets(line, sizeof line, f)) counted = count_line(j, line) || counted;
    if (f) fclose(f);
    if (!counted && skip)
        j->skipped = 1;
    else if (!counted && ok && j->command)
        j->passed = 1;
    else if (j->failed == 0 && (!ok || !counted))
        j->failed = 1; // crashed, or ran no test
}

static void job_end(job *j, int wait_status) {
    kill(-j->pid, SIGKILL);
    j->pid = 0;
    j->seconds = now_s() - j->start_s;
    j->wait_status = wait_status;
    count_results(j);
}

static void print_log(const job *j, bool only_skips) {
    FILE *f = fopen(j->log, "r");
    char line[4096];
    while (f && fgets(line, sizeof line, f)) {
        if (only_skips && strncasecmp(line, "skip", 4) != 0) continue;
        printf("    %s%s", line, strchr(line, '\n') ? "" : "\n");
    }
    if (f) fclose(f);
}

static void report(const job *j) {
    int st = j->wait_status;
    if (j->failed) {
        printf("FAILED %s (%d passed, %d failed): ", j->name, j->passed, j->failed);
        if (j->timed_out)
            printf("killed after %d s\n", j->limit_s);
        else if (WIFSIGNALED(st))
            printf("%s\n", strsignal(WTERMSIG(st)));
        else if (WEXITSTATUS(st) == 0)
            printf("exit status 0, but no test counted as passed\n");
        else
            printf("exit status %d\n", WEXITSTATUS(st));
        print_log(j, false);
    } else if (j->skipped) {
        printf("ok     %s (%d passed, %d skipped)\n", j->name, j->passed, j->skipped);
        print_log(j, true);
    } else {
        printf("ok     %s (%d passed, %.2f s)\n", j->name, j->passed, j->seconds);
    }
    fflush(stdout);
}

// Takes in every child that has ended. Returns how many.
static int reap(job *jobs, int n) {
    int ended = 0, st;
    for (pid_t p; (p = waitpid(-1, &st, WNOHANG)) > 0;) {
        for (int i = 0; i < n; i++) {
            if (jobs[i].pid != p) continue;
            job_end(&jobs[i], st);
            report(&jobs[i]);
            ended++;
        }
    }
    return ended;
}

static void kill_late(job *jobs, int n, bool all) {
    for (int i = 0; i < n; i++) {
        bool late = jobs[i].pid > 0 && now_s() - jobs[i].start_s > jobs[i].limit_s;
        jobs[i].timed_out |= late;
        if (jobs[i].pid > 0 && (late || all)) kill(-jobs[i].pid, SIGKILL);
    }
}

// Returns false when interrupted.
static bool run_all(job *jobs, int n, int parallel) {
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, &old);
    for (int next = 0, running = 0; next < n || running > 0;) {
        while (next < n && running < parallel && job_start(&jobs[next], &old)) {
            next++;
            running++;
        }
        struct timespec tick = {.tv_nsec = 200000000};
        int sig = sigtimedwait(&set, NULL, &tick);
        bool stop = sig == SIGINT || sig == SIGTERM;
        kill_late(jobs, n, stop);
        if (stop) return false;
        running -= reap(jobs, n);
    }
    return true;
}

static int slower(const void *a, const void *b) {
    double x = ((const job *)a)->seconds, y = ((const job *)b)->seconds;
    return (x < y) - (x > y);
}

static int summary(job *jobs, int n) {
    int passed = 0, failed = 0, skipped = 0;
    qsort(jobs, (size_t)n, sizeof *jobs, slower);
    for (int i = 0; i < n && i < SLOWEST && n > 1; i++) {
        printf("%s%s %.2f s%s", i ? ", " : "slowest: ", jobs[i].name, jobs[i].seconds,
               i + 1 == n || i + 1 == SLOWEST ? "\n" : "");
    }
    for (int i = 0; i < n; i++) {
        passed += jobs[i].passed;
        failed += jobs[i].failed;
        skipped += jobs[i].skipped;
        if (jobs[i].failed) printf("FAILED %s\n", jobs[i].name);
    }
    if (passed + failed == 0) printf("no test ran\n");
    printf("%d passed, %d failed", passed, failed);
    if (skipped) printf(", %d skipped", skipped);
    printf("\n");
    return failed == 0 && passed > 0 ? 0 : 1;
}

static int processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Returns the index of the first argument that is no option, or -1.
static int read_options(options *opt, int argc, char **argv) {
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        const char *value = argv[i + 1];
        if (strcmp(argv[i], "--slow") == 0)
            opt->slow = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--limit") == 0)
            opt->limit_s = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--logs") == 0)
            opt->logs = value;
        else
            return -1;
    }
    return opt->slow > 0 && opt->limit_s > 0 ? i : -1;
}

int main(int argc, char **argv) {
    options opt = {.slow = 1, .limit_s = 60, .logs = "."};
    int n = 0, first = read_options(&opt, argc, argv);
    if (first < 0) {
        return fprintf(stderr, "usage: runner [--slow N] [--limit S] [--logs DIR] JOB...\n"), 2;
    }
    if (mkdir(opt.logs, 0755) < 0 && errno != EEXIST) {
        return fprintf(stderr, "%s: %s\n", opt.logs, strerror(errno)), 2;
    }
    job *jobs = calloc((size_t)argc, sizeof *jobs);
    if (!jobs) return 2;
    for (int i = first; i < argc; i++) job_init(&jobs[n++], argv[i], &opt);
    int status = run_all(jobs, n, processors()) ? summary(jobs, n) : 130;
    free(jobs);
    return status;
}
