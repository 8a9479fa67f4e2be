// A batch of tensors that are moved together. batch_plan.h has the plan of a batch.
//
// A batch has source tensors, destination tensors, and items. An item copies some elements of one source to one
// destination. Every tensor has a layout, on a mesh of its own. Index maps count tensor dims, whether or not a layout
// flattens them. Sources with pending reductions are reduced before anything is sent. Elements are cast to the
// destination's dtype: after they are received if the source's dtype is smaller, otherwise before they are sent.
// Destination elements that no item writes keep their values. If two items write the same element, either value may
// remain.
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
  // Index of the first sender if candidate senders alternate. Consecutive batches vary it to balance the load.
  int64_t first_sender = 0;

  // Throws UserError that names the argument or the item's index: a destination with pending reductions, a map that
  // contradicts the shapes, an unknown tensor, bucket_bytes below one element, buckets below 1, first_sender below 0.
  void check() const;

  // The ranks of all meshes, ascending.
  std::vector<Rank> ranks() const;

  // Returns digests for ranks to compare: one for the settings, then one for each item, which covers all that comes
  // before it. Two batches agree up to the first digest that differs. Digests are the same in every process.
  std::vector<uint64_t> digests() const;
  // Returns "float32[8, 4] on dp=2 as [S(0)] -> float32[8, 4] on tp=2 as [R]", followed by the map unless the item is a
  // full tensor.
  std::string item_text(int item) const;

  // Writes each distinct layout and map once. Equal batches give equal bytes.
  std::string to_bytes() const;
  // Throws UserError if the bytes are damaged or check() fails.
  static Batch from_bytes(std::string_view bytes);
};

// Returns a batch that moves full tensors, each from the first to the second layout of its pair. Throws UserError if
// the shapes of a pair differ.
Batch whole_tensors(std::vector<std::pair<Layout, Layout>> pairs, int64_t bucket_bytes = Batch::kDefaultBucketBytes,
                    int64_t buckets = Batch::kDefaultBuckets);

}  // namespace shardwright
