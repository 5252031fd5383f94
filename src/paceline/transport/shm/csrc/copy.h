/* Copying into staging areas: through the caches or past them, whichever has been faster here. */
#ifndef PACELINE_COPY_H
#define PACELINE_COPY_H

#include <stdint.h>

/* [Note: past the caches]
 * A staging line was last read by another CPU, whose cache may still hold it. Where the two CPUs share no cache, an
 * ordinary store has to take the line from there first, and waits for it line by line: 1 MB among two ranks takes 690
 * us. A streaming store goes past the caches and needs no answer: 74 us. Where they do share a cache, it is the other
 * way round (46 us, and 95 us with streaming stores), as what went past the caches has to be fetched from memory. The
 * system decides which CPUs we are on, and may move us, and a virtual machine does not say which of them share a cache.
 * So it is measured.
 */
typedef struct {
    double ns_per_byte[2]; /* what it took lately: through the caches, past them */
    uint64_t calls;
} pl_habit;

enum { PL_HABITS = 8 };

/* The copying of the collective that is under way. */
typedef struct {
    pl_habit *habit; /* NULL: too small to matter */
    uint64_t nbytes;
    int past;
    int64_t since_ns, spent_ns;
} pl_copying;

/* Choose a way for a collective that moves `nbytes`. Ranks need not choose the same way: the bits are the same. */
pl_copying pl_copying_start(pl_habit habits[PL_HABITS], uint64_t nbytes);
/* The time between these two is not counted: how late other ranks are says nothing about copying. */
void pl_copying_pause(pl_copying *copying);
void pl_copying_resume(pl_copying *copying);
void pl_copying_end(pl_copying *copying);

/* Copies by memcpy, or with streaming stores if `past`. A release does not order those: before what they wrote is
 * published, there has to be a pl_copy_flush. */
void pl_copy(void *to, const void *from, uint64_t nbytes, int past);
void pl_copy_flush(int past);

#endif
