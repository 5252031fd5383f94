/* A rank's end of a group: joining, leaving, arenas, and what a fork may not do. */
#define _GNU_SOURCE
#include "endpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "wait.h"

/* How long a caller and the worker spin before they sleep, where spinning pays. */
#define INLINE_SPIN_NS 100000
#define WORKER_SPIN_NS 20000

int pl_abi(void) { return PL_ABI; }

uint64_t pl_control_bytes(int size) {
    return pl_round_up(pl_rings_at(size) + (uint64_t)size * (uint64_t)size * pl_ring_stride(size), 4096);
}

/* -- forks --------------------------------------------------------------------------------------------------------- */

/* A child of fork has the memory of the group but none of its threads, and is not the rank. A counter tells it from its
 * parent; process numbers would, too, but asking for one is a system call. */
static int fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* The endpoints that are open in this process. A process may be one rank of a group, but not two. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static pl_endpoint *open_endpoints;

static void before_fork(void) { pthread_mutex_lock(&open_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&open_lock); }
static void after_fork_in_child(void) {
    fork_generation++;
    open_endpoints = NULL;
    pthread_mutex_unlock(&open_lock);
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

int pl_is_forked(const pl_endpoint *ep) { return ep->fork_generation != fork_generation; }

const char *const pl_forked = "this process is a fork of the rank that opened the group, and not a rank of it";

pl_job *pl_refusal(pl_endpoint *ep) { return pl_is_forked(ep) ? pl_job_refused(ep, PL_FORKED, pl_forked) : NULL; }

/* -- joining ------------------------------------------------------------------------------------------------------- */

static void make_header(pl_header *h, uint64_t nbytes, int size) {
    h->magic = PL_MAGIC;
    h->layout = PL_LAYOUT;
    h->abi = PL_ABI;
    h->nbytes = nbytes;
    h->size = (uint32_t)size;
    atomic_store_explicit(&h->made, 1, memory_order_release);
}

static const char *header_refused(const pl_header *h, uint64_t nbytes, int size) {
    if (!atomic_load_explicit(&h->made, memory_order_acquire) || h->magic != PL_MAGIC)
        return "it was not made by this library";
    if (h->layout != PL_LAYOUT || h->abi != PL_ABI) return "it was made by another version of this library";
    if (h->size != (uint32_t)size) return "it was made for another number of ranks";
    if (h->nbytes != nbytes) return "its size is wrong";
    return NULL;
}

/* The lock is held until the process ends or closes the file; see [Note: life] in round.c. */
static const char *take_life_lock(pl_endpoint *ep) {
    struct stat info;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = ep->rank, .l_len = 1};
    if (ep->fd < 0) return NULL;
    if (fstat(ep->fd, &info) != 0) return "its file descriptor is not open";
    ep->device = info.st_dev;
    ep->inode = info.st_ino;
    for (const pl_endpoint *other = open_endpoints; other; other = other->next_open)
        if (other->fd >= 0 && other->device == ep->device && other->inode == ep->inode)
            return "this process is a rank of it already";
    if (fcntl(ep->fd, F_SETLK, &lock) == 0) return NULL;
    return errno == EACCES || errno == EAGAIN ? "another process has this rank" : "its file cannot be locked";
}

static void add_cpus(pl_header *h) {
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    for (int c = 0; c < PL_CPU_WORDS * 64 && c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &cpus))
            atomic_fetch_or_explicit(&h->cpus[c / 64], UINT64_C(1) << c % 64, memory_order_relaxed);
}

/* Spinning pays only while the rank that is waited for runs on another CPU. The CPUs of all ranks are counted together,
 * as each rank may be bound to one of its own. Until all have joined, nobody spins. */
