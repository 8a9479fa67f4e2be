// What one rank does: instructions over buffers.
//
// Buffers hold elements of the tensor's dtype in row-major order. Buffer 0 is the input, which no instruction
// writes; `output` is the result. A temporary exists from the first instruction that names it to the last, so buffers
// whose lives do not meet share memory through the allocator, and the peak is exact.
//
// A communication instruction only starts the transfer. Its effects are there after the Wait that carries its ticket;
// until then what it reads must not be written and what it writes must not be touched.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"
#include "planner/plan.h"

namespace shardwright {

constexpr int kInputBuffer = 0;

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

using Operation = std::variant<Copy, FillZero, Divide, Power, Reduce, AllGather, ReduceScatter, AllReduce, AllToAll,
                               SendReceive, Wait>;

struct Instruction {
  Operation operation;
  int step = -1;  // the step of the plan it serves, for messages
};

// The ranks of a group of the mesh, or those of them that have something to say to each other.
struct Group {
  MeshDimSet mesh_dims;
  std::vector<int64_t> positions;  // ascending rank
  std::vector<int64_t> ranks;
  int64_t index = -1;  // of this rank
};

struct Program {
  std::vector<int64_t> input_shape;
  std::vector<int64_t> output_shape;
  DType dtype;
  std::vector<int64_t> buffer_counts;  // elements, by buffer id
  int output = kInputBuffer;           // kInputBuffer: nothing to do, the result is the input itself
  std::vector<Instruction> instructions;
  std::vector<Group> groups;
  // Where the result is one box of the input, perhaps divided: its first index in each dim. A runtime may then keep
  // the memory order of an input that is not row-major.
  std::optional<std::vector<int64_t>> box_of_input;
  // One line per plan step, for error messages and listings.
  std::vector<std::string> step_texts;

  // Buffers whose life begins, and ends, with each instruction; the output ends with none.
  struct Lifetimes {
    std::vector<std::vector<int>> begins;
    std::vector<std::vector<int>> ends;
  };
  Lifetimes lifetimes() const;

  // The most bytes allocated at once: the result and temporaries, not the input, which belongs to the caller.
  int64_t peak_bytes() const;
  // The same while each step runs.
  std::vector<int64_t> peak_bytes_by_step() const;

  std::string to_string() const;
};

bool is_communication(const Operation& operation);
// Index of the group an operation communicates in; -1 for one that does not.
int group_of(const Operation& operation);
// Buffers an operation reads or writes.
std::vector<int> buffers_of(const Operation& operation);

// The program of the rank at `position`.
Program compile(const Plan& plan, int64_t position);

}  // namespace shardwright
