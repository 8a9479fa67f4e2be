#include "process_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "arguments.h"

namespace async_device {
namespace {

std::mutex counters_mutex;
std::map<std::string, int64_t>& all_counters() {
  static auto* counters = new std::map<std::string, int64_t>;
  return *counters;
}

void count(const std::string& name, int64_t by = 1) {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  all_counters()[name] += by;
}

std::vector<int> launched_groups;  // under counters_mutex

int next_number() {
  static std::atomic<int> next{0};
  return next++;
}

GlooMaker& gloo_maker() {
  static auto* maker = new GlooMaker;
  return *maker;
}

BackendPtr make_gloo(const StorePtr& store, const Place& place, Milliseconds timeout) {
  if (place.size == 1) return nullptr;
  TORCH_CHECK(gloo_maker() != nullptr, "strict: set_gloo_maker has not been called");
  return gloo_maker()(c10::make_intrusive<c10d::PrefixStore>("gloo", store), place.rank, place.size, timeout);
}

std::atomic<int64_t> messages_until_refusal{0};  // below 1: refuses none

thread_local int64_t open_groups = 0;
thread_local std::vector<std::function<void()>> held_back;  // until no group is open

// If no group is open at the end of its lifetime, launches the delayed operations.
struct HeldBack {
  ~HeldBack() {
    if (open_groups > 0) return;
    for (const auto& give : std::exchange(held_back, {})) give();
  }
};

c10::Device device_of(const std::vector<Tensors>& used) {
  for (const Tensors& some : used) {
    for (const at::Tensor& tensor : some) {
      if (tensor.device().type() == kDeviceType) return tensor.device();
    }
  }
  return device();
}

class StrictWork final : public c10d::Work {
 public:
  StrictWork(Event end, c10::Device device, Tensors kept, bool blocks_host)
      : end_(std::move(end)), device_(device), kept_(std::move(kept)), blocks_host_(blocks_host) {}

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return end_.query(); }
  void synchronize() override { end_.block(current_stream(device_)); }
  bool wait(Milliseconds) override {
    synchronize();
    kept_.clear();
    if (blocks_host_) end_.synchronize();
    return true;
  }

 private:
  Event end_;
  c10::Device device_;
  Tensors kept_;
  bool blocks_host_;
};

// Copies a rank's messages to itself locally. Throws if one has no counterpart, unless `is_broken`.
Moves without_own(Moves messages, int own, bool is_broken) {
  const auto take_own = [own](std::vector<Message>& all) {
    std::vector<Memory> taken;
    for (const Message& message : all) {
      if (message.peer == own) taken.push_back(message.memory);
    }
    std::erase_if(all, [own](const Message& message) { return message.peer == own; });
    return taken;
  };
  const auto sent = take_own(messages.sends);
  const auto received = take_own(messages.receives);
  if (is_broken) return messages;
  TORCH_CHECK_VALUE(sent.size() == received.size(), "strict: the batch sends ", sent.size(),
                    " messages to its own rank and receives ", received.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    TORCH_CHECK_VALUE(sent[i].bytes() == received[i].bytes(), "strict: a message of a rank to itself has ",
                      sent[i].bytes(), " bytes where ", received[i].bytes(), " are expected");
    messages.copies.emplace_back(sent[i], received[i]);
  }
  return messages;
}

}  // namespace

void set_gloo_maker(GlooMaker maker) { gloo_maker() = std::move(maker); }

std::map<std::string, int64_t> counters() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  return all_counters();
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  std::erase_if(all_counters(), [](const auto& item) { return item.first != "communicators"; });
}

std::vector<int> take_launched_groups() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  return std::exchange(launched_groups, {});
}

// ------------------------------------------------------------------------------------------- making and ending groups

StrictGroup::StrictGroup(StorePtr store, Place place, Milliseconds timeout, Rules rules)
    : Backend(place.rank, place.size),
      store_(std::move(store)),
      place_(std::move(place)),
      rules_(rules),
      number_(next_number()),
      timeout_(timeout) {}

StrictGroup::~StrictGroup() {
  if (!communicator_) return;
  communicator_->close("destroyed", /*finish_first=*/false);
  count("communicators", -1);
}

void StrictGroup::attach(BackendPtr gloo) {
  communicator_ = std::make_shared<Communicator>(place_, store_, std::move(gloo), timeout_);
  count("communicators");
}

void StrictGroup::connect() {
  if (communicator_) return;
  forbid_in_capture("making the communicator of a process group");
  try {
    meet(store_, place_, "ranks", "", "making the communicator", timeout_);
    attach(make_gloo(store_, place_, timeout_));
  } catch (const c10::Error& error) {
    unusable_ = error.what_without_backtrace();
    throw;
  }
  count("rendezvous");
}

