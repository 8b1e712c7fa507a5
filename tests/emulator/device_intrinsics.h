// Device functions that CUTLASS's conversions name in templates which no kernel here instantiates.
// g++ wants them declared, and never defined.
#pragma once

#include <cuda_fp16.h>

int __dp4a(int, int, int);
unsigned int __byte_perm(unsigned int, unsigned int, unsigned int);
__half2 __hfma2(__half2, __half2, __half2);
