#include "attention/two_level.h"

#include "attention/gradient_sums.h"
#include "attention/head_exchange.h"
#include "attention/ring.h"

namespace shardwright {
namespace {

// The mesh dims of mesh_of_programs().
constexpr int kAcrossNodes = 0;
constexpr int kInNode = 1;

// Returns the attention with only the parts of this rank's node.
Attention attention_in_node(const AttentionWriter& all) {
  Attention attention = all.attention;
  const int64_t count = attention.ranks_per_node;
  for (std::vector<IntervalList>* parts : {&attention.parts, &attention.key_parts}) {
    if (parts->empty()) continue;
    const auto begin = parts->begin() + all.me / count * count;
    *parts = {begin, begin + count};
  }
  return attention;
}

// Returns one part for each node: the parts of its ranks, one after the other.
std::vector<IntervalList> by_node(const std::vector<IntervalList>& by_rank, int64_t ranks_per_node) {
  std::vector<IntervalList> parts;
  for (size_t p = 0; p < by_rank.size(); ++p) {
    if (static_cast<int64_t>(p) % ranks_per_node == 0) parts.emplace_back();
    for (const Interval& run : by_rank[p]) append(parts.back(), run);
  }
  return parts;
}

// Returns the attention of a share of the heads, with one part for each node.
Attention attention_between_nodes(const AttentionWriter& all, const HeadShare& share) {
  Attention attention = all.attention;
  attention.method = AttentionMethod::kRing;
  attention.heads = share.q_heads();
  attention.kv_heads = share.kv_heads();
  attention.parts = by_node(all.attention.parts, attention.ranks_per_node);
  attention.key_parts = by_node(all.attention.key_parts, attention.ranks_per_node);
  return attention;
}

// Writes both directions, with one writer for the ranks of this node (in_node_) and one for the ranks of all nodes that
// compute the same heads (across_).
class TwoLevel {
 public:
  TwoLevel(AttentionWriter& all, HeadSharing sharing)
      : in_node_(all, kInNode, attention_in_node(all), all.products),
        exchange_(in_node_, sharing),
        across_(all, kAcrossNodes, attention_between_nodes(all, exchange_.own_share()),
                all.products.joined(all.attention.ranks_per_node)) {}

  // Emits the gather of the node's rows of this rank's heads, the products with all keys along the ring between nodes,
  // and the transfers of results to the owners of the rows.
  void forward(const ForwardTensors& t) {
    exchange_.gather(t);
    ForwardTensors inner;
    inner.q = exchange_.joined(0);
    inner.k = exchange_.joined(1);
    inner.v = exchange_.joined(2);
    inner.out = inner.lse = inner.q;
    inner.out.depth = t.out.depth;
    inner.lse.depth = 1;
    inner.out.buffer = builder().new_buffer(inner.out.count());
    inner.lse.buffer = builder().new_buffer(inner.lse.count(), across_.attention.sum_dtype());
    if (exchange_.own_share().q_heads() > 0) emit_forward(across_, exchange_.own_share(), inner);
    builder().begin_chunk(-1);  // nothing is computed while results return
    const std::vector<HeadExchange::Result> results{{inner.out, HeadKind::kQueries}, {inner.lse, HeadKind::kQueries}};
    const std::vector<HeadsTensor> to{t.out, t.lse};
    const std::vector<HeadExchange::ResultTransfer> transfers = start_transfers(results);
    exchange_.copy_to(to, own_rows_of(results));
    for (const HeadExchange::ResultTransfer& transfer : transfers) exchange_.copy_to(to, transfer);
  }

  // Like forward(), but transfers gradients in place of results, and each rank adds up the gradients of its rows.
  void backward(const BackwardTensors& t) {
    exchange_.gather(t);
    BackwardTensors inner;
    HeadsTensor* const gathered[] = {&inner.q, &inner.k, &inner.v, &inner.out, &inner.dout, &inner.lse};
    for (size_t i = 0; i < std::size(gathered); ++i) *gathered[i] = exchange_.joined(i);
    inner.dq = across_.new_sum(inner.q);
    inner.dk = across_.new_sum(inner.k);
    inner.dv = across_.new_sum(inner.v);
    if (exchange_.own_share().q_heads() > 0) emit_backward(across_, exchange_.own_share(), inner);
    builder().begin_chunk(-1);
    const std::vector<HeadExchange::Result> sums{
        {inner.dq, HeadKind::kQueries}, {inner.dk, HeadKind::kKeys}, {inner.dv, HeadKind::kKeys}};
    const std::vector<HeadsTensor> to{t.dq, t.dk, t.dv};
    const std::vector<HeadExchange::ResultTransfer> transfers = start_transfers(sums);
    exchange_.add_to(to, own_rows_of(sums));
    for (const HeadExchange::ResultTransfer& transfer : transfers) exchange_.add_to(to, transfer);
  }

 private:
  ProgramBuilder& builder() { return in_node_.builder; }

  // Emits copies of the rows of one rank from tensors that have the rows of all ranks of the node.
  std::vector<HeadExchange::Result> rows_of(int64_t owner, const std::vector<HeadExchange::Result>& node_tensors) {
    std::vector<HeadExchange::Result> taken;
    for (const auto& [all, kind] : node_tensors) {
      int64_t first = 0;
      for (int64_t before = 0; before < owner; ++before) {
        first += shardwright::rows_of(in_node_.attention, kind, before);
      }
      HeadsTensor rows = all;
      rows.rows = shardwright::rows_of(in_node_.attention, kind, owner);
      rows.buffer = builder().new_buffer(rows.count(), builder().program().dtype_of(all.buffer));
      std::vector<Box> boxes;
      append_box(boxes, all, {0, first}, rows, {}, rows.heads, rows.rows);
      builder().copy(all.buffer, rows.buffer, std::move(boxes));
      taken.push_back({rows, kind});
    }
    return taken;
  }

  // Emits the starts of transfers that send each other rank of the node the rows of these tensors that it owns.
  std::vector<HeadExchange::ResultTransfer> start_transfers(const std::vector<HeadExchange::Result>& node_tensors) {
    std::vector<HeadExchange::ResultTransfer> transfers;
    for (int64_t distance = 1; distance < in_node_.num_ranks; ++distance) {
      transfers.push_back(exchange_.start_transfer(distance, rows_of(in_node_.ahead(distance), node_tensors)));
    }
    return transfers;
  }

  // Emits copies of this rank's own rows of these tensors. Returns them as a transfer without a ticket, so that copy_to
  // and add_to treat own and received rows in one way.
  HeadExchange::ResultTransfer own_rows_of(const std::vector<HeadExchange::Result>& node_tensors) {
    return {kNoTicket, in_node_.me, rows_of(in_node_.me, node_tensors)};
  }

  AttentionWriter in_node_;
  HeadExchange exchange_;
  AttentionWriter across_;
};

}  // namespace

void emit_two_level_forward(AttentionWriter& all, const ForwardTensors& tensors) {
  TwoLevel(all, HeadSharing::kAll).forward(tensors);
}

void emit_two_level_backward(AttentionWriter& all, const BackwardTensors& tensors) {
  TwoLevel(all, sharing_in_backward(all.attention)).backward(tensors);
}

}  // namespace shardwright
