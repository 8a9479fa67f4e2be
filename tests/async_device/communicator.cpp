#include "communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "driver.h"

namespace async_device {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollEvery = Milliseconds(3);
// Time for which a rank that gives up waits for the others to report their operations.
constexpr auto kAskOthersFor = Milliseconds(1000);
constexpr int kHeaderTag = 0;
constexpr int kDataTag = 1;
constexpr int64_t kHeaderFields = 3;  // kind, detail, bytes

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : separator) + part;
  return all;
}

// Returns the values that ranks post under `key`/rank, once all have posted, or at the deadline. Ranks that have not
// posted have an empty value.
std::vector<std::string> collect(c10d::Store& store, const std::string& key, int size, Clock::time_point deadline) {
  std::vector<std::string> values(size);
  std::vector<bool> is_there(size);
  while (true) {
    bool is_complete = true;
    for (int rank = 0; rank < size; ++rank) {
      const std::string name = key + "/" + std::to_string(rank);
      if (!is_there[rank] && store.check({name})) {
        const auto bytes = store.get(name);
        values[rank].assign(bytes.begin(), bytes.end());
        is_there[rank] = true;
      }
      is_complete = is_complete && is_there[rank];
    }
    if (is_complete || Clock::now() >= deadline) return values;
    std::this_thread::sleep_for(kPollEvery);
  }
}

void wait_until(const c10::intrusive_ptr<c10d::Work>& work, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
  work->wait(std::max(left, Milliseconds(1)));
}

// Returns the first line of a Gloo error, without the location in its sources.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Destroying a process group made in Python may need Python's lock, for which no stream's thread may wait. So the few
// Gloo groups still in use when their group is destroyed are leaked.
void keep_forever(BackendPtr gloo) {
  static std::mutex mutex;
  static auto* kept = new std::vector<BackendPtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(gloo));
}

}  // namespace

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"a batch of messages", "all_reduce", "reduce", "reduce_scatter", "broadcast",
                                           "all_gather",          "all_to_all", "gather", "scatter",        "barrier"};
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "something unknown";
}

// ------------------------------------------------------------------------------------------------ ranks and rendezvous

int64_t Place::global(int group_rank) const { return global_ranks.empty() ? group_rank : global_ranks.at(group_rank); }

std::string Place::text() const {
  return c10::str("strict: rank ", global(rank), " in group '", group, "' of ", size, ": ");
}

std::string Place::text(const std::vector<int>& group_ranks) const {
  std::string all = group_ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < group_ranks.size(); ++i) {
    if (i > 0) all += i + 1 == group_ranks.size() ? " and " : ", ";
    all += std::to_string(global(group_ranks[i]));
  }
  return all;
}

std::vector<std::string> meet(const StorePtr& store, const Place& place, const std::string& key,
                              const std::string& value, const std::string& purpose, Milliseconds timeout) {
  const std::string own = key + "/" + std::to_string(place.rank);
  if (store->check({own})) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str(place.text(), "the store has '", own, "' from before: a group of the same ",
                             "name was made in it, whose addresses NCCL would take for those of today"));
  }
  store->set(own, bytes_of("=" + value));
  auto values = collect(*store, key, place.size, Clock::now() + timeout);
  std::vector<int> missing;
  for (int rank = 0; rank < place.size; ++rank) {
    if (values[rank].empty()) {
      missing.push_back(rank);
    } else {
      values[rank].erase(0, 1);
    }
  }
  if (!missing.empty()) {
    C10_THROW_ERROR(DistBackendError, c10::str(place.text(), purpose, " needs all ranks of the group; ",
                                               place.text(missing), " did not come in ", timeout.count(), " ms"));
  }
  return values;
}

// ------------------------------------------------------------------------------------------------------------ memory

Memory Memory::of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()), tensor.numel(), tensor.scalar_type()};
}

int64_t Memory::bytes() const { return count * static_cast<int64_t>(c10::elementSize(dtype)); }

Memory Memory::part(int64_t first, int64_t num) const {
  return {data + first * static_cast<int64_t>(c10::elementSize(dtype)), num, dtype};
}

at::Tensor Memory::as_cpu() const { return at::from_blob(data, {count}, at::TensorOptions(dtype)); }

at::Tensor Memory::as_bytes() const { return at::from_blob(data, {bytes()}, at::TensorOptions(at::kByte)); }

void Moves::copy() const {
  for (const auto& [from, to] : copies) {
    if (to.bytes() > 0) std::memmove(to.data, from.data, static_cast<size_t>(to.bytes()));
  }
}

// ------------------------------------------------------------------------------------------------------ communicator

Communicator::Communicator(Place place, StorePtr store, BackendPtr gloo, Milliseconds timeout)
    : place_(std::move(place)), store_(std::move(store)), timeout_(timeout), gloo_(std::move(gloo)) {}

