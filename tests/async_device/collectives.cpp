// The collectives of strict process groups.
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "process_group.h"
#include "reductions.h"

namespace async_device {
namespace {

const Tensors& only(const std::vector<Tensors>& lists, int size, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1 && static_cast<int>(lists.front().size()) == size, "strict: ", what,
                    " takes one list of ", size, " tensors, one per rank");
  return lists.front();
}

void check_same(const Memory& memory, const Memory& other, int64_t count, const char* what) {
  TORCH_CHECK_VALUE(memory.dtype == other.dtype, "strict: ", what, " takes one dtype, got ", memory.dtype, " and ",
                    other.dtype);
  TORCH_CHECK_VALUE(memory.count == count, "strict: ", what, " expects ", count, " elements, got ", memory.count);
}

int64_t detail_of(at::ScalarType dtype, int64_t root = 0) { return static_cast<int64_t>(dtype) + 1000 * root; }

std::vector<Memory> equal_parts(const Memory& whole, int num) {
  std::vector<Memory> parts;
  for (int i = 0; i < num; ++i) parts.push_back(whole.part(i * (whole.count / num), whole.count / num));
  return parts;
}

// Returns the parts of all_to_all_single: rows by rank, evenly divided if there are no splits.
std::vector<Memory> split_parts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int num) {
  const char* what = name_of(Kind::kAllToAll);
  const Memory whole = memory_of(tensor, what);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % num == 0, "strict: ", what, " without splits needs rows that ", num, " divides, got ",
                      rows);
    return equal_parts(whole, num);
  }
  TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == num, "strict: ", what, " takes ", num, " splits, got ",
                    splits.size());
  TORCH_CHECK_VALUE(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows, "strict: ", what, " has splits ",
                    splits, " of ", rows, " rows");
  const int64_t row = rows == 0 ? 0 : whole.count / rows;
  std::vector<Memory> parts;
  int64_t first = 0;
  for (const int64_t split : splits) {
    parts.push_back(whole.part(first * row, split * row));
    first += split;
  }
  return parts;
}

// Sends `to[r]` to rank r and receives `from[r]` from it.
Moves moves_between(const std::vector<Memory>& to, const std::vector<Memory>& from, int own) {
  Moves moves;
  for (int rank = 0; rank < static_cast<int>(to.size()); ++rank) {
    if (rank == own) continue;
    moves.sends.push_back({rank, to[rank]});
    moves.receives.push_back({rank, from[rank]});
  }
  moves.copies.emplace_back(to[own], from[own]);
  return moves;
}

std::vector<Tensors> with(std::vector<Tensors> lists, const Tensors& list) {
  lists.push_back(list);
  return lists;
}

}  // namespace

StrictGroup::Body StrictGroup::gathering(const Tensors& outputs, const at::Tensor& input) const {
  const char* what = name_of(Kind::kAllGather);
  const Memory own = memory_of(input, what);
  std::vector<Memory> from;
  if (outputs.size() == 1 && (size_ > 1 || outputs[0].numel() == input.numel())) {
    const Memory whole = memory_of(outputs[0], what);
    check_same(whole, own, own.count * size_, what);
    from = equal_parts(whole, size_);
  } else {
    for (const at::Tensor& output : outputs) from.push_back(memory_of(output, what));
    for (const Memory& part : from) check_same(part, own, part.count, what);
    check_same(from[rank_], own, own.count, what);
  }
  return moving(Kind::kAllGather, detail_of(own.dtype), moves_between(std::vector<Memory>(size_, own), from, rank_));
}

WorkPtr StrictGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective(Kind::kAllReduce, options.asyncOp, {tensors}, [&](const char* what) {
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    return all_reducing(tensor, reduction_of(options.reduceOp, tensor.scalar_type(), true, what), rank_, size_);
  });
}

WorkPtr StrictGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return collective(Kind::kAllReduce, options.asyncOp, {tensors}, [&](const char* what) {
    std::vector<Body> bodies;
    for (const at::Tensor& tensor : tensors) {
      check_tensor(tensor, what);
      const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), true, what);
      bodies.push_back(all_reducing(tensor, reduction, rank_, size_));
    }
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return collective(Kind::kReduce, options.asyncOp, {tensors}, [&](const char* what) {
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    check_root(options.rootRank, size_, what);
    const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), true, what);
    return reducing(tensor, reduction, static_cast<int>(options.rootRank), rank_, size_);
  });
}

WorkPtr StrictGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return collective(Kind::kBroadcast, options.asyncOp, {tensors}, [&](const char* what) {
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    check_root(options.rootRank, size_, what);
    Memory memory = Memory::of(tensor);
    if (tensor.is_complex()) memory = {memory.data, 2 * memory.count, c10::toRealValueType(memory.dtype)};
    check_dtype(memory.dtype, what);
    Moves moves;
    const int root = static_cast<int>(options.rootRank);
    if (rank_ != root) moves.receives.push_back({root, memory});
    for (int rank = 0; rank_ == root && rank < size_; ++rank) {
      if (rank != root) moves.sends.push_back({rank, memory});
    }
    return moving(Kind::kBroadcast, detail_of(memory.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, with(outputs, inputs),
                    [&](const char* what) { return gathering(only(outputs, size_, what), only(inputs, what)); });
}

WorkPtr StrictGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, {Tensors{output, input}},
                    [&](const char*) { return gathering({output}, input); });
}

