/* Messages between two ranks: send and recv.
 *
 * For each ordered pair of ranks there is a ring of bytes in the control segment. A message is a header and its bytes,
 * as many at a time as there is room for. One thread of a rank at a time moves bytes, under the lock of its post: the
 * caller of send, recv or wait, else the post's own thread, which sleeps on this rank's bell.
 *
 * [Note: bells]
 * Who has moved a ring's counter looks whether the rank at its other end listens, and if so rings. Who wants to sleep
 * first says that it listens, then looks at its rings once more. Counters and `listening` are sequentially
 * consistent, so one of the two sees the other (the argument of [Note: sleepers] in round.c). The bell itself counts,
 * so a ring between the last look and the sleep is seen by the futex.
 *
 * [Note: stash]
 * Messages of a pair come in the order they were sent, and are wanted in any order (by tag). One that nobody waits for
 * stays in the ring, and the sender waits, until a recv is looking for another: then it is moved aside to the heap.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "channel.h"
#include "fault.h"
#include "ring.h"
#include "wait.h"

/* How long closing waits for ranks to take what was sent to them. */
#define CLOSE_NS INT64_C(10000000000)

typedef struct {
    uint64_t nbytes;
    int64_t tag;
} message_header;

typedef struct stashed {
    int source, complete;
    int64_t tag;
    uint64_t nbytes;
    pl_job *taker; /* a recv that waits for the rest of it */
    struct stashed *next;
    unsigned char bytes[];
} stashed;

/* What is being read out of a ring. */
typedef struct {
    int active;
    message_header header;
    uint64_t done;
    pl_job *into;   /* a recv; or */
    stashed *aside; /* the heap; or neither: the bytes are dropped */
} incoming;

typedef struct {
    pl_job *first, *last;
} job_list;

typedef struct pl_post {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* for the thread: a job is pending, or the end */
    pthread_cond_t finished; /* for those who wait */
    int closed;
    pthread_t thread;
    int pending;  /* jobs that have not ended */
    job_list sends[PL_MAX_RANKS];
    job_list recvs; /* not matched yet, in the order they were posted */
    incoming in[PL_MAX_RANKS];
    stashed *aside; /* in the order they came */
} pl_post;

/* -- lists ----------------------------------------------------------------------------------------------------------- */

static void add(job_list *list, pl_job *job) {
    job->next = NULL;
    if (list->last) list->last->next = job;
    else list->first = job;
    list->last = job;
}

static void take_out(job_list *list, pl_job *job) {
    pl_job *before = NULL;
    for (pl_job *j = list->first; j; before = j, j = j->next) {
        if (j != job) continue;
        if (before) before->next = j->next;
        else list->first = j->next;
        if (list->last == j) list->last = before;
        return;
    }
}

static void end(pl_post *post, pl_job *job) {
    pl_job_settle(job);
    post->pending--;
    pthread_cond_broadcast(&post->finished);
    pl_job_release(job);
}

/* -- bells ----------------------------------------------------------------------------------------------------------- */

static void ring_bell(pl_slot *slot) {
    if (!atomic_load_explicit(&slot->listening, memory_order_seq_cst)) return;
    atomic_fetch_add_explicit(&slot->bell, 1, memory_order_seq_cst);
    pl_wake_all(&slot->bell);
}

