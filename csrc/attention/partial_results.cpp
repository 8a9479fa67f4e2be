#include "attention/partial_results.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

PartialResults::PartialResults(AttentionWriter& writer, HeadShare share) : writer_(writer), share_(std::move(share)) {}

PartialResults::Queries& PartialResults::of(int queries) {
  Queries& found = queries_[queries];
  if (found.before.empty()) {
    found.before.push_back(0);
    for (int keys = 0; keys < writer_.products.num_blocks(); ++keys) {
      found.before.push_back(found.before.back() + (writer_.products.meet(queries, keys) ? 1 : 0));
    }
  }
  return found;
}

int PartialResults::met(const Queries& queries, Node node) {
  const int64_t last = static_cast<int64_t>(queries.before.size()) - 1;
  const auto [level, index] = node;
  const int64_t begin = std::min(static_cast<int64_t>(index) << level, last);
  const int64_t end = std::min((static_cast<int64_t>(index) + 1) << level, last);
  return queries.before[end] - queries.before[begin];
}

HeadsTensor PartialResults::out_in(BufferId buffer, int queries) const {
  return {buffer,
          0,
          writer_.attention.batch,
          share_.q_heads(),
          writer_.products.block(queries).rows(),
          writer_.attention.depth};
}

HeadsTensor PartialResults::lse_in(BufferId buffer, int queries) const {
  HeadsTensor lse = out_in(buffer, queries);
  lse.offset = lse.count();
  lse.depth = 1;
  return lse;
}

Partial PartialResults::partial(BufferId buffer, int queries, int64_t head) const {
  return {out_in(buffer, queries).at(head, 0), lse_in(buffer, queries).rows_at(head, 0)};
}

AttendSizes PartialResults::sizes(int queries) const {
  const Attention& a = writer_.attention;
  return {a.batch, share_.q_heads(), share_.q_heads(), writer_.products.block(queries).rows(), 0, a.depth};
}

BufferId PartialResults::new_partial(int queries) {
  const int64_t outputs = out_in(kMissingBuffer, queries).count();
  const int64_t sums = lse_in(kMissingBuffer, queries).count();
  return writer_.builder.new_buffer(outputs + sums, writer_.attention.sum_dtype());
}

bool PartialResults::attend(int queries, const Heads& q, int keys, const Heads& k, const Heads& v) {
  const BufferId made = new_partial(queries);
  for (const HeadGroup& group : share_.groups) {
    Attend o{sizes(queries),
             writer_.products.band(queries, keys),
             writer_.attention.scale,
             q,
             k,
             v,
             partial(made, queries, group.q_head)};
    o.sizes.heads = group.q_heads;
    o.sizes.kv_heads = group.kv_heads;
    o.sizes.columns = writer_.products.block(keys).rows();
    o.q.offset += group.q_head * q.head_stride;
    o.k.offset += group.kv_head * k.head_stride;
    o.v.offset += group.kv_head * v.head_stride;
    writer_.builder.emit(o);
  }
  Queries& state = of(queries);
  const int all = state.before.back();
  BufferId result = made;
  for (Node node{0, keys}; met(state, node) < all; node = {node.first + 1, node.second / 2}) {
    const Node sibling{node.first, node.second ^ 1};
    if (met(state, sibling) == 0) continue;
    const auto other = state.waiting.find(sibling);
    if (other == state.waiting.end()) {
      state.waiting[node] = result;
      return false;
    }
    const bool is_left = node.second < sibling.second;
    const BufferId left = is_left ? result : other->second;
    const BufferId right = is_left ? other->second : result;
    writer_.builder.emit(Merge{sizes(queries), partial(left, queries, 0), partial(right, queries, 0)});
    state.waiting.erase(other);
    result = left;
  }
  state.complete = result;
  return true;
}

void PartialResults::see_nothing(int queries, const Heads& q) {
  const BufferId made = new_partial(queries);
  writer_.builder.emit(Attend{sizes(queries), {}, writer_.attention.scale, q, q, q, partial(made, queries, 0)});
  of(queries).complete = made;
}

void PartialResults::store(int queries, int64_t row, const HeadsTensor& out, const HeadsTensor& lse,
                           int64_t first_head) {
  ProgramBuilder& builder = writer_.builder;
  const auto found = queries_.find(queries);
  check_invariant(found != queries_.end() && found->second.complete != kMissingBuffer, "the result of block ", queries,
                  " is incomplete");
  HeadsTensor from = out_in(found->second.complete, queries);
  const HeadsTensor sums = lse_in(found->second.complete, queries);
  if (!(writer_.attention.sum_dtype() == writer_.attention.dtype)) {
    HeadsTensor rounded = from;
    rounded.buffer = builder.new_buffer(from.count());
    builder.emit(Cast{from.range(), rounded.range()});
    from = rounded;
  }
  std::vector<Box> boxes;
  append_box(boxes, from, {}, out, {first_head, row}, from.heads, from.rows);
  builder.copy(from.buffer, out.buffer, std::move(boxes));
  boxes.clear();
  append_box(boxes, sums, {}, lse, {first_head, row}, sums.heads, sums.rows);
  builder.copy(sums.buffer, lse.buffer, std::move(boxes));
  queries_.erase(found);
}

}  // namespace shardwright
