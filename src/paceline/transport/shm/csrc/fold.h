/* Elementwise reduction of several inputs, always in the order given: the same bits on every rank. */
#ifndef PACELINE_FOLD_H
#define PACELINE_FOLD_H

#include <stdint.h>

#include "pl.h"

typedef struct {
    int dtype, op;
    uint64_t item_bytes;
    int past; /* outputs that are copies of the first are made past the caches, and not flushed (copy.h) */
} pl_fold;

uint64_t pl_item_bytes(int dtype);

/* Why this dtype cannot be reduced in this way, or NULL. */
const char *pl_fold_refused(int dtype, int op);

/* outs[0..n_outs) = fold of ins[0..n_ins), `count` elements each. An output may be one of the inputs, and must
 * not overlap any otherwise. */
void pl_fold_run(const pl_fold *fold, void *const *outs, int n_outs, const void *const *ins, int n_ins, uint64_t count);

#endif
