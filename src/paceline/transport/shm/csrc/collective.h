/* What the collectives share: how memory is cut up.
 *
 * A round (layout.h, [Note: rounds]) is always written like this:
 *     write own halves; pl_pass; read others' halves; ep->round++
 */
#ifndef PACELINE_COLLECTIVE_H
#define PACELINE_COLLECTIVE_H

#include "descriptor.h"
#include "endpoint.h"
#include "fault.h"

/* Shares and pieces begin on a cache line, so that no two ranks write to the same one. */
#define GRAIN_BYTES 64

static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The length of part `index` of a whole that is cut into parts of length `part`; 0 behind the end. */
static inline uint64_t part_of(uint64_t total, uint64_t index, uint64_t part) {
    uint64_t begin = index * part;
    return begin >= total ? 0 : min_u64(part, total - begin);
}

/* [Note: wandering]
 * Writing to lines that another CPU has read a moment ago is slow: they have to be taken from its cache first. (Two
 * ranks, 256 KB: 126 us if they are in its cache, 35 us if they are not.) So a collective that needs less than a half
 * wanders through it from round to round. When it comes back to a line, the line has long been pushed out of the nearer
 * caches. The place follows from the round and from `need`, on which the ranks agree, so nobody has to be told.
 */
static inline unsigned char *spot(const pl_endpoint *ep, int rank, uint64_t round, uint64_t need) {
    const uint64_t step = pl_round_up(need ? need : 1, 4096), spots = ep->half_bytes / step;
    return pl_staging(ep, rank, round) + (spots > 1 ? (round >> 1) % spots * step : 0);
}

/* -- all_reduce.c, exchange.c -------------------------------------------------------------------------------------- */

/* What pl_run runs. */
void pl_run_all_reduce(pl_endpoint *ep, pl_job *job);
void pl_run_exchange(pl_endpoint *ep, pl_job *job);
void pl_run_reduce_exchange(pl_endpoint *ep, pl_job *job);

#endif
