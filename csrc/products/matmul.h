// Matrix products and a redistribute as one program: data moves in chunks, and some chunks are multiplied while others
// are being sent.
//
// There are two kinds. A GatherMatmul moves an operand, and multiplies it by one or several operands that do not move:
// a gather of activations for a column-parallel layer, of a sharded weight, or of a gradient along the summed axis. A
// MatmulScatter sums one or several products and moves the sum: a reduce-scatter or an all-reduce after a row-parallel
// layer, or an exchange to another placement. The move is a plan, of which one step is chunked: the last step of an
// operand's plan, the first step of a result's plan. The other steps run unchunked, before or after it.
//
// Chunks follow the data that ranks exchange, so parts may be uneven or empty, in any number of tensor dims:
//
//   ring        Chunk d is received from the rank at distance d (for a result: sent to it). The rank's own part, at
//               distance 0, is multiplied while the first chunk of an operand is received, or while the last chunk of a
//               result is sent. With fewer chunks, a chunk takes several distances together; with more, each part is
//               cut.
//   collective  Chunk j holds the j-th share of every part, moved by one all-gather, all-to-all, reduce-scatter or
//               all-reduce.
//   flags       For a gathered operand: one product of the full operand, which waits for a chunk's flag before it reads
//               the chunk. Each part is cut into `chunks` shares, which are copied from the memory of peers. It needs a
//               device whose product can wait for flags, and is never chosen unless it is requested (why_no_flags).
//   serial      The full operand is moved, then multiplied; or the full result is computed, then moved.
//
// Operands of 8-bit floats are multiplied by scales, which are inputs too (Scaling). The moved operand's row scales are
// sent before its chunks; the product of the rank's own part does not wait for them.
//
// At most `depth` transfers are in flight during a product. A gather starts transfers `depth` chunks ahead. A received
// chunk is kept in a slot of one buffer until it is multiplied, so depth + 1 chunks exist at a time, unless the
// gathered operand is kept. After a scatter has started a transfer, it waits for the transfer that it started `depth`
// chunks before, so at most `depth` blocks are being sent while the next block is computed.
//
// Sums over an axis that is cut into chunks are accumulated in float32 if the dtype has 16 bits.
//
// All ranks must use the same schedule. timeline.h chooses it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "moves/plan.h"
#include "products/contraction.h"
#include "program/program.h"

