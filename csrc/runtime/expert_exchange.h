// Rows that travel to other ranks and back: one all-to-all each way.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

// Sends rows of bytes and returns those that arrive: `rows` is [sum of send_counts, row bytes], uint8, contiguous, for
// rank 0 first. The one place where rows meet a process group. `wire`: the kind of device whose tensors the group
// takes; rows on another one go through host memory. On devices with streams this runs on the current stream. Throws
// DistBackendError naming rank, `step` and group.
at::Tensor exchange_rows(RankGroup& group, const std::string& step, c10::DeviceType wire, const at::Tensor& rows,
                         const std::vector<int64_t>& send_counts, const std::vector<int64_t>& receive_counts);

// Row r of the result is what rank r sent here: `words` is [size of the group, n], int64, on the CPU, row r for rank r.
// Travels on `device`, which is then waited for.
at::Tensor exchange_words(RankGroup& group, const std::string& step, const at::Tensor& words, c10::Device device);

// Which rows travel between the ranks of a group, and where their answers are summed. Immutable.
class RowExchange {
 public:
  // `send_rows`: [sum of send_counts], by receiving rank; -1 is a row of zeros. `returns`: [rows, columns], places in
  // `send_rows`, or -1. Both int64, on the rows' device. Keeps the group weakly.
  RowExchange(RankGroupPtr group, c10::DeviceType wire, at::Tensor send_rows, at::Tensor returns,
              std::vector<int64_t> send_counts, std::vector<int64_t> receive_counts);

  int64_t num_rows() const { return returns_.size(0); }
  int64_t num_received() const { return num_received_; }
  int64_t num_sent_to_others() const;
  int64_t num_received_from_others() const;

  // Each part, [num_rows, width] of any dtype, to the ranks that its rows are for: [num_received, width] by sending
  // rank. The parts of a row travel together.
  std::vector<at::Tensor> send(const std::string& step, const std::vector<at::Tensor>& parts) const;

  // The other way: each part is [num_received, width], and comes back as [num_rows, width] with the answers to a row
  // summed in the order of ranks.
  std::vector<at::Tensor> send_back(const std::string& step, const std::vector<at::Tensor>& parts) const;

 private:
  at::Tensor travel(const std::string& step, const at::Tensor& rows, bool is_way_back) const;

  RankGroupPtr group_;
  c10::DeviceType wire_;
  at::Tensor send_rows_;
  at::Tensor returns_;
  std::vector<int64_t> send_counts_;
  std::vector<int64_t> receive_counts_;
  int64_t num_received_;
};

// Bytes of a row in which parts of these widths and dtypes travel together, each aligned.
int64_t record_bytes(const std::vector<at::Tensor>& parts);

}  // namespace shardwright
