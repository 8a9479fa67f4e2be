#include "exchange/indexed_exchange.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <tuple>
#include <utility>

#include "exchange/cells.h"
#include "exchange/samples.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Maximum number of listed runs of an axis, over all parts: 16 times the maximum of one part.
constexpr int64_t kMaxRunsOfAxis = 16 * CutRule::kMaxRuns;

// The messages are recomputed by cells if the busiest rank sends more than 1 + 1 / kExcessDivisor times the least
// possible.
constexpr int64_t kExcessDivisor = 20;

// Returns the number of bits of a rank that follow the longest common binary prefix of two ranks; 0 if they are equal.
// Example: 2 for 4 and 6.
int distance(Rank a, Rank b) { return std::bit_width(static_cast<uint64_t>(to_int(a) ^ to_int(b))); }

}  // namespace

// Computes the shares of one axis: for each receiver and element, the axis shard of the source that sends the element.
// The ranks that have a shard share its sending. Works on samples (exchange/samples.h) of the indices, so that
// repetitions are not listed.
class IndexedExchange::AxisShares {
 public:
  AxisShares(const AxisGrid& src, const AxisGrid& dst, size_t axis, ReplicaPolicy policy)
      : src_(src),
        dst_(dst),
        axis_(axis),
        policy_(policy),
        samples_({&src.axes[axis].lists, &dst.axes[axis].lists}),
        sent_(src.axes[axis].lists.size(), 0) {
    const int64_t runs = runs_to_list();
    ranks_.resize(sent_.size());
    for (size_t p = 0; p < src.shards.size(); ++p) {
      ranks_[src.shards[p][axis]].push_back(src.mesh->rank_at(Position{static_cast<int64_t>(p)}));
    }
    make_sample_ranges();
    if (const int64_t senders = max_senders(); policy_ == ReplicaPolicy::kEvenBytes && senders > 1) {
      samples_ = Samples({&src.axes[axis].lists, &dst.axes[axis].lists},
                         std::clamp<int64_t>(CutRule::kMaxRuns / runs, 1, senders));
      make_sample_ranges();
    }
    for (const IntervalList& list : dst.axes[axis].lists) needed_.push_back(samples_.in(list));
  }

  // Returns the shares of each receiver, by its position. Call it once.
  std::map<int64_t, Shares> compute() {
    for (size_t to = 0; to < dst_.shards.size(); ++to) add_requests(static_cast<int64_t>(to));
    std::stable_sort(requests_.begin(), requests_.end(), [&](const Request& a, const Request& b) {
      return sample_ranges_[a.sample_range].lists.size() < sample_ranges_[b.sample_range].lists.size();
    });
    for (const Request& request : requests_) assign(request);
    std::map<int64_t, Shares> shares;
    for (auto& [to, by_shard] : assigned_) {
      Shares& own = shares[to];
      for (auto& [shard, elements] : by_shard) {
        own.push_back({shard, samples_.repeated(sorted_by_begin(std::move(elements)))});
      }
    }
    return shares;
  }

 private:
  // Elements that a receiver needs and does not hold.
  struct Request {
    int64_t to = 0;           // position of the receiver
    size_t sample_range = 0;  // index in sample_ranges_
    Interval interval;        // within the sample range
  };

  // Returns an upper bound on the number of runs that are listed, here or by the exchange: the runs in the samples, or
  // all runs if a list does not ascend. Throws UserError if they are too many.
  int64_t runs_to_list() const {
    const std::vector<const std::vector<IntervalList>*> sides{&src_.axes[axis_].lists, &dst_.axes[axis_].lists};
    const bool ascend = std::all_of(sides.begin(), sides.end(), [](const std::vector<IntervalList>* lists) {
      return std::all_of(lists->begin(), lists->end(), is_ascending);
    });
    int64_t runs = 1;
    for (const std::vector<IntervalList>* lists : sides) {
      for (const IntervalList& list : *lists) {
        runs += ascend ? samples_.max_intervals_in(list) : static_cast<int64_t>(list.size());
        check_user(
            runs <= kMaxRunsOfAxis,
            "placements: the parts of all ranks must have at most 2^24 intervals together, got ", runs, " or more; ",
            ascend
                ? "choose block sizes whose least common multiple is small, so that source and destination repeat early"
                : "list the intervals of each part in ascending order");
      }
    }
    return runs;
  }

