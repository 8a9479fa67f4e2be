// The instructions of programs. Each is an aggregate that holds everything about it.
//
// An instruction is a compute instruction, a transfer, or a Wait. A transfer only starts; it is complete after the Wait
// with its ticket. Until then, what it reads must not be written, and what it writes must not be touched.
//
// To add an instruction, add it to Operation, and to IsCompute or IsTransfer below. Every place that must handle it
// then fails to compile until it does (support/match.h).
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/box.h"
#include "layout/dtype.h"
#include "layout/placement.h"
#include "program/attend.h"
#include "program/buffer_range.h"
#include "support/match.h"

namespace shardwright {

struct Copy {
  BufferId src = kMissingBuffer;
  BufferId dst = kMissingBuffer;
  std::vector<Box> boxes;
  double divisor = 1;  // every element is divided by it; floating and complex dtypes only
  // The dtypes that elements are read and written in, and that boxes count in, where they are not those of the buffers.
  // Elements are cast if the two differ.
  std::optional<DType> src_dtype = std::nullopt;
  std::optional<DType> dst_dtype = std::nullopt;
};

struct FillZero {
  BufferRange dst;
};

// dst = dst / divisor
struct Divide {
  BufferRange dst;
  double divisor = 1;
};

// dst = src ** exponent
struct Power {
  BufferRange src;
  BufferRange dst;
  double exponent = 1;
};

// dst = (op over parts of dst.count elements, taken in this order) / divisor, rounded once.
struct Reduce {
  ReduceOp op = ReduceOp::kSum;
  std::vector<BufferRange> parts;
  BufferRange dst;
  double divisor = 1;
};

// dst = src, in dst's dtype.
struct Cast {
  BufferRange src;
  BufferRange dst;
};

// A matrix in a buffer: element (i, j) is at offset + i * row_stride + j * column_stride.
struct Matrix {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// Float32 factors of the rows of lhs, or of the columns of rhs: the i-th is at offset + i * stride.
struct Scale {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t stride = 0;  // 0: one factor for all
};

// For a product that begins while its lhs is still being fetched: see Fetch.
struct Flags {
  BufferRange range;         // one for each chunk: lhs is cut into as many chunks of equally many rows
  int64_t first = 0;         // the chunk that is multiplied first; the others follow in their order, around the end
  Ticket fetch = kNoTicket;  // the Fetch that sets them
};

// dst = lhs x rhs, m x k times k x n. There are `count` such products, one batch stride apart.
struct Gemm {
  Matrix lhs;
  Matrix rhs;
  Matrix dst;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t count = 1;
  int64_t lhs_batch_stride = 0;
  int64_t rhs_batch_stride = 0;
  int64_t dst_batch_stride = 0;
  bool accumulates = false;                   // dst = dst + lhs x rhs
  std::optional<Matrix> bias = std::nullopt;  // added to every product; none if it accumulates
  // For operands of 8-bit floats, which have both. Then k > 0, there is no bias, and in batches the strides are 0.
  std::optional<Scale> lhs_scale = std::nullopt;
  std::optional<Scale> rhs_scale = std::nullopt;
  // If given, the product waits for a chunk's flag before it reads the chunk. Then it is one product of row-major
  // matrices (rhs may be column-major), and nothing is added to it.
  std::optional<Flags> flags = std::nullopt;
};

// `group` below is an index into Program::groups. Data is in the group's order, by ascending rank.

struct AllGather {
  int group = -1;
  BufferRange src;
  BufferRange dst;
};

struct ReduceScatter {
  int group = -1;
  ReduceOp op = ReduceOp::kSum;
  BufferRange src;
  BufferRange dst;
};

struct AllReduce {  // in place
  int group = -1;
  ReduceOp op = ReduceOp::kSum;
  BufferRange data;
};

struct AllToAll {
  int group = -1;
  BufferRange src;
  BufferRange dst;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> receive_counts;
  bool by_messages = false;  // sent as one message per peer, not by the backend's collective; the same on all ranks
};

// Messages to and from some peers; no other ranks take part.
struct SendReceive {
  struct Message {
    int64_t peer = -1;  // index in the group
    BufferRange range;
  };
  int group = -1;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

// Offer and Fetch are an all-gather in two halves, between which nothing else communicates in the group.

// Lets the other ranks of the group read `src`. It is complete once all of them have offered as well.
struct Offer {
  int group = -1;
  BufferRange src;
};

// Brings what the other ranks have offered, chunk by chunk: dst is cut into as many chunks as there are flags. Writes
// the chunks of this rank's own part never, and the others once each, the nearest rank's first. Sets every chunk's flag
// to 1 after its data, which a Gemm may wait for before this is complete. The flags must be 0 before.
struct Fetch {
  int group = -1;
  Ticket offer = kNoTicket;  // complete
  BufferRange dst;
  BufferRange flags;

  int64_t chunk_count() const { return dst.count / flags.count; }  // elements
};

struct Wait {
  Ticket ticket = kNoTicket;
};

using Operation =
    std::variant<Copy, FillZero, Divide, Power, Reduce, Cast, Gemm, Attend, AttendBackward, Merge, Accumulate,
                 AllGather, ReduceScatter, AllReduce, AllToAll, SendReceive, Offer, Fetch, Wait>;

template <typename T, typename... Kinds>
concept IsOneOf = (std::same_as<T, Kinds> || ...);

template <typename T>
concept IsCompute =
    IsOneOf<T, Copy, FillZero, Divide, Power, Reduce, Cast, Gemm, Attend, AttendBackward, Merge, Accumulate>;

template <typename T>
concept IsTransfer = IsOneOf<T, AllGather, ReduceScatter, AllReduce, AllToAll, SendReceive, Offer, Fetch>;

bool is_communication(const Operation& operation);  // whether it is a transfer
// The index of the group in which a transfer communicates; nothing for other operations.
std::optional<int> group_of(const Operation& operation);
std::string to_string(const Operation& operation);  // its text in listings
// The buffers that an operation reads or writes; none for a Wait.
std::vector<BufferId> buffers_of(const Operation& operation);

}  // namespace shardwright
