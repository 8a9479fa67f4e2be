#include "layout/selection.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

namespace shardwright {
namespace {

// A copy has two sides: `from`, the memory that is read, and `to`, the memory that is written. An *axis* is a dim of
// the regions. A *piece* is a run of indices of an axis that both sides have (Piece in layout/region.h).

// A number of repetitions, and the distance between them on both sides, in positions of the axis.
struct Steps {
  int64_t count = 1;
  int64_t from = 0;
  int64_t to = 0;
};

// Pieces of one length at equal distances on both sides (`steps`). The whole sequence may repeat at equal distances
// (`repeats`), so a block-cyclic part of a million blocks is one box.
struct EvenPieces {
  int64_t length = 0;  // of each piece
  int64_t from = 0;    // positions of the first piece
  int64_t to = 0;
  Steps steps;
  Steps repeats;
};

// Appends `more` to `group` and returns true, if lengths and distances match and both sides ascend. Else returns false.
bool try_join(EvenPieces& group, const EvenPieces& more) {
  if (group.length != more.length || group.repeats.count > 1 || more.repeats.count > 1) return false;
  const Steps step{2, more.from - group.from - (group.steps.count - 1) * group.steps.from,
                   more.to - group.to - (group.steps.count - 1) * group.steps.to};
  const auto fits = [&](const Steps& steps) {
    return steps.count == 1 ? step.from > 0 && step.to > 0 : step.from == steps.from && step.to == steps.to;
  };
  if (!fits(group.steps) || !fits(more.steps)) return false;
  group.steps = {group.steps.count + more.steps.count, step.from, step.to};
  return true;
}

// Groups pieces of equal lengths and distances greedily. Pieces at 0, 8, 16 and 17 make a group of three and a group of
// one. A repeating block of several pieces is grouped by itself, and each of its groups repeats.
std::vector<EvenPieces> even_pieces(const PieceList& pieces) {
  std::vector<EvenPieces> groups;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    const Steps repeats{count, shift.a, shift.b};
    const size_t first = groups.size();
    for (const Piece& piece : block) {
      EvenPieces group{piece.length, piece.a_position, piece.b_position, {}, {}};
      if (block.size() == 1) group.steps = repeats;
      // A piece of a block that repeats may only join a group of its own block.
      const size_t first_joinable = count == 1 || block.size() == 1 ? 0 : first;
      if (groups.size() <= first_joinable || !try_join(groups.back(), group)) groups.push_back(group);
    }
    for (size_t i = first; i < groups.size() && block.size() > 1; ++i) groups[i].repeats = repeats;
  }
  return groups;
}

// Returns the pieces with the positions of one side (&Piece::a_position or b_position) replaced by positions in the
// packed message.
PieceList with_packed(const PieceList& pieces, int64_t Piece::* side) {
  PieceList packed;
  int64_t next = 0;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    std::vector<Piece> moved(block.begin(), block.end());
    int64_t within = 0;
    for (Piece& piece : moved) {
      piece.*side = next + within;
      within += piece.length;
    }
    Piece::Shift step = shift;
    (side == &Piece::a_position ? step.a : step.b) = within;
    packed.append_repeated(moved, step, count);
    next += count * within;
  }
  return packed;
}

// Consecutive positions of an axis that are at equal distances in memory.
struct Run {
  int64_t length = 0;  // number of positions
  int64_t offset = 0;  // of the first position in memory, in elements
  int64_t stride = 0;  // in elements
};

// An axis in memory: its dims, outermost first, with their strides. Adjacent dims without gaps are merged. Most axes
// have one dim, so the innermost dim is stored without an allocation.
class AxisInMemory {
 public:
  explicit AxisInMemory(int64_t stride) : inner_{0, stride} {}
  AxisInMemory(const LocalAxis& axis, const std::vector<int64_t>& strides) : first_(axis.first) {
    for (size_t i = 0; i < axis.dims.size(); ++i) {
      const int64_t stride = strides[axis.dims[i]];
      const int64_t size = axis.dims.size() > 1 ? axis.sizes[i] : 0;
      if (i == 0) {
        inner_ = {size, stride};
      } else if (size == 1) {
        continue;
      } else if (inner_.size == 1 || inner_.stride == size * stride) {
        inner_ = {inner_.size * size, stride};
      } else {
        outer_.push_back(inner_);
        inner_ = {size, stride};
      }
    }
  }

  // True if all positions are at equal distances in memory.
  bool is_one_run() const { return outer_.empty(); }

