#include "attention/parts.h"

#include <algorithm>
#include <numeric>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns its argument. Throws UserError as check() does.
const Attention& checked(const Attention& attention) {
  check(attention);
  return attention;
}

// Returns the position of a rank. Throws UserError if the rank is not on the attention's mesh.
int64_t position_of(const Attention& attention, Rank rank) {
  const std::optional<Position> position = attention.mesh->position_of(rank);
  check_user(position.has_value(), "rank must be on the mesh (", *attention.mesh, "), got ", rank);
  return *position;
}

MeshDimSet all_dims(const Mesh& mesh) {
  MeshDimSet all;
  for (int d = 0; d < mesh.ndim(); ++d) all.insert(d);
  return all;
}

std::vector<int64_t> all_positions(const Mesh& mesh) {
  std::vector<int64_t> positions(mesh.size());
  std::iota(positions.begin(), positions.end(), int64_t{0});
  return positions;
}

// Returns the positions that differ from `position` along this mesh dim only, itself included.
std::vector<int64_t> positions_along(const Mesh& mesh, int mesh_dim, int64_t position) {
  std::vector<int64_t> positions;
  const int64_t first = position - mesh.coordinate(position, mesh_dim) * mesh.stride(mesh_dim);
  for (int64_t c = 0; c < mesh.dim_size(mesh_dim); ++c) positions.push_back(first + c * mesh.stride(mesh_dim));
  return positions;
}

}  // namespace

AttentionWriter::AttentionWriter(const Attention& given, Rank rank)
    : attention(checked(given)),
      products(given),
      shared_builder(std::make_shared<ProgramBuilder>(given.dtype, given.lowering, /*named_groups_only=*/true, rank)),
      builder(*shared_builder),
      mesh(mesh_of_programs(given)),
      mesh_dims(all_dims(*mesh)),
      mesh_positions(all_positions(*mesh)),
      me(position_of(given, rank)),
      num_ranks(given.mesh->size()) {}

AttentionWriter::AttentionWriter(const AttentionWriter& all, int mesh_dim, Attention given, BlockProducts blocks)
    : attention(std::move(given)),
      products(std::move(blocks)),
      shared_builder(all.shared_builder),
      builder(*shared_builder),
      mesh(all.mesh),
      mesh_dims(MeshDimSet::single(mesh_dim)),
      mesh_positions(positions_along(*mesh, mesh_dim, all.me)),
      me(mesh->coordinate(all.me, mesh_dim)),
      num_ranks(mesh->dim_size(mesh_dim)) {}

int AttentionWriter::group() {
  return builder.group_of_ranks(mesh_dims, mesh->ranks_at(mesh->group(mesh_positions[me], mesh_dims)));
}

int64_t AttentionWriter::member(int64_t position) const {
  if (mesh->ranks_are_positions()) return position;  // members ascend
  const std::vector<int64_t> members = mesh->group(mesh_positions[me], mesh_dims);
  return std::find(members.begin(), members.end(), mesh_positions[position]) - members.begin();
}

HeadsTensor AttentionWriter::new_input(int64_t heads, int64_t rows, int64_t depth) {
  HeadsTensor input{kMissingBuffer, 0, attention.batch, heads, rows, depth};
  input.buffer = builder.new_input({input.batch, input.heads, input.rows, input.depth});
  return input;
}

std::optional<PairMask> AttentionWriter::new_mask_input() {
  if (!attention.mask_tensor) return std::nullopt;
  const MaskTensor& m = *attention.mask_tensor;
  check_user(m.rows == 1 || m.rows == rows(), "mask must have 1 row, or the ", rows(), " rows of q on rank ",
             builder.rank(), ", got ", m.rows);
  const auto stride = [](int64_t size, int64_t all) { return size == 1 ? 0 : all; };
  return PairMask{builder.new_input(m.shape(), m.dtype),
                  0,
                  stride(m.batch, m.heads * m.rows * m.columns),
                  stride(m.heads, m.rows * m.columns),
                  stride(m.rows, m.columns),
                  stride(m.columns, 1)};
}

ForwardTensors AttentionWriter::new_forward_tensors() {
  ForwardTensors t;
  t.q = new_input(attention.heads, rows(), attention.depth);
  t.k = new_input(attention.kv_heads, key_rows(), attention.depth);
  t.v = new_input(attention.kv_heads, key_rows(), attention.value_depth);
  t.mask = new_mask_input();
  t.out = t.lse = t.q;
  t.out.depth = attention.value_depth;
  t.lse.depth = 1;
  t.out.buffer = builder.new_buffer(t.out.count());
  t.lse.buffer = builder.new_buffer(t.lse.count(), attention.sum_dtype());
  builder.add_output(t.out.buffer, {t.out.batch, t.out.heads, t.out.rows, t.out.depth});
  builder.add_output(t.lse.buffer, {t.q.batch, t.q.heads, t.q.rows});
  builder.begin_step(concat("the forward of attention (", method_name(attention.method), ")"));
  return t;
}

