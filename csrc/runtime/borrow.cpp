#include "runtime/borrow.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <memory>

#include "runtime/torch_version.h"

namespace shardwright {

namespace {

#if !SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
// Torch 2.11 has no function that ends the error of `release_data_and_set_meta_custom_data_ptr_error_msg_`. An explicit
// instantiation may name the private flag.
template <auto member>
struct Private {
  friend void end_access_error(c10::StorageImpl& storage) { storage.*member = false; }
};
void end_access_error(c10::StorageImpl& storage);
template struct Private<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

template <typename Storage>
void clear_access_error(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    end_access_error(storage);
  }
}

}  // namespace

void borrow_memory(const at::Tensor& tensor, const at::Tensor& arena, int64_t offset_bytes) {
  const auto size_bytes = static_cast<int64_t>(tensor.nbytes());
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.storage_offset() == 0, "tensor: has strides ", tensor.strides(),
                    " and storage offset ", tensor.storage_offset(),
                    "; allowed is a contiguous tensor that begins its storage");
  TORCH_CHECK_VALUE(arena.scalar_type() == at::kByte && arena.is_contiguous() && arena.device() == tensor.device(),
                    "arena: allowed are contiguous bytes on ", tensor.device());
  TORCH_CHECK_VALUE(0 <= offset_bytes && offset_bytes + size_bytes <= arena.numel(), "offset_bytes: got ", offset_bytes,
                    " for ", size_bytes, " bytes; allowed is what fits into ", arena.numel());
  TORCH_CHECK_VALUE(offset_bytes % static_cast<int64_t>(tensor.element_size()) == 0, "offset_bytes: got ", offset_bytes,
                    "; allowed are multiples of ", tensor.element_size());
  auto owner = std::make_unique<c10::Storage>(arena.storage());
  char* data = static_cast<char*>(arena.data_ptr()) + offset_bytes;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  clear_access_error(*storage);
  storage->set_data_ptr_noswap(
      {data, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); }, tensor.device()});
  storage->set_nbytes(static_cast<size_t>(size_bytes));
}

void give_back_memory(const at::Tensor& tensor, const std::string& when_read) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
  // The size stays, since an operator on a view checks it before it asks for the address.
  if (tensor.numel() > 0) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(when_read);
}

}  // namespace shardwright
