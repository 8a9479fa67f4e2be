// Schedules as text and as JSON, by use.
#include <algorithm>
#include <map>
#include <set>

#include "planning/json.h"
#include "schedule/lanes.h"
#include "schedule/schedule.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward";
    case Pass::kRecompute:
      return "recompute";
    case Pass::kBackward:
      return "backward";
  }
  throw InvariantError("a schedule has a pass that is not forward, recompute or backward");
}

Pass parse_pass(const std::string& name) {
  for (const Pass pass : {Pass::kForward, Pass::kRecompute, Pass::kBackward}) {
    if (name == pass_name(pass)) return pass;
  }
  throw UserError(concat("pass must be one of forward, recompute, backward, got '", name, "'"));
}

namespace {

// Returns the indices of the items that satisfy a condition.
template <typename Items, typename Condition>
std::vector<int> indices(const Items& items, const Condition& condition) {
  std::vector<int> matching;
  for (size_t i = 0; i < items.size(); ++i) {
    if (condition(items[i])) matching.push_back(static_cast<int>(i));
  }
  return matching;
}

// Returns the names of the weights of the chosen items (gathers or reductions, by index), as "a, b".
template <typename Items>
std::string names(const StepSchedule& s, const Items& items, const std::vector<int>& chosen) {
  std::vector<std::string> weight_names;
  for (const int i : chosen) weight_names.push_back(s.weights[items[i].weight].name);
  return join(weight_names);
}

// Returns the names of weights, as "a, b".
std::string names(const StepSchedule& s, const std::vector<int>& weights) {
  std::vector<std::string> weight_names;
  for (const int w : weights) weight_names.push_back(s.weights[w].name);
  return join(weight_names);
}

// Returns the indices of the reductions that start after a use and are not in chunks.
std::vector<int> unchunked_reductions_after(const StepSchedule& s, int use) {
  return indices(s.reductions, [&](const Reduction& r) { return r.start == use && !r.in_chunks; });
}

// Returns the weights whose gradients are complete after a use, and whose chunks were all reduced in earlier uses.
std::vector<int> reduced_in_earlier_uses(const StepSchedule& s, int use) {
  const std::vector<ReducedWithin> reduced_here = s.reduced_within(use);
  std::vector<int> reduced;
  for (const int w : s.uses[use].in_chunks) {
    if (std::none_of(reduced_here.begin(), reduced_here.end(), [&](const ReducedWithin& r) { return r.weight == w; })) {
      reduced.push_back(w);
    }
  }
  return reduced;
}

// Returns true if `use` is the longest of the consecutive uses of a weight in one pass, or the first of equally long
// ones.
bool is_longest(const std::vector<Use>& uses, int use, int weight) {
  const auto is_in_run = [&](int i) {
    return 0 <= i && i < static_cast<int>(uses.size()) && uses[i].pass == uses[use].pass &&
           std::count(uses[i].weights.begin(), uses[i].weights.end(), weight) > 0;
  };
  for (int i = use - 1; is_in_run(i); --i) {
    if (uses[i].compute_ps >= uses[use].compute_ps) return false;
  }
  for (int i = use + 1; is_in_run(i); ++i) {
    if (uses[i].compute_ps > uses[use].compute_ps) return false;
  }
  return true;
}

// Returns the line of a use. `num_earlier` is the number of earlier uses with the same weights and pass.
std::string use_text(const StepSchedule& s, int use, int num_earlier) {
  const Use& u = s.uses[use];
  std::string line = concat(use, ". ", pass_name(u.pass), " ", u.weights.empty() ? "nothing" : names(s, u.weights));
  if (num_earlier > 0) line += concat(" (use ", num_earlier + 1, ")");
  const auto add = [&](const char* action, const std::string& objects) {
    if (!objects.empty()) line += concat("; ", action, " ", objects);
  };
  add("before: gather", names(s, s.gathers, s.gathers_before(use)));
  std::vector<int> started;
  for (size_t k = 0; k < s.activation_gathers.size(); ++k) {
    if (s.activation_gathers[k].start == use) started.push_back(static_cast<int>(k));
  }
  add("gather activations", join(started));
  std::vector<int> gathered;
  for (const int w : s.gathered_within(use)) gathered.push_back(s.weights[w].original);
  add("in chunks: gather", names(s, gathered));
  std::vector<int> reduced;
  for (const ReducedWithin& r : s.reduced_within(use)) reduced.push_back(r.weight);
  add("in chunks: reduce the gradient of", names(s, reduced));
  add("after: reduce the gradient of", names(s, s.reductions, unchunked_reductions_after(s, use)));
  add("after: reduce the rest of the gradient of", names(s, reduced_in_earlier_uses(s, use)));
  add("after: wait for the gradient of", names(s, s.reductions, s.reductions_finished_after(use)));
  std::vector<std::string> released;
  for (const int b : s.released_after(use)) {
    released.push_back(s.weights[s.buffers[b].weight].name + (s.buffers[b].is_kept_copy ? " (kept copy)" : ""));
  }
  add("after: release", join(released));
  return line;
}

// Returns the duration of the transfers of all chunks.
int64_t transfer_ps(const ChunkedReduction& reduction) {
  int64_t sum_ps = 0;
  for (const ReducingProduct& p : reduction.products) sum_ps += p.transfer_ps;
  return sum_ps;
}

std::string json_of(const Weight& w) {
  return concat("{\"name\": ", quoted(w.name), ", \"rest_bytes\": ", w.rest_bytes, ", \"use_bytes\": ", w.use_bytes,
                ", \"keep_bytes\": ", w.keep_bytes, ", \"gradient_bytes\": ", w.gradient_bytes,
                ", \"gather_ps\": ", w.gather_ps, ", \"reduce_ps\": ", w.reduce_ps, ", \"original\": ", w.original,
                ", \"gathered_in_chunks_ps\": ", w.chunks_ps, ", \"reduced_in_chunks_ps\": ", transfer_ps(w.in_chunks),
                ", \"fetch_ps\": ", w.fetch_ps, ", \"send_ps\": ", w.send_ps, "}");
}

std::string json_of(const Use& u) {
  return concat("{\"weights\": [", join(u.weights), "], \"pass\": \"", pass_name(u.pass), "\", \"gradients\": [",
                join(u.gradients), "], \"compute_ps\": ", u.compute_ps, ", \"in_chunks\": [", join(u.in_chunks), "]}");
}

std::string json_of(const WeightBuffer& b) {
  return concat("{\"weight\": ", b.weight, ", \"is_kept_copy\": ", b.is_kept_copy ? "true" : "false",
                ", \"first\": ", b.first, ", \"last\": ", b.last, ", \"size_bytes\": ", b.size_bytes,
                ", \"offset_bytes\": ", b.offset_bytes, "}");
}

std::string json_of(const Gather& g) {
  return concat("{\"weight\": ", g.weight, ", \"buffer\": ", g.buffer, ", \"start\": ", g.start,
                ", \"needed\": ", g.needed, ", \"from_copy\": ", g.from_copy ? "true" : "false", "}");
}

std::string json_of(const Activation& a) {
  return concat("{\"name\": ", quoted(a.name), ", \"kept_bytes\": ", a.kept_bytes, ", \"bytes\": ", a.bytes,
                ", \"gather_ps\": ", a.gather_ps, ", \"saved\": ", a.saved, ", \"first\": ", a.first,
                ", \"last\": ", a.last, ", \"until\": ", a.until, "}");
}

std::string json_of(const ActivationGather& g) {
  return concat("{\"start\": ", g.start, ", \"trigger\": ", g.trigger, "}");
}

std::string json_of(const Reduction& r) {
  return concat("{\"weight\": ", r.weight, ", \"first\": ", r.first, ", \"start\": ", r.start,
                ", \"finish\": ", r.finish, ", \"in_chunks\": ", r.in_chunks ? "true" : "false", "}");
}

// Returns a JSON member: a list with one item per line.
template <typename Items>
std::string json_list(const char* name, const Items& items) {
  std::vector<std::string> lines;
  for (const auto& item : items) lines.push_back("    " + json_of(item));
  return concat("  \"", name, "\": [", lines.empty() ? "" : "\n", join(lines, ",\n"), lines.empty() ? "]" : "\n  ]");
}

}  // namespace

