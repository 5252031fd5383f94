/* A rank that writes where it should not: random overwrites of the words by which ranks talk to each other.
 *
 *     overwrite OVERWRITES SEED
 *
 * Ranks are threads of one process and run the same random program of collectives and messages. Meanwhile a vandal
 * writes random, extreme and almost right values over the header, the seats, the rings' counters and what is in the
 * rings. Data may be wrong. All else may not: every job has to end, well or with an error that says something, and
 * no rank may touch memory that is not its own, which is the sanitizer's to find. A group that has failed is made anew.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "common.h"
#include "fold.h"
#include "post.h"
#include "ring.h"
#include "wait.h"

enum { LEAST_SIZE = 2, MOST_SIZE = 4, STEPS = 40, STEPS_AFTER = 2, MAX_COUNT = 20000, LARGE_COUNT = 300000 };
#define TIMEOUT_S 0.03
#define HANG_NS INT64_C(60000000000)
#define ARENA_BYTES ((uint64_t)1 << 18)
#define CAUSE "overwritten"

/* An allocation that nobody needs fails at once, instead of slowing the machine down. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1:max_allocation_size_mb=256"; }

static int size;
static pl_header *control; /* of the group at hand */
static pl_header *controls[MOST_SIZE + 1];
static uint64_t arenas[PL_MAX_RANKS];
static _Atomic int running; /* ranks of the group that have not ended */
static _Atomic int64_t group_since_ns;
static _Atomic uint64_t ended[PL_INTERRUPTED + 1], said_so;
static uint64_t seed;

typedef struct {
    int rank, failed;
    uint64_t random;
    pl_endpoint *endpoint;
} rank_thread;

static uint64_t draw(rank_thread *t, uint64_t below) { return draw_from(&t->random, below); }