  // Returns the maximum number of ranks that may send elements of the same range of a sample with repetitions. A range
  // of one element per repetition cannot be divided within a sample, so each of these ranks needs a sample of its own.
  int64_t max_senders() const {
    int64_t most = 1;
    for (const SampleRange& sample_range : sample_ranges_) {
      if (sample_range.lists.size() < 2 || sample_range.count == 1) continue;
      int64_t ranks = 0;
      for (const int64_t shard : sample_range.lists) ranks += num_ranks(shard);
      most = std::max(most, ranks);
    }
    return most;
  }

  // Fills sample_ranges_ from the shards of the source.
  void make_sample_ranges() {
    std::vector<const IntervalList*> lists;
    for (const IntervalList& list : src_.axes[axis_].lists) lists.push_back(&list);
    sample_ranges_ = sample_ranges(samples_, lists);
  }

  // Adds the requests of the receiver at position `to`. Assigns elements that it holds to its own shard.
  void add_requests(int64_t to) {
    const Rank rank = dst_.mesh->rank_at(Position{to});
    const std::optional<Position> before = src_.mesh->position_of(rank);
    const int64_t own = before ? src_.shards[*before][axis_] : -1;
    assigned_[to];  // an entry even if the receiver needs nothing
    for (const Interval& interval : needed_[dst_.shards[to][axis_]]) {
      auto at = std::partition_point(
          sample_ranges_.begin(), sample_ranges_.end(),
          [&](const SampleRange& sample_range) { return sample_range.interval.end <= interval.begin; });
      for (; at != sample_ranges_.end() && at->interval.begin < interval.end; ++at) {
        const Interval both{std::max(interval.begin, at->interval.begin), std::min(interval.end, at->interval.end)};
        if (std::binary_search(at->lists.begin(), at->lists.end(), own)) {
          assigned_[to][own].push_back(both);  // kept by the rank, not sent
        } else {
          requests_.push_back({to, static_cast<size_t>(at - sample_ranges_.begin()), both});
        }
      }
    }
  }

  // Assigns a request to the nearest shard; with kEvenBytes, divides it among all shards that have its elements.
  void assign(const Request& request) {
    const std::vector<int64_t>& shards = sample_ranges_[request.sample_range].lists;
    if (shards.size() > 1 && policy_ == ReplicaPolicy::kEvenBytes) return divide(request);
    int64_t best = shards.front();
    if (shards.size() > 1) {
      const Rank to = dst_.mesh->rank_at(Position{request.to});
      const auto nearest = [&](int64_t shard) {
        int least = 64;
        for (const Rank rank : ranks_[shard]) least = std::min(least, distance(rank, to));
        return least;
      };
      int of_best = nearest(best);
      for (const int64_t shard : shards) {
        const int of_shard = nearest(shard);
        if (of_shard > of_best || (of_shard == of_best && !sends_less(shard, best))) continue;
        best = shard;
        of_best = of_shard;
      }
    }
    assign_to(request, best, request.interval);
  }

  // Divides a request among the shards that send least so far, so that their ranks then send equally much. Example: 10
  // elements that three shards of one rank each have, which send 4, 0 and 9 elements so far. The first two send 3 and 7
  // of them, so that each has sent 7. The third sends none.
  void divide(const Request& request) {
    std::vector<int64_t> shards = sample_ranges_[request.sample_range].lists;
    std::stable_sort(shards.begin(), shards.end(), [&](int64_t a, int64_t b) { return sends_less(a, b); });
    const int64_t count = sample_ranges_[request.sample_range].count;
    int64_t left = request.interval.extent();
    __int128 sum = static_cast<__int128>(left) * count;  // of the request and of elements that these shards send so far
    int64_t ranks = 0;                                   // number of ranks of these shards
    size_t num_senders = 0;                              // number of these shards
    while (num_senders < shards.size()) {
      const int64_t next = shards[num_senders];
      if (num_senders > 0 && static_cast<__int128>(sent_[next]) * ranks >= sum * num_ranks(next)) break;
      sum += sent_[next];
      ranks += num_ranks(next);
      ++num_senders;
    }
    int64_t begin = request.interval.begin;
    for (size_t i = 0; i < num_senders; ++i) {
      const auto level = static_cast<int64_t>((sum * num_ranks(shards[i]) + ranks - 1) / ranks);
      const int64_t missing = std::max<int64_t>(level - sent_[shards[i]], 0);
      const int64_t amount = i + 1 == num_senders ? left : std::min((missing + count - 1) / count, left);
      if (amount > 0) assign_to(request, shards[i], {begin, begin + amount});
      begin += amount;
      left -= amount;
    }
  }

