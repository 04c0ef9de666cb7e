/* CUDA backend: the driver API on the primary context, which is the one that PyTorch and every CUDA runtime use.
 *
 * cuMemAlloc packs small requests into shared 2 MiB blocks, and an IPC handle exports the whole block: sizes are therefore
 * rounded up to 2 MiB, and export checks with the driver that the pointer is the base of a block of its own.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda_abi.h"
#include "internal.h"

typedef struct {
#define MEMBER(name, arguments) CUresult(*name) arguments;
    FGA_CUDA_FUNCTIONS(MEMBER)
#undef MEMBER
} cuda_functions;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static cuda_functions cu;
static bool ready;
static char library_path[256];
static int num_devices;
static CUcontext contexts[FGA_MAX_DEVICES]; /* retained at first use, for the life of the process, as PyTorch does */

static const char *text_of(CUresult error) {
    const char *text = NULL;
    if (cu.cuGetErrorString(error, &text) != FGA_CUDA_SUCCESS || text == NULL)
        text = "unknown error";
    return text;
}

static int fail(CUresult error, const char *call, int device, uint64_t nbytes) {
    return fga_fail(error == FGA_CUDA_OUT_OF_MEMORY ? FGA_MEMORY : FGA_RUNTIME,
                    "cuda: %s of %llu bytes on device %d: %s (error %u)", call, (unsigned long long)nbytes, device,
                    text_of(error), (unsigned)error);
}

