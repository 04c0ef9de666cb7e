/* What the operating system knows: randomness, the identity of processes, libraries already loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

int fga_random(void *bytes, size_t count) {
    size_t done = 0;
    while (done < count) {
        ssize_t got = getrandom((char *)bytes + done, count - done, 0);
        if (got > 0)
            done += (size_t)got;
        else if (errno != EINTR)
            return fga_fail(FGA_RUNTIME, "getrandom: %s", strerror(errno));
    }
    return FGA_OK;
}

/* State letter and start time of a process; false when there is no such process. */
static bool read_stat(uint32_t pid, char *state, uint64_t *start_time) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    /* The command name may itself hold spaces and brackets: count fields from its last bracket. */
    char *rest = strrchr(text, ')');
    unsigned long long ticks;
    if (rest == NULL ||
        sscanf(rest + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", state,
               &ticks) != 2)
        return false;
    *start_time = ticks;
    return true;
}

static uint64_t pid_namespace(void) {
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

int fga_make_identity(fga_identity *identity) {
    char state;
    memset(identity, 0, sizeof *identity);
    identity->pid = (uint32_t)getpid();
    identity->pid_namespace = pid_namespace();
    if (!read_stat(identity->pid, &state, &identity->start_time))
        identity->start_time = 0;
    return fga_random(identity->token, sizeof identity->token);
}

bool fga_shares_pid_namespace(const fga_identity *identity) {
    return identity->pid_namespace != 0 && identity->pid_namespace == pid_namespace();
}

bool fga_is_dead(const fga_identity *identity) {
    char state;
    uint64_t start_time;
    if (identity->start_time == 0 || !fga_shares_pid_namespace(identity))
        return false;
    if (!read_stat(identity->pid, &state, &start_time))
        return true;
    return start_time != identity->start_time || state == 'Z' || state == 'X';
}

typedef struct {
    const char *stem;
    char *path;
    size_t path_bytes;
} search;

static int match_loaded(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    search *wanted = data;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *name = slash != NULL ? slash + 1 : info->dlpi_name;
    if (strncmp(name, wanted->stem, strlen(wanted->stem)) != 0)
        return 0;
    snprintf(wanted->path, wanted->path_bytes, "%s", info->dlpi_name);
    return 1;
}

void *fga_load_library(const char *env, const char *stem, const char *const *names, char *path, size_t path_bytes) {
    const char *chosen = getenv(env);
    if (chosen != NULL && chosen[0] != '\0') {
        snprintf(path, path_bytes, "%s", chosen);
        return dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    }
    search wanted = {stem, path, path_bytes};
    if (dl_iterate_phdr(match_loaded, &wanted) != 0)
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (const char *const *name = names; *name != NULL; name++) {
        void *library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
        snprintf(path, path_bytes, "%s", *name);
        if (library != NULL)
            return library;
    }
    return NULL;
}
