#include "program/copy_table.h"

#include <cstring>
#include <mutex>

namespace shardwright {
namespace {

// A table that is stored with its copy.
struct StoredTable {
  TableDevice::Upload upload;
  bool is_uploaded = false;  // true once the upload is known to be complete
  bool is_captured = false;  // true once a captured graph reads the table
};

// One mutex for all copies: uploads are rare, and all other work under it is short.
std::mutex& tables_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Tables that graphs read. Never destroyed, because at exit the device's allocator may already be gone.
std::vector<std::shared_ptr<void>>& tables_in_graphs() {
  static auto* tables = new std::vector<std::shared_ptr<void>>;
  return *tables;
}

// Makes the table readable by the graph that is being captured, from now on and in all replays.
void ready_for_capture(TableDevice& device, StoredTable& table) {
  if (!table.is_uploaded) device.wait(table.upload.event.get());
  table.is_uploaded = true;
  if (!table.is_captured) tables_in_graphs().push_back(table.upload.memory);
  table.is_captured = true;
}

// Makes the current stream wait until the table is uploaded.
void ready_for_stream(TableDevice& device, StoredTable& table) {
  table.is_uploaded = table.is_uploaded || device.is_done(table.upload.event.get());
  if (!table.is_uploaded) device.block(table.upload.event.get());
  if (!table.is_captured) device.note_use(table.upload);
}

// Appends the bytes of the items.
template <typename T>
void append(std::vector<uint8_t>& bytes, const std::vector<T>& items) {
  const size_t at = bytes.size();
  bytes.resize(at + items.size() * sizeof(T));
  std::memcpy(bytes.data() + at, items.data(), items.size() * sizeof(T));
}

}  // namespace

std::vector<uint8_t> pack_table(const WordBoxes& boxes, int64_t words_per_block) {
  const auto num_boxes = static_cast<int64_t>(boxes.boxes.size());
  std::vector<int32_t> first_box;
  int64_t box = 0;
  for (int64_t word = 0; word < boxes.words(); word += words_per_block) {
    while (boxes.first_word[box + 1] <= word) ++box;
    first_box.push_back(static_cast<int32_t>(box));
  }
  first_box.push_back(static_cast<int32_t>(num_boxes - 1));
  std::vector<uint8_t> bytes;
  append(bytes, boxes.boxes);
  append(bytes, boxes.first_word);
  append(bytes, first_box);
  return bytes;
}

BoxTable table_at(const void* begin, const WordBoxes& boxes) {
  static_assert(sizeof(WordBox) % alignof(int64_t) == 0);
  const auto* bytes = static_cast<const uint8_t*>(begin);
  const auto* words = bytes + boxes.boxes.size() * sizeof(WordBox);
  BoxTable table;
  table.boxes = reinterpret_cast<const WordBox*>(bytes);
  table.first_word = reinterpret_cast<const int64_t*>(words);
  table.first_box = reinterpret_cast<const int32_t*>(words + boxes.first_word.size() * sizeof(int64_t));
  table.num_boxes = static_cast<int64_t>(boxes.boxes.size());
  return table;
}

BoxTable table_on(TableDevice& device, int device_index, const StridedCopy& copy, const WordBoxes& boxes,
                  int64_t words_per_block) {
  const std::lock_guard<std::mutex> lock(tables_mutex());
  const bool is_capturing = device.is_capturing();
  std::shared_ptr<void>& slot = copy.device_table(boxes, device_index);
  if (!slot) {
    const std::vector<uint8_t> bytes = pack_table(boxes, words_per_block);
    auto new_table = std::make_shared<StoredTable>();
    new_table->upload = is_capturing ? device.upload_beside_capture(bytes) : device.upload(bytes);
    new_table->is_uploaded = new_table->upload.event == nullptr;
    slot = std::move(new_table);
  }
  auto& table = *static_cast<StoredTable*>(slot.get());
  is_capturing ? ready_for_capture(device, table) : ready_for_stream(device, table);
  return table_at(table.upload.begin, boxes);
}

}  // namespace shardwright
