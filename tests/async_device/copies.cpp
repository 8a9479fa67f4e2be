// shardwright's copies of boxes on the test device, done like its CUDA kernel: every copy uses an uploaded, cached
// table (program/copy_table.h), and finds words in blocks of numbers.
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <vector>

#include "allocator.h"
#include "driver.h"
#include "program/copy_table.h"
#include "program/strided_copy.h"

namespace async_device {
namespace {

constexpr int64_t kWordsPerBlock = 8;  // small, so that blocks begin within boxes and span several

class Tables final : public shardwright::TableDevice {
 public:
  bool is_capturing() override { return async_device::is_capturing(current_stream()); }

  Upload upload(const std::vector<uint8_t>& bytes) override {
    auto memory = memory_for(bytes);
    const auto event = std::make_shared<Event>();
    event->record(current_stream());
    const void* begin = memory->const_data_ptr();
    return {std::move(memory), begin, event};
  }

  Upload upload_beside_capture(const std::vector<uint8_t>& bytes) override {
    const RelaxedRules relaxed;
    const c10::Stream before = current_stream();
    c10::Stream other = stream_from_pool(false);
    while (async_device::is_capturing(other)) other = stream_from_pool(false);
    set_current_stream(other);
    auto memory = memory_for(bytes);
    synchronize(other);
    set_current_stream(before);
    const void* begin = memory->const_data_ptr();
    return {std::move(memory), begin, nullptr};
  }

  bool is_done(void* event) override {
    const RelaxedRules relaxed;
    return static_cast<Event*>(event)->query();
  }
  void wait(void* event) override {
    const RelaxedRules relaxed;
    static_cast<Event*>(event)->synchronize();
  }
  void block(void* event) override { static_cast<Event*>(event)->block(current_stream()); }
  void note_use(const Upload& upload) override {
    record_stream(static_cast<at::Tensor*>(upload.memory.get())->storage().data_ptr(), current_stream());
  }

 private:
  static std::shared_ptr<at::Tensor> memory_for(const std::vector<uint8_t>& bytes) {
    auto memory = std::make_shared<at::Tensor>(
        at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions(at::kByte).device(device())));
    launch(current_stream(), [to = memory->mutable_data_ptr(), bytes] { std::memcpy(to, bytes.data(), bytes.size()); });
    return memory;
  }
};

template <typename Word>
void copy_words(const shardwright::BoxTable& table, const Word* from, Word* to) {
  const int64_t words = table.first_word[table.num_boxes];
  for (int64_t word = 0; word < words; ++word) {
    const int64_t box = table.box_in_block(word / kWordsPerBlock, word);
    int64_t source = 0;
    int64_t target = 0;
    table.boxes[box].locate(static_cast<uint32_t>(word - table.first_word[box]), source, target);
    to[target] = from[source];
  }
}

struct Word16 {
  uint64_t halves[2];
};

void copy(const shardwright::StridedCopy& copy, const at::Tensor& src, at::Tensor& dst) {
  const OnDevice on_device(dst.device());
  const void* from = src.const_data_ptr();
  void* to = dst.mutable_data_ptr();
  for (const shardwright::WordBoxes& boxes : copy.at(from, to)) {
    Tables tables;
    const shardwright::BoxTable table =
        shardwright::table_on(tables, dst.device().index(), copy, boxes, kWordsPerBlock);
    launch(current_stream(), [=, bytes = boxes.word_bytes] {
      const auto run = [&](auto word) {
        using Word = decltype(word);
        copy_words(table, static_cast<const Word*>(from), static_cast<Word*>(to));
      };
      switch (bytes) {
        case 1:
          return run(uint8_t{});
        case 2:
          return run(uint16_t{});
        case 4:
          return run(uint32_t{});
        case 8:
          return run(uint64_t{});
        default:
          return run(Word16{});
      }
    });
  }
}

}  // namespace

// Returns the functions of shardwright's DeviceCopy.
uintptr_t copy_address() { return reinterpret_cast<uintptr_t>(&copy); }

}  // namespace async_device
