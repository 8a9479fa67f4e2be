#include "runtime/batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "cost/lowering.h"
#include "runtime/executor.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The origin of a batch, which has no plans.
class BatchOrigin : public Origin {
 public:
  explicit BatchOrigin(std::shared_ptr<const BatchPlan> plan) : plan_(std::move(plan)) {}

  const char* kind() const override { return "batch"; }
  std::vector<Plan> plans() const override { return {}; }
  std::vector<Rank> ranks() const override { return plan_->ranks(); }
  std::string title() const override { return concat("batch of ", plan_->batch().items.size(), " items"); }
  std::string text() const override {
    return concat(title(), " in ", plan_->num_rounds(), " rounds of up to ", plan_->bucket_bytes(), " bytes");
  }
  Signature signature() const override {
    return {{"batch", text()}, {"digest", concat(plan_->batch().digests().back())}};
  }

 private:
  std::shared_ptr<const BatchPlan> plan_;
};

// True if the program was compiled for tensors with these strides.
bool is_compiled_for(const Program& program, const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].strides().equals(*program.buffers[i].strides)) return false;
  }
  return true;
}

// Returns the sources, then the destinations, in the order of the program's buffers.
std::vector<at::Tensor> joined(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) {
  sources.insert(sources.end(), destinations.begin(), destinations.end());
  return sources;
}

const Program& program_of(const Execution& execution) { return execution.compiled().program(); }

}  // namespace

BatchHandle::BatchHandle(std::shared_ptr<Execution> execution, at::Tensor token)
    : execution_(std::move(execution)), token_(std::move(token)) {}

void BatchHandle::wait_for_sources() const { execution_->wait_until(execution_->compiled().end_of_input_reads()); }
void BatchHandle::wait_for_destination(int destination) const {
  execution_->wait_until(program_of(*execution_).destination_ends.at(destination).written);
}
void BatchHandle::wait_for_destination_and_sends(int destination) const {
  execution_->wait_until(program_of(*execution_).destination_ends.at(destination).sent);
}
void BatchHandle::wait() const {
  execution_->wait_until(static_cast<int>(program_of(*execution_).instructions.size()));
}
bool BatchHandle::is_done() const { return execution_->is_done(); }

std::vector<int> BatchHandle::completion_order() const {
  const std::vector<DestinationEnd>& ends = program_of(*execution_).destination_ends;
  std::vector<int> order(ends.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ends[a].sent < ends[b].sent; });
  return order;
}

BoundBatch::BoundBatch(std::shared_ptr<const BatchPlan> plan, Rank rank, RankGroupPtr group,
                       c10::DeviceType group_device)
    : plan_(std::move(plan)), rank_(rank), group_(std::move(group)), group_device_(group_device) {
  const std::vector<Rank>& ranks = plan_->ranks();
  check_user(ranks.empty() || to_int(ranks.back()) < group_->size(), "group must have rank ",
             ranks.empty() ? Rank{0} : ranks.back(), " of the layouts' meshes, got ", group_->size(), " ranks");
}

void BoundBatch::run(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const {
  const std::vector<at::Tensor> tensors = joined(std::move(sources), destinations);
  run_all(executable_for(tensors), tensors);
}

BatchHandle BoundBatch::start(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const {
  const std::vector<at::Tensor> tensors = joined(std::move(sources), destinations);
  const at::Tensor token = at::empty({0});
  return {start_all(executable_for(tensors), tensors, token), token};
}

ExecutablePtr BoundBatch::executable_for(const std::vector<at::Tensor>& tensors) const {
  const Batch& batch = plan_->batch();
  TORCH_CHECK_VALUE(tensors.size() == batch.sources.size() + batch.destinations.size(),
                    "sources and destinations must be lists of ", batch.sources.size(), " and ",
                    batch.destinations.size(), " tensors, got ", tensors.size(), " in all");
  const bool through_host = group_device_ == c10::kCPU && !tensors.empty() && !tensors.front().device().is_cpu();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!executable_ || executable_->program().stages_on_host != through_host ||
      !is_compiled_for(executable_->program(), tensors)) {
    executable_ = compile_for(tensors, through_host);
  }
  return executable_;
}

ExecutablePtr BoundBatch::compile_for(const std::vector<at::Tensor>& tensors, bool through_host) const {
  const Batch& batch = plan_->batch();
  BatchStrides strides;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool is_source = i < batch.sources.size();
    const Layout& layout = is_source ? batch.sources[i] : batch.destinations[i - batch.sources.size()];
    const std::string name = is_source ? concat("source ", i) : concat("destination ", i - batch.sources.size());
    check_strided(tensors[i], name);
    const std::vector<int64_t> shape = layout.local_shape_of_rank(rank_);
    TORCH_CHECK_VALUE(tensors[i].sizes().equals(shape), name, " must have shape ", c10::IntArrayRef(shape), " on rank ",
                      rank_, ", got ", tensors[i].sizes(), " (", layout.to_string(), ")");
    (is_source ? strides.sources : strides.destinations).push_back(tensors[i].strides().vec());
  }
  Program program = compile_batch(*plan_, rank_, group_->size(), strides, through_host);
  auto compiled = std::make_shared<const CompiledProgram>(
      std::move(program), group_device_ == c10::kCPU ? Lowering::kGloo : Lowering::kNccl, plan_->num_rounds() > 0,
      std::make_unique<BatchOrigin>(plan_), rank_);
  return std::make_shared<const Executable>(std::move(compiled), std::vector<RankGroupPtr>{group_});
}

}  // namespace shardwright
