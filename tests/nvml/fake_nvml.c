/* A libnvidia-ml.so.1 that answers from a script file, so that nvidia-ml-py runs on it unmodified.
 *
 * The script is the file named by $FAKE_NVML, else /run/fake-nvml/script. It is re-read when it changes. Each line is
 * "key value..."; "gpu" starts a GPU, lines before the first one apply to the whole library.
 * tests/nvml/__init__.py writes scripts and documents the keys. Faults and hangs apply before each call:
 * "fault FUNCTION CODE", "hang FUNCTION" (until the script changes), "slow FUNCTION MILLISECONDS", "crash FUNCTION"; FUNCTION may be "*".
 * "freezer FOLDER", before the first GPU: a process whose call hangs enters that control group first.
 * "then PATTERN FILE", before the first GPU: as soon as a file of that pattern (glob) exists, FILE is the script.
 *
 * Built with -DOLD_DRIVER the library lacks the symbols that drivers before 450 to 555 lack.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <glob.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 32
#define MAX_ITEMS 64
#define TEXT 128

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7,
       NO_DRIVER = 9, LOST = 15, UNKNOWN = 999 };

typedef struct { char kind; char function[64]; int value; } Trouble; /* kind: f(ault), h(ang), s(low), c(rash) */
typedef struct { char kind; unsigned pid; unsigned long long memory; char mig[TEXT]; } Proc; /* kind: c, g, m(ps) */
typedef struct { int gpu, number; char uuid[TEXT], name[TEXT]; unsigned gi, ci; unsigned long long total, used; } Mig;
typedef struct { char remote[32]; int type; } Link;
typedef struct { unsigned pid, sm; long long age_us; } Sample;
typedef struct { unsigned id; double value; } Metric;

typedef struct {
    int number, minor;
    char uuid[TEXT], name[TEXT], pci[32], cpus[TEXT];
    unsigned long long total, used, reserved, ecc;
    int utilization, temperature, power, power_limit, compute_mode, gen, gen_max, width, width_max, numa, recovery;
    int remap, remap_pending, remap_failed, retired_pending, mig_mode;
    unsigned long long throttle;
    int links, procs, samples, migs, troubles, levels[MAX_GPUS], xids, xid[MAX_ITEMS];
    int gpm, metrics, pcie_tx, pcie_rx, link_speed, link_tx, link_rx; /* throughput in KB/s, of each link in KiB/s */
    Metric metric[MAX_ITEMS];
    Link link[MAX_ITEMS];
    Proc proc[MAX_ITEMS];
    Sample sample[MAX_ITEMS];
    Mig mig[8];
    Trouble trouble[MAX_ITEMS];
} Gpu;

static struct { char driver[TEXT]; int cuda, record, gpus, troubles; Gpu gpu[MAX_GPUS]; Trouble trouble[MAX_ITEMS]; } S;
static struct stat seen;
static char awaited[512], following[512]; /* PATTERN and FILE of "then" */
static char freezer[512];                 /* FOLDER of "freezer" */
static int initialized;
/* Handles stay valid after a re-read: a device is the address of its slot. Slot 16 * gpu is the GPU, 16 * gpu + 1 + k its MIG device k. */
static char slots[MAX_GPUS * 16];

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static void add_trouble(Trouble *list, int *count, char kind, const char *rest) {
    if (*count == MAX_ITEMS) return;
    Trouble *t = &list[(*count)++];
    t->kind = kind;
    t->value = 0;
    sscanf(rest, "%63s %d", t->function, &t->value);
}

