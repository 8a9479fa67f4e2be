// The memory of moves on one mesh. The sketches have the instructions that exchanges.cpp and reductions.cpp emit.
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "moves/collectives.h"
#include "moves/step_exchange.h"
#include "program/builder.h"
#include "program/step_memory.h"
#include "program/transfer_method.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Maximum size of a group whose members are listed. In larger groups, all exchanges are messages between the ranks that
// have data for each other, which are found without a list (exchange/mesh_exchange.h).
constexpr int64_t kMaxGroupListed = 512;

// The memory of a move on one mesh. An exchange is *regular* if all of its messages have one size and its counts have
// closed forms (exchange/mesh_exchange.h). Then a few members of a group determine the memory of all members.
class MoveMemory : public StepMemory {
 public:
  MoveMemory(const Step& step, const Plan& plan)
      : step_(step),
        lowering_(plan.lowering),
        named_groups_only_(plan.named_groups_only),
        is_native_(reduces_natively(step, plan.lowering)),
        group_size_(step.before.mesh().group_size(step.mesh_dims)),
        exchange_(mesh_exchange_of(step)) {}

  void split_classes(RankClasses& classes) const override {
    const bool is_reduction = step_.op == StepOp::kReduceScatter || step_.op == StepOp::kAllReduce;
    const bool moves = !is_local(step_.op) && !is_reduction;
    const bool is_gather = step_.op == StepOp::kAllGather;
    const bool order_matters = !lowering_.gathers || !is_gather;
    const bool lists_members = is_gather || !group_is_large();
    classes.add(step_, moves && order_matters && lists_members);
    // The connected components, and the order of their ranks, depend on what each rank sends to each peer.
    const bool depends_on_components =
        lowering_.narrows_groups && !named_groups_only_ && !is_gather && !exchange_.is_regular_and_full();
    if (moves && depends_on_components && lists_members) classes.split_all(step_.mesh_dims);
    // On a mesh whose ranks do not ascend, groups may differ in the order of their ranks.
    if (!is_local(step_.op) && !ranks_ascend(step_.before.mesh())) classes.split_all(MeshDimSet::from_bits(~0u));
  }

  std::optional<Traffic> traffic_determining_peak(Rank rank) const override {
    const bool exchanges =
        step_.op == StepOp::kAllToAll || step_.op == StepOp::kPermute || step_.op == StepOp::kExchange;
    if (!exchanges || !group_is_large() || !exchange_.is_regular()) return std::nullopt;
    return exchange_.traffic_at(position_of(rank));
  }
  std::optional<Traffic> traffic_upper_bound() const override { return exchange_.upper_bound(); }

  // A rank's memory in an exchange by messages depends only on its profile: the number, lengths and contiguity of its
  // messages. Steps of several rounds have no profile.
  bool is_like_earlier_rank(Rank rank) override {
    const bool exchanges =
        step_.op == StepOp::kAllToAll || step_.op == StepOp::kPermute || step_.op == StepOp::kExchange;
    if (!exchanges || exchange_.is_regular()) return false;
    const Position position = position_of(rank);
    const std::optional<std::vector<int>> profile = exchange_.profile(position);
    if (!profile || !(group_is_large() || move_of(position).second.transfer_method == TransferMethod::kMessages))
      return false;
    return !profiles_seen_.insert(*profile).second;
  }

  void sketch_rank(Sketch& sketch, Rank rank, int current, int next) override {
    const Position position = position_of(rank);
    switch (step_.op) {
      case StepOp::kZeroFill:
        if (sketch.count_of(next) > 0) sketch.emit({next});
        [[fallthrough]];
      case StepOp::kSlice:
      case StepOp::kPartition:
        return copy_own(sketch, exchange_.kept_extent(position).count, current, next);
      case StepOp::kAllGather:
      case StepOp::kAllToAll:
      case StepOp::kPermute:
      case StepOp::kExchange:
        return emit_data_move(sketch, position, current, next);
      case StepOp::kReduceScatter:
        return emit_reduce_scatter(sketch, position, current, next);
      case StepOp::kAllReduce:
        return emit_all_reduce(sketch, position, current, next);
      case StepOp::kCross:
      case StepOp::kRearrange:
        break;
    }
    throw InvariantError("MoveMemory got a crossing or a rearrangement, whose memory memory_of_crossing returns");
  }

 private:
  using Group = MeshExchange::Group;

  // Returns true if the members of the step's groups are not listed.
  bool group_is_large() const { return group_size_ > kMaxGroupListed; }
  // Returns the position of a rank that is on the mesh.
  Position position_of(Rank rank) const { return *step_.before.mesh().position_of(rank); }

