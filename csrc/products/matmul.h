// Matrix products next to a redistribute, as one program: what is moved goes in chunks, and chunks are multiplied while
// others travel.
//
// Two kinds. A GatherMatmul moves an operand, and multiplies it by one or several others that stay where they are: a
// gather of activations for a column-parallel layer, of a sharded weight, of a gradient along the summed axis. A
// MatmulScatter sums one or several products and moves the result: a reduce-scatter or an all-reduce behind a
// row-parallel layer, or an exchange to another placement. What moves goes by a plan. Of that plan one step is
// chunked, the last one of an operand's and the first one of a result's; the others go before and behind it whole.
//
// Chunks follow what the ranks have for each other, so parts may be uneven or empty, in any number of tensor dims:
//
//   ring        chunk d holds what comes from the rank at distance d (of a result: what goes there). The own part, at
//               distance 0, is multiplied while the first one travels; of a result it is multiplied last, while the
//               last one travels. Fewer chunks take several distances together, more cut each part.
//   collective  chunk j holds the j-th share of every part, moved by one all-gather, all-to-all, reduce-scatter or
//               all-reduce.
//   serial      everything is moved, then everything multiplied, or the other way round.
//
// Operands of 8-bit floats stand for their values by scales, which are inputs too: a Scaling says which. Scales of rows
// that move with their operand go ahead of its chunks, in one transfer; the own part does not wait for it.
//
// At most `depth` transfers are under way beside a product. Those of a gather are started so far ahead, into slots of
// one buffer that each hold a chunk from its arrival until it is multiplied: depth + 1 chunks are there at a time,
// unless the gathered operand is asked for. Those of a scatter are waited for so far behind, and as many blocks of the
// product wait to be sent. Sums over an axis that is cut into chunks are carried in float32 where the dtype is of 16
// bits.
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

enum class Method : uint8_t { kSerial, kRing, kCollective };

const char* method_name(Method method);        // "serial", "ring" or "collective"
Method parse_method(const std::string& name);  // throws UserError

constexpr int64_t kMaxChunks = 4096;
constexpr int64_t kMaxSmsLeft = 1024;

struct Schedule {
  Method method = Method::kSerial;
  int64_t chunks = 1;
  // Of a ring, by hand: the distances of each chunk, in the order in which they travel; all from 1 to the number of
  // partners less one, once. Empty: as many as `chunks` says, nearest first.
  std::vector<std::vector<int64_t>> distances = {};
  // Transfers under way beside a product, at most; of serial 1. As many as there are chunks, or more: all.
  int64_t depth = 1;
  // Multiprocessors that products leave to transfers under way beside them (Program::sms_left); of serial 0.
  int64_t sms_left = 0;
  bool operator==(const Schedule&) const = default;
};

// The value of an element of an operand is the element times its scale, in float32. One scale for all of a tensor, or
// one for each row: for each place along the axes that are not summed over.
struct Scaling {
  bool by_row = false;
  DType result;  // of the products
  // By row, of a GatherMatmul: the way of the moved operand's scales, which lie as it does, less the summed axes.
  std::optional<Plan> plan = std::nullopt;
};

// Inputs of its program: the operand that moves, then each product's other operand, then each bias, then the scales of
// the operands in the same order. Outputs: each product's result, then the operand as gathered if it is kept.
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

// Inputs of its program: both operands of each term, then what is added to their sum on this rank, if anything is: it
// lies as the plan's source; then the operands' scales. Output: the moved result.
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
// The ranks that take part in the step that is chunked.
int64_t num_partners(const Matmul& matmul);

// The plans that its program carries out: its own, and that of scales.
std::vector<const Plan*> plans_of(const Matmul& matmul);

// Whether something of it can be chunked; if not, why.
std::optional<std::string> why_only_serial(const Matmul& matmul);

// Whether the step that is chunked can go by messages: all but an all-reduce.
bool has_ring(const Matmul& matmul);

// All of a schedule but its method: "4", or the distances by hand, "1.3_2"; after a colon the depth where it is not 1,
// "4:3", and after another one the multiprocessors left to transfers where there are any, "4:3:16".
std::string chunks_text(const Schedule& schedule);

// Throws UserError where tensors and scales do not fit each other, where dtypes have no products, and where a method is
// asked for that why_only_serial excludes.
void check(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
