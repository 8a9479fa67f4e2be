// _runtime: placements, index arithmetic, exchanges and rows of experts. Python checks the arguments.
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/runtime_parts.h"
#include "runtime/c10d/process_groups.h"
#include "runtime/expert_device.h"
#include "runtime/expert_exchange.h"
#include "runtime/expert_rows.h"
#include "runtime/experts.h"

namespace shardwright {
namespace {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Returns a view of a contiguous tensor [tokens, per token] in host memory.
template <typename T>
PerToken<T> per_token(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.size(0), tensor.size(1)};
}

// Returns a view of the elements of a contiguous tensor in host memory.
template <typename T>
std::span<const T> span_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

// Returns a tensor of the values.
template <typename T>
at::Tensor tensor_of(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, dtype);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<T>());
  return tensor;
}

// Returns a 1-D int64 tensor of the values.
at::Tensor longs_of(const std::vector<int64_t>& values) {
  return tensor_of(values, {static_cast<int64_t>(values.size())}, at::kLong);
}

// The fields of RowRoutes: send_rows, rows_of_token, row_counts, pair_counts.
using Routes = std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>, std::vector<int64_t>>;

// Calls route_rows for a tensor of codes [tokens, per token].
Routes routes_of(const at::Tensor& codes, const std::vector<int32_t>& target_of_replica, int num_ranks) {
  RowRoutes routes = route_rows(per_token<int32_t>(codes), target_of_replica, num_ranks);
  return {longs_of(routes.send_rows), tensor_of(routes.rows_of_token, {codes.size(0), routes.width}, at::kLong),
          std::move(routes.row_counts), std::move(routes.pair_counts)};
}

// Calls expand_rows for a tensor of codes. Returns pairs, copies and counts.
std::tuple<at::Tensor, at::Tensor, at::Tensor> expansion_of(const at::Tensor& codes, int64_t first_replica,
                                                            int64_t num_local,
                                                            const std::optional<at::Tensor>& origins) {
  const auto order = origins ? span_of<int64_t>(*origins) : std::span<const int64_t>();
  const Expansion expansion = expand_rows(per_token<int32_t>(codes), first_replica, num_local, order);
  return {longs_of(expansion.pairs), tensor_of(expansion.copies, codes.sizes(), at::kLong), longs_of(expansion.counts)};
}

// Calls drop_beyond_capacity for a copy of the codes. Returns the copy and the number of dropped codes.
std::pair<at::Tensor, int64_t> drop_codes_beyond_capacity(const at::Tensor& codes, const at::Tensor& taken,
                                                          int64_t capacity) {
  const auto before = span_of<int64_t>(taken);
  at::Tensor left = codes.clone();
  const std::span<int32_t> changed(left.mutable_data_ptr<int32_t>(), static_cast<size_t>(left.numel()));
  const int64_t dropped = drop_beyond_capacity(changed, {before.begin(), before.end()}, capacity);
  return {left, dropped};
}

