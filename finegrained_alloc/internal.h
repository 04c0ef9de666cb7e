/* What the core and the backends share. Not part of the ABI. */
#ifndef FGA_INTERNAL_H
#define FGA_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "finegrained_alloc.h"

#define FGA_PAYLOAD_BYTES 96
#define FGA_MAX_DEVICES 64
/* An allocation of whole 2 MiB pages shares none of them with anything else, and IPC handles work in such pages. */
#define FGA_GPU_PAGE FGA_PIECE

/* Reserved address space. */
typedef struct fga_space {
    struct fga_space *next;
    uint64_t id;
    void *ptr;
    uint64_t nbytes;
    int backend;
    int device;
    unsigned references; /* the caller's, and one for each thing that lies in it */
    bool owned;          /* false once fga_unreserve was called */
} fga_space;

typedef struct fga_memory {
    struct fga_memory *next;
    uint64_t id;
    void *ptr;        /* already there for alloc, where it lies in a space */
    fga_space *space; /* NULL: it lies where the backend put it */
    uint64_t nbytes;  /* asked for */
    uint64_t held;   /* rounded up by the backend */
    int backend;
    int device;
    unsigned references; /* the owner's, and one for each mapping of this process */
    bool owned;          /* false once fga_free was called */
    int descriptor;      /* by which peers open the memory; -1 where there is none, or it is sealed */
} fga_memory;

/* Who this process is, in a form that a recycled pid cannot forge. */
typedef struct {
    uint64_t token[2];
    uint64_t pid_namespace; /* 0 where /proc does not tell */
    uint64_t start_time;    /* in clock ticks since boot; 0 where /proc does not tell */
    uint32_t pid;
} fga_identity;

typedef struct {
    void *to;
    const void *from;
    uint64_t to_pitch, from_pitch, width, rows; /* pitches of at most FGA_MAX_PITCH */
    void *stream;
} fga_copy;

/* What GPU runtimes take for the bytes from one row to the next. */
#define FGA_MAX_PITCH INT32_MAX

typedef struct {
    const char *name;
    int (*available)(char *text, size_t text_bytes);
    int (*device_count)(int *count);
    int (*reserve)(int device, uint64_t nbytes, void **ptr); /* NULL where memory can't be put at given addresses */
    int (*unreserve)(void *ptr, uint64_t nbytes, int device);
    int (*alloc)(fga_memory *memory);   /* reads nbytes, device and space; sets ptr, held, descriptor */
    int (*release)(fga_memory *memory); /* in a space: what stays is reserved as before */
    int (*seal)(fga_memory *memory);  /* NULL where there is nothing to seal */
    int (*export_payload)(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]);
    /* at: *ptr, in a space; else it is set. */
    int (*open)(const uint8_t payload[FGA_PAYLOAD_BYTES], const fga_identity *owner, uint64_t held, int device, bool at,
                void **ptr);
    int (*close)(void *ptr, uint64_t held, int device, bool at);
    int (*can_access_peer)(int device, int peer, int *yes);
    int (*enable_peer_access)(int device, int peer);
    int (*admit)(const fga_memory *memory, int device); /* peer access to what lies in a space; NULL with reserve */
    int (*copy_rows)(int device, const fga_copy *copy);
} fga_backend;

extern const fga_backend fga_host_backend;
extern const fga_backend fga_cuda_backend;
extern const fga_backend fga_hip_backend;

/* NULL (and FGA_INVALID set) for an unknown number. */
const fga_backend *fga_find_backend(int backend);

/* Records the text for fga_last_error() and returns code. */
int fga_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* 0 on overflow. unit is a power of two. */
uint64_t fga_round_up(uint64_t nbytes, uint64_t unit);

/* Frees the live allocation at ptr, as fga_free does by id. */
int fga_free_pointer(const void *ptr);

/* From now on peers can ask this process for descriptors of its memory; the registry is locked. See descriptors.c. */
int fga_serve_descriptors(const fga_identity *self);
/* Sets *descriptor, which is the caller's, to that of the owner's allocation number id. */
int fga_ask_for_descriptor(const fga_identity *owner, uint64_t id, const char *backend, int *descriptor);
/* In a child of fork, which has the listening socket and nobody who listens. */
void fga_forget_server(void);

int fga_random(void *bytes, size_t count);
int fga_make_identity(fga_identity *identity);
/* False also where that cannot be known: in another pid namespace, or without /proc. */
bool fga_is_dead(const fga_identity *identity);
/* Whether its pid means the same process here. False also without /proc. */
bool fga_shares_pid_namespace(const fga_identity *identity);

/* Bytes that may still be taken before the system kills a process for want of memory; text gets whose limit that is. */
uint64_t fga_free_memory(char *text, size_t text_bytes);

/* The library named by environment variable env if set; else one already loaded whose name starts with stem (two copies of a
 * GPU runtime in a process do not share pointers); else the first of names (NULL-terminated) that loads. */
void *fga_load_library(const char *env, const char *stem, const char *const *names, char *path, size_t path_bytes);

#endif
