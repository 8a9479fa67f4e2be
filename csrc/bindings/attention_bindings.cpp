// _planner: attention over a sequence that is sharded over ranks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/block_products.h"
#include "attention/choose.h"
#include "attention/compile.h"
#include "attention/serialize.h"
#include "bindings/arguments.h"
#include "bindings/views.h"
#include "products/timeline.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// By position: the [begin, end) intervals of a rank.
using Parts = std::vector<std::vector<std::pair<int64_t, int64_t>>>;

// Batch, heads, heads of keys and values, depth, depth of values.
using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
// Dtype and shape of a mask tensor.
using MaskForm = std::pair<std::string, std::tuple<int64_t, int64_t, int64_t, int64_t>>;

// Returns the mask tensor with this dtype and shape.
MaskTensor mask_of(const MaskForm& form) {
  const auto& [batch, heads, rows, columns] = form.second;
  return {DType::parse(form.first), batch, heads, rows, columns};
}

// Returns the parts as lists of intervals.
std::vector<IntervalList> intervals_of(const Parts& parts) {
  std::vector<IntervalList> all;
  for (const auto& part : parts) {
    IntervalList runs;
    for (const auto& [begin, end] : part) append(runs, Interval{begin, end});
    all.push_back(std::move(runs));
  }
  return all;
}

// The constructor in Python. Throws UserError if the arguments contradict each other.
Attention attention_of(const std::shared_ptr<Mesh>& mesh, const std::string& dtype, const Sizes& sizes,
                       const Parts& parts, const std::optional<Parts>& key_parts, bool keys_are_whole, bool is_causal,
                       std::optional<int64_t> window, std::vector<int64_t> documents,
                       const std::optional<MaskForm>& mask, double scale, int64_t chunks, const Lowering& lowering) {
  Attention a;
  a.mesh = mesh;
  a.dtype = DType::parse(dtype);
  std::tie(a.batch, a.heads, a.kv_heads, a.depth, a.value_depth) = sizes;
  a.parts = intervals_of(parts);
  if (key_parts) a.key_parts = intervals_of(*key_parts);
  a.keys_are_whole = keys_are_whole;
  a.mask = {is_causal, window, std::move(documents)};
  if (mask) a.mask_tensor = mask_of(*mask);
  a.scale = scale;
  a.chunks = chunks;
  a.lowering = lowering;
  a.method = AttentionMethod::kSerial;
  check(a);
  return a;
}

// Returns the program of a rank, forward or backward.
Program program_of(const Attention& a, int64_t rank, bool is_backward) {
  return is_backward ? compile_attention_backward(a, Rank{rank}) : compile_attention(a, Rank{rank});
}

// Returns the given topology, or the default one of the lowering.
Topology topology_of(const Attention& a, const std::optional<Topology>& topology) {
  return topology ? *topology : Topology::named(a.lowering.default_topology);
}

// Returns an attention with another method. Throws UserError if the method is not possible.
Attention with_method(Attention attention, const std::string& method, const std::optional<Topology>& topology) {
  attention.method = parse_attention_method(method);
  const bool has_nodes = attention.method == AttentionMethod::kTwoLevel;
  attention.ranks_per_node = has_nodes ? ranks_per_node_of(*attention.mesh, topology_of(attention, topology)) : 0;
  check(attention);
  return attention;
}

// Returns an attention for a mask tensor of another dtype or shape.
Attention with_mask(Attention attention, const MaskForm& form) {
  attention.mask_tensor = mask_of(form);
  check(attention);
  return attention;
}

// Defines the methods that predict times and choose an attention method.
void define_predictions(py::class_<Attention>& attention) {
  attention
      .def(
          "choose",
          [](const Attention& a, const std::optional<Topology>& topology, const GemmModel& model, bool with_backward) {
            return std::string(method_name(choose(a, topology_of(a, topology), model, with_backward)));
          },
          py::arg("topology"), py::arg("model"), py::arg("with_backward"),
          "Returns the method predicted to be fastest. A topology of None is the backend's default.")
      .def(
          "forecasts",
          [](const Attention& a, const std::optional<Topology>& topology, const GemmModel& model, bool with_backward) {
            std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t>> all;
            for (const AttentionForecast& f : forecasts(a, topology_of(a, topology), model, with_backward)) {
              all.emplace_back(method_name(f.method), f.forward_ps, f.backward_ps, f.compute_ps, f.received_bytes,
                               f.peak_bytes);
            }
            return all;
          },
          py::arg("topology"), py::arg("model"), py::arg("with_backward") = true,
          "Returns for each method: name; picoseconds of the forward, of the backward, and of the forward's compute "
          "alone; bytes received by the rank that receives most, and the most bytes that a rank allocates at once, "
          "both in the forward.")
      .def(
          "describe",
          [](const Attention& a, const std::optional<Topology>& topology, const GemmModel& model) {
            return describe(a, topology_of(a, topology), model);
          },
          py::arg("topology"), py::arg("model"),
          "Returns a text with the sizes, the block products of each rank, and the predictions.");
}