// Defines placements, and index arithmetic in host memory.
void define_index_arithmetic(py::module_& m) {
  py::class_<ExpertPlacement>(
      m, "ExpertPlacement",
      "The experts on each rank of a group. A replica is one expert on one rank; replicas are numbered in the order of "
      "ranks. A code is a replica's number plus 1, or 0 for no expert.")
      .def(py::init<int64_t, const std::vector<std::vector<int64_t>>&>(), py::arg("num_experts"),
           py::arg("experts_of_rank"),
           "`experts_of_rank`: for each rank of the group, its experts in their order. Raises ValueError if an expert "
           "is on no rank, is out of range, or is listed twice for one rank.")
      .def_property_readonly("num_experts", &ExpertPlacement::num_experts)
      .def_property_readonly("num_replicas", &ExpertPlacement::num_replicas)
      .def_property_readonly("first_replica", &ExpertPlacement::first_replica,
                             "The first replica of each rank, then the number of replicas.")
      .def_property_readonly("rank_of_replica", &ExpertPlacement::rank_of_replica, "The rank of each replica.")
      .def_property_readonly("hash", &ExpertPlacement::hash, "A hash of the arguments, for ranks to compare.")
      .def(
          "choose",
          [](const ExpertPlacement& placement, const at::Tensor& expert_ids, int rank,
             const std::vector<int32_t>& node_of_rank) {
            const auto ids = per_token<int64_t>(expert_ids);
            return tensor_of(choose_replicas(placement, ids, rank, node_of_rank), expert_ids.sizes(), at::kInt);
          },
          py::arg("expert_ids"), py::arg("rank"), py::arg("node_of_rank"), ReleaseGil(),
          "Returns int32 codes for `expert_ids` ([tokens, experts per token], int64; -1 for no expert), the choices of "
          "`rank`. Both are in host memory. `node_of_rank` may be empty. Raises ValueError if an id is out of range.");
  m.def(
      "count_by_replica",
      [](const at::Tensor& codes, int64_t num_replicas) {
        return longs_of(count_by_replica(span_of<int32_t>(codes), num_replicas));
      },
      py::arg("codes"), py::arg("num_replicas"), ReleaseGil(),
      "Returns the number of codes for each replica, as int64.");
  m.def(
      "drop_beyond_capacity", &drop_codes_beyond_capacity, py::arg("codes"), py::arg("taken"), py::arg("capacity"),
      ReleaseGil(),
      "Limits the number of tokens of each replica to `capacity`, of which it has ``taken[replica]`` already. Returns "
      "(codes, number of dropped codes). The codes of further tokens are dropped: they become 0.");
  m.def(
      "route_rows", &routes_of, py::arg("codes"), py::arg("target_of_replica"), py::arg("num_ranks"), ReleaseGil(),
      "Returns (send_rows, rows_of_token, number of rows for each rank, number of codes for each rank). The first two "
      "are arguments of a `RowExchange`. Codes of replicas whose target is -1 are not sent.");
  m.def("expand_rows", &expansion_of, py::arg("codes"), py::arg("first_replica"), py::arg("num_local"),
        py::arg("origins"), ReleaseGil(),
        "Returns (pairs, copies, counts) for the replicas ``first_replica`` to ``first_replica + num_local - 1``, from "
        "the codes of received rows: `codes` is [rows, codes per row], int32. `origins`: a sort key for each row, "
        "int64, or None for the order of rows. `pairs`: for each copy of a row, ``row * codes per row + column``, "
        "sorted by expert, then by the row's origin. `copies`: for each code, the index of its copy, or -1. `counts`: "
        "number of copies for each local expert.");
}

// Defines index arithmetic on devices.
void define_device_arithmetic(py::module_& m) {
  py::class_<DevicePlacement>(m, "DevicePlacement",
                              "The tables of an `ExpertPlacement` on a device. Its methods do not wait for the device.")
      .def(py::init([](const ExpertPlacement& placement, const std::string& device) {
             return DevicePlacement(placement, c10::Device(device));
           }),
           py::arg("placement"), py::arg("device"), ReleaseGil())
      .def("choose", &choose_replicas_on_device, py::arg("expert_ids"), py::arg("rank"), ReleaseGil(),
           "Like `ExpertPlacement.choose` without nodes, on the device.")
      .def(
          "route",
          [](const DevicePlacement& placement, const at::Tensor& codes, int64_t rows_per_rank) {
            const DeviceRoutes routes = route_rows_on_device(placement, codes, rows_per_rank);
            return std::make_tuple(routes.send_rows, routes.rows_of_token, routes.dropped);
          },
          py::arg("codes"), py::arg("rows_per_rank"), ReleaseGil(),
          "Returns (send_rows, rows_of_token, number of codes without a row). The first two are arguments of a "
          "`RowExchange` with `rows_per_rank` rows for each rank.");
  m.def(
      "expand_rows_on_device",
      [](const at::Tensor& codes, int64_t first_replica, int64_t num_local, const std::optional<at::Tensor>& origins,
         int64_t capacity, int64_t max_pairs) {
        const DeviceExpansion e = expand_rows_on_device(codes, first_replica, num_local, origins, capacity, max_pairs);
        return std::make_tuple(e.pairs, e.copies, e.counts, e.dropped);
      },
      py::arg("codes"), py::arg("first_replica"), py::arg("num_local"), py::arg("origins"), py::arg("capacity"),
      py::arg("max_pairs"), ReleaseGil(),
      "Like `expand_rows`, for at most `max_pairs` copies in all and `capacity` copies for each expert. Also returns "
      "the number of dropped copies.");
}

