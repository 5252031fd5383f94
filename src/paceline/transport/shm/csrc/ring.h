/* Bytes from one rank to another: one writer, one reader (layout.h, pl_ring). */
#ifndef PACELINE_RING_H
#define PACELINE_RING_H

#include <string.h>

#include "endpoint.h"

/* A counter is read with acquire before bytes are touched, and stored with release afterwards (here all of it is
 * seq_cst). So the bytes that a reader sees counted are written, and the room that a writer sees counted is free. */

static inline uint64_t ring_room(const pl_endpoint *ep, const pl_ring *ring) {
    return pl_ring_bytes(ep->size) - (atomic_load(&ring->tail) - atomic_load(&ring->head));
}

static inline uint64_t ring_filled(const pl_ring *ring) { return atomic_load(&ring->tail) - atomic_load(&ring->head); }

static inline void ring_write(const pl_endpoint *ep, pl_ring *ring, const void *from, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ep->size), tail = atomic_load(&ring->tail), at = tail % room;
    const uint64_t first = n < room - at ? n : room - at;
    memcpy(ring->bytes + at, from, first);
    memcpy(ring->bytes, (const char *)from + first, n - first);
    atomic_store(&ring->tail, tail + n);
}

/* If `to` is NULL, the bytes are dropped. */
static inline void ring_read(const pl_endpoint *ep, pl_ring *ring, void *to, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ep->size), head = atomic_load(&ring->head), at = head % room;
    const uint64_t first = n < room - at ? n : room - at;
    if (to) {
        memcpy(to, ring->bytes + at, first);
        memcpy((char *)to + first, ring->bytes, n - first);
    }
    atomic_store(&ring->head, head + n);
}

#endif