static void gpu_line(Gpu *g, const char *key, const char *rest) {
    if (!strcmp(key, "uuid")) copy(g->uuid, TEXT, rest);
    else if (!strcmp(key, "name")) copy(g->name, TEXT, rest);
    else if (!strcmp(key, "pci")) copy(g->pci, sizeof g->pci, rest);
    else if (!strcmp(key, "cpus")) copy(g->cpus, TEXT, rest);
    else if (!strcmp(key, "memory")) sscanf(rest, "%llu %llu %llu", &g->total, &g->used, &g->reserved);
    else if (!strcmp(key, "utilization")) g->utilization = atoi(rest);
    else if (!strcmp(key, "temperature")) g->temperature = atoi(rest);
    else if (!strcmp(key, "power")) sscanf(rest, "%d %d", &g->power, &g->power_limit);
    else if (!strcmp(key, "compute_mode")) g->compute_mode = atoi(rest);
    else if (!strcmp(key, "throttle")) g->throttle = strtoull(rest, NULL, 0);
    else if (!strcmp(key, "pcie")) sscanf(rest, "%d %d %d %d", &g->gen, &g->width, &g->gen_max, &g->width_max);
    else if (!strcmp(key, "ecc")) g->ecc = strtoull(rest, NULL, 0);
    else if (!strcmp(key, "remap")) g->remap = 1, sscanf(rest, "%d %d", &g->remap_pending, &g->remap_failed);
    else if (!strcmp(key, "retired_pending")) g->retired_pending = atoi(rest);
    else if (!strcmp(key, "recovery")) g->recovery = atoi(rest);
    else if (!strcmp(key, "minor")) g->minor = atoi(rest);
    else if (!strcmp(key, "numa")) g->numa = atoi(rest);
    else if (!strcmp(key, "xid") && g->xids < MAX_ITEMS) g->xid[g->xids++] = atoi(rest);
    else if (!strcmp(key, "mig_mode")) g->mig_mode = atoi(rest);
    else if (!strcmp(key, "gpm")) g->gpm = 1;
    else if (!strcmp(key, "metric") && g->metrics < MAX_ITEMS) {
        Metric *m = &g->metric[g->metrics++];
        sscanf(rest, "%u %lf", &m->id, &m->value); /* "nan" too */
    } else if (!strcmp(key, "throughput")) sscanf(rest, "%d %d", &g->pcie_tx, &g->pcie_rx);
    else if (!strcmp(key, "link_rates")) sscanf(rest, "%d %d %d", &g->link_speed, &g->link_tx, &g->link_rx);
    else if (!strcmp(key, "link") && g->links < MAX_ITEMS) {
        Link *l = &g->link[g->links++];
        sscanf(rest, "%31s %d", l->remote, &l->type);
    } else if (!strcmp(key, "level")) {
        int peer, level;
        if (sscanf(rest, "%d %d", &peer, &level) == 2 && peer >= 0 && peer < MAX_GPUS) g->levels[peer] = level + 1;
    } else if (!strcmp(key, "process") && g->procs < MAX_ITEMS) {
        Proc *p = &g->proc[g->procs++];
        char kind[16] = "";
        long long memory = -1;
        p->mig[0] = 0;
        sscanf(rest, "%15s %u %lld %127s", kind, &p->pid, &memory, p->mig);
        p->kind = kind[0];
        p->memory = (unsigned long long)memory; /* -1 is NVML's "not available" */
    } else if (!strcmp(key, "sample") && g->samples < MAX_ITEMS) {
        Sample *s = &g->sample[g->samples++];
        sscanf(rest, "%u %u %lld", &s->pid, &s->sm, &s->age_us);
    } else if (!strcmp(key, "mig") && g->migs < 8) {
        Mig *m = &g->mig[g->migs];
        m->gpu = g->number;
        m->number = g->migs++;
        sscanf(rest, "%127s %u %u %llu %llu %127[^\n]", m->uuid, &m->gi, &m->ci, &m->total, &m->used, m->name);
    }
}

/* Like the driver: GPUs that a device cgroup denies to this process are omitted, and the others are renumbered. */
static void hide(void) {
    int kept = 0, script_number[MAX_GPUS], levels[MAX_GPUS];
    for (int i = 0; i < S.gpus; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/nvidia%d", S.gpu[i].minor);
        if (access(path, R_OK) && errno == EPERM) continue; /* without such a file the script applies */
        script_number[kept] = i;
        if (kept != i) S.gpu[kept] = S.gpu[i];
        S.gpu[kept].number = kept;
        for (int k = 0; k < S.gpu[kept].migs; k++) S.gpu[kept].mig[k].gpu = kept;
        kept++;
    }
    for (int i = 0; i < kept; i++) {
        memcpy(levels, S.gpu[i].levels, sizeof levels);
        for (int k = 0; k < kept; k++) S.gpu[i].levels[k] = levels[script_number[k]];
    }
    S.gpus = kept;
}

