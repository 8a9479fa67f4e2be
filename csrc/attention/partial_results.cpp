#include "attention/partial_results.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

PartialResults::PartialResults(AttentionWriter& writer, HeadShare share) : writer_(writer), share_(std::move(share)) {}

MergeTree<BufferId>& PartialResults::tree(int queries) {
  auto found = trees_.find(queries);
  if (found == trees_.end()) {
    found = trees_.emplace(queries, MergeTree<BufferId>(writer_.products.key_overlaps(queries))).first;
  }
  return found->second;
}

HeadsTensor PartialResults::out_in(BufferId buffer, int queries) const {
  return {buffer,
          0,
          writer_.attention.batch,
          share_.q_heads(),
          writer_.products.queries()[queries].rows(),
          writer_.attention.value_depth};
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
  return {a.batch, share_.q_heads(), share_.q_heads(), writer_.products.queries()[queries].rows(),
          0,       a.depth,          a.value_depth};
}

BufferId PartialResults::new_partial(int queries) {
  const int64_t out_elements = out_in(kMissingBuffer, queries).count();
  const int64_t lse_elements = lse_in(kMissingBuffer, queries).count();
  return writer_.builder.new_buffer(out_elements + lse_elements, writer_.attention.sum_dtype());
}

bool PartialResults::attend(int queries, const Heads& q, int keys, const Heads& k, const Heads& v,
                            const std::optional<PairMask>& mask) {
  const BufferId buffer = new_partial(queries);
  for (const HeadGroup& group : share_.groups) {
    Attend o{sizes(queries),
             writer_.products.band(queries, keys),
             writer_.attention.scale,
             q,
             k,
             v,
             partial(buffer, queries, group.q_head),
             mask};
    o.sizes.heads = group.q_heads;
    o.sizes.kv_heads = group.kv_heads;
    o.sizes.columns = writer_.products.keys()[keys].rows();
    o.q.offset += group.q_head * q.head_stride;
    if (o.mask) o.mask->offset += group.q_head * o.mask->head_stride;
    o.k.offset += group.kv_head * k.head_stride;
    o.v.offset += group.kv_head * v.head_stride;
    writer_.builder.emit(o);
  }
  const auto merge = [&](BufferId left, BufferId right) {
    writer_.builder.emit(Merge{sizes(queries), partial(left, queries, 0), partial(right, queries, 0)});
  };
  const std::optional<BufferId> complete = tree(queries).add({0, keys}, buffer, merge);
  if (!complete) return false;
  complete_[queries] = *complete;
  trees_.erase(queries);
  return true;
}

void PartialResults::set_empty_result(int queries, const Heads& q) {
  const BufferId buffer = new_partial(queries);
  writer_.builder.emit(Attend{sizes(queries), {}, writer_.attention.scale, q, q, q, partial(buffer, queries, 0)});
  complete_[queries] = buffer;
}

void PartialResults::store(int queries, int64_t row, const HeadsTensor& out, const HeadsTensor& lse,
                           int64_t first_head) {
  ProgramBuilder& builder = writer_.builder;
  const auto found = complete_.find(queries);
  check_invariant(found != complete_.end(), "the result of block ", queries, " is incomplete");
  HeadsTensor from = out_in(found->second, queries);
  const HeadsTensor lse_from = lse_in(found->second, queries);
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
  append_box(boxes, lse_from, {}, lse, {first_head, row}, lse_from.heads, lse_from.rows);
  builder.copy(lse_from.buffer, lse.buffer, std::move(boxes));
  complete_.erase(found);
}

}  // namespace shardwright
