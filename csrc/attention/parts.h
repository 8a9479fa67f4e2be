// Functions that both directions of attention, and all methods, write programs with.
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

// A row-major tensor [batch, heads, rows, depth] somewhere in a buffer.
struct HeadsTensor {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t depth = 0;  // 1 for an lse

  int64_t count() const { return batch * heads * rows * depth; }
  BufferRange range() const { return {buffer, offset, count()}; }
  Heads at(int64_t head, int64_t row) const {
    return {buffer, offset + (head * rows + row) * depth, heads * rows * depth, rows * depth, depth};
  }
  HeadRows rows_at(int64_t head, int64_t row) const { return {buffer, offset + head * rows + row, heads * rows, rows}; }
};

// Those of both directions.
struct ForwardTensors {
  HeadsTensor q, k, v;
  HeadsTensor out, lse;  // to be written
  std::optional<PairMask> mask = std::nullopt;
};

struct BackwardTensors {
  HeadsTensor q, k, v, out, dout, lse;
  HeadsTensor dq, dk, dv;  // sums, which begin as zeros
  std::optional<PairMask> mask = std::nullopt;
};

// One rank's program of an attention while it is being written, over ranks that share a sequence.
struct AttentionWriter {
  // All ranks of the attention. The mesh is that of its programs.
  AttentionWriter(const Attention& attention, Rank rank);
  // The same program, over the ranks that differ from this one along one dim of the mesh. They share the sequence of
  // `attention`, which has a part for each.
  AttentionWriter(const AttentionWriter& all, int mesh_dim, Attention attention, BlockProducts products);

  Attention attention;
  BlockProducts products;
  std::shared_ptr<ProgramBuilder> written;
  ProgramBuilder& builder;
  MeshPtr mesh;
  MeshDimSet mesh_dims;
  std::vector<int64_t> mesh_positions;  // of each rank that shares the sequence, on the mesh
  int64_t me;                           // this rank's position among them
  int64_t num_ranks;                    // that share the sequence

  int64_t rows() const { return attention.rows(me); }
  int64_t key_rows() const { return attention.key_rows(me); }
  // The position that is this far behind or ahead on the ring.
  int64_t behind(int64_t distance) const { return (me - distance % num_ranks + num_ranks) % num_ranks; }
  int64_t ahead(int64_t distance) const { return (me + distance) % num_ranks; }
  // The index of these ranks as a group of the program, and of a position in that group.
  int group();
  int64_t member(int64_t position) const;

  // The instructions that follow belong to this chunk of a pipeline. A serial method has none: nothing is computed
  // while keys travel, so its transfers take no longer than alone (GemmModel::chunk_ps).
  void begin_chunk(int chunk) {
    if (attention.method != AttentionMethod::kSerial) builder.begin_chunk(chunk);
  }

  // The inputs and the outputs of a direction, which begins here (compile.h). Sums are zeros; add_gradient_outputs
  // makes them outputs when they are complete.
  ForwardTensors new_forward_tensors();
  BackwardTensors new_backward_tensors();
  void add_gradient_outputs(const BackwardTensors& tensors);

  // A new tensor like this one, in the dtype in which gradients are summed, of zeros.
  HeadsTensor new_sum(HeadsTensor like);

 private:
  HeadsTensor new_input(int64_t heads, int64_t rows, int64_t depth);
  std::optional<PairMask> new_mask_input();
  void add_sum_output(const HeadsTensor& sum);
};

// The mask of two blocks, of all heads; none if there is no mask tensor.
std::optional<PairMask> mask_of(const AttentionWriter& writer, std::optional<PairMask> mask, int queries, int keys);

// Appends the box that copies `heads` heads and `rows` rows of one tensor, from a head and a row on, to another.
struct HeadsPlace {
  int64_t head = 0;
  int64_t row = 0;
};
void append_box(std::vector<Box>& boxes, const HeadsTensor& src, HeadsPlace from, const HeadsTensor& dst, HeadsPlace to,
                int64_t heads, int64_t rows);

// The keys or values of one rank that another needs, as they lie in memory: all its rows, or some blocks packed.
struct KeyRows {
  std::vector<int> blocks;
  int64_t rows = 0;
  bool are_all = false;              // of the owner's rows, in their order
  std::map<int, int64_t> first_row;  // by block
};
KeyRows needed_rows(const AttentionWriter& writer, int64_t owner, int64_t by);
// All of them, where their owner has them.
KeyRows own_rows(const AttentionWriter& writer);

// Keys and values that are at hand.
struct KeyValues {
  KeyRows rows;
  HeadsTensor k;
  HeadsTensor v;
};

// Sends every other rank what it needs of this rank's k and v, and receives what this rank needs, in one transfer for
// each group of distances: keys of the rank that is d behind come to this one while its own go to the one d ahead.
class KeyExchange {
 public:
  // `groups` hold each distance from 1 to the number of ranks less one once.
  KeyExchange(AttentionWriter& writer, HeadsTensor k, HeadsTensor v, std::vector<std::vector<int64_t>> groups);

  size_t num_groups() const { return groups_.size(); }
  const std::vector<int64_t>& distances(size_t group) const { return groups_[group]; }
  // Starts the transfer of a group. What arrives stays until that of the group after next is started.
  void start(size_t group);
  void wait(size_t group) { writer_.builder.wait(tickets_[group]); }
  // The data that came from the rank at this distance.
  const KeyValues& arrived(int64_t distance) const { return arrived_.at(distance); }

 private:
  int64_t elements(const KeyRows& rows) const;

  AttentionWriter& writer_;
  HeadsTensor k_;
  HeadsTensor v_;
  std::vector<std::vector<int64_t>> groups_;
  std::vector<Ticket> tickets_;
  std::map<int64_t, KeyRows> needed_;  // by distance
  std::map<int64_t, KeyValues> arrived_;
  BufferId slots_ = kMissingBuffer;
  int64_t slot_elements_ = 0;
};

// The groups of distances of a method other than ulysses.
std::vector<std::vector<int64_t>> distance_groups(AttentionMethod method, int64_t num_ranks);

// Heads of queries that share heads of keys evenly, so that they are one product.
struct HeadGroup {
  int64_t q_head = 0;
  int64_t q_heads = 0;
  int64_t kv_head = 0;
  int64_t kv_heads = 0;
};

// The heads that a rank computes. Numbers within groups count from the first head of the share.
struct HeadShare {
  int64_t q_begin = 0;
  int64_t q_end = 0;
  int64_t kv_begin = 0;
  int64_t kv_end = 0;
  std::vector<HeadGroup> groups;

  int64_t q_heads() const { return q_end - q_begin; }
  int64_t kv_heads() const { return kv_end - kv_begin; }
};

enum class HeadKind : uint8_t { kQueries, kKeys };

// The number of rows of a tensor of one kind that a rank holds.
int64_t rows_of(const Attention& attention, HeadKind kind, int64_t position);

// The heads of a tensor of one kind in a share: the first one, and how many.
int64_t first_head(const HeadShare& share, HeadKind kind);
int64_t num_heads(const HeadShare& share, HeadKind kind);

// The unit that is shared out if there are fewer heads of keys than ranks: heads of queries; or only whole heads of
// keys, so that some ranks have none, and the gradient of a head of keys is computed by one rank.
enum class HeadSharing : uint8_t { kAll, kWholeHeadsOfKeys };

HeadShare all_heads(const Attention& attention);
// The share of rank `index` of `count`. Where there are enough heads of keys, it is of whole ones.
HeadShare share_of_heads(const Attention& attention, int64_t index, int64_t count, HeadSharing sharing);

}  // namespace shardwright
