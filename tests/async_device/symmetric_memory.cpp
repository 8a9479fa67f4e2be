#include "symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator.h"
#include "driver.h"

namespace async_device {
namespace {

namespace symm = c10d::symmetric_memory;

constexpr Milliseconds kRendezvousTimeout{20'000};
constexpr std::chrono::microseconds kPause{50};

std::atomic<int64_t> signals_until_loss{0};  // below 1: loses none

// One rank's signals, followed by its memory.
class Mapping {
 public:
  // Creates memory under a name, or maps the memory of another process.
  Mapping(const std::string& name, size_t bytes, bool is_fresh) : bytes_(symm::get_signal_pad_size() + bytes) {
    const int file = shm_open(name.c_str(), is_fresh ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    TORCH_CHECK(file >= 0, "symmetric memory ", name, ": ", std::strerror(errno));
    const bool has_size = !is_fresh || ftruncate(file, static_cast<off_t>(bytes_)) == 0;
    void* mapped = has_size ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    TORCH_CHECK(mapped != MAP_FAILED, "symmetric memory of ", bytes, " bytes: ", std::strerror(errno));
    begin_ = static_cast<char*>(mapped);
    if (is_fresh) std::memset(memory(), 0xFF, bytes);
  }
  ~Mapping() {
    try {
      synchronize_device();
    } catch (const std::exception&) {
      // Ignored: later synchronization raises it.
    }
    munmap(begin_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint32_t* signals() const { return reinterpret_cast<uint32_t*>(begin_); }
  char* memory() const { return begin_ + symm::get_signal_pad_size(); }

 private:
  size_t bytes_;
  char* begin_ = nullptr;
};

class Shared final : public symm::SymmetricMemory {
 public:
  Shared(int rank, size_t bytes, std::vector<std::shared_ptr<Mapping>> ranks)
      : rank_(rank), bytes_(bytes), ranks_(std::move(ranks)) {}

  std::vector<void*> get_buffer_ptrs() override {
    std::vector<void*> all;
    for (const auto& mapping : ranks_) all.push_back(mapping->memory());
    return all;
  }
  std::vector<void*> get_signal_pad_ptrs() override {
    std::vector<void*> all;
    for (const auto& mapping : ranks_) all.push_back(mapping->signals());
    return all;
  }
  void** get_buffer_ptrs_dev() override { TORCH_CHECK(false, "the test device has no kernels"); }
  void** get_signal_pad_ptrs_dev() override { TORCH_CHECK(false, "the test device has no kernels"); }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(ranks_.size()); }
  c10::Device get_device() override { return device(); }

  void barrier(int, size_t) override { TORCH_CHECK(false, "the test device has no barrier"); }
  void put_signal(int to, int channel, size_t timeout_ms) override {
    give(place(to, channel, rank_), 0, 1, timeout_ms, "send a signal to", to, channel);
  }
  void wait_signal(int from, int channel, size_t timeout_ms) override {
    give(place(rank_, channel, from), 1, 0, timeout_ms, "receive a signal from", from, channel);
  }

 private:
  uint32_t* place(int owner, int channel, int by) const {
    const size_t index = static_cast<size_t>(channel) * ranks_.size() + static_cast<size_t>(by);
    TORCH_CHECK((index + 1) * sizeof(uint32_t) <= symm::get_signal_pad_size(), "there is no channel ", channel);
    return ranks_.at(owner)->signals() + index;
  }

  // Adds to the current stream: once the signal is `from`, sets it to `to`.
  void give(uint32_t* signal, uint32_t from, uint32_t to, size_t timeout_ms, const char* what, int peer, int channel) {
    enqueue(current_stream(), [=, rank = rank_, broken = broken_] {
      if (to == 1 && signals_until_loss > 0 && --signals_until_loss == 0) return;
      wait_for_multiprocessor();
      const auto deadline = std::chrono::steady_clock::now() + Milliseconds(timeout_ms);
      const std::atomic_ref<uint32_t> shared(*signal);
      for (uint32_t expected = from; !*broken && !shared.compare_exchange_strong(expected, to); expected = from) {
        if (timeout_ms != 0 && std::chrono::steady_clock::now() > deadline) {
          *broken = true;
          TORCH_CHECK(false, "rank ", rank, " failed to ", what, " rank ", peer, " on channel ", channel, " in ",
                      timeout_ms, " ms");
        }
        std::this_thread::sleep_for(kPause);
      }
    });
  }

  int rank_;
  size_t bytes_;
  std::vector<std::shared_ptr<Mapping>> ranks_;
  std::shared_ptr<std::atomic<bool>> broken_ = std::make_shared<std::atomic<bool>>(false);
};

class SharedAllocator final : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t bytes, int, const std::optional<std::string>&) override {
    forbid_in_capture("allocating symmetric memory");
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string name = c10::str("/asyncdev_", getpid(), "_", ++made_);
    const auto mapping = std::make_shared<Mapping>(name, bytes, true);
    blocks_[mapping->memory()] = {name, bytes, mapping};
    return mapping->memory();
  }
  void free(void* memory) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.erase(memory);
  }
  size_t get_alloc_size(void* memory) override { return block_of(memory).bytes; }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* memory, const std::optional<std::string>& group) override {
    forbid_in_capture("a rendezvous");
    const Block block = block_of(memory);
    const auto process_group = c10d::resolve_process_group(group.value());
    const Place place{*group, process_group->getRank(), process_group->getSize(), {}};
    const std::string key = c10::str("symmetric_memory/", number_of_meeting(*group));
    const auto meet_in = [&](const char* phase) {
      return meet(process_group->getStore(), place, key + phase, block.name, "a rendezvous", kRendezvousTimeout);
    };
    const std::vector<std::string> names = meet_in("/names");
    std::vector<std::shared_ptr<Mapping>> ranks;
    for (int rank = 0; rank < place.size; ++rank) {
      ranks.push_back(rank == place.rank ? block.mapping : std::make_shared<Mapping>(names[rank], block.bytes, false));
    }
    meet_in("/mapped");
    shm_unlink(block.name.c_str());
    return c10::make_intrusive<Shared>(place.rank, block.bytes, std::move(ranks));
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return kDeviceType; }
  std::string name() override { return "shared"; }

 private:
  struct Block {
    std::string name;
    size_t bytes = 0;
    std::shared_ptr<Mapping> mapping;
  };

  Block block_of(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    TORCH_CHECK(found != blocks_.end(), "this is no symmetric memory");
    return found->second;
  }
  int64_t number_of_meeting(const std::string& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++meetings_[group];
  }

  std::mutex mutex_;
  int64_t made_ = 0;
  std::map<void*, Block> blocks_;
  std::map<std::string, int64_t> meetings_;
};

}  // namespace

void register_symmetric_memory() { symm::register_allocator(kDeviceType, c10::make_intrusive<SharedAllocator>()); }

void lose_signal(int64_t number) { signals_until_loss = number; }

}  // namespace async_device
