// _planner: batches of many tensors, and their plans.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "batch/batch.h"
#include "batch/batch_certificate.h"
#include "batch/batch_plan.h"
#include "batch/reductions.h"
#include "bindings/arguments.h"
#include "bindings/views.h"

namespace shardwright {
namespace {

// Source dim, destination dim, first index in the source, first index in the destination, length. An absent dim is -1.
using AxisNumbers = std::array<int64_t, 5>;
// Index of the source, index of the destination, axes (nullopt: the full tensor).
using ItemParts = std::tuple<int, int, std::optional<std::vector<AxisNumbers>>>;

// The class of batch plans in Python.
struct BatchPlanView {
  std::shared_ptr<const BatchPlan> plan;
  BatchCertificate certificate;
};

// The constructor of batches in Python. Throws UserError for invalid arguments.
Batch batch_of(const std::vector<std::shared_ptr<Layout>>& sources,
               const std::vector<std::shared_ptr<Layout>>& destinations, const std::vector<ItemParts>& items,
               const Typed<int64_t>& bucket_bytes, const Typed<int64_t>& buckets,
               const Typed<int64_t>& first_sender_group) {
  Batch batch;
  batch.bucket_bytes = integer(bucket_bytes, "bucket_bytes");
  batch.buckets = integer(buckets, "buckets");
  batch.first_sender_group = integer(first_sender_group, "first_sender_group");
  for (const auto& layout : sources) batch.sources.push_back(*layout);
  for (const auto& layout : destinations) batch.destinations.push_back(*layout);
  for (const auto& [source, destination, axes] : items) {
    if (axes) {
      std::vector<MapAxis> map_axes;
      for (const AxisNumbers& a : *axes) {
        map_axes.push_back({static_cast<int>(a[0]), static_cast<int>(a[1]), a[2], a[3], a[4]});
      }
      batch.items.push_back({source, destination, IndexMap(std::move(map_axes))});
    } else {
      check_user(source >= 0 && source < static_cast<int64_t>(sources.size()), "source of item ", batch.items.size(),
                 " must be ", IndexInRange{std::ssize(sources), "sources"}, ", got ", source);
      batch.items.push_back({source, destination, IndexMap::identity(sources[source]->tensor_shape())});
    }
  }
  batch.check();
  return batch;
}

// Defines the class BatchPlan.
void define_plan_of_batch(py::module_& m) {
  const auto value_of = [](int64_t BatchCertificate::* member) {
    return [member](const BatchPlanView& v) { return v.certificate.*member; };
  };
  using Certificate = BatchCertificate;
  py::class_<BatchPlanView>(m, "BatchPlan",
                            "The plan of a batch and its costs. ``str(plan)`` describes it. Maxima are over ranks.")
      .def(py::init([](const Batch& batch) {
             auto plan = std::make_shared<const BatchPlan>(batch);
             BatchCertificate certificate = certificate_of(*plan);
             return BatchPlanView{std::move(plan), std::move(certificate)};
           }),
           py::arg("batch"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "ranks", [](const BatchPlanView& v) { return to_ints(v.plan->ranks()); },
          "The ranks of all layouts, ascending.")
      .def_property_readonly("num_items", value_of(&Certificate::items))
      .def_property_readonly("num_kinds", value_of(&Certificate::kinds),
                             "Number of kinds of items. Items of one kind have equal layouts and maps.")
      .def_property_readonly("received_bytes_max", value_of(&Certificate::received_bytes_max),
                             "Bytes received by the rank that receives most. No plan can have fewer.")
      .def_property_readonly("received_bytes_sum", value_of(&Certificate::received_bytes_sum),
                             "Bytes received by all ranks.")
      .def_property_readonly("kept_bytes_sum", value_of(&Certificate::kept_bytes_sum), "Bytes that are copied locally.")
      .def_property_readonly("sent_bytes_max", value_of(&Certificate::sent_bytes_max),
                             "Bytes sent by the rank that sends most.")
      .def_property_readonly("sent_bytes_bound", value_of(&Certificate::sent_bytes_bound),
                             "A lower bound on `sent_bytes_max` if only ranks that hold the data send it.")
      .def_property_readonly(
          "sent_bound_is_exact", [](const BatchPlanView& v) { return v.certificate.sent_bound_is_exact; },
          "True if some way of sending reaches `sent_bytes_bound`; False if that is not known.")
      .def_property_readonly("num_rounds", value_of(&Certificate::rounds), "Number of rounds of messages.")
      .def_property_readonly("rounds_bound", value_of(&Certificate::rounds_bound),
                             "A lower bound on the number of rounds with the requested `bucket_bytes`.")
      .def_property_readonly("messages_max", value_of(&Certificate::messages_max),
                             "Messages received by the rank that receives most.")
      .def_property_readonly("messages_sum", value_of(&Certificate::messages_sum), "Messages received by all ranks.")
      .def_property_readonly(
          "messages_are_exact", [](const BatchPlanView& v) { return v.certificate.messages_are_exact; },
          "True if `messages_max` and `messages_sum` are exact; if not, they are upper bounds.")
      .def_property_readonly("reductions", value_of(&Certificate::reductions),
                             "Number of sources with pending reductions, which are reduced before anything is sent.")
      .def_property_readonly("reduction_bytes_sum", value_of(&Certificate::reduction_bytes_sum),
                             "Bytes received by all ranks for these reductions.")
      .def_property_readonly("reduced_bytes_max", value_of(&Certificate::reduced_bytes_max),
                             "Bytes of the reduced parts on the rank that holds most of them.")
      .def_property_readonly("reducing_bytes_max", value_of(&Certificate::reducing_bytes_max),
                             "Temporary bytes of the reduction that needs most, besides its result.")
      .def_property_readonly("bucket_bytes", value_of(&Certificate::bucket_bytes), "Size of a bucket.")
      .def_property_readonly("buckets", value_of(&Certificate::buckets), "Number of buckets on each rank.")
      .def_property_readonly("memory_bytes", value_of(&Certificate::memory_bytes),
                             "Extra bytes of memory on each rank: buckets * bucket_bytes. With reductions, an upper "
                             "bound that includes them.")
      .def("to_json", [](const BatchPlanView& v) { return v.certificate.to_json(); })
      .def("__str__", [](const BatchPlanView& v) { return v.certificate.to_string(); })
      .def("__repr__", [](const BatchPlanView& v) {
        return concat("<BatchPlan of ", v.certificate.items, " items in ", v.certificate.rounds, " rounds>");
      });
}

}  // namespace

void define_batch(py::module_& m) {
  py::class_<Batch>(
      m, "Batch",
      "Tensors that are moved together.\n\n`sources` and `destinations` are layouts. An item is (index of a source, "
      "index of a destination, axes). An axis is (source dim, destination dim, first index in the source, first index "
      "in the destination, length), with -1 for an absent dim. Axes of None mean the full tensor. `bucket_bytes` and "
      "`buckets` are the maximum size of a rank's buckets, and the maximum number of them. `first_sender_group` is the "
      "sender group (csrc/batch/item_family.h) that is tried first.")
      .def(py::init(&batch_of), py::arg("sources"), py::arg("destinations"), py::arg("items"),
           py::arg("bucket_bytes") = Batch::kDefaultBucketBytes, py::arg("buckets") = Batch::kDefaultBuckets,
           py::arg("first_sender_group") = 0)
      .def_property_readonly("num_items", [](const Batch& batch) { return batch.items.size(); })
      .def("digests", &Batch::digests, py::call_guard<py::gil_scoped_release>(),
           "Returns a digest of the settings, then a digest for each item, which covers the settings and all items up "
           "to it.")
      .def(
          "reductions",
          [](const Batch& batch) {
            std::map<int, std::shared_ptr<Layout>> reduced;
            for (const BatchReduction& reduction : reductions_of(batch)) {
              reduced.emplace(reduction.source, std::make_shared<Layout>(reduction.after));
            }
            return reduced;
          },
          py::call_guard<py::gil_scoped_release>(),
          "Returns, for each source with pending reductions, its index and the layout to which it is reduced first.")
      .def("item_text", &Batch::item_text, py::arg("item"), "Returns the description of an item, given by its index.")
      .def(
          "to_bytes", [](const Batch& batch) { return py::bytes(batch.to_bytes()); },
          "Returns the batch in the form that the runtime takes.");
  define_plan_of_batch(m);
}

}  // namespace shardwright