static const char *script(void) {
    const char *path = getenv("FAKE_NVML");
    glob_t found;
    if (awaited[0] && !glob(awaited, 0, NULL, &found)) {
        globfree(&found);
        awaited[0] = 0;
    }
    return following[0] && !awaited[0] ? following : path ? path : "/run/fake-nvml/script";
}

static void load(void) {
    const char *path = script();
    struct stat st;
    if (stat(path, &st)) { memset(&S, 0, sizeof S); S.gpus = -1; seen.st_ino = 0; return; }
    if (st.st_ino == seen.st_ino && st.st_size == seen.st_size && st.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        st.st_mtim.tv_nsec == seen.st_mtim.tv_nsec) return;
    FILE *f = fopen(path, "r");
    if (!f) { S.gpus = -1; return; }
    seen = st;
    memset(&S, 0, sizeof S);
    copy(S.driver, TEXT, "580.159.04");
    S.cuda = 13000;
    S.record = 24;
    freezer[0] = 0;
    Gpu *g = NULL;
    char line[1024], key[64];
    while (fgets(line, sizeof line, f)) {
        int at = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%63s%n", key, &at) != 1 || key[0] == '#') continue;
        const char *rest = line + at + (line[at] == ' ');
        if (!strcmp(key, "gpu")) {
            if (S.gpus == MAX_GPUS) break;
            g = &S.gpu[S.gpus];
            g->number = S.gpus++;
            g->numa = -1;
            g->minor = g->number;
        } else if (!strcmp(key, "fault") || !strcmp(key, "hang") || !strcmp(key, "slow") || !strcmp(key, "crash"))
            add_trouble(g ? g->trouble : S.trouble, g ? &g->troubles : &S.troubles, key[0], rest);
        else if (g) gpu_line(g, key, rest);
        else if (!strcmp(key, "driver")) copy(S.driver, TEXT, rest);
        else if (!strcmp(key, "cuda")) S.cuda = atoi(rest);
        else if (!strcmp(key, "record")) S.record = atoi(rest);
        else if (!strcmp(key, "freezer")) copy(freezer, sizeof freezer, rest);
        else if (!strcmp(key, "then")) sscanf(rest, "%511s %511s", awaited, following);
    }
    fclose(f);
    hide();
}

/* Re-reads the script, but not within 2 s after GPUs were counted: a reading begins with that and is of one script. */
static struct timespec reading;
static void reload(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec - reading.tv_sec > 2) load();
}

static Trouble *find(int gpu, const char *function) {
    Trouble *list = gpu < 0 ? S.trouble : S.gpu[gpu].trouble;
    int count = gpu < 0 ? S.troubles : S.gpu[gpu].troubles;
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].function, "*") || !strcmp(list[i].function, function)) return &list[i];
    return NULL;
}

/* Puts this process into a control group; in one that is frozen, it stays here until that is thawed. */
static void join_freezer(void) {
    char path[600];
    if (!freezer[0]) return;
    snprintf(path, sizeof path, "%s/cgroup.procs", freezer);
    FILE *f = fopen(path, "w");
    if (f) { fputs("0", f); fclose(f); }
    freezer[0] = 0;
}

/* Called by every function: waits, hangs or fails according to the script. gpu < 0: the library as a whole. */
static int enter(int gpu, const char *function) {
    reload();
    if (S.gpus < 0) return NO_DRIVER;
    for (;;) {
        if (gpu >= S.gpus) return LOST;
        Trouble *t = find(gpu, function);
        if (!t) return OK;
        if (t->kind == 'f') return t->value;
        if (t->kind == 'c') abort();
        if (t->kind == 's') { usleep(t->value * 1000); return OK; }
        join_freezer();
        usleep(5000);
        load();
    }
}

static int number_of(void *device) {
    ptrdiff_t slot = (char *)device - slots;
    return slot < 0 || slot >= (ptrdiff_t)sizeof slots ? -2 : (int)(slot / 16);
}

