/* Compiled by test_runtime_headers.py against AMD's real headers, and linked with AMD's real library where it is there:
 * the build fails when a prototype, a type or a constant of hip_abi.h differs from theirs. */
#include <hip/hip_runtime_api.h>

#ifndef HIP_INCLUDE_HIP_HIP_RUNTIME_API_H
#error "the include guard that hip_abi.h looks for has changed: the check would compare hip_abi.h with itself"
#endif

#include <hip/hip_version.h>

#include "hip_abi.h"

#define ASSIGN(name, result, arguments) result(*const checked_##name) arguments = name;
FGA_HIP_FUNCTIONS(ASSIGN)

_Static_assert(hipSuccess == FGA_HIP_SUCCESS, "hipSuccess");
_Static_assert(hipErrorOutOfMemory == FGA_HIP_OUT_OF_MEMORY, "hipErrorOutOfMemory");
_Static_assert(hipErrorPeerAccessAlreadyEnabled == FGA_HIP_PEER_ALREADY_ENABLED, "hipErrorPeerAccessAlreadyEnabled");
#if HIP_VERSION_MAJOR >= 6
_Static_assert(hipIpcMemLazyEnablePeerAccess == FGA_HIP_IPC_LAZY_PEER_ACCESS, "hipIpcMemLazyEnablePeerAccess");
#else /* another value before HIP 6, which is why hip.c refuses an older library */
_Static_assert(hipIpcMemLazyEnablePeerAccess != FGA_HIP_IPC_LAZY_PEER_ACCESS, "hipIpcMemLazyEnablePeerAccess");
#endif
_Static_assert(hipDeviceMallocFinegrained == FGA_HIP_MALLOC_FINEGRAINED, "hipDeviceMallocFinegrained");
/* hip.c passes these by value and return them under types of its own, so size, alignment and sign must be the same. */
_Static_assert(sizeof(hipIpcMemHandle_t) == 64 && _Alignof(hipIpcMemHandle_t) == 1, "hipIpcMemHandle_t");
_Static_assert(sizeof(hipError_t) == sizeof(unsigned int), "hipError_t");
_Static_assert(hipMemcpyDefault == FGA_HIP_MEMCPY_DEFAULT, "hipMemcpyDefault");
_Static_assert(sizeof(hipMemcpyKind) == sizeof(unsigned int), "hipMemcpyKind");
_Static_assert(sizeof(hipStream_t) == sizeof(void *), "hipStream_t");
_Static_assert(sizeof(hipDeviceptr_t) == sizeof(void *), "hipDeviceptr_t");

int main(void) { return checked_hipFree == 0; }
