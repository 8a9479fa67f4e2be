// Sketches: programs reduced to the sizes and uses of their buffers, which determine the peak memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace shardwright {

constexpr int kNoBuffer = -1;  // stands for no buffer in emit() and wait()

// A program reduced to the sizes of its buffers, in elements, and the buffers that each instruction uses. Buffers are
// numbered; the input is number 0.
//
//   new_buffer(12)      1: the output        The peak is 18 elements: buffers 1 and 2 exist at once, from the second
//   new_buffer(6)       2                    instruction on. The input does not count.
//   emit({0, 2})        pack
//   emit({2, 1})        start the transfer
//   wait({2, 1})
class Sketch {
 public:
  Sketch() : buffers_(1) {}  // the input, which belongs to the caller

  // Begins a step, to which the following instructions belong. Required before the first instruction.
  void begin_step() {
    ++num_steps_;
    has_waited_ = false;
  }
  // Removes all steps, all instructions, and all buffers but the input.
  void clear() {
    buffers_.resize(1);
    buffers_[0] = {};
    steps_.clear();
    stages_.clear();
    num_steps_ = 0;
  }

  // Adds a buffer of `count` elements, and returns its number.
  int new_buffer(int64_t count) {
    buffers_.push_back({count});
    return static_cast<int>(buffers_.size()) - 1;
  }
  // Makes the buffer exist from the first instruction on, because an earlier step wrote it.
  void hold_from_start(int buffer) { buffers_[buffer].first = 0; }
  int64_t count_of(int buffer) const { return buffers_[buffer].count; }

  // Adds an instruction that uses these buffers. A buffer exists from the first instruction that uses it to the last.
  void emit(std::initializer_list<int> named) {
    for (const int buffer : named) {
      if (buffer == kNoBuffer) continue;
      if (buffers_[buffer].first < 0) buffers_[buffer].first = static_cast<int>(steps_.size());
      buffers_[buffer].last = static_cast<int>(steps_.size());
    }
    steps_.push_back(num_steps_ - 1);
    stages_.push_back(num_steps_ - 1 + (has_waited_ ? 1 : 0));
  }
  // Adds a Wait for a transfer that uses these buffers. In segments, it and the following instructions of the step are
  // in the next pipeline stage.
  void wait(std::initializer_list<int> named) {
    has_waited_ = true;
    emit(named);
  }

  // Returns the maximum number of elements that exist at once in each step, without the input. The buffer `output`
  // exists to the end.
  std::vector<int64_t> peaks(int output) const {
    std::vector<int64_t> changes(steps_.size() + 1,
                                 0);  // by instruction: elements allocated less elements freed before it
    for (size_t b = 1; b < buffers_.size(); ++b) {
      const Buffer& buffer = buffers_[b];
      if (buffer.first < 0) continue;
      changes[buffer.first] += buffer.count;
      if (static_cast<int>(b) != output) changes[buffer.last + 1] -= buffer.count;
    }
    std::vector<int64_t> peaks(num_steps_, 0);
    int64_t live = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
      live += changes[i];
      peaks[steps_[i]] = std::max(peaks[steps_[i]], live);
    }
    return peaks;
  }

  struct Buffer {
    int64_t count = 0;
    int first = -1;  // index of the first instruction that uses it; -1: none does
    int last = -1;   // index of the last instruction that uses it
  };
  const std::vector<Buffer>& buffers() const { return buffers_; }
  // The step and the pipeline stage (program/in_segments.h) of each instruction, counted from the first. Both ascend.
  const std::vector<int>& steps() const { return steps_; }
  const std::vector<int>& stages() const { return stages_; }

 private:
  std::vector<Buffer> buffers_;
  std::vector<int> steps_;   // indexed by instruction
  std::vector<int> stages_;  // indexed by instruction
  int num_steps_ = 0;
  bool has_waited_ = false;  // in the current step
};

}  // namespace shardwright
