/* Rounds: the one synchronisation that collectives are made of. The rules are in layout.h, [Note: rounds]. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "descriptor.h"
#include "endpoint.h"
#include "fault.h"
#include "wait.h"

/* -- the gate ------------------------------------------------------------------------------------------------------ */

/* [Note: sleepers]
 * Nobody makes a system call to wake when nobody sleeps. A rank that wants to sleep first counts itself in `sleepers`
 * and then looks at `arrivals` again. The rank that arrives last first adds to `arrivals` and then looks at `sleepers`.
 * All four are sequentially consistent, so at least one of the two sees the other: either the sleeper finds the gate
 * open or the last to arrive finds the sleeper. (With release and acquire both could read the old value: the store of
 * each may sit in a store buffer while the load is done.) Between the sleeper's look and its sleep, the futex compares
 * again. The count of a rank that is killed asleep stays: it costs calls, not correctness.
 */

static uint32_t gate_target(const pl_endpoint *ep) { return (uint32_t)(ep->round * (uint64_t)ep->size); }

/* Counters wrap around, so differences tell. While we are at a gate, others may have arrived at the next one, but
 * cannot have passed it. */
static int reached(const pl_endpoint *ep, uint32_t arrivals, uint32_t target) {
    return arrivals - target < (uint32_t)ep->size;
}

/* All ranks have passed the gate before this one. */
static int is_possible(const pl_endpoint *ep, uint32_t arrivals, uint32_t target) {
    return arrivals - target + (uint32_t)ep->size < 2 * (uint32_t)ep->size;
}

/* True if this was the last arrival: then the gate is open. */
static int arrive(pl_endpoint *ep) {
    pl_header *h = ep->header;
    pl_fault(PL_AT_BEFORE_PUBLISH);
    atomic_store_explicit(&pl_seat_of(ep, ep->rank)->round, (uint32_t)ep->round, memory_order_relaxed);
    uint32_t now = atomic_fetch_add_explicit(&h->arrivals, 1, memory_order_seq_cst) + 1;
    int last = now == gate_target(ep);
    if (last && atomic_load_explicit(&h->sleepers, memory_order_seq_cst)) pl_wake_all(&h->arrivals);
    pl_fault(PL_AT_PUBLISHED);
    return last;
}

static int spin_for(pl_endpoint *ep, int64_t spin_ns) {
    const uint32_t target = gate_target(ep);
    int64_t end = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (reached(ep, atomic_load_explicit(&ep->header->arrivals, memory_order_acquire), target)) return 1;
            if (spin_ns == 0) return 0;
            pl_pause();
        }
        int64_t now = pl_now_ns();
        if (end == 0) end = now + spin_ns;
        else if (now >= end) return 0;
        sched_yield(); /* the rank we wait for may be queued behind us, on this CPU */
    }
}

static int all_there(pl_endpoint *ep, pl_job *job);
static int is_called_away(pl_endpoint *ep, pl_job *job);

static int sleep_at_gate(pl_endpoint *ep, pl_job *job) {
    pl_header *h = ep->header;
    const uint32_t target = gate_target(ep);
    int64_t looked = pl_now_ns();
    int open, fine = 1;
    atomic_fetch_add_explicit(&h->sleepers, 1, memory_order_seq_cst);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&h->arrivals, memory_order_seq_cst);
        open = reached(ep, seen, target);
        if (open || !(fine = pl_still_fine(ep, job))) break;
        if (!is_possible(ep, seen, target)) {
            pl_overwritten(ep, job, "the count of arrivals");
            break;
        }
        int64_t now = pl_now_ns();
        if (now - looked >= PL_NAP_NS) {
            looked = now;
            if (!(fine = all_there(ep, job) && !is_called_away(ep, job))) break;
        }
        int64_t nap = job->deadline_ns - now < PL_NAP_NS ? job->deadline_ns - now : PL_NAP_NS;
        pl_sleep_on(&h->arrivals, seen, nap > 0 ? nap : 1);
    }
    atomic_fetch_sub_explicit(&h->sleepers, 1, memory_order_relaxed);
    return open;
}

/* A spin that was long enough doubles, up to the longest that a job may spend. So does a spin that was just too short.
 * (If it did not, a rank that was late once would put the others to sleep, whose waking makes them late for the next
 * gate, and so on: 1 MB took 50 us where it takes 22.) Any other spin was for nothing: a long sleep followed, or it had
 * been the longest already. It halves, because where there are too few CPUs, spinning takes one from the rank that is
 * waited for. */
int64_t pl_next_spin(int64_t spin_ns, int64_t most_ns, int64_t slept_ns) {
    const int64_t least_ns = most_ns / 32;
    const int worth = slept_ns == 0 || (spin_ns < most_ns && slept_ns < most_ns);
    const int64_t next_ns = worth ? spin_ns * 2 : spin_ns / 2;
    if (next_ns < least_ns) return least_ns;
    return next_ns < most_ns ? next_ns : most_ns;
}

