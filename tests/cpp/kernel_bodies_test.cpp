// Runs the bodies of CUDA kernels on the host over whole grids, block by block and thread by thread in an order that no
// GPU guarantees, and compares with plain loops.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "program/copy_boxes.h"
#include "runtime/cuda/copy_boxes_body.h"
#include "runtime/cuda/reduce_parts_body.h"
#include "runtime/cuda/sum_rows_body.h"

namespace shardwright {
namespace {

struct alignas(16) Word16 {
  uint64_t halves[2];
};

template <typename Body>
void over_grid(int64_t blocks, int threads, const Body& body) {
  for (int64_t block = blocks; block-- > 0;) {
    for (int thread = threads; thread-- > 0;) body(block, thread);
  }
}

template <typename Word, int kBoxes>
bool run_inline(const WordBoxes& boxes, const Word* src, Word* dst) {
  const auto count = static_cast<int64_t>(boxes.boxes.size());
  if (inline_boxes_for(count, kBoxes) != kBoxes) return false;
  InlineTable<kBoxes> table;
  std::copy(boxes.boxes.begin(), boxes.boxes.end(), table.boxes);
  std::copy(boxes.first_word.begin(), boxes.first_word.end(), table.first_word);
  over_grid(num_copy_blocks(boxes.words()), kCopyThreads,
            [&](int64_t block, int thread) { copy_inline_words(block, thread, table, count, src, dst); });
  return true;
}

template <typename Word>
void run_grid(const WordBoxes& boxes, const void* src, void* dst, bool by_table) {
  const auto* from = static_cast<const Word*>(src);
  auto* to = static_cast<Word*>(dst);
  const bool is_done = !by_table && (run_inline<Word, 8>(boxes, from, to) || run_inline<Word, 16>(boxes, from, to) ||
                                     run_inline<Word, 32>(boxes, from, to) || run_inline<Word, 64>(boxes, from, to) ||
                                     run_inline<Word, 144>(boxes, from, to));
  if (is_done) return;
  const std::vector<uint8_t> packed = pack_table(boxes, kWordsPerBlock);
  std::vector<uint64_t> memory((packed.size() + 7) / 8);
  std::memcpy(memory.data(), packed.data(), packed.size());
  const BoxTable table = table_at(memory.data(), boxes);
  over_grid(num_copy_blocks(boxes.words()), kCopyThreads,
            [&](int64_t block, int thread) { copy_table_words(block, thread, table, from, to); });
}

void run_grids(const StridedCopy& copy, const void* src, void* dst, bool by_table) {
  for (const WordBoxes& boxes : copy.at(src, dst)) {
    switch (boxes.word_bytes) {
      case 1:
        run_grid<uint8_t>(boxes, src, dst, by_table);
        break;
      case 2:
        run_grid<uint16_t>(boxes, src, dst, by_table);
        break;
      case 4:
        run_grid<uint32_t>(boxes, src, dst, by_table);
        break;
      case 8:
        run_grid<uint64_t>(boxes, src, dst, by_table);
        break;
      default:
        run_grid<Word16>(boxes, src, dst, by_table);
    }
  }
}

// Boxes with random strides, and with gaps between them in the source; packed in the destination.
std::vector<Box> random_boxes(std::mt19937& random, int64_t count, int64_t& src_items, int64_t& dst_items) {
  const auto up_to = [&](int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random); };
  std::vector<Box> boxes;
  src_items = up_to(9);
  dst_items = up_to(9);
  for (int64_t b = 0; b < count; ++b) {
    Box box;
    box.src_offset = src_items;
    box.dst_offset = dst_items;
    const auto ndim = static_cast<size_t>(1 + up_to(3));
    int64_t src_stride = 1 + up_to(1);
    int64_t dst_stride = 1;
    for (size_t d = 0; d < ndim; ++d) {
      const int64_t size = 1 + up_to(count > 20 ? 4 : 14);
      box.sizes.insert(box.sizes.begin(), size);
      box.src_strides.insert(box.src_strides.begin(), src_stride);
      box.dst_strides.insert(box.dst_strides.begin(), dst_stride);
      src_stride *= size + up_to(2);
      dst_stride *= size;
    }
    src_items += src_stride + up_to(5);
    dst_items += dst_stride;
    boxes.push_back(box);
  }
  return boxes;
}

TEST(KernelBodies, CopiesMatchPlainLoops) {
  std::mt19937 random(3);
  for (const int64_t count : {1, 2, 9, 17, 33, 100, 145, 400}) {
    for (const int64_t item_bytes : {1, 2, 4, 8, 16}) {
      int64_t src_items = 0;
      int64_t dst_items = 0;
      const std::vector<Box> boxes = random_boxes(random, count, src_items, dst_items);
      std::vector<Word16> src(static_cast<size_t>(src_items * item_bytes / 16 + 1));
      auto* bytes = reinterpret_cast<unsigned char*>(src.data());
      for (size_t i = 0; i < src.size() * 16; ++i) bytes[i] = static_cast<unsigned char>(random());
      const std::vector<Word16> empty(static_cast<size_t>(dst_items * item_bytes / 16 + 1), Word16{{7, 7}});
      std::vector<Word16> expected = empty;
      copy_boxes(boxes, bytes, expected.data(), item_bytes);
      for (const bool by_table : {false, true}) {
        std::vector<Word16> found = empty;
        run_grids(StridedCopy(boxes, item_bytes), src.data(), found.data(), by_table);
        EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * 16), 0)
            << count << " boxes of items of " << item_bytes << (by_table ? " bytes by a table" : " bytes inline");
      }
    }
  }
}

