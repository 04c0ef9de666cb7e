/* Host backend: a file in /dev/shm, mapped shared.
 *
 * The name is 128 random bits and the file is created exclusively with mode 0600, so that no other user can guess, plant or
 * read one. Space is reserved at once: a full /dev/shm is an error here and not a SIGBUS later. The opener checks that it
 * got the very inode that the owner made.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "internal.h"

#define DIRECTORY "/dev/shm"
#define PREFIX "pyrocshmem-"
#define RANDOM_BYTES 16
#define NAME_LENGTH (sizeof PREFIX - 1 + 2 * RANDOM_BYTES)

typedef struct {
    char name[64];
    uint64_t inode;
    uint64_t filesystem;
} file_payload;

_Static_assert(sizeof(file_payload) <= FGA_PAYLOAD_BYTES, "payload too small for a file");
_Static_assert(NAME_LENGTH < 64, "name too long for its field");

static void path_of(const char *name, char path[96]) { snprintf(path, 96, "%s/%.63s", DIRECTORY, name); }

static int available(char *text, size_t text_bytes) {
    struct stat info;
    if (stat(DIRECTORY, &info) != 0 || !S_ISDIR(info.st_mode) || access(DIRECTORY, R_OK | W_OK | X_OK) != 0)
        return fga_fail(FGA_UNAVAILABLE, "host: %s: %s", DIRECTORY, strerror(errno));
    snprintf(text, text_bytes, "%s", DIRECTORY);
    return FGA_OK;
}

static int device_count(int *count) {
    *count = 1;
    return FGA_OK;
}

static int out_of_space(uint64_t nbytes, const char *what, int error) {
    struct statvfs info;
    unsigned long long left = 0;
    if (statvfs(DIRECTORY, &info) == 0)
        left = (unsigned long long)info.f_bavail * info.f_frsize;
    return fga_fail(FGA_MEMORY,
                    "host: %llu bytes in %s: %s: %s (%llu bytes free there; a container takes its limit from --shm-size)",
                    (unsigned long long)nbytes, DIRECTORY, what, strerror(error), left);
}

static int reserve(int fd, uint64_t held) {
    int error;
    do
        error = posix_fallocate(fd, 0, (off_t)held);
    while (error == EINTR);
    return error;
}

static int map_new_file(int fd, fga_memory *memory, file_payload *file) {
    struct stat info;
    /* The umask can only have taken bits away; peers insist on exactly 0600. */
    if (fchmod(fd, 0600) != 0 || fstat(fd, &info) != 0)
        return fga_fail(FGA_RUNTIME, "host: %s/%s: %s", DIRECTORY, file->name, strerror(errno));
    int error = reserve(fd, memory->held);
    if (error != 0)
        return out_of_space(memory->nbytes, "posix_fallocate", error);
    memory->ptr = mmap(NULL, memory->held, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory->ptr == MAP_FAILED)
        return out_of_space(memory->nbytes, "mmap", errno);
    file->inode = (uint64_t)info.st_ino;
    file->filesystem = (uint64_t)info.st_dev;
    return FGA_OK;
}

static int alloc(fga_memory *memory) {
    file_payload file = {.name = PREFIX};
    uint8_t random[RANDOM_BYTES];
    char path[96];
    memory->held = fga_round_up(memory->nbytes, (uint64_t)sysconf(_SC_PAGESIZE));
    if (memory->held == 0 || memory->held > INT64_MAX)
        return out_of_space(memory->nbytes, "too large", EFBIG);
    int status = fga_random(random, sizeof random);
    if (status != FGA_OK)
        return status;
    for (int i = 0; i < RANDOM_BYTES; i++)
        snprintf(file.name + sizeof PREFIX - 1 + 2 * i, 3, "%02x", random[i]);
    path_of(file.name, path);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return fga_fail(errno == ENOSPC ? FGA_MEMORY : FGA_RUNTIME, "host: %s: %s", path, strerror(errno));
    status = map_new_file(fd, memory, &file);
    close(fd);
    if (status != FGA_OK) {
        unlink(path);
        return status;
    }
    memory->named = true;
    memcpy(memory->payload, &file, sizeof file);
    return FGA_OK;
}

static int seal(fga_memory *memory) {
    char path[96];
    if (!memory->named)
        return FGA_OK;
    path_of((const char *)memory->payload, path);
    memory->named = false;
    /* Someone else may have cleaned /dev/shm: gone is what was wanted. */
    if (unlink(path) != 0 && errno != ENOENT)
        return fga_fail(FGA_RUNTIME, "host: unlink %s: %s", path, strerror(errno));
    return FGA_OK;
}

