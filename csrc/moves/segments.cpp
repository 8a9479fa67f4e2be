#include "moves/segments.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "exchange/digits.h"
#include "moves/collectives.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Calls visit(layout) for the source, the layouts before and after each step, and the destination.
template <typename Visit>
void for_each_layout(const Plan& plan, const Visit& visit) {
  visit(plan.src);
  for (const Step& step : plan.steps) {
    visit(step.before);
    visit(step.after);
  }
  visit(plan.dst);
}

// Returns true if a step is local, or one collective in one round. Returns false for rearrangements.
bool communicates_once(const Step& step, Lowering lowering) {
  if (step.op == StepOp::kRearrange || step.rounds > 1) return false;
  const int64_t size = step.before.mesh().group_size(step.mesh_dims);
  return is_local(step.op) || num_collectives(step.op, size, reduces_natively(step, lowering)) == 1;
}

// Calls visit(list) for each part of a tensor dim that ranks of a layout hold, empty parts included.
template <typename Visit>
void for_each_part(const Layout& layout, int tensor_dim, const Visit& visit) {
  const MeshDimSet cutting = dims_of(layout.cuts(tensor_dim));
  for (const int64_t position : layout.mesh().group(0, cutting)) visit(layout.part(tensor_dim, position));
}

// Returns the number of parts, empty parts included, that the cuts of a tensor dim make.
int64_t num_parts(const Layout& layout, int tensor_dim) {
  return layout.mesh().group_size(dims_of(layout.cuts(tensor_dim)));
}

// Returns the borders of a tensor dim: the indices at which a part begins or ends, ascending, from 0 to its size.
// Returns an empty list if there are more than kMaxBorders.
std::vector<int64_t> borders_of(const Plan& plan, int tensor_dim) {
  std::vector<int64_t> borders{0, plan.src.shape()[tensor_dim]};
  bool fits_limit = true;
  const Layout* previous = nullptr;
  for_each_layout(plan, [&](const Layout& layout) {
    fits_limit = fits_limit && num_parts(layout, tensor_dim) <= kMaxBorders;
    if (!fits_limit || (previous != nullptr && *previous == layout)) return;
    previous = &layout;
    for_each_part(layout, tensor_dim, [&](const IntervalList& list) {
      fits_limit = fits_limit && static_cast<int64_t>(list.size()) <= kMaxBorders;
      for (const Interval& interval : fits_limit ? list : IntervalList()) {
        borders.push_back(interval.begin);
        borders.push_back(interval.end);
      }
    });
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    fits_limit = fits_limit && static_cast<int64_t>(borders.size()) <= kMaxBorders;
  });
  return fits_limit ? borders : std::vector<int64_t>{};
}

// Returns the number of indices of a range that are `remainder` modulo `count`: the share of segment `remainder`.
int64_t num_in_segment(Interval range, int64_t remainder, int64_t count) {
  // Returns this number for the range from 0 to `end`.
  const auto below = [&](int64_t end) { return end > remainder ? (end - 1 - remainder) / count + 1 : 0; };
  return below(range.end) - below(range.begin);
}

// Returns the indices of one of `count` non-uniform segments: in each range between two borders, those that follow the
// indices of the segments before it.
IntervalList indices_of(const std::vector<int64_t>& borders, int64_t segment, int64_t count) {
  IntervalList indices;
  for (size_t i = 1; i < borders.size(); ++i) {
    const Interval range{borders[i - 1], borders[i]};
    int64_t begin = range.begin;
    for (int64_t before = 0; before < segment; ++before) begin += num_in_segment(range, before, count);
    append(indices, {begin, begin + num_in_segment(range, segment, count)});
  }
  return indices;
}

// Returns the lengths of the k parts of a list of n elements, by coordinate. The rule of the cut must make runs.
std::vector<int64_t> lengths_of_runs(const Cut& cut, int64_t n, int64_t k) {
  std::vector<int64_t> lengths;
  for (int64_t c = 0; c < k; ++c) lengths.push_back(cut.rule.length(n, k, c));
  return lengths;
}

// Returns the block length of one layout: the greatest common divisor of the lengths of all runs. For example, S(0) of
// 16 rows over 4 ranks has blocks of 4 rows. The last cut may make runs of unequal lengths; returns 0 for other unequal
// parts, which have no blocks.
int64_t block_length_of(const Layout& layout, int tensor_dim) {
  const std::vector<Cut>& cuts = layout.cuts(tensor_dim);
  const int64_t n = layout.shape()[tensor_dim];
  int64_t block = n;
  const auto include_weights = [&](const std::vector<Digit>& digits) {
    for (const Digit& digit : digits) block = std::gcd(block, digit.weight);
  };
  if (const auto digits = digits_of(layout.mesh(), n, cuts)) {
    include_weights(*digits);
    return block;
  }
  const std::vector<Cut> before(cuts.begin(), cuts.end() - 1);
  const auto digits = digits_of(layout.mesh(), n, before);
  if (!digits || !cuts.back().rule.makes_runs()) return 0;
  include_weights(*digits);
  const int64_t list_length = n / layout.mesh().group_size(dims_of(before));
  for (const int64_t length : lengths_of_runs(cuts.back(), list_length, layout.mesh().dim_size(cuts.back().mesh_dim))) {
    block = std::gcd(block, length);
  }
  return block;
}

