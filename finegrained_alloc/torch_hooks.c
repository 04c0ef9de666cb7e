/* The two functions that PyTorch's CUDAPluggableAllocator calls. They report failure as a null pointer, which PyTorch turns
 * into torch.OutOfMemoryError after trying to free what it caches; they never end the process.
 */
#include <stdatomic.h>
#include <stdio.h>

#include "internal.h"

static atomic_int torch_backend = -1;

int fga_set_torch_backend(int backend) {
    if (backend != FGA_CUDA && backend != FGA_HIP)
        return fga_fail(FGA_INVALID, "PyTorch allocates from backend 1 (cuda) or 2 (hip), not %d", backend);
    atomic_store(&torch_backend, backend);
    return FGA_OK;
}

void *fga_torch_malloc(ssize_t size, int device, void *stream) {
    void *ptr = NULL;
    uint64_t id;
    (void)stream; /* the memory is usable from every stream at once */
    if (size <= 0 || fga_alloc(atomic_load(&torch_backend), device, (uint64_t)size, NULL, &ptr, &id) != FGA_OK)
        return NULL;
    return ptr;
}

void fga_torch_free(void *ptr, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    if (ptr != NULL && fga_free_pointer(ptr) != FGA_OK)
        fprintf(stderr, "finegrained_alloc: free for PyTorch: %s\n", fga_last_error());
}
