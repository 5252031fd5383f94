/* Collectives, made of rounds (layout.h, [Note: rounds]). A round here is always:
 *     write own halves; pl_pass; read others' halves; ch->round++
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel.h"
#include "fault.h"
#include "fold.h"

/* Up to here everybody reduces everything, in one round: latency is what counts. */
#define SMALL_BYTES ((uint64_t)32 << 10)
/* Shares and pieces begin on a line, so that no two ranks write the same one. */
#define GRAIN_BYTES 64

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Part `index` of what is cut into parts of `part`: how much there is of it. */
static uint64_t part_of(uint64_t total, uint64_t index, uint64_t part) {
    uint64_t begin = index * part;
    return begin >= total ? 0 : min_u64(part, total - begin);
}

/* [Note: wandering]
 * Writing to lines that another CPU has read a moment ago is slow: they have to be taken from its cache first. (Two
 * ranks, 256 KB: 126 us where they are, 35 us where they are not.) So a collective that needs less than a half wanders
 * through it from round to round and comes back to a line when it has long been pushed out of the nearer caches. Where
 * it is follows from the round and from `need`, which ranks agree on, so nobody has to be told.
 */
static unsigned char *spot(const pl_channel *ch, int rank, uint64_t round, uint64_t need) {
    const uint64_t step = pl_round_up(need ? need : 1, 4096), spots = ch->half_bytes / step;
    return pl_staging(ch, rank, round) + (spots > 1 ? (round >> 1) % spots * step : 0);
}

/* -- do all ranks mean the same? ----------------------------------------------------------------------------------- */

pl_descriptor pl_descriptor_of(const pl_job *job) {
    pl_descriptor d = {.kind = (uint32_t)job->kind, .root = (uint32_t)job->root, .flags = (uint64_t)job->form | (uint64_t)job->same << 8 | (uint64_t)job->is_unequal << 9};
    if (job->form != PL_FORM_BARRIER) d.dtype = (uint32_t)job->dtype;
    if (job->form == PL_FORM_ALL_REDUCE || job->form == PL_FORM_REDUCE_EXCHANGE) {
        d.op = (uint32_t)job->op;
        d.count = job->count;
        memcpy(&d.scale, &job->scale, sizeof d.scale);
    }
    return d;
}

static int is_same_call(const pl_descriptor *a, const pl_descriptor *b) {
    const int same_dtype = a->dtype == b->dtype || a->dtype == PL_NO_DTYPE || b->dtype == PL_NO_DTYPE;
    return a->kind == b->kind && a->op == b->op && same_dtype && a->root == b->root && a->count == b->count &&
           a->scale == b->scale && a->flags == b->flags;
}

void pl_describe(const pl_descriptor *d, char *text, uint64_t bytes) {
    static const char *const kinds[PL_KINDS] = {"barrier", "all_reduce", "broadcast", "all_gather",    "gather",
                                                "scatter", "all_to_all", "reduce",    "reduce_scatter",
                                                "sparse all_reduce"};
    static const char *const ops[PL_OPS] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
    static const char *const dtypes[PL_DTYPES] = {"float32", "float64", "float16", "bfloat16", "complex64",
                                                  "complex128", "int8", "int16", "int32", "int64",
                                                  "uint8", "uint16", "uint32", "uint64", "bool"};
    /* Descriptors of others are looked at before they are believed. */
    const char *kind = d->kind < PL_KINDS ? kinds[d->kind] : "?";
    char root[24] = "";
    if ((int32_t)d->root >= 0) snprintf(root, sizeof root, " root %d", (int)d->root);
    const uint64_t form = d->flags & 0xff;
    const char *dtype = d->dtype < PL_DTYPES ? dtypes[d->dtype] : d->dtype == PL_NO_DTYPE ? "nothing" : "another dtype";
    if (form == PL_FORM_ALL_REDUCE || form == PL_FORM_REDUCE_EXCHANGE)
        snprintf(text, bytes, "%s(%s, %llu x %s)%s", kind, d->op < PL_OPS ? ops[d->op] : "?",
                 (unsigned long long)d->count, dtype, root);
    else if (form == PL_FORM_EXCHANGE)
        snprintf(text, bytes, "%s(%s)%s", kind, dtype, root);
    else
        snprintf(text, bytes, "%s%s", kind, root);
}

static void post(pl_channel *ch, const pl_descriptor *d) {
    pl_slot_of(ch, ch->rank)->descriptor[ch->round & 1] = *d;
    pl_fault(PL_AT_POSTED);
}