  // Emits the copy of the `own` elements that stay on the rank, unless there are none.
  static void copy_own(Sketch& sketch, int64_t own, int current, int next) {
    if (own > 0) sketch.emit({current, next});
  }

  // Returns the group of the rank at a position, and that rank's transfer. The group's members are listed only if
  // instructions depend on single members.
  std::pair<Group&, DataMove> move_of(int64_t position) {
    const bool lists_members = step_.op != StepOp::kAllGather || step_.policy != ReplicaPolicy::kAligned;
    Group& group =
        lists_members && !group_is_large() ? exchange_.group(position) : exchange_.group_without_members(position);
    const size_t me = MeshExchange::index_of(group, position);
    return {group, data_move_of(step_, exchange_, group, me, lowering_, named_groups_only_)};
  }

  // Emits a step that moves data without reducing it.
  void emit_data_move(Sketch& sketch, int64_t position, int current, int next) {
    const auto& [group, move] = move_of(position);
    if (!move.transfer_method) return copy_own(sketch, exchange_.kept_extent(position).count, current, next);
    switch (*move.transfer_method) {
      case TransferMethod::kAllGather:
        return emit_native_all_gather(sketch, position, current, next);
      case TransferMethod::kAllToAll: {
        const Group& listed = exchange_.group(position);
        std::vector<int64_t> partners;
        for (const size_t member : move.partners) partners.push_back(listed.positions[member]);
        return emit_all_to_alls(sketch, listed, position, partners.empty() ? listed.positions : partners, current,
                                next);
      }
      case TransferMethod::kMessages:
        return emit_messages(sketch, group, position, current, next);
    }
  }

  // Returns true if each member's part of `n` elements is one run of the result, and the runs follow each other in the
  // group's order. Then an all-gather can write to the result directly. The answer is cached for the group.
  bool gathers_in_place(int64_t position, int64_t n) {
    const Group& group = exchange_.group_without_members(position);
    const auto [entry, is_new] = gathers_in_place_.try_emplace(group.least, true);
    if (!is_new) return entry->second;
    const auto is_run_at = [&](int64_t member, int64_t first) {
      const Extent part = exchange_.full_transfer(member, position).in_round(0);
      return part.is_contiguous_needed && part.first_needed == first;
    };
    const Mesh& mesh = step_.before.mesh();
    if (exchange_.is_regular() && mesh.ranks_are_positions()) {
      // If parts are equal, the index of a part is linear in the coordinates of its rank.
      int64_t stride = 1;
      for (int d = mesh.ndim() - 1; d >= 0; --d) {
        if (!step_.mesh_dims.contains(d) || mesh.dim_size(d) == 1) continue;
        entry->second = entry->second && is_run_at(group.least + mesh.stride(d), stride * n);
        stride *= mesh.dim_size(d);
      }
      return entry->second;
    }
    const std::vector<int64_t>& members = exchange_.group(position).positions;
    for (size_t m = 0; m < members.size() && entry->second; ++m) {
      entry->second = is_run_at(members[m], static_cast<int64_t>(m) * n);
    }
    return entry->second;
  }

  // Emits an all-gather by the transport: into the result, or into a staging buffer followed by a copy.
  void emit_native_all_gather(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t n = exchange_.num_held(position);
    const int64_t k = exchange_.group_without_members(position).size;
    if (gathers_in_place(position, n)) {
      sketch.emit({current, next});
      return sketch.wait({current, next});
    }
    const int staging = sketch.new_buffer(n * k);
    sketch.emit({current, staging});
    copy_own(sketch, exchange_.kept_extent(position).count, current, next);
    sketch.wait({current, staging});
    if (k > 1) sketch.emit({staging, next});
  }

  // Returns both ways to send one round of an all-to-all. With one round the totals are known from the rank's traffic,
  // so peers are added only until it is known which of the four lists of messages are runs.
  AllToAllOptions options_of_round(const Group& group, int64_t position, const std::vector<int64_t>& partners,
                                   int64_t round) {
    const bool is_gather = step_.op == StepOp::kAllGather;  // a rank sends the same data to all members
    AllToAllOptions options;
    const Extent own = exchange_.kept_extent(position);
    AllToAllOptions::Totals totals;
    if (step_.rounds == 1) {
      const Traffic traffic = exchange_.traffic_at(position);
      const int64_t item = step_.before.dtype().size_bytes();
      totals = {traffic.sent_bytes / item, traffic.received_bytes / item, own.count};
    }
    std::optional<Transfer> sends;
    for (const int64_t member : partners) {
      if (step_.rounds == 1 && options.are_complete(totals)) break;
      if (member == position) {
        options.add_own(own);
        continue;
      }
      if (!sends || !is_gather) sends = exchange_.transfer(group, position, member);
      const Transfer received = exchange_.transfer(group, member, position);
      options.add_peer(sends->in_round(round), received.in_round(round));
    }
    if (step_.rounds == 1) options.set_totals(totals);
    return options;
  }

