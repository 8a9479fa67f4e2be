#include "runtime/side_stream.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/flag_product.h"
#include "runtime/torch_version.h"

namespace shardwright {
namespace {

constexpr int kMaxDevices = 128;           // device indices have 8 bits, and are not negative
constexpr size_t kMaxPooledEvents = 1024;  // unused events per device; only very long programs use more at a time

// Unused device events, by device, for later StreamEvents.
class EventPool {
 public:
  // Removes an unused event of the device and returns it, or a new event if there is none.
  std::unique_ptr<c10::Event> take(c10::Device device) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<std::unique_ptr<c10::Event>>& unused = unused_.at(device.index());
      while (!unused.empty()) {
        std::unique_ptr<c10::Event> event = std::move(unused.back());
        unused.pop_back();
        if (event->device_type() == device.type()) return event;
      }
    }
    ++num_made_;
    return std::make_unique<c10::Event>(device.type(), c10::EventFlag::PYTORCH_DEFAULT);
  }

  // Adds an unused event, or destroys it if there are many.
  void put_back(std::unique_ptr<c10::Event> event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::unique_ptr<c10::Event>>& unused = unused_.at(event->device_index());
    if (unused.size() < kMaxPooledEvents) unused.push_back(std::move(event));
  }

  int64_t num_made() const { return num_made_; }

 private:
  std::mutex mutex_;
  std::array<std::vector<std::unique_ptr<c10::Event>>, kMaxDevices> unused_;
  std::atomic<int64_t> num_made_{0};
};

EventPool& event_pool() {
  static auto* pool = new EventPool;  // never destroyed: threads may still run at exit
  return *pool;
}

// Returns the registered functions, by type of device; null if none.
std::array<CaptureQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& capture_queries() {
  static std::array<CaptureQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES> queries{};
  return queries;
}

// True if a graph is being captured on the current stream of a device of this type. Skips devices without a context,
// because a query would create one.
bool is_capturing_any_device(c10::DeviceType type) {
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(type).deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    if (hooks.hasPrimaryContext(index) && is_capturing(c10::Device(type, index))) return true;
  }
  return false;
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

StreamEvent::StreamEvent(c10::Stream stream) : event_(event_pool().take(stream.device())) { event_->record(stream); }

StreamEvent::~StreamEvent() {
  // An event that failed to be recorded belongs to no device.
  if (event_ && event_->was_marked_for_recording()) event_pool().put_back(std::move(event_));
}

void StreamEvent::block(c10::Stream stream) const { event_->block(stream); }

bool StreamEvent::query() const { return is_done(*event_); }

int64_t num_stream_events_made() { return event_pool().num_made(); }

SideStreamGuard::SideStreamGuard(c10::Device device, SideStream which)
    : SideStreamGuard(device, which, StreamEvent(current_stream(device))) {}

SideStreamGuard::SideStreamGuard(c10::Device device, SideStream which, const StreamEvent& after)
    : side_(side_stream(device, which)) {
  after.block(side_);
  guard_.emplace(side_);
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void wait_for(const StreamEvent& event, c10::Device device) { event.block(current_stream(device)); }

c10::Event record_event(c10::Device device, bool with_time) {
  c10::Event event(device.type(), with_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  event.record(current_stream(device));
  return event;
}

bool is_capturing(c10::Stream stream) {
  if (stream.device().is_cpu()) return false;
  if (const CaptureQuery query = capture_queries().at(static_cast<size_t>(stream.device_type()))) return query(stream);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return c10::impl::VirtualGuardImpl(stream.device_type()).isStreamCapturing(stream);
#else
  return false;
#endif
}

bool is_capturing(c10::Device device) {
  if (device.is_cpu()) return false;
  return device.has_index() ? is_capturing(current_stream(device)) : is_capturing_any_device(device.type());
}

bool register_capture_query(c10::DeviceType device, CaptureQuery query) {
  capture_queries().at(static_cast<size_t>(device)) = query;
  return true;
}

}  // namespace shardwright
