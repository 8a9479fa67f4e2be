// What one rank does: instructions over buffers.
//
// Buffers hold elements of the tensor's dtype in row-major order, unless another dtype is named. The first ones are the
// inputs, which no instruction writes; `outputs` are the results. A temporary exists from the first instruction that
// names it to the last, so buffers whose lives do not meet share memory through the allocator, and the peak is exact.
//
// A communication instruction only starts the transfer. Its effects are there after the Wait that carries its ticket;
// until then what it reads must not be written and what it writes must not be touched.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"
#include "moves/plan.h"

namespace shardwright {

constexpr int kInputBuffer = 0;  // the first

struct BufferRange {
  int buffer = -1;
  int64_t offset = 0;
  int64_t count = 0;  // elements
};

// A box of elements with its place in two row-major arrays; sizes and strides outermost first, in elements.
struct Box {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> src_strides;
  std::vector<int64_t> dst_strides;
};

struct Copy {
  int src = -1;
  int dst = -1;
  std::vector<Box> boxes;
  double divisor = 1;  // of every element, on its way; floating and complex dtypes only
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
  int buffer = -1;
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// What the rows of lhs, or the columns of rhs, are multiplied by: number i at offset + i * stride, in float32.
struct Scale {
  int buffer = -1;
  int64_t offset = 0;
  int64_t stride = 0;  // 0: one for all
};

// dst = lhs x rhs, m x k times k x n; `count` of them, each a batch stride behind the one before.
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
  std::optional<Matrix> bias = std::nullopt;  // added to every product; not where it accumulates
  // Of operands of 8-bit floats, which have both; k > 0, no bias, and strides of 0 in batches.
  std::optional<Scale> lhs_scale = std::nullopt;
  std::optional<Scale> rhs_scale = std::nullopt;
};

// `group` below indexes Program::groups. Ranges are in the group's order, by ascending rank.

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
  bool by_messages = false;  // to each peer one, instead of the backend's collective; the same on all ranks
};

// Messages to and from some peers; nobody else is waited for.
struct SendReceive {
  struct Message {
    int64_t peer = -1;  // index in the group
    BufferRange range;
  };
  int group = -1;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

struct Wait {
  int ticket = -1;  // index of the instruction that started the transfer
};

using Operation = std::variant<Copy, FillZero, Divide, Power, Reduce, Cast, Gemm, AllGather, ReduceScatter, AllReduce,
                               AllToAll, SendReceive, Wait>;

struct Instruction {
  Operation operation;
  int step = -1;   // the step of the plan it serves, for messages
  int chunk = -1;  // of a pipeline: the chunk it serves
};

// The ranks of a group of the mesh, or those of them that have something to say to each other.
struct Group {
  MeshDimSet mesh_dims;
  std::vector<int64_t> positions;  // ascending rank
  std::vector<int64_t> ranks;
  int64_t index = -1;  // of this rank
};

struct Output {
  int buffer = kInputBuffer;  // an input: nothing to do, the result is that input itself
  std::vector<int64_t> shape;
};

struct Program {
  std::vector<std::vector<int64_t>> input_shapes;
  std::vector<Output> outputs;
  DType dtype = DType::parse("float32");
  std::vector<int64_t> buffer_counts;  // elements, by buffer id
  std::map<int, DType> other_dtypes;   // of buffers whose elements are not of `dtype`
  std::vector<Instruction> instructions;
  std::vector<Group> groups;
  // Multiprocessors that a Gemm is to leave to transfers if any are under way, started and not waited for, when the
  // device is given it. Devices without them ignore this.
  int64_t sms_left = 0;
  // Where the result is one box of the input, perhaps divided: its first index in each dim. A runtime may then keep
  // the memory order of an input that is not row-major.
  std::optional<std::vector<int64_t>> box_of_input;
  // One line per plan step, for error messages and listings.
  std::vector<std::string> step_texts;

  bool is_input(int buffer) const { return buffer < static_cast<int>(input_shapes.size()); }
  bool is_output(int buffer) const;
  const DType& dtype_of(int buffer) const;
  int64_t size_bytes(int buffer) const { return buffer_counts[buffer] * dtype_of(buffer).size_bytes(); }

  // Buffers whose life begins, and ends, with each instruction; an output ends with none.
  struct Lifetimes {
    std::vector<std::vector<int>> begins;
    std::vector<std::vector<int>> ends;
  };
  Lifetimes lifetimes() const;

  // The most bytes allocated at once: results and temporaries, not inputs, which belong to the caller.
  int64_t peak_bytes() const;
  // The same while each step runs.
  std::vector<int64_t> peak_bytes_by_step() const;

  std::string to_string() const;
};

bool is_communication(const Operation& operation);
// Index of the group an operation communicates in; -1 for one that does not.
int group_of(const Operation& operation);
std::string to_string(const Operation& operation);  // as listings show it
// Buffers an operation reads or writes.
std::vector<int> buffers_of(const Operation& operation);

// The program of the rank at `position`.
Program compile(const Plan& plan, int64_t position);

}  // namespace shardwright
