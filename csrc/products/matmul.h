// Matrix products and a redistribute as one program: data moves in chunks, and some chunks are multiplied while others
// are under way.
//
// There are two kinds. A GatherMatmul moves an operand, and multiplies it by one or several others that stay where they
// are: a gather of activations for a column-parallel layer, of a sharded weight, of a gradient along the summed axis. A
// MatmulScatter sums one or several products and moves the result: a reduce-scatter or an all-reduce after a
// row-parallel layer, or an exchange to another placement. The move is a plan, of which one step is chunked: the last
// step of an operand's plan, the first step of a result's. The other steps run whole, before or after it.
//
// Chunks follow what the ranks have for each other, so parts may be uneven or empty, in any number of tensor dims:
//
//   ring        Chunk d holds what comes from the rank at distance d (for a result: what goes there). For an operand,
//   the
//               rank's own part, at distance 0, is multiplied while the first chunk is under way; for a result it is
//               multiplied last, while the last chunk is under way. With fewer chunks, a chunk takes several distances
//               together; with more, each part is cut.
//   collective  Chunk j holds the j-th share of every part, moved by one all-gather, all-to-all, reduce-scatter or
//               all-reduce.
//   flags       Of an operand that is gathered: one product of everything, which waits for a flag of each chunk.
//               Parts are cut into `chunks` shares each, copied from the memory of peers. It is for devices whose
//               product can wait so, and never chosen unless asked for (why_no_flags).
//   serial      Everything is moved, then everything is multiplied, or the reverse.
//
// The values of operands of 8-bit floats are products with scales, which are inputs too (Scaling). Scales of rows that
// move with their operand are sent ahead of its chunks, in one transfer; the rank's own part does not wait for it.
//
// At most `depth` transfers are under way during a product. A gather starts transfers that far ahead, into slots of one
// buffer that each hold a chunk from its arrival until it is multiplied: depth + 1 chunks exist at a time, unless the
// gathered operand is kept. A scatter waits for transfers that it started so far before, and holds as many blocks that
// wait to be sent. Sums over an axis that is cut into chunks are accumulated in float32 if the dtype has 16 bits.
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
  // The most transfers under way during a product; 1 for serial. As many as there are chunks, or more, means all.
  int64_t depth = 1;
  // Multiprocessors that products leave to transfers under way (Program::sms_left); 0 for serial.
  int64_t sms_left = 0;
  bool operator==(const Schedule&) const = default;
};

// The value of an element of an operand is the element times its scale, in float32. There is one scale for a whole
// tensor, or one for each row, that is, for each place along the axes that are not summed over.
struct Scaling {
  bool by_row = false;
  DType result;  // the dtype of the products
  // For a GatherMatmul with scales by row: the plan for the moved operand's scales, which are placed like the operand
  // without its summed axes.
  std::optional<Plan> plan = std::nullopt;
};

// Inputs of its program: the operand that moves, then each product's other operand, then each bias, then the scales of
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

// Inputs of its program: both operands of each term, then the addend, if there is one, which is added to their sum on
// this rank and has the layout of the plan's source, then the operands' scales. Output: the moved result.
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
// The number of ranks that take part in the chunked step.
int64_t num_partners(const Matmul& matmul);

// The plans that its program carries out: its own, and that of its scales if they have one.
std::vector<const Plan*> plans_of(const Matmul& matmul);

// Returns why nothing can be chunked, or nothing if something can.
std::optional<std::string> why_only_serial(const Matmul& matmul);

// The operands that PyTorch's product that waits for flags takes (torch.ops.symm_mem._async_input_mm): chunks of whole
// clusters of two tiles, and rows of both operands and of the result that begin at multiples of 16 bytes.
constexpr int64_t kRowsOfFlaggedChunks = 256;
constexpr int64_t kUnitOfFlaggedRows = 8;

// Returns why method 'flags' cannot be used with parts cut into so many shares, or nothing if it can. It takes one
// product of bfloat16 without a bias, on a device, with an operand of even parts that follow each other in the gathered
// operand, and the sizes above. It is the same on all ranks. What depends on the device is checked when it runs.
std::optional<std::string> why_no_flags(const Matmul& matmul, int64_t shares);

// Returns whether the chunked step can be sent as messages, as any step but an all-reduce can.
bool has_ring(const Matmul& matmul);

// Formats everything of a schedule but its method: the number of chunks, "4", or the distances given by hand, "1.3_2";
// after a colon the depth if it is not 1, "4:3"; after another colon the multiprocessors left to transfers if there are
// any, "4:3:16".
std::string chunks_text(const Schedule& schedule);

// Sizes and cuts of the tensor that the plan moves and of the operands that do not move, by axis: "0=6 1=5(0) float32;
// ...", where mesh dim 0 cuts the second axis. It is the same however each rank orders the dims of its weights in
// memory. So is the plan if it has steps.
std::string operands_text(const Matmul& matmul);

// Throws UserError if tensors and scales do not fit each other, if dtypes have no products, or if the method is not
// possible (why_only_serial).
void check(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
