#include "exchange/exchange.h"

#include <algorithm>

namespace shardwright {

Interval in_round(Interval range, int64_t round, int64_t rounds) {
  const __int128 length = range.end - range.begin;
  return {range.begin + static_cast<int64_t>(length * round / rounds),
          range.begin + static_cast<int64_t>(length * (round + 1) / rounds)};
}

std::optional<Selection> Exchange::kept(Rank rank) const {
  const std::optional<Region> before = region(rank, Direction::kSend);
  const std::optional<Region> after = region(rank, Direction::kReceive);
  return before && after ? std::optional<Selection>(Selection(*before, *after)) : std::nullopt;
}

bool Exchange::crosses_nodes(int64_t ranks_per_node) const {
  if (ranks_per_node <= 0) return false;
  return std::any_of(ranks().begin(), ranks().end(), [&](Rank rank) {
    const std::vector<MessageSize> sizes = message_sizes(rank, Direction::kReceive);
    return std::any_of(sizes.begin(), sizes.end(), [&](const MessageSize& message) {
      return to_int(message.peer) / ranks_per_node != to_int(rank) / ranks_per_node;
    });
  });
}

int64_t Exchange::num_elements(Rank rank, Direction direction) const {
  int64_t elements = 0;
  for (const MessageSize& message : message_sizes(rank, direction)) elements += message.elements;
  return elements;
}

int64_t Exchange::messages_at_most(Rank rank, Direction direction) const {
  return std::ssize(message_sizes(rank, direction));
}

int64_t Exchange::total_needed_elements() const {
  int64_t elements = 0;
  for (const Rank rank : ranks()) {
    if (const std::optional<Region> needed = region(rank, Direction::kReceive)) {
      elements += shardwright::num_elements(*needed);
    }
  }
  return elements;
}

Traffic Exchange::traffic(Rank rank, int64_t rounds) const {
  Traffic traffic;
  for (const auto& [peer, elements] : message_sizes(rank, Direction::kSend)) {
    traffic.sent_bytes += elements * item_bytes_;
    traffic.sent_messages += std::min(rounds, elements);
  }
  for (const auto& [peer, elements] : message_sizes(rank, Direction::kReceive)) {
    traffic.received_bytes += elements * item_bytes_;
    traffic.messages += std::min(rounds, elements);
  }
  return traffic;
}

StepCounts Exchange::maxima(int64_t rounds) const {
  StepCounts maxima;
  for (const Rank rank : ranks()) {
    const Traffic rank_traffic = traffic(rank, rounds);
    maxima.received_bytes = std::max(maxima.received_bytes, rank_traffic.received_bytes);
    maxima.sent_bytes = std::max(maxima.sent_bytes, rank_traffic.sent_bytes);
    maxima.messages = std::max(maxima.messages, rank_traffic.messages);
    maxima.sent_messages = std::max(maxima.sent_messages, rank_traffic.sent_messages);
    if (const std::optional<Region> needed = region(rank, Direction::kReceive)) {
      maxima.touched_bytes = std::max(maxima.touched_bytes, shardwright::num_elements(*needed) * item_bytes_);
    }
  }
  return maxima;
}

}  // namespace shardwright
