/* The post of a rank: its messages that are under way. Shared by message.c, which is asked for them, and delivery.c,
 * which moves their bytes. Everything here is under the lock of the post. */
#ifndef PACELINE_POST_H
#define PACELINE_POST_H

#include "endpoint.h"

/* What goes into a ring before the bytes of a message. */
typedef struct {
    uint64_t nbytes;
    int64_t tag;
    uint64_t check; /* a header that was overwritten, or is not where a message begins, does not fit it */
} message_header;

/* `at` is the ring's counter where the header begins. */
static inline uint64_t header_check(const message_header *header, uint64_t at) {
    return PL_MAGIC + header->nbytes * UINT64_C(0x9e3779b97f4a7c15) +
           (uint64_t)header->tag * UINT64_C(0xbf58476d1ce4e5b9) + at * UINT64_C(0x94d049bb133111eb);
}

/* A message that was moved aside ([Note: stash] in delivery.c). */
typedef struct stashed {
    int source, complete;
    int64_t tag;
    uint64_t nbytes;
    pl_job *taker; /* a recv that waits for the rest of it */
    struct stashed *next;
    unsigned char bytes[];
} stashed;

/* The message that is being read out of a ring. Its bytes go to a recv, or aside, or nowhere: then they are dropped. */
typedef struct {
    int active;
    message_header header;
    uint64_t done;
    pl_job *into;
    stashed *aside;
} incoming;

typedef struct pl_post {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* for the thread: a job is pending, or the end */
    pthread_cond_t finished; /* for those who wait */
    int closed;
    pthread_t thread;
    int pending; /* jobs that have not ended */
    pl_job_list sends[PL_MAX_RANKS];
    pl_job_list recvs; /* not matched yet, in the order they were asked for */
    incoming in[PL_MAX_RANKS];
    uint64_t sent[PL_MAX_RANKS], taken[PL_MAX_RANKS]; /* this rank's counters of its rings */
    stashed *aside; /* in the order they came */
} pl_post;

/* A new send or recv, which is counted in `pending` already. */
void pl_post_add(pl_endpoint *ep, pl_post *post, pl_job *job);
/* Forget a job that will not be delivered. The rest of a message that a recv has begun to receive is dropped. */
void pl_post_withdraw(pl_endpoint *ep, pl_post *post, pl_job *job);
/* The job has its outcome: publish it. */
void pl_post_end(pl_post *post, pl_job *job);
/* Move as many bytes as can be moved, out and in. False if there were none. */
int pl_post_move(pl_endpoint *ep, pl_post *post);
/* Sleep, without the lock, until there may be bytes to move, or for a nap. */
void pl_post_sleep(pl_endpoint *ep, pl_post *post);

#endif
