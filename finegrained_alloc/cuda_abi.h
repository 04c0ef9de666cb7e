/* The part of the CUDA driver API that cuda.c uses, so that no CUDA header is needed to build.
 *
 * With <cuda.h> included first, the types are NVIDIA's own: tests/finegrained_alloc/check_cuda.c then lets the compiler
 * compare every prototype and constant with the real ones.
 */
#ifndef FGA_CUDA_ABI_H
#define FGA_CUDA_ABI_H

#include <stddef.h>

#ifndef CUDA_VERSION
typedef unsigned int CUresult; /* an enumeration there, of this size */
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct {
    char reserved[64];
} CUipcMemHandle;
#endif

#define FGA_CUDA_SUCCESS 0u
#define FGA_CUDA_OUT_OF_MEMORY 2u
#define FGA_CUDA_PEER_ALREADY_ENABLED 704u
#define FGA_CUDA_IPC_LAZY_PEER_ACCESS 1u

/* X(symbol in the library, arguments) */
#define FGA_CUDA_FUNCTIONS(X)                                                        \
    X(cuInit, (unsigned int flags))                                                  \
    X(cuDriverGetVersion, (int *version))                                            \
    X(cuGetErrorString, (CUresult error, const char **text))                         \
    X(cuDeviceGetCount, (int *count))                                                \
    X(cuDeviceGet, (CUdevice *device, int ordinal))                                  \
    X(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device))               \
    X(cuCtxPushCurrent_v2, (CUcontext context))                                      \
    X(cuCtxPopCurrent_v2, (CUcontext *context))                                      \
    X(cuMemAlloc_v2, (CUdeviceptr *ptr, size_t nbytes))                              \
    X(cuMemFree_v2, (CUdeviceptr ptr))                                               \
    X(cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *nbytes, CUdeviceptr ptr)) \
    X(cuIpcGetMemHandle, (CUipcMemHandle *handle, CUdeviceptr ptr))                  \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr *ptr, CUipcMemHandle handle, unsigned int flags)) \
    X(cuIpcCloseMemHandle, (CUdeviceptr ptr))                                        \
    X(cuDeviceCanAccessPeer, (int *yes, CUdevice device, CUdevice peer))             \
    X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned int flags))

#endif
