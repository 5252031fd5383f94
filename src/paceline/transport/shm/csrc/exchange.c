/* Exchange: bytes from each rank to each. Reduce_exchange: piece d of every rank, reduced, to rank d. */
#include <stdlib.h>
#include <string.h>

#include "collective.h"
#include "fold.h"

/* -- both ---------------------------------------------------------------------------------------------------------- */

/* Say how much this rank sends to each rank and expects from each. */
static void post_tables(pl_endpoint *ep, const pl_job *job) {
    pl_seat *seat = pl_seat_of(ep, ep->rank);
    for (int r = 0; r < ep->size; r++) {
        seat->out[ep->round & 1][r] = job->send_sizes[job->same ? 0 : r];
        seat->in[ep->round & 1][r] = job->recv_sizes ? job->recv_sizes[r] : 0;
    }
}

/* What rank `s` has said that it sends to `d`, and what `d` has said that it expects from `s`. What this rank has said
 * it knows by itself ([Note: overwritten] in layout.h). */
static uint64_t told_out(const pl_endpoint *ep, const pl_job *job, int s, int d) {
    if (s == ep->rank) return job->send_sizes[job->same ? 0 : d];
    return PL_ONCE(pl_seat_of(ep, s)->out[ep->round & 1][d]);
}

static uint64_t told_in(const pl_endpoint *ep, const pl_job *job, int d, int s) {
    if (d == ep->rank) return job->recv_sizes[s];
    return PL_ONCE(pl_seat_of(ep, d)->in[ep->round & 1][s]);
}

/* Bytes, or elements, that this rank stages for others. */
static uint64_t sent(const pl_endpoint *ep, const pl_job *job) {
    uint64_t all = 0;
    if (job->same) return job->send_sizes[0];
    for (int d = 0; d < ep->size; d++) all += d == ep->rank ? 0 : job->send_sizes[d];
    return all;
}

/* -- exchange ------------------------------------------------------------------------------------------------------ */

/* Does every rank send what the receiver expects? Every rank checks all pairs, so that all fail or none does. `largest`
 * is the size of the largest piece that travels, which decides how many rounds are needed. */
static int tables_match(pl_endpoint *ep, pl_job *job, uint64_t *largest) {
    *largest = 0;
    for (int s = 0; s < ep->size; s++)
        for (int d = 0; d < ep->size; d++) {
            const uint64_t out = told_out(ep, job, s, d), in = told_in(ep, job, d, s);
            if (out != in) {
                char what[100];
                pl_describe_posted(ep, s, what, sizeof what);
                pl_job_fail(job, PL_DISAGREED, ep->names[d],
                            "%s: rank %d sends %llu bytes to rank %d, which expects %llu", what, ep->names[s],
                            (unsigned long long)out, ep->names[d], (unsigned long long)in);
                return 0;
            }
            if (s != d && out > *largest) *largest = out;
        }
    return 1;
}

/* Every rank has said how much it sends: make room for all of it. */
static int make_room(pl_endpoint *ep, pl_job *job, uint64_t *largest) {
    const uint64_t n = (uint64_t)ep->size;
    uint64_t *recvs = job->tables + 2 * n, *sizes = job->tables + 3 * n, all = 0;
    *largest = 0;
    for (int s = 0; s < ep->size; s++) {
        /* A rank sends the same to all, and says so as many times. */
        sizes[s] = told_out(ep, job, s, 0);
        for (int d = 1; d < ep->size; d++)
            if (told_out(ep, job, s, d) != sizes[s])
                return pl_overwritten(ep, job, "how much rank %d sends", ep->names[s]);
        if (sizes[s] > ep->most_bytes)
            return pl_overwritten(ep, job, "that rank %d sends %llu bytes", ep->names[s], (unsigned long long)sizes[s]);
        recvs[s] = all; /* an offset, until there is an address to add it to */
        all += pl_round_up(sizes[s], GRAIN_BYTES);
        if (sizes[s] > *largest) *largest = sizes[s];
    }
    job->gathered = malloc(all ? all : 1);
    if (!job->gathered) {
        pl_set_poison(ep, PL_MEMORY, ep->names[ep->rank], "no memory for what the ranks have sent");
        return pl_still_fine(ep, job);
    }
    for (int s = 0; s < ep->size; s++) recvs[s] += (uint64_t)job->gathered;
    job->recvs = recvs;
    job->recv_sizes = sizes;
    return 1;
}

