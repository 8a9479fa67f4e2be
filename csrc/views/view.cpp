#include "views/view.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "cost/cost.h"
#include "exchange/digits.h"
#include "support/error.h"
#include "views/find_cuts.h"

namespace shardwright {
namespace {

// Dims [src_begin, src_end) of the source shape and [dst_begin, dst_end) of the destination shape, with equal numbers
// of elements.
struct Group {
  size_t src_begin, src_end, dst_begin, dst_end;
};

// A cut of a dim of the view.
struct NewCut {
  int mesh_dim;  // of the original mesh
  size_t part;   // index into the parts of a mesh dim that is split, else 0
  CutRule rule;
};

// The cuts of the view, and the mesh dims that must be split for them.
struct Result {
  std::vector<std::vector<NewCut>> cuts;       // by dim
  std::map<int, std::vector<int64_t>> splits;  // split mesh dim -> sizes of its parts
};

// Returns the smallest groups of consecutive dims that have equal products of sizes on both sides, in order. Dims of
// size 1 without a counterpart join the group before them. All sizes must be positive, with equal products.
std::vector<Group> groups_of(const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
  std::vector<Group> groups;
  size_t i = 0, j = 0;
  while (i < src.size() || j < dst.size()) {
    Group group{i, i, j, j};
    int64_t a = i < src.size() ? src[i++] : 1;
    int64_t b = j < dst.size() ? dst[j++] : 1;
    while (a != b) {
      if (a < b) {
        a *= src[i++];
      } else {
        b *= dst[j++];
      }
    }
    group.src_end = i;
    group.dst_end = j;
    const bool is_one_sided = group.src_begin == i || group.dst_begin == j;
    if (is_one_sided && !groups.empty()) {
      groups.back().src_end = i;
      groups.back().dst_end = j;
    } else {
      groups.push_back(group);
    }
  }
  return groups;
}

// Returns the sizes of the dims [begin, end).
std::vector<int64_t> slice(const std::vector<int64_t>& dims, size_t begin, size_t end) {
  return {dims.begin() + static_cast<int64_t>(begin), dims.begin() + static_cast<int64_t>(end)};
}

// Finds the cuts of one group of dims. Tries three ways in this order: to keep the cuts, to assign digits to the new
// dims, and to compare the elements that ranks hold.
class GroupView {
 public:
  GroupView(const Layout& layout, const std::vector<int64_t>& dst, const Group& group)
      : mesh_(layout.mesh()),
        src_(slice(layout.shape(), group.src_begin, group.src_end)),
        dst_(slice(dst, group.dst_begin, group.dst_end)),
        cuts_(layout.cuts().begin() + static_cast<int64_t>(group.src_begin),
              layout.cuts().begin() + static_cast<int64_t>(group.src_end)),
        first_(group.dst_begin) {}

  // Returns the mesh dims that cut the group.
  MeshDimSet mesh_dims() const {
    MeshDimSet set;
    for (const std::vector<Cut>& list : cuts_) set = set | dims_of(list);
    return set;
  }

  // Adds the cuts of the group to the result and returns nullopt, or returns the reason why there are none.
  std::optional<std::string> solve(Result& result) const {
    if (mesh_dims().empty() || keep(result) || move_digits(result)) return std::nullopt;
    const std::optional<Holdings> holdings = holdings_of(mesh_, src_, cuts_);
    if (!holdings) {
      return concat("comparing the parts of (", join(src_), ") and (", join(dst_), ") takes more than ",
                    kMaxIntervalsCompared, " intervals");
    }
    auto found = fitting_cuts(*holdings, dst_);
    if (const auto* cuts = std::get_if<std::vector<std::vector<Cut>>>(&found)) {
      for (size_t j = 0; j < dst_.size(); ++j) {
        for (const Cut& c : (*cuts)[j]) result.cuts[first_ + j].push_back({c.mesh_dim, 0, c.rule});
      }
      return std::nullopt;
    }
    const NoFit& none = std::get<NoFit>(found);
    if (none.to_split.size() == 1 && fit_split(*holdings, none.to_split[0], result)) return std::nullopt;
    return none.reason;
  }

