#include "exchange/digits.h"

#include <algorithm>

#include "exchange/known_parts.h"

namespace shardwright {

std::optional<std::vector<Digit>> digits_of(const Mesh& mesh, int64_t n, std::span<const Cut> cuts) {
  std::vector<Digit> digits;  // largest weight first
  digits.reserve(cuts.size());
  int64_t left = n;
  for (const Cut& c : cuts) {
    const int64_t k = mesh.dim_size(c.mesh_dim);
    const std::optional<int64_t> split_factor = c.rule.equal_split_factor(left, k);
    if (left == 0 || !split_factor) return std::nullopt;
    // `weight` is first the weight in the list that the earlier cuts left. The loop turns it into the weight in an
    // index of the tensor dim: it multiplies the weight by the radix of each fixed digit below the new one.
    int64_t weight = left / (*split_factor * k);
    size_t at = digits.size();
    for (; at > 0; --at) {
      const Digit& fixed = digits[at - 1];
      if (fixed.weight > weight) {
        if (fixed.weight % (weight * k) != 0) return std::nullopt;
        break;
      }
      if (weight % fixed.weight != 0) return std::nullopt;
      weight *= fixed.radix;
    }
    digits.insert(digits.begin() + static_cast<int64_t>(at), {weight, k, c.mesh_dim});
    left /= k;
  }
  return digits;
}

// The ends of the digits of both lists divide the index into common digits.
std::optional<Matching> Matching::of(int64_t n, std::span<const Digit> before, std::span<const Digit> after) {
  std::array<int64_t, 2 * kMaxDigits> ends;
  if (2 * (before.size() + after.size()) > ends.size()) return std::nullopt;
  size_t num_ends = 0;  // ends are in ascending order, without duplicates
  const auto add_end = [&](int64_t end) {
    size_t at = num_ends;
    while (at > 0 && ends[at - 1] > end) --at;
    if (at > 0 && ends[at - 1] == end) return;
    std::copy_backward(ends.begin() + at, ends.begin() + num_ends, ends.begin() + num_ends + 1);
    ends[at] = end;
    ++num_ends;
  };
  for (const std::span<const Digit> digits : {before, after}) {
    for (size_t i = digits.size(); i-- > 0;) {
      add_end(digits[i].weight);
      add_end(digits[i].weight * digits[i].radix);
    }
  }

  Matching matching;
  matching.elements_per_overlap_ = n;
  for (size_t i = 0; i + 1 < num_ends; ++i) {
    if (ends[i + 1] % ends[i] != 0) return std::nullopt;
    const auto owner = [&](std::span<const Digit> digits) {
      for (const Digit& digit : digits) {
        if (digit.weight <= ends[i] && ends[i + 1] <= digit.weight * digit.radix) {
          return Owner{digit.mesh_dim, ends[i] / digit.weight};
        }
      }
      return Owner();
    };
    const Common common{ends[i + 1] / ends[i], owner(before), owner(after)};
    if (common.before.mesh_dim < 0 && common.after.mesh_dim < 0) continue;
    if (matching.count_ == kMaxDigits) return std::nullopt;
    matching.digits_[matching.count_++] = common;
    matching.elements_per_overlap_ /= common.radix;
  }
  return matching;
}

bool Matching::Common::agrees_at(const Mesh& mesh, int64_t position) const {
  return !is_tie() || before.value_at(mesh, position, radix) == after.value_at(mesh, position, radix);
}

std::optional<Matching> Matching::of_cuts(const Mesh& mesh, int64_t n, std::span<const Cut> before,
                                          std::span<const Cut> after) {
  const auto digits_before = digits_of(mesh, n, before);
  const auto digits_after = digits_before ? digits_of(mesh, n, after) : std::nullopt;
  return digits_after ? of(n, *digits_before, *digits_after) : std::nullopt;
}

int64_t Matching::sources() const {
  int64_t sources = 1;
  for (const Common& digit : digits()) sources *= digit.after.mesh_dim < 0 ? digit.radix : 1;
  return sources;
}

MeshDimSet Matching::tied_dims() const {
  MeshDimSet dims;
  for (const Common& digit : digits()) {
    if (!digit.is_tie()) continue;
    dims.insert(digit.before.mesh_dim);
    dims.insert(digit.after.mesh_dim);
  }
  return dims;
}

bool Matching::agrees_at(const Mesh& mesh, int64_t position) const {
  return std::all_of(digits().begin(), digits().end(),
                     [&](const Common& digit) { return digit.agrees_at(mesh, position); });
}

namespace {

// Maximum number of combinations of coordinates that sum_by_coordinates() visits one by one.
constexpr int64_t kMaxCombinations = int64_t{1} << 12;

// Returns the sum over all ranks of the elements that a rank holds in both layouts. Tensor dims are *coupled* if one
// mesh dim cuts both. Sums of uncoupled tensor dims multiply, so each set of coupled dims is visited by itself: all
// combinations of coordinates on the mesh dims that cut them. Returns nullopt if a set has more than kMaxCombinations.
std::optional<int64_t> sum_by_coordinates(const Layout& a, const Layout& b) {
  const Mesh& mesh = a.mesh();
  std::vector<MeshDimSet> cutting(a.ndim());
  for (int t = 0; t < a.ndim(); ++t) {
    cutting[t] = dims_of(a.cuts(t)) | dims_of(b.cuts(t));
    // Equal cuts into equal parts at the beginning of both lists do not change the number of common elements.
    int64_t n = a.shape()[t];
    for (size_t i = 0; i < std::min(a.cuts(t).size(), b.cuts(t).size()) && a.cuts(t)[i] == b.cuts(t)[i]; ++i) {
      const int64_t k = mesh.dim_size(a.cuts(t)[i].mesh_dim);
      if (!a.cuts(t)[i].rule.is_chunks() || n % k != 0) break;
      n /= k;
      cutting[t].erase(a.cuts(t)[i].mesh_dim);
    }
  }
  KnownParts parts_of_a(a);
  KnownParts parts_of_b(b);
  int64_t total = 1;
  MeshDimSet seen;
  std::vector<bool> done(a.ndim(), false);
  for (int first = 0; first < a.ndim(); ++first) {
    if (done[first]) continue;
    std::vector<int> coupled{first};
    MeshDimSet dims = cutting[first];
    done[first] = true;
    for (bool grew = true; grew;) {
      grew = false;
      for (int t = 0; t < a.ndim(); ++t) {
        if (done[t] || (cutting[t] & dims).empty()) continue;
        coupled.push_back(t);
        dims = dims | cutting[t];
        done[t] = grew = true;
      }
    }
    if (mesh.group_size(dims) > kMaxCombinations) return std::nullopt;
    int64_t sum = 0;
    for (const int64_t position : mesh.group(0, dims)) {
      int64_t shared = 1;
      for (const int t : coupled) {
        shared *= intersection_length(parts_of_a.at(t, position).list, parts_of_b.at(t, position).list);
      }
      sum += shared;
    }
    total *= sum;
    seen = seen | dims;
  }
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (!seen.contains(d)) total *= mesh.dim_size(d);
  }
  return total;
}

// A set of ties, and the fraction of the mesh's ranks that satisfy all of them. Parts of coordinates that must be equal
// have one common value. Example: the ties a == b, b == c and a == c, of radix 4, leave 4 of 64 combinations: each of
// the first two ties multiplies the denominator of the fraction by 4, and the third follows from them.
class Ties {
 public:
  // Adds a tie. Returns false if it compares a part of a coordinate that overlaps a part of an earlier tie without
  // being the same part: then no closed form exists.
  bool add(const Matching::Common& digit) {
    const std::optional<size_t> before = find_or_add(digit.before, digit.radix);
    const std::optional<size_t> after = find_or_add(digit.after, digit.radix);
    if (!before || !after) return false;
    if (root(*before) != root(*after)) {
      parts_[root(*before)].parent = root(*after);
      denominator_ *= digit.radix;
    }
    return true;
  }

