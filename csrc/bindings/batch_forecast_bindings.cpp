// _planner: what is predicted for a batch.
#include <pybind11/pybind11.h>

#include <string>

#include "batch/batch_forecast.h"
#include "bindings/arguments.h"
#include "bindings/views.h"

namespace py = pybind11;

namespace shardwright {
namespace {

BatchForecast forecast_of(const std::string& bytes, const Topology& topology) {
  const py::gil_scoped_release release;
  return forecast(BatchPlan(Batch::from_bytes(bytes)), topology);
}

}  // namespace

void define_batch_forecast(py::module_& m) {
  m.def(
      "forecast_batch",
      [](const std::string& bytes, const Topology& topology) {
        const BatchForecast made = forecast_of(bytes, topology);
        py::list destinations;
        for (const BatchForecast::OfDestination& one : made.destinations) {
          destinations.append(py::make_tuple(one.received_bytes, one.received_bytes_max, one.kept_bytes,
                                             one.first_round, one.last_round, one.predicted_ps));
        }
        py::list links;
        for (const BatchForecast::OfLink& one : made.links) {
          links.append(py::make_tuple(number(one.from), number(one.to), one.bytes, one.messages, one.predicted_ps));
        }
        return py::make_tuple(destinations, links, made.predicted_ps, made.reducing_ps);
      },
      py::arg("batch_bytes"), py::arg("topology"));
}

}  // namespace shardwright
