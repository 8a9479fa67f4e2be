#include "program/strided_copy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "layout/box.h"

namespace shardwright {
namespace {

constexpr int64_t kMaxWords = int64_t{1} << 31;    // a box must have fewer words
constexpr int64_t kGrainBytes = int64_t{1} << 18;  // minimum bytes for each thread

// A dim of a box. Strides are in elements.
struct Dim {
  int64_t size;
  int64_t src;  // stride in the source
  int64_t dst;  // stride in the destination
};

// Returns the dims of a box, merged where possible. The last dim is a run on both sides. Returns nullopt for an empty
// box.
std::optional<std::vector<Dim>> merged_dims(Box box) {
  if (std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end()) return std::nullopt;
  box.simplify();
  std::vector<Dim> dims;
  for (size_t d = 0; d < box.sizes.size(); ++d) dims.push_back({box.sizes[d], box.src_strides[d], box.dst_strides[d]});
  if (dims.empty() || dims.back().src != 1 || dims.back().dst != 1) dims.push_back({1, 1, 1});
  return dims;
}

// Returns the largest power of two up to `most` that divides all of `bytes`: the widest possible word.
int common_width(int most, std::initializer_list<int64_t> bytes) {
  int64_t width = most;
  for (const int64_t b : bytes) {
    if (b != 0) width = std::min(width, b & -b);
  }
  return static_cast<int>(width);
}

// Turns boxes into boxes of words, sorted by the width of words. `alignment` is the alignment of both addresses, in
// bytes.
class Preparation {
 public:
  Preparation(int64_t item_bytes, int alignment) : item_(item_bytes), alignment_(alignment) {}

  // Adds a box, unless it is empty.
  void add(const Box& box) {
    if (const auto dims = merged_dims(box)) add(box.src_offset, box.dst_offset, *dims);
  }

  // Returns all boxes: one WordBoxes for each width of words, widest first.
  std::vector<WordBoxes> take() {
    std::vector<WordBoxes> all;
    for (auto& [width, boxes] : by_width_) all.push_back(std::move(boxes));
    return all;
  }

 private:
  // Adds a box with these offsets and dims. Splits it if it has too many dims or words.
  void add(int64_t src, int64_t dst, std::vector<Dim> dims) {
    int64_t items = 1;
    for (const Dim& dim : dims) items *= dim.size;
    const bool is_too_large = items * item_ >= kMaxWords;  // words may be single bytes
    if (dims.size() > kMaxCopyDims || is_too_large) return split(src, dst, std::move(dims));
    const Dim& run = dims.back();
    int width = common_width(alignment_, {src * item_, dst * item_, run.size * item_});
    for (size_t d = 0; d + 1 < dims.size(); ++d)
      width = common_width(width, {dims[d].src * item_, dims[d].dst * item_});
    WordBox box;
    box.src_offset = src * item_ / width;
    box.dst_offset = dst * item_ / width;
    box.ndim = static_cast<int>(dims.size());
    for (size_t d = 0; d + 1 < dims.size(); ++d) {
      box.sizes[d] = Divisor(static_cast<uint32_t>(dims[d].size));
      box.src_strides[d] = dims[d].src * item_ / width;
      box.dst_strides[d] = dims[d].dst * item_ / width;
    }
    const auto last = static_cast<size_t>(box.ndim - 1);
    box.sizes[last] = Divisor(static_cast<uint32_t>(run.size * item_ / width));
    box.src_strides[last] = box.dst_strides[last] = 1;
    WordBoxes& boxes = by_width_[-width];  // negated, so that the widest words are first
    if (boxes.boxes.empty()) {
      boxes.word_bytes = width;
      boxes.first_word = boxes.first_run = {0};
    }
    boxes.boxes.push_back(box);
    boxes.first_word.push_back(boxes.first_word.back() + items * item_ / width);
    boxes.first_run.push_back(boxes.first_run.back() + items / run.size);
  }

  // Adds the two halves of the outermost dim. A dim of only one index is dropped.
  void split(int64_t src, int64_t dst, std::vector<Dim> dims) {
    const Dim outermost = dims.front();
    const int64_t half = outermost.size / 2;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, half}, std::pair{half, outermost.size}}) {
      if (begin == end) continue;
      std::vector<Dim> part = dims;
      part.front().size = end - begin;
      if (end - begin == 1 && part.size() > 1) part.erase(part.begin());
      add(src + begin * outermost.src, dst + begin * outermost.dst, std::move(part));
    }
  }

  int64_t item_;                       // bytes of an element
  int alignment_;                      // of both addresses, in bytes
  std::map<int, WordBoxes> by_width_;  // by negated bytes of a word
};

