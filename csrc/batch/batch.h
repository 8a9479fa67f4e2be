// A batch of tensors that are moved together. batch_plan.h has the plan of a batch.
//
// A batch has source tensors, destination tensors, and items. An item copies some elements of one source to one
// destination; its index map has the elements and their indices in the destination (exchange/index_map.h). Each tensor
// has a layout; the layouts may be on different meshes. The dims of an index map are the dims of the full tensor, even
// if a layout flattens some of them. Messages are sent in rounds. A *bucket* is a buffer for all messages that one rank
// sends and receives in one round (schedule.h).
//
// Sources with pending reductions are reduced before anything is sent. Elements are cast to the destination's dtype:
// after they are received if the source's dtype is smaller, otherwise before they are sent. Destination elements that
// no item writes keep their values. If two items write the same element, either value may remain.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

// A copy of some elements of one source to one destination.
struct BatchItem {
  int source = 0;       // index into Batch::sources
  int destination = 0;  // index into Batch::destinations
  IndexMap map;         // the elements to copy, and their indices in the destination
};

// The tensors and items to move, and the limits on memory.
struct Batch {
  static constexpr int64_t kDefaultBucketBytes = int64_t{64} << 20;
  static constexpr int64_t kDefaultBuckets = 3;

  std::vector<Layout> sources;
  std::vector<Layout> destinations;
  std::vector<BatchItem> items;
  int64_t bucket_bytes = kDefaultBucketBytes;  // maximum size of a bucket
  int64_t buckets = kDefaultBuckets;           // maximum number of buckets of a rank, hence of its rounds in flight
  // The sender group (item_family.h) that is tried first, modulo the number of groups. Has no effect on items that do
  // not alternate between sender groups. A caller that cuts a transfer into batches gives each batch another value, so
  // that the batches load different senders.
  int64_t first_sender_group = 0;

  // Throws UserError, which names the argument or the item's index, on a destination with pending reductions, a map
  // that exceeds a shape, a source or destination index out of range, bucket_bytes below one element, buckets below 1,
  // or first_sender_group below 0.
  void check() const;

  // Returns the ranks of all meshes, ascending, each once.
  std::vector<Rank> ranks() const;

  // Returns hashes with which ranks compare their batches; equal batches have equal hashes in every process. Hash 0 is
  // of the settings and the numbers of sources and destinations, hash 1 + i also of the items 0 to i and their layouts.
  // So if hash 1 + i is the first that differs between two batches, item i is the first item that differs. Layouts that
  // no item uses are not hashed. check() must pass.
  std::vector<uint64_t> digests() const;
  // Returns text such as "float32[8, 4] on dp=2 as [S(0)] -> float32[8, 4] on tp=2 as [R]", followed by the map unless
  // the item copies a full tensor to the same indices. check() must pass. Throws std::out_of_range if there is no such
  // item.
  std::string item_text(int item) const;

  // Returns the batch in the wire format (support/wire_format.h). Each distinct layout and map is written once. Equal
  // batches give equal bytes.
  std::string to_bytes() const;
  // Returns the batch that to_bytes() wrote. Throws UserError if the bytes are damaged or check() fails.
  static Batch from_bytes(std::string_view bytes);
};

// Returns a batch that moves full tensors. Each pair has the layouts of a source and of its destination. Throws
// UserError if the values of Layout::shape() differ in a pair. Does not call check().
Batch whole_tensors(std::vector<std::pair<Layout, Layout>> pairs, int64_t bucket_bytes = Batch::kDefaultBucketBytes,
                    int64_t buckets = Batch::kDefaultBuckets);

}  // namespace shardwright
