#include "attention/compile.h"
#include "attention/gradient_sums.h"
#include "attention/ring.h"
#include "attention/two_level.h"
#include "attention/ulysses.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Writes a backward. The gradients of received keys are sent to the owner of the keys, in sum_dtype(), while this rank
// attends to the next keys. The owner adds them to its own gradients (gradient_sums.h).
class Backward {
 public:
  Backward(AttentionWriter& writer, const HeadShare& share, const BackwardTensors& tensors)
      : writer_(writer),
        share_(share),
        of_queries_(writer_, HeadKind::kQueries, share_.q_heads()),
        of_keys_(writer_, HeadKind::kKeys, share_.kv_heads()),
        t_(tensors) {}

  // Emits all instructions; none if this rank holds neither queries nor keys.
  void emit() {
    if (t_.q.count() > 0 || t_.k.count() > 0) attend_to_all_keys();
  }

 private:
  // A transfer that receives sums of the gradients of this rank's keys.
  struct GradientTransfer {
    Ticket ticket = kNoTicket;
    std::vector<ReturnedSums> sums;
  };

  // Emits the products with all keys, in the order of the forward. The gradients of the keys of one group are sent to
  // their owners while this rank attends to the keys of the next group.
  void attend_to_all_keys() {
    for (const int block : writer_.products.queries().of_rank(writer_.me)) {
      of_queries_.set_total(block, {t_.dq.at(0, writer_.products.queries()[block].row)});
    }
    for (const int block : writer_.products.keys().of_rank(writer_.me)) {
      const int64_t row = writer_.products.keys()[block].row;
      of_keys_.set_total(block, {t_.dk.at(0, row), t_.dv.at(0, row)});
    }
    KeyExchange exchange(writer_, t_.k, t_.v, distance_groups(writer_.attention.method, writer_.num_ranks));
    const KeyValues own{own_rows(writer_), t_.k, t_.v};
    if (exchange.num_groups() == 0) return attend(own, of_keys_);
    const bool is_serial = writer_.attention.method == AttentionMethod::kSerial;
    writer_.begin_chunk(0);
    exchange.start(0);
    if (is_serial) exchange.wait(0);
    attend(own, of_keys_);
    GradientTransfer last;
    for (size_t g = 0; g < exchange.num_groups(); ++g) {
      if (!is_serial) exchange.wait(g);
      writer_.begin_chunk(static_cast<int>(g) + 1);
      if (g + 1 < exchange.num_groups()) exchange.start(g + 1);
      GradientTransfer next = attend_to_group(exchange, g);
      finish(last);
      last = std::move(next);
    }
    finish(last);
  }

  // Emits the products with the keys received in group g, and the start of the transfer that sends the gradients of
  // these keys to their owners, and receives gradients of this rank's keys.
  GradientTransfer attend_to_group(const KeyExchange& exchange, size_t g) {
    ProgramBuilder& builder = writer_.builder;
    GradientTransfer transfer;
    SendReceive move;
    const int64_t heads = share_.kv_heads();
    for (const int64_t distance : exchange.distances(g)) {
      const int64_t owner = writer_.behind(distance);
      const ReturnedSums sent = returned_sums(writer_, owner, writer_.me, heads);
      if (sent.buffer != kMissingBuffer) {
        builder.emit(FillZero{builder.whole(sent.buffer)});
        GradientSums of_received(writer_, HeadKind::kKeys, heads);
        for (const ReturnedSums::Sum& sum : sent.sums) of_received.set_memory(sum);
        attend(exchange.received(distance), of_received);
        move.sends.push_back({writer_.member(owner), builder.whole(sent.buffer)});
      }
      const int64_t by = writer_.ahead(distance);
      ReturnedSums received = returned_sums(writer_, writer_.me, by, heads);
      if (received.buffer == kMissingBuffer) continue;
      move.receives.push_back({writer_.member(by), builder.whole(received.buffer)});
      transfer.sums.push_back(std::move(received));
    }
    if (move.sends.empty() && move.receives.empty()) return transfer;
    if (g + 1 == exchange.num_groups()) builder.begin_chunk(-1);  // nothing is computed meanwhile
    move.group = writer_.group();
    transfer.ticket = builder.send_receive(std::move(move));
    return transfer;
  }

  // Emits the wait for a transfer, and the additions of the received gradients to the gradients of this rank's keys.
  void finish(const GradientTransfer& transfer) {
    writer_.builder.wait(transfer.ticket);
    for (const ReturnedSums& received : transfer.sums) {
      for (const ReturnedSums::Sum& sum : received.sums) of_keys_.add_received(sum);
    }
  }

