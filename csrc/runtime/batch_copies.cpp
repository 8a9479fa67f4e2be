#include "runtime/batch_copies.h"

#include <ATen/ops/as_strided.h>

#include <map>
#include <tuple>
#include <utility>

#include "runtime/local_ops.h"

namespace shardwright {
namespace {

// Adds boxes to the copy between the same two tensors.
class Copies {
 public:
  explicit Copies(std::vector<PreparedCopy>& copies) : copies_(copies) {}

  std::vector<Box>& between(int source, int destination, at::ScalarType in_bucket) {
    const auto [found, is_new] = known_.try_emplace({source, destination, in_bucket}, copies_.size());
    if (is_new) copies_.push_back({source, destination, in_bucket});
    return copies_[found->second].boxes;
  }

 private:
  std::vector<PreparedCopy>& copies_;
  std::map<std::tuple<int, int, at::ScalarType>, size_t> known_;
};

void append(std::vector<Box>& to, std::vector<Box> boxes) {
  to.insert(to.end(), std::make_move_iterator(boxes.begin()), std::make_move_iterator(boxes.end()));
}

}  // namespace

bool PreparedBatch::fits(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations) const {
  if (strides.size() != sources.size() + destinations.size()) return false;
  return all_tensors(sources, destinations, [&](size_t i, const at::Tensor& tensor) {
    return tensor.scalar_type() == dtypes[i] && tensor.strides().equals(strides[i]);
  });
}

PreparedBatch prepare_copies(const BatchProgram& program, const std::vector<at::Tensor>& sources,
                             const std::vector<at::Tensor>& destinations) {
  PreparedBatch prepared;
  all_tensors(sources, destinations, [&](size_t, const at::Tensor& tensor) {
    prepared.strides.push_back(tensor.strides().vec());
    prepared.dtypes.push_back(tensor.scalar_type());
    return true;
  });
  const std::vector<std::vector<int64_t>>& strides = prepared.strides;
  const auto src_strides = [&](int source) -> const auto& { return strides[source]; };
  const auto dst_strides = [&](int destination) -> const auto& { return strides[sources.size() + destination]; };
  const Batch& batch = program.plan().batch();
  const std::vector<BatchItem>& items = batch.items;
  const auto src_dtype = [&](int source) { return sources[source].scalar_type(); };
  const auto dst_dtype = [&](int destination) { return destinations[destination].scalar_type(); };
  const auto in_bucket = [&](const BatchItem& item) {
    const bool as_source = travels_as_source(batch.sources[item.source], batch.destinations[item.destination]);
    return as_source ? src_dtype(item.source) : dst_dtype(item.destination);
  };
  const auto close = [](std::vector<PreparedCopy>& copies, const auto& from, const auto& to) {
    for (PreparedCopy& copy : copies) {
      if (from(copy) != to(copy)) continue;
      copy.copy.emplace(copy.boxes, static_cast<int64_t>(c10::elementSize(to(copy))));
      copy.boxes.clear();
    }
  };
  const auto of_source = [&](const PreparedCopy& copy) { return src_dtype(copy.source); };
  const auto of_bucket = [](const PreparedCopy& copy) { return copy.in_bucket; };
  const auto of_destination = [&](const PreparedCopy& copy) { return dst_dtype(copy.destination); };

  Copies kept(prepared.keep);
  for (const int item : program.own_items()) {
    const auto& [source, destination, map] = items[item];
    append(kept.between(source, destination, at::ScalarType::Undefined),
           program.boxes_to_keep(item, src_strides(source), dst_strides(destination)));
  }
  close(prepared.keep, of_source, of_destination);
  for (const BatchRound& round : program.rounds()) {
    PreparedBatch::Round& made = prepared.rounds.emplace_back();
    Copies packed(made.pack);
    for (const BatchMessage& message : round.sends) {
      for (const BatchFragment& fragment : message.fragments) {
        const BatchItem& item = items[fragment.item];
        append(packed.between(item.source, item.destination, in_bucket(item)),
               program.boxes_to_pack(fragment, src_strides(item.source)));
      }
    }
    Copies unpacked(made.unpack);
    for (const BatchMessage& message : round.receives) {
      for (const BatchFragment& fragment : message.fragments) {
        const BatchItem& item = items[fragment.item];
        append(unpacked.between(-1, item.destination, in_bucket(item)),
               program.boxes_to_unpack(fragment, dst_strides(item.destination)));
      }
    }
    close(made.pack, of_source, of_bucket);
    close(made.unpack, of_bucket, of_destination);
  }
  return prepared;
}

at::Tensor view_as(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, bytes.numel() / size * size).view(dtype);
}

void run_copy(const PreparedCopy& copy, const at::Tensor& src, const at::Tensor& dst) {
  at::Tensor to = dst;
  if (copy.copy) return run(*copy.copy, src, to);
  for (const Box& box : copy.boxes) {
    at::as_strided(to, box.sizes, box.dst_strides, to.storage_offset() + box.dst_offset)
        .copy_(at::as_strided(src, box.sizes, box.src_strides, src.storage_offset() + box.src_offset));
  }
}

}  // namespace shardwright
