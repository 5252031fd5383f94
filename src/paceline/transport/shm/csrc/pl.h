/* The shared-memory kernel: what may be called from outside (kernel.py, the sanitizer harness).
 *
 * Files, from the ground up:
 *   layout.h      what is in the control segment, and what may be touched when
 *   wait.h/.c     sleeping and waking: spin, then futex
 *   round.c       the one synchronisation there is: a round; poison, dead ranks, deadlines
 *   fold.h/.c     elementwise reduction, in rank order
 *   copy.h/.c     copying to staging, through the caches or past them
 *   descriptor.h/.c
 *                 what a rank says it is about to do, and whether all ranks say the same
 *   collective.h  what the collectives share
 *   all_reduce.c, exchange.c, collective.c
 *                 the collectives: all_reduce; exchange and reduce_exchange; barrier, and whichever is asked for
 *   job.c         jobs, the queue, the worker thread
 *   ring.h        bytes from one rank to another
 *   post.h        the messages of a rank that are under way
 *   delivery.c    moves their bytes, over a ring for each ordered pair of ranks
 *   message.c     send and recv, as they are asked for
 *   endpoint.c    a rank's end of a group: open, close, arenas, fork
 *   fault.h/.c    where tests let a rank die
 *   module.c      the module of Python: the quickest way to an all_reduce, and signals
 *   dlpack.h      how module.c reads tensors
 *
 * Calls that give a `pl_job *` return NULL when the job has ended well on the calling thread. Otherwise the caller
 * owns a handle: it may wait for it and must release it.
 */
#ifndef PACELINE_PL_H
#define PACELINE_PL_H

#include <stdint.h>

#define PL_ABI 7
#define PL_MAX_RANKS 64
#define PL_API __attribute__((visibility("default")))

typedef struct pl_endpoint pl_endpoint;
typedef struct pl_job pl_job;

/* How a job ended. */
enum pl_status {
    PL_OK,
    PL_PENDING,
    PL_LOST,      /* a rank's process is gone */
    PL_LEFT,      /* a rank has closed the group */
    PL_TIMED_OUT, /* ranks did not arrive in time */
    PL_POISONED,  /* a rank gave the group up, and said why */
    PL_DISAGREED, /* ranks are in different collectives */
    PL_CLOSED,    /* this rank has closed the group */
    PL_FORKED,    /* this process is a fork of the one that opened the group */
    PL_ARGUMENT,
    PL_MEMORY,
    PL_INTERRUPTED, /* the program wants its thread back (a signal); see pl_on_interrupt */
};

enum pl_op { PL_SUM, PL_AVG, PL_PRODUCT, PL_MIN, PL_MAX, PL_BAND, PL_BOR, PL_BXOR, PL_OPS };

enum pl_dtype {
    PL_F32, PL_F64, PL_F16, PL_BF16, PL_C64, PL_C128,
    PL_I8, PL_I16, PL_I32, PL_I64, PL_U8, PL_U16, PL_U32, PL_U64, PL_BOOL, PL_DTYPES
};

enum pl_kind {
    PL_BARRIER, PL_ALL_REDUCE, PL_BROADCAST, PL_ALL_GATHER, PL_GATHER, PL_SCATTER, PL_ALL_TO_ALL, PL_REDUCE,
    PL_REDUCE_SCATTER, PL_SPARSE_ALL_REDUCE, PL_KINDS
};

/* Where a rank can be made to fail; the words are in codes.py. */
enum pl_phase {
    PL_AT_POSTED, PL_AT_STAGED, PL_AT_BEFORE_PUBLISH, PL_AT_PUBLISHED, PL_AT_PASSED, PL_AT_REDUCED, PL_AT_COPIED,
    PL_AT_SENDING, PL_AT_RECEIVING
};

PL_API int pl_abi(void);

/* Bytes of the control segment of `size` ranks. */
PL_API uint64_t pl_control_bytes(int size);

/* Join the group whose control segment is mapped at `base`. NULL if it is refused; `reason` says why.
 * `fd` is the segment's file, locked while the endpoint is open, or -1 where ranks are threads (tests). */
PL_API pl_endpoint *pl_open(void *base, uint64_t nbytes, int fd, int rank, int size, int create, const int *names,
                            char *reason, uint64_t reason_bytes);

PL_API pl_job *pl_all_reduce(pl_endpoint *, const void *src, void *dst, uint64_t count, int dtype, int op,
                             double timeout_s, int run_inline);
/* `dtype` is only compared between ranks, so any number will do. */
PL_API pl_job *pl_exchange(pl_endpoint *, const uint64_t *sends, const uint64_t *send_bytes, const uint64_t *recvs,
                           const uint64_t *recv_bytes, int same, int kind, int root, int dtype, double timeout_s,
                           int run_inline);
/* Every rank gets the bytes of every rank, which may differ in number. When the job has ended, pl_job_part says where
 * they are. */
PL_API pl_job *pl_gather_unequal(pl_endpoint *, const void *src, uint64_t nbytes, int kind, int dtype,
                                 double timeout_s);
PL_API pl_job *pl_reduce_exchange(pl_endpoint *, const uint64_t *sends, const uint64_t *counts, void *dst, int dtype,
                                  int op, int kind, int root, double timeout_s, int run_inline);
PL_API pl_job *pl_barrier(pl_endpoint *, double timeout_s, int run_inline);

PL_API pl_job *pl_send(pl_endpoint *, const void *src, uint64_t nbytes, int to, int64_t tag, double timeout_s);
/* If `from` is -1, the message may come from any rank. */
PL_API pl_job *pl_recv(pl_endpoint *, void *dst, uint64_t nbytes, int from, int64_t tag, double timeout_s);

PL_API int pl_register_arena(pl_endpoint *, uint64_t arena, const uint64_t *bases, uint64_t nbytes);
PL_API void pl_unregister_arena(pl_endpoint *, uint64_t arena);

/* Make all ranks' calls fail, now and later, with `status`. `blamed` is the name of the rank at fault, which need not
 * be one of this group, or -1. */
PL_API void pl_poison(pl_endpoint *, const char *cause, int blamed, int status);
PL_API void pl_close(pl_endpoint *); /* finishes what was started; calls after it are refused */
PL_API void pl_abort(pl_endpoint *); /* makes what was started fail, everywhere, and closes */
PL_API void pl_free(pl_endpoint *);  /* after closing, when nobody is going to call any more */
/* Long waits ask this from time to time, on whatever thread they are: shall this thread stop waiting? */
PL_API void pl_on_interrupt(int (*is_interrupted)(void));

/* How long a wait spins after one that spun for `spin_ns`, of at most `most_ns`, and then slept for `slept_ns`. */
PL_API int64_t pl_next_spin(int64_t spin_ns, int64_t most_ns, int64_t slept_ns);

PL_API int pl_job_wait(pl_job *, double timeout_s); /* its status; PL_PENDING when the time is up */
PL_API int pl_job_status(pl_job *);
PL_API const char *pl_job_message(pl_job *);
PL_API int pl_job_rank(pl_job *);   /* the rank that is to blame, by its name, or -1 */
PL_API int pl_job_source(pl_job *); /* where a received message came from */
PL_API const void *pl_job_part(pl_job *, int rank, uint64_t *nbytes); /* what was gathered from a rank */
PL_API void pl_job_release(pl_job *);

/* For tests: fail at `phase`, after it has been passed `count` times; action 1 kills the process, 2 stops it. */
PL_API void pl_fail_at(int phase, int count, int action);

#endif
