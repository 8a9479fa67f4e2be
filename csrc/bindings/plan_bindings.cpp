// _planner: plans and their steps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "picture/picture.h"
#include "planning/json.h"
#include "planning/serialize.h"
#include "program/program.h"
#include "simulate/simulate.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// The class Step in Python.
struct StepView {
  Step step;
  Lowering lowering;
  TrafficTotals traffic;
  int64_t predicted_ps;
};

// Returns a getter for a property whose first computation may take long. It releases the GIL meanwhile.
template <typename Value>
auto without_gil(Value value) {
  return [value](const PlanView& p) {
    const py::gil_scoped_release release;
    return value(*p.certified);
  };
}

using PlanClass = py::class_<PlanView>;

// Defines the class Step.
void define_step(py::module_& m) {
  py::class_<StepView>(m, "Step", "One move of a plan.")
      .def_property_readonly(
          "op", [](const StepView& s) { return step_op_name(s.step.op); },
          "The kind of step: slice, partition, zero_fill, all_gather, all_to_all, permute, exchange, reduce_scatter, "
          "all_reduce, cross or rearrange.")
      .def_property_readonly(
          "mesh_dims", [](const StepView& s) { return tuple_of(s.step.mesh_dims.to_vector()); },
          "Indices of the mesh dims that the step spans.")
      .def_property_readonly(
          "before", [](const StepView& s) { return s.step.before; }, "The layout before the step.")
      .def_property_readonly(
          "after", [](const StepView& s) { return s.step.after; }, "The layout after the step.")
      .def_property_readonly(
          "ordered", [](const StepView& s) { return s.step.ordered; },
          "True if contributions are exchanged and summed in rank order, instead of by a native collective.")
      .def_property_readonly(
          "rounds", [](const StepView& s) { return s.step.rounds; },
          "Number of rounds in which the elements are sent. More rounds need less temporary memory; each counts as a "
          "step.")
      .def_property_readonly(
          "predicted_us", [](const StepView& s) { return static_cast<double>(s.predicted_ps) / 1e6; },
          "The predicted time with the plan's topology, in microseconds.")
      .def_property_readonly(
          "replica_policy", [](const StepView& s) { return replica_policy_name(s.step.policy); },
          "The way in which replicas (ranks with equal data) share the sending of the data. ``\"aligned\"``: each "
          "receiver gets its data from one replica. ``\"whole_messages\"``: the replicas divide the messages. "
          "``\"even_bytes\"``: they divide the elements, which splits some messages. ``\"node_local\"``: each replica "
          "sends to its own node, and they divide the remaining messages.")
      .def_property_readonly(
          "wire_bytes_max", [](const StepView& s) { return s.traffic.received_bytes_max; },
          "Bytes received from other ranks by the rank that receives most.")
      .def_property_readonly(
          "wire_bytes_sum", [](const StepView& s) { return s.traffic.received_bytes_sum; },
          "Bytes received by all ranks.")
      .def_property_readonly(
          "send_bytes_max", [](const StepView& s) { return s.traffic.sent_bytes_max; },
          "Bytes sent by the rank that sends most.")
      .def_property_readonly(
          "messages_max", [](const StepView& s) { return s.traffic.messages_max; },
          "Messages received by the rank that receives most.")
      .def_property_readonly(
          "sent_messages_max", [](const StepView& s) { return s.traffic.sent_messages_max; },
          "Messages sent by the rank that sends most.")
      .def("__repr__", [](const StepView& s) {
        return concat("Step(", step_name(s.step), ": ", s.step.before.placements_string(), " -> ",
                      s.step.after.placements_string(), ")");
      });
}

