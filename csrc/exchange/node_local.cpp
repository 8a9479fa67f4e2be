#include "exchange/node_local.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace shardwright {
namespace {

// A range of a receiver's elements that have no sender yet.
struct OpenRange {
  Rank rank{};
  Interval range;
};

// Lets `from` send up to `amount` elements of the open ranges, beginning with open[next], and appends its messages.
// Sets `next` to the index of the first range that is still open.
void assign(std::vector<OpenRange>& open, size_t& next, Rank from, int64_t amount, std::vector<NodeMessage>& messages) {
  while (amount > 0 && next < open.size()) {
    Interval& left = open[next].range;
    const int64_t taken = std::min(amount, left.end - left.begin);
    messages.push_back({from, open[next].rank, {left.begin, left.begin + taken}});
    left.begin += taken;
    amount -= taken;
    if (left.begin == left.end) ++next;
  }
}

// Returns the number of elements of the open ranges from index `first` on.
int64_t elements_of(const std::vector<OpenRange>& open, size_t first) {
  int64_t elements = 0;
  for (size_t i = first; i < open.size(); ++i) elements += open[i].range.end - open[i].range.begin;
  return elements;
}

// Returns the level to which the totals of the senders must be raised so that they send `elements` more, rounded up.
// `sent` has the total of each sender so far. Example: for sent = {10, 0, 30} and 20 elements the level is 15: the
// first two senders send 5 and 15 more.
int64_t level_for(std::vector<int64_t> sent, int64_t elements) {
  std::sort(sent.begin(), sent.end());
  int64_t sum = elements;
  for (size_t i = 0; i < sent.size(); ++i) {
    sum += sent[i];
    const auto count = static_cast<int64_t>(i) + 1;
    if (i + 1 == sent.size() || sum <= sent[i + 1] * count) return (sum + count - 1) / count;
  }
  return 0;
}

}  // namespace

std::vector<NodeMessage> assign_within_nodes(std::vector<Rank> senders, std::vector<Need> needs, int64_t ranks_per_node,
                                             int64_t max_within_node) {
  const auto node_of = [&](Rank rank) { return to_int(rank) / ranks_per_node; };
  std::sort(senders.begin(), senders.end());
  std::sort(needs.begin(), needs.end(), [](const Need& a, const Need& b) { return a.rank < b.rank; });
  std::vector<NodeMessage> messages;
  std::vector<int64_t> sent(senders.size());  // by sender
  std::vector<OpenRange> remaining;           // of all nodes
  size_t sender = 0;
  for (size_t need = 0; need < needs.size();) {
    const int64_t node = node_of(needs[need].rank);
    std::vector<OpenRange> open;
    for (; need < needs.size() && node_of(needs[need].rank) == node; ++need) {
      open.push_back({needs[need].rank, {0, needs[need].elements}});
    }
    // The senders [first, sender) are on this node.
    while (sender < senders.size() && node_of(senders[sender]) < node) ++sender;
    const size_t first = sender;
    while (sender < senders.size() && node_of(senders[sender]) == node) ++sender;
    const auto count = static_cast<int64_t>(sender - first);
    const int64_t elements = elements_of(open, 0);
    size_t next = 0;
    for (size_t i = first; i < sender; ++i) {
      const int64_t before = elements_of(open, next);
      assign(open, next, senders[i], std::min(max_within_node, (elements + count - 1) / count), messages);
      sent[i] = before - elements_of(open, next);
    }
    remaining.insert(remaining.end(), open.begin() + static_cast<int64_t>(next), open.end());
  }
  const int64_t level = level_for(sent, elements_of(remaining, 0));
  size_t next = 0;
  for (size_t i = 0; i < senders.size(); ++i) assign(remaining, next, senders[i], level - sent[i], messages);
  return messages;
}

}  // namespace shardwright
