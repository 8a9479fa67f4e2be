// The functions with which all methods of attention, forward and backward, write their programs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/block_products.h"
#include "program/builder.h"

namespace shardwright {

// A row-major tensor [batch, heads, rows, depth] that begins at an offset (in elements) of a buffer.
struct HeadsTensor {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t depth = 0;  // 1 for an lse (program/attend.h)

  int64_t count() const { return batch * heads * rows * depth; }
  BufferRange range() const { return {buffer, offset, count()}; }
  // Return a view of the tensor that begins at row `row` of head `head`; rows_at is for an lse. The view has no number
  // of heads or rows: the instruction that uses it has these sizes.
  Heads at(int64_t head, int64_t row) const {
    return {buffer, offset + (head * rows + row) * depth, heads * rows * depth, rows * depth, depth};
  }
  HeadRows rows_at(int64_t head, int64_t row) const { return {buffer, offset + head * rows + row, heads * rows, rows}; }
};

// The tensors of a rank's forward program.
struct ForwardTensors {
  HeadsTensor q, k, v;
  HeadsTensor out, lse;  // to be written
  std::optional<PairMask> mask = std::nullopt;
};

// The tensors of a rank's backward program. `out` and `lse` are results of the forward, and `dout` is the gradient of
// `out`.
struct BackwardTensors {
  HeadsTensor q, k, v, out, dout, lse;
  HeadsTensor dq, dk, dv;  // gradients, to which products are added; zeros at first
  std::optional<PairMask> mask = std::nullopt;
};

// One rank's program while it is being written. A writer is for a set of ranks that share a sequence: all ranks, or in
// two_level the ranks of a node, or one rank of each node. Positions are relative to this set.
struct AttentionWriter {
  // Starts a program for all ranks of the attention, on mesh_of_programs(attention). Throws UserError as check() does,
  // or if the rank is not on the attention's mesh.
  AttentionWriter(const Attention& attention, Rank rank);
  // Continues the program of `all` for the ranks that differ from this rank along one mesh dim only. They share the
  // sequence of `attention`, which has one part for each of these ranks.
  AttentionWriter(const AttentionWriter& all, int mesh_dim, Attention attention, BlockProducts products);

  Attention attention;
  BlockProducts products;
  std::shared_ptr<ProgramBuilder> shared_builder;  // owns `builder`; shared by all writers of one program
  ProgramBuilder& builder;
  MeshPtr mesh;                         // of all ranks of the program
  MeshDimSet mesh_dims;                 // mesh dims along which the ranks that share the sequence differ
  std::vector<int64_t> mesh_positions;  // position on `mesh` of each rank that shares the sequence
  int64_t me;                           // this rank's position among the ranks that share the sequence
  int64_t num_ranks;                    // number of ranks that share the sequence

  int64_t rows() const { return attention.rows(me); }
  int64_t key_rows() const { return attention.key_rows(me); }
  // Return the position that is `distance` behind this rank, or ahead of it, on the ring of num_ranks positions.
  int64_t behind(int64_t distance) const { return (me - distance % num_ranks + num_ranks) % num_ranks; }
  int64_t ahead(int64_t distance) const { return (me + distance) % num_ranks; }
  // Return the index in Program::groups of the group of the ranks that share the sequence, and the index of a position
  // in this group.
  int group();
  int64_t member(int64_t position) const;

  // Assigns the following instructions to this chunk of a pipeline. Does nothing for serial: the cost model adds time
  // to the transfers of chunks (GemmModel::chunk_ps), but serial computes nothing during transfers.
  void begin_chunk(int chunk) {
    if (attention.method != AttentionMethod::kSerial) builder.begin_chunk(chunk);
  }

  // Declare the inputs of a forward or backward (compile.h) and begin its step. new_forward_tensors also declares the
  // outputs. new_backward_tensors sets the gradients to zeros; add_gradient_outputs must declare them as outputs once
  // all products were added, and casts them to Attention::dtype. The first two throw UserError unless the mask tensor
  // has 1 row or the rank's number of rows.
  ForwardTensors new_forward_tensors();
  BackwardTensors new_backward_tensors();
  void add_gradient_outputs(const BackwardTensors& tensors);

  // Allocates a tensor of zeros in sum_dtype(), with the sizes of `like`.
  HeadsTensor new_sum(HeadsTensor like);

