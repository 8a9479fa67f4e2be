// Tables of boxes in device memory, for copies with more boxes than fit into a kernel's arguments. A table is packed,
// uploaded once, kept with the copy, and safe in captured graphs. This file depends on no device; operations are passed
// in.
//
//   first use                    uploads on the current stream; the host does not wait
//   later, upload under way      the current stream waits for the upload
//   later, upload known done     nothing
//   while a graph is captured    the host waits for an upload under way, or uploads outside of the capture, because a
//                                graph cannot wait for work that is not part of it. The table then lives as long as the
//                                process, because nothing tells when the last replay has read it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program/strided_copy.h"

namespace shardwright {

// Words are handed out in blocks of one size. The pointers are into the memory that the table was uploaded to.
struct BoxTable {
  const WordBox* boxes = nullptr;
  const int64_t* first_word = nullptr;  // by box; one entry more for the end
  const int32_t* first_box = nullptr;   // by block: the box of its first word; one entry more, the last box
  int64_t num_boxes = 0;

  // Returns the box of the word `word` in block number `block`. It is among the boxes between the first box of this
  // block and that of the next one.
  SHARDWRIGHT_HOST_DEVICE int64_t box_in_block(int64_t block, int64_t word) const {
    const int64_t first = first_box[block];
    return first + box_of(first_word + first, first_box[block + 1] - first + 1, word);
  }
};

// Boxes as the argument of a kernel, for few of them: nothing is uploaded or kept. The driver copies the whole argument
// at each launch, so there are several sizes, each at most about twice the one before.
template <int kBoxes>
struct InlineTable {
  WordBox boxes[kBoxes];
  int64_t first_word[kBoxes + 1];
};
inline constexpr int kInlineBoxes[] = {8, 16, 32, 64, 144};

// Arguments of at most 4 KiB fit on every GPU. More, up to 32,764 bytes, need compute capability 7.0 and CUDA 12.1.
inline constexpr int kInlineBoxesEverywhere = 16;

// Returns the smallest of these sizes that holds so many boxes, of those up to `most`; 0 if none does.
constexpr int inline_boxes_for(int64_t num_boxes, int most) {
  for (const int size : kInlineBoxes) {
    if (num_boxes <= size && size <= most) return size;
  }
  return 0;
}

// Packs the three arrays one after the other.
std::vector<uint8_t> pack_table(const WordBoxes& boxes, int64_t words_per_block);

// Returns the table that pack_table made and that now begins at `begin`, a multiple of 8.
BoxTable table_at(const void* begin, const WordBoxes& boxes);

// The operations of a device that tables need, on the current stream. An implementation may be made for each call.
class TableDevice {
 public:
  // Owned device memory, and the event at the end of the upload into it; no event if the upload is already done.
  struct Upload {
    std::shared_ptr<void> memory;
    const void* begin = nullptr;
    std::shared_ptr<void> event;
  };

  virtual ~TableDevice() = default;

  // Returns whether work given to the current stream becomes part of a graph.
  virtual bool is_capturing() = 0;

  // Enqueues the upload on the current stream, which is not capturing. `bytes` need not outlive the call.
  virtual Upload upload(const std::vector<uint8_t>& bytes) = 0;

  // While the current stream is capturing: uploads outside of the graph and waits for it. Throws if that is impossible.
  virtual Upload upload_beside_capture(const std::vector<uint8_t>& bytes) = 0;

  // Both may be called while some stream of the process is capturing.
  virtual bool is_done(void* event) = 0;
  virtual void wait(void* event) = 0;

  // Makes the current stream, which is not capturing, wait for the event.
  virtual void block(void* event) = 0;

  // Notes that the current stream, which is not capturing, is about to read the memory, so that the allocator does not
  // reuse it too early even if it is freed.
  virtual void note_use(const Upload& upload) = 0;
};

// Returns the table of these boxes, which are from copy.at(), for device number `device_index`. Thread-safe. Work that
// is given to the current stream next may read the table, which lives as long as the copy.
BoxTable table_on(TableDevice& device, int device_index, const StridedCopy& copy, const WordBoxes& boxes,
                  int64_t words_per_block);

}  // namespace shardwright