BackwardTensors AttentionWriter::new_backward_tensors() {
  BackwardTensors t;
  t.q = new_input(attention.heads, rows(), attention.depth);
  t.k = new_input(attention.kv_heads, key_rows(), attention.depth);
  t.v = new_input(attention.kv_heads, key_rows(), attention.value_depth);
  t.out = new_input(attention.heads, rows(), attention.value_depth);
  t.dout = new_input(attention.heads, rows(), attention.value_depth);
  t.lse = t.q;
  t.lse.depth = 1;
  t.lse.buffer = builder.new_input({t.q.batch, t.q.heads, t.q.rows}, attention.sum_dtype());
  t.mask = new_mask_input();
  builder.begin_step(concat("the backward of attention (", method_name(attention.method), ")"));
  t.dq = new_sum(t.q);
  t.dk = new_sum(t.k);
  t.dv = new_sum(t.v);
  return t;
}

void AttentionWriter::add_gradient_outputs(const BackwardTensors& tensors) {
  for (const HeadsTensor& sum : {tensors.dq, tensors.dk, tensors.dv}) add_sum_output(sum);
}

HeadsTensor AttentionWriter::new_sum(HeadsTensor like) {
  like.buffer = builder.new_buffer(like.count(), attention.sum_dtype());
  like.offset = 0;
  if (like.count() > 0) builder.emit(FillZero{like.range()});
  return like;
}

void AttentionWriter::add_sum_output(const HeadsTensor& sum) {
  BufferId result = sum.buffer;
  if (!(attention.dtype == attention.sum_dtype())) {
    result = builder.new_buffer(sum.count());
    if (sum.count() > 0) builder.emit(Cast{sum.range(), builder.whole(result)});
  }
  builder.add_output(result, {sum.batch, sum.heads, sum.rows, sum.depth});
}

std::optional<PairMask> mask_of(const AttentionWriter& writer, std::optional<PairMask> mask, int queries, int keys) {
  if (!mask) return mask;
  mask->offset += writer.products.queries()[queries].row * mask->row_stride;
  mask->offset += writer.products.keys()[keys].tokens.begin * mask->column_stride;
  return mask;
}

void append_box(std::vector<Box>& boxes, const HeadsTensor& src, HeadsOffset from, const HeadsTensor& dst,
                HeadsOffset to, int64_t heads, int64_t rows) {
  const Heads a = src.at(from.head, from.row);
  const Heads b = dst.at(to.head, to.row);
  if (src.batch * heads * rows * src.depth == 0) return;
  boxes.push_back({a.offset,
                   b.offset,
                   {src.batch, heads, rows, src.depth},
                   {a.batch_stride, a.head_stride, a.row_stride, 1},
                   {b.batch_stride, b.head_stride, b.row_stride, 1}});
}

KeyRows needed_rows(const AttentionWriter& writer, int64_t owner, int64_t by) {
  KeyRows needed;
  needed.blocks = writer.products.keys_needed(owner, by);
  for (const int block : needed.blocks) {
    needed.first_row[block] = needed.rows;
    needed.rows += writer.products.keys()[block].rows();
  }
  needed.are_all = needed.rows == writer.attention.key_rows(owner);
  return needed;
}

KeyRows own_rows(const AttentionWriter& writer) {
  KeyRows own;
  own.blocks = writer.products.keys().of_rank(writer.me);
  own.rows = writer.key_rows();
  own.are_all = true;
  for (const int block : own.blocks) own.first_row[block] = writer.products.keys()[block].row;
  return own;
}

KeyExchange::KeyExchange(AttentionWriter& writer, HeadsTensor k, HeadsTensor v,
                         std::vector<std::vector<int64_t>> groups)
    : writer_(writer), k_(k), v_(v), groups_(std::move(groups)), tickets_(groups_.size(), kNoTicket) {
  for (const std::vector<int64_t>& group : groups_) {
    int64_t group_elements = 0;
    for (const int64_t distance : group) {
      needed_[distance] = needed_rows(writer_, writer_.behind(distance), writer_.me);
      group_elements += elements(needed_[distance]);
    }
    slot_elements_ = std::max(slot_elements_, group_elements);
  }
  const int64_t slots = groups_.size() > 1 ? 2 : 1;
  if (slot_elements_ > 0) slots_ = writer_.builder.new_buffer(slots * slot_elements_);
}

