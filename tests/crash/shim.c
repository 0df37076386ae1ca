/*
 * A preloaded library that counts the file-system calls of a process and strikes at one of them.
 *
 *     void strike_arm(long nth, int what)   begin to count; at the nth call (1 is the first):
 *                                           what > 0: raise that signal in the process before the call
 *                                           what < 0: let the call fail with errno = -what
 *                                           what == 0: only count
 *     long strike_count(void)               calls since it was armed
 *     void strike_disarm(void)
 *
 * A signal that does not end the process lets the call go on. Write calls that are struck by SIGKILL write half first.
 *
 * Build: gcc -shared -fPIC -O1 -pthread -o shim.so shim.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long count;
static atomic_long target;
static atomic_int action;
static atomic_int armed;

void strike_arm(long nth, int what)
{
    count = 0;
    target = nth;
    action = what;
    armed = 1;
}

void strike_disarm(void) { armed = 0; }

long strike_count(void) { return count; }

/* Returns 1 if the call has to fail with errno set; *killing is set where a write should be cut in half first. */
static int struck(int *killing)
{
    if (!armed)
        return 0;
    long now = ++count;
    int what = action;
    if (now != target || what == 0)
        return 0;
    if (what < 0) {
        errno = -what;
        return 1;
    }
    if (what == SIGKILL && killing != NULL) {
        *killing = 1;
        return 0;
    }
    kill(getpid(), what);
    return 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) \
        real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int interesting(const char *path) { return path[0] != '/' || __builtin_strncmp(path, "/proc", 5) != 0; }

#define OPEN(name, label) \
    int name(const char *path, int flags, ...) \
    { \
        mode_t mode = 0; \
        va_list more; \
        va_start(more, flags); \
        if (flags & (O_CREAT | O_TMPFILE)) \
            mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(int, label, const char *, int, ...); \
        if (interesting(path) && struck(NULL)) \
            return -1; \
        return real(path, flags, mode); \
    }
OPEN(open, "open")
OPEN(open64, "open64")

#define OPENAT(name, label) \
    int name(int dir, const char *path, int flags, ...) \
    { \
        mode_t mode = 0; \
        va_list more; \
        va_start(more, flags); \
        if (flags & (O_CREAT | O_TMPFILE)) \
            mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(int, label, int, const char *, int, ...); \
        if (interesting(path) && struck(NULL)) \
            return -1; \
        return real(dir, path, flags, mode); \
    }
OPENAT(openat, "openat")
OPENAT(openat64, "openat64")

#define SIMPLE(name, parameters, arguments, ...) \
    int name parameters \
    { \
        REAL(int, #name, __VA_ARGS__); \
        if (struck(NULL)) \
            return -1; \
        return real arguments; \
    }
SIMPLE(fsync, (int fd), (fd), int)
SIMPLE(fdatasync, (int fd), (fd), int)
SIMPLE(rename, (const char *a, const char *b), (a, b), const char *, const char *)
SIMPLE(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), int, const char *, int, const char *)
SIMPLE(unlink, (const char *path), (path), const char *)
SIMPLE(unlinkat, (int dir, const char *path, int flags), (dir, path, flags), int, const char *, int)
SIMPLE(ftruncate, (int fd, off_t size), (fd, size), int, off_t)
SIMPLE(ftruncate64, (int fd, off64_t size), (fd, size), int, off64_t)
SIMPLE(fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), int, int, off_t, off_t)
SIMPLE(fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), int, int, off64_t, off64_t)
SIMPLE(fchmod, (int fd, mode_t mode), (fd, mode), int, mode_t)
SIMPLE(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)

#define PWRITEV(name, offset) \
    ssize_t name(int fd, const struct iovec *parts, int number, offset at) \
    { \
        int killing = 0; \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset); \
        if (struck(&killing)) \
            return -1; \
        if (killing) { \
            struct iovec half = {parts[0].iov_base, parts[0].iov_len / 1024 * 512}; \
            real(fd, &half, 1, at); \
            kill(getpid(), SIGKILL); \
        } \
        return real(fd, parts, number, at); \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

ssize_t write(int fd, const void *data, size_t size)
{
    int killing = 0;
    REAL(ssize_t, "write", int, const void *, size_t);
    if (fd > 2 && struck(&killing))
        return -1;
    if (killing) {
        real(fd, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return real(fd, data, size);
}

#define PREADV(name, offset) \
    ssize_t name(int fd, const struct iovec *parts, int number, offset at) \
    { \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset); \
        if (struck(NULL)) \
            return -1; \
        return real(fd, parts, number, at); \
    }
PREADV(preadv, off_t)
PREADV(preadv64, off64_t)

#define PREAD(name, offset) \
    ssize_t name(int fd, void *data, size_t size, offset at) \
    { \
        REAL(ssize_t, #name, int, void *, size_t, offset); \
        if (struck(NULL)) \
            return -1; \
        return real(fd, data, size, at); \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)
