/* A libnvidia-ml.so.1 without a GPU: the entry points that the gateway calls through pynvml, and NVIDIA's programs by go-nvml.
 *
 * Its world (GPUs, MIG instances, links, failures) is a text file, $FAKE_NVML_WORLD, that a test replaces while it runs;
 * `tests/fakes/nvml.py` writes it and is the reference of its lines. Events are lines appended to `$FAKE_NVML_WORLD.events`.
 * What isn't here isn't exported: pynvml then says FUNCTION_NOT_FOUND, as it does on an old driver. The minors of MIG's
 * capabilities aren't NVML's: they are in /proc/driver/nvidia/capabilities.
 *
 * "nvml.h" below is NVIDIA's public header (its comments are the NVML API reference), "nvlib" is NVIDIA/go-nvlib, "plugin"
 * NVIDIA/k8s-device-plugin, "assumed" what no source says: there the answer is the one that is hardest on the caller.
 * Structs are laid out as pynvml.py has them. A handle is a number in a pointer, never followed, and is of one initialisation:
 * one from before an nvmlShutdown is refused, where the real library would have done anything.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    CRASHES = -1, SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, GPU_IS_LOST = 15, MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};
enum { MAX_GPUS = 32, MAX_LINKS = 36, MAX_PROFILES = 20, MAX_MIGS = 16, MAX_RULES = 64, MAX_SETS = 64 };
enum { NOWHERE = MAX_GPUS, NAME = 96, ADDRESS = 32, WHOLE = 1 << 20 };
enum { GPU_HANDLE = 1, MIG_HANDLE, GPU_INSTANCE, COMPUTE_INSTANCE, EVENT_SET };
enum { RECOVERY_ACTION = 230, UNSIGNED_INT = 1, PROFILE_NUMBERS = 17 };

typedef int Result;
typedef unsigned u32;
typedef unsigned long long u64;
typedef struct { uint64_t as_number; } *Handle;
#define EXPORTED __attribute__((visibility("default")))

struct link { u32 active, type; char pci[ADDRESS]; int is_there; };
struct profile { u32 index, id, slices, count, processors, memory_mb, copies, decoders, encoders, jpegs, ofas; char name[NAME]; };
struct mig { u32 gi, ci, place, profile, slices, start, size; char uuid[NAME]; };
struct way { u32 level; char to[NAME]; };
struct gpu {
    char uuid[NAME], pci[ADDRESS], name[NAME];
    u32 minor, mig, mig_pending, mig_max, lost, rows[4], capability[2], fabric[3];
    unsigned char cluster[16];
    u64 memory, events;
    int rows_known, retired, recovery, addressing;
    u32 profiles, migs, ways;
    struct link link[MAX_LINKS];
    struct profile profile[MAX_PROFILES];
    struct mig of_mig[MAX_MIGS];
    struct way way[MAX_GPUS];
};
struct rule { char function[NAME]; int code, gpu; u32 hangs_ms; };
struct world {
    char driver[NAME], nodes[256];
    u32 gpus, rules, at_once;
    struct gpu gpu[MAX_GPUS];
    struct rule rule[MAX_RULES];
};
struct set { u64 serial; off_t read; u64 types[MAX_GPUS]; off_t since[MAX_GPUS]; };
struct board { char uuid[NAME]; int lost, node; };

/* What one call works on: copied under the lock, so that the rest of the call needs none. */
struct at { u32 board; struct gpu gpu; struct mig mig; struct profile profile; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct world world, loaded;
static struct stat seen;
static char path[4096], events_path[4096 + 8];
static struct board boards[MAX_GPUS]; /* the GPUs of this initialisation, by their index */
static u32 board_count, references, waits;
static u64 initialisation, calls, serial;
static struct set *sets[MAX_SETS];

/* --- the world's file --- */

static int a_line(struct world *w, const char *line) {
    u32 g, i;
    struct gpu gpu = {0};
    struct link link = {.is_there = 1};
    struct profile profile = {0};
    struct mig mig = {0};
    struct way way = {0};
    struct rule rule = {0};
    if (line[0] == '\0' || line[0] == '#') return 1;
    if (sscanf(line, "driver %95s", w->driver) == 1) return 1;
    if (sscanf(line, "nodes %u %255[^\n]", &w->at_once, w->nodes) == 2) return 1;
    if (sscanf(line,
               "gpu %95s %31s minor=%u memory=%llu mig=%u,%u,%u lost=%u rows=%d:%u,%u,%u,%u retired=%d recovery=%d "
               "addressing=%d events=%llx name=%95[^\n]",
               gpu.uuid, gpu.pci, &gpu.minor, &gpu.memory, &gpu.mig, &gpu.mig_pending, &gpu.mig_max, &gpu.lost,
               &gpu.rows_known, &gpu.rows[0], &gpu.rows[1], &gpu.rows[2], &gpu.rows[3], &gpu.retired, &gpu.recovery,
               &gpu.addressing, &gpu.events, gpu.name) == 18) {
        if (w->gpus == MAX_GPUS) return 0;
        w->gpu[w->gpus++] = gpu;
        return 1;
    }
    u32 two[2], fabric[3];
    if (sscanf(line, "capability %u %u %u", &g, &two[0], &two[1]) == 3) {
        if (g >= w->gpus) return 0;
        memcpy(w->gpu[g].capability, two, sizeof two);
        return 1;
    }
    int cluster = 0;
    if (sscanf(line, "fabric %u %u %u %u %n", &g, &fabric[0], &fabric[1], &fabric[2], &cluster) == 4 && cluster) {
        if (g >= w->gpus || strlen(line + cluster) != 32) return 0;
        memcpy(w->gpu[g].fabric, fabric, sizeof fabric);
        for (i = 0; i < 16; i++)
            if (sscanf(line + cluster + 2 * i, "%2hhx", &w->gpu[g].cluster[i]) != 1) return 0;
        return 1;
    }
    if (sscanf(line, "link %u %u %u %u %31s", &g, &i, &link.active, &link.type, link.pci) == 5) {
        if (g >= w->gpus || i >= MAX_LINKS) return 0;
        w->gpu[g].link[i] = link;
        return 1;
    }
    if (sscanf(line, "profile %u %u %u %u %u %u %u %u,%u,%u,%u,%u %95s", &g, &profile.index, &profile.id, &profile.slices,
               &profile.count, &profile.processors, &profile.memory_mb, &profile.copies, &profile.decoders, &profile.encoders,
               &profile.jpegs, &profile.ofas, profile.name) == 13) {
        if (g >= w->gpus || w->gpu[g].profiles == MAX_PROFILES) return 0;
        w->gpu[g].profile[w->gpu[g].profiles++] = profile;
        return 1;
    }
    if (sscanf(line, "mig %u %u %u %u %u %u %u %u %95s", &g, &mig.gi, &mig.ci, &mig.place, &mig.profile, &mig.slices,
               &mig.start, &mig.size, mig.uuid) == 9) {
        if (g >= w->gpus || w->gpu[g].migs == MAX_MIGS || mig.gi > 255 || mig.ci > 255) return 0;
        w->gpu[g].of_mig[w->gpu[g].migs++] = mig;
        return 1;
    }
    if (sscanf(line, "way %u %u %95s", &g, &way.level, way.to) == 3) {
        if (g >= w->gpus || w->gpu[g].ways == MAX_GPUS) return 0;
        w->gpu[g].way[w->gpu[g].ways++] = way;
        return 1;
    }
    if (sscanf(line, "fails %95s %d %d %u", rule.function, &rule.code, &rule.gpu, &rule.hangs_ms) == 4) {
        if (w->rules == MAX_RULES) return 0;
        w->rule[w->rules++] = rule;
        return 1;
    }
    return 0;
}

static int read_world(void) {
    static char text[WHOLE];
    struct stat now;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &now) != 0) {
        fprintf(stderr, "fake NVML: the world %s can't be read: %s; set FAKE_NVML_WORLD to a file\n", path, strerror(errno));
        if (fd >= 0) close(fd);
        return 0;
    }
    size_t size = 0;
    ssize_t got;
    while (size < sizeof text - 1 && (got = read(fd, text + size, sizeof text - 1 - size)) > 0) size += (size_t)got;
    close(fd);
    text[size] = '\0';
    memset(&loaded, 0, sizeof loaded);
    int number = 1;
    for (char *line = text, *end; *line; line = end + 1, number++) {
        end = strchrnul(line, '\n');
        int last = *end == '\0';
        *end = '\0';
        if (!a_line(&loaded, line)) {
            fprintf(stderr, "fake NVML: %s, line %d isn't one that a_line() in nvml.c reads: %s\n", path, number, line);
            return 0;
        }
        if (last) break;
    }
    world = loaded;
    seen = now;
    return 1;
}

