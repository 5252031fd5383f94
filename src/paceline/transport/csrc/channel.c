/* A rank's end of a group: joining, leaving, arenas, and what a fork may not do. */
#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wait.h"

int pl_abi(void) { return PL_ABI; }

uint64_t pl_control_bytes(int size) {
    return pl_round_up(pl_rings_at(size) + (uint64_t)size * (uint64_t)size * pl_ring_stride(size), 4096);
}

/* -- forks ----------------------------------------------------------------------------------------------------------- */

/* A child of fork has the memory of the group but none of its threads, and is not the rank. It is told by a counter
 * and not by its process number, as asking for that is a system call. */
static int fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* Channels this process has joined; a process is one rank of a group. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static pl_channel *open_channels;

static void before_fork(void) { pthread_mutex_lock(&open_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&open_lock); }
static void after_fork_in_child(void) {
    fork_generation++;
    open_channels = NULL;
    pthread_mutex_unlock(&open_lock);
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

int pl_is_forked(const pl_channel *ch) { return ch->fork_generation != fork_generation; }

const char *const pl_forked = "this process is a fork of the rank that opened the group, and not a rank of it";

pl_job *pl_refusal(pl_channel *ch) { return pl_is_forked(ch) ? pl_job_refused(ch, PL_FORKED, pl_forked) : NULL; }

/* -- joining ---------------------------------------------------------------------------------------------------------- */

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

/* Held until the process ends or closes the file: [Note: life] in round.c. */
static const char *take_life_lock(pl_channel *ch) {
    struct stat info;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = ch->rank, .l_len = 1};
    if (ch->fd < 0) return NULL;
    if (fstat(ch->fd, &info) != 0) return "its file descriptor is not open";
    ch->device = info.st_dev;
    ch->inode = info.st_ino;
    for (const pl_channel *other = open_channels; other; other = other->next_open)
        if (other->fd >= 0 && other->device == ch->device && other->inode == ch->inode)
            return "this process is a rank of it already";
    if (fcntl(ch->fd, F_SETLK, &lock) == 0) return NULL;
    return errno == EACCES || errno == EAGAIN ? "another process has this rank" : "its file cannot be locked";
}

static void add_cpus(pl_header *h) {
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    for (int c = 0; c < PL_CPU_WORDS * 64 && c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &cpus))
            atomic_fetch_or_explicit(&h->cpus[c / 64], UINT64_C(1) << c % 64, memory_order_relaxed);
}

/* Spinning pays only while the rank that is waited for runs on another CPU. Ranks that are bound to one CPU each have
 * as many as there are ranks, so it is the CPUs of all that count. Until all have joined, nobody spins. */
void pl_settle_spin(pl_channel *ch) {
    int n = 0;
    if (atomic_load_explicit(&ch->has_spin, memory_order_relaxed)) return;
    for (int r = 0; r < ch->size; r++)
        if (atomic_load_explicit(&pl_slot_of(ch, r)->state, memory_order_acquire) == PL_ABSENT) return;
    for (int w = 0; w < PL_CPU_WORDS; w++)
        n += __builtin_popcountll(atomic_load_explicit(&ch->header->cpus[w], memory_order_relaxed));
    if (n >= ch->size) pl_set_spin(ch, 100e-6, 20e-6);
    else pl_set_spin(ch, 0, 0);
}

static const char *join(pl_channel *ch) {
    const char *refused;
    pthread_mutex_lock(&open_lock);
    refused = take_life_lock(ch);
    if (!refused) {
        ch->next_open = open_channels;
        open_channels = ch;
        add_cpus(ch->header);
        atomic_store_explicit(&pl_slot_of(ch, ch->rank)->state, PL_JOINED, memory_order_release);
    }
    pthread_mutex_unlock(&open_lock);
    return refused;
}

static pl_channel *new_channel(void *base, int fd, int rank, int size, const int *names) {
    pl_channel *ch = calloc(1, sizeof *ch);
    if (!ch) return NULL;
    pthread_once(&fork_once, watch_forks);
    ch->header = base;
    ch->rank = rank;
    ch->size = size;
    ch->fd = fd;
    ch->fork_generation = fork_generation;
    ch->half_bytes = pl_half_bytes(size);
    ch->round = 1;
    ch->spin_ns = INT64_MAX;
    for (int r = 0; r < size; r++) ch->names[r] = names ? names[r] : r;
    atomic_init(&ch->references, 1);
    pl_queue_init(&ch->queue);
    pthread_mutex_init(&ch->arena_lock, NULL);
    pthread_cond_init(&ch->arena_free, NULL);
    return ch;
}

/* So that the first collectives do not stop for page faults. */
static void touch_pages(const pl_channel *ch, uint64_t nbytes) {
    const volatile unsigned char *at = (const unsigned char *)ch->header;
    for (uint64_t i = 0; i < nbytes; i += 4096) (void)at[i];
}

