// _planner: schedules of training steps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "picture/step.h"
#include "schedule/chunks.h"
#include "schedule/lanes.h"
#include "schedule/schedule.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// name, rest, use, keep and gradient bytes, times of a gather and of a reduction, and of copies from and to the host
using WeightParts = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
// products, each with times of all chunks and of one and its use; time of the rest, bytes of the gradient meanwhile
using ReductionParts = std::tuple<std::vector<std::tuple<int64_t, int64_t, int>>, int64_t, int64_t>;
// weight, bytes and time of what is gathered before, bytes of chunks, their time, their number, whether in backwards
// too, the reduction of the gradient
using FormParts = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, bool, ReductionParts>;
// weights, pass, weights whose gradients are complete, time of the compute
using UseParts = std::tuple<std::vector<int>, std::string, std::vector<int>, int64_t>;

// name; bytes kept and gathered, time of a gather; uses that save it, need it first and last; the turn of its last need
using ActivationParts = std::tuple<std::string, int64_t, int64_t, int64_t, int, int, int, int>;

std::vector<Activation> activations_of(const std::vector<ActivationParts>& parts) {
  std::vector<Activation> activations;
  for (const auto& [name, kept_bytes, bytes, gather_ps, saved, first, last, until] : parts) {
    activations.push_back({name, kept_bytes, bytes, gather_ps, saved, first, last, until});
  }
  return activations;
}

std::vector<Weight> weights_of(const std::vector<WeightParts>& parts) {
  std::vector<Weight> weights;
  for (const auto& [name, rest, use, keep, gradient, gather_ps, reduce_ps, fetch_ps, send_ps] : parts) {
    weights.push_back({name, rest, use, keep, gradient, gather_ps, reduce_ps, -1, 0, 0, {}, fetch_ps, send_ps});
  }
  return weights;
}

std::vector<Use> uses_of(const std::vector<UseParts>& parts) {
  std::vector<Use> uses;
  for (const auto& [weights, pass, gradients, compute_ps] : parts) {
    uses.push_back({weights, parse_pass(pass), gradients, compute_ps});
  }
  return uses;
}

StepSchedule schedule_of(const std::vector<WeightParts>& weights, const std::vector<UseParts>& uses,
                         std::optional<int64_t> budget_bytes, std::optional<int64_t> prefetch, int64_t alignment_bytes,
                         int64_t held_bytes, const std::vector<int>& gather_until, const std::vector<FormParts>& forms,
                         bool may_add_chunks, const std::vector<ActivationParts>& activations) {
  ScheduleOptions options{
      budget_bytes, prefetch.value_or(1), alignment_bytes, held_bytes, gather_until, activations_of(activations), 0};
  options.activations_ahead = activations_ahead_within(weights_of(weights), uses_of(uses), options);
  std::vector<ChunkedForm> chunked;
  for (const auto& [weight, use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, r] : forms) {
    ChunkedReduction reduction{{}, std::get<1>(r), std::get<2>(r)};
    for (const auto& [all_ps, last_ps, use] : std::get<0>(r)) reduction.products.push_back({all_ps, last_ps, use});
    chunked.push_back({weight, use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, reduction});
  }
  return schedule_with_chunks(weights_of(weights), uses_of(uses), chunked, {options, !prefetch, may_add_chunks});
}

using Span = std::pair<int64_t, int64_t>;

std::vector<Span> spans_of(const std::vector<LaneSpan>& spans) {
  std::vector<Span> all;
  for (const LaneSpan& span : spans) all.emplace_back(span.begin_ps, span.end_ps);
  return all;
}

std::optional<py::typing::Dict<py::str, py::object>> lanes_of(const StepSchedule& schedule) {
  if (!has_times(schedule)) return std::nullopt;
  const StepLanes lanes = predict(schedule);
  py::typing::Dict<py::str, py::object> found;
  found["uses"] = spans_of(lanes.uses);
  found["gathers"] = spans_of(lanes.gathers);
  found["reductions"] = spans_of(lanes.reductions);
  std::vector<std::tuple<int, int, bool, Span>> chunks;
  for (const ChunksSpan& c : lanes.chunks) {
    chunks.emplace_back(c.weight, c.use, c.is_reduction, Span(c.span.begin_ps, c.span.end_ps));
  }
  found["chunks"] = std::move(chunks);
  found["fetches"] = spans_of(lanes.fetches);
  found["sends"] = spans_of(lanes.sends);
  found["activations"] = spans_of(lanes.activations);
  found["copy_ps"] = lanes.copy_ps;
  found["compute_ps"] = lanes.compute_ps;
  found["transfer_ps"] = lanes.transfer_ps;
  found["total_ps"] = lanes.total_ps;
  return found;
}