 private:
  // Declares an input [batch, heads, rows, depth] in Attention::dtype.
  HeadsTensor new_input(int64_t heads, int64_t rows, int64_t depth);
  // Declares the mask tensor as an input; returns nullopt without one.
  std::optional<PairMask> new_mask_input();
  // Declares an output: the sum, cast to Attention::dtype.
  void add_sum_output(const HeadsTensor& sum);
};

// Returns the part of the mask tensor for a block of queries and a block of keys, for all heads; nullopt without a
// mask.
std::optional<PairMask> mask_of(const AttentionWriter& writer, std::optional<PairMask> mask, int queries, int keys);

// The first head and row of a box (append_box).
struct HeadsOffset {
  int64_t head = 0;
  int64_t row = 0;
};
// Appends a box (program/copy_boxes.h) that copies `heads` heads and `rows` rows of `src`, from `from` on, to `dst`,
// from `to` on, for all batches. Appends nothing if the box is empty.
void append_box(std::vector<Box>& boxes, const HeadsTensor& src, HeadsOffset from, const HeadsTensor& dst,
                HeadsOffset to, int64_t heads, int64_t rows);

// The rows of one rank's keys and values that another rank needs, and their places in a tensor: either all rows of the
// owner in their order, or only the needed blocks, one after the other.
struct KeyRows {
  std::vector<int> blocks;           // numbers of the needed blocks
  int64_t rows = 0;                  // number of rows of the needed blocks
  bool are_all = false;              // true if all rows of the owner are needed, or the owner has none
  std::map<int, int64_t> first_row;  // by block: the row of the tensor at which the block begins
};
// Returns the rows of the owner's keys that rank `by` needs.
KeyRows needed_rows(const AttentionWriter& writer, int64_t owner, int64_t by);
// Returns all rows of this rank's keys, at their places in its local tensors.
KeyRows own_rows(const AttentionWriter& writer);

// Keys and values that this rank holds or has received.
struct KeyValues {
  KeyRows rows;
  HeadsTensor k;
  HeadsTensor v;
};

// Sends every other rank the rows of this rank's k and v that the other rank needs, and receives the rows that this
// rank needs. At distance d, a rank receives from the rank d behind and sends to the rank d ahead. Distances are
// divided into groups, and each group is one transfer.
class KeyExchange {
 public:
  // `groups` must contain each distance from 1 to num_ranks - 1 once (distance_groups).
  KeyExchange(AttentionWriter& writer, HeadsTensor k, HeadsTensor v, std::vector<std::vector<int64_t>> groups);

  size_t num_groups() const { return groups_.size(); }
  const std::vector<int64_t>& distances(size_t group) const { return groups_[group]; }
  // Emits the start of a group's transfer, after copies of the rows to send if a rank does not need all rows. The
  // received data is kept until the transfer of the group after next starts.
  void start(size_t group);
  // Emits the wait for a group's transfer; nothing if the group had nothing to send or receive.
  void wait(size_t group) { writer_.builder.wait(tickets_[group]); }
  // Returns the data received from the rank that is `distance` behind. Its group must have been started.
  const KeyValues& received(int64_t distance) const { return received_.at(distance); }

 private:
  // Returns the number of elements of k and v in these rows.
  int64_t elements(const KeyRows& rows) const;

  AttentionWriter& writer_;
  HeadsTensor k_;
  HeadsTensor v_;
  std::vector<std::vector<int64_t>> groups_;
  std::vector<Ticket> tickets_;
  std::map<int64_t, KeyRows> needed_;      // by distance
  std::map<int64_t, KeyValues> received_;  // by distance
  BufferId slots_ = kMissingBuffer;        // one or two slots for received data, which groups use alternately
  int64_t slot_elements_ = 0;              // size of a slot
};

// Returns the groups of distances of a method that sends keys. For 4 ranks: {{1}, {2}, {3}} for ring, else {{1, 2, 3}}.
// For 1 rank: no groups.
std::vector<std::vector<int64_t>> distance_groups(AttentionMethod method, int64_t num_ranks);

// Heads that are computed as one product: each head of keys is shared by q_heads / kv_heads heads of queries.
struct HeadGroup {
  int64_t q_head = 0;    // first head of queries
  int64_t q_heads = 0;   // number of heads of queries
  int64_t kv_head = 0;   // first head of keys and values
  int64_t kv_heads = 0;  // number of heads of keys and values
};

// The heads that a rank computes: [q_begin, q_end) of queries and [kv_begin, kv_end) of keys and values, divided into
// groups. Head numbers in `groups` are relative to q_begin and kv_begin.
struct HeadShare {
  int64_t q_begin = 0;
  int64_t q_end = 0;
  int64_t kv_begin = 0;
  int64_t kv_end = 0;
  std::vector<HeadGroup> groups;

  int64_t q_heads() const { return q_end - q_begin; }
  int64_t kv_heads() const { return kv_end - kv_begin; }
};

// The heads and rows of a tensor: those of queries (also results, lse and their gradients), or those of keys and
// values.
enum class HeadKind : uint8_t { kQueries, kKeys };

// Returns the number of rows of a rank's tensor of this kind.
int64_t rows_of(const Attention& attention, HeadKind kind, int64_t position);

// Return the first head of a share in tensors of this kind, and the number of its heads.
int64_t first_head(const HeadShare& share, HeadKind kind);
int64_t num_heads(const HeadShare& share, HeadKind kind);

// The way to divide heads among ranks if there are fewer heads of keys than ranks.
enum class HeadSharing : uint8_t {
  kAll,  // divides heads of queries, so that all ranks have heads
  // Divides heads of keys, each with all its heads of queries: one rank computes the gradient of each head of keys, and
  // some ranks have no heads.
  kWholeHeadsOfKeys,
};

// Returns the share of a rank that computes all heads.
HeadShare all_heads(const Attention& attention);
// Returns the share of rank `index` of `count` ranks. If there are at least `count` heads of keys, heads of keys are
// divided, each with all its heads of queries; `sharing` has no effect then. With 8 heads of queries, 2 heads of keys
// and 4 ranks:
//
//   kAll                 ranks 0 to 3 have the queries [0, 2), [2, 4), [4, 6) and [6, 8); each head of keys is read by
//                        two ranks
//   kWholeHeadsOfKeys    rank 1 has the queries [0, 4), rank 3 has [4, 8), and ranks 0 and 2 have none
HeadShare share_of_heads(const Attention& attention, int64_t index, int64_t count, HeadSharing sharing);

}  // namespace shardwright