static const pl_descriptor *posted(const pl_channel *ch, int rank) {
    return &pl_slot_of(ch, rank)->descriptor[ch->round & 1];
}

/* After the first gate. All ranks compare the same descriptors, so all come to the same verdict and stay in step. */
static int agreed(pl_channel *ch, pl_job *job) {
    int one = 0, other = 0;
    /* One that has a dtype to compare with, if there is one. */
    while (one < ch->size - 1 && posted(ch, one)->dtype == PL_NO_DTYPE) one++;
    while (other < ch->size && is_same_call(posted(ch, one), posted(ch, other))) other++;
    if (other == ch->size) return 1;
    char first[100], second[100];
    pl_describe(posted(ch, one), first, sizeof first);
    pl_describe(posted(ch, other), second, sizeof second);
    pl_job_fail(job, PL_DISAGREED, ch->names[other],
                "ranks are in different collectives: rank %d in %s, rank %d in %s; every rank has to call the same ones "
                "in the same order", ch->names[one], first, ch->names[other], second);
    return 0;
}

/* -- barrier ------------------------------------------------------------------------------------------------------- */

static int barrier(pl_channel *ch, pl_job *job) {
    pl_descriptor d = pl_descriptor_of(job);
    post(ch, &d);
    if (!pl_pass(ch, job)) return 0;
    int ok = agreed(ch, job);
    ch->round++;
    return ok;
}

/* -- all_reduce ---------------------------------------------------------------------------------------------------- */

/* Everybody stages everything and reduces everything. */
static int all_reduce_small(pl_channel *ch, pl_job *job, const pl_fold *fold, const pl_descriptor *d) {
    const uint64_t nbytes = job->count * fold->item_bytes;
    post(ch, d);
    if (nbytes) memcpy(spot(ch, ch->rank, ch->round, nbytes), job->src, nbytes);
    pl_fault(PL_AT_STAGED);
    if (!pl_pass(ch, job)) return 0;
    int ok = agreed(ch, job);
    if (ok) {
        const void *ins[PL_MAX_RANKS];
        void *out = job->dst;
        for (int r = 0; r < ch->size; r++) ins[r] = r == ch->rank ? job->src : spot(ch, r, ch->round, nbytes);
        pl_fold_run(fold, &out, 1, ins, ch->size, job->count);
        pl_fault(PL_AT_REDUCED);
    }
    ch->round++;
    return ok;
}

/* [Note: zero copy]
 * The tensors of all ranks are in one arena, which everybody has mapped. Between the gate of the round that posted the
 * descriptors and the arrival at the next, rank r alone touches share r, of all ranks' tensors: it reads them all and
 * writes them all. The second round tells everybody that every share is done. Each element is read once a rank and
 * written once a rank in total, which is the least there can be.
 */
static int all_reduce_in_place(pl_channel *ch, pl_job *job, const pl_fold *fold, const pl_arena *arena) {
    const uint64_t item = fold->item_bytes, size = (uint64_t)ch->size;
    const uint64_t share = pl_round_up((job->count + size - 1) / size, GRAIN_BYTES);
    const uint64_t begin = share * (uint64_t)ch->rank, count = part_of(job->count, (uint64_t)ch->rank, share);
    void *tensors[PL_MAX_RANKS];
    for (int r = 0; r < ch->size; r++) tensors[r] = arena->bases[r] + posted(ch, r)->offset + begin * item;
    pl_fold_run(fold, tensors, ch->size, (const void *const *)tensors, ch->size, count);
    pl_fault(PL_AT_REDUCED);
    ch->round++;
    if (!pl_pass(ch, job)) return 0;
    ch->round++;
    return 1;
}

/* [Note: staged all_reduce]
 * Tensors in private memory travel through the staging areas in chunks of one share a rank. In round k a rank shows
 *     - of chunk k, the shares that others will reduce: its inputs, piece d for rank d;
 *     - of chunk k - 1, the share it has reduced: piece `rank`, which has no input in it.
 * After the gate it reduces its share of chunk k out of others' pieces into its own tensor and into the *next* round's
 * half, which nobody reads any more, and copies others' results of chunk k - 1 to its tensor. So n chunks take n + 1
 * rounds, and inputs and results travel together.
 *
 * Of two ranks, each puts its result back where the other's input was: that line has just been read, and is cheap to
 * write, while one of the next half has to be taken from the other CPU's cache first. It may: from the gate of k to the
 * arrival at k + 1 nobody else touches the piece, and its owner reads it after the gate of k + 1.
 */