// Defines the layouts, settings, certificate and steps of a plan.
void define_ends_and_steps(PlanClass& plan) {
  plan.def_property_readonly(
          "src", [](const PlanView& p) { return p.plan().src; }, "The source layout.")
      .def_property_readonly(
          "dst", [](const PlanView& p) { return p.plan().dst; }, "The destination layout.")
      .def_property_readonly(
          "backend", [](const PlanView& p) { return p.plan().lowering.name; },
          "The lowering that the plan is for: ``\"nccl\"`` or ``\"gloo\"``.")
      .def_property_readonly(
          "objective", [](const PlanView& p) { return objective_name(p.plan().objective); },
          "The cost that the plan minimizes: ``\"time\"`` or ``\"bytes\"``.")
      .def_property_readonly(
          "topology", [](const PlanView& p) { return p.plan().topology.name; },
          "The name of the topology with which the plan was chosen.")
      .def_property_readonly(
          "certificate",
          [](const PlanView& p) {
            const auto all =
                without_gil([](const CertifiedPlan& plan) { return bounded_values(plan.certificate()); })(p);
            py::typing::Dict<py::str, std::pair<int64_t, int64_t>> figures;
            for (const auto& [name, value, bound] : all) {
              figures[py::str(name)] = py::make_tuple(value, bound);
            }
            return figures;
          },
          "For each cost, by name, its value and a lower bound for any plan. The names are ``wire_bytes_max`` and "
          "``wire_bytes_sum`` (received), ``send_bytes_max``, ``messages_max``, ``steps`` (those that communicate), "
          "``peak_bytes`` and ``predicted_ps``.")
      .def_property_readonly(
          "remarks", without_gil([](const CertifiedPlan& plan) { return plan.remarks(); }),
          "One sentence for each bound that the plan does not meet and each property that it cannot guarantee.")
      .def_property_readonly("replicas_are_bitwise_equal", without_gil([](const CertifiedPlan& plan) {
                               return plan.certificate().replicas_are_bitwise_equal;
                             }),
                             "True if replicas are bitwise equal after reductions, whichever library reduces.")
      .def_property_readonly(
          "segments", [](const PlanView& p) { return p.plan().segments.count; },
          "Number of segments of the tensor that pass through the steps as a pipeline; 1 on one mesh.")
      .def_property_readonly(
          "steps",
          [](const PlanView& p) {
            std::vector<StepView> views;
            for (const Step& step : p.plan().steps) {
              views.push_back({step, p.plan().lowering, totals(step, p.plan().lowering),
                               predicted_picoseconds(step, p.plan().lowering, p.plan().topology)});
            }
            return views;
          },
          "The steps in order.");
}

// Defines costs of the worst rank, and sums over all ranks.
void define_values(PlanClass& plan) {
  plan.def_property_readonly("wire_bytes_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_max; }),
                             "Bytes received from other ranks over all steps, by the rank that receives most.")
      .def_property_readonly("wire_bytes_sum",
                             without_gil([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_sum; }),
                             "Bytes received over all steps by all ranks; see `wire_bytes_sum_is_exact`.")
      .def_property_readonly(
          "wire_bytes_sum_is_exact", without_gil([](const CertifiedPlan& plan) { return plan.traffic().sum_is_exact; }),
          "True if `wire_bytes_sum` is exact; if not, it is an upper bound. Up to 4,096 ranks it is always exact.")
      .def_property_readonly(
          "maxima_are_exact", without_gil([](const CertifiedPlan& plan) { return plan.traffic().maxima_are_exact; }),
          "True if the maxima of bytes and messages, received and sent, are over all ranks.\n\nIf False, the mesh has "
          "too many classes of ranks to compute the costs of each, and the maxima are over its outermost ranks. Always "
          "True up to 4,096 ranks.")
      .def_property_readonly("send_bytes_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.traffic().sent_bytes_max; }),
                             "Bytes sent over all steps by the rank that sends most.")
      .def_property_readonly("messages_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.traffic().messages_max; }),
                             "Messages received over all steps by the rank that receives most.")
      .def_property_readonly("sent_messages_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.traffic().sent_messages_max; }),
                             "Messages sent over all steps by the rank that sends most.")
      .def_property_readonly("bound_bytes_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.bound().bytes_max; }),
                             "A lower bound, for any plan, on the bytes received by the rank that receives most.")
      .def_property_readonly("bound_bytes_sum",
                             without_gil([](const CertifiedPlan& plan) { return plan.bound().bytes_sum; }),
                             "A lower bound, for any plan, on the bytes received by all ranks.")
      .def_property_readonly("bound_send_bytes_max",
                             without_gil([](const CertifiedPlan& plan) { return plan.certificate().least_sent_bytes; }),
                             "A lower bound, for any plan, on the bytes sent by the rank that sends most.")
      .def_property_readonly(
          "peak_bytes", without_gil([](const CertifiedPlan& plan) { return plan.peak_bytes(); }),
          "The most memory allocated at once on the worst rank: the result and temporaries, not the source.")
      .def_property_readonly("peak_bytes_is_exact",
                             without_gil([](const CertifiedPlan& plan) { return plan.certificate().peak_is_exact; }),
                             "True if no rank allocates more than `peak_bytes`; see `maxima_are_exact`.");
}

