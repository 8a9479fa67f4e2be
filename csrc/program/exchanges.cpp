// Compiles steps in which every rank receives what it lacks: all-gathers, all-to-alls and other exchanges on one mesh,
// crossings and rearrangements.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "exchange/mesh_exchange.h"
#include "layout/selection.h"
#include "moves/collectives.h"
#include "moves/step_exchange.h"
#include "program/builder.h"
#include "program/step_memory.h"
#include "program/transfer_method.h"
#include "program/transfers.h"
#include "support/error.h"

namespace shardwright {
namespace {

// One rank's messages in a step's exchange, divided into rounds, and the elements that stay on the rank.
class RankPart {
 public:
  // `participants` are this rank and all ranks that may send it data or receive data from it, ascending.
  RankPart(const Exchange& exchange, std::vector<Rank> participants, Rank rank, int64_t rounds)
      : participants_(std::move(participants)),
        rank_(rank),
        rounds_(rounds),
        sends_(exchange.messages(rank, Direction::kSend)),
        receives_(exchange.messages(rank, Direction::kReceive)),
        kept_(exchange.kept(rank)) {}

  // The part of a message that is sent in one round. `peer` is an index into the participants.
  struct Message {
    int64_t peer = -1;
    Selection elements;
  };
  // Return the messages that the rank sends, or receives, in a round.
  std::vector<Message> sends(int64_t round) const { return messages_in_round(sends_, round); }
  std::vector<Message> receives(int64_t round) const { return messages_in_round(receives_, round); }
  // The elements that stay on the rank; nullopt if it is not on both meshes.
  const std::optional<Selection>& kept() const { return kept_; }
  // Returns this rank's index among the participants.
  int64_t index() const { return index_of(rank_); }

 private:
  // Returns the index of a rank among the participants.
  int64_t index_of(Rank rank) const {
    return std::lower_bound(participants_.begin(), participants_.end(), rank) - participants_.begin();
  }

  // Returns the parts of `full_messages` that are sent in a round, without empty parts.
  std::vector<Message> messages_in_round(const std::vector<Exchange::Message>& full_messages, int64_t round) const {
    std::vector<Message> messages;
    for (const auto& [peer, elements] : full_messages) {
      const Interval range = in_round({0, elements.count()}, round, rounds_);
      if (range.begin < range.end) messages.push_back({index_of(peer), elements.slice(range.begin, range.end)});
    }
    return messages;
  }

  std::vector<Rank> participants_;
  Rank rank_;
  int64_t rounds_;
  std::vector<Exchange::Message> sends_;
  std::vector<Exchange::Message> receives_;
  std::optional<Selection> kept_;
};

// The ranks that take part in a step with this rank, and the collective or messages that they use.
struct Participants {
  std::vector<Rank> ranks;  // ascending, this one included
  TransferMethod transfer_method;
};

// Returns the participants of a step between meshes: all ranks of both. Returns nullopt if no rank receives anything.
std::optional<Participants> participants_between_meshes(const ProgramBuilder& builder, const Exchange& exchange) {
  if (!exchange.communicates()) return std::nullopt;
  return Participants{exchange.ranks(), transfer_method_between_meshes(exchange.ranks().size(), builder.lowering())};
}

// Returns the participants of a step on one mesh: this rank's group or a part of it (data_move_of). Returns nullopt if
// that is this rank alone.
std::optional<Participants> participants_on_mesh(const ProgramBuilder& builder, const Step& step,
                                                 const MeshExchange& exchange) {
  const Position here = builder.position_on(step.before.mesh());
  MeshExchange::Group& group = exchange.group(here);
  const size_t me = MeshExchange::index_of(group, here);
  const DataMove move = data_move_of(step, exchange, group, me, builder.lowering(), builder.named_groups_only());
  if (!move.transfer_method) return std::nullopt;
  std::vector<int64_t> partners = group.positions;
  if (!move.partners.empty()) {
    partners.clear();
    for (const size_t member : move.partners) partners.push_back(group.positions[member]);
  }
  return Participants{step.before.mesh().ranks_at(partners), *move.transfer_method};
}

// Returns the length of a message, and the index of its first element in the sender's and in the receiver's part where
// it is contiguous there (Extent in exchange/mesh_exchange.h).
Extent extent_of(const Selection& elements) {
  const int64_t held = elements.contiguous_in_sender();
  const int64_t needed = elements.contiguous_in_receiver();
  return {elements.count(), std::max<int64_t>(held, 0), std::max<int64_t>(needed, 0), held >= 0, needed >= 0};
}

// The memory of a crossing or rearrangement.
class CrossingMemory : public StepMemory {
 public:
  CrossingMemory(const Step& step, const Plan& plan)
      : step_(step),
        exchange_(exchange_of(step)),
        transfer_method_(transfer_method_between_meshes(exchange_->ranks().size(), plan.lowering)),
        communicates_(exchange_->communicates()) {}

