/* Where tests let a rank die: pl_fail_at arms one phase, and reaching it kills or stops the process. */
#ifndef PACELINE_FAULT_H
#define PACELINE_FAULT_H

#include "pl.h"

/* The armed phase, or -1. It is not atomic, as it is set before the threads that read it are busy. */
extern int pl_armed;

void pl_strike(void);

/* Unless a phase is armed, this costs one comparison with a word that is always in cache. */
static inline void pl_fault(enum pl_phase here) {
    if (__builtin_expect(pl_armed == (int)here, 0)) pl_strike();
}

#endif
