/* HIP backend: fine-grained device memory, coherent with peers while a kernel runs.
 *
 * Ordinary hipMalloc memory may stay in a GPU's cache until the kernel ends, so a peer that polls a flag in it can wait for
 * ever; hipExtMallocWithFlags(fine-grained) is what lets flags and data cross within a kernel. The caller's current device is
 * put back after every call, and a failure never stays behind for the next hipGetLastError (PyTorch would report it as its own).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "hip_abi.h"
#include "internal.h"

typedef struct {
#define MEMBER(name, result, arguments) result(*name) arguments;
    FGA_HIP_FUNCTIONS(MEMBER)
#undef MEMBER
} hip_functions;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static hip_functions hip;
static bool ready;
static char library_path[256];
static int num_devices;

static int fail(hipError_t error, const char *call, int device, uint64_t nbytes) {
    hip.hipGetLastError();
    return fga_fail(error == FGA_HIP_OUT_OF_MEMORY ? FGA_MEMORY : FGA_RUNTIME,
                    "hip: %s of %llu bytes on device %d: %s (error %u)", call, (unsigned long long)nbytes, device,
                    hip.hipGetErrorString(error), (unsigned)error);
}

static int load_locked(void) {
    static const char *const names[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", NULL};
    if (ready)
        return FGA_OK;
    void *library = fga_load_library("PYROCSHMEM_HIP_LIBRARY", "libamdhip64", names, library_path, sizeof library_path);
    if (library == NULL)
        return fga_fail(FGA_UNAVAILABLE, "hip: the runtime library does not load: %s", dlerror());
/* POSIX dlsym yields functions as void *; the copy avoids a cast that ISO C forbids. */
#define RESOLVE(name, result, arguments)                                                               \
    do {                                                                                               \
        void *symbol = dlsym(library, #name);                                                          \
        if (symbol == NULL)                                                                            \
            return fga_fail(FGA_UNAVAILABLE, "hip: %s has no %s", library_path, #name);                \
        memcpy(&hip.name, &symbol, sizeof symbol);                                                     \
    } while (0);
    FGA_HIP_FUNCTIONS(RESOLVE)
#undef RESOLVE
    int version = 0;
    /* HIP 6 is the first with MI300X; before it FGA_HIP_IPC_LAZY_PEER_ACCESS had another value. */
    if (hip.hipRuntimeGetVersion(&version) != FGA_HIP_SUCCESS || version < 60000000) {
        hip.hipGetLastError();
        return fga_fail(FGA_UNAVAILABLE, "hip: %s is of version %d.%d, expected 6.0 or newer", library_path,
                        version / 10000000, version / 100000 % 100);
    }
    hipError_t error = hip.hipGetDeviceCount(&num_devices);
    if (error != FGA_HIP_SUCCESS || num_devices == 0) {
        hip.hipGetLastError();
        return fga_fail(FGA_UNAVAILABLE, "hip: no device: %s (error %u)", hip.hipGetErrorString(error),
                        (unsigned)error);
    }
    ready = true;
    return FGA_OK;
}

static int load(void) {
    pthread_mutex_lock(&lock);
    int status = load_locked();
    pthread_mutex_unlock(&lock);
    return status;
}

static int enter(int device, int *previous) {
    int status = load();
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipGetDevice(previous);
    if (error == FGA_HIP_SUCCESS && *previous != device)
        error = hip.hipSetDevice(device);
    return error == FGA_HIP_SUCCESS ? FGA_OK : fail(error, "hipSetDevice", device, 0);
}

static void leave(int device, int previous) {
    if (device != previous)
        hip.hipSetDevice(previous);
}

static int available(char *text, size_t text_bytes) {
    int version = 0;
    int status = load();
    if (status != FGA_OK)
        return status;
    hip.hipRuntimeGetVersion(&version);
    snprintf(text, text_bytes, "%s, HIP %d.%d, %d device%s", library_path, version / 10000000,
             version / 100000 % 100, num_devices, num_devices == 1 ? "" : "s");
    return FGA_OK;
}

static int device_count(int *count) {
    int status = load();
    *count = num_devices;
    return status;
}

static int alloc(fga_memory *memory) {
    int previous;
    memory->held = fga_round_up(memory->nbytes, FGA_GPU_PAGE);
    if (memory->held == 0)
        return fga_fail(FGA_MEMORY, "hip: %llu bytes: too large", (unsigned long long)memory->nbytes);
    int status = enter(memory->device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipExtMallocWithFlags(&memory->ptr, memory->held, FGA_HIP_MALLOC_FINEGRAINED);
    if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipExtMallocWithFlags", memory->device, memory->nbytes);
    leave(memory->device, previous);
    return status;
}

static int release(fga_memory *memory) {
    int previous;
    int status = enter(memory->device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipFree(memory->ptr);
    if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipFree", memory->device, memory->nbytes);
    leave(memory->device, previous);
    return status;
}

/* An IPC handle stands for a whole block: it must be this allocation's own. */
static int get_handle(const fga_memory *memory, hipIpcMemHandle_t *handle) {
    hipDeviceptr_t base = NULL;
    size_t nbytes = 0;
    hipError_t error = hip.hipMemGetAddressRange(&base, &nbytes, memory->ptr);
    if (error != FGA_HIP_SUCCESS)
        return fail(error, "hipMemGetAddressRange", memory->device, memory->nbytes);
    if (base != memory->ptr || nbytes < memory->held)
        return fga_fail(FGA_RUNTIME, "hip: pointer %p is in a block of %llu bytes at %p; expected a block of its own of "
                        "at least %llu bytes", memory->ptr, (unsigned long long)nbytes, base,
                        (unsigned long long)memory->held);
    error = hip.hipIpcGetMemHandle(handle, memory->ptr);
    return error == FGA_HIP_SUCCESS ? FGA_OK : fail(error, "hipIpcGetMemHandle", memory->device, memory->nbytes);
}

static int export_payload(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]) {
    hipIpcMemHandle_t handle;
    int previous;
    int status = enter(memory->device, &previous);
    if (status != FGA_OK)
        return status;
    status = get_handle(memory, &handle);
    leave(memory->device, previous);
    if (status == FGA_OK)
        memcpy(payload, &handle, sizeof handle);
    return status;
}

static int open_handle(const uint8_t payload[FGA_PAYLOAD_BYTES], const fga_identity *owner, uint64_t held, int device,
                       bool at, void **ptr) {
    (void)owner, (void)at; /* there are no spaces here */
    hipIpcMemHandle_t handle;
    int previous;
    memcpy(&handle, payload, sizeof handle);
    int status = enter(device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipIpcOpenMemHandle(ptr, handle, FGA_HIP_IPC_LAZY_PEER_ACCESS);
    if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipIpcOpenMemHandle", device, held);
    leave(device, previous);
    return status;
}

static int close_handle(void *ptr, uint64_t held, int device, bool at) {
    int previous;
    (void)at;
    int status = enter(device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipIpcCloseMemHandle(ptr);
    if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipIpcCloseMemHandle", device, held);
    leave(device, previous);
    return status;
}

static int can_access_peer(int device, int peer, int *yes) {
    hipError_t error = hip.hipDeviceCanAccessPeer(yes, device, peer);
    return error == FGA_HIP_SUCCESS ? FGA_OK : fail(error, "hipDeviceCanAccessPeer", device, 0);
}

static int enable_peer_access(int device, int peer) {
    int previous;
    int status = enter(device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipDeviceEnablePeerAccess(peer, 0);
    if (error == FGA_HIP_PEER_ALREADY_ENABLED)
        hip.hipGetLastError();
    else if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipDeviceEnablePeerAccess", device, 0);
    leave(device, previous);
    return status;
}

static int copy_rows(int device, const fga_copy *copy) {
    int previous;
    int status = enter(device, &previous);
    if (status != FGA_OK)
        return status;
    hipError_t error = hip.hipMemcpy2DAsync(copy->to, copy->to_pitch, copy->from, copy->from_pitch, copy->width, copy->rows,
                                            FGA_HIP_MEMCPY_DEFAULT, (hipStream_t)copy->stream);
    if (error != FGA_HIP_SUCCESS)
        status = fail(error, "hipMemcpy2DAsync", device, copy->width * copy->rows);
    leave(device, previous);
    return status;
}

const fga_backend fga_hip_backend = {
    .name = "hip",
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
