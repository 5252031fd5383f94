/* Delivery: moves the bytes of messages between jobs and rings.
 *
 * For each ordered pair of ranks there is a ring of bytes in the control segment. A message is a header and its bytes,
 * as many at a time as there is room for.
 *
 * [Note: bells]
 * A rank that has moved a ring's counter looks whether the rank at the other end listens, and if so rings its bell. A
 * rank that wants to sleep first says that it listens, then looks at its rings once more. Counters and `listening` are
 * sequentially consistent, so one of the two sees the other (the argument of [Note: sleepers] in round.c). The bell
 * itself counts, so the futex notices if it is rung between the last look and the sleep.
 *
 * [Note: stash]
 * Messages of a pair come in the order they were sent, and are wanted in any order (by tag). A message that no recv is
 * waiting for stays in the ring, and its sender waits, until there is a recv that looks for another message from that
 * rank. Then it is moved aside, to the heap.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fault.h"
#include "post.h"
#include "ring.h"
#include "wait.h"

void pl_post_end(pl_post *post, pl_job *job) {
    pl_job_settle(job);
    post->pending--;
    pthread_cond_broadcast(&post->finished);
    pl_job_release(job);
}

/* -- bells --------------------------------------------------------------------------------------------------------- */

static void ring_bell(pl_seat *seat) {
    if (!atomic_load_explicit(&seat->listening, memory_order_seq_cst)) return;
    atomic_fetch_add_explicit(&seat->bell, 1, memory_order_seq_cst);
    pl_wake_all(&seat->bell);
}

void pl_ring_all_bells(pl_endpoint *ep) {
    for (int r = 0; r < ep->size; r++) ring_bell(pl_seat_of(ep, r));
}

/* -- rings --------------------------------------------------------------------------------------------------------- */

/* Always false: nothing can be moved. */
static int ring_overwritten(pl_endpoint *ep, int from, int to) {
    return pl_overwritten(ep, NULL, "the ring from rank %d to rank %d", ep->names[from], ep->names[to]);
}

/* -- sending ------------------------------------------------------------------------------------------------------- */

/* Send as much of a message as there is room for, its header first. False if there is no room. */
static int send_some(pl_endpoint *ep, pl_job *job, pl_ring *ring, uint64_t *sent) {
    uint64_t room, before = job->done_bytes;
    int moved = 0;
    if (!ring_room(ep, ring, *sent, &room)) return ring_overwritten(ep, ep->rank, job->peer);
    if (!job->announced && room >= sizeof(message_header)) {
        message_header header = {.nbytes = job->count, .tag = job->tag};
        header.check = header_check(&header, *sent);
        ring_write(ep, ring, sent, &header, sizeof header);
        room -= sizeof header;
        job->announced = moved = 1;
    }
    if (job->announced && room && job->done_bytes < job->count) {
        uint64_t left = job->count - job->done_bytes, n = left < room ? left : room;
        ring_write(ep, ring, sent, job->src + job->done_bytes, n);
        job->done_bytes += n;
    }
    return moved || job->done_bytes != before;
}

static int push_out(pl_endpoint *ep, pl_post *post, int to) {
    pl_ring *ring = pl_ring_between(ep, ep->rank, to);
    int moved = 0;
    for (pl_job *job; (job = post->sends[to].first) && send_some(ep, job, ring, &post->sent[to]);) {
        moved = 1;
        pl_fault(PL_AT_SENDING);
        if (job->done_bytes < job->count) break;
        pl_list_remove(&post->sends[to], job);
        pl_post_end(post, job);
    }
    if (moved) ring_bell(pl_seat_of(ep, to));
    return moved;
}

/* -- receiving ----------------------------------------------------------------------------------------------------- */

static int fits(const pl_job *recv, int source, int64_t tag) {
    return recv->tag == tag && (recv->peer == source || recv->peer < 0);
}

static pl_job *match(pl_post *post, int source, int64_t tag) {
    for (pl_job *job = post->recvs.first; job; job = job->next)
        if (fits(job, source, tag)) {
            pl_list_remove(&post->recvs, job);
            return job;
        }
    return NULL;
}

/* Is there a recv that may want what comes from `source`? If not, the bytes stay in the ring. */
static int is_looked_for(const pl_post *post, int source) {
    const incoming *in = &post->in[source];
    if (in->active && (in->into || (in->aside && in->aside->taker))) return 1;
    for (const pl_job *job = post->recvs.first; job; job = job->next)
        if (job->peer == source || job->peer < 0) return 1;
    return 0;
}

static int has_right_size(pl_endpoint *ep, pl_job *recv, int source, uint64_t nbytes) {
    recv->source = source;
    if (recv->count == nbytes) return 1;
    pl_job_fail(recv, PL_DISAGREED, ep->names[source], "rank %d sent %llu bytes to rank %d, which receives %llu",
                ep->names[source], (unsigned long long)nbytes, ep->names[ep->rank], (unsigned long long)recv->count);
    return 0;
}

static void remove_stashed(pl_post *post, stashed *message) {
    for (stashed **at = &post->aside; *at; at = &(*at)->next)
        if (*at == message) {
            *at = message->next;
            break;
        }
    free(message);
}

/* Nobody knows where the next message begins, so that all that is in the ring, and comes, is dropped. */
static void drop_all(pl_endpoint *ep, int source, incoming *in) {
    ring_overwritten(ep, source, ep->rank);
    in->header.nbytes = UINT64_MAX;
}