/* Where in the staging area of s its piece for d is. (The piece for oneself does not travel.) A piece that goes to all
 * ranks wanders; `nbytes` is the size of the whole piece, which sender and receiver both know. */
static unsigned char *piece_at(const pl_endpoint *ep, const pl_job *job, int s, int d, uint64_t nbytes,
                               uint64_t piece) {
    if (job->same) return spot(ep, s, ep->round, min_u64(nbytes, piece));
    return pl_staging(ep, s, ep->round) + (uint64_t)((d - s - 1 + ep->size) % ep->size) * piece;
}

static void stage_pieces(pl_endpoint *ep, const pl_job *job, uint64_t k, uint64_t piece) {
    const int past = ep->copying.past;
    for (int d = 0; d < ep->size; d++) {
        if (d == ep->rank || (job->same && d != (ep->rank + 1) % ep->size)) continue;
        const uint64_t from = job->same ? 0 : (uint64_t)d, all = job->send_sizes[from], n = part_of(all, k, piece);
        if (n) pl_copy(piece_at(ep, job, ep->rank, d, all, piece), (const char *)job->sends[from] + k * piece, n, past);
    }
    pl_copy_flush(past);
    pl_fault(PL_AT_STAGED);
}

static void collect_pieces(pl_endpoint *ep, const pl_job *job, uint64_t k, uint64_t piece) {
    for (int s = 0; s < ep->size; s++) {
        if (s == ep->rank) continue;
        const uint64_t all = job->recv_sizes[s], n = part_of(all, k, piece);
        if (n) memcpy((char *)job->recvs[s] + k * piece, piece_at(ep, job, s, ep->rank, all, piece), n);
    }
    pl_fault(PL_AT_COPIED);
}

void pl_run_exchange(pl_endpoint *ep, pl_job *job) {
    const uint64_t pieces = job->same || ep->size < 2 ? 1 : (uint64_t)ep->size - 1;
    const uint64_t piece = ep->half_bytes / pieces / GRAIN_BYTES * GRAIN_BYTES;
    const int me = ep->rank;
    uint64_t rounds = 1;
    ep->copying = pl_copying_start(ep->habits[PL_FORM_EXCHANGE], sent(ep, job));
    post_descriptor(ep, pl_descriptor_of(job));
    post_tables(ep, job);
    for (uint64_t k = 0; k < rounds; k++) {
        /* How many rounds there are is only what others say: they end with the job's time at the latest. */
        if (k > 0 && !pl_still_fine(ep, job)) return;
        stage_pieces(ep, job, k, piece);
        if (k == 0) pl_copying_pause(&ep->copying);
        if (!pl_pass(ep, job)) return;
        if (k == 0) {
            pl_copying_resume(&ep->copying);
            uint64_t largest;
            if (!agreed(ep, job) || !(job->is_unequal ? make_room : tables_match)(ep, job, &largest)) {
                ep->round++;
                return;
            }
            rounds = largest ? (largest - 1) / piece + 1 : 1;
            if (job->recv_sizes[me])
                memmove((char *)job->recvs[me], (const char *)job->sends[job->same ? 0 : me], job->recv_sizes[me]);
        }
        collect_pieces(ep, job, k, piece);
        ep->round++;
    }
    pl_copying_end(&ep->copying);
}

/* -- reduce_exchange ----------------------------------------------------------------------------------------------- */

