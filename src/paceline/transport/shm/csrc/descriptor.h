/* Descriptors: what a rank says it is about to do, so that ranks in different collectives find out. Every collective
 * posts one and compares those of all ranks. That is inline, as a function call shows in the time of a barrier (2%). */
#ifndef PACELINE_DESCRIPTOR_H
#define PACELINE_DESCRIPTOR_H

#include "endpoint.h"
#include "fault.h"

static inline pl_descriptor pl_descriptor_of(const pl_job *job) {
    const uint64_t flags = (uint64_t)job->form | (uint64_t)job->same << 8 | (uint64_t)job->is_unequal << 9;
    pl_descriptor d = {.kind = (uint32_t)job->kind, .root = (uint32_t)job->root, .flags = flags};
    if (job->form != PL_FORM_BARRIER) d.dtype = (uint32_t)job->dtype;
    if (job->form == PL_FORM_ALL_REDUCE || job->form == PL_FORM_REDUCE_EXCHANGE) {
        d.op = (uint32_t)job->op;
        d.count = job->count;
    }
    return d;
}

/* Say what this rank is about to do. Other ranks may read it after the gate of this round. */
static inline void post_descriptor(pl_endpoint *ep, pl_descriptor d) {
    pl_seat_of(ep, ep->rank)->descriptor[ep->round & 1] = d;
    pl_fault(PL_AT_POSTED);
}

static inline const pl_descriptor *posted_descriptor(const pl_endpoint *ep, int rank) {
    return &pl_seat_of(ep, rank)->descriptor[ep->round & 1];
}

/* Write it in words, such as "all_reduce(SUM, 1024 x float32)", for messages. */
void pl_describe(const pl_descriptor *d, char *text, uint64_t bytes);
/* The same for what a rank has posted. */
void pl_describe_posted(const pl_endpoint *ep, int rank, char *text, uint64_t bytes);

/* The job fails, because ranks `one` and `other` are in different collectives. */
void pl_fail_disagreed(pl_endpoint *ep, pl_job *job, int one, int other);

static inline int is_same_call(const pl_descriptor *a, const pl_descriptor *b) {
    const int same_dtype = a->dtype == b->dtype || a->dtype == PL_NO_DTYPE || b->dtype == PL_NO_DTYPE;
    return a->kind == b->kind && a->op == b->op && same_dtype && a->root == b->root && a->count == b->count &&
           a->flags == b->flags;
}

/* After the first gate: are all ranks in the same collective? If not, the job fails. All ranks compare the same
 * descriptors, so all come to the same verdict and stay in step. */
static inline int agreed(pl_endpoint *ep, pl_job *job) {
    int one = 0, other = 0;
    /* The first rank that has a dtype to compare with, if there is one. */
    while (one < ep->size - 1 && posted_descriptor(ep, one)->dtype == PL_NO_DTYPE) one++;
    while (other < ep->size && is_same_call(posted_descriptor(ep, one), posted_descriptor(ep, other))) other++;
    if (other == ep->size) return 1;
    pl_fail_disagreed(ep, job, one, other);
    return 0;
}

#endif
