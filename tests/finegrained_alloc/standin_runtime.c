/* A recording stand-in for libamdhip64 and libcuda: every function that finegrained_alloc uses, over plain memory.
 *
 * Each call is appended to the file $STANDIN_LOG as "name argument...". $STANDIN_FAIL="name=code,..." makes calls fail,
 * $STANDIN_DEVICES sets the number of devices (2), $STANDIN_OFFSET moves allocations into their block, as a runtime that
 * packs small ones would. Handles hold the address, so opening works within a process; in another it allocates anew. Memory of
 * the functions for virtual memory is a memfd, whose descriptor is its handle: that one is shared between processes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "hip_abi.h"

#define MAX_BLOCKS 64
#define ALIGNMENT ((size_t)2 << 20)
#define NOT_FOUND 1u /* hipErrorInvalidValue, CUDA_ERROR_INVALID_VALUE */

#define DECLARE_HIP(name, result, arguments) result name arguments;
#define DECLARE_CUDA(name, arguments) CUresult name arguments;
FGA_HIP_FUNCTIONS(DECLARE_HIP)
FGA_CUDA_FUNCTIONS(DECLARE_CUDA)

unsigned standin_sticky(void);
int standin_device(void), standin_live(void), standin_depth(void);

typedef struct {
    char *base;
    size_t nbytes;
    size_t offset;
} block;

static block blocks[MAX_BLOCKS];
static unsigned sticky; /* what hipGetLastError would give */
static int device;
static int enabled[8][8];
static uintptr_t stack[16];
static int depth;

unsigned standin_sticky(void) { return sticky; }
int standin_device(void) { return device; }
int standin_depth(void) { return depth; }

int standin_live(void) {
    int count = 0;
    for (int i = 0; i < MAX_BLOCKS; i++)
        count += blocks[i].base != NULL;
    return count;
}

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atol(text) : otherwise;
}

