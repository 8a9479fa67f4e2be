#include "attention/compile.h"
#include "attention/partial_results.h"
#include "attention/ulysses.h"
#include "support/error.h"

namespace shardwright {
namespace {

class Forward {
 public:
  Forward(const Attention& attention, Rank rank) : writer_(attention, rank), results_(writer_, all_heads(attention)) {}

  Program compile() {
    ProgramBuilder& builder = writer_.builder;
    const Attention& a = writer_.attention;
    q_ = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    const HeadsTensor k = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    const HeadsTensor v = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    out_ = writer_.tensor(builder.new_buffer(q_.count()), a.heads, a.depth);
    lse_ = writer_.tensor(builder.new_buffer(a.batch * a.heads * writer_.rows(), a.sum_dtype()), a.heads, 1);
    builder.add_output(out_.buffer, writer_.q_shape());
    builder.add_output(lse_.buffer, writer_.lse_shape());
    builder.begin_step(concat("the forward of attention (", method_name(a.method), ")"));
    for (const int queries : writer_.products.of_rank(writer_.me)) {
      if (writer_.products.keys_of(queries).empty()) see_nothing(queries);
    }
    if (q_.count() > 0 || k.count() > 0) move_keys(k, v);
    return std::move(builder.program());
  }

 private:
  void move_keys(const HeadsTensor& k, const HeadsTensor& v) {
    KeyExchange exchange(writer_, k, v, distance_groups(writer_.attention.method, writer_.num_ranks));
    const KeyValues own{own_rows(writer_), k, v};
    if (exchange.num_groups() == 0) return attend(own);
    const bool is_serial = writer_.attention.method == AttentionMethod::kSerial;
    writer_.builder.begin_chunk(0);
    exchange.start(0);
    if (is_serial) exchange.wait(0);
    attend(own);
    for (size_t g = 0; g < exchange.num_groups(); ++g) {
      if (!is_serial) exchange.wait(g);
      writer_.builder.begin_chunk(static_cast<int>(g) + 1);
      if (g + 1 < exchange.num_groups()) exchange.start(g + 1);
      for (const int64_t distance : exchange.distances(g)) attend(exchange.arrived(distance));
    }
  }

  void attend(const KeyValues& at_hand) {
    for (const int queries : writer_.products.of_rank(writer_.me)) {
      const SequenceBlock& block = writer_.products.block(queries);
      for (const int keys : at_hand.rows.blocks) {
        if (!writer_.products.meet(queries, keys)) continue;
        const int64_t row = at_hand.rows.first_row.at(keys);
        const bool is_complete =
            results_.attend(queries, q_.at(0, block.row), keys, at_hand.k.at(0, row), at_hand.v.at(0, row));
        if (is_complete) results_.store(queries, block.row, out_, lse_, 0);
      }
    }
  }

  void see_nothing(int queries) {
    const SequenceBlock& block = writer_.products.block(queries);
    results_.see_nothing(queries, q_.at(0, block.row));
    results_.store(queries, block.row, out_, lse_, 0);
  }

  AttentionWriter writer_;
  PartialResults results_;
  HeadsTensor q_;
  HeadsTensor out_;
  HeadsTensor lse_;
};

}  // namespace

Program compile_attention(const Attention& attention, Rank rank) {
  if (attention.method == AttentionMethod::kUlysses) return compile_ulysses(attention, rank);
  return Forward(attention, rank).compile();
}

}  // namespace shardwright
