#include "batch/batch_program.h"

#include <algorithm>
#include <map>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

using Seat = std::optional<Grid::Seat>;

Region region_of(const Grid& grid, const std::vector<int64_t>& slots) {
  Region region;
  for (int t = 0; t < grid.ndim(); ++t) region.push_back(grid.lists(t)[slots[t]]);
  return region;
}

Region region_of(const Grid& grid, Rank rank) { return region_of(grid, grid.seat_of(rank)->slots); }

// One side of an axis in a box: the tensor dim, or none, and the stride and first local position there.
struct AxisSide {
  int64_t stride = 0;
  int64_t first = 0;
};

// The strides of a local tensor's dims, by axis. An axis without a dim of the tensor has one index.
std::vector<AxisSide> sides_of(const std::vector<Window>& windows, const std::vector<int64_t>& strides,
                               const std::vector<int64_t>& firsts) {
  std::vector<AxisSide> sides;
  for (size_t a = 0; a < windows.size(); ++a) {
    const bool has_dim = windows[a].tensor_dim != Window::kNoDim;
    sides.push_back({has_dim ? strides[windows[a].tensor_dim] : 0, firsts[a]});
  }
  return sides;
}

int64_t offset_of(const std::vector<AxisSide>& sides, const std::vector<int64_t>& positions) {
  int64_t offset = 0;
  for (size_t a = 0; a < sides.size(); ++a) offset += (sides[a].first + positions[a]) * sides[a].stride;
  return offset;
}

std::vector<int64_t> strides_of(const std::vector<AxisSide>& sides) {
  std::vector<int64_t> strides;
  for (const AxisSide& side : sides) strides.push_back(side.stride);
  return strides;
}

}  // namespace

// Collects the fragments of all rounds.
class BatchProgram::Builder {
 public:
  explicit Builder(const BatchPlan& plan) : plan_(plan), rounds_(plan.num_rounds()) {}

  void add(int item, const Part& part) {
    for (const ItemPiece& piece : plan_.pieces(item)) {
      Round& round = rounds_[piece.round];
      round.element_bytes = plan_.wire_dtype(item).size_bytes();
      add(item, piece, part.sends, round.sends);
      add(item, piece, part.receives, round.receives);
    }
  }

  // Returns the rounds in which there is something.
  std::vector<BatchRound> finish() {
    std::vector<BatchRound> rounds;
    for (size_t r = 0; r < rounds_.size(); ++r) {
      Round& round = rounds_[r];
      if (round.sends.empty() && round.receives.empty()) continue;
      BatchRound made;
      made.number = static_cast<int>(r);
      made.element_bytes = round.element_bytes;
      made.sends = placed(round.sends, 0, round.element_bytes, made.sent_bytes);
      made.receives = placed(round.receives, made.sent_bytes, round.element_bytes, made.received_bytes);
      check_invariant(made.sent_bytes + made.received_bytes <= plan_.bucket_bytes(), "round ", r, " packs ",
                      made.sent_bytes, " and ", made.received_bytes, " bytes into buckets of ", plan_.bucket_bytes());
      rounds.push_back(std::move(made));
    }
    return rounds;
  }

 private:
  using Messages = std::map<Rank, std::vector<BatchFragment>>;
  struct Round {
    int64_t element_bytes = 1;
    Messages sends;
    Messages receives;
  };

  static void add(int item, const ItemPiece& piece, const std::vector<Parcel>& parcels, Messages& messages) {
    for (size_t p = 0; p < parcels.size(); ++p) {
      const int64_t elements = parcels[p].range.end - parcels[p].range.begin;
      const int64_t begin = ItemPiece::before(piece.begin, elements);
      const int64_t end = ItemPiece::before(piece.end, elements);
      if (begin < end) messages[parcels[p].peer].push_back({item, static_cast<int>(p), begin, end, 0});
    }
  }

  static std::vector<BatchMessage> placed(Messages& messages, int64_t offset_bytes, int64_t element_bytes,
                                          int64_t& all_bytes) {
    std::vector<BatchMessage> made;
    for (auto& [peer, fragments] : messages) {
      BatchMessage message{peer, offset_bytes + all_bytes, 0, std::move(fragments)};
      for (BatchFragment& fragment : message.fragments) {
        fragment.position = (message.offset_bytes + message.size_bytes) / element_bytes;
        message.size_bytes += (fragment.end - fragment.begin) * element_bytes;
      }
      all_bytes += message.size_bytes;
      made.push_back(std::move(message));
    }
    return made;
  }

  const BatchPlan& plan_;
  std::vector<Round> rounds_;
};

