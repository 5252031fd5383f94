/* Messages between two ranks: send and recv, as they are asked for, waited for and given up.
 *
 * One thread of a rank at a time moves bytes (delivery.c), under the lock of the rank's post: the caller of send, recv
 * or wait, or else the post's own thread, which sleeps on this rank's bell.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "post.h"
#include "wait.h"

/* How long closing waits for ranks to take what was sent to them. */
#define CLOSE_NS INT64_C(10000000000)

/* -- what ends a job otherwise ------------------------------------------------------------------------------------- */

/* A send that has begun cannot be taken back, as part of it is in the ring: the group is given up with it. */
static void give_up(pl_endpoint *ep, pl_post *post, pl_job *job) {
    pl_post_withdraw(ep, post, job);
    if (job->form == PL_FORM_SEND && job->announced)
        pl_set_poison(ep, (enum pl_status)job->outcome, ep->names[job->peer], job->message);
    pl_post_end(post, job);
}

static int has_come_too_late(pl_endpoint *ep, pl_job *job) {
    if (job->deadline_ns == INT64_MAX || pl_now_ns() < job->deadline_ns) return 0;
    char who[24] = "any rank";
    if (job->peer >= 0) snprintf(who, sizeof who, "rank %d", ep->names[job->peer]);
    pl_job_fail(job, PL_TIMED_OUT, job->peer < 0 ? -1 : ep->names[job->peer],
                "rank %d waited %.3g s for %s %s a message of %llu bytes with tag %lld",
                ep->names[ep->rank], job->timeout_s, who, job->form == PL_FORM_SEND ? "to take" : "to send",
                (unsigned long long)job->count, (long long)job->tag);
    return 1;
}

/* A recv from any rank goes on when one rank has left the group, as long as others are there. */
static int can_do_without(const pl_endpoint *ep, int rank) {
    int others = 0;
    if (atomic_load(&pl_seat_of(ep, rank)->state) != PL_GONE) return 0;
    for (int r = 0; r < ep->size; r++) others += r != ep->rank && atomic_load(&pl_seat_of(ep, r)->state) != PL_GONE;
    return others > 0;
}

/* pl_still_fine and pl_is_there find poison and dead ranks. The deadline is kept from them: they would poison the group
 * for it, and a message that is late need not end the group. */
static int is_hopeless(pl_endpoint *ep, pl_job *job) {
    if (has_come_too_late(ep, job)) return 1;
    int64_t deadline_ns = job->deadline_ns;
    job->deadline_ns = INT64_MAX;
    int fine = pl_still_fine(ep, job);
    for (int r = 0; fine && r < ep->size; r++)
        if (r != ep->rank && (job->peer == r || (job->peer < 0 && !can_do_without(ep, r))))
            fine = pl_is_there(ep, job, r);
    job->deadline_ns = deadline_ns;
    return !fine;
}

static void check(pl_endpoint *ep, pl_post *post, pl_job *job) {
    if (job && is_hopeless(ep, job)) give_up(ep, post, job);
}