void pl_settle_spin(pl_endpoint *ep) {
    int n = 0;
    if (atomic_load_explicit(&ep->has_spin, memory_order_relaxed)) return;
    for (int r = 0; r < ep->size; r++)
        if (atomic_load_explicit(&pl_seat_of(ep, r)->state, memory_order_acquire) == PL_ABSENT) return;
    for (int w = 0; w < PL_CPU_WORDS; w++)
        n += __builtin_popcountll(atomic_load_explicit(&ep->header->cpus[w], memory_order_relaxed));
    atomic_store(&ep->inline_spin_ns, n >= ep->size ? INLINE_SPIN_NS : 0);
    atomic_store(&ep->worker_spin_ns, n >= ep->size ? WORKER_SPIN_NS : 0);
    atomic_store(&ep->has_spin, 1);
}

static const char *join(pl_endpoint *ep) {
    const char *refused;
    pthread_mutex_lock(&open_lock);
    refused = take_life_lock(ep);
    if (!refused) {
        ep->next_open = open_endpoints;
        open_endpoints = ep;
        add_cpus(ep->header);
        atomic_store_explicit(&pl_seat_of(ep, ep->rank)->state, PL_JOINED, memory_order_release);
    }
    pthread_mutex_unlock(&open_lock);
    return refused;
}

/* More than any rank can have to send, and far from where sums of sizes wrap around. */
static uint64_t memory_of_the_machine(void) {
    const uint64_t most = UINT64_C(1) << 56;
    struct sysinfo info;
    if (sysinfo(&info) != 0 || info.totalram + info.totalswap > most / info.mem_unit) return most;
    return (info.totalram + info.totalswap) * info.mem_unit;
}

static pl_endpoint *new_endpoint(void *base, int fd, int rank, int size, const int *names) {
    pl_endpoint *ep = calloc(1, sizeof *ep);
    if (!ep) return NULL;
    pthread_once(&fork_once, watch_forks);
    ep->header = base;
    ep->rank = rank;
    ep->size = size;
    ep->fd = fd;
    ep->fork_generation = fork_generation;
    ep->half_bytes = pl_half_bytes(size);
    ep->most_bytes = memory_of_the_machine();
    ep->round = 1;
    ep->spin_ns = INT64_MAX;
    for (int r = 0; r < size; r++) ep->names[r] = names ? names[r] : r;
    atomic_init(&ep->references, 1);
    pl_queue_init(&ep->queue);
    pthread_mutex_init(&ep->arena_lock, NULL);
    pthread_cond_init(&ep->arena_free, NULL);
    return ep;
}

/* The pages are touched now, so that the first collectives do not stop for page faults. */
static void touch_pages(const pl_endpoint *ep, uint64_t nbytes) {
    const volatile unsigned char *at = (const unsigned char *)ep->header;
    for (uint64_t i = 0; i < nbytes; i += 4096) (void)at[i];
}

pl_endpoint *pl_open(void *base, uint64_t nbytes, int fd, int rank, int size, int create, const int *names,
                     char *reason, uint64_t reason_bytes) {
    const char *refused = NULL;
    pl_endpoint *ep = NULL;
    if (size < 1 || size > PL_MAX_RANKS || rank < 0 || rank >= size) refused = "no such rank";
    else if (nbytes < pl_control_bytes(size)) refused = "it is too small";
    else if ((uintptr_t)base % PL_LINE != 0) refused = "it is not mapped at a page";
    if (!refused && create) make_header(base, nbytes, size);
    if (!refused) refused = header_refused(base, nbytes, size);
    if (!refused && !(ep = new_endpoint(base, fd, rank, size, names))) refused = "no memory";
    if (!refused) refused = join(ep);
    if (!refused) {
        touch_pages(ep, nbytes);
        return ep;
    }
    snprintf(reason, reason_bytes, "%s", refused);
    if (ep) pl_endpoint_release(ep);
    return NULL;
}

/* -- leaving ------------------------------------------------------------------------------------------------------- */

void pl_endpoint_release(pl_endpoint *ep) {
    if (atomic_fetch_sub_explicit(&ep->references, 1, memory_order_acq_rel) != 1) return;
    for (pl_arena *next, *a = ep->arenas; a; a = next) {
        next = a->next;
        free(a);
    }
    pthread_cond_destroy(&ep->arena_free);
    pthread_mutex_destroy(&ep->arena_lock);
    pl_queue_free(&ep->queue);
    pl_post_free(ep);
    free(ep);
}

