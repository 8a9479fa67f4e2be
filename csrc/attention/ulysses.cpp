#include "attention/ulysses.h"

#include "attention/head_exchange.h"
#include "attention/partial_results.h"

namespace shardwright {
namespace {

class UlyssesForward {
 public:
  UlyssesForward(const Attention& attention, Rank rank)
      : writer_(attention, rank), exchange_(writer_), results_(writer_, exchange_.mine()) {}

  Program compile() {
    ProgramBuilder& builder = writer_.builder;
    const Attention& a = writer_.attention;
    const HeadsTensor q = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    const HeadsTensor k = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    const HeadsTensor v = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    out_ = writer_.tensor(builder.new_buffer(q.count()), a.heads, a.depth);
    lse_ = writer_.tensor(builder.new_buffer(a.batch * a.heads * writer_.rows(), a.sum_dtype()), a.heads, 1);
    builder.add_output(out_.buffer, writer_.q_shape());
    builder.add_output(lse_.buffer, writer_.lse_shape());
    builder.begin_step("the forward of attention (ulysses)");
    builder.begin_chunk(0);
    exchange_.gather({{q, HeadKind::kQueries}, {k, HeadKind::kKeys}, {v, HeadKind::kKeys}});
    std::vector<HeadExchange::Arriving> arriving;
    for (int64_t distance = 1; distance < writer_.num_ranks; ++distance) {
      builder.begin_chunk(static_cast<int>(distance));
      arriving.push_back(compute_for(distance));
    }
    builder.begin_chunk(0);
    attend_for(writer_.me, out_, lse_, exchange_.mine().q_begin);
    for (const HeadExchange::Arriving& one : arriving) take(one);
    return std::move(builder.program());
  }

 private:
  HeadExchange::Arriving compute_for(int64_t distance) {
    const int64_t owner = writer_.ahead(distance);
    HeadsTensor out = out_;
    out.heads = exchange_.mine().q_heads();
    out.rows = writer_.attention.rows(owner);
    HeadsTensor lse = out;
    lse.depth = 1;
    if (out.count() > 0) {
      out.buffer = writer_.builder.new_buffer(out.count());
      lse.buffer = writer_.builder.new_buffer(lse.count(), writer_.attention.sum_dtype());
      attend_for(owner, out, lse, 0);
    } else {
      lse.buffer = lse_.buffer;
    }
    return exchange_.start_return(distance, {{out, HeadKind::kQueries}, {lse, HeadKind::kQueries}});
  }

  void attend_for(int64_t owner, const HeadsTensor& out, const HeadsTensor& lse, int64_t first_head) {
    if (exchange_.mine().q_heads() == 0 || writer_.attention.batch == 0) return;
    for (const int queries : writer_.products.of_rank(owner)) {
      const SequenceBlock& block = writer_.products.block(queries);
      const Heads q = exchange_.at(0, block);
      const std::vector<int> seen = writer_.products.keys_of(queries);
      for (const int keys : seen) {
        const SequenceBlock& of_keys = writer_.products.block(keys);
        results_.attend(queries, q, keys, exchange_.at(1, of_keys), exchange_.at(2, of_keys));
      }
      if (seen.empty()) results_.see_nothing(queries, q);
      results_.store(queries, block.row, out, lse, first_head);
    }
  }

  void take(const HeadExchange::Arriving& arriving) {
    writer_.builder.wait(arriving.ticket);
    const int64_t head = exchange_.share(arriving.from).q_begin;
    const HeadsTensor* const to[] = {&out_, &lse_};
    for (size_t i = 0; i < arriving.shares.size(); ++i) {
      const HeadsTensor& from = arriving.shares[i];
      std::vector<Box> boxes;
      append_box(boxes, from, {}, *to[i], {head, 0}, from.heads, from.rows);
      writer_.builder.copy(from.buffer, to[i]->buffer, std::move(boxes));
    }
  }

  AttentionWriter writer_;
  HeadExchange exchange_;
  PartialResults results_;
  HeadsTensor out_, lse_;
};

// The gradients of queries are complete on the rank that has their heads. Those of keys whose heads several ranks share
// are sums over these ranks, which the owner of the rows adds up, by increasing distance.
class UlyssesBackward {
 public:
  UlyssesBackward(const Attention& attention, Rank rank) : writer_(attention, rank), exchange_(writer_) {}

