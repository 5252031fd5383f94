/* Bytes from one rank to another: one writer, one reader (layout.h, pl_ring). */
#ifndef PACELINE_RING_H
#define PACELINE_RING_H

#include <string.h>

#include "channel.h"

/* Counters are read with acquire (here: seq_cst) before bytes are touched and stored with release after: bytes that
 * the reader sees counted in are written, and room that the writer sees counted out is read. */

static inline uint64_t ring_room(const pl_channel *ch, const pl_ring *ring) {
    return pl_ring_bytes(ch->size) - (atomic_load(&ring->tail) - atomic_load(&ring->head));
}

static inline uint64_t ring_filled(const pl_ring *ring) { return atomic_load(&ring->tail) - atomic_load(&ring->head); }

static inline void ring_write(const pl_channel *ch, pl_ring *ring, const void *from, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ch->size), tail = atomic_load(&ring->tail), at = tail % room;
    const uint64_t first = n < room - at ? n : room - at;
    memcpy(ring->bytes + at, from, first);
    memcpy(ring->bytes, (const char *)from + first, n - first);
    atomic_store(&ring->tail, tail + n);
}

/* `to` NULL: drop them. */
static inline void ring_read(const pl_channel *ch, pl_ring *ring, void *to, uint64_t n) {
    const uint64_t room = pl_ring_bytes(ch->size), head = atomic_load(&ring->head), at = head % room;
    const uint64_t first = n < room - at ? n : room - at;
    if (to) {
        memcpy(to, ring->bytes + at, first);
        memcpy((char *)to + first, ring->bytes, n - first);
    }
    atomic_store(&ring->head, head + n);
}

#endif
