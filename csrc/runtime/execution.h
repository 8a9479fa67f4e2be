// One run of an Executable: its buffers, what is under way, and how far it has come.
#pragma once

#include <mutex>
#include <optional>

#include "runtime/executor.h"

namespace shardwright {

class Execution {
 public:
  Execution(std::shared_ptr<const Executable> executable, const at::Tensor& input);
  // Into `out`, contiguous and of the right shape.
  Execution(std::shared_ptr<const Executable> executable, const at::Tensor& input, const at::Tensor& out);

  // Allocated by the first instruction that writes it, or by the first to ask for it here.
  const at::Tensor& output();

  // Up to and including the first communication.
  void start();
  // Up to and including the last communication.
  void start_all();
  void finish();
  bool finished() const { return next_ == num_instructions_; }
  bool all_started() const { return next_ > executable_->last_communication(); }

 private:
  void advance_until(int instruction);  // exclusive
  void step();
  void execute(const Operation& operation, int index);
  void wait(int ticket);
  // Raises what every rank raises: rank, step, group, plan and reason.
  [[noreturn]] void fail(int index, const std::string& reason);
  std::string group_text(int index) const;
  void allocate(int buffer);
  at::Tensor range(const BufferRange& range) const;
  char* data(const BufferRange& range) const;
  // As bytes where process groups do not take the dtype.
  at::Tensor wire(const BufferRange& range) const;
  void reduce(const Reduce& reduce);
  void all_to_all(const AllToAll& move, int index);

  std::shared_ptr<const Executable> executable_;
  const Program& program_;
  at::TensorOptions options_;
  std::vector<at::Tensor> buffers_;                // flat
  at::Tensor output_;                              // shaped
  std::vector<std::vector<comm::WorkPtr>> works_;  // by instruction
  int num_instructions_ = 0;
  int64_t item_bytes_ = 0;
  bool is_on_cpu_ = false;
  int next_ = 0;
  std::recursive_mutex mutex_;
};

}  // namespace shardwright
