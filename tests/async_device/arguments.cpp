#include "arguments.h"

#include <c10/util/Exception.h>

#include <utility>

#include "driver.h"
#include "reductions.h"

namespace async_device {

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().type() == kDeviceType, "strict: ", what, " takes tensors on ", device(),
                    ", got one on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "strict: ", what, " takes dense tensors, got ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "strict: ", what,
                    " takes contiguous tensors, got sizes ", tensor.sizes(), " with strides ", tensor.strides());
}

Memory memory_of(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  check_dtype(tensor.scalar_type(), what);
  return Memory::of(tensor);
}

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "strict: ", what, " takes one tensor, got ", tensors.size());
  return tensors.front();
}

void check_root(int64_t root, int size, const char* what) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "strict: root of ", what, " must be in [0, ", size - 1, "], got ", root);
}

Communicator::Body moving(Kind kind, int64_t detail, Moves moves) {
  return [kind, detail, moves = std::move(moves)](Communicator& communicator) {
    moves.copy();
    communicator.exchange(kind, detail, moves);
  };
}

Communicator::Body in_turn(std::vector<Communicator::Body> pieces) {
  return [pieces = std::move(pieces)](Communicator& communicator) {
    for (const auto& piece : pieces) piece(communicator);
  };
}

}  // namespace async_device