  // A row is the positions of one index of the outermost dim. row() returns their number, left_in_row() the number of
  // positions from `position` to the end of its row.
  int64_t row() const {
    if (outer_.empty()) return 1;
    int64_t positions = inner_.size;
    for (size_t d = 1; d < outer_.size(); ++d) positions *= outer_[d].size;
    return positions;
  }
  int64_t left_in_row(int64_t position) const { return row() - (first_ + position) % row(); }

  // Returns the distance in memory between positions that differ by `by`, or nullopt if it depends on the position.
  std::optional<int64_t> distance(int64_t by) const {
    if (outer_.empty()) return by * inner_.stride;
    if (by % row() != 0) return std::nullopt;
    return by / row() * outer_.front().stride;
  }

  // Returns the runs of the positions [begin, begin + length), in order.
  std::vector<Run> runs(int64_t begin, int64_t length) const {
    if (outer_.empty()) return {{length, (first_ + begin) * inner_.stride, inner_.stride}};
    std::vector<Run> runs;
    for (int64_t at = first_ + begin, end = first_ + begin + length; at < end;) {
      const int64_t next = std::min(end, (at / inner_.size + 1) * inner_.size);
      int64_t offset = at % inner_.size * inner_.stride;
      int64_t rest = at / inner_.size;
      for (size_t d = outer_.size(); d-- > 0; rest /= std::max<int64_t>(outer_[d].size, 1)) {
        offset += (d == 0 ? rest : rest % outer_[d].size) * outer_[d].stride;
      }
      runs.push_back({next - at, offset, inner_.stride});
      at = next;
    }
    return runs;
  }

 private:
  struct Dim {
    int64_t size = 0;
    int64_t stride = 0;
  };

  int64_t first_ = 0;       // position 0 of the axis, as a row-major index over the dims
  std::vector<Dim> outer_;  // all dims but the innermost
  Dim inner_;               // the innermost dim; its size is not used if it is the only dim
};

using Memory = std::vector<AxisInMemory>;  // by axis

// Returns the axes of a dense row-major array of this shape.
Memory row_major_memory(const std::vector<int64_t>& shape) {
  Memory memory;
  for (const int64_t stride : row_major_strides(shape)) memory.emplace_back(stride);
  return memory;
}

// Returns the axes of a local tensor. `strides` has one stride per dim of the tensor.
Memory strided_memory(const std::vector<LocalAxis>& axes, const std::vector<int64_t>& strides) {
  Memory memory;
  for (const LocalAxis& axis : axes) memory.emplace_back(axis, strides);
  return memory;
}

// Appends the boxes of one block, one for each combination of EvenPieces of the axes, in row-major order.
class BoxMaker {
 public:
  BoxMaker(const Memory& src, const Memory& dst, const std::vector<PieceList>& pieces, std::vector<Box>& boxes)
      : src_(src), dst_(dst), boxes_(boxes) {
    for (const PieceList& list : pieces) pieces_.push_back(even_pieces(list));
  }

  // Appends all boxes. The offsets are those of the memory of both sides, in elements.
  void make(int64_t src_offset, int64_t dst_offset) { add_axis({src_offset, dst_offset, {}, {}, {}}, 0); }

 private:
  // Appends the boxes of this axis and all later axes. `box` has the dims of the axes before it.
  void add_axis(const Box& box, size_t axis) {
    if (axis == pieces_.size()) {
      boxes_.emplace_back(box).simplify();
      return;
    }
    for (const EvenPieces& pieces : pieces_[axis]) add_pieces(box, axis, pieces);
  }

  // Adds repetitions as a dim of the box if their distance is constant on both sides, else one by one.
  void add_pieces(Box box, size_t axis, EvenPieces pieces) {
    for (Steps EvenPieces::* const level : {&EvenPieces::repeats, &EvenPieces::steps}) {
      const Steps steps = std::exchange(pieces.*level, {});
      if (steps.count == 1) continue;
      const std::optional<int64_t> from = src_[axis].distance(steps.from);
      const std::optional<int64_t> to = dst_[axis].distance(steps.to);
      if (from && to) {
        box.add_dim(steps.count, *from, *to);
        continue;
      }
      for (int64_t i = 0; i < steps.count; ++i) {
        EvenPieces repetition = pieces;
        repetition.from += i * steps.from;
        repetition.to += i * steps.to;
        add_pieces(box, axis, repetition);
      }
      return;
    }
    if (!try_add_rows(box, axis, pieces)) add_piece(box, axis, pieces);
  }