WorkPtr StrictGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, {outputs, inputs}, [&](const char* what) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "strict: ", what, " takes as many outputs as inputs");
    std::vector<Body> bodies;
    for (size_t i = 0; i < inputs.size(); ++i) bodies.push_back(gathering({outputs[i]}, inputs[i]));
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  return collective(Kind::kReduceScatter, options.asyncOp, with(inputs, outputs), [&](const char* what) {
    const Memory output = memory_of(only(outputs, what), what);
    std::vector<Memory> parts;
    for (const at::Tensor& input : only(inputs, size_, what)) parts.push_back(memory_of(input, what));
    for (const Memory& part : parts) check_same(part, output, part.count, what);
    check_same(parts[rank_], output, output.count, what);
    return reduce_scattering(output, parts, reduction_of(options.reduceOp, output.dtype, false, what), rank_);
  });
}

WorkPtr StrictGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr StrictGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  return collective(Kind::kReduceScatter, options.asyncOp, {outputs, inputs}, [&](const char* what) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "strict: ", what, " takes as many outputs as inputs");
    std::vector<Body> bodies;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Memory output = memory_of(outputs[i], what);
      const Memory input = memory_of(inputs[i], what);
      check_same(input, output, output.count * size_, what);
      const Reduction reduction = reduction_of(options.reduceOp, output.dtype, false, what);
      bodies.push_back(reduce_scattering(output, equal_parts(input, size_), reduction, rank_));
    }
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return collective(Kind::kAllToAll, options.asyncOp, {Tensors{output, input}}, [&](const char* what) {
    const auto to = split_parts(input, input_splits, size_);
    const auto from = split_parts(output, output_splits, size_);
    check_same(from[rank_], to[rank_], to[rank_].count, what);
    return moving(Kind::kAllToAll, detail_of(to[0].dtype), moves_between(to, from, rank_));
  });
}

WorkPtr StrictGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return collective(Kind::kAllToAll, options.asyncOp, {outputs, inputs}, [&](const char* what) {
    std::vector<Memory> to;
    std::vector<Memory> from;
    TORCH_CHECK_VALUE(static_cast<int>(inputs.size()) == size_ && static_cast<int>(outputs.size()) == size_,
                      "strict: ", what, " takes lists of ", size_, " tensors, got ", inputs.size(), " and ",
                      outputs.size());
    for (const at::Tensor& input : inputs) to.push_back(memory_of(input, what));
    for (const at::Tensor& output : outputs) from.push_back(memory_of(output, what));
    check_same(from[rank_], to[rank_], to[rank_].count, what);
    return moving(Kind::kAllToAll, detail_of(to[0].dtype), moves_between(to, from, rank_));
  });
}

WorkPtr StrictGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return collective(Kind::kGather, options.asyncOp, with(outputs, inputs), [&](const char* what) {
    check_root(options.rootRank, size_, what);
    const int root = static_cast<int>(options.rootRank);
    const Memory own = memory_of(only(inputs, what), what);
    Moves moves;
    if (rank_ == root) {
      const Tensors& list = only(outputs, size_, what);
      for (int rank = 0; rank < size_; ++rank) {
        const Memory to = memory_of(list[rank], what);
        check_same(to, own, own.count, what);
        if (rank != root) moves.receives.push_back({rank, to});
        if (rank == root) moves.copies.emplace_back(own, to);
      }
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "strict: ", what, " takes outputs on the root alone");
      moves.sends.push_back({root, own});
    }
    return moving(Kind::kGather, detail_of(own.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return collective(Kind::kScatter, options.asyncOp, with(inputs, outputs), [&](const char* what) {
    check_root(options.rootRank, size_, what);
    const int root = static_cast<int>(options.rootRank);
    const Memory own = memory_of(only(outputs, what), what);
    Moves moves;
    if (rank_ == root) {
      const Tensors& list = only(inputs, size_, what);
      for (int rank = 0; rank < size_; ++rank) {
        const Memory from = memory_of(list[rank], what);
        check_same(from, own, own.count, what);
        if (rank != root) moves.sends.push_back({rank, from});
        if (rank == root) moves.copies.emplace_back(from, own);
      }
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "strict: ", what, " takes inputs on the root alone");
      moves.receives.push_back({root, own});
    }
    return moving(Kind::kScatter, detail_of(own.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::barrier(const c10d::BarrierOptions& options) {
  return collective(Kind::kBarrier, options.asyncOp, {}, [&](const char*) {
    const std::vector<Memory> nothing(size_);
    return moving(Kind::kBarrier, 0, moves_between(nothing, nothing, rank_));
  });
}

}  // namespace async_device
