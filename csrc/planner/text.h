// Figures as people read them.
#pragma once

#include <cstdint>
#include <string>

#include "layout/error.h"

namespace shardwright {

inline std::string bytes_text(int64_t bytes) {
  if (bytes < 10 * 1024) return concat(bytes, " B");
  if (bytes < 10 * 1024 * 1024) return concat(bytes / 1024, " KiB");
  return concat(bytes / 1024 / 1024, " MiB");
}

inline std::string microseconds_text(int64_t picoseconds) {
  if (picoseconds < 10'000'000) return concat(static_cast<double>(picoseconds / 100'000) / 10, " us");
  return concat(picoseconds / 1'000'000, " us");
}

}  // namespace shardwright
