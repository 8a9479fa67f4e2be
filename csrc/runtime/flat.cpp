#include "runtime/flat.h"

#include <c10/core/Storage.h>

#include <utility>

namespace shardwright {
namespace {

// Returns a flat tensor of `count` elements on the storage of `base`. `offset`: in elements of `dtype`, from the start
// of the storage.
at::Tensor view(const at::Tensor& base, caffe2::TypeMeta dtype, int64_t offset, int64_t count) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous(c10::IntArrayRef(&count, 1));
  return at::Tensor(std::move(impl));
}

}  // namespace

at::Tensor flat_view(const at::Tensor& base, int64_t offset, int64_t count) {
  return view(base, base.dtype(), base.storage_offset() + offset, count);
}

at::Tensor flat_bytes(const at::Tensor& base, int64_t offset, int64_t count) {
  const auto item = static_cast<int64_t>(base.element_size());
  return view(base, caffe2::TypeMeta::Make<uint8_t>(), (base.storage_offset() + offset) * item, count * item);
}

at::Tensor flat_elements(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  return view(bytes, c10::scalarTypeToTypeMeta(dtype), bytes.storage_offset() / item, bytes.numel() / item);
}

}  // namespace shardwright
