/* The part of the HIP runtime API that hip.c uses, so that no HIP header is needed to build.
 *
 * With <hip/hip_runtime_api.h> included first, the types are AMD's own: tests/finegrained_alloc/check_hip.c then lets the
 * compiler compare every prototype and constant with the real ones.
 */
#ifndef FGA_HIP_ABI_H
#define FGA_HIP_ABI_H

#include <stddef.h>

#ifndef HIP_INCLUDE_HIP_HIP_RUNTIME_API_H
typedef unsigned int hipError_t; /* an enumeration there, of this size */
typedef void *hipDeviceptr_t;
typedef unsigned int hipMemcpyKind; /* an enumeration, too */
typedef struct ihipStream_t *hipStream_t;
typedef struct {
    char reserved[64];
} hipIpcMemHandle_t;
#endif

#define FGA_HIP_SUCCESS 0u
#define FGA_HIP_OUT_OF_MEMORY 2u
#define FGA_HIP_PEER_ALREADY_ENABLED 704u
#define FGA_HIP_IPC_LAZY_PEER_ACCESS 0x1u
#define FGA_HIP_MALLOC_FINEGRAINED 0x1u
#define FGA_HIP_MEMCPY_DEFAULT 4u

/* X(symbol in the library, result, arguments) */
#define FGA_HIP_FUNCTIONS(X)                                                                       \
    X(hipGetErrorString, const char *, (hipError_t error))                                         \
    X(hipGetLastError, hipError_t, (void))                                                         \
    X(hipRuntimeGetVersion, hipError_t, (int *version))                                            \
    X(hipGetDeviceCount, hipError_t, (int *count))                                                 \
    X(hipGetDevice, hipError_t, (int *device))                                                     \
    X(hipSetDevice, hipError_t, (int device))                                                      \
    X(hipExtMallocWithFlags, hipError_t, (void **ptr, size_t nbytes, unsigned int flags))          \
    X(hipFree, hipError_t, (void *ptr))                                                            \
    X(hipMemGetAddressRange, hipError_t, (hipDeviceptr_t *base, size_t *nbytes, hipDeviceptr_t ptr)) \
    X(hipIpcGetMemHandle, hipError_t, (hipIpcMemHandle_t *handle, void *ptr))                      \
    X(hipIpcOpenMemHandle, hipError_t, (void **ptr, hipIpcMemHandle_t handle, unsigned int flags)) \
    X(hipIpcCloseMemHandle, hipError_t, (void *ptr))                                               \
    X(hipDeviceCanAccessPeer, hipError_t, (int *yes, int device, int peer))                        \
    X(hipDeviceEnablePeerAccess, hipError_t, (int peer, unsigned int flags))                       \
    X(hipMemcpy2DAsync, hipError_t, (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, \
                                     size_t rows, hipMemcpyKind kind, hipStream_t stream))

#endif
