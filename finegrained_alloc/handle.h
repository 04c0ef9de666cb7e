/* The exported handle: a fixed-size record that says what it is of, whose it is, and whether it arrived whole. */
#ifndef FGA_HANDLE_H
#define FGA_HANDLE_H

#include "internal.h"

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t backend;
    int32_t device; /* of the owner, in the owner's numbering */
    uint32_t reserved;
    uint64_t nbytes;
    uint64_t held;
    uint64_t id;
    uint64_t token[2];
    uint64_t pid_namespace;
    uint64_t start_time;
    uint64_t pid;
    uint8_t payload[FGA_PAYLOAD_BYTES];
    uint64_t checksum; /* of all before it: against damage, not against forgery */
} fga_handle;

_Static_assert(sizeof(fga_handle) == 24 + 8 * 8 + FGA_PAYLOAD_BYTES + 8, "the handle must have no padding");

void fga_pack_handle(fga_handle *handle, const fga_memory *memory, const fga_identity *owner,
                     const uint8_t payload[FGA_PAYLOAD_BYTES]);
/* FGA_INVALID, naming what is wrong, unless bytes hold one whole handle of this version. */
int fga_unpack_handle(fga_handle *handle, fga_identity *owner, const void *bytes, uint64_t count);

#endif
