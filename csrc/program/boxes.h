// Boxes: the elements that move between two local tensors, as few strided blocks as possible. Pieces at equal distances
// are one dim of a box.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/region.h"
#include "program/program.h"

namespace shardwright {

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape);

// Drops dims of size 1 and merges neighbouring dims that are dense on both sides, so that inner runs get long.
// For sizes (3,4), strides (4,1) and (8,1) stay as they are, and strides (4,1) and (4,1) become one run of 12.
void simplify(Box& box);

// How often something comes, and how far apart it is on both sides of a copy.
struct Steps {
  int64_t count = 1;
  int64_t from = 0;
  int64_t to = 0;
};

// Pieces of one length at equal distances on both sides, which as a whole may come again at equal distances. So a
// block-cyclic part of a million blocks is one box.
struct EvenPieces {
  int64_t length = 0;
  int64_t from = 0;  // the first one's positions
  int64_t to = 0;
  Steps steps;
  Steps repeats;
};

// By dim. Every combination of one from each dim is copied.
using EvenPiecesByDim = std::vector<std::vector<EvenPieces>>;

// The elements that two local tensors share. A packed message carries them in row-major order over the shared indices
// of each dim.
class Intersection {
 public:
  // a and b are regions of one tensor.
  Intersection(const Region& a, const Region& b);
  // Of what they share, the elements of a region whose lists ascend; both have all of these.
  Intersection(const Region& a, const Region& b, const Region& only);

  int64_t count() const { return count_; }
  // The shape of the packed message.
  const std::vector<int64_t>& shape() const { return packed_shape_; }

  // A part without gaps in either tensor, with its beginning in both tensors and in the packed message, by dim.
  struct Part {
    std::vector<int64_t> sizes;
    std::vector<int64_t> in_a;
    std::vector<int64_t> in_b;
    std::vector<int64_t> packed;
  };
  std::vector<Part> parts() const;  // in packed order

  // What is copied from a to b, from a to the packed message, and from there to b.
  EvenPiecesByDim pieces_a_to_b() const;
  EvenPiecesByDim pieces_a_to_packed() const;
  EvenPiecesByDim pieces_packed_to_b() const;

  // Share `index` of `shares` along one dim. If the dim does not divide evenly, the first shares have one index more.
  Intersection share(size_t dim, int64_t index, int64_t shares) const;

  // Boxes that copy between the row-major local tensors of a and b and the packed message, each starting at an offset.
  std::vector<Box> a_to_b(int64_t a_base, int64_t b_base) const;
  std::vector<Box> a_to_packed(int64_t a_base, int64_t packed_base) const;
  std::vector<Box> packed_to_b(int64_t packed_base, int64_t b_base) const;

  // The offset of the packed message in the local tensor if it is one run there, else -1.
  int64_t run_in_a() const;
  int64_t run_in_b() const;

  // The elements [begin, end) of the packed order, as a list of as few Intersections as possible, in this order.
  std::vector<Intersection> slice(int64_t begin, int64_t end) const;

 private:
  void add(PieceList pieces);
  // Keeps only the shared indices [begin, end) of dim d, counted along it.
  void narrow(size_t d, int64_t begin, int64_t end);

  std::vector<PieceList> pieces_;
  std::vector<int64_t> a_shape_;
  std::vector<int64_t> b_shape_;
  std::vector<int64_t> packed_shape_;
  int64_t count_ = 1;
};

// What one rank sends another: ranges of intersections in packed order, one after the other.
class Parcel {
 public:
  Parcel() = default;
  Parcel(const Intersection& whole, int64_t begin, int64_t end) { add(whole, begin, end); }
  void add(const Intersection& whole, int64_t begin, int64_t end);

  int64_t count() const { return count_; }
  std::vector<Box> a_to_b(int64_t a_base, int64_t b_base) const;
  std::vector<Box> a_to_packed(int64_t a_base, int64_t packed_base) const;
  std::vector<Box> packed_to_b(int64_t packed_base, int64_t b_base) const;
  int64_t run_in_a() const { return run(&Intersection::run_in_a); }
  int64_t run_in_b() const { return run(&Intersection::run_in_b); }

 private:
  // The boxes of all parts; on the packed side, parts follow one another.
  template <typename BoxesOfPart>
  std::vector<Box> boxes(const BoxesOfPart& boxes_of_part) const;
  int64_t run(int64_t (Intersection::*run_of_part)() const) const;

  std::vector<Intersection> parts_;
  int64_t count_ = 0;
};

}  // namespace shardwright
