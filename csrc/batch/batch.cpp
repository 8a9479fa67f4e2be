#include "batch/batch.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "batch/item_family.h"
#include "planning/serialize.h"
#include "support/error.h"
#include "support/wire_format.h"

namespace shardwright {
namespace {

constexpr std::string_view kKind = "batch";  // kind in the first line of the wire format

// Numbers distinct strings in the order of their first appearance.
class Numbers {
 public:
  // Returns the number of a string, from 0 on.
  int of(std::string value) {
    return numbers_.try_emplace(std::move(value), static_cast<int>(numbers_.size())).first->second;
  }
  // Returns the number of distinct strings.
  size_t count() const { return numbers_.size(); }

 private:
  std::unordered_map<std::string, int> numbers_;
};

// Returns the map for which IndexMap::encoding() returns these integers. Throws UserError unless their number is a
// multiple of 5. Does not check the axes.
IndexMap map_of(const std::vector<int64_t>& encoding) {
  check_argument(encoding.size() % 5 == 0, "batch bytes: the number of integers of an index map", "a multiple of 5",
                 encoding.size());
  std::vector<MapAxis> axes;
  for (size_t i = 0; i < encoding.size(); i += 5) {
    // An integer outside the range of int becomes another invalid dim, which check() reports.
    const auto dim = [](int64_t integer) { return static_cast<int>(std::clamp<int64_t>(integer, -2, 1 << 20)); };
    axes.push_back({dim(encoding[i]), dim(encoding[i + 1]), encoding[i + 2], encoding[i + 3], encoding[i + 4]});
  }
  return IndexMap(std::move(axes));
}

}  // namespace

void Batch::check() const {
  check_argument(buckets >= 1, "buckets", "at least 1", buckets);
  check_argument(first_sender_group >= 0, "first_sender_group", "at least 0", first_sender_group);
  for (size_t i = 0; i < destinations.size(); ++i) {
    check_user(destinations[i].partial_dims().empty(), "destination ", i,
               " must be a layout without pending reductions, got ", destinations[i]);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    check_user(item.source >= 0 && item.source < static_cast<int64_t>(sources.size()), "source of item ", i,
               " must be ", IndexInRange{std::ssize(sources), "sources"}, ", got ", item.source);
    check_user(item.destination >= 0 && item.destination < static_cast<int64_t>(destinations.size()),
               "destination of item ", i, " must be ", IndexInRange{std::ssize(destinations), "destinations"}, ", got ",
               item.destination);
    item.map.check(sources[item.source].tensor_shape(), destinations[item.destination].tensor_shape(),
                   concat("item ", i));
    const int64_t item_bytes = wire_dtype(sources[item.source], destinations[item.destination]).size_bytes();
    check_user(bucket_bytes >= item_bytes, "bucket_bytes must be at least ", item_bytes, ", got ", bucket_bytes,
               ": item ", i, " has elements of ", item_bytes, " bytes");
  }
}

std::vector<Rank> Batch::ranks() const {
  std::set<const Mesh*> seen;
  std::vector<Rank> ranks;
  for (const std::vector<Layout>* side : {&sources, &destinations}) {
    for (const Layout& layout : *side) {
      if (!seen.insert(&layout.mesh()).second) continue;
      const std::vector<Rank> more = layout.mesh().ranks();
      ranks.insert(ranks.end(), more.begin(), more.end());
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    }
  }
  return ranks;
}

std::string Batch::to_bytes() const {
  std::map<const Mesh*, int> index_of_mesh;  // by address; equal meshes at other addresses are found by their bytes
  Numbers meshes;
  Numbers layouts;
  std::vector<std::pair<int, const Layout*>> written;  // mesh number and layout
  // Returns the number of a layout in the list of written layouts, and appends it to the list if it is new.
  const auto index_of = [&](const Layout& layout) {
    const auto [mesh, is_new_mesh] = index_of_mesh.try_emplace(&layout.mesh(), 0);
    if (is_new_mesh) {
      Writer out("mesh");
      write(out, layout.mesh());
      mesh->second = meshes.of(std::move(out).finish());
    }
    Writer out("layout");
    out.integer(mesh->second);
    write(out, layout);
    const int index = layouts.of(std::move(out).finish());
    if (index == static_cast<int>(written.size())) written.emplace_back(mesh->second, &layout);
    return static_cast<int64_t>(index);
  };
  std::vector<int64_t> layouts_of_sources;
  std::vector<int64_t> layouts_of_destinations;
  for (const Layout& layout : sources) layouts_of_sources.push_back(index_of(layout));
  for (const Layout& layout : destinations) layouts_of_destinations.push_back(index_of(layout));
  std::map<std::vector<int64_t>, int64_t> index_of_map;
  std::vector<std::vector<int64_t>> maps;  // encodings of the distinct maps
  std::vector<int64_t> items_as_integers;  // source, destination and map of each item
  for (const BatchItem& item : items) {
    std::vector<int64_t> map = item.map.encoding();
    const auto [found, is_new] = index_of_map.try_emplace(map, static_cast<int64_t>(maps.size()));
    if (is_new) maps.push_back(std::move(map));
    items_as_integers.insert(items_as_integers.end(), {item.source, item.destination, found->second});
  }
  std::vector<const Mesh*> written_meshes(meshes.count(), nullptr);
  for (const auto& [mesh, index] : index_of_mesh) written_meshes[index] = mesh;

  Writer out(kKind);
  out.integer(bucket_bytes);
  out.integer(buckets);
  out.integer(first_sender_group);
  out.list(written_meshes, [&](const Mesh* mesh) { write(out, *mesh); });
  out.list(written, [&](const auto& mesh_and_layout) {
    out.integer(mesh_and_layout.first);
    write(out, *mesh_and_layout.second);
  });
  out.integers(layouts_of_sources);
  out.integers(layouts_of_destinations);
  out.list(maps, [&](const std::vector<int64_t>& map) { out.integers(map); });
  out.integers(items_as_integers);
  return std::move(out).finish();
}

Batch Batch::from_bytes(std::string_view bytes) {
  Reader in(bytes, kKind);
  Batch batch;
  batch.bucket_bytes = in.integer();
  batch.buckets = in.integer();
  batch.first_sender_group = in.integer();
  const std::vector<MeshPtr> meshes = in.list([&] { return read_mesh(in); });
  const std::vector<Layout> layouts =
      in.list([&] { return read_layout(in, meshes.at(in.integer(0, static_cast<int64_t>(meshes.size()) - 1))); });
  // Reads a list of indices into `layouts`, and returns these layouts.
  const auto tensors = [&] {
    return in.list([&] { return layouts.at(in.integer(0, static_cast<int64_t>(layouts.size()) - 1)); });
  };
  batch.sources = tensors();
  batch.destinations = tensors();
  const std::vector<IndexMap> maps = in.list([&] { return map_of(in.integers()); });
  const std::vector<int64_t> items_as_integers = in.integers();
  in.finish();
  check_argument(items_as_integers.size() % 3 == 0, "batch bytes: the number of integers of the items",
                 "a multiple of 3", items_as_integers.size());
  for (size_t i = 0; i < items_as_integers.size(); i += 3) {
    // Returns items_as_integers[j]. Throws UserError unless it is an index into `count` sources, destinations or maps.
    const auto checked_index = [&](size_t j, int64_t count, const char* name, const char* plural) {
      const int64_t index = items_as_integers[j];
      check_user(index >= 0 && index < count, "batch bytes: the ", name, " of item ", i / 3, " must be ",
                 IndexInRange{count, plural}, ", got ", index);
      return static_cast<int>(index);
    };
    batch.items.push_back({checked_index(i, std::ssize(batch.sources), "source", "sources"),
                           checked_index(i + 1, std::ssize(batch.destinations), "destination", "destinations"),
                           maps[checked_index(i + 2, std::ssize(maps), "map", "maps")]});
  }
  batch.check();
  return batch;
}

std::vector<uint64_t> Batch::digests() const {
  constexpr uint64_t kOffset = 14695981039346656037u;  // FNV-1a
  constexpr uint64_t kPrime = 1099511628211u;
  uint64_t digest = kOffset;
  const auto add = [&](std::string_view bytes) {
    for (const char c : bytes) digest = (digest ^ static_cast<uint8_t>(c)) * kPrime;
  };
  std::unordered_map<const Mesh*, std::string> meshes;  // hash of each mesh, as text
  const auto add_layout = [&](const Layout& layout) {
    const auto [mesh, is_new] = meshes.try_emplace(&layout.mesh());
    if (is_new) {
      Writer out("mesh");
      write(out, layout.mesh());
      mesh->second = std::to_string(std::hash<std::string>()(std::move(out).finish()));
    }
    Writer out("layout");
    write(out, layout);
    add(mesh->second);
    add(std::move(out).finish());
  };
  add(concat(bucket_bytes, ",", buckets, ",", first_sender_group, ",", sources.size(), ",", destinations.size()));
  std::vector<uint64_t> digests{digest};
  for (const BatchItem& item : items) {
    add(concat(item.source, ",", item.destination, ",", item.map.to_string()));
    add_layout(sources[item.source]);
    add_layout(destinations[item.destination]);
    digests.push_back(digest);
  }
  return digests;
}

std::string Batch::item_text(int item) const {
  const BatchItem& batch_item = items.at(item);
  const Layout& src = sources[batch_item.source];
  const Layout& dst = destinations[batch_item.destination];
  const std::vector<int64_t> shape = src.tensor_shape();
  const bool is_whole = shape == dst.tensor_shape() && batch_item.map == IndexMap::identity(shape);
  return concat(src.to_string(), " -> ", dst.to_string(), is_whole ? "" : ", " + batch_item.map.to_string());
}

Batch whole_tensors(std::vector<std::pair<Layout, Layout>> pairs, int64_t bucket_bytes, int64_t buckets) {
  Batch batch;
  batch.bucket_bytes = bucket_bytes;
  batch.buckets = buckets;
  for (auto& [src, dst] : pairs) {
    const auto index = static_cast<int>(batch.items.size());
    check_user(src.shape() == dst.shape(), "items: item ", index, " must be two layouts of one shape, got ", src,
               " and ", dst);
    batch.items.push_back({index, index, IndexMap::identity(src.tensor_shape())});
    batch.sources.push_back(std::move(src));
    batch.destinations.push_back(std::move(dst));
  }
  return batch;
}

}  // namespace shardwright