namespace shardwright {

enum class Method : uint8_t { kSerial, kRing, kCollective, kFlags };  // described above

const char* method_name(Method method);        // "serial", "ring", "collective" or "flags"
Method parse_method(const std::string& name);  // throws UserError

constexpr int64_t kMaxChunks = 4096;   // maximum of Schedule::chunks and of Schedule::depth
constexpr int64_t kMaxSmsLeft = 1024;  // maximum of Schedule::sms_left

// The method of a Matmul, and the chunks of its chunked step.
struct Schedule {
  Method method = Method::kSerial;
  // The number of chunks. A ring also counts the chunks of the rank's own part, which are not sent (ring_chunks in
  // products/blocks.h). For a collective or flags, the number of shares of each part.
  int64_t chunks = 1;
  // For a ring whose chunks the user chose: the distances of each chunk, in the order in which chunks are sent. Each
  // distance from 1 to num_partners() - 1 appears once. If empty, there are `chunks` chunks, nearest first.
  std::vector<std::vector<int64_t>> distances = {};
  // The maximum number of transfers in flight during a product; 1 for serial. It may exceed the number of chunks.
  int64_t depth = 1;
  // Multiprocessors that products leave to transfers in flight (Program::sms_left); 0 for serial.
  int64_t sms_left = 0;
  bool operator==(const Schedule&) const = default;
};

// Scales of operands of 8-bit floats. The value of an element is the stored number times its scale, in float32. A
// tensor has one scale, or one scale for each row: for each index along the axes that are not summed over.
struct Scaling {
  bool by_row = false;
  DType result;  // the dtype of the products
  // For a GatherMatmul with scales by row: the plan for the moved operand's scales, which are placed like the operand
  // without its summed axes.
  std::optional<Plan> plan = std::nullopt;
};

// Moves an operand by a plan, and multiplies it by other operands.
//
// Inputs of the program: the operand that moves, then each product's other operand, then each bias, then the scales of
// the operands in the same order. Outputs: each product's result, then the gathered operand if it is kept.
struct GatherMatmul {
  struct Product {
    Contraction axes;       // lhs is the operand that moves, rhs the other operand
    Layout other;           // of the other operand, on the same mesh
    bool has_bias = false;  // true: a bias along the last axis of the result is added
  };
  Plan plan;
  std::vector<Product> products;
  bool keeps_gathered = false;
  std::optional<Scaling> scaling = std::nullopt;
};

// Sums products, and moves the sum by a plan.
//
// Inputs of the program: both operands of each term, then the addend, if there is one, then the operands' scales. Each
// rank adds its part of the addend to its sum of products; the addend has the layout plan.src. Output: the moved sum.
struct MatmulScatter {
  struct Term {
    Contraction axes;
    Layout lhs;
    Layout rhs;
  };
  Plan plan;
  std::vector<Term> terms;
  bool has_addend = false;
  std::optional<Scaling> scaling = std::nullopt;
};

using Matmul = std::variant<GatherMatmul, MatmulScatter>;

// Returns the plan of the moved operand or result.
const Plan& plan_of(const Matmul& matmul);
// Returns the number of ranks that exchange data in the chunked step, this rank included; 1 if the plan has no steps.
int64_t num_partners(const Matmul& matmul);

// Returns all plans that the program executes: plan_of(matmul), then the plan of the scales if there is one.
std::vector<const Plan*> plans_of(const Matmul& matmul);

// Returns the reason why the method must be serial: why the step that would be chunked cannot be. Returns nullopt if it
// can be chunked. Example: "the last step of the operand's plan (slice) moves nothing".
std::optional<std::string> why_only_serial(const Matmul& matmul);

// Limits of PyTorch's product that waits for flags (torch.ops.symm_mem._async_input_mm).
constexpr int64_t kRowsOfFlaggedChunks = 256;  // the rows of a chunk are a multiple of this: a cluster of two tiles
constexpr int64_t kUnitOfFlaggedRows = 8;      // the elements of a row are a multiple of this: 16 bytes of bfloat16

// Returns the reason why method 'flags' cannot be used with parts cut into `shares` shares, or nullopt if it can. It
// requires one product of bfloat16 without a bias, on a device. The operand's parts must be even and consecutive in the
// gathered operand, and sizes must be multiples of the limits above. All ranks get the same result. Limits of the
// device are checked when the program runs.
std::optional<std::string> why_no_flags(const Matmul& matmul, int64_t shares);

// Returns true if the step to chunk exists and may be sent as the messages of a ring: if it is not an all-reduce. Does
// not check if the step can be chunked (why_only_serial).
bool has_ring(const Matmul& matmul);

// Returns a schedule, without its method, as "chunks[:depth[:sms_left]]". Trailing fields with their defaults are left
// out. Distances given by hand take the place of the number of chunks.
//
//   "4"       4 chunks, depth 1              "4:3:16"  4 chunks, depth 3, 16 multiprocessors left to transfers
//   "1.3_2"   two chunks sent: distances 1 and 3 together, then distance 2
//   "1.2_"    one chunk sent: distances 1 and 2; the "_" at the end tells distances from a number of chunks
std::string chunks_text(const Schedule& schedule);

// Returns the sizes and cuts, by axis, of the tensor that the plan moves and of the operands that do not move. In
// "0=6 1=5(0) float32; ...", axis 0 has 6 elements, and axis 1 has 5 and is cut by mesh dim 0. Debug modes compare this
// text between ranks. It does not depend on the order in which a rank stores the dims of a weight, in which ranks may
// differ.
std::string operands_text(const Matmul& matmul);

// Throws UserError if tensors and scales do not match, if products of their dtypes are not supported, if a number of
// the schedule is out of range, or if the schedule is not possible (why_only_serial, why_no_flags, has_ring).
void check(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
