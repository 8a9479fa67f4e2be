// _planner: schedules of training steps.
//
// Python passes and gets tuples. The comment of each type of tuple below names a struct (in schedule/schedule.h,
// chunks.h or lanes.h), and the fields of the struct that are the elements of the tuple, in order.
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

// Weight: name, rest_bytes, use_bytes, keep_bytes, gradient_bytes, gather_ps, reduce_ps, fetch_ps, send_ps.
using WeightParts = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
// Use: weights, pass, gradients, compute_ps.
using UseParts = std::tuple<std::vector<int>, std::string, std::vector<int>, int64_t>;
// Activation: name, kept_bytes, bytes, gather_ps, saved, first, last, until.
using ActivationParts = std::tuple<std::string, int64_t, int64_t, int64_t, int, int, int, int>;
// ReducingProduct: transfer_ps, last_chunk_ps, use.
using ReducingProductParts = std::tuple<int64_t, int64_t, int>;
// ChunkedReduction: products, rest_ps, gradient_bytes.
using ChunkedReductionParts = std::tuple<std::vector<ReducingProductParts>, int64_t, int64_t>;
// ChunkedWeight: weight, use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, reduction.
using ChunkedWeightParts = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, bool, ChunkedReductionParts>;

// WeightBuffer: weight, is_kept_copy, first, last, size_bytes, offset_bytes.
using BufferParts = std::tuple<int, bool, int, int, int64_t, int64_t>;
// Gather: weight, buffer, start, needed, from_copy.
using GatherParts = std::tuple<int, int, int, int, bool>;
// Reduction: weight, first, start, finish, in_chunks.
using ReductionParts = std::tuple<int, int, int, int, bool>;
// LaneSpan: begin_ps, end_ps.
using Span = std::pair<int64_t, int64_t>;
// ChunksSpan: weight, use, is_reduction, span.
using ChunksParts = std::tuple<int, int, bool, Span>;

// Returns activations from their tuples.
std::vector<Activation> activations_of(const std::vector<ActivationParts>& parts) {
  std::vector<Activation> activations;
  for (const auto& [name, kept_bytes, bytes, gather_ps, saved, first, last, until] : parts) {
    activations.push_back({name, kept_bytes, bytes, gather_ps, saved, first, last, until});
  }
  return activations;
}

// Returns weights from their tuples.
std::vector<Weight> weights_of(const std::vector<WeightParts>& parts) {
  std::vector<Weight> weights;
  for (const auto& [name, rest, use, keep, gradient, gather_ps, reduce_ps, fetch_ps, send_ps] : parts) {
    weights.push_back({name, rest, use, keep, gradient, gather_ps, reduce_ps, -1, 0, 0, {}, fetch_ps, send_ps});
  }
  return weights;
}

// Returns uses from their tuples.
std::vector<Use> uses_of(const std::vector<UseParts>& parts) {
  std::vector<Use> uses;
  for (const auto& [weights, pass, gradients, compute_ps] : parts) {
    uses.push_back({weights, parse_pass(pass), gradients, compute_ps});
  }
  return uses;
}

// Returns chunked weights from their tuples.
std::vector<ChunkedWeight> chunked_weights_of(const std::vector<ChunkedWeightParts>& parts) {
  std::vector<ChunkedWeight> weights;
  for (const auto& [weight, use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, reduction_parts] :
       parts) {
    const auto& [products, rest_ps, gradient_bytes] = reduction_parts;
    ChunkedReduction reduction{{}, rest_ps, gradient_bytes};
    for (const auto& [all_chunks_ps, last_chunk_ps, use] : products) {
      reduction.products.push_back({all_chunks_ps, last_chunk_ps, use});
    }
    weights.push_back({weight, use_bytes, gather_ps, chunk_bytes, transfer_ps, num_chunks, in_backwards, reduction});
  }
  return weights;
}