void pl_ring_all_bells(pl_channel *ch) {
    for (int r = 0; r < ch->size; r++) ring_bell(pl_slot_of(ch, r));
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

static int send_some(pl_channel *ch, pl_job *job, pl_ring *ring) {
    uint64_t room = ring_room(ch, ring), before = job->done_bytes;
    int moved = 0;
    if (!job->announced && room >= sizeof(message_header)) {
        message_header header = {.nbytes = job->count, .tag = job->tag};
        ring_write(ch, ring, &header, sizeof header);
        room -= sizeof header;
        job->announced = moved = 1;
    }
    if (job->announced && room && job->done_bytes < job->count) {
        uint64_t left = job->count - job->done_bytes, n = left < room ? left : room;
        ring_write(ch, ring, job->src + job->done_bytes, n);
        job->done_bytes += n;
    }
    return moved || job->done_bytes != before;
}

static int push_out(pl_channel *ch, pl_post *post, int to) {
    pl_ring *ring = pl_ring_between(ch, ch->rank, to);
    int moved = 0;
    for (pl_job *job; (job = post->sends[to].first) && send_some(ch, job, ring);) {
        moved = 1;
        pl_fault(PL_AT_SENDING);
        if (job->done_bytes < job->count) break;
        take_out(&post->sends[to], job);
        end(post, job);
    }
    if (moved) ring_bell(pl_slot_of(ch, to));
    return moved;
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

static int fits(const pl_job *recv, int source, int64_t tag) {
    return recv->tag == tag && (recv->peer == source || recv->peer < 0);
}

static pl_job *match(pl_post *post, int source, int64_t tag) {
    for (pl_job *job = post->recvs.first; job; job = job->next)
        if (fits(job, source, tag)) {
            take_out(&post->recvs, job);
            return job;
        }
    return NULL;
}

static int is_looked_for(const pl_post *post, int source) {
    if (post->in[source].active && (post->in[source].into || (post->in[source].aside && post->in[source].aside->taker)))
        return 1;
    for (const pl_job *job = post->recvs.first; job; job = job->next)
        if (job->peer == source || job->peer < 0) return 1;
    return 0;
}

static int has_right_size(pl_channel *ch, pl_job *recv, int source, uint64_t nbytes) {
    recv->source = source;
    if (recv->count == nbytes) return 1;
    pl_job_fail(recv, PL_DISAGREED, ch->names[source], "rank %d sent %llu bytes to rank %d, which receives %llu", ch->names[source],
                (unsigned long long)nbytes, ch->names[ch->rank], (unsigned long long)recv->count);
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

static void put_aside(pl_channel *ch, pl_post *post, int source, incoming *in) {
    stashed **at = &post->aside;
    in->aside = malloc(sizeof(stashed) + in->header.nbytes);
    if (!in->aside) {
        pl_set_poison(ch, PL_MEMORY, ch->names[ch->rank], "no memory to set a message aside that was not waited for");
        return;
    }
    *in->aside = (stashed){.source = source, .tag = in->header.tag, .nbytes = in->header.nbytes};
    while (*at) at = &(*at)->next;
    *at = in->aside;
}

static void begin_message(pl_channel *ch, pl_post *post, int source, incoming *in) {
    pl_job *recv = match(post, source, in->header.tag);
    if (recv && has_right_size(ch, recv, source, in->header.nbytes)) in->into = recv;
    else if (recv) end(post, recv);
    else put_aside(ch, post, source, in);
}

/* Give a stashed message that is complete to who waits for it. */
static void hand_over(pl_post *post, stashed *message) {
    if (!message->complete || !message->taker) return;
    memcpy(message->taker->dst, message->bytes, message->nbytes);
    end(post, message->taker);
    remove_stashed(post, message);
}

static void end_message(pl_post *post, incoming *in) {
    if (in->into) {
        end(post, in->into);
    } else if (in->aside) {
        in->aside->complete = 1;
        hand_over(post, in->aside);
    }
    *in = (incoming){0};
}

static int pull_in(pl_channel *ch, pl_post *post, int source) {
    pl_ring *ring = pl_ring_between(ch, source, ch->rank);
    incoming *in = &post->in[source];
    int moved = 0;
    while (is_looked_for(post, source)) {
        uint64_t filled = ring_filled(ring);
        if (!in->active) {
            if (filled < sizeof in->header) break;
            ring_read(ch, ring, &in->header, sizeof in->header);
            filled -= sizeof in->header;
            in->active = 1;
            begin_message(ch, post, source, in);
            moved = 1;
        }
        uint64_t left = in->header.nbytes - in->done, n = left < filled ? left : filled;
        if (n) {
            unsigned char *to = in->into ? in->into->dst : in->aside ? in->aside->bytes : NULL;
            ring_read(ch, ring, to ? to + in->done : NULL, n);
            in->done += n;
            moved = 1;
            pl_fault(PL_AT_RECEIVING);
        }
        if (in->done < in->header.nbytes) break;
        end_message(post, in);
    }
    if (moved) ring_bell(pl_slot_of(ch, source));
    return moved;
}

static int move_all(pl_channel *ch, pl_post *post) {
    int moved = 0;
    for (int r = 0; r < ch->size; r++) {
        if (r == ch->rank) continue;
        if (post->sends[r].first) moved |= push_out(ch, post, r);
        moved |= pull_in(ch, post, r);
    }
    return moved;
}

/* -- what ends a job otherwise ------------------------------------------------------------------------------------------ */

/* A recv that has begun leaves the rest of its message to be dropped; a send that has begun cannot be taken back. */
static void give_up(pl_channel *ch, pl_post *post, pl_job *job) {
    if (job->form == PL_FORM_SEND) {
        take_out(&post->sends[job->peer], job);
        if (job->announced) pl_set_poison(ch, (enum pl_status)job->outcome, ch->names[job->peer], job->message);
    } else {
        take_out(&post->recvs, job);
        for (int r = 0; r < ch->size; r++)
            if (post->in[r].into == job) post->in[r].into = NULL;
        for (stashed *m = post->aside; m; m = m->next)
            if (m->taker == job) m->taker = NULL;
    }
    end(post, job);
}

static int has_come_too_late(pl_channel *ch, pl_job *job) {
    if (job->deadline_ns == INT64_MAX || pl_now_ns() < job->deadline_ns) return 0;
    char who[24] = "any rank";
    if (job->peer >= 0) snprintf(who, sizeof who, "rank %d", ch->names[job->peer]);
    pl_job_fail(job, PL_TIMED_OUT, job->peer < 0 ? -1 : ch->names[job->peer],
                "rank %d waited %.3g s for %s %s a message of %llu bytes with tag %lld",
                ch->names[ch->rank], job->timeout_s, who, job->form == PL_FORM_SEND ? "to take" : "to send",
                (unsigned long long)job->count, (long long)job->tag);
    return 1;
}

/* Who waits for anybody does not mind that some have left, as long as others are there. */
static int can_do_without(const pl_channel *ch, int rank) {
    int others = 0;
    if (atomic_load(&pl_slot_of(ch, rank)->state) != PL_GONE) return 0;
    for (int r = 0; r < ch->size; r++) others += r != ch->rank && atomic_load(&pl_slot_of(ch, r)->state) != PL_GONE;
    return others > 0;
}

/* Poison and dead ranks are pl_still_fine's and pl_is_there's to find; the deadline is not, as a message that is late
 * need not end the group. */
static int is_hopeless(pl_channel *ch, pl_job *job) {
    if (has_come_too_late(ch, job)) return 1;
    int64_t deadline_ns = job->deadline_ns;
    job->deadline_ns = INT64_MAX;
    int fine = pl_still_fine(ch, job);
    for (int r = 0; fine && r < ch->size; r++)
        if (r != ch->rank && (job->peer == r || (job->peer < 0 && !can_do_without(ch, r)))) fine = pl_is_there(ch, job, r);
    job->deadline_ns = deadline_ns;
    return !fine;
}

static void check(pl_channel *ch, pl_post *post, pl_job *job) {
    if (job && is_hopeless(ch, job)) give_up(ch, post, job);
}

static void check_all(pl_channel *ch, pl_post *post) {
    /* A rank that has left may have sent before it did. */
    while (move_all(ch, post)) {}
    for (int r = 0; r < ch->size; r++) {
        for (pl_job *next, *job = post->sends[r].first; job; job = next) {
            next = job->next;
            check(ch, post, job);
        }
        check(ch, post, post->in[r].into);
    }
    for (pl_job *next, *job = post->recvs.first; job; job = next) {
        next = job->next;
        check(ch, post, job);
    }
    for (stashed *next, *m = post->aside; m; m = next) {
        next = m->next;
        check(ch, post, m->taker);
    }
}

/* -- the thread ------------------------------------------------------------------------------------------------------- */

static void sleep_on_bell(pl_channel *ch, pl_post *post) {
    pl_slot *slot = pl_slot_of(ch, ch->rank);
    atomic_fetch_add_explicit(&slot->listening, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&slot->bell, memory_order_seq_cst);
    if (!move_all(ch, post) && post->pending) {
        pthread_mutex_unlock(&post->lock);
        pl_sleep_on(&slot->bell, seen, PL_NAP_NS);
        pthread_mutex_lock(&post->lock);
    }
    atomic_fetch_sub_explicit(&slot->listening, 1, memory_order_seq_cst);
}

static void *carry(void *argument) {
    pl_channel *ch = argument;
    pl_post *post = ch->post;
    int64_t checked = pl_now_ns();
    pthread_mutex_lock(&post->lock);
    for (;;) {
        while (!post->pending && !post->closed) pthread_cond_wait(&post->work, &post->lock);
        if (!post->pending) break;
        sleep_on_bell(ch, post);
        move_all(ch, post);
        int64_t now = pl_now_ns();
        if (now - checked >= PL_NAP_NS || pl_is_poisoned(ch)) {
            check_all(ch, post);
            checked = now;
        }
    }
    pthread_mutex_unlock(&post->lock);
    return NULL;
}

/* -- asking ----------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static pl_post *new_post(void) {
    pl_post *post = calloc(1, sizeof *post);
    pthread_condattr_t monotonic;
    if (!post) return NULL;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&post->lock, NULL);
    pthread_cond_init(&post->work, &monotonic);
    pthread_cond_init(&post->finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return post;
}

static void free_post(pl_post *post) {
    pthread_cond_destroy(&post->work);
    pthread_cond_destroy(&post->finished);
    pthread_mutex_destroy(&post->lock);
    free(post);
}

/* Made at the first message: most groups never send one. Not for a message that races with the group's end, which has
 * looked for a thread to end and found none. */
static pl_post *post_of(pl_channel *ch) {
    pthread_mutex_lock(&making);
    if (!ch->post && !ch->post_closed && (ch->post = new_post()) != NULL)
        if (!pl_start_thread(&ch->post->thread, carry, ch)) {
            free_post(ch->post);
            ch->post = NULL;
        }
    pl_post *post = ch->post;
    pthread_mutex_unlock(&making);
    return post;
}

static int is_closed(pl_channel *ch) {
    pthread_mutex_lock(&making);
    const int closed = ch->post_closed;
    pthread_mutex_unlock(&making);
    return closed;
}

/* A recv may find its message among those set aside. */
static void add_recv(pl_channel *ch, pl_post *post, pl_job *job) {
    for (stashed *m = post->aside; m; m = m->next) {
        if (m->taker || !fits(job, m->source, m->tag)) continue;
        if (has_right_size(ch, job, m->source, m->nbytes)) {
            m->taker = job;
            hand_over(post, m);
        } else {
            end(post, job);
            if (m->complete) remove_stashed(post, m);
        }
        return;
    }
    add(&post->recvs, job);
}

static pl_job *submit(pl_channel *ch, pl_job *like) {
    pl_job *refusal = pl_refusal(ch);
    if (refusal) return refusal;
    pl_post *post = post_of(ch);
    if (!post && is_closed(ch)) return pl_job_refused(ch, PL_CLOSED, "this rank has closed the group");
    if (!post) return pl_job_refused(ch, PL_MEMORY, "no memory for messages");
    pl_job *job = pl_job_new(like);
    if (pl_job_status(job) != PL_PENDING) return job;
    pl_job_start(job, 0);
    pthread_mutex_lock(&post->lock);
    if (post->closed || !pl_still_fine(ch, job)) {
        if (post->closed) pl_job_fail(job, PL_CLOSED, -1, "this rank has closed the group");
        post->pending++;
        end(post, job);
    } else {
        if (!post->pending++) pthread_cond_signal(&post->work);
        if (job->form == PL_FORM_SEND) add(&post->sends[job->peer], job);
        else add_recv(ch, post, job);
        move_all(ch, post);
    }
    pthread_mutex_unlock(&post->lock);
    return job;
}

static pl_job new_message(pl_channel *ch, enum pl_form form, uint64_t nbytes, int peer, int64_t tag, double timeout_s) {
    return (pl_job){.channel = ch, .form = form, .count = nbytes, .peer = peer, .tag = tag, .timeout_s = timeout_s,
                    .blamed = -1, .source = -1};
}

pl_job *pl_send(pl_channel *ch, const void *src, uint64_t nbytes, int to, int64_t tag, double timeout_s) {
    if (to < 0 || to >= ch->size || to == ch->rank) return pl_job_refused(ch, PL_ARGUMENT, "send: no such rank");
    pl_job job = new_message(ch, PL_FORM_SEND, nbytes, to, tag, timeout_s);
    job.src = src;
    return submit(ch, &job);
}

pl_job *pl_recv(pl_channel *ch, void *dst, uint64_t nbytes, int from, int64_t tag, double timeout_s) {
    if (from >= ch->size || from == ch->rank) return pl_job_refused(ch, PL_ARGUMENT, "recv: no such rank");
    pl_job job = new_message(ch, PL_FORM_RECV, nbytes, from < 0 ? -1 : from, tag, timeout_s);
    job.dst = dst;
    return submit(ch, &job);
}

/* -- waiting, closing --------------------------------------------------------------------------------------------------- */

int pl_post_wait(pl_job *job, double timeout_s) {
    pl_channel *ch = job->channel;
    pl_post *post = ch->post;
    int interrupted = 0;
    pthread_mutex_lock(&post->lock);
    /* The segment is there while a message is pending. */
    if (pl_job_status(job) == PL_PENDING) pl_settle_spin(ch);
    const int64_t now = pl_now_ns(), spin_end = now + atomic_load(&ch->inline_spin_ns);
    const int64_t end_ns = timeout_s < 1e9 ? now + (int64_t)(timeout_s * 1e9) : INT64_MAX;
    /* A peer that answers at once is answered without a thread switch. */
    while (pl_job_status(job) == PL_PENDING && pl_now_ns() < spin_end) {
        if (move_all(ch, post)) continue;
        pthread_mutex_unlock(&post->lock);
        pl_pause();
        pthread_mutex_lock(&post->lock);
    }
    while (pl_job_status(job) == PL_PENDING && pl_nap(&post->finished, &post->lock, end_ns, &interrupted)) {}
    pthread_mutex_unlock(&post->lock);
    return interrupted && pl_job_status(job) == PL_PENDING ? PL_INTERRUPTED : pl_job_status(job);
}

static pl_job *any_send(const pl_channel *ch, const pl_post *post) {
    for (int r = 0; r < ch->size; r++)
        if (post->sends[r].first) return post->sends[r].first;
    return NULL;
}

static void drop(pl_channel *ch, pl_post *post, pl_job *job) {
    if (!job) return;
    pl_job_fail(job, PL_CLOSED, -1, "rank %d has closed the group before the message was through", ch->names[ch->rank]);
    give_up(ch, post, job);
}

/* What was sent is delivered to the ring; what was not received will not be. */
void pl_post_close(pl_channel *ch) {
    const int64_t end_ns = pl_now_ns() + CLOSE_NS;
    const struct timespec until = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    pthread_mutex_lock(&making);
    ch->post_closed = 1;
    pl_post *post = ch->post;
    pthread_mutex_unlock(&making);
    if (!post) return;
    pthread_mutex_lock(&post->lock);
    post->closed = 1;
    while (post->recvs.first) drop(ch, post, post->recvs.first);
    for (int r = 0; r < ch->size; r++) drop(ch, post, post->in[r].into);
    for (stashed *m = post->aside; m; m = m->next) drop(ch, post, m->taker);
    while (any_send(ch, post))
        if (pthread_cond_timedwait(&post->finished, &post->lock, &until) != 0) drop(ch, post, any_send(ch, post));
    pthread_cond_broadcast(&post->work);
    pthread_mutex_unlock(&post->lock);
    pthread_join(post->thread, NULL);
}

void pl_post_free(pl_channel *ch) {
    pl_post *post = ch->post;
    if (!post) return;
    while (post->aside) remove_stashed(post, post->aside);
    free_post(post);
}