// Returns the placements of one uniform segment. The rules of the plan may name sizes that do not fit a segment, so
// they are replaced by strided cuts that make the same parts, or by runs that are `count` times shorter. Mesh dims of
// size 1 cut nothing.
std::vector<Placement> placements_of_segment(const Layout& layout, const Segments& segments) {
  const int tensor_dim = segments.tensor_dim;
  std::vector<Placement> placements = layout.placements();
  for (Placement& placement : placements) {
    if (placement.is_shard_like() && placement.dim == tensor_dim) placement = Placement::shard(tensor_dim);
  }
  int64_t left = layout.shape()[tensor_dim];
  for (const Cut& cut : layout.cuts(tensor_dim)) {
    const int64_t k = layout.mesh().dim_size(cut.mesh_dim);
    const std::optional<int64_t> split_factor = cut.rule.equal_split_factor(left, k);
    if (split_factor) {
      placements[cut.mesh_dim] = Placement::cut(tensor_dim, *split_factor);
      left /= k;
      continue;
    }
    check_invariant(cut.rule.makes_runs(), "the parts of ", layout, " have no blocks, so no uniform segments");
    std::vector<int64_t> lengths = lengths_of_runs(cut, left, k);
    for (int64_t& length : lengths) length /= segments.count;
    placements[cut.mesh_dim] = Placement::cut(tensor_dim, CutRule::ragged(lengths));
  }
  return placements;
}

}  // namespace

int64_t block_length(const Plan& plan, int tensor_dim) {
  int64_t block = plan.src.shape()[tensor_dim];
  for_each_layout(plan, [&](const Layout& layout) {
    if (layout.flattened() > 1) block = 0;  // a flattened layout has other dims
    if (block == 0 || layout.cuts(tensor_dim).empty()) return;
    const int64_t own = block_length_of(layout, tensor_dim);
    block = own == 0 ? 0 : std::gcd(block, own);
  });
  return block;
}

bool can_run_in_segments(const Plan& plan, const Segments& segments) {
  if (segments.count == 1) return segments.tensor_dim == 0;
  if (segments.count < 1 || segments.count > kMaxSegments || !crosses(plan)) return false;
  if (segments.tensor_dim < 0 || segments.tensor_dim >= plan.src.ndim()) return false;
  for (const Step& step : plan.steps) {
    if (!communicates_once(step, plan.lowering)) return false;
  }
  const int64_t block = block_length(plan, segments.tensor_dim);
  if (block > 0 && block % segments.count == 0) return true;
  if (segments.count > std::min(kMaxNonUniformSegments, plan.src.shape()[segments.tensor_dim])) return false;
  if (static_cast<int64_t>(ranks_of(plan).size()) > kMaxRanksInNonUniformSegments) return false;
  return !borders_of(plan, segments.tensor_dim).empty();
}

bool are_uniform(const Plan& plan) {
  const int64_t block = block_length(plan, plan.segments.tensor_dim);
  return block > 0 && block % plan.segments.count == 0;
}

namespace {

// Returns the layout of one uniform segment: a tensor whose dim is `count` times shorter.
Layout layout_of_uniform_segment(const Layout& layout, const Segments& segments) {
  std::vector<int64_t> shape = layout.shape();
  shape[segments.tensor_dim] /= segments.count;
  ShardOrder order;
  for (int t = 0; t < layout.ndim(); ++t) {
    std::vector<int>& mesh_dims = order[t];
    for (const Cut& cut : layout.cuts(t)) mesh_dims.push_back(cut.mesh_dim);
  }
  return Layout(layout.mesh_ptr(), std::move(shape), layout.dtype(), placements_of_segment(layout, segments), order,
                StridedMeaning::kLiteral);
}

// Returns the plan with each layout replaced by make(layout), and without segments.
template <typename MakeLayout>
Plan with_layouts(const Plan& plan, const MakeLayout& make) {
  Plan other = plan;
  other.segments = {};
  other.src = make(plan.src);
  other.dst = make(plan.dst);
  for (Step& step : other.steps) {
    step.before = make(step.before);
    step.after = make(step.after);
  }
  return other;
}

}  // namespace

std::vector<Plan> plans_of_segments(const Plan& plan) {
  const Segments& segments = plan.segments;
  std::vector<Plan> plans;
  if (are_uniform(plan)) {
    plans.push_back(
        with_layouts(plan, [&](const Layout& layout) { return layout_of_uniform_segment(layout, segments); }));
    return plans;
  }
  const std::vector<int64_t> borders = borders_of(plan, segments.tensor_dim);
  for (int64_t segment = 0; segment < segments.count; ++segment) {
    const IntervalList indices = indices_of(borders, segment, segments.count);
    plans.push_back(
        with_layouts(plan, [&](const Layout& layout) { return layout.restricted_to(segments.tensor_dim, indices); }));
  }
  return plans;
}

PartsInSegments::PartsInSegments(const Layout& layout, int tensor_dim) {
  for_each_part(layout, tensor_dim, [&](const IntervalList& list) {
    longest_ = std::max(longest_, length(list));
    parts_.push_back(list);
  });
}

// Every segment gets an equal share of each run of a part, and some segments one index more. `more` counts these
// indices.
int64_t PartsInSegments::largest_count_in_segment(int64_t count) const {
  int64_t most = 0;
  std::vector<int64_t> more;  // indexed by segment
  for (const IntervalList& list : parts_) {
    int64_t equal_shares = 0;
    more.assign(count, 0);
    for (const Interval& interval : list) {
      equal_shares += (interval.end - interval.begin) / count;
      for (int64_t i = interval.end - (interval.end - interval.begin) % count; i < interval.end; ++i) ++more[i % count];
    }
    most = std::max(most, equal_shares + *std::max_element(more.begin(), more.end()));
  }
  return most;
}

}  // namespace shardwright
