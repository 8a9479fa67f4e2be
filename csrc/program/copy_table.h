// Tables of boxes in device memory, for copies with more boxes than fit into a kernel's arguments. A box is divided
// into words, which are copied one by one (strided_copy.h). A table is packed, uploaded once and stored with the copy.
// Captured graphs may read it. This file depends on no device; operations are passed in.
//
//   first use                    uploads on the current stream; the host does not wait
//   later, upload in flight      the current stream waits for the upload
//   later, upload complete       nothing
//   while a graph is captured    the host waits for an upload in flight, or uploads outside of the capture, because a
//                                graph cannot wait for work that is not part of it. The table then lives as long as the
//                                process, because the end of the last replay that reads it is unknown.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program/strided_copy.h"

namespace shardwright {

// A table of boxes whose words are numbered. A thread block copies `words_per_block` consecutive words. The pointers
// are into the memory to which the table was uploaded.
struct BoxTable {
  const WordBox* boxes = nullptr;
  const int64_t* first_word = nullptr;  // by box, plus one entry for the end
  const int32_t* first_box = nullptr;   // by block: the box of its first word; plus one entry, the last box
  int64_t num_boxes = 0;

  // Returns the box of word number `word`, which thread block `block` copies. It is between the first box of this block
  // and the first box of the next block.
  SHARDWRIGHT_HOST_DEVICE int64_t box_in_block(int64_t block, int64_t word) const {
    const int64_t first = first_box[block];
    return first + box_of(first_word + first, first_box[block + 1] - first + 1, word);
  }
};

// Boxes as a kernel argument, for few boxes: nothing is uploaded or stored. The driver copies the whole argument at
// each launch, so there are several sizes, each at most about twice the previous one.
template <int kBoxes>
struct InlineTable {
  WordBox boxes[kBoxes];
  int64_t first_word[kBoxes + 1];
};
inline constexpr int kInlineBoxes[] = {8, 16, 32, 64, 144};  // sizes of InlineTable

// Largest size of an InlineTable that is below 4 KiB, the limit of arguments on every GPU. Larger arguments, up to
// 32,764 bytes, need compute capability 7.0 and CUDA 12.1.
inline constexpr int kInlineBoxesEverywhere = 16;

// Returns the smallest of kInlineBoxes, up to `most`, that is at least `num_boxes`; 0 if there is none.
constexpr int inline_boxes_for(int64_t num_boxes, int most) {
  for (const int size : kInlineBoxes) {
    if (num_boxes <= size && size <= most) return size;
  }
  return 0;
}

// Returns the bytes of a BoxTable's three arrays in a row: boxes, first_word, first_box.
std::vector<uint8_t> pack_table(const WordBoxes& boxes, int64_t words_per_block);

// Returns the table whose bytes pack_table made; they begin at `begin`, a multiple of 8.
BoxTable table_at(const void* begin, const WordBoxes& boxes);

// The device operations that tables need, on the current stream. An implementation may be created for each call.
class TableDevice {
 public:
  // Owned device memory, and the event at the end of the upload into it. The event is null if the upload is complete.
  struct Upload {
    std::shared_ptr<void> memory;
    const void* begin = nullptr;  // first byte of the table, in `memory`
    std::shared_ptr<void> event;
  };

  virtual ~TableDevice() = default;

  // Returns true if work given to the current stream becomes part of a graph.
  virtual bool is_capturing() = 0;

  // Enqueues the upload on the current stream, which must not be capturing. `bytes` need not outlive the call.
  virtual Upload upload(const std::vector<uint8_t>& bytes) = 0;

  // Called while the current stream is capturing: uploads outside of the graph and waits for it. Throws if that is
  // impossible.
  virtual Upload upload_beside_capture(const std::vector<uint8_t>& bytes) = 0;

  // is_done() returns true once the event has happened. wait() makes the host wait for it. Both may be called while a
  // stream of the process is capturing.
  virtual bool is_done(void* event) = 0;
  virtual void wait(void* event) = 0;

  // Makes the current stream, which must not be capturing, wait for the event.
  virtual void block(void* event) = 0;

  // Records that the current stream, which must not be capturing, will read the memory. So the allocator does not reuse
  // it too early even if it is freed.
  virtual void note_use(const Upload& upload) = 0;
};

// Returns the table of `boxes`, an item of copy.at(), on device number `device_index`; uploads it on first use.
// Thread-safe. The work given to the current stream next may read the table, which lives as long as the copy. Throws if
// upload_beside_capture() does.
BoxTable table_on(TableDevice& device, int device_index, const StridedCopy& copy, const WordBoxes& boxes,
                  int64_t words_per_block);

}  // namespace shardwright
