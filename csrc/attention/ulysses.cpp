#include "attention/ulysses.h"

#include "attention/gradient_sums.h"
#include "attention/head_exchange.h"
#include "attention/partial_results.h"

namespace shardwright {
namespace {

// Writes the forward. A rank computes its share of the heads for the rows of one other rank after the other, by
// increasing distance, and sends each result while it computes the next one. Its own rows come last.
class UlyssesForward {
 public:
  UlyssesForward(const Attention& attention, Rank rank)
      : writer_(attention, rank), exchange_(writer_, HeadSharing::kAll), results_(writer_, exchange_.own_share()) {}

  Program compile() {
    ProgramBuilder& builder = writer_.builder;
    const ForwardTensors t = writer_.new_forward_tensors();
    out_ = t.out;
    lse_ = t.lse;
    exchange_.gather(t);  // outside of all chunks: nothing is computed meanwhile
    std::vector<HeadExchange::ResultTransfer> transfers;
    for (int64_t distance = 1; distance < writer_.num_ranks; ++distance) {
      builder.begin_chunk(static_cast<int>(distance));
      transfers.push_back(compute_for(distance));
    }
    builder.begin_chunk(0);
    attend_for(writer_.me, out_, lse_, exchange_.own_share().q_begin);
    for (const HeadExchange::ResultTransfer& transfer : transfers) exchange_.copy_to({out_, lse_}, transfer);
    return std::move(builder.program());
  }

 private:
  // Emits the products of this rank's share of the heads for the rows of the rank `distance` ahead, and the transfer of
  // the result to that rank.
  HeadExchange::ResultTransfer compute_for(int64_t distance) {
    const int64_t owner = writer_.ahead(distance);
    HeadsTensor out = out_;
    out.heads = exchange_.own_share().q_heads();
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
    return exchange_.start_transfer(distance, {{out, HeadKind::kQueries}, {lse, HeadKind::kQueries}});
  }

  // Emits the products of the owner's queries with all keys, and stores the results in `out` and `lse` from
  // `first_head` on.
  void attend_for(int64_t owner, const HeadsTensor& out, const HeadsTensor& lse, int64_t first_head) {
    if (exchange_.own_share().q_heads() == 0 || writer_.attention.batch == 0) return;
    for (const int queries : writer_.products.queries().of_rank(owner)) {
      const SequenceBlock& block = writer_.products.queries()[queries];
      const Heads q = exchange_.at(0, block);
      const std::vector<int> seen = writer_.products.keys_of(queries);
      for (const int keys : seen) {
        const SequenceBlock& of_keys = writer_.products.keys()[keys];
        results_.attend(queries, q, keys, exchange_.at(1, of_keys), exchange_.at(2, of_keys));
      }
      if (seen.empty()) results_.set_empty_result(queries, q);
      results_.store(queries, block.row, out, lse, first_head);
    }
  }

  AttentionWriter writer_;
  HeadExchange exchange_;
  PartialResults results_;
  HeadsTensor out_, lse_;
};

// Writes the backward. The gradients of queries are complete on the rank that computes their heads. If several ranks
// compute products with one head of keys, the owner of the rows adds up the gradients of these ranks, by increasing
// distance. For sums by token (gradient_sums.h), one rank computes each head of keys.
class UlyssesBackward {
 public:
  UlyssesBackward(const Attention& attention, Rank rank)
      : writer_(attention, rank), exchange_(writer_, sharing_in_backward(attention)) {}

  Program compile() {
    const BackwardTensors t = writer_.new_backward_tensors();
    exchange_.gather(t);
    sums_ = {t.dq, t.dk, t.dv};
    make_shares();
    if (exchange_.own_share().q_heads() > 0 && writer_.attention.batch > 0) attend();
    return_all();
    writer_.add_gradient_outputs(t);
    return std::move(writer_.builder.program());
  }

