#include "runtime/executable.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/serialize.h"
#include "program/order.h"
#include "program/transfer_traffic.h"
#include "runtime/open_groups.h"
#include "runtime/side_stream.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the description of a step that communicates. The group of a crossing or rearrangement has the ranks of both
// meshes.
Communication communication_of(const Step& step) {
  Communication communication;
  communication.op = step_op_name(step.op);
  communication.mesh_dims = step.mesh_dims.to_vector();
  communication.group_size = is_cross_or_rearrange(step.op)
                                 ? static_cast<int64_t>(ranks_of(step.before.mesh(), step.after.mesh()).size())
                                 : step.before.mesh().group_size(step.mesh_dims);
  for (const int d : communication.mesh_dims) {
    const Placement& before = step.before.placements()[d];
    const Placement& after = step.after.placements()[d];
    if (before.is_partial()) communication.reduce_op = reduce_op_name(before.op);
    if (before.is_shard_like()) communication.gather_dim = before.dim;
    if (after.is_shard_like()) communication.shard_dim = after.dim;
  }
  return communication;
}

// Returns the ranks of a layout's mesh as text: "[0, 2, 4]", or "0 to 127" for more than 64 ranks 0, 1, 2, ...
std::string ranks_text(const Layout& layout) {
  const Mesh& mesh = layout.mesh();
  if (mesh.size() > 64 && mesh.ranks_are_positions()) return concat("0 to ", mesh.size() - 1);
  return concat("[", join(mesh.ranks()), "]");
}

// Returns the signature of a redistribute.
Signature signature_of(const Plan& plan, const std::string& plan_bytes) {
  std::vector<std::string> steps;
  for (const Step& step : plan.steps) {
    steps.push_back(step_name(step));
  }
  // The hash covers everything else in a plan, such as its topology.
  const size_t bytes = std::hash<std::string>()(plan_bytes);
  return {{"tensor", concat(plan.src.dtype().name(), "[", join(plan.src.shape()), "]")},
          {"dtype", plan.src.dtype().name()},
          {"mesh", crosses(plan) ? concat(plan.src.mesh().to_string(), " -> ", plan.dst.mesh().to_string())
                                 : plan.src.mesh().to_string()},
          {"ranks", crosses(plan) ? concat(ranks_text(plan.src), " -> ", ranks_text(plan.dst)) : ranks_text(plan.src)},
          {"src", plan.src.placements_string()},
          {"dst", plan.dst.placements_string()},
          {"backend", std::string(plan.lowering.name)},
          {"objective", objective_name(plan.objective)},
          {"topology", plan.topology.name},
          {"steps", steps.empty() ? "none" : join(steps)},
          {"plan bytes", concat(plan_bytes.size(), " with hash ", bytes)}};
}

// Returns CompiledProgram::offset_of_input. It looks for the interval of the destination that contains the input's only
// interval.
std::optional<int64_t> find_offset_of_input(const Plan& plan, Rank rank) {
  const std::optional<int64_t> from = plan.src.mesh().position_of(rank);
  const std::optional<int64_t> to = plan.dst.mesh().position_of(rank);
  const bool only_moves = plan.src.partial_dims().empty() && plan.dst.partial_dims().empty();
  if (plan.steps.size() != 1 || !only_moves || !from || !to) return std::nullopt;
  if (plan.src.ndim() != 1 || plan.dst.ndim() != 1) return std::nullopt;
  const IntervalList held = plan.src.region(*from)[0];
  const IntervalList needed = plan.dst.region(*to)[0];
  if (held.size() != 1) return std::nullopt;
  int64_t position = 0;  // of `interval` in the output
  for (const Interval& interval : needed) {
    if (interval.begin <= held[0].begin && held[0].end <= interval.end)
      return position + held[0].begin - interval.begin;
    position += interval.end - interval.begin;
  }
  return std::nullopt;
}

// The origin of a redistribute. It keeps the plan as bytes, and decodes them on each call.
class PlanOrigin : public Origin {
 public:
  explicit PlanOrigin(std::string plan_bytes) : plan_bytes_(std::move(plan_bytes)) {}

