// Assigns addresses in one arena to buffers with known lifetimes, offline.
#pragma once

#include <cstdint>
#include <vector>

namespace shardwright {

// A buffer that exists during the events first, ..., last. Events are consecutive numbers; a schedule has one per use.
struct Lifetime {
  int64_t first = 0;
  int64_t last = 0;
  int64_t size_bytes = 0;
};

struct ArenaLayout {
  std::vector<int64_t> offsets;  // by buffer, in bytes
  int64_t size_bytes = 0;        // size of the arena
  int64_t live_bytes = 0;        // most bytes that exist at the same event, a lower bound on size_bytes
};

// Returns the addresses of buffers. Buffers that share an event do not overlap. Sizes are rounded up to multiples of
// `alignment_bytes`, a power of two, so offsets are multiples of it too. The layout depends on the arguments alone.
//
// Finding the smallest arena is NP-hard. Four orders are tried: largest first, longest-lived first, most bytes times
// events first, earliest first. In each order, a buffer is placed in the smallest gap that holds it between the placed
// buffers with which it shares an event. If all buffers have one size, the arena is the smallest possible: in the
// earliest-first order, a buffer gets a new place only if all places so far are occupied.
ArenaLayout lay_out(const std::vector<Lifetime>& buffers, int64_t alignment_bytes);

// Rounds up to a multiple of a power of two.
constexpr int64_t aligned(int64_t size_bytes, int64_t alignment_bytes) {
  return (size_bytes + alignment_bytes - 1) & ~(alignment_bytes - 1);
}

}  // namespace shardwright