  Program compile() {
    ProgramBuilder& builder = writer_.builder;
    const Attention& a = writer_.attention;
    const HeadsTensor q = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    const HeadsTensor k = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    const HeadsTensor v = writer_.tensor(writer_.new_kv_input(), a.kv_heads, a.depth);
    const HeadsTensor out = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    const HeadsTensor dout = writer_.tensor(writer_.new_q_input(), a.heads, a.depth);
    const HeadsTensor lse = writer_.tensor(writer_.new_lse_input(), a.heads, 1);
    builder.begin_step("the backward of attention (ulysses)");
    exchange_.gather({{q, HeadKind::kQueries},
                      {k, HeadKind::kKeys},
                      {v, HeadKind::kKeys},
                      {out, HeadKind::kQueries},
                      {dout, HeadKind::kQueries},
                      {lse, HeadKind::kQueries}});
    sums_ = {writer_.new_sum(q), writer_.new_sum(k), writer_.new_sum(v)};
    make_shares();
    for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) attend_for(owner);
    return_all();
    const std::vector<int64_t> shapes[] = {writer_.q_shape(), writer_.kv_shape(), writer_.kv_shape()};
    for (size_t i = 0; i < sums_.size(); ++i) writer_.add_sum_output(sums_[i], shapes[i]);
    return std::move(builder.program());
  }

 private:
  static constexpr HeadKind kKinds[] = {HeadKind::kQueries, HeadKind::kKeys, HeadKind::kKeys};

  // For each rank, the gradients of its rows for this rank's share of the heads. Its own are part of its sums.
  void make_shares() {
    shares_.resize(writer_.num_ranks);
    for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) {
      for (size_t i = 0; i < sums_.size(); ++i) {
        HeadsTensor like = sums_[i];
        like.heads = num_heads(exchange_.mine(), kKinds[i]);
        like.rows = writer_.attention.rows(owner);
        shares_[owner].push_back(owner == writer_.me ? sums_[i] : writer_.new_sum(like));
      }
    }
  }

  Heads gradient_at(size_t i, const SequenceBlock& block) const {
    const int64_t head = block.owner == writer_.me ? first_head(exchange_.mine(), kKinds[i]) : 0;
    return shares_[block.owner][i].at(head, block.row);
  }

  void attend_for(int64_t owner) {
    const Attention& a = writer_.attention;
    if (a.batch == 0) return;
    for (const int queries : writer_.products.of_rank(owner)) {
      const SequenceBlock& rows = writer_.products.block(queries);
      for (const int keys : writer_.products.keys_of(queries)) {
        const SequenceBlock& columns = writer_.products.block(keys);
        for (const HeadGroup& group : exchange_.mine().groups) {
          const auto of_q = [&](Heads heads) {
            heads.offset += group.q_head * heads.head_stride;
            return heads;
          };
          const auto of_kv = [&](Heads heads) {
            heads.offset += group.kv_head * heads.head_stride;
            return heads;
          };
          HeadRows lse = exchange_.rows_at(5, rows);
          lse.offset += group.q_head * lse.head_stride;
          const AttendSizes sizes{a.batch, group.q_heads, group.kv_heads, rows.rows(), columns.rows(), a.depth};
          writer_.builder.emit(AttendBackward{sizes, writer_.products.band(queries, keys), a.scale,
                                              of_q(exchange_.at(0, rows)), of_kv(exchange_.at(1, columns)),
                                              of_kv(exchange_.at(2, columns)), of_q(exchange_.at(3, rows)),
                                              of_q(exchange_.at(4, rows)), lse, of_q(gradient_at(0, rows)),
                                              of_kv(gradient_at(1, columns)), of_kv(gradient_at(2, columns))});
        }
      }
    }
  }

  void return_all() {
    std::vector<HeadExchange::Arriving> arriving;
    for (int64_t distance = 1; distance < writer_.num_ranks; ++distance) {
      std::vector<HeadExchange::Sent> sent;
      for (size_t i = 0; i < sums_.size(); ++i) {
        sent.push_back({shares_[writer_.ahead(distance)][i], kKinds[i]});
      }
      arriving.push_back(exchange_.start_return(distance, sent));
    }
    for (const HeadExchange::Arriving& one : arriving) {
      writer_.builder.wait(one.ticket);
      for (size_t i = 0; i < sums_.size(); ++i) {
        const HeadsTensor& from = one.shares[i];
        if (from.count() == 0) continue;
        const AttendSizes sizes{from.batch, from.heads, from.heads, from.rows, 0, from.depth};
        const int64_t head = first_head(exchange_.share(one.from), kKinds[i]);
        writer_.builder.emit(Accumulate{sizes, from.at(0, 0), sums_[i].at(head, 0)});
      }
    }
  }

  AttentionWriter writer_;
  HeadExchange exchange_;
  std::vector<HeadsTensor> sums_;                 // of dq, dk, dv, for this rank's rows
  std::vector<std::vector<HeadsTensor>> shares_;  // by owner, of dq, dk, dv
};

}  // namespace

Program compile_ulysses(const Attention& attention, Rank rank) { return UlyssesForward(attention, rank).compile(); }

Program compile_ulysses_backward(const Attention& attention, Rank rank) {
  return UlyssesBackward(attention, rank).compile();
}

}  // namespace shardwright
