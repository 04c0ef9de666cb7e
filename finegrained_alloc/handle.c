/* Packing and checking of exported handles. */
#include "handle.h"

#include <string.h>

#define MAGIC "FGALLOC"
#define VERSION 2u

/* FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/ */
static uint64_t checksum_of(const fga_handle *handle) {
    const uint8_t *bytes = (const uint8_t *)handle;
    uint64_t sum = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < offsetof(fga_handle, checksum); i++)
        sum = (sum ^ bytes[i]) * UINT64_C(0x100000001b3);
    return sum;
}

void fga_pack_handle(fga_handle *handle, const fga_memory *memory, const fga_identity *owner,
                     const uint8_t payload[FGA_PAYLOAD_BYTES]) {
    memset(handle, 0, sizeof *handle);
    memcpy(handle->magic, MAGIC, sizeof handle->magic);
    handle->version = VERSION;
    handle->backend = (uint32_t)memory->backend;
    handle->device = memory->device;
    handle->nbytes = memory->nbytes;
    handle->held = memory->held;
    handle->id = memory->id;
    memcpy(handle->token, owner->token, sizeof handle->token);
    handle->pid_namespace = owner->pid_namespace;
    handle->start_time = owner->start_time;
    handle->pid = owner->pid;
    memcpy(handle->payload, payload, FGA_PAYLOAD_BYTES);
    handle->checksum = checksum_of(handle);
}

int fga_unpack_handle(fga_handle *handle, fga_identity *owner, const void *bytes, uint64_t count) {
    if (count != sizeof *handle)
        return fga_fail(FGA_INVALID, "handle is %s: %llu bytes, expected %zu", count < sizeof *handle ? "truncated" : "too long",
                        (unsigned long long)count, sizeof *handle);
    memcpy(handle, bytes, sizeof *handle);
    if (memcmp(handle->magic, MAGIC, sizeof handle->magic) != 0)
        return fga_fail(FGA_INVALID, "not a handle of finegrained_alloc: wrong magic");
    if (handle->version != VERSION)
        return fga_fail(FGA_INVALID, "handle is of version %u, this library reads version %u", handle->version, VERSION);
    if (handle->checksum != checksum_of(handle))
        return fga_fail(FGA_INVALID, "handle is damaged: wrong checksum");
    if (fga_find_backend((int)handle->backend) == NULL)
        return FGA_INVALID;
    if (handle->nbytes == 0 || handle->nbytes > handle->held || handle->device < 0)
        return fga_fail(FGA_INVALID, "handle makes no sense: %llu bytes in a block of %llu, device %d",
                        (unsigned long long)handle->nbytes, (unsigned long long)handle->held, handle->device);
    memcpy(owner->token, handle->token, sizeof owner->token);
    owner->pid_namespace = handle->pid_namespace;
    owner->start_time = handle->start_time;
    owner->pid = (uint32_t)handle->pid;
    return FGA_OK;
}