typedef struct {
    pl_channel *ch;
    const pl_job *job;
    const pl_fold *fold;
    uint64_t piece; /* elements: room for a share in a half */
    uint64_t need;  /* bytes of a half that are used */
} pl_chunks;

/* How large shares of chunk `c` are: the whole pieces, but the last chunk is divided among all ranks, too. */
static uint64_t share_of(const pl_chunks *s, uint64_t c, uint64_t *chunk_count) {
    const uint64_t size = (uint64_t)s->ch->size;
    *chunk_count = part_of(s->job->count, c, s->piece * size);
    return min_u64(s->piece, pl_round_up((*chunk_count + size - 1) / size, GRAIN_BYTES));
}

static void stage_inputs(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes;
    uint64_t chunk, share = share_of(s, c, &chunk);
    const unsigned char *src = s->job->src + c * s->piece * (uint64_t)s->ch->size * item;
    unsigned char *half = spot(s->ch, s->ch->rank, s->ch->round, s->need);
    for (int d = 0; d < s->ch->size; d++)
        if (d != s->ch->rank)
            pl_copy(half + (uint64_t)d * s->piece * item, src + (uint64_t)d * share * item,
                    part_of(chunk, (uint64_t)d, share) * item, s->ch->copying.past);
    pl_copy_flush(s->ch->copying.past);
    pl_fault(PL_AT_STAGED);
}

/* Where rank `from` puts what it has reduced in `round`; of two ranks, for `to`. */
static unsigned char *result_spot(const pl_chunks *s, int from, int to, uint64_t round) {
    unsigned char *half = s->ch->size == 2 ? spot(s->ch, to, round, s->need) : spot(s->ch, from, round + 1, s->need);
    return half + (uint64_t)from * s->piece * s->fold->item_bytes;
}

static void reduce_share(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes, me = (uint64_t)s->ch->rank;
    uint64_t chunk, share = share_of(s, c, &chunk);
    const uint64_t at = (c * s->piece * (uint64_t)s->ch->size + me * share) * item;
    const void *ins[PL_MAX_RANKS];
    for (int r = 0; r < s->ch->size; r++)
        ins[r] = r == s->ch->rank ? s->job->src + at : spot(s->ch, r, s->ch->round, s->need) + me * s->piece * item;
    void *outs[2] = {s->job->dst + at, result_spot(s, s->ch->rank, 1 - s->ch->rank, s->ch->round)};
    pl_fold_run(s->fold, outs, 2, ins, s->ch->size, part_of(chunk, me, share));
    pl_copy_flush(s->fold->past);
    pl_fault(PL_AT_REDUCED);
}

static void collect_results(const pl_chunks *s, uint64_t c) {
    const uint64_t item = s->fold->item_bytes;
    uint64_t chunk, share = share_of(s, c, &chunk);
    unsigned char *dst = s->job->dst + c * s->piece * (uint64_t)s->ch->size * item;
    for (int r = 0; r < s->ch->size; r++)
        if (r != s->ch->rank)
            memcpy(dst + (uint64_t)r * share * item,
                   result_spot(s, r, s->ch->rank, s->ch->round - 1),
                   part_of(chunk, (uint64_t)r, share) * item);
    pl_fault(PL_AT_COPIED);
}

static pl_chunks chunks_of(pl_channel *ch, const pl_job *job, const pl_fold *fold) {
    const uint64_t size = (uint64_t)ch->size;
    const uint64_t most = ch->half_bytes / size / GRAIN_BYTES * GRAIN_BYTES / fold->item_bytes;
    const uint64_t piece = min_u64(most, pl_round_up((job->count + size - 1) / size, GRAIN_BYTES));
    return (pl_chunks){.ch = ch, .job = job, .fold = fold, .piece = piece, .need = piece * size * fold->item_bytes};
}

/* The rounds after the inputs of the first chunk are staged; `passed`: the first gate is passed already. */
static int run_chunks(const pl_chunks *s, pl_job *job, int passed) {
    const uint64_t chunk = s->piece * (uint64_t)s->ch->size, n_chunks = (job->count + chunk - 1) / chunk;
    for (uint64_t k = 0; k <= n_chunks; k++) {
        if (!(passed && k == 0)) {
            if (k < n_chunks) stage_inputs(s, k);
            if (!pl_pass(s->ch, job)) return 0;
        }
        if (k < n_chunks) reduce_share(s, k);
        if (k > 0) collect_results(s, k - 1);
        s->ch->round++;
    }
    return 1;
}

