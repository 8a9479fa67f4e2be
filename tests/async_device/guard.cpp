// The device interface of c10: a guard, which handles streams and events, and hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "driver.h"

namespace async_device {
namespace {

c10::DeviceIndex index_of(c10::Device given) { return given.has_index() ? given.index() : device().index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device to) const override { return set_device(index_of(to)); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device to) const override { set_device(index_of(to)); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { set_device(index_of(to)); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(c10::Device of) const override { return current_stream(of); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(index_of(of) * kFirstStream); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool isHighPriority) const override {
    const OnDevice guard({kDeviceType, index_of(of)});
    return stream_from_pool(isHighPriority);
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return getStreamFromGlobalPool(of, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_current_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_done(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { async_device::synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
  // Overrides a function of torch 2.15 and later.
  bool isStreamCapturing(const c10::Stream& stream) const { return is_capturing(stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<Event*>(event)->block(stream);
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(first)->milliseconds_until(*static_cast<Event*>(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return device().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return set_device(index).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? device().index() : set_device(index).index();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    const OnDevice guard(storage.device());
    c10::DataPtr grown = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) allocator()->copy_data(grown.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool kRegistered = [] {
  c10::SetAllocator(kDeviceType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace async_device