static Mig *mig_of(void *device) {
    int k = (int)(((char *)device - slots) % 16) - 1, gpu = number_of(device);
    return k < 0 || gpu < 0 || k >= S.gpu[gpu].migs ? NULL : &S.gpu[gpu].mig[k];
}

#define GPU(device) \
    int number = number_of(device); \
    if (!initialized) return UNINITIALIZED; \
    if (number < 0) return INVALID; \
    int trouble = enter(number, __func__); \
    if (trouble) return trouble; \
    Gpu *g = &S.gpu[number]; \
    (void)g;

#define NUMBER(function, type, expression) \
    int function(void *device, type *out) { \
        GPU(device) \
        long long value = (expression); \
        if (value < 0) return UNSUPPORTED; \
        *out = (type)value; \
        return OK; \
    }

int nvmlInit_v2(void) { int e = enter(-1, __func__); if (!e) initialized++; return e; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; int e = enter(-1, __func__); if (!e) initialized++; return e; }
int nvmlShutdown(void) { if (initialized) initialized--; return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID: return "Invalid Argument";
    case UNSUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case SMALL: return "Insufficient Size";
    case NO_DRIVER: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 13: return "Function Not Found";
    case LOST: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int e = enter(-1, __func__);
    if (!e) copy(out, size, S.driver);
    return e;
}
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { copy(out, size, "13.580.159.04"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { int e = enter(-1, __func__); if (!e) *out = S.cuda; return e; }
int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!initialized) return UNINITIALIZED;
    load();
    clock_gettime(CLOCK_MONOTONIC, &reading);
    int e = enter(-1, __func__);
    if (!e) *out = S.gpus;
    return e;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if (!initialized) return UNINITIALIZED;
    reload();
    if ((int)index >= S.gpus) return INVALID;
    int e = enter(index, __func__);
    if (!e) *out = &slots[16 * index];
    return e;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    if (!initialized) return UNINITIALIZED;
    reload();
    for (int i = 0; i < S.gpus; i++) {
        if (!strcmp(S.gpu[i].uuid, uuid)) { int e = enter(i, __func__); if (!e) *out = &slots[16 * i]; return e; }
        for (int k = 0; k < S.gpu[i].migs; k++)
            if (!strcmp(S.gpu[i].mig[k].uuid, uuid)) { *out = &slots[16 * i + k + 1]; return OK; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **out) {
    if (!initialized) return UNINITIALIZED;
    reload();
    for (int i = 0; i < S.gpus; i++)
        if (!strcasecmp(S.gpu[i].pci, pci)) { int e = enter(i, __func__); if (!e) *out = &slots[16 * i]; return e; }
    return NOT_FOUND;
}

NUMBER(nvmlDeviceGetIndex, unsigned, mig_of(device) ? mig_of(device)->number : g->number)
NUMBER(nvmlDeviceGetMinorNumber, unsigned, g->minor)
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    GPU(device)
    copy(out, size, mig_of(device) ? mig_of(device)->uuid : g->uuid);
    return OK;
}
int nvmlDeviceGetName(void *device, char *out, unsigned size) {
    GPU(device)
    copy(out, size, mig_of(device) ? mig_of(device)->name : g->name);
    return OK;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
static int pci(const char *text, Pci *out) {
    memset(out, 0, sizeof *out);
    sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    copy(out->bus_id, sizeof out->bus_id, text);
    snprintf(out->legacy, sizeof out->legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0x1f);
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *device, Pci *out) { GPU(device) return pci(g->pci, out); }

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
    GPU(device)
    Mig *m = mig_of(device);
    out->total = m ? m->total : g->total;
    out->used = m ? m->used : g->used + g->reserved;
    out->free = out->total - out->used;
    return OK;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *out) {
    GPU(device)
    Mig *m = mig_of(device);
    if (out->version != 0x02000028) return 25;
    out->total = m ? m->total : g->total;
    out->reserved = m ? 0 : g->reserved;
    out->used = m ? m->used : g->used;
    out->free = out->total - out->used - out->reserved;
    return OK;
}
#endif

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(void *device, Utilization *out) {
    GPU(device)
    if (mig_of(device) || g->mig_mode > 0 || g->utilization < 0) return UNSUPPORTED;
    out->gpu = g->utilization;
    out->memory = g->utilization / 2;
    return OK;
}
typedef struct { unsigned version, sensor; int temperature; } Temperature;
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *out) {
    GPU(device)
    if (sensor || g->temperature < 0) return UNSUPPORTED;
    *out = g->temperature;
    return OK;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetTemperatureV(void *device, Temperature *out) {
    GPU(device)
    if (g->temperature < 0) return UNSUPPORTED;
    out->temperature = g->temperature;
    return OK;
}
#endif
NUMBER(nvmlDeviceGetPowerUsage, unsigned, g->power)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, g->power_limit)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, g->power_limit)
NUMBER(nvmlDeviceGetComputeMode, unsigned, g->compute_mode)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, g->gen)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, g->gen_max)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, g->width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, g->width_max)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, (long long)g->throttle)
#ifndef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, (long long)g->throttle)
#endif
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, g->remap ? -1 : g->retired_pending)

