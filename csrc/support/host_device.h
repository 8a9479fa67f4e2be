// Macros for functions that compile both for kernels and for the host, where tests run whole grids of them.
#pragma once

#ifdef __CUDACC__
#define SHARDWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#define SHARDWRIGHT_UNROLL _Pragma("unroll")  // before a loop
#else
#define SHARDWRIGHT_HOST_DEVICE inline
#define SHARDWRIGHT_UNROLL
#endif
