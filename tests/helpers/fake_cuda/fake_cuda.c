/* A CUDA driver without a GPU: the calls that discod makes, over shared memory.
 *
 * State that processes share is in files of $FAKE_CUDA_DIR, by default the directory of this
 * library: "state" (struct shared), "mem-ID" (one per device allocation), "control" (the faults
 * to show), and "violations" (a line for each thing that would be a crash or a leak with a real
 * driver). Streams are threads: copies happen later, in order within a stream only. Any address
 * is plain memory. What is not modelled: several contexts per device, and peer access.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ = 205,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

static const struct { int code; const char *name, *meaning; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer is not registered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* ---- what processes share ---- */

enum { MAX_FAULTS = 64, MAX_ALLOCS = 8192, MAX_MAPPINGS = 4096, MAX_RANGES = 16384 };
enum { MAX_EVENTS = 65536 };

struct process { int pid; uint64_t began; };
struct fault { char call[40]; char kind; int code, pid; long after, times, micros; };
struct alloc { uint64_t id, size; struct process owner; int device; bool exported, freed; };
struct mapping { uint64_t id; struct process by; int count; };
struct range { struct process by; uint64_t address, size; };
struct event { uint64_t id, recorded, completed; struct process owner; bool destroyed; };

struct shared {
    bool ready;
    pthread_mutex_t lock;
    uint64_t secret, stamp;
    int faults, allocs, mappings, ranges, events; /* how many slots were ever used */
    struct fault fault[MAX_FAULTS];
    struct alloc alloc[MAX_ALLOCS];
    struct mapping mapping[MAX_MAPPINGS];
    struct range range[MAX_RANGES];
    struct event event[MAX_EVENTS];
};

static struct shared *shared;
static char directory[3000];
static int devices = 1;
static uint64_t memory = 4ull << 30;

static void lock(void) {
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&shared->lock);
}

static void unlock(void) { pthread_mutex_unlock(&shared->lock); }

static void attach_at(const char *where) {
    char path[4096];
    snprintf(path, sizeof path, "%s/state", where);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) || ftruncate(fd, sizeof *shared)) abort();
    struct shared *state = mmap(0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED) abort();
    if (!state->ready) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&state->lock, &attributes);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        state->secret = now.tv_nsec * 0x9e3779b97f4a7c15ull;
        state->ready = true;
    }
    flock(fd, LOCK_UN); /* closing does not: the mapping keeps the open file */
    close(fd);
    shared = state;
}

static void attach_once(void) {
    const char *where = getenv("FAKE_CUDA_DIR");
    if (where) {
        snprintf(directory, sizeof directory, "%s", where);
    } else {
        Dl_info info;
        if (!dladdr(attach_once, &info)) abort();
        snprintf(directory, sizeof directory, "%s", info.dli_fname);
        *strrchr(directory, '/') = 0;
    }
    if (getenv("FAKE_CUDA_DEVICES")) devices = atoi(getenv("FAKE_CUDA_DEVICES"));
    if (getenv("FAKE_CUDA_MEMORY")) memory = strtoull(getenv("FAKE_CUDA_MEMORY"), 0, 10);
    if (!shared) attach_at(directory);
}

static void attach(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, attach_once);
}

/* When the process began, in clock ticks after the boot; 0 when it has ended, or is a zombie. */
static uint64_t began(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *field = strrchr(text, ')'); /* the name may have blanks and brackets */
    if (!field || field[2] == 'Z' || field[2] == 'X') return 0;
    for (int i = 0; i < 20 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, 0, 10) : 0;
}

static bool alive(struct process process) {
    return process.pid && process.began == began(process.pid);
}

static struct process self(void) {
    return (struct process){getpid(), began(getpid())};
}

static void violation(const char *format, ...) {
    char path[4096], text[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    text[length++] = '\n';
    snprintf(path, sizeof path, "%s/violations", directory);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, text, length) != length) abort();
    close(fd);
}

/* ---- faults on demand ---- */

static int sick; /* an error that every later call of this process returns */

static void nap(long micros) {
    struct timespec time = {micros / 1000000, micros % 1000000 * 1000};
    while (nanosleep(&time, &time) && errno == EINTR) continue;
}

/* Read "control" again if it is another: lines of kind, call, code, after, times, microseconds,
 * and the pid of the only process to show it, or 0. */