c10::intrusive_ptr<StrictGroup> StrictGroup::split_off(const StorePtr& store, const std::vector<int>& ranks,
                                                       const std::string& name, Milliseconds timeout, Rules rules) {
  check_usable("splitting off a group");
  TORCH_CHECK(!batch_, place_.text(), "splitting off a group while a batch is open");
  connect();
  forbid_in_capture("splitting off a process group");
  const auto own = std::find(ranks.begin(), ranks.end(), place_.rank);
  const std::string color = own == ranks.end() ? "none" : place_.text(ranks);
  const auto colors =
      meet(store_, place_, "split/" + std::to_string(num_splits_++), color,
           "splitting off a group" + (name.empty() ? "" : " '" + name + "'"), std::min(timeout, timeout_));
  count("split");
  if (own == ranks.end()) return nullptr;
  Place child{name, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), {}};
  for (const int rank : ranks) {
    if (colors[rank] != color) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(place_.text(), "splits off a group of ", color, " while ", place_.text({rank}),
                               colors[rank] == "none" ? " takes no part" : " splits off one of " + colors[rank],
                               "; all ranks must make groups in the same order"));
    }
    child.global_ranks.push_back(place_.global(rank));
  }
  auto group = c10::make_intrusive<StrictGroup>(store, child, timeout, rules);
  group->attach(make_gloo(store, child, timeout));
  return group;
}

c10::intrusive_ptr<c10d::Backend> StrictGroup::split(const StorePtr& store, const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  return split_off(store, ranks, options->group_name, options->timeout, rules_);
}

c10::intrusive_ptr<c10d::Backend::Options> StrictGroup::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void StrictGroup::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  if (communicator_) communicator_->set_timeout(timeout);
}

void StrictGroup::eagerConnectSingleDevice(at::Device) { connect(); }

// Returns the group's stream on the current device. Like NCCL's groups, a group has one communicator for each device.
c10::Stream StrictGroup::own_stream() {
  std::optional<c10::Stream>& stream = own_streams_[device().index()];
  if (!stream) stream = stream_from_pool(rules_.is_high_priority);
  return *stream;
}

void StrictGroup::check_graphs() {
  const std::lock_guard<std::mutex> lock(launching_);
  std::erase_if(graphs_, [](const std::weak_ptr<Graph>& graph) { return graph.expired(); });
  TORCH_CHECK(!rules_.refuses_to_end || graphs_.empty(), place_.text(), "the group cannot be destroyed while ",
              graphs_.size(), " captured graphs have operations of it; let them go first");
}

void StrictGroup::shutdown() {
  check_graphs();
  if (communicator_) communicator_->close("destroyed", /*finish_first=*/true);
  if (unusable_.empty()) unusable_ = "the group was destroyed";
}

void StrictGroup::abort() {
  if (communicator_) communicator_->close("aborted", /*finish_first=*/false);
  if (unusable_.empty()) unusable_ = "the group was aborted";
}

// -------------------------------------------------------------------------------------------------------- launching

void StrictGroup::check_usable(const char* what) const {
  TORCH_CHECK(unusable_.empty(), place_.text(), what, " on a group that cannot be used any more: ", unusable_);
  TORCH_CHECK(!batch_ || batch_->broken_by.empty(), place_.text(), what,
              " while a batch is open that was left after an error; call endCoalescing. The error: ",
              batch_ ? batch_->broken_by : "");
}

c10::Stream StrictGroup::stream_for(bool is_async) {
  const c10::Stream current = current_stream();
  const c10::Stream own = own_stream();
  if (!is_async || current == own) return current;
  Event given;
  given.record(current);
  given.block(own);
  return own;
}

WorkPtr StrictGroup::launch(const std::vector<c10::Stream>& streams, const std::string& what, Body body, Tensors kept,
                            bool is_async, bool blocks_host) {
  const c10::Stream stream = streams.front();
  check_allowed(stream.device());
  for (const c10::Stream& other : streams) {
    if (other == stream) continue;
    Event given;
    given.record(other);
    given.block(stream);
  }
  // The ticket and the place on the stream are taken together, because several threads may launch.
  const std::lock_guard<std::mutex> lock(launching_);
  {
    const std::lock_guard<std::mutex> lock_of_groups(counters_mutex);
    launched_groups.push_back(number_);
  }
  auto give = [stream, communicator = communicator_, what, body = std::move(body)] {
    enqueue_at_launch(stream, [communicator, what, body] {
      const uint64_t ticket = communicator->take_ticket();
      return Work([communicator, ticket, what, body] { communicator->run(ticket, what, body); });
    });
  };
  const auto graph = graph_captured_on(stream);
  const auto is_it = [&](const std::weak_ptr<Graph>& known) { return known.lock() == graph; };
  if (graph && std::none_of(graphs_.begin(), graphs_.end(), is_it)) graphs_.push_back(graph);
  // As on CUDA, events are recorded now, also if the operation is delayed.
  if (open_groups > 0) {
    held_back.push_back(std::move(give));
  } else {
    give();
  }
  Event end;
  end.record(stream);
  for (const c10::Stream& other : streams) {
    if (!(other == stream)) end.block(other);
  }
  if (!is_async && blocks_host) end.synchronize();
  if (!is_async && !rules_.has_real_work) return nullptr;
  return c10::make_intrusive<StrictWork>(std::move(end), stream.device(), std::move(kept),
                                         blocks_host || rules_.waits_block_host);
}

