// What one rank sends, receives and keeps of an item, as boxes of local tensors with any strides.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "batch/index_map.h"
#include "layout/rank.h"
#include "program/boxes.h"

namespace shardwright {

// Where an axis of an item lies in a local tensor: on these of its dims, of these sizes, seen as one in row-major
// order. Position 0 of the axis is position `first` there. An axis that the tensor does not have is on no dim.
struct LocalAxis {
  std::vector<int> dims;
  std::vector<int64_t> sizes;  // read only where there are several dims
  int64_t first = 0;
};

// Each window's axis, on its own dim of the local tensor.
std::vector<LocalAxis> local_axes(const std::vector<Window>& windows, const std::vector<int64_t>& firsts);

struct RankMove {
  struct Parcel {
    Rank peer{};
    Interval range;  // of the elements of `whole`
    Intersection whole;

    int64_t elements() const { return range.end - range.begin; }
  };

  // By ascending peer. Those of two ranks are in the same order on both.
  std::vector<Parcel> sends;
  std::vector<Parcel> receives;
  std::optional<Intersection> own;  // what stays here, if anything does
  std::vector<LocalAxis> src_axes;
  std::vector<LocalAxis> dst_axes;

  // Boxes between a local tensor with these strides and a buffer, for the elements `range` of a parcel, which follow
  // each other in the buffer from `position` on.
  std::vector<Box> boxes_to_pack(const Parcel& parcel, Interval range, int64_t position,
                                 const std::vector<int64_t>& src_strides) const;
  std::vector<Box> boxes_to_unpack(const Parcel& parcel, Interval range, int64_t position,
                                   const std::vector<int64_t>& dst_strides) const;
  // Boxes from the source to the destination of what stays here.
  std::vector<Box> boxes_to_keep(const std::vector<int64_t>& src_strides,
                                 const std::vector<int64_t>& dst_strides) const;
};

}  // namespace shardwright