  const char* kind() const override { return "redistribute"; }
  std::vector<Plan> plans() const override { return {from_bytes(plan_bytes_)}; }
  std::string text() const override { return to_string(from_bytes(plan_bytes_)); }
  Signature signature() const override { return signature_of(from_bytes(plan_bytes_), plan_bytes_); }

 private:
  std::string plan_bytes_;
};

}  // namespace

std::string Origin::title() const {
  const Plan plan = plans().front();
  return concat(kind(), " ", plan.src.placements_string(), " -> ", plan.dst.placements_string());
}

std::vector<Rank> Origin::ranks() const {
  const Plan plan = plans().front();
  return crosses(plan) ? ranks_of(plan) : plan.src.mesh().ranks();
}

std::shared_ptr<const CompiledProgram> CompiledProgram::from_plan_bytes(const std::string& plan_bytes, Rank rank) {
  const Plan plan = from_bytes(plan_bytes);
  return std::make_shared<CompiledProgram>(compile(plan, rank), std::vector<const Plan*>{&plan},
                                           std::make_unique<PlanOrigin>(plan_bytes), rank);
}

CompiledProgram::CompiledProgram(Program program, const std::vector<const Plan*>& plans, std::unique_ptr<Origin> origin,
                                 Rank rank)
    : program_(std::move(program)),
      lifetimes_(program_.lifetimes()),
      origin_(std::move(origin)),
      rank_(rank),
      lowering_(plans.front()->lowering) {
  set_predecessors();
  for (const Plan* plan : plans) {
    received_bytes_ += traffic_at(*plan, rank_).received_bytes;
    for (const Step& step : plan->steps) {
      is_collective_ = is_collective_ || shardwright::communicates(step);
      divides_integers_ = divides_integers_ || (step.op == StepOp::kPartition && !program_.dtype.has_fractions());
    }
  }
  if (plans.size() == 1) offset_of_input_ = find_offset_of_input(*plans.front(), rank_);
  set_dtypes();
  set_indices();
}

CompiledProgram::CompiledProgram(Program program, Lowering lowering, bool is_collective, std::unique_ptr<Origin> origin,
                                 Rank rank)
    : program_(std::move(program)),
      lifetimes_(program_.lifetimes()),
      origin_(std::move(origin)),
      rank_(rank),
      lowering_(lowering),
      is_collective_(is_collective) {
  set_predecessors();
  for (const Instruction& instruction : program_.instructions) {
    received_bytes_ += traffic_of(program_, instruction.operation).received_bytes;
  }
  set_dtypes();
  set_indices();
}

void CompiledProgram::set_predecessors() {
  is_predecessor_.resize(program_.instructions.size(), false);
  if (lowering_.is_on_device) predecessors_ = order_of_transfers(program_);
  for (const int instruction : predecessors_) {
    if (instruction >= 0) is_predecessor_[instruction] = true;
  }
}

void CompiledProgram::set_dtypes() {
  dtypes_.resize(program_.buffers.size(), at::ScalarType::Undefined);
  for (size_t b = program_.buffers.size(); b-- > 0;) {
    const Buffer& buffer = program_.buffers[b];
    if (buffer.dtype != program_.dtype) {
      dtypes_[b] = scalar_type_of(buffer.dtype);
    } else if (buffer.role == BufferRole::kInput) {
      dtype_input_ = static_cast<int>(b);
    }
  }
  const DTypeKind kind = program_.dtype.kind();
  is_sent_as_bytes_ = kind == DTypeKind::kOpaque || kind == DTypeKind::kComplex || program_.dtype == DType::kInt16;
}

