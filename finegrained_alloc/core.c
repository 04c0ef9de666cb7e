/* The registry of what this process has allocated and opened, and the public functions over the backends.
 *
 * The lock guards the registry only: a backend call may wait for a GPU (freeing does), and another thread's rank must be able
 * to go on meanwhile. seal is the exception, one short system call.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "handle.h"

typedef struct mapping {
    struct mapping *next;
    uint64_t id;
    void *ptr;
    uint64_t held;
    int backend;
    int device;
    fga_memory *own; /* the allocation, where it is this process's; such a mapping maps nothing */
} mapping;

static const fga_backend *const backends[FGA_NUM_BACKENDS] = {&fga_host_backend, &fga_cuda_backend, &fga_hip_backend};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static fga_memory *memories;
static mapping *mappings;
static fga_stats stats;
static uint64_t next_id = 1;
static fga_identity self;

static _Thread_local char last_error[768];

const char *fga_last_error(void) { return last_error; }

uint32_t fga_abi_version(void) { return FGA_ABI_VERSION; }

uint64_t fga_handle_size(void) { return sizeof(fga_handle); }

int fga_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

uint64_t fga_round_up(uint64_t nbytes, uint64_t unit) {
    return nbytes > UINT64_MAX - (unit - 1) ? 0 : (nbytes + unit - 1) & ~(unit - 1);
}

const fga_backend *fga_find_backend(int backend) {
    if (backend < 0 || backend >= FGA_NUM_BACKENDS) {
        fga_fail(FGA_INVALID, "unknown backend %d, expected 0 (host), 1 (cuda) or 2 (hip)", backend);
        return NULL;
    }
    return backends[backend];
}

static int check_device(int backend, int device, const fga_backend **found) {
    int count = 0;
    *found = fga_find_backend(backend);
    if (*found == NULL)
        return FGA_INVALID;
    int status = (*found)->device_count(&count);
    if (status == FGA_OK && (device < 0 || device >= count))
        return fga_fail(FGA_INVALID, "%s: device %d, expected 0 to %d", (*found)->name, device, count - 1);
    return status;
}

/* A child of fork owns nothing of its parent's: were it to free a file, the parent's peers could not open it. */
static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