static void check_all(pl_endpoint *ep, pl_post *post) {
    /* A rank that has left may have sent before it did. */
    while (pl_post_move(ep, post)) {}
    for (int r = 0; r < ep->size; r++) {
        for (pl_job *next, *job = post->sends[r].first; job; job = next) {
            next = job->next;
            check(ep, post, job);
        }
        check(ep, post, post->in[r].into);
    }
    for (pl_job *next, *job = post->recvs.first; job; job = next) {
        next = job->next;
        check(ep, post, job);
    }
    for (stashed *next, *m = post->aside; m; m = next) {
        next = m->next;
        check(ep, post, m->taker);
    }
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

static void *carry(void *argument) {
    pl_endpoint *ep = argument;
    pl_post *post = ep->post;
    int64_t checked = pl_now_ns();
    pthread_mutex_lock(&post->lock);
    for (;;) {
        while (!post->pending && !post->closed) pthread_cond_wait(&post->work, &post->lock);
        if (!post->pending) break;
        pl_post_sleep(ep, post);
        pl_post_move(ep, post);
        int64_t now = pl_now_ns();
        if (now - checked >= PL_NAP_NS || pl_is_poisoned(ep)) {
            check_all(ep, post);
            checked = now;
        }
    }
    pthread_mutex_unlock(&post->lock);
    return NULL;
}

/* -- asking -------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static pl_post *new_post(void) {
    pl_post *post = calloc(1, sizeof *post);
    if (!post) return NULL;
    pthread_mutex_init(&post->lock, NULL);
    pl_condition_init(&post->work);
    pl_condition_init(&post->finished);
    return post;
}

static void free_post(pl_post *post) {
    for (stashed *next, *m = post->aside; m; m = next) {
        next = m->next;
        free(m);
    }
    pthread_cond_destroy(&post->work);
    pthread_cond_destroy(&post->finished);
    pthread_mutex_destroy(&post->lock);
    free(post);
}

/* The post is made at the first message, as most groups never send one. It is not made after pl_post_close has looked
 * for one, since nobody would end its thread. */
static pl_post *post_of(pl_endpoint *ep) {
    pthread_mutex_lock(&making);
    if (!ep->post && !ep->post_closed && (ep->post = new_post()) != NULL)
        if (!pl_start_thread(&ep->post->thread, carry, ep)) {
            free_post(ep->post);
            ep->post = NULL;
        }
    pl_post *post = ep->post;
    pthread_mutex_unlock(&making);
    return post;
}

static int is_closed(pl_endpoint *ep) {
    pthread_mutex_lock(&making);
    const int closed = ep->post_closed;
    pthread_mutex_unlock(&making);
    return closed;
}

static pl_job *submit(pl_endpoint *ep, pl_job *like) {
    pl_job *refusal = pl_refusal(ep);
    if (refusal) return refusal;
    pl_post *post = post_of(ep);
    if (!post && is_closed(ep)) return pl_job_refused(ep, PL_CLOSED, "this rank has closed the group");
    if (!post) return pl_job_refused(ep, PL_MEMORY, "no memory for messages");
    pl_job *job = pl_job_new(like);
    if (pl_job_status(job) != PL_PENDING) return job;
    pl_job_start(job, 0);
    pthread_mutex_lock(&post->lock);
    if (post->closed || !pl_still_fine(ep, job)) {
        if (post->closed) pl_job_fail(job, PL_CLOSED, -1, "this rank has closed the group");
        post->pending++;
        pl_post_end(post, job);
    } else {
        if (!post->pending++) pthread_cond_signal(&post->work);
        pl_post_add(ep, post, job);
        pl_post_move(ep, post);
    }
    pthread_mutex_unlock(&post->lock);
    return job;
}

static pl_job new_message(pl_endpoint *ep, enum pl_form form, uint64_t nbytes, int peer, int64_t tag,
                          double timeout_s) {
    return (pl_job){.endpoint = ep, .form = form, .count = nbytes, .peer = peer, .tag = tag, .timeout_s = timeout_s,
                    .blamed = -1, .source = -1};
}

pl_job *pl_send(pl_endpoint *ep, const void *src, uint64_t nbytes, int to, int64_t tag, double timeout_s) {
    if (to < 0 || to >= ep->size || to == ep->rank) return pl_job_refused(ep, PL_ARGUMENT, "send: no such rank");
    pl_job job = new_message(ep, PL_FORM_SEND, nbytes, to, tag, timeout_s);
    job.src = src;
    return submit(ep, &job);
}

pl_job *pl_recv(pl_endpoint *ep, void *dst, uint64_t nbytes, int from, int64_t tag, double timeout_s) {
    if (from >= ep->size || from == ep->rank) return pl_job_refused(ep, PL_ARGUMENT, "recv: no such rank");
    pl_job job = new_message(ep, PL_FORM_RECV, nbytes, from < 0 ? -1 : from, tag, timeout_s);
    job.dst = dst;
    return submit(ep, &job);
}

/* -- waiting, closing ---------------------------------------------------------------------------------------------- */

int pl_post_wait(pl_job *job, double timeout_s) {
    pl_endpoint *ep = job->endpoint;
    pl_post *post = ep->post;
    int interrupted = 0;
    pthread_mutex_lock(&post->lock);
    /* If the job has ended, the group may be closed and the segment gone. */
    if (pl_job_status(job) == PL_PENDING) pl_settle_spin(ep);
    const int64_t now = pl_now_ns(), spin_end = now + atomic_load(&ep->inline_spin_ns);
    const int64_t end_ns = timeout_s < 1e9 ? now + (int64_t)(timeout_s * 1e9) : INT64_MAX;
    /* A peer that answers at once is answered without a thread switch. */
    while (pl_job_status(job) == PL_PENDING && pl_now_ns() < spin_end) {
        if (pl_post_move(ep, post)) continue;
        pthread_mutex_unlock(&post->lock);
        pl_pause();
        pthread_mutex_lock(&post->lock);
    }
    while (pl_job_status(job) == PL_PENDING && pl_nap(&post->finished, &post->lock, end_ns, &interrupted)) {}
    pthread_mutex_unlock(&post->lock);
    return interrupted && pl_job_status(job) == PL_PENDING ? PL_INTERRUPTED : pl_job_status(job);
}

static pl_job *any_send(const pl_endpoint *ep, const pl_post *post) {
    for (int r = 0; r < ep->size; r++)
        if (post->sends[r].first) return post->sends[r].first;
    return NULL;
}

static void drop(pl_endpoint *ep, pl_post *post, pl_job *job) {
    if (!job) return;
    pl_job_fail(job, PL_CLOSED, -1, "rank %d closed the group before the message was through", ep->names[ep->rank]);
    give_up(ep, post, job);
}

/* Recvs are given up at once. Sends go on until all their bytes are in the rings, for CLOSE_NS at most. */
void pl_post_close(pl_endpoint *ep) {
    const int64_t end_ns = pl_now_ns() + CLOSE_NS;
    const struct timespec until = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    pthread_mutex_lock(&making);
    ep->post_closed = 1;
    pl_post *post = ep->post;
    pthread_mutex_unlock(&making);
    if (!post) return;
    pthread_mutex_lock(&post->lock);
    post->closed = 1;
    while (post->recvs.first) drop(ep, post, post->recvs.first);
    for (int r = 0; r < ep->size; r++) drop(ep, post, post->in[r].into);
    for (stashed *m = post->aside; m; m = m->next) drop(ep, post, m->taker);
    while (any_send(ep, post))
        if (pthread_cond_timedwait(&post->finished, &post->lock, &until) != 0) drop(ep, post, any_send(ep, post));
    pthread_cond_broadcast(&post->work);
    pthread_mutex_unlock(&post->lock);
    pthread_join(post->thread, NULL);
}

void pl_post_free(pl_endpoint *ep) {
    if (ep->post) free_post(ep->post);
}