static void read_control(void) {
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/control", directory);
    uint64_t stamp = 0;
    if (!stat(path, &status))
        stamp = status.st_ino + status.st_mtim.tv_sec * 1000000000ull + status.st_mtim.tv_nsec;
    if (__atomic_load_n(&shared->stamp, __ATOMIC_ACQUIRE) == stamp) return;
    lock();
    if (shared->stamp != stamp) {
        shared->faults = 0;
        FILE *file = fopen(path, "re");
        struct fault next;
        while (file && shared->faults < MAX_FAULTS
               && fscanf(file, " %c %39s %d %ld %ld %ld %d", &next.kind, next.call, &next.code,
                         &next.after, &next.times, &next.micros, &next.pid) == 7)
            shared->fault[shared->faults++] = next;
        if (file) fclose(file);
        __atomic_store_n(&shared->stamp, stamp, __ATOMIC_RELEASE);
    }
    unlock();
}

static bool meant(const struct fault *fault, const char *call) {
    return !strcmp(fault->call, call) && (!fault->pid || fault->pid == getpid());
}

/* Hang, wait, or return an error, as the control file wants it for this call. */
static int show_faults(const char *call) {
    long micros = 0;
    int code = OK;
    bool hangs;
    do {
        hangs = false;
        read_control();
        if (!shared->faults) break;
        lock();
        for (int i = 0; i < shared->faults; i++)
            hangs |= shared->fault[i].kind == 'h' && meant(&shared->fault[i], call);
        for (int i = 0; i < shared->faults && !hangs; i++) {
            struct fault *fault = &shared->fault[i];
            if (!meant(fault, call)) continue;
            if (fault->kind == 'd') micros += fault->micros;
            else if (fault->after > 0) fault->after--;
            else if (fault->times > 0) { fault->times--; code = fault->code; }
        }
        unlock();
        if (hangs) nap(1000);
    } while (hangs);
    if (micros) nap(micros);
    return code;
}

static bool started;
static __thread int current[16]; /* a stack of contexts: device + 1 */
static __thread int depth;

static int enter(const char *call, bool needs_context) {
    if (!started) return NOT_INITIALIZED;
    int code = show_faults(call);
    if (code) return code;
    if (sick) return sick;
    return needs_context && !depth ? INVALID_CONTEXT : OK;
}

#define ENTER(needs_context) \
    do { int code_ = enter(__func__, needs_context); if (code_) return code_; } while (0)

/* ---- streams ---- */

enum kind { COPY, RECORD, WAIT };
struct op { struct op *next; enum kind kind; char *dst, *src; size_t size; uint64_t event, ticket; };
struct stream {
    struct stream *next;
    pthread_cond_t wake;
    struct op *first, *last; /* the first one is running */
    bool destroyed;
};

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t something_done = PTHREAD_COND_INITIALIZER;
static struct stream *streams, *default_stream;

static void run(struct op *op) {
    int code = OK;
    if (op->kind == COPY) {
        code = show_faults("copy");
        if (!code) memcpy(op->dst, op->src, op->size);
    } else if (op->kind == RECORD) {
        code = show_faults("record");
        struct event *event = &shared->event[op->event];
        lock();
        if (event->completed < op->ticket) event->completed = op->ticket;
        unlock();
    } else {
        struct event *event = &shared->event[op->event];
        while (__atomic_load_n(&event->completed, __ATOMIC_ACQUIRE) < op->ticket) nap(50);
    }
    if (code) sick = code;
}

static void *serve(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&streams_lock);
    for (;;) {
        while (!stream->first && !stream->destroyed)
            pthread_cond_wait(&stream->wake, &streams_lock);
        struct op *op = stream->first;
        if (!op) break;
        pthread_mutex_unlock(&streams_lock);
        run(op);
        pthread_mutex_lock(&streams_lock);
        stream->first = op->next;
        if (!op->next) stream->last = 0;
        free(op);
        pthread_cond_broadcast(&something_done);
    }
    for (struct stream **link = &streams; *link; link = &(*link)->next)
        if (*link == stream) { *link = stream->next; break; }
    pthread_mutex_unlock(&streams_lock);
    free(stream);
    return 0;
}

/* With streams_lock held. */
static struct stream *new_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    pthread_cond_init(&stream->wake, 0);
    stream->next = streams;
    streams = stream;
    if (pthread_create(&thread, 0, serve, stream)) abort();
    pthread_detach(thread);
    return stream;
}

