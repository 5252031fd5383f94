/* Jobs: what the kernel was asked to do. The queue of collectives, and the thread that works through it. */
#define _GNU_SOURCE
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "endpoint.h"
#include "fold.h"
#include "wait.h"

/* -- a job --------------------------------------------------------------------------------------------------------- */

/* What is handed out when there is no memory for a job. Nobody frees it. */
static pl_job no_memory = {.status = PL_MEMORY, .blamed = -1, .source = -1, .references = INT_MAX / 2,
                           .message = "out of memory in the shared-memory kernel"};

void pl_job_fail(pl_job *job, enum pl_status status, int blamed, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(job->message, sizeof job->message, format, arguments);
    va_end(arguments);
    job->outcome = (int)status;
    job->blamed = blamed;
}

void pl_job_start(pl_job *job, int64_t spin_ns) {
    const int forever = !(job->timeout_s > 0 && job->timeout_s < 1e9);
    job->deadline_ns = forever ? INT64_MAX : pl_now_ns() + (int64_t)(job->timeout_s * 1e9);
    job->spin_ns = spin_ns;
}

static uint64_t table_length(const pl_job *job) {
    return job->form == PL_FORM_EXCHANGE || job->form == PL_FORM_REDUCE_EXCHANGE ? (uint64_t)job->endpoint->size : 0;
}

/* Tables are copied because the caller's arrays are gone when the call returns. */
static const uint64_t *copy_table(uint64_t *to, const uint64_t *from, uint64_t n) {
    if (from) memcpy(to, from, n * sizeof *to);
    return from ? to : NULL;
}

pl_job *pl_job_new(const pl_job *like) {
    const uint64_t n = table_length(like), n_sends = like->same ? 1 : n;
    pl_job *job = malloc(sizeof *job + 4 * n * sizeof(uint64_t));
    if (!job) return &no_memory;
    memcpy(job, like, sizeof *job);
    job->sends = copy_table(job->tables, like->sends, n_sends);
    job->send_sizes = copy_table(job->tables + n, like->send_sizes, n_sends);
    job->recvs = copy_table(job->tables + 2 * n, like->recvs, n);
    job->recv_sizes = copy_table(job->tables + 3 * n, like->recv_sizes, n);
    atomic_init(&job->references, 2);
    atomic_init(&job->status, PL_PENDING);
    atomic_fetch_add_explicit(&job->endpoint->references, 1, memory_order_relaxed);
    return job;
}

void pl_job_release(pl_job *job) {
    if (job == &no_memory || atomic_fetch_sub_explicit(&job->references, 1, memory_order_acq_rel) != 1) return;
    pl_endpoint_release(job->endpoint);
    free(job->gathered);
    free(job);
}

/* The kernel is done with the job. This is a release: after reading the status one may read the rest, and tensors. */
void pl_job_settle(pl_job *job) { atomic_store_explicit(&job->status, job->outcome, memory_order_release); }

/* A copy of a job that has failed on its caller's stack. It belongs to the caller alone. */
static pl_job *kept(const pl_job *failed) {
    pl_job *job = pl_job_new(failed);
    if (job == &no_memory) return job;
    pl_job_settle(job);
    pl_job_release(job);
    return job;
}

pl_job *pl_job_refused(pl_endpoint *ep, enum pl_status status, const char *text) {
    pl_job job = {.endpoint = ep, .source = -1};
    pl_job_fail(&job, status, -1, "%s", text);
    return kept(&job);
}

int pl_job_status(pl_job *job) { return atomic_load_explicit(&job->status, memory_order_acquire); }
const char *pl_job_message(pl_job *job) { return job->message; }
int pl_job_rank(pl_job *job) { return job->blamed; }
int pl_job_source(pl_job *job) { return job->source; }

const void *pl_job_part(pl_job *job, int rank, uint64_t *nbytes) {
    *nbytes = job->recv_sizes[rank];
    return (const void *)job->recvs[rank];
}

void pl_list_add(pl_job_list *list, pl_job *job) {
    job->next = NULL;
    if (list->last) list->last->next = job;
    else list->first = job;
    list->last = job;
}

void pl_list_remove(pl_job_list *list, pl_job *job) {
    pl_job *before = NULL;
    for (pl_job *j = list->first; j; before = j, j = j->next) {
        if (j != job) continue;
        if (before) before->next = j->next;
        else list->first = j->next;
        if (list->last == j) list->last = before;
        return;
    }
}

/* -- the queue ----------------------------------------------------------------------------------------------------- */

void pl_queue_init(pl_queue *q) {
    pthread_mutex_init(&q->lock, NULL);
    pl_condition_init(&q->work);
    pl_condition_init(&q->progress);
}

void pl_queue_free(pl_queue *q) {
    pthread_cond_destroy(&q->work);
    pthread_cond_destroy(&q->progress);
    pthread_mutex_destroy(&q->lock);
}

/* These are called with the lock held, and return with it held. */

