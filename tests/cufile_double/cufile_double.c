/*
 * cufile_double: a stand-in for libcufile that needs no GPU and no NVIDIA driver.
 *
 * It exports the cuFile functions that torchdirect calls, with the calling conventions and structure layouts of
 * libcufile 1.15, and moves bytes with pread(2) and pwrite(2). A "device pointer" is a plain host address and a
 * "CUDA stream" is any number. Faults are injected and counters are read through three extra functions:
 *
 *     int  double_set(const char *key, long value);   0, or -1 when the table is full
 *     long double_get(const char *key);               a setting, a call count or a live count; 0 when unknown
 *     void double_reset(void);                        forget settings, counts and live objects; read the environment
 *     long double_run_stream(void *stream);           run what waits on a stream (NULL: all); returns how many ran
 *
 * The environment variable CUFILE_DOUBLE="key=value,key=value" gives settings to a process that cannot call
 * double_set(), such as the child that probes the driver. It is read when the library is loaded and on double_reset().
 *
 * Build:  gcc -shared -fPIC -O1 -pthread -o libcufile.so.0 cufile_double.c
 *         add -DCUFILE_DOUBLE_OLD for a library from before streams, statistics, parameters and versions.
 *
 * FAULTS OF ANY FUNCTION (F is the cuFile name, for example cuFileRead; cuFileDriverClose covers its _v2 too)
 *   fail.F             what a failing call answers. CUfileError_t functions put it into err. cuFileRead and
 *                      cuFileWrite return -value from 5000 on, else -1 with errno=value.
 *   fail.F.cuda        the cu_err beside it
 *   fail.F.nth         fail only the nth call since the reset (1 is the first)
 *   fail.F.from        fail every call from this one on
 *   delay_us.F         sleep before answering
 *
 * SYNCHRONOUS READ AND WRITE
 *   cap.read, cap.write    most bytes that one call moves (0: no cap), for short transfers
 *   align                  refuse pointers, offsets and sizes that are no multiple of this (0: accept all)
 *   align.code             the refusal (default 5022)
 *
 * DRIVER
 *   open.abort             1: cuFileDriverOpen calls abort()
 *   open.close_stdin       1: cuFileDriverOpen closes descriptor 0, as a half-installed nvidia-fs makes the real one do
 *   open.hang_ms           cuFileDriverOpen sleeps this long
 *   implicit_open          1: registering works while the driver is closed (default 0: answers 5001)
 *   version                default 1150
 *   props.NAME             a field of CUfileDrvProps_t, for example props.max_batch_io_size (default 128)
 *
 * BUFFERS
 *   buf.max                registering more bytes than this fails (0: no limit)
 *   buf.deny               1: every registration fails
 *   buf.code               the failure (default 5016)
 *
 * BATCH
 *   batch.limit            cuFileBatchIOSetUp refuses more entries (default 128)
 *   batch.limit.code       the refusal (default 5022)
 *   batch.reverse          1: events come back in reverse order of submission
 *   batch.step             most events that one cuFileBatchIOGetStatus hands out (0: all)
 *   batch.polls            this many cuFileBatchIOGetStatus calls of a batch answer 0 events first
 *   batch.event.nth        which submitted entry, counted since the reset, gets the outcome below (-1: every one)
 *   batch.event.status     its CUfileStatus_t (default 0x40, CUFILE_FAILED)
 *   batch.event.ret        its ret, for example -5 or -5030
 *   batch.short.nth, batch.short.by    this entry moves that many bytes less and still completes
 *   batch.stuck            1: nothing completes before cuFileBatchIOCancel
 *   batch.cancel_tells     1: an event tells of each entry that was cancelled; libcufile 1.15 sends none
 *
 * STREAMS
 *   async.mode             0: at submission; 1: when double_run_stream() is called; 2: by a thread after async.delay_ms
 *   async.delay_ms         default 20
 *   async.nth              which submission, counted since the reset, gets async.value (-1: every one)
 *   async.value            what it stores instead of a byte count, for example -5 or -5030; no bytes move
 *   async.short.nth, async.short.by    this one moves that many bytes less (-1: every one)
 *   async.unregistered     1: refuse streams that cuFileStreamRegister has not seen, with 5022
 *
 * COUNTERS (read with double_get)
 *   calls.F                calls since the reset
 *   live.opens, live.handles, live.buffers, live.batches, live.streams, live.async
 *   live.buffer_bytes
 *   peak.inflight          most synchronous reads and writes that ran at one time
 *   bytes.read, bytes.written
 *
 * All functions may be called from any thread.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int double_set(const char *key, long value);
EXPORT long double_get(const char *key);
EXPORT void double_reset(void);
EXPORT long double_run_stream(void *stream);

typedef struct { int err; int cu_err; } status_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } descr_t;
typedef struct {
    struct { unsigned major_version, minor_version; size_t poll_thresh_size, max_direct_io_size;
             unsigned dstatusflags, dcontrolflags; } nvfs;
    unsigned fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
    unsigned max_batch_io_size, max_batch_io_timeout_msecs;
} props_t;
typedef struct {
    int mode;
    struct { void *base; off_t file_offset; off_t ptr_offset; size_t size; } batch;
    void *fh;
    int opcode;
    void *cookie;
} io_params_t;
typedef struct { void *cookie; int status; ssize_t ret; } io_event_t;

/* ---- settings and counters: one small table under one lock ---- */

