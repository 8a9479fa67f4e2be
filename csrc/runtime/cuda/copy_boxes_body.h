// The work of one thread of the kernels that copy boxes (copy_boxes.cu). It also compiles for the host, where tests
// call it for every thread of a grid.
//
// All words of a copy are numbered (strided_copy.h). A thread block copies kWordsPerBlock = 1024 consecutive words, and
// each of its 8 warps 128 consecutive words of them. Thread t of warp w in block b copies the words n, n + 32, n + 64
// and n + 96, where n = 1024 b + 128 w + t. So neighboring threads access neighboring words. Each thread loads its four
// words before it stores any, so that several loads are in flight.
#pragma once

#include <cstdint>

#include "program/copy_table.h"
#include "program/strided_copy.h"

namespace shardwright {

inline constexpr int kCopyThreads = 256;  // threads per block
inline constexpr int kWarpThreads = 32;
inline constexpr int kWordsPerThread = 4;
inline constexpr int kWordsPerBlock = kCopyThreads * kWordsPerThread;

// Returns the number of thread blocks for this many words.
inline int64_t num_copy_blocks(int64_t words) { return (words + kWordsPerBlock - 1) / kWordsPerBlock; }

// Copies the words of one thread. `words` is the number of words of the copy, and first_word[b] the number of the first
// word of box b. Threads beyond the last word do nothing. The words of the block are in boxes `first` to `last`, among
// which the warp finds the boxes of its own words. The words of most warps are all in one box; then each thread reads
// the dims of the box once for its four words.
template <typename Word>
SHARDWRIGHT_HOST_DEVICE void copy_words(int64_t block, int thread, const WordBox* boxes, const int64_t* first_word,
                                        int64_t words, int64_t first, int64_t last, const Word* __restrict__ src,
                                        Word* __restrict__ dst) {
  const int64_t begin = block * kWordsPerBlock + thread / kWarpThreads * (kWarpThreads * kWordsPerThread);
  if (begin >= words) return;
  const int64_t begin_of_next = begin + kWarpThreads * kWordsPerThread;
  const int64_t end = begin_of_next < words ? begin_of_next : words;
  first += box_of(first_word + first, last - first + 1, begin);
  last = first + box_of(first_word + first, last - first + 1, end - 1);
  const int64_t thread_begin = begin + thread % kWarpThreads;
  int64_t from[kWordsPerThread];
  int64_t to[kWordsPerThread];
  if (first == last) {
    uint32_t words_in_box[kWordsPerThread];
    SHARDWRIGHT_UNROLL
    for (int w = 0; w < kWordsPerThread; ++w) {
      words_in_box[w] = static_cast<uint32_t>(thread_begin + w * kWarpThreads - first_word[first]);
    }
    boxes[first].template locate<kWordsPerThread>(words_in_box, from, to);
  } else {
    SHARDWRIGHT_UNROLL
    for (int w = 0; w < kWordsPerThread; ++w) {
      const int64_t word = thread_begin + w * kWarpThreads;
      const int64_t b = first + box_of(first_word + first, last - first + 1, word);
      boxes[b].locate(static_cast<uint32_t>(word - first_word[b]), from[w], to[w]);
    }
  }
  Word loaded[kWordsPerThread];
  SHARDWRIGHT_UNROLL
  for (int w = 0; w < kWordsPerThread; ++w) {
    if (thread_begin + w * kWarpThreads < end) loaded[w] = src[from[w]];
  }
  SHARDWRIGHT_UNROLL
  for (int w = 0; w < kWordsPerThread; ++w) {
    if (thread_begin + w * kWarpThreads < end) dst[to[w]] = loaded[w];
  }
}

// Copies the words of one thread, with the boxes in the kernel's argument.
template <typename Word, int kBoxes>
SHARDWRIGHT_HOST_DEVICE void copy_inline_words(int64_t block, int thread, const InlineTable<kBoxes>& table,
                                               int64_t num_boxes, const Word* src, Word* dst) {
  const int64_t words = table.first_word[num_boxes];
  const int64_t begin = block * kWordsPerBlock;
  const int64_t end = begin + kWordsPerBlock < words ? begin + kWordsPerBlock : words;
  const int64_t first = box_of(table.first_word, num_boxes, begin);
  const int64_t last = box_of(table.first_word, num_boxes, end - 1);
  copy_words(block, thread, table.boxes, table.first_word, words, first, last, src, dst);
}

// Copies the words of one thread, with the boxes in a table in memory. The table must be made for blocks of
// kWordsPerBlock words (table_on in program/copy_table.h).
template <typename Word>
SHARDWRIGHT_HOST_DEVICE void copy_table_words(int64_t block, int thread, const BoxTable& table, const Word* src,
                                              Word* dst) {
  copy_words(block, thread, table.boxes, table.first_word, table.first_word[table.num_boxes], table.first_box[block],
             table.first_box[block + 1], src, dst);
}

}  // namespace shardwright
