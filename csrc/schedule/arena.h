// Assigns addresses in one arena to buffers with known lifetimes, offline.
#pragma once

#include <cstdint>
#include <vector>

namespace shardwright {

// The lifetime and size of a buffer, which exists during the events first, ..., last. An event is a point in time,
// given as an integer; the events of a schedule are its uses.
struct Lifetime {
  int64_t first = 0;
  int64_t last = 0;
  int64_t size_bytes = 0;
};

struct ArenaLayout {
  std::vector<int64_t> offsets;  // by buffer, in bytes
  int64_t size_bytes = 0;        // size of the arena
  int64_t live_bytes = 0;        // maximum bytes that exist at one event, a lower bound on size_bytes
};

// Returns the addresses of buffers. Buffers that share an event do not overlap. Sizes are rounded up to multiples of
// `alignment_bytes`, a power of two, so offsets are multiples of it too. The layout depends on the arguments alone.
//
// Finding the smallest arena is NP-hard. Buffers are placed one by one in four orders, of which the smallest arena is
// taken: largest first, longest-lived first, most bytes times events first, earliest first. A buffer is placed in the
// smallest gap that holds it between the placed buffers with which it shares an event. If all buffers have one size,
// the arena is the smallest possible: in the earliest-first order, a buffer gets a new place only if all places so far
// are occupied.
//
//   a, events 0 to 1, 4 bytes; b, events 1 to 2, 2 bytes; c, events 2 to 3, 4 bytes. Earliest first:
//     a is placed at 0
//     b shares event 1 with a, so it is placed at 4
//     c shares event 2 with b only, and the gap [0, 4) holds it: it is placed at 0
//   The arena has 6 bytes. That is the smallest possible, because a and b, 6 bytes, both exist at event 1.
ArenaLayout lay_out(const std::vector<Lifetime>& buffers, int64_t alignment_bytes);

// Rounds `size_bytes` up to a multiple of `alignment_bytes`, a power of two.
constexpr int64_t aligned(int64_t size_bytes, int64_t alignment_bytes) {
  return (size_bytes + alignment_bytes - 1) & ~(alignment_bytes - 1);
}

}  // namespace shardwright
