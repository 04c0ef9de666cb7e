/* Reserved address space, and what lies in it: memory that grows without moving. */
#include <stdlib.h>

#include "registry.h"

int fga_reserve(int backend, int device, uint64_t nbytes, void **ptr, uint64_t *id) {
    const fga_backend *found;
    int status = fga_check_device(backend, device, &found);
    if (status != FGA_OK)
        return status;
    if (nbytes == 0 || nbytes % FGA_PIECE != 0)
        return fga_fail(FGA_INVALID, "%s: address space of %llu bytes, expected a multiple of %llu", found->name,
                        (unsigned long long)nbytes, (unsigned long long)FGA_PIECE);
    if (found->reserve == NULL)
        return fga_fail(FGA_UNAVAILABLE, "%s: memory can't be put at given addresses here", found->name);
    fga_space *space = calloc(1, sizeof *space);
    if (space == NULL)
        return fga_fail(FGA_MEMORY, "%s: no memory for the record of a reservation", found->name);
    space->nbytes = nbytes;
    space->backend = backend;
    space->device = device;
    space->references = 1;
    space->owned = true;
    status = found->reserve(device, nbytes, &space->ptr);
    if (status != FGA_OK) {
        free(space);
        return status;
    }
    pthread_mutex_lock(&fga_lock);
    space->id = fga_registry.next_id++;
    space->next = fga_registry.spaces;
    fga_registry.spaces = space;
    *ptr = space->ptr;
    *id = space->id;
    pthread_mutex_unlock(&fga_lock);
    return FGA_OK;
}

static bool meets(uintptr_t start, uint64_t nbytes, const void *other, uint64_t other_bytes) {
    uintptr_t from = (uintptr_t)other;
    return start < from + other_bytes && from < start + nbytes;
}

/* The lock is held. */
static bool is_taken(const fga_space *space, uintptr_t start, uint64_t nbytes) {
    for (const fga_memory *memory = fga_registry.memories; memory != NULL; memory = memory->next)
        if (memory->space == space && meets(start, nbytes, memory->ptr, memory->held))
            return true;
    for (const fga_mapping *mapping = fga_registry.mappings; mapping != NULL; mapping = mapping->next)
        if (mapping->space == space && meets(start, nbytes, mapping->ptr, mapping->held))
            return true;
    return false;
}

static fga_space *find_space(int backend, int device, uintptr_t start, uint64_t nbytes) {
    for (fga_space *space = fga_registry.spaces; space != NULL; space = space->next) {
        uintptr_t base = (uintptr_t)space->ptr;
        if (space->owned && space->backend == backend && space->device == device && start >= base &&
            start - base <= space->nbytes && nbytes <= space->nbytes - (start - base))
            return space;
    }
    return NULL;
}

fga_space *fga_take_place(int backend, int device, void *at, uint64_t nbytes) {
    uintptr_t start = (uintptr_t)at;
    const char *problem = NULL;
    pthread_mutex_lock(&fga_lock);
    fga_space *space = find_space(backend, device, start, nbytes);
    if (space == NULL)
        problem = "this process has not reserved them for that device";
    else if ((start - (uintptr_t)space->ptr) % FGA_PIECE != 0 || nbytes % FGA_PIECE != 0)
        problem = "they don't start at a multiple of 2 MiB from the start of the reserved space, or end at none";
    else if (is_taken(space, start, nbytes))
        problem = "other memory lies there";
    else
        space->references++;
    pthread_mutex_unlock(&fga_lock);
    if (problem == NULL)
        return space;
    fga_fail(FGA_INVALID, "memory can't be put at the %llu bytes from %p on: %s", (unsigned long long)nbytes, at, problem);
    return NULL;
}

/* The lock is held, and is given back here. */
static int drop(fga_space *space) {
    if (--space->references != 0) {
        pthread_mutex_unlock(&fga_lock);
        return FGA_OK;
    }
    fga_space **link = &fga_registry.spaces;
    while (*link != space)
        link = &(*link)->next;
    *link = space->next;
    pthread_mutex_unlock(&fga_lock);
    int status = fga_find_backend(space->backend)->unreserve(space->ptr, space->nbytes, space->device);
    free(space);
    return status;
}

int fga_leave_place(fga_space *space) {
    if (space == NULL)
        return FGA_OK;
    pthread_mutex_lock(&fga_lock);
    return drop(space);
}

int fga_unreserve(uint64_t id) {
    pthread_mutex_lock(&fga_lock);
    fga_space *space = fga_registry.spaces;
    while (space != NULL && (space->id != id || !space->owned))
        space = space->next;
    if (space == NULL) {
        pthread_mutex_unlock(&fga_lock);
        return fga_fail(FGA_INVALID, "number %llu is not address space that this process has reserved",
                        (unsigned long long)id);
    }
    space->owned = false;
    return drop(space);
}
