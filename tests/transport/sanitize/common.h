/* What the programs of this folder share. */
#ifndef PACELINE_COMMON_H
#define PACELINE_COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "endpoint.h"

#define CHECK(right, ...)                                    \
    do {                                                     \
        if (!(right)) {                                      \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);  \
            fprintf(stderr, __VA_ARGS__);                    \
            fprintf(stderr, "\n");                           \
            abort();                                         \
        }                                                    \
    } while (0)

/* splitmix64: a number below `below`. */
static inline uint64_t draw_from(uint64_t *random, uint64_t below) {
    uint64_t z = *random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (z ^ z >> 31) % below;
}

/* Shared memory between two pages that nobody may touch: whoever leaves it at either end is caught. */
static inline void *map(uint64_t nbytes) {
    const uint64_t guard = 4096, inside = pl_round_up(nbytes, guard);
    unsigned char *at = mmap(NULL, inside + 2 * guard, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED && mprotect(at + guard, inside, PROT_READ | PROT_WRITE) == 0, "mmap");
    return at + guard;
}

/* Ranks would settle how long they spin by the number of CPUs. Here it is the same on every machine. */
static inline void set_spin(pl_endpoint *endpoint, double spin_s) {
    atomic_store(&endpoint->inline_spin_ns, (int64_t)(spin_s * 1e9));
    atomic_store(&endpoint->worker_spin_ns, (int64_t)(spin_s * 1e9));
    atomic_store(&endpoint->has_spin, 1);
}

#endif
