// The instructions of programs. Each is an aggregate with all of its operands and options.
//
// An instruction is a compute instruction, a transfer, or a Wait. A transfer only starts; it is complete after the Wait
// with its ticket. Until then, the memory that it reads must not be written, and the memory that it writes must not be
// read or written.
//
// To add an instruction, add it to Operation, and to IsCompute or IsTransfer below. Then every place that must handle
// it fails to compile until it does (support/match.h).
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

// Copies the elements of the boxes from `src` to `dst`.
struct Copy {
  BufferId src = kMissingBuffer;
  BufferId dst = kMissingBuffer;
  std::vector<Box> boxes;
  double divisor = 1;  // every element is divided by it; floating and complex dtypes only
  // The dtypes of the elements that are read and written. Offsets and strides of the boxes count elements of these
  // dtypes. nullopt: the buffer's dtype. Elements are cast if the two dtypes differ.
  std::optional<DType> src_dtype = std::nullopt;
  std::optional<DType> dst_dtype = std::nullopt;
};

// dst = 0
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

// dst = (op over all parts) / divisor, rounded once. Each part has dst.count elements; parts are reduced in this order.
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

// Float32 factors of the rows of lhs, or of the columns of rhs: factor i is at offset + i * stride.
struct Scale {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t stride = 0;  // 0: one factor for all
};

// Flags for a product that begins while its lhs is still being fetched (see Fetch).
struct Flags {
  BufferRange range;         // one flag per chunk; lhs is divided into range.count chunks of equally many rows
  int64_t first = 0;         // the chunk that is multiplied first; the following chunks are taken in cyclic order
  Ticket fetch = kNoTicket;  // the Fetch that sets them
};

// dst = lhs x rhs, with sizes m x k and k x n. There are `count` such products, one batch stride apart.
struct Gemm {
  Matrix lhs;
  Matrix rhs;
  Matrix dst;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t count = 1;             // number of products
  int64_t lhs_batch_stride = 0;  // elements from one product's lhs to the next one's
  int64_t rhs_batch_stride = 0;
  int64_t dst_batch_stride = 0;
  bool accumulates = false;                   // dst = dst + lhs x rhs
  std::optional<Matrix> bias = std::nullopt;  // added to every product; not set if it accumulates
  // Both set for operands of 8-bit floats. Then k > 0, there is no bias, and batches have strides of 0.
  std::optional<Scale> lhs_scale = std::nullopt;
  std::optional<Scale> rhs_scale = std::nullopt;
  // If set, the product waits for a chunk's flag before it reads the chunk. It must be one product of row-major
  // matrices (rhs may be column-major) without bias or accumulation.
  std::optional<Flags> flags = std::nullopt;
};

// In transfers, `group` is an index into Program::groups. Data is in the group's order, by ascending rank.

// dst = `src` of all ranks of the group, this one included, one after the other. All have the same length.
struct AllGather {
  int group = -1;
  BufferRange src;
  BufferRange dst;
};

// `src` has one equal part for each rank of the group. dst = op over the ranks' contributions to this rank's part.
struct ReduceScatter {
  int group = -1;
  ReduceOp op = ReduceOp::kSum;
  BufferRange src;
  BufferRange dst;
};

// data = op over `data` of all ranks of the group.
struct AllReduce {
  int group = -1;
  ReduceOp op = ReduceOp::kSum;
  BufferRange data;
};

// `src` has a part for each rank of the group. dst = this rank's parts of all ranks' `src`, one after the other.
struct AllToAll {
  int group = -1;
  BufferRange src;
  BufferRange dst;
  std::vector<int64_t> send_counts;     // elements to each rank of the group
  std::vector<int64_t> receive_counts;  // elements from each rank of the group
  bool by_messages = false;  // sent as one message per peer, not by the backend's all-to-all; the same on all ranks
};

// Messages to and from some peers. No other ranks take part.
struct SendReceive {
  struct Message {
    int64_t peer = -1;  // index in the group
    BufferRange range;
  };
  int group = -1;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

// Offer and Fetch are the two halves of an all-gather. Between them, nothing else communicates in the group.

// Lets all other ranks of the group read `src`. The transfer is complete once every rank of the group has started its
// Offer.
struct Offer {
  int group = -1;
  BufferRange src;
};

// Reads the data that the other ranks offer, chunk by chunk. dst is divided into as many chunks as there are flags. An
// earlier Copy must write the chunks of this rank's own part. Fetch writes every other chunk once, the nearest rank's
// chunks first. It sets all flags, which must be 0 before, to 1: a chunk's flag after the chunk's data. A Gemm may wait
// for a flag before this transfer is complete.
struct Fetch {
  int group = -1;
  Ticket offer = kNoTicket;  // this rank's Offer, which must be complete
  BufferRange dst;
  BufferRange flags;

  int64_t chunk_count() const { return dst.count / flags.count; }  // elements of a chunk
};

// Completes the transfer that the instruction with this number started.
struct Wait {
  Ticket ticket = kNoTicket;
};

// An instruction without its place in the program (Instruction in program.h).
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

// Returns true for a transfer, false for a compute instruction and for a Wait.
bool is_communication(const Operation& operation);
// Returns the index of the group in which a transfer communicates; nullopt for other operations.
std::optional<int> group_of(const Operation& operation);
// Returns the text of an operation in listings of programs: "copy b0 -> b2 in 1 boxes".
std::string to_string(const Operation& operation);
// Returns the buffers that an operation reads or writes, some possibly twice; none for a Wait.
std::vector<BufferId> buffers_of(const Operation& operation);

}  // namespace shardwright
