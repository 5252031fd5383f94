/* setuptools builds extension modules, so the library is one: an empty one. It is loaded with ctypes, never imported. */
#include <stddef.h>

__attribute__((visibility("default"))) void *PyInit__kernel(void) { return NULL; }
