/* Sleeping until a word of shared memory changes. */
#ifndef PACELINE_WAIT_H
#define PACELINE_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

/* No sleep is longer: a waiter looks for poison, dead ranks and its deadline at least this often. */
#define PL_NAP_NS INT64_C(50000000)

int64_t pl_now_ns(void);

/* A hint to the CPU that this thread spins, and that the other thread of the core may go first. */
static inline void pl_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Sleep while *word == seen, for at most `ns`. May return early for no reason. */
void pl_sleep_on(_Atomic uint32_t *word, uint32_t seen, int64_t ns);

/* Wake everybody who sleeps on the word. */
void pl_wake_all(_Atomic uint32_t *word);

#endif
