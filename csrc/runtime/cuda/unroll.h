// SHARDWRIGHT_UNROLL before a loop of a kernel's body, which tests compile for the host too.
#pragma once

#ifdef __CUDACC__
#define SHARDWRIGHT_UNROLL _Pragma("unroll")
#else
#define SHARDWRIGHT_UNROLL
#endif
