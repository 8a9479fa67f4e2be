// Ranges of time that PyTorch's profilers show.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace shardwright {

// Shows a name to the profilers of the current thread: from show() until the next show() or the destruction. Costs
// almost nothing unless a profiler runs.
class ProfilerRange {
 public:
  ProfilerRange() = default;
  explicit ProfilerRange(const std::string& name) {
    if (is_wanted()) show(name);
  }

  // True if a profiler runs.
  static bool is_wanted() { return at::hasCallbacks(); }

  void show(const std::string& name) {
    record_.reset();
    record_.emplace(at::RecordScope::FUNCTION);
    if (record_->isActive()) record_->before(name);
  }

 private:
  std::optional<at::RecordFunction> record_;
};

}  // namespace shardwright
