// The placement of a tensor on one mesh dim, in DTensor's terms and spelling.
//
//   R          replicated
//   S(d)       tensor dim d is cut into chunks, as torch.chunk does
//   SS(d,f)    DTensor's _StridedShard(d, split_factor=f)
//   Ragged(d,3:1:4), Blocks(d,b), Cyclic(d,b), Owned(d,c), Packed(d,8:4:4), Pieces(d,0-2+6-8:2-6)
//              tensor dim d is cut by another rule (cut_rule.h)
//   P(op)      pending reduction; "P" alone is P(sum). Ops: sum avg min max product band bor bxor, and "norm p"
//              (DTensor's _NormPartial(p): each rank holds a p-norm of its own elements)
//
// parse() also reads what torch prints: "Shard(dim=0)", "Replicate()", "Partial(avg)", "_StridedShard(dim=0, sf=2)".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/cut_rule.h"
#include "layout/dtype.h"

namespace shardwright {

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBitAnd, kBitOr, kBitXor, kNorm };

// Returns the op as in P(op): "sum", "band", ...
const char* reduce_op_name(ReduceOp op);

// kReplicate is R, kShard S(d), kStridedShard SS(d,f), kPartial P(op). kShardByRule is every other shard.
enum class PlacementKind : uint8_t { kReplicate, kShard, kStridedShard, kPartial, kShardByRule };

// Fields that the kind does not use keep their defaults, so that == may compare all fields.
struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  int64_t dim = -1;              // shards: the tensor dim
  CutRule rule;                  // shards: the rule of the cut
  ReduceOp op = ReduceOp::kSum;  // partials: the pending reduction
  double norm_power = 0;         // P(norm p)

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {PlacementKind::kShard, dim, 1, ReduceOp::kSum, 0}; }
  static Placement strided_shard(int64_t dim, int64_t split_factor) {
    return {PlacementKind::kStridedShard, dim, split_factor, ReduceOp::kSum, 0};
  }
  // Returns the placement that cuts a tensor dim by a rule.
  static Placement cut(int64_t dim, const CutRule& rule) {
    if (rule.is_chunks()) return shard(dim);
    if (rule.is_strided_or_chunks()) return strided_shard(dim, rule.split_factor());
    return {PlacementKind::kShardByRule, dim, rule, ReduceOp::kSum, 0};
  }
  static Placement partial(ReduceOp op, double norm_power = 0) {
    return {PlacementKind::kPartial, -1, 1, op, norm_power};
  }

  bool is_replicate() const { return kind == PlacementKind::kReplicate; }
  // True for every placement that cuts a tensor dim.
  bool is_shard_like() const { return !is_replicate() && !is_partial(); }
  // True for Shard and StridedShard, the shards that torch has.
  bool is_plain_shard() const { return is_shard_like() && kind != PlacementKind::kShardByRule; }
  bool is_partial() const { return kind == PlacementKind::kPartial; }

  // Reads one placement as spelled above or as torch prints it. "Owned(c)" is Owned(0,c). Throws UserError that names
  // the text and the allowed forms, or the number that is out of range for the rule.
  static Placement parse(const std::string& text);
  std::string to_string() const;  // as spelled above

  bool operator==(const Placement& other) const = default;
};

// Splits "S(0),R,SS(1,2)" at the commas outside parentheses and parses each part. Throws UserError as
// Placement::parse() does, also if the text or a part is empty.
std::vector<Placement> parse_placements(const std::string& text);

// Returns an error text that names the allowed dtypes if elements of `dtype` cannot be reduced with `op`, else an empty
// string.
std::string why_not_reducible(ReduceOp op, const DType& dtype);

}  // namespace shardwright