// Makes the schedule of a step. Without `prefetch`, the fastest one is chosen.
StepSchedule schedule_of(const std::vector<WeightParts>& weights, const std::vector<UseParts>& uses,
                         std::optional<int64_t> budget_bytes, std::optional<int64_t> prefetch, int64_t alignment_bytes,
                         int64_t held_bytes, const std::vector<int>& gather_until,
                         const std::vector<ChunkedWeightParts>& chunked_weights, bool may_add_chunks,
                         const std::vector<ActivationParts>& activations) {
  ScheduleOptions options{
      budget_bytes, prefetch.value_or(1), alignment_bytes, held_bytes, gather_until, activations_of(activations), 0};
  options.activations_ahead = activations_ahead_within(weights_of(weights), uses_of(uses), options);
  return schedule_with_chunks(weights_of(weights), uses_of(uses), chunked_weights_of(chunked_weights),
                              {options, !prefetch, may_add_chunks});
}

// Returns spans as pairs.
std::vector<Span> spans_of(const std::vector<LaneSpan>& spans) {
  std::vector<Span> all;
  for (const LaneSpan& span : spans) all.emplace_back(span.begin_ps, span.end_ps);
  return all;
}

// Returns the predicted lanes, or nothing if the schedule has no times.
std::optional<py::typing::Dict<py::str, py::object>> lanes_of(const StepSchedule& schedule) {
  if (!has_times(schedule)) return std::nullopt;
  const StepLanes lanes = predict(schedule);
  py::typing::Dict<py::str, py::object> fields;
  fields["uses"] = spans_of(lanes.uses);
  fields["gathers"] = spans_of(lanes.gathers);
  fields["reductions"] = spans_of(lanes.reductions);
  std::vector<ChunksParts> chunks;
  for (const ChunksSpan& c : lanes.chunks) {
    chunks.emplace_back(c.weight, c.use, c.is_reduction, Span(c.span.begin_ps, c.span.end_ps));
  }
  fields["chunks"] = std::move(chunks);
  fields["fetches"] = spans_of(lanes.fetches);
  fields["sends"] = spans_of(lanes.sends);
  fields["activations"] = spans_of(lanes.activations);
  fields["copy_ps"] = lanes.copy_ps;
  fields["compute_ps"] = lanes.compute_ps;
  fields["transfer_ps"] = lanes.transfer_ps;
  fields["total_ps"] = lanes.total_ps;
  return fields;
}

// Defines the uses, the predicted lanes and their settings.
void define_lists(py::class_<StepSchedule>& schedule) {
  schedule
      .def_property_readonly(
          "original_of",
          [](const StepSchedule& s) {
            std::vector<int> all;
            for (const Weight& w : s.weights) all.push_back(w.original);
            return all;
          },
          "For each weight: -1, or for a chunked weight the index of the weight that it stands for. Chunked weights "
          "are last.")
      .def_property_readonly(
          "prefetch", [](const StepSchedule& s) { return s.options.prefetch; },
          "Number of weight changes by which gathers are ahead.")
      .def_property_readonly(
          "lanes", &lanes_of,
          R"(The predicted times of the step, by name; None if the durations of uses or gathers are unknown.

A span is (begin_ps, end_ps), in picoseconds from the beginning of the step.

- ``uses``, ``gathers``, ``reductions``, ``activations``: a span for each item of the schedule's list of this name. An
  activation's span is that of its gather.
- ``fetches``: for each gather, the span of the copy from the host.
- ``sends``: for each reduction, the span of the copy to the host.
- ``chunks``: (weight, use, is_reduction, span) of all chunks that are transferred for a weight within a use, for its
  gather or for the reduction of its gradient.
- ``compute_ps``, ``transfer_ps``, ``copy_ps``: the sums of the durations of uses, transfers and copies.
- ``total_ps``: the duration of the step.)")
      .def_property_readonly(
          "uses",
          [](const StepSchedule& s) {
            std::vector<UseParts> all;
            for (const Use& u : s.uses) {
              all.emplace_back(u.weights, pass_name(u.pass), u.gradients, u.compute_ps);
            }
            return all;
          },
          "For each use: (weights, pass, gradients, compute_ps), as given to the constructor. A weight that is "
          "gathered in chunks is replaced by its chunked weight (`original_of`).");
}

