/* All_reduce, in one of three ways: small tensors in one round, tensors in an arena in place, others in chunks. */
#include <string.h>

#include "collective.h"
#include "fold.h"

/* Up to this size latency counts. So every rank stages its whole tensor and reduces those of all, in one round. */
#define SMALL_BYTES ((uint64_t)32 << 10)

/* -- small --------------------------------------------------------------------------------------------------------- */

static void all_reduce_small(pl_endpoint *ep, pl_job *job, const pl_fold *fold) {
    const uint64_t nbytes = job->count * fold->item_bytes;
    post_descriptor(ep, pl_descriptor_of(job));
    if (nbytes) memcpy(spot(ep, ep->rank, ep->round, nbytes), job->src, nbytes);
    pl_fault(PL_AT_STAGED);
    if (!pl_pass(ep, job)) return;
    if (agreed(ep, job)) {
        const void *ins[PL_MAX_RANKS];
        void *out = job->dst;
        for (int r = 0; r < ep->size; r++) ins[r] = r == ep->rank ? job->src : spot(ep, r, ep->round, nbytes);
        pl_fold_run(fold, &out, 1, ins, ep->size, job->count);
        pl_fault(PL_AT_REDUCED);
    }
    ep->round++;
}

/* -- in place ------------------------------------------------------------------------------------------------------ */

/* Loops over elements rely on it. Complex numbers are pairs. */
static uint64_t alignment(const pl_fold *fold) { return min_u64(fold->item_bytes, 8); }

/* [Note: zero copy]
 * The tensors of all ranks are in one arena, which everybody has mapped. Between the gate of the round that posted the
 * descriptors and the arrival at the next, rank r alone touches share r of all ranks' tensors: it reads each of them,
 * and writes the result to each of them. The second round tells everybody that every share is done. Each element of
 * each tensor is read once and written once, by one rank, which is the least there can be.
 */
static int all_reduce_in_place(pl_endpoint *ep, pl_job *job, const pl_fold *fold, const pl_arena *arena) {
    const uint64_t nbytes = job->count * fold->item_bytes;
    const uint64_t item = fold->item_bytes, size = (uint64_t)ep->size;
    const uint64_t share = pl_round_up((job->count + size - 1) / size, GRAIN_BYTES);
    const uint64_t begin = share * (uint64_t)ep->rank, count = part_of(job->count, (uint64_t)ep->rank, share);
    void *tensors[PL_MAX_RANKS];
    for (int r = 0; r < ep->size; r++) {
        uint64_t offset = PL_ONCE(posted_descriptor(ep, r)->offset);
        if (r == ep->rank) offset = (uint64_t)(job->dst - arena->bases[r]);
        if (offset > arena->nbytes || nbytes > arena->nbytes - offset || offset % alignment(fold))
            return pl_overwritten(ep, job, "where in an arena the tensor of rank %d is", ep->names[r]);
        tensors[r] = arena->bases[r] + offset + begin * item;
    }
    pl_fold_run(fold, tensors, ep->size, (const void *const *)tensors, ep->size, count);
    pl_fault(PL_AT_REDUCED);
    ep->round++;
    if (!pl_pass(ep, job)) return 0;
    ep->round++;
    return 1;
}

/* -- in chunks ----------------------------------------------------------------------------------------------------- */

/* [Note: staged all_reduce]
 * Tensors in private memory travel through the staging areas in chunks, each of which has one share for each rank. In
 * round k a rank shows
 *     - of chunk k, the shares that others will reduce: its inputs, piece d for rank d;
 *     - of chunk k - 1, the share it has reduced: piece `rank`, which has no input in it.
 * After the gate it reduces its share of chunk k from others' pieces, into its own tensor and into the *next* round's
 * half, which nobody reads any more. It also copies others' results of chunk k - 1 to its tensor. So inputs and results
 * travel together, and n chunks take n + 1 rounds.
 *
 * If there are two ranks, each puts its result where the other's input was: it has just read those lines, so they are
 * cheap to write, while lines of the next half have to be taken from the other CPU's cache first. This is safe: from
 * the gate of k to the arrival at k + 1 nobody else touches the piece, and its owner reads it after the gate of k + 1.
 */
typedef struct {
    pl_endpoint *ep;
    const pl_job *job;
    const pl_fold *fold;
    uint64_t piece; /* elements: room for a share in a half */
    uint64_t need;  /* bytes of a half that are used */
} pl_chunks;

/* The length of a share of chunk `c`. It is a whole piece, except in the last chunk, which may be shorter and is
 * divided among all ranks as well. */
static uint64_t share_of(const pl_chunks *s, uint64_t c, uint64_t *chunk_count) {
    const uint64_t size = (uint64_t)s->ep->size;
    *chunk_count = part_of(s->job->count, c, s->piece * size);
    return min_u64(s->piece, pl_round_up((*chunk_count + size - 1) / size, GRAIN_BYTES));
}

static void stage_inputs(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes;
    uint64_t chunk, share = share_of(s, c, &chunk);
    const unsigned char *src = s->job->src + c * s->piece * (uint64_t)s->ep->size * item;
    unsigned char *half = spot(s->ep, s->ep->rank, s->ep->round, s->need);
    for (int d = 0; d < s->ep->size; d++)
        if (d != s->ep->rank)
            pl_copy(half + (uint64_t)d * s->piece * item, src + (uint64_t)d * share * item,
                    part_of(chunk, (uint64_t)d, share) * item, s->ep->copying.past);
    pl_copy_flush(s->ep->copying.past);
    pl_fault(PL_AT_STAGED);
}