  // Adds a piece with at least two full rows in three parts: the positions before the first full row, the full rows,
  // and the rest. Returns false for other pieces.
  bool try_add_rows(const Box& box, size_t axis, const EvenPieces& piece) {
    const bool of_src = !src_[axis].is_one_run();
    const AxisInMemory& side = of_src ? src_[axis] : dst_[axis];
    if (side.is_one_run()) return false;
    const int64_t row = side.row();
    const int64_t head = std::min(side.left_in_row(of_src ? piece.from : piece.to) % row, piece.length);
    const int64_t rows = (piece.length - head) / row;
    if (rows < 2) return false;
    const auto add = [&](int64_t begin, int64_t length, int64_t count) {
      if (length > 0) add_pieces(box, axis, {length, piece.from + begin, piece.to + begin, {count, row, row}, {}});
    };
    add(0, head, 1);
    add(head, row, rows);
    add(head + rows * row, piece.length - head - rows * row, 1);
    return true;
  }

  // Adds a piece, split where a run of either side ends.
  void add_piece(const Box& box, size_t axis, const EvenPieces& piece) {
    const std::vector<Run> src = src_[axis].runs(piece.from, piece.length);
    const std::vector<Run> dst = dst_[axis].runs(piece.to, piece.length);
    int64_t in_src = 0;  // the position in the current run
    int64_t in_dst = 0;
    for (size_t s = 0, d = 0; s < src.size() && d < dst.size();) {
      const int64_t length = std::min(src[s].length - in_src, dst[d].length - in_dst);
      Box narrower = box;
      narrower.src_offset += src[s].offset + in_src * src[s].stride;
      narrower.dst_offset += dst[d].offset + in_dst * dst[d].stride;
      narrower.add_dim(length, src[s].stride, dst[d].stride);
      add_axis(narrower, axis + 1);
      in_src = in_src + length == src[s].length ? (++s, 0) : in_src + length;
      in_dst = in_dst + length == dst[d].length ? (++d, 0) : in_dst + length;
    }
  }

  const Memory& src_;
  const Memory& dst_;
  std::vector<std::vector<EvenPieces>> pieces_;  // by axis
  std::vector<Box>& boxes_;
};

// Returns the offset in the source (or destination) if the boxes are one box that is dense there, else -1.
int64_t run_of(const std::vector<Box>& boxes, bool in_src) {
  if (boxes.size() != 1 || boxes[0].sizes.size() > 1) return -1;
  const Box& box = boxes[0];
  const std::vector<int64_t>& strides = in_src ? box.src_strides : box.dst_strides;
  if (!strides.empty() && strides[0] != 1) return -1;
  return in_src ? box.src_offset : box.dst_offset;
}

// True if every axis has exactly one piece.
bool are_single_pieces(const std::vector<PieceList>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [](const PieceList& list) { return list.size() == 1; });
}

}  // namespace

Selection::Selection(const Region& sender, const Region& receiver) {
  Block block{{}, shape_of(sender), shape_of(receiver), {}, 1};
  for (size_t d = 0; d < sender.size(); ++d) block.add_dim(intersect(sender[d], receiver[d]));
  count_ = block.count;
  blocks_.push_back(std::move(block));
}

Selection::Selection(const Region& sender, const Region& receiver, const Region& only) {
  Block block{{}, shape_of(sender), shape_of(receiver), {}, 1};
  for (size_t d = 0; d < sender.size(); ++d) block.add_dim(intersect(sender[d], receiver[d], only[d]));
  count_ = block.count;
  blocks_.push_back(std::move(block));
}

void Selection::Block::add_dim(PieceList common) {
  const int64_t size = length(common);
  pieces.push_back(std::move(common));
  shape.push_back(size);
  count *= size;
}