  // Emits the products of this rank's queries with these keys. `of_keys` adds up the gradients of the keys.
  void attend(const KeyValues& kv, GradientSums& of_keys) {
    const std::vector<int>& own_queries = writer_.products.queries().of_rank(writer_.me);
    for (const auto& [queries, keys] : pairs_in_order(writer_, own_queries, kv.rows.blocks)) {
      const int64_t q_row = writer_.products.queries()[queries].row;
      const int64_t k_row = kv.rows.first_row.at(keys);
      const BackwardRows rows{t_.q.at(0, q_row),
                              kv.k.at(0, k_row),
                              kv.v.at(0, k_row),
                              t_.out.at(0, q_row),
                              t_.dout.at(0, q_row),
                              t_.lse.rows_at(0, q_row),
                              mask_of(writer_, t_.mask, queries, keys)};
      attend_backward(writer_, share_, queries, keys, rows, of_queries_, of_keys);
    }
  }

  AttentionWriter& writer_;
  HeadShare share_;
  GradientSums of_queries_;
  GradientSums of_keys_;  // of this rank's keys
  BackwardTensors t_;
};

// Sums a tensor over all ranks, and moves `sum` to a new buffer with the result. Position p adds up the p-th part of
// all ranks' tensors, in the order of positions, and sends the result to all ranks. So all ranks get the same bits.
void sum_over_ranks(AttentionWriter& writer, HeadsTensor& sum) {
  if (sum.count() == 0) return;
  ProgramBuilder& builder = writer.builder;
  const auto part_of = [&](BufferId buffer, int64_t position) {
    const int64_t begin = sum.count() * position / writer.num_ranks;
    return BufferRange{buffer, begin, sum.count() * (position + 1) / writer.num_ranks - begin};
  };
  // Sends the range sent_to(p) to each other position p, and receives the range received_from(p) from it.
  const auto exchange = [&](const auto& sent_to, const auto& received_from) {
    SendReceive move;
    for (int64_t position = 0; position < writer.num_ranks; ++position) {
      if (position == writer.me) continue;
      const BufferRange sent = sent_to(position);
      const BufferRange received = received_from(position);
      if (sent.count > 0) move.sends.push_back({writer.member(position), sent});
      if (received.count > 0) move.receives.push_back({writer.member(position), received});
    }
    if (move.sends.empty() && move.receives.empty()) return;
    move.group = writer.group();
    builder.wait(builder.send_receive(std::move(move)));
  };

  const BufferId local_sum = sum.buffer;
  sum.buffer = builder.new_buffer(sum.count(), writer.attention.sum_dtype());
  const BufferRange own_part = part_of(sum.buffer, writer.me);
  const BufferId staging = builder.new_buffer(writer.num_ranks * own_part.count, writer.attention.sum_dtype());
  const auto staged = [&](int64_t position) { return BufferRange{staging, position * own_part.count, own_part.count}; };
  exchange([&](int64_t position) { return part_of(local_sum, position); }, staged);
  if (own_part.count > 0) {
    builder.emit(FillZero{own_part});
    for (int64_t position = 0; position < writer.num_ranks; ++position) {
      const BufferRange from = position == writer.me ? part_of(local_sum, position) : staged(position);
      const auto row = [](const BufferRange& range) { return Heads{range.buffer, range.offset, 0, 0, 0}; };
      builder.emit(Accumulate{{1, 1, 1, 1, 0, own_part.count, 0}, row(from), row(own_part)});
    }
  }
  exchange([&](int64_t) { return own_part; }, [&](int64_t position) { return part_of(sum.buffer, position); });
}

}  // namespace

void emit_backward(AttentionWriter& writer, const HeadShare& share, const BackwardTensors& tensors) {
  Backward(writer, share, tensors).emit();
}

Program compile_attention_backward(const Attention& attention, Rank rank) {
  if (attention.method == AttentionMethod::kUlysses) return compile_ulysses_backward(attention, rank);
  AttentionWriter writer(attention, rank);
  BackwardTensors tensors = writer.new_backward_tensors();
  if (attention.method == AttentionMethod::kTwoLevel) {
    emit_two_level_backward(writer, tensors);
  } else {
    emit_backward(writer, all_heads(attention), tensors);
  }
  if (attention.keys_are_whole && writer.num_ranks > 1) {
    writer.builder.begin_chunk(-1);  // nothing is computed meanwhile
    sum_over_ranks(writer, tensors.dk);
    sum_over_ranks(writer, tensors.dv);
  }
  writer.add_gradient_outputs(tensors);
  return std::move(writer.builder.program());
}

}  // namespace shardwright
