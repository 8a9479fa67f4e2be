// _planner: schedules of training steps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/views.h"
#include "schedule/schedule.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// name, rest, use, keep and gradient bytes, time of a gather
using WeightParts = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t>;
// weights, pass, weights whose gradients are complete, time of the compute
using UseParts = std::tuple<std::vector<int>, std::string, std::vector<int>, int64_t>;

std::vector<Weight> weights_of(const std::vector<WeightParts>& parts) {
  std::vector<Weight> weights;
  for (const auto& [name, rest, use, keep, gradient, gather_ps] : parts) {
    weights.push_back({name, rest, use, keep, gradient, gather_ps});
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
                         std::optional<int64_t> budget_bytes, int64_t prefetch, int64_t alignment_bytes,
                         int64_t held_bytes, const std::vector<int>& gather_until) {
  return make_schedule(weights_of(weights), uses_of(uses),
                       {budget_bytes, prefetch, alignment_bytes, held_bytes, gather_until});
}

}  // namespace

void define_step_schedule(py::module_& m) {
  py::class_<StepSchedule>(m, "StepSchedule")
      .def(py::init(&schedule_of), py::arg("weights"), py::arg("uses"), py::kw_only(),
           py::arg("budget_bytes") = std::nullopt, py::arg("prefetch") = ScheduleOptions{}.prefetch,
           py::arg("alignment_bytes") = ScheduleOptions{}.alignment_bytes,
           py::arg("held_bytes") = ScheduleOptions{}.held_bytes,
           py::arg("gather_until") = ScheduleOptions{}.gather_until)
      .def_property_readonly("buffers",
                             [](const StepSchedule& s) {
                               std::vector<std::tuple<int, bool, int, int, int64_t, int64_t>> all;
                               for (const WeightBuffer& b : s.buffers) {
                                 all.emplace_back(b.weight, b.is_kept_copy, b.first, b.last, b.size_bytes,
                                                  b.offset_bytes);
                               }
                               return all;
                             })
      .def_property_readonly("gathers",
                             [](const StepSchedule& s) {
                               std::vector<std::tuple<int, int, int, int, bool>> all;
                               for (const Gather& g : s.gathers) {
                                 all.emplace_back(g.weight, g.buffer, g.start, g.needed, g.from_copy);
                               }
                               return all;
                             })
      .def_property_readonly("reductions",
                             [](const StepSchedule& s) {
                               std::vector<std::tuple<int, int, int, int>> all;
                               for (const Reduction& r : s.reductions) {
                                 all.emplace_back(r.weight, r.first, r.start, r.finish);
                               }
                               return all;
                             })
      .def_readonly("arena_bytes", &StepSchedule::arena_bytes)
      .def_readonly("live_buffer_bytes", &StepSchedule::live_buffer_bytes)
      .def_readonly("peak_gradient_bytes", &StepSchedule::peak_gradient_bytes)
      .def_property_readonly("peak_bytes", &StepSchedule::peak_bytes)
      .def("to_json", [](const StepSchedule& s) { return to_json(s); })
      .def("__str__", [](const StepSchedule& s) { return to_text(s); });
  m.def(
      "overlapping_budget_bytes",
      [](const std::vector<WeightParts>& weights, const std::vector<UseParts>& uses, int64_t prefetch,
         int64_t alignment_bytes, int64_t held_bytes, const std::vector<int>& gather_until) {
        return overlapping_budget_bytes(weights_of(weights), uses_of(uses),
                                        {std::nullopt, prefetch, alignment_bytes, held_bytes, gather_until});
      },
      py::arg("weights"), py::arg("uses"), py::kw_only(), py::arg("prefetch") = ScheduleOptions{}.prefetch,
      py::arg("alignment_bytes") = ScheduleOptions{}.alignment_bytes,
      py::arg("held_bytes") = ScheduleOptions{}.held_bytes, py::arg("gather_until") = ScheduleOptions{}.gather_until);
}

}  // namespace shardwright
