// Crossings from one mesh to another, and rearrangements: a transfer set over the ranks of both meshes.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "crossing/crossing.h"
#include "crossing/rearrangement.h"
#include "layout/selection.h"
#include "moves/exchange.h"
#include "moves/traffic.h"
#include "program/builder.h"
#include "program/carriers.h"
#include "program/step_memory.h"
#include "program/transfers.h"
#include "support/error.h"

namespace shardwright {
namespace {

// What one rank sends another: a range of what they share. Deliveries with one peer follow one another, and are one
// message.
struct Delivery {
  Rank peer{};
  Selection whole;
  Interval range;
};

// Who sends what to whom in a step of the ranks of both meshes.
class Deliveries {
 public:
  virtual ~Deliveries() = default;
  virtual const std::vector<Rank>& ranks() const = 0;
  virtual std::vector<Delivery> sends(Rank rank) const = 0;
  virtual std::vector<Delivery> receives(Rank rank) const = 0;
  // Returns whether any rank receives anything.
  virtual bool communicates() const = 0;
  // Returns what stays on a rank of both meshes.
  virtual Selection own(Rank rank) const = 0;
};

class CrossingDeliveries : public Deliveries {
 public:
  explicit CrossingDeliveries(const Step& step) : step_(step), crossing_(crossing_of(step)) {}
  const std::vector<Rank>& ranks() const override { return crossing_.ranks(); }
  bool communicates() const override { return crossing_.communicates(); }
  std::vector<Delivery> sends(Rank rank) const override {
    std::vector<Delivery> all;
    for (const auto& [peer, range] : crossing_.sends(rank)) {
      all.push_back({peer, Selection(held(rank), needed(peer)), range});
    }
    return all;
  }
  std::vector<Delivery> receives(Rank rank) const override {
    std::vector<Delivery> all;
    for (const auto& [peer, range] : crossing_.receives(rank)) {
      all.push_back({peer, Selection(held(peer), needed(rank)), range});
    }
    return all;
  }
  Selection own(Rank rank) const override { return Selection(held(rank), needed(rank)); }

 private:
  Region held(Rank rank) const { return step_.before.region(*step_.before.mesh().position_of(rank)); }
  Region needed(Rank rank) const { return step_.after.region(*step_.after.mesh().position_of(rank)); }

  const Step& step_;
  Crossing crossing_;
};

class RearrangementDeliveries : public Deliveries {
 public:
  explicit RearrangementDeliveries(const Step& step) : move_(step.before, step.after, step.sharing) {}
  const std::vector<Rank>& ranks() const override { return move_.ranks(); }
  bool communicates() const override { return move_.communicates(); }
  std::vector<Delivery> sends(Rank rank) const override {
    std::vector<Delivery> all;
    for (const auto& [peer, elements, range] : move_.sends(rank)) {
      all.push_back({peer, Selection(move_.held(rank), move_.needed(peer), elements), range});
    }
    return all;
  }
  std::vector<Delivery> receives(Rank rank) const override {
    std::vector<Delivery> all;
    for (const auto& [peer, elements, range] : move_.receives(rank)) {
      all.push_back({peer, Selection(move_.held(peer), move_.needed(rank), elements), range});
    }
    return all;
  }
  Selection own(Rank rank) const override { return Selection(move_.held(rank), move_.needed(rank)); }

 private:
  Rearrangement move_;
};

std::unique_ptr<Deliveries> deliveries_of(const Step& step) {
  if (step.op == StepOp::kRearrange) return std::make_unique<RearrangementDeliveries>(step);
  return std::make_unique<CrossingDeliveries>(step);
}

// What one rank sends, receives and keeps in a crossing.
class PartInCrossing {
 public:
  PartInCrossing(const Step& step, const Deliveries& deliveries, Rank rank)
      : step_(step),
        deliveries_(deliveries),
        rank_(rank),
        sends_(deliveries.sends(rank)),
        receives_(deliveries.receives(rank)) {}

  // A message in one round, and the index of its peer among the ranks of the crossing.
  struct Message {
    int64_t peer = -1;
    Selection elements;
  };

  std::vector<Message> sends(int64_t round) const { return in_round_of(sends_, round); }
  std::vector<Message> receives(int64_t round) const { return in_round_of(receives_, round); }
  // Returns what stays on the rank, or nullopt if it is not on both meshes.
  std::optional<Selection> own() const {
    const bool is_on_both = step_.before.mesh().position_of(rank_) && step_.after.mesh().position_of(rank_);
    return is_on_both ? std::optional<Selection>(deliveries_.own(rank_)) : std::nullopt;
  }

  int64_t index_of(Rank rank) const {
    const std::vector<Rank>& ranks = deliveries_.ranks();
    return std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  }
  int64_t index() const { return index_of(rank_); }

