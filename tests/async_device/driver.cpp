#include "driver.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace async_device {

namespace {
using Clock = std::chrono::steady_clock;
// For each stream, the number of captured pieces of work before a point of a capture.
using Seen = std::map<c10::StreamId, int64_t>;
}  // namespace

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  Clock::time_point when;
  // Only if the mark was recorded in a capture:
  std::weak_ptr<Graph> graph;
  bool is_captured = false;
  size_t number = 0;
  Seen seen;

  void set() {
    const std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    when = Clock::now();
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_done; });
  }

  bool is_set() {
    const std::lock_guard<std::mutex> lock(mutex);
    return is_done;
  }
};

class Graph {
 public:
  struct Node {
    enum class Kind { kWork, kRecord, kWait };
    Kind kind;
    c10::StreamId stream;
    std::function<Work()> at_launch;
    size_t mark = 0;
  };
  std::vector<Node> nodes;
  size_t num_marks = 0;
  c10::StreamId origin = 0;
  std::map<c10::StreamId, Seen> streams;  // the streams in the capture
  std::string spoiled_by;
  bool is_capturing = true;
};

namespace {

constexpr int kStreamsOfPriority = 32;

struct Delays {
  uint64_t seed = 0;
  double probability = 0;
  int64_t max_microseconds = 0;
  int64_t epoch = 0;
};

std::mutex delays_mutex;
Delays delays;

std::mutex failure_mutex;
std::string failure;

class Worker {
 public:
  explicit Worker(c10::StreamId id) : id_(id) {
    std::thread([this] { run(); }).detach();
  }

  void add(Work work, bool has_delay) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({std::move(work), has_delay});
    changed_.notify_all();
  }

  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }

 private:
  struct Item {
    Work work;
    bool has_delay = false;
  };

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      Item item = std::move(queue_.front());
      lock.unlock();
      if (item.has_delay) delay();
      try {
        item.work();
      } catch (const c10::Error& error) {
        fail(error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(error.what());
      }
      item.work = nullptr;
      lock.lock();
      queue_.pop_front();
    }
  }

  void delay() {
    Delays now;
    {
      const std::lock_guard<std::mutex> lock(delays_mutex);
      now = delays;
    }
    if (now.epoch != epoch_) {
      epoch_ = now.epoch;
      random_.seed(now.seed * 64 + static_cast<uint64_t>(id_));
    }
    if (now.max_microseconds == 0 || std::uniform_real_distribution<double>(0, 1)(random_) >= now.probability) return;
    const int64_t microseconds = std::uniform_int_distribution<int64_t>(0, now.max_microseconds)(random_);
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }

  c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;  // the first one is running
  std::mt19937_64 random_;
  int64_t epoch_ = -1;
};

// Number of queues of each device. 0: each stream has its own queue.
const int64_t num_queues = [] {
  const char* given = std::getenv("ASYNC_DEVICE_QUEUES");
  return given == nullptr ? 0 : std::atoll(given);
}();

Worker& worker_of(c10::StreamId id) {
  static std::mutex mutex;
  static auto* workers = new std::map<c10::StreamId, Worker*>;  // outlives threads that run at exit
  if (num_queues > 0) id = id / kFirstStream * kFirstStream + id % kFirstStream % num_queues;
  const std::lock_guard<std::mutex> lock(mutex);
  Worker*& worker = (*workers)[id];
  if (worker == nullptr) worker = new Worker(id);
  return *worker;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kNumDevices] = {0, kFirstStream};

std::atomic<int64_t> num_works{0};
std::atomic<int64_t> num_events{0};
std::atomic<int64_t> num_waits{0};
std::atomic<int64_t> launches_until_refusal{0};  // 0: refuses none
std::atomic<int> forbidden{-1};                  // index of a device that must not be used

thread_local int relaxed = 0;

// All captures, and the order of the work given to captured streams.
std::recursive_mutex capture_mutex;
std::vector<std::shared_ptr<Graph>> captures;
std::atomic<int> num_captures{0};

std::shared_ptr<Graph> capture_of(c10::StreamId id) {
  if (num_captures == 0) return nullptr;
  const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  for (const auto& graph : captures) {
    if (graph->streams.contains(id)) return graph;
  }
  return nullptr;
}

[[noreturn]] void spoil(Graph& graph, const std::string& reason) {
  if (graph.spoiled_by.empty()) graph.spoiled_by = reason;
  TORCH_CHECK(false, "async_device: ", reason);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- streams

c10::Device device() { return {kDeviceType, current_device}; }

c10::Device set_device(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kNumDevices, "async_device: there is no device ", static_cast<int>(index));
  return {kDeviceType, std::exchange(current_device, index)};
}

