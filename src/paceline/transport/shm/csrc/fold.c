/* Elementwise reduction. Loops are written for the compiler to vectorise, and compiled for several CPUs. */
#include "fold.h"

#include <string.h>

#include "copy.h"

/* The best clone is chosen when the library is loaded. That does not work under sanitizers. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(PL_PLAIN) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif

/* An output may be one of the inputs, element for element, so that no iteration depends on another. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT
#endif

/* Elements folded at a time: sums that are not complete stay in the first-level cache. */
#define BLOCK 2048

/* -- native types: out = a op b, and `also` = the same unless it is NULL ------------------------------------------- */

typedef void pair_fn(void *out, void *also, const void *a, const void *b, uint64_t n);

/* Two outputs in one pass: storing a result twice costs less than reading it again. */
#define EACH(T, expression)                                        \
    T *o = out, *o2 = also;                                        \
    const T *p = a, *q = b;                                        \
    if (o2)                                                        \
        INDEPENDENT for (uint64_t i = 0; i < n; i++) {             \
            const T x = p[i], y = q[i], r = (T)(expression);       \
            o[i] = r;                                              \
            o2[i] = r;                                             \
        }                                                          \
    else                                                           \
        INDEPENDENT for (uint64_t i = 0; i < n; i++) {             \
            const T x = p[i], y = q[i];                            \
            o[i] = (T)(expression);                                \
        }

#define PAIR(name, T, expression) \
    CLONES static void name(void *out, void *also, const void *a, const void *b, uint64_t n) { EACH(T, expression) }