/* Functions that other readers of NVML call and data-centre GPUs do not support. */
NUMBER(nvmlDeviceGetFanSpeed, unsigned, -1)
NUMBER(nvmlDeviceGetDisplayActive, unsigned, 0)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
int nvmlDeviceGetEncoderUtilization(void *device, unsigned *out, unsigned *us) { GPU(device) *out = 0; *us = 100000; return OK; }
int nvmlDeviceGetDecoderUtilization(void *device, unsigned *out, unsigned *us) { GPU(device) *out = 0; *us = 100000; return OK; }
int nvmlDeviceGetDriverModel(void *device, unsigned *current, unsigned *pending) {
    GPU(device)
    (void)current, (void)pending;
    return UNSUPPORTED;
}
typedef struct { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; } ProcessSample;
int nvmlDeviceGetProcessUtilization(void *device, void *samples, unsigned *count, unsigned long long since) {
    GPU(device)
    ProcessSample *out = samples;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned room = *count, found = 0;
    for (int i = 0; i < g->samples; i++) {
        unsigned long long at = now.tv_sec * 1000000ULL + now.tv_nsec / 1000 - g->sample[i].age_us;
        if (at <= since) continue;
        if (found < room && out) out[found] = (ProcessSample){g->sample[i].pid, at, g->sample[i].sm, 0, 0, 0};
        found++;
    }
    *count = found;
    return !found ? NOT_FOUND : !out || found > room ? SMALL : OK;
}

int nvmlDeviceGetMemoryAffinity(void *device, unsigned words, unsigned long *out, unsigned scope) {
    GPU(device)
    (void)scope;
    if (g->numa < 0) return UNSUPPORTED;
    memset(out, 0, words * sizeof *out);
    out[0] = 1UL << g->numa;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { GPU(device) *major = 9; *minor = 0; return OK; }

int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, unsigned long long *out) {
    GPU(device)
    *out = type == 1 && counter == 0 ? g->ecc : 0; /* uncorrected, volatile */
    return OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    GPU(device)
    if (!g->remap) return UNSUPPORTED;
    *corrected = *uncorrected = 0;
    *pending = g->remap_pending;
    *failed = g->remap_failed;
    return OK;
}

/* A counter of the rate times the time since the machine was booted. */
static unsigned long long counted(int rate) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return rate * (now.tv_sec + now.tv_nsec / 1e9);
}

typedef struct { unsigned field, scope; int64_t at, latency; unsigned type, error; unsigned long long value; } Field;
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
    GPU(device)
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].error = UNSUPPORTED;
#ifndef OLD_DRIVER
        if (fields[i].field == 230 && g->recovery >= 0) { /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
            fields[i].error = OK;
            fields[i].value = g->recovery;
        }
#endif
        if (fields[i].field == 90 && g->link_speed > 0) { /* NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON */
            fields[i].error = OK;
            fields[i].value = g->link_speed;
        }
        if ((fields[i].field == 138 || fields[i].field == 139) && g->link_speed > 0) { /* ..._THROUGHPUT_DATA_TX, _RX */
            int active = (int)fields[i].scope < g->links && strcmp(g->link[fields[i].scope].remote, "down");
            fields[i].error = (int)fields[i].scope >= g->links ? INVALID : active ? OK : UNSUPPORTED;
            fields[i].type = 3; /* unsigned long long */
            if (active) fields[i].value = counted(fields[i].field == 138 ? g->link_tx : g->link_rx);
        }
    }
    return OK;
}

