#include "program/transfer_traffic.h"

#include "moves/collectives.h"

namespace shardwright {
namespace {

// Returns the traffic of the program's rank in each kind of transfer.
class Counter {
 public:
  explicit Counter(const Program& program) : program_(program) {}

  TransferTraffic of(const AllGather& o) const { return both_ways(others(o) * bytes(o.src), others(o)); }

  TransferTraffic of(const ReduceScatter& o) const { return both_ways(others(o) * bytes(o.dst), others(o)); }

  TransferTraffic of(const AllReduce& o) const {
    const int64_t item_bytes = program_.dtype_of(o.data.buffer).size_bytes();
    const Traffic ring = all_reduce_traffic(o.data.count, others(o) + 1, 0, item_bytes, true);
    return both_ways(ring.received_bytes, ring.messages);
  }

  TransferTraffic of(const AllToAll& o) const {
    const Group& group = program_.groups[o.group];
    TransferTraffic traffic{0, 0, others(o), others(o)};
    for (size_t m = 0; m < group.ranks.size(); ++m) {
      if (static_cast<int64_t>(m) == group.index) continue;
      traffic.received_bytes += bytes({o.dst.buffer, 0, o.receive_counts[m]});
      traffic.sent_bytes += bytes({o.src.buffer, 0, o.send_counts[m]});
    }
    return traffic;
  }

  TransferTraffic of(const SendReceive& o) const {
    return of_messages(o, [](int64_t) { return true; });
  }

  // Returns the traffic of the messages whose peer, an index in the group, satisfies `counts`.
  TransferTraffic of_messages(const SendReceive& o, const auto& counts) const {
    TransferTraffic traffic;
    for (const auto& message : o.receives) {
      if (!counts(message.peer)) continue;
      traffic.received_bytes += bytes(message.range);
      ++traffic.received_messages;
    }
    for (const auto& message : o.sends) {
      if (!counts(message.peer)) continue;
      traffic.sent_bytes += bytes(message.range);
      ++traffic.sent_messages;
    }
    return traffic;
  }

  TransferTraffic of(const Offer& o) const { return {0, 0, others(o), others(o)}; }

  // A rank sends as much as it receives, because all ranks of the group copy from each other.
  TransferTraffic of(const Fetch& o) const {
    const int64_t chunks = o.flags.count / (others(o) + 1) * others(o);
    return both_ways(bytes({o.dst.buffer, 0, chunks * o.chunk_count()}), chunks);
  }

 private:
  // Returns the traffic of a rank that sends as much as it receives.
  static TransferTraffic both_ways(int64_t bytes, int64_t messages) { return {bytes, bytes, messages, messages}; }

  // Returns the number of other ranks in the group.
  int64_t others(const IsTransfer auto& transfer) const {
    return static_cast<int64_t>(program_.groups[transfer.group].ranks.size()) - 1;
  }

  // Returns the bytes of a range.
  int64_t bytes(const BufferRange& range) const { return range.count * program_.dtype_of(range.buffer).size_bytes(); }

  const Program& program_;
};

}  // namespace

TransferTraffic traffic_of(const Program& program, const Operation& operation) {
  return match(
      operation, [&](const IsTransfer auto& o) { return Counter(program).of(o); },
      [](const IsCompute auto&) { return TransferTraffic{}; }, [](const Wait&) { return TransferTraffic{}; });
}

TransferTraffic traffic_inside_node(const Program& program, const SendReceive& transfer, int64_t ranks_per_node) {
  if (ranks_per_node <= 0) return {};
  const Group& group = program.groups[transfer.group];
  const auto node_of = [&](int64_t index) { return to_int(group.ranks[index]) / ranks_per_node; };
  return Counter(program).of_messages(transfer, [&](int64_t peer) { return node_of(peer) == node_of(group.index); });
}

}  // namespace shardwright
