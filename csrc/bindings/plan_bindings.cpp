// _planner: plans and their steps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "moves/describe.h"
#include "moves/figures.h"
#include "moves/traffic.h"
#include "picture/picture.h"
#include "planning/json.h"
#include "planning/serialize.h"
#include "program/program.h"
#include "simulate/simulate.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// The class of steps that Python sees.
struct StepView {
  Step step;
  Lowering lowering;
  TrafficTotals traffic;
  int64_t predicted_ps;
};

// Wraps a figure that may take long to compute the first time: the GIL is released meanwhile.
template <typename Figure>
auto patiently(Figure figure) {
  return [figure](const PlanView& p) {
    const py::gil_scoped_release release;
    return figure(*p.certified);
  };
}

using PlanClass = py::class_<PlanView>;

void define_step(py::module_& m) {
  py::class_<StepView>(m, "Step")
      .def_property_readonly("op", [](const StepView& s) { return step_op_name(s.step.op); })
      .def_property_readonly("mesh_dims",
                             [](const StepView& s) { return py::tuple(py::cast(s.step.mesh_dims.to_vector())); })
      .def_property_readonly("before", [](const StepView& s) { return s.step.before; })
      .def_property_readonly("after", [](const StepView& s) { return s.step.after; })
      .def_property_readonly("ordered", [](const StepView& s) { return s.step.ordered; })
      .def_property_readonly("rounds", [](const StepView& s) { return s.step.rounds; })
      .def_property_readonly("predicted_us",
                             [](const StepView& s) { return static_cast<double>(s.predicted_ps) / 1e6; })
      .def_property_readonly("sharing", [](const StepView& s) { return sharing_name(s.step.sharing); })
      .def_property_readonly("wire_bytes_max", [](const StepView& s) { return s.traffic.received_bytes_max; })
      .def_property_readonly("wire_bytes_sum", [](const StepView& s) { return s.traffic.received_bytes_sum; })
      .def_property_readonly("send_bytes_max", [](const StepView& s) { return s.traffic.sent_bytes_max; })
      .def_property_readonly("messages_max", [](const StepView& s) { return s.traffic.messages_max; })
      .def_property_readonly("sent_messages_max", [](const StepView& s) { return s.traffic.sent_messages_max; })
      .def("__repr__", [](const StepView& s) {
        return concat("Step(", named(s.step), ": ", s.step.before.placements_string(), " -> ",
                      s.step.after.placements_string(), ")");
      });
}

void define_ends_and_steps(PlanClass& plan) {
  plan.def_property_readonly("src", [](const PlanView& p) { return p.plan().src; })
      .def_property_readonly("dst", [](const PlanView& p) { return p.plan().dst; })
      .def_property_readonly("backend", [](const PlanView& p) { return p.plan().lowering.name; })
      .def_property_readonly("objective", [](const PlanView& p) { return objective_name(p.plan().objective); })
      .def_property_readonly("topology", [](const PlanView& p) { return p.plan().topology.name; })
      .def_property_readonly(
          "certificate",
          [](const PlanView& p) {
            const auto all = patiently([](const CertifiedPlan& plan) { return figures_of(plan.certificate()); })(p);
            py::dict figures;
            for (const auto& [name, value, bound] : all) {
              figures[py::str(name)] = py::make_tuple(value, bound);
            }
            return figures;
          })
      .def_property_readonly("remarks", patiently([](const CertifiedPlan& plan) { return plan.remarks(); }))
      .def_property_readonly("replicas_are_bitwise_equal", patiently([](const CertifiedPlan& plan) {
                               return plan.certificate().replicas_are_bitwise_equal;
                             }))
      .def_property_readonly("segments", [](const PlanView& p) { return p.plan().segments.count; })
      .def_property_readonly("steps", [](const PlanView& p) {
        std::vector<StepView> views;
        for (const Step& step : p.plan().steps) {
          views.push_back({step, p.plan().lowering, totals(step, p.plan().lowering),
                           predicted_picoseconds(step, p.plan().lowering, p.plan().topology)});
        }
        return views;
      });
}

// Figures of the worst rank, and sums over all ranks.
void define_figures(PlanClass& plan) {
  plan.def_property_readonly("wire_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_max; }))
      .def_property_readonly("wire_bytes_sum",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_sum; }))
      .def_property_readonly("wire_bytes_sum_is_exact",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().sum_is_exact; }))
      .def_property_readonly("maxima_are_exact",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().maxima_are_exact; }))
      .def_property_readonly("send_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().sent_bytes_max; }))
      .def_property_readonly("messages_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().messages_max; }))
      .def_property_readonly("sent_messages_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().sent_messages_max; }))
      .def_property_readonly("bound_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.bound().bytes_max; }))
      .def_property_readonly("bound_bytes_sum",
                             patiently([](const CertifiedPlan& plan) { return plan.bound().bytes_sum; }))
      .def_property_readonly("bound_send_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.certificate().least_sent_bytes; }))
      .def_property_readonly("peak_bytes", patiently([](const CertifiedPlan& plan) { return plan.peak_bytes(); }))
      .def_property_readonly("peak_bytes_is_exact",
                             patiently([](const CertifiedPlan& plan) { return plan.certificate().peak_is_exact; }));
}

void define_figures_of_ranks(PlanClass& plan) {
  plan.def_property_readonly(
          "predicted_us", [](const PlanView& p) { return static_cast<double>(predicted_picoseconds(p.plan())) / 1e6; })
      .def(
          "wire_bytes",
          [](const PlanView& p, const py::object& given) {
            const Rank rank = rank_of(given);
            if (!p.plan().dst.mesh().position_of(rank)) position_on(p.plan().src.mesh(), rank);
            return traffic_at(p.plan(), rank).received_bytes;
          },
          py::arg("rank"))
      .def(
          "rank_peak_bytes",
          [](const PlanView& p, const py::object& rank) { return compile(p.plan(), rank_of(rank)).peak_bytes(); },
          py::arg("rank"))
      .def(
          "program",
          [](const PlanView& p, const py::object& rank) { return compile(p.plan(), rank_of(rank)).to_string(); },
          py::arg("rank"))
      .def(
          "simulate", [](const PlanView& p) { return simulate(p.plan()).received_bytes_sum; },
          py::call_guard<py::gil_scoped_release>());
}

void define_forms(PlanClass& plan) {
  plan.def("to_bytes", [](const PlanView& p) { return py::bytes(to_bytes(p.plan())); })
      .def_static(
          "from_bytes",
          [](const py::object& data) {
            return view_of(from_bytes(std::string(object<py::bytes>(data, "data", "bytes, as Plan.to_bytes gives"))));
          },
          py::arg("data"))
      .def("to_json", patiently([](const CertifiedPlan& plan) {
             return to_json(plan.plan(), plan.certificate(), plan.remarks());
           }))
      .def("to_svg", patiently([](const CertifiedPlan& plan) { return to_svg(plan.plan()); }))
      .def("to_html", patiently([](const CertifiedPlan& plan) { return to_html(plan.plan()); }))
      .def("_repr_html_", [](const PlanView& p) { return to_svg(p.plan()); })  // in notebooks
      .def("__str__", [](const PlanView& p) { return p.certified->text(); })
      .def("__repr__", [](const PlanView& p) { return concat("Plan(", p.certified->text(), ")"); });
}

}  // namespace

void define_plan(py::module_& m) {
  define_step(m);
  PlanClass plan(m, "Plan");
  define_ends_and_steps(plan);
  define_figures(plan);
  define_figures_of_ranks(plan);
  define_forms(plan);
}

}  // namespace shardwright
