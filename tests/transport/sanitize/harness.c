/* Random programs of collectives and messages on ranks that are threads of one process, for the sanitizers.
 *
 *     harness SIZE PROGRAMS STEPS SPIN_S
 *
 * Every rank draws the same program from the same seed. Results are compared with what they must be; the races and the
 * memory errors are the sanitizer's to find. Built by the Makefile here, for ThreadSanitizer and for Address- and
 * UndefinedBehaviorSanitizer; run by `make sanitize`.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>

#include "common.h"

#define TIMEOUT_S 120.0
#define MAX_COUNT 900000
#define ARENA_BYTES ((uint64_t)4 << 20)

static int size, programs, steps;
static double spin_s;
static void *control;
static uint64_t control_bytes;
static uint64_t arenas[PL_MAX_RANKS];

typedef struct {
    int rank;
    uint64_t random;
    pl_endpoint *endpoint;
} rank_thread;

/* The same numbers on every rank. */
static uint64_t draw(rank_thread *t, uint64_t below) { return draw_from(&t->random, below); }

static uint64_t draw_count(rank_thread *t) {
    const uint64_t most[] = {1, 20, 9000, 100000, MAX_COUNT};
    return draw(t, most[draw(t, 5)] + 1);
}

static void finish(pl_job *job) {
    if (!job) return;
    int status = pl_job_wait(job, 1e30);
    CHECK(status == PL_OK, "status %d: %s", status, pl_job_message(job));
    pl_job_release(job);
}

/* A small number that depends on rank, place and step, so that sums are exact. */
static int32_t element(int rank, uint64_t i, uint64_t step) { return (int32_t)((i * 7 + step) % 1000) * (rank + 1); }

static int32_t *filled(int rank, uint64_t count, uint64_t step) {
    int32_t *x = malloc((count + 1) * sizeof *x);
    for (uint64_t i = 0; i < count; i++) x[i] = element(rank, i, step);
    return x;
}

static void expect_sum(const int32_t *x, uint64_t count, uint64_t step) {
    for (uint64_t i = 0; i < count; i++) {
        int32_t want = element(0, i, step) * size * (size + 1) / 2;
        CHECK(x[i] == want, "element %llu of %llu: %d, not %d", (unsigned long long)i, (unsigned long long)count, x[i],
              want);
    }
}

static void step_all_reduce(rank_thread *t, uint64_t step) {
    const uint64_t count = draw_count(t);
    const int queued = (int)draw(t, 2), in_arena = (int)draw(t, 3) == 0;
    int32_t *mine = filled(t->rank, count, step), *x = mine;
    if (in_arena) x = memcpy((void *)(arenas[t->rank] + 64 * (uint64_t)t->rank), mine, count * sizeof *x);
    finish(pl_all_reduce(t->endpoint, x, x, count, PL_I32, PL_SUM, TIMEOUT_S, !queued));
    expect_sum(x, count, step);
    /* Zero copy writes to others' memory: nobody may use it for something else before all have looked. */
    if (in_arena) finish(pl_barrier(t->endpoint, TIMEOUT_S, 1));
    free(mine);
}

/* Several at once, waited for in the reverse order. */
static void step_queue(rank_thread *t, uint64_t step) {
    enum { JOBS = 6 };
    pl_job *jobs[JOBS];
    int32_t *x[JOBS];
    uint64_t counts[JOBS];
    for (int i = 0; i < JOBS; i++) {
        counts[i] = draw_count(t) / 4;
        x[i] = filled(t->rank, counts[i], step + (uint64_t)i);
        jobs[i] = pl_all_reduce(t->endpoint, x[i], x[i], counts[i], PL_I32, PL_SUM, TIMEOUT_S, i == 3);
    }
    for (int i = JOBS - 1; i >= 0; i--) {
        /* Looking at the status is as good as waiting. */
        while (jobs[i] && i % 2 && pl_job_status(jobs[i]) == PL_PENDING) sched_yield();
        if (!(i % 2)) finish(jobs[i]);
        expect_sum(x[i], counts[i], step + (uint64_t)i);
        if (i % 2 && jobs[i]) finish(jobs[i]);
        free(x[i]);
    }
}

