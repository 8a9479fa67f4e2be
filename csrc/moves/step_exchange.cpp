#include "moves/step_exchange.h"

#include <algorithm>
#include <utility>

#include "exchange/indexed_exchange.h"
#include "moves/exchange.h"
#include "support/error.h"

namespace shardwright {
namespace {

// An exchange on one mesh, within the groups of a step.
class MeshExchange final : public Exchange {
 public:
  explicit MeshExchange(const Step& step)
      : Exchange(step.before.dtype().size_bytes()), step_(step), ranks_(step.before.mesh().ranks()) {
    std::sort(ranks_.begin(), ranks_.end());
  }

  const std::vector<Rank>& ranks() const override { return ranks_; }
  bool communicates() const override { return !is_local(step_.op); }

  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override {
    std::vector<MessageSize> sizes;
    for_each(rank, direction,
             [&](Position peer, Interval range) { sizes.push_back({mesh().rank_at(peer), range.extent()}); });
    return sizes;
  }

  std::vector<Message> messages(Rank rank, Direction direction) const override {
    std::vector<Message> messages;
    const Region own = *region(rank, direction);
    for_each(rank, direction, [&](Position peer, Interval range) {
      const Selection common = direction == Direction::kSend ? Selection(own, step_.after.region(peer))
                                                             : Selection(step_.before.region(peer), own);
      messages.push_back({mesh().rank_at(peer), common.slice(range.begin, range.end)});
    });
    return messages;
  }

  std::optional<Region> region(Rank rank, Direction side) const override {
    const std::optional<Position> position = mesh().position_of(rank);
    if (!position) return std::nullopt;
    return (side == Direction::kSend ? step_.before : step_.after).region(*position);
  }

  std::vector<LocalAxis> local_axes(Rank, Direction) const override {
    std::vector<LocalAxis> axes;
    for (int t = 0; t < step_.before.ndim(); ++t) axes.push_back({{t}, {}, 0});
    return axes;
  }

 private:
  const Mesh& mesh() const { return step_.before.mesh(); }

  // Calls visit(peer, range) for each message, by ascending rank of the peer.
  template <typename Visit>
  void for_each(Rank rank, Direction direction, const Visit& visit) const {
    if (is_local(step_.op)) return;
    const Position here = *mesh().position_of(rank);
    const Transfers transfers(step_, here);
    const std::vector<int64_t>& group = transfers.group();
    const auto me = static_cast<size_t>(std::find(group.begin(), group.end(), here) - group.begin());
    for (size_t peer = 0; peer < group.size(); ++peer) {
      if (peer == me) continue;
      const Interval range = direction == Direction::kSend ? transfers.range(me, peer) : transfers.range(peer, me);
      if (range.begin < range.end) visit(Position{group[peer]}, range);
    }
  }

  const Step& step_;
  std::vector<Rank> ranks_;
};

}  // namespace

GridExchange crossing_of(const Step& step) {
  return GridExchange(step.before, step.after, step.sharing, step.ranks_per_node);
}

std::unique_ptr<const Exchange> exchange_of(const Step& step) {
  check_invariant(step.op != StepOp::kReduceScatter && step.op != StepOp::kAllReduce, "the exchange of a reduction");
  if (step.op == StepOp::kCross) return std::make_unique<const GridExchange>(crossing_of(step));
  if (step.op != StepOp::kRearrange) return std::make_unique<const MeshExchange>(step);
  return std::make_unique<const IndexedExchange>(step.before, step.after, step.sharing);
}

}  // namespace shardwright
