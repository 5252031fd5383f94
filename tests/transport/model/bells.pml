/* The bells of the kernel (csrc/delivery.c, [Note: bells]; csrc/ring.h), for spin.
 *
 * A sender moves MESSAGES bytes through a ring with room for ROOM; a receiver takes them out. Each sleeps on its own
 * bell when it can do nothing. Checked: the receiver reads the bytes that were sent, in order; nobody sleeps for ever
 * (naps are left out, as in rounds.pml). Bytes are ordinary stores, which may be late; counters are atomics.
 *
 *   -DNO_RELEASE      the tail is moved without waiting for the bytes
 *   -DWEAK_LISTENING  saying that one listens is an ordinary store, which may be late
 *   -DNO_SECOND_LOOK  a rank that wants to sleep does not look at the ring after saying that it listens
 */
#ifndef MESSAGES
#define MESSAGES 4
#endif
#define ROOM 2
#define SENDER 0
#define RECEIVER 1

byte ring[ROOM], late[ROOM]; /* `late`: a byte on its way to the ring; 0: none */
byte head, tail;
byte bell[2];
bool listening[2], late_listening[2], asleep[2];
byte on_their_way, finished;

active proctype memory() {
    do
    :: atomic { late[0] -> ring[0] = late[0]; late[0] = 0; on_their_way-- }
    :: atomic { late[1] -> ring[1] = late[1]; late[1] = 0; on_their_way-- }
    :: atomic { late_listening[0] -> listening[0] = true; late_listening[0] = false }
    :: atomic { late_listening[1] -> listening[1] = true; late_listening[1] = false }
    :: finished == 2 && on_their_way == 0 -> break
    od
}

/* Whoever listens is rung for: the bell counts, and wakes who sleeps on it. */
inline ring_bell(who) {
    if
    :: listening[who] -> bell[who]++; asleep[who] = false
    :: else
    fi
}

/* `possible`: there is something to do. */
inline sleep_until(me, possible) {
    do
    :: possible -> break
    :: else ->
#ifdef WEAK_LISTENING
        late_listening[me] = true;
#else
        listening[me] = true;
#endif
        seen = bell[me];
#ifndef NO_SECOND_LOOK
        if
        :: possible
        :: else ->
#endif
            atomic {
                if
                :: bell[me] == seen -> asleep[me] = true /* the futex compares and queues in one step */
                :: else
                fi
            }
            !asleep[me];
#ifndef NO_SECOND_LOOK
        fi;
#endif
        !late_listening[me];
        listening[me] = false
    od
}

active proctype sender() {
    byte n, seen;
    for (n : 1 .. MESSAGES) {
        sleep_until(SENDER, tail - head < ROOM);
        atomic { late[(n - 1) % ROOM] = n; on_their_way++ }
#ifndef NO_RELEASE
        late[(n - 1) % ROOM] == 0;
#endif
        tail++;
        ring_bell(RECEIVER)
    }
    finished++
}

active proctype receiver() {
    byte n, seen;
    for (n : 1 .. MESSAGES) {
        sleep_until(RECEIVER, tail - head > 0);
        assert(ring[(n - 1) % ROOM] == n);
        head++;
        ring_bell(SENDER)
    }
    finished++
}
