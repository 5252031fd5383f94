#define _GNU_SOURCE
#include "wait.h"

#include <limits.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t pl_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#if defined(__linux__) && !defined(PL_NO_FUTEX)

/* These are not the _PRIVATE operations, because the word is shared between processes. */

void pl_sleep_on(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    /* The system compares *word with `seen` and puts us to sleep in one step, so no wake in between is missed. */
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

void pl_wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#else

/* Where there is no futex: look again and again, less and less often. */

void pl_sleep_on(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    int64_t end = pl_now_ns() + ns;
    for (int64_t nap = 20000; atomic_load_explicit(word, memory_order_acquire) == seen && pl_now_ns() < end;) {
        struct timespec t = {.tv_sec = 0, .tv_nsec = nap};
        nanosleep(&t, NULL);
        if (nap < 1000000) nap *= 2;
    }
}

void pl_wake_all(_Atomic uint32_t *word) { (void)word; }

#endif