static void leave(pl_endpoint *ep) {
    pthread_mutex_lock(&open_lock);
    for (pl_endpoint **at = &open_endpoints; *at; at = &(*at)->next_open)
        if (*at == ep) {
            *at = ep->next_open;
            break;
        }
    pthread_mutex_unlock(&open_lock);
    /* The state changes before the lock is let go: whoever finds the lock free must not take us for dead. */
    atomic_store_explicit(&pl_seat_of(ep, ep->rank)->state, PL_GONE, memory_order_release);
    pl_wake_all(&ep->header->arrivals);
    pl_ring_all_bells(ep);
}

void pl_close(pl_endpoint *ep) {
    if (pl_is_forked(ep)) return;
    pl_queue_close(ep);
    pl_post_close(ep);
    leave(ep);
}

/* This is not a part of closing, as another thread may be in a call that is about to find the endpoint closed. */
void pl_free(pl_endpoint *ep) {
    if (!pl_is_forked(ep)) pl_endpoint_release(ep);
}

void pl_abort(pl_endpoint *ep) {
    char text[96];
    if (pl_is_forked(ep)) return;
    snprintf(text, sizeof text, "rank %d has aborted the group", ep->names[ep->rank]);
    pl_set_poison(ep, PL_POISONED, ep->names[ep->rank], text);
    pl_close(ep);
}

void pl_poison(pl_endpoint *ep, const char *cause, int blamed, int status) {
    if (!pl_is_forked(ep)) pl_set_poison(ep, (enum pl_status)status, blamed, cause);
}

/* -- arenas -------------------------------------------------------------------------------------------------------- */

int pl_register_arena(pl_endpoint *ep, uint64_t number, const uint64_t *bases, uint64_t nbytes) {
    pl_arena *arena = malloc(sizeof *arena + (size_t)ep->size * sizeof arena->bases[0]);
    int free_number = 1;
    if (!arena) return 0;
    *arena = (pl_arena){.number = number, .nbytes = nbytes};
    for (int r = 0; r < ep->size; r++) arena->bases[r] = (unsigned char *)bases[r];
    pthread_mutex_lock(&ep->arena_lock);
    for (const pl_arena *a = ep->arenas; a; a = a->next) free_number &= a->number != number;
    if (free_number) {
        arena->next = ep->arenas;
        ep->arenas = arena;
    }
    pthread_mutex_unlock(&ep->arena_lock);
    if (!free_number) free(arena);
    return free_number;
}

void pl_unregister_arena(pl_endpoint *ep, uint64_t number) {
    if (pl_is_forked(ep)) return;
    pthread_mutex_lock(&ep->arena_lock);
    for (pl_arena **at = &ep->arenas; *at;) {
        pl_arena *arena = *at;
        if (arena->number != number) {
            at = &arena->next;
        } else if (arena->pins) {
            pthread_cond_wait(&ep->arena_free, &ep->arena_lock);
            at = &ep->arenas; /* the list may have changed meanwhile */
        } else {
            *at = arena->next;
            free(arena);
            break;
        }
    }
    pthread_mutex_unlock(&ep->arena_lock);
}

pl_arena *pl_arena_pin(pl_endpoint *ep, const void *at, uint64_t nbytes) {
    const uintptr_t begin = (uintptr_t)at;
    pthread_mutex_lock(&ep->arena_lock);
    pl_arena *arena = ep->arenas;
    for (; arena; arena = arena->next) {
        const uintptr_t base = (uintptr_t)arena->bases[ep->rank];
        if (begin >= base && begin - base <= arena->nbytes && nbytes <= arena->nbytes - (begin - base)) break;
    }
    if (arena) arena->pins++;
    pthread_mutex_unlock(&ep->arena_lock);
    return arena;
}

void pl_arena_unpin(pl_endpoint *ep, pl_arena *arena) {
    pthread_mutex_lock(&ep->arena_lock);
    if (--arena->pins == 0) pthread_cond_broadcast(&ep->arena_free);
    pthread_mutex_unlock(&ep->arena_lock);
}
