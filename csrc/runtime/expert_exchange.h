// Sends rows to other ranks and receives their results: one all-to-all in each direction.
//
// A *part* is a tensor with a row of values for each row that is sent, such as tokens or codes. A *record* has the
// bytes of one row of all parts, and is sent as a unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

// Sends rows of bytes and returns the received rows. `rows` is [sum of send_counts, row bytes], uint8, contiguous, with
// the rows for rank 0 first. `wire`: the type of device whose tensors the group supports; rows on another device are
// sent through host memory. On devices with streams this runs on the current stream. Throws DistBackendError that names
// rank, `step` and group. No other function here uses the process group.
at::Tensor exchange_rows(RankGroup& group, const std::string& step, c10::DeviceType wire, const at::Tensor& rows,
                         const std::vector<int64_t>& send_counts, const std::vector<int64_t>& receive_counts);

// Sends row r of `words` ([size of the group, n], int64, on CPU) to rank r. Row r of the result was received from rank
// r. The words are sent from `device`, and the host waits for it.
at::Tensor exchange_words(RankGroup& group, const std::string& step, const at::Tensor& words, c10::Device device);

// The rows that the ranks of a group send each other, and the results that are returned and summed. Immutable.
class RowExchange {
 public:
  // `send_rows`: [sum of send_counts], row numbers sorted by receiving rank; -1 means a row of zeros. `returns`:
  // [rows, columns], indices into `send_rows`, or -1. Both are int64, on the rows' device. Does not keep the group
  // alive.
  RowExchange(RankGroupPtr group, c10::DeviceType wire, at::Tensor send_rows, at::Tensor returns,
              std::vector<int64_t> send_counts, std::vector<int64_t> receive_counts);

  // Number of rows of the parts that `send` takes.
  int64_t num_rows() const { return returns_.size(0); }
  // Number of rows that this rank receives, from itself included.
  int64_t num_received() const { return num_received_; }
  int64_t num_sent_to_others() const;
  int64_t num_received_from_others() const;

  // Sends each part, [num_rows, width] of any dtype, to the ranks of its rows. Returns [num_received, width] for each
  // part, sorted by sending rank. All parts of a row are sent in one record.
  std::vector<at::Tensor> send(const std::string& step, const std::vector<at::Tensor>& parts) const;

  // Sends results back to the ranks that sent the rows. Each part is [num_received, width]. Returns [num_rows, width]
  // for each part: the sum of a row's results in the order of ranks.
  std::vector<at::Tensor> send_back(const std::string& step, const std::vector<at::Tensor>& parts) const;

 private:
  // Exchanges rows of bytes, in the direction of `send`, or of `send_back` if `is_reverse`.
  at::Tensor exchange(const std::string& step, const at::Tensor& rows, bool is_reverse) const;

  RankGroupPtr group_;
  c10::DeviceType wire_;
  at::Tensor send_rows_;                 // by sent row: the number of the row in the parts
  at::Tensor returns_;                   // by row of the parts: its indices into send_rows_
  std::vector<int64_t> send_counts_;     // by receiving rank
  std::vector<int64_t> receive_counts_;  // by sending rank
  int64_t num_received_;
};

// Returns the size in bytes of a record of parts with these widths and dtypes. Each part is aligned in the record.
int64_t record_bytes(const std::vector<at::Tensor>& parts);

}  // namespace shardwright