std::vector<int> StepSchedule::gathers_before(int use) const {
  return indices(gathers, [&](const Gather& g) { return g.start == use; });
}

std::vector<int> StepSchedule::released_after(int use) const {
  return indices(buffers, [&](const WeightBuffer& b) { return b.last == use; });
}

std::vector<int> StepSchedule::reductions_started_after(int use) const {
  return indices(reductions, [&](const Reduction& r) { return r.start == use; });
}

std::vector<int> StepSchedule::reductions_finished_after(int use) const {
  return indices(reductions, [&](const Reduction& r) { return r.finish == use; });
}

std::vector<int> StepSchedule::gathered_within(int use) const {
  std::vector<int> gathered;
  for (const int w : uses[use].weights) {
    if (weights[w].chunks_ps > 0 && is_longest(uses, use, w)) gathered.push_back(w);
  }
  return gathered;
}

std::vector<ReducedWithin> StepSchedule::reduced_within(int use) const {
  std::vector<ReducedWithin> reduced;
  for (const Reduction& r : reductions) {
    if (!r.in_chunks || use < r.first || r.start < use) continue;
    ReducedWithin all{r.weight, 0, 0};
    for (const ReducingProduct& p : weights[r.weight].in_chunks.products) {
      if ((p.use < 0 ? r.start : p.use) != use) continue;
      all.transfer_ps += p.transfer_ps;
      all.last_chunk_ps = std::max(all.last_chunk_ps, p.last_chunk_ps);
    }
    if (all.transfer_ps > 0) reduced.push_back(all);
  }
  return reduced;
}

