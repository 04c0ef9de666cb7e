/* How much memory may still be taken: what the control groups of this process and the machine have left.
 *
 * Memory that no file system limits is taken until the system kills a process. What a group holds of files that were not
 * used lately is given back under pressure, and counts as free.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

/* Tests build with others. */
#ifndef FGA_MEMINFO
#define FGA_MEMINFO "/proc/meminfo"
#endif
#ifndef FGA_CGROUP
#define FGA_CGROUP "/sys/fs/cgroup"
#endif

typedef struct {
    const char *folder, *limit, *used, *unused_files;
} cgroup_version;

static const cgroup_version version_1 = {FGA_CGROUP "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                         "total_inactive_file"};
static const cgroup_version version_2 = {FGA_CGROUP, "memory.max", "memory.current", "inactive_file"};

/* The number that stands at the start of a file, or behind key in one of its lines. */
static bool read_number(const char *path, const char *key, uint64_t *number) {
    char line[256];
    bool found = false;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    while (!found && fgets(line, sizeof line, file) != NULL)
        found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNu64, number) == 1;
    fclose(file);
    return found;
}

static bool read_of_group(const cgroup_version *version, const char *group, const char *name, const char *key,
                          uint64_t *number) {
    char path[1024];
    snprintf(path, sizeof path, "%s%s/%s", version->folder, group, name);
    return read_number(path, key, number);
}

/* Of the group and of all above it, which limit it, too. A container may see its group as the root. */
static void look_at_groups(const cgroup_version *version, char *group, uint64_t *left, char *text, size_t text_bytes) {
    char *end = strcmp(group, "/") == 0 ? group : group + strlen(group);
    for (; end != NULL; end = strrchr(group, '/')) {
        uint64_t limit, used, unused_files = 0;
        *end = '\0';
        if (!read_of_group(version, group, version->limit, "", &limit) ||
            !read_of_group(version, group, version->used, "", &used))
            continue;
        read_of_group(version, group, "memory.stat", version->unused_files, &unused_files);
        used -= unused_files < used ? unused_files : used;
        if (used < limit && limit - used >= *left)
            continue;
        *left = used < limit ? limit - used : 0;
        snprintf(text, text_bytes, "the limit of %s%s is %" PRIu64 " bytes, %" PRIu64 " are in use", version->folder, group,
                 limit, used);
    }
}

uint64_t fga_free_memory(char *text, size_t text_bytes) {
    char line[1024];
    uint64_t left = UINT64_MAX;
    text[0] = '\0';
    if (read_number(FGA_MEMINFO, "MemAvailable:", &left)) {
        left *= 1024;
        snprintf(text, text_bytes, "%" PRIu64 " bytes are available on this machine", left);
    }
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL)
        return left;
    /* Lines of number:controllers:group; version 2 is the one without controllers. */
    while (fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controllers[1] == '\0')
            look_at_groups(&version_2, group, &left, text, text_bytes);
        else if (strstr(controllers, "memory") != NULL)
            look_at_groups(&version_1, group, &left, text, text_bytes);
    }
    fclose(file);
    return left;
}
