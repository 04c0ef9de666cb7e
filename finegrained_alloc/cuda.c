/* CUDA backend: the driver API on the primary context, which is the one that PyTorch and every CUDA runtime use.
 *
 * cuMemAlloc packs small requests into shared 2 MiB blocks, and an IPC handle exports the whole block: sizes are therefore
 * rounded up to 2 MiB, and export checks with the driver that the pointer is the base of a block of its own.
 *
 * An IPC handle opens wherever the driver likes. Memory at a given address is made, shared and mapped by the driver's functions
 * for virtual memory instead, and its handle stands for a file descriptor (descriptors.c). The mapping keeps the memory: the
 * owner's and each peer's hold their own reference to it, so none needs to wait for another one's end.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "registry.h"

typedef struct {
#define MEMBER(name, arguments) CUresult(*name) arguments;
    FGA_CUDA_FUNCTIONS(MEMBER)
#undef MEMBER
} cuda_functions;

/* Behind the bytes of an IPC handle. */
enum { IPC_HANDLE = 0, DESCRIPTOR = 1 };
typedef struct {
    CUipcMemHandle ipc;
    uint32_t kind;
    uint32_t reserved;
    uint64_t id; /* of the allocation, by which its owner finds the descriptor */
} cuda_payload;

_Static_assert(sizeof(cuda_payload) <= FGA_PAYLOAD_BYTES, "payload too small for a handle");

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

/* Memory of the device that a file descriptor can stand for. */
static CUmemAllocationProp properties_of(int device) {
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    properties.type = FGA_CUDA_PINNED;
    properties.requestedHandleTypes = FGA_CUDA_POSIX_DESCRIPTOR;
    properties.location.type = FGA_CUDA_LOCATION_DEVICE;
    properties.location.id = device;
    return properties;
}

/* Whether the device can do that at all, with pieces of 2 MiB. */
static int check_spaces(int device) {
    static const struct {
        unsigned attribute;
        const char *name;
    } needed[] = {{FGA_CUDA_HAS_VIRTUAL_MEMORY, "virtual memory management"},
                  {FGA_CUDA_HAS_POSIX_DESCRIPTORS, "file descriptors for memory"}};
    CUmemAllocationProp properties = properties_of(device);
    CUdevice handle;
    size_t granularity = 0;
    CUresult error = cu.cuDeviceGet(&handle, device);
    for (size_t i = 0; i < sizeof needed / sizeof *needed && error == FGA_CUDA_SUCCESS; i++) {
        int yes = 0;
        error = cu.cuDeviceGetAttribute(&yes, needed[i].attribute, handle);
        if (error == FGA_CUDA_SUCCESS && !yes)
            return fga_fail(FGA_UNAVAILABLE, "cuda: device %d has no %s", device, needed[i].name);
    }
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuDeviceGetAttribute", device, 0);
    error = cu.cuMemGetAllocationGranularity(&granularity, &properties, FGA_CUDA_GRANULARITY_MINIMUM);
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuMemGetAllocationGranularity", device, 0);
    if (granularity == 0 || FGA_PIECE % granularity != 0)
        return fga_fail(FGA_UNAVAILABLE, "cuda: device %d has memory in pieces of %zu bytes, expected 2 MiB or a part of that",
                        device, granularity);
    return FGA_OK;
}

static int reserve(int device, uint64_t nbytes, void **ptr) {
    CUdeviceptr found = 0;
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    status = check_spaces(device);
    if (status == FGA_OK) {
        CUresult error = cu.cuMemAddressReserve(&found, nbytes, FGA_PIECE, 0, 0);
        if (error != FGA_CUDA_SUCCESS)
            status = fail(error, "cuMemAddressReserve", device, nbytes);
    }
    leave();
    *ptr = (void *)(uintptr_t)found;
    return status;
}

static int unreserve(void *ptr, uint64_t nbytes, int device) {
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuMemAddressFree((CUdeviceptr)(uintptr_t)ptr, nbytes);
    leave();
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemAddressFree", device, nbytes);
}

