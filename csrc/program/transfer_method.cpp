#include "program/transfer_method.h"

#include <algorithm>

namespace shardwright {
namespace {

// Groups of more ranks always use messages, because examining every pair of ranks takes more time than an all-to-all
// saves.
constexpr size_t kMaxGroupForPairs = 512;

// Single messages of Gloo can stall, but its all-to-all does not. Up to this number of ranks, an all-to-all is faster
// even if some pairs exchange nothing.
constexpr size_t kMaxSparseAllToAll = 8;

// Returns the method among `num_ranks` ranks. `all_pairs_exchange` is true if every rank has a message for every other.
// `stalls` is true if single messages of the transport may stall.
TransferMethod transfer_method_of_exchange(size_t num_ranks, bool all_pairs_exchange, bool stalls) {
  const bool suits_all_to_all = all_pairs_exchange || (stalls && num_ranks <= kMaxSparseAllToAll);
  return suits_all_to_all ? TransferMethod::kAllToAll : TransferMethod::kMessages;
}

// Returns the method of an all-gather within a group.
TransferMethod transfer_method_of_gather(const Step& step, const MeshExchange& exchange, MeshExchange::Group& group,
                                         Lowering lowering) {
  if (gathers_natively(lowering, step.rounds == 1 && exchange.is_even(group))) return TransferMethod::kAllGather;
  const bool copies = lowering.copies_gather(group.size, step.before.largest_part_bytes());
  return copies ? TransferMethod::kAllToAll : TransferMethod::kMessages;
}

}  // namespace

DataMove data_move_of(const Step& step, const MeshExchange& exchange, MeshExchange::Group& group, size_t member,
                      Lowering lowering, bool named_groups_only) {
  if (step.op == StepOp::kAllGather) return {transfer_method_of_gather(step, exchange, group, lowering), {}};
  const auto k = static_cast<size_t>(group.size);
  if (k > kMaxGroupForPairs) return {TransferMethod::kMessages, {}};
  if (lowering.narrows_groups && !named_groups_only) {
    const Components& all = exchange.components(group);
    const size_t index = all.of_member[member];
    const std::vector<size_t>& component = all.members[index];
    if (component.size() == 1) return {};
    return {transfer_method_of_exchange(component.size(), all.all_pairs_exchange[index], true), component};
  }
  if (k == 1) return {};
  return {transfer_method_of_exchange(k, exchange.all_exchange(group), false), {}};
}

TransferMethod transfer_method_between_meshes(size_t num_ranks, Lowering lowering) {
  return transfer_method_of_exchange(num_ranks, false, lowering.narrows_groups);
}

TransferMethod transfer_method_of_reduced_chunks(int64_t chunk_bytes) {
  return chunk_bytes <= kMaxCopiedGatherBytes ? TransferMethod::kAllToAll : TransferMethod::kMessages;
}

bool gathers_natively(Lowering lowering, bool parts_are_equal) { return lowering.gathers && parts_are_equal; }

bool all_to_alls_use_messages(const Step& step, int64_t shares, Lowering lowering) {
  const int64_t largest = std::max(step.before.largest_part_bytes(), step.after.largest_part_bytes());
  const auto group_size = is_cross_or_rearrange(step.op)
                              ? static_cast<int64_t>(ranks_of(step.before.mesh(), step.after.mesh()).size())
                              : step.before.mesh().group_size(step.mesh_dims);
  return lowering.uses_messages(largest / (group_size * shares * step.rounds));
}

}  // namespace shardwright