static uint64_t draw_count(rank_thread *t) {
    const uint64_t most[] = {1, 20, 9000, MAX_COUNT, MAX_COUNT, MAX_COUNT, LARGE_COUNT};
    return draw(t, most[draw(t, 7)] + 1);
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

static int finish(rank_thread *t, pl_job *job) {
    if (!job) {
        ended[PL_OK]++;
        return 1;
    }
    const int status = pl_job_wait(job, 1e30);
    const char *message = pl_job_message(job);
    CHECK(status >= PL_OK && status <= PL_INTERRUPTED && status != PL_PENDING, "no such status: %d", status);
    CHECK(!message[0] == (status == PL_OK), "status %d: '%s'", status, message);
    for (const char *c = message; *c; c++) CHECK((unsigned char)*c >= ' ' || strchr("\n\t", *c), "unprintable: %d", *c);
    ended[status]++;
    if (strstr(message, CAUSE)) said_so++;
    /* After the others, a group goes on. */
    if (status != PL_OK && status != PL_DISAGREED) t->failed = 1;
    return status == PL_OK;
}

static void finish_and_release(rank_thread *t, pl_job *job) {
    finish(t, job);
    if (job) pl_job_release(job);
}

/* Memory without a byte to spare, so that the sanitizer sees whoever leaves it. */
static uint64_t filled(uint64_t nbytes) { return (uint64_t)memset(malloc(nbytes ? nbytes : 1), 1, nbytes); }

static void all_reduce(rank_thread *t) {
    const int dtypes[] = {PL_F32, PL_F64, PL_BF16, PL_C128, PL_I32, PL_BOOL}, dtype = dtypes[draw(t, 6)];
    const uint64_t count = draw_count(t), nbytes = count * pl_item_bytes(dtype);
    const int queued = (int)draw(t, 2), in_arena = draw(t, 3) && nbytes <= ARENA_BYTES;
    const uint64_t mine = filled(nbytes);
    /* The end of the arena is where an offset that is too large leaves it. */
    void *x = in_arena ? (void *)(arenas[t->rank] + (ARENA_BYTES - nbytes) / 64 * 64) : (void *)mine;
    finish_and_release(t, pl_all_reduce(t->endpoint, x, x, count, dtype, PL_SUM, TIMEOUT_S, !queued));
    free((void *)mine);
}

static void all_to_all(rank_thread *t) {
    const uint64_t base = draw_count(t), queued = draw(t, 2);
    uint64_t sends[MOST_SIZE], out[MOST_SIZE], recvs[MOST_SIZE], in[MOST_SIZE];
    for (int r = 0; r < size; r++) {
        out[r] = base + (uint64_t)(t->rank + 3 * r);
        in[r] = base + (uint64_t)(r + 3 * t->rank);
        sends[r] = filled(out[r]);
        recvs[r] = filled(in[r]);
    }
    finish_and_release(
        t, pl_exchange(t->endpoint, sends, out, recvs, in, 0, PL_ALL_TO_ALL, -1, PL_U8, TIMEOUT_S, !queued));
    for (int r = 0; r < size; r++) {
        free((void *)sends[r]);
        free((void *)recvs[r]);
    }
}

static void all_gather(rank_thread *t) {
    uint64_t recvs[MOST_SIZE], in[MOST_SIZE], out = draw_count(t), send = filled(out);
    for (int r = 0; r < size; r++) recvs[r] = filled(in[r] = out);
    finish_and_release(t, pl_exchange(t->endpoint, &send, &out, recvs, in, 1, PL_ALL_GATHER, -1, PL_U8, TIMEOUT_S, 1));
    for (int r = 0; r < size; r++) free((void *)recvs[r]);
    free((void *)send);
}

static void gather_unequal(rank_thread *t) {
    const uint64_t nbytes = draw_count(t) + 3 * (uint64_t)t->rank, sent = filled(nbytes);
    pl_job *job = pl_gather_unequal(t->endpoint, (void *)sent, nbytes, PL_ALL_GATHER, PL_U8, TIMEOUT_S);
    if (finish(t, job))
        for (int r = 0; r < size; r++) {
            uint64_t part_bytes;
            const void *part = pl_job_part(job, r, &part_bytes);
            void *copy = malloc(part_bytes + 1);
            CHECK(copy, "a part of %llu bytes", (unsigned long long)part_bytes);
            free(memcpy(copy, part, part_bytes));
        }
    pl_job_release(job);
    free((void *)sent);
}

static void reduce_scatter(rank_thread *t) {
    const uint64_t base = draw_count(t);
    uint64_t sends[MOST_SIZE], counts[MOST_SIZE];
    for (int r = 0; r < size; r++) {
        counts[r] = r == 1 ? 0 : base + (uint64_t)r;
        sends[r] = filled(counts[r] * 4);
    }
    const uint64_t x = filled(counts[t->rank] * 4);
    finish_and_release(t, pl_reduce_exchange(t->endpoint, sends, counts, (void *)x, PL_I32, PL_SUM, PL_REDUCE_SCATTER,
                                             -1, TIMEOUT_S, 1));
    for (int r = 0; r < size; r++) free((void *)sends[r]);
    free((void *)x);
}

/* Around the ring, and in the wrong order, so that the first is moved aside. */
static void messages(rank_thread *t) {
    enum { MESSAGES = 3 };
    const int after = (t->rank + 1) % size, before = (t->rank - 1 + size) % size;
    uint64_t nbytes[MESSAGES], out[MESSAGES], in[MESSAGES];
    pl_job *sends[MESSAGES], *recvs[MESSAGES];
    for (int tag = 0; tag < MESSAGES; tag++) {
        nbytes[tag] = draw_count(t);
        out[tag] = filled(nbytes[tag]);
        in[tag] = filled(nbytes[tag]);
        sends[tag] = pl_send(t->endpoint, (void *)out[tag], nbytes[tag], after, tag, TIMEOUT_S);
    }
    for (int tag = MESSAGES - 1; tag >= 0; tag--)
        recvs[tag] = pl_recv(t->endpoint, (void *)in[tag], nbytes[tag], tag ? before : -1, tag, TIMEOUT_S);
    for (int tag = 0; tag < MESSAGES; tag++) {
        finish_and_release(t, recvs[tag]);
        finish_and_release(t, sends[tag]);
        free((void *)out[tag]);
        free((void *)in[tag]);
    }
}

static void *run_rank(void *argument) {
    rank_thread *t = argument;
    for (int i = 0, after = 0; i < STEPS && after < STEPS_AFTER; i++, after += t->failed)
        switch (draw(t, 10)) {
        case 0: case 1: case 2: all_reduce(t); break;
        case 3: all_to_all(t); break;
        case 4: all_gather(t); break;
        case 5: gather_unequal(t); break;
        case 6: reduce_scatter(t); break;
        case 7: case 8: messages(t); break;
        default: finish_and_release(t, pl_barrier(t->endpoint, TIMEOUT_S, 1)); break;
        }
    pl_unregister_arena(t->endpoint, 1);
    (t->rank % 2 ? pl_abort : pl_close)(t->endpoint);
    pl_free(t->endpoint);
    running--;
    return NULL;
}

/* -- the vandal ---------------------------------------------------------------------------------------------------- */

/* A place that ranks read, and how many bytes of it to overwrite. */
static unsigned char *place(uint64_t *random, uint64_t *nbytes) {
    pl_seat *seat = &control->seats[draw_from(random, (uint64_t)size)];
    const uint64_t half = draw_from(random, 2), other = draw_from(random, (uint64_t)size);
    const uint64_t pair = draw_from(random, (uint64_t)(size * size)), rings = pl_rings_at(size);
    pl_ring *ring = (pl_ring *)((unsigned char *)control + rings + pair * pl_ring_stride(size));
    *nbytes = draw_from(random, 2) ? 8 : 4;
    switch (draw_from(random, 13)) {
    case 0: *nbytes = 4; return (unsigned char *)&control->poison;
    case 1: *nbytes = 4; return (unsigned char *)(draw_from(random, 4) ? &control->arrivals : &control->sleepers);
    case 2: *nbytes = 4; return (unsigned char *)(draw_from(random, 2) ? &seat->round : &seat->state);
    case 3: case 4: return (unsigned char *)&seat->descriptor[half] + draw_from(random, sizeof(pl_descriptor) / 8) * 8;
    case 5: case 6: return (unsigned char *)&(draw_from(random, 3) ? seat->out : seat->in)[half][other];
    case 7: return (unsigned char *)seat->cause + draw_from(random, sizeof seat->cause / 8 + 1) * 8;
    case 8: *nbytes = 4; return (unsigned char *)(draw_from(random, 2) ? &seat->bell : &seat->listening);
    case 9: *nbytes = 8; return (unsigned char *)(draw_from(random, 2) ? &ring->head : &ring->tail);
    case 10: return ring->bytes + (atomic_load(&ring->tail) - draw_from(random, 65)) % pl_ring_bytes(size) / 8 * 8;
    case 11: return (unsigned char *)control + draw_from(random, pl_staging_at(size) / 8) * 8;
    default: return (unsigned char *)control + draw_from(random, pl_control_bytes(size) / 8) * 8;
    }
}

static uint64_t value(uint64_t *random, uint64_t now) {
    switch (draw_from(random, 8)) {
    case 0: return draw_from(random, UINT64_MAX);
    case 1: return draw_from(random, 70);
    case 2: return -draw_from(random, 70);
    case 3: return UINT64_C(1) << draw_from(random, 64);
    case 4: return now ^ UINT64_C(1) << draw_from(random, 64);
    case 5: return now + draw_from(random, 70);
    case 6: return now - draw_from(random, 70);
    default: return draw_from(random, 12) | draw_from(random, 6) << 8; /* such as a poison word */
    }
}

/* A message that nobody has sent, with a header that looks right. */
static void forge(uint64_t *random) {
    const int from = (int)draw_from(random, (uint64_t)size), to = (int)draw_from(random, (uint64_t)size);
    pl_ring *ring = (pl_ring *)((unsigned char *)control + pl_rings_at(size) +
                                (uint64_t)(from * size + to) * pl_ring_stride(size));
    const uint64_t tail = atomic_load(&ring->tail), room = pl_ring_bytes(size);
    const uint64_t nbytes = value(random, draw_from(random, LARGE_COUNT));
    message_header header = {.nbytes = nbytes, .tag = (int64_t)draw_from(random, 5)};
    header.check = header_check(&header, tail);
    for (uint64_t i = 0; i < sizeof header; i++) ring->bytes[(tail + i) % room] = ((unsigned char *)&header)[i];
    atomic_store(&ring->tail, tail + sizeof header + draw_from(random, 2) * draw_from(random, room));
}

/* Overwrite a few times or often, until the ranks have ended, and return how often. Some places are overwritten again
 * and again, so that they are when somebody reads them. */
static uint64_t vandalise(uint64_t *random, uint64_t most) {
    const uint64_t limits[] = {10, 100, 500}, limit = draw_from(random, limits[draw_from(random, 3)]) + 1;
    uint64_t done = 0;
    if (limit < most) most = limit;
    for (uint64_t wait = draw_from(random, 2000); wait && running; wait--) pl_pause();
    while (running && done < most) {
        uint64_t nbytes, now = 0;
        if (!draw_from(random, 12)) {
            forge(random);
            done++;
            continue;
        }
        unsigned char *at = place(random, &nbytes);
        memcpy(&now, at, nbytes);
        const uint64_t wrong = value(random, now), times = draw_from(random, 3) ? 1 : 1 + draw_from(random, 50);
        for (uint64_t k = 0; k < times && running && done < most; k++, done++) {
            memcpy(at, &wrong, nbytes);
            for (uint64_t wait = draw_from(random, 300); wait; wait--) pl_pause();
            if (!draw_from(random, 8)) sched_yield();
        }
    }
    return done;
}

/* -- groups -------------------------------------------------------------------------------------------------------- */

static void *watch(void *nothing) {
    for (;;) {
        const struct timespec second = {.tv_sec = 1};
        nanosleep(&second, NULL);
        CHECK(pl_now_ns() - group_since_ns < HANG_NS, "a group hangs; the seed is %llu", (unsigned long long)seed);
    }
    return nothing;
}

static uint64_t run_group(uint64_t *random, uint64_t most) {
    rank_thread ranks[MOST_SIZE];
    pthread_t threads[MOST_SIZE];
    const uint64_t program = draw_from(random, UINT64_MAX);
    char reason[256];
    size = LEAST_SIZE + (int)draw_from(random, MOST_SIZE - LEAST_SIZE + 1);
    control = controls[size];
    memset(control, 0, pl_control_bytes(size));
    group_since_ns = pl_now_ns();
    running = size;
    for (int r = 0; r < size; r++) {
        ranks[r] = (rank_thread){.rank = r, .random = program};
        ranks[r].endpoint = pl_open(control, pl_control_bytes(size), -1, r, size, r == 0, NULL, reason, sizeof reason);
        CHECK(ranks[r].endpoint && pl_register_arena(ranks[r].endpoint, 1, arenas, ARENA_BYTES), "refused: %s", reason);
        set_spin(ranks[r].endpoint, 0.00002);
    }
    for (int r = 0; r < size; r++) pthread_create(&threads[r], NULL, run_rank, &ranks[r]);
    const uint64_t done = vandalise(random, most);
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
    return done;
}

int main(int argc, char **argv) {
    CHECK(argc == 3, "usage: %s OVERWRITES SEED", argv[0]);
    const uint64_t overwrites = strtoull(argv[1], NULL, 10);
    uint64_t random = seed = strtoull(argv[2], NULL, 10), done = 0, groups = 0;
    pthread_t watcher;
    for (int n = LEAST_SIZE; n <= MOST_SIZE; n++) controls[n] = map(pl_control_bytes(n));
    for (int r = 0; r < MOST_SIZE; r++) arenas[r] = (uint64_t)map(ARENA_BYTES);
    group_since_ns = pl_now_ns();
    pthread_create(&watcher, NULL, watch, NULL);
    for (; done < overwrites; groups++) done += run_group(&random, overwrites - done);
    CHECK(ended[PL_OK] && said_so, "nobody noticed");
    printf("%llu overwrites, %llu groups; jobs by how they ended:", (unsigned long long)done,
           (unsigned long long)groups);
    for (int s = 0; s <= PL_INTERRUPTED; s++) printf(" %llu", (unsigned long long)ended[s]);
    printf("; %llu said that memory was overwritten\n", (unsigned long long)said_so);
    return 0;
}
