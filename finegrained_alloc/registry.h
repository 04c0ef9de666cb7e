/* What this process has allocated and opened, as core.c and peers.c share it. */
#ifndef FGA_REGISTRY_H
#define FGA_REGISTRY_H

#include <pthread.h>

#include "internal.h"

typedef struct fga_mapping {
    struct fga_mapping *next;
    uint64_t id;
    void *ptr;
    fga_space *space; /* NULL: it lies where the backend put it */
    uint64_t held;
    int backend;
    int device;
    fga_memory *own; /* the allocation, where it is this process's; such a mapping maps nothing */
} fga_mapping;

typedef struct {
    fga_memory *memories;
    fga_mapping *mappings;
    fga_space *spaces;
    fga_stats stats;
    uint64_t next_id; /* of allocations, mappings and spaces alike */
    fga_identity self; /* pid 0 until first needed */
} fga_registry_state;

/* It guards the registry only: a backend call may wait for a GPU (freeing does), and another thread's rank must be able to
 * go on meanwhile. Exporting and sealing, which are short, are the exceptions. */
extern pthread_mutex_t fga_lock;
extern fga_registry_state fga_registry;

/* The live allocation, or NULL. The lock is held. */
fga_memory *fga_find_memory(uint64_t id);

/* Gives one reference back; the last one takes the record out of the registry and returns true. The lock is held. */
bool fga_drop_reference(fga_memory *memory);

/* Frees memory and record after the last reference. The lock is not held. */
int fga_release(fga_memory *memory);

/* The space that has all of [at, at + nbytes), with a reference taken: nothing lies there. NULL with the error set. */
fga_space *fga_take_place(int backend, int device, void *at, uint64_t nbytes);

/* Gives the reference back; NULL is allowed. The lock is not held. */
int fga_leave_place(fga_space *space);

/* The backend, once it is known to be there and to have the device. */
int fga_check_device(int backend, int device, const fga_backend **found);

#endif
