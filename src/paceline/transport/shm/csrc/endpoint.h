/* A rank's end of a group, and its jobs: what the files of the kernel share with each other. */
#ifndef PACELINE_ENDPOINT_H
#define PACELINE_ENDPOINT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "copy.h"
#include "layout.h"
#include "pl.h"

/* What a job is. Its fields count accordingly. The collectives come first, so there are PL_FORM_SEND of them. */
enum pl_form {
    PL_FORM_BARRIER, PL_FORM_ALL_REDUCE, PL_FORM_EXCHANGE, PL_FORM_REDUCE_EXCHANGE, PL_FORM_SEND, PL_FORM_RECV
};

struct pl_job {
    pl_endpoint *endpoint;
    _Atomic int references;
    _Atomic int status; /* an enum pl_status; everything else about how it ended is written before it (release) */
    int outcome;        /* what the status will be, while it is still pending */
    int blamed;         /* the rank at fault, by its name, or -1 */
    int source;
    char message[PL_CAUSE_BYTES];

    /* What is to be done. */
    enum pl_form form;
    int kind, root, dtype, op, same;
    double timeout_s;
    const unsigned char *src;
    unsigned char *dst;
    uint64_t count; /* elements; bytes for messages */
    const uint64_t *sends, *send_sizes, *recvs, *recv_sizes;
    int is_unequal;          /* an exchange that finds out on the way how much others send ... */
    unsigned char *gathered; /* ... and keeps here what they sent, for the life of the job */

    /* While it runs. */
    int64_t deadline_ns; /* INT64_MAX: none */
    int64_t spin_ns;
    struct pl_job *next;

    /* Messages. */
    int peer; /* -1: any */
    int64_t tag;
    uint64_t done_bytes;
    int announced;

    uint64_t tables[]; /* a copy of what sends ... recv_sizes point to, for jobs that outlive the call */
};

typedef struct {
    pl_job *first, *last;
} pl_job_list;

typedef struct pl_arena {
    uint64_t number, nbytes;
    int pins; /* jobs that use it */
    struct pl_arena *next;
    unsigned char *bases[];
} pl_arena;

/* The order of collectives. One thread has the turn: the worker, a caller that runs inline, or a caller that waits. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* for the worker: a job, a free turn, or the end */
    pthread_cond_t progress; /* for those who wait: a job has ended, or the turn is free */
    pl_job_list jobs;
    int taken;  /* the turn */
    int closed; /* no new jobs */
    int waiting;
    int has_worker;
    pthread_t worker;
} pl_queue;

struct pl_post; /* post.h */

struct pl_endpoint {
    pl_header *header;
    int rank, size, fd;
    _Atomic int references; /* the opener, and every job */
    int fork_generation;
    int names[PL_MAX_RANKS];
    atomic_int has_poisoned;
    atomic_int is_over;  /* this rank knows that the group is poisoned, even if somebody overwrites the word */
    uint64_t most_bytes; /* the memory of the machine: no rank has more to send */
    atomic_int has_spin; /* the next two are settled, and stay */
    _Atomic int64_t inline_spin_ns, worker_spin_ns;

    pl_queue queue;
    /* These belong to whoever has the turn. */
    uint64_t round;  /* the round being written */
    int64_t spin_ns; /* how long the next wait spins: as long as spinning has been worth it lately */
    pl_habit habits[PL_FORM_SEND][PL_HABITS]; /* how to copy to staging, by form */
    pl_copying copying;
    uint64_t half_bytes;

    pthread_mutex_t arena_lock;
    pthread_cond_t arena_free;
    pl_arena *arenas;

    struct pl_post *post;
    int post_closed; /* no messages any more; this and `post` are under the lock `making` of message.c */

    /* Which file this process has joined, so that it does not join it twice (endpoint.c). */
    uint64_t device, inode;
    struct pl_endpoint *next_open;
};

/* -- where things are ---------------------------------------------------------------------------------------------- */

static inline pl_seat *pl_seat_of(const pl_endpoint *ep, int rank) { return &ep->header->seats[rank]; }

/* The half of a rank's staging area that belongs to a round. */
static inline unsigned char *pl_staging(const pl_endpoint *ep, int rank, uint64_t round) {
    uint64_t half = (uint64_t)rank * 2 + (round & 1);
    return (unsigned char *)ep->header + pl_staging_at(ep->size) + half * ep->half_bytes;
}