c10::Stream current_stream() { return current_stream(device()); }

c10::Stream current_stream(c10::Device of) {
  return stream_of(current_streams[of.has_index() ? of.index() : current_device]);
}

c10::Stream set_current_stream(c10::Stream to) {
  return stream_of(std::exchange(current_streams[to.device_index()], to.id()));
}

c10::Stream stream_from_pool(bool is_high_priority) {
  static std::atomic<uint64_t> given[kNumDevices][2];
  const uint64_t n = given[current_device][is_high_priority]++ % kStreamsOfPriority;
  const uint64_t first = 1 + (is_high_priority ? kStreamsOfPriority : 0);
  return stream_of(current_device * kFirstStream + static_cast<c10::StreamId>(first + n));
}

Counts counts() { return {num_works, num_events, num_waits}; }

void forbid_device(c10::DeviceIndex index) { forbidden = index; }

void check_allowed(c10::Device of) {
  TORCH_CHECK(of.index() != forbidden, "async_device: device ", static_cast<int>(of.index()), " is used, and ",
              "all tensors of this test are on another one");
}

void refuse_launch(int64_t number) { launches_until_refusal = number; }

int64_t launches_before_refusal() { return launches_until_refusal; }

void launch(c10::Stream stream, Work work) {
  check_allowed(stream.device());
  if (launches_until_refusal > 0) TORCH_CHECK(--launches_until_refusal > 0, "async_device: a launch was refused");
  enqueue(stream, std::move(work));
}

void enqueue(c10::Stream stream, Work work) {
  enqueue_at_launch(stream, [work = std::move(work)] { return work; });
}

void enqueue_at_launch(c10::Stream stream, std::function<Work()> at_launch) {
  ++num_works;
  if (const auto graph = capture_of(stream.id())) {
    const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
    graph->nodes.push_back({Graph::Node::Kind::kWork, stream.id(), std::move(at_launch)});
    ++graph->streams[stream.id()][stream.id()];
    return;
  }
  worker_of(stream.id()).add(at_launch(), true);
}

bool is_done(c10::Stream stream) {
  forbid_in_capture("querying a stream");
  raise_failure();
  return worker_of(stream.id()).is_idle();
}

void synchronize(c10::Stream stream) {
  forbid_in_capture("synchronizing a stream");
  const auto mark = std::make_shared<Mark>();
  worker_of(stream.id()).add([mark] { mark->set(); }, false);
  mark->wait();
  raise_failure();
}

void synchronize_device() {
  for (int d = 0; d < kNumDevices; ++d) {
    for (c10::StreamId id = 0; id <= 2 * kStreamsOfPriority; ++id) synchronize(stream_of(d * kFirstStream + id));
  }
}

void fail(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  if (failure.empty()) failure = reason;
}

void raise_failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  TORCH_CHECK(failure.empty(), "async_device: work on a stream has failed: ", failure);
}

void forget_failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  failure.clear();
}

void set_delays(uint64_t seed, double probability, int64_t max_microseconds) {
  const std::lock_guard<std::mutex> lock(delays_mutex);
  delays = {seed, probability, max_microseconds, delays.epoch + 1};
}

// -------------------------------------------------------------------------------------------------------- events

void Event::record(c10::Stream stream) {
  ++num_events;
  mark_ = std::make_shared<Mark>();
  if (const auto graph = capture_of(stream.id())) {
    const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
    mark_->graph = graph;
    mark_->is_captured = true;
    mark_->number = graph->num_marks++;
    mark_->seen = graph->streams[stream.id()];
    graph->nodes.push_back({Graph::Node::Kind::kRecord, stream.id(), {}, mark_->number});
    return;
  }
  worker_of(stream.id()).add([mark = mark_] { mark->set(); }, false);
}

void Event::block(c10::Stream stream) const {
  if (!mark_) return;
  ++num_waits;
  const auto graph = capture_of(stream.id());
  if (!mark_->is_captured) {
    if (graph) spoil(*graph, "a stream in a capture waits for an event from outside of it");
    worker_of(stream.id()).add([mark = mark_] { mark->wait(); }, false);
    return;
  }
  const auto of_mark = mark_->graph.lock();
  TORCH_CHECK(of_mark && of_mark->is_capturing,
              "async_device: a stream waits for an event of a capture that has ended");
  if (graph && graph != of_mark) spoil(*graph, "a stream in a capture waits for an event of another capture");
  const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  Seen& seen = of_mark->streams[stream.id()];  // the stream joins the capture
  for (const auto& [id, count] : mark_->seen) seen[id] = std::max(seen[id], count);
  of_mark->nodes.push_back({Graph::Node::Kind::kWait, stream.id(), {}, mark_->number});
}