static void step_all_to_all(rank_thread *t, uint64_t step) {
    const uint64_t base = draw_count(t) / 2;
    const int queued = (int)draw(t, 2);
    uint64_t sends[PL_MAX_RANKS], out[PL_MAX_RANKS], recvs[PL_MAX_RANKS], in[PL_MAX_RANKS];
    for (int r = 0; r < size; r++) {
        out[r] = (base + (uint64_t)(t->rank + 3 * r)) * 4;
        in[r] = (base + (uint64_t)(r + 3 * t->rank)) * 4;
        sends[r] = (uint64_t)filled(t->rank, out[r] / 4, step + (uint64_t)r);
        recvs[r] = (uint64_t)calloc(1, in[r] + 4);
    }
    finish(pl_exchange(t->endpoint, sends, out, recvs, in, 0, PL_ALL_TO_ALL, -1, PL_U8, TIMEOUT_S, !queued));
    for (int r = 0; r < size; r++) {
        const int32_t *x = (const int32_t *)recvs[r];
        for (uint64_t i = 0; i < in[r] / 4; i++) CHECK(x[i] == element(r, i, step + (uint64_t)t->rank), "all_to_all");
        free((void *)sends[r]);
        free((void *)recvs[r]);
    }
}

static void step_all_gather(rank_thread *t, uint64_t step) {
    const uint64_t count = draw_count(t);
    uint64_t recvs[PL_MAX_RANKS], in[PL_MAX_RANKS], send, out = count * 4;
    send = (uint64_t)filled(t->rank, count, step);
    for (int r = 0; r < size; r++) {
        in[r] = out;
        recvs[r] = (uint64_t)calloc(1, out + 4);
    }
    finish(pl_exchange(t->endpoint, &send, &out, recvs, in, 1, PL_ALL_GATHER, -1, PL_U8, TIMEOUT_S, 1));
    for (int r = 0; r < size; r++) {
        const int32_t *x = (const int32_t *)recvs[r];
        for (uint64_t i = 0; i < count; i++) CHECK(x[i] == element(r, i, step), "all_gather");
        free((void *)recvs[r]);
    }
    free((void *)send);
}

/* Each rank sends as many as it likes; what comes belongs to the job. */
static void step_gather_unequal(rank_thread *t, uint64_t step) {
    const uint64_t base = draw_count(t), count = base + 3 * (uint64_t)t->rank;
    int32_t *sent = filled(t->rank, count, step);
    pl_job *job = pl_gather_unequal(t->endpoint, sent, count * 4, PL_ALL_GATHER, PL_I32, TIMEOUT_S);
    CHECK(job && pl_job_wait(job, 1e30) == PL_OK, "gather_unequal");
    for (int r = 0; r < size; r++) {
        uint64_t nbytes;
        const int32_t *x = pl_job_part(job, r, &nbytes);
        CHECK(nbytes == (base + 3 * (uint64_t)r) * 4, "size of a part");
        for (uint64_t i = 0; i < nbytes / 4; i++) CHECK(x[i] == element(r, i, step), "part");
    }
    pl_job_release(job);
    free(sent);
}

static void step_reduce_scatter(rank_thread *t, uint64_t step) {
    const uint64_t base = draw_count(t) / 2;
    uint64_t sends[PL_MAX_RANKS], counts[PL_MAX_RANKS];
    for (int r = 0; r < size; r++) {
        counts[r] = r == 1 ? 0 : base + (uint64_t)r;
        sends[r] = (uint64_t)filled(t->rank, counts[r], step);
    }
    int32_t *x = calloc(counts[t->rank] + 1, sizeof *x);
    finish(pl_reduce_exchange(t->endpoint, sends, counts, x, PL_I32, PL_SUM, PL_REDUCE_SCATTER, -1, TIMEOUT_S, 1));
    expect_sum(x, counts[t->rank], step);
    for (int r = 0; r < size; r++) free((void *)sends[r]);
    free(x);
}