std::string to_text(const StepSchedule& s) {
  std::vector<std::string> lines;
  std::map<std::pair<std::vector<int>, Pass>, int> numbers;
  for (int i = 0; i < static_cast<int>(s.uses.size()); ++i) {
    lines.push_back(use_text(s, i, numbers[{s.uses[i].weights, s.uses[i].pass}]++));
  }
  const std::vector<Activation>& activations = s.options.activations;
  std::set<int> used;
  for (const Use& use : s.uses) used.insert(use.weights.begin(), use.weights.end());
  const auto count = [](size_t n, const char* noun) { return count_text(static_cast<int64_t>(n), noun); };
  lines.push_back(concat(count(s.uses.size(), "use"), " of ", count(used.size(), "weight"), ", ",
                         count(s.gathers.size(), "gather"), ", ", count(s.reductions.size(), "reduction"),
                         activations.empty() ? "" : concat(", ", count(activations.size(), "activation"))));
  lines.push_back(concat("peak ", bytes_text(s.peak_bytes()), ": arena ", bytes_text(s.arena_bytes), " of which ",
                         bytes_text(s.live_buffer_bytes), " are in use at a time, gradients ",
                         bytes_text(s.peak_gradient_bytes),
                         activations.empty() ? "" : concat(", activations ", bytes_text(s.peak_activation_bytes)),
                         s.options.held_bytes > 0 ? concat(", held ", bytes_text(s.options.held_bytes)) : "",
                         s.options.budget_bytes ? concat("; budget ", bytes_text(*s.options.budget_bytes)) : ""));
  for (const WeightBuffer& b : s.buffers) {
    lines.push_back(concat("  ", s.weights[b.weight].name, b.is_kept_copy ? " (kept copy)" : "", " in uses ", b.first,
                           " to ", b.last, ": ", bytes_text(b.size_bytes), " at ", b.offset_bytes));
  }
  for (size_t k = 0; k < activations.size(); ++k) {
    const Activation& a = activations[k];
    lines.push_back(concat("  activation ", k, ", ", a.name, " of use ", a.saved, ", in uses ", a.first, " to ", a.last,
                           ": ", bytes_text(a.bytes), ", of which ", bytes_text(a.kept_bytes), " are kept"));
  }
  return join(lines, "\n") + "\n" + (has_times(s) ? lanes_text(s) : "");
}

std::string to_json(const StepSchedule& s) {
  const std::string budget = s.options.budget_bytes ? std::to_string(*s.options.budget_bytes) : "null";
  const std::vector<std::string> fields{
      "  \"version\": 2",
      json_list("weights", s.weights),
      json_list("uses", s.uses),
      concat("  \"budget_bytes\": ", budget),
      concat("  \"prefetch\": ", s.options.prefetch),
      concat("  \"alignment_bytes\": ", s.options.alignment_bytes),
      concat("  \"held_bytes\": ", s.options.held_bytes),
      concat("  \"gather_until\": [", join(s.options.gather_until), "]"),
      json_list("buffers", s.buffers),
      json_list("gathers", s.gathers),
      json_list("reductions", s.reductions),
      json_list("activations", s.options.activations),
      concat("  \"activations_ahead\": ", s.options.activations_ahead),
      json_list("activation_gathers", s.activation_gathers),
      concat("  \"arena_bytes\": ", s.arena_bytes),
      concat("  \"live_buffer_bytes\": ", s.live_buffer_bytes),
      concat("  \"peak_gradient_bytes\": ", s.peak_gradient_bytes),
      concat("  \"peak_activation_bytes\": ", s.peak_activation_bytes),
      concat("  \"peak_bytes\": ", s.peak_bytes()),
      concat("  \"predicted_ps\": ", has_times(s) ? std::to_string(predict(s).total_ps) : "null"),
  };
  return "{\n" + join(fields, ",\n") + "\n}\n";
}

}  // namespace shardwright