static void record(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length] = '\n';
    int fd = open(getenv("STANDIN_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (fd < 0 || write(fd, line, (size_t)length + 1) < 0)
        abort();
    close(fd);
}

/* The error that the test planted for this call, or 0. */
static unsigned planted(const char *name) {
    const char *found = getenv("STANDIN_FAIL");
    size_t length = strlen(name);
    while (found != NULL && (found = strstr(found, name)) != NULL) {
        if (found[length] == '=')
            return sticky = (unsigned)atoi(found + length + 1);
        found += length;
    }
    return 0;
}

static unsigned new_block(void **ptr, size_t nbytes) {
    for (int i = 0; i < MAX_BLOCKS; i++) {
        if (blocks[i].base != NULL)
            continue;
        size_t offset = (size_t)setting("STANDIN_OFFSET", 0);
        blocks[i] = (block){aligned_alloc(ALIGNMENT, nbytes + ALIGNMENT), nbytes + offset, offset};
        *ptr = blocks[i].base + offset;
        return 0;
    }
    return sticky = 2;
}

static block *find_block(const void *ptr) {
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (blocks[i].base != NULL && (const char *)ptr >= blocks[i].base &&
            (const char *)ptr < blocks[i].base + blocks[i].nbytes)
            return &blocks[i];
    return NULL;
}

static unsigned drop_block(const void *ptr) {
    block *found = find_block(ptr);
    if (found == NULL || found->base + found->offset != ptr)
        return sticky = NOT_FOUND;
    free(found->base);
    found->base = NULL;
    return 0;
}

static unsigned range_of(void **base, size_t *nbytes, const void *ptr) {
    block *found = find_block(ptr);
    if (found == NULL)
        return sticky = NOT_FOUND;
    *base = found->base;
    *nbytes = found->nbytes;
    return 0;
}

static void fill_handle(char reserved[64], const void *ptr) {
    for (int i = 0; i < 64; i++)
        reserved[i] = (char)(i + 1);
    memcpy(reserved, &ptr, sizeof ptr);
    size_t nbytes = find_block(ptr)->nbytes;
    memcpy(reserved + 8, &nbytes, sizeof nbytes);
}

/* The bytes after address and size must have come through whole. */
static unsigned open_block(void **ptr, const char reserved[64]) {
    size_t nbytes;
    for (int i = 16; i < 64; i++)
        if (reserved[i] != (char)(i + 1))
            return sticky = NOT_FOUND;
    memcpy(&nbytes, reserved + 8, sizeof nbytes);
    return new_block(ptr, nbytes - (size_t)setting("STANDIN_SHORT", 0));
}

static unsigned enable(int from, int to) {
    if (enabled[from][to])
        return sticky = 704;
    enabled[from][to] = 1;
    return 0;
}

/* -- HIP ---------------------------------------------------------------------------------------------------------------- */

#define BEGIN(name, ...)       \
    record(__VA_ARGS__);       \
    if (planted(name) != 0)    \
        return sticky;

const char *hipGetErrorString(hipError_t error) { return error == 2 ? "stand-in out of memory" : "stand-in error"; }

hipError_t hipGetLastError(void) {
    unsigned last = sticky;
    sticky = 0;
    return last;
}

hipError_t hipRuntimeGetVersion(int *version) {
    *version = (int)setting("STANDIN_VERSION", 60342134);
    return 0;
}

hipError_t hipGetDeviceCount(int *count) {
    BEGIN("hipGetDeviceCount", "hipGetDeviceCount")
    *count = (int)setting("STANDIN_DEVICES", 2);
    return *count == 0 ? (sticky = 100) : 0;
}

hipError_t hipGetDevice(int *current) {
    *current = device;
    return 0;
}

hipError_t hipSetDevice(int wanted) {
    BEGIN("hipSetDevice", "hipSetDevice %d", wanted)
    device = wanted;
    return 0;
}

hipError_t hipExtMallocWithFlags(void **ptr, size_t nbytes, unsigned int flags) {
    BEGIN("hipExtMallocWithFlags", "hipExtMallocWithFlags device=%d nbytes=%zu flags=%u", device, nbytes, flags)
    return new_block(ptr, nbytes);
}

hipError_t hipFree(void *ptr) {
    BEGIN("hipFree", "hipFree device=%d ptr=%p", device, ptr)
    return drop_block(ptr);
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t *base, size_t *nbytes, hipDeviceptr_t ptr) {
    BEGIN("hipMemGetAddressRange", "hipMemGetAddressRange ptr=%p", ptr)
    return range_of(base, nbytes, ptr);
}

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *ptr) {
    BEGIN("hipIpcGetMemHandle", "hipIpcGetMemHandle device=%d ptr=%p", device, ptr)
    fill_handle(handle->reserved, ptr);
    return 0;
}

hipError_t hipIpcOpenMemHandle(void **ptr, hipIpcMemHandle_t handle, unsigned int flags) {
    BEGIN("hipIpcOpenMemHandle", "hipIpcOpenMemHandle device=%d flags=%u", device, flags)
    return open_block(ptr, handle.reserved);
}

hipError_t hipIpcCloseMemHandle(void *ptr) {
    BEGIN("hipIpcCloseMemHandle", "hipIpcCloseMemHandle device=%d ptr=%p", device, ptr)
    return drop_block(ptr);
}

hipError_t hipDeviceCanAccessPeer(int *yes, int from, int to) {
    BEGIN("hipDeviceCanAccessPeer", "hipDeviceCanAccessPeer %d %d", from, to)
    *yes = (int)setting("STANDIN_LINKED", 1);
    return 0;
}

hipError_t hipDeviceEnablePeerAccess(int peer, unsigned int flags) {
    BEGIN("hipDeviceEnablePeerAccess", "hipDeviceEnablePeerAccess device=%d peer=%d flags=%u", device, peer, flags)
    return enable(device, peer);
}

static void copy_block(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t rows) {
    for (size_t row = 0; row < rows; row++)
        memcpy(to + row * to_pitch, from + row * from_pitch, width);
}

