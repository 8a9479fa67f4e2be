// Many tensors that move together: what is asked for. batch_plan.h says how it is done.
//
// A batch has source tensors, destination tensors, and items, each of which moves some elements of one source to one
// destination. Every tensor has a layout on a mesh of its own; maps count the dims of tensors, whether or not a layout
// flattens them. Pending reductions of sources are reduced before anything moves. Elements are cast to the
// destination's dtype, before they move if that is the smaller one, else when they have arrived. What no item writes is
// left as it is. If two items write the same element, either may come last.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

struct BatchItem {
  int source = 0;       // index into Batch::sources
  int destination = 0;  // index into Batch::destinations
  IndexMap map;
};

struct Batch {
  static constexpr int64_t kDefaultBucketBytes = int64_t{64} << 20;
  static constexpr int64_t kDefaultBuckets = 3;

  std::vector<Layout> sources;
  std::vector<Layout> destinations;
  std::vector<BatchItem> items;
  int64_t bucket_bytes = kDefaultBucketBytes;
  int64_t buckets = kDefaultBuckets;
  // The number of the holder that begins to send if several take turns; for batches that follow one another.
  int64_t first_turn = 0;

  // Throws UserError that names the argument, and the item by its number: destinations with pending reductions, a
  // map that contradicts the shapes, numbers of tensors that do not exist, bucket_bytes below one element, buckets
  // below 1, first_turn below 0.
  void check() const;

  // The ranks of all meshes, ascending.
  std::vector<Rank> ranks() const;

  // For the comparison of ranks: a number for the settings, and then one for each item, which depends on all that comes
  // before it. Two batches agree up to the first number that differs. The same in every process.
  std::vector<uint64_t> digests() const;
  // "float32[8, 4] on dp=2 as [S(0)] -> float32[8, 4] on tp=2 as [R]", with the map if the shapes are not the same
  std::string item_text(int item) const;

  // Layouts and maps are written once, however many items have them. Equal batches give equal bytes.
  std::string to_bytes() const;
  // Throws UserError on bytes that are damaged or that do not pass check().
  static Batch from_bytes(std::string_view bytes);
};

// The batch that moves each tensor whole, from the first to the second layout of its pair.
Batch whole_tensors(std::vector<std::pair<Layout, Layout>> pairs, int64_t bucket_bytes = Batch::kDefaultBucketBytes,
                    int64_t buckets = Batch::kDefaultBuckets);

}  // namespace shardwright
