#include "descriptor.h"

#include <stdio.h>

void pl_describe(const pl_descriptor *d, char *text, uint64_t bytes) {
    static const char *const kinds[PL_KINDS] = {"barrier", "all_reduce", "broadcast", "all_gather",    "gather",
                                                "scatter", "all_to_all", "reduce",    "reduce_scatter",
                                                "sparse all_reduce"};
    static const char *const ops[PL_OPS] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
    static const char *const dtypes[PL_DTYPES] = {"float32", "float64", "float16", "bfloat16", "complex64",
                                                  "complex128", "int8", "int16", "int32", "int64",
                                                  "uint8", "uint16", "uint32", "uint64", "bool"};
    /* Another rank may have written these numbers: they are checked before they are used as indices. */
    const char *kind = d->kind < PL_KINDS ? kinds[d->kind] : "?";
    char root[24] = "";
    if ((int32_t)d->root >= 0) snprintf(root, sizeof root, " root %d", (int)d->root);
    const uint64_t form = d->flags & 0xff;
    const char *dtype = d->dtype < PL_DTYPES ? dtypes[d->dtype] : d->dtype == PL_NO_DTYPE ? "nothing" : "another dtype";
    if (form == PL_FORM_ALL_REDUCE || form == PL_FORM_REDUCE_EXCHANGE)
        snprintf(text, bytes, "%s(%s, %llu x %s)%s", kind, d->op < PL_OPS ? ops[d->op] : "?",
                 (unsigned long long)d->count, dtype, root);
    else if (form == PL_FORM_EXCHANGE)
        snprintf(text, bytes, "%s(%s)%s", kind, dtype, root);
    else
        snprintf(text, bytes, "%s%s", kind, root);
}

void pl_describe_posted(const pl_endpoint *ep, int rank, char *text, uint64_t bytes) {
    const pl_descriptor *posted = posted_descriptor(ep, rank);
    const pl_descriptor d = {.kind = PL_ONCE(posted->kind), .op = PL_ONCE(posted->op), .dtype = PL_ONCE(posted->dtype),
                             .root = PL_ONCE(posted->root), .count = PL_ONCE(posted->count),
                             .flags = PL_ONCE(posted->flags)};
    pl_describe(&d, text, bytes);
}

void pl_fail_disagreed(pl_endpoint *ep, pl_job *job, int one, int other) {
    char first[100], second[100];
    const pl_descriptor mine = pl_descriptor_of(job);
    if (!is_same_call(posted_descriptor(ep, ep->rank), &mine)) {
        pl_overwritten(ep, job, "what rank %d is in", ep->names[ep->rank]);
        return;
    }
    pl_describe_posted(ep, one, first, sizeof first);
    pl_describe_posted(ep, other, second, sizeof second);
    pl_job_fail(job, PL_DISAGREED, ep->names[other],
                "ranks are in different collectives: rank %d in %s, rank %d in %s; every rank has to call the same "
                "ones in the same order", ep->names[one], first, ep->names[other], second);
}