BatchProgram::BatchProgram(std::shared_ptr<const BatchPlan> plan, Rank rank)
    : plan_(std::move(plan)),
      rank_(rank),
      last_of_source_(plan_->batch().sources.size(), -1),
      last_of_destination_(plan_->batch().destinations.size(), -1) {
  for (const BatchPlan::Kind& kind : plan_->kinds()) parts_.push_back(part_in(kind));
  Builder builder(*plan_);
  for (const int item : plan_->order()) {
    const Part& part = parts_[plan_->kind_of(item)];
    if (part.own) own_items_.push_back(item);
    if (!part.sends.empty() || !part.receives.empty()) builder.add(item, part);
  }
  rounds_ = builder.finish();
  for (size_t r = 0; r < rounds_.size(); ++r) {
    for (const BatchMessage& message : rounds_[r].sends) {
      for (const BatchFragment& fragment : message.fragments) {
        last_of_source_[plan_->batch().items[fragment.item].source] = static_cast<int>(r);
      }
    }
    for (const BatchMessage& message : rounds_[r].receives) {
      for (const BatchFragment& fragment : message.fragments) {
        last_of_destination_[plan_->batch().items[fragment.item].destination] = static_cast<int>(r);
      }
    }
  }
}

BatchProgram::Part BatchProgram::part_in(const BatchPlan::Kind& kind) const {
  Part part;
  const Grid& src = kind.crossing.src();
  const Grid& dst = kind.crossing.dst();
  const Seat holds = src.seat_of(rank_);
  const Seat needs = dst.seat_of(rank_);
  if (holds) {
    const Region held = region_of(src, holds->slots);
    for (const Crossing::Parcel& parcel : kind.crossing.sends(rank_)) {
      part.sends.push_back({parcel.peer, parcel.range, Intersection(held, region_of(dst, parcel.peer))});
    }
    for (int a = 0; a < src.ndim(); ++a) part.first_in_src.push_back(src.first_position(a, holds->slots[a]));
  }
  if (needs) {
    const Region needed = region_of(dst, needs->slots);
    for (const Crossing::Parcel& parcel : kind.crossing.receives(rank_)) {
      part.receives.push_back({parcel.peer, parcel.range, Intersection(region_of(src, parcel.peer), needed)});
    }
    for (int a = 0; a < dst.ndim(); ++a) part.first_in_dst.push_back(dst.first_position(a, needs->slots[a]));
    if (holds) {
      Intersection own(region_of(src, holds->slots), needed);
      if (own.count() > 0) part.own = std::move(own);
    }
  }
  return part;
}

std::vector<Box> BatchProgram::boxes_to(const BatchFragment& fragment, const std::vector<int64_t>& strides,
                                        bool is_sent) const {
  const Part& part = parts_[plan_->kind_of(fragment.item)];
  const IndexMap& map = plan_->batch().items[fragment.item].map;
  const Parcel& parcel = (is_sent ? part.sends : part.receives)[fragment.parcel];
  const std::vector<AxisSide> sides = is_sent ? sides_of(map.src_windows(), strides, part.first_in_src)
                                              : sides_of(map.dst_windows(), strides, part.first_in_dst);
  const std::vector<int64_t> local_strides = strides_of(sides);
  std::vector<Box> boxes;
  int64_t position = fragment.position;
  for (const Intersection& slice :
       parcel.whole.slice(parcel.range.begin + fragment.begin, parcel.range.begin + fragment.end)) {
    const std::vector<int64_t> packed_strides = row_major_strides(slice.shape());
    for (const Intersection::Part& one : slice.parts()) {
      int64_t packed = position;
      for (size_t a = 0; a < one.packed.size(); ++a) packed += one.packed[a] * packed_strides[a];
      const int64_t local = offset_of(sides, is_sent ? one.in_a : one.in_b);
      Box box = is_sent ? Box{local, packed, one.sizes, local_strides, packed_strides}
                        : Box{packed, local, one.sizes, packed_strides, local_strides};
      simplify(box);
      boxes.push_back(std::move(box));
    }
    position += slice.count();
  }
  return boxes;
}

std::vector<Box> BatchProgram::boxes_to_pack(const BatchFragment& fragment,
                                             const std::vector<int64_t>& src_strides) const {
  return boxes_to(fragment, src_strides, true);
}

std::vector<Box> BatchProgram::boxes_to_unpack(const BatchFragment& fragment,
                                               const std::vector<int64_t>& dst_strides) const {
  return boxes_to(fragment, dst_strides, false);
}

std::vector<Box> BatchProgram::boxes_to_keep(int item, const std::vector<int64_t>& src_strides,
                                             const std::vector<int64_t>& dst_strides) const {
  const Part& part = parts_[plan_->kind_of(item)];
  const IndexMap& map = plan_->batch().items[item].map;
  const std::vector<AxisSide> src = sides_of(map.src_windows(), src_strides, part.first_in_src);
  const std::vector<AxisSide> dst = sides_of(map.dst_windows(), dst_strides, part.first_in_dst);
  std::vector<Box> boxes;
  for (const Intersection::Part& one : part.own->parts()) {
    Box box{offset_of(src, one.in_a), offset_of(dst, one.in_b), one.sizes, strides_of(src), strides_of(dst)};
    simplify(box);
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace shardwright