bool Event::query() const {
  forbid_in_capture("querying an event");
  if (!mark_) return true;
  TORCH_CHECK(!mark_->is_captured, "async_device: an event that was recorded in a capture cannot be queried");
  return mark_->is_set();
}

void Event::synchronize() const {
  forbid_in_capture("synchronizing an event");
  if (!mark_) return;
  TORCH_CHECK(!mark_->is_captured, "async_device: an event that was recorded in a capture cannot be synchronized");
  mark_->wait();
  raise_failure();
}

double Event::milliseconds_until(const Event& later) const {
  TORCH_CHECK(mark_ && later.mark_ && mark_->is_set() && later.mark_->is_set(),
              "async_device: the time between events that are not both done");
  return std::chrono::duration<double, std::milli>(later.mark_->when - mark_->when).count();
}

// -------------------------------------------------------------------------------------------------------- graphs

std::shared_ptr<Graph> begin_capture() {
  TORCH_CHECK(!is_capturing(current_stream()), "async_device: the current stream is in a capture already");
  const c10::StreamId current = current_stream().id();
  TORCH_CHECK(current % kFirstStream != 0, "async_device: the default stream cannot be captured");
  const auto graph = std::make_shared<Graph>();
  graph->origin = current;
  graph->streams[current];
  const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  captures.push_back(graph);
  ++num_captures;
  return graph;
}

void end_capture(const std::shared_ptr<Graph>& graph) {
  const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  TORCH_CHECK(graph->is_capturing, "async_device: the capture has ended already");
  graph->is_capturing = false;
  std::erase(captures, graph);
  --num_captures;
  TORCH_CHECK(graph->spoiled_by.empty(), "async_device: the capture was spoiled by ", graph->spoiled_by);
  const Seen& joined = graph->streams[graph->origin];
  for (const auto& [id, seen] : graph->streams) {
    const auto own = seen.find(id);
    const auto known = joined.find(id);
    TORCH_CHECK(own == seen.end() || (known != joined.end() && known->second >= own->second), "async_device: stream ",
                id, " has work in the capture that its first stream does not wait for");
  }
}

void replay(const Graph& graph) {
  forbid_in_capture("replaying a graph");
  TORCH_CHECK(!graph.is_capturing && graph.spoiled_by.empty(), "async_device: the graph was not captured to its end");
  std::vector<std::shared_ptr<Mark>> marks;
  for (size_t i = 0; i < graph.num_marks; ++i) marks.push_back(std::make_shared<Mark>());
  // Work of other streams begins after all work that the launching stream received before.
  const c10::StreamId current = current_stream().id();
  const auto launched = std::make_shared<Mark>();
  worker_of(current).add([launched] { launched->set(); }, false);
  for (const auto& [id, seen] : graph.streams) {
    if (id != graph.origin) worker_of(id).add([launched] { launched->wait(); }, false);
  }
  for (const Graph::Node& node : graph.nodes) {
    Worker& worker = worker_of(node.stream == graph.origin ? current : node.stream);
    switch (node.kind) {
      case Graph::Node::Kind::kWork:
        worker.add(node.at_launch(), true);
        break;
      case Graph::Node::Kind::kRecord:
        worker.add([mark = marks[node.mark]] { mark->set(); }, false);
        break;
      case Graph::Node::Kind::kWait:
        worker.add([mark = marks[node.mark]] { mark->wait(); }, false);
        break;
    }
  }
}

bool is_capturing(c10::Stream stream) { return capture_of(stream.id()) != nullptr; }

std::shared_ptr<Graph> graph_captured_on(c10::Stream stream) { return capture_of(stream.id()); }

bool is_capturing_anywhere() { return num_captures > 0; }

const Graph* capturing_graph(c10::Stream stream) { return capture_of(stream.id()).get(); }

void forbid_in_capture(const char* what) {
  if (num_captures == 0 || relaxed > 0) return;
  const std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  if (captures.empty()) return;
  const std::string reason = std::string(what) + " while a graph is captured";
  for (const auto& graph : captures) {
    if (graph->spoiled_by.empty()) graph->spoiled_by = reason;
  }
  TORCH_CHECK(false, "async_device: ", reason);
}

RelaxedRules::RelaxedRules() { ++relaxed; }
RelaxedRules::~RelaxedRules() { --relaxed; }

}  // namespace async_device