static int unmap(void *ptr, uint64_t held, int device) {
    (void)device;
    if (munmap(ptr, held) != 0)
        return fga_fail(FGA_RUNTIME, "host: munmap: %s", strerror(errno));
    return FGA_OK;
}

static int release(fga_memory *memory) {
    int sealed = seal(memory);
    int unmapped = unmap(memory->ptr, memory->held, 0);
    return sealed != FGA_OK ? sealed : unmapped;
}

static int export_payload(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]) {
    if (!memory->named)
        return fga_fail(FGA_INVALID, "host: the allocation is sealed: its file has no name any more");
    memcpy(payload, memory->payload, FGA_PAYLOAD_BYTES);
    return FGA_OK;
}

/* A handle comes from outside: the name must not be able to lead anywhere else. */
static bool is_our_name(const char name[64]) {
    if (memchr(name, '\0', 64) != name + NAME_LENGTH || strncmp(name, PREFIX, sizeof PREFIX - 1) != 0)
        return false;
    return strspn(name + sizeof PREFIX - 1, "0123456789abcdef") == 2 * RANDOM_BYTES;
}

static bool is_same_file(const struct stat *info, const file_payload *file) {
    return S_ISREG(info->st_mode) && info->st_uid == geteuid() && (info->st_mode & 07777) == 0600 &&
           (uint64_t)info->st_ino == file->inode && (uint64_t)info->st_dev == file->filesystem;
}

static int open_file(const uint8_t payload[FGA_PAYLOAD_BYTES], uint64_t held, int device, void **ptr) {
    (void)device;
    file_payload file;
    struct stat info;
    char path[96];
    memcpy(&file, payload, sizeof file);
    if (!is_our_name(file.name))
        return fga_fail(FGA_INVALID, "host: the handle holds no name of this library");
    path_of(file.name, path);
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return fga_fail(FGA_STALE, "host: %s does not exist: the owner has freed or sealed the memory, or shares no "
                        "/dev/shm with this process", path);
    if (fd < 0)
        return fga_fail(FGA_RUNTIME, "host: %s: %s", path, strerror(errno));
    int status = FGA_OK;
    if (fstat(fd, &info) != 0)
        status = fga_fail(FGA_RUNTIME, "host: %s: %s", path, strerror(errno));
    else if (!is_same_file(&info, &file) || (uint64_t)info.st_size != held)
        status = fga_fail(FGA_INVALID, "host: %s is not the file that was exported (owner %u, mode %o, %lld bytes; "
                          "expected owner %u, mode 600, %llu bytes, and the same inode)", path, info.st_uid,
                          info.st_mode & 07777, (long long)info.st_size, geteuid(), (unsigned long long)held);
    if (status == FGA_OK) {
        *ptr = mmap(NULL, held, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*ptr == MAP_FAILED)
            status = fga_fail(FGA_MEMORY, "host: mmap of %llu bytes: %s", (unsigned long long)held, strerror(errno));
    }
    close(fd);
    return status;
}

static void discard(const uint8_t payload[FGA_PAYLOAD_BYTES]) {
    file_payload file;
    struct stat info;
    char path[96];
    memcpy(&file, payload, sizeof file);
    if (!is_our_name(file.name))
        return;
    path_of(file.name, path);
    if (lstat(path, &info) == 0 && is_same_file(&info, &file))
        unlink(path);
}

static int can_access_peer(int device, int peer, int *yes) {
    (void)device, (void)peer;
    *yes = 1;
    return FGA_OK;
}

static int enable_peer_access(int device, int peer) {
    (void)device, (void)peer;
    return FGA_OK;
}

static int copy_rows(int device, const fga_copy *copy) {
    (void)device;
    for (uint64_t row = 0; row < copy->rows; row++)
        memcpy((char *)copy->to + row * copy->to_pitch, (const char *)copy->from + row * copy->from_pitch, copy->width);
    return FGA_OK;
}

const fga_backend fga_host_backend = {
    .name = "host",
    .available = available,
    .device_count = device_count,
    .alloc = alloc,
    .release = release,
    .seal = seal,
    .export_payload = export_payload,
    .open = open_file,
    .close = unmap,
    .discard = discard,
    .can_access_peer = can_access_peer,
    .enable_peer_access = enable_peer_access,
    .copy_rows = copy_rows,
};
