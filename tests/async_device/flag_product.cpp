// The operators of PyTorch's symmetric memory for products that wait for flags, as they behave on CUDA: a product reads
// a chunk of its left operand once the chunk's flag is not 0, one chunk after the other. While it runs it holds all
// multiprocessors, so no signal of symmetric memory, which is a kernel, can begin.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "driver.h"
#include "symmetric_memory.h"

namespace async_device {
namespace {

constexpr int64_t kTileRows = 128;
constexpr std::chrono::microseconds kPause{50};

std::atomic<int64_t> flags_until_loss{0};  // below 1: loses none
std::atomic<int64_t> products_running{0};

at::Tensor matrix(void* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(data, sizes, strides, at::TensorOptions(at::kBFloat16));
}

struct Running {
  Running() { ++products_running; }
  ~Running() { --products_running; }
};

at::Tensor async_input_mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& flags, int64_t first) {
  forbid_in_capture("a product that waits for flags");
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.is_contiguous() && a.size(1) == b.size(0), "these are no matrices");
  TORCH_CHECK(b.is_contiguous() || b.t().is_contiguous(), "b lies in neither order");
  TORCH_CHECK(a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16, "a and b are not bfloat16");
  TORCH_CHECK(flags.dim() == 1 && flags.scalar_type() == at::kUInt32, "flags are a vector of uint32");
  const int64_t chunks = flags.numel();
  TORCH_CHECK(a.size(0) % (chunks * kTileRows) == 0, a.size(0), " rows in ", chunks, " chunks of whole tiles");
  TORCH_CHECK(a.size(1) % 8 == 0 && b.size(1) % 8 == 0, "rows do not begin at multiples of 16 bytes");
  const at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  launch(current_stream(), [=, rows = a.size(0) / chunks, k = a.size(1), n = b.size(1), from = a.data_ptr(),
                            flag = static_cast<uint32_t*>(flags.data_ptr()), to = out.data_ptr(),
                            rhs = matrix(b.data_ptr(), b.sizes(), b.strides())] {
    const Running running;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t chunk = (first + i) % chunks;
      while (std::atomic_ref(flag[chunk]).load() == 0) {
        raise_failure();  // if the stream that should set the flag failed
        std::this_thread::sleep_for(kPause);
      }
      const auto rows_of = [&](void* data, int64_t columns) {
        return matrix(static_cast<at::BFloat16*>(data) + chunk * rows * columns, {rows, columns}, {columns, 1});
      };
      at::Tensor part = rows_of(to, n);
      at::mm_out(part, rows_of(from, k), rhs);
    }
  });
  return out;
}

at::Tensor stream_write_value(const at::Tensor& flags, int64_t index, int64_t value) {
  forbid_in_capture("writing a value from a stream");
  TORCH_CHECK(index >= 0 && index < flags.numel() && flags.scalar_type() == at::kUInt32, "there is no flag ", index);
  launch(current_stream(), [flag = static_cast<uint32_t*>(flags.data_ptr()) + index, value] {
    if (flags_until_loss > 0 && --flags_until_loss == 0) return;
    std::atomic_ref(*flag).store(static_cast<uint32_t>(value));
  });
  return flags;
}

// Boxed, because kernels of one operator must have the same C++ signature, which differs between versions of torch.
void boxed_product(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const at::Tensor out =
      async_input_mm(stack->at(0).toTensor(), stack->at(1).toTensor(), stack->at(2).toTensor(), stack->at(3).toInt());
  stack->assign({out});
}

void boxed_write(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const at::Tensor flags = stream_write_value(stack->at(0).toTensor(), stack->at(1).toInt(), stack->at(2).toInt());
  stack->assign({flags});
}

}  // namespace

void lose_flag(int64_t number) { flags_until_loss = number; }

void wait_for_multiprocessor() {
  while (products_running > 0) {
    raise_failure();
    std::this_thread::sleep_for(kPause);
  }
}

TORCH_LIBRARY_IMPL(symm_mem, PrivateUse1, m) {
  m.impl("_async_input_mm", torch::CppFunction::makeFromBoxedFunction<&boxed_product>());
  m.impl("stream_write_value32_", torch::CppFunction::makeFromBoxedFunction<&boxed_write>());
}

}  // namespace async_device