// Copies `count` runs of kBytes bytes. Strides are in bytes.
template <int kBytes>
void copy_runs_of(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

// Copies `count` runs of `bytes` bytes, whose strides are in bytes. Short runs, which fit into a register or two, are
// copied without a call for each.
void copy_runs(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t count, int64_t bytes) {
  switch (bytes) {
    case 1:
      return copy_runs_of<1>(src, src_stride, dst, dst_stride, count);
    case 2:
      return copy_runs_of<2>(src, src_stride, dst, dst_stride, count);
    case 4:
      return copy_runs_of<4>(src, src_stride, dst, dst_stride, count);
    case 8:
      return copy_runs_of<8>(src, src_stride, dst, dst_stride, count);
    case 16:
      return copy_runs_of<16>(src, src_stride, dst, dst_stride, count);
    case 32:
      return copy_runs_of<32>(src, src_stride, dst, dst_stride, count);
    case 64:
      return copy_runs_of<64>(src, src_stride, dst, dst_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(dst + i * dst_stride, src + i * src_stride, static_cast<size_t>(bytes));
      }
  }
}

// Copies the runs [begin, end) of a box, all runs of the second-to-last dim in one call.
void copy_box_runs(const WordBox& box, int word_bytes, const char* src, char* dst, int64_t begin, int64_t end) {
  const int run = box.ndim - 1;
  const int64_t run_bytes = static_cast<int64_t>(box.sizes[run].divisor) * word_bytes;
  const int64_t row = run > 0 ? box.sizes[run - 1].divisor : 1;
  const int64_t src_stride = run > 0 ? box.src_strides[run - 1] * word_bytes : 0;
  const int64_t dst_stride = run > 0 ? box.dst_strides[run - 1] * word_bytes : 0;
  while (begin < end) {
    const int64_t count = std::min(end - begin, row - begin % row);
    int64_t from = 0;
    int64_t to = 0;
    box.locate(static_cast<uint32_t>(begin * box.sizes[run].divisor), from, to);
    copy_runs(src + from * word_bytes, src_stride, dst + to * word_bytes, dst_stride, count, run_bytes);
    begin += count;
  }
}

// Returns true if the copy is a single run, which is divided among threads by words.
bool is_one_run(const WordBoxes& boxes) { return boxes.first_run.back() == 1; }

// Copies boxes, divided among threads: by runs, or by words if there is only one run.
void run_boxes(const WordBoxes& boxes, const char* src, char* dst, const ParallelFor& parallel_for) {
  if (is_one_run(boxes)) {
    const WordBox& box = boxes.boxes.front();
    const auto copy_words = [&](int64_t begin, int64_t end) {
      std::memcpy(dst + (box.dst_offset + begin) * boxes.word_bytes, src + (box.src_offset + begin) * boxes.word_bytes,
                  static_cast<size_t>((end - begin) * boxes.word_bytes));
    };
    return parallel_for(boxes.words(), kGrainBytes / boxes.word_bytes, copy_words);
  }
  const int64_t num_runs = boxes.first_run.back();
  const int64_t run_bytes = std::max<int64_t>(boxes.words() * boxes.word_bytes / num_runs, 1);
  const auto copy_range = [&](int64_t begin, int64_t end) {
    int64_t b = box_of(boxes.first_run.data(), static_cast<int64_t>(boxes.boxes.size()), begin);
    for (; begin < end; ++b) {
      const int64_t first = boxes.first_run[b];
      const int64_t last = std::min(end, boxes.first_run[b + 1]);
      copy_box_runs(boxes.boxes[b], boxes.word_bytes, src, dst, begin - first, last - first);
      begin = last;
    }
  };
  parallel_for(num_runs, std::max<int64_t>(kGrainBytes / run_bytes, 1), copy_range);
}

// Returns the largest power of two, up to kMaxWordBytes, that divides both addresses.
int alignment_of(const void* src, const void* dst) {
  const auto bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) | kMaxWordBytes;
  return static_cast<int>(bits & -bits);
}

}  // namespace

Divisor::Divisor(uint32_t n) : divisor(n) {
  if (n <= 1) return;
  const auto log = static_cast<uint32_t>(std::bit_width(n - 1));  // rounded up
  multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log)) + n - 1) / n);
  shift = log - 1;
}

// The caches: boxes by alignment of the addresses, and tables by boxes and device.
struct StridedCopy::State {
  std::mutex mutex;
  std::map<int, std::unique_ptr<std::vector<WordBoxes>>> by_alignment;
  std::map<std::pair<const WordBoxes*, int>, std::shared_ptr<void>> device_tables;
};

StridedCopy::StridedCopy(const std::vector<Box>& boxes, int64_t item_bytes)
    : boxes_(boxes), item_bytes_(item_bytes), state_(std::make_shared<State>()) {
  for (const Box& box : boxes) {
    int64_t items = 1;
    for (const int64_t size : box.sizes) items *= size;
    bytes_ += items * item_bytes;
  }
}

const std::vector<WordBoxes>& StridedCopy::at(const void* src, const void* dst) const {
  return for_alignment(alignment_of(src, dst));
}

const std::vector<WordBoxes>& StridedCopy::for_alignment(int bytes) const {
  const std::lock_guard lock(state_->mutex);
  std::unique_ptr<std::vector<WordBoxes>>& cached = state_->by_alignment[bytes];
  if (!cached) {
    Preparation preparation(item_bytes_, bytes);
    for (const Box& box : boxes_) preparation.add(box);
    cached = std::make_unique<std::vector<WordBoxes>>(preparation.take());
  }
  return *cached;
}

std::shared_ptr<void>& StridedCopy::device_table(const WordBoxes& boxes, int device) const {
  const std::lock_guard lock(state_->mutex);
  return state_->device_tables[{&boxes, device}];
}

void run(const StridedCopy& copy, const void* src, void* dst, const ParallelFor& parallel_for) {
  for (const WordBoxes& boxes : copy.at(src, dst)) {
    run_boxes(boxes, static_cast<const char*>(src), static_cast<char*>(dst), parallel_for);
  }
}

}  // namespace shardwright
