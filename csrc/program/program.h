// A Program is what one rank does: instructions over buffers.
//
// Buffers hold elements in row-major order. The first ones are the inputs, which belong to the caller and which no
// instruction writes. A temporary exists from the first instruction that names it to the last, so buffers whose lives
// do not overlap can share memory through the allocator, and the peak is exact. An output exists from the first
// instruction that names it to the end.
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
  int step = -1;   // the step of the plan that it belongs to, for error messages
  int chunk = -1;  // the chunk of a product that it belongs to, or -1
};

// The ranks of a group of the mesh, or the subset of them that exchange data.
struct Group {
  MeshDimSet mesh_dims;
  std::vector<Rank> ranks;  // ascending
  int64_t index = -1;       // of this rank
};

enum class BufferRole : uint8_t { kInput, kOutput, kTemporary };

struct Buffer {
  int64_t count = 0;  // elements
  DType dtype = DType::kFloat32;
  BufferRole role = BufferRole::kTemporary;
  std::vector<int64_t> shape = {};  // of an input

  int64_t size_bytes() const { return count * dtype.size_bytes(); }
};

struct Output {
  BufferId buffer = kInputBuffer;  // if it is an input, the result is that input itself
  std::vector<int64_t> shape;
};

struct Program {
  DType dtype = DType::kFloat32;  // of the tensor that is moved
  std::vector<Buffer> buffers;    // by BufferId; inputs first
  std::vector<Output> outputs;    // the results, in order
  std::vector<Instruction> instructions;
  std::vector<Group> groups;
  // Multiprocessors that a Gemm leaves to transfers if any are under way (started, not waited for) when it is
  // submitted. Devices without multiprocessors ignore this.
  int64_t sms_left = 0;
  // If the result is one box of the input, perhaps divided: the box's first index in each dim. A runtime may then keep
  // the memory order of an input that is not row-major.
  std::optional<std::vector<int64_t>> box_of_input;
  // One line per plan step, for error messages and listings.
  std::vector<std::string> step_texts;

  size_t num_inputs() const;
  bool is_input(BufferId buffer) const { return buffers[buffer].role == BufferRole::kInput; }
  bool is_output(BufferId buffer) const { return buffers[buffer].role == BufferRole::kOutput; }
  DType dtype_of(BufferId buffer) const { return buffers[buffer].dtype; }
  int64_t size_bytes(BufferId buffer) const { return buffers[buffer].size_bytes(); }

  // The buffers whose life begins, and those whose life ends, with each instruction. Outputs do not end.
  struct Lifetimes {
    std::vector<std::vector<BufferId>> begins;
    std::vector<std::vector<BufferId>> ends;
  };
  Lifetimes lifetimes() const;

  // The operation whose memory an instruction concerns: its own, or for a Wait that of the transfer.
  const Operation& operation_in_effect(const Operation& operation) const;

  // Bytes that the runtime allocates besides buffers while an instruction runs (attend_tiles.h).
  int64_t scratch_bytes(const Operation& operation) const;

  // The most bytes allocated at once: results, temporaries and scratch, not inputs, which belong to the caller.
  int64_t peak_bytes() const;
  // The same during each step.
  std::vector<int64_t> peak_bytes_by_step() const;

  std::string to_string() const;
};

// Returns the program of a rank. In steps on a mesh without this rank it does nothing, and holds a buffer without
// elements. Throws UserError for a rank that is on neither the source's nor the destination's mesh.
Program compile(const Plan& plan, Rank rank);

}  // namespace shardwright
