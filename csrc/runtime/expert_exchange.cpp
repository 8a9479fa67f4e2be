#include "runtime/expert_exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "runtime/executor.h"
#include "runtime/expert_rows.h"
#include "runtime/issue_order.h"
#include "runtime/staging.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Alignment in bytes of each part in a record of several parts, so that any dtype can be read there.
constexpr int64_t kPartAlignment = 16;

// Rounds up to a multiple of kPartAlignment.
int64_t aligned(int64_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

// Returns the size in bytes of one row of a part.
int64_t width_bytes(const at::Tensor& part) { return part.size(1) * static_cast<int64_t>(part.element_size()); }

// Raises the error of an exchange, which names rank, step and group.
[[noreturn]] void fail(const RankGroup& group, const std::string& step, const std::string& reason) {
  const std::string text = concat("shardwright: rank ", group.rank(), " of a group of ", group.size(), " ('",
                                  group.name(), "') failed in ", step, "\n", reason);
  throw c10::DistBackendError({__func__, __FILE__, __LINE__}, text);
}

// Returns a part as uint8, [rows, bytes per row], with pending conjugation and negation applied.
at::Tensor bytes_of(const at::Tensor& part) { return part.resolve_conj().resolve_neg().contiguous().view(at::kByte); }

// Returns the device from which the group sends rows on `device`: the CPU, or the same device.
c10::Device device_for(c10::DeviceType group_device, c10::Device device) {
  return group_device == at::kCPU ? at::kCPU : device;
}

// Returns the counts, each multiplied by a factor.
std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

// Records in one byte tensor: [number of records, record_bytes]. The parts of a record are consecutive.
class Records {
 public:
  // Allocates records with undefined content. `parts` give widths and dtypes, and must outlive the Records.
  Records(const std::vector<at::Tensor>& parts, int64_t num_records) : parts_(parts) {
    const int64_t bytes = record_bytes(parts);
    bytes_ = allocate_staging(num_records * bytes, parts.front().options().dtype(at::kByte)).view({num_records, bytes});
  }
  // Uses existing bytes as records.
  Records(const std::vector<at::Tensor>& parts, at::Tensor bytes) : parts_(parts), bytes_(std::move(bytes)) {}

  const at::Tensor& bytes() const { return bytes_; }

  // Returns the memory to the staging cache. Call it only for records that the first constructor allocated, once they
  // have been sent.
  void release() const {
    at::Tensor memory = bytes_.view({-1});
    return_staging(memory);
  }

  // Returns a view of part `index` of all records, in the dtype of that part; a new tensor if the view would be empty.
  at::Tensor part(size_t index) const {
    int64_t offset = 0;
    for (size_t i = 0; i < index; ++i) offset += aligned(width_bytes(parts_[i]));
    const at::Tensor& like = parts_[index];
    if (bytes_.size(0) == 0 || like.size(1) == 0) {
      return at::empty({bytes_.size(0), like.size(1)}, like.options());
    }
    return bytes_.narrow(1, offset, width_bytes(like)).view(like.scalar_type());
  }

 private:
  const std::vector<at::Tensor>& parts_;
  at::Tensor bytes_;
};

}  // namespace

int64_t record_bytes(const std::vector<at::Tensor>& parts) {
  if (parts.size() == 1) return width_bytes(parts.front());
  int64_t bytes = 0;
  for (const at::Tensor& part : parts) bytes += aligned(width_bytes(part));
  return bytes;
}

