/* The sum of `n_copies` float arrays, stored to all of them: what an all-reduce has to do at least. */
#include <stdint.h>

static void two(float *restrict a, float *restrict b, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) a[i] = b[i] = a[i] + b[i];
}

static void four(float *restrict a, float *restrict b, float *restrict c, float *restrict d, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) a[i] = b[i] = c[i] = d[i] = a[i] + b[i] + c[i] + d[i];
}

void limit_run(float **copies, int n_copies, uint64_t begin, uint64_t end) {
    float *a = copies[0] + begin, *b = copies[1] + begin;
    if (n_copies == 2) two(a, b, end - begin);
    else if (n_copies == 4) four(a, b, copies[2] + begin, copies[3] + begin, end - begin);
}