/* Where rank `from` puts what it has reduced in `round`. If there are two ranks, that is in the half of `to`. */
static unsigned char *result_spot(const pl_chunks *s, int from, int to, uint64_t round) {
    unsigned char *half = s->ep->size == 2 ? spot(s->ep, to, round, s->need) : spot(s->ep, from, round + 1, s->need);
    return half + (uint64_t)from * s->piece * s->fold->item_bytes;
}

static void reduce_share(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes, me = (uint64_t)s->ep->rank;
    uint64_t chunk, share = share_of(s, c, &chunk);
    const uint64_t at = (c * s->piece * (uint64_t)s->ep->size + me * share) * item;
    const void *ins[PL_MAX_RANKS];
    for (int r = 0; r < s->ep->size; r++)
        ins[r] = r == s->ep->rank ? s->job->src + at : spot(s->ep, r, s->ep->round, s->need) + me * s->piece * item;
    void *outs[2] = {s->job->dst + at, result_spot(s, s->ep->rank, 1 - s->ep->rank, s->ep->round)};
    pl_fold_run(s->fold, outs, 2, ins, s->ep->size, part_of(chunk, me, share));
    pl_copy_flush(s->fold->past);
    pl_fault(PL_AT_REDUCED);
}

static void collect_results(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes;
    uint64_t chunk, share = share_of(s, c, &chunk);
    unsigned char *dst = s->job->dst + c * s->piece * (uint64_t)s->ep->size * item;
    for (int r = 0; r < s->ep->size; r++)
        if (r != s->ep->rank)
            memcpy(dst + (uint64_t)r * share * item,
                   result_spot(s, r, s->ep->rank, s->ep->round - 1),
                   part_of(chunk, (uint64_t)r, share) * item);
    pl_fault(PL_AT_COPIED);
}

static pl_chunks chunks_of(pl_endpoint *ep, const pl_job *job, const pl_fold *fold) {
    const uint64_t size = (uint64_t)ep->size;
    const uint64_t most = ep->half_bytes / size / GRAIN_BYTES * GRAIN_BYTES / fold->item_bytes;
    const uint64_t piece = min_u64(most, pl_round_up((job->count + size - 1) / size, GRAIN_BYTES));
    return (pl_chunks){.ep = ep, .job = job, .fold = fold, .piece = piece, .need = piece * size * fold->item_bytes};
}

/* Run all rounds. With `passed`, the inputs of the first chunk are staged and its gate is passed already. */
static int run_chunks(const pl_chunks *s, pl_job *job, int passed) {
    const uint64_t chunk = s->piece * (uint64_t)s->ep->size, n_chunks = (job->count + chunk - 1) / chunk;
    for (uint64_t k = 0; k <= n_chunks; k++) {
        if (!(passed && k == 0)) {
            if (k < n_chunks) stage_inputs(s, k);
            if (!pl_pass(s->ep, job)) return 0;
        }
        if (k < n_chunks) reduce_share(s, k);
        if (k > 0) collect_results(s, k - 1);
        s->ep->round++;
    }
    return 1;
}

/* -- any of them --------------------------------------------------------------------------------------------------- */

/* Reduce in place if all ranks' tensors are in one arena, else in chunks. False if the job has failed. */
static int all_reduce_large(pl_endpoint *ep, pl_job *job, const pl_fold *fold, const pl_arena *arena) {
    pl_descriptor d = pl_descriptor_of(job);
    const pl_chunks staged = chunks_of(ep, job, fold);
    if (arena) {
        d.arena = arena->number + 1;
        d.offset = (uint64_t)(job->dst - arena->bases[ep->rank]);
        if (job->src != job->dst) memcpy(job->dst, job->src, job->count * fold->item_bytes);
    }
    post_descriptor(ep, d);
    /* A rank whose tensor is in an arena does not know yet whether anything will be staged. */
    if (!arena) stage_inputs(&staged, 0);
    pl_copying_pause(&ep->copying);
    if (!pl_pass(ep, job)) return 0;
    pl_copying_resume(&ep->copying);
    if (!agreed(ep, job)) {
        ep->round++;
        return 0;
    }
    int in_arena = 0, in_same = 0;
    for (int r = 0; r < ep->size; r++) {
        const uint64_t theirs = r == ep->rank ? d.arena : PL_ONCE(posted_descriptor(ep, r)->arena);
        in_arena += theirs != 0;
        in_same += theirs != 0 && theirs == d.arena;
    }
    if (in_same == ep->size) return all_reduce_in_place(ep, job, fold, arena);
    /* Ranks whose tensors are in an arena have not staged them: if there are any, all begin anew in the next round. */
    if (in_arena) ep->round++;
    return run_chunks(&staged, job, !in_arena);
}

void pl_run_all_reduce(pl_endpoint *ep, pl_job *job) {
    pl_fold fold = {.dtype = job->dtype, .op = job->op, .item_bytes = pl_item_bytes(job->dtype)};
    const uint64_t nbytes = job->count * fold.item_bytes;
    if (nbytes <= SMALL_BYTES) {
        all_reduce_small(ep, job, &fold);
        return;
    }
    pl_arena *arena = (uintptr_t)job->dst % alignment(&fold) ? NULL : pl_arena_pin(ep, job->dst, nbytes);
    /* A tensor in an arena is not copied, unless it turns out later that those of other ranks are elsewhere. */
    ep->copying = pl_copying_start(ep->habits[PL_FORM_ALL_REDUCE], arena ? 0 : nbytes);
    fold.past = ep->copying.past;
    if (all_reduce_large(ep, job, &fold, arena)) pl_copying_end(&ep->copying);
    if (arena) pl_arena_unpin(ep, arena);
}