static void put_aside(pl_endpoint *ep, pl_post *post, int source, incoming *in) {
    stashed **at = &post->aside;
    if (in->header.nbytes > ep->most_bytes) {
        drop_all(ep, source, in);
        return;
    }
    in->aside = malloc(sizeof(stashed) + in->header.nbytes);
    if (!in->aside) {
        pl_set_poison(ep, PL_MEMORY, ep->names[ep->rank], "no memory to set aside a message that nobody waited for");
        return;
    }
    *in->aside = (stashed){.source = source, .tag = in->header.tag, .nbytes = in->header.nbytes};
    while (*at) at = &(*at)->next;
    *at = in->aside;
}

static void begin_message(pl_endpoint *ep, pl_post *post, int source, incoming *in) {
    pl_job *recv = match(post, source, in->header.tag);
    if (recv && has_right_size(ep, recv, source, in->header.nbytes)) in->into = recv;
    else if (recv) pl_post_end(post, recv);
    else put_aside(ep, post, source, in);
}

/* Give a stashed message to the recv that waits for it, if the message is complete and there is such a recv. */
static void hand_over(pl_post *post, stashed *message) {
    if (!message->complete || !message->taker) return;
    memcpy(message->taker->dst, message->bytes, message->nbytes);
    pl_post_end(post, message->taker);
    remove_stashed(post, message);
}

static void end_message(pl_post *post, incoming *in) {
    if (in->into) {
        pl_post_end(post, in->into);
    } else if (in->aside) {
        in->aside->complete = 1;
        hand_over(post, in->aside);
    }
    *in = (incoming){0};
}

static int pull_in(pl_endpoint *ep, pl_post *post, int source) {
    pl_ring *ring = pl_ring_between(ep, source, ep->rank);
    incoming *in = &post->in[source];
    uint64_t filled, *taken = &post->taken[source];
    int moved = 0;
    while (is_looked_for(post, source)) {
        if (!ring_filled(ep, ring, *taken, &filled)) return ring_overwritten(ep, source, ep->rank);
        if (!in->active) {
            if (filled < sizeof in->header) break;
            const uint64_t at = *taken;
            ring_read(ep, ring, taken, &in->header, sizeof in->header);
            filled -= sizeof in->header;
            in->active = moved = 1;
            if (in->header.check == header_check(&in->header, at)) begin_message(ep, post, source, in);
            else drop_all(ep, source, in);
        }
        uint64_t left = in->header.nbytes - in->done, n = left < filled ? left : filled;
        if (n) {
            unsigned char *to = in->into ? in->into->dst : in->aside ? in->aside->bytes : NULL;
            ring_read(ep, ring, taken, to ? to + in->done : NULL, n);
            in->done += n;
            moved = 1;
            pl_fault(PL_AT_RECEIVING);
        }
        if (in->done < in->header.nbytes) break;
        end_message(post, in);
    }
    if (moved) ring_bell(pl_seat_of(ep, source));
    return moved;
}

/* -- both ---------------------------------------------------------------------------------------------------------- */

int pl_post_move(pl_endpoint *ep, pl_post *post) {
    int moved = 0;
    for (int r = 0; r < ep->size; r++) {
        if (r == ep->rank) continue;
        if (post->sends[r].first) moved |= push_out(ep, post, r);
        moved |= pull_in(ep, post, r);
    }
    return moved;
}

void pl_post_sleep(pl_endpoint *ep, pl_post *post) {
    pl_seat *seat = pl_seat_of(ep, ep->rank);
    atomic_fetch_add_explicit(&seat->listening, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&seat->bell, memory_order_seq_cst);
    if (!pl_post_move(ep, post) && post->pending) {
        pthread_mutex_unlock(&post->lock);
        pl_sleep_on(&seat->bell, seen, PL_NAP_NS);
        pthread_mutex_lock(&post->lock);
    }
    atomic_fetch_sub_explicit(&seat->listening, 1, memory_order_seq_cst);
}

/* -- jobs that come and go ----------------------------------------------------------------------------------------- */

/* A recv may find its message among those set aside. */
static void add_recv(pl_endpoint *ep, pl_post *post, pl_job *job) {
    for (stashed *m = post->aside; m; m = m->next) {
        if (m->taker || !fits(job, m->source, m->tag)) continue;
        if (has_right_size(ep, job, m->source, m->nbytes)) {
            m->taker = job;
            hand_over(post, m);
        } else {
            pl_post_end(post, job);
            if (m->complete) remove_stashed(post, m);
        }
        return;
    }
    pl_list_add(&post->recvs, job);
}

void pl_post_add(pl_endpoint *ep, pl_post *post, pl_job *job) {
    if (job->form == PL_FORM_SEND) pl_list_add(&post->sends[job->peer], job);
    else add_recv(ep, post, job);
}

void pl_post_withdraw(pl_endpoint *ep, pl_post *post, pl_job *job) {
    if (job->form == PL_FORM_SEND) {
        pl_list_remove(&post->sends[job->peer], job);
        return;
    }
    pl_list_remove(&post->recvs, job);
    for (int r = 0; r < ep->size; r++)
        if (post->in[r].into == job) post->in[r].into = NULL;
    for (stashed *m = post->aside; m; m = m->next)
        if (m->taker == job) m->taker = NULL;
}
