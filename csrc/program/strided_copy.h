// Copies of boxes, prepared for fast execution: dims are merged, elements are joined into words, and words are
// numbered.
//
// A box is a grid of runs: ranges that are contiguous in the source and in the destination. Each box is copied in words
// as wide as its sizes, strides and offsets allow. All words of a copy are numbered consecutively, so the work can be
// divided into ranges of numbers, whatever the boxes are. A GPU thread copies words (`locate` finds a word by its
// number); a CPU thread copies runs. Both use the same tables, and `locate` compiles for both.
//
//   Columns 2 to 5 of a float32[3, 8] tensor to a packed buffer, both 16-byte aligned: 3 runs of 16 bytes. They begin
//   at bytes 8, 40 and 72, so words have 8 bytes. The WordBox has sizes {3, 2}, source strides {4, 1}, destination
//   strides {2, 1} and src_offset 1, in words. Word 3 is the second word of row 1: source 1 + 4 + 1 = 6, destination 2
//   + 1 = 3.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "program/program.h"
#include "support/host_device.h"

namespace shardwright {

constexpr int kMaxCopyDims = 7;    // maximum number of dims of a WordBox; boxes with more are split
constexpr int kMaxWordBytes = 16;  // maximum width of a word

// Computes n / divisor, for n below 2^31, with a multiplication: the high half of n * multiplier, shifted right. For
// divisor 3, multiplier 0xAAAAAAAB and shift 1: 7 * 0xAAAAAAAB has the high half 4, and 4 >> 1 = 2. See Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994.
struct Divisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t n);  // n must be at least 1 and below 2^31

  SHARDWRIGHT_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    if (divisor == 1) return n;
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32) >> shift;
  }
};

// A box with offsets, sizes and strides in words, outermost dim first; the last dim is the run, which is contiguous on
// both sides. A box has fewer than 2^31 words.
struct WordBox {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int ndim = 0;
  Divisor sizes[kMaxCopyDims];
  int64_t src_strides[kMaxCopyDims];
  int64_t dst_strides[kMaxCopyDims];

  // Computes the source and destination of word `i` of the box, as indices of words in the two arrays.
  SHARDWRIGHT_HOST_DEVICE void locate(uint32_t i, int64_t& src, int64_t& dst) const { locate(&i, &src, &dst); }

  // Computes the sources and destinations of the kCount words `i[0]` to `i[kCount - 1]`. Overwrites `i`.
  template <int kCount = 1>
  SHARDWRIGHT_HOST_DEVICE void locate(uint32_t* i, int64_t* src, int64_t* dst) const {
    SHARDWRIGHT_UNROLL
    for (int w = 0; w < kCount; ++w) {
      src[w] = src_offset;
      dst[w] = dst_offset;
    }
    for (int d = ndim - 1; d >= 0; --d) {
      const Divisor size = sizes[d];
      const int64_t src_stride = src_strides[d];
      const int64_t dst_stride = dst_strides[d];
      SHARDWRIGHT_UNROLL
      for (int w = 0; w < kCount; ++w) {
        const uint32_t outer = d == 0 ? 0 : size.quotient(i[w]);
        const int64_t index = i[w] - outer * size.divisor;  // along dim d
        src[w] += index * src_stride;
        dst[w] += index * dst_stride;
        i[w] = outer;
      }
    }
  }
};

// Returns the box with word (or run) number `i`: the index of the last of the `count` ascending numbers in `first` that
// is at most `i`. Requires first[0] <= i.
SHARDWRIGHT_HOST_DEVICE int64_t box_of(const int64_t* first, int64_t count, int64_t i) {
  int64_t low = 0;
  while (count > 1) {
    const int64_t half = count / 2;
    if (first[low + half] <= i) low += half;
    count -= half;
  }
  return low;
}

// The boxes of a copy that have words of one width. Words and runs are numbered over all boxes.
struct WordBoxes {
  int word_bytes = 1;
  std::vector<WordBox> boxes;
  std::vector<int64_t> first_word;  // number of each box's first word, plus one entry for the end
  std::vector<int64_t> first_run;   // number of each box's first run, plus one entry for the end

  // Returns the number of words of all boxes.
  int64_t words() const { return first_word.back(); }
};

// The boxes of a copy. Their words are computed, and cached, for each alignment of addresses that occurs. Thread-safe.
class StridedCopy {
 public:
  // An element of the boxes has `item_bytes` bytes.
  StridedCopy(const std::vector<Box>& boxes, int64_t item_bytes);

  // Returns the boxes for memory at these addresses, with words as wide as the addresses allow: one WordBoxes for each
  // width of words, widest first. Empty boxes are left out. The result lives as long as the copy.
  const std::vector<WordBoxes>& at(const void* src, const void* dst) const;

  const std::vector<Box>& boxes() const { return boxes_; }
  // Returns the bytes that the copy writes.
  int64_t bytes() const { return bytes_; }

  // Returns the pointer to the table of these boxes, an item of at(), on device number `device`. The pointer is null
  // until the caller (copy_table.h) sets it. The caller must guard the pointer with a lock of its own.
  std::shared_ptr<void>& device_table(const WordBoxes& boxes, int device) const;

 private:
  // Returns the boxes for addresses of this alignment, in bytes.
  const std::vector<WordBoxes>& for_alignment(int bytes) const;

  std::vector<Box> boxes_;
  int64_t item_bytes_;
  int64_t bytes_ = 0;
  struct State;  // the caches, under a lock
  std::shared_ptr<State> state_;
};

// A function that calls `body(begin, end)` for disjoint ranges that cover [0, count), each of at least `grain` indices
// unless `count` is smaller, on any number of threads.
using ParallelFor =
    std::function<void(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body)>;

// Runs the copy on the CPU, from the buffer at `src` to the buffer at `dst`, which must not overlap. The runs of large
// copies are divided among threads.
void run(const StridedCopy& copy, const void* src, void* dst, const ParallelFor& parallel_for);

}  // namespace shardwright