static int enqueue(void *handle, struct op op) {
    struct op *copy = malloc(sizeof op);
    *copy = op;
    copy->next = 0;
    pthread_mutex_lock(&streams_lock);
    if (!handle && !default_stream) default_stream = new_stream();
    struct stream *wanted = handle ? handle : default_stream, *stream = streams;
    while (stream && stream != wanted) stream = stream->next;
    if (stream && !stream->destroyed) {
        if (stream->last) stream->last->next = copy;
        else stream->first = copy;
        stream->last = copy;
        pthread_cond_signal(&stream->wake);
    } else {
        stream = 0;
        free(copy);
    }
    pthread_mutex_unlock(&streams_lock);
    return stream ? OK : INVALID_HANDLE;
}

static void wait_for_streams(void) {
    pthread_mutex_lock(&streams_lock);
    for (struct stream *stream = streams; stream;) {
        if (stream->first) {
            pthread_cond_wait(&something_done, &streams_lock);
            stream = streams;
        } else {
            stream = stream->next;
        }
    }
    pthread_mutex_unlock(&streams_lock);
}

/* Whether a copy that is queued or running touches the bytes. */
static bool in_flight(const char *start, size_t size) {
    bool found = false;
    pthread_mutex_lock(&streams_lock);
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct op *op = stream->first; op; op = op->next)
            found |= op->kind == COPY
                     && ((op->dst < start + size && start < op->dst + op->size)
                         || (op->src < start + size && start < op->src + op->size));
    pthread_mutex_unlock(&streams_lock);
    return found;
}

/* ---- the API: start, devices, contexts ---- */

int cuGetErrorName(int code, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) { *name = errors[i].name; return OK; }
    *name = 0;
    return INVALID_VALUE;
}

int cuGetErrorString(int code, const char **meaning) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) { *meaning = errors[i].meaning; return OK; }
    *meaning = 0;
    return INVALID_VALUE;
}

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    attach();
    int code = show_faults("cuInit");
    if (code) return code;
    if (!devices) return NO_DEVICE;
    started = true;
    return OK;
}

int cuDeviceGetCount(int *count) {
    ENTER(false);
    *count = devices;
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER(false);
    if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    char text[32];
    ENTER(false);
    if (device < 0 || device >= devices) return INVALID_DEVICE;
    snprintf(text, sizeof text, "fake-cuda-gpu-%02d", device);
    memcpy(uuid, text, 16);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(false);
    if (device < 0 || device >= devices) return INVALID_DEVICE;
    *context = (void *)(intptr_t)(device + 1);
    return OK;
}

int cuCtxPushCurrent_v2(void *context) {
    ENTER(false);
    int number = (int)(intptr_t)context;
    if (number < 1 || number > devices || depth == 16) return INVALID_CONTEXT;
    current[depth++] = number;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) { /* shows no faults: it could not be undone */
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(intptr_t)current[--depth];
    return OK;
}

int cuCtxSynchronize(void) {
    ENTER(true);
    wait_for_streams();
    return sick;
}

/* ---- device memory ---- */

struct local { struct local *next; char *base; size_t size; uint64_t id; int count; bool own; };
static pthread_mutex_t locals_lock = PTHREAD_MUTEX_INITIALIZER;
static struct local *locals;

static uint64_t used_bytes(int device) {
    uint64_t used = 0;
    for (int i = 0; i < shared->allocs; i++) {
        struct alloc *alloc = &shared->alloc[i];
        if (!alloc->freed && alloc->device == device && alive(alloc->owner)) used += alloc->size;
    }
    return used;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(true);
    lock();
    uint64_t used = used_bytes(current[depth - 1] - 1);
    unlock();
    *total_bytes = memory;
    *free_bytes = used < memory ? memory - used : 0;
    return OK;
}

static char *map_memory(uint64_t id, size_t size, bool create) {
    char path[4096];
    snprintf(path, sizeof path, "%s/mem-%lu", directory, id);
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
    if (fd < 0) return 0;
    char *base = MAP_FAILED;
    if (!create || !ftruncate(fd, size))
        base = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return base == MAP_FAILED ? 0 : base;
}