static int counts_match(pl_endpoint *ep, pl_job *job) {
    for (int s = 1; s < ep->size; s++)
        for (int d = 0; d < ep->size; d++) {
            const uint64_t a = told_out(ep, job, 0, d), b = told_out(ep, job, s, d);
            if (a == b) continue;
            char what[100];
            pl_describe_posted(ep, s, what, sizeof what);
            pl_job_fail(job, PL_DISAGREED, ep->names[s],
                        "%s: the piece for rank %d has %llu elements on rank %d and %llu on rank %d", what,
                        ep->names[d], (unsigned long long)a, ep->names[0], (unsigned long long)b, ep->names[s]);
            return 0;
        }
    return 1;
}

/* How a half is divided. Pieces without elements take no room in it, so a reduce to one root has all of it. */
typedef struct {
    uint64_t place[PL_MAX_RANKS]; /* of the piece for each rank: how many pieces are before it */
    uint64_t piece;               /* elements of a part */
    uint64_t need;                /* bytes of a half that are used */
    uint64_t rounds;
} pl_parts;

static pl_parts parts_of(const pl_endpoint *ep, const pl_job *job, uint64_t item) {
    pl_parts p = {.rounds = 1, .piece = 1};
    uint64_t places = 0, largest = 0;
    for (int d = 0; d < ep->size; d++) {
        p.place[d] = places;
        places += job->send_sizes[d] != 0;
        if (job->send_sizes[d] > largest) largest = job->send_sizes[d];
    }
    if (!largest) return p;
    p.piece = min_u64(ep->half_bytes / places / GRAIN_BYTES * GRAIN_BYTES / item, pl_round_up(largest, GRAIN_BYTES));
    p.need = places * p.piece * item;
    p.rounds = (largest + p.piece - 1) / p.piece;
    return p;
}

static void stage_parts(pl_endpoint *ep, const pl_job *job, const pl_parts *p, uint64_t k, uint64_t item) {
    unsigned char *half = spot(ep, ep->rank, ep->round, p->need);
    const int past = ep->copying.past;
    for (int d = 0; d < ep->size; d++) {
        const uint64_t n = part_of(job->send_sizes[d], k, p->piece);
        if (d != ep->rank && n)
            pl_copy(half + p->place[d] * p->piece * item, (const char *)job->sends[d] + k * p->piece * item, n * item,
                    past);
    }
    pl_copy_flush(past);
    pl_fault(PL_AT_STAGED);
}

static void reduce_part(pl_endpoint *ep, const pl_job *job, const pl_fold *fold, const pl_parts *p, uint64_t k) {
    const uint64_t item = fold->item_bytes, at = k * p->piece * item;
    const void *ins[PL_MAX_RANKS];
    void *out = job->dst + at;
    for (int r = 0; r < ep->size; r++)
        ins[r] = r == ep->rank ? (const char *)job->sends[r] + at
                               : (const char *)spot(ep, r, ep->round, p->need) + p->place[ep->rank] * p->piece * item;
    pl_fold_run(fold, &out, 1, ins, ep->size, part_of(job->send_sizes[ep->rank], k, p->piece));
    pl_fault(PL_AT_REDUCED);
}

void pl_run_reduce_exchange(pl_endpoint *ep, pl_job *job) {
    const pl_fold fold = {.dtype = job->dtype, .op = job->op, .item_bytes = pl_item_bytes(job->dtype)};
    const pl_parts parts = parts_of(ep, job, fold.item_bytes);
    ep->copying = pl_copying_start(ep->habits[PL_FORM_REDUCE_EXCHANGE], sent(ep, job) * fold.item_bytes);
    post_descriptor(ep, pl_descriptor_of(job));
    post_tables(ep, job);
    for (uint64_t k = 0; k < parts.rounds; k++) {
        stage_parts(ep, job, &parts, k, fold.item_bytes);
        if (k == 0) pl_copying_pause(&ep->copying);
        if (!pl_pass(ep, job)) return;
        if (k == 0) pl_copying_resume(&ep->copying);
        if (k == 0 && !(agreed(ep, job) && counts_match(ep, job))) {
            ep->round++;
            return;
        }
        if (part_of(job->send_sizes[ep->rank], k, parts.piece)) reduce_part(ep, job, &fold, &parts, k);
        ep->round++;
    }
    pl_copying_end(&ep->copying);
}
