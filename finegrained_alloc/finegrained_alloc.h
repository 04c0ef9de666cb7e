/* finegrained_alloc: memory that peers can map, behind one small C ABI.
 *
 * Three backends: host (nameless files in /dev/shm), cuda (driver API) and hip (fine-grained device memory). The GPU
 * runtimes are loaded with dlopen at the first use, so the library builds with any C compiler and runs on a machine with no GPU.
 *
 * Protocol: fga_alloc -> fga_export gives a handle of fga_handle_size() bytes, which is sent to a peer by any means ->
 * the peer calls fga_open -> both use the memory -> the peer calls fga_close, then the owner calls fga_free.
 * Only the base of an allocation can be exported, so a handle never exposes anything else of the process.
 *
 * Memory that grows at one address (not on hip): fga_reserve gives address space; fga_alloc at an address in it puts memory
 * there, and fga_open a peer's. What is freed or closed leaves the addresses reserved, for the next piece.
 *
 * Every function is thread-safe and returns a status; the text of this thread's last failure is in fga_last_error().
 * A forked child starts with an empty registry: it can neither free nor export what its parent allocated.
 */
#ifndef FINEGRAINED_ALLOC_H
#define FINEGRAINED_ALLOC_H

#include <stdint.h>
#include <sys/types.h>

#define FGA_API __attribute__((visibility("default")))
#define FGA_ABI_VERSION 3

enum { FGA_HOST = 0, FGA_CUDA = 1, FGA_HIP = 2, FGA_NUM_BACKENDS = 3 };

enum {
    FGA_OK = 0,
    FGA_INVALID = 1,     /* the caller's mistake: a bad argument, a damaged handle, a double free */
    FGA_MEMORY = 2,      /* not enough memory */
    FGA_UNAVAILABLE = 3, /* this machine has no such backend */
    FGA_STALE = 4,       /* the handle was good once: its owner has died, or has freed or sealed the memory */
    FGA_RUNTIME = 5      /* the operating system or the GPU runtime refused */
};

typedef struct {
    uint64_t allocations;       /* live now, freed ones that a mapping of this process still uses included */
    uint64_t bytes;             /* memory those hold, rounded up as the backend does */
    uint64_t mappings;          /* open now */
    uint64_t total_allocations; /* since the process started */
    uint64_t total_mappings;
} fga_stats;

FGA_API uint32_t fga_abi_version(void);
FGA_API const char *fga_last_error(void);

/* FGA_OK, or FGA_UNAVAILABLE with the reason; text gets what was found. */
FGA_API int fga_available(int backend, char *text, uint64_t text_bytes);
FGA_API int fga_device_count(int backend, int *count);

/* Address space with no memory behind it. Whatever lies in it is at a multiple of FGA_PIECE from its start, and as large. */
#define FGA_PIECE (UINT64_C(2) << 20)
FGA_API int fga_reserve(int backend, int device, uint64_t nbytes, void **ptr, uint64_t *id);
/* While memory lies in it the space goes with the last of that; nothing new can be put there. */
FGA_API int fga_unreserve(uint64_t id);

/* at: where in a reservation of the same backend and device, NULL for anywhere. id names the allocation in fga_free and
 * fga_seal and is never reused, so a double free is always noticed. */
FGA_API int fga_alloc(int backend, int device, uint64_t nbytes, void *at, void **ptr, uint64_t *id);
/* While mappings of this same process are open the memory itself goes with the last of them. */
FGA_API int fga_free(uint64_t id);
/* Closes the descriptor by which peers open the memory, where there is one, after which no new peer can. */
FGA_API int fga_seal(uint64_t id);

FGA_API uint64_t fga_handle_size(void);
/* ptr must be the base of a live allocation of this process. */
FGA_API int fga_export(const void *ptr, void *handle, uint64_t handle_bytes);
/* at as in fga_alloc. A handle of this very process gives the same pointer back, wherever at is, and peer access between the
 * two devices. */
FGA_API int fga_open(const void *handle, uint64_t handle_bytes, int device, void *at, void **ptr, uint64_t *nbytes,
                     int *backend, uint64_t *id);
FGA_API int fga_close(uint64_t id);

FGA_API int fga_can_access_peer(int backend, int device, int peer, int *yes);
FGA_API int fga_enable_peer_access(int backend, int device, int peer);

/* Copies rows of width bytes, which start to_pitch and from_pitch bytes apart, between memory that the device reaches: a
 * command of the stream, for a copy engine, which may be captured in a graph. On the host it is done when this returns. */
FGA_API int fga_copy_rows(int backend, int device, void *to, uint64_t to_pitch, const void *from, uint64_t from_pitch,
                          uint64_t width, uint64_t rows, void *stream);

FGA_API void fga_get_stats(fga_stats *stats);

/* Hooks for torch.cuda.memory.CUDAPluggableAllocator; the backend is set once, before the first of them is called. */
FGA_API int fga_set_torch_backend(int backend);
FGA_API void *fga_torch_malloc(ssize_t size, int device, void *stream);
FGA_API void fga_torch_free(void *ptr, ssize_t size, int device, void *stream);

#endif
