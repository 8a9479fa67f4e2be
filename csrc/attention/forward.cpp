#include "attention/compile.h"
#include "attention/partial_results.h"
#include "attention/ring.h"
#include "attention/two_level.h"
#include "attention/ulysses.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Writes a forward of a method that cuts the sequence alone (ring.h).
class Forward {
 public:
  Forward(AttentionWriter& writer, const HeadShare& share, const ForwardTensors& tensors)
      : writer_(writer), results_(writer, share), t_(tensors) {}

  // Emits all instructions. Blocks of queries that see no keys come first.
  void emit() {
    for (const int queries : writer_.products.queries().of_rank(writer_.me)) {
      if (writer_.products.keys_of(queries).empty()) set_empty_result(queries);
    }
    if (t_.q.count() > 0 || t_.k.count() > 0) attend_to_all_keys();
  }

 private:
  // Emits the products with all keys. This rank attends to its own keys while the keys of the first group of distances
  // are received, then to the keys of each group while the keys of the next group are received. Serial first receives
  // all keys, which are one group.
  void attend_to_all_keys() {
    KeyExchange exchange(writer_, t_.k, t_.v, distance_groups(writer_.attention.method, writer_.num_ranks));
    const KeyValues own{own_rows(writer_), t_.k, t_.v};
    if (exchange.num_groups() == 0) return attend(own);
    const bool is_serial = writer_.attention.method == AttentionMethod::kSerial;
    writer_.begin_chunk(0);
    exchange.start(0);
    if (is_serial) exchange.wait(0);
    attend(own);
    for (size_t g = 0; g < exchange.num_groups(); ++g) {
      if (!is_serial) exchange.wait(g);
      writer_.begin_chunk(static_cast<int>(g) + 1);
      if (g + 1 < exchange.num_groups()) exchange.start(g + 1);
      for (const int64_t distance : exchange.distances(g)) attend(exchange.received(distance));
    }
  }

  // Emits the products of this rank's queries with these keys, and stores the results that become complete.
  void attend(const KeyValues& kv) {
    for (const int queries : writer_.products.queries().of_rank(writer_.me)) {
      const SequenceBlock& block = writer_.products.queries()[queries];
      for (const int keys : kv.rows.blocks) {
        if (!writer_.products.overlap(queries, keys)) continue;
        const int64_t row = kv.rows.first_row.at(keys);
        const bool is_complete = results_.attend(queries, t_.q.at(0, block.row), keys, kv.k.at(0, row), kv.v.at(0, row),
                                                 mask_of(writer_, t_.mask, queries, keys));
        if (is_complete) results_.store(queries, block.row, t_.out, t_.lse, 0);
      }
    }
  }

  // Emits and stores the result of a block of queries that see no keys.
  void set_empty_result(int queries) {
    const SequenceBlock& block = writer_.products.queries()[queries];
    results_.set_empty_result(queries, t_.q.at(0, block.row));
    results_.store(queries, block.row, t_.out, t_.lse, 0);
  }

  AttentionWriter& writer_;
  PartialResults results_;
  ForwardTensors t_;
};

}  // namespace

void emit_forward(AttentionWriter& writer, const HeadShare& share, const ForwardTensors& tensors) {
  Forward(writer, share, tensors).emit();
}

Program compile_attention(const Attention& attention, Rank rank) {
  if (attention.method == AttentionMethod::kUlysses) return compile_ulysses(attention, rank);
  AttentionWriter writer(attention, rank);
  const ForwardTensors tensors = writer.new_forward_tensors();
  if (attention.method == AttentionMethod::kTwoLevel) {
    emit_two_level_forward(writer, tensors);
  } else {
    emit_forward(writer, all_heads(attention), tensors);
  }
  return std::move(writer.builder.program());
}

}  // namespace shardwright
