// _planner: what is predicted for a batch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

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
      [](const py::bytes& bytes, const Topology& topology) {
        const BatchForecast made = forecast_of(std::string(bytes), topology);
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> destinations;
        for (const BatchForecast::OfDestination& one : made.destinations) {
          destinations.emplace_back(one.received_bytes, one.received_bytes_max, one.kept_bytes, one.first_round,
                                    one.last_round, one.predicted_ps);
        }
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> links;
        for (const BatchForecast::OfLink& one : made.links) {
          links.emplace_back(number(one.from), number(one.to), one.bytes, one.messages, one.predicted_ps);
        }
        return std::tuple(destinations, links, made.predicted_ps, made.reducing_ps);
      },
      py::arg("batch_bytes"), py::arg("topology"),
      "Predicts a batch, in bytes and picoseconds: for each destination what all ranks receive, what the worst one "
      "receives, what is copied locally, first and last round (-1 for none), time; for each link sender, receiver, "
      "bytes, messages at most, time; the time of all; and how much of that is for reducing sources before.");
}

}  // namespace shardwright
