/* What is in the control segment.
 *
 *     +--------+---------+------------------------------+---------------------------+
 *     | header | seats   | staging: rank 0 | 1 | ...    | rings: 0>0 0>1 ... W>W    |
 *     +--------+---------+------------------------------+---------------------------+
 *
 * [Note: rounds]
 * All collectives are made of rounds, counted from 1 for the life of the group. In round k a rank
 *     1. writes: its descriptor and its staging area, the halves of number k % 2, and nothing else;
 *     2. arrives: adds 1 to `arrivals` (release);
 *     3. waits until `arrivals` has reached size * k (acquire): the gate;
 *     4. reads: the halves k % 2 of other ranks.
 * Why a reader sees what it should: every write of step 1 comes before its rank's release in step 2. All changes of
 * `arrivals` are read-modify-write, so each continues the release sequences of those before it, and a rank that
 * reads a value >= size * k with acquire synchronises with *all* arrivals of round k (C11 5.1.2.4), not only with the
 * last.
 * Why nobody overwrites what is still being read: a rank writes half k % 2 again in round k + 2, after it has
 * passed the gate of k + 1. To arrive at k + 1, another rank has first finished step 4 of round k; its reads come
 * before its release in k + 1, which our acquire at that gate synchronises with. So two halves are enough, and so is
 * one gate a round. With one half this fails; tests/transport/model/ checks both, with delayed stores.
 *
 * A zero-copy all_reduce (all_reduce.c) also touches arenas. It does so only between the gate of its first round and
 * the arrival at its last, and each rank touches only its own share. A staged all_reduce of two ranks writes into the
 * other rank's half. It does so only between the gate of k and the arrival at k + 1, and each rank only its own piece.
 *
 * [Note: overwritten]
 * Every rank can write to all of the control segment, and a wild pointer of one of them may. So a rank believes nothing
 * in it. What decides an index, an address, a size, a number of rounds or how a job ends is read once (PL_ONCE), as it
 * may change between two looks, and is held against what the rank knows by itself: the number of ranks, its own sizes,
 * the size of a ring or an arena, the memory of the machine. What this rank itself has written is not read back. What
 * cannot be true ends the group with an error that says so (pl_overwritten). What can be true but is not may give wrong
 * data, a wrong error, or a wait until the deadline. tests/transport/sanitize/overwrite.c tries it.
 */
#ifndef PACELINE_LAYOUT_H
#define PACELINE_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#include "pl.h"

#define PL_MAGIC UINT64_C(0x31656e696c636170) /* "pacline1" */
#define PL_LAYOUT 5                           /* changes with any type or size in this file, or in a ring */
/* Many x86 CPUs fetch lines of 64 bytes in pairs, and on other CPUs a line has 128 bytes. */
#define PL_LINE 128
#define PL_CAUSE_BYTES 320
#define PL_NO_DTYPE INT32_MAX
#define PL_CPU_WORDS 16 /* of 64 CPUs each: as many as a cpu_set_t has */

/* Processes share these atomics: they must not be made with a lock, which would belong to one process. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics need to be lock-free here");
_Static_assert(sizeof(_Atomic uint32_t) == 4, "a futex is 32 bits");

#define PL_ALIGNED _Alignas(PL_LINE)

/* A plain word of the segment, read exactly once: the compiler may not look again ([Note: overwritten]). */
#define PL_ONCE(word) (*(const volatile __typeof__(word) *)&(word))

/* What a rank is doing; compared after the first round of each collective. */
typedef struct {
    uint32_t kind, op, dtype, root; /* a dtype of PL_NO_DTYPE agrees with any */
    uint64_t count;  /* elements of a reduction, else 0 */
    uint64_t arena;  /* where the tensor is: an arena's number + 1, or 0 for private memory ... */
    uint64_t offset; /* ... and how far into it */
    uint64_t flags;
} pl_descriptor;

enum pl_state { PL_ABSENT, PL_JOINED, PL_GONE };

typedef struct {
    /* Written by the owner of the seat only. */
    PL_ALIGNED _Atomic uint32_t round; /* the last it arrived at, to see who is missing; orders nothing */
    _Atomic uint32_t state;
    /* Halves, as in [Note: rounds]. */
    PL_ALIGNED pl_descriptor descriptor[2];
    PL_ALIGNED uint64_t out[2][PL_MAX_RANKS]; /* bytes this rank sends to each ... */
    uint64_t in[2][PL_MAX_RANKS];             /* ... and expects from each */
    /* Why this rank poisoned the group, and the name of the rank to blame. Written once, before the poison word. */
    PL_ALIGNED char cause[PL_CAUSE_BYTES];
    int32_t blamed;
    /* Rung by others when a ring from or to this rank has moved (delivery.c). */
    PL_ALIGNED _Atomic uint32_t bell;
    _Atomic uint32_t listening; /* somebody sleeps on the bell */
} pl_seat;

typedef struct {
    uint64_t magic;
    uint32_t layout, abi;
    uint64_t nbytes;
    uint32_t size;
    _Atomic uint32_t made; /* the header is complete */
    /* 0, or why nothing works any more: status | (reporter + 1) << 8. Set once, never cleared. */
    PL_ALIGNED _Atomic uint32_t poison;
    /* The gate. The two are on one line, as whoever changes one looks at the other. */
    PL_ALIGNED _Atomic uint32_t arrivals;
    _Atomic uint32_t sleepers;
    /* CPUs that some rank may run on. A rank adds its own before its state is PL_JOINED. */
    PL_ALIGNED _Atomic uint64_t cpus[PL_CPU_WORDS];
    PL_ALIGNED pl_seat seats[];
} pl_header;

/* One direction between two ranks: bytes, one writer, one reader. Counters only grow; their difference is what is in
 * it. The writer owns `tail`, the reader `head`. */
typedef struct {
    PL_ALIGNED _Atomic uint64_t tail;
    PL_ALIGNED _Atomic uint64_t head;
    PL_ALIGNED unsigned char bytes[];
} pl_ring;

/* Sizes follow from the number of ranks alone, so all ranks agree on them. */
static inline uint64_t pl_half_bytes(int size) {
    /* One half of a rank's staging area. It is large, so that rounds are few, and so that a half has left the caches
     * near the other CPUs by the time it is written again: taking lines back from there is what costs (1 MB among two
     * ranks: 42 us with halves of 1 MB, 100 us with halves of 256 KB). */
    return size <= 8 ? (uint64_t)1 << 20 : size <= 16 ? (uint64_t)1 << 19 : (uint64_t)1 << 17;
}

static inline uint64_t pl_ring_bytes(int size) {
    return size <= 4 ? (uint64_t)1 << 18 : size <= 8 ? (uint64_t)1 << 16 : size <= 16 ? (uint64_t)1 << 14 : 4096;
}

static inline uint64_t pl_round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static inline uint64_t pl_staging_at(int size) {
    return pl_round_up(sizeof(pl_header) + (uint64_t)size * sizeof(pl_seat), 4096);
}

static inline uint64_t pl_rings_at(int size) { return pl_staging_at(size) + (uint64_t)size * 2 * pl_half_bytes(size); }

static inline uint64_t pl_ring_stride(int size) { return sizeof(pl_ring) + pl_ring_bytes(size); }

#endif