uint64_t Communicator::take_ticket() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(closed_.empty(), place_.text(), "an operation is launched on a group that was ", closed_);
  return next_++;
}

void Communicator::run(uint64_t ticket, const std::string& what, const Body& body) {
  std::string failure;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ + 1 == ticket; });
    if (!failed_.empty())
      failure = c10::str(place_.text(), "operation ", ticket, ", ", what, ", was left out: ", failed_);
    is_running_ = failure.empty();
  }
  if (failure.empty()) {
    try {
      const at::NoGradGuard no_grad;
      body(*this);
    } catch (const c10::Error& error) {
      failure = explain(ticket, what, error.what_without_backtrace());
    } catch (const std::exception& error) {
      failure = explain(ticket, what, error.what());
    }
  }
  if (!failure.empty()) fail(failure);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.empty()) failed_ = failure;
  is_running_ = false;
  done_ = ticket;
  changed_.notify_all();
}

std::string Communicator::explain(uint64_t ticket, const std::string& what, const std::string& reason) {
  const std::string here = c10::str("operation ", ticket, ", ", what);
  std::vector<std::string> others;
  try {
    store_->set("gave_up/" + std::to_string(place_.rank), bytes_of(here));
    const auto said = collect(*store_, "gave_up", place_.size, Clock::now() + kAskOthersFor);
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank == place_.rank) continue;
      others.push_back(place_.text({rank}) +
                       (said[rank].empty() ? " waits for nothing in this group" : " gave up in " + said[rank]));
    }
  } catch (const std::exception& error) {
    others.push_back(std::string("the others cannot be asked: ") + first_line(error.what()));
  }
  return c10::str(place_.text(), "gave up in ", here, ": ", first_line(reason), "; ", joined(others, "; "));
}

void Communicator::exchange(Kind kind, int64_t detail, const Moves& moves) {
  const auto deadline = Clock::now() + timeout_.load();
  const auto header_of = [&](const Message& message) {
    return at::tensor({static_cast<int64_t>(kind), detail, message.memory.bytes()}, at::kLong);
  };
  std::vector<at::Tensor> sent_headers;
  std::vector<c10::intrusive_ptr<c10d::Work>> sent;
  std::vector<c10::intrusive_ptr<c10d::Work>> received;
  std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>> headers;
  for (const Message& message : moves.receives) {
    std::vector<at::Tensor> header{at::zeros({kHeaderFields}, at::kLong)};
    headers.emplace_back(header[0], gloo_->recv(header, message.peer, kHeaderTag));
  }
  for (const Message& message : moves.sends) {
    std::vector<at::Tensor> header{header_of(message)};
    sent_headers.push_back(header[0]);
    sent.push_back(gloo_->send(header, message.peer, kHeaderTag));
    std::vector<at::Tensor> data{message.memory.as_bytes()};
    if (data[0].numel() > 0) sent.push_back(gloo_->send(data, message.peer, kDataTag));
  }
  for (size_t i = 0; i < headers.size(); ++i) {
    const Message& message = moves.receives[i];
    try {
      wait_until(headers[i].second, deadline);
    } catch (const std::exception& error) {
      TORCH_CHECK(Clock::now() < deadline, place_.text({message.peer}), " did not come in ", timeout_.load().count(),
                  " ms");
      TORCH_CHECK(false, place_.text({message.peer}), " is gone: ", first_line(error.what()));
    }
    const int64_t* theirs = headers[i].first.const_data_ptr<int64_t>();
    TORCH_CHECK(theirs[0] == static_cast<int64_t>(kind), place_.text({message.peer}), " is in ",
                name_of(static_cast<Kind>(theirs[0])), " instead");
    TORCH_CHECK(theirs[2] == message.memory.bytes(), place_.text({message.peer}), " sends ", theirs[2], " bytes where ",
                message.memory.bytes(), " are expected");
    TORCH_CHECK(theirs[1] == detail, place_.text({message.peer}), " has another dtype, root or reduction");
    std::vector<at::Tensor> data{message.memory.as_bytes()};
    if (data[0].numel() > 0) received.push_back(gloo_->recv(data, message.peer, kDataTag));
  }
  for (const auto& work : received) wait_until(work, deadline);
  for (const auto& work : sent) wait_until(work, deadline);
}

void Communicator::close(const std::string& reason, bool finish_first) {
  BackendPtr gloo;
  bool is_used = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_.empty()) closed_ = reason;
    if (finish_first) {
      changed_.wait(lock, [this] { return done_ + 1 == next_; });
    } else if (failed_.empty()) {
      failed_ = "the group was " + closed_;
    }
    gloo.swap(gloo_);
    is_used = is_running_;
    if (is_used) gloo_ = gloo;
  }
  if (is_used) keep_forever(std::move(gloo));
}

}  // namespace async_device