void CompiledProgram::set_indices() {
  const std::vector<Instruction>& instructions = program_.instructions;
  copies_.resize(instructions.size());
  const auto is_wait = [](const Instruction& i) { return std::holds_alternative<Wait>(i.operation); };
  first_wait_ =
      static_cast<int>(std::find_if(instructions.begin(), instructions.end(), is_wait) - instructions.begin());
  for (int i = 0; i < static_cast<int>(instructions.size()); ++i) {
    const Operation& operation = instructions[i].operation;
    if (const auto* copy = std::get_if<Copy>(&operation)) {
      const bool casts = program_.src_dtype(*copy) != program_.dst_dtype(*copy);
      const bool is_local = program_.buffers[copy->src].is_on_host == program_.buffers[copy->dst].is_on_host;
      if (!casts && is_local) copies_[i].emplace(copy->boxes, program_.src_dtype(*copy).size_bytes());
    }
    if (const auto* gemm = std::get_if<Gemm>(&operation); gemm != nullptr && gemm->flags) {
      flagged_product_ = i;
      flagged_result_ = gemm->dst.buffer;
    }
    if (is_communication(operation)) last_communication_ = i;
    if (is_communication(operation) && i < first_wait_) end_of_first_transfers_ = i + 1;
    const bool is_exchange =
        std::holds_alternative<AllToAll>(operation) || std::holds_alternative<SendReceive>(operation);
    if (is_communication(operation) && !is_exchange) end_of_collectives_ = i + 1;
    const std::vector<BufferId> buffers = buffers_of(operation);
    if (std::none_of(buffers.begin(), buffers.end(), [&](BufferId b) { return program_.is_input(b); })) continue;
    if (is_communication(operation) || i > first_wait_) reads_input_after_start_ = true;
    if (!is_communication(operation) || i > first_wait_) end_of_input_reads_ = i + 1;
  }
}

// These are the options of the first input of the program's own dtype. Without such an input, the device is that of the
// first tensor.
at::TensorOptions CompiledProgram::own_options(c10::ArrayRef<at::Tensor> tensors) const {
  if (tensors.empty()) return at::TensorOptions().device(at::kCPU).dtype(scalar_type_of(program_.dtype));
  const bool has_own_dtype = dtype_input_ >= 0;
  const at::TensorOptions options =
      tensors[has_own_dtype ? dtype_input_ : 0].options().requires_grad(false).memory_format(std::nullopt);
  return has_own_dtype ? options : options.dtype(scalar_type_of(program_.dtype));
}

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype.id()) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kBool:
      return at::kBool;
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kUInt16:
      return at::kUInt16;
    case DType::kUInt32:
      return at::kUInt32;
    case DType::kUInt64:
      return at::kUInt64;
    case DType::kComplex32:
      return at::kComplexHalf;
    case DType::kComplex64:
      return at::kComplexFloat;
    case DType::kComplex128:
      return at::kComplexDouble;
    case DType::kFloat8E4M3FN:
      return at::kFloat8_e4m3fn;
    case DType::kFloat8E4M3FNUZ:
      return at::kFloat8_e4m3fnuz;
    case DType::kFloat8E5M2:
      return at::kFloat8_e5m2;
    case DType::kFloat8E5M2FNUZ:
      return at::kFloat8_e5m2fnuz;
    case DType::kFloat8E8M0FNU:
      return at::kFloat8_e8m0fnu;
  }
  throw InvariantError(concat("no torch dtype for ", dtype.name()));
}

void check_strided(const at::Tensor& tensor, const std::string& argument) {
  TORCH_CHECK_VALUE(tensor.defined(), argument, " must be a tensor, got none");
  TORCH_CHECK_VALUE(!tensor.is_nested(), argument, " must be a plain tensor, got a nested tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, argument, " must be a strided tensor, got layout ",
                    tensor.layout(), "; .to_dense() makes it strided");
}

