// Products of placed tensors and their possible schedules, for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "products/matmul.h"
#include "support/error.h"

namespace shardwright {

inline MeshPtr mesh_of(std::vector<int64_t> sizes) {
  std::vector<std::string> names;
  for (size_t d = 0; d < sizes.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  return std::make_shared<Mesh>(names, std::move(sizes));
}

inline Layout layout_on(const MeshPtr& mesh, std::vector<int64_t> shape, const std::vector<std::string>& placements,
                        const char* dtype = "float32") {
  std::vector<Placement> parsed;
  for (const std::string& placement : placements) parsed.push_back(Placement::parse(placement));
  return Layout(mesh, std::move(shape), DType::parse(dtype), parsed);
}

// Returns every method with several numbers of chunks and several depths.
inline std::vector<Schedule> schedules(const Matmul& matmul) {
  std::vector<Schedule> all{{Method::kSerial, 1}};
  if (why_only_serial(matmul)) return all;
  const int64_t k = num_partners(matmul);
  const bool all_reduces = !has_ring(matmul);
  for (const int64_t chunks : {int64_t{1}, int64_t{2}, int64_t{3}, k, 2 * k}) {
    if (!all_reduces) all.push_back({Method::kRing, chunks});
    all.push_back({Method::kCollective, chunks});
  }
  all.push_back({.method = Method::kCollective, .chunks = 5, .depth = 2});
  all.push_back({.method = Method::kCollective, .chunks = 3, .depth = kMaxChunks});
  if (all_reduces) return all;
  all.push_back({.method = Method::kRing, .chunks = 2 * k, .depth = 3, .sms_left = 16});
  all.push_back({.method = Method::kRing, .chunks = k, .depth = k});
  // Custom distances: the farthest first, then all others together.
  Schedule backwards{Method::kRing, k, {}};
  backwards.depth = 2;
  Schedule together{Method::kRing, 3, {{}, {k - 1}}};
  for (int64_t d = k - 1; d > 0; --d) backwards.distances.push_back({d});
  for (int64_t d = 1; d < k - 1; ++d) together.distances[0].push_back(d);
  if (k > 1) all.push_back(backwards);
  if (k > 2) all.push_back(together);
  return all;
}

// A random product: axes in any order, cut by any mesh dims, with tensors moved from or to any layout.
class RandomProduct {
 public:
  explicit RandomProduct(unsigned seed) : random_(seed) {
    std::vector<int64_t> mesh_sizes;
    for (int64_t d = 0, dims = pick(1, 2); d < dims; ++d) mesh_sizes.push_back(pick(1, dims == 1 ? 4 : 3));
    mesh_ = mesh_of(mesh_sizes);
    // Two or so of the axes a to f are free in lhs, one or two are free in rhs, and one or two are summed.
    std::string lhs;
    std::string rhs;
    std::string out;
    char letter = 'a';
    for (int64_t i = 0, n = pick(1, 2); i < n; ++i, ++letter) add(letter, {&lhs, &out});
    for (int64_t i = 0, n = pick(1, 2); i < n; ++i, ++letter) add(letter, {&rhs, &out});
    for (int64_t i = 0, n = pick(1, 2); i < n; ++i, ++letter) add(letter, {&lhs, &rhs});
    for (std::string* letters : {&lhs, &rhs, &out}) std::shuffle(letters->begin(), letters->end(), random_);
    text = lhs + "," + rhs + "->" + out;
    for (size_t d = 0; d < mesh_sizes.size(); ++d) {
      // This mesh dim cuts the product along one axis, or along none.
      const int64_t axis = pick(-1, static_cast<int64_t>(sizes_.size()) - 1);
      cuts_.push_back(axis < 0 ? '-' : static_cast<char>('a' + axis));
    }
  }

  Layout lhs(const char* dtype) { return during(text.substr(0, text.find(',')), dtype); }
  Layout rhs(const char* dtype) {
    const size_t begin = text.find(',') + 1;
    return during(text.substr(begin, text.find('-') - begin), dtype);
  }
  Layout out(const char* dtype) { return during(text.substr(text.find('>') + 1), dtype, true); }

  // Returns the same tensor sharded in any other way, or replicated.
  Layout elsewhere(const Layout& layout) {
    std::vector<std::string> placements;
    for (size_t d = 0; d < cuts_.size(); ++d) {
      const int64_t dim = pick(-1, layout.ndim() - 1);
      placements.push_back(dim < 0 ? "R" : concat("S(", dim, ")"));
    }
    return layout_on(mesh_, layout.shape(), placements, layout.dtype().name().c_str());
  }

  std::string text;

 private:
  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  void add(char letter, std::initializer_list<std::string*> tensors) {
    for (std::string* letters : tensors) letters->push_back(letter);
    sizes_.push_back(pick(0, 9) == 0 ? 0 : pick(1, 5));
  }

  Layout during(const std::string& letters, const char* dtype, bool is_result = false) {
    std::vector<int64_t> shape;
    for (const char letter : letters) shape.push_back(sizes_[letter - 'a']);
    std::vector<std::string> placements;
    for (const char cut : cuts_) {
      const size_t dim = letters.find(cut);
      const bool is_due = is_result && cut != '-';
      placements.push_back(dim != std::string::npos ? concat("S(", dim, ")") : is_due ? "P" : "R");
    }
    return layout_on(mesh_, shape, placements, dtype);
  }

  std::mt19937 random_;
  MeshPtr mesh_;
  std::vector<int64_t> sizes_;  // by axis
  std::string cuts_;            // by mesh dim; '-': none
};

}  // namespace shardwright
