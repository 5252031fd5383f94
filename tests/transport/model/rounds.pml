/* The round protocol of the kernel (csrc/layout.h, [Note: rounds]; csrc/round.c, [Note: sleepers];
 * csrc/all_reduce.c, [Note: zero copy] and [Note: staged all_reduce]), for spin.
 *
 * What is checked, over all interleavings of N ranks and ROUNDS rounds:
 *   - a rank that passes the gate of round k reads from others what they wrote for round k (assertions);
 *   - nobody sleeps for ever (spin's check for invalid end states). The naps of the code, which end after 50 ms at the
 *     latest, are left out on purpose: they are for dead ranks, and correctness must not lean on them.
 *
 * Weak memory order. Ordinary stores go to a buffer and reach memory whenever they like, in any order (`memory` below):
 * what x86, and ARM, may do with stores, and more. A release waits until the rank's own buffer is empty, and that is
 * all it does. Loads happen where they stand: between the acquire before and the release after them, which is where
 * those keep them. Each of these orders is taken away in one of the mutants, to see that it is needed and that this
 * model would notice:
 *
 *   -DONE_HALF      staging areas have one half and not two
 *   -DNO_RELEASE    arriving does not wait for the stores before it
 *   -DNO_ACQUIRE    what others wrote may be read before the gate is passed
 *   -DLATE_READS    reads of a round may be done after arriving at the next
 *   -DWEAK_SLEEPERS the count of sleepers is an ordinary store: it may be in the buffer while the sleeper looks again
 *   -DNO_RECHECK    a sleeper does not look again after it has counted itself, and the futex does not compare
 *
 * -DWRITE_BACK checks a staged all_reduce of two ranks as well: in round k each puts its result where the other's input
 * was, and finds the other's in its own half after the gate of k + 1. Its mutants:
 *
 *   -DEARLY_RESULT  the other's result of a round may be read before the gate of the next is passed
 *   -DLATE_RESULT   the own result of a round is written after arriving at the next
 *
 * -DZERO_COPY checks the other protocol: pairs of rounds, between which rank r owns share r of all tensors.
 */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif

#ifdef ONE_HALF
#define HALF(k) 0
#else
#define HALF(k) ((k) % 2)
#endif

/* Places in memory: tensors in zero copy (share s of the tensor of rank r), halves of staging areas otherwise. */
#ifdef ZERO_COPY
#define PLACES (N * N)
#define AT(r, s) ((r) * N + (s))
#else
#define PLACES (N * 2)
#define AT(r, h) ((r) * 2 + (h))
#endif

byte arrivals, sleepers;
bool asleep[N];           /* in the queue of the futex on `arrivals` */
byte mem[PLACES];         /* what all can see; a value says for which round it was written */
byte buffer[N * PLACES];  /* stores of a rank that are still on their way; 0: none */
bool counting[N];         /* WEAK_SLEEPERS: the store to `sleepers` that is on its way */
byte pending;             /* how many stores are on their way: with none, and all ranks asleep, nothing moves: a deadlock */
byte finished;

inline store(place, value) {
    atomic {
        if
        :: buffer[me * PLACES + (place)] == 0 -> pending++
        :: else
        fi;
        buffer[me * PLACES + (place)] = value
    }
}
/* A rank sees its own stores at once. */
#define LOAD(place) (buffer[me * PLACES + (place)] -> buffer[me * PLACES + (place)] : mem[place])

/* Stores arrive, in any order. */
active proctype memory() {
    byte i;
    do
    :: atomic {
        pending > 0 ->
        select(i : 0 .. N * PLACES - 1);
        if
        :: buffer[i] -> mem[i % PLACES] = buffer[i]; buffer[i] = 0; pending--
        :: else
        fi;
        i = 0
       }
#ifdef WEAK_SLEEPERS
    :: atomic { counting[0] -> sleepers++; counting[0] = false }
    :: atomic { counting[1] -> sleepers++; counting[1] = false }
#endif
    :: finished == N && pending == 0 -> break
    od
}