int64_t KeyExchange::elements(const KeyRows& rows) const {
  return k_.batch * k_.heads * rows.rows * (k_.depth + v_.depth);
}

void KeyExchange::start(size_t group) {
  ProgramBuilder& builder = writer_.builder;
  SendReceive move;
  int64_t offset = static_cast<int64_t>(group % 2) * slot_elements_;
  for (const int64_t distance : groups_[group]) {
    const int64_t peer = writer_.member(writer_.ahead(distance));
    const KeyRows sent = needed_rows(writer_, writer_.me, writer_.ahead(distance));
    if (sent.rows > 0 && elements(sent) > 0) {
      HeadsTensor k = k_;
      HeadsTensor v = v_;
      if (!sent.are_all) {
        k.rows = v.rows = sent.rows;
        k.buffer = v.buffer = builder.new_buffer(elements(sent));
        k.offset = 0;
        v.offset = k.count();
        std::vector<Box> from_k;
        std::vector<Box> from_v;
        for (const int block : sent.blocks) {
          const SequenceBlock& b = writer_.products.keys()[block];
          append_box(from_k, k_, {0, b.row}, k, {0, sent.first_row.at(block)}, k.heads, b.rows());
          append_box(from_v, v_, {0, b.row}, v, {0, sent.first_row.at(block)}, v.heads, b.rows());
        }
        builder.copy(k_.buffer, k.buffer, std::move(from_k));
        builder.copy(v_.buffer, v.buffer, std::move(from_v));
      }
      move.sends.push_back({peer, k.range()});
      move.sends.push_back({peer, v.range()});
    }
    const KeyRows& needed = needed_.at(distance);
    KeyValues received{needed, k_, v_};
    received.k.buffer = received.v.buffer = slots_;
    received.k.rows = received.v.rows = needed.rows;
    received.k.offset = offset;
    received.v.offset = offset + received.k.count();
    offset += elements(needed);
    if (elements(needed) > 0) {
      const int64_t from = writer_.member(writer_.behind(distance));
      move.receives.push_back({from, received.k.range()});
      move.receives.push_back({from, received.v.range()});
    }
    received_[distance] = std::move(received);
  }
  if (move.sends.empty() && move.receives.empty()) return;
  move.group = writer_.group();
  tickets_[group] = builder.send_receive(std::move(move));
}

std::vector<std::vector<int64_t>> distance_groups(AttentionMethod method, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> groups;
  for (int64_t distance = 1; distance < num_ranks; ++distance) {
    if (groups.empty() || method == AttentionMethod::kRing) groups.emplace_back();
    groups.back().push_back(distance);
  }
  return groups;
}

HeadShare all_heads(const Attention& attention) { return share_of_heads(attention, 0, 1, HeadSharing::kAll); }

int64_t rows_of(const Attention& attention, HeadKind kind, int64_t position) {
  return kind == HeadKind::kQueries ? attention.rows(position) : attention.key_rows(position);
}

int64_t first_head(const HeadShare& share, HeadKind kind) {
  return kind == HeadKind::kQueries ? share.q_begin : share.kv_begin;
}

int64_t num_heads(const HeadShare& share, HeadKind kind) {
  return kind == HeadKind::kQueries ? share.q_heads() : share.kv_heads();
}

HeadShare share_of_heads(const Attention& attention, int64_t index, int64_t count, HeadSharing sharing) {
  const int64_t per_kv = attention.heads / attention.kv_heads;
  const bool are_whole = attention.kv_heads >= count || sharing == HeadSharing::kWholeHeadsOfKeys;
  const auto begin = [&](int64_t i) {
    return are_whole ? attention.kv_heads * i / count * per_kv : attention.heads * i / count;
  };
  HeadShare share{begin(index), begin(index + 1), 0, 0, {}};
  if (share.q_heads() == 0) return share;
  share.kv_begin = share.q_begin / per_kv;
  share.kv_end = (share.q_end + per_kv - 1) / per_kv;
  if (share.q_begin % per_kv == 0 && share.q_end % per_kv == 0) {
    share.groups.push_back({0, share.q_heads(), 0, share.kv_heads()});
    return share;
  }
  for (int64_t kv = share.kv_begin; kv < share.kv_end; ++kv) {
    const int64_t first = std::max(share.q_begin, kv * per_kv);
    const int64_t last = std::min(share.q_end, (kv + 1) * per_kv);
    share.groups.push_back({first - share.q_begin, last - first, kv - share.kv_begin, 1});
  }
  return share;
}

}  // namespace shardwright
