#include "batch/rank_move.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

namespace shardwright {
namespace {

// Indices of an axis at equal distances in memory.
struct Run {
  int64_t length = 0;
  int64_t offset = 0;
  int64_t stride = 0;
};

// An axis in memory: the dims of the local tensor that it lies on, outermost first, and their strides. Dims that follow
// each other without gaps are one.
class AxisInMemory {
 public:
  // Of a buffer.
  explicit AxisInMemory(int64_t stride) : sizes_{0}, strides_{stride} {}
  AxisInMemory(const LocalAxis& axis, const std::vector<int64_t>& strides) : first_(axis.first) {
    for (size_t i = 0; i < axis.dims.size(); ++i) {
      const int64_t stride = strides[axis.dims[i]];
      const int64_t size = axis.dims.size() > 1 ? axis.sizes[i] : 0;
      if (!strides_.empty() && size == 1) continue;
      if (!strides_.empty() && (sizes_.back() == 1 || strides_.back() == size * stride)) {
        sizes_.back() *= size;
        strides_.back() = stride;
      } else {
        sizes_.push_back(size);
        strides_.push_back(stride);
      }
    }
    if (strides_.empty()) {
      sizes_ = {0};
      strides_ = {0};
    }
  }

  bool is_one_run() const { return strides_.size() == 1; }

  // The positions for one index of the outermost dim, where there are several dims, and how many of them are left from
  // a position on.
  int64_t row() const { return std::accumulate(sizes_.begin() + 1, sizes_.end(), int64_t{1}, std::multiplies<>()); }
  int64_t left_in_row(int64_t position) const { return row() - (first_ + position) % row(); }

  // How far apart in memory any two positions are of which one is `by` after the other, if that is the same for all.
  std::optional<int64_t> distance(int64_t by) const {
    if (by % row() != 0) return std::nullopt;
    return by / row() * strides_.front();
  }

  // The runs of positions [begin, begin + length), in order.
  std::vector<Run> runs(int64_t begin, int64_t length) const {
    if (is_one_run()) return {{length, (first_ + begin) * strides_.back(), strides_.back()}};
    std::vector<Run> runs;
    const int64_t row = sizes_.back();
    for (int64_t at = first_ + begin, end = first_ + begin + length; at < end;) {
      const int64_t next = std::min(end, (at / row + 1) * row);
      int64_t offset = at % row * strides_.back();
      int64_t rest = at / row;
      for (size_t d = strides_.size() - 1; d-- > 0; rest /= std::max<int64_t>(sizes_[d], 1)) {
        offset += (d == 0 ? rest : rest % sizes_[d]) * strides_[d];
      }
      runs.push_back({next - at, offset, strides_.back()});
      at = next;
    }
    return runs;
  }

 private:
  int64_t first_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

using Memory = std::vector<AxisInMemory>;

Memory memory_of(const std::vector<LocalAxis>& axes, const std::vector<int64_t>& strides) {
  Memory memory;
  for (const LocalAxis& axis : axes) memory.emplace_back(axis, strides);
  return memory;
}

Memory packed_memory(const std::vector<int64_t>& shape) {
  Memory memory;
  for (const int64_t stride : row_major_strides(shape)) memory.emplace_back(stride);
  return memory;
}

// A run on both sides.
struct RunOfBoth {
  int64_t length = 0;
  Run src;
  Run dst;
};

std::vector<RunOfBoth> cut_alike(const std::vector<Run>& src, const std::vector<Run>& dst) {
  std::vector<RunOfBoth> both;
  int64_t i = 0;  // where the next one begins in its run
  int64_t j = 0;
  for (size_t s = 0, d = 0; s < src.size() && d < dst.size();) {
    const int64_t length = std::min(src[s].length - i, dst[d].length - j);
    both.push_back({length,
                    {length, src[s].offset + i * src[s].stride, src[s].stride},
                    {length, dst[d].offset + j * dst[d].stride, dst[d].stride}});
    i += length;
    j += length;
    if (i == src[s].length) {
      i = 0;
      ++s;
    }
    if (j == dst[d].length) {
      j = 0;
      ++d;
    }
  }
  return both;
}

// Makes the boxes of what is copied between two memories, of which each axis of the pieces is an axis.
class Boxes {
 public:
  Boxes(const Memory& src, const Memory& dst, const EvenPiecesByDim& pieces) : src_(src), dst_(dst), pieces_(pieces) {}

  std::vector<Box> made(int64_t src_base, int64_t dst_base) {
    add_axis({src_base, dst_base, {}, {}, {}}, 0);
    return std::move(boxes_);
  }