 private:
  // A digit (exchange/digits.h) of the index into a dim of the view, fixed by a part of a mesh dim.
  struct NewDigit {
    int64_t weight, radix;
    int mesh_dim;
    size_t part;
  };

  // Splits the mesh dim `split` in two, which does not change positions, and adds cuts on the new mesh to the result.
  // Tries the ways to factor the size of the mesh dim until cuts fit. Returns false if none do.
  bool fit_split(const Holdings& holdings, int split, Result& result) const {
    const int64_t k = mesh_.dim_size(split);
    for (int64_t outer = 2; outer < k; ++outer) {
      if (k % outer != 0) continue;
      std::vector<int64_t> sizes;
      for (int d = 0; d < mesh_.ndim(); ++d) {
        sizes.push_back(d == split ? outer : mesh_.dim_size(d));
        if (d == split) sizes.push_back(k / outer);
      }
      std::vector<std::string> names;
      for (size_t i = 0; i < sizes.size(); ++i) names.push_back(std::to_string(i));
      const Mesh fine(names, sizes);
      std::vector<int> mesh_dims;
      for (const int d : holdings.mesh_dims) {
        mesh_dims.push_back(d + (d > split ? 1 : 0));
        if (d == split) mesh_dims.push_back(d + 1);
      }
      const auto found = fitting_cuts({fine, mesh_dims, holdings.positions, holdings.lists}, dst_);
      const auto* cuts = std::get_if<std::vector<std::vector<Cut>>>(&found);
      if (cuts == nullptr) continue;
      for (size_t j = 0; j < dst_.size(); ++j) {
        for (const Cut& c : (*cuts)[j]) {
          const int d = c.mesh_dim - (c.mesh_dim > split ? 1 : 0);
          result.cuts[first_ + j].push_back({d, c.mesh_dim == split + 1 ? size_t{1} : 0, c.rule});
        }
      }
      result.splits[split] = {outer, k / outer};
      return true;
    }
    return false;
  }

  // Keeps the cuts if both sides have the same dims apart from dims of size 1, and no dim of size 1 is cut. If both
  // sides have equal dims, dims of size 1 may be cut too. Returns false otherwise.
  bool keep(Result& result) const {
    std::vector<size_t> src_dims, dst_dims;
    for (size_t i = 0; i < src_.size(); ++i) {
      if (src_[i] != 1) src_dims.push_back(i);
      if (src_[i] == 1 && !cuts_[i].empty() && src_ != dst_) return false;
    }
    for (size_t j = 0; j < dst_.size(); ++j) {
      if (dst_[j] != 1) dst_dims.push_back(j);
    }
    if (src_ == dst_) {  // then cut dims of size 1 stay, too
      src_dims.resize(src_.size());
      std::iota(src_dims.begin(), src_dims.end(), size_t{0});
      dst_dims = src_dims;
    }
    if (src_dims.size() != dst_dims.size()) return false;
    for (size_t i = 0; i < src_dims.size(); ++i) {
      if (src_[src_dims[i]] != dst_[dst_dims[i]]) return false;
    }
    for (size_t i = 0; i < src_dims.size(); ++i) {
      for (const Cut& c : cuts_[src_dims[i]]) result.cuts[first_ + dst_dims[i]].push_back({c.mesh_dim, 0, c.rule});
    }
    return true;
  }