void CompiledProgram::check_tensors(c10::ArrayRef<at::Tensor> tensors) const {
  const auto dtype_name = [](const at::Tensor& t) { return c10::toString(t.scalar_type()); };
  const size_t inputs = program_.num_inputs();
  TORCH_CHECK_VALUE(tensors.size() == inputs + program_.num_destinations(), "inputs must be a list of ",
                    inputs + program_.num_destinations(), " tensors, got ", tensors.size(), " (", origin_->text(), ")");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const auto name_of_tensor = [&] {
      if (i >= inputs) return concat("destination ", i - inputs);
      return tensors.size() == 1 ? std::string("local tensor") : concat("input ", i);
    };
    TORCH_CHECK_VALUE(!tensor.key_set().has(c10::DispatchKey::Python), name_of_tensor(),
                      " must be a plain tensor, got a tensor subclass");
    if (tensor.layout() != at::kStrided || tensor.is_nested()) check_strided(tensor, name_of_tensor());
    const Buffer& buffer = program_.buffers[i];
    TORCH_CHECK_VALUE(tensor.sizes().equals(buffer.shape), name_of_tensor(), " must have shape ",
                      c10::IntArrayRef(buffer.shape), " on rank ", rank_, ", got ", tensor.sizes(), " (",
                      origin_->text(), ")");
    // True if the buffer has the program's own dtype: the tensor must have the dtype of input `dtype_input_`, which may
    // be any dtype of the same size.
    const bool has_own_dtype = dtypes_[i] == at::ScalarType::Undefined && dtype_input_ >= 0;
    const bool has_dtype = has_own_dtype ? static_cast<int64_t>(tensor.element_size()) == program_.dtype.size_bytes() &&
                                               tensor.scalar_type() == tensors[dtype_input_].scalar_type()
                                         : tensor.scalar_type() == scalar_type_of(buffer.dtype);
    const bool must_equal_input = has_own_dtype && static_cast<int64_t>(i) != dtype_input_;
    TORCH_CHECK_VALUE(
        has_dtype, name_of_tensor(), " must have dtype ",
        must_equal_input ? concat(dtype_name(tensors[dtype_input_]), ", as input ", dtype_input_) : buffer.dtype.name(),
        ", got ", dtype_name(tensor));
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), name_of_tensor(),
                      " must be on the device of the first input, ", tensors[0].device(), ", got ", tensor.device());
  }
}

Executable::Executable(std::shared_ptr<const CompiledProgram> compiled, std::vector<RankGroupPtr> groups)
    : compiled_(std::move(compiled)), groups_(std::move(groups)) {
  check_user(groups_.size() == program().groups.size(), "groups must be a list of ", program().groups.size(),
             " process groups, got ", groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& expected = program().groups[g];
    check_user(
        groups_[g]->size() == static_cast<int64_t>(expected.ranks.size()) && groups_[g]->rank() == expected.index,
        "groups[", g, "] must have the ranks (", join(expected.ranks), ") in this order, got a group of ",
        groups_[g]->size(), " ranks in which this rank is number ", groups_[g]->rank());
  }
}

c10::SmallVector<GroupLease, 4> Executable::lease_groups() const {
  c10::SmallVector<GroupLease, 4> leases;
  for (size_t g = 0; g < groups_.size(); ++g) {
    leases.push_back(groups_[g]->lease());
    if (!leases.back()) {
      throw UserError(concat("group must be a process group that exists, got the group of ranks (",
                             join(program().groups[g].ranks), "), which was destroyed (", compiled_->origin().text(),
                             ")"));
    }
  }
  return leases;
}

// In a capture `connected_device_` stays as it is, so that a later call connects the groups.
void Executable::connect(const at::Device& device) const {
  if (device.is_cpu() || !compiled_->lowering().is_on_device) return;
  if (compiled_->is_collective()) check_no_open_group(device);
  if (connected_device_ == device.index()) return;
  for (const GroupLease& group : lease_groups()) group->connect(device);
  if (!is_capturing(device)) connected_device_ = device.index();
}

bool Executable::goes_through_host(const at::Device& device) const {
  return !compiled_->lowering().is_on_device && !program().stages_on_host && !device.is_cpu() && !groups_.empty();
}

std::vector<Communication> Executable::communications() const {
  std::vector<Communication> all;
  for (const Plan& plan : compiled_->origin().plans()) {
    for (const Step& step : plan.steps) {
      if (communicates(step)) all.push_back(communication_of(step));
    }
  }
  return all;
}

std::vector<Rank> Executable::mesh_ranks() const { return compiled_->origin().ranks(); }

}  // namespace shardwright