// Defines the predicted time, and the costs and programs of single ranks.
void define_values_of_ranks(PlanClass& plan) {
  plan.def_property_readonly(
          "predicted_us", [](const PlanView& p) { return static_cast<double>(predicted_picoseconds(p.plan())) / 1e6; },
          "The predicted time with the plan's topology, in microseconds.")
      .def(
          "wire_bytes",
          [](const PlanView& p, const Typed<int64_t>& rank_number) {
            const Rank rank = rank_of(rank_number);
            if (!p.plan().dst.mesh().position_of(rank)) position_on(p.plan().src.mesh(), rank);
            return traffic_at(p.plan(), rank).received_bytes;
          },
          py::arg("rank"),
          "Returns the bytes that one rank receives in all steps. Raises ValueError if the rank is not on the meshes.")
      .def(
          "rank_peak_bytes",
          [](const PlanView& p, const Typed<int64_t>& rank) { return compile(p.plan(), rank_of(rank)).peak_bytes(); },
          py::arg("rank"), "Returns the most memory that one rank allocates at once.")
      .def(
          "program",
          [](const PlanView& p, const Typed<int64_t>& rank) { return compile(p.plan(), rank_of(rank)).to_string(); },
          py::arg("rank"), "Returns the instructions of one rank, as text.")
      .def(
          "simulate", [](const PlanView& p) { return simulate(p.plan()).received_bytes_sum; },
          py::call_guard<py::gil_scoped_release>(),
          "Runs the programs of all ranks in this process. Returns the bytes that all ranks receive. Raises "
          "RuntimeError if an element is wrong, or if bytes or memory differ from the plan's.");
}

// Defines conversions to bytes, JSON, pictures and text.
void define_forms(PlanClass& plan) {
  plan.def(
          "to_bytes", [](const PlanView& p) { return py::bytes(to_bytes(p.plan())); },
          "Returns the plan as bytes, which `from_bytes` reads.")
      .def_static(
          "from_bytes",
          [](const Typed<py::bytes>& data) {
            return view_of(from_bytes(std::string(object<py::bytes>(data, "data", "bytes from Plan.to_bytes"))));
          },
          py::arg("data"), "Returns the plan from the result of `to_bytes`. Raises ValueError for other bytes.")
      .def("to_json", without_gil([](const CertifiedPlan& plan) {
             return to_json(plan.plan(), plan.certificate(), plan.remarks());
           }),
           "Returns JSON as described in docs/plan.schema.json; `plan_from_json` reads it.")
      .def("to_svg", without_gil([](const CertifiedPlan& plan) { return to_svg(plan.plan()); }),
           "Returns an SVG picture of the ranks' parts and messages: a row per rank (up to 16 ranks) or per mesh dim.")
      .def(
          "to_html",
          [](const py::object& plan) {
            return py::str(py::module_::import("shardwright.pages").attr("plan_page")(plan));
          },
          "Returns an HTML page with times, timeline, costs, links, certificate and picture. The page has no scripts "
          "and needs no other files.")
      .def("_repr_html_", [](const PlanView& p) { return to_svg(p.plan()); })  // in notebooks
      .def("__str__", [](const PlanView& p) { return p.certified->text(); })
      .def("__repr__", [](const PlanView& p) { return concat("Plan(", p.certified->text(), ")"); });
}

}  // namespace

void define_plan(py::module_& m) {
  define_step(m);
  PlanClass plan(m, "Plan",
                 "The moves from one layout to another, and their costs. ``str(plan)`` is one line per move.");
  define_ends_and_steps(plan);
  define_values(plan);
  define_values_of_ranks(plan);
  define_forms(plan);
}

}  // namespace shardwright