inline drain() {
#ifdef NO_RELEASE
    skip
#else
    for (i : 0 .. PLACES - 1) {
        buffer[me * PLACES + i] == 0
    }
    i = 0;
#endif
}

inline wake_all() {
    atomic {
        for (i : 0 .. N - 1) { asleep[i] = false }
        i = 0
    }
}

/* One read-modify-write; then, if it was the last, a look at the sleepers. */
inline arrive(k) {
    drain();
    atomic { arrivals++; last = (arrivals == N * (k)) }
    if
    :: last && sleepers > 0 -> wake_all()
    :: else
    fi;
    last = false
}

/* Spinning and sleeping are both allowed at any time. */
inline pass(k) {
    if
    :: arrivals >= N * (k)
    :: true ->
#ifdef WEAK_SLEEPERS
        counting[me] = true;
#else
        sleepers++;
#endif
        do
        :: seen = arrivals;
           if
#ifndef NO_RECHECK
           :: seen >= N * (k) -> break
           :: else
#else
           :: arrivals >= N * (k) && asleep_once -> break
           :: else
#endif
           fi;
           atomic {
               if
#ifdef NO_RECHECK
               :: true -> asleep[me] = true; asleep_once = true
#else
               :: arrivals == seen -> asleep[me] = true   /* the futex compares and queues in one step */
               :: else
#endif
               fi
           }
           !asleep[me]
        od;
#ifdef WEAK_SLEEPERS
        !counting[me];
#endif
        sleepers--;
        seen = 0
    fi
}

#ifndef ZERO_COPY

#ifdef EARLY_RESULT
#define RESULT(k) early
#else
#define RESULT(k) LOAD(AT(me, HALF(k)))
#endif

inline read_others(k) {
    for (other : 0 .. N - 1) {
        if
        :: other != me -> assert(LOAD(AT(other, HALF(k))) == k)
        :: else
        fi
    }
    other = 0
}

active [N] proctype rank() {
    byte me = _pid - 1, k, i, other, seen, early;
    bool last, asleep_once;
    for (k : 1 .. ROUNDS) {
        store(AT(me, HALF(k)), k);
#ifdef NO_ACQUIRE
        early = LOAD(AT(1 - me, HALF(k)));
#endif
        arrive(k);
#ifdef EARLY_RESULT
        early = LOAD(AT(me, HALF(k - 1)));
#endif
#ifdef LATE_RESULT
        if
        :: k > 1 -> store(AT(1 - me, HALF(k - 1)), 100 + k - 1)
        :: else
        fi;
#endif
#ifdef LATE_READS
        if
        :: k > 1 -> read_others(k - 1)
        :: else
        fi;
        pass(k)
#else
        pass(k);
#ifdef NO_ACQUIRE
        assert(early == k)
#else
        read_others(k);
#ifdef WRITE_BACK
        if
        :: k > 1 -> assert(RESULT(k - 1) == 100 + k - 1)
        :: else
        fi;
#ifndef LATE_RESULT
        store(AT(1 - me, HALF(k)), 100 + k)
#endif
#endif
#endif
#endif
    }
    finished++
}

#else

/* Values: k when the owner filled its tensor for the pair of rounds k, k + 1; 100 + k when the share is reduced. */
active [N] proctype rank() {
    byte me = _pid - 1, k = 1, i, other, seen;
    bool last, asleep_once;
    do
    :: k < ROUNDS ->
        for (other : 0 .. N - 1) { store(AT(me, other), k) }
        arrive(k);
        pass(k);
        for (other : 0 .. N - 1) {
            assert(LOAD(AT(other, me)) == k);
            store(AT(other, me), 100 + k)
        }
        arrive(k + 1);
        pass(k + 1);
        for (other : 0 .. N - 1) { assert(LOAD(AT(me, other)) == 100 + k) }
        k = k + 2
    :: else -> break
    od;
    finished++
}

#endif
