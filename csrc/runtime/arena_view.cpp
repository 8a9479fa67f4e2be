#include "runtime/arena_view.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <memory>

#include "runtime/torch_version.h"

namespace shardwright {
namespace {

// The deleter of arena views' memory: deletes a reference to the arena. Its address also identifies arena views.
void drop_arena(void* arena) { delete static_cast<c10::Storage*>(arena); }

// Returns a tensor's data pointer; it is null after release_memory.
const c10::DataPtr& memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// Returns the storage of the arena of an arena view, or null for other tensors.
const c10::Storage* arena_of(const at::Tensor& tensor) {
  const c10::DataPtr& memory = memory_of(tensor);
  return memory.get_deleter() == &drop_arena ? static_cast<const c10::Storage*>(memory.get_context()) : nullptr;
}

#if !SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
// Torch 2.11 cannot clear the error that `release_data_and_set_meta_custom_data_ptr_error_msg_` sets. An explicit
// template instantiation may name the private flag.
template <auto member>
struct Private {
  friend void end_access_error(c10::StorageImpl& storage) { storage.*member = false; }
};
void end_access_error(c10::StorageImpl& storage);
template struct Private<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

// Clears the error that release_memory has set, which each read of the address raises.
template <typename Storage>
void clear_access_error(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    end_access_error(storage);
  }
}

}  // namespace

void view_arena(const at::Tensor& tensor, const at::Tensor& arena, int64_t offset_bytes) {
  const auto size_bytes = static_cast<int64_t>(tensor.nbytes());
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.storage_offset() == 0,
                    "tensor must be contiguous and begin its storage, got strides ", tensor.strides(),
                    " and storage offset ", tensor.storage_offset());
  TORCH_CHECK_VALUE(arena.scalar_type() == at::kByte && arena.is_contiguous() && arena.device() == tensor.device(),
                    "arena must be contiguous, of dtype Byte and on ", tensor.device(), ", got strides ",
                    arena.strides(), ", dtype ", arena.scalar_type(), " and device ", arena.device());
  TORCH_CHECK_VALUE(0 <= offset_bytes && offset_bytes + size_bytes <= arena.numel(), "offset_bytes must be in [0, ",
                    arena.numel() - size_bytes, "], because the tensor has ", size_bytes, " bytes and the arena ",
                    arena.numel(), ", got ", offset_bytes);
  TORCH_CHECK_VALUE(offset_bytes % static_cast<int64_t>(tensor.element_size()) == 0,
                    "offset_bytes must be a multiple of ", tensor.element_size(), ", got ", offset_bytes);
  auto owner = std::make_unique<c10::Storage>(arena.storage());
  char* data = static_cast<char*>(arena.data_ptr()) + offset_bytes;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  clear_access_error(*storage);
  storage->set_data_ptr_noswap({data, owner.release(), &drop_arena, tensor.device()});
  storage->set_nbytes(static_cast<size_t>(size_bytes));
}

at::Tensor on_arena(const at::Tensor& tensor) {
  const c10::Storage* arena = arena_of(tensor);
  if (arena == nullptr) return tensor;
  const auto item_bytes = static_cast<int64_t>(tensor.element_size());
  const auto begin = static_cast<const char*>(tensor.storage().data()) - static_cast<const char*>(arena->data());
  // The division is exact: view_arena requires an offset that is a multiple of the element size.
  return at::empty({0}, tensor.options())
      .set_(*arena, begin / item_bytes + tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

void record_use(const at::Tensor& tensor, c10::Stream stream) {
  const c10::Storage* arena = arena_of(tensor);
  const c10::DataPtr& memory = arena != nullptr ? arena->data_ptr() : memory_of(tensor);
  const c10::Allocator* allocator = c10::GetAllocator(stream.device_type());
  if (memory.get() == nullptr || memory.get_deleter() != allocator->raw_deleter()) return;
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(memory, stream);
}

void release_memory(const at::Tensor& tensor, const std::string& when_read) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
  // The size stays, because an operator on a view checks the size before it reads the address.
  if (tensor.numel() > 0) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(when_read);
}

}  // namespace shardwright
