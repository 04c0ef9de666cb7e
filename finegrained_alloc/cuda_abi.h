/* The part of the CUDA driver API that cuda.c uses, so that no CUDA header is needed to build.
 *
 * With <cuda.h> included first, the types are NVIDIA's own: tests/finegrained_alloc/check_cuda.c then lets the compiler
 * compare every prototype and constant with the real ones.
 */
#ifndef FGA_CUDA_ABI_H
#define FGA_CUDA_ABI_H

#include <stddef.h>

/* CUDA_MEMCPY2D, whose fields check_cuda.c compares with NVIDIA's. */
typedef struct {
    size_t srcXInBytes, srcY;
    unsigned int srcMemoryType; /* an enumeration there, of this size */
    const void *srcHost;
    unsigned long long srcDevice;
    void *srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    unsigned int dstMemoryType;
    void *dstHost;
    unsigned long long dstDevice;
    void *dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} fga_cuda_copy;

/* CUmemLocation, CUmemAllocationProp, CUmemAccessDesc; enumerations there are of this size. */
typedef struct {
    unsigned int type;
    int id;
} fga_cuda_location;

typedef struct {
    unsigned int type;
    unsigned int requestedHandleTypes;
    fga_cuda_location location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} fga_cuda_allocation;

typedef struct {
    fga_cuda_location location;
    unsigned int flags;
} fga_cuda_access;

#ifndef CUDA_VERSION
typedef unsigned int CUresult; /* an enumeration there, of this size */
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct {
    char reserved[64];
} CUipcMemHandle;
typedef struct CUstream_st *CUstream;
typedef fga_cuda_copy CUDA_MEMCPY2D;
typedef unsigned int CUdevice_attribute;
typedef unsigned int CUmemAllocationHandleType;
typedef unsigned int CUmemAllocationGranularity_flags;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef fga_cuda_allocation CUmemAllocationProp;
typedef fga_cuda_access CUmemAccessDesc;
#endif

#define FGA_CUDA_SUCCESS 0u
#define FGA_CUDA_OUT_OF_MEMORY 2u
#define FGA_CUDA_PEER_ALREADY_ENABLED 704u
#define FGA_CUDA_IPC_LAZY_PEER_ACCESS 1u
#define FGA_CUDA_MEMORY_UNIFIED 4u
#define FGA_CUDA_HAS_VIRTUAL_MEMORY 102u
#define FGA_CUDA_HAS_POSIX_DESCRIPTORS 103u
#define FGA_CUDA_PINNED 1u
#define FGA_CUDA_POSIX_DESCRIPTOR 1u
#define FGA_CUDA_LOCATION_DEVICE 1u
#define FGA_CUDA_GRANULARITY_MINIMUM 0u
#define FGA_CUDA_READ_WRITE 3u

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
    X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned int flags))                   \
    X(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream))             \
    X(cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device)) \
    X(cuMemGetAllocationGranularity, (size_t *nbytes, const CUmemAllocationProp *properties, \
                                      CUmemAllocationGranularity_flags option))      \
    X(cuMemAddressReserve, (CUdeviceptr *ptr, size_t nbytes, size_t alignment, CUdeviceptr at, unsigned long long flags)) \
    X(cuMemAddressFree, (CUdeviceptr ptr, size_t nbytes))                            \
    X(cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *properties, \
                    unsigned long long flags))                                       \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle))                           \
    X(cuMemMap, (CUdeviceptr ptr, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, \
                 unsigned long long flags))                                          \
    X(cuMemUnmap, (CUdeviceptr ptr, size_t nbytes))                                  \
    X(cuMemSetAccess, (CUdeviceptr ptr, size_t nbytes, const CUmemAccessDesc *access, size_t count)) \
    X(cuMemExportToShareableHandle, (void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, \
                                     unsigned long long flags))                      \
    X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type))

#endif
