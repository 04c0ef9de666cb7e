/* File descriptors of device memory, passed from its owner to the peers that open it.
 *
 * Such a descriptor means nothing but in the process that has it (opening it in /proc gives another file), and taking it with
 * pidfd_getfd needs the rights of a debugger, which containers and Yama refuse. So the owner gives it: a thread of its own
 * listens on a socket in the abstract namespace, whose name is the process's token, and which ends with the process. Each side
 * makes sure that the other is a process of the same user; the client also that it is the one that the handle names.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "registry.h"

#define CLIENT_WAITS_S 10
#define SERVER_WAITS_S 2
#define BACKLOG 128

typedef struct {
    uint64_t token[2];
    uint64_t id;
} request;

static int listener = -1; /* fga_lock guards it */

static socklen_t name_of(const fga_identity *identity, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    /* The first byte, which stays 0, makes the name abstract. */
    int length = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "finegrained_alloc-%016" PRIx64 "%016" PRIx64,
                          identity->token[0], identity->token[1]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static void limit_waits(int fd, int seconds) {
    struct timeval limit = {.tv_sec = seconds};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/* False, with errno set, also when it is another user's. */
static bool is_same_user(int fd, struct ucred *peer) {
    socklen_t size = sizeof *peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, peer, &size) != 0)
        return false;
    errno = EPERM;
    return peer->uid == geteuid();
}

/* A copy of the descriptor, or -1: the memory was freed or sealed. */
static int find_descriptor(const request *asked) {
    int fd = -1;
    pthread_mutex_lock(&fga_lock);
    fga_memory *memory = fga_find_memory(asked->id);
    if (memory != NULL && memory->descriptor >= 0 &&
        memcmp(asked->token, fga_registry.self.token, sizeof asked->token) == 0)
        fd = fcntl(memory->descriptor, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&fga_lock);
    return fd;
}

typedef union {
    struct cmsghdr header; /* for its alignment */
    char bytes[CMSG_SPACE(sizeof(int))];
} control;

/* One byte, which says whether a descriptor comes with it. */
static void answer(int client, int fd) {
    char found = fd >= 0;
    struct iovec data = {&found, 1};
    control room = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (found) {
        message.msg_control = room.bytes;
        message.msg_controllen = sizeof room.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    sendmsg(client, &message, MSG_NOSIGNAL);
}

static void serve(int client) {
    struct ucred peer;
    request asked;
    limit_waits(client, SERVER_WAITS_S);
    if (!is_same_user(client, &peer) || recv(client, &asked, sizeof asked, 0) != (ssize_t)sizeof asked)
        return;
    int fd = find_descriptor(&asked);
    answer(client, fd);
    if (fd >= 0)
        close(fd);
}

static void *serve_all(void *argument) {
    int socket = (int)(intptr_t)argument;
    for (;;) {
        int client = accept4(socket, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0) {
            serve(client);
            close(client);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
            usleep(1000);
        }
    }
    return NULL;
}

static int start_thread(int socket) {
    pthread_t thread;
    pthread_attr_t detached;
    sigset_t all, before;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    /* Signals are for the threads that the program knows of. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &detached, serve_all, (void *)(intptr_t)socket);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return error;
}

int fga_serve_descriptors(const fga_identity *self) {
    struct sockaddr_un name;
    if (listener >= 0)
        return FGA_OK;
    socklen_t length = name_of(self, &name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fga_fail(FGA_RUNTIME, "a socket to give descriptors to peers: %s", strerror(errno));
    int error = 0;
    if (bind(fd, (struct sockaddr *)&name, length) != 0 || listen(fd, BACKLOG) != 0)
        error = errno;
    if (error == 0)
        error = start_thread(fd);
    if (error != 0) {
        close(fd);
        return fga_fail(FGA_RUNTIME, "a socket to give descriptors to peers: %s", strerror(error));
    }
    listener = fd;
    return FGA_OK;
}

void fga_forget_server(void) {
    if (listener >= 0)
        close(listener);
    listener = -1;
}

enum { NO_DESCRIPTOR = -1, NO_ANSWER = -2 };

/* The descriptor, or one of these; errno is set where no answer comes. */
static int receive(int fd) {
    char found = 0;
    struct iovec data = {&found, 1};
    control room = {.bytes = {0}};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = room.bytes, .msg_controllen = sizeof room.bytes};
    ssize_t length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (length != 1) {
        errno = length == 0 ? ECONNRESET : errno;
        return NO_ANSWER;
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!found)
        return NO_DESCRIPTOR;
    int received = -1;
    if (header == NULL || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
        errno = EMFILE; /* what the system drops a descriptor for */
        return NO_ANSWER;
    }
    memcpy(&received, CMSG_DATA(header), sizeof received);
    return received;
}

static int exchange(int fd, const fga_identity *owner, uint64_t id, const char *backend, int *received) {
    struct sockaddr_un name;
    struct ucred peer;
    request asked = {{owner->token[0], owner->token[1]}, id};
    socklen_t length = name_of(owner, &name);
    limit_waits(fd, CLIENT_WAITS_S);
    if (connect(fd, (struct sockaddr *)&name, length) != 0) {
        if (errno == ECONNREFUSED)
            return fga_fail(FGA_STALE, "%s: process %u gives no descriptors: it has ended, or is in another network namespace",
                            backend, owner->pid);
        return fga_fail(FGA_RUNTIME, "%s: connect to process %u: %s", backend, owner->pid, strerror(errno));
    }
    if (!is_same_user(fd, &peer) || (fga_shares_pid_namespace(owner) && (uint32_t)peer.pid != owner->pid))
        return fga_fail(FGA_INVALID, "%s: process %d of user %u answers in place of process %u", backend, (int)peer.pid,
                        (unsigned)peer.uid, owner->pid);
    *received = send(fd, &asked, sizeof asked, MSG_NOSIGNAL) == (ssize_t)sizeof asked ? receive(fd) : NO_ANSWER;
    if (*received == NO_DESCRIPTOR)
        return fga_fail(FGA_STALE, "%s: the handle's allocation (number %llu of process %u) was freed or sealed", backend,
                        (unsigned long long)id, owner->pid);
    if (*received == NO_ANSWER)
        return fga_fail(FGA_RUNTIME, "%s: process %u was asked for a descriptor: %s", backend, owner->pid, strerror(errno));
    return FGA_OK;
}

int fga_ask_for_descriptor(const fga_identity *owner, uint64_t id, const char *backend, int *received) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fga_fail(FGA_RUNTIME, "%s: a socket: %s", backend, strerror(errno));
    int status = exchange(fd, owner, id, backend, received);
    close(fd);
    return status;
}
