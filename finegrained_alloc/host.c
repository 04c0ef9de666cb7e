/* Host backend: files in /dev/shm that never have a name, mapped shared.
 *
 * Without a name nobody can guess, plant or read it, and nothing stays of it when a process is killed, at whatever
 * instant. Peers open the owner's descriptor in /proc, which the system lets processes of the same user do; the owner keeps
 * it open until the memory is sealed or freed. An opener checks that it got the very inode that the owner made. Space is
 * reserved at once: a full /dev/shm is an error here and not a SIGBUS later.
 *
 * Where /dev/shm cannot hold nameless files, the file is a memfd. That is not counted against the size of /dev/shm, nor against
 * anything else that refuses in time, so what is left is looked at before space is reserved.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "internal.h"

/* Tests build with another. */
#ifndef FGA_SHM
#define FGA_SHM "/dev/shm"
#endif
/* Of a memfd: ranks that allocate at once take turns by so much, and see in time what the others took. */
#define STEP (UINT64_C(16) << 20)

typedef struct {
    uint64_t inode;
    uint64_t filesystem;
    int64_t descriptor;
} file_payload;

_Static_assert(sizeof(file_payload) <= FGA_PAYLOAD_BYTES, "payload too small for a file");

/* The descriptor, or -1 with errno set. */
static int make_file(bool *is_memfd) {
    int fd = open(FGA_SHM, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    /* The directory is missing, may not be written to, or its file system knows only files with names. */
    *is_memfd = fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == EACCES || errno == EROFS ||
                           errno == EOPNOTSUPP || errno == EISDIR);
    return *is_memfd ? memfd_create("pyrocshmem", MFD_CLOEXEC) : fd;
}

static int no_file(int error) {
    struct rlimit files;
    if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0)
        return fga_fail(FGA_RUNTIME, "host: %s (at most %llu, `ulimit -n`; an allocation holds one until it is sealed)",
                        strerror(error), (unsigned long long)files.rlim_cur);
    return fga_fail(error == ENOSPC || error == ENOMEM ? FGA_MEMORY : FGA_RUNTIME, "host: a file in %s: %s", FGA_SHM,
                    strerror(error));
}

static int available(char *text, size_t text_bytes) {
    bool is_memfd;
    int fd = make_file(&is_memfd);
    if (fd < 0)
        return fga_fail(FGA_UNAVAILABLE, "host: a file in %s: %s", FGA_SHM, strerror(errno));
    close(fd);
    if (access("/proc/self/fd", X_OK) != 0)
        return fga_fail(FGA_UNAVAILABLE, "host: /proc/self/fd: %s", strerror(errno));
    snprintf(text, text_bytes, is_memfd ? "memfd, since %s holds no nameless files" : "%s", FGA_SHM);
    return FGA_OK;
}

static int device_count(int *count) {
    *count = 1;
    return FGA_OK;
}

static int out_of_space(uint64_t nbytes, int error) {
    struct statvfs info;
    struct rlimit size;
    unsigned long long left = 0;
    if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &size) == 0 && size.rlim_cur != RLIM_INFINITY)
        return fga_fail(FGA_MEMORY, "host: %llu bytes in %s: files of this process are limited to %llu bytes (RLIMIT_FSIZE, "
                        "`ulimit -f`)", (unsigned long long)nbytes, FGA_SHM, (unsigned long long)size.rlim_cur);
    if (statvfs(FGA_SHM, &info) == 0)
        left = (unsigned long long)info.f_bavail * info.f_frsize;
    return fga_fail(FGA_MEMORY, "host: %llu bytes in %s: %s (%llu bytes free there; a container takes its limit from "
                    "--shm-size)", (unsigned long long)nbytes, FGA_SHM, strerror(error), left);
}

static int reserve(int fd, uint64_t start, uint64_t nbytes) {
    int error;
    do
        error = posix_fallocate(fd, (off_t)start, (off_t)nbytes);
    while (error == EINTR);
    return error;
}