static void keep_local(char *base, size_t size, uint64_t id, bool own) {
    struct local *local = malloc(sizeof *local);
    *local = (struct local){locals, base, size, id, 1, own};
    locals = local;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    ENTER(true);
    if (!size) return INVALID_VALUE;
    int device = current[depth - 1] - 1;
    lock();
    if (shared->allocs == MAX_ALLOCS || used_bytes(device) + size > memory) {
        unlock();
        return OUT_OF_MEMORY;
    }
    uint64_t id = shared->allocs++;
    shared->alloc[id] = (struct alloc){id, size, self(), device, false, false};
    char *base = map_memory(id, size, true);
    shared->alloc[id].freed = !base;
    unlock();
    if (!base) return OUT_OF_MEMORY;
    pthread_mutex_lock(&locals_lock);
    keep_local(base, size, id, true);
    pthread_mutex_unlock(&locals_lock);
    *pointer = (uint64_t)(uintptr_t)base;
    return OK;
}

/* The link to what begins at, or contains, the address; with locals_lock held. */
static struct local **find_local(uint64_t address, bool exact) {
    struct local **link = &locals;
    for (; *link; link = &(*link)->next) {
        uint64_t base = (uint64_t)(uintptr_t)(*link)->base;
        if (exact ? address == base : address >= base && address < base + (*link)->size) break;
    }
    return link;
}

/* Unmap it once nothing in flight touches it; with locals_lock held. */
static void drop_local(struct local **link, const char *call) {
    struct local *local = *link;
    if (in_flight(local->base, local->size)) {
        violation("%s in pid %d of memory %lu with a copy in flight", call, getpid(), local->id);
        wait_for_streams();
    }
    munmap(local->base, local->size);
    *link = local->next;
    free(local);
}

int cuMemFree_v2(uint64_t pointer) {
    ENTER(true);
    pthread_mutex_lock(&locals_lock);
    struct local **link = find_local(pointer, true);
    if (!*link || !(*link)->own) {
        pthread_mutex_unlock(&locals_lock);
        return INVALID_VALUE;
    }
    uint64_t id = (*link)->id;
    lock();
    for (int i = 0; i < shared->mappings; i++) {
        struct mapping *mapping = &shared->mapping[i];
        if (mapping->count && mapping->id == id && alive(mapping->by))
            violation("pid %d freed memory %lu, which pid %d has open", getpid(), id,
                      mapping->by.pid);
    }
    shared->alloc[id].freed = true;
    unlock();
    char path[4096];
    snprintf(path, sizeof path, "%s/mem-%lu", directory, id);
    unlink(path);
    drop_local(link, __func__);
    pthread_mutex_unlock(&locals_lock);
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    ENTER(true);
    pthread_mutex_lock(&locals_lock);
    struct local *local = *find_local(pointer, false);
    if (local) {
        if (base) *base = (uint64_t)(uintptr_t)local->base;
        if (size) *size = local->size;
    }
    pthread_mutex_unlock(&locals_lock);
    return local ? OK : INVALID_VALUE;
}

/* ---- registered host memory, copies ---- */

int cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    int code = OK, slot = -1;
    ENTER(true);
    if (!size || flags & ~1u) return INVALID_VALUE;
    lock();
    for (int i = 0; i < shared->ranges; i++) {
        struct range *range = &shared->range[i];
        if (!range->size) slot = i;
        else if (range->by.pid != getpid()) continue;
        else if (address < range->address + range->size && range->address < address + size)
            code = ALREADY_REGISTERED;
    }
    if (slot < 0 && shared->ranges < MAX_RANGES) slot = shared->ranges++;
    if (slot < 0) code = OUT_OF_MEMORY;
    if (!code) shared->range[slot] = (struct range){self(), address, size};
    unlock();
    return code;
}

int cuMemHostUnregister(void *pointer) {
    uint64_t address = (uint64_t)(uintptr_t)pointer, size = 0;
    ENTER(true);
    lock();
    for (int i = 0; i < shared->ranges; i++) {
        struct range *range = &shared->range[i];
        if (range->size && range->by.pid == getpid() && range->address == address) {
            size = range->size;
            range->size = 0;
        }
    }
    unlock();
    if (!size) return NOT_REGISTERED;
    if (in_flight(pointer, size)) {
        violation("pid %d unregistered memory with a copy in flight", getpid());
        wait_for_streams();
    }
    return OK;
}