// Defines exchanges, gathers and sums of rows.
void define_rows(py::module_& m) {
  py::class_<RowExchange>(m, "RowExchange",
                          "The rows that the ranks of a group send each other, and the sums of the results that they "
                          "send back (csrc/runtime/expert_exchange.h). Parts are tensors [rows, width].")
      .def(
          py::init([](const std::string& group, const std::string& group_device, const at::Tensor& send_rows,
                      const at::Tensor& rows_of_token, const std::vector<int64_t>& send_counts,
                      const std::vector<int64_t>& receive_counts) {
            return RowExchange(group_named(group), c10::Device(group_device).type(), send_rows, rows_of_token,
                               send_counts, receive_counts);
          }),
          py::arg("group_name"), py::arg("group_device"), py::arg("send_rows"), py::arg("rows_of_token"),
          py::arg("send_counts"), py::arg("receive_counts"),
          "`group_device`: the type of device whose tensors the group transfers. `send_rows`: row numbers by receiving "
          "rank; -1 is a row of zeros. `rows_of_token`: [rows, columns], the indices of each row in `send_rows`, then "
          "-1.")
      .def_property_readonly("num_rows", &RowExchange::num_rows, "Number of rows of the parts that `send` takes.")
      .def_property_readonly("num_received", &RowExchange::num_received,
                             "Number of rows that this rank receives, including the rows from itself.")
      .def_property_readonly("num_sent_to_others", &RowExchange::num_sent_to_others)
      .def_property_readonly("num_received_from_others", &RowExchange::num_received_from_others)
      .def("send", &RowExchange::send, py::arg("step"), py::arg("parts"), ReleaseGil(),
           "Sends the rows of all parts. Returns the received rows of each part, ordered by sending rank. Raises "
           "DistBackendError that names `step` if the transfer fails.")
      .def("send_back", &RowExchange::send_back, py::arg("step"), py::arg("parts"), ReleaseGil(),
           "Sends results for received rows back. Returns, for each part, the sum of the results of each row.");
  m.def(
      "exchange_words",
      [](const std::string& group, const std::string& step, const at::Tensor& words, const std::string& device) {
        return exchange_words(*group_named(group), step, words, c10::Device(device));
      },
      py::arg("group_name"), py::arg("step"), py::arg("words"), py::arg("device"), ReleaseGil(),
      "Sends row r of `words` ([group size, n], int64, in host memory) to rank r. Returns a tensor whose row r is from "
      "rank r. The transfer uses `device`.");
  m.def("record_bytes", &record_bytes, py::arg("parts"),
        "Returns the bytes that are sent for one row of these parts, with padding.");
  m.def("take_rows", &take_rows, py::arg("rows"), py::arg("index"), ReleaseGil(),
        "Returns a tensor whose row i is ``rows[index[i]]``, or zeros if ``index[i]`` is -1.");
  m.def("sum_rows", &sum_rows, py::arg("rows"), py::arg("table"), py::arg("weights"), ReleaseGil(),
        "Returns a tensor whose row m is the sum over j of ``weights[m, j] * rows[table[m, j]]``, without entries of "
        "-1. None means weights of 1.");
  m.def(
      "take_weighted_rows", &take_weighted_rows, py::arg("rows"), py::arg("pairs"), py::arg("weights"), ReleaseGil(),
      "Returns, for each pair p (an index into the flat `weights` of shape [rows, n]), the row ``rows[p // n]`` times "
      "weight p; zeros for -1.");
  m.def(
      "dot_rows",
      [](const at::Tensor& rows, const at::Tensor& table, const at::Tensor& others, const at::Tensor& like) {
        return dot_rows(rows, table, others, like.scalar_type());
      },
      py::arg("rows"), py::arg("table"), py::arg("others"), py::arg("like"), ReleaseGil(),
      "Returns a tensor of the dtype of `like`: element (m, j) is the dot product of ``rows[table[m, j]]`` and "
      "``others[m]``, 0 for -1.");
}

}  // namespace

void define_experts(py::module_& m) {
  define_index_arithmetic(m);
  define_device_arithmetic(m);
  define_rows(m);
}

}  // namespace shardwright