static int load_locked(void) {
    static const char *const names[] = {"libcuda.so.1", "libcuda.so", NULL};
    if (ready)
        return FGA_OK;
    void *library = fga_load_library("PYROCSHMEM_CUDA_LIBRARY", "libcuda.so", names, library_path, sizeof library_path);
    if (library == NULL)
        return fga_fail(FGA_UNAVAILABLE, "cuda: the driver library does not load: %s", dlerror());
/* POSIX dlsym yields functions as void *; the copy avoids a cast that ISO C forbids. */
#define RESOLVE(name, arguments)                                                                       \
    do {                                                                                               \
        void *symbol = dlsym(library, #name);                                                          \
        if (symbol == NULL)                                                                            \
            return fga_fail(FGA_UNAVAILABLE, "cuda: %s has no %s", library_path, #name);               \
        memcpy(&cu.name, &symbol, sizeof symbol);                                                      \
    } while (0);
    FGA_CUDA_FUNCTIONS(RESOLVE)
#undef RESOLVE
    CUresult error = cu.cuInit(0);
    if (error != FGA_CUDA_SUCCESS)
        return fga_fail(FGA_UNAVAILABLE, "cuda: cuInit: %s (error %u)", text_of(error), (unsigned)error);
    error = cu.cuDeviceGetCount(&num_devices);
    if (error != FGA_CUDA_SUCCESS || num_devices == 0)
        return fga_fail(FGA_UNAVAILABLE, "cuda: no device (error %u)", (unsigned)error);
    if (num_devices > FGA_MAX_DEVICES)
        num_devices = FGA_MAX_DEVICES;
    ready = true;
    return FGA_OK;
}

static int load(void) {
    pthread_mutex_lock(&lock);
    int status = load_locked();
    pthread_mutex_unlock(&lock);
    return status;
}

static int get_context(int device, CUcontext *context) {
    CUdevice handle;
    CUresult error = FGA_CUDA_SUCCESS;
    int status = load();
    if (status != FGA_OK)
        return status;
    pthread_mutex_lock(&lock);
    if (contexts[device] == NULL) {
        error = cu.cuDeviceGet(&handle, device);
        if (error == FGA_CUDA_SUCCESS)
            error = cu.cuDevicePrimaryCtxRetain(&contexts[device], handle);
    }
    *context = contexts[device];
    pthread_mutex_unlock(&lock);
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuDevicePrimaryCtxRetain", device, 0);
}

static int enter(int device) {
    CUcontext context;
    int status = get_context(device, &context);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuCtxPushCurrent_v2(context);
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuCtxPushCurrent", device, 0);
}

static void leave(void) {
    CUcontext popped;
    cu.cuCtxPopCurrent_v2(&popped);
}

static int available(char *text, size_t text_bytes) {
    int version = 0;
    int status = load();
    if (status != FGA_OK)
        return status;
    cu.cuDriverGetVersion(&version);
    snprintf(text, text_bytes, "%s, driver API %d.%d, %d device%s", library_path, version / 1000, version % 1000 / 10,
             num_devices, num_devices == 1 ? "" : "s");
    return FGA_OK;
}

static int device_count(int *count) {
    int status = load();
    *count = num_devices;
    return status;
}

static int alloc(fga_memory *memory) {
    CUdeviceptr ptr = 0;
    memory->held = fga_round_up(memory->nbytes, FGA_GPU_PAGE);
    if (memory->held == 0)
        return fga_fail(FGA_MEMORY, "cuda: %llu bytes: too large", (unsigned long long)memory->nbytes);
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuMemAlloc_v2(&ptr, memory->held);
    leave();
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuMemAlloc", memory->device, memory->nbytes);
    memory->ptr = (void *)(uintptr_t)ptr;
    return FGA_OK;
}

static int release(fga_memory *memory) {
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuMemFree_v2((CUdeviceptr)(uintptr_t)memory->ptr);
    leave();
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemFree", memory->device, memory->nbytes);
}

/* The block at ptr must start there and hold all of it, or an IPC handle would mean something else. */
static int check_range(CUdeviceptr ptr, uint64_t held, int device) {
    CUdeviceptr base = 0;
    size_t nbytes = 0;
    CUresult error = cu.cuMemGetAddressRange_v2(&base, &nbytes, ptr);
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuMemGetAddressRange", device, held);
    if (base != ptr || nbytes < held)
        return fga_fail(FGA_RUNTIME, "cuda: pointer 0x%llx is %llu bytes into a block of %llu bytes; expected a block of "
                        "its own of at least %llu bytes", ptr, ptr - base, (unsigned long long)nbytes,
                        (unsigned long long)held);
    return FGA_OK;
}

static int export_payload(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]) {
    CUipcMemHandle handle;
    CUdeviceptr ptr = (CUdeviceptr)(uintptr_t)memory->ptr;
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    status = check_range(ptr, memory->held, memory->device);
    if (status == FGA_OK) {
        CUresult error = cu.cuIpcGetMemHandle(&handle, ptr);
        if (error != FGA_CUDA_SUCCESS)
            status = fail(error, "cuIpcGetMemHandle", memory->device, memory->nbytes);
    }
    leave();
    if (status == FGA_OK)
        memcpy(payload, &handle, sizeof handle);
    return status;
}

static int open_handle(const uint8_t payload[FGA_PAYLOAD_BYTES], const fga_identity *owner, uint64_t held, int device,
                       void **ptr) {
    (void)owner;
    CUipcMemHandle handle;
    CUdeviceptr opened = 0;
    memcpy(&handle, payload, sizeof handle);
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuIpcOpenMemHandle_v2(&opened, handle, FGA_CUDA_IPC_LAZY_PEER_ACCESS);
    if (error != FGA_CUDA_SUCCESS) {
        status = fail(error, "cuIpcOpenMemHandle", device, held);
    } else {
        status = check_range(opened, held, device);
        if (status != FGA_OK)
            cu.cuIpcCloseMemHandle(opened);
    }
    leave();
    *ptr = (void *)(uintptr_t)opened;
    return status;
}

static int close_handle(void *ptr, uint64_t held, int device) {
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuIpcCloseMemHandle((CUdeviceptr)(uintptr_t)ptr);
    leave();
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuIpcCloseMemHandle", device, held);
}

static int can_access_peer(int device, int peer, int *yes) {
    CUdevice from, to;
    CUresult error = cu.cuDeviceGet(&from, device);
    if (error == FGA_CUDA_SUCCESS)
        error = cu.cuDeviceGet(&to, peer);
    if (error == FGA_CUDA_SUCCESS)
        error = cu.cuDeviceCanAccessPeer(yes, from, to);
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuDeviceCanAccessPeer", device, 0);
}

static int enable_peer_access(int device, int peer) {
    CUcontext other;
    int status = get_context(peer, &other);
    if (status == FGA_OK)
        status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuCtxEnablePeerAccess(other, 0);
    leave();
    if (error == FGA_CUDA_SUCCESS || error == FGA_CUDA_PEER_ALREADY_ENABLED)
        return FGA_OK;
    return fga_fail(FGA_RUNTIME, "cuda: no peer access from device %d to device %d: %s (error %u)", device, peer,
                    text_of(error), (unsigned)error);
}

static int copy_rows(int device, const fga_copy *copy) {
    /* By address alone, whichever device it is on. */
    CUDA_MEMCPY2D rows = {
        .srcMemoryType = FGA_CUDA_MEMORY_UNIFIED,
        .srcDevice = (CUdeviceptr)(uintptr_t)copy->from,
        .srcPitch = copy->from_pitch,
        .dstMemoryType = FGA_CUDA_MEMORY_UNIFIED,
        .dstDevice = (CUdeviceptr)(uintptr_t)copy->to,
        .dstPitch = copy->to_pitch,
        .WidthInBytes = copy->width,
        .Height = copy->rows,
    };
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuMemcpy2DAsync_v2(&rows, (CUstream)copy->stream);
    leave();
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemcpy2DAsync", device, copy->width * copy->rows);
}

const fga_backend fga_cuda_backend = {
    .name = "cuda",
    .available = available,
    .device_count = device_count,
    .alloc = alloc,
    .release = release,
    .export_payload = export_payload,
    .open = open_handle,
    .close = close_handle,
    .can_access_peer = can_access_peer,
    .enable_peer_access = enable_peer_access,
    .copy_rows = copy_rows,
};