static int all_reduce_large(pl_channel *ch, pl_job *job, const pl_fold *fold, pl_descriptor *d, pl_arena *arena) {
    pl_chunks staged = chunks_of(ch, job, fold);
    if (arena) {
        d->arena = arena->number + 1;
        d->offset = (uint64_t)(job->dst - arena->bases[ch->rank]);
        if (job->src != job->dst) memcpy(job->dst, job->src, job->count * fold->item_bytes);
    }
    post(ch, d);
    /* Only a rank that knows already that it will come to staging begins with it. */
    if (!arena) stage_inputs(&staged, 0);
    pl_copying_pause(&ch->copying);
    if (!pl_pass(ch, job)) return 0;
    pl_copying_resume(&ch->copying);
    if (!agreed(ch, job)) {
        ch->round++;
        return 0;
    }
    int in_arena = 0, in_same = 0;
    for (int r = 0; r < ch->size; r++) {
        in_arena += posted(ch, r)->arena != 0;
        in_same += posted(ch, r)->arena != 0 && posted(ch, r)->arena == posted(ch, 0)->arena;
    }
    if (in_same == ch->size) return all_reduce_in_place(ch, job, fold, arena);
    /* With some ranks in an arena and some not, not all have staged: begin anew in the next round. */
    if (in_arena) ch->round++;
    return run_chunks(&staged, job, !in_arena);
}

static int all_reduce(pl_channel *ch, pl_job *job) {
    pl_fold fold = {.dtype = job->dtype, .op = job->op, .item_bytes = pl_item_bytes(job->dtype), .scale = job->scale};
    const uint64_t nbytes = job->count * fold.item_bytes;
    pl_descriptor d = pl_descriptor_of(job);
    if (nbytes <= SMALL_BYTES) return all_reduce_small(ch, job, &fold, &d);
    pl_arena *arena = pl_arena_pin(ch, job->dst, nbytes);
    /* In an arena nothing is copied, or it is not known yet that something will be. */
    ch->copying = pl_copying_start(ch->habits[PL_FORM_ALL_REDUCE], arena ? 0 : nbytes);
    fold.past = ch->copying.past;
    int ok = all_reduce_large(ch, job, &fold, &d, arena);
    if (ok) pl_copying_end(&ch->copying);
    if (arena) pl_arena_unpin(ch, arena);
    return ok;
}

/* -- exchange: bytes from each to each ------------------------------------------------------------------------------- */

static void post_tables(pl_channel *ch, const pl_job *job) {
    pl_slot *slot = pl_slot_of(ch, ch->rank);
    for (int r = 0; r < ch->size; r++) {
        slot->out[ch->round & 1][r] = job->send_sizes[job->same ? 0 : r];
        slot->in[ch->round & 1][r] = job->recv_sizes ? job->recv_sizes[r] : 0;
    }
}

/* Does everybody send what the other expects? Checked for all pairs by all ranks, so that all fail or none does.
 * `largest` is the largest piece that travels: how many rounds are needed. */
static int tables_match(pl_channel *ch, pl_job *job, uint64_t *largest) {
    const uint64_t half = ch->round & 1;
    *largest = 0;
    for (int s = 0; s < ch->size; s++)
        for (int d = 0; d < ch->size; d++) {
            uint64_t out = pl_slot_of(ch, s)->out[half][d], in = pl_slot_of(ch, d)->in[half][s];
            if (out != in) {
                char what[100];
                pl_describe(posted(ch, s), what, sizeof what);
                pl_job_fail(job, PL_DISAGREED, ch->names[d], "%s: rank %d sends %llu bytes to rank %d, which expects %llu", what,
                            ch->names[s], (unsigned long long)out, ch->names[d], (unsigned long long)in);
                return 0;
            }
            if (s != d && out > *largest) *largest = out;
        }
    return 1;
}

/* Everybody has said how much it sends: make room for it. */
static int make_room(pl_channel *ch, pl_job *job, uint64_t *largest) {
    const uint64_t n = (uint64_t)ch->size;
    uint64_t *recvs = job->tables + 2 * n, *sizes = job->tables + 3 * n, all = 0;
    *largest = 0;
    for (int s = 0; s < ch->size; s++) {
        sizes[s] = pl_slot_of(ch, s)->out[ch->round & 1][s];
        recvs[s] = all; /* from where it begins, for now */
        all += pl_round_up(sizes[s], GRAIN_BYTES);
        if (sizes[s] > *largest) *largest = sizes[s];
    }
    job->gathered = malloc(all ? all : 1);
    if (!job->gathered) {
        pl_set_poison(ch, PL_MEMORY, ch->names[ch->rank], "no memory for what the ranks have sent");
        return pl_still_fine(ch, job);
    }
    for (int s = 0; s < ch->size; s++) recvs[s] += (uint64_t)job->gathered;
    job->recvs = recvs;
    job->recv_sizes = sizes;
    return 1;
}