/* For kernels on the device. */
static int give_access(CUdeviceptr ptr, uint64_t held, int device) {
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = FGA_CUDA_LOCATION_DEVICE;
    access.location.id = device;
    access.flags = FGA_CUDA_READ_WRITE;
    CUresult error = cu.cuMemSetAccess(ptr, held, &access, 1);
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemSetAccess", device, held);
}

static int unmap(CUdeviceptr ptr, uint64_t held, int device) {
    CUresult error = cu.cuMemUnmap(ptr, held);
    return error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemUnmap", device, held);
}

/* The handle is given back, whatever happens: from here on the mapping holds the memory. */
static int map_at(CUdeviceptr ptr, uint64_t held, int device, CUmemGenericAllocationHandle handle) {
    CUresult error = cu.cuMemMap(ptr, held, 0, handle, 0);
    int status = error == FGA_CUDA_SUCCESS ? give_access(ptr, held, device) : fail(error, "cuMemMap", device, held);
    if (error == FGA_CUDA_SUCCESS && status != FGA_OK)
        cu.cuMemUnmap(ptr, held);
    CUresult released = cu.cuMemRelease(handle);
    if (status == FGA_OK && released != FGA_CUDA_SUCCESS) {
        cu.cuMemUnmap(ptr, held);
        status = fail(released, "cuMemRelease", device, held);
    }
    return status;
}

static int seal(fga_memory *memory) {
    if (memory->descriptor >= 0)
        close(memory->descriptor);
    memory->descriptor = -1;
    return FGA_OK;
}

/* In the device's context. */
static int alloc_at(fga_memory *memory) {
    CUmemAllocationProp properties = properties_of(memory->device);
    CUmemGenericAllocationHandle handle;
    CUresult error = cu.cuMemCreate(&handle, memory->held, &properties, 0);
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuMemCreate", memory->device, memory->nbytes);
    error = cu.cuMemExportToShareableHandle(&memory->descriptor, handle, FGA_CUDA_POSIX_DESCRIPTOR, 0);
    if (error != FGA_CUDA_SUCCESS) {
        memory->descriptor = -1;
        cu.cuMemRelease(handle);
        return fail(error, "cuMemExportToShareableHandle", memory->device, memory->nbytes);
    }
    fcntl(memory->descriptor, F_SETFD, FD_CLOEXEC);
    int status = map_at((CUdeviceptr)(uintptr_t)memory->ptr, memory->held, memory->device, handle);
    if (status != FGA_OK)
        seal(memory);
    return status;
}

static int alloc_anywhere(fga_memory *memory) {
    CUdeviceptr ptr = 0;
    CUresult error = cu.cuMemAlloc_v2(&ptr, memory->held);
    if (error != FGA_CUDA_SUCCESS)
        return fail(error, "cuMemAlloc", memory->device, memory->nbytes);
    memory->ptr = (void *)(uintptr_t)ptr;
    return FGA_OK;
}

static int alloc(fga_memory *memory) {
    memory->held = fga_round_up(memory->nbytes, FGA_GPU_PAGE);
    if (memory->held == 0)
        return fga_fail(FGA_MEMORY, "cuda: %llu bytes: too large", (unsigned long long)memory->nbytes);
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    status = memory->space != NULL ? alloc_at(memory) : alloc_anywhere(memory);
    leave();
    return status;
}

static int release(fga_memory *memory) {
    CUdeviceptr ptr = (CUdeviceptr)(uintptr_t)memory->ptr;
    seal(memory);
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    if (memory->space != NULL) {
        status = unmap(ptr, memory->held, memory->device);
    } else {
        CUresult error = cu.cuMemFree_v2(ptr);
        status = error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuMemFree", memory->device, memory->nbytes);
    }
    leave();
    return status;
}