hipError_t hipMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                            hipMemcpyKind kind, hipStream_t stream) {
    BEGIN("hipMemcpy2DAsync", "hipMemcpy2DAsync device=%d to_pitch=%zu from_pitch=%zu width=%zu rows=%zu kind=%u stream=%p",
          device, to_pitch, from_pitch, width, rows, kind, (void *)stream)
    copy_block(to, to_pitch, from, from_pitch, width, rows);
    return 0;
}

/* -- CUDA: context N + 1 stands for device N ------------------------------------------------------------------------------ */

static int top(void) { return depth > 0 ? (int)stack[depth - 1] - 1 : -1; }

CUresult cuInit(unsigned int flags) {
    BEGIN("cuInit", "cuInit flags=%u", flags)
    return 0;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = hipGetErrorString(error);
    return 0;
}

CUresult cuDeviceGetCount(int *count) {
    BEGIN("cuDeviceGetCount", "cuDeviceGetCount")
    *count = (int)setting("STANDIN_DEVICES", 2);
    return 0;
}

CUresult cuDeviceGet(CUdevice *handle, int ordinal) {
    *handle = ordinal;
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice handle) {
    BEGIN("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain %d", handle)
    *context = (CUcontext)(uintptr_t)(handle + 1);
    return 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN("cuCtxPushCurrent", "cuCtxPushCurrent %d", (int)(uintptr_t)context - 1)
    stack[depth++] = (uintptr_t)context;
    return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    BEGIN("cuCtxPopCurrent", "cuCtxPopCurrent")
    *context = (CUcontext)stack[--depth];
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t nbytes) {
    void *found = NULL;
    BEGIN("cuMemAlloc", "cuMemAlloc device=%d nbytes=%zu", top(), nbytes)
    unsigned error = new_block(&found, nbytes);
    *ptr = (CUdeviceptr)(uintptr_t)found;
    return error;
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    BEGIN("cuMemFree", "cuMemFree device=%d ptr=0x%llx", top(), ptr)
    return drop_block((void *)(uintptr_t)ptr);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr ptr) {
    void *found = NULL;
    BEGIN("cuMemGetAddressRange", "cuMemGetAddressRange ptr=0x%llx", ptr)
    unsigned error = range_of(&found, nbytes, (void *)(uintptr_t)ptr);
    *base = (CUdeviceptr)(uintptr_t)found;
    return error;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr ptr) {
    BEGIN("cuIpcGetMemHandle", "cuIpcGetMemHandle device=%d ptr=0x%llx", top(), ptr)
    fill_handle(handle->reserved, (void *)(uintptr_t)ptr);
    return 0;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *ptr, CUipcMemHandle handle, unsigned int flags) {
    void *opened = NULL;
    BEGIN("cuIpcOpenMemHandle", "cuIpcOpenMemHandle device=%d flags=%u", top(), flags)
    unsigned error = open_block(&opened, handle.reserved);
    *ptr = (CUdeviceptr)(uintptr_t)opened;
    return error;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr ptr) {
    BEGIN("cuIpcCloseMemHandle", "cuIpcCloseMemHandle device=%d ptr=0x%llx", top(), ptr)
    return drop_block((void *)(uintptr_t)ptr);
}

CUresult cuDeviceCanAccessPeer(int *yes, CUdevice from, CUdevice to) {
    BEGIN("cuDeviceCanAccessPeer", "cuDeviceCanAccessPeer %d %d", from, to)
    *yes = (int)setting("STANDIN_LINKED", 1);
    return 0;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    BEGIN("cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess device=%d peer=%d flags=%u", top(),
          (int)(uintptr_t)peer - 1, flags)
    return enable(top(), (int)(uintptr_t)peer - 1);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    BEGIN("cuMemcpy2DAsync", "cuMemcpy2DAsync device=%d to_pitch=%zu from_pitch=%zu width=%zu rows=%zu kinds=%u,%u stream=%p",
          top(), copy->dstPitch, copy->srcPitch, copy->WidthInBytes, copy->Height, copy->srcMemoryType,
          copy->dstMemoryType, (void *)stream)
    if (copy->srcXInBytes + copy->srcY + copy->dstXInBytes + copy->dstY != 0)
        return NOT_FOUND;
    copy_block((char *)(uintptr_t)copy->dstDevice, copy->dstPitch, (const char *)(uintptr_t)copy->srcDevice, copy->srcPitch,
               copy->WidthInBytes, copy->Height);
    return 0;
}