// Defines the buffers in the arena, the gathers and the reductions.
void define_arena(py::class_<StepSchedule>& schedule) {
  schedule
      .def_property_readonly(
          "buffers",
          [](const StepSchedule& s) {
            std::vector<BufferParts> all;
            for (const WeightBuffer& b : s.buffers) {
              all.emplace_back(b.weight, b.is_kept_copy, b.first, b.last, b.size_bytes, b.offset_bytes);
            }
            return all;
          },
          "For each buffer in the arena: (weight, is_kept_copy, first, last, size_bytes, offset_bytes). It exists from "
          "use `first` to use `last`.")
      .def_property_readonly(
          "gathers",
          [](const StepSchedule& s) {
            std::vector<GatherParts> all;
            for (const Gather& g : s.gathers) {
              all.emplace_back(g.weight, g.buffer, g.start, g.needed, g.from_copy);
            }
            return all;
          },
          "For each gather: (weight, buffer, start, needed, from_copy). It starts before use `start` and is done "
          "before use `needed`. With `from_copy`, it reads the kept copy instead of the sharded parts.")
      .def_property_readonly(
          "chunk_gathers",
          [](const StepSchedule& s) {
            std::vector<std::pair<int, int>> all;
            for (int use = 0; use < static_cast<int>(s.uses.size()); ++use) {
              for (const int w : s.gathered_within(use)) all.emplace_back(s.weights[w].original, use);
            }
            return all;
          },
          "For each gather in chunks: (weight, use), with the index of the original weight. All chunks are gathered "
          "during the use. The part that is not in chunks is one of `gathers`.")
      .def_property_readonly(
          "reductions",
          [](const StepSchedule& s) {
            std::vector<ReductionParts> all;
            for (const Reduction& r : s.reductions) {
              all.emplace_back(r.weight, r.first, r.start, r.finish, r.in_chunks);
            }
            return all;
          },
          "For each reduction: (weight, first, start, finish, in_chunks). The gradient exists from use `first` on. The "
          "reduction starts after use `start` and is done after use `finish`. With `in_chunks`, chunks are reduced "
          "during the uses from `first` to `start`, and only the rest after `start`.");
}

// Defines sizes, activations and conversions to text.
void define_values(py::class_<StepSchedule>& schedule) {
  schedule
      .def(
          "to_svg", [](const StepSchedule& s) { return to_svg(s); },
          "Returns the step as a standalone SVG picture: compute, transfers, and the buffers in the arena.")
      .def_readonly("arena_bytes", &StepSchedule::arena_bytes, "Size of the arena.")
      .def_readonly("live_buffer_bytes", &StepSchedule::live_buffer_bytes,
                    "Maximum of the bytes of buffers that exist at once, a lower bound on `arena_bytes`.")
      .def_readonly("peak_gradient_bytes", &StepSchedule::peak_gradient_bytes,
                    "Maximum of the bytes of gradients that exist at once.")
      .def_readonly("peak_activation_bytes", &StepSchedule::peak_activation_bytes,
                    "Maximum of the bytes of activations that exist at once.")
      .def_property_readonly(
          "activations",
          [](const StepSchedule& s) {
            std::vector<ActivationParts> all;
            for (const Activation& a : s.options.activations) {
              all.emplace_back(a.name, a.kept_bytes, a.bytes, a.gather_ps, a.saved, a.first, a.last, a.until);
            }
            return all;
          },
          "For each activation: (name, kept_bytes, bytes, gather_ps, saved, first, last, until), as given to the "
          "constructor.")
      .def_property_readonly(
          "activation_gathers",
          [](const StepSchedule& s) {
            std::vector<std::pair<int, int>> all;
            for (const ActivationGather& g : s.activation_gathers) {
              all.emplace_back(g.start, g.trigger);
            }
            return all;
          },
          "For each activation: (start, trigger). Its gather starts in use `start`, when the activation `trigger` is "
          "first needed. With a `trigger` of -1, the gather starts before the use.")
      .def_property_readonly(
          "peak_bytes", &StepSchedule::peak_bytes,
          "Size of the arena, plus the maximum of the bytes of gradients and activations that exist at once, plus "
          "`held_bytes`.")
      .def(
          "to_json", [](const StepSchedule& s) { return to_json(s); }, "Returns the schedule as JSON.")
      .def("__str__", [](const StepSchedule& s) { return to_text(s); });
}

}  // namespace