/* A copy must not leave the registered range, or the allocation, in which it begins. */
static bool leaves(uint64_t address, size_t size) {
    bool found = false;
    lock();
    for (int i = 0; i < shared->ranges; i++) {
        struct range *range = &shared->range[i];
        if (range->size && range->by.pid == getpid() && address >= range->address
            && address < range->address + range->size)
            found |= address + size > range->address + range->size;
    }
    unlock();
    pthread_mutex_lock(&locals_lock);
    struct local *local = *find_local(address, false);
    if (local) found |= address + size > (uint64_t)(uintptr_t)local->base + local->size;
    pthread_mutex_unlock(&locals_lock);
    return found;
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t size, void *stream) {
    ENTER(true);
    if (leaves(dst, size) || leaves(src, size)) return INVALID_VALUE;
    char *to = (char *)(uintptr_t)dst, *from = (char *)(uintptr_t)src;
    return enqueue(stream, (struct op){.kind = COPY, .dst = to, .src = from, .size = size});
}

/* ---- IPC of memory ---- */

struct handle { uint64_t magic, id, check; char rest[40]; };
enum { MEMORY_MAGIC = 0x6d656d, EVENT_MAGIC = 0x657674 };

static struct handle make_handle(uint64_t magic, uint64_t id) {
    struct handle handle = {magic, id, shared->secret ^ (id + 1) * magic, {0}};
    memset(handle.rest, 0xa5, sizeof handle.rest);
    return handle;
}

static bool genuine(struct handle handle, uint64_t magic) {
    struct handle made = make_handle(magic, handle.id);
    return !memcmp(&made, &handle, sizeof made);
}

int cuIpcGetMemHandle(struct handle *handle, uint64_t pointer) {
    ENTER(true);
    pthread_mutex_lock(&locals_lock);
    struct local *local = *find_local(pointer, false);
    uint64_t id = local ? local->id : 0;
    bool own = local && local->own;
    pthread_mutex_unlock(&locals_lock);
    if (!own) return INVALID_VALUE;
    shared->alloc[id].exported = true;
    *handle = make_handle(MEMORY_MAGIC, id);
    return OK;
}

/* Count a mapping of this process up or down; with the shared lock held. */
static void count_mapping(uint64_t id, int change) {
    struct mapping *unused = 0;
    for (int i = 0; i < shared->mappings; i++) {
        struct mapping *mapping = &shared->mapping[i];
        if (mapping->count && mapping->id == id && mapping->by.pid == getpid()) {
            mapping->count += change;
            return;
        }
        if (!mapping->count) unused = mapping;
    }
    if (!unused) {
        if (shared->mappings == MAX_MAPPINGS) abort();
        unused = &shared->mapping[shared->mappings++];
    }
    *unused = (struct mapping){id, self(), change};
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, struct handle handle, unsigned flags) {
    int code = OK;
    ENTER(true);
    if (flags & ~1u) return INVALID_VALUE;
    if (!genuine(handle, MEMORY_MAGIC) || handle.id >= MAX_ALLOCS) return INVALID_HANDLE;
    pthread_mutex_lock(&locals_lock);
    lock();
    struct alloc *alloc = &shared->alloc[handle.id];
    struct local *local = locals;
    while (local && (local->own || local->id != handle.id)) local = local->next;
    char *base = local ? local->base : 0;
    if (alloc->owner.pid == getpid()) code = INVALID_CONTEXT;
    else if (!alloc->exported || alloc->freed || !alive(alloc->owner)) code = INVALID_HANDLE;
    else if (alloc->device != current[depth - 1] - 1) code = INVALID_DEVICE;
    else if (local) local->count++;
    else if (!(base = map_memory(handle.id, alloc->size, false))) code = MAP_FAILED_;
    else keep_local(base, alloc->size, handle.id, false);
    if (!code) count_mapping(handle.id, 1);
    unlock();
    pthread_mutex_unlock(&locals_lock);
    *pointer = (uint64_t)(uintptr_t)base;
    return code;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    ENTER(true);
    pthread_mutex_lock(&locals_lock);
    struct local **link = find_local(pointer, true);
    bool ours = *link && !(*link)->own;
    if (ours) {
        uint64_t id = (*link)->id;
        if (!--(*link)->count) drop_local(link, __func__);
        lock();
        count_mapping(id, -1);
        unlock();
    }
    pthread_mutex_unlock(&locals_lock);
    return ours ? OK : INVALID_VALUE;
}

/* ---- events, the API of streams ---- */

struct event_object { uint64_t id; bool interprocess; };