#define MAX_ENTRIES 512
static struct { char key[64]; long value; } table[MAX_ENTRIES];
static int entries;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long inflight;

static long *slot(const char *key, bool create) {
    for (int i = 0; i < entries; i++)
        if (strcmp(table[i].key, key) == 0) return &table[i].value;
    if (!create || entries == MAX_ENTRIES || strlen(key) >= sizeof table[0].key) return NULL;
    strcpy(table[entries].key, key);
    table[entries].value = 0;
    return &table[entries++].value;
}

static long peek(const char *key, long missing) {
    long *value = slot(key, false);
    return value ? *value : missing;
}

static long add(const char *key, long amount) {
    long *value = slot(key, true);
    return value ? (*value += amount) : 0;
}

static long setting(const char *key, long missing) {
    pthread_mutex_lock(&lock);
    long value = peek(key, missing);
    pthread_mutex_unlock(&lock);
    return value;
}

static void sleep_us(long us) {
    if (us <= 0) return;
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

static long fault(const char *function, int *cuda) {
    char key[96];
    pthread_mutex_lock(&lock);
    snprintf(key, sizeof key, "calls.%s", function);
    long call = add(key, 1);
    snprintf(key, sizeof key, "delay_us.%s", function);
    long delay = peek(key, 0);
    snprintf(key, sizeof key, "fail.%s", function);
    long code = peek(key, 0);
    snprintf(key, sizeof key, "fail.%s.nth", function);
    long nth = peek(key, 0);
    snprintf(key, sizeof key, "fail.%s.from", function);
    long from = peek(key, 0);
    snprintf(key, sizeof key, "fail.%s.cuda", function);
    *cuda = (int)peek(key, 0);
    pthread_mutex_unlock(&lock);
    sleep_us(delay);
    if (nth && call != nth) return 0;
    if (from && call < from) return 0;
    return code;
}

#define ENTER(name)                                                                                                   \
    int cuda_;                                                                                                        \
    long code_ = fault(name, &cuda_);                                                                                 \
    if (code_) return (status_t){(int)code_, cuda_}
#define OK ((status_t){0, 0})
#define ERR(code) ((status_t){(int)(code), 0})

/* ---- live objects ---- */

typedef struct object { struct object *next; void *key; int fd; size_t length; } object_t;
static object_t *handles, *buffers, *streams;

static object_t *find(object_t *list, void *key) {
    for (; list; list = list->next)
        if (list->key == key) return list;
    return NULL;
}

static object_t *push(object_t **list, void *key) {
    object_t *o = calloc(1, sizeof *o);
    o->key = key ? key : o;
    o->next = *list;
    *list = o;
    return o;
}

static bool drop(object_t **list, void *key, size_t *length) {
    for (; *list; list = &(*list)->next)
        if ((*list)->key == key) {
            object_t *gone = *list;
            *list = gone->next;
            if (length) *length = gone->length;
            free(gone);
            return true;
        }
    return false;
}

static int fd_of(void *fh) {
    pthread_mutex_lock(&lock);
    object_t *o = find(handles, fh);
    int fd = o ? o->fd : -1;
    pthread_mutex_unlock(&lock);
    return fd;
}

static bool driver_ready(void) {
    pthread_mutex_lock(&lock);
    bool ready = peek("live.opens", 0) > 0 || peek("implicit_open", 0);
    pthread_mutex_unlock(&lock);
    return ready;
}

static ssize_t move(bool writing, void *fh, void *base, size_t size, off_t file_offset, off_t ptr_offset) {
    int fd = fd_of(fh);
    if (fd < 0) return -5027;
    long align = setting("align", 0);
    if (align > 0 && (size % align || file_offset % align || ptr_offset % align || (uintptr_t)base % align))
        return -setting("align.code", 5022);
    long cap = setting(writing ? "cap.write" : "cap.read", 0);
    if (cap > 0 && size > (size_t)cap) size = cap;
    char *p = (char *)base + ptr_offset;
    ssize_t n = writing ? pwrite(fd, p, size, file_offset) : pread(fd, p, size, file_offset);
    if (n > 0) {
        pthread_mutex_lock(&lock);
        add(writing ? "bytes.written" : "bytes.read", n);
        pthread_mutex_unlock(&lock);
    }
    return n;
}

/* ---- driver ---- */

EXPORT status_t cuFileDriverOpen(void) {
    if (setting("open.abort", 0)) abort();
    if (setting("open.close_stdin", 0)) close(0);
    sleep_us(setting("open.hang_ms", 0) * 1000);
    ENTER("cuFileDriverOpen");
    pthread_mutex_lock(&lock);
    add("live.opens", 1);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT status_t cuFileDriverClose_v2(void) {
    ENTER("cuFileDriverClose");
    pthread_mutex_lock(&lock);
    bool open = peek("live.opens", 0) > 0;
    if (open) add("live.opens", -1);
    pthread_mutex_unlock(&lock);
    return open ? OK : ERR(5001);
}

EXPORT status_t cuFileDriverClose(void) { return cuFileDriverClose_v2(); }

EXPORT long cuFileUseCount(void) { return setting("live.opens", 0); }

EXPORT status_t cuFileDriverGetProperties(props_t *p) {
    ENTER("cuFileDriverGetProperties");
    if (!p) return ERR(5022);
    if (!driver_ready()) return ERR(5001);
    memset(p, 0, sizeof *p);
    p->nvfs.major_version = setting("props.major_version", 0);
    p->nvfs.minor_version = setting("props.minor_version", 0);
    p->nvfs.poll_thresh_size = setting("props.poll_thresh_size", 4);
    p->nvfs.max_direct_io_size = setting("props.max_direct_io_size", 16384);
    p->nvfs.dstatusflags = setting("props.dstatusflags", 0);
    p->nvfs.dcontrolflags = setting("props.dcontrolflags", 2);
    p->fflags = setting("props.fflags", 0);
    p->max_device_cache_size = setting("props.max_device_cache_size", 131072);
    p->per_buffer_cache_size = setting("props.per_buffer_cache_size", 1024);
    p->max_device_pinned_mem_size = setting("props.max_device_pinned_mem_size", 33554432);
    p->max_batch_io_size = setting("props.max_batch_io_size", 128);
    p->max_batch_io_timeout_msecs = setting("props.max_batch_io_timeout_msecs", 0);
    return OK;
}

#define SETTER(name, key)                                                                                             \
    EXPORT status_t name(size_t kib) {                                                                                \
        ENTER(#name);                                                                                                 \
        if (!driver_ready()) return ERR(5001);                                                                        \
        if (kib % 4) return ERR(5003);                                                                                \
        double_set(key, (long)kib);                                                                                   \
        return OK;                                                                                                    \
    }

EXPORT int double_set(const char *key, long value) {
    pthread_mutex_lock(&lock);
    long *place = slot(key, true);
    if (place) *place = value;
    pthread_mutex_unlock(&lock);
    return place ? 0 : -1;
}

SETTER(cuFileDriverSetMaxDirectIOSize, "props.max_direct_io_size")
SETTER(cuFileDriverSetMaxCacheSize, "props.max_device_cache_size")
SETTER(cuFileDriverSetMaxPinnedMemSize, "props.max_device_pinned_mem_size")

EXPORT status_t cuFileDriverSetPollMode(bool poll, size_t threshold) {
    ENTER("cuFileDriverSetPollMode");
    if (!driver_ready()) return ERR(5001);
    long control = setting("props.dcontrolflags", 2);
    double_set("props.dcontrolflags", poll ? control | 1 : control & ~1L);
    double_set("props.poll_thresh_size", (long)threshold);
    return OK;
}

/* ---- handles and buffers ---- */

EXPORT status_t cuFileHandleRegister(void **fh, descr_t *d) {
    ENTER("cuFileHandleRegister");
    if (!fh || !d || d->type != 1) return ERR(5022);
    if (!driver_ready()) return ERR(5001);
    if (fcntl(d->handle.fd, F_GETFL) < 0) return ERR(5022);
    pthread_mutex_lock(&lock);
    for (object_t *o = handles; o; o = o->next)
        if (o->fd == d->handle.fd) {
            pthread_mutex_unlock(&lock);
            return ERR(5028);
        }
    object_t *o = push(&handles, NULL);
    o->fd = d->handle.fd;
    *fh = o->key;
    add("live.handles", 1);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT void cuFileHandleDeregister(void *fh) {
    int cuda;
    (void)fault("cuFileHandleDeregister", &cuda);
    pthread_mutex_lock(&lock);
    if (drop(&handles, fh, NULL)) add("live.handles", -1);
    pthread_mutex_unlock(&lock);
}

EXPORT status_t cuFileBufRegister(const void *base, size_t length, int flags) {
    (void)flags;
    ENTER("cuFileBufRegister");
    if (!base || !length) return ERR(5022);
    if (!driver_ready()) return ERR(5001);
    long max = setting("buf.max", 0);
    if (setting("buf.deny", 0) || (max > 0 && length > (size_t)max)) return ERR(setting("buf.code", 5016));
    pthread_mutex_lock(&lock);
    bool known = find(buffers, (void *)base) != NULL;
    if (!known) {
        push(&buffers, (void *)base)->length = length;
        add("live.buffers", 1);
        add("live.buffer_bytes", (long)length);
    }
    pthread_mutex_unlock(&lock);
    return known ? ERR(5023) : OK;
}

EXPORT status_t cuFileBufDeregister(const void *base) {
    ENTER("cuFileBufDeregister");
    size_t length = 0;
    pthread_mutex_lock(&lock);
    bool known = drop(&buffers, (void *)base, &length);
    if (known) {
        add("live.buffers", -1);
        add("live.buffer_bytes", -(long)length);
    }
    pthread_mutex_unlock(&lock);
    return known ? OK : ERR(5022);
}

/* ---- synchronous transfers ---- */

static ssize_t transfer(const char *name, bool writing, void *fh, void *base, size_t size, off_t file_offset,
                        off_t ptr_offset) {
    pthread_mutex_lock(&lock);
    long *peak = slot("peak.inflight", true);
    if (++inflight > *peak) *peak = inflight;
    pthread_mutex_unlock(&lock);
    int cuda;
    long code = fault(name, &cuda);
    ssize_t result;
    int error = 0;
    if (code >= 5000) result = -code;
    else if (code) { result = -1; error = (int)code; }
    else { result = move(writing, fh, base, size, file_offset, ptr_offset); error = errno; }
    pthread_mutex_lock(&lock);
    inflight--;
    pthread_mutex_unlock(&lock);
    if (result == -1) errno = error;
    return result;
}

EXPORT ssize_t cuFileRead(void *fh, void *base, size_t size, off_t file_offset, off_t ptr_offset) {
    return transfer("cuFileRead", false, fh, base, size, file_offset, ptr_offset);
}

EXPORT ssize_t cuFileWrite(void *fh, const void *base, size_t size, off_t file_offset, off_t ptr_offset) {
    return transfer("cuFileWrite", true, fh, (void *)base, size, file_offset, ptr_offset);
}

/* ---- batch ---- */

typedef struct batch {
    struct batch *next;
    unsigned capacity, waiting;
    long polls;
    bool canceled;
    io_event_t *events;
} batch_t;
static batch_t *batches;

static batch_t *find_batch(void *id) {
    for (batch_t *b = batches; b; b = b->next)
        if (b == id) return b;
    return NULL;
}

EXPORT status_t cuFileBatchIOSetUp(void **id, unsigned nr) {
    ENTER("cuFileBatchIOSetUp");
    if (!id || !nr) return ERR(5022);
    if (!driver_ready()) return ERR(5001);
    if (nr > setting("batch.limit", 128)) return ERR(setting("batch.limit.code", 5022));
    batch_t *b = calloc(1, sizeof *b);
    b->capacity = nr;
    b->events = calloc(nr, sizeof *b->events);
    pthread_mutex_lock(&lock);
    b->next = batches;
    batches = b;
    add("live.batches", 1);
    pthread_mutex_unlock(&lock);
    *id = b;
    return OK;
}

EXPORT status_t cuFileBatchIOSubmit(void *id, unsigned nr, io_params_t *io, unsigned flags) {
    (void)flags;
    ENTER("cuFileBatchIOSubmit");
    pthread_mutex_lock(&lock);
    batch_t *b = find_batch(id);
    bool full = b && b->waiting + nr > b->capacity;
    pthread_mutex_unlock(&lock);
    if (!b || !io) return ERR(5022);
    if (full) return ERR(5037);
    for (unsigned i = 0; i < nr; i++) {
        io_event_t event = {io[i].cookie, 0x10, 0};
        pthread_mutex_lock(&lock);
        long n = add("count.batch_entries", 1);
        long chosen = peek("batch.event.nth", 0);
        bool forced = chosen == -1 || (chosen && chosen == n);
        long chosen_short = peek("batch.short.nth", 0);
        long less = chosen_short == -1 || (chosen_short && chosen_short == n) ? peek("batch.short.by", 0) : 0;
        if (forced) {
            event.status = (int)peek("batch.event.status", 0x40);
            event.ret = peek("batch.event.ret", 0);
        }
        pthread_mutex_unlock(&lock);
        if (!forced) {
            size_t size = io[i].batch.size > (size_t)less ? io[i].batch.size - less : 0;
            event.ret = move(io[i].opcode == 1, io[i].fh, io[i].batch.base, size, io[i].batch.file_offset,
                             io[i].batch.ptr_offset);
            if (event.ret == -1) event.ret = -errno;
            if (event.ret < 0) event.status = 0x40;
        }
        pthread_mutex_lock(&lock);
        b->events[b->waiting++] = event;
        pthread_mutex_unlock(&lock);
    }
    return OK;
}

EXPORT status_t cuFileBatchIOGetStatus(void *id, unsigned min_nr, unsigned *nr, io_event_t *out,
                                       struct timespec *timeout) {
    (void)min_nr;
    (void)timeout;
    ENTER("cuFileBatchIOGetStatus");
    pthread_mutex_lock(&lock);
    batch_t *b = find_batch(id);
    if (!b || !nr || !out) {
        pthread_mutex_unlock(&lock);
        return ERR(5022);
    }
    long step = peek("batch.step", 0);
    unsigned count = b->waiting < *nr ? b->waiting : *nr;
    if (step > 0 && count > step) count = step;
    if (b->polls++ < peek("batch.polls", 0) || (peek("batch.stuck", 0) && !b->canceled)) count = 0;
    bool reverse = peek("batch.reverse", 0);
    for (unsigned i = 0; i < count; i++) {
        if (reverse) out[i] = b->events[b->waiting - 1];
        else {
            out[i] = b->events[0];
            memmove(b->events, b->events + 1, (b->waiting - 1) * sizeof *b->events);
        }
        b->waiting--;
    }
    *nr = count;
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT status_t cuFileBatchIOCancel(void *id) {
    ENTER("cuFileBatchIOCancel");
    pthread_mutex_lock(&lock);
    batch_t *b = find_batch(id);
    if (b) {
        b->canceled = true;
        if (!peek("batch.cancel_tells", 0)) b->waiting = 0;
        for (unsigned i = 0; i < b->waiting; i++) {
            b->events[i].status = 0x08;
            b->events[i].ret = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return b ? OK : ERR(5022);
}

EXPORT void cuFileBatchIODestroy(void *id) {
    int cuda;
    (void)fault("cuFileBatchIODestroy", &cuda);
    pthread_mutex_lock(&lock);
    for (batch_t **p = &batches; *p; p = &(*p)->next)
        if (*p == id) {
            batch_t *gone = *p;
            *p = gone->next;
            free(gone->events);
            free(gone);
            add("live.batches", -1);
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* ---- streams ---- */

typedef struct request {
    struct request *next;
    bool writing, forced;
    long value, less;
    void *fh, *base, *stream;
    size_t *size;
    off_t *file_offset, *ptr_offset;
    ssize_t *done;
} request_t;
static request_t *queue;

static void finish(request_t *r) {
    ssize_t n = r->value;
    if (!r->forced) {
        size_t size = *r->size > (size_t)r->less ? *r->size - r->less : 0;
        n = move(r->writing, r->fh, r->base, size, *r->file_offset, *r->ptr_offset);
        if (n == -1) n = -errno;
    }
    __atomic_store_n(r->done, n, __ATOMIC_RELEASE);
    free(r);
    pthread_mutex_lock(&lock);
    add("live.async", -1);
    pthread_mutex_unlock(&lock);
}

EXPORT long double_run_stream(void *stream) {
    long ran = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        request_t **p = &queue;
        while (*p && stream && (*p)->stream != stream) p = &(*p)->next;
        request_t *r = *p;
        if (r) *p = r->next;
        pthread_mutex_unlock(&lock);
        if (!r) return ran;
        finish(r);
        ran++;
    }
}

EXPORT long double_get(const char *key) { return setting(key, 0); }

static void read_environment(void) {
    const char *text = getenv("CUFILE_DOUBLE");
    char *copy = text ? strdup(text) : NULL, *rest = copy, *item;
    while (rest && (item = strsep(&rest, ",")) != NULL) {
        char *equals = strchr(item, '=');
        if (!equals) continue;
        *equals = 0;
        double_set(item, strtol(equals + 1, NULL, 0));
    }
    free(copy);
}

EXPORT void double_reset(void) {
    double_run_stream(NULL);
    pthread_mutex_lock(&lock);
    entries = 0;
    while (handles) drop(&handles, handles->key, NULL);
    while (buffers) drop(&buffers, buffers->key, NULL);
    while (streams) drop(&streams, streams->key, NULL);
    while (batches) {
        batch_t *next = batches->next;
        free(batches->events);
        free(batches);
        batches = next;
    }
    pthread_mutex_unlock(&lock);
    read_environment();
}

__attribute__((constructor)) static void loaded(void) { read_environment(); }

#ifndef CUFILE_DOUBLE_OLD

static void *later(void *request) {
    sleep_us(setting("async.delay_ms", 20) * 1000);
    finish(request);
    return NULL;
}

static status_t enqueue(const char *name, bool writing, void *fh, void *base, size_t *size, off_t *file_offset,
                        off_t *ptr_offset, ssize_t *done, void *stream) {
    ENTER(name);
    if (!size || !file_offset || !ptr_offset || !done || !base) return ERR(5022);
    if (fd_of(fh) < 0) return ERR(5027);
    pthread_mutex_lock(&lock);
    bool unknown = peek("async.unregistered", 0) && !find(streams, stream);
    pthread_mutex_unlock(&lock);
    if (unknown) return ERR(5022);
    request_t *r = calloc(1, sizeof *r);
    *r = (request_t){NULL, writing, false, 0, 0, fh, base, stream, size, file_offset, ptr_offset, done};
    pthread_mutex_lock(&lock);
    add("live.async", 1);
    long n = add("count.async", 1);
    long chosen = peek("async.nth", 0);
    r->forced = chosen == -1 || (chosen && chosen == n);
    r->value = peek("async.value", -5);
    long chosen_short = peek("async.short.nth", 0);
    if (chosen_short == -1 || (chosen_short && chosen_short == n)) r->less = peek("async.short.by", 4096);
    long mode = peek("async.mode", 0);
    if (mode == 1) {
        request_t **tail = &queue;
        while (*tail) tail = &(*tail)->next;
        *tail = r;
    }
    pthread_mutex_unlock(&lock);
    if (mode == 0) finish(r);
    if (mode == 2) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, later, r) != 0) finish(r);
        else pthread_detach(thread);
    }
    return OK;
}

EXPORT status_t cuFileReadAsync(void *fh, void *base, size_t *size, off_t *file_offset, off_t *ptr_offset,
                                ssize_t *done, void *stream) {
    return enqueue("cuFileReadAsync", false, fh, base, size, file_offset, ptr_offset, done, stream);
}

EXPORT status_t cuFileWriteAsync(void *fh, void *base, size_t *size, off_t *file_offset, off_t *ptr_offset,
                                 ssize_t *done, void *stream) {
    return enqueue("cuFileWriteAsync", true, fh, base, size, file_offset, ptr_offset, done, stream);
}

EXPORT status_t cuFileStreamRegister(void *stream, unsigned flags) {
    ENTER("cuFileStreamRegister");
    if (flags > 15) return ERR(5022);
    if (!driver_ready()) return ERR(5001);
    pthread_mutex_lock(&lock);
    bool known = stream && find(streams, stream);
    if (!known) {
        push(&streams, stream);
        add("live.streams", 1);
    }
    pthread_mutex_unlock(&lock);
    return known ? ERR(5022) : OK;
}

EXPORT status_t cuFileStreamDeregister(void *stream) {
    ENTER("cuFileStreamDeregister");
    pthread_mutex_lock(&lock);
    bool known = drop(&streams, stream, NULL);
    if (known) add("live.streams", -1);
    pthread_mutex_unlock(&lock);
    return known ? OK : ERR(5022);
}

/* ---- version, parameters, statistics ---- */

EXPORT status_t cuFileGetVersion(int *version) {
    ENTER("cuFileGetVersion");
    *version = (int)setting("version", 1150);
    return OK;
}

static char strings[3][256];
static bool staged(void) { return setting("live.opens", 0) == 0; }

#define PARAMETER(kind, type, last)                                                                                   \
    EXPORT status_t cuFileGetParameter##kind(int which, type *value) {                                                \
        ENTER("cuFileGetParameter" #kind);                                                                            \
        if (which < 0 || which > last || !value) return ERR(5022);                                                    \
        char key[64];                                                                                                 \
        snprintf(key, sizeof key, "param." #kind ".%d", which);                                                       \
        *value = (type)setting(key, 0);                                                                               \
        return OK;                                                                                                    \
    }                                                                                                                 \
    EXPORT status_t cuFileSetParameter##kind(int which, type value) {                                                 \
        ENTER("cuFileSetParameter" #kind);                                                                            \
        if (which < 0 || which > last) return ERR(5022);                                                              \
        if (!staged()) return ERR(5026);                                                                              \
        char key[64];                                                                                                 \
        snprintf(key, sizeof key, "param." #kind ".%d", which);                                                       \
        double_set(key, (long)value);                                                                                 \
        return OK;                                                                                                    \
    }
PARAMETER(SizeT, size_t, 11)
PARAMETER(Bool, bool, 11)

EXPORT status_t cuFileGetParameterString(int which, char *text, int length) {
    ENTER("cuFileGetParameterString");
    if (which < 0 || which > 2 || !text || length < 1) return ERR(5022);
    snprintf(text, length, "%s", strings[which]);
    return OK;
}

EXPORT status_t cuFileSetParameterString(int which, const char *text) {
    ENTER("cuFileSetParameterString");
    if (which < 0 || which > 2 || !text) return ERR(5022);
    if (!staged()) return ERR(5026);
    snprintf(strings[which], sizeof strings[which], "%s", text);
    return OK;
}

EXPORT status_t cuFileGetParameterMinMaxValue(int which, size_t *low, size_t *high) {
    ENTER("cuFileGetParameterMinMaxValue");
    if (which < 0 || which > 11 || !low || !high) return ERR(5022);
    *low = 1;
    *high = 256;
    return OK;
}

EXPORT status_t cuFileGetBARSizeInKB(int gpu, size_t *size) {
    ENTER("cuFileGetBARSizeInKB");
    if (gpu != 0 || !size) return ERR(5022);
    *size = 262144;
    return OK;
}

EXPORT status_t cuFileSetStatsLevel(int level) {
    ENTER("cuFileSetStatsLevel");
    if (level < 0 || level > 3) return ERR(5022);
    double_set("stats.level", level);
    return OK;
}

EXPORT status_t cuFileGetStatsLevel(int *level) {
    ENTER("cuFileGetStatsLevel");
    *level = (int)setting("stats.level", 0);
    return OK;
}

#define SIMPLE(name)                                                                                                  \
    EXPORT status_t name(void) {                                                                                      \
        ENTER(#name);                                                                                                 \
        return driver_ready() ? OK : ERR(5001);                                                                       \
    }
SIMPLE(cuFileStatsStart)
SIMPLE(cuFileStatsStop)
SIMPLE(cuFileStatsReset)

static status_t statistics(const char *name, int level, size_t size, void *out) {
    ENTER(name);
    if (!out || setting("stats.level", 0) < level) return ERR(5022);
    memset(out, 0, size);
    ((uint64_t *)out)[0] = setting("calls.cuFileRead", 0); /* read_ops.ok */
    ((uint64_t *)out)[2] = setting("calls.cuFileWrite", 0); /* write_ops.ok */
    ((uint64_t *)out)[12] = setting("bytes.read", 0); /* read_bytes */
    ((uint64_t *)out)[13] = setting("bytes.written", 0); /* write_bytes */
    return OK;
}

EXPORT status_t cuFileGetStatsL1(void *out) { return statistics("cuFileGetStatsL1", 1, 512, out); }
EXPORT status_t cuFileGetStatsL2(void *out) { return statistics("cuFileGetStatsL2", 2, 1024, out); }
EXPORT status_t cuFileGetStatsL3(void *out) { return statistics("cuFileGetStatsL3", 3, 5000, out); }

#endif
