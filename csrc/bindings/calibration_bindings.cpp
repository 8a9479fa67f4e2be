// _planner: fits of links for calibration.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/views.h"
#include "cost/link_fit.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Measured all-to-alls: number of peers, bytes sent, seconds.
using Measured = std::vector<std::tuple<int64_t, int64_t, double>>;

// Returns measured all-to-alls as points of a fit.
std::vector<LinkPoint> points_of(const Measured& measured) {
  std::vector<LinkPoint> points;
  for (const auto& [peers, sent_bytes, seconds] : measured) points.push_back({peers, sent_bytes, seconds});
  return points;
}

}  // namespace

void define_calibration(py::module_& m) {
  py::class_<LinkFit>(m, "LinkFit", "The costs of transfers over a link, fitted to measurements.")
      .def_readonly("step", &LinkFit::step, "Seconds per step.")
      .def_readonly("message", &LinkFit::message, "Seconds per message.")
      .def_readonly("byte", &LinkFit::byte, "Seconds per byte.")
      .def_readonly("error", &LinkFit::error, "Mean relative error of the fit.");
  m.def(
      "fit_links",
      [](const Measured& inside, const Measured& between, const std::map<std::string, Measured>& mesh_dims,
         const std::set<std::string>& crossing) {
        std::map<std::string, std::vector<LinkPoint>> along;
        for (const auto& [name, measured] : mesh_dims) along[name] = points_of(measured);
        const LinkFits fits = fit_links(points_of(inside), points_of(between), along, crossing);
        return std::make_tuple(fits.inside, fits.between, fits.mesh_dims);
      },
      py::arg("inside"), py::arg("between"), py::arg("mesh_dims"), py::arg("crossing"),
      "Returns (link within nodes, link between nodes, links of mesh dims by name), fitted to "
      "measurements.\n\n`inside`, "
      "`between` and the values of `mesh_dims` are measured all-to-alls, as (number of peers, bytes sent, seconds). "
      "`crossing` names the mesh dims along which ranks are on different nodes.");
}

}  // namespace shardwright