WorkPtr StrictGroup::collective(Kind kind, bool is_async, const std::vector<Tensors>& used,
                                const std::function<Body(const char*)>& build) {
  const char* what = name_of(kind);
  const OnDevice on_device(device_of(used));
  check_usable(what);
  try {
    TORCH_CHECK(!batch_ || !batch_->has_messages, place_.text(), what,
                " while a batch of messages is open, which was left open or is not meant for collectives");
    Body body = build(what);
    connect();
    count(what);
    const c10::Stream stream = stream_for(is_async);
    Tensors kept;
    for (const Tensors& some : used) {
      if (rules_.keeps_tensors && is_async) kept.insert(kept.end(), some.begin(), some.end());
    }
    if (!batch_) return launch({stream}, what, std::move(body), std::move(kept), is_async, kind == Kind::kBarrier);
    batch_->kept.insert(batch_->kept.end(), kept.begin(), kept.end());
    batch_->collectives.push_back(std::move(body));
    batch_->streams.push_back(stream);
    batch_->is_async = batch_->is_async || is_async;
  } catch (const std::exception& error) {
    if (batch_) batch_->broken_by = error.what();
    throw;
  }
  return nullptr;
}

void refuse_message(int64_t number) { messages_until_refusal = number; }

WorkPtr StrictGroup::message(Tensors& tensors, int peer, bool is_send) {
  const char* what = is_send ? "send" : "recv";
  check_usable(what);
  TORCH_CHECK(batch_, place_.text(), what,
              " outside of a batch: messages go between startCoalescing and endCoalescing");
  try {
    TORCH_CHECK(batch_->collectives.empty(), place_.text(), what, " in a batch of collectives");
    const at::Tensor& tensor = only(tensors, what);
    const Memory memory = memory_of(tensor, what);
    const OnDevice on_device(tensor.device());
    check_root(peer, size_, what);
    connect();
    TORCH_CHECK(messages_until_refusal.fetch_sub(1) != 1, place_.text(), what, " was refused, as a test asked for");
    count(what);
    const c10::Stream stream = stream_for(/*is_async=*/true);
    if (rules_.records_streams) {
      c10::impl::VirtualGuardImpl(kDeviceType).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    (is_send ? batch_->messages.sends : batch_->messages.receives).push_back({peer, memory});
    if (rules_.keeps_tensors && is_send) batch_->kept.push_back(tensor);
    batch_->streams.push_back(stream);
    batch_->is_async = batch_->has_messages = true;
  } catch (const std::exception& error) {
    batch_->broken_by = error.what();
    throw;
  }
  return nullptr;
}

void StrictGroup::startCoalescing() {
  TORCH_CHECK(unusable_.empty(), place_.text(), "a batch on a group that cannot be used any more: ", unusable_);
  TORCH_CHECK(!batch_, place_.text(), "startCoalescing while a batch is open, which was left open or is nested");
  batch_.emplace();
  if (rules_.holds_thread) ++open_groups;
}

int64_t open_groups_of_thread() { return open_groups; }

WorkPtr StrictGroup::endCoalescing() {
  TORCH_CHECK(batch_, place_.text(), "endCoalescing without startCoalescing");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (rules_.holds_thread) --open_groups;
  HeldBack others;  // launches the delayed operations after the batch itself
  if (batch.streams.empty()) return nullptr;
  count("batch");
  if (!batch.has_messages) {
    return launch(batch.streams, "a batch of collectives", in_turn(std::move(batch.collectives)), std::move(batch.kept),
                  batch.is_async);
  }
  const std::string what =
      c10::str("a batch of ", batch.messages.sends.size(), " sends and ", batch.messages.receives.size(), " receives");
  Moves moves = without_own(std::move(batch.messages), rank_, !batch.broken_by.empty());
  return launch(batch.streams, what, moving(Kind::kMessages, 0, std::move(moves)), std::move(batch.kept), true);
}

WorkPtr StrictGroup::send(Tensors& tensors, int peer, int) { return message(tensors, peer, true); }

WorkPtr StrictGroup::recv(Tensors& tensors, int peer, int) { return message(tensors, peer, false); }

}  // namespace async_device