static inline pl_ring *pl_ring_between(const pl_endpoint *ep, int from, int to) {
    uint64_t index = (uint64_t)from * (uint64_t)ep->size + (uint64_t)to;
    return (pl_ring *)((unsigned char *)ep->header + pl_rings_at(ep->size) + index * pl_ring_stride(ep->size));
}

/* -- round.c ------------------------------------------------------------------------------------------------------- */

/* Arrive at the current round and pass its gate; false if the job has failed instead. The round stays the current one
 * until its reads are done and the caller adds 1 to ep->round. */
int pl_pass(pl_endpoint *ep, pl_job *job);

/* Look for poison and for the deadline, which end all waiting. False if the job has failed. */
int pl_still_fine(pl_endpoint *ep, pl_job *job);
/* Does `rank` still take part? If not, the group is poisoned and the job fails. */
int pl_is_there(pl_endpoint *ep, pl_job *job, int rank);
void pl_set_poison(pl_endpoint *ep, enum pl_status status, int blamed, const char *text);
int pl_is_poisoned(const pl_endpoint *ep);
/* The control segment holds what no rank has written ([Note: overwritten] in layout.h): poison the group, and fail the
 * job, if there is one. `format` says where that was seen. Returns false. */
int pl_overwritten(pl_endpoint *ep, pl_job *job, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* -- collective.c -------------------------------------------------------------------------------------------------- */

/* Run a collective. The caller has the turn. How it went is in job->outcome, which the caller publishes. */
void pl_run(pl_endpoint *ep, pl_job *job);

/* -- job.c, delivery.c, message.c, endpoint.c ---------------------------------------------------------------------- */

void pl_job_fail(pl_job *job, enum pl_status status, int blamed, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Begin to count the time a job has. */
void pl_job_start(pl_job *job, int64_t spin_ns);
/* A copy on the heap, with two owners: the caller of the kernel, and the kernel until it is done. */
pl_job *pl_job_new(const pl_job *like);
/* A job that has failed before it began. */
pl_job *pl_job_refused(pl_endpoint *ep, enum pl_status status, const char *text);
void pl_job_settle(pl_job *job);
/* Adds the job at the end. */
void pl_list_add(pl_job_list *list, pl_job *job);
/* Takes the job out, wherever in the list it is, if it is there. */
void pl_list_remove(pl_job_list *list, pl_job *job);
void pl_queue_init(pl_queue *queue);
/* Take no new jobs from now on, and return when the present ones have ended. */
void pl_queue_close(pl_endpoint *ep);
void pl_queue_free(pl_queue *queue);
/* NULL if this process may use the endpoint, or a job that says why not. */
pl_job *pl_refusal(pl_endpoint *ep);
extern const char *const pl_forked;
/* Whether this thread should stop waiting. No lock is held, as the program's answer may take a while. */
int pl_is_interrupted(void);
/* A condition whose waits end by the clock of pl_now_ns. */
void pl_condition_init(pthread_cond_t *condition);
/* Wait on the condition for a while; false if the time is up or the thread was interrupted. */
int pl_nap(pthread_cond_t *on, pthread_mutex_t *lock, int64_t end_ns, int *interrupted);

/* Start a thread that leaves signals to the program's own threads. */
int pl_start_thread(pthread_t *thread, void *(*function)(void *), void *argument);
/* Wake whoever sleeps on a bell, on all ranks. */
void pl_ring_all_bells(pl_endpoint *ep);
/* No new messages from now on. Returns when sends are finished; recvs are given up. */
void pl_post_close(pl_endpoint *ep);
void pl_post_free(pl_endpoint *ep);
int pl_post_wait(pl_job *job, double timeout_s);

/* Decide how long waits spin, once every rank has joined. */
void pl_settle_spin(pl_endpoint *ep);
int pl_is_forked(const pl_endpoint *ep);
void pl_endpoint_release(pl_endpoint *ep);
/* The arena that holds the bytes, pinned, or NULL. */
pl_arena *pl_arena_pin(pl_endpoint *ep, const void *at, uint64_t nbytes);
void pl_arena_unpin(pl_endpoint *ep, pl_arena *arena);

#endif
