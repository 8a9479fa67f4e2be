// A selection: elements that are in the local tensors of both a sender and a receiver, with their places in memory.
//
// Elements are ordered row-major over the common indices of each dim. A packed message holds them in this order.
//
// Example: 12 rows, of which the sender has rows 0 to 5 and the receiver the odd ones.
//
//   const Selection rows(sender, receiver);
//   rows.count()                                        3: rows 1, 3 and 5
//   rows.boxes(CopySide::local(), CopySide::packed())   one box: 3 elements, from 1, 3, 5 of the sender to 0, 1, 2
//   rows.boxes(CopySide::packed(), CopySide::local())   one box: 3 elements, from 0, 1, 2 to 0, 1, 2 of the receiver
//   rows.contiguous_in_sender()                         -1: there are gaps
//   rows.contiguous_in_receiver()                       -1: no gaps, but three pieces, because the sender has gaps
//   rows.slice(1, 3)                                    rows 3 and 5
#pragma once

#include <cstdint>
#include <vector>

#include "layout/box.h"
#include "layout/region.h"

namespace shardwright {

// An axis in a local tensor: the dims of the tensor that form the axis, flattened row-major. Position 0 of the axis is
// position `first` of the flattened dims. An axis that the tensor lacks has no dims.
struct LocalAxis {
  std::vector<int> dims;       // outermost first
  std::vector<int64_t> sizes;  // of the dims; not read if there is only one
  int64_t first = 0;
};

// One side of a copy of a selection: the memory that it reads or writes.
class CopySide {
 public:
  // A packed message that begins `offset` elements into its memory.
  static CopySide packed(int64_t offset = 0) { return {nullptr, nullptr, offset, true}; }
  // The row-major local tensor: the sender's for a source, the receiver's for a destination. It begins `offset`
  // elements into its memory.
  static CopySide local(int64_t offset = 0) { return {nullptr, nullptr, offset, false}; }
  // The local tensor with any strides. `axes` has one item per dim of the regions, and `strides` one per dim of the
  // local tensor, in elements. Both must outlive the side.
  static CopySide strided(const std::vector<LocalAxis>& axes, const std::vector<int64_t>& strides) {
    return {&axes, &strides, 0, false};
  }

 private:
  friend class Selection;
  CopySide(const std::vector<LocalAxis>* axes, const std::vector<int64_t>* strides, int64_t offset, bool is_packed)
      : axes_(axes), strides_(strides), offset_(offset), is_packed_(is_packed) {}

  const std::vector<LocalAxis>* axes_;   // null: row-major
  const std::vector<int64_t>* strides_;  // by dim of the local tensor; null: row-major
  int64_t offset_;                       // of the first element of the memory, in elements
  bool is_packed_;
};

class Selection {
 public:
  Selection() = default;  // no elements
  // Selects the common elements of two regions of one tensor.
  Selection(const Region& sender, const Region& receiver);
  // Selects the elements of `only`, whose lists ascend. Both regions must contain all of them.
  Selection(const Region& sender, const Region& receiver, const Region& only);

  int64_t count() const { return count_; }

  // Returns the elements [begin, end) of this selection, in order. The range must be within [0, count()].
  Selection slice(int64_t begin, int64_t end) const;
  // Appends the elements of another selection of the same two local tensors.
  void append(Selection other);

  // Returns boxes that copy the elements, in order. Pieces at equal distances share a box. At most one side may be
  // packed.
  std::vector<Box> boxes(const CopySide& from, const CopySide& to) const;

  // Return the offset in the row-major local tensor if all elements are one run there, in order. Return -1 otherwise,
  // if there are no elements, and for one run that consists of several pieces: elements that are adjacent in this local
  // tensor, but not in the other one.
  int64_t contiguous_in_sender() const { return contiguous(&Selection::sender_run); }
  int64_t contiguous_in_receiver() const { return contiguous(&Selection::receiver_run); }

  // Returns the indices of the elements as disjoint regions, in any order. `sender` is the region that was given to the
  // constructor.
  std::vector<Region> indices(const Region& sender) const;

  // ---- Only for selections from the constructors with regions and from share()

  // Returns the number of common indices of each dim: the shape of the packed message.
  const std::vector<int64_t>& shape() const { return blocks_.front().shape; }
  // Divides the selection along a dim into `shares` shares and returns share `index`. If the dim does not divide
  // evenly, the first shares have one index more.
  Selection share(size_t dim, int64_t index, int64_t shares) const;

  // A part without gaps in either tensor: its sizes, and its first position in both tensors and in the packed message.
  struct Part {
    std::vector<int64_t> sizes;
    std::vector<int64_t> in_sender;
    std::vector<int64_t> in_receiver;
    std::vector<int64_t> packed;
  };
  std::vector<Part> parts() const;  // in order

 private:
  // Elements that are the product of one list of pieces per dim.
  struct Block {
    std::vector<PieceList> pieces;        // by dim; side a is the sender, side b the receiver
    std::vector<int64_t> sender_shape;    // of the sender's local tensor
    std::vector<int64_t> receiver_shape;  // of the receiver's local tensor
    std::vector<int64_t> shape;           // number of selected indices of each dim
    int64_t count = 1;                    // number of elements

    // Adds an innermost dim with these pieces.
    void add_dim(PieceList common);
    // Keeps the selected indices [begin, end) of dim d, counted from the first selected index.
    void narrow(size_t d, int64_t begin, int64_t end);
  };

  // Appends blocks with the elements [begin, end) of a block.
  static void add_slices(const Block& block, int64_t begin, int64_t end, std::vector<Block>& slices);
  // Appends boxes that copy the elements of a block.
  static void add_boxes(const Block& block, const CopySide& from, const CopySide& to, std::vector<Box>& boxes);
  // Return the offset of a block in the row-major local tensor if it is one run there, else -1.
  static int64_t sender_run(const Block& block);
  static int64_t receiver_run(const Block& block);
  // Returns the offset of the first block if each block is one run and begins where the one before it ends, else -1.
  int64_t contiguous(int64_t (*run_of)(const Block&)) const;

  std::vector<Block> blocks_;  // in the order of their elements
  int64_t count_ = 0;          // number of elements in all blocks
};

}  // namespace shardwright
