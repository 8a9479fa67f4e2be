#include "batch/rank_move.h"

#include <algorithm>
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
  int64_t stride() const { return strides_.back(); }
  int64_t offset(int64_t position) const { return (first_ + position) * strides_.back(); }

  // The runs of positions [begin, begin + length), in order.
  std::vector<Run> runs(int64_t begin, int64_t length) const {
    if (is_one_run()) return {{length, offset(begin), stride()}};
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

// Adds the boxes of a part of an intersection between two memories, whose elements begin at `base`.
class Boxes {
 public:
  Boxes(const Memory& src, const Memory& dst) : src_(src), dst_(dst) {
    for (size_t a = 0; a < src.size(); ++a) {
      is_one_box_ = is_one_box_ && src[a].is_one_run() && dst[a].is_one_run();
      src_strides_.push_back(src[a].stride());
      dst_strides_.push_back(dst[a].stride());
    }
  }

  void add(const std::vector<int64_t>& sizes, const std::vector<int64_t>& in_src, const std::vector<int64_t>& in_dst,
           int64_t src_base, int64_t dst_base) {
    Box box{src_base, dst_base, sizes, src_strides_, dst_strides_};
    if (is_one_box_) {
      for (size_t a = 0; a < sizes.size(); ++a) {
        box.src_offset += src_[a].offset(in_src[a]);
        box.dst_offset += dst_[a].offset(in_dst[a]);
      }
      return push(std::move(box));
    }
    add_axis(box, 0, sizes, in_src, in_dst);
  }

  std::vector<Box> take() { return std::move(boxes_); }

 private:
  void add_axis(const Box& box, size_t axis, const std::vector<int64_t>& sizes, const std::vector<int64_t>& in_src,
                const std::vector<int64_t>& in_dst) {
    if (axis == sizes.size()) return push(box);
    const std::vector<Run> src = src_[axis].runs(in_src[axis], sizes[axis]);
    const std::vector<Run> dst = dst_[axis].runs(in_dst[axis], sizes[axis]);
    for (const RunOfBoth& run : cut_alike(src, dst)) {
      Box narrower = box;
      narrower.sizes[axis] = run.length;
      narrower.src_offset += run.src.offset;
      narrower.dst_offset += run.dst.offset;
      add_axis(narrower, axis + 1, sizes, in_src, in_dst);
    }
  }

  void push(Box box) {
    simplify(box);
    boxes_.push_back(std::move(box));
  }

  const Memory& src_;
  const Memory& dst_;
  std::vector<int64_t> src_strides_;
  std::vector<int64_t> dst_strides_;
  bool is_one_box_ = true;
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
    Boxes boxes(src, packed);
    for (const Intersection::Part& one : slice.parts()) boxes.add(one.sizes, one.in_a, one.packed, 0, begin);
    append(all, boxes.take());
  });
  return all;
}

std::vector<Box> RankMove::boxes_to_unpack(const Parcel& parcel, Interval range, int64_t position,
                                           const std::vector<int64_t>& dst_strides) const {
  const Memory dst = memory_of(dst_axes, dst_strides);
  std::vector<Box> all;
  for_each_slice(parcel, range, position, [&](const Intersection& slice, int64_t begin) {
    const Memory packed = packed_memory(slice.shape());
    Boxes boxes(packed, dst);
    for (const Intersection::Part& one : slice.parts()) boxes.add(one.sizes, one.packed, one.in_b, begin, 0);
    append(all, boxes.take());
  });
  return all;
}

std::vector<Box> RankMove::boxes_to_keep(const std::vector<int64_t>& src_strides,
                                         const std::vector<int64_t>& dst_strides) const {
  const Memory src = memory_of(src_axes, src_strides);
  const Memory dst = memory_of(dst_axes, dst_strides);
  Boxes boxes(src, dst);
  for (const Intersection::Part& one : own->parts()) boxes.add(one.sizes, one.in_a, one.in_b, 0, 0);
  return boxes.take();
}

}  // namespace shardwright