static int wait_at_gate(pl_endpoint *ep, pl_job *job) {
    const int64_t most_ns = job->spin_ns, spin_ns = ep->spin_ns < most_ns ? ep->spin_ns : most_ns;
    int64_t slept_ns = 0;
    int open = spin_for(ep, spin_ns);
    if (!open) {
        const int64_t since_ns = pl_now_ns();
        open = sleep_at_gate(ep, job);
        slept_ns = pl_now_ns() - since_ns + 1;
    }
    ep->spin_ns = pl_next_spin(spin_ns, most_ns, slept_ns);
    return open;
}

/* The acquire that lets us read what others wrote is in whichever load finds the gate open. */
int pl_pass(pl_endpoint *ep, pl_job *job) {
    int last = arrive(ep);
    if (!last && !wait_at_gate(ep, job)) return 0;
    pl_fault(PL_AT_PASSED);
    return 1;
}

/* -- what ends all waiting ----------------------------------------------------------------------------------------- */

static int is_missing(const pl_endpoint *ep, int rank) {
    uint32_t at = atomic_load_explicit(&pl_seat_of(ep, rank)->round, memory_order_relaxed);
    return (int32_t)(at - (uint32_t)ep->round) < 0;
}

/* [Note: life]
 * A rank that lives holds a record lock on byte `rank` of the control segment's file. The system drops it when the
 * process ends, however it ends; a fork does not inherit it; and asking works across pid namespaces, where process
 * numbers do not.
 */
static int is_alive(const pl_endpoint *ep, int rank) {
    if (ep->fd < 0) return 1;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    while (fcntl(ep->fd, F_GETLK, &lock) != 0)
        if (errno != EINTR) return 1; /* not known to be dead; the deadline remains */
    return lock.l_type != F_UNLCK;
}

static void what_it_does(const pl_job *job, char *text, uint64_t bytes) {
    pl_descriptor d = pl_descriptor_of(job);
    if (job->form == PL_FORM_SEND) snprintf(text, bytes, "send(%llu bytes)", (unsigned long long)job->count);
    else if (job->form == PL_FORM_RECV) snprintf(text, bytes, "recv(%llu bytes)", (unsigned long long)job->count);
    else pl_describe(&d, text, bytes);
}

int pl_is_there(pl_endpoint *ep, pl_job *job, int rank) {
    char what[128], text[PL_CAUSE_BYTES];
    uint32_t state = atomic_load_explicit(&pl_seat_of(ep, rank)->state, memory_order_acquire);
    if (state == PL_JOINED && is_alive(ep, rank)) return 1;
    if (state == PL_ABSENT) return 1; /* still starting: the deadline decides */
    if (state != PL_JOINED && state != PL_GONE)
        return pl_overwritten(ep, job, "the state of rank %d", ep->names[rank]);
    what_it_does(job, what, sizeof what);
    if (state == PL_GONE) {
        snprintf(text, sizeof text, "rank %d closed the group while rank %d was in %s", ep->names[rank],
                 ep->names[ep->rank], what);
        pl_set_poison(ep, PL_LEFT, ep->names[rank], text);
    } else {
        snprintf(text, sizeof text, "rank %d is gone: its process ended while rank %d was in %s", ep->names[rank],
                 ep->names[ep->rank], what);
        pl_set_poison(ep, PL_LOST, ep->names[rank], text);
    }
    return pl_still_fine(ep, job);
}

/* Only ranks that have not arrived keep us waiting. One that arrived and has died since is found in the next round. */
static int all_there(pl_endpoint *ep, pl_job *job) {
    for (int r = 0; r < ep->size; r++)
        if (is_missing(ep, r) && !pl_is_there(ep, job, r)) return 0;
    return 1;
}

static void time_out(pl_endpoint *ep, pl_job *job) {
    char who[96] = "", what[128], text[PL_CAUSE_BYTES];
    int first = -1;
    for (int r = 0, at = 0; r < ep->size; r++) {
        int late = job->form == PL_FORM_RECV || job->form == PL_FORM_SEND ? r == job->peer : is_missing(ep, r);
        if (!late) continue;
        if (first < 0) first = ep->names[r];
        if (at < (int)sizeof who)
            at += snprintf(who + at, sizeof who - (size_t)at, "%s%d", at ? ", " : "", ep->names[r]);
    }
    what_it_does(job, what, sizeof what);
    if (first < 0)
        snprintf(text, sizeof text, "rank %d waited in %s until the timeout of %.3g s, and no rank answered",
                 ep->names[ep->rank], what, job->timeout_s);
    else
        snprintf(text, sizeof text,
                 "rank %d waited in %s until the timeout of %.3g s for rank %s, which did not arrive",
                 ep->names[ep->rank], what, job->timeout_s, who);
    pl_set_poison(ep, PL_TIMED_OUT, first, text);
}