 private:
  std::vector<Message> in_round_of(const std::vector<Delivery>& deliveries, int64_t round) const {
    std::vector<Message> messages;
    for (auto one = deliveries.begin(); one != deliveries.end();) {
      const auto end =
          std::find_if(one, deliveries.end(), [&](const Delivery& other) { return other.peer != one->peer; });
      int64_t elements = 0;
      for (auto part = one; part != end; ++part) elements += part->range.extent();
      const Interval range = in_round({0, elements}, round, step_.rounds);
      Message message{index_of(one->peer), {}};
      int64_t before = 0;  // elements of parts before this one
      for (; one != end; ++one) {
        const int64_t first = std::max(range.begin - before, int64_t{0});
        const int64_t last = std::min(range.end - before, one->range.extent());
        if (first < last) message.elements.append(one->whole.slice(one->range.begin + first, one->range.begin + last));
        before += one->range.extent();
      }
      if (range.begin < range.end) messages.push_back(std::move(message));
    }
    return messages;
  }

  const Step& step_;
  const Deliveries& deliveries_;
  Rank rank_;
  std::vector<Delivery> sends_;
  std::vector<Delivery> receives_;
};

// Returns the number of elements of a selection, and where they begin on either side if they are one run there.
Load load_of(const Selection& elements) {
  const int64_t held = elements.contiguous_in_sender();
  const int64_t needed = elements.contiguous_in_receiver();
  return {elements.count(), std::max<int64_t>(held, 0), std::max<int64_t>(needed, 0), held >= 0, needed >= 0};
}

class CrossingMemory : public StepMemory {
 public:
  CrossingMemory(const Step& step, const Plan& plan)
      : step_(step),
        deliveries_(deliveries_of(step)),
        carrier_(carrier_between_meshes(deliveries_->ranks().size(), plan.lowering)),
        communicates_(deliveries_->communicates()) {}

  void write(Sketch& sketch, Rank rank, int current, int next) override {
    const PartInCrossing part(step_, *deliveries_, rank);
    const std::optional<Selection> own = part.own();
    const int64_t own_count = own ? own->count() : 0;
    if (!communicates_) {
      if (own_count > 0) sketch.emit({current, next});
      return;
    }
    for (int64_t round = 0; round < step_.rounds; ++round) {
      if (carrier_ == Carrier::kAllToAll) {
        write_all_to_all(sketch, loads_of(part, own, round), own_count, round, step_.rounds, current, next);
      } else {
        Packed packed;
        for (const auto& message : part.sends(round)) packed.add_sent(load_of(message.elements), 1);
        for (const auto& message : part.receives(round)) packed.add_received(load_of(message.elements), 1);
        write_messages(sketch, packed, own_count, round, current, next);
      }
    }
  }

  void tell_apart(RankClasses&) const override { throw InvariantError("ranks of a crossing are looked at one by one"); }
  std::optional<Traffic> traffic_that_decides(Rank) const override { return std::nullopt; }
  std::optional<Traffic> traffic_at_most() const override { return std::nullopt; }

 private:
  static BothLoads loads_of(const PartInCrossing& part, const std::optional<Selection>& own, int64_t round) {
    std::map<int64_t, std::pair<Load, Load>> by_index;  // by the peer's index: what it is sent, and what it sends
    for (const auto& message : part.sends(round)) by_index[message.peer].first = load_of(message.elements);
    for (const auto& message : part.receives(round)) by_index[message.peer].second = load_of(message.elements);
    if (own) by_index[part.index()];
    BothLoads loads;
    for (const auto& [peer, both] : by_index) {
      if (peer != part.index()) {
        loads.add_peer(both.first, both.second);
      } else {
        loads.add_own(load_of(own->slice(0, own->count())));
      }
    }
    return loads;
  }

  const Step& step_;
  std::unique_ptr<Deliveries> deliveries_;
  Carrier carrier_;
  bool communicates_;
};

}  // namespace

void compile_crossing(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  const std::unique_ptr<Deliveries> deliveries = deliveries_of(step);
  const PartInCrossing part(step, *deliveries, builder.rank());
  const std::optional<Selection> own = part.own();
  if (!deliveries->communicates()) {
    if (own) builder.copy(current, next, own->boxes(Place::local(), Place::local()));
    return;
  }
  const int group = builder.group_of_ranks({}, deliveries->ranks());
  const Carrier carrier = carrier_between_meshes(deliveries->ranks().size(), builder.lowering());
  for (int64_t round = 0; round < step.rounds; ++round) {
    TransferSet set{group, Messages(Messages::Side::kSent, current), Messages(Messages::Side::kReceived, next)};
    for (auto& [peer, elements] : part.sends(round)) set.sends.add(peer, {{current, std::move(elements)}});
    for (auto& [peer, elements] : part.receives(round)) set.receives.add(peer, {{next, std::move(elements)}});
    std::vector<OwnItem> kept;
    if (own) kept.push_back({current, next, own->slice(0, round == 0 ? own->count() : 0)});  // all in the first round
    exchange(builder, std::move(set), carrier, kept, step.rounds == 1);
  }
}

std::unique_ptr<StepMemory> memory_of_crossing(const Step& step, const Plan& plan) {
  return std::make_unique<CrossingMemory>(step, plan);
}

}  // namespace shardwright
