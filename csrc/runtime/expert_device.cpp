#include "runtime/expert_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

namespace shardwright {
namespace {

// Returns the options of an int64 tensor.
at::TensorOptions longs(c10::Device device) { return at::TensorOptions(at::kLong).device(device); }

// Returns an int64 tensor of the values.
at::Tensor as_tensor(const std::vector<int64_t>& values, c10::Device device) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(device);
}

// Returns 0, 1, ..., n - 1.
at::Tensor numbers(int64_t n, at::TensorOptions options) {
  at::Tensor out = at::empty({n}, options);
  if (n > 0) at::arange_out(out, n);  // `out` has its size already, so the host does not wait for it
  return out;
}

// Returns `size` elements: values[i] at indices[i], and -1 elsewhere. Values with indices[i] == size are left out.
at::Tensor scattered(int64_t size, const at::Tensor& indices, const at::Tensor& values) {
  return at::full({size + 1}, -1, values.options()).scatter_(0, indices, values).narrow(0, 0, size);
}

// Returns the number of steps from one rank to another in cyclic order: (to - from) modulo num_ranks.
at::Tensor cyclic_distance(const at::Tensor& from, const at::Tensor& to, int64_t num_ranks) {
  return (to - from).remainder(num_ranks);
}

}  // namespace

DevicePlacement::DevicePlacement(const ExpertPlacement& placement, c10::Device device)
    : has_copies(placement.has_copies()), num_ranks(placement.num_ranks()) {
  const int64_t columns = has_copies ? num_ranks : 1;
  std::vector<int64_t> codes((placement.num_experts() + 1) * columns, 0);
  for (int64_t expert = 0; expert < placement.num_experts(); ++expert) {
    for (const int32_t replica : placement.replicas_of(expert)) {
      const int64_t column = has_copies ? placement.rank_of_replica()[replica] : 0;
      codes[(expert + 1) * columns + column] = replica + 1;
    }
  }
  std::vector<int64_t> targets{num_ranks};
  targets.insert(targets.end(), placement.rank_of_replica().begin(), placement.rank_of_replica().end());
  code_of = as_tensor(codes, device).view({placement.num_experts() + 1, columns});
  target_of = as_tensor(targets, device);
}

at::Tensor choose_replicas_on_device(const DevicePlacement& placement, const at::Tensor& expert_ids, int rank) {
  const int64_t tokens = expert_ids.size(0);
  const int64_t per_token = expert_ids.size(1);
  const int64_t ranks = placement.num_ranks;
  const at::Tensor flat_ids = (expert_ids + 1).reshape({-1});
  at::Tensor code_on_rank =
      placement.code_of.index_select(0, flat_ids).view({tokens, per_token, placement.code_of.size(1)});
  if (!placement.has_copies) return code_on_rank.squeeze(2).to(at::kInt);
  const at::Tensor rank_numbers = numbers(ranks, longs(expert_ids.device()));
  const at::Tensor is_held = code_on_rank.gt(0);
  const at::Tensor num_replicas = is_held.sum(2);
  const at::Tensor is_single = num_replicas.eq(1);
  at::Tensor codes = at::where(is_single, code_on_rank.sum(2), at::zeros({}, code_on_rank.options()));
  // [tokens, ranks]: true for ranks that the token is sent to anyway. Of these, the first in cyclic order from this
  // rank on is preferred.
  const at::Tensor is_visited = (is_held & is_single.unsqueeze(2)).any(1) | rank_numbers.eq(rank);
  const at::Tensor nearness = ranks - cyclic_distance(at::full({}, rank, rank_numbers.options()), rank_numbers, ranks);
  // Sets the missing codes to those of the ranks `picked`, from the table `allowed` of codes by rank.
  const auto choose = [&](const at::Tensor& allowed, const at::Tensor& picked) {
    const at::Tensor index = picked.expand({tokens, per_token}).unsqueeze(2);
    codes = at::where(codes.eq(0), allowed.gather(2, index).squeeze(2), codes);
  };
  const at::Tensor code_on_visited = code_on_rank * is_visited.unsqueeze(1);
  choose(code_on_visited, at::argmax(code_on_visited.gt(0) * nearness, 2));
  const at::Tensor token_numbers = numbers(tokens, longs(expert_ids.device())).unsqueeze(1);
  const at::Tensor preference = ranks - 1 - cyclic_distance(token_numbers + rank, rank_numbers, ranks);
  for (int64_t j = 0; j < per_token; ++j) {
    const at::Tensor num_pending = (is_held & codes.eq(0).unsqueeze(2)).sum(1);
    choose(code_on_rank, at::argmax(num_pending * ranks + preference, 1, /*keepdim=*/true));
  }
  return codes.to(at::kInt);
}