// Memory beyond the range of 32-bit addresses, of which only touched pages exist.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (exists()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool exists() const { return data_ != MAP_FAILED; }
  uint16_t* items() const { return static_cast<uint16_t*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

TEST(KernelBodies, OffsetsMayExceed32Bits) {
  constexpr int64_t kFar = (int64_t{1} << 32) + 3;  // items
  const SparseMemory src(size_t{2} * (3 * kFar));
  const SparseMemory dst(size_t{2} * (2 * kFar));
  if (!src.exists() || !dst.exists()) GTEST_SKIP() << "so much address space cannot be had";
  Box box;
  box.sizes = {2, 700};
  box.src_strides = {kFar, 1};
  box.src_offset = kFar - 1;
  box.dst_strides = {700, 1};
  box.dst_offset = kFar;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 700; ++j) src.items()[box.src_offset + i * kFar + j] = static_cast<uint16_t>(i * 1000 + j);
  }
  run_grids(StridedCopy({box}, 2), src.items(), dst.items(), false);
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 700; ++j) ASSERT_EQ(dst.items()[kFar + i * 700 + j], i * 1000 + j);
  }
}

TEST(KernelBodies, ArgumentsGrowWithTheNumberOfBoxes) {
  constexpr int kMost = 144;
  size_t before = 0;
  for (const int64_t count : {1, 8, 9, 16, 17, 32, 33, 64, 65, 144}) {
    const int size = inline_boxes_for(count, kMost);
    ASSERT_GE(size, count);
    EXPECT_LE(size, count <= 8 ? 8 : count <= 64 ? 2 * count : kMost);
    EXPECT_GE(static_cast<size_t>(size), before);
    before = static_cast<size_t>(size);
  }
  EXPECT_EQ(inline_boxes_for(145, kMost), 0);
  EXPECT_EQ(inline_boxes_for(17, kInlineBoxesEverywhere), 0);
}