void Selection::Block::narrow(size_t d, int64_t begin, int64_t end) {
  pieces[d] = subrange(pieces[d], begin, end);
  shape[d] = end - begin;
  count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Selection Selection::slice(int64_t begin, int64_t end) const {
  Selection sliced;
  int64_t at = 0;  // number of the block's first element
  for (const Block& block : blocks_) {
    add_slices(block, std::max(begin - at, int64_t{0}), std::min(end - at, block.count), sliced.blocks_);
    at += block.count;
  }
  sliced.count_ = std::max<int64_t>(end - begin, 0);
  return sliced;
}

// Splits along the outermost dim with more than one index. Rows that are only partly in the range are sliced
// recursively; the rows between them are taken whole.
void Selection::add_slices(const Block& block, int64_t begin, int64_t end, std::vector<Block>& slices) {
  if (begin >= end) return;
  if (begin == 0 && end == block.count) {
    slices.push_back(block);
    return;
  }
  size_t outer = 0;
  while (block.shape[outer] == 1) ++outer;
  const int64_t row = block.count / block.shape[outer];
  for (int64_t at = begin; at < end;) {
    const int64_t first = at / row;
    const bool is_whole_row = at % row == 0 && end - at >= row;
    const int64_t last = is_whole_row ? end / row : first + 1;
    Block rows = block;
    rows.narrow(outer, first, last);
    const int64_t to = std::min(end, last * row);
    add_slices(rows, at - first * row, to - first * row, slices);
    at = to;
  }
}

void Selection::append(Selection other) {
  std::move(other.blocks_.begin(), other.blocks_.end(), std::back_inserter(blocks_));
  count_ += other.count_;
}

// On a packed side, each block begins where the block before it ends.
std::vector<Box> Selection::boxes(const CopySide& from, const CopySide& to) const {
  std::vector<Box> all;
  CopySide source = from;
  CopySide destination = to;
  for (const Block& block : blocks_) {
    add_boxes(block, source, destination, all);
    if (from.is_packed_) source.offset_ += block.count;
    if (to.is_packed_) destination.offset_ += block.count;
  }
  return all;
}

// A packed side is row-major over the block's shape, so the positions of its side are replaced (with_packed).
void Selection::add_boxes(const Block& block, const CopySide& from, const CopySide& to, std::vector<Box>& boxes) {
  const auto memory_of = [&](const CopySide& side, const std::vector<int64_t>& local_shape) {
    if (side.axes_ != nullptr) return strided_memory(*side.axes_, *side.strides_);
    return row_major_memory(side.is_packed_ ? block.shape : local_shape);
  };
  const Memory src = memory_of(from, block.sender_shape);
  const Memory dst = memory_of(to, block.receiver_shape);
  if (!from.is_packed_ && !to.is_packed_) {
    BoxMaker(src, dst, block.pieces, boxes).make(from.offset_, to.offset_);
    return;
  }
  std::vector<PieceList> pieces;
  for (const PieceList& list : block.pieces) {
    pieces.push_back(with_packed(list, from.is_packed_ ? &Piece::a_position : &Piece::b_position));
  }
  BoxMaker(src, dst, pieces, boxes).make(from.offset_, to.offset_);
}

int64_t Selection::sender_run(const Block& block) {
  std::vector<Box> boxes;
  if (are_single_pieces(block.pieces)) add_boxes(block, CopySide::local(), CopySide::packed(), boxes);
  return run_of(boxes, true);
}

int64_t Selection::receiver_run(const Block& block) {
  std::vector<Box> boxes;
  if (are_single_pieces(block.pieces)) add_boxes(block, CopySide::packed(), CopySide::local(), boxes);
  return run_of(boxes, false);
}

int64_t Selection::contiguous(int64_t (*run_of)(const Block&)) const {
  int64_t first = -1;
  int64_t next = -1;
  for (const Block& block : blocks_) {
    const int64_t at = run_of(block);
    if (at < 0 || (first >= 0 && at != next)) return -1;
    if (first < 0) first = at;
    next = at + block.count;
  }
  return first;
}

// Maps the sender's local positions of each block to indices.
std::vector<Region> Selection::indices(const Region& sender) const {
  std::vector<Region> all;
  for (const Block& block : blocks_) {
    if (block.count == 0) continue;
    Region& region = all.emplace_back();
    for (size_t d = 0; d < sender.size(); ++d) {
      IntervalList positions;
      for (const auto& [pieces, count, shift] : block.pieces[d].blocks()) {
        std::vector<Interval> intervals;
        for (const Piece& piece : pieces) intervals.push_back({piece.a_position, piece.a_position + piece.length});
        positions.append_repeated(intervals, shift.a, count);
      }
      if (!is_ascending(positions)) {
        const std::vector<Interval> sorted = sorted_by_begin(positions);
        positions = {};
        for (const Interval& interval : sorted) positions.append(interval);
      }
      region.push_back(at_positions(sender[d], positions));
    }
  }
  return all;
}

Selection Selection::share(size_t dim, int64_t index, int64_t shares) const {
  Selection narrowed = *this;
  Block& block = narrowed.blocks_.front();
  const int64_t size = block.shape[dim];
  const auto begin_of = [&](int64_t i) { return size / shares * i + std::min(i, size % shares); };
  block.narrow(dim, begin_of(index), begin_of(index + 1));
  narrowed.count_ = block.count;
  return narrowed;
}

std::vector<Selection::Part> Selection::parts() const {
  std::vector<Part> parts{Part{}};
  for (const PieceList& pieces : blocks_.front().pieces) {
    std::vector<Part> longer;
    for (const Part& part : parts) {
      int64_t packed = 0;
      for (const Piece& piece : pieces) {
        Part& next = longer.emplace_back(part);
        next.sizes.push_back(piece.length);
        next.in_sender.push_back(piece.a_position);
        next.in_receiver.push_back(piece.b_position);
        next.packed.push_back(packed);
        packed += piece.length;
      }
    }
    parts = std::move(longer);
  }
  return parts;
}

}  // namespace shardwright
