#include "runtime/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <mutex>

namespace shardwright {
namespace {

constexpr int kMaxDevices = 128;  // device indices are of 8 bits

c10::Stream side_stream(c10::Device device) {
  static std::mutex mutex;
  static std::array<std::optional<c10::Stream>, kMaxDevices> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  std::optional<c10::Stream>& stream = streams.at(device.index());
  const bool is_of_other_type = stream && stream->device_type() != device.type();
  if (!stream || is_of_other_type) {
    stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  return *stream;
}

c10::Event event_for(c10::Device device, bool with_time) {
  return c10::Event(device.type(), with_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
}

}  // namespace

SideStreamGuard::SideStreamGuard(c10::Device device) : side_(side_stream(device)) {
  record_current(device, false).block(side_);
  guard_.emplace(side_);
}

c10::Event SideStreamGuard::record(bool with_time) const {
  c10::Event event = event_for(side_.device(), with_time);
  event.record(side_);
  return event;
}

void wait_for(const c10::Event& event, c10::Device device) {
  event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

c10::Event record_current(c10::Device device, bool with_time) {
  c10::Event event = event_for(device, with_time);
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace shardwright
