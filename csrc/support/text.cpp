#include "support/text.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

std::string bytes_text(int64_t bytes) {
  if (bytes < 10 * 1024) return concat(bytes, " B");
  if (bytes < 10 * 1024 * 1024) return concat(bytes / 1024, " KiB");
  return concat(bytes / 1024 / 1024, " MiB");
}

std::string microseconds_text(int64_t picoseconds) {
  if (picoseconds < 10'000'000) return concat(static_cast<double>(picoseconds / 100'000) / 10, " us");
  return concat(picoseconds / 1'000'000, " us");
}

std::string times_text(int64_t value, int64_t bound) {
  const auto hundredths = static_cast<int64_t>(static_cast<__int128>(value) * 100 / std::max<int64_t>(bound, 1));
  return concat(static_cast<double>(hundredths) / 100, " times");
}

std::string count_text(int64_t count, const char* noun) { return concat(count, " ", noun, count == 1 ? "" : "s"); }

}  // namespace shardwright