/* Around the ring, two tags in the wrong order, one of them larger than a ring holds. */
static void step_messages(rank_thread *t, uint64_t step) {
    const int after = (t->rank + 1) % size, before = (t->rank - 1 + size) % size;
    const uint64_t counts[2] = {draw_count(t), draw_count(t)};
    int32_t *out[2], *in[2];
    pl_job *sends[2];
    for (int tag = 0; tag < 2; tag++) {
        out[tag] = filled(t->rank, counts[tag], step + (uint64_t)tag);
        sends[tag] = pl_send(t->endpoint, out[tag], counts[tag] * 4, after, tag, TIMEOUT_S);
    }
    for (int tag = 1; tag >= 0; tag--) {
        in[tag] = calloc(counts[tag] + 1, 4);
        pl_job *job = pl_recv(t->endpoint, in[tag], counts[tag] * 4, tag ? before : -1, tag, TIMEOUT_S);
        finish(job);
        for (uint64_t i = 0; i < counts[tag]; i++)
            CHECK(in[tag][i] == element(before, i, step + (uint64_t)tag), "message");
        free(in[tag]);
    }
    for (int tag = 0; tag < 2; tag++) {
        finish(sends[tag]);
        free(out[tag]);
    }
    /* From anybody means that the next program's message could be taken for this one's. */
    finish(pl_barrier(t->endpoint, TIMEOUT_S, 1));
}

static void step_disagree(rank_thread *t) {
    int32_t x[64] = {0};
    pl_job *job = pl_all_reduce(t->endpoint, x, x, t->rank ? 64 : 63, PL_I32, PL_SUM, TIMEOUT_S, 1);
    CHECK(job && pl_job_status(job) == PL_DISAGREED, "ranks that disagree are to be told");
    pl_job_release(job);
}

static void run_program(rank_thread *t) {
    for (int i = 0; i < steps; i++) {
        const uint64_t step = (uint64_t)i * 17;
        switch (draw(t, 9)) {
        case 0: case 1: step_all_reduce(t, step); break;
        case 2: step_queue(t, step); break;
        case 3: step_all_to_all(t, step); break;
        case 4: step_all_gather(t, step); break;
        case 5: step_reduce_scatter(t, step); break;
        case 6: step_messages(t, step); break;
        case 7: step_gather_unequal(t, step); break;
        default: step_disagree(t); break;
        }
    }
}

static void open_endpoint(rank_thread *t) {
    char reason[256];
    t->endpoint = pl_open(control, control_bytes, -1, t->rank, size, t->rank == 0, NULL, reason, sizeof reason);
    CHECK(t->endpoint, "refused: %s", reason);
    set_spin(t->endpoint, spin_s);
    CHECK(pl_register_arena(t->endpoint, 1, arenas, ARENA_BYTES), "arena");
}

static void *run_rank(void *argument) {
    rank_thread *t = argument;
    run_program(t);
    pl_unregister_arena(t->endpoint, 1);
    pl_close(t->endpoint);
    pl_free(t->endpoint);
    return NULL;
}

/* The end that is not a happy one: one rank gives up while others wait. */
static void *run_poison(void *argument) {
    rank_thread *t = argument;
    if (t->rank == size - 1) {
        pl_poison(t->endpoint, "enough", -1, PL_POISONED);
    } else {
        pl_job *job = pl_barrier(t->endpoint, TIMEOUT_S, t->rank % 2);
        CHECK(job && pl_job_wait(job, 1e30) == PL_POISONED, "poison");
        pl_job_release(job);
        int32_t x;
        job = pl_recv(t->endpoint, &x, 4, size - 1, 0, TIMEOUT_S);
        CHECK(pl_job_wait(job, 1e30) == PL_POISONED, "poison of messages");
        pl_job_release(job);
    }
    pl_close(t->endpoint);
    pl_free(t->endpoint);
    return NULL;
}

static void run_all(void *(*function)(void *), uint64_t seed) {
    rank_thread ranks[PL_MAX_RANKS];
    pthread_t threads[PL_MAX_RANKS];
    memset(control, 0, control_bytes);
    for (int r = 0; r < size; r++) {
        ranks[r] = (rank_thread){.rank = r, .random = seed};
        open_endpoint(&ranks[r]);
    }
    for (int r = 0; r < size; r++) pthread_create(&threads[r], NULL, function, &ranks[r]);
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
}

int main(int argc, char **argv) {
    CHECK(argc == 5, "usage: %s SIZE PROGRAMS STEPS SPIN_S", argv[0]);
    size = atoi(argv[1]);
    programs = atoi(argv[2]);
    steps = atoi(argv[3]);
    spin_s = atof(argv[4]);
    control_bytes = pl_control_bytes(size);
    control = map(control_bytes);
    for (int r = 0; r < size; r++) arenas[r] = (uint64_t)map(ARENA_BYTES);
    for (int p = 0; p < programs; p++) run_all(run_rank, (uint64_t)p);
    run_all(run_poison, 0);
    printf("%d ranks, %d programs of %d steps: fine\n", size, programs, steps);
    return 0;
}
