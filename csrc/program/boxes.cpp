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

struct Side {
  const std::vector<int64_t>& shape;
  int64_t Piece::* position;
  int64_t base;
};

// Pieces of one length at equal distances on both sides. So a block-cyclic part of a million blocks is one box.
struct EvenPieces {
  int64_t length = 0;
  int64_t from = 0;  // the first one's positions
  int64_t to = 0;
  int64_t from_step = 0;
  int64_t to_step = 0;
  int64_t count = 1;
};

// Takes as many pieces together as possible, from the first on, where both sides ascend. Pieces at 0, 8, 16 and 17 make
// two lists, of three pieces and of one.
std::vector<EvenPieces> taken_together(const std::vector<Piece>& pieces, const Side& from, const Side& to) {
  std::vector<EvenPieces> lists;
  for (const Piece& piece : pieces) {
    if (!lists.empty() && lists.back().length == piece.length) {
      EvenPieces& last = lists.back();
      const int64_t from_step = piece.*from.position - last.from - (last.count - 1) * last.from_step;
      const int64_t to_step = piece.*to.position - last.to - (last.count - 1) * last.to_step;
      const bool fits =
          last.count == 1 ? from_step > 0 && to_step > 0 : from_step == last.from_step && to_step == last.to_step;
      if (fits) {
        last.from_step = from_step;
        last.to_step = to_step;
        ++last.count;
        continue;
      }
    }
    lists.push_back({piece.length, piece.*from.position, piece.*to.position, 0, 0, 1});
  }
  return lists;
}

// Makes one box per combination of lists of pieces, in row-major order of the combinations.
std::vector<Box> boxes_between(const std::vector<std::vector<Piece>>& pieces, const Side& from, const Side& to) {
  const size_t ndim = pieces.size();
  std::vector<std::vector<EvenPieces>> lists;
  for (const auto& list : pieces) {
    if (list.empty()) return {};
    lists.push_back(taken_together(list, from, to));
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
      if (list.count > 1) add_dim(list.count, list.from_step * from_strides[d], list.to_step * to_strides[d]);
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
std::vector<std::vector<Piece>> packed_positions(std::vector<std::vector<Piece>> pieces, int64_t Piece::* position) {
  for (auto& list : pieces) {
    int64_t next = 0;
    for (Piece& piece : list) {
      piece.*position = next;
      next += piece.length;
    }
  }
  return pieces;
}

// Several pieces count as several runs even where one side has them one after the other: pairs (program/pairs.h) count
// pieces too.
bool are_one_piece(const std::vector<std::vector<Piece>>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [](const std::vector<Piece>& list) { return list.size() == 1; });
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

void Intersection::add(std::vector<Piece> pieces) {
  int64_t shared = 0;
  for (const Piece& piece : pieces) shared += piece.length;
  pieces_.push_back(std::move(pieces));
  packed_shape_.push_back(shared);
  count_ *= shared;
}

std::vector<Box> Intersection::a_to_b(int64_t a_base, int64_t b_base) const {
  return boxes_between(pieces_, {a_shape_, &Piece::a_position, a_base}, {b_shape_, &Piece::b_position, b_base});
}

std::vector<Box> Intersection::a_to_packed(int64_t a_base, int64_t packed_base) const {
  return boxes_between(packed_positions(pieces_, &Piece::b_position), {a_shape_, &Piece::a_position, a_base},
                       {packed_shape_, &Piece::b_position, packed_base});
}

std::vector<Box> Intersection::packed_to_b(int64_t packed_base, int64_t b_base) const {
  return boxes_between(packed_positions(pieces_, &Piece::a_position), {packed_shape_, &Piece::a_position, packed_base},
                       {b_shape_, &Piece::b_position, b_base});
}

int64_t Intersection::run_in_a() const { return are_one_piece(pieces_) ? run_of(a_to_packed(0, 0), true) : -1; }

int64_t Intersection::run_in_b() const { return are_one_piece(pieces_) ? run_of(packed_to_b(0, 0), false) : -1; }

std::vector<Intersection::Part> Intersection::parts() const {
  std::vector<Part> parts{Part{}};
  for (const std::vector<Piece>& pieces : pieces_) {
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
  std::vector<Piece> kept;
  int64_t at = 0;
  for (const Piece& piece : pieces_[d]) {
    const int64_t from = std::max(begin - at, int64_t{0});
    const int64_t to = std::min(end - at, piece.length);
    if (from < to) kept.push_back({to - from, piece.a_position + from, piece.b_position + from});
    at += piece.length;
  }
  pieces_[d] = std::move(kept);
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

Parcel::Parcel(const Intersection& whole, int64_t begin, int64_t end)
    : parts_(whole.slice(begin, end)), count_(std::max<int64_t>(end - begin, 0)) {}

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
