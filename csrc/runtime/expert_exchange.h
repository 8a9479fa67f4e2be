// Sends rows to other ranks and receives their results: one all-to-all in each direction.
//
// The data of a row is in several tensors, its *parts*, such as the token and its codes: row r of the exchange is row r
// of every part. A *record* is the bytes of one row of all parts, which are sent together.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

// Sends rows of bytes and returns the received rows. `rows` is [sum of send_counts, row bytes], uint8, contiguous, with
// the rows for rank 0 first. send_counts[r] and receive_counts[r] are the numbers of rows to and from rank r. The
// result is on the device of `rows`. `group_device`: the type of device whose tensors the group transfers, CPU for
// Gloo; rows on another device are sent through host memory. On devices with streams this runs on the current stream.
// Throws c10::Error if the group was destroyed. If the transfer fails, throws c10::DistBackendError that names rank,
// group and `step`, the caller's name of the transfer. All transfers of this file are done by this function.
at::Tensor exchange_rows(RankGroup& group, const std::string& step, c10::DeviceType group_device,
                         const at::Tensor& rows, const std::vector<int64_t>& send_counts,
                         const std::vector<int64_t>& receive_counts);

// Sends row r of `words` ([size of the group, n], int64, on CPU) to rank r. Returns a tensor on CPU whose row r was
// received from rank r. The words are copied to `device` and sent from there, and the host waits for the result.
// `step`: as in exchange_rows.
at::Tensor exchange_words(RankGroup& group, const std::string& step, const at::Tensor& words, c10::Device device);

// The rows that the ranks of a group send each other, and the sums of the results that they send back. Immutable.
//
// For example, rank 0 of two ranks has rows a and b. It sends a to both ranks, and b to rank 1:
//
//   send_rows       0, 0, 1            rows of the parts: a for rank 0; a, b for rank 1
//   send_counts     1, 2
//   rows_of_token   (0, 1), (2, -1)    indices into send_rows: a is 0 and 1, b is 2
//
// If rank r returns f_r(x) for a row x, then send_back returns f_0(a) + f_1(a) for a, and f_1(b) for b.
class RowExchange {
 public:
  // `send_rows`: [sum of send_counts], by receiving rank the numbers of the rows to send; -1 means a row of zeros.
  // `rows_of_token`: [rows, columns], for each row its indices in `send_rows`, then -1. Both are int64, on the rows'
  // device. `send_counts`: rows to each rank; `receive_counts`: rows from each rank. Does not keep the group alive.
  // `group_device`: see exchange_rows.
  RowExchange(RankGroupPtr group, c10::DeviceType group_device, at::Tensor send_rows, at::Tensor rows_of_token,
              std::vector<int64_t> send_counts, std::vector<int64_t> receive_counts);

  // Number of rows of the parts that `send` takes.
  int64_t num_rows() const { return rows_of_token_.size(0); }
  // Number of rows that this rank receives, including the rows from itself.
  int64_t num_received() const { return num_received_; }
  // Number of rows that this rank sends to other ranks, and receives from other ranks.
  int64_t num_sent_to_others() const;
  int64_t num_received_from_others() const;

  // Sends the rows of parts, at least one. A part is [num_rows, width], of any dtype. Returns [num_received, width] for
  // each part, sorted by sending rank.
  std::vector<at::Tensor> send(const std::string& step, const std::vector<at::Tensor>& parts) const;

  // Sends the results for received rows back to the ranks that sent the rows. A part is [num_received, width], of a
  // floating dtype that sum_rows supports. Returns [num_rows, width] for each part: the sum of each row's results, in
  // the order of ranks.
  std::vector<at::Tensor> send_back(const std::string& step, const std::vector<at::Tensor>& parts) const;

 private:
  // Sends rows of bytes and returns the received rows, in the direction of `send`, or of `send_back` if `is_reverse`.
  at::Tensor exchange(const std::string& step, const at::Tensor& rows, bool is_reverse) const;

  RankGroupPtr group_;
  c10::DeviceType group_device_;
  at::Tensor send_rows_;                 // by sent row: the row of the parts
  at::Tensor rows_of_token_;             // by row of the parts: its indices in send_rows_
  std::vector<int64_t> send_counts_;     // by receiving rank
  std::vector<int64_t> receive_counts_;  // by sending rank
  int64_t num_received_;
};

// Returns the size in bytes of a record of parts with these widths and dtypes. Several parts are padded to multiples of
// 16 bytes each, one part alone is not.
int64_t record_bytes(const std::vector<at::Tensor>& parts);

}  // namespace shardwright