void define_lists(py::class_<StepSchedule>& schedule) {
  schedule
      .def_property_readonly(
          "form_of",
          [](const StepSchedule& s) {
            std::vector<int> all;
            for (const Weight& w : s.weights) all.push_back(w.form_of);
            return all;
          },
          "By weight, those of `forms` that are used last: the weight that it is in chunks, or -1.")
      .def_property_readonly("prefetch", [](const StepSchedule& s) { return s.options.prefetch; })
      .def_property_readonly(
          "lanes", &lanes_of,
          "Begin and end in picoseconds of \"uses\", \"gathers\" and \"reductions\" as predicted; \"chunks\" within "
          "uses, each as weight, use, whether it is a reduction, and begin and end; \"fetches\" from the host by "
          "gather and \"sends\" to it by reduction; \"activations\"; \"compute_ps\", \"transfer_ps\", \"copy_ps\", "
          "\"total_ps\". None without times.")
      .def_property_readonly(
          "uses",
          [](const StepSchedule& s) {
            std::vector<UseParts> all;
            for (const Use& u : s.uses) {
              all.emplace_back(u.weights, pass_name(u.pass), u.gradients, u.compute_ps);
            }
            return all;
          },
          "Weights, pass, weights whose gradients are complete afterwards, and picoseconds of the compute or 0.");
}

void define_arena(py::class_<StepSchedule>& schedule) {
  schedule
      .def_property_readonly(
          "buffers",
          [](const StepSchedule& s) {
            std::vector<std::tuple<int, bool, int, int, int64_t, int64_t>> all;
            for (const WeightBuffer& b : s.buffers) {
              all.emplace_back(b.weight, b.is_kept_copy, b.first, b.last, b.size_bytes, b.offset_bytes);
            }
            return all;
          },
          "Weight, whether it is a kept copy, first and last use, size and offset in bytes.")
      .def_property_readonly(
          "gathers",
          [](const StepSchedule& s) {
            std::vector<std::tuple<int, int, int, int, bool>> all;
            for (const Gather& g : s.gathers) {
              all.emplace_back(g.weight, g.buffer, g.start, g.needed, g.from_copy);
            }
            return all;
          },
          "Weight, buffer, the use before which it starts, the use that needs it, whether it is from the kept copy.")
      .def_property_readonly(
          "chunk_gathers",
          [](const StepSchedule& s) {
            std::vector<std::pair<int, int>> all;
            for (int use = 0; use < static_cast<int>(s.uses.size()); ++use) {
              for (const int w : s.gathered_within(use)) all.emplace_back(s.weights[w].form_of, use);
            }
            return all;
          },
          "Weight, and a use within which all its chunks are gathered; what is not in chunks is one of `gathers`.")
      .def_property_readonly(
          "reductions",
          [](const StepSchedule& s) {
            std::vector<std::tuple<int, int, int, int, bool>> all;
            for (const Reduction& r : s.reductions) {
              all.emplace_back(r.weight, r.first, r.start, r.finish, r.in_chunks);
            }
            return all;
          },
          "Weight; the uses from which its gradient exists, after which it is reduced, and after which that is done; "
          "whether in chunks within these uses, all but what is not in chunks.");
}

void define_figures(py::class_<StepSchedule>& schedule) {
  schedule
      .def(
          "to_svg", [](const StepSchedule& s) { return to_svg(s); },
          "The step as a standalone picture: compute, transfers, and what lies where in the arena.")
      .def_readonly("arena_bytes", &StepSchedule::arena_bytes)
      .def_readonly("live_buffer_bytes", &StepSchedule::live_buffer_bytes)
      .def_readonly("peak_gradient_bytes", &StepSchedule::peak_gradient_bytes)
      .def_readonly("peak_activation_bytes", &StepSchedule::peak_activation_bytes)
      .def_property_readonly("activations",
                             [](const StepSchedule& s) {
                               std::vector<ActivationParts> all;
                               for (const Activation& a : s.options.activations) {
                                 all.emplace_back(a.name, a.kept_bytes, a.bytes, a.gather_ps, a.saved, a.first, a.last,
                                                  a.until);
                               }
                               return all;
                             })
      .def_property_readonly(
          "activation_gathers",
          [](const StepSchedule& s) {
            std::vector<std::pair<int, int>> all;
            for (const ActivationGather& g : s.activation_gathers) {
              all.emplace_back(g.start, g.trigger);
            }
            return all;
          },
          "By activation: the use in which its gather starts, and the activation in whose turn; -1: before the use.")
      .def_property_readonly("peak_bytes", &StepSchedule::peak_bytes)
      .def("to_json", [](const StepSchedule& s) { return to_json(s); })
      .def("__str__", [](const StepSchedule& s) { return to_text(s); });
}

}  // namespace