static struct gpu *in_world(const char *uuid) {
    for (u32 i = 0; i < world.gpus; i++)
        if (strcmp(world.gpu[i].uuid, uuid) == 0) return &world.gpu[i];
    return NULL;
}

/* Read the world again if it is another. A GPU lost once stays lost until the last nvmlShutdown: the kernel driver can't
 * let go of it, nor reset it, while a client has it open (nvidia-smi's manual, --gpu-reset). */
static int refresh(void) {
    struct stat now;
    if (stat(path, &now) != 0 || now.st_ino != seen.st_ino || now.st_dev != seen.st_dev || now.st_size != seen.st_size ||
        now.st_mtim.tv_sec != seen.st_mtim.tv_sec || now.st_mtim.tv_nsec != seen.st_mtim.tv_nsec)
        if (!read_world()) return 0;
    for (u32 i = 0; i < board_count; i++) {
        struct gpu *gpu = in_world(boards[i].uuid);
        if (gpu == NULL || gpu->lost) boards[i].lost = 1;
    }
    return 1;
}

/* --- what every call does first --- */

static Handle handle(u32 kind, u32 board, u32 gi, u32 ci) {
    return (Handle)(uintptr_t)(initialisation << 32 | (uint64_t)kind << 24 | ci << 16 | gi << 8 | board);
}

static u32 kind_of(Handle h) { return (uintptr_t)h >> 24 & 0xff; }

static struct rule *rule_for(const char *function, int board) {
    for (u32 i = 0; i < world.rules; i++)
        if (strcmp(world.rule[i].function, function) == 0 && (world.rule[i].gpu < 0 || world.rule[i].gpu == board))
            return &world.rule[i];
    return NULL;
}

/* A test's own clock, if it has one: what time it is, and how to let it pass. */
static int64_t (*test_now)(void);
static void (*test_rest)(u32 ms);

EXPORTED void fake_nvml_clock(int64_t (*now)(void), void (*rest)(u32 ms)) {
    test_now = now;
    test_rest = rest;
}

