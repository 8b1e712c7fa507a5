// Device functions that CUTLASS names. It wants those of its conversions declared, and never
// defined, in templates which no kernel here instantiates.
#pragma once

#include <cuda_fp16.h>

int __dp4a(int, int, int);
unsigned int __byte_perm(unsigned int, unsigned int, unsigned int);
__half2 __hfma2(__half2, __half2, __half2);

// Where in shared memory, in bytes from its beginning: what descriptors hold (machine.cpp).
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
size_t __cvta_generic_to_shared(const void* address);