/* Where in the staging area of s its piece for d is. One for oneself does not travel. A piece that goes to all wanders;
 * `nbytes`, all of it, is known at both ends. */
static unsigned char *piece_at(const pl_channel *ch, const pl_job *job, int s, int d, uint64_t nbytes, uint64_t piece) {
    if (job->same) return spot(ch, s, ch->round, min_u64(nbytes, piece));
    return pl_staging(ch, s, ch->round) + (uint64_t)((d - s - 1 + ch->size) % ch->size) * piece;
}

static void stage_pieces(pl_channel *ch, const pl_job *job, uint64_t k, uint64_t piece) {
    const int past = ch->copying.past;
    for (int d = 0; d < ch->size; d++) {
        if (d == ch->rank || (job->same && d != (ch->rank + 1) % ch->size)) continue;
        const uint64_t from = job->same ? 0 : (uint64_t)d, all = job->send_sizes[from], n = part_of(all, k, piece);
        if (n) pl_copy(piece_at(ch, job, ch->rank, d, all, piece), (const char *)job->sends[from] + k * piece, n, past);
    }
    pl_copy_flush(past);
    pl_fault(PL_AT_STAGED);
}

static void collect_pieces(pl_channel *ch, const pl_job *job, uint64_t k, uint64_t piece) {
    for (int s = 0; s < ch->size; s++) {
        if (s == ch->rank) continue;
        const uint64_t all = job->recv_sizes[s], n = part_of(all, k, piece);
        if (n) memcpy((char *)job->recvs[s] + k * piece, piece_at(ch, job, s, ch->rank, all, piece), n);
    }
    pl_fault(PL_AT_COPIED);
}

/* Bytes, or elements, that this rank stages for others. */
static uint64_t sent(const pl_channel *ch, const pl_job *job) {
    uint64_t all = 0;
    if (job->same) return job->send_sizes[0];
    for (int d = 0; d < ch->size; d++) all += d == ch->rank ? 0 : job->send_sizes[d];
    return all;
}

static int exchange(pl_channel *ch, pl_job *job) {
    const uint64_t pieces = job->same || ch->size < 2 ? 1 : (uint64_t)ch->size - 1;
    const uint64_t piece = ch->half_bytes / pieces / GRAIN_BYTES * GRAIN_BYTES;
    const int me = ch->rank;
    pl_descriptor d = pl_descriptor_of(job);
    uint64_t rounds = 1;
    ch->copying = pl_copying_start(ch->habits[PL_FORM_EXCHANGE], sent(ch, job));
    post(ch, &d);
    post_tables(ch, job);
    for (uint64_t k = 0; k < rounds; k++) {
        stage_pieces(ch, job, k, piece);
        if (k == 0) pl_copying_pause(&ch->copying);
        if (!pl_pass(ch, job)) return 0;
        if (k == 0) {
            pl_copying_resume(&ch->copying);
            uint64_t largest;
            if (!agreed(ch, job) || !(job->is_unequal ? make_room : tables_match)(ch, job, &largest)) {
                ch->round++;
                return 0;
            }
            rounds = largest ? (largest + piece - 1) / piece : 1;
            if (job->recv_sizes[me])
                memmove((char *)job->recvs[me], (const char *)job->sends[job->same ? 0 : me], job->recv_sizes[me]);
        }
        collect_pieces(ch, job, k, piece);
        ch->round++;
    }
    pl_copying_end(&ch->copying);
    return 1;
}

/* -- reduce_exchange: piece d of everybody, reduced, to rank d --------------------------------------------------------- */

static int counts_match(pl_channel *ch, pl_job *job) {
    const uint64_t half = ch->round & 1;
    for (int s = 1; s < ch->size; s++)
        for (int d = 0; d < ch->size; d++) {
            uint64_t a = pl_slot_of(ch, 0)->out[half][d], b = pl_slot_of(ch, s)->out[half][d];
            if (a == b) continue;
            char what[100];
            pl_describe(posted(ch, s), what, sizeof what);
            pl_job_fail(job, PL_DISAGREED, ch->names[s],
                        "%s: the piece for rank %d has %llu elements on rank %d and %llu on rank %d", what, ch->names[d], (unsigned long long)a, ch->names[0], (unsigned long long)b, ch->names[s]);
            return 0;
        }
    return 1;
}