  // Returns the number of ranks that hold a shard of the source.
  int64_t num_ranks(int64_t shard) const { return static_cast<int64_t>(ranks_[shard].size()); }

  // Returns true if the ranks of shard `a` send fewer elements so far, per rank, than those of shard `b`.
  bool sends_less(int64_t a, int64_t b) const {
    return static_cast<__int128>(sent_[a]) * num_ranks(b) < static_cast<__int128>(sent_[b]) * num_ranks(a);
  }

  // Lets a shard send these elements of a request.
  void assign_to(const Request& request, int64_t shard, Interval interval) {
    assigned_[request.to][shard].push_back(interval);
    sent_[shard] += interval.extent() * sample_ranges_[request.sample_range].count;
  }

  const AxisGrid& src_;
  const AxisGrid& dst_;
  size_t axis_;
  ReplicaPolicy policy_;
  Samples samples_;
  std::vector<std::vector<Interval>> needed_;  // by shard of the destination, in the samples
  std::vector<SampleRange> sample_ranges_;     // ranges of the shards of the source
  std::vector<std::vector<Rank>> ranks_;       // by shard of the source: the ranks that hold it
  std::vector<int64_t> sent_;                  // by shard of the source: elements that its ranks send so far
  std::vector<Request> requests_;
  std::map<int64_t, std::map<int64_t, std::vector<Interval>>> assigned_;  // by receiver and shard
};

IndexedExchange::IndexedExchange(const Layout& src, const Layout& dst, ReplicaPolicy policy)
    : IndexedExchange(axis_grids(src, dst), src.dtype().size_bytes(), policy) {
  const MeshDimSet kept = kept_partials(src, dst);
  check_invariant(src.partial_dims() == kept && dst.partial_dims() == kept,
                  "the pending reductions of a rearrangement differ: ", src, " -> ", dst);
}

IndexedExchange::IndexedExchange(AxisGrids grids, int64_t item_bytes, ReplicaPolicy policy)
    : Exchange(item_bytes),
      policy_(policy),
      src_(std::move(grids.src)),
      dst_(std::move(grids.dst)),
      ranks_(ranks_of(*src_.mesh, *dst_.mesh)) {
  check_invariant(policy != ReplicaPolicy::kAligned, "a rearrangement has ReplicaPolicy::kAligned");
  check_invariant(src_.axes.size() == dst_.axes.size(), "the grids of a rearrangement have ", src_.axes.size(), " and ",
                  dst_.axes.size(), " axes");
  for (size_t axis = 0; axis < src_.axes.size(); ++axis) {
    shares_.push_back(AxisShares(src_, dst_, axis, policy_).compute());
  }
  compute_messages();
  if (policy_ == ReplicaPolicy::kEvenBytes) compute_messages_by_cells();
  index_message_ranges();
}

Region IndexedExchange::elements_of(const MessageRange& message) const {
  Region region(src_.axes.size());
  int64_t digits = message.combination;  // one digit per axis: the index of its share
  for (size_t axis = region.size(); axis-- > 0;) {
    const Shares& shares = shares_of(axis, message.to);
    region[axis] = shares[digits % static_cast<int64_t>(shares.size())].elements;
    digits /= static_cast<int64_t>(shares.size());
  }
  return region;
}

// A part of the source is one axis shard on each axis. Every combination of a receiver's shares is requested from one
// part. divide_among() then chooses among the part's candidate senders.
void IndexedExchange::compute_messages() {
  std::map<std::vector<int64_t>, std::vector<int64_t>> senders;        // positions, by part
  std::map<std::vector<int64_t>, std::vector<MessageRange>> requests;  // by part
  for (size_t p = 0; p < src_.shards.size(); ++p) senders[src_.shards[p]].push_back(static_cast<int64_t>(p));
  for (int64_t to = 0; to < static_cast<int64_t>(dst_.shards.size()); ++to) {
    const std::optional<Position> before = src_.mesh->position_of(dst_.mesh->rank_at(Position{to}));
    int64_t combinations = 1;
    for (size_t axis = 0; axis < src_.axes.size(); ++axis) {
      combinations *= static_cast<int64_t>(shares_of(axis, to).size());
    }
    for (int64_t combination = 0; combination < combinations; ++combination) {
      std::vector<int64_t> part(src_.axes.size());
      int64_t count = 1;
      int64_t digits = combination;
      for (size_t axis = part.size(); axis-- > 0;) {
        const Shares& shares = shares_of(axis, to);
        const Share& share = shares[digits % static_cast<int64_t>(shares.size())];
        digits /= static_cast<int64_t>(shares.size());
        part[axis] = share.shard;
        count *= length(share.elements);
      }
      if (count == 0 || (before && src_.shards[*before] == part)) continue;
      requests[part].push_back({0, to, combination, {0, count}});
    }
  }
  std::vector<int64_t> sent(src_.shards.size(), 0);
  for (auto& [part, requests_of_part] : requests) divide_among(senders.at(part), std::move(requests_of_part), sent);
}