int cuEventCreate(struct event_object **event, unsigned flags) {
    ENTER(true);
    if (flags & ~7u || (flags & 4 && !(flags & 2))) return INVALID_VALUE;
    lock();
    if (shared->events == MAX_EVENTS) {
        unlock();
        return OUT_OF_MEMORY;
    }
    uint64_t id = shared->events++;
    shared->event[id] = (struct event){id, 0, 0, self(), false};
    unlock();
    *event = malloc(sizeof **event);
    **event = (struct event_object){id, flags & 4};
    return OK;
}

int cuEventRecord(struct event_object *event, void *stream) {
    ENTER(true);
    lock();
    uint64_t ticket = ++shared->event[event->id].recorded;
    unlock();
    return enqueue(stream, (struct op){.kind = RECORD, .event = event->id, .ticket = ticket});
}

static bool event_done(const struct event_object *event) {
    lock();
    bool done = shared->event[event->id].completed >= shared->event[event->id].recorded;
    unlock();
    return done;
}

int cuEventQuery(struct event_object *event) {
    ENTER(true);
    return event_done(event) ? OK : NOT_READY;
}

int cuEventSynchronize(struct event_object *event) {
    ENTER(true);
    while (!event_done(event) && !sick) nap(50);
    return sick;
}

int cuEventDestroy_v2(struct event_object *event) {
    ENTER(true);
    lock();
    struct event *state = &shared->event[event->id];
    if (state->owner.pid == getpid()) state->destroyed = true;
    unlock();
    free(event);
    return OK;
}

int cuIpcGetEventHandle(struct handle *handle, struct event_object *event) {
    ENTER(true);
    if (!event->interprocess) return INVALID_HANDLE;
    *handle = make_handle(EVENT_MAGIC, event->id);
    return OK;
}

int cuIpcOpenEventHandle(struct event_object **event, struct handle handle) {
    ENTER(true);
    if (!genuine(handle, EVENT_MAGIC) || handle.id >= MAX_EVENTS) return INVALID_HANDLE;
    lock();
    struct event state = shared->event[handle.id];
    unlock();
    if (state.owner.pid == getpid()) return INVALID_CONTEXT;
    if (state.destroyed || !alive(state.owner)) return INVALID_HANDLE;
    *event = malloc(sizeof **event);
    **event = (struct event_object){handle.id, true};
    return OK;
}

int cuStreamCreate(void **stream, unsigned flags) {
    ENTER(true);
    if (flags & ~1u) return INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    *stream = new_stream();
    pthread_mutex_unlock(&streams_lock);
    return OK;
}

int cuStreamWaitEvent(void *stream, struct event_object *event, unsigned flags) {
    ENTER(true);
    if (flags) return INVALID_VALUE;
    lock();
    uint64_t ticket = shared->event[event->id].recorded;
    unlock();
    return enqueue(stream, (struct op){.kind = WAIT, .event = event->id, .ticket = ticket});
}

int cuStreamDestroy_v2(void *handle) {
    ENTER(true);
    pthread_mutex_lock(&streams_lock);
    struct stream *stream = streams;
    while (stream && stream != handle) stream = stream->next;
    if (stream) {
        stream->destroyed = true;
        pthread_cond_signal(&stream->wake);
    }
    pthread_mutex_unlock(&streams_lock);
    return stream ? OK : INVALID_HANDLE;
}

/* ---- for tests ---- */

/* What live processes hold, a line each: memory, open or range; pid; number; bytes. */
int fakeCudaReport(const char *where, char *text, size_t size) {
    size_t length = 0;
    if (!shared) attach_at(where);
    lock();
    text[0] = 0;
    for (int i = 0; i < shared->allocs; i++) {
        struct alloc *alloc = &shared->alloc[i];
        if (!alloc->freed && alive(alloc->owner) && length < size)
            length += snprintf(text + length, size - length, "memory %d %lu %lu\n",
                               alloc->owner.pid, alloc->id, alloc->size);
    }
    for (int i = 0; i < shared->mappings; i++) {
        struct mapping *mapping = &shared->mapping[i];
        if (mapping->count && alive(mapping->by) && length < size)
            length += snprintf(text + length, size - length, "open %d %lu %d\n", mapping->by.pid,
                               mapping->id, mapping->count);
    }
    for (int i = 0; i < shared->ranges; i++) {
        struct range *range = &shared->range[i];
        if (range->size && alive(range->by) && length < size)
            length += snprintf(text + length, size - length, "range %d %lu %lu\n", range->by.pid,
                               range->address, range->size);
    }
    unlock();
    return length < size ? OK : OUT_OF_MEMORY;
}