pl_channel *pl_open(void *base, uint64_t nbytes, int fd, int rank, int size, int create, const int *names,
                    char *reason, uint64_t reason_bytes) {
    const char *refused = NULL;
    pl_channel *ch = NULL;
    if (size < 1 || size > PL_MAX_RANKS || rank < 0 || rank >= size) refused = "no such rank";
    else if (nbytes < pl_control_bytes(size)) refused = "it is too small";
    else if ((uintptr_t)base % PL_LINE != 0) refused = "it is not mapped at a page";
    if (!refused && create) make_header(base, nbytes, size);
    if (!refused) refused = header_refused(base, nbytes, size);
    if (!refused && !(ch = new_channel(base, fd, rank, size, names))) refused = "no memory";
    if (!refused) refused = join(ch);
    if (!refused) {
        touch_pages(ch, nbytes);
        return ch;
    }
    snprintf(reason, reason_bytes, "%s", refused);
    if (ch) pl_channel_release(ch);
    return NULL;
}

/* -- leaving ---------------------------------------------------------------------------------------------------------- */

void pl_channel_release(pl_channel *ch) {
    if (atomic_fetch_sub_explicit(&ch->references, 1, memory_order_acq_rel) != 1) return;
    for (pl_arena *next, *a = ch->arenas; a; a = next) {
        next = a->next;
        free(a);
    }
    pthread_cond_destroy(&ch->arena_free);
    pthread_mutex_destroy(&ch->arena_lock);
    pl_queue_free(&ch->queue);
    pl_post_free(ch);
    free(ch);
}

static void leave(pl_channel *ch) {
    pthread_mutex_lock(&open_lock);
    for (pl_channel **at = &open_channels; *at; at = &(*at)->next_open)
        if (*at == ch) {
            *at = ch->next_open;
            break;
        }
    pthread_mutex_unlock(&open_lock);
    /* The state goes first: whoever finds the lock free later must not take us for dead. */
    atomic_store_explicit(&pl_slot_of(ch, ch->rank)->state, PL_GONE, memory_order_release);
    pl_wake_all(&ch->header->arrivals);
    pl_ring_all_bells(ch);
}

void pl_close(pl_channel *ch) {
    if (pl_is_forked(ch)) return;
    pl_queue_close(ch);
    pl_post_close(ch);
    leave(ch);
}

/* Apart from closing, as another thread may be about to find out that the channel is closed. */
void pl_free(pl_channel *ch) {
    if (!pl_is_forked(ch)) pl_channel_release(ch);
}

void pl_abort(pl_channel *ch) {
    char text[96];
    if (pl_is_forked(ch)) return;
    snprintf(text, sizeof text, "rank %d has aborted the group", ch->names[ch->rank]);
    pl_set_poison(ch, PL_POISONED, ch->names[ch->rank], text);
    pl_close(ch);
}

void pl_poison(pl_channel *ch, const char *cause, int blamed, int status) {
    if (!pl_is_forked(ch)) pl_set_poison(ch, (enum pl_status)status, blamed, cause);
}

void pl_set_spin(pl_channel *ch, double inline_s, double worker_s) {
    atomic_store(&ch->has_spin, 1);
    atomic_store(&ch->inline_spin_ns, (int64_t)(inline_s * 1e9));
    atomic_store(&ch->worker_spin_ns, (int64_t)(worker_s * 1e9));
}

/* -- arenas ------------------------------------------------------------------------------------------------------------ */

int pl_register_arena(pl_channel *ch, uint64_t number, const uint64_t *bases, uint64_t nbytes) {
    pl_arena *arena = malloc(sizeof *arena + (size_t)ch->size * sizeof arena->bases[0]);
    int free_number = 1;
    if (!arena) return 0;
    *arena = (pl_arena){.number = number, .nbytes = nbytes};
    for (int r = 0; r < ch->size; r++) arena->bases[r] = (unsigned char *)bases[r];
    pthread_mutex_lock(&ch->arena_lock);
    for (const pl_arena *a = ch->arenas; a; a = a->next) free_number &= a->number != number;
    if (free_number) {
        arena->next = ch->arenas;
        ch->arenas = arena;
    }
    pthread_mutex_unlock(&ch->arena_lock);
    if (!free_number) free(arena);
    return free_number;
}

void pl_unregister_arena(pl_channel *ch, uint64_t number) {
    if (pl_is_forked(ch)) return;
    pthread_mutex_lock(&ch->arena_lock);
    for (pl_arena **at = &ch->arenas; *at;) {
        pl_arena *arena = *at;
        if (arena->number != number) {
            at = &arena->next;
        } else if (arena->pins) {
            pthread_cond_wait(&ch->arena_free, &ch->arena_lock);
            at = &ch->arenas; /* the list may be another by now */
        } else {
            *at = arena->next;
            free(arena);
            break;
        }
    }
    pthread_mutex_unlock(&ch->arena_lock);
}

pl_arena *pl_arena_pin(pl_channel *ch, const void *at, uint64_t nbytes) {
    const uintptr_t begin = (uintptr_t)at;
    pthread_mutex_lock(&ch->arena_lock);
    pl_arena *arena = ch->arenas;
    for (; arena; arena = arena->next) {
        const uintptr_t base = (uintptr_t)arena->bases[ch->rank];
        if (begin >= base && begin - base <= arena->nbytes && nbytes <= arena->nbytes - (begin - base)) break;
    }
    if (arena) arena->pins++;
    pthread_mutex_unlock(&ch->arena_lock);
    return arena;
}

void pl_arena_unpin(pl_channel *ch, pl_arena *arena) {
    pthread_mutex_lock(&ch->arena_lock);
    if (--arena->pins == 0) pthread_cond_broadcast(&ch->arena_free);
    pthread_mutex_unlock(&ch->arena_lock);
}