// compute_messages() treats each axis as if all ranks with a shard had all elements of the other axes. So if elements
// are on several shards of one axis and another axis is cut too, some rank may send more than necessary. If it sends
// too much more, the messages are recomputed: every share is then a class, every combination of shares a cell, and each
// cell's senders and their numbers of elements come from the flow.
void IndexedExchange::compute_messages_by_cells() {
  std::vector<int64_t> sent(src_.shards.size(), 0);
  std::vector<int64_t> received(dst_.shards.size(), 0);
  for (const MessageRange& message : message_ranges_) {
    sent[message.from] += message.range.extent();
    received[message.to] += message.range.extent();
  }
  const int64_t most_sent = *std::max_element(sent.begin(), sent.end());
  const int64_t most_received = *std::max_element(received.begin(), received.end());
  const auto is_close_to = [&](int64_t least) { return most_sent - least <= least / kExcessDivisor; };
  if (is_close_to(most_received)) return;
  const std::optional<Cells> cells = Cells::of(src_, dst_, ranks_);
  if (!cells) return;
  const int64_t least = cells->direct_load().rounded_up();
  if (is_close_to(least)) return;

  message_ranges_.clear();
  // By axis, class and receiver: the index of the class in the receiver's shares.
  std::vector<std::vector<std::map<int64_t, int64_t>>> share_indices(shares_.size());
  for (size_t axis = 0; axis < shares_.size(); ++axis) {
    shares_[axis].clear();
    share_indices[axis].resize(cells->classes(axis).size());
    for (size_t i = 0; i < share_indices[axis].size(); ++i) {
      for (const size_t rank : cells->classes(axis)[i].after.indices()) {
        const int64_t to = *dst_.mesh->position_of(ranks_[rank]);
        Shares& shares = shares_[axis][to];
        share_indices[axis][i][to] = static_cast<int64_t>(shares.size());
        shares.push_back({static_cast<int64_t>(i), cells->classes(axis)[i].elements});
      }
    }
  }
  const std::vector<std::vector<std::pair<size_t, int64_t>>> shared = cells->direct_shares(least);
  for (size_t c = 0; c < shared.size(); ++c) {
    const Cells::Cell& cell = cells->all()[c];
    // The copies for all receivers form a queue. Each sender in turn sends its number of elements of the queue.
    auto sender_share = shared[c].begin();
    int64_t left = sender_share->second;
    for (const size_t receiver : cell.receivers.indices()) {
      const int64_t to = *dst_.mesh->position_of(ranks_[receiver]);
      int64_t combination = 0;
      for (size_t axis = 0; axis < shares_.size(); ++axis) {
        combination = combination * static_cast<int64_t>(shares_[axis].at(to).size()) +
                      share_indices[axis][cell.classes[axis]].at(to);
      }
      for (int64_t begin = 0; begin < cell.elements;) {
        if (left == 0) left = (++sender_share)->second;
        const int64_t end = std::min(cell.elements, begin + left);
        message_ranges_.push_back(
            {*src_.mesh->position_of(ranks_[sender_share->first]), to, combination, {begin, end}});
        left -= end - begin;
        begin = end;
      }
    }
  }
}

void IndexedExchange::index_message_ranges() {
  for (size_t i = 0; i < message_ranges_.size(); ++i) {
    sent_by_[sender(message_ranges_[i])].push_back(i);
    received_by_[receiver(message_ranges_[i])].push_back(i);
  }
  for (auto& [rank, all] : sent_by_) {
    std::stable_sort(all.begin(), all.end(),
                     [&](size_t a, size_t b) { return receiver(message_ranges_[a]) < receiver(message_ranges_[b]); });
  }
  for (auto& [rank, all] : received_by_) {
    std::stable_sort(all.begin(), all.end(),
                     [&](size_t a, size_t b) { return sender(message_ranges_[a]) < sender(message_ranges_[b]); });
  }
}