template <typename Weight>
void check_sums(int64_t num_rows, int64_t num_sums, int64_t columns, int64_t width, bool has_weights) {
  std::mt19937 random(static_cast<unsigned>(num_sums * 31 + columns));
  const int64_t stride = width + 3;
  std::vector<float> rows(static_cast<size_t>(num_rows * stride));
  for (float& value : rows) value = std::uniform_real_distribution<float>(-1, 1)(random);
  std::vector<int64_t> table(static_cast<size_t>(num_sums * columns));
  for (int64_t& place : table) place = std::uniform_int_distribution<int64_t>(-1, num_rows - 1)(random);
  std::vector<Weight> weights(table.size());
  for (Weight& weight : weights) weight = std::uniform_real_distribution<Weight>(-1, 1)(random);
  std::vector<float> found(static_cast<size_t>(num_sums * width), NAN);
  const RowSums<float, Weight> sums{rows.data(),  table.data(), has_weights ? weights.data() : nullptr,
                                    found.data(), num_sums,     columns,
                                    width,        stride};
  over_grid(sums.num_blocks() + 1, sums.kThreads,
            [&](int64_t block, int thread) { sums.template run<float>(block, thread); });
  for (int64_t m = 0; m < num_sums; ++m) {
    for (int64_t i = 0; i < width; ++i) {
      float expected = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t place = table[static_cast<size_t>(m * columns + j)];
        if (place < 0) continue;
        const float value = rows[static_cast<size_t>(place * stride + i)];
        expected += has_weights ? static_cast<float>(weights[static_cast<size_t>(m * columns + j)]) * value : value;
      }
      ASSERT_EQ(found[static_cast<size_t>(m * width + i)], expected) << "sum " << m << ", element " << i;
    }
  }
}

TEST(KernelBodies, RowSumsMatchPlainLoops) {
  for (const bool has_weights : {false, true}) {
    check_sums<float>(5, 7, 3, 1000, has_weights);
    check_sums<double>(1, 3, 1, 1, has_weights);
    check_sums<float>(9, 4, 8, 256, has_weights);
    check_sums<float>(2, 1, 2, 257, has_weights);
  }
}

template <typename Item, int kItems, typename Combine>
void check_reduction(int num_parts, int64_t num_words, double divisor) {
  std::mt19937 random(static_cast<unsigned>(num_parts * 7 + num_words));
  const auto numel = static_cast<size_t>(num_words * kItems);
  std::vector<std::vector<Item>> parts(static_cast<size_t>(num_parts), std::vector<Item>(numel));
  ReducedParts<Item> at{};
  for (size_t m = 0; m < parts.size(); ++m) {
    for (Item& item : parts[m]) {
      item = random() % 16 == 0 ? Item(NAN) : std::uniform_real_distribution<Item>(-2, 2)(random);
    }
    at.at[m] = parts[m].data();
  }
  std::vector<Item> found(numel + kItems, Item(7));
  over_grid(num_reduce_blocks(num_words) + 1, kReduceThreads, [&](int64_t block, int thread) {
    reduce_word<Item, kItems, Combine>(block, thread, at, num_parts, num_words, divisor, found.data());
  });
  for (size_t i = 0; i < numel; ++i) {
    Item expected = parts[0][i];
    for (size_t m = 1; m < parts.size(); ++m) expected = Combine()(expected, parts[m][i]);
    expected /= static_cast<Item>(divisor);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found[i])) << "element " << i << " of " << num_parts << " parts";
    } else {
      ASSERT_EQ(found[i], expected) << "element " << i << " of " << num_parts << " parts";
    }
  }
  for (size_t i = numel; i < found.size(); ++i) ASSERT_EQ(found[i], Item(7)) << "written behind the result";
}

TEST(KernelBodies, ReductionsMatchPlainLoops) {
  for (const int num_parts : {1, 2, 5, kMaxReducedParts}) {
    for (const int64_t num_words : {1, 255, 256, 513}) {
      check_reduction<float, 4, SumOfTwo>(num_parts, num_words, 1);
      check_reduction<float, 1, SumOfTwo>(num_parts, num_words, num_parts);
      check_reduction<double, 2, ProductOfTwo>(num_parts, num_words, 1);
      check_reduction<float, 4, MinOfTwo>(num_parts, num_words, 1);
      check_reduction<double, 1, MaxOfTwo>(num_parts, num_words, 1);
    }
  }
  EXPECT_EQ(MinOfTwo()(1.0, 2.0), 1);
  EXPECT_EQ(MaxOfTwo()(1.0, 2.0), 2);
  const double nan = std::nan("");
  EXPECT_TRUE(std::isnan(MinOfTwo()(nan, 2.0)) && std::isnan(MaxOfTwo()(1.0, nan)));
}

}  // namespace
}  // namespace shardwright
