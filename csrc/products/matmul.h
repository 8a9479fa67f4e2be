// Matrix products and a redistribute as one program: data moves in chunks, and some chunks are multiplied while others
// are being sent.
//
// There are two kinds. A GatherMatmul moves an operand, and multiplies it by one or several others that do not move: a
// gather of activations for a column-parallel layer, of a sharded weight, of a gradient along the summed axis. A
// MatmulScatter sums one or several products and moves the result: a reduce-scatter or an all-reduce after a
// row-parallel layer, or an exchange to another placement. The move is a plan, of which one step is chunked: the last
// step of an operand's plan, the first step of a result's. The other steps run unchunked, before or after it.
//
// Chunks follow the data that ranks exchange, so parts may be uneven or empty, in any number of tensor dims:
//
//   ring        Chunk d is received from the rank at distance d (for a result: sent to it). The rank's own part, at
//               distance 0, is multiplied while the first chunk of an operand is received, or while the last chunk of a
//               result is sent. With fewer chunks, a chunk takes several distances together; with more, each part is
//               cut.
//   collective  Chunk j holds the j-th share of every part, moved by one all-gather, all-to-all, reduce-scatter or
//               all-reduce.
//   flags       For a gathered operand: one product of everything, which waits for a flag of each chunk. Parts are cut
//               into `chunks` shares each, copied from the memory of peers. It needs a device whose product can wait
//               for flags, and is never chosen unless it is requested (why_no_flags).
//   serial      Everything is moved, then everything is multiplied, or the reverse.
//
// Operands of 8-bit floats are multiplied by scales, which are inputs too (Scaling). Scales of rows that move with
// their operand are sent before its chunks, in one transfer; the rank's own part does not wait for it.
//
// At most `depth` transfers are under way during a product. A gather starts transfers that many chunks ahead, into
// slots of one buffer that each hold a chunk from its receipt until it is multiplied: depth + 1 chunks exist at a time,
// unless the gathered operand is kept. A scatter waits for the transfer that it started `depth` chunks before, so up to
// `depth` blocks wait to be sent. Sums over an axis that is cut into chunks are accumulated in float32 if
// the dtype has 16 bits.
//
// A schedule is part of the spec: all ranks must use the same one (timeline.h).
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

enum class Method : uint8_t { kSerial, kRing, kCollective, kFlags };

const char* method_name(Method method);        // "serial", "ring", "collective" or "flags"
Method parse_method(const std::string& name);  // throws UserError

constexpr int64_t kMaxChunks = 4096;
constexpr int64_t kMaxSmsLeft = 1024;

struct Schedule {
  Method method = Method::kSerial;
  int64_t chunks = 1;
  // For a ring given by hand: the distances of each chunk, in the order in which chunks are sent. Each distance from 1
  // to the number of partners less one appears once. If empty, there are `chunks` chunks, nearest first.
  std::vector<std::vector<int64_t>> distances = {};
  // The maximum number of transfers under way in a product; 1 for serial. From the number of chunks on, it means all.
  int64_t depth = 1;
  // Multiprocessors that products leave to transfers under way (Program::sms_left); 0 for serial.
  int64_t sms_left = 0;
  bool operator==(const Schedule&) const = default;
};

// The value of an operand's element is the element times its scale, in float32. A tensor has one scale, or one scale
// for each row, that is, for each index along the axes that are not summed over.
struct Scaling {
  bool by_row = false;
  DType result;  // the dtype of the products
  // For a GatherMatmul with scales by row: the plan for the moved operand's scales, which are placed like the operand
  // without its summed axes.
  std::optional<Plan> plan = std::nullopt;
};

// Inputs of the program: the operand that moves, then each product's other operand, then each bias, then the scales of
// the operands in the same order. Outputs: each product's result, then the gathered operand if it is kept.
struct GatherMatmul {
  struct Product {
    Contraction axes;       // lhs is the operand that moves
    Layout other;           // on the same mesh
    bool has_bias = false;  // along the last axis of the result
  };
  Plan plan;
  std::vector<Product> products;
  bool keeps_gathered = false;
  std::optional<Scaling> scaling = std::nullopt;
};

// Inputs of the program: both operands of each term, then the addend, if there is one, then the operands' scales.
// Each rank adds the addend to its sum of terms; its layout is the source of the plan. Output: the moved result.
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

const Plan& plan_of(const Matmul& matmul);
// Returns the number of ranks that take part in the chunked step.
int64_t num_partners(const Matmul& matmul);

// Returns the plans that its program executes: its own, then the plan of its scales if they have one.
std::vector<const Plan*> plans_of(const Matmul& matmul);

// Returns the reason why no step can be chunked, or nullopt if one can.
std::optional<std::string> why_only_serial(const Matmul& matmul);

// The limits of PyTorch's product that waits for flags (torch.ops.symm_mem._async_input_mm): chunks are whole clusters
// of two tiles, and rows of both operands and of the result begin at multiples of 16 bytes.
constexpr int64_t kRowsOfFlaggedChunks = 256;
constexpr int64_t kUnitOfFlaggedRows = 8;

// Returns the reason why method 'flags' cannot be used with parts cut into `shares` shares, or nullopt if it can. It
// requires one product of bfloat16 without a bias, on a device, with an operand of even parts that follow each other in
// the gathered operand, and the sizes above. The answer is the same on all ranks. Limits of the device are checked when
// the program runs.
std::optional<std::string> why_no_flags(const Matmul& matmul, int64_t shares);

// True if the chunked step can be sent as messages: it can be any step but an all-reduce.
bool has_ring(const Matmul& matmul);

// Returns a schedule without its method as a string: the number of chunks, "4", or the distances given by hand,
// "1.3_2"; after a colon the depth if it is not 1, "4:3"; after another colon the multiprocessors left to transfers if
// there are any, "4:3:16".
std::string chunks_text(const Schedule& schedule);

// Returns the sizes and cuts, by axis, of the tensor that the plan moves and of the operands that do not move: "0=6
// 1=5(0) float32; ...", where mesh dim 0 cuts axis 1. Ranks may store a weight's dims in different orders. Their
// strings are still equal, and so are all of their plans that have steps.
std::string operands_text(const Matmul& matmul);

// Throws UserError if tensors and scales do not match, if products of their dtypes are not supported, or if the method
// is not possible (why_only_serial).
void check(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
