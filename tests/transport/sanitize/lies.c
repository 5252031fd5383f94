/* Lies: each word of the control segment that decides more than data, overwritten at the moment at which it is read.
 *
 * Rank 0 is real and runs on a thread. Rank 1 is played by the main thread: it opens its endpoint, but writes its seat
 * and its rings by hand. Whatever it says, rank 0's job has to end with an error that says what happened, and the
 * sanitizer must not find anything. `lies` runs all cases.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>

#include "common.h"
#include "descriptor.h"
#include "post.h"
#include "ring.h"

#define ARENA_BYTES ((uint64_t)1 << 20)
#define HUGE_BYTES ((uint64_t)-40)
enum { SIZE = 2, COUNT = 20000 };

static pl_header *control;
static pl_endpoint *real, *played;
static uint64_t arenas[SIZE];
static float numbers[COUNT];

static pl_seat *seat(int rank) { return pl_seat_of(real, rank); }

static void open_both(void) {
    char reason[256];
    memset(control, 0, pl_control_bytes(SIZE));
    for (int r = 0; r < SIZE; r++) {
        pl_endpoint *ep = pl_open(control, pl_control_bytes(SIZE), -1, r, SIZE, r == 0, NULL, reason, sizeof reason);
        CHECK(ep && pl_register_arena(ep, 1, arenas, ARENA_BYTES), "refused: %s", reason);
        set_spin(ep, 0);
        *(r ? &played : &real) = ep;
    }
}

static void close_both(void) {
    pl_abort(real);
    pl_abort(played);
    pl_free(real);
    pl_free(played);
}

/* The job ends with `status` and says `what`. */
static void expect(pl_job *job, int status, const char *what) {
    CHECK(job, "it went well: %s", what);
    const int got = pl_job_wait(job, 30);
    CHECK(got == status && strstr(pl_job_message(job), what), "status %d: %s", got, pl_job_message(job));
    pl_job_release(job);
}

static void wait_for_arrival(void) {
    while (atomic_load(&control->arrivals) != 1) sched_yield();
}

/* Rank 1 says the same as rank 0, and `lie` is written to `word` of some seat. Then it arrives. */
static void agree_but(uint64_t *word, uint64_t lie) {
    wait_for_arrival();
    seat(1)->descriptor[1] = seat(0)->descriptor[1];
    for (int r = 0; r < SIZE; r++) {
        seat(1)->out[1][r] = seat(0)->out[1][r];
        seat(1)->in[1][r] = seat(0)->in[1][r];
    }
    *word = lie;
    atomic_fetch_add(&control->arrivals, 1);
}

static pl_job *all_reduce(void *at) {
    return pl_all_reduce(real, at, at, COUNT, PL_F32, PL_SUM, 20, 0);
}

/* -- collectives --------------------------------------------------------------------------------------------------- */

static void offsets(void) {
    const uint64_t lies[] = {ARENA_BYTES, ARENA_BYTES - COUNT * 4 + 4, HUGE_BYTES, UINT64_C(1) << 63, 2};
    for (unsigned k = 0; k < sizeof lies / sizeof *lies; k++) {
        open_both();
        pl_job *job = all_reduce((void *)arenas[0]);
        agree_but(&seat(1)->descriptor[1].offset, lies[k]);
        expect(job, PL_POISONED, "overwritten: rank 0 has found in it what no rank writes (where in an arena the "
                                 "tensor of rank 1 is)");
        close_both();
    }
}

/* Everybody's seat says that the tensors are in arena 1, but ours is not. Rank 0 goes on by itself. */
static void arena_that_is_not_ours(void) {
    open_both();
    pl_job *job = pl_all_reduce(real, numbers, numbers, COUNT, PL_F32, PL_SUM, 0.05, 0);
    wait_for_arrival();
    seat(0)->descriptor[1].arena = 2;
    agree_but(&seat(1)->descriptor[1].arena, 2);
    expect(job, PL_TIMED_OUT, "did not arrive");
    close_both();
}

static void unequal_sizes(void) {
    open_both();
    pl_job *job = pl_gather_unequal(real, numbers, 100, PL_ALL_GATHER, PL_F32, 20);
    agree_but(&seat(1)->out[1][1], HUGE_BYTES);
    expect(job, PL_POISONED, "(how much rank 1 sends)");
    close_both();
    open_both();
    job = pl_gather_unequal(real, numbers, 100, PL_ALL_GATHER, PL_F32, 20);
    wait_for_arrival();
    seat(1)->descriptor[1] = seat(0)->descriptor[1];
    for (int r = 0; r < SIZE; r++) seat(1)->out[1][r] = HUGE_BYTES;
    atomic_fetch_add(&control->arrivals, 1);
    expect(job, PL_POISONED, "(that rank 1 sends 18446744073709551576 bytes)");
    close_both();
}

/* Rank 0 is told to send itself more than it has. It goes by what it knows. */
static void own_size(void) {
    open_both();
    float *mine = malloc(100);
    pl_job *job = pl_gather_unequal(real, memset(mine, 0, 100), 100, PL_ALL_GATHER, PL_F32, 20);
    agree_but(&seat(0)->out[1][0], 4096);
    CHECK(pl_job_wait(job, 30) == PL_OK, "%s", pl_job_message(job));
    uint64_t nbytes;
    pl_job_part(job, 0, &nbytes);
    CHECK(nbytes == 100, "%llu bytes", (unsigned long long)nbytes);
    pl_job_release(job);
    free(mine);
    close_both();
}

