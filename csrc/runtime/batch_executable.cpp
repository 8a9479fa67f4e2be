#include "runtime/batch_executable.h"

#include <c10/util/Exception.h>

#include <utility>

#include "support/error.h"

namespace shardwright {

BatchExecutable::BatchExecutable(std::shared_ptr<const BatchProgram> program, RankGroupPtr group, c10::DeviceType wire)
    : program_(std::move(program)), group_(std::move(group)), wire_(wire) {
  const std::vector<Rank>& ranks = program_->plan().ranks();
  check_user(ranks.empty() || number(ranks.back()) < group_->size(), "group: has ", group_->size(),
             " ranks; the layouts' meshes have rank ", ranks.empty() ? Rank{0} : ranks.back());
  const Batch& batch = program_->plan().batch();
  for (const Layout& layout : batch.sources) {
    source_shapes_.push_back(layout.local_shape_of_rank(program_->rank()));
  }
  for (const Layout& layout : batch.destinations) {
    destination_shapes_.push_back(layout.local_shape_of_rank(program_->rank()));
  }
  for (const BatchRound& round : program_->rounds()) received_bytes_ += round.received_bytes;
}

void BatchExecutable::check(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations) const {
  const Batch& batch = program_->plan().batch();
  TORCH_CHECK_VALUE(sources.size() == batch.sources.size(), "sources: got ", sources.size(), " tensors; allowed are ",
                    batch.sources.size());
  TORCH_CHECK_VALUE(destinations.size() == batch.destinations.size(), "destinations: got ", destinations.size(),
                    " tensors; allowed are ", batch.destinations.size());
  all_tensors(sources, destinations, [&](size_t i, const at::Tensor& tensor) {
    const bool is_source = i < sources.size();
    const size_t index = is_source ? i : i - sources.size();
    const Layout& layout = (is_source ? batch.sources : batch.destinations)[index];
    const std::vector<int64_t>& shape = (is_source ? source_shapes_ : destination_shapes_)[index];
    const char* side = is_source ? "source " : "destination ";
    TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested(), side, index,
                      ": allowed are strided tensors");
    TORCH_CHECK_VALUE(tensor.sizes().equals(shape), side, index, ": has shape ", tensor.sizes(), " on rank ",
                      program_->rank(), ", where ", layout.to_string(), " has ", c10::IntArrayRef(shape));
    TORCH_CHECK_VALUE(static_cast<int64_t>(tensor.element_size()) == layout.dtype().size_bytes(), side, index, ": is ",
                      c10::toString(tensor.scalar_type()), ", where the layout is ", layout.dtype().name());
    const at::Tensor& first = sources.empty() ? destinations.front() : sources.front();
    TORCH_CHECK_VALUE(tensor.device() == first.device(), side, index, ": is on ", tensor.device(),
                      "; allowed is one device, and the first tensor is on ", first.device());
    return true;
  });
}

std::shared_ptr<const PreparedBatch> BatchExecutable::prepared(const std::vector<at::Tensor>& sources,
                                                               const std::vector<at::Tensor>& destinations) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!prepared_ || !prepared_->fits(sources, destinations)) {
    prepared_ = std::make_shared<const PreparedBatch>(prepare_copies(*program_, sources, destinations));
  }
  return prepared_;
}

}  // namespace shardwright