  // If all cuts are even, distributes the digits that they fix among the new dims. Returns false otherwise, and if a
  // digit does not fit.
  bool move_digits(Result& result) const {
    std::vector<Digit> digits;
    int64_t inner = 1;
    for (size_t t = src_.size(); t-- > 0; inner *= src_[t]) {
      std::optional<std::vector<Digit>> of_dim = digits_of(mesh_, src_[t], cuts_[t]);
      if (!of_dim) return false;
      for (Digit& digit : *of_dim) digit.weight *= inner;
      digits.insert(digits.begin(), of_dim->begin(), of_dim->end());
    }
    std::vector<std::vector<NewDigit>> by_dim(dst_.size());
    std::map<int, std::vector<int64_t>> radices;
    for (const Digit& digit : digits) {
      if (!assign(digit, by_dim, radices[digit.mesh_dim])) return false;
    }
    for (size_t j = 0; j < dst_.size(); ++j) result.cuts[first_ + j] = cuts_of(dst_[j], std::move(by_dim[j]));
    for (auto& [mesh_dim, sizes] : radices) {
      if (sizes.size() > 1) result.splits[mesh_dim] = std::move(sizes);
    }
    return true;
  }

  // Assigns a digit of the flattened group's index to the new dims, and appends the radices of its parts to `radices`.
  // A digit that crosses a dim boundary is split: with (64) on tp=8 viewed as (4, 16), the digit of radix 8 becomes
  // digits of radix 4 and 2. Returns false if the radices do not divide.
  bool assign(const Digit& digit, std::vector<std::vector<NewDigit>>& by_dim, std::vector<int64_t>& radices) const {
    const int64_t begin = digit.weight;
    const int64_t end = digit.weight * digit.radix;
    int64_t above = std::accumulate(dst_.begin(), dst_.end(), int64_t{1}, std::multiplies<>());
    for (size_t j = 0; j < dst_.size(); ++j) {
      const int64_t top = above;
      above /= dst_[j];
      const int64_t low = std::max(begin, above);
      const int64_t high = std::min(end, top);
      if (low >= high) continue;
      if (low % begin != 0 || end % high != 0 || high % low != 0 || low % above != 0 || top % high != 0) return false;
      by_dim[j].push_back({low / above, high / low, digit.mesh_dim, radices.size()});
      radices.push_back(high / low);
    }
    return true;
  }

  // Returns one cut of a dim for each of these digits of its index: chunks, first digit first, if these are its leading
  // digits without gaps; otherwise strided cuts in mesh order, which DTensor can express.
  static std::vector<NewCut> cuts_of(int64_t size, std::vector<NewDigit> digits) {
    std::vector<NewCut> cuts;
    int64_t top = size;
    for (const NewDigit& digit : digits) {
      if (digit.weight * digit.radix != top) break;
      top = digit.weight;
      cuts.push_back({digit.mesh_dim, digit.part, CutRule()});
    }
    if (cuts.size() == digits.size()) return cuts;
    cuts.clear();
    std::sort(digits.begin(), digits.end(), [](const NewDigit& a, const NewDigit& b) {
      return std::pair(a.mesh_dim, a.part) < std::pair(b.mesh_dim, b.part);
    });
    for (size_t i = 0; i < digits.size(); ++i) {
      int64_t factor = size / (digits[i].weight * digits[i].radix);
      for (size_t earlier = 0; earlier < i; ++earlier) {
        if (digits[earlier].weight > digits[i].weight) factor /= digits[earlier].radix;
      }
      cuts.push_back({digits[i].mesh_dim, digits[i].part, CutRule(factor)});
    }
    return cuts;
  }

