/* Bytes from one rank to another: one writer, one reader (layout.h, pl_ring). */
#ifndef PACELINE_RING_H
#define PACELINE_RING_H

#include <string.h>

#include "endpoint.h"

/* A counter is read with acquire before bytes are touched, and stored with release afterwards (here all of it is
 * seq_cst). So the bytes that a reader sees counted are written, and the room that a writer sees counted is free. */

/* Each of the two is false if the ring's counters were overwritten. `own` is the counter of this rank, as it knows it
 * by itself ([Note: overwritten] in layout.h). */

static inline int ring_room(const pl_endpoint *ep, const pl_ring *ring, uint64_t own, uint64_t *room) {
    const uint64_t tail = atomic_load(&ring->tail), filled = tail - atomic_load(&ring->head);
    const uint64_t all = pl_ring_bytes(ep->size);
    *room = all - filled;
    return tail == own && filled <= all;
}

static inline int ring_filled(const pl_endpoint *ep, const pl_ring *ring, uint64_t own, uint64_t *filled) {
    const uint64_t tail = atomic_load(&ring->tail), head = atomic_load(&ring->head);
    *filled = tail - head;
    return head == own && *filled <= pl_ring_bytes(ep->size);
}

/* There has to be room for `n` bytes. */
static inline void ring_write(const pl_endpoint *ep, pl_ring *ring, uint64_t *own, const void *from, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ep->size), at = *own % room, first = n < room - at ? n : room - at;
    memcpy(ring->bytes + at, from, first);
    memcpy(ring->bytes, (const char *)from + first, n - first);
    atomic_store(&ring->tail, *own += n);
}

/* There have to be `n` bytes. If `to` is NULL, they are dropped. */
static inline void ring_read(const pl_endpoint *ep, pl_ring *ring, uint64_t *own, void *to, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ep->size), at = *own % room, first = n < room - at ? n : room - at;
    if (to) {
        memcpy(to, ring->bytes + at, first);
        memcpy((char *)to + first, ring->bytes, n - first);
    }
    atomic_store(&ring->head, *own += n);
}

#endif
