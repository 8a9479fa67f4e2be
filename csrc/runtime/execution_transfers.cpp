// The functions of an Execution that start transfers and wait for them.
#include "runtime/execution.h"
#include "runtime/flat.h"
#include "runtime/side_stream.h"
#include "support/error.h"

namespace shardwright {

at::Tensor Execution::transfer_view(const BufferRange& range) const {
  return compiled_.is_sent_as_bytes() ? flat_bytes(buffers_[range.buffer], range.offset, range.count)
                                      : this->range(range);
}

// On devices with streams the backend may run the transfer on a stream of its own; the current stream waits for it. If
// the current stream is a side stream, the home stream waits only at the Wait instruction (Execution::wait).
void Execution::start_transfer(const Operation& operation, int index) {
  ++num_under_way_;
  const bool traces = is_traced();
  if (traces) {
    spans_.resize(program_.instructions.size());
    spans_[index] = TraceSpan("communication", to_string(operation), program_.instructions[index].chunk, run_number());
  }
  if (transfers_on_host_) return call_transport(operation, index);
  std::optional<SideStreamGuard> side;
  if (uses_side_stream_) enter_side_stream(side, index);
  if (traces) spans_[index].start_at(record_event(device_, true));
  call_transport(operation, index);
  for (WorkPtr& work : works_[index]) {
    if (work) work->wait();
  }
  works_[index].clear();
  if (side) transfer_ends_[index].emplace(side->record());
  if (traces) spans_[index].stop_at(record_event(device_, true));
}

// The predecessor is the last instruction that uses the transfer's memory (program/order.h). If the transfer allocates
// memory, the side stream waits for all earlier work on the current stream instead, because that work, even of other
// programs, may still use this memory.
void Execution::enter_side_stream(std::optional<SideStreamGuard>& side, int transfer) const {
  const bool allocates = !compiled_.lifetimes().begins[transfer].empty();
  const int predecessor = compiled_.predecessor_of(transfer);
  if (allocates) {
    side.emplace(device_, SideStream::kTransfers);
  } else {
    side.emplace(device_, SideStream::kTransfers, predecessor < 0 ? *begin_event_ : *predecessor_events_[predecessor]);
  }
}

// Transports get flat views of the buffers. Peers are ranks in the group, and counts are in the order of these ranks.
void Execution::call_transport(const Operation& operation, int index) {
  match(
      operation,
      [&](const AllGather& o) {
        at::Tensor src = transfer_view(o.src);
        at::Tensor dst = transfer_view(o.dst);
        works_[index] = {groups_[o.group]->all_gather(dst, src)};
      },
      [&](const ReduceScatter& o) {
        at::Tensor src = range(o.src);
        at::Tensor dst = range(o.dst);
        works_[index] = {groups_[o.group]->reduce_scatter(dst, src, o.op)};
      },
      [&](const AllReduce& o) {
        at::Tensor data = range(o.data);
        works_[index] = {groups_[o.group]->all_reduce(data, o.op)};
      },
      [&](const AllToAll& o) {
        exchanges_by_messages_ || o.by_messages ? send_all_to_all(o, index) : all_to_all(o, index);
      },
      [&](const SendReceive& o) {
        std::vector<Message> sends;
        std::vector<Message> receives;
        for (const auto& m : o.sends) sends.push_back({m.peer, transfer_view(m.range)});
        for (const auto& m : o.receives) receives.push_back({m.peer, transfer_view(m.range)});
        works_[index] = groups_[o.group]->send_receive(sends, receives);
      },
      [&](const Offer& o) { groups_[o.group]->offer(range(o.src)); },
      [&](const Fetch& o) {
        at::Tensor dst = range(o.dst);
        groups_[o.group]->fetch(dst, range(o.flags));
      },
      [](const IsCompute auto&) { check_invariant(false, "an instruction that computes is run as a transfer"); },
      [](const Wait&) { check_invariant(false, "a Wait is run as a transfer"); });
}

// The counts are converted to bytes if the data is sent as bytes.
void Execution::all_to_all(const AllToAll& move, int index) {
  at::Tensor src = transfer_view(move.src);
  at::Tensor dst = transfer_view(move.dst);
  std::vector<int64_t> send_counts = move.send_counts;
  std::vector<int64_t> receive_counts = move.receive_counts;
  if (compiled_.is_sent_as_bytes()) {
    const auto item_bytes = static_cast<int64_t>(buffers_[move.src.buffer].element_size());
    for (int64_t& count : send_counts) count *= item_bytes;
    for (int64_t& count : receive_counts) count *= item_bytes;
  }
  works_[index] = {groups_[move.group]->all_to_all(dst, src, std::move(receive_counts), std::move(send_counts))};
}

// In src and dst, the parts of all ranks are consecutive, in the order of the group. Empty parts are not sent, and this
// rank's own part is copied.
void Execution::send_all_to_all(const AllToAll& move, int index) {
  std::vector<Message> sends;
  std::vector<Message> receives;
  BufferRange sent{move.src.buffer, move.src.offset, 0};
  BufferRange received{move.dst.buffer, move.dst.offset, 0};
  at::Tensor own_sent;
  at::Tensor own_received;
  for (size_t m = 0; m < move.send_counts.size(); ++m) {
    const auto peer = static_cast<int64_t>(m);
    sent.count = move.send_counts[m];
    received.count = move.receive_counts[m];
    if (peer == program_.groups[move.group].index) {
      if (sent.count > 0) {
        own_sent = transfer_view(sent);
        own_received = transfer_view(received);
      }
    } else {
      if (sent.count > 0) sends.push_back({peer, transfer_view(sent)});
      if (received.count > 0) receives.push_back({peer, transfer_view(received)});
    }
    sent.offset += sent.count;
    received.offset += received.count;
  }
  if (!sends.empty() || !receives.empty()) works_[index] = groups_[move.group]->send_receive(sends, receives);
  if (own_sent.defined()) own_received.copy_(own_sent);  // while messages are under way
}

void Execution::wait(int ticket) {
  --num_under_way_;
  for (WorkPtr& work : works_[ticket]) {
    if (work) work->wait();
  }
  works_[ticket].clear();
  if (uses_side_stream_) wait_for(*transfer_ends_[ticket], device_);
  if (!spans_.empty() && transfers_on_host_) spans_[ticket].stop();
}

}  // namespace shardwright
