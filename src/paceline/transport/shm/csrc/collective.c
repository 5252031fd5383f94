/* Runs whichever collective is asked for. The barrier is here, too: it is a round and nothing else. */
#include "collective.h"

static void barrier(pl_endpoint *ep, pl_job *job) {
    post_descriptor(ep, pl_descriptor_of(job));
    if (!pl_pass(ep, job)) return;
    agreed(ep, job);
    ep->round++;
}

void pl_run(pl_endpoint *ep, pl_job *job) {
    if (!pl_still_fine(ep, job)) return;
    switch (job->form) {
    case PL_FORM_BARRIER: barrier(ep, job); break;
    case PL_FORM_ALL_REDUCE: pl_run_all_reduce(ep, job); break;
    case PL_FORM_EXCHANGE: pl_run_exchange(ep, job); break;
    case PL_FORM_REDUCE_EXCHANGE: pl_run_reduce_exchange(ep, job); break;
    default: break;
    }
}
