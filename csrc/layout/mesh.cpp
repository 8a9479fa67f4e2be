#include "layout/mesh.h"

#include <algorithm>
#include <set>

#include "support/error.h"
#include "support/utf8.h"

namespace shardwright {

std::vector<int> MeshDimSet::to_vector() const {
  std::vector<int> mesh_dims;
  mesh_dims.reserve(count());
  for (uint32_t left = bits_; left != 0; left &= left - 1) mesh_dims.push_back(std::countr_zero(left));
  return mesh_dims;
}

Mesh::Mesh(std::vector<std::string> dim_names, std::vector<int64_t> dim_sizes, const std::vector<int64_t>& ranks,
           std::shared_ptr<const Topology> topology)
    : dim_names_(std::move(dim_names)), dim_sizes_(std::move(dim_sizes)), topology_(std::move(topology)) {
  check_user(!dim_sizes_.empty(), "mesh must have at least one dim, got none");
  check_user(ndim() <= MeshDimSet::kMaxDims, "mesh must have at most ", MeshDimSet::kMaxDims, " dims, got ", ndim());
  check_user(dim_names_.size() == dim_sizes_.size(), "mesh: number of dim names must be ", dim_sizes_.size(),
             ", one per dim, got ", dim_names_.size());
  for (const std::string& name : dim_names_) check_utf8(name, "mesh: dim name");
  const std::set<std::string> distinct(dim_names_.begin(), dim_names_.end());
  if (distinct.size() != dim_names_.size() || distinct.count("") > 0) {
    throw UserError(concat("mesh: dim names must be distinct and not empty, got ('", join(dim_names_, "', '"), "')"));
  }

  strides_.assign(ndim(), 1);
  for (int d = ndim() - 1; d >= 0; --d) {
    check_user(dim_sizes_[d] >= 1, "mesh: size of dim '", dim_names_[d], "' must be at least 1, got ", dim_sizes_[d]);
    strides_[d] = size_;
    if (size_ > kMaxSize / dim_sizes_[d]) {
      throw UserError(concat("mesh must have at most ", kMaxSize, " ranks, got sizes (", join(dim_sizes_), ")"));
    }
    size_ *= dim_sizes_[d];
  }

  if (ranks.empty()) return;
  check_user(static_cast<int64_t>(ranks.size()) == size_, "mesh: number of ranks must be ", size_,
             ", one per position of ", *this, ", got ", ranks.size());
  bool is_iota = true;
  for (int64_t p = 0; p < size_; ++p) {
    check_argument(ranks[p] >= 0, "mesh: ranks", "at least 0", ranks[p], " at position ", p);
    const bool is_new = position_of_rank_.emplace(Rank{ranks[p]}, Position{p}).second;
    check_argument(is_new, "mesh: ranks", "distinct", ranks[p], " twice");
    ranks_ascend_ = ranks_ascend_ && (p == 0 || ranks[p] > ranks[p - 1]);
    is_iota = is_iota && ranks[p] == p;
    ranks_.push_back(Rank{ranks[p]});
  }
  if (!is_iota) return;
  ranks_.clear();
  position_of_rank_.clear();
}

int64_t Mesh::group_size(MeshDimSet mesh_dims) const {
  int64_t size = 1;
  for (int d = 0; d < ndim(); ++d) {
    if (mesh_dims.contains(d)) size *= dim_sizes_[d];
  }
  return size;
}

std::vector<Rank> Mesh::ranks() const {
  if (!ranks_.empty()) return ranks_;
  std::vector<Rank> all;
  all.reserve(size_);
  for (int64_t p = 0; p < size_; ++p) all.push_back(Rank{p});
  return all;
}

std::vector<Rank> Mesh::ranks_at(const std::vector<int64_t>& positions) const {
  std::vector<Rank> all;
  all.reserve(positions.size());
  for (const int64_t position : positions) all.push_back(rank_at(Position{position}));
  return all;
}

std::optional<Position> Mesh::position_of(Rank rank) const {
  if (ranks_.empty()) {
    const bool is_there = to_int(rank) >= 0 && to_int(rank) < size_;
    return is_there ? std::optional<Position>(Position{to_int(rank)}) : std::nullopt;
  }
  const int64_t from_first = to_int(rank) - to_int(ranks_.front());  // the position if ranks are consecutive
  if (from_first >= 0 && from_first < size_ && ranks_[from_first] == rank) return Position{from_first};
  const auto found = position_of_rank_.find(rank);
  return found == position_of_rank_.end() ? std::nullopt : std::optional<Position>(found->second);
}

std::vector<int64_t> Mesh::coordinates(int64_t position) const {
  std::vector<int64_t> coordinates(ndim());
  for (int d = 0; d < ndim(); ++d) coordinates[d] = coordinate(position, d);
  return coordinates;
}

// Begins with the member whose coordinates on `mesh_dims` are 0, and adds the other coordinates mesh dim by mesh dim.
std::vector<int64_t> Mesh::group(int64_t position, MeshDimSet mesh_dims) const {
  std::vector<int64_t> members{position};
  for (int d = 0; d < ndim(); ++d) {
    if (mesh_dims.contains(d)) members[0] -= coordinate(position, d) * strides_[d];
  }
  for (int d = 0; d < ndim(); ++d) {
    if (!mesh_dims.contains(d)) continue;
    std::vector<int64_t> wider;
    wider.reserve(members.size() * dim_sizes_[d]);
    for (const int64_t member : members) {
      for (int64_t c = 0; c < dim_sizes_[d]; ++c) wider.push_back(member + c * strides_[d]);
    }
    members = std::move(wider);
  }
  if (!ranks_ascend_) {
    std::sort(members.begin(), members.end(), [this](int64_t a, int64_t b) { return ranks_[a] < ranks_[b]; });
  }
  return members;
}

std::string Mesh::to_string() const {
  std::vector<std::string> parts;
  for (int d = 0; d < ndim(); ++d) parts.push_back(concat(dim_names_[d], "=", dim_sizes_[d]));
  return join(parts, ",");
}

std::string Mesh::names_of(MeshDimSet mesh_dims) const {
  std::vector<std::string> names;
  for (int d = 0; d < ndim(); ++d) {
    if (mesh_dims.contains(d)) names.push_back(dim_names_[d]);
  }
  return join(names, "+");
}

std::vector<Rank> ranks_of(const Mesh& a, const Mesh& b) {
  std::vector<Rank> ranks = a.ranks();
  if (&a != &b) {
    const std::vector<Rank> others = b.ranks();
    ranks.insert(ranks.end(), others.begin(), others.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

bool Mesh::operator==(const Mesh& other) const {
  if (this == &other) return true;
  if (dim_names_ != other.dim_names_ || dim_sizes_ != other.dim_sizes_) return false;
  return ranks_ == other.ranks_;
}

}  // namespace shardwright