  // The ranks that satisfy all ties are 1 / denominator() of the mesh.
  int64_t denominator() const { return denominator_; }

 private:
  // A part of a coordinate. Parts that must be equal form a tree (union-find).
  struct Part {
    Matching::Owner owner;
    int64_t radix;
    size_t parent;  // index in parts_; a root is its own parent
  };

  // Returns the index of a part, which is added if it is new; nullopt if it overlaps a known part without being equal.
  std::optional<size_t> find_or_add(const Matching::Owner& owner, int64_t radix) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      if (part.owner == owner && part.radix == radix) return i;
      const bool is_disjoint = part.owner.mesh_dim != owner.mesh_dim ||
                               part.owner.divisor % (owner.divisor * radix) == 0 ||
                               owner.divisor % (part.owner.divisor * part.radix) == 0;
      if (!is_disjoint) return std::nullopt;
    }
    parts_.push_back({owner, radix, parts_.size()});
    return parts_.size() - 1;
  }

  // Returns the root of a part's tree. Parts with one root must be equal.
  size_t root(size_t part) const {
    while (parts_[part].parent != part) part = parts_[part].parent;
    return part;
  }

  std::vector<Part> parts_;
  int64_t denominator_ = 1;
};

}  // namespace

SharedElements::SharedElements(const Layout& before, const Layout& after) : before_(before), after_(after) {
  if (before.is_restricted() || after.is_restricted()) return;
  const Mesh& mesh = before.mesh();
  for (int t = 0; t < before.ndim(); ++t) {
    const auto matching = Matching::of_cuts(mesh, before.shape()[t], before.cuts(t), after.cuts(t));
    if (!matching) {
      matchings_.clear();
      return;
    }
    matchings_.push_back(*matching);
  }
}

int64_t SharedElements::at(int64_t position) const {
  if (matchings_.empty()) return shared_elements(before_.region(position), after_.region(position));
  int64_t shared = 1;
  for (const Matching& matching : matchings_) {
    if (!matching.agrees_at(before_.mesh(), position)) return 0;
    shared *= matching.elements_per_overlap();
  }
  return shared;
}

MeshDimSet SharedElements::varying_dims() const {
  if (matchings_.empty()) return MeshDimSet::from_bits(~0u);
  MeshDimSet dims;
  for (const Matching& matching : matchings_) dims = dims | matching.tied_dims();
  return dims;
}

std::optional<int64_t> SharedElements::sum() const {
  Ties ties;
  int64_t shared = 1;
  bool has_closed_form = !matchings_.empty();
  for (const Matching& matching : matchings_) {
    shared *= matching.elements_per_overlap();
    for (const Matching::Common& digit : matching.digits()) {
      if (!digit.is_tie()) continue;
      has_closed_form = has_closed_form && ties.add(digit);
    }
  }
  if (!has_closed_form) return sum_by_coordinates(before_, after_);
  return shared * (before_.mesh().size() / ties.denominator());
}

}  // namespace shardwright