// Defines the methods that return programs and texts.
void define_programs(py::class_<Attention>& attention) {
  attention
      .def(
          "program",
          [](const Attention& a, int64_t rank, bool is_backward) {
            return program_of(a, rank, is_backward).to_string();
          },
          py::arg("rank"), py::arg("backward") = false,
          "Returns the instructions of one rank, forward or backward, as text.")
      .def(
          "peak_bytes",
          [](const Attention& a, int64_t rank, bool is_backward) {
            return program_of(a, rank, is_backward).peak_bytes();
          },
          py::arg("rank"), py::arg("backward") = false, "Returns the most memory that one rank allocates at once.")
      .def(
          "to_text", [](const Attention& a, bool is_backward) { return to_text(a, is_backward); }, py::arg("backward"),
          "Returns the forward or the backward as text, which operators take.");
}

}  // namespace

void define_attention(py::module_& m) {
  py::class_<Attention> attention(m, "Attention",
                                  "Attention whose sequence is sharded over ranks (csrc/attention/attention.h).");
  attention
      .def(py::init(&attention_of), py::arg("mesh"), py::arg("dtype"), py::arg("sizes"), py::arg("parts"),
           py::kw_only(), py::arg("key_parts"), py::arg("keys_are_whole"), py::arg("is_causal"), py::arg("window"),
           py::arg("documents"), py::arg("mask"), py::arg("scale"), py::arg("chunks"), py::arg("lowering"),
           R"(Makes an attention with the method ``"serial"``; `with_method` changes the method.

Args:
    mesh: a mesh of one dim.
    dtype: of queries, keys, values and results.
    sizes: batch, heads, heads of keys and values, depth, and depth of values.
    parts: by position on the mesh, the [begin, end) intervals of the queries' sequence on that rank, in local order.
    key_parts: the same for the sequence of keys and values, or None in self-attention.
    keys_are_whole: True if every rank has all keys and values already.
    window: a query at i sees the keys j with ``|i - j| < window``; None for all keys.
    documents: the lengths of consecutive documents; tokens see only their own document. Empty for one document.
    mask: dtype and shape of this rank's mask tensor, or None.
    scale: factor of the scores.
    chunks: number of chunks of equal length at whose ends the intervals are cut into blocks; 0: none.
    lowering: of the transport that sends keys, values and results.

Raises:
    ValueError: the arguments contradict each other.)")
      .def("with_method", &with_method, py::arg("method"), py::arg("topology"),
           "Returns this attention with another method. Raises ValueError if the method is not possible: "
           "``\"two_level\"`` needs a topology with nodes.")
      .def("with_mask", &with_mask, py::arg("mask"),
           "Returns this attention for a mask tensor of this dtype and shape. Raises ValueError if they do not fit.")
      .def_property_readonly("method", [](const Attention& a) { return method_name(a.method); })
      .def_property_readonly("dtype", [](const Attention& a) { return a.dtype.name(); })
      .def_readonly("lowering", &Attention::lowering)
      .def(
          "rows", [](const Attention& a, int64_t rank) { return a.rows(position_on(*a.mesh, Rank{rank})); },
          py::arg("rank"), "Returns the number of rows of queries that a rank holds.")
      .def(
          "key_rows", [](const Attention& a, int64_t rank) { return a.key_rows(position_on(*a.mesh, Rank{rank})); },
          py::arg("rank"), "Returns the number of rows of keys that a rank holds.")
      .def("with_default_mask", &with_default_mask,
           "Returns this attention without the dtype and shape of the mask tensor, which may differ between ranks.")
      .def(
          "counts",
          [](const Attention& a, int64_t rank) {
            const BlockCounts c = count_blocks(BlockProducts(a), position_on(*a.mesh, Rank{rank}));
            return std::make_tuple(c.full, c.triangles, c.others, c.pairs);
          },
          py::arg("rank"),
          "Returns, for one rank, the numbers of block products that are full, triangular and other, and the number of "
          "(query, key) pairs that are not masked.");
  define_programs(attention);
  define_predictions(attention);
}

}  // namespace shardwright
