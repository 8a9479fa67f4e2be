#include "program/boxes.h"

#include <algorithm>
#include <utility>

namespace shardwright {

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (int d = static_cast<int>(shape.size()) - 2; d >= 0; --d) strides[d] = strides[d + 1] * shape[d + 1];
  return strides;
}

namespace {

// Where pieces are copied from, at their a_position, or to, at their b_position.
struct Side {
  const std::vector<int64_t>& shape;
  int64_t base;
};

// Takes pieces to the list of pieces before them, if they are as long and as far apart, and both sides ascend.
bool joins(EvenPieces& list, const EvenPieces& more) {
  if (list.length != more.length || list.repeats.count > 1 || more.repeats.count > 1) return false;
  const Steps step{2, more.from - list.from - (list.steps.count - 1) * list.steps.from,
                   more.to - list.to - (list.steps.count - 1) * list.steps.to};
  const auto fits = [&](const Steps& steps) {
    return steps.count == 1 ? step.from > 0 && step.to > 0 : step.from == steps.from && step.to == steps.to;
  };
  if (!fits(list.steps) || !fits(more.steps)) return false;
  list.steps = {list.steps.count + more.steps.count, step.from, step.to};
  return true;
}

// Takes as many pieces together as possible, from the first on. Pieces at 0, 8, 16 and 17 make two lists, of three
// pieces and of one.
std::vector<EvenPieces> taken_together(const PieceList& pieces) {
  std::vector<EvenPieces> lists;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    const Steps repeats{count, shift.a, shift.b};
    const size_t first = lists.size();
    for (const Piece& piece : block) {
      EvenPieces one{piece.length, piece.a_position, piece.b_position, {}, {}};
      if (block.size() == 1) one.steps = repeats;
      const bool may_join = lists.size() > (count == 1 || block.size() == 1 ? 0 : first);
      if (!may_join || !joins(lists.back(), one)) lists.push_back(one);
    }
    for (size_t i = first; i < lists.size() && block.size() > 1; ++i) lists[i].repeats = repeats;
  }
  return lists;
}

EvenPiecesByDim taken_together(const std::vector<PieceList>& pieces) {
  EvenPiecesByDim lists;
  for (const PieceList& list : pieces) lists.push_back(taken_together(list));
  return lists;
}

// Makes one box per combination of lists of pieces, in row-major order of the combinations.
std::vector<Box> boxes_between(const EvenPiecesByDim& lists, const Side& from, const Side& to) {
  const size_t ndim = lists.size();
  for (const std::vector<EvenPieces>& list : lists) {
    if (list.empty()) return {};
  }
  const std::vector<int64_t> from_strides = row_major_strides(from.shape);
  const std::vector<int64_t> to_strides = row_major_strides(to.shape);
  std::vector<Box> boxes;
  std::vector<size_t> at(ndim, 0);
  while (true) {
    Box box;
    box.src_offset = from.base;
    box.dst_offset = to.base;
    const auto add_dim = [&](int64_t size, int64_t src_stride, int64_t dst_stride) {
      box.sizes.push_back(size);
      box.src_strides.push_back(src_stride);
      box.dst_strides.push_back(dst_stride);
    };
    for (size_t d = 0; d < ndim; ++d) {
      const EvenPieces& list = lists[d][at[d]];
      box.src_offset += list.from * from_strides[d];
      box.dst_offset += list.to * to_strides[d];
      for (const Steps& steps : {list.repeats, list.steps}) {
        if (steps.count > 1) add_dim(steps.count, steps.from * from_strides[d], steps.to * to_strides[d]);
      }
      add_dim(list.length, from_strides[d], to_strides[d]);
    }
    simplify(box);
    boxes.push_back(std::move(box));
    size_t d = ndim;
    while (d > 0 && ++at[d - 1] == lists[d - 1].size()) at[--d] = 0;
    if (d == 0) return boxes;
  }
}

// Returns the pieces with their places in the packed message written into `position`.
std::vector<PieceList> packed_positions(const std::vector<PieceList>& pieces, int64_t Piece::* position) {
  std::vector<PieceList> all;
  for (const PieceList& list : pieces) {
    PieceList& packed = all.emplace_back();
    int64_t next = 0;
    for (const auto& [block, count, shift] : list.blocks()) {
      std::vector<Piece> moved(block.begin(), block.end());
      int64_t within = 0;
      for (Piece& piece : moved) {
        piece.*position = next + within;
        within += piece.length;
      }
      Piece::Shift step = shift;
      (position == &Piece::a_position ? step.a : step.b) = within;
      packed.append_repeated(moved, step, count);
      next += count * within;
    }
  }
  return all;
}

// Several pieces count as several runs even where one side has them one after the other: pairs (program/pairs.h) count
// pieces too.
bool are_one_piece(const std::vector<PieceList>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [](const PieceList& list) { return list.size() == 1; });
}

int64_t run_of(const std::vector<Box>& boxes, bool in_src) {
  if (boxes.size() != 1 || boxes[0].sizes.size() > 1) return -1;
  const Box& box = boxes[0];
  const std::vector<int64_t>& strides = in_src ? box.src_strides : box.dst_strides;
  if (!strides.empty() && strides[0] != 1) return -1;
  return in_src ? box.src_offset : box.dst_offset;
}

}  // namespace

Intersection::Intersection(const Region& a, const Region& b) : a_shape_(shape_of(a)), b_shape_(shape_of(b)) {
  for (size_t d = 0; d < a.size(); ++d) add(intersect(a[d], b[d]));
}

