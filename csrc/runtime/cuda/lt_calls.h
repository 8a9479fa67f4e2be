// Calls cuBLASLt for one product. Each status has one outcome:
//
//   status                                                outcome
//   success                                               the product was launched
//   not supported, architecture mismatch, invalid value   cuBLASLt *declines*: ATen computes this product, and all
//                                                         later products of the same problem
//   any other                                             c10::Error with function, status and product
//
// These functions need no device: tests run them against a mock of cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <functional>
#include <optional>

#include "runtime/cuda/gemm_problem.h"

namespace shardwright::lt {

// An algorithm that cuBLASLt has chosen for a product.
struct Algorithm {
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace_bytes = 0;
  double waves = 0;  // tiles of the product / tiles that the device runs at once
};

// The library handle, the stream and the maximum workspace for a product.
struct Device {
  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;
  size_t workspace_limit_bytes = 0;
};

// Returns the algorithm for a problem, from the cache or from cuBLASLt. Returns nothing if cuBLASLt declines.
std::optional<Algorithm> find_algorithm(const Device& device, const Problem& problem, const Pointers& pointers);

// Launches a product: d = a x b, or d += a x b if `accumulates`. `workspace_of` returns the workspace for an algorithm,
// which must live until the call has returned. Returns false, with nothing launched, if cuBLASLt declines.
bool multiply(const Device& device, const Problem& problem, const Pointers& pointers, bool accumulates,
              const std::function<void*(const Algorithm&)>& workspace_of);

}  // namespace shardwright::lt