/* Process lists: 24-byte records, or 32 bytes in _v3 with "record 32" (drivers 535.43 to 535.86). */
static int processes(void *device, Gpu *g, char kind, int record, unsigned *count, char *out) {
    Mig *m = mig_of(device);
    unsigned room = *count, found = 0;
    for (int i = 0; i < g->procs; i++) {
        Proc *p = &g->proc[i];
        if (p->kind != kind || (m && strcmp(p->mig, m->uuid))) continue;
        if (found < room && out) {
            unsigned long long words[4] = {p->pid, p->memory, 0xffffffffffffffffULL, 0};
            for (int k = 0; k < g->migs; k++)
                if (!strcmp(p->mig, g->mig[k].uuid)) words[2] = g->mig[k].gi | (unsigned long long)g->mig[k].ci << 32;
            memcpy(out + found * record, words, record);
        }
        found++;
    }
    *count = found;
    return found && (!out || found > room) ? SMALL : OK;
}
#define PROCESSES(function, kind, record) \
    int function(void *device, unsigned *count, char *out) { GPU(device) return processes(device, g, kind, record, count, out); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 'c', 24)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g', 24)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'm', 24)
#ifndef OLD_DRIVER
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 'c', S.record)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g', S.record)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'm', S.record)
#endif

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    GPU(device)
    if (g->mig_mode < 0) return UNSUPPORTED;
    *current = *pending = g->mig_mode;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *out) { GPU(device) *out = g->mig_mode > 0 ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **out) {
    GPU(device)
    if (g->mig_mode < 1 || (int)index >= g->migs) return NOT_FOUND;
    *out = &slots[16 * number + index + 1];
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **out) {
    GPU(device)
    *out = &slots[16 * number];
    return OK;
}
int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *out) { GPU(device) *out = mig_of(device) != NULL; return OK; }
int nvmlDeviceGetGpuInstanceId(void *device, unsigned *out) {
    GPU(device)
    if (!mig_of(device)) return INVALID;
    *out = mig_of(device)->gi;
    return OK;
}
int nvmlDeviceGetComputeInstanceId(void *device, unsigned *out) {
    GPU(device)
    if (!mig_of(device)) return INVALID;
    *out = mig_of(device)->ci;
    return OK;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *out) {
    GPU(device)
    if (!g->links) return UNSUPPORTED;
    if ((int)link >= g->links) return INVALID;
    *out = strcmp(g->link[link].remote, "down") != 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, Pci *out) {
    GPU(device)
    if ((int)link >= g->links) return INVALID;
    return pci(g->link[link].remote, out);
}
#ifndef OLD_DRIVER
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *out) {
    GPU(device)
    if ((int)link >= g->links) return INVALID;
    *out = g->link[link].type; /* 0 GPU, 1 IBM NPU, 2 switch, 255 unknown */
    return OK;
}
#endif
int nvmlDeviceGetTopologyCommonAncestor(void *device, void *peer, unsigned *out) {
    GPU(device)
    int other = number_of(peer);
    if (other < 0) return INVALID;
    *out = number == other ? 0 : g->levels[other] ? g->levels[other] - 1 : 50; /* default: SYSTEM */
    return OK;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned words, unsigned long *out) {
    GPU(device)
    if (!g->cpus[0]) return UNSUPPORTED;
    memset(out, 0, words * sizeof *out);
    for (const char *at = g->cpus; *at;) {
        unsigned first, last;
        int used = 0;
        if (sscanf(at, "%u%n", &first, &used) != 1) break;
        at += used;
        last = first;
        if (*at == '-' && sscanf(at + 1, "%u%n", &last, &used) == 1) at += 1 + used;
        for (unsigned c = first; c <= last && c < words * 64; c++) out[c / 64] |= 1UL << (c % 64);
        if (*at == ',') at++;
    }
    return OK;
}