static void give_turn_back(pl_queue *q) {
    q->taken = 0;
    if (q->waiting) pthread_cond_broadcast(&q->progress);
    if (q->jobs.first || q->closed) pthread_cond_signal(&q->work);
}

static void run_first(pl_endpoint *ep, int64_t spin_ns) {
    pl_queue *q = &ep->queue;
    pl_job *job = q->jobs.first;
    pl_list_remove(&q->jobs, job);
    q->taken = 1;
    pthread_mutex_unlock(&q->lock);
    pl_job_start(job, spin_ns);
    pl_run(ep, job);
    pthread_mutex_lock(&q->lock);
    pl_job_settle(job);
    give_turn_back(q);
    pl_job_release(job);
}

static void *work(void *argument) {
    pl_endpoint *ep = argument;
    pl_queue *q = &ep->queue;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (q->taken || (!q->jobs.first && !q->closed)) pthread_cond_wait(&q->work, &q->lock);
        if (!q->jobs.first) break;
        run_first(ep, atomic_load_explicit(&ep->worker_spin_ns, memory_order_relaxed));
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* Signals are for the threads of the program, which knows what to do about them. */
int pl_start_thread(pthread_t *thread, void *(*function)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(thread, NULL, function, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !failed;
}

static _Atomic(int (*)(void)) asked_for_interrupts;

void pl_on_interrupt(int (*is_interrupted)(void)) { atomic_store(&asked_for_interrupts, is_interrupted); }

int pl_is_interrupted(void) {
    int (*ask)(void) = atomic_load(&asked_for_interrupts);
    return ask && ask();
}

void pl_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

int pl_nap(pthread_cond_t *on, pthread_mutex_t *lock, int64_t end_ns, int *interrupted) {
    const int64_t soon_ns = pl_now_ns() + PL_NAP_NS, until_ns = soon_ns < end_ns ? soon_ns : end_ns;
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    if (pthread_cond_timedwait(on, lock, &until) == 0) return 1;
    if (until_ns == end_ns) return 0;
    pthread_mutex_unlock(lock);
    *interrupted = pl_is_interrupted();
    pthread_mutex_lock(lock);
    return !*interrupted;
}

/* Wait until the job has ended or the time is up. True if the thread was interrupted instead; the job then goes on
 * without it. A thread that waits without limit takes the turn when it is free. That saves the switch back from the
 * worker's thread, and often also the one to it, if a job is waited for as soon as it is made. */
static int wait_locked(pl_endpoint *ep, pl_job *job, double timeout_s) {
    pl_queue *q = &ep->queue;
    const int limited = timeout_s < 1e9;
    const int64_t end_ns = limited ? pl_now_ns() + (int64_t)(timeout_s * 1e9) : INT64_MAX;
    int interrupted = 0;
    q->waiting++;
    while (pl_job_status(job) == PL_PENDING) {
        if (!limited && !q->taken && q->jobs.first)
            run_first(ep, atomic_load_explicit(&ep->inline_spin_ns, memory_order_relaxed));
        else if (!pl_nap(&q->progress, &q->lock, end_ns, &interrupted))
            break;
    }
    q->waiting--;
    return interrupted && pl_job_status(job) == PL_PENDING;
}

static pl_job *run_here(pl_endpoint *ep, pl_job *job) {
    pl_queue *q = &ep->queue;
    q->taken = 1;
    pthread_mutex_unlock(&q->lock);
    pl_job_start(job, atomic_load_explicit(&ep->inline_spin_ns, memory_order_relaxed));
    pl_run(ep, job);
    pthread_mutex_lock(&q->lock);
    give_turn_back(q);
    pthread_mutex_unlock(&q->lock);
    return job->outcome == PL_OK ? NULL : kept(job);
}

/* Jobs run in the order in which they are submitted. The lock makes that one order, whatever threads submit them. */
static pl_job *submit(pl_endpoint *ep, pl_job *job, int run_inline) {
    pl_queue *q = &ep->queue;
    pl_job *refusal = pl_refusal(ep);
    if (refusal) return refusal;
    pthread_mutex_lock(&q->lock);
    if (q->closed) {
        pthread_mutex_unlock(&q->lock);
        return pl_job_refused(ep, PL_CLOSED, "this rank has closed the group");
    }
    /* This comes only now, because the segment of a closed group may be gone. */
    pl_settle_spin(ep);
    if (run_inline && !q->taken && !q->jobs.first) return run_here(ep, job);
    if (!q->has_worker) q->has_worker = pl_start_thread(&q->worker, work, ep);
    pl_job *queued = q->has_worker ? pl_job_new(job) : &no_memory;
    if (queued != &no_memory) {
        pl_list_add(&q->jobs, queued);
        if (!q->taken) pthread_cond_signal(&q->work);
        if (run_inline) wait_locked(ep, queued, INFINITY);
    }
    pthread_mutex_unlock(&q->lock);
    if (!run_inline || pl_job_status(queued) != PL_OK) return queued;
    pl_job_release(queued);
    return NULL;
}

int pl_job_wait(pl_job *job, double timeout_s) {
    if (pl_job_status(job) != PL_PENDING) return pl_job_status(job);
    if (pl_is_forked(job->endpoint)) {
        /* This is a copy of the parent's job, which nobody but us looks at. */
        pl_job_fail(job, PL_FORKED, -1, "%s", pl_forked);
        return PL_FORKED;
    }
    if (job->form == PL_FORM_SEND || job->form == PL_FORM_RECV) return pl_post_wait(job, timeout_s);
    pthread_mutex_lock(&job->endpoint->queue.lock);
    const int interrupted = wait_locked(job->endpoint, job, timeout_s);
    pthread_mutex_unlock(&job->endpoint->queue.lock);
    return interrupted ? PL_INTERRUPTED : pl_job_status(job);
}

void pl_queue_close(pl_endpoint *ep) {
    pl_queue *q = &ep->queue;
    pthread_mutex_lock(&q->lock);
    q->closed = 1;
    pthread_cond_broadcast(&q->work);
    /* A caller on another thread may have the turn. */
    q->waiting++;
    while (q->taken || q->jobs.first) pthread_cond_wait(&q->progress, &q->lock);
    q->waiting--;
    pthread_mutex_unlock(&q->lock);
    if (q->has_worker) pthread_join(q->worker, NULL);
}

/* -- asking for a collective --------------------------------------------------------------------------------------- */

static pl_job new_collective(pl_endpoint *ep, enum pl_form form, int kind, double timeout_s) {
    return (pl_job){.endpoint = ep, .form = form, .kind = kind, .root = -1, .timeout_s = timeout_s,
                    .blamed = -1, .source = -1};
}

pl_job *pl_barrier(pl_endpoint *ep, double timeout_s, int run_inline) {
    pl_job job = new_collective(ep, PL_FORM_BARRIER, PL_BARRIER, timeout_s);
    return submit(ep, &job, run_inline);
}

static pl_job *submit_reduction(pl_endpoint *ep, pl_job *job, void *dst, int dtype, int op, int run_inline) {
    const char *refused = pl_fold_refused(dtype, op);
    if (refused) return pl_job_refused(ep, PL_ARGUMENT, refused);
    job->dst = dst;
    job->dtype = dtype;
    job->op = op;
    return submit(ep, job, run_inline);
}

pl_job *pl_all_reduce(pl_endpoint *ep, const void *src, void *dst, uint64_t count, int dtype, int op,
                      double timeout_s, int run_inline) {
    pl_job job = new_collective(ep, PL_FORM_ALL_REDUCE, PL_ALL_REDUCE, timeout_s);
    job.src = src;
    job.count = count;
    return submit_reduction(ep, &job, dst, dtype, op, run_inline);
}

/* The dtype of such an exchange is not compared: an empty tensor is often made without thinking of one. */
static int moves_nothing(const pl_job *exchange) {
    for (int r = 0; r < exchange->endpoint->size; r++)
        if (exchange->send_sizes[exchange->same ? 0 : r] || exchange->recv_sizes[r]) return 0;
    return 1;
}

pl_job *pl_exchange(pl_endpoint *ep, const uint64_t *sends, const uint64_t *send_bytes, const uint64_t *recvs,
                    const uint64_t *recv_bytes, int same, int kind, int root, int dtype, double timeout_s,
                    int run_inline) {
    pl_job job = new_collective(ep, PL_FORM_EXCHANGE, kind, timeout_s);
    job.sends = sends;
    job.send_sizes = send_bytes;
    job.recvs = recvs;
    job.recv_sizes = recv_bytes;
    job.same = same != 0;
    job.root = root;
    job.dtype = moves_nothing(&job) ? PL_NO_DTYPE : dtype;
    return submit(ep, &job, run_inline);
}

pl_job *pl_gather_unequal(pl_endpoint *ep, const void *src, uint64_t nbytes, int kind, int dtype, double timeout_s) {
    const uint64_t send = (uint64_t)src;
    pl_job job = new_collective(ep, PL_FORM_EXCHANGE, kind, timeout_s);
    job.sends = &send;
    job.send_sizes = &nbytes;
    job.same = 1;
    job.is_unequal = 1;
    job.dtype = dtype;
    return submit(ep, &job, 0);
}

pl_job *pl_reduce_exchange(pl_endpoint *ep, const uint64_t *sends, const uint64_t *counts, void *dst, int dtype, int op,
                           int kind, int root, double timeout_s, int run_inline) {
    pl_job job = new_collective(ep, PL_FORM_REDUCE_EXCHANGE, kind, timeout_s);
    job.sends = sends;
    job.send_sizes = counts;
    job.root = root;
    for (int d = 0; d < ep->size; d++) job.count += counts[d];
    return submit_reduction(ep, &job, dst, dtype, op, run_inline);
}
