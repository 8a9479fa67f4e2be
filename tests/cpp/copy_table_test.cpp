// Tables of boxes on a device of plain memory, whose streams run only when told to. Data that is read before it is
// written or after it is freed is poison.
#include "program/copy_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

namespace shardwright {
namespace {

constexpr int64_t kWordsPerBlock = 8;
constexpr uint8_t kPoison = 0xCB;

class FakeDevice final : public TableDevice {
 public:
  int stream = 0;  // the current stream
  bool captures = false;
  bool has_other_streams = true;
  std::vector<std::function<void()>> graph;

  ~FakeDevice() override { EXPECT_TRUE(alive_.empty()); }

  bool is_capturing() override { return captures; }

  Upload upload(const std::vector<uint8_t>& bytes) override {
    EXPECT_FALSE(captures);
    const std::shared_ptr<Block> block = allocate(bytes.size());
    const auto event = std::make_shared<Event>();
    event->stream = stream;
    enqueue([data = block->data, bytes] { std::copy(bytes.begin(), bytes.end(), data->begin()); });
    enqueue([event] { event->is_done = true; });
    return {block, block->data->data(), event};
  }

  Upload upload_beside_capture(const std::vector<uint8_t>& bytes) override {
    EXPECT_TRUE(captures);
    if (!has_other_streams) throw std::runtime_error("all streams are captured");
    const std::shared_ptr<Block> block = allocate(bytes.size());
    std::copy(bytes.begin(), bytes.end(), block->data->begin());
    return {block, block->data->data(), nullptr};
  }

  bool is_done(void* event) override {
    EXPECT_FALSE(captures);
    return static_cast<Event*>(event)->is_done;
  }

  void wait(void* event) override { run(static_cast<Event*>(event)->stream); }

  void block(void* event) override {
    EXPECT_FALSE(captures) << "a graph cannot wait for what is not part of it";
    enqueue({}, static_cast<Event*>(event));
  }

  void note_use(const Upload& upload) override { static_cast<Block*>(upload.memory.get())->users.insert(stream); }

  // Adds a kernel that reads the table to the current stream, or to the graph.
  void launch(const BoxTable& table, size_t size, std::vector<uint8_t>& found) {
    const auto* begin = reinterpret_cast<const uint8_t*>(table.boxes);
    const auto read = [begin, size, &found] { found.assign(begin, begin + size); };
    captures ? graph.push_back(read) : enqueue(read);
  }

  // Runs a stream's work up to the first event that has not happened. Returns false if it stopped at one.
  bool run(int number) {
    std::deque<Work>& works = streams_[number];
    for (; !works.empty(); works.pop_front()) {
      if (works.front().after != nullptr && !works.front().after->is_done) return false;
      if (works.front().act) works.front().act();
    }
    for (const auto& block : freed_) block->users.erase(number);
    release();
    return true;
  }

  size_t num_alive() const { return alive_.size(); }

 private:
  struct Event {
    int stream = 0;
    bool is_done = false;
  };
  struct Work {
    std::function<void()> act;
    Event* after = nullptr;
  };
  struct Block {
    std::shared_ptr<std::vector<uint8_t>> data;
    std::set<int> users;
  };

  void enqueue(std::function<void()> act, Event* after = nullptr) {
    streams_[stream].push_back({std::move(act), after});
  }

  // Like a caching allocator, reuses freed memory at once, unless a stream that was recorded for it is still busy.
  std::shared_ptr<Block> allocate(size_t size) {
    auto* block = new Block{std::make_shared<std::vector<uint8_t>>(size, kPoison), {stream}};
    alive_.insert(block);
    return {block, [this](Block* freed) {
              freed_.push_back(std::unique_ptr<Block>(freed));
              release();
            }};
  }

  void release() {
    for (auto it = freed_.begin(); it != freed_.end();) {
      const auto is_busy = [this](int user) { return !streams_[user].empty(); };
      if (std::any_of((*it)->users.begin(), (*it)->users.end(), is_busy)) {
        ++it;
        continue;
      }
      std::fill((*it)->data->begin(), (*it)->data->end(), kPoison);
      graveyard_.push_back((*it)->data);
      alive_.erase(it->get());
      it = freed_.erase(it);
    }
  }

  std::map<int, std::deque<Work>> streams_;
  std::set<Block*> alive_;
  std::vector<std::unique_ptr<Block>> freed_;
  std::vector<std::shared_ptr<std::vector<uint8_t>>> graveyard_;  // freed memory: readable, but poison
};

std::vector<Box> many_boxes(int64_t count) {
  std::vector<Box> boxes;
  for (int64_t b = 0; b < count; ++b) boxes.push_back({16 * b, 8 * b, {1 + b % 5}, {1}, {1}});
  return boxes;
}

// A copy on a device, and the bytes that its kernels read from the table.
struct Case {
  FakeDevice& device;
  std::unique_ptr<StridedCopy> copy = std::make_unique<StridedCopy>(many_boxes(50), 4);
  const WordBoxes& boxes = copy->at(nullptr, nullptr).front();
  std::vector<uint8_t> expected = pack_table(boxes, kWordsPerBlock);
  std::vector<uint8_t> found;

  explicit Case(FakeDevice& on) : device(on) {}