/* A NaN stays, on whichever rank it is: a maximum that hides it would be silently wrong. */
#define FLOAT_PAIRS(T, name)                                \
    PAIR(name##_sum, T, x + y)                              \
    PAIR(name##_product, T, x * y)                          \
    PAIR(name##_min, T, y < x || y != y ? y : x)            \
    PAIR(name##_max, T, y > x || y != y ? y : x)

/* Signed integers are added and multiplied as unsigned ones: the bits are the same, and overflow wraps. */
#define INTEGER_PAIRS(T, U, name)                           \
    PAIR(name##_sum, T, (U)x + (U)y)                        \
    PAIR(name##_product, T, (U)((uint64_t)x * (uint64_t)y)) \
    PAIR(name##_min, T, y < x ? y : x)                      \
    PAIR(name##_max, T, y > x ? y : x)                      \
    PAIR(name##_band, T, x & y)                             \
    PAIR(name##_bor, T, x | y)                              \
    PAIR(name##_bxor, T, x ^ y)

FLOAT_PAIRS(float, f32)
FLOAT_PAIRS(double, f64)
INTEGER_PAIRS(int8_t, uint8_t, i8)
INTEGER_PAIRS(int16_t, uint16_t, i16)
INTEGER_PAIRS(int32_t, uint32_t, i32)
INTEGER_PAIRS(int64_t, uint64_t, i64)
INTEGER_PAIRS(uint8_t, uint8_t, u8)
INTEGER_PAIRS(uint16_t, uint16_t, u16)
INTEGER_PAIRS(uint32_t, uint32_t, u32)
INTEGER_PAIRS(uint64_t, uint64_t, u64)
/* A bool is a byte that is not 0, and becomes 0 or 1. */
PAIR(bool_or, uint8_t, (x | y) != 0)
PAIR(bool_and, uint8_t, (x != 0) & (y != 0))
PAIR(bool_xor, uint8_t, (x != 0) ^ (y != 0))

#define DIVIDE(name, T)                                                                 \
    CLONES static void name##_divide(void *out, const void *a, uint64_t n, double by) { \
        T *o = out;                                                                     \
        const T *p = a, s = (T)by;                                                      \
        INDEPENDENT for (uint64_t i = 0; i < n; i++) o[i] = p[i] / s;                   \
    }

/* Integers are rounded toward zero. */
DIVIDE(f32, float)
DIVIDE(f64, double)
DIVIDE(i8, int8_t)
DIVIDE(i16, int16_t)
DIVIDE(i32, int32_t)
DIVIDE(i64, int64_t)
DIVIDE(u8, uint8_t)
DIVIDE(u16, uint16_t)
DIVIDE(u32, uint32_t)
DIVIDE(u64, uint64_t)

/* By dtype; 0 where there is no mean. */
typedef void divide_fn(void *out, const void *a, uint64_t n, double by);
static divide_fn *const divisions[PL_DTYPES] = {
    [PL_F32] = f32_divide, [PL_F64] = f64_divide, [PL_C64] = f32_divide, [PL_C128] = f64_divide,
    [PL_I8] = i8_divide,   [PL_I16] = i16_divide, [PL_I32] = i32_divide, [PL_I64] = i64_divide,
    [PL_U8] = u8_divide,   [PL_U16] = u16_divide, [PL_U32] = u32_divide, [PL_U64] = u64_divide,
};

#define FLOAT_ROW(name) {name##_sum, name##_sum, name##_product, name##_min, name##_max, 0, 0, 0}
#define INTEGER_ROW(name) \
    {name##_sum, name##_sum, name##_product, name##_min, name##_max, name##_band, name##_bor, name##_bxor}

/* By dtype and op; 0 where there is no such thing. Complex numbers are added as pairs of floats (pl_fold_run). */
static pair_fn *const pairs[PL_DTYPES][PL_OPS] = {
    [PL_F32] = FLOAT_ROW(f32),
    [PL_F64] = FLOAT_ROW(f64),
    [PL_C64] = {f32_sum, f32_sum},
    [PL_C128] = {f64_sum, f64_sum},
    [PL_I8] = INTEGER_ROW(i8),
    [PL_I16] = INTEGER_ROW(i16),
    [PL_I32] = INTEGER_ROW(i32),
    [PL_I64] = INTEGER_ROW(i64),
    [PL_U8] = INTEGER_ROW(u8),
    [PL_U16] = INTEGER_ROW(u16),
    [PL_U32] = INTEGER_ROW(u32),
    [PL_U64] = INTEGER_ROW(u64),
    [PL_BOOL] = {bool_or, 0, bool_and, bool_and, bool_or, bool_and, bool_or, bool_xor},
};

/* -- 16-bit floats: unpacked to float, folded there, rounded once -------------------------------------------------- */

static inline float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* These have no branches, so that the loops below vectorise on any CPU. */

static inline float from_bf16(uint16_t h) { return as_float((uint32_t)h << 16); }

static inline uint16_t to_bf16(float f) {
    uint32_t bits = as_bits(f);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    uint32_t nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = (uint32_t)(h & 0x7fff) << 13;
    uint32_t normal = size + ((127 - 15) << 23);
    uint32_t special = normal + ((127 - 15) << 23); /* infinities and NaNs: from exponent 31 to 255 */
    /* A subnormal: put its bits behind the point of a normal number and take that number away again. */
    uint32_t subnormal = as_bits(as_float(size + (113u << 23)) - as_float(113u << 23));
    uint32_t bits = size < (1u << 23) ? subnormal : size >= (31u << 23) ? special : normal;
    return as_float(sign | bits);
}

static inline uint16_t to_f16(float f) {
    uint32_t bits = as_bits(f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uint32_t normal = (size - ((127u - 15) << 23) + 0xfff + (size >> 13 & 1)) >> 13; /* to nearest, ties to even */
    /* A subnormal: adding 0.5 leaves exactly the bits that f16 has, rounded by the addition. */
    uint32_t subnormal = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    uint32_t special = size > 0x7f800000 ? 0x7e00 | (size >> 13 & 0x3ff) : 0x7c00;
    uint32_t half = size >= ((127u + 16) << 23) ? special : size < ((127u - 14) << 23) ? subnormal : normal;
    return (uint16_t)(sign | half);
}

#define PACKED(name)                                                            \
    CLONES static void name##_unpack(float *o, const uint16_t *p, uint64_t n) { \
        for (uint64_t i = 0; i < n; i++) o[i] = from_##name(p[i]);              \
    }                                                                           \
    CLONES static void name##_pack(uint16_t *o, const float *p, uint64_t n) {   \
        for (uint64_t i = 0; i < n; i++) o[i] = to_##name(p[i]);                \
    }

PACKED(f16)
PACKED(bf16)

/* -- folding ------------------------------------------------------------------------------------------------------- */

uint64_t pl_item_bytes(int dtype) {
    static const uint8_t bytes[PL_DTYPES] = {
        [PL_F32] = 4, [PL_F64] = 8, [PL_F16] = 2, [PL_BF16] = 2, [PL_C64] = 8, [PL_C128] = 16, [PL_BOOL] = 1,
        [PL_I8] = 1,  [PL_I16] = 2, [PL_I32] = 4, [PL_I64] = 8,
        [PL_U8] = 1,  [PL_U16] = 2, [PL_U32] = 4, [PL_U64] = 8,
    };
    return dtype >= 0 && dtype < PL_DTYPES ? bytes[dtype] : 0;
}

static int is_packed(int dtype) { return dtype == PL_F16 || dtype == PL_BF16; }

const char *pl_fold_refused(int dtype, int op) {
    if (dtype < 0 || dtype >= PL_DTYPES || op < 0 || op >= PL_OPS) return "no such dtype or operation";
    if (!is_packed(dtype) && !pairs[dtype][op]) return "this operation is not defined for this dtype";
    if (is_packed(dtype) && op >= PL_BAND) return "this operation is not defined for this dtype";
    return 0;
}

/* Fold a block of native elements into `out` and `also`. Only the last step writes there, as they may be inputs. */
static void fold_native(const pl_fold *f, void *out, void *also, const void *const *ins, int n_ins, uint64_t at,
                        uint64_t n, uint64_t item) {
    _Alignas(64) unsigned char between[BLOCK * 8];
    const int divides = f->op == PL_AVG;
    const void *so_far = (const char *)ins[0] + at * item;
    for (int k = 1; k < n_ins; k++) {
        const void *next = (const char *)ins[k] + at * item;
        const int is_last = k == n_ins - 1 && !divides;
        void *to = is_last ? out : between, *to_also = is_last ? also : NULL;
        pairs[f->dtype][f->op](to, to_also, so_far, next, n);
        so_far = to;
    }
    if (n_ins > 1 && !divides) return;
    /* What is left is a single input, or a sum that is still to be divided. */
    if (divides && n_ins > 1) divisions[f->dtype](out, so_far, n, n_ins);
    else memmove(out, so_far, n * item);
    if (also) memcpy(also, out, n * item);
}

static void fold_packed(const pl_fold *f, void *out, void *also, const void *const *ins, int n_ins, uint64_t at,
                        uint64_t n) {
    _Alignas(64) float sum[BLOCK], next[BLOCK];
    const int is_bf16 = f->dtype == PL_BF16;
    for (int k = 0; k < n_ins; k++) {
        const uint16_t *in = (const uint16_t *)ins[k] + at;
        (is_bf16 ? bf16_unpack : f16_unpack)(k ? next : sum, in, n);
        if (k) pairs[PL_F32][f->op](sum, NULL, sum, next, n);
    }
    if (f->op == PL_AVG) f32_divide(sum, sum, n, n_ins);
    (is_bf16 ? bf16_pack : f16_pack)(out, sum, n);
    if (also) memcpy(also, out, n * sizeof(uint16_t));
}

static int is_among(const void *out, const void *const *ins, int n_ins) {
    for (int k = 0; k < n_ins; k++)
        if (ins[k] == out) return 1;
    return 0;
}

/* Sums of three or four tensors, each of which the result replaces (arenas of as many ranks), in one pass. It takes
 * half the time of the general way, which passes over them in pairs. The same additions in the same order give the same
 * bits. */
CLONES static void f32_sum_3_in_place(float *a, float *b, float *c, uint64_t n) {
    INDEPENDENT for (uint64_t i = 0; i < n; i++) a[i] = b[i] = c[i] = a[i] + b[i] + c[i];
}

CLONES static void f32_sum_4_in_place(float *a, float *b, float *c, float *d, uint64_t n) {
    INDEPENDENT for (uint64_t i = 0; i < n; i++) a[i] = b[i] = c[i] = d[i] = a[i] + b[i] + c[i] + d[i];
}

static int is_in_place(void *const *outs, int n_outs, const void *const *ins, int n_ins) {
    int same = n_outs == n_ins;
    for (int k = 0; same && k < n_ins; k++) same = outs[k] == ins[k];
    return same;
}

void pl_fold_run(const pl_fold *f, void *const *outs, int n_outs, const void *const *ins, int n_ins, uint64_t count) {
    const int is_complex = f->dtype == PL_C64 || f->dtype == PL_C128;
    const uint64_t numbers = is_complex ? count * 2 : count;
    const uint64_t item = is_complex ? f->item_bytes / 2 : f->item_bytes;
    if ((n_ins == 3 || n_ins == 4) && (f->dtype == PL_F32 || f->dtype == PL_C64) && f->op == PL_SUM &&
        is_in_place(outs, n_outs, ins, n_ins)) {
        float *const *o = (float *const *)outs;
        if (n_ins == 3) f32_sum_3_in_place(o[0], o[1], o[2], numbers);
        else f32_sum_4_in_place(o[0], o[1], o[2], o[3], numbers);
        return;
    }
    /* A line that was just read is cheap to write in the same pass. Others, such as a staging area that another CPU has
     * in its cache, are better written by memcpy, which does not have to fetch them first. */
    const int fused = n_outs > 1 && is_among(outs[1], ins, n_ins);
    /* Two inputs that become two outputs need no memory in between (fold_native), so one block holds all elements. */
    const int at_once = fused && n_outs == 2 && n_ins == 2 && f->op != PL_AVG && !is_packed(f->dtype);
    const uint64_t block = at_once ? numbers : BLOCK;
    for (uint64_t at = 0; at < numbers; at += block) {
        uint64_t n = numbers - at < block ? numbers - at : block;
        void *out = (char *)outs[0] + at * item, *also = fused ? (char *)outs[1] + at * item : NULL;
        if (is_packed(f->dtype)) fold_packed(f, out, also, ins, n_ins, at, n);
        else fold_native(f, out, also, ins, n_ins, at, n, item);
        /* This copies from the first-level cache, and only now, because an output may be an input. */
        for (int k = fused ? 2 : 1; k < n_outs; k++) pl_copy((char *)outs[k] + at * item, out, n * item, f->past);
    }
}
