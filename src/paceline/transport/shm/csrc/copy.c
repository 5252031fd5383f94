#include "copy.h"

#include <string.h>

#include "wait.h"

/* ThreadSanitizer does not see streaming stores. */
#if defined(__SSE2__) && !defined(PL_PLAIN) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

/* -- which way ----------------------------------------------------------------------------------------------------- */

#define LEAST_BYTES ((uint64_t)32 << 10)
/* The other way is tried once in this many calls. Programs often repeat themselves after a power of two of calls. This
 * is no such number, so that the trial does not always fall on the same call of a program. */
#define TRIAL_EVERY 61
#define TURNS_AT_FIRST 4

/* A collective is compared with others of about its size, as what a byte costs depends on how many there are. */
static pl_habit *habit_for(pl_habit habits[PL_HABITS], uint64_t nbytes) {
    int class = 0;
    for (uint64_t n = nbytes / LEAST_BYTES; n > 3 && class < PL_HABITS - 1; n /= 4) class++;
    return &habits[class];
}

pl_copying pl_copying_start(pl_habit habits[PL_HABITS], uint64_t nbytes) {
    pl_copying c = {.nbytes = nbytes};
    if (!STREAMS || nbytes <= LEAST_BYTES) return c;
    c.habit = habit_for(habits, nbytes);
    const uint64_t call = c.habit->calls++;
    if (call < TURNS_AT_FIRST) c.past = call & 1;
    else c.past = (c.habit->ns_per_byte[1] < c.habit->ns_per_byte[0]) ^ (call % TRIAL_EVERY == 0);
    c.since_ns = pl_now_ns();
    return c;
}

void pl_copying_pause(pl_copying *c) {
    if (c->habit) c->spent_ns += pl_now_ns() - c->since_ns;
}

void pl_copying_resume(pl_copying *c) {
    if (c->habit) c->since_ns = pl_now_ns();
}

void pl_copying_end(pl_copying *c) {
    if (!c->habit) return;
    pl_copying_pause(c);
    double *lately = &c->habit->ns_per_byte[c->past], now = (double)c->spent_ns / (double)c->nbytes;
    /* A shorter time is believed at once. A longer one may mean that a CPU was taken from us, and is believed when it
     * lasts. */
    if (*lately == 0 || now < *lately) *lately = now;
    else *lately += (now < 2 * *lately ? now - *lately : *lately) / 4;
}

/* -- copying ------------------------------------------------------------------------------------------------------- */

#if STREAMS

static void copy_past(unsigned char *to, const unsigned char *from, uint64_t nbytes) {
    const uint64_t to_line = (uint64_t)(-(uintptr_t)to & 63), head = to_line < nbytes ? to_line : nbytes;
    memcpy(to, from, head);
    uint64_t i = head;
    /* Whole lines at a time, as the CPU would send off write buffers that are half full. */
    for (; i + 64 <= nbytes; i += 64)
        for (int k = 0; k < 64; k += 16)
            _mm_stream_si128((__m128i *)(to + i + k), _mm_loadu_si128((const __m128i *)(from + i + k)));
    memcpy(to + i, from + i, nbytes - i);
}

void pl_copy(void *to, const void *from, uint64_t nbytes, int past) {
    if (past) copy_past(to, from, nbytes);
    else memcpy(to, from, nbytes);
}

/* Atomics order ordinary stores only. C11 and the ABI know no others, so code that makes streaming stores has to order
 * them itself. After this fence all of them are visible before any later store is, in particular before the arrival
 * that publishes them. So [Note: rounds] in layout.h holds for them, too. */
void pl_copy_flush(int past) {
    if (past) _mm_sfence();
}

#else

void pl_copy(void *to, const void *from, uint64_t nbytes, int past) {
    (void)past;
    memcpy(to, from, nbytes);
}

void pl_copy_flush(int past) { (void)past; }

#endif