 private:
  static constexpr HeadKind kKinds[] = {HeadKind::kQueries, HeadKind::kKeys, HeadKind::kKeys};

  // Sets shares_. Allocates zeros for each other rank; this rank's own gradients are added to sums_ directly.
  void make_shares() {
    shares_.resize(writer_.num_ranks);
    for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) {
      for (size_t i = 0; i < sums_.size(); ++i) {
        HeadsTensor like = sums_[i];
        like.heads = num_heads(exchange_.own_share(), kKinds[i]);
        like.rows = rows_of(writer_.attention, kKinds[i], owner);
        shares_[owner].push_back(owner == writer_.me ? sums_[i] : writer_.new_sum(like));
      }
    }
  }

  // Returns the rows of a block in the owner's sum i (dq, dk or dv), from the first head of this rank's share on.
  Heads gradient_at(size_t i, const SequenceBlock& block) const {
    const int64_t head = block.owner == writer_.me ? first_head(exchange_.own_share(), kKinds[i]) : 0;
    return shares_[block.owner][i].at(head, block.row);
  }

  // Emits the products of all pairs of blocks, which add gradients for this rank's share of the heads to shares_.
  void attend() {
    GradientSums of_queries(writer_, HeadKind::kQueries, exchange_.own_share().q_heads());
    GradientSums of_keys(writer_, HeadKind::kKeys, exchange_.own_share().kv_heads());
    std::vector<int> queries_in_order;
    std::vector<int> keys_in_order;
    for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) {
      for (const int block : writer_.products.queries().of_rank(owner)) queries_in_order.push_back(block);
    }
    for (int block = 0; block < writer_.products.queries().size(); ++block) {
      of_queries.set_total(block, {gradient_at(0, writer_.products.queries()[block])});
    }
    for (int block = 0; block < writer_.products.keys().size(); ++block) {
      const SequenceBlock& rows = writer_.products.keys()[block];
      of_keys.set_total(block, {gradient_at(1, rows), gradient_at(2, rows)});
      keys_in_order.push_back(block);
    }
    for (const auto& [queries, keys] : pairs_in_order(writer_, queries_in_order, keys_in_order)) {
      const SequenceBlock& q = writer_.products.queries()[queries];
      const SequenceBlock& k = writer_.products.keys()[keys];
      const BackwardRows rows{exchange_.at(0, q), exchange_.at(1, k), exchange_.at(2, k),
                              exchange_.at(3, q), exchange_.at(4, q), exchange_.rows_at(5, q)};
      attend_backward(writer_, exchange_.own_share(), queries, keys, rows, of_queries, of_keys);
    }
  }

  // Emits the transfers that send every other rank the gradients of its rows, and the additions of received gradients
  // to this rank's sums.
  void return_all() {
    std::vector<HeadExchange::ResultTransfer> transfers;
    for (int64_t distance = 1; distance < writer_.num_ranks; ++distance) {
      std::vector<HeadExchange::Result> sent;
      for (size_t i = 0; i < sums_.size(); ++i) {
        sent.push_back({shares_[writer_.ahead(distance)][i], kKinds[i]});
      }
      transfers.push_back(exchange_.start_transfer(distance, sent));
    }
    for (const HeadExchange::ResultTransfer& transfer : transfers) exchange_.add_to(sums_, transfer);
  }

  AttentionWriter writer_;
  HeadExchange exchange_;
  std::vector<HeadsTensor> sums_;  // dq, dk, dv of this rank's rows
  // By owner of the rows: dq, dk, dv for this rank's share of the heads. For this rank itself: sums_.
  std::vector<std::vector<HeadsTensor>> shares_;
};

}  // namespace

Program compile_ulysses(const Attention& attention, Rank rank) { return UlyssesForward(attention, rank).compile(); }

Program compile_ulysses_backward(const Attention& attention, Rank rank) {
  return UlyssesBackward(attention, rank).compile();
}

}  // namespace shardwright