static void after_fork_in_child(void) {
    memories = NULL;
    mappings = NULL;
    memset(&stats, 0, sizeof stats);
    memset(&self, 0, sizeof self);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void at_load(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* A process that ends without freeing leaves no file behind. GPU memory goes with the process by itself. */
__attribute__((destructor)) static void at_exit(void) {
    pthread_mutex_lock(&lock);
    for (fga_memory *memory = memories; memory != NULL; memory = memory->next)
        if (backends[memory->backend]->seal != NULL)
            backends[memory->backend]->seal(memory);
    pthread_mutex_unlock(&lock);
}

static fga_memory *find_memory(uint64_t id) {
    fga_memory *memory = memories;
    while (memory != NULL && (memory->id != id || !memory->owned))
        memory = memory->next;
    return memory;
}

int fga_available(int backend, char *text, uint64_t text_bytes) {
    const fga_backend *found = fga_find_backend(backend);
    return found == NULL ? FGA_INVALID : found->available(text, text_bytes);
}

int fga_device_count(int backend, int *count) {
    const fga_backend *found = fga_find_backend(backend);
    return found == NULL ? FGA_INVALID : found->device_count(count);
}

int fga_alloc(int backend, int device, uint64_t nbytes, void **ptr, uint64_t *id) {
    const fga_backend *found;
    int status = check_device(backend, device, &found);
    if (status != FGA_OK)
        return status;
    if (nbytes == 0)
        return fga_fail(FGA_INVALID, "%s: 0 bytes, expected at least 1", found->name);
    fga_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return fga_fail(FGA_MEMORY, "%s: no memory for the record of an allocation", found->name);
    memory->nbytes = nbytes;
    memory->backend = backend;
    memory->device = device;
    memory->references = 1;
    memory->owned = true;
    status = found->alloc(memory);
    if (status != FGA_OK) {
        free(memory);
        return status;
    }
    pthread_mutex_lock(&lock);
    memory->id = next_id++;
    memory->next = memories;
    memories = memory;
    stats.allocations++;
    stats.total_allocations++;
    stats.bytes += memory->held;
    *ptr = memory->ptr;
    *id = memory->id;
    pthread_mutex_unlock(&lock);
    return FGA_OK;
}

/* Gives one reference back; the last one takes the record out of the registry and returns true. The lock is held. */
static bool drop_reference(fga_memory *memory) {
    if (--memory->references != 0)
        return false;
    fga_memory **link = &memories;
    while (*link != memory)
        link = &(*link)->next;
    *link = memory->next;
    stats.allocations--;
    stats.bytes -= memory->held;
    return true;
}

static int release(fga_memory *memory) {
    int status = backends[memory->backend]->release(memory);
    free(memory);
    return status;
}

/* Unlocks. */
static int free_locked(fga_memory *memory, const char *what) {
    if (memory == NULL) {
        pthread_mutex_unlock(&lock);
        return fga_fail(FGA_INVALID, "%s is not a live allocation of this process (freed before, or made by its parent?)",
                        what);
    }
    memory->owned = false;
    bool last = drop_reference(memory);
    pthread_mutex_unlock(&lock);
    return last ? release(memory) : FGA_OK;
}

int fga_free(uint64_t id) {
    char what[32];
    snprintf(what, sizeof what, "number %llu", (unsigned long long)id);
    pthread_mutex_lock(&lock);
    return free_locked(find_memory(id), what);
}

int fga_free_pointer(const void *ptr) {
    char what[32];
    snprintf(what, sizeof what, "%p", ptr);
    pthread_mutex_lock(&lock);
    fga_memory *memory = memories;
    while (memory != NULL && (memory->ptr != ptr || !memory->owned))
        memory = memory->next;
    return free_locked(memory, what);
}

int fga_seal(uint64_t id) {
    int status = FGA_OK;
    pthread_mutex_lock(&lock);
    fga_memory *memory = find_memory(id);
    if (memory == NULL)
        status = fga_fail(FGA_INVALID, "number %llu is not a live allocation of this process", (unsigned long long)id);
    else if (backends[memory->backend]->seal != NULL)
        status = backends[memory->backend]->seal(memory);
    pthread_mutex_unlock(&lock);
    return status;
}

static int refuse_export(const void *ptr, const fga_memory *inside) {
    if (inside == NULL)
        return fga_fail(FGA_INVALID, "%p is not a live allocation of this process", ptr);
    return fga_fail(FGA_INVALID, "%p is %llu bytes inside the allocation at %p: only a base can be exported", ptr,
                    (unsigned long long)((const char *)ptr - (const char *)inside->ptr), inside->ptr);
}

/* The lock is held; NULL with the error set when ptr is no base. */
static fga_memory *find_base(const void *ptr) {
    const fga_memory *inside = NULL;
    for (fga_memory *memory = memories; memory != NULL; memory = memory->next) {
        if (!memory->owned)
            continue;
        if (memory->ptr == ptr)
            return memory;
        if ((const char *)ptr > (const char *)memory->ptr && (const char *)ptr < (const char *)memory->ptr + memory->held)
            inside = memory;
    }
    refuse_export(ptr, inside);
    return NULL;
}

static int identify_self(void) {
    return self.pid != 0 ? FGA_OK : fga_make_identity(&self);
}

int fga_export(const void *ptr, void *handle, uint64_t handle_bytes) {
    uint8_t payload[FGA_PAYLOAD_BYTES] = {0};
    fga_handle packed;
    if (handle_bytes != sizeof packed)
        return fga_fail(FGA_INVALID, "room for a handle of %llu bytes, expected %zu", (unsigned long long)handle_bytes,
                        sizeof packed);
    pthread_mutex_lock(&lock);
    fga_memory *memory = find_base(ptr);
    int status = memory == NULL ? FGA_INVALID : identify_self();
    /* Under the lock, so that the memory cannot be freed meanwhile; no export call waits for a GPU. */
    if (status == FGA_OK)
        status = backends[memory->backend]->export_payload(memory, payload);
    if (status == FGA_OK) {
        fga_pack_handle(&packed, memory, &self, payload);
        memcpy(handle, &packed, sizeof packed);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* Sets *own, with a reference taken, when the handle is of this process. */
static int find_own(const fga_handle *handle, const fga_identity *owner, fga_memory **own) {
    pthread_mutex_lock(&lock);
    int status = identify_self();
    if (status == FGA_OK && memcmp(owner->token, self.token, sizeof self.token) == 0) {
        *own = find_memory(handle->id);
        if (*own != NULL)
            (*own)->references++;
        else
            status = fga_fail(FGA_STALE, "the handle's allocation (number %llu of this process) was freed",
                              (unsigned long long)handle->id);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static int open_own(mapping *opened) {
    opened->ptr = opened->own->ptr;
    opened->held = opened->own->held;
    if (opened->device == opened->own->device)
        return FGA_OK;
    return backends[opened->backend]->enable_peer_access(opened->device, opened->own->device);
}

static int open_foreign(mapping *opened, const fga_handle *handle, const fga_identity *owner) {
    const fga_backend *backend = backends[opened->backend];
    opened->held = handle->held;
    if (fga_is_dead(owner)) {
        if (backend->discard != NULL)
            backend->discard(handle->payload);
        return fga_fail(FGA_STALE, "%s: the handle's owner, process %u, is not running any more", backend->name,
                        owner->pid);
    }
    return backend->open(handle->payload, handle->held, opened->device, &opened->ptr);
}

static int drop_own(fga_memory *own) {
    pthread_mutex_lock(&lock);
    bool last = drop_reference(own);
    pthread_mutex_unlock(&lock);
    return last ? release(own) : FGA_OK;
}

int fga_open(const void *bytes, uint64_t count, int device, void **ptr, uint64_t *nbytes, int *backend, uint64_t *id) {
    fga_handle handle;
    fga_identity owner;
    const fga_backend *found;
    fga_memory *own = NULL;
    int status = fga_unpack_handle(&handle, &owner, bytes, count);
    if (status == FGA_OK)
        status = check_device((int)handle.backend, device, &found);
    if (status == FGA_OK)
        status = find_own(&handle, &owner, &own);
    if (status != FGA_OK)
        return status;
    mapping *opened = calloc(1, sizeof *opened);
    if (opened == NULL) {
        status = fga_fail(FGA_MEMORY, "no memory for the record of a mapping");
    } else {
        opened->backend = (int)handle.backend;
        opened->device = device;
        opened->own = own;
        status = own != NULL ? open_own(opened) : open_foreign(opened, &handle, &owner);
    }
    if (status != FGA_OK) {
        if (own != NULL)
            drop_own(own);
        free(opened);
        return status;
    }
    pthread_mutex_lock(&lock);
    opened->id = next_id++;
    opened->next = mappings;
    mappings = opened;
    stats.mappings++;
    stats.total_mappings++;
    *ptr = opened->ptr;
    *nbytes = handle.nbytes;
    *backend = opened->backend;
    *id = opened->id;
    pthread_mutex_unlock(&lock);
    return FGA_OK;
}

int fga_close(uint64_t id) {
    pthread_mutex_lock(&lock);
    mapping **link = &mappings;
    while (*link != NULL && (*link)->id != id)
        link = &(*link)->next;
    mapping *closed = *link;
    if (closed != NULL) {
        *link = closed->next;
        stats.mappings--;
    }
    pthread_mutex_unlock(&lock);
    if (closed == NULL)
        return fga_fail(FGA_INVALID, "number %llu is not an open mapping of this process", (unsigned long long)id);
    int status = closed->own != NULL ? drop_own(closed->own)
                                     : backends[closed->backend]->close(closed->ptr, closed->held, closed->device);
    free(closed);
    return status;
}

static int check_pair(int backend, int device, int peer, const fga_backend **found) {
    int status = check_device(backend, device, found);
    return status == FGA_OK ? check_device(backend, peer, found) : status;
}

int fga_can_access_peer(int backend, int device, int peer, int *yes) {
    const fga_backend *found;
    int status = check_pair(backend, device, peer, &found);
    *yes = 1;
    return status != FGA_OK || device == peer ? status : found->can_access_peer(device, peer, yes);
}

int fga_enable_peer_access(int backend, int device, int peer) {
    const fga_backend *found;
    int status = check_pair(backend, device, peer, &found);
    return status != FGA_OK || device == peer ? status : found->enable_peer_access(device, peer);
}

void fga_get_stats(fga_stats *result) {
    pthread_mutex_lock(&lock);
    *result = stats;
    pthread_mutex_unlock(&lock);
}
