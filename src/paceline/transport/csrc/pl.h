/* The shared-memory kernel: what may be called from outside (kernel.py, the sanitizer harness).
 *
 * Files, from the ground up:
 *   layout.h      what is in the control segment, and what may be touched when
 *   wait.h/.c     sleeping and waking: spin, then futex
 *   round.c       the one synchronisation there is: a round; poison, dead ranks, deadlines
 *   fold.h/.c     elementwise reduction, in rank order
 *   copy.h/.c     copying to staging, through the caches or past them
 *   collective.c  barrier, all_reduce, exchange, reduce_exchange: all made of rounds
 *   job.c         jobs, the queue, the worker thread
 *   ring.h        bytes from one rank to another
 *   message.c     send and recv, over a ring for each ordered pair of ranks
 *   channel.c     a rank's end of a group: open, close, arenas, fork
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

#define PL_ABI 6
#define PL_MAX_RANKS 64
#define PL_API __attribute__((visibility("default")))

typedef struct pl_channel pl_channel;
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

/* Where a rank can be made to fail; the words are in kernel.py. */
enum pl_phase {
    PL_AT_POSTED, PL_AT_STAGED, PL_AT_BEFORE_PUBLISH, PL_AT_PUBLISHED, PL_AT_PASSED, PL_AT_REDUCED, PL_AT_COPIED,
    PL_AT_SENDING, PL_AT_RECEIVING
};

PL_API int pl_abi(void);

/* Bytes of the control segment of `size` ranks. */
PL_API uint64_t pl_control_bytes(int size);

/* Join the group whose control segment is mapped at `base`. NULL if it is refused; `reason` says why.
 * `fd` is the segment's file, locked while the channel is open, or -1 where ranks are threads (tests). */
PL_API pl_channel *pl_open(void *base, uint64_t nbytes, int fd, int rank, int size, int create, const int *names,
                           char *reason, uint64_t reason_bytes);

PL_API pl_job *pl_all_reduce(pl_channel *, const void *src, void *dst, uint64_t count, int dtype, int op,
                             double scale, double timeout_s, int run_inline);
/* `dtype` is compared between ranks, and only that: any number will do. */
PL_API pl_job *pl_exchange(pl_channel *, const uint64_t *sends, const uint64_t *send_bytes, const uint64_t *recvs,
                           const uint64_t *recv_bytes, int same, int kind, int root, int dtype, double timeout_s,
                           int run_inline);
/* To everybody, everybody's bytes, which may differ in number; where they are is known when the job has ended. */
PL_API pl_job *pl_gather_unequal(pl_channel *, const void *src, uint64_t nbytes, int kind, int dtype, double timeout_s);
PL_API pl_job *pl_reduce_exchange(pl_channel *, const uint64_t *sends, const uint64_t *counts, void *dst, int dtype,
                                  int op, int kind, int root, double timeout_s, int run_inline);
PL_API pl_job *pl_barrier(pl_channel *, double timeout_s, int run_inline);

PL_API pl_job *pl_send(pl_channel *, const void *src, uint64_t nbytes, int to, int64_t tag, double timeout_s);
/* `from` -1: from anybody. */
PL_API pl_job *pl_recv(pl_channel *, void *dst, uint64_t nbytes, int from, int64_t tag, double timeout_s);

PL_API int pl_register_arena(pl_channel *, uint64_t arena, const uint64_t *bases, uint64_t nbytes);
PL_API void pl_unregister_arena(pl_channel *, uint64_t arena);

/* Make everybody's calls fail, now and later, with `status`. `blamed` is the number of the rank at fault, which need not
 * be one of these, or -1. */
PL_API void pl_poison(pl_channel *, const char *cause, int blamed, int status);
PL_API void pl_close(pl_channel *); /* finishes what was started; calls after it are refused */
PL_API void pl_abort(pl_channel *); /* makes it fail, everywhere, and closes */
PL_API void pl_free(pl_channel *);  /* after closing, when nobody is going to call any more */
/* What long waits ask from time to time, on whatever thread they are: shall this thread stop waiting? */
PL_API void pl_on_interrupt(int (*is_interrupted)(void));
PL_API void pl_set_spin(pl_channel *, double inline_s, double worker_s);

/* How long the wait after one spins that spun for `spin_ns`, of `most_ns`, and slept for `slept_ns` then. */
PL_API int64_t pl_next_spin(int64_t spin_ns, int64_t most_ns, int64_t slept_ns);

PL_API int pl_job_wait(pl_job *, double timeout_s); /* its status; PL_PENDING when the time is up */
PL_API int pl_job_status(pl_job *);
PL_API const char *pl_job_message(pl_job *);
PL_API int pl_job_rank(pl_job *);   /* the rank that is to blame, by its name, or -1 */
PL_API int pl_job_source(pl_job *); /* where a received message came from */
PL_API const void *pl_job_part(pl_job *, int rank, uint64_t *nbytes); /* what was gathered of a rank */
PL_API void pl_job_release(pl_job *);

/* For tests: fail when `phase` is reached for the `count`-th time from now; action 1 kills, 2 stops the process. */
PL_API void pl_fail_at(int phase, int count, int action);

#endif