#ifndef OLD_DRIVER
/* Events: XID errors in the script beyond those present when this process registered. */
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } Event;
static char events;
static int listening[MAX_GPUS], told[MAX_GPUS];
int nvmlEventSetCreate(void **out) {
    if (!initialized) return UNINITIALIZED;
    int e = enter(-1, __func__);
    if (!e) *out = &events;
    return e;
}
int nvmlEventSetFree(void *set) { return set == &events ? OK : INVALID; }
int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *out) { GPU(device) *out = 8; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    GPU(device)
    if (set != &events || types != 8) return INVALID; /* 8: XID errors */
    listening[number] = 1;
    told[number] = g->xids;
    return OK;
}
int nvmlEventSetWait_v2(void *set, Event *out, unsigned timeout_ms) {
    if (!initialized) return UNINITIALIZED;
    if (set != &events) return INVALID;
    int e = enter(-1, __func__);
    if (e) return e;
    for (int i = 0; i < S.gpus; i++)
        if (listening[i] && told[i] < S.gpu[i].xids) {
            *out = (Event){&slots[16 * i], 8, S.gpu[i].xid[told[i]++], -1, -1};
            return OK;
        }
    usleep(timeout_ms * 1000);
    return 10; /* timeout */
}
#endif

/* For nvitop in bench/: it queries more values, and missing functions must not slow it down. */
int nvmlDeviceGetClockInfo(void *device, unsigned clock, unsigned *out) {
    GPU(device)
    (void)clock;
    *out = 345;
    return OK;
}

int nvmlDeviceGetMaxClockInfo(void *device, unsigned clock, unsigned *out) {
    GPU(device)
    (void)clock;
    *out = 1980;
    return OK;
}

int nvmlDeviceGetPcieThroughput(void *device, unsigned counter, unsigned *out) {
    GPU(device)
    if (counter > 1) return INVALID;
    int found = counter ? g->pcie_rx : g->pcie_tx;
    if (mig_of(device) || g->mig_mode > 0 || found < 0) return UNSUPPORTED;
    *out = found;
    return OK;
}

#ifndef OLD_DRIVER
/* GPM, of Hopper and later: the metrics of the second sample, when both are of one GPU and in order. */
typedef struct { int gpu; double at; int metrics; Metric metric[MAX_ITEMS]; } GpmSample;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned id; int error; double value; const char *names[3]; } GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metric[]; } GpmRequest;

int nvmlGpmQueryDeviceSupport(void *device, GpmSupport *out) {
    GPU(device)
    if (out->version != 1) return 25;
    out->supported = g->gpm;
    return OK;
}
int nvmlGpmSampleAlloc(GpmSample **out) {
    if (!initialized) return UNINITIALIZED;
    int e = enter(-1, __func__);
    if (!e) (*out = calloc(1, sizeof **out))->gpu = -1;
    return e;
}
int nvmlGpmSampleFree(GpmSample *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *device, GpmSample *sample) {
    GPU(device)
    if (!sample) return INVALID;
    if (!g->gpm || mig_of(device) || g->mig_mode > 0) return UNSUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sample->gpu = number;
    sample->at = now.tv_sec + now.tv_nsec / 1e9;
    sample->metrics = g->metrics;
    memcpy(sample->metric, g->metric, sizeof g->metric);
    return OK;
}
int nvmlGpmMetricsGet(GpmRequest *request) {
    if (!initialized) return UNINITIALIZED;
    int e = enter(-1, __func__);
    if (e) return e;
    if (request->version != 1) return 25;
    GpmSample *first = request->first, *second = request->second;
    if (!first || !second || first->gpu < 0 || first->gpu != second->gpu || first->at >= second->at) return INVALID;
    for (unsigned i = 0; i < request->count; i++) {
        GpmMetric *m = &request->metric[i];
        m->error = UNSUPPORTED;
        for (int k = 0; k < second->metrics; k++)
            if (second->metric[k].id == m->id) m->error = OK, m->value = second->metric[k].value;
    }
    return OK;
}
#endif

int nvmlDeviceGetDisplayMode(void *device, unsigned *out) {
    GPU(device)
    *out = 0;
    return OK;
}
