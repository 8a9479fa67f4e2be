#include "runtime/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <mutex>

#include "runtime/torch_version.h"

namespace shardwright {
namespace {

constexpr int kMaxDevices = 128;  // device indices are of 8 bits

c10::Event event_for(c10::Device device, bool with_time) {
  return c10::Event(device.type(), with_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
}

std::array<CaptureQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& capture_queries() {
  static std::array<CaptureQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES> queries{};
  return queries;
}

}  // namespace

c10::Stream side_stream(c10::Device device, SideStream which) {
  static std::mutex mutex;
  static std::array<std::array<std::optional<c10::Stream>, 2>, kMaxDevices> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  std::optional<c10::Stream>& stream = streams.at(device.index()).at(static_cast<size_t>(which));
  const bool is_of_other_type = stream && stream->device_type() != device.type();
  if (!stream || is_of_other_type) {
    stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  return *stream;
}

SideStreamGuard::SideStreamGuard(c10::Device device, SideStream which)
    : SideStreamGuard(device, which, record_current(device, false)) {}

SideStreamGuard::SideStreamGuard(c10::Device device, SideStream which, const c10::Event& after)
    : side_(side_stream(device, which)) {
  after.block(side_);
  guard_.emplace(side_);
}

c10::Event SideStreamGuard::record(bool with_time) const {
  c10::Event event = event_for(side_.device(), with_time);
  event.record(side_);
  return event;
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void wait_for(const c10::Event& event, c10::Device device) { event.block(current_stream(device)); }

c10::Event record_current(c10::Device device, bool with_time) {
  c10::Event event = event_for(device, with_time);
  event.record(current_stream(device));
  return event;
}

bool is_capturing(c10::Device device) {
  if (device.is_cpu()) return false;
  if (const CaptureQuery query = capture_queries().at(static_cast<size_t>(device.type()))) {
    return query(current_stream(device));
  }
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return c10::impl::VirtualGuardImpl(device.type()).isStreamCapturing(current_stream(device));
#else
  return false;
#endif
}

bool register_capture_query(c10::DeviceType device, CaptureQuery query) {
  capture_queries().at(static_cast<size_t>(device)) = query;
  return true;
}

}  // namespace shardwright