/* Pieces without elements take no room in a half: a reduce to one root has all of it. */
typedef struct {
    uint64_t place[PL_MAX_RANKS]; /* of the piece for each rank */
    uint64_t piece;               /* elements of a part */
    uint64_t need;                /* bytes of a half that are used */
    uint64_t rounds;
} pl_parts;

static pl_parts parts_of(const pl_channel *ch, const pl_job *job, uint64_t item) {
    pl_parts p = {.rounds = 1, .piece = 1};
    uint64_t places = 0, largest = 0;
    for (int d = 0; d < ch->size; d++) {
        p.place[d] = places;
        places += job->send_sizes[d] != 0;
        if (job->send_sizes[d] > largest) largest = job->send_sizes[d];
    }
    if (!largest) return p;
    p.piece = min_u64(ch->half_bytes / places / GRAIN_BYTES * GRAIN_BYTES / item, pl_round_up(largest, GRAIN_BYTES));
    p.need = places * p.piece * item;
    p.rounds = (largest + p.piece - 1) / p.piece;
    return p;
}

static void stage_parts(pl_channel *ch, const pl_job *job, const pl_parts *p, uint64_t k, uint64_t item) {
    unsigned char *half = spot(ch, ch->rank, ch->round, p->need);
    const int past = ch->copying.past;
    for (int d = 0; d < ch->size; d++) {
        const uint64_t n = part_of(job->send_sizes[d], k, p->piece);
        if (d != ch->rank && n)
            pl_copy(half + p->place[d] * p->piece * item, (const char *)job->sends[d] + k * p->piece * item, n * item, past);
    }
    pl_copy_flush(past);
    pl_fault(PL_AT_STAGED);
}

static void reduce_part(pl_channel *ch, const pl_job *job, const pl_fold *fold, const pl_parts *p, uint64_t k) {
    const uint64_t item = fold->item_bytes, at = k * p->piece * item;
    const void *ins[PL_MAX_RANKS];
    void *out = job->dst + at;
    for (int r = 0; r < ch->size; r++)
        ins[r] = r == ch->rank ? (const char *)job->sends[r] + at
                               : (const char *)spot(ch, r, ch->round, p->need) + p->place[ch->rank] * p->piece * item;
    pl_fold_run(fold, &out, 1, ins, ch->size, part_of(job->send_sizes[ch->rank], k, p->piece));
    pl_fault(PL_AT_REDUCED);
}

static int reduce_exchange(pl_channel *ch, pl_job *job) {
    const pl_fold fold = {.dtype = job->dtype, .op = job->op, .item_bytes = pl_item_bytes(job->dtype), .scale = 1.0};
    const pl_parts parts = parts_of(ch, job, fold.item_bytes);
    pl_descriptor d = pl_descriptor_of(job);
    ch->copying = pl_copying_start(ch->habits[PL_FORM_REDUCE_EXCHANGE], sent(ch, job) * fold.item_bytes);
    post(ch, &d);
    post_tables(ch, job);
    for (uint64_t k = 0; k < parts.rounds; k++) {
        stage_parts(ch, job, &parts, k, fold.item_bytes);
        if (k == 0) pl_copying_pause(&ch->copying);
        if (!pl_pass(ch, job)) return 0;
        if (k == 0) pl_copying_resume(&ch->copying);
        if (k == 0 && !(agreed(ch, job) && counts_match(ch, job))) {
            ch->round++;
            return 0;
        }
        if (part_of(job->send_sizes[ch->rank], k, parts.piece)) reduce_part(ch, job, &fold, &parts, k);
        ch->round++;
    }
    pl_copying_end(&ch->copying);
    return 1;
}

/* -- any of them ------------------------------------------------------------------------------------------------------- */

/* The caller has the turn. How it went is in job->outcome, for the caller to publish. */
void pl_run(pl_channel *ch, pl_job *job) {
    if (!pl_still_fine(ch, job)) return;
    switch (job->form) {
    case PL_FORM_BARRIER: barrier(ch, job); break;
    case PL_FORM_ALL_REDUCE: all_reduce(ch, job); break;
    case PL_FORM_EXCHANGE: exchange(ch, job); break;
    case PL_FORM_REDUCE_EXCHANGE: reduce_exchange(ch, job); break;
    default: break;
    }
}