static void arrivals(void) {
    open_both();
    pl_job *job = pl_barrier(real, 1e30, 0);
    wait_for_arrival();
    atomic_store(&control->arrivals, 1000);
    expect(job, PL_POISONED, "(the count of arrivals)");
    close_both();
}

static void own_descriptor(void) {
    open_both();
    pl_job *job = pl_barrier(real, 20, 0);
    wait_for_arrival();
    seat(1)->descriptor[1] = seat(0)->descriptor[1];
    seat(0)->descriptor[1].kind = 12345;
    atomic_fetch_add(&control->arrivals, 1);
    expect(job, PL_POISONED, "(what rank 0 is in)");
    close_both();
}

static void state(void) {
    open_both();
    atomic_store(&seat(1)->state, 77);
    expect(pl_barrier(real, 20, 0), PL_POISONED, "(the state of rank 1)");
    close_both();
}

/* -- poison -------------------------------------------------------------------------------------------------------- */

static void poison_words(void) {
    const uint32_t words[] = {PL_OK | 2 << 8, PL_PENDING | 2 << 8, PL_INTERRUPTED | 2 << 8, 200 | 2 << 8,
                              PL_LOST | 3 << 8, PL_LOST, UINT32_MAX, PL_LOST | 1 << 8};
    for (unsigned k = 0; k < sizeof words / sizeof *words; k++) {
        open_both();
        /* Rank 1 has a cause, and rank 0 has none. */
        strcpy(seat(1)->cause, "a cause");
        atomic_store(&control->poison, words[k]);
        expect(pl_barrier(real, 20, 1), PL_POISONED, "(why the group has failed)");
        close_both();
    }
}

static void poison_that_is_taken_back(void) {
    open_both();
    pl_poison(real, "enough", -1, PL_POISONED);
    expect(pl_barrier(real, 20, 1), PL_POISONED, "enough");
    atomic_store(&control->poison, 0);
    expect(pl_barrier(real, 20, 1), PL_POISONED, "(why the group has failed)");
    pl_poison(real, "enough", -1, PL_POISONED); /* this returns */
    close_both();
}

static void cause_without_an_end(void) {
    open_both();
    memset(seat(1)->cause, '\033', sizeof seat(1)->cause);
    atomic_store(&control->poison, PL_LOST | 2 << 8);
    pl_job *job = pl_barrier(real, 20, 1);
    CHECK(strlen(pl_job_message(job)) == PL_CAUSE_BYTES - 1 && !strchr(pl_job_message(job), '\033'), "cause");
    pl_job_release(job);
    close_both();
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

/* Put a header into the ring from rank 1, with `more` behind it that nobody wrote. */
static void forge(uint64_t nbytes, int64_t tag, uint64_t wrong, uint64_t more) {
    pl_ring *ring = pl_ring_between(real, 1, 0);
    message_header header = {.nbytes = nbytes, .tag = tag};
    header.check = header_check(&header, 0) + wrong;
    memcpy(ring->bytes, &header, sizeof header);
    atomic_store(&ring->tail, sizeof header + more);
}

static void headers(void) {
    open_both();
    forge(100, 0, 1, 100);
    expect(pl_recv(real, numbers, 100, 1, 0, 20), PL_POISONED, "(the ring from rank 1 to rank 0)");
    close_both();
    /* A message that is to be set aside, since another is wanted: malloc(sizeof(stashed) + its size) would wrap. */
    open_both();
    forge((uint64_t)-sizeof(stashed), 5, 0, 1000);
    expect(pl_recv(real, numbers, 100, 1, 0, 20), PL_POISONED, "(the ring from rank 1 to rank 0)");
    close_both();
}

static void counters_of_a_reader(void) {
    pl_ring *ring = (open_both(), pl_ring_between(real, 1, 0));
    forge(sizeof numbers * 100, 0, 0, pl_ring_bytes(SIZE) * 50);
    float *to = malloc(sizeof numbers * 100);
    expect(pl_recv(real, to, sizeof numbers * 100, 1, 0, 20), PL_POISONED, "(the ring from rank 1 to rank 0)");
    free(to);
    close_both();
    open_both();
    atomic_store(&ring->head, (uint64_t)-8);
    expect(pl_recv(real, numbers, 100, 1, 0, 20), PL_POISONED, "(the ring from rank 1 to rank 0)");
    close_both();
}

static void counters_of_a_writer(void) {
    const uint64_t lies[][2] = {{8, 0}, {0, 8}, {0, UINT64_C(1) << 63}, {HUGE_BYTES, 0}};
    const uint64_t nbytes = 8 * pl_ring_bytes(SIZE);
    for (unsigned k = 0; k < sizeof lies / sizeof *lies; k++) {
        pl_ring *ring = (open_both(), pl_ring_between(real, 0, 1));
        void *from = calloc(1, nbytes);
        atomic_store(&ring->tail, lies[k][0]);
        atomic_store(&ring->head, lies[k][1]);
        expect(pl_send(real, from, nbytes, 1, 0, 20), PL_POISONED, "(the ring from rank 0 to rank 1)");
        free(from);
        close_both();
    }
}

int main(void) {
    control = map(pl_control_bytes(SIZE));
    for (int r = 0; r < SIZE; r++) arenas[r] = (uint64_t)map(ARENA_BYTES);
    offsets();
    arena_that_is_not_ours();
    unequal_sizes();
    own_size();
    arrivals();
    own_descriptor();
    state();
    poison_words();
    poison_that_is_taken_back();
    cause_without_an_end();
    headers();
    counters_of_a_reader();
    counters_of_a_writer();
    printf("no lie was believed\n");
    return 0;
}