at::Tensor exchange_rows(RankGroup& group, const std::string& step, c10::DeviceType group_device,
                         const at::Tensor& rows, const std::vector<int64_t>& send_counts,
                         const std::vector<int64_t>& receive_counts) {
  const GroupLease lease = group.lease();
  TORCH_CHECK(lease, "shardwright: rank ", group.rank(), " failed in ", step, ", because its process group '",
              group.name(), "' was destroyed; dispatch again with a group that exists");
  const int64_t row_bytes = rows.size(1);
  const int64_t num_received = std::reduce(receive_counts.begin(), receive_counts.end());
  at::Tensor received =
      at::empty({num_received, row_bytes}, rows.options().device(device_for(group_device, rows.device())));
  if (row_bytes == 0) return received.to(rows.device());
  prefer_huge_pages(received);
  if (rows.device() != received.device()) ++counters().through_host;
  at::Tensor to_send = rows.to(received.device()).view({-1});
  at::Tensor to_receive = received.view({-1});
  try {
    lease->connect(received.device());
    WorkPtr work;
    IssueOrder& order = received.device().is_cpu() ? issue_order_of(group) : issue_order_of(received.device());
    order.issue([&] {
      work = lease->all_to_all(to_receive, to_send, times(receive_counts, row_bytes), times(send_counts, row_bytes));
    });
    if (work) work->wait();
  } catch (const c10::Error& error) {
    fail(group, step, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(group, step, error.what());
  }
  counters().received_bytes += (num_received - receive_counts[group.rank()]) * row_bytes;
  return received.to(rows.device());
}

at::Tensor exchange_words(RankGroup& group, const std::string& step, const at::Tensor& words, c10::Device device) {
  const std::vector<int64_t> one_each(group.size(), 1);
  const at::Tensor bytes = words.contiguous().view(at::kByte).to(device);
  return exchange_rows(group, step, device.type(), bytes, one_each, one_each).cpu().view(at::kLong);
}

RowExchange::RowExchange(RankGroupPtr group, c10::DeviceType group_device, at::Tensor send_rows,
                         at::Tensor rows_of_token, std::vector<int64_t> send_counts,
                         std::vector<int64_t> receive_counts)
    : group_(std::move(group)),
      group_device_(group_device),
      send_rows_(std::move(send_rows)),
      rows_of_token_(std::move(rows_of_token)),
      send_counts_(std::move(send_counts)),
      receive_counts_(std::move(receive_counts)),
      num_received_(std::reduce(receive_counts_.begin(), receive_counts_.end())) {
  const int64_t num_sent = std::reduce(send_counts_.begin(), send_counts_.end());
  check_invariant(num_sent == send_rows_.size(0), "send_counts sum to ", num_sent, ", but send_rows has ",
                  send_rows_.size(0), " rows");
}

int64_t RowExchange::num_sent_to_others() const { return send_rows_.size(0) - send_counts_[group_->rank()]; }

int64_t RowExchange::num_received_from_others() const { return num_received_ - receive_counts_[group_->rank()]; }

at::Tensor RowExchange::exchange(const std::string& step, const at::Tensor& rows, bool is_reverse) const {
  return is_reverse ? exchange_rows(*group_, step, group_device_, rows, receive_counts_, send_counts_)
                    : exchange_rows(*group_, step, group_device_, rows, send_counts_, receive_counts_);
}

std::vector<at::Tensor> RowExchange::send(const std::string& step, const std::vector<at::Tensor>& parts) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // autograd need not see parts of records as views
  const Records outgoing(parts, send_rows_.size(0));
  for (size_t i = 0; i < parts.size(); ++i) take_rows_into(parts[i], send_rows_, outgoing.part(i));
  const Records incoming(parts, exchange(step, outgoing.bytes(), false));
  outgoing.release();
  std::vector<at::Tensor> received;
  for (size_t i = 0; i < parts.size(); ++i) received.push_back(incoming.part(i));
  return received;
}

std::vector<at::Tensor> RowExchange::send_back(const std::string& step, const std::vector<at::Tensor>& parts) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // autograd need not see parts of records as views
  const bool is_one_part = parts.size() == 1;
  const Records outgoing = is_one_part ? Records(parts, bytes_of(parts.front())) : Records(parts, num_received_);
  for (size_t i = 0; i < parts.size() && !is_one_part; ++i) outgoing.part(i).copy_(parts[i]);
  const Records answers(parts, exchange(step, outgoing.bytes(), true));
  if (!is_one_part) outgoing.release();
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < parts.size(); ++i) sums.push_back(sum_rows(answers.part(i), rows_of_token_, std::nullopt));
  return sums;
}

}  // namespace shardwright