static int reserve_memfd(int fd, const fga_memory *memory) {
    char limit[1200];
    for (uint64_t done = 0; done < memory->held; done += STEP) {
        uint64_t missing = memory->held - done;
        uint64_t left = fga_free_memory(limit, sizeof limit);
        if (missing > left)
            return fga_fail(FGA_MEMORY, "host: %llu bytes in a memfd: too little memory is left: %.400s",
                            (unsigned long long)memory->nbytes, limit);
        int error = reserve(fd, done, missing < STEP ? missing : STEP);
        if (error != 0)
            return fga_fail(FGA_MEMORY, "host: %llu bytes in a memfd: %s", (unsigned long long)memory->nbytes,
                            strerror(error));
    }
    return FGA_OK;
}

static int no_addresses(uint64_t held, int error) {
    struct rlimit space;
    if (error == ENOMEM && getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
        return fga_fail(FGA_MEMORY, "host: mmap of %llu bytes: the address space of this process is limited to %llu bytes "
                        "(RLIMIT_AS, `ulimit -v`)", (unsigned long long)held, (unsigned long long)space.rlim_cur);
    return fga_fail(FGA_MEMORY, "host: mmap of %llu bytes: %s", (unsigned long long)held, strerror(error));
}

/* at: in place of what *ptr reserves. */
static int map_file(int fd, uint64_t held, bool at, void **ptr) {
    void *mapped = mmap(at ? *ptr : NULL, held, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
    if (mapped == MAP_FAILED)
        return no_addresses(held, errno);
    *ptr = mapped;
    return FGA_OK;
}

static int reserve_addresses(int device, uint64_t nbytes, void **ptr) {
    (void)device;
    *ptr = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *ptr != MAP_FAILED ? FGA_OK : no_addresses(nbytes, errno);
}

static int seal(fga_memory *memory) {
    if (memory->descriptor >= 0)
        close(memory->descriptor);
    memory->descriptor = -1;
    return FGA_OK;
}

static int alloc(fga_memory *memory) {
    bool is_memfd;
    memory->held = fga_round_up(memory->nbytes, (uint64_t)sysconf(_SC_PAGESIZE));
    if (memory->held == 0 || memory->held > INT64_MAX)
        return out_of_space(memory->nbytes, EFBIG);
    memory->descriptor = make_file(&is_memfd);
    if (memory->descriptor < 0)
        return no_file(errno);
    int status = FGA_OK;
    /* A memfd is open to all, and the umask may have taken bits from a file: peers insist on exactly 0600. */
    if (fchmod(memory->descriptor, 0600) != 0)
        status = fga_fail(FGA_RUNTIME, "host: fchmod: %s", strerror(errno));
    else if (is_memfd)
        status = reserve_memfd(memory->descriptor, memory);
    else {
        int error = reserve(memory->descriptor, 0, memory->held);
        if (error != 0)
            status = out_of_space(memory->nbytes, error);
    }
    if (status == FGA_OK)
        status = map_file(memory->descriptor, memory->held, memory->space != NULL, &memory->ptr);
    if (status != FGA_OK)
        seal(memory);
    return status;
}

static int unreserve(void *ptr, uint64_t nbytes, int device) {
    (void)device;
    if (munmap(ptr, nbytes) != 0)
        return fga_fail(FGA_RUNTIME, "host: munmap: %s", strerror(errno));
    return FGA_OK;
}

static int unmap(void *ptr, uint64_t held, int device, bool at) {
    if (!at)
        return unreserve(ptr, held, device);
    /* In one step, so that no other thread's mapping can come between. */
    if (mmap(ptr, held, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return fga_fail(FGA_RUNTIME, "host: mmap of what is given back: %s", strerror(errno));
    return FGA_OK;
}

static int release(fga_memory *memory) {
    seal(memory);
    return unmap(memory->ptr, memory->held, 0, memory->space != NULL);
}

static int export_payload(const fga_memory *memory, uint8_t payload[FGA_PAYLOAD_BYTES]) {
    struct stat info;
    if (memory->descriptor < 0)
        return fga_fail(FGA_INVALID, "host: the allocation is sealed: no peer can open it any more");
    if (fstat(memory->descriptor, &info) != 0)
        return fga_fail(FGA_RUNTIME, "host: descriptor %d of an allocation: %s", memory->descriptor, strerror(errno));
    file_payload file = {(uint64_t)info.st_ino, (uint64_t)info.st_dev, memory->descriptor};
    memcpy(payload, &file, sizeof file);
    return FGA_OK;
}

/* A handle comes from outside: what it leads to must be nameless memory of this user, and the owner's. */
static int check_file(int fd, const char *path, const file_payload *file, uint64_t held) {
    struct stat info;
    if (fstat(fd, &info) != 0)
        return fga_fail(FGA_RUNTIME, "host: %s: %s", path, strerror(errno));
    if ((uint64_t)info.st_ino != file->inode || (uint64_t)info.st_dev != file->filesystem)
        return fga_fail(FGA_STALE, "host: %s is another file now: the owner has freed or sealed the memory", path);
    if (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 07777) != 0600 || info.st_nlink != 0 ||
        (uint64_t)info.st_size != held)
        return fga_fail(FGA_INVALID, "host: %s is not the file that was exported (owner %u, mode %o, %lu names, %lld bytes; "
                        "expected owner %u, mode 600, no name, %llu bytes)", path, info.st_uid, info.st_mode & 07777,
                        (unsigned long)info.st_nlink, (long long)info.st_size, geteuid(), (unsigned long long)held);
    return FGA_OK;
}

static int not_found(const char *path, uint32_t pid, int error) {
    if (error == ENOENT)
        return fga_fail(FGA_STALE, "host: %s does not exist: the owner has freed or sealed the memory, or has ended", path);
    if (error == EACCES || error == EPERM)
        return fga_fail(FGA_RUNTIME, "host: %s: %s: process %u is of another user, has more rights than this one, or lets "
                        "nobody look at it (PR_SET_DUMPABLE)", path, strerror(error), pid);
    return fga_fail(FGA_RUNTIME, "host: %s: %s", path, strerror(error));
}

static int open_file(const uint8_t payload[FGA_PAYLOAD_BYTES], const fga_identity *owner, uint64_t held, int device,
                     bool at, void **ptr) {
    (void)device;
    file_payload file;
    char path[64], again[64];
    memcpy(&file, payload, sizeof file);
    if (!fga_shares_pid_namespace(owner))
        return fga_fail(FGA_RUNTIME, "host: the handle's owner, process %u, is in another pid namespace, or /proc is not "
                        "mounted here: ranks on one host need a common one (containers: --pid)", owner->pid);
    snprintf(path, sizeof path, "/proc/%u/fd/%lld", owner->pid, (long long)file.descriptor);
    /* That only finds it: a forged handle may name a pipe or a device, which to open may wait, or do something. */
    int found = open(path, O_PATH | O_CLOEXEC);
    if (found < 0)
        return not_found(path, owner->pid, errno);
    int fd = -1;
    int status = check_file(found, path, &file, held);
    if (status == FGA_OK) {
        snprintf(again, sizeof again, "/proc/self/fd/%d", found);
        fd = open(again, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            status = fga_fail(FGA_RUNTIME, "host: %s: %s", path, strerror(errno));
    }
    close(found);
    if (status != FGA_OK)
        return status;
    status = map_file(fd, held, at, ptr);
    close(fd);
    return status;
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

static int admit(const fga_memory *memory, int device) {
    (void)memory, (void)device;
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
    .reserve = reserve_addresses,
    .unreserve = unreserve,
    .alloc = alloc,
    .release = release,
    .seal = seal,
    .export_payload = export_payload,
    .open = open_file,
    .close = unmap,
    .can_access_peer = can_access_peer,
    .enable_peer_access = enable_peer_access,
    .admit = admit,
    .copy_rows = copy_rows,
};
