/* The registry of what this process has allocated, and the public functions over it and over the backends. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "handle.h"
#include "registry.h"

static const fga_backend *const backends[FGA_NUM_BACKENDS] = {&fga_host_backend, &fga_cuda_backend, &fga_hip_backend};

pthread_mutex_t fga_lock = PTHREAD_MUTEX_INITIALIZER;
fga_registry_state fga_registry = {.next_id = 1};

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

int fga_check_device(int backend, int device, const fga_backend **found) {
    int count = 0;
    *found = fga_find_backend(backend);
    if (*found == NULL)
        return FGA_INVALID;
    int status = (*found)->device_count(&count);
    if (status == FGA_OK && (device < 0 || device >= count))
        return fga_fail(FGA_INVALID, "%s: device %d, expected 0 to %d", (*found)->name, device, count - 1);
    return status;
}

/* A child of fork owns nothing of its parent's, the descriptors of its memory included. */
static void before_fork(void) { pthread_mutex_lock(&fga_lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&fga_lock); }

static void after_fork_in_child(void) {
    for (fga_memory *memory = fga_registry.memories; memory != NULL; memory = memory->next)
        if (backends[memory->backend]->seal != NULL)
            backends[memory->backend]->seal(memory);
    fga_registry.memories = NULL;
    fga_registry.mappings = NULL;
    fga_registry.spaces = NULL;
    fga_forget_server();
    memset(&fga_registry.stats, 0, sizeof fga_registry.stats);
    memset(&fga_registry.self, 0, sizeof fga_registry.self);
    pthread_mutex_unlock(&fga_lock);
}

__attribute__((constructor)) static void at_load(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

fga_memory *fga_find_memory(uint64_t id) {
    fga_memory *memory = fga_registry.memories;
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

int fga_alloc(int backend, int device, uint64_t nbytes, void *at, void **ptr, uint64_t *id) {
    const fga_backend *found;
    int status = fga_check_device(backend, device, &found);
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
    memory->descriptor = -1;
    if (at != NULL) {
        memory->ptr = at;
        memory->space = fga_take_place(backend, device, at, nbytes);
        status = memory->space == NULL ? FGA_INVALID : FGA_OK;
    }
    if (status == FGA_OK)
        status = found->alloc(memory);
    if (status != FGA_OK) {
        fga_leave_place(memory->space);
        free(memory);
        return status;
    }
    pthread_mutex_lock(&fga_lock);
    memory->id = fga_registry.next_id++;
    memory->next = fga_registry.memories;
    fga_registry.memories = memory;
    fga_registry.stats.allocations++;
    fga_registry.stats.total_allocations++;
    fga_registry.stats.bytes += memory->held;
    *ptr = memory->ptr;
    *id = memory->id;
    pthread_mutex_unlock(&fga_lock);
    return FGA_OK;
}

bool fga_drop_reference(fga_memory *memory) {
    if (--memory->references != 0)
        return false;
    fga_memory **link = &fga_registry.memories;
    while (*link != memory)
        link = &(*link)->next;
    *link = memory->next;
    fga_registry.stats.allocations--;
    fga_registry.stats.bytes -= memory->held;
    return true;
}

int fga_release(fga_memory *memory) {
    int status = backends[memory->backend]->release(memory);
    int left = fga_leave_place(memory->space);
    free(memory);
    return status == FGA_OK ? left : status;
}

/* The lock is held, and is given back here. */
static int free_locked(fga_memory *memory, const char *what) {
    if (memory == NULL) {
        pthread_mutex_unlock(&fga_lock);
        return fga_fail(FGA_INVALID, "%s is not a live allocation of this process (freed before, or made by its parent?)",
                        what);
    }
    memory->owned = false;
    bool last = fga_drop_reference(memory);
    int status = FGA_OK;
    /* This process still has it open: let no new peer in, all the same. */
    if (!last && backends[memory->backend]->seal != NULL)
        status = backends[memory->backend]->seal(memory);
    pthread_mutex_unlock(&fga_lock);
    return last ? fga_release(memory) : status;
}

int fga_free(uint64_t id) {
    char what[32];
    snprintf(what, sizeof what, "number %llu", (unsigned long long)id);
    pthread_mutex_lock(&fga_lock);
    return free_locked(fga_find_memory(id), what);
}

int fga_free_pointer(const void *ptr) {
    char what[32];
    snprintf(what, sizeof what, "%p", ptr);
    pthread_mutex_lock(&fga_lock);
    fga_memory *memory = fga_registry.memories;
    while (memory != NULL && (memory->ptr != ptr || !memory->owned))
        memory = memory->next;
    return free_locked(memory, what);
}

int fga_seal(uint64_t id) {
    int status = FGA_OK;
    pthread_mutex_lock(&fga_lock);
    fga_memory *memory = fga_find_memory(id);
    if (memory == NULL)
        status = fga_fail(FGA_INVALID, "number %llu is not a live allocation of this process", (unsigned long long)id);
    else if (backends[memory->backend]->seal != NULL)
        status = backends[memory->backend]->seal(memory);
    pthread_mutex_unlock(&fga_lock);
    return status;
}

static int check_pair(int backend, int device, int peer, const fga_backend **found) {
    int status = fga_check_device(backend, device, found);
    return status == FGA_OK ? fga_check_device(backend, peer, found) : status;
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

int fga_copy_rows(int backend, int device, void *to, uint64_t to_pitch, const void *from, uint64_t from_pitch,
                  uint64_t width, uint64_t rows, void *stream) {
    const fga_backend *found;
    int status = fga_check_device(backend, device, &found);
    if (status != FGA_OK || width == 0 || rows == 0)
        return status;
    if (to == NULL || from == NULL || to_pitch < width || from_pitch < width || to_pitch > FGA_MAX_PITCH ||
        from_pitch > FGA_MAX_PITCH)
        return fga_fail(FGA_INVALID, "%s: rows of %llu bytes, %llu apart at %p, to %llu apart at %p; expected pitches from "
                        "the width to %d", found->name, (unsigned long long)width, (unsigned long long)from_pitch, from,
                        (unsigned long long)to_pitch, to, FGA_MAX_PITCH);
    fga_copy copy = {to, from, to_pitch, from_pitch, width, rows, stream};
    /* Rows that lie together are one. */
    if (to_pitch == width && from_pitch == width && rows <= FGA_MAX_PITCH / width) {
        copy.width = copy.to_pitch = copy.from_pitch = width * rows;
        copy.rows = 1;
    }
    return found->copy_rows(device, &copy);
}

void fga_get_stats(fga_stats *result) {
    pthread_mutex_lock(&fga_lock);
    *result = fga_registry.stats;
    pthread_mutex_unlock(&fga_lock);
}