  const Mesh& mesh_;
  std::vector<int64_t> src_, dst_;      // sizes of the group's dims, in the layout and in the view
  std::vector<std::vector<Cut>> cuts_;  // by dim of src_
  size_t first_;                        // index of the group's first dim in the view
};

// Returns the mesh with these mesh dims split, and for each mesh dim of `mesh` the index of its first part on the new
// mesh. Returns nullopt if a new name is taken or there are too many mesh dims.
std::optional<std::pair<MeshPtr, std::vector<int>>> split_mesh(const MeshPtr& mesh,
                                                               const std::map<int, std::vector<int64_t>>& splits) {
  std::vector<int> begins;
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  for (int d = 0; d < mesh->ndim(); ++d) {
    begins.push_back(static_cast<int>(names.size()));
    const auto split = splits.find(d);
    if (split == splits.end()) {
      names.push_back(mesh->dim_names()[d]);
      sizes.push_back(mesh->dim_size(d));
      continue;
    }
    for (size_t i = 0; i < split->second.size(); ++i) {
      names.push_back(concat(mesh->dim_names()[d], ".", i));
      sizes.push_back(split->second[i]);
    }
  }
  if (splits.empty()) return std::pair(mesh, begins);
  for (const std::string& name : names) {
    if (std::count(names.begin(), names.end(), name) > 1) return std::nullopt;
  }
  if (names.size() > MeshDimSet::kMaxDims) return std::nullopt;
  const std::vector<int64_t> ranks = mesh->ranks_are_positions() ? std::vector<int64_t>{} : to_ints(mesh->ranks());
  return std::pair(MeshPtr(std::make_shared<Mesh>(names, sizes, ranks, mesh->topology())), begins);
}

// Returns the shape with the first `flattened` dims merged. Throws UserError if `flattened` is out of range.
std::vector<int64_t> with_merged_dims(const std::vector<int64_t>& shape, int flattened) {
  const int most = std::max(1, static_cast<int>(shape.size()));
  check_argument(flattened >= 1 && flattened <= most, "flattened", InRange{1, most}, flattened);
  if (flattened == 1) return shape;
  std::vector<int64_t> dims{1};
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i < static_cast<size_t>(flattened)) {
      dims[0] *= shape[i];
    } else {
      dims.push_back(shape[i]);
    }
  }
  return dims;
}

// Throws UserError if a size is negative or the shape has another number of elements than the layout.
void check_sizes(const Layout& layout, const std::vector<int64_t>& shape) {
  int64_t left = layout.num_elements();
  bool fits = true;
  for (const int64_t size : shape) {
    if (size < 0) throw UserError(concat("shape must have sizes of at least 0, got (", join(shape), ")"));
    fits = fits && (size == 0 || left % size == 0);
    if (fits && size > 0) left /= size;
  }
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (layout.num_elements() == 0) {
    fits = is_empty;
  } else {
    fits = fits && !is_empty && left == 1;
  }
  if (fits) return;
  throw UserError(concat("shape must have the ", layout.num_elements(), " elements of (", join(layout.tensor_shape()),
                         "), got (", join(shape), ")"));
}

// Returns the layout with the cuts of `result`. `mesh` and `begins` are from split_mesh(). Pending reductions stay.
Layout assembled(const Layout& layout, const std::vector<int64_t>& shape, int flattened, const Result& result,
                 const MeshPtr& mesh, const std::vector<int>& begins) {
  std::vector<Placement> placements(mesh->ndim(), Placement::replicate());
  for (int d = 0; d < layout.mesh().ndim(); ++d) {
    if (layout.placements()[d].is_partial()) placements[begins[d]] = layout.placements()[d];
  }
  ShardOrder order;
  for (size_t t = 0; t < result.cuts.size(); ++t) {
    for (const NewCut& cut : result.cuts[t]) {
      const int d = begins[cut.mesh_dim] + static_cast<int>(cut.part);
      placements[d] = Placement::cut(static_cast<int64_t>(t), cut.rule);
      order[static_cast<int64_t>(t)].push_back(d);
    }
  }
  return Layout(mesh, shape, layout.dtype(), std::move(placements), order, StridedMeaning::kLiteral, flattened);
}

}  // namespace

std::vector<int64_t> inferred_shape(const Layout& layout, std::vector<int64_t> shape) {
  const auto unknown = std::find(shape.begin(), shape.end(), -1);
  if (unknown == shape.end()) return shape;
  if (std::count(shape.begin(), shape.end(), -1) != 1) {
    throw UserError(concat("shape must have -1 at most once, got (", join(shape), ")"));
  }
  int64_t known = 1;
  for (const int64_t size : shape) {
    if (size == -1) continue;
    if (size > 0) known = saturating_product(known, size);
    if (size > 0 && layout.num_elements() % known == 0) continue;
    throw UserError(concat("shape must have, besides -1, sizes above 0 whose product divides ", layout.num_elements(),
                           ", the number of elements, got (", join(shape), ")"));
  }
  *unknown = layout.num_elements() / known;
  return shape;
}