void define_step_schedule(py::module_& m) {
  py::class_<StepSchedule> schedule(
      m, "StepSchedule", "The gathers and releases of weights within a training step; see csrc/schedule/schedule.h.");
  schedule.def(py::init(&schedule_of), py::arg("weights"), py::arg("uses"), py::kw_only(),
               py::arg("budget_bytes") = std::nullopt, py::arg("prefetch") = std::optional(ScheduleOptions{}.prefetch),
               py::arg("alignment_bytes") = ScheduleOptions{}.alignment_bytes,
               py::arg("held_bytes") = ScheduleOptions{}.held_bytes,
               py::arg("gather_until") = ScheduleOptions{}.gather_until,
               py::arg("chunked_weights") = std::vector<ChunkedWeightParts>{}, py::arg("may_add_chunks") = false,
               py::arg("activations") = std::vector<ActivationParts>{},
               R"(Plans a step.

Args:
    weights: each (name, rest_bytes, use_bytes, keep_bytes, gradient_bytes, gather_ps, reduce_ps, fetch_ps, send_ps):
        bytes of the sharded part, of the gathered weight, of what is kept from first to last use, and of the gradient;
        picoseconds of a gather, of a reduction, and of their copies from and to the host, or 0.
    uses: each (weights, pass, gradients, compute_ps): indices of the weights that are needed; "forward", "recompute"
        or "backward"; weights whose gradients are complete afterwards; picoseconds of the compute, or 0.
    budget_bytes: memory limit for gathered weights, kept copies, gathered activations, gradients and `held_bytes`.
    prefetch: number of weight changes by which gathers are ahead. A weight change is a use that needs a weight which
        the use before does not need. None: the least number whose predicted step is within 1% of the fastest within
        the budget.
    alignment_bytes: alignment of addresses in the arena.
    held_bytes: part of the budget that is always in use outside of the arena.
    gather_until: for each use, the index of a later use. While the use runs, the gathers for all uses up to that index
        should be done or under way. An index below the use itself requires nothing.
    chunked_weights: weights that may be gathered in chunks, each (weight, use_bytes, gather_ps, chunk_bytes,
        transfer_ps, num_chunks, in_backwards, reduction): index; bytes and picoseconds of the part that is gathered
        before the use; bytes of the chunks that exist at a time, picoseconds of all chunks, and their number; True if
        backwards may gather chunks too; the reduction of the gradient in chunks. A reduction is (products, rest_ps,
        gradient_bytes): its products (none: not in chunks), picoseconds of the part that is not in chunks, and bytes
        of the gradient meanwhile. A product is (transfer_ps, last_chunk_ps, use): picoseconds of all chunks and of one
        chunk, and its use (-1: the one that completes the gradient).
    may_add_chunks: adds the bytes of chunks to the budget.
    activations: activations of which parts are kept, in the order in which they are needed, each (name, kept_bytes,
        bytes, gather_ps, saved, first, last, until): bytes of the kept part and of the gathered activation; picoseconds
        of a gather, or 0; the use that saves it, the first and the last use that need it, and the activation in whose
        turn it is needed last. An activation's turn lasts from its first need to the first need of the next one.

Raises:
    ValueError: the budget is too small (the message names one that suffices), or the arguments are invalid.)");
  define_lists(schedule);
  define_arena(schedule);
  define_values(schedule);
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
      "Returns the least budget, in bytes, with which gathers are as far ahead as required and each reduction runs "
      "during the next backward.");
}

}  // namespace shardwright