  // Emits all rounds of an exchange by all-to-alls.
  void emit_all_to_alls(Sketch& sketch, const Group& group, int64_t position, const std::vector<int64_t>& partners,
                        int current, int next) {
    const Extent own = exchange_.kept_extent(position);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const AllToAllOptions options = options_of_round(group, position, partners, round);
      sketch_all_to_all(sketch, options, own.count, round, step_.rounds, current, next);
    }
  }

  // Emits all rounds of an exchange by messages.
  void emit_messages(Sketch& sketch, const Group& group, int64_t position, int current, int next) {
    std::vector<PackingCounts> rounds(step_.rounds);
    if (exchange_.is_regular()) {
      add_regular_messages(rounds, position);
    } else {
      for (const auto& [transfer, times] : exchange_.message_classes(group, position, Direction::kSend)) {
        for (int64_t round = 0; round < step_.rounds; ++round) rounds[round].add_sent(transfer.in_round(round), times);
      }
      for (const auto& [transfer, times] : exchange_.message_classes(group, position, Direction::kReceive)) {
        for (int64_t round = 0; round < step_.rounds; ++round) {
          rounds[round].add_received(transfer.in_round(round), times);
        }
      }
    }
    const int64_t own = exchange_.kept_extent(position).count;
    for (int64_t round = 0; round < step_.rounds; ++round) {
      sketch_messages(sketch, rounds[round], own, round, current, next);
    }
  }

  // Adds the messages of a regular exchange to each round. All pairs of ranks that exchange anything have transfers of
  // one size and number of runs, so one transfer and the rank's traffic determine all of its messages.
  void add_regular_messages(std::vector<PackingCounts>& rounds, int64_t position) {
    const Traffic traffic = exchange_.traffic_at(position);
    if (traffic.received_bytes == 0 && traffic.sent_bytes == 0) return;
    const Transfer& transfer = exchange_.any_transfer(position);
    const int64_t transfer_bytes = transfer.count() * step_.before.dtype().size_bytes();
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Extent message = transfer.in_round(round);
      rounds[round].add_sent(message, traffic.sent_bytes / transfer_bytes);
      rounds[round].add_received(message, traffic.received_bytes / transfer_bytes);
    }
  }

  // The messages that each member of a group sends in a reduce-scatter. Members hold the same elements, so they all
  // send the same messages.
  struct ScatterMessages {
    std::vector<RunOfMessages> rounds;  // the messages of each round
    std::vector<bool> is_even;          // by round: all members receive equally many elements
  };

  // Determines if the messages that the rank at `position` sends in a step of one round are one run, and the first
  // element of the run, without listing the messages. The caller sets the total of the result. Returns nullopt unless
  // the exchange is regular and the parts of all members have one length. Then the index of a part is linear in the
  // coordinates of its member, so the first member and the next member along each mesh dim show if all parts are
  // consecutive.
  std::optional<RunOfMessages> run_of_equal_parts(int64_t position) {
    const Mesh& mesh = step_.before.mesh();
    if (step_.rounds > 1 || !exchange_.is_regular() || !mesh.ranks_are_positions()) return std::nullopt;
    const int64_t least = exchange_.group_without_members(position).least;
    const Extent first = exchange_.full_transfer(position, least).in_round(0);
    bool is_run = first.is_contiguous_held && first.count > 0;
    int64_t stride = 1;
    for (int d = mesh.ndim() - 1; d >= 0; --d) {
      if (!step_.mesh_dims.contains(d) || mesh.dim_size(d) == 1) continue;
      const Extent next = exchange_.full_transfer(position, least + mesh.stride(d)).in_round(0);
      if (next.count != first.count) return std::nullopt;
      is_run = is_run && next.is_contiguous_held && next.first_held == first.first_held + stride * first.count;
      stride *= mesh.dim_size(d);
    }
    RunOfMessages run;
    run.add(first.count, first.first_held, is_run);
    return run;
  }

  // Adds each member's part to the messages of its rounds, in the order of the group. Stops as soon as the messages of
  // no round are one run, because further parts change only the totals. The caller sets the totals.
  void add_parts_in_order(std::vector<RunOfMessages>& rounds, int64_t position) {
    for (const int64_t member : exchange_.group(position).positions) {
      const Transfer part = exchange_.full_transfer(position, member);
      bool is_any_run = false;
      for (int64_t round = 0; round < step_.rounds; ++round) {
        const Extent message = part.in_round(round);
        rounds[round].add(message.count, message.first_held, message.is_contiguous_held);
        is_any_run = is_any_run || rounds[round].is_run();
      }
      if (!is_any_run) break;
    }
  }

  // Returns the messages that each member of this position's group sends, from a cache.
  const ScatterMessages& scatter_messages(int64_t position) {
    const auto [entry, is_new] = scatter_messages_.try_emplace(exchange_.group_without_members(position).least);
    ScatterMessages& messages = entry->second;
    if (!is_new) return messages;
    messages.rounds.resize(step_.rounds);
    if (const std::optional<RunOfMessages> run = run_of_equal_parts(position)) {
      messages.rounds[0] = *run;
    } else {
      add_parts_in_order(messages.rounds, position);
    }
    const std::map<int64_t, int64_t> needs = exchange_.members_by_need(position);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      std::set<int64_t> counts;
      int64_t total = 0;
      for (const auto& [need, members] : needs) {
        const Interval range = in_round({0, need}, round, step_.rounds);
        counts.insert(range.end - range.begin);
        total += (range.end - range.begin) * members;
      }
      messages.rounds[round].set_total(total);
      messages.is_even.push_back(counts.size() == 1);
    }
    return messages;
  }

  // Emits all rounds of a reduce-scatter.
  void emit_reduce_scatter(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t num_held = exchange_.num_held(position);
    if (num_held == 0) return;
    current = emit_power(sketch, current, num_held);
    const ScatterMessages& messages = scatter_messages(position);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const RunOfMessages& sent = messages.rounds[round];
      if (sent.total() == 0) continue;
      const Interval own_range = in_round({0, sketch.count_of(next)}, round, step_.rounds);
      const int64_t own = own_range.end - own_range.begin;
      int packed = current;
      if (!sent.is_run()) {
        packed = sketch.new_buffer(sent.total());
        sketch.emit({current, packed});
      }
      if (messages.is_even[round] && is_native_) {
        sketch.emit({packed, next});
        sketch.wait({packed, next});
        continue;
      }
      const int staging = sketch.new_buffer(own * exchange_.group_without_members(position).size);
      sketch.emit({packed, staging});
      sketch.wait({packed, staging});
      if (own > 0) sketch.emit({next, staging});
    }
  }

  // Emits all rounds of an all-reduce: natively, as an exchange of two ranks, or in chunks (reductions.cpp).
  void emit_all_reduce(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t n = sketch.count_of(next);
    if (n == 0) return;
    if (is_native_) {
      sketch.emit({current, next});
      return sketch.wait({next});
    }
    const int64_t me = index_in_group(step_.before.mesh(), position, step_.mesh_dims);
    const int64_t k = exchange_.group_without_members(position).size;
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Interval range = in_round({0, n}, round, step_.rounds);
      const int64_t length = range.end - range.begin;
      if (length == 0) continue;
      const int contribution = emit_power(sketch, current, length);
      if (k == 2) {
        const int staging = sketch.new_buffer(length);
        sketch.emit({contribution, staging});
        sketch.wait({contribution, staging});
        sketch.emit({contribution, staging, next});
        continue;
      }
      const Interval own_chunk = flat_chunk(length, k, me);
      const int64_t own = own_chunk.end - own_chunk.begin;
      const int staging = sketch.new_buffer(own * k);
      sketch.emit({contribution, staging});
      sketch.wait({contribution, staging});
      if (own > 0) sketch.emit({next, staging});
      const Interval first = flat_chunk(length, k, 0);
      const int64_t chunk_bytes = (first.end - first.begin) * step_.before.dtype().size_bytes();
      const bool copies = transfer_method_of_reduced_chunks(chunk_bytes) == TransferMethod::kAllToAll;
      const int gathered = copies ? sketch.new_buffer(own * k) : kNoBuffer;
      if (copies && own > 0) sketch.emit({next, gathered});
      sketch.emit({gathered, next});
      sketch.wait({gathered, next});
    }
  }

  // Emits the powers of a pending norm. Returns the new buffer with the powers, or `current` if no norm is pending.
  int emit_power(Sketch& sketch, int current, int64_t count) const {
    if (reduction_of(step_).power == 1) return current;
    const int powers = sketch.new_buffer(count);
    sketch.emit({current, powers});
    return powers;
  }

  const Step& step_;
  Lowering lowering_;
  bool named_groups_only_;
  bool is_native_;
  int64_t group_size_;
  MeshExchange exchange_;
  // Caches, by the first position of a group.
  std::map<int64_t, bool> gathers_in_place_;
  std::map<int64_t, ScatterMessages> scatter_messages_;
  std::set<std::vector<int>> profiles_seen_;
};

}  // namespace

std::unique_ptr<StepMemory> memory_of_move(const Step& step, const Plan& plan) {
  return std::make_unique<MoveMemory>(step, plan);
}

}  // namespace shardwright
