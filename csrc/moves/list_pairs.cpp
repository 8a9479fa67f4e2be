#include "moves/list_pairs.h"

#include <algorithm>
#include <utility>

#include "cost/cost.h"
#include "moves/spans.h"

namespace shardwright {
namespace {

// A pair without matching digits takes long if one of its lists has more pieces, over all ranks.
constexpr int64_t kMaxPiecesCompared = 4096;

}  // namespace

ListPair& ListPairs::add(int tensor_dim, int before, int after) {
  Table& table = tables_[tensor_dim];
  if (std::max(before, after) >= table.stride) {
    Table larger;
    larger.stride = static_cast<int>(lists_.size(tensor_dim));
    larger.pairs.resize(lists_.size(tensor_dim) * lists_.size(tensor_dim));
    for (int b = 0; b < table.stride; ++b) {
      std::copy_n(table.pairs.begin() + b * table.stride, table.stride, larger.pairs.begin() + b * larger.stride);
    }
    table = std::move(larger);
  }
  ListPair& pair =
      pairs_.emplace_back(compute(tensor_dim, lists_.at(tensor_dim, before), lists_.at(tensor_dim, after)));
  table.pairs[before * table.stride + after] = &pair;
  return pair;
}

ListPair ListPairs::compute(int tensor_dim, const CutList& before, const CutList& after) const {
  const int64_t n = layout_.shape()[tensor_dim];
  ListPair pair;
  if (before.digits && after.digits) {
    if (const std::optional<Matching> matching = Matching::of(n, *before.digits, *after.digits)) {
      const auto has = [](const CutList& list, const Digit& digit) {
        return std::find(list.digits->begin(), list.digits->end(), digit) != list.digits->end();
      };
      pair.subdivides = true;
      for (const Digit& digit : *before.digits) {
        if (has(after, digit)) continue;
        pair.spanned.insert(digit.mesh_dim);
        pair.subdivides = false;
      }
      for (const Digit& digit : *after.digits) {
        if (!has(before, digit)) pair.spanned.insert(digit.mesh_dim);
      }
      set_closed_form(pair, *matching);
      return pair;
    }
  }
  pair.takes_long = std::max(num_pieces(n, before), num_pieces(n, after)) > kMaxPiecesCompared;
  pair.spanned = spanned_dims(layout_.mesh(), n, before.cuts, after.cuts);
  return pair;
}

void ListPairs::set_closed_form(ListPair& pair, const Matching& matching) const {
  ClosedForm form;
  form.shared = form.shared_by_node = matching.elements_per_overlap();
  form.sources = matching.sources();
  for (const Matching::Common& digit : matching.digits()) {
    const int from = digit.before.mesh_dim;
    const int to = digit.after.mesh_dim;
    const bool is_between_before = from >= 0 && between_nodes_.contains(from);
    const bool is_between_after = to >= 0 && between_nodes_.contains(to);
    if (digit.is_tie()) {
      if (pair.ties.size() == kMaxTies) return;
      pair.ties.push_back({to, digit.radix});
      form.differs = true;
      if (is_between_before && is_between_after) form.differs_between_nodes = true;
    }
    if (!is_between_before && !is_between_after) form.shared_by_node *= digit.radix;
    if (to >= 0 && !is_between_after) form.needed_by_node *= digit.radix;
  }
  pair.closed_form = form;
}

bool ListPairs::subdivides(int tensor_dim, int before, int after) {
  at(tensor_dim, before, after);
  std::optional<bool>& known = tables_[tensor_dim].pairs[before * tables_[tensor_dim].stride + after]->subdivides;
  if (!known) {
    const CutList& a = lists_.at(tensor_dim, before);
    const CutList& b = lists_.at(tensor_dim, after);
    known = (a.dims - b.dims).empty() &&
            hold_same_elements(layout_.mesh(), layout_.shape()[tensor_dim], a.cuts, b.cuts, a.dims);
  }
  return *known;
}

int64_t ListPairs::num_pieces(int64_t n, const CutList& list) const {
  int64_t count = 1;
  bool is_strided = false;
  for (const Cut& c : list.cuts) {
    const int64_t k = layout_.mesh().dim_size(c.mesh_dim);
    is_strided = is_strided || !c.rule.makes_runs();
    count = saturating_product(count, saturating_product(c.rule.runs(n, k), k));
  }
  return is_strided ? count : 1;
}

}  // namespace shardwright
