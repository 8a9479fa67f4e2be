// A Program is the work of one rank: instructions over buffers.
//
// Buffers hold elements in row-major order, unless they have strides. The first buffers belong to the caller: the
// inputs, which no instruction writes, then the destinations, parts of which instructions may write. A temporary exists
// from the first instruction that names it to the last. So buffers with disjoint lives can share memory through the
// allocator, and the peak is exact. An output exists from the first instruction that names it to the end.
//
// Example: rank 0 of 2 moves float32[4, 6] from S(0) to S(1). It packs the columns for rank 1, starts the all-to-all
// (b2 to rank 1, 6 elements of b1 from rank 1), and copies its own elements meanwhile:
//
//   g0 = ranks (0, 1), here 0
//   buffers b0:12 b1:12 b2:6, input b0, output b1
//   0. copy b0 -> b2 in 1 boxes
//   1. all_to_all g0 b2[0:6] (0, 6) -> b1[6:12] (0, 6)
//   2. copy b0 -> b1 in 1 boxes
//   3. wait for instruction 1
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "moves/plan.h"
#include "program/instructions.h"

namespace shardwright {

struct Instruction {
  Operation operation;
  int step = -1;   // the step that it belongs to: an index in Program::step_texts
  int chunk = -1;  // the chunk of a product that it belongs to, or -1
};

// Ranks that communicate: all or some ranks of a group of the mesh, or of both meshes of a crossing.
struct Group {
  MeshDimSet mesh_dims;     // of the first step that communicates in the group
  std::vector<Rank> ranks;  // ascending
  int64_t index = -1;       // index of this rank in `ranks`
};

// Inputs and destinations are buffers of the caller; the program allocates outputs and temporaries.
enum class BufferRole : uint8_t { kInput, kDestination, kOutput, kTemporary };

struct Buffer {
  int64_t count = 0;  // number of elements; with strides, it includes the gaps between the elements
  DType dtype = DType::kFloat32;
  BufferRole role = BufferRole::kTemporary;
  std::vector<int64_t> shape = {};                             // of an input or destination; empty for other buffers
  std::optional<std::vector<int64_t>> strides = std::nullopt;  // of an input or destination; nullopt: row-major
  bool is_on_host = false;  // true: in host memory, while other buffers may be on a device

  int64_t size_bytes() const { return count * dtype.size_bytes(); }
};

struct Output {
  BufferId buffer = kInputBuffer;  // if it is an input, the caller gets that input itself, not a copy
  std::vector<int64_t> shape;
};

// The numbers of instructions, counted from the program's first, after which a destination is finished.
struct DestinationEnd {
  int written = 0;  // all up to the last instruction that writes this rank's part
  int sent = 0;     // all up to the last Wait for a message to another rank's part; at least `written`
};

struct Program {
  DType dtype = DType::kFloat32;                 // of the tensor that is moved
  std::vector<Buffer> buffers;                   // by BufferId; inputs first
  std::vector<Output> outputs;                   // results, in the order in which the caller receives them
  std::vector<DestinationEnd> destination_ends;  // by destination
  std::vector<Instruction> instructions;
  std::vector<Group> groups;
  // Multiprocessors that a Gemm leaves to transfers if any are in flight (started, not waited for) when it is
  // submitted. Devices without multiprocessors ignore this.
  int64_t sms_left = 0;
  // Set if the result is one box of the input, perhaps divided: the box's first index in each dim. A runtime may then
  // keep the memory order of an input that is not row-major.
  std::optional<std::vector<int64_t>> box_of_input;
  // Messages are sent from and received into host memory, while the caller's buffers may be on a device.
  bool stages_on_host = false;
  // One line per plan step, for error messages and listings.
  std::vector<std::string> step_texts;
  // The layouts of each plan step and the bytes that this rank receives in it, for profilers. A note, or the full list,
  // is empty if they are not known.
  std::vector<std::string> step_notes;

  size_t num_inputs() const;
  size_t num_destinations() const { return destination_ends.size(); }
  bool is_input(BufferId buffer) const { return buffers[buffer].role == BufferRole::kInput; }
  bool is_of_caller(BufferId buffer) const {
    return is_input(buffer) || buffers[buffer].role == BufferRole::kDestination;
  }
  bool is_output(BufferId buffer) const { return buffers[buffer].role == BufferRole::kOutput; }
  DType dtype_of(BufferId buffer) const { return buffers[buffer].dtype; }
  int64_t size_bytes(BufferId buffer) const { return buffers[buffer].size_bytes(); }
  // Return the dtypes in which a copy reads and writes.
  DType src_dtype(const Copy& copy) const { return copy.src_dtype.value_or(dtype_of(copy.src)); }
  DType dst_dtype(const Copy& copy) const { return copy.dst_dtype.value_or(dtype_of(copy.dst)); }

  // For each instruction, the buffers to allocate before it and the buffers to free after it. Outputs are not freed;
  // buffers of the caller are in neither list.
  struct Lifetimes {
    std::vector<std::vector<BufferId>> begins;
    std::vector<std::vector<BufferId>> ends;
  };
  Lifetimes lifetimes() const;

  // Returns the operation whose memory an instruction uses: for a Wait, the transfer that it waits for; otherwise the
  // operation itself.
  const Operation& operation_in_effect(const Operation& operation) const;

  // Returns the bytes that the runtime allocates in addition to buffers while an instruction runs: for Attend and
  // AttendBackward as in attend_tiles.h, for other instructions 0.
  int64_t scratch_bytes(const Operation& operation) const;

  // Returns the most bytes allocated at once: outputs, temporaries and scratch.
  int64_t peak_bytes() const;
  // Returns, for each step of step_texts, the most bytes allocated at once during its instructions; 0 without any.
  std::vector<int64_t> peak_bytes_by_step() const;

  // Returns a listing of groups, buffers and instructions.
  std::string to_string() const;
};

// Returns the program of a rank. A step on meshes without this rank has no instructions, and its result is a buffer
// without elements. Throws UserError for a rank that is on neither the source's nor the destination's mesh.
Program compile(const Plan& plan, Rank rank);

}  // namespace shardwright
