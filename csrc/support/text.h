// Formats numbers for messages.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// All numbers are rounded down. bytes_text changes to the next unit at 10 of that unit; microseconds_text drops the
// decimal at 10 us; times_text has up to two decimals.
std::string bytes_text(int64_t bytes);                    // "1536 B", "48 KiB", "12 MiB"
std::string microseconds_text(int64_t picoseconds);       // "3.1 us", "214 us"
std::string times_text(int64_t value, int64_t bound);     // value / max(bound, 1): "1.31 times"
std::string count_text(int64_t count, const char* noun);  // "1 step", "3 steps"

}  // namespace shardwright