  void sketch_rank(Sketch& sketch, Rank rank, int current, int next) override {
    const RankPart part(*exchange_, exchange_->ranks(), rank, step_.rounds);
    const int64_t own_count = part.kept() ? part.kept()->count() : 0;
    if (!communicates_) {
      if (own_count > 0) sketch.emit({current, next});
      return;
    }
    for (int64_t round = 0; round < step_.rounds; ++round) {
      if (transfer_method_ == TransferMethod::kAllToAll) {
        sketch_all_to_all(sketch, options_of_round(part, round), own_count, round, step_.rounds, current, next);
      } else {
        PackingCounts counts;
        for (const auto& message : part.sends(round)) counts.add_sent(extent_of(message.elements), 1);
        for (const auto& message : part.receives(round)) counts.add_received(extent_of(message.elements), 1);
        sketch_messages(sketch, counts, own_count, round, current, next);
      }
    }
  }

  void split_classes(RankClasses&) const override { throw InvariantError("ranks of a crossing have no classes"); }
  std::optional<Traffic> traffic_determining_peak(Rank) const override { return std::nullopt; }
  std::optional<Traffic> traffic_upper_bound() const override { return std::nullopt; }

 private:
  // Returns both ways to send a rank's messages in one round of an all-to-all: with and without its own part.
  static AllToAllOptions options_of_round(const RankPart& part, int64_t round) {
    std::map<int64_t, std::pair<Extent, Extent>> by_index;  // by index of the peer: sent to it, received from it
    for (const auto& message : part.sends(round)) by_index[message.peer].first = extent_of(message.elements);
    for (const auto& message : part.receives(round)) by_index[message.peer].second = extent_of(message.elements);
    if (part.kept()) by_index[part.index()];
    AllToAllOptions options;
    for (const auto& [peer, sent_and_received] : by_index) {
      if (peer != part.index()) {
        options.add_peer(sent_and_received.first, sent_and_received.second);
      } else {
        options.add_own(extent_of(*part.kept()));
      }
    }
    return options;
  }

  const Step& step_;
  std::unique_ptr<const Exchange> exchange_;
  TransferMethod transfer_method_;
  bool communicates_;
};

// Emits the exchange of a step: only local copies if there are no participants, otherwise one transfer per round.
void emit_exchange(ProgramBuilder& builder, const Step& step, const Exchange& step_exchange,
                   const std::optional<Participants>& participants, BufferId current, BufferId next) {
  if (!participants) {
    const std::optional<Selection> kept = step_exchange.kept(builder.rank());
    if (kept) builder.copy(current, next, kept->boxes(CopySide::local(), CopySide::local()));
    return;
  }
  const int group = builder.group_of_ranks(step.mesh_dims, participants->ranks);
  const RankPart part(step_exchange, participants->ranks, builder.rank(), step.rounds);
  for (int64_t round = 0; round < step.rounds; ++round) {
    TransferSet set{group, Messages(Messages::Side::kSent, current), Messages(Messages::Side::kReceived, next)};
    for (auto& [peer, elements] : part.sends(round)) set.sends.add(peer, {{current, std::move(elements)}});
    for (auto& [peer, elements] : part.receives(round)) set.receives.add(peer, {{next, std::move(elements)}});
    std::vector<OwnItem> own;  // copied in the first round
    if (const auto& kept = part.kept()) own.push_back({current, next, kept->slice(0, round == 0 ? kept->count() : 0)});
    exchange(builder, std::move(set), participants->transfer_method, own, step.rounds == 1);
  }
}

}  // namespace

void compile_exchange(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  if (is_cross_or_rearrange(step.op)) {
    const std::unique_ptr<const Exchange> exchange = exchange_of(step);
    return emit_exchange(builder, step, *exchange, participants_between_meshes(builder, *exchange), current, next);
  }
  const MeshExchange exchange = mesh_exchange_of(step);
  emit_exchange(builder, step, exchange, participants_on_mesh(builder, step, exchange), current, next);
}

std::unique_ptr<StepMemory> memory_of_crossing(const Step& step, const Plan& plan) {
  return std::make_unique<CrossingMemory>(step, plan);
}

}  // namespace shardwright
