/* What we use of DLPack's exchange interface, version 1.3: how a tensor library describes a tensor to C code that has
 * no header of that library. A tensor type holds the interface as a capsule, `__dlpack_c_exchange_api__`. */
#ifndef PACELINE_DLPACK_H
#define PACELINE_DLPACK_H

#include <stdint.h>

#define DLPACK_CAPSULE "dlpack_exchange_api"
#define DLPACK_MAJOR 1
#define DLPACK_LEAST_MINOR 3

enum { DLPACK_CPU = 1 };
enum { DLPACK_INT, DLPACK_UINT, DLPACK_FLOAT, DLPACK_BFLOAT = 4, DLPACK_BOOL = 6 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL if they lie one after another */
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void (*allocate)(void), (*own)(void), (*make)(void); /* not used here */
    /* Fills in `out`, which is good while `object` lives and nobody changes it. If it has no such description, the
     * result is -1, with a Python exception. */
    int (*describe)(void *object, dlpack_tensor *out);
    void (*stream)(void);
} dlpack_exchange;

#endif
