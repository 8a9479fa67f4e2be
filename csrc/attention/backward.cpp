#include "attention/compile.h"
#include "attention/parts.h"
#include "attention/ulysses.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Gradients of keys that another rank holds travel to it in float32 while the next keys are attended to. The owner adds
// them to its own, by increasing distance.
class Backward {
 public:
  Backward(const Attention& attention, Rank rank) : writer_(attention, rank) {}

  Program compile() {
    ProgramBuilder& builder = writer_.builder;
    const Attention& a = writer_.attention;
    q_ = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    k_ = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    v_ = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    out_ = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    dout_ = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    lse_ = writer_.tensor(writer_.new_lse_input(), a.heads, 1);
    builder.begin_step(concat("the backward of attention (", method_name(a.method), ")"));
    dq_ = writer_.new_sum(q_);
    dk_ = writer_.new_sum(k_);
    dv_ = writer_.new_sum(v_);
    if (q_.count() > 0 || k_.count() > 0) move_keys();
    for (const auto& [sum, shape] :
         {std::pair(dq_, writer_.q_shape()), std::pair(dk_, writer_.kv_shape()), std::pair(dv_, writer_.kv_shape())}) {
      writer_.add_sum_output(sum, shape);
    }
    return std::move(builder.program());
  }

 private:
  // Gradients under way: those of keys of other ranks, and those of this rank's keys from others.
  struct Returning {
    Ticket ticket = kNoTicket;
    std::vector<std::pair<KeyRows, HeadsTensor>> dk;
    std::vector<HeadsTensor> dv;
  };

  void move_keys() {
    KeyExchange exchange(writer_, k_, v_, distance_groups(writer_.attention.method, writer_.num_ranks));
    const KeyValues own{own_rows(writer_), k_, v_};
    if (exchange.num_groups() == 0) return attend(own, dk_, dv_);
    const bool is_serial = writer_.attention.method == AttentionMethod::kSerial;
    exchange.start(0);
    if (is_serial) exchange.wait(0);
    attend(own, dk_, dv_);
    Returning last;
    for (size_t g = 0; g < exchange.num_groups(); ++g) {
      if (!is_serial) exchange.wait(g);
      writer_.builder.begin_chunk(static_cast<int>(g) + 1);
      if (g + 1 < exchange.num_groups()) exchange.start(g + 1);
      Returning next = return_gradients(exchange, g);
      take(last);
      last = std::move(next);
    }
    take(last);
  }

  Returning return_gradients(const KeyExchange& exchange, size_t g) {
    ProgramBuilder& builder = writer_.builder;
    Returning returning;
    SendReceive move;
    for (const int64_t distance : exchange.distances(g)) {
      const KeyValues& arrived = exchange.arrived(distance);
      if (arrived.k.count() > 0) {
        HeadsTensor dk = arrived.k;
        dk.buffer = builder.new_buffer(2 * dk.count(), writer_.attention.sum_dtype());
        dk.offset = 0;
        HeadsTensor dv = dk;
        dv.offset = dk.count();
        builder.emit(FillZero{builder.whole(dk.buffer)});
        attend(arrived, dk, dv);
        move.sends.push_back({writer_.member(writer_.behind(distance)), builder.whole(dk.buffer)});
      }
      KeyRows sent = needed_rows(writer_, writer_.me, writer_.ahead(distance));
      HeadsTensor dk = k_;
      dk.rows = sent.rows;
      if (dk.count() == 0) continue;
      dk.buffer = builder.new_buffer(2 * dk.count(), writer_.attention.sum_dtype());
      HeadsTensor dv = dk;
      dv.offset = dk.count();
      move.receives.push_back({writer_.member(writer_.ahead(distance)), builder.whole(dk.buffer)});
      returning.dk.emplace_back(std::move(sent), dk);
      returning.dv.push_back(dv);
    }
    if (move.sends.empty() && move.receives.empty()) return returning;
    move.group = writer_.group();
    returning.ticket = builder.send_receive(std::move(move));
    return returning;
  }

  void take(const Returning& returning) {
    writer_.builder.wait(returning.ticket);
    for (size_t i = 0; i < returning.dk.size(); ++i) {
      const auto& [rows, dk] = returning.dk[i];
      if (rows.are_all) {
        accumulate(dk, 0, dk_, 0, dk_.rows);
        accumulate(returning.dv[i], 0, dv_, 0, dv_.rows);
        continue;
      }
      for (const int keys : rows.blocks) {
        const SequenceBlock& block = writer_.products.block(keys);
        accumulate(dk, rows.first_row.at(keys), dk_, block.row, block.rows());
        accumulate(returning.dv[i], rows.first_row.at(keys), dv_, block.row, block.rows());
      }
    }
  }

  void accumulate(const HeadsTensor& from, int64_t from_row, const HeadsTensor& to, int64_t to_row, int64_t rows) {
    const AttendSizes sizes{from.batch, from.heads, from.heads, rows, 0, from.depth};
    writer_.builder.emit(Accumulate{sizes, from.at(0, from_row), to.at(0, to_row)});
  }

  void attend(const KeyValues& at_hand, const HeadsTensor& dk, const HeadsTensor& dv) {
    const Attention& a = writer_.attention;
    for (const int queries : writer_.products.of_rank(writer_.me)) {
      const SequenceBlock& block = writer_.products.block(queries);
      for (const int keys : at_hand.rows.blocks) {
        if (!writer_.products.meet(queries, keys)) continue;
        const int64_t row = at_hand.rows.first_row.at(keys);
        const AttendSizes sizes{a.batch, a.heads, a.kv_heads, block.rows(), writer_.products.block(keys).rows(),
                                a.depth};
        writer_.builder.emit(AttendBackward{sizes, writer_.products.band(queries, keys), a.scale, q_.at(0, block.row),
                                            at_hand.k.at(0, row), at_hand.v.at(0, row), out_.at(0, block.row),
                                            dout_.at(0, block.row), lse_.rows_at(0, block.row), dq_.at(0, block.row),
                                            dk.at(0, row), dv.at(0, row)});
      }
    }
  }

  AttentionWriter writer_;
  HeadsTensor q_, k_, v_, out_, dout_, lse_;
  HeadsTensor dq_, dk_, dv_;  // sums
};

}  // namespace

Program compile_attention_backward(const Attention& attention, Rank rank) {
  if (attention.method == AttentionMethod::kUlysses) return compile_ulysses_backward(attention, rank);
  return Backward(attention, rank).compile();
}

}  // namespace shardwright