/* -- CUDA's virtual memory ------------------------------------------------------------------------------------------------ */

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice handle) {
    BEGIN("cuDeviceGetAttribute", "cuDeviceGetAttribute %u of %d", attribute, handle)
    *value = (unsigned)setting("STANDIN_LACKS", 0) != attribute;
    return 0;
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    BEGIN("cuMemGetAllocationGranularity", "cuMemGetAllocationGranularity device=%d option=%u", properties->location.id, option)
    *nbytes = (size_t)setting("STANDIN_GRANULARITY", (long)ALIGNMENT);
    return 0;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t nbytes, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    BEGIN("cuMemAddressReserve", "cuMemAddressReserve nbytes=%zu alignment=%zu at=%llu flags=%llu", nbytes, alignment, at, flags)
    char *found = mmap(NULL, nbytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return 2;
    size_t skipped = (alignment - (uintptr_t)found % alignment) % alignment;
    munmap(found, skipped);
    munmap(found + skipped + nbytes, alignment - skipped);
    *ptr = (CUdeviceptr)(uintptr_t)(found + skipped);
    return 0;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t nbytes) {
    BEGIN("cuMemAddressFree", "cuMemAddressFree ptr=0x%llx nbytes=%zu", ptr, nbytes)
    return munmap((void *)(uintptr_t)ptr, nbytes) == 0 ? 0 : NOT_FOUND;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    BEGIN("cuMemCreate", "cuMemCreate device=%d nbytes=%zu type=%u handles=%u flags=%llu", properties->location.id, nbytes,
          properties->type, properties->requestedHandleTypes, flags)
    int fd = memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes) != 0)
        return 2;
    *handle = (CUmemGenericAllocationHandle)fd;
    return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    BEGIN("cuMemRelease", "cuMemRelease")
    return close((int)handle) == 0 ? 0 : NOT_FOUND;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    BEGIN("cuMemMap", "cuMemMap device=%d ptr=0x%llx nbytes=%zu offset=%zu flags=%llu", top(), ptr, nbytes, offset, flags)
    void *mapped = mmap((void *)(uintptr_t)ptr, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return mapped == MAP_FAILED ? NOT_FOUND : 0;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t nbytes) {
    BEGIN("cuMemUnmap", "cuMemUnmap device=%d ptr=0x%llx nbytes=%zu", top(), ptr, nbytes)
    void *mapped = mmap((void *)(uintptr_t)ptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped == MAP_FAILED ? NOT_FOUND : 0;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t nbytes, const CUmemAccessDesc *access, size_t count) {
    BEGIN("cuMemSetAccess", "cuMemSetAccess ptr=0x%llx nbytes=%zu device=%d flags=%u count=%zu", ptr, nbytes,
          access->location.id, access->flags, count)
    return mprotect((void *)(uintptr_t)ptr, nbytes, PROT_READ | PROT_WRITE) == 0 ? 0 : NOT_FOUND;
}

CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    BEGIN("cuMemExportToShareableHandle", "cuMemExportToShareableHandle type=%u flags=%llu", type, flags)
    *(int *)shared = dup((int)handle);
    return *(int *)shared < 0 ? NOT_FOUND : 0;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type) {
    BEGIN("cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle type=%u", type)
    int fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
    *handle = (CUmemGenericAllocationHandle)fd;
    return fd < 0 ? NOT_FOUND : 0;
}