Intersection::Intersection(const Region& a, const Region& b, const Region& only)
    : a_shape_(shape_of(a)), b_shape_(shape_of(b)) {
  for (size_t d = 0; d < a.size(); ++d) add(intersect(a[d], b[d], only[d]));
}

void Intersection::add(PieceList pieces) {
  const int64_t shared = length(pieces);
  pieces_.push_back(std::move(pieces));
  packed_shape_.push_back(shared);
  count_ *= shared;
}

EvenPiecesByDim Intersection::pieces_a_to_b() const { return taken_together(pieces_); }

EvenPiecesByDim Intersection::pieces_a_to_packed() const {
  return taken_together(packed_positions(pieces_, &Piece::b_position));
}

EvenPiecesByDim Intersection::pieces_packed_to_b() const {
  return taken_together(packed_positions(pieces_, &Piece::a_position));
}

std::vector<Box> Intersection::a_to_b(int64_t a_base, int64_t b_base) const {
  return boxes_between(pieces_a_to_b(), {a_shape_, a_base}, {b_shape_, b_base});
}

std::vector<Box> Intersection::a_to_packed(int64_t a_base, int64_t packed_base) const {
  return boxes_between(pieces_a_to_packed(), {a_shape_, a_base}, {packed_shape_, packed_base});
}

std::vector<Box> Intersection::packed_to_b(int64_t packed_base, int64_t b_base) const {
  return boxes_between(pieces_packed_to_b(), {packed_shape_, packed_base}, {b_shape_, b_base});
}

int64_t Intersection::run_in_a() const { return are_one_piece(pieces_) ? run_of(a_to_packed(0, 0), true) : -1; }

int64_t Intersection::run_in_b() const { return are_one_piece(pieces_) ? run_of(packed_to_b(0, 0), false) : -1; }

std::vector<Intersection::Part> Intersection::parts() const {
  std::vector<Part> parts{Part{}};
  for (const PieceList& pieces : pieces_) {
    std::vector<Part> longer;
    for (const Part& part : parts) {
      int64_t packed = 0;
      for (const Piece& piece : pieces) {
        longer.push_back(part);
        longer.back().sizes.push_back(piece.length);
        longer.back().in_a.push_back(piece.a_position);
        longer.back().in_b.push_back(piece.b_position);
        longer.back().packed.push_back(packed);
        packed += piece.length;
      }
    }
    parts = std::move(longer);
  }
  return parts;
}

Intersection Intersection::share(size_t dim, int64_t index, int64_t shares) const {
  const int64_t length = packed_shape_[dim];
  const auto begin_of = [&](int64_t i) { return length / shares * i + std::min(i, length % shares); };
  Intersection narrowed = *this;
  narrowed.narrow(dim, begin_of(index), begin_of(index + 1));
  return narrowed;
}

void Intersection::narrow(size_t d, int64_t begin, int64_t end) {
  pieces_[d] = subrange(pieces_[d], begin, end);
  packed_shape_[d] = end - begin;
  count_ = 1;
  for (const int64_t size : packed_shape_) count_ *= size;
}

// Splits along the outermost dim of more than one index: rows that are only partly in the range are sliced recursively,
// the rows between them are taken whole.
std::vector<Intersection> Intersection::slice(int64_t begin, int64_t end) const {
  if (begin >= end) return {};
  if (begin == 0 && end == count_) return {*this};
  size_t outer = 0;
  while (packed_shape_[outer] == 1) ++outer;
  const int64_t row = count_ / packed_shape_[outer];
  std::vector<Intersection> parts;
  for (int64_t at = begin; at < end;) {
    const int64_t first = at / row;
    const bool is_whole_row = at % row == 0 && end - at >= row;
    const int64_t last = is_whole_row ? end / row : first + 1;
    Intersection rows = *this;
    rows.narrow(outer, first, last);
    const int64_t to = std::min(end, last * row);
    if (is_whole_row) {
      parts.push_back(std::move(rows));
    } else {
      for (Intersection& part : rows.slice(at - first * row, to - first * row)) parts.push_back(std::move(part));
    }
    at = to;
  }
  return parts;
}

void Parcel::add(const Intersection& whole, int64_t begin, int64_t end) {
  for (Intersection& part : whole.slice(begin, end)) parts_.push_back(std::move(part));
  count_ += std::max<int64_t>(end - begin, 0);
}

template <typename BoxesOfPart>
std::vector<Box> Parcel::boxes(const BoxesOfPart& boxes_of_part) const {
  std::vector<Box> all;
  int64_t packed = 0;
  for (const Intersection& part : parts_) {
    for (Box& box : boxes_of_part(part, packed)) all.push_back(std::move(box));
    packed += part.count();
  }
  return all;
}

std::vector<Box> Parcel::a_to_b(int64_t a_base, int64_t b_base) const {
  return boxes([&](const Intersection& part, int64_t) { return part.a_to_b(a_base, b_base); });
}

std::vector<Box> Parcel::a_to_packed(int64_t a_base, int64_t packed_base) const {
  return boxes([&](const Intersection& part, int64_t at) { return part.a_to_packed(a_base, packed_base + at); });
}

std::vector<Box> Parcel::packed_to_b(int64_t packed_base, int64_t b_base) const {
  return boxes([&](const Intersection& part, int64_t at) { return part.packed_to_b(packed_base + at, b_base); });
}

int64_t Parcel::run(int64_t (Intersection::*run_of_part)() const) const {
  int64_t first = -1;
  int64_t next = -1;
  for (const Intersection& part : parts_) {
    const int64_t at = (part.*run_of_part)();
    if (at < 0 || (first >= 0 && at != next)) return -1;
    if (first < 0) first = at;
    next = at + part.count();
  }
  return first;
}

}  // namespace shardwright
