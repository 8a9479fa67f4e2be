#include "picture/drawn_messages.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "exchange/exchange.h"
#include "layout/selection.h"
#include "moves/step_exchange.h"

namespace shardwright {
namespace {

// Collects the messages of one step.
class MessageList {
 public:
  MessageList(const Step& step, const std::map<Rank, int64_t>& rows) : step_(step), rows_(rows) {}

  std::vector<DrawnMessage> all() {
    reduces(step_) ? add_kept() : add_exchange();
    std::sort(messages_.begin(), messages_.end(),
              [](const auto& a, const auto& b) { return std::pair(a.from, a.to) < std::pair(b.from, b.to); });
    return std::move(messages_);
  }

 private:
  // Adds a message, unless it is empty. `sender` is the region that the elements were selected from.
  void add(Rank from, Rank to, const Selection& elements, const Region& sender) {
    if (elements.count() == 0) return;
    const int64_t bytes = elements.count() * step_.before.dtype().size_bytes();
    messages_.push_back({rows_.at(from), rows_.at(to), bytes, elements.indices(sender)});
  }

  // Adds all messages and kept elements of a step that moves data.
  void add_exchange() {
    const std::unique_ptr<const Exchange> exchange = exchange_of(step_);
    for (const Rank from : exchange->ranks()) {
      const std::optional<Region> before = exchange->region(from, Direction::kSend);
      if (!before) continue;
      if (const std::optional<Selection> kept = exchange->kept(from)) add(from, from, *kept, *before);
      for (const auto& [to, elements] : exchange->messages(from, Direction::kSend)) add(from, to, elements, *before);
    }
    // Regions begin with the axes of reductions that stay pending, which are not drawn.
    for (DrawnMessage& message : messages_) {
      for (Region& part : message.parts) part.erase(part.begin(), part.end() - step_.before.ndim());
    }
  }

  // Adds the elements that each rank holds both before and after the step.
  void add_kept() {
    const Mesh& mesh = step_.before.mesh();
    for (const Rank rank : mesh.ranks()) {
      const Position position = *mesh.position_of(rank);
      const Region before = step_.before.region(position);
      add(rank, rank, Selection(before, step_.after.region(position)), before);
    }
  }

  const Step& step_;
  const std::map<Rank, int64_t>& rows_;
  std::vector<DrawnMessage> messages_;
};

}  // namespace

bool reduces(const Step& step) { return step.op == StepOp::kReduceScatter || step.op == StepOp::kAllReduce; }

std::vector<DrawnMessage> drawn_messages(const Step& step, const std::map<Rank, int64_t>& rows) {
  return MessageList(step, rows).all();
}

}  // namespace shardwright
