// Plans whose tensor is moved in segments, as in a pipeline: while one segment is in a step, the next segment is in the
// step before it. So a rank forwards one segment while it receives the next, and links within nodes and between nodes
// are in use at the same time.
//
// A segment is a set of indices of one tensor dim; each rank has the elements of its part at these indices. The
// *borders* of the tensor dim are the indices where some part of some layout of the plan begins or ends. Between two
// borders, each segment has one range. Example: 16 rows that are S(0) over 4 ranks before and over 2 after have borders
// at 0, 4, 8, 12 and 16. In two segments, the first has rows 0, 1, 4, 5, 8, 9, 12 and 13.
//
// A *block* is a range of indices that all parts of all layouts of the plan hold either fully or not at all. Blocks
// have one length and begin at its multiples; in the example, a block has 4 rows. Segments are *uniform* if there are
// blocks and the number of segments divides their length. Then every segment is a tensor with the same kind of
// placements whose tensor dim is `count` times shorter, and the costs and programs of one segment hold for all.
//
// *Non-uniform* segments: from any run of indices, segment i takes as many indices as the run has with remainder i
// modulo `count`. So its share of each run of a part differs from an equal share by less than one index. Example:
// 7 rows that are S(0) over 2 ranks before and over 3 after have parts of 4 and 3 rows, and of 3, 3 and 1 rows:
//
//   borders             0 . . 3 4 . 6 7
//   segment 0 of 2      0 1     4   6           2 + 2 rows before, and 2, 1 and 1 after
//   segment 1 of 2          2 3   5             2 + 1 rows before, and 1, 2 and 0 after
//
// The pipeline stages of two segments and two steps:
//
//   pipeline stage    0          1          2
//   crosses           segment 0  segment 1
//   is gathered                  segment 0  segment 1
#pragma once

#include <cstdint>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxSegments = 256;  // maximum number of segments of a plan

// Limits of non-uniform segments, each of which has its own program.
constexpr int64_t kMaxNonUniformSegments = 32;
constexpr int64_t kMaxBorders = 4096;                   // borders of the tensor dim
constexpr int64_t kMaxRanksInNonUniformSegments = 512;  // ranks of both meshes

// Returns the length of the blocks of a tensor dim, in indices, or 0 if the dim is empty or no length is known. A
// length is known if no layout of the plan flattens dims and, in each layout, digits (exchange/digits.h) describe all
// cuts of the tensor dim, or all except the last, which then must make runs (CutRule::makes_runs).
int64_t block_length(const Plan& plan, int tensor_dim);

// Returns true if a plan can be carried out in these segments. The segments of the plan itself are ignored. A single
// segment must have tensor dim 0. More segments, at most kMaxSegments, require a plan between two meshes and segments
// that are uniform or within the limits above. Each step must be local, or one collective in one round; no step may be
// a rearrangement.
bool can_run_in_segments(const Plan& plan, const Segments& segments);

// Returns true if all segments of a plan are uniform.
bool are_uniform(const Plan& plan);

// Returns the plan of each segment, as plans with one segment. Returns one plan for all segments if they are uniform.
// can_run_in_segments() must be true for the plan's segments.
std::vector<Plan> plans_of_segments(const Plan& plan);

// The parts of one tensor dim that the ranks of a layout hold, divided into non-uniform segments. The layout must be
// within the limits above.
class PartsInSegments {
 public:
  PartsInSegments(const Layout& layout, int tensor_dim);
  // Returns the number of indices of the longest part.
  int64_t longest() const { return longest_; }
  // Returns the largest number of indices that a part shares with one of `count` segments.
  int64_t largest_count_in_segment(int64_t count) const;

 private:
  std::vector<IntervalList> parts_;
  int64_t longest_ = 0;
};

}  // namespace shardwright