// With whole messages, chooses the nearest candidate sender for each request. Otherwise arranges the requests in a
// queue, as in GridExchange, and divides the queue into one range for each candidate sender.
void IndexedExchange::divide_among(const std::vector<int64_t>& senders, std::vector<MessageRange> requests,
                                   std::vector<int64_t>& sent) {
  if (senders.size() == 1 || policy_ == ReplicaPolicy::kWholeMessages) {
    for (MessageRange& message : requests) {
      const Rank to = receiver(message);
      const auto order = [&](int64_t sender) {
        return std::tuple(distance(src_.mesh->rank_at(Position{sender}), to), sent[sender], sender);
      };
      message.from =
          *std::min_element(senders.begin(), senders.end(), [&](int64_t a, int64_t b) { return order(a) < order(b); });
      sent[message.from] += message.range.end;
      message_ranges_.push_back(message);
    }
    return;
  }
  int64_t total = 0;
  for (const MessageRange& message : requests) total += message.range.end;
  const auto count = static_cast<int64_t>(senders.size());
  const int64_t quota = (total + count - 1) / count;
  int64_t begin_in_queue = 0;
  for (const MessageRange& message : requests) {
    for (int64_t begin = begin_in_queue; begin < begin_in_queue + message.range.end;) {
      const int64_t end = std::min(begin_in_queue + message.range.end, (begin / quota + 1) * quota);
      message_ranges_.push_back(
          {senders[begin / quota], message.to, message.combination, {begin - begin_in_queue, end - begin_in_queue}});
      begin = end;
    }
    begin_in_queue += message.range.end;
  }
}

const std::vector<size_t>& IndexedExchange::message_ranges_of(Rank rank, Direction direction) const {
  static const std::vector<size_t> kNone;
  const Indices& all = direction == Direction::kSend ? sent_by_ : received_by_;
  const auto found = all.find(rank);
  return found == all.end() ? kNone : found->second;
}

std::vector<Exchange::MessageSize> IndexedExchange::message_sizes(Rank rank, Direction direction) const {
  std::vector<MessageSize> sizes;
  for (const size_t i : message_ranges_of(rank, direction)) {
    const MessageRange& message = message_ranges_[i];
    const Rank peer = direction == Direction::kSend ? receiver(message) : sender(message);
    if (sizes.empty() || sizes.back().peer != peer) sizes.push_back({peer, 0});
    sizes.back().elements += message.range.extent();
  }
  return sizes;
}

std::vector<Exchange::Message> IndexedExchange::messages(Rank rank, Direction direction) const {
  std::vector<Message> messages;
  for (const size_t i : message_ranges_of(rank, direction)) {
    const MessageRange& message = message_ranges_[i];
    const Rank peer = direction == Direction::kSend ? receiver(message) : sender(message);
    const Selection common(src_.local_region(message.from), dst_.local_region(message.to), elements_of(message));
    if (messages.empty() || messages.back().peer != peer) messages.push_back({peer, {}});
    messages.back().elements.append(common.slice(message.range.begin, message.range.end));
  }
  return messages;
}

int64_t IndexedExchange::total_needed_elements() const {
  int64_t elements = 0;
  for (int64_t p = 0; p < dst_.mesh->size(); ++p) elements += shardwright::num_elements(dst_.region(p));
  return elements;
}

std::optional<Region> IndexedExchange::region(Rank rank, Direction side) const {
  const AxisGrid& grid = side == Direction::kSend ? src_ : dst_;
  const std::optional<Position> position = grid.mesh->position_of(rank);
  return position ? std::optional<Region>(grid.local_region(*position)) : std::nullopt;
}

std::vector<LocalAxis> IndexedExchange::local_axes(Rank rank, Direction side) const {
  const AxisGrid& grid = side == Direction::kSend ? src_ : dst_;
  return grid.local_axes(*grid.mesh->position_of(rank));
}

std::optional<std::map<std::vector<Rank>, int64_t>> IndexedExchange::demand() const {
  const std::optional<Cells> cells = Cells::of(src_, dst_, ranks_);
  if (!cells) return std::nullopt;
  std::map<std::vector<Rank>, int64_t> demand;
  for (const Cells::Cell& cell : cells->all()) {
    std::vector<Rank> senders;
    for (const size_t i : cell.senders.indices()) senders.push_back(ranks_[i]);
    demand[std::move(senders)] += cell.elements * cell.receivers.size();
  }
  return demand;
}

}  // namespace shardwright
