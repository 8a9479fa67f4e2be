// Boxes in the memory of a device, for copies of more boxes than fit into a kernel's arguments: packed, uploaded once,
// kept with the copy, and safe in captured graphs. Knows no device: what one does is passed in.
//
//   first use                    uploaded on the current stream; the host waits for nothing
//   later, upload under way      the current stream waits for the upload
//   later, upload seen done      nothing
//   while a graph is captured    the host waits for an upload under way, or uploads beside the capture: a graph cannot
//                                wait for what is not part of it. The table then lives as long as the process, because
//                                nothing says when the last replay has read it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program/strided_copy.h"

namespace shardwright {

// Words are dealt out in blocks of one size. Points into the memory that the table was packed for.
struct BoxTable {
  const WordBox* boxes = nullptr;
  const int64_t* first_word = nullptr;  // by box; one entry more for the end
  const int32_t* first_box = nullptr;   // by block: the box of its first word; one entry more, the last box
  int64_t num_boxes = 0;

  // The box of word `word` of block number `block`: among those between where this block and the next one begin.
  SHARDWRIGHT_HOST_DEVICE int64_t box_in_block(int64_t block, int64_t word) const {
    const int64_t first = first_box[block];
    return first + box_of(first_word + first, first_box[block + 1] - first + 1, word);
  }
};

// The three arrays one behind the other.
std::vector<uint8_t> pack_table(const WordBoxes& boxes, int64_t words_per_block);

// What pack_table made, where it lies now: `begin` is a multiple of 8.
BoxTable table_at(const void* begin, const WordBoxes& boxes);

// What a device does for tables, for the stream that is current. An implementation may be made for each call.
class TableDevice {
 public:
  // Memory of the device, owned, and what says that the upload into it is done: nothing where it is.
  struct Upload {
    std::shared_ptr<void> memory;
    const void* begin = nullptr;
    std::shared_ptr<void> event;
  };

  virtual ~TableDevice() = default;

  // Whether what the current stream is given becomes part of a graph.
  virtual bool is_capturing() = 0;

  // Puts the upload on the current stream, which is not capturing, and returns. `bytes` need not outlive the call.
  virtual Upload upload(const std::vector<uint8_t>& bytes) = 0;

  // While the current stream is capturing: uploads outside of the graph, and waits for it. Throws where it cannot.
  virtual Upload upload_beside_capture(const std::vector<uint8_t>& bytes) = 0;

  // Neither asks more than the host may while some stream of the process is capturing.
  virtual bool is_done(void* event) = 0;
  virtual void wait(void* event) = 0;

  // The current stream, which is not capturing, waits.
  virtual void block(void* event) = 0;

  // The current stream, which is not capturing, is about to read the memory: it may be freed early, not used again
  // early.
  virtual void note_use(const Upload& upload) = 0;
};

// The table of boxes that are from copy.at(), for device number `device_index`. Any thread may call it. What it returns
// may be read by what the current stream is given next, and stays while the copy does.
BoxTable table_on(TableDevice& device, int device_index, const StridedCopy& copy, const WordBoxes& boxes,
                  int64_t words_per_block);

}  // namespace shardwright
