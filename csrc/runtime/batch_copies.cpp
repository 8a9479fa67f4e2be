#include "runtime/batch_copies.h"

#include <ATen/ops/as_strided.h>

#include <map>
#include <utility>

#include "runtime/local_ops.h"

namespace shardwright {
namespace {

// Adds boxes to the copy between the same two tensors.
class Copies {
 public:
  explicit Copies(std::vector<PreparedCopy>& copies) : copies_(copies) {}

  PreparedCopy& between(int source, int destination) {
    const auto [found, is_new] = known_.try_emplace({source, destination}, copies_.size());
    if (is_new) copies_.push_back({source, destination, {}, std::nullopt});
    return copies_[found->second];
  }

 private:
  std::vector<PreparedCopy>& copies_;
  std::map<std::pair<int, int>, size_t> known_;
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
  const auto src_strides = [&](int source) -> const std::vector<int64_t>& { return prepared.strides[source]; };
  const auto dst_strides = [&](int destination) -> const std::vector<int64_t>& {
    return prepared.strides[sources.size() + destination];
  };
  const auto close = [&](std::vector<PreparedCopy>& copies, bool from_bucket) {
    for (PreparedCopy& copy : copies) {
      const at::ScalarType to = destinations[copy.destination].scalar_type();
      if (!from_bucket && sources[copy.source].scalar_type() != to) continue;
      copy.copy.emplace(copy.boxes, static_cast<int64_t>(c10::elementSize(to)));
      copy.boxes.clear();
    }
  };

  const std::vector<BatchItem>& items = program.plan().batch().items;
  Copies kept(prepared.keep);
  for (const int item : program.own_items()) {
    const auto& [source, destination, map] = items[item];
    append(kept.between(source, destination).boxes,
           program.boxes_to_keep(item, src_strides(source), dst_strides(destination)));
  }
  close(prepared.keep, false);
  for (const BatchRound& round : program.rounds()) {
    PreparedBatch::Round& made = prepared.rounds.emplace_back();
    Copies packed(made.pack);
    for (const BatchMessage& message : round.sends) {
      for (const BatchFragment& fragment : message.fragments) {
        const auto& [source, destination, map] = items[fragment.item];
        append(packed.between(source, destination).boxes, program.boxes_to_pack(fragment, src_strides(source)));
      }
    }
    Copies unpacked(made.unpack);
    for (const BatchMessage& message : round.receives) {
      for (const BatchFragment& fragment : message.fragments) {
        const int destination = items[fragment.item].destination;
        append(unpacked.between(-1, destination).boxes, program.boxes_to_unpack(fragment, dst_strides(destination)));
      }
    }
    close(made.pack, false);
    close(made.unpack, true);
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
