// A selection: elements that a sender's and a receiver's local tensor have in common, and their places in memory.
//
// Elements are ordered row-major over the common indices of each dim. A packed message holds them in this order.
//
// Example: 12 rows, of which the sender has rows 0 to 5 and the receiver the odd ones.
//
//   const Selection rows(sender, receiver);
//   rows.count()                                     3: rows 1, 3 and 5
//   rows.boxes(Place::local(), Place::packed())      one box: 3 elements, from 1, 3, 5 in the sender's tensor to 0, 1,
//   2 rows.boxes(Place::packed(), Place::local())      one box: 3 elements, from 0, 1, 2 to 0, 1, 2 in the receiver's
//   rows.contiguous_in_sender()                      -1: there are gaps
//   rows.contiguous_in_receiver()                    0: one run from offset 0 on
//   rows.slice(1, 3)                                 rows 3 and 5
#pragma once

#include <cstdint>
#include <vector>

#include "layout/box.h"
#include "layout/region.h"

namespace shardwright {

// The place of one axis in a local tensor: the dims that hold it, seen as one in row-major order. Position 0 of the
// axis is position `first` there. An axis that the tensor lacks has no dims.
struct LocalAxis {
  std::vector<int> dims;
  std::vector<int64_t> sizes;  // read only where there are several dims
  int64_t first = 0;
};

// The memory that a copy of a selection reads or writes.
class Place {
 public:
  // A packed message.
  static Place packed(int64_t offset = 0) { return {nullptr, nullptr, offset, true}; }
  // The local tensor, row-major: the sender's for a source, the receiver's for a destination.
  static Place local(int64_t offset = 0) { return {nullptr, nullptr, offset, false}; }
  // The local tensor with any strides. `axes` and `strides` must outlive the place.
  static Place strided(const std::vector<LocalAxis>& axes, const std::vector<int64_t>& strides) {
    return {&axes, &strides, 0, false};
  }

 private:
  friend class Selection;
  Place(const std::vector<LocalAxis>* axes, const std::vector<int64_t>* strides, int64_t offset, bool is_packed)
      : axes_(axes), strides_(strides), offset_(offset), is_packed_(is_packed) {}

  const std::vector<LocalAxis>* axes_;
  const std::vector<int64_t>* strides_;
  int64_t offset_;
  bool is_packed_;
};

class Selection {
 public:
  Selection() = default;  // no elements
  // The common elements of two regions of one tensor.
  Selection(const Region& sender, const Region& receiver);
  // Of these, the elements of `only`, whose lists ascend. Both regions have all of them.
  Selection(const Region& sender, const Region& receiver, const Region& only);

  int64_t count() const { return count_; }

  // The elements [begin, end) of this selection, in order.
  Selection slice(int64_t begin, int64_t end) const;
  // Adds the elements of another selection of the same tensors behind those of this one.
  void append(Selection other);

  // As few boxes as possible that copy the elements, in order. At most one of the places is packed.
  std::vector<Box> boxes(const Place& from, const Place& to) const;

  // The offset in the row-major local tensor if all elements are one run there, in order; else -1. A run that consists
  // of several pieces of the other side counts as several.
  int64_t contiguous_in_sender() const { return contiguous(&Selection::sender_run); }
  int64_t contiguous_in_receiver() const { return contiguous(&Selection::receiver_run); }

  // The indices of the elements, in any order, as the union of regions that share nothing. `sender` is the region that
  // the selection was made from.
  std::vector<Region> indices(const Region& sender) const;

  // ---- Only for a selection that was made from regions, or `share` of one.

  // The common indices of each dim: the shape of the packed message.
  const std::vector<int64_t>& shape() const { return blocks_.front().shape; }
  // Share `index` of `shares` along a dim. If they do not divide it evenly, the first shares have one index more.
  Selection share(size_t dim, int64_t index, int64_t shares) const;

  // A part without gaps in either tensor: its sizes, and its first index in both tensors and in the packed message.
  struct Part {
    std::vector<int64_t> sizes;
    std::vector<int64_t> in_sender;
    std::vector<int64_t> in_receiver;
    std::vector<int64_t> packed;
  };
  std::vector<Part> parts() const;  // in order

 private:
  // All combinations of the indices of each dim.
  struct Block {
    std::vector<PieceList> pieces;  // by dim; side a is the sender
    std::vector<int64_t> sender_shape;
    std::vector<int64_t> receiver_shape;
    std::vector<int64_t> shape;
    int64_t count = 1;

    void add_dim(PieceList common);
    // Keeps the indices [begin, end) of dim d.
    void narrow(size_t d, int64_t begin, int64_t end);
  };

  static void add_slices(const Block& block, int64_t begin, int64_t end, std::vector<Block>& slices);
  static void add_boxes(const Block& block, const Place& from, const Place& to, std::vector<Box>& boxes);
  static int64_t sender_run(const Block& block);
  static int64_t receiver_run(const Block& block);
  int64_t contiguous(int64_t (*run_of)(const Block&)) const;

  std::vector<Block> blocks_;
  int64_t count_ = 0;
};

}  // namespace shardwright