 private:
  // Adds the boxes of all combinations from an axis on to what the axes before it say.
  void add_axis(const Box& box, size_t axis) {
    if (axis == pieces_.size()) {
      simplify(boxes_.emplace_back(box));
      return;
    }
    for (const EvenPieces& some : pieces_[axis]) add_pieces(box, axis, some);
  }

  // What comes again is a dim of the boxes where each time is as far from the one before it, on both sides.
  void add_pieces(Box box, size_t axis, EvenPieces some) {
    for (Steps EvenPieces::* const level : {&EvenPieces::repeats, &EvenPieces::steps}) {
      const Steps steps = std::exchange(some.*level, {});
      if (steps.count == 1) continue;
      const std::optional<int64_t> from = src_[axis].distance(steps.from);
      const std::optional<int64_t> to = dst_[axis].distance(steps.to);
      if (from && to) {
        add_dim(box, {steps.count, *from, *to});
        continue;
      }
      for (int64_t i = 0; i < steps.count; ++i) {
        EvenPieces one = some;
        one.from += i * steps.from;
        one.to += i * steps.to;
        add_pieces(box, axis, one);
      }
      return;
    }
    if (!divided_into_rows(box, axis, some)) add_piece(box, axis, some);
  }

  // Divides a piece of several rows into what comes before the first whole row, whole rows, and the rest.
  bool divided_into_rows(const Box& box, size_t axis, const EvenPieces& piece) {
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

  void add_piece(const Box& box, size_t axis, const EvenPieces& piece) {
    for (const RunOfBoth& run :
         cut_alike(src_[axis].runs(piece.from, piece.length), dst_[axis].runs(piece.to, piece.length))) {
      Box narrower = box;
      narrower.src_offset += run.src.offset;
      narrower.dst_offset += run.dst.offset;
      add_dim(narrower, {run.length, run.src.stride, run.dst.stride});
      add_axis(narrower, axis + 1);
    }
  }

  static void add_dim(Box& box, const Steps& steps) {
    box.sizes.push_back(steps.count);
    box.src_strides.push_back(steps.from);
    box.dst_strides.push_back(steps.to);
  }

  const Memory& src_;
  const Memory& dst_;
  const EvenPiecesByDim& pieces_;
  std::vector<Box> boxes_;
};

// Calls visit(slice, where it begins in the buffer) for the slices of a range of a parcel.
template <typename Visit>
void for_each_slice(const RankMove::Parcel& parcel, Interval range, int64_t position, const Visit& visit) {
  for (const Intersection& slice :
       parcel.whole.slice(parcel.range.begin + range.begin, parcel.range.begin + range.end)) {
    visit(slice, position);
    position += slice.count();
  }
}

void append(std::vector<Box>& to, std::vector<Box> boxes) {
  to.insert(to.end(), std::make_move_iterator(boxes.begin()), std::make_move_iterator(boxes.end()));
}

}  // namespace

std::vector<LocalAxis> local_axes(const std::vector<Window>& windows, const std::vector<int64_t>& firsts) {
  std::vector<LocalAxis> axes;
  for (size_t a = 0; a < windows.size(); ++a) {
    if (windows[a].tensor_dim == Window::kNoDim) {
      axes.push_back({});
    } else {
      axes.push_back({{windows[a].tensor_dim}, {}, firsts[a]});
    }
  }
  return axes;
}

std::vector<Box> RankMove::boxes_to_pack(const Parcel& parcel, Interval range, int64_t position,
                                         const std::vector<int64_t>& src_strides) const {
  const Memory src = memory_of(src_axes, src_strides);
  std::vector<Box> all;
  for_each_slice(parcel, range, position, [&](const Intersection& slice, int64_t begin) {
    const Memory packed = packed_memory(slice.shape());
    append(all, Boxes(src, packed, slice.pieces_a_to_packed()).made(0, begin));
  });
  return all;
}

std::vector<Box> RankMove::boxes_to_unpack(const Parcel& parcel, Interval range, int64_t position,
                                           const std::vector<int64_t>& dst_strides) const {
  const Memory dst = memory_of(dst_axes, dst_strides);
  std::vector<Box> all;
  for_each_slice(parcel, range, position, [&](const Intersection& slice, int64_t begin) {
    const Memory packed = packed_memory(slice.shape());
    append(all, Boxes(packed, dst, slice.pieces_packed_to_b()).made(begin, 0));
  });
  return all;
}

std::vector<Box> RankMove::boxes_to_keep(const std::vector<int64_t>& src_strides,
                                         const std::vector<int64_t>& dst_strides) const {
  const Memory src = memory_of(src_axes, src_strides);
  const Memory dst = memory_of(dst_axes, dst_strides);
  return Boxes(src, dst, own->pieces_a_to_b()).made(0, 0);
}

}  // namespace shardwright
