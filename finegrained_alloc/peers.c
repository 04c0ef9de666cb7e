/* Exporting to peers and opening what they exported. */
#include <stdlib.h>
#include <string.h>

#include "handle.h"
#include "registry.h"

/* The lock is held; NULL with the error set when ptr is no base. */
static fga_memory *find_base(const void *ptr) {
    uintptr_t address = (uintptr_t)ptr;
    for (fga_memory *memory = fga_registry.memories; memory != NULL; memory = memory->next) {
        uintptr_t base = (uintptr_t)memory->ptr;
        if (!memory->owned || address < base || address - base >= memory->held)
            continue;
        if (address == base)
            return memory;
        fga_fail(FGA_INVALID, "%p is %llu bytes inside the allocation at %p: only a base can be exported", ptr,
                 (unsigned long long)(address - base), memory->ptr);
        return NULL;
    }
    fga_fail(FGA_INVALID, "%p is not a live allocation of this process", ptr);
    return NULL;
}

static int identify_self(void) {
    return fga_registry.self.pid != 0 ? FGA_OK : fga_make_identity(&fga_registry.self);
}

int fga_export(const void *ptr, void *handle, uint64_t handle_bytes) {
    uint8_t payload[FGA_PAYLOAD_BYTES] = {0};
    fga_handle packed;
    if (handle_bytes != sizeof packed)
        return fga_fail(FGA_INVALID, "room for a handle of %llu bytes, expected %zu", (unsigned long long)handle_bytes,
                        sizeof packed);
    pthread_mutex_lock(&fga_lock);
    fga_memory *memory = find_base(ptr);
    int status = memory == NULL ? FGA_INVALID : identify_self();
    /* Under the lock, so that the memory cannot be freed meanwhile; no export call waits for a GPU. */
    if (status == FGA_OK)
        status = fga_find_backend(memory->backend)->export_payload(memory, payload);
    if (status == FGA_OK) {
        fga_pack_handle(&packed, memory, &fga_registry.self, payload);
        memcpy(handle, &packed, sizeof packed);
    }
    pthread_mutex_unlock(&fga_lock);
    return status;
}

/* Sets *own, with a reference taken, when the handle is of this process. */
static int find_own(const fga_handle *handle, const fga_identity *owner, fga_memory **own) {
    pthread_mutex_lock(&fga_lock);
    int status = identify_self();
    if (status == FGA_OK && memcmp(owner->token, fga_registry.self.token, sizeof fga_registry.self.token) == 0) {
        *own = fga_find_memory(handle->id);
        if (*own != NULL)
            (*own)->references++;
        else
            status = fga_fail(FGA_STALE, "the handle's allocation (number %llu of this process) was freed",
                              (unsigned long long)handle->id);
    }
    pthread_mutex_unlock(&fga_lock);
    return status;
}

static int open_own(fga_mapping *opened) {
    opened->ptr = opened->own->ptr;
    opened->held = opened->own->held;
    if (opened->device == opened->own->device)
        return FGA_OK;
    const fga_backend *backend = fga_find_backend(opened->backend);
    return opened->own->space != NULL ? backend->admit(opened->own, opened->device)
                                      : backend->enable_peer_access(opened->device, opened->own->device);
}

static int open_foreign(fga_mapping *opened, const fga_handle *handle, const fga_identity *owner, void *at) {
    const fga_backend *backend = fga_find_backend(opened->backend);
    opened->held = handle->held;
    if (fga_is_dead(owner))
        return fga_fail(FGA_STALE, "%s: the handle's owner, process %u, is not running any more", backend->name,
                        owner->pid);
    if (at != NULL) {
        opened->ptr = at;
        opened->space = fga_take_place(opened->backend, opened->device, at, handle->held);
        if (opened->space == NULL)
            return FGA_INVALID;
    }
    return backend->open(handle->payload, owner, handle->held, opened->device, at != NULL, &opened->ptr);
}

static int drop_own(fga_memory *own) {
    pthread_mutex_lock(&fga_lock);
    bool last = fga_drop_reference(own);
    pthread_mutex_unlock(&fga_lock);
    return last ? fga_release(own) : FGA_OK;
}

static void record(fga_mapping *opened) {
    pthread_mutex_lock(&fga_lock);
    opened->id = fga_registry.next_id++;
    opened->next = fga_registry.mappings;
    fga_registry.mappings = opened;
    fga_registry.stats.mappings++;
    fga_registry.stats.total_mappings++;
    pthread_mutex_unlock(&fga_lock);
}

int fga_open(const void *bytes, uint64_t count, int device, void *at, void **ptr, uint64_t *nbytes, int *backend,
             uint64_t *id) {
    fga_handle handle;
    fga_identity owner;
    const fga_backend *found;
    int status = fga_unpack_handle(&handle, &owner, bytes, count);
    if (status == FGA_OK)
        status = fga_check_device((int)handle.backend, device, &found);
    if (status != FGA_OK)
        return status;
    fga_mapping *opened = calloc(1, sizeof *opened);
    if (opened == NULL)
        return fga_fail(FGA_MEMORY, "%s: no memory for the record of a mapping", found->name);
    opened->backend = (int)handle.backend;
    opened->device = device;
    status = find_own(&handle, &owner, &opened->own);
    if (status == FGA_OK)
        status = opened->own != NULL ? open_own(opened) : open_foreign(opened, &handle, &owner, at);
    if (status != FGA_OK) {
        if (opened->own != NULL)
            drop_own(opened->own);
        fga_leave_place(opened->space);
        free(opened);
        return status;
    }
    record(opened);
    *ptr = opened->ptr;
    *nbytes = handle.nbytes;
    *backend = opened->backend;
    *id = opened->id;
    return FGA_OK;
}

int fga_close(uint64_t id) {
    pthread_mutex_lock(&fga_lock);
    fga_mapping **link = &fga_registry.mappings;
    while (*link != NULL && (*link)->id != id)
        link = &(*link)->next;
    fga_mapping *closed = *link;
    if (closed != NULL) {
        *link = closed->next;
        fga_registry.stats.mappings--;
    }
    pthread_mutex_unlock(&fga_lock);
    if (closed == NULL)
        return fga_fail(FGA_INVALID, "number %llu is not an open mapping of this process", (unsigned long long)id);
    int status = closed->own != NULL ? drop_own(closed->own)
                                     : fga_find_backend(closed->backend)
                                           ->close(closed->ptr, closed->held, closed->device, closed->space != NULL);
    int left = fga_leave_place(closed->space);
    free(closed);
    return status == FGA_OK ? left : status;
}

