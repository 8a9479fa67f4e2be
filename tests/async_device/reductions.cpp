#include "reductions.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace async_device {
namespace {

using c10d::ReduceOp;

constexpr std::array kCarried = {at::kChar,           at::kByte,        at::kInt,           at::kLong,
                                 at::kHalf,           at::kBFloat16,    at::kFloat,         at::kDouble,
                                 at::kBool,           at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz,
                                 at::kFloat8_e5m2fnuz};

int64_t detail_of(const Reduction& reduction, int root = 0) {
  return static_cast<int64_t>(reduction.dtype) + 1000 * root + 1'000'000 * static_cast<int64_t>(reduction.op);
}

Memory seen_as(const Memory& memory, const Reduction& reduction) {
  return {memory.data, memory.count * reduction.per_element, reduction.dtype};
}

// Reduces in the order of ranks, so that all ranks get the same bits.
at::Tensor reduced(std::vector<at::Tensor> parts, const Reduction& reduction) {
  if (reduction.op == ReduceOp::PREMUL_SUM) {
    for (at::Tensor& part : parts) part = part.mul(reduction.factor);
  }
  at::Tensor result = parts[0].clone();
  for (size_t i = 1; i < parts.size(); ++i) {
    switch (reduction.op) {
      case ReduceOp::PRODUCT:
        result.mul_(parts[i]);
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, parts[i]);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, parts[i]);
        break;
      default:
        result.add_(parts[i]);
    }
  }
  if (reduction.op != ReduceOp::AVG) return result;
  const auto num = static_cast<int64_t>(parts.size());
  return at::isIntegralType(reduction.dtype, false) ? result.div(num, "trunc") : result.div(num);
}

void write(const at::Tensor& from, const Memory& to) {
  if (to.bytes() > 0) std::memcpy(to.data, from.contiguous().const_data_ptr(), static_cast<size_t>(to.bytes()));
}

// Sends `to[r]` to rank r and returns the contributions of all ranks, in their order. If there is a root, other ranks
// only send.
std::vector<at::Tensor> contributions(Communicator& communicator, Kind kind, const std::vector<Memory>& to,
                                      const Reduction& reduction, int rank, int root = -1) {
  const int size = static_cast<int>(to.size());
  std::vector<at::Tensor> parts;
  Moves moves;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) {
      parts.push_back(to[rank].as_cpu().clone());
      continue;
    }
    if (root < 0 || peer == root) moves.sends.push_back({peer, to[peer]});
    if (root >= 0 && rank != root) continue;
    parts.push_back(at::empty({to[rank].count}, at::TensorOptions(reduction.dtype)));
    moves.receives.push_back({peer, Memory::of(parts.back())});
  }
  communicator.exchange(kind, detail_of(reduction, std::max(root, 0)), moves);
  return parts;
}

}  // namespace

void check_dtype(at::ScalarType dtype, const char* what) {
  TORCH_CHECK_TYPE(std::find(kCarried.begin(), kCarried.end(), dtype) != kCarried.end(), "strict: ", what,
                   " has dtype ", dtype, ", which NCCL does not carry; send bytes");
}

Reduction reduction_of(const ReduceOp& op, at::ScalarType dtype, bool allows_complex, const char* what) {
  Reduction reduction{op.op_, 1, dtype, 1};
  const bool is_linear = op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM;
  if (at::isComplexType(dtype) && allows_complex) {
    TORCH_CHECK_VALUE(is_linear, "strict: ", what, " does not reduce ", dtype, " but by sum and average");
    reduction.dtype = c10::toRealValueType(dtype);
    reduction.per_element = 2;
  }
  check_dtype(reduction.dtype, what);
  TORCH_CHECK_TYPE(!at::isFloat8Type(dtype), "strict: ", what, " does not reduce ", dtype);
  TORCH_CHECK_VALUE(is_linear || op.op_ == ReduceOp::PRODUCT || op.op_ == ReduceOp::MIN || op.op_ == ReduceOp::MAX,
                    "strict: ", what, " has reduction number ", static_cast<int>(op.op_), ", which NCCL does not know");
  if (dtype == at::kBool) {
    TORCH_CHECK_TYPE(op.op_ != ReduceOp::AVG, "strict: ", what, " does not average ", dtype);
    reduction.dtype = at::kByte;
    if (op.op_ == ReduceOp::SUM) reduction.op = ReduceOp::MAX;
  }
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    TORCH_CHECK_TYPE(at::isFloatingType(reduction.dtype), "strict: ", what, " does not scale ", dtype);
    const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(supplement && !supplement->tensor_factor.defined(), "strict: ", what,
                      " takes a number as factor");
    reduction.factor = supplement->double_factor;
  }
  return reduction;
}

Communicator::Body all_reducing(const at::Tensor& tensor, const Reduction& reduction, int rank, int size) {
  const Memory memory = seen_as(Memory::of(tensor), reduction);
  return [=](Communicator& communicator) {
    const std::vector<Memory> to(size, memory);
    write(reduced(contributions(communicator, Kind::kAllReduce, to, reduction, rank), reduction), memory);
  };
}

Communicator::Body reducing(const at::Tensor& tensor, const Reduction& reduction, int root, int rank, int size) {
  const Memory memory = seen_as(Memory::of(tensor), reduction);
  return [=](Communicator& communicator) {
    const std::vector<Memory> to(size, memory);
    const auto parts = contributions(communicator, Kind::kReduce, to, reduction, rank, root);
    if (rank == root) write(reduced(parts, reduction), memory);
  };
}

Communicator::Body reduce_scattering(const Memory& output, const std::vector<Memory>& parts, const Reduction& reduction,
                                     int rank) {
  std::vector<Memory> to;
  for (const Memory& part : parts) to.push_back(seen_as(part, reduction));
  return [to = std::move(to), output = seen_as(output, reduction), reduction, rank](Communicator& communicator) {
    write(reduced(contributions(communicator, Kind::kReduceScatter, to, reduction, rank), reduction), output);
  };
}

}  // namespace async_device
