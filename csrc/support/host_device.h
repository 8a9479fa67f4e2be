// Macros for functions that are compiled for CUDA kernels and also for the host, where tests call them for every thread
// of a grid.
#pragma once

#ifdef __CUDACC__
#define SHARDWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#define SHARDWRIGHT_UNROLL _Pragma("unroll")  // before a loop
#else
#define SHARDWRIGHT_HOST_DEVICE inline
#define SHARDWRIGHT_UNROLL
#endif
