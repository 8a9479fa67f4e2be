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

// Boxes with random strides, and with gaps between them in the source; packed in the destination. Both memories end
// with the last item of the last box, so that sanitizers detect an access beyond it.
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
  const Box& last = boxes.back();
  src_items = last.src_offset + 1;
  for (size_t d = 0; d < last.sizes.size(); ++d) src_items += (last.sizes[d] - 1) * last.src_strides[d];
  return boxes;
}

TEST(KernelBodies, CopiesMatchPlainLoops) {
  std::mt19937 random(3);
  for (const int64_t count : {1, 2, 9, 17, 33, 100, 145, 400}) {
    for (const int64_t item_bytes : {1, 2, 4, 8, 16}) {
      int64_t src_items = 0;
      int64_t dst_items = 0;
      const std::vector<Box> boxes = random_boxes(random, count, src_items, dst_items);
      std::vector<uint8_t> src(static_cast<size_t>(src_items * item_bytes));
      for (uint8_t& byte : src) byte = static_cast<uint8_t>(random());
      const std::vector<uint8_t> empty(static_cast<size_t>(dst_items * item_bytes), 7);
      std::vector<uint8_t> expected = empty;
      copy_boxes(boxes, src.data(), expected.data(), item_bytes);
      for (const bool by_table : {false, true}) {
        std::vector<uint8_t> found = empty;
        run_grids(StridedCopy(boxes, item_bytes), src.data(), found.data(), by_table);
        EXPECT_TRUE(found == expected) << count << " boxes of items of " << item_bytes
                                       << (by_table ? " bytes by a table" : " bytes inline");
      }
    }
  }
}

// Memory beyond the range of 32-bit addresses, of which only touched pages exist.
template <typename Item>
class SparseMemory {
 public:
  explicit SparseMemory(int64_t items)
      : bytes_(static_cast<size_t>(items) * sizeof(Item)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (exists()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool exists() const { return data_ != MAP_FAILED; }
  Item* items() const { return static_cast<Item*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

constexpr int64_t kFar = (int64_t{1} << 32) + 3;  // an offset beyond 32 bits, in items

// Copies two far rows of one box, or of as many boxes as there are columns, to far rows.
template <typename Item>
void check_far_copy(int64_t columns, bool is_one_box, bool by_table) {
  const SparseMemory<Item> src(3 * kFar);
  const SparseMemory<Item> dst(3 * kFar);
  if (!src.exists() || !dst.exists()) GTEST_SKIP() << "so much address space cannot be had";
  const int64_t first_src = kFar - 1;
  const int64_t first_dst = kFar + 1;
  std::vector<Box> boxes;
  for (int64_t j = 0; j < (is_one_box ? 1 : columns); ++j) {
    Box box;
    box.sizes = {2, is_one_box ? columns : 1};
    box.src_strides = box.dst_strides = {kFar, 1};
    box.src_offset = first_src + j;
    box.dst_offset = first_dst + j;
    boxes.push_back(box);
  }
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < columns; ++j) src.items()[first_src + i * kFar + j] = static_cast<Item>(i * 101 + j);
  }
  run_grids(StridedCopy(boxes, sizeof(Item)), src.items(), dst.items(), by_table);
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      ASSERT_EQ(dst.items()[first_dst + i * kFar + j], static_cast<Item>(i * 101 + j)) << "row " << i << ", item " << j;
    }
  }
}

TEST(KernelBodies, CopiesOfFarItems) {
  for (const bool by_table : {false, true}) {
    check_far_copy<uint8_t>(700, true, by_table);
    check_far_copy<uint16_t>(700, true, by_table);
    check_far_copy<uint64_t>(700, true, by_table);
    check_far_copy<float>(200, false, by_table);  // more boxes than kernel arguments hold
  }
}