// Divides the dims into groups, finds the cuts of each group, and splits mesh dims where that is needed.
std::variant<Layout, NoView> view_of(const Layout& layout, const std::vector<int64_t>& shape, int flattened) {
  check_sizes(layout, shape);
  const std::vector<int64_t> dims = with_merged_dims(shape, flattened);
  Result result;
  result.cuts.resize(dims.size());
  if (layout.num_elements() > 0) {
    for (const Group& group : groups_of(layout.shape(), dims)) {
      const GroupView view(layout, dims, group);
      if (std::optional<std::string> reason = view.solve(result)) return NoView{std::move(*reason), view.mesh_dims()};
    }
  }
  const auto mesh = split_mesh(layout.mesh_ptr(), result.splits);
  if (!mesh) {
    MeshDimSet split;
    for (const auto& entry : result.splits) split.insert(entry.first);
    return NoView{concat("mesh dim '", layout.mesh().names_of(split),
                         "' would have to be split, but its parts' names are taken or the mesh has too many dims"),
                  split};
  }
  return assembled(layout, shape, flattened, result, mesh->first, mesh->second);
}

bool is_known_to_dtensor(const Layout& layout) {
  bool is_strided = false;
  bool is_in_mesh_order = true;
  for (const std::vector<Cut>& list : layout.cuts()) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].rule.is_strided_or_chunks()) return false;
      is_strided = is_strided || !list[i].rule.is_chunks();
      is_in_mesh_order = is_in_mesh_order && (i == 0 || list[i - 1].mesh_dim < list[i].mesh_dim);
    }
  }
  if (layout.flattened() > 1 || (is_strided && !is_in_mesh_order)) return false;
  return (is_in_mesh_order && !is_strided) || layout.has_equal_parts();
}

std::variant<Layout, NoView> dtensor_view_of(const Layout& layout, const std::vector<int64_t>& shape) {
  auto found = view_of(layout, shape);
  const auto* view = std::get_if<Layout>(&found);
  if (view == nullptr || (view->mesh() == layout.mesh() && is_known_to_dtensor(*view))) return found;
  return NoView{concat("the view would be ", *view, ", which DTensor cannot express"), layout.cut_dims(), *view};
}

Layout permuted(const Layout& layout, const std::vector<int64_t>& dims) {
  const std::vector<int64_t> shape = layout.tensor_shape();
  const auto ndim = static_cast<int64_t>(shape.size());
  std::vector<int64_t> normal = dims;
  for (int64_t& d : normal) d = d < 0 ? d + ndim : d;
  std::vector<int64_t> sorted = normal;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> all(shape.size());
  std::iota(all.begin(), all.end(), 0);
  if (sorted != all) throw UserError(concat("dims must be a permutation of (", join(all), "), got (", join(dims), ")"));
  const int64_t flattened = layout.flattened();
  for (int64_t i = 0; i < flattened && flattened > 1; ++i) {
    if (normal[i] == i) continue;
    throw UserError(concat("dims must begin with the ", flattened, " flattened dims in their order, got (", join(dims),
                           ") for ", layout));
  }
  Result result;
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < ndim; ++i) {
    sizes.push_back(shape[normal[i]]);
    if (i > 0 && i < flattened) continue;
    const int64_t from = flattened == 1 ? normal[i] : std::max(normal[i] - flattened + 1, int64_t{0});
    result.cuts.emplace_back();
    for (const Cut& c : layout.cuts(static_cast<int>(from))) result.cuts.back().push_back({c.mesh_dim, 0, c.rule});
  }
  std::vector<int> begins(layout.mesh().ndim());
  std::iota(begins.begin(), begins.end(), 0);
  return assembled(layout, sizes, layout.flattened(), result, layout.mesh_ptr(), begins);
}

}  // namespace shardwright