  void launch() { device.launch(table_on(device, 0, *copy, boxes, kWordsPerBlock), expected.size(), found); }
  bool was_right() {
    const bool is_right = found == expected;
    found.clear();
    return is_right;
  }
};

// The last tables of a copy are kept for graphs, so their device must outlive the test.
FakeDevice& device_with_graphs() {
  static auto* device = new FakeDevice;
  device->stream = 0;
  device->captures = false;
  device->graph.clear();
  return *device;
}

TEST(CopyTable, BlocksFindTheBoxesOfTheirWords) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Box> boxes;
    const auto up_to = [&](int64_t most) { return std::uniform_int_distribution<int64_t>(1, most)(random); };
    const int64_t count = up_to(trial % 2 ? 3 : 60);
    for (int64_t b = 0; b < count; ++b) boxes.push_back({400 * b, 200 * b, {up_to(9), up_to(20)}, {20, 1}, {20, 1}});
    const StridedCopy copy(boxes, 4);
    const int64_t per_block = up_to(40);
    for (const WordBoxes& some : copy.at(nullptr, nullptr)) {
      const std::vector<uint8_t> bytes = pack_table(some, per_block);
      const BoxTable table = table_at(bytes.data(), some);
      ASSERT_EQ(table.num_boxes, static_cast<int64_t>(some.boxes.size()));
      int64_t box = 0;
      for (int64_t word = 0; word < some.words(); ++word) {
        while (word >= some.first_word[box + 1]) ++box;
        ASSERT_EQ(table.box_in_block(word / per_block, word), box) << "trial " << trial << ", word " << word;
        ASSERT_EQ(table.boxes[box].src_offset, some.boxes[box].src_offset);
      }
    }
  }
}

TEST(CopyTable, OtherStreamsWaitForTheUpload) {
  FakeDevice device;
  Case c(device);
  c.launch();
  device.stream = 1;
  c.launch();
  EXPECT_FALSE(device.run(1)) << "read before it was there";
  EXPECT_TRUE(device.run(0));
  EXPECT_TRUE(c.was_right());
  EXPECT_TRUE(device.run(1));
  EXPECT_TRUE(c.was_right());
  device.stream = 2;  // this stream does not need to wait: the table is known to be uploaded
  c.launch();
  EXPECT_TRUE(device.run(2));
  EXPECT_TRUE(c.was_right());
  EXPECT_EQ(device.num_alive(), 1U);
  c.copy.reset();
  EXPECT_EQ(device.num_alive(), 0U);
}

TEST(CopyTable, FreedMemoryIsNotReusedWhileStreamsReadIt) {
  FakeDevice device;
  Case c(device);
  c.launch();
  EXPECT_TRUE(device.run(0));
  EXPECT_TRUE(c.was_right());
  device.stream = 1;
  c.launch();
  c.copy.reset();  // evicted before a kernel of stream 1 has run
  EXPECT_TRUE(device.run(1));
  EXPECT_TRUE(c.was_right());
  EXPECT_EQ(device.num_alive(), 0U);
}

TEST(CopyTable, CaptureWaitsForAPendingUpload) {
  FakeDevice& device = device_with_graphs();
  Case c(device);
  c.launch();
  device.captures = true;
  c.launch();
  EXPECT_TRUE(c.was_right()) << "the upload, and the first kernel after it, are not done";
  device.graph.at(0)();
  EXPECT_TRUE(c.was_right());
}

TEST(CopyTable, FirstUseInACaptureUploadsOutsideTheGraph) {
  FakeDevice& device = device_with_graphs();
  Case c(device);
  device.captures = true;
  c.launch();
  c.launch();
  ASSERT_EQ(device.graph.size(), 2U);
  for (const auto& kernel : device.graph) {
    kernel();
    EXPECT_TRUE(c.was_right());
  }
  device.captures = false;
  device.stream = 3;
  c.launch();
  EXPECT_TRUE(device.run(3));
  EXPECT_TRUE(c.was_right());
}

TEST(CopyTable, TablesOfGraphsOutliveTheCopy) {
  FakeDevice& device = device_with_graphs();
  Case before(device);
  Case inside(device);
  before.launch();
  EXPECT_TRUE(device.run(0));
  EXPECT_TRUE(before.was_right());
  device.captures = true;
  before.launch();
  inside.launch();
  device.captures = false;
  before.copy.reset();
  inside.copy.reset();
  device.graph.at(0)();
  EXPECT_TRUE(before.was_right());
  device.graph.at(1)();
  EXPECT_TRUE(inside.was_right());
}

TEST(CopyTable, FailedUploadLeavesNoTable) {
  FakeDevice device;
  Case c(device);
  device.captures = true;
  device.has_other_streams = false;
  EXPECT_THROW(c.launch(), std::runtime_error);
  device.captures = false;
  c.launch();
  EXPECT_TRUE(device.run(0));
  EXPECT_TRUE(c.was_right());
  c.copy.reset();
}

TEST(CopyTable, EachDeviceHasItsOwnTable) {
  FakeDevice device;
  Case c(device);
  c.launch();
  table_on(device, 1, *c.copy, c.boxes, kWordsPerBlock);
  EXPECT_EQ(device.num_alive(), 2U);
  EXPECT_TRUE(device.run(0));
  c.copy.reset();
  EXPECT_EQ(device.num_alive(), 0U);
}

}  // namespace
}  // namespace shardwright
