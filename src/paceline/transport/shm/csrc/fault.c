#include "fault.h"

#include <signal.h>
#include <stdatomic.h>

int pl_armed = -1;
static atomic_int left;
static int deadly;

void pl_fail_at(int phase, int count, int action) {
    atomic_store(&left, count);
    deadly = action == 1;
    pl_armed = phase;
}

void pl_strike(void) {
    if (atomic_fetch_sub(&left, 1) != 0) return;
    pl_armed = -1;
    raise(deadly ? SIGKILL : SIGSTOP);
}
