// The product of an Execution that waits for flags. A flag is an integer in device memory that becomes 1 once a chunk
// of the product's left operand has arrived (Offer and Fetch in program/instructions.h).
#include <ATen/ops/as_strided.h>

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/flag_product.h"
#include "runtime/flag_watch.h"
#include "runtime/flat.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr uintptr_t kAlignmentBytes = 16;  // alignment of operands that the product's kernel requires

// Returns a matrix in a buffer: a view, or a copy if the view is not aligned.
at::Tensor matrix_of(const at::Tensor& buffer, const Matrix& matrix, int64_t rows, int64_t columns) {
  const at::Tensor view = at::as_strided(buffer, {rows, columns}, {matrix.row_stride, matrix.column_stride},
                                         buffer.storage_offset() + matrix.offset);
  return reinterpret_cast<uintptr_t>(view.const_data_ptr()) % kAlignmentBytes == 0 ? view : view.clone();
}

}  // namespace

// These checks have the same result on all ranks, because they depend only on arenas, sizes, and the kind of device and
// torch.
void Execution::check_flags() const {
  const auto& product = std::get<Gemm>(program_.instructions[compiled_.flagged_product()].operation);
  const auto& fetch = std::get<Fetch>(program_.instructions[product.flags->fetch].operation);
  const GroupLease& group = groups_[fetch.group];
  const auto ranks = static_cast<int64_t>(program_.groups[fetch.group].ranks.size());
  std::optional<std::string> why = group->why_no_offers(device_, program_.size_bytes(fetch.dst.buffer) / ranks);
  if (!why) why = why_no_flag_products(device_);
  if (!why && is_capturing(device_)) why = "a graph is being captured, where setting a flag may launch a kernel";
  check_user(!why, "method must be one of 'serial', 'ring', 'collective' here, got 'flags': ", why.value_or(""));
}

// The operator allocates its result, which replaces the program's buffer.
void Execution::multiply_flagged(const Gemm& gemm, int index) {
  const Flags& flags = *gemm.flags;
  const at::Tensor product = multiply_with_flags(matrix_of(buffers_[gemm.lhs.buffer], gemm.lhs, gemm.m, gemm.k),
                                                 matrix_of(buffers_[gemm.rhs.buffer], gemm.rhs, gemm.k, gemm.n),
                                                 buffers_[flags.range.buffer], flags.first);
  buffers_[gemm.dst.buffer] = flat_view(product, 0, product.numel());
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (program_.outputs[i].buffer == gemm.dst.buffer) outputs_[i] = product.view(program_.outputs[i].shape);
  }
  const int group = group_of(program_.instructions[flags.fetch].operation).value();
  watch_product(record_event(device_, false), groups_[group]->timeout(), [executable = executable_, flags, index] {
    const Program& program = executable->program();
    const Instruction& instruction = program.instructions[index];
    const int group = group_of(program.instructions[flags.fetch].operation).value();
    return concat("shardwright: rank ", executable->compiled().rank(), " waits for the flags of ", flags.range.count,
                  " chunks in ", program.step_texts[instruction.step], " in the group of ranks (",
                  join(program.groups[group].ranks), ") of plan\n", executable->compiled().origin().text());
  });
}

}  // namespace shardwright
