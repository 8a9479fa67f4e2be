// _planner: predicted traffic and times of batches.
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

// Predicts the times of a batch, given as bytes, without the GIL.
BatchForecast forecast_of(const std::string& bytes, const Topology& topology) {
  const py::gil_scoped_release release;
  return forecast(BatchPlan(Batch::from_bytes(bytes)), topology);
}

}  // namespace

void define_batch_forecast(py::module_& m) {
  m.def(
      "forecast_batch",
      [](const py::bytes& bytes, const Topology& topology) {
        const BatchForecast forecast = forecast_of(std::string(bytes), topology);
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> destinations;
        for (const BatchForecast::OfDestination& destination : forecast.destinations) {
          destinations.emplace_back(destination.received_bytes, destination.received_bytes_max, destination.kept_bytes,
                                    destination.first_round, destination.last_round, destination.predicted_ps);
        }
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> links;
        for (const BatchForecast::OfLink& link : forecast.links) {
          links.emplace_back(to_int(link.from), to_int(link.to), link.bytes, link.messages, link.predicted_ps);
        }
        return std::tuple(destinations, links, forecast.predicted_ps, forecast.reducing_ps);
      },
      py::arg("batch_bytes"), py::arg("topology"),
      "Predicts the traffic and times of a batch, in bytes and picoseconds.\n\nReturns (destinations, links, total "
      "time, time of reductions). A destination is (bytes received by all ranks, bytes received by the rank that "
      "receives most, bytes copied locally, first round, last round, time), with rounds of -1 if nothing is sent. A "
      "link is (sender, receiver, bytes, upper bound on messages, time). The total time includes the reductions of "
      "sources.");
}

}  // namespace shardwright
