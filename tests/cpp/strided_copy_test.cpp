// Compares prepared copies with the plain copies of copy_boxes.h: in runs, as on CPU, and word by word, as on a GPU.
#include "program/strided_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "program/copy_boxes.h"

namespace shardwright {
namespace {

using Bytes = std::vector<unsigned char>;

// Parallel loops with one thread, with several, and with threads that each copy very little.
void serially(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) { body(0, count); }
void one_by_one(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t i = count; i-- > 0;) body(i, i + 1);
}
void in_thirds(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  for (const int64_t third : {2, 0, 1}) {
    if (count * third / 3 < count * (third + 1) / 3) body(count * third / 3, count * (third + 1) / 3);
  }
}

// Does the work of the CUDA kernel for all words of all boxes.
void word_by_word(const StridedCopy& copy, const unsigned char* src, unsigned char* dst) {
  for (const WordBoxes& boxes : copy.at(src, dst)) {
    const auto count = static_cast<int64_t>(boxes.boxes.size());
    for (int64_t word = 0; word < boxes.words(); ++word) {
      const int64_t b = box_of(boxes.first_word.data(), count, word);
      int64_t from = 0;
      int64_t to = 0;
      boxes.boxes[b].locate(static_cast<uint32_t>(word - boxes.first_word[b]), from, to);
      std::memcpy(dst + to * boxes.word_bytes, src + from * boxes.word_bytes, static_cast<size_t>(boxes.word_bytes));
    }
  }
}

struct Arrays {
  std::vector<Box> boxes;
  int64_t src_items = 0;
  int64_t dst_items = 0;
};

// Returns boxes of a row-major array, packed one after the other, with some elements before the first.
Arrays random_boxes(std::mt19937& random, size_t max_dims, int64_t max_boxes) {
  const auto up_to = [&](int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random); };
  Arrays arrays;
  arrays.dst_items = up_to(3);
  const int64_t front = up_to(5);
  const auto ndim = static_cast<size_t>(up_to(static_cast<int64_t>(max_dims)));
  std::vector<int64_t> shape(ndim);
  int64_t items = 1;
  for (int64_t& size : shape) items *= size = 1 + up_to(ndim > 4 ? 2 : ndim > 2 ? 6 : 24);
  std::vector<int64_t> strides(ndim, 1);
  for (size_t d = ndim; d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  arrays.src_items = front + items;
  for (int64_t left = 1 + up_to(max_boxes); left > 0; --left) {
    Box box{front, arrays.dst_items, {}, strides, std::vector<int64_t>(ndim, 1)};
    int64_t count = 1;
    for (size_t d = 0; d < ndim; ++d) {
      const int64_t begin = up_to(shape[d] - 1);
      box.sizes.push_back(up_to(20) == 0 ? 0 : 1 + up_to(shape[d] - begin - 1));
      box.src_offset += begin * strides[d];
      count *= box.sizes[d];
    }
    for (size_t d = ndim; d-- > 1;) box.dst_strides[d - 1] = box.dst_strides[d] * box.sizes[d];
    arrays.dst_items += count + up_to(2);
    arrays.boxes.push_back(std::move(box));
  }
  return arrays;
}

// Packs and unpacks, also from and to memory that begins at odd addresses.
void check(const Arrays& arrays, int64_t item, size_t src_shift, size_t dst_shift) {
  Bytes src(static_cast<size_t>(arrays.src_items * item) + src_shift);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<unsigned char>(i * 37 + 11);
  const Bytes empty(static_cast<size_t>(arrays.dst_items * item) + dst_shift, 0xee);
  Bytes expected = empty;
  copy_boxes(arrays.boxes, src.data() + src_shift, expected.data() + dst_shift, item);
  const StridedCopy copy(arrays.boxes, item);
  for (const ParallelFor& threads : {ParallelFor(serially), ParallelFor(one_by_one), ParallelFor(in_thirds)}) {
    Bytes result = empty;
    run(copy, src.data() + src_shift, result.data() + dst_shift, threads);
    ASSERT_EQ(result, expected);
  }
  Bytes result = empty;
  word_by_word(copy, src.data() + src_shift, result.data() + dst_shift);
  ASSERT_EQ(result, expected);
}

TEST(StridedCopy, MatchesPlainCopies) {
  std::mt19937 random(7);
  int64_t bytes = 0;
  std::set<int> widths;
  for (int trial = 0; trial < 3000; ++trial) {
    const Arrays arrays = random_boxes(random, trial % 3 == 0 ? 9 : 4, trial % 7 == 0 ? 40 : 4);
    const int64_t item = int64_t{1} << (trial % 5);
    const auto shift = [&] { return static_cast<size_t>(std::uniform_int_distribution<int>(0, 3)(random)) * item; };
    ASSERT_NO_FATAL_FAILURE(check(arrays, item, trial % 2 ? shift() : 0, trial % 2 ? shift() : 0)) << trial;
    const StridedCopy copy(arrays.boxes, item);
    bytes += copy.bytes();
    for (const WordBoxes& boxes : copy.at(nullptr, nullptr)) widths.insert(boxes.word_bytes);
  }
  EXPECT_GT(bytes, 500000);
  EXPECT_EQ(widths, (std::set<int>{1, 2, 4, 8, 16}));
}

TEST(StridedCopy, UsesTheWidestPossibleWords) {
  alignas(64) static unsigned char memory[64];
  const auto width = [&](const Box& box, int64_t item, size_t shift = 0) {
    return StridedCopy({box}, item).at(memory + shift, memory).at(0).word_bytes;
  };
  EXPECT_EQ(width({0, 0, {4, 8}, {16, 1}, {8, 1}}, 4), 16);
  EXPECT_EQ(width({0, 0, {4, 8}, {18, 1}, {8, 1}}, 4), 8) << "rows of 72 bytes";
  EXPECT_EQ(width({1, 0, {4, 8}, {16, 1}, {8, 1}}, 4), 4) << "begins 4 bytes in";
  EXPECT_EQ(width({0, 0, {4, 8}, {16, 1}, {8, 1}}, 4, 8), 8) << "memory begins 8 bytes in";
  EXPECT_EQ(width({0, 0, {4, 7}, {16, 1}, {7, 1}}, 1), 1);
  EXPECT_EQ(width({0, 0, {4, 4}, {4, 1}, {4, 1}}, 1), 16) << "rows that are one run";
  EXPECT_EQ(width({0, 0, {4}, {2}, {1}}, 2), 2) << "no run at all";
  const StridedCopy apart({{0, 0, {8}, {1}, {1}}, {8, 8, {3}, {1}, {1}}}, 4);
  EXPECT_EQ(apart.at(memory, memory).size(), 2u) << "one odd box does not make the others slow";
}

TEST(StridedCopy, MergesDims) {
  const StridedCopy copy({{0, 0, {2, 3, 1, 5, 7}, {3 * 35, 35, 35, 7, 1}, {3 * 35, 35, 35, 7, 1}}}, 4);
  const WordBoxes& boxes = copy.at(nullptr, nullptr).at(0);
  EXPECT_EQ(boxes.boxes.at(0).ndim, 1);
  EXPECT_EQ(boxes.first_run.back(), 1);
}

TEST(StridedCopy, DivisorMatchesIntegerDivision) {
  std::mt19937 random(3);
  std::uniform_int_distribution<uint32_t> any(0, std::numeric_limits<int32_t>::max());
  for (int trial = 0; trial < 200000; ++trial) {
    const uint32_t divisor = 1 + any(random) % (trial % 2 ? 1000 : std::numeric_limits<int32_t>::max());
    const Divisor by(divisor);
    for (const uint32_t n : {any(random), divisor - 1, divisor, divisor * (any(random) % 4), 0x7fffffffu}) {
      if (n > 0x7fffffffu) continue;
      ASSERT_EQ(by.quotient(n), n / divisor) << n << " / " << divisor;
    }
  }
}

// A box of more than 2^31 words is split; nothing is copied here.
TEST(StridedCopy, SplitsBoxesOfTooManyWords) {
  const int64_t rows = int64_t{1} << 20;
  const StridedCopy copy({{0, 0, {rows, 4097}, {4099, 1}, {4097, 1}}}, 1);
  const WordBoxes& boxes = copy.at(nullptr, nullptr).at(0);
  EXPECT_EQ(boxes.words(), rows * 4097);
  ASSERT_GT(boxes.boxes.size(), 1u);
  for (size_t b = 0; b < boxes.boxes.size(); ++b) {
    const int64_t words = boxes.first_word[b + 1] - boxes.first_word[b];
    ASSERT_LT(words, int64_t{1} << 31);
    int64_t src = 0;
    int64_t dst = 0;
    boxes.boxes[b].locate(static_cast<uint32_t>(words - 1), src, dst);
    EXPECT_EQ(dst, boxes.first_word[b + 1] - 1);
    EXPECT_EQ(src, dst / 4097 * 4099 + dst % 4097);
  }
}

}  // namespace
}  // namespace shardwright