void define_step_schedule(py::module_& m) {
  py::class_<StepSchedule> schedule(
      m, "StepSchedule",
      "When weights are gathered, kept and released within a training step; see csrc/schedule/schedule.h.");
  schedule.def(py::init(&schedule_of), py::arg("weights"), py::arg("uses"), py::kw_only(),
               py::arg("budget_bytes") = std::nullopt, py::arg("prefetch") = std::optional(ScheduleOptions{}.prefetch),
               py::arg("alignment_bytes") = ScheduleOptions{}.alignment_bytes,
               py::arg("held_bytes") = ScheduleOptions{}.held_bytes,
               py::arg("gather_until") = ScheduleOptions{}.gather_until, py::arg("forms") = std::vector<FormParts>{},
               py::arg("may_add_chunks") = false, py::arg("activations") = std::vector<ActivationParts>{},
               R"(Plans a step.

Args:
    weights: name; bytes at rest, in use, kept from first to last use, and of the gradient; picoseconds of a
        gather and of a reduction, and of the copies from and to the host that belong to them, or 0.
    uses: weights that are needed, by index; "forward", "recompute" or "backward"; weights whose gradients are
        complete afterwards; picoseconds of the compute, or 0.
    budget_bytes: for gathered weights, kept copies and gradients.
    prefetch: for how many changes of weights ahead they are gathered. None: as few as it takes to be within 1%
        of the fastest predicted step within the budget.
    alignment_bytes: of addresses in the arena.
    held_bytes: of the budget, what is in use all the time outside of the arena.
    gather_until: by use, the last use whose weights should have begun to be gathered at it; below it: no wish.
    forms: of weights that may be gathered in chunks: index; bytes and picoseconds of what is gathered before
        the use all the same; bytes of the chunks that exist at a time, picoseconds of all and their number;
        whether in backwards too; and of the reduction of the gradient in chunks, products (none: not in
        chunks), each with picoseconds of all chunks and of one, and the use that it is in (-1: that which
        completes the gradient), picoseconds of what is reduced afterwards, and bytes of the gradient meanwhile.
    may_add_chunks: whether their bytes may be added to the budget.
    activations: of which parts are kept, in the order in which they are needed: name; bytes that are kept, and
        gathered; picoseconds of a gather, or 0; the use that saves it, the first and last that need it, and the
        activation in whose turn it is needed last.

Raises:
    ValueError: the budget is too small, and the text names one that is not; or the arguments contradict.)");
  define_lists(schedule);
  define_arena(schedule);
  define_figures(schedule);
  m.def(
      "overlapping_budget_bytes",
      [](const std::vector<WeightParts>& weights, const std::vector<UseParts>& uses, int64_t prefetch,
         int64_t alignment_bytes, int64_t held_bytes, const std::vector<int>& gather_until,
         const std::vector<ActivationParts>& activations) {
        return overlapping_budget_bytes(weights_of(weights), uses_of(uses),
                                        {std::nullopt, prefetch, alignment_bytes, held_bytes, gather_until,
                                         activations_of(activations), prefetch == 0 ? 0 : 1});
      },
      py::arg("weights"), py::arg("uses"), py::kw_only(), py::arg("prefetch") = ScheduleOptions{}.prefetch,
      py::arg("alignment_bytes") = ScheduleOptions{}.alignment_bytes,
      py::arg("held_bytes") = ScheduleOptions{}.held_bytes, py::arg("gather_until") = ScheduleOptions{}.gather_until,
      py::arg("activations") = std::vector<ActivationParts>{},
      "The least budget with which gathers are as far ahead as wanted and reductions run alongside the next backward.");
}

}  // namespace shardwright