static int admit(const fga_memory *memory, int device) {
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    status = give_access((CUdeviceptr)(uintptr_t)memory->ptr, memory->held, device);
    leave();
    return status;
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

static int get_ipc_handle(const fga_memory *memory, CUipcMemHandle *handle) {
    CUdeviceptr ptr = (CUdeviceptr)(uintptr_t)memory->ptr;
    int status = enter(memory->device);
    if (status != FGA_OK)
        return status;
    status = check_range(ptr, memory->held, memory->device);
    if (status == FGA_OK) {
        CUresult error = cu.cuIpcGetMemHandle(handle, ptr);
        if (error != FGA_CUDA_SUCCESS)
            status = fail(error, "cuIpcGetMemHandle", memory->device, memory->nbytes);
    }
    leave();
    return status;
}

static int export_payload(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]) {
    cuda_payload packed;
    int status;
    memset(&packed, 0, sizeof packed);
    if (memory->space == NULL) {
        status = get_ipc_handle(memory, &packed.ipc);
    } else if (memory->descriptor < 0) {
        status = fga_fail(FGA_INVALID, "cuda: the allocation is sealed: no peer can open it any more");
    } else {
        packed.kind = DESCRIPTOR;
        packed.id = memory->id;
        status = fga_serve_descriptors(&fga_registry.self);
    }
    if (status == FGA_OK)
        memcpy(payload, &packed, sizeof packed);
    return status;
}

static int open_ipc(const CUipcMemHandle *handle, uint64_t held, int device, CUdeviceptr *opened) {
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuIpcOpenMemHandle_v2(opened, *handle, FGA_CUDA_IPC_LAZY_PEER_ACCESS);
    if (error != FGA_CUDA_SUCCESS) {
        status = fail(error, "cuIpcOpenMemHandle", device, held);
    } else {
        status = check_range(*opened, held, device);
        if (status != FGA_OK)
            cu.cuIpcCloseMemHandle(*opened);
    }
    leave();
    return status;
}

static int open_descriptor(int fd, uint64_t held, int device, CUdeviceptr at) {
    CUmemGenericAllocationHandle handle;
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    CUresult error = cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, FGA_CUDA_POSIX_DESCRIPTOR);
    status = error == FGA_CUDA_SUCCESS ? map_at(at, held, device, handle)
                                       : fail(error, "cuMemImportFromShareableHandle", device, held);
    leave();
    return status;
}

static int open_handle(const uint8_t payload[FGA_PAYLOAD_BYTES], const fga_identity *owner, uint64_t held, int device,
                       bool at, void **ptr) {
    cuda_payload packed;
    CUdeviceptr opened = at ? (CUdeviceptr)(uintptr_t)*ptr : 0;
    memcpy(&packed, payload, sizeof packed);
    if (packed.kind != (at ? DESCRIPTOR : IPC_HANDLE))
        return fga_fail(FGA_INVALID, "cuda: the handle is of memory %s reserved address space: open it %s",
                        at ? "outside of" : "in", at ? "anywhere" : "at an address in such space");
    int status;
    if (at) {
        int fd;
        status = fga_ask_for_descriptor(owner, packed.id, "cuda", &fd);
        if (status != FGA_OK)
            return status;
        status = open_descriptor(fd, held, device, opened);
        close(fd);
    } else {
        status = open_ipc(&packed.ipc, held, device, &opened);
    }
    *ptr = (void *)(uintptr_t)opened;
    return status;
}

static int close_handle(void *ptr, uint64_t held, int device, bool at) {
    CUdeviceptr opened = (CUdeviceptr)(uintptr_t)ptr;
    int status = enter(device);
    if (status != FGA_OK)
        return status;
    if (at) {
        status = unmap(opened, held, device);
    } else {
        CUresult error = cu.cuIpcCloseMemHandle(opened);
        status = error == FGA_CUDA_SUCCESS ? FGA_OK : fail(error, "cuIpcCloseMemHandle", device, held);
    }
    leave();
    return status;
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
    .reserve = reserve,
    .unreserve = unreserve,
    .alloc = alloc,
    .release = release,
    .seal = seal,
    .export_payload = export_payload,
    .open = open_handle,
    .close = close_handle,
    .can_access_peer = can_access_peer,
    .enable_peer_access = enable_peer_access,
    .admit = admit,
    .copy_rows = copy_rows,
};