// A copy of more than 2^32 words, in boxes of fewer than 2^31. Runs the thread blocks around multiples of 2^31 words.
TEST(KernelBodies, CopiesOfMoreThan32BitsOfWords) {
  constexpr int64_t kWords = kFar + 5000;
  const SparseMemory<uint8_t> src(kWords + 1);
  const SparseMemory<uint8_t> dst(kWords + 1);
  if (!src.exists() || !dst.exists()) GTEST_SKIP() << "so much address space cannot be had";
  Box box;
  box.sizes = {kWords};
  box.src_strides = box.dst_strides = {1};
  box.src_offset = 1;  // an odd offset, so that words are single bytes
  const StridedCopy copy({box}, 1);
  const std::vector<WordBoxes>& all = copy.at(src.items(), dst.items());
  ASSERT_EQ(all.size(), 1u);
  const WordBoxes& boxes = all.front();
  ASSERT_EQ(boxes.words(), kWords);
  const auto count = static_cast<int64_t>(boxes.boxes.size());
  ASSERT_GE(count, 3);
  ASSERT_LE(count, 8);
  InlineTable<8> inlined;
  std::copy(boxes.boxes.begin(), boxes.boxes.end(), inlined.boxes);
  std::copy(boxes.first_word.begin(), boxes.first_word.end(), inlined.first_word);
  const std::vector<uint8_t> packed = pack_table(boxes, kWordsPerBlock);
  std::vector<uint64_t> memory((packed.size() + 7) / 8);
  std::memcpy(memory.data(), packed.data(), packed.size());
  const BoxTable table = table_at(memory.data(), boxes);
  const int64_t last = num_copy_blocks(kWords) - 1;
  for (const bool by_table : {false, true}) {
    for (const int64_t block : {int64_t{1} << 21, (int64_t{1} << 21) - 1, int64_t{1} << 22, last - 1, last}) {
      const int64_t begin = block * kWordsPerBlock;
      const int64_t end = std::min(begin + kWordsPerBlock, kWords);
      for (int64_t w = begin; w < end; ++w) {
        src.items()[1 + w] = static_cast<uint8_t>(w % 251 + 1 + by_table);
        dst.items()[w] = 0;
      }
      for (int thread = kCopyThreads; thread-- > 0;) {
        by_table ? copy_table_words(block, thread, table, src.items(), dst.items())
                 : copy_inline_words(block, thread, inlined, count, src.items(), dst.items());
      }
      for (int64_t w = begin; w < end; ++w) {
        ASSERT_EQ(dst.items()[w], static_cast<uint8_t>(w % 251 + 1 + by_table)) << "word " << w;
      }
    }
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

// Computes the last two of so many sums that the table has more than 2^32 entries, from the first row and from the last
// one of more than 2^32 elements.
void check_far_sums(int64_t columns, int64_t width) {
  const int64_t num_sums = kFar / columns + 2;
  const int64_t num_rows = kFar / width + 2;
  const SparseMemory<float> rows(num_rows * width);
  const SparseMemory<int64_t> table(num_sums * columns);
  const SparseMemory<float> weights(num_sums * columns);
  const SparseMemory<float> out(num_sums * width);
  if (!rows.exists() || !table.exists() || !weights.exists() || !out.exists()) {
    GTEST_SKIP() << "so much address space cannot be had";
  }
  for (int64_t i = 0; i < width; ++i) {
    rows.items()[i] = static_cast<float>(i);
    rows.items()[(num_rows - 1) * width + i] = static_cast<float>(1000 + i);
  }
  for (int64_t m = num_sums - 2; m < num_sums; ++m) {
    for (int64_t j = 0; j < columns; ++j) {
      table.items()[m * columns + j] = j == 0 ? num_rows - 1 : j == 1 ? -1 : 0;
      weights.items()[m * columns + j] = static_cast<float>(j + 2);
    }
  }
  for (const bool has_weights : {false, true}) {
    const RowSums<float, float> sums{rows.items(), table.items(), has_weights ? weights.items() : nullptr,
                                     out.items(),  num_sums,      columns,
                                     width,        width};
    for (int64_t block = sums.num_blocks() - 2 * sums.blocks_per_row(); block <= sums.num_blocks(); ++block) {
      for (int thread = sums.kThreads; thread-- > 0;) sums.run<float>(block, thread);
    }
    for (int64_t m = num_sums - 2; m < num_sums; ++m) {
      for (int64_t i = 0; i < width; ++i) {
        float expected = static_cast<float>(1000 + i) * (has_weights ? 2 : 1);
        for (int64_t j = 2; j < columns; ++j) expected += static_cast<float>(i * (has_weights ? j + 2 : 1));
        ASSERT_EQ(out.items()[m * width + i], expected) << "sum " << m << ", element " << i;
      }
    }
  }
}

TEST(KernelBodies, RowSumsOfFarRows) {
  check_far_sums(3, 300);
  check_far_sums(1, 1);
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

// Reduces the last words of parts of more than 2^32 words.
template <int kItems>
void check_far_reduction() {
  constexpr int64_t kWords = kFar;
  constexpr int kParts = 3;
  const SparseMemory<float> first(kWords * kItems);
  const SparseMemory<float> second(kWords * kItems);
  const SparseMemory<float> third(kWords * kItems);
  const SparseMemory<float> sum((kWords + kReduceThreads) * kItems);
  ReducedParts<float> parts{};
  int m = 0;
  for (const SparseMemory<float>* each : {&first, &second, &third}) {
    if (!each->exists() || !sum.exists()) GTEST_SKIP() << "so much address space cannot be had";
    parts.at[m++] = each->items();
  }
  const int64_t blocks = num_reduce_blocks(kWords);
  const int64_t begin = (blocks - 2) * kReduceThreads * kItems;
  for (int64_t i = begin; i < kWords * kItems; ++i) {
    first.items()[i] = 1;
    second.items()[i] = static_cast<float>(i - begin);
    third.items()[i] = 0.5f;
  }
  for (int64_t block = blocks - 2; block < blocks; ++block) {
    for (int thread = kReduceThreads; thread-- > 0;) {
      reduce_word<float, kItems, SumOfTwo>(block, thread, parts, kParts, kWords, 2, sum.items());
    }
  }
  for (int64_t i = begin; i < kWords * kItems; ++i) {
    ASSERT_EQ(sum.items()[i], (1.5f + static_cast<float>(i - begin)) / 2) << "element " << i;
  }
  for (int64_t i = kWords * kItems; i < (kWords + kReduceThreads) * kItems; ++i) {
    ASSERT_EQ(sum.items()[i], 0) << "written behind the result";
  }
}

TEST(KernelBodies, ReductionsOfFarElements) {
  check_far_reduction<1>();
  check_far_reduction<4>();
}

}  // namespace
}  // namespace shardwright