/* A thread that leaves in the middle of a collective leaves the other ranks without its part: they are told. */
static int is_called_away(pl_endpoint *ep, pl_job *job) {
    char what[128], text[PL_CAUSE_BYTES];
    if (!pl_is_interrupted()) return 0;
    what_it_does(job, what, sizeof what);
    snprintf(text, sizeof text, "rank %d was interrupted in %s", ep->names[ep->rank], what);
    pl_set_poison(ep, PL_POISONED, ep->names[ep->rank], text);
    pl_job_fail(job, PL_INTERRUPTED, -1, "%s", text);
    return 1;
}

int pl_is_poisoned(const pl_endpoint *ep) {
    return atomic_load_explicit(&ep->header->poison, memory_order_relaxed) != 0 ||
           atomic_load_explicit(&ep->is_over, memory_order_relaxed);
}

static void say_overwritten(const pl_endpoint *ep, char text[PL_CAUSE_BYTES], const char *where) {
    snprintf(text, PL_CAUSE_BYTES,
             "the control memory of the group was overwritten: rank %d has found in it what no rank writes (%s). Some "
             "code on a rank of this host, such as an extension in C, writes to memory that is not its own",
             ep->names[ep->rank], where);
}

int pl_overwritten(pl_endpoint *ep, pl_job *job, const char *format, ...) {
    char where[96], text[PL_CAUSE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(where, sizeof where, format, arguments);
    va_end(arguments);
    say_overwritten(ep, text, where);
    pl_set_poison(ep, PL_POISONED, -1, text);
    return job ? pl_still_fine(ep, job) : 0;
}

/* The cause need not end where it should, nor be a text. */
static void copy_cause(char text[PL_CAUSE_BYTES], const pl_seat *seat) {
    int n = 0;
    for (char c; n < PL_CAUSE_BYTES - 1 && (c = PL_ONCE(seat->cause[n])); n++)
        text[n] = ((unsigned char)c < ' ' && c != '\n' && c != '\t') || c == 127 ? '?' : c;
    text[n] = 0;
}

static int fail_with_poison(pl_endpoint *ep, pl_job *job) {
    /* Acquire: the reporter wrote its cause before the word. */
    const uint32_t word = atomic_load_explicit(&ep->header->poison, memory_order_acquire);
    if (word == 0 && !atomic_load_explicit(&ep->is_over, memory_order_relaxed)) return 0;
    atomic_store_explicit(&ep->is_over, 1, memory_order_relaxed);
    char cause[PL_CAUSE_BYTES] = "";
    uint32_t status = word & 0xff;
    int blamed = -1;
    const uint32_t reporter = (word >> 8) - 1;
    if (reporter < (uint32_t)ep->size && status >= PL_LOST && status <= PL_MEMORY) {
        copy_cause(cause, pl_seat_of(ep, (int)reporter));
        blamed = PL_ONCE(pl_seat_of(ep, (int)reporter)->blamed);
    }
    if (!cause[0]) {
        status = PL_POISONED;
        blamed = -1;
        say_overwritten(ep, cause, "why the group has failed");
    }
    pl_job_fail(job, (enum pl_status)status, blamed, "%s", cause);
    return 1;
}

int pl_still_fine(pl_endpoint *ep, pl_job *job) {
    if (fail_with_poison(ep, job)) return 0;
    if (job->deadline_ns == INT64_MAX || pl_now_ns() < job->deadline_ns) return 1;
    time_out(ep, job);
    fail_with_poison(ep, job);
    return 0;
}

/* The first cause stays; a second one changes nothing. */
void pl_set_poison(pl_endpoint *ep, enum pl_status status, int blamed, const char *text) {
    if (!atomic_exchange(&ep->has_poisoned, 1)) {
        uint32_t none = 0, word = (uint32_t)status | (uint32_t)(ep->rank + 1) << 8;
        snprintf(pl_seat_of(ep, ep->rank)->cause, PL_CAUSE_BYTES, "%s", text);
        pl_seat_of(ep, ep->rank)->blamed = blamed;
        atomic_compare_exchange_strong_explicit(&ep->header->poison, &none, word, memory_order_release,
                                                memory_order_relaxed);
        atomic_store_explicit(&ep->is_over, 1, memory_order_relaxed);
    } else {
        /* Another thread of this rank is between the stores above, and about to be done. */
        while (!pl_is_poisoned(ep)) pl_pause();
    }
    pl_wake_all(&ep->header->arrivals);
    pl_ring_all_bells(ep);
}