DeviceRoutes route_rows_on_device(const DevicePlacement& placement, const at::Tensor& codes, int64_t rows_per_rank) {
  const int64_t tokens = codes.size(0);
  const int64_t ranks = placement.num_ranks;
  const auto options = longs(codes.device());
  const at::Tensor target = placement.target_of.index_select(0, codes.reshape({-1}).to(at::kLong)).view(codes.sizes());
  const at::Tensor is_target = at::zeros({tokens, ranks + 1}, options).scatter_(1, target, 1).narrow(1, 0, ranks);
  const at::Tensor row_in_rank = is_target.cumsum(0) - 1;
  const at::Tensor has_row = is_target.gt(0) & row_in_rank.lt(rows_per_rank);
  const at::Tensor rank_numbers = numbers(ranks, options);
  const at::Tensor no_row = at::full({}, -1, options);
  DeviceRoutes routes;
  routes.rows_of_token = at::where(has_row, row_in_rank + rank_numbers * rows_per_rank, no_row);
  const int64_t num_rows = ranks * rows_per_rank;
  const at::Tensor token_numbers = numbers(tokens, options).unsqueeze(1).expand({tokens, ranks});
  const at::Tensor targets = at::where(has_row, routes.rows_of_token, at::full({}, num_rows, options));
  routes.send_rows = scattered(num_rows, targets.reshape({-1}), token_numbers.reshape({-1}));
  const at::Tensor has_any = at::cat({has_row, at::zeros({tokens, 1}, has_row.options())}, 1);
  routes.dropped = (codes.ne(0) & has_any.gather(1, target).eq(false)).sum();
  if (codes.size(1) < ranks) {  // keep only the ranks that a token is sent to, in ascending order
    const at::Tensor order = at::argsort(has_row.eq(false).to(at::kInt), /*stable=*/true, 1);
    routes.rows_of_token = routes.rows_of_token.gather(1, order.narrow(1, 0, codes.size(1)));
  }
  return routes;
}

DeviceExpansion expand_rows_on_device(const at::Tensor& codes, int64_t first_replica, int64_t num_local,
                                      const std::optional<at::Tensor>& origins, int64_t capacity, int64_t max_pairs) {
  const auto options = longs(codes.device());
  const int64_t num_pairs = codes.numel();
  const at::Tensor local = codes.to(at::kLong) - 1 - first_replica;
  const at::Tensor is_local = local.ge(0) & local.lt(num_local);
  at::Tensor expert = at::where(is_local, local, at::full({}, num_local, options));
  at::Tensor pairs = numbers(num_pairs, options).view(codes.sizes());
  if (origins) {
    const at::Tensor order = at::argsort(*origins, /*stable=*/true, 0);
    expert = expert.index_select(0, order);
    pairs = pairs.index_select(0, order);
  }
  const auto [by_expert, order] = at::sort(expert.reshape({-1}), /*stable=*/true, 0, /*descending=*/false);
  const at::Tensor pair = pairs.reshape({-1}).index_select(0, order);
  const at::Tensor bounds = at::searchsorted(by_expert, numbers(num_local + 2, options));
  const at::Tensor uncapped_counts = bounds.narrow(0, 1, num_local + 1) - bounds.narrow(0, 0, num_local + 1);
  const at::Tensor index_in_expert = numbers(num_pairs, options) - bounds.index_select(0, by_expert);
  const at::Tensor is_kept = by_expert.lt(num_local) & index_in_expert.lt(capacity);
  const at::Tensor counts = uncapped_counts.clamp_max(capacity);
  const at::Tensor copy = index_in_expert + (counts.cumsum(0) - counts).index_select(0, by_expert);
  DeviceExpansion expansion;
  expansion.counts = counts.narrow(0, 0, num_local);
  expansion.dropped = (uncapped_counts - counts).narrow(0, 0, num_local).sum();
  expansion.pairs = scattered(max_pairs, at::where(is_kept, copy, at::full({}, max_pairs, options)), pair);
  expansion.copies =
      scattered(num_pairs, pair, at::where(is_kept, copy, at::full({}, -1, options))).view(codes.sizes());
  return expansion;
}

}  // namespace shardwright
