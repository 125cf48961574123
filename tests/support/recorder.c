/* Records what the processes of a command make durable below a folder, as a library for LD_PRELOAD.

RECORD_ROOT is the folder and RECORD_TO an existing folder outside of it. The file RECORD_TO/log gets one line for each
call that succeeded, with fields separated by tabs: C path (a file was created), M path (a folder was made), T path (a
file was truncated), R path path (renamed), U path (removed), D path (a folder was synced), S path number (a file was
synced, and RECORD_TO/number is a copy of its content). A lock keeps each call and its line together. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int real_open(const char *path, int flags, mode_t mode) { return REAL(open)(path, flags, mode); }

/* Writes the absolute path of a file, whose folder exists, and returns whether it lies in the recorded folder. */
static int resolve(int folder, const char *path, char *out) {
    const char *root = getenv("RECORD_ROOT");
    char whole[2 * PATH_MAX], parent[PATH_MAX], link[64];
    if (!root || !getenv("RECORD_TO") || !path) return 0;
    if (path[0] == '/' || folder == AT_FDCWD) {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, parent, sizeof parent - 1);
        if (length < 0) return 0;
        parent[length] = 0;
        snprintf(whole, sizeof whole, "%s/%s", parent, path);
    }
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    char *name = strrchr(whole, '/');
    if (!name) {
        if (!realpath(".", parent)) return 0;
        snprintf(out, PATH_MAX, "%.*s/%.*s", PATH_MAX / 2, parent, PATH_MAX / 4, whole);
    } else {
        *name++ = 0;
        if (!realpath(whole[0] ? whole : "/", parent)) return 0;
        snprintf(out, PATH_MAX, "%.*s/%.*s", PATH_MAX / 2, parent, PATH_MAX / 4, name);
    }
    size_t size = strlen(root);
    return !strncmp(out, root, size) && (out[size] == '/' || !out[size]);
}

static int resolve_open(int file, char *out) {
    char link[64];
    const char *root = getenv("RECORD_ROOT");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0 || !root || !getenv("RECORD_TO")) return 0;
    out[length] = 0;
    size_t size = strlen(root);
    return !strncmp(out, root, size) && (out[size] == '/' || !out[size]);
}

/* Every call opens the log anew, so that the lock excludes other threads and forked processes too. */
static int begin(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/log", getenv("RECORD_TO"));
    int log = real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 || flock(log, LOCK_EX)) abort();
    return log;
}

static void end(int log, const char *kind, const char *first, const char *second) {
    if (kind) {
        char line[2 * PATH_MAX + 8];
        int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", kind, first, second ? second : "");
        if (write(log, line, length) != length) abort();
    }
    close(log);
}

static void copy(const char *path, const char *name) {
    char target[PATH_MAX], block[1 << 16];
    snprintf(target, sizeof target, "%s/%s", getenv("RECORD_TO"), name);
    int in = real_open(path, O_RDONLY | O_CLOEXEC, 0), out = real_open(target, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (in < 0 || out < 0) abort();
    for (ssize_t size; (size = read(in, block, sizeof block)) > 0;)
        if (write(out, block, size) != size) abort();
    close(in);
    close(out);
}

static int synced(int file, int (*sync)(int)) {
    char path[PATH_MAX], number[32];
    struct stat state;
    if (fstat(file, &state) || !resolve_open(file, path)) return sync(file);
    int log = begin(), result = sync(file);
    if (!result && S_ISDIR(state.st_mode)) {
        end(log, "D", path, NULL);
    } else if (!result && S_ISREG(state.st_mode)) {
        snprintf(number, sizeof number, "%lld", (long long)lseek(log, 0, SEEK_END));
        copy(path, number);
        end(log, "S", path, number);
    } else {
        end(log, NULL, NULL, NULL);
    }
    return result;
}

int fsync(int file) { return synced(file, REAL(fsync)); }
int fdatasync(int file) { return synced(file, REAL(fdatasync)); }

static int opened(int folder, const char *path, int flags, mode_t mode, int (*open_at)(int, const char *, int, ...)) {
    char whole[PATH_MAX];
    struct stat state;
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !resolve(folder, path, whole))
        return open_at(folder, path, flags, mode);
    int log = begin(), existed = !lstat(whole, &state), result = open_at(folder, path, flags, mode);
    end(log, result < 0 ? NULL : !existed ? "C" : flags & O_TRUNC ? "T" : NULL, whole, NULL);
    return result;
}

#define MODE                                  \
    mode_t mode = 0;                          \
    if (flags & (O_CREAT | O_TMPFILE)) {      \
        va_list rest;                         \
        va_start(rest, flags);                \
        mode = (mode_t)va_arg(rest, int);     \
        va_end(rest);                         \
    }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, REAL(openat)); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode, REAL(openat)); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode, REAL(openat)); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode, REAL(openat)); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, REAL(openat)); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

static FILE *stream_opened(const char *path, const char *mode, FILE *(*open_stream)(const char *, const char *)) {
    char whole[PATH_MAX];
    struct stat state;
    if (mode[0] == 'r' || !resolve(AT_FDCWD, path, whole)) return open_stream(path, mode);
    int log = begin(), existed = !lstat(whole, &state);
    FILE *result = open_stream(path, mode);
    end(log, !result ? NULL : !existed ? "C" : mode[0] == 'w' ? "T" : NULL, whole, NULL);
    return result;
}
FILE *fopen(const char *path, const char *mode) { return stream_opened(path, mode, REAL(fopen)); }
FILE *fopen64(const char *path, const char *mode) { return stream_opened(path, mode, REAL(fopen)); }

#define ONE(kind, folder, path, call)              \
    char whole[PATH_MAX];                          \
    if (!resolve(folder, path, whole)) return call; \
    int log = begin(), result = call;              \
    end(log, result ? NULL : kind, whole, NULL);   \
    return result;
int mkdir(const char *path, mode_t mode) { ONE("M", AT_FDCWD, path, REAL(mkdir)(path, mode)) }
int mkdirat(int folder, const char *path, mode_t mode) { ONE("M", folder, path, REAL(mkdirat)(folder, path, mode)) }
int unlink(const char *path) { ONE("U", AT_FDCWD, path, REAL(unlink)(path)) }
int unlinkat(int folder, const char *path, int flags) { ONE("U", folder, path, REAL(unlinkat)(folder, path, flags)) }
int rmdir(const char *path) { ONE("U", AT_FDCWD, path, REAL(rmdir)(path)) }
int remove(const char *path) { ONE("U", AT_FDCWD, path, REAL(remove)(path)) }

#define TWO(from_folder, from, to_folder, to, call)                                                      \
    char first[PATH_MAX], second[PATH_MAX];                                                              \
    int inside = resolve(from_folder, from, first), goal = resolve(to_folder, to, second);               \
    if (!inside && !goal) return call;                                                                   \
    int log = begin(), result = call;                                                                    \
    end(log, result ? NULL : "R", first, second);                                                        \
    return result;
int rename(const char *from, const char *to) { TWO(AT_FDCWD, from, AT_FDCWD, to, REAL(rename)(from, to)) }
int renameat(int a, const char *from, int b, const char *to) { TWO(a, from, b, to, REAL(renameat)(a, from, b, to)) }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    TWO(a, from, b, to, REAL(renameat2)(a, from, b, to, flags))
}
