/* Compiled by test_runtime_headers.py against NVIDIA's real header: the build fails when a prototype, a type or a constant
 * of cuda_abi.h differs from theirs. */
#include <cuda.h>
#include <stddef.h>

#ifndef CUDA_VERSION
#error "the macro that cuda_abi.h looks for has changed: the check would compare cuda_abi.h with itself"
#endif

#include "cuda_abi.h"

#define ASSIGN(name, arguments) CUresult (*const checked_##name) arguments = name;
void use(void);
void use(void) {
    FGA_CUDA_FUNCTIONS(ASSIGN)
#define USE(name, arguments) (void)checked_##name;
    FGA_CUDA_FUNCTIONS(USE)
}

_Static_assert(CUDA_SUCCESS == FGA_CUDA_SUCCESS, "CUDA_SUCCESS");
_Static_assert(CUDA_ERROR_OUT_OF_MEMORY == FGA_CUDA_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY");
_Static_assert(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED == FGA_CUDA_PEER_ALREADY_ENABLED,
               "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED");
_Static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == FGA_CUDA_IPC_LAZY_PEER_ACCESS,
               "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS");
_Static_assert(sizeof(CUipcMemHandle) == 64 && _Alignof(CUipcMemHandle) == 1, "CUipcMemHandle");
_Static_assert(sizeof(CUresult) == sizeof(unsigned int), "CUresult");
_Static_assert(sizeof(CUdevice) == sizeof(int), "CUdevice");
_Static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long), "CUdeviceptr");

_Static_assert(sizeof(CUstream) == sizeof(void *), "CUstream");
_Static_assert(CU_MEMORYTYPE_UNIFIED == FGA_CUDA_MEMORY_UNIFIED, "CU_MEMORYTYPE_UNIFIED");
_Static_assert(sizeof(CUDA_MEMCPY2D) == sizeof(fga_cuda_copy), "CUDA_MEMCPY2D");
#define SAME(field)                                                                                          \
    _Static_assert(offsetof(CUDA_MEMCPY2D, field) == offsetof(fga_cuda_copy, field) &&                       \
                       sizeof(((CUDA_MEMCPY2D *)0)->field) == sizeof(((fga_cuda_copy *)0)->field), #field);
SAME(srcXInBytes) SAME(srcY) SAME(srcMemoryType) SAME(srcHost) SAME(srcDevice) SAME(srcArray) SAME(srcPitch)
SAME(dstXInBytes) SAME(dstY) SAME(dstMemoryType) SAME(dstHost) SAME(dstDevice) SAME(dstArray) SAME(dstPitch)
SAME(WidthInBytes) SAME(Height)

_Static_assert(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == FGA_CUDA_HAS_VIRTUAL_MEMORY,
               "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED");
_Static_assert(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED == FGA_CUDA_HAS_POSIX_DESCRIPTORS,
               "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED");
_Static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == FGA_CUDA_PINNED, "CU_MEM_ALLOCATION_TYPE_PINNED");
_Static_assert(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == FGA_CUDA_POSIX_DESCRIPTOR,
               "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
_Static_assert(CU_MEM_LOCATION_TYPE_DEVICE == FGA_CUDA_LOCATION_DEVICE, "CU_MEM_LOCATION_TYPE_DEVICE");
_Static_assert(CU_MEM_ALLOC_GRANULARITY_MINIMUM == FGA_CUDA_GRANULARITY_MINIMUM, "CU_MEM_ALLOC_GRANULARITY_MINIMUM");
_Static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == FGA_CUDA_READ_WRITE, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE");
_Static_assert(sizeof(CUdevice_attribute) == sizeof(unsigned int), "CUdevice_attribute");
_Static_assert(sizeof(CUmemAllocationHandleType) == sizeof(unsigned int), "CUmemAllocationHandleType");
_Static_assert(sizeof(CUmemAllocationGranularity_flags) == sizeof(unsigned int), "CUmemAllocationGranularity_flags");
_Static_assert(sizeof(CUmemGenericAllocationHandle) == sizeof(unsigned long long), "CUmemGenericAllocationHandle");
_Static_assert(sizeof(CUmemAllocationProp) == sizeof(fga_cuda_allocation), "CUmemAllocationProp");
_Static_assert(sizeof(CUmemAccessDesc) == sizeof(fga_cuda_access), "CUmemAccessDesc");
#define SAME_IN(type, ours, field)                                                                     \
    _Static_assert(offsetof(type, field) == offsetof(ours, field) &&                                   \
                       sizeof(((type *)0)->field) == sizeof(((ours *)0)->field), #type "." #field);
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, type)
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, requestedHandleTypes)
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, location)
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, location.type)
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, location.id)
SAME_IN(CUmemAllocationProp, fga_cuda_allocation, allocFlags)
SAME_IN(CUmemAccessDesc, fga_cuda_access, location)
SAME_IN(CUmemAccessDesc, fga_cuda_access, flags)
