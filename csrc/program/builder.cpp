#include "program/builder.h"

#include <algorithm>

#include "program/transfer_method.h"
#include "support/error.h"

namespace shardwright {

ProgramBuilder::ProgramBuilder(DType dtype, Lowering lowering, bool named_groups_only, Rank rank)
    : lowering_(lowering), named_groups_only_(named_groups_only), rank_(rank), dtype_(dtype) {
  program_.dtype = dtype_;
}

Position ProgramBuilder::position_on(const Mesh& mesh) const {
  const std::optional<Position> position = mesh.position_of(rank_);
  check_invariant(position.has_value(), "rank ", rank_, " is not on the mesh (", mesh, ")");
  return *position;
}

int64_t ProgramBuilder::count_in(const Layout& layout) const {
  return is_on(layout.mesh()) ? num_elements(region_in(layout)) : 0;
}

void ProgramBuilder::begin_step(std::string text, std::string note) {
  program_.step_texts.push_back(std::move(text));
  program_.step_notes.push_back(std::move(note));
}

void ProgramBuilder::begin_exchanges(const Step& step, int64_t shares) {
  exchanges_by_messages_ = all_to_alls_use_messages(step, shares, lowering_);
}

BufferId ProgramBuilder::new_buffer(int64_t count, DType dtype) {
  program_.buffers.push_back({count, dtype});
  return static_cast<BufferId>(program_.buffers.size() - 1);
}

BufferId ProgramBuilder::new_input(std::vector<int64_t> shape, DType dtype) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  program_.buffers.push_back({count, dtype, BufferRole::kInput, std::move(shape)});
  return static_cast<BufferId>(program_.buffers.size() - 1);
}

void ProgramBuilder::add_output(BufferId buffer, std::vector<int64_t> shape) {
  BufferRole& role = program_.buffers[buffer].role;
  if (role == BufferRole::kTemporary) role = BufferRole::kOutput;
  program_.outputs.push_back({buffer, std::move(shape)});
}

std::vector<Instruction> ProgramBuilder::take_last_wait(int first) {
  std::vector<Instruction>& all = program_.instructions;
  for (auto i = static_cast<int>(all.size()) - 1; i >= first; --i) {
    if (is_communication(all[i].operation)) return {};
    if (!std::holds_alternative<Wait>(all[i].operation)) continue;
    std::vector<Instruction> taken(all.begin() + i, all.end());
    all.resize(i);
    return taken;
  }
  return {};
}

void ProgramBuilder::put_back(std::vector<Instruction> instructions) {
  for (Instruction& instruction : instructions) program_.instructions.push_back(std::move(instruction));
}

Ticket ProgramBuilder::emit(Operation operation) {
  program_.instructions.push_back({std::move(operation), static_cast<int>(program_.step_texts.size()) - 1, chunk_});
  return static_cast<Ticket>(program_.instructions.size() - 1);
}

Instruction* ProgramBuilder::last_of_chunk() {
  if (program_.instructions.empty()) return nullptr;
  Instruction& last = program_.instructions.back();
  const bool is_of_chunk = last.step == static_cast<int>(program_.step_texts.size()) - 1 && last.chunk == chunk_;
  return is_of_chunk ? &last : nullptr;
}

Ticket ProgramBuilder::send_receive(SendReceive move) {
  return move.sends.empty() && move.receives.empty() ? kNoTicket : emit(std::move(move));
}

void ProgramBuilder::wait(Ticket ticket) {
  if (ticket >= 0) emit(Wait{ticket});
}

void ProgramBuilder::copy(BufferId src, BufferId dst, std::vector<Box> boxes) {
  if (!boxes.empty()) emit(Copy{src, dst, std::move(boxes)});
}

void ProgramBuilder::divide(BufferRange dst, double divisor) {
  const bool changes_dtype = !program_.dtype.has_fractions();
  if (divisor != 1 && (dst.count > 0 || changes_dtype)) emit(Divide{dst, divisor});
}

void ProgramBuilder::copy_shared(const Step& step, BufferId current, BufferId next) {
  copy(current, next,
       Selection(region_in(step.before), region_in(step.after)).boxes(CopySide::local(), CopySide::local()));
}

int ProgramBuilder::group_index(const Step& step) {
  const Mesh& mesh = step.before.mesh();
  return group_of_ranks(step.mesh_dims, mesh.ranks_at(mesh.group(position_on(mesh), step.mesh_dims)));
}

int ProgramBuilder::group_of_ranks(MeshDimSet mesh_dims, std::vector<Rank> ranks) {
  for (size_t g = 0; g < program_.groups.size(); ++g) {
    if (program_.groups[g].ranks == ranks) return static_cast<int>(g);
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    throw InvariantError(concat("rank ", rank_, " is not in its group (", join(ranks), ")"));
  }
  const int64_t index = own - ranks.begin();
  program_.groups.push_back({mesh_dims, std::move(ranks), index});
  return static_cast<int>(program_.groups.size()) - 1;
}

void append(std::vector<Box>& boxes, std::vector<Box> more) {
  for (Box& box : more) boxes.push_back(std::move(box));
}

}  // namespace shardwright