static int64_t now_ms(void) {
    struct timespec t;
    if (test_now) return test_now();
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Under the lock: hang and fail as the world says. A hanging call ends when its time is over or its rule is gone. */
static Result as_told(const char *function, int board) {
    struct rule *rule = rule_for(function, board);
    int64_t start = now_ms();
    while (rule && now_ms() - start < rule->hangs_ms) {
        pthread_mutex_unlock(&lock);
        if (test_rest) test_rest((u32)(rule->hangs_ms - (now_ms() - start)));
        else nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        pthread_mutex_lock(&lock);
        if (!refresh()) return UNKNOWN;
        rule = rule_for(function, board);
    }
    if (rule && rule->code == CRASHES) raise(SIGSEGV);
    return rule ? rule->code : SUCCESS;
}

static Result ready(const char *function, int board) {
    calls++;
    if (references == 0) return UNINITIALIZED;
    if (!refresh()) return UNKNOWN;
    Result result = as_told(function, board);
    return result != SUCCESS ? result : references == 0 ? UNINITIALIZED : SUCCESS;
}

/* A call about a GPU or a part of one: `kinds` is a mask of the kinds of handle that it takes. */
static Result enter_at(const char *function, Handle h, u32 kinds, struct at *at) {
    uint64_t number = (uintptr_t)h;
    u32 board = number & 0xff, gi = number >> 8 & 0xff, ci = number >> 16 & 0xff, kind = kind_of(h);
    pthread_mutex_lock(&lock);
    int known = number >> 32 == initialisation && board < board_count && kind >= GPU_HANDLE && kind <= COMPUTE_INSTANCE;
    Result result = ready(function, known ? (int)board : -1);
    if (result != SUCCESS) goto out;
    result = INVALID_ARGUMENT;
    if (!known || !(kinds >> kind & 1)) goto out;
    result = GPU_IS_LOST;
    if (boards[board].lost) goto out;
    at->board = board;
    at->gpu = *in_world(boards[board].uuid);
    result = kind == GPU_HANDLE ? SUCCESS : NOT_FOUND;
    /* nvml.h, nvmlDeviceGetMigDeviceHandleByIndex: the handle of a destroyed instance is invalid from then on. */
    for (u32 i = 0; result != SUCCESS && at->gpu.mig && i < at->gpu.migs; i++)
        if (at->gpu.of_mig[i].gi == gi && (kind == GPU_INSTANCE || at->gpu.of_mig[i].ci == ci)) {
            at->mig = at->gpu.of_mig[i];
            result = SUCCESS;
        }
    if (result != SUCCESS) result = INVALID_ARGUMENT;
    for (u32 i = 0; kind != GPU_HANDLE && i < at->gpu.profiles; i++)
        if (at->gpu.profile[i].index == at->mig.profile) at->profile = at->gpu.profile[i];
out:
    pthread_mutex_unlock(&lock);
    return result;
}

#define GPU_ONLY (1u << GPU_HANDLE)
#define MIG_ONLY (1u << MIG_HANDLE)
#define ANY (GPU_ONLY | MIG_ONLY)
#define ENTER_AT(function, h, kinds)                                     \
    struct at at;                                                        \
    do {                                                                 \
        memset(&at, 0, sizeof at);                                       \
        Result entered = enter_at(function, h, kinds, &at);              \
        if (entered != SUCCESS) return entered;                          \
    } while (0)

static Result give(const char *text, char *to, u32 size) {
    if (to == NULL) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* --- the library --- */

/* A GPU's device node is open from its first handle on, to the last nvmlShutdown (seen with driver 580). */
static void hold(u32 board) {
    char node[sizeof world.nodes + 32];
    if (world.nodes[0] == '\0' || boards[board].node >= 0) return;
    snprintf(node, sizeof node, "%s/nvidia%u", world.nodes, in_world(boards[board].uuid)->minor);
    boards[board].node = open(node, O_RDWR | O_CLOEXEC);
}

/* nvml.h: init finds the GPUs but attaches to none: one that is ill doesn't hinder the others. All the same it opens the node of
 * the first one (seen with driver 580, on a machine with one). Each init needs a shutdown. */
EXPORTED Result nvmlInitWithFlags(u32 flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    calls++;
    const char *where = getenv("FAKE_NVML_WORLD");
    if (references == 0) {
        snprintf(path, sizeof path, "%s", where ? where : "(FAKE_NVML_WORLD isn't set)");
        snprintf(events_path, sizeof events_path, "%s.events", path);
        memset(&seen, 0, sizeof seen);
        board_count = 0;
    }
    Result result = refresh() ? as_told("nvmlInit", -1) : UNKNOWN;
    if (result == SUCCESS && references++ == 0) {
        initialisation = (initialisation + 1) & 0x7fffffff;
        for (board_count = 0; board_count < world.gpus; board_count++) {
            boards[board_count].lost = world.gpu[board_count].lost != 0;
            strcpy(boards[board_count].uuid, world.gpu[board_count].uuid);
            boards[board_count].node = -1;
            if (board_count < world.at_once) hold(board_count);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* What go-nvml calls, and with it NVIDIA's own programs; pynvml calls the one above. */
EXPORTED Result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

/* nvml.h both lists UNINITIALIZED and promises no error for one shutdown too many; here it is one. */
EXPORTED Result nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    calls++;
    Result result = references ? SUCCESS : UNINITIALIZED;
    if (references) references--;
    for (u32 i = 0; references == 0 && i < board_count; i++)
        if (boards[i].node >= 0) {
            close(boards[i].node);
            boards[i].node = -1;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED const char *nvmlErrorString(Result result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

EXPORTED Result nvmlSystemGetDriverVersion(char *version, u32 size) {
    pthread_mutex_lock(&lock);
    Result result = ready("nvmlSystemGetDriverVersion", -1);
    if (result == SUCCESS) result = give(world.driver, version, size);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED Result nvmlSystemGetCudaDriverVersion(int *version) {
    pthread_mutex_lock(&lock);
    Result result = ready("nvmlSystemGetCudaDriverVersion", -1);
    if (result == SUCCESS) *version = 12040;
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- finding GPUs --- */

/* nvml.h: all GPUs count, even those of which no handle can be had. */
EXPORTED Result nvmlDeviceGetCount_v2(u32 *count) {
    pthread_mutex_lock(&lock);
    Result result = ready("nvmlDeviceGetCount", -1);
    if (result == SUCCESS) *count = board_count;
    pthread_mutex_unlock(&lock);
    return result;
}

/* The handle of a GPU, GPU_IS_LOST as nvml.h has it, or `else_` where there is no such GPU. */
static Result to_gpu(const char *function, u32 board, Result else_, Handle *found) {
    pthread_mutex_lock(&lock);
    int known = board < board_count;
    Result result = ready(function, known ? (int)board : -1);
    if (result == SUCCESS && !known) result = else_;
    if (result == SUCCESS && boards[board].lost) result = GPU_IS_LOST;
    if (result == SUCCESS) {
        hold(board);
        *found = handle(GPU_HANDLE, board, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED Result nvmlDeviceGetHandleByIndex_v2(u32 index, Handle *found) {
    return to_gpu("nvmlDeviceGetHandleByIndex", index, INVALID_ARGUMENT, found);
}

/* nvml.h: "0000:65:00.0" and "00000000:65:00.0" are the same to it; it calls what it doesn't know NOT_FOUND, and what is no address
 * INVALID_ARGUMENT (seen with driver 580). */
static int same_address(const char *a, const char *b) {
    u32 x[4], y[4];
    return sscanf(a, "%x:%x:%x.%x", &x[0], &x[1], &x[2], &x[3]) == 4 &&
           sscanf(b, "%x:%x:%x.%x", &y[0], &y[1], &y[2], &y[3]) == 4 && memcmp(x, y, sizeof x) == 0;
}

EXPORTED Result nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle *found) {
    u32 board = NOWHERE;
    pthread_mutex_lock(&lock);
    int here = references && refresh();
    for (u32 i = 0; here && i < board_count; i++) {
        struct gpu *gpu = in_world(boards[i].uuid);
        if (gpu && same_address(gpu->pci, address)) board = i;
    }
    pthread_mutex_unlock(&lock);
    return to_gpu("nvmlDeviceGetHandleByPciBusId", board, same_address(address, address) ? NOT_FOUND : INVALID_ARGUMENT, found);
}

/* Of GPUs only: nobody asks for a MIG device by its UUID here. */
EXPORTED Result nvmlDeviceGetHandleByUUID(const char *uuid, Handle *found) {
    u32 board = NOWHERE;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; references && i < board_count; i++)
        if (strcmp(boards[i].uuid, uuid) == 0) board = i;
    pthread_mutex_unlock(&lock);
    return to_gpu("nvmlDeviceGetHandleByUUID", board, NOT_FOUND, found);
}

/* --- one GPU --- */

EXPORTED Result nvmlDeviceGetName(Handle h, char *name, u32 size) {
    char text[2 * NAME + 8];
    ENTER_AT("nvmlDeviceGetName", h, ANY);
    /* Seen in nvidia-smi -L and in DCGM: a MIG device's name ends with its profile. */
    snprintf(text, sizeof text, kind_of(h) == MIG_HANDLE ? "%s MIG %s" : "%s", at.gpu.name, at.profile.name);
    return give(text, name, size);
}

EXPORTED Result nvmlDeviceGetUUID(Handle h, char *uuid, u32 size) {
    ENTER_AT("nvmlDeviceGetUUID", h, ANY);
    return give(kind_of(h) == MIG_HANDLE ? at.mig.uuid : at.gpu.uuid, uuid, size);
}

EXPORTED Result nvmlDeviceGetMinorNumber(Handle h, u32 *minor) {
    ENTER_AT("nvmlDeviceGetMinorNumber", h, GPU_ONLY);
    *minor = at.gpu.minor;
    return SUCCESS;
}

struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char address[32]; };

static void fill_pci(const char *address, struct pci *to) {
    memset(to, 0, sizeof *to);
    sscanf(address, "%x:%x:%x", &to->domain, &to->bus, &to->device);
    snprintf(to->address, sizeof to->address, "%08X:%02X:%02X.0", to->domain, to->bus, to->device);
    snprintf(to->legacy, sizeof to->legacy, "%04X:%02X:%02X.0", to->domain & 0xffff, to->bus & 0xff, to->device & 0xff);
}

EXPORTED Result nvmlDeviceGetPciInfo_v3(Handle h, struct pci *to) {
    ENTER_AT("nvmlDeviceGetPciInfo", h, GPU_ONLY);
    fill_pci(at.gpu.pci, to);
    to->id = 0x233010de; /* H100 SXM5 80GB */
    return SUCCESS;
}

/* Every GPU is a Hopper, whatever its name and compute capability. */
EXPORTED Result nvmlDeviceGetArchitecture(Handle h, u32 *to) {
    ENTER_AT("nvmlDeviceGetArchitecture", h, GPU_ONLY);
    *to = 9;
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetBrand(Handle h, u32 *to) {
    ENTER_AT("nvmlDeviceGetBrand", h, GPU_ONLY);
    *to = 14;
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetCudaComputeCapability(Handle h, int *major, int *minor) {
    ENTER_AT("nvmlDeviceGetCudaComputeCapability", h, GPU_ONLY);
    *major = (int)at.gpu.capability[0], *minor = (int)at.gpu.capability[1];
    return SUCCESS;
}

struct addressing { u32 version, mode; };

/* nvml.h: "Not Supported" where the platform has none of the modes. pynvml has it since 13.580. */
EXPORTED Result nvmlDeviceGetAddressingMode(Handle h, struct addressing *to) {
    ENTER_AT("nvmlDeviceGetAddressingMode", h, GPU_ONLY);
    if (to->version != (1u << 24 | sizeof *to)) return ARGUMENT_VERSION_MISMATCH;
    if (at.gpu.addressing < 0) return NOT_SUPPORTED;
    to->mode = (u32)at.gpu.addressing;
    return SUCCESS;
}

struct memory { u64 total, free, used; };

/* nvml.h: of a MIG device its own memory, of a GPU all. */
EXPORTED Result nvmlDeviceGetMemoryInfo(Handle h, struct memory *to) {
    ENTER_AT("nvmlDeviceGetMemoryInfo", h, ANY);
    u64 total = kind_of(h) == MIG_HANDLE ? (u64)at.profile.memory_mb << 20 : at.gpu.memory;
    u64 used = (u64)(at.gpu.minor + 1) << 30;
    *to = (struct memory){total, total - used, used};
    return SUCCESS;
}

/* --- gauges; each GPU has its own values, by its minor number --- */

struct utilization { u32 gpu, memory; };

/* nvml.h: "Not Supported" for MIG devices, and for a GPU in MIG mode. */
EXPORTED Result nvmlDeviceGetUtilizationRates(Handle h, struct utilization *to) {
    ENTER_AT("nvmlDeviceGetUtilizationRates", h, GPU_ONLY);
    if (at.gpu.mig) return NOT_SUPPORTED;
    *to = (struct utilization){10 + at.gpu.minor, 20 + at.gpu.minor};
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetTemperature(Handle h, u32 sensor, u32 *celsius) {
    ENTER_AT("nvmlDeviceGetTemperature", h, GPU_ONLY);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = 40 + at.gpu.minor;
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetPowerUsage(Handle h, u32 *milliwatts) {
    ENTER_AT("nvmlDeviceGetPowerUsage", h, GPU_ONLY);
    *milliwatts = 1000 * (100 + at.gpu.minor) + 500;
    return SUCCESS;
}

/* --- MIG --- */

EXPORTED Result nvmlDeviceGetMigMode(Handle h, u32 *current, u32 *pending) {
    ENTER_AT("nvmlDeviceGetMigMode", h, GPU_ONLY);
    if (at.gpu.mig_max == 0) return NOT_SUPPORTED;
    *current = at.gpu.mig;
    *pending = at.gpu.mig_pending;
    return SUCCESS;
}

/* nvml.h: 0 where MIG isn't supported or isn't enabled. */
EXPORTED Result nvmlDeviceGetMaxMigDeviceCount(Handle h, u32 *count) {
    ENTER_AT("nvmlDeviceGetMaxMigDeviceCount", h, GPU_ONLY);
    *count = at.gpu.mig ? at.gpu.mig_max : 0;
    return SUCCESS;
}

/* nvlib, VisitMigDevices: places may be empty (NOT_FOUND), and those after them not. Without MIG all are (seen with driver 580). */
EXPORTED Result nvmlDeviceGetMigDeviceHandleByIndex(Handle h, u32 index, Handle *found) {
    ENTER_AT("nvmlDeviceGetMigDeviceHandleByIndex", h, GPU_ONLY);
    if (at.gpu.mig && index >= at.gpu.mig_max) return INVALID_ARGUMENT;
    for (u32 i = 0; at.gpu.mig && i < at.gpu.migs; i++)
        if (at.gpu.of_mig[i].place == index) {
            *found = handle(MIG_HANDLE, at.board, at.gpu.of_mig[i].gi, at.gpu.of_mig[i].ci);
            return SUCCESS;
        }
    return NOT_FOUND;
}

EXPORTED Result nvmlDeviceGetGpuInstanceId(Handle h, u32 *id) {
    ENTER_AT("nvmlDeviceGetGpuInstanceId", h, MIG_ONLY);
    *id = at.mig.gi;
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetComputeInstanceId(Handle h, u32 *id) {
    ENTER_AT("nvmlDeviceGetComputeInstanceId", h, MIG_ONLY);
    *id = at.mig.ci;
    return SUCCESS;
}

struct attributes {
    u32 processors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    u64 memory_mb;
};

/* nvml.h: "only supports MIG device handles". */
EXPORTED Result nvmlDeviceGetAttributes_v2(Handle h, struct attributes *to) {
    ENTER_AT("nvmlDeviceGetAttributes", h, ANY);
    if (kind_of(h) != MIG_HANDLE) return NOT_SUPPORTED;
    u32 processors = at.profile.slices ? at.profile.processors * at.mig.slices / at.profile.slices : 0;
    *to = (struct attributes){processors, at.profile.copies, at.profile.decoders, at.profile.encoders, at.profile.jpegs,
                              at.profile.ofas, at.profile.slices, at.mig.slices, at.profile.memory_mb};
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetGpuInstanceById(Handle h, u32 id, Handle *found) {
    ENTER_AT("nvmlDeviceGetGpuInstanceById", h, GPU_ONLY);
    for (u32 i = 0; at.gpu.mig && i < at.gpu.migs; i++)
        if (at.gpu.of_mig[i].gi == id) {
            *found = handle(GPU_INSTANCE, at.board, id, 0);
            return SUCCESS;
        }
    return NOT_FOUND;
}

struct gpu_instance { Handle device; u32 id, profile, start, size; };

EXPORTED Result nvmlGpuInstanceGetInfo(Handle h, struct gpu_instance *to) {
    ENTER_AT("nvmlGpuInstanceGetInfo", h, 1u << GPU_INSTANCE);
    *to = (struct gpu_instance){handle(GPU_HANDLE, at.board, 0, 0), at.mig.gi, at.profile.id, at.mig.start, at.mig.size};
    return SUCCESS;
}

struct gpu_profile {
    u32 id, p2p, slices, count, processors, copy_engines, decoders, encoders, jpegs, ofas;
    u64 memory_mb;
};

/* nvlib, GetProfile: asks for each profile number in turn, and skips those that are NOT_SUPPORTED or invalid. Old drivers know
   this first form alone. */
EXPORTED Result nvmlDeviceGetGpuInstanceProfileInfo(Handle h, u32 number, struct gpu_profile *to) {
    ENTER_AT("nvmlDeviceGetGpuInstanceProfileInfo", h, GPU_ONLY);
    for (u32 i = 0; i < at.gpu.profiles; i++) {
        const struct profile *p = &at.gpu.profile[i];
        if (p->index != number) continue;
        *to = (struct gpu_profile){.id = p->id, .slices = p->slices, .count = p->count,
                                      .processors = p->processors, .memory_mb = p->memory_mb};
        return SUCCESS;
    }
    return number < PROFILE_NUMBERS ? NOT_SUPPORTED : INVALID_ARGUMENT; /* seen with driver 580 */
}

EXPORTED Result nvmlDeviceIsMigDeviceHandle(Handle h, u32 *is) {
    ENTER_AT("nvmlDeviceIsMigDeviceHandle", h, ANY);
    *is = kind_of(h) == MIG_HANDLE;
    return SUCCESS;
}

EXPORTED Result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle h, Handle *found) {
    ENTER_AT("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", h, MIG_ONLY);
    *found = handle(GPU_HANDLE, at.board, 0, 0);
    return SUCCESS;
}

EXPORTED Result nvmlGpuInstanceGetComputeInstanceById(Handle h, u32 id, Handle *found) {
    ENTER_AT("nvmlGpuInstanceGetComputeInstanceById", h, 1u << GPU_INSTANCE);
    for (u32 i = 0; i < at.gpu.migs; i++)
        if (at.gpu.of_mig[i].gi == at.mig.gi && at.gpu.of_mig[i].ci == id) {
            *found = handle(COMPUTE_INSTANCE, at.board, at.mig.gi, id);
            return SUCCESS;
        }
    return NOT_FOUND;
}

/* nvml.h, NVML_COMPUTE_INSTANCE_PROFILE_…: the slices of each number. A profile's ID is assumed to be its number. */
static const u32 compute_slices[] = {1, 2, 3, 4, 7, 8, 6};
enum { COMPUTE_PROFILES = sizeof compute_slices / sizeof *compute_slices };

struct compute_instance { Handle device, gpu_instance; u32 id, profile, start, size; };

EXPORTED Result nvmlComputeInstanceGetInfo_v2(Handle h, struct compute_instance *to) {
    ENTER_AT("nvmlComputeInstanceGetInfo", h, 1u << COMPUTE_INSTANCE);
    u32 number = 0;
    while (number < COMPUTE_PROFILES && compute_slices[number] != at.mig.slices) number++;
    *to = (struct compute_instance){handle(GPU_HANDLE, at.board, 0, 0), handle(GPU_INSTANCE, at.board, at.mig.gi, 0), at.mig.ci,
                                    number, 0, at.mig.slices};
    return SUCCESS;
}

struct compute_profile { u32 id, slices, count, processors, copy_engines, decoders, encoders, jpegs, ofas; };

EXPORTED Result nvmlGpuInstanceGetComputeInstanceProfileInfo(Handle h, u32 number, u32 engines, struct compute_profile *to) {
    ENTER_AT("nvmlGpuInstanceGetComputeInstanceProfileInfo", h, 1u << GPU_INSTANCE);
    if (engines != 0 || number >= COMPUTE_PROFILES || compute_slices[number] > at.profile.slices) return NOT_SUPPORTED;
    *to = (struct compute_profile){.id = number, .slices = compute_slices[number]};
    return SUCCESS;
}

/* --- links and ways --- */

struct fabric { unsigned char cluster[16]; u32 status, clique, state; };

EXPORTED Result nvmlDeviceGetGpuFabricInfo(Handle h, struct fabric *to) {
    ENTER_AT("nvmlDeviceGetGpuFabricInfo", h, GPU_ONLY);
    if (at.gpu.fabric[0] == 0) return NOT_SUPPORTED;
    *to = (struct fabric){.status = at.gpu.fabric[1], .clique = at.gpu.fabric[2], .state = at.gpu.fabric[0]};
    memcpy(to->cluster, at.gpu.cluster, sizeof to->cluster);
    return SUCCESS;
}

static Result link_of(const char *function, Handle h, u32 number, struct link *to) {
    ENTER_AT(function, h, GPU_ONLY);
    if (number >= MAX_LINKS) return INVALID_ARGUMENT;
    *to = at.gpu.link[number];
    return to->is_there ? SUCCESS : NOT_SUPPORTED;
}

EXPORTED Result nvmlDeviceGetNvLinkState(Handle h, u32 number, u32 *active) {
    struct link link = {0};
    Result result = link_of("nvmlDeviceGetNvLinkState", h, number, &link);
    if (result == SUCCESS) *active = link.active;
    return result;
}

/* Assumed: nobody is known at the end of a link that is down. */
EXPORTED Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle h, u32 number, struct pci *to) {
    struct link link = {0};
    Result result = link_of("nvmlDeviceGetNvLinkRemotePciInfo", h, number, &link);
    if (result == SUCCESS && !link.active) result = NOT_SUPPORTED;
    if (result == SUCCESS) fill_pci(link.pci, to);
    return result;
}

EXPORTED Result nvmlDeviceGetNvLinkRemoteDeviceType(Handle h, u32 number, u32 *type) {
    struct link link = {0};
    Result result = link_of("nvmlDeviceGetNvLinkRemoteDeviceType", h, number, &link);
    if (result == SUCCESS && !link.active) result = NOT_SUPPORTED;
    if (result == SUCCESS) *type = link.type;
    return result;
}

EXPORTED Result nvmlDeviceGetTopologyCommonAncestor(Handle a, Handle b, u32 *level) {
    struct at one = {0}, other = {0};
    Result result = enter_at("nvmlDeviceGetTopologyCommonAncestor", a, GPU_ONLY, &one);
    if (result == SUCCESS) result = enter_at("nvmlDeviceGetTopologyCommonAncestor", b, GPU_ONLY, &other);
    if (result == SUCCESS) *level = 0; /* NVML_TOPOLOGY_INTERNAL: the same board */
    for (u32 i = 0; result == SUCCESS && i < one.gpu.ways; i++)
        if (strcmp(one.gpu.way[i].to, other.gpu.uuid) == 0) *level = one.gpu.way[i].level;
    return result;
}

/* --- health --- */

EXPORTED Result nvmlDeviceGetRemappedRows(Handle h, u32 *correctable, u32 *uncorrectable, u32 *pending, u32 *failure) {
    ENTER_AT("nvmlDeviceGetRemappedRows", h, GPU_ONLY);
    if (!at.gpu.rows_known) return NOT_SUPPORTED;
    *correctable = at.gpu.rows[0];
    *uncorrectable = at.gpu.rows[1];
    *pending = at.gpu.rows[2];
    *failure = at.gpu.rows[3];
    return SUCCESS;
}

/* Pages are retired before Ampere; since then rows are remapped instead, and this is NOT_SUPPORTED. */
EXPORTED Result nvmlDeviceGetRetiredPagesPendingStatus(Handle h, u32 *pending) {
    ENTER_AT("nvmlDeviceGetRetiredPagesPendingStatus", h, GPU_ONLY);
    if (at.gpu.retired < 0) return NOT_SUPPORTED;
    *pending = (u32)at.gpu.retired;
    return SUCCESS;
}

struct field { u32 id, scope; int64_t at, latency; u32 type, result; union { double d; u32 u; u64 ull; } value; };

/* nvml.h: the call succeeds where any value was had; each field has a result of its own. */
EXPORTED Result nvmlDeviceGetFieldValues(Handle h, int count, struct field *fields) {
    ENTER_AT("nvmlDeviceGetFieldValues", h, GPU_ONLY);
    if (count < 1 || fields == NULL) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        int known = fields[i].id == RECOVERY_ACTION && at.gpu.recovery >= 0;
        fields[i].result = known ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = UNSIGNED_INT;
        fields[i].value.ull = known ? (u32)at.gpu.recovery : 0;
    }
    return SUCCESS;
}

/* --- events --- */

static struct set **find_set(Handle h) {
    for (u32 i = 0; i < MAX_SETS && (uintptr_t)h >> 32 == initialisation; i++)
        if (sets[i] && sets[i]->serial == (uintptr_t)h) return &sets[i];
    return NULL;
}

EXPORTED Result nvmlEventSetCreate(Handle *made) {
    pthread_mutex_lock(&lock);
    Result result = ready("nvmlEventSetCreate", -1);
    u32 i = 0;
    while (i < MAX_SETS && sets[i]) i++;
    if (result == SUCCESS && (i == MAX_SETS || !(sets[i] = calloc(1, sizeof **sets)))) result = MEMORY;
    if (result == SUCCESS) {
        sets[i]->serial = (uintptr_t)handle(EVENT_SET, 0, 0, 0) | (++serial & 0xffffff);
        *made = (Handle)(uintptr_t)sets[i]->serial;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED Result nvmlEventSetFree(Handle h) {
    pthread_mutex_lock(&lock);
    Result result = ready("nvmlEventSetFree", -1);
    struct set **set = find_set(h);
    if (result == SUCCESS && set == NULL) result = INVALID_ARGUMENT;
    if (result == SUCCESS) {
        free(*set);
        *set = NULL;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORTED Result nvmlDeviceGetSupportedEventTypes(Handle h, u64 *types) {
    ENTER_AT("nvmlDeviceGetSupportedEventTypes", h, GPU_ONLY);
    *types = at.gpu.events;
    return SUCCESS;
}

/* nvml.h: events from before this call aren't recorded; where one of the types isn't supported, none is registered. There is
 * no registering for one MIG device: a GPU's events are those of all its instances. */
EXPORTED Result nvmlDeviceRegisterEvents(Handle h, u64 types, Handle to) {
    ENTER_AT("nvmlDeviceRegisterEvents", h, GPU_ONLY);
    if (types & ~at.gpu.events) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct stat now;
    struct set **set = find_set(to);
    if (set) {
        off_t end = stat(events_path, &now) == 0 ? now.st_size : 0;
        if ((*set)->types[at.board] == 0) (*set)->since[at.board] = end;
        (*set)->types[at.board] |= types;
    }
    pthread_mutex_unlock(&lock);
    return set ? SUCCESS : INVALID_ARGUMENT;
}

struct event { Handle device; u64 type, data; u32 gi, ci; };

/* Under the lock: the set's next event, `event <uuid> <type> <data> <gi> <ci>`. Half a line isn't one yet. */
static int next_event(struct set *set, struct event *to) {
    char line[256];
    int found = 0;
    FILE *file = fopen(events_path, "re");
    if (file == NULL) return 0;
    fseeko(file, set->read, SEEK_SET);
    while (!found && fgets(line, sizeof line, file) && strchr(line, '\n')) {
        off_t began = set->read;
        char uuid[NAME];
        set->read = ftello(file);
        if (sscanf(line, "event %95s %llu %llu %u %u", uuid, &to->type, &to->data, &to->gi, &to->ci) != 5) {
            fprintf(stderr, "fake NVML: %s has a line that isn't an event: %s", events_path, line);
            continue;
        }
        for (u32 i = 0; i < board_count && !found; i++)
            if (strcmp(boards[i].uuid, uuid) == 0 && (set->types[i] & to->type) && began >= set->since[i]) {
                to->device = handle(GPU_HANDLE, i, 0, 0);
                found = 1;
            }
    }
    fclose(file);
    return found;
}

static Result look(Handle h, struct event *to) {
    if (references == 0) return UNINITIALIZED;
    struct set **set = find_set(h);
    if (set == NULL) return INVALID_ARGUMENT;
    if (!refresh()) return UNKNOWN;
    Result told = as_told("nvmlEventSetWait", -1);
    if (told != SUCCESS) return told;
    set = find_set(h);
    if (set == NULL) return INVALID_ARGUMENT;
    if (next_event(*set, to)) return SUCCESS;
    /* nvml.h: GPU_IS_LOST when any GPU of the set fell off the bus; at once, and again at each further wait
     * (NVIDIA/k8s-test-infra#746, Project-HAMi/HAMi#2321). */
    for (u32 i = 0; i < board_count; i++)
        if ((*set)->types[i] && boards[i].lost) return GPU_IS_LOST;
    return TIMEOUT;
}

/* nvml.h: waits for one event of the set's GPUs, at most the time given; on Linux each Xid is told, with its own data. */
EXPORTED Result nvmlEventSetWait_v2(Handle h, struct event *to, u32 timeout_ms) {
    char folder[sizeof path], drained[4096];
    int64_t start_ms = now_ms();
    pthread_mutex_lock(&lock);
    calls++;
    waits++;
    strcpy(folder, path);
    char *slash = strrchr(folder, '/');
    if (slash) *slash = '\0';
    int watch = references && !test_rest ? inotify_init1(IN_CLOEXEC | IN_NONBLOCK) : -1;
    if (watch >= 0 && inotify_add_watch(watch, slash ? folder : ".", IN_MODIFY | IN_MOVED_TO | IN_CREATE | IN_DELETE) < 0) {
        close(watch);
        watch = -1;
    }
    memset(to, 0, sizeof *to);
    Result result;
    for (;;) {
        result = look(h, to);
        int64_t left = start_ms + timeout_ms - now_ms();
        if (result != TIMEOUT || left <= 0) break;
        pthread_mutex_unlock(&lock);
        struct pollfd fd = {.fd = watch, .events = POLLIN};
        if (test_rest) test_rest((u32)left);
        else poll(&fd, watch >= 0, watch >= 0 ? (int)(left > 1000000 ? 1000000 : left) : 2);
        while (watch >= 0 && read(watch, drained, sizeof drained) > 0) continue;
        pthread_mutex_lock(&lock);
    }
    if (watch >= 0) close(watch);
    waits--;
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- for tests, not NVIDIA's: what is held now, and how many calls there were in all --- */

struct counts { u32 references, event_sets, waits; u64 calls; };

EXPORTED void fake_nvml_counts(struct counts *to) {
    pthread_mutex_lock(&lock);
    *to = (struct counts){references, 0, waits, calls};
    for (u32 i = 0; i < MAX_SETS; i++) to->event_sets += sets[i] != NULL;
    pthread_mutex_unlock(&lock);
}
