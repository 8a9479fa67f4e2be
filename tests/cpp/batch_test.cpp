// Runs batches on all ranks in one process, and compares every element with the maps, index by index.
#include "batch/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "batch/batch_certificate.h"
#include "batch/compile_batch.h"
#include "batch/item_family.h"
#include "exchange/bounds.h"
#include "layouts.h"
#include "random_pieces.h"
#include "simulate/machine.h"
#include "support/error.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;
using test::Placed;
using test::RandomPlacements;

constexpr double kUntouched = -1;

// A rank's part of a tensor in its own memory, with any strides.
struct Local {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  Machine::Payload memory;
};

Local local_with(const std::vector<std::vector<int64_t>>& lists, RandomPlacements& random) {
  Local local;
  std::vector<int> order;
  for (size_t d = 0; d < lists.size(); ++d) {
    local.shape.push_back(static_cast<int64_t>(lists[d].size()));
    order.push_back(static_cast<int>(d));
  }
  std::shuffle(order.begin(), order.end(), random.random());
  local.strides.resize(lists.size());
  int64_t stride = random.pick(1, 2);
  for (const int d : order) {
    local.strides[d] = stride;
    stride = stride * local.shape[d] + random.pick(0, 2);
  }
  local.memory.assign(std::max<int64_t>(stride, 1), kUntouched);
  return local;
}

// Calls visit(global index, place in memory) for every element of a part.
template <typename Visit>
void for_each_element(const std::vector<std::vector<int64_t>>& lists, Local& local, const Visit& visit) {
  int64_t count = 1;
  for (const int64_t size : local.shape) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> index(lists.size());
    int64_t rest = i;
    int64_t offset = 0;
    for (size_t d = lists.size(); d-- > 0;) {
      const int64_t at = rest % local.shape[d];
      rest /= local.shape[d];
      index[d] = lists[d][at];
      offset += at * local.strides[d];
    }
    visit(index, local.memory[offset]);
  }
}

// Converts an index in local dims, of which the first may stand for several flattened ones, to an index in the tensor.
std::vector<int64_t> in_tensor(const Layout& layout, const std::vector<int64_t>& index) {
  std::vector<int64_t> all(index.begin() + (layout.flattened() > 1 ? 1 : 0), index.end());
  if (layout.flattened() == 1) return all;
  const std::vector<int64_t> shape = layout.tensor_shape();
  int64_t rest = index[0];
  for (int d = layout.flattened(); d-- > 0; rest /= shape[d]) all.insert(all.begin(), rest % shape[d]);
  return all;
}

std::vector<int64_t> in_local_dims(const Layout& layout, const std::vector<int64_t>& index) {
  if (layout.flattened() == 1) return index;
  std::vector<int64_t> all{0};
  const std::vector<int64_t> shape = layout.tensor_shape();
  for (int d = 0; d < layout.flattened(); ++d) all[0] = all[0] * shape[d] + index[d];
  all.insert(all.end(), index.begin() + layout.flattened(), index.end());
  return all;
}

double value_of(int source, const std::vector<int64_t>& index) {
  int64_t value = source + 1;
  for (const int64_t i : index) value = value * 64 + i;
  return static_cast<double>(value);
}

// Returns the index in the source of an element of the destination, or nothing if the item does not write this element.
std::optional<std::vector<int64_t>> source_index(const IndexMap& map, size_t src_ndim,
                                                 const std::vector<int64_t>& dst_index) {
  std::vector<int64_t> index(src_ndim, 0);
  for (const MapAxis& axis : map.axes()) {
    const int64_t at = axis.dst_dim < 0 ? 0 : dst_index[axis.dst_dim] - axis.dst_begin;
    if (at < 0 || at >= axis.length) return std::nullopt;
    if (axis.src_dim >= 0) index[axis.src_dim] = axis.src_begin + at;
  }
  return index;
}

struct Problem {
  std::vector<Placed> sources;
  std::vector<Placed> destinations;
  Batch batch;

  int add_source(Placed placed) {
    batch.sources.push_back(placed.layout);
    sources.push_back(std::move(placed));
    return static_cast<int>(sources.size()) - 1;
  }
  int add_destination(Placed placed) {
    batch.destinations.push_back(placed.layout);
    destinations.push_back(std::move(placed));
    return static_cast<int>(destinations.size()) - 1;
  }
};

BatchStrides strides_of(const std::vector<Local>& sources, const std::vector<Local>& destinations) {
  BatchStrides strides;
  for (const Local& local : sources) strides.sources.push_back(local.strides);
  for (const Local& local : destinations) strides.destinations.push_back(local.strides);
  return strides;
}

// All ranks of a batch, run by the machine that also runs the programs of plans.
class Simulation {
 public:
  Simulation(const Problem& problem, RandomPlacements& random, int64_t world)
      : problem_(problem), plan_(Batch::from_bytes(problem.batch.to_bytes())) {
    const bool through_host = random.pick(0, 1) == 1;
    for (int64_t r = 0; r < world; ++r) {
      const Rank rank{r};
      std::vector<Local> sources;
      for (size_t s = 0; s < problem.sources.size(); ++s) {
        sources.push_back(local_of(problem.sources[s], rank, random));
        for_each_element(lists_of(problem.sources[s], rank), sources.back(),
                         [&](const std::vector<int64_t>& index, double& place) {
                           place = value_of(static_cast<int>(s), in_tensor(problem.sources[s].layout, index));
                         });
      }
      std::vector<Local>& destinations = destinations_[rank];
      for (const Placed& placed : problem.destinations) destinations.push_back(local_of(placed, rank, random));
      programs_[rank] = compile_batch(plan_, rank, world, strides_of(sources, destinations), through_host);
      std::vector<Machine::Payload> memory;
      for (Local& local : sources) memory.push_back(std::move(local.memory));
      for (const Local& local : destinations) memory.push_back(local.memory);
      machine_.add(rank, programs_[rank], std::move(memory));
    }
    memory_bytes_ = (through_host ? 2 : 1) * certificate_of(plan_).memory_bytes;
  }

  const BatchPlan& plan() const { return plan_; }
  // Returns the number of ranks that take part in more than one round.
  int64_t ranks_in_rounds() const {
    return std::count_if(programs_.begin(), programs_.end(), [](const auto& one) {
      const std::vector<Instruction>& all = one.second.instructions;
      return std::count_if(all.begin(), all.end(), [](const Instruction& instruction) {
               return std::holds_alternative<Wait>(instruction.operation);
             }) > 1;
    });
  }

  void run() {
    machine_.run();
    for (auto& [rank, locals] : destinations_) {
      for (size_t d = 0; d < locals.size(); ++d) locals[d].memory = machine_.destination(rank, d);
    }
  }

  void expect_right() {
    for (auto& [rank, locals] : destinations_) {
      for (size_t d = 0; d < locals.size(); ++d) expect_right(rank, static_cast<int>(d), locals[d]);
    }
  }

  // Compares the bytes that all ranks sent and received with the certificate, and with the elements that each rank
  // needs and lacks.
  void expect_certificate() {
    const BatchCertificate promised = certificate_of(plan_);
    BatchCertificate seen;
    for (const auto& [rank, program] : programs_) {
      int64_t sent = 0;
      int64_t messages = 0;
      for (const Instruction& instruction : program.instructions) {
        const auto* move = std::get_if<SendReceive>(&instruction.operation);
        if (move == nullptr) continue;
        for (const auto& message : move->sends) sent += message.range.count;
        messages += std::ssize(move->receives);
      }
      const int64_t received = machine_.received_bytes(rank);
      EXPECT_EQ(received, missing_bytes(rank));
      EXPECT_LE(machine_.peak_bytes(rank), memory_bytes_);
      EXPECT_EQ(machine_.peak_bytes(rank), program.peak_bytes());
      seen.received_bytes_max = std::max(seen.received_bytes_max, received);
      seen.received_bytes_sum += received;
      seen.sent_bytes_max = std::max(seen.sent_bytes_max, sent);
      seen.messages_max = std::max(seen.messages_max, messages);
      seen.messages_sum += messages;
    }
    EXPECT_EQ(seen.received_bytes_max, promised.received_bytes_max);
    EXPECT_EQ(seen.received_bytes_sum, promised.received_bytes_sum);
    EXPECT_EQ(seen.sent_bytes_max, promised.sent_bytes_max);
    EXPECT_EQ(seen.messages_max, promised.messages_max);
    EXPECT_EQ(seen.messages_sum, promised.messages_sum);
    EXPECT_TRUE(promised.messages_are_exact);
    EXPECT_LE(promised.sent_bytes_bound, promised.sent_bytes_max);
    EXPECT_LE(promised.rounds_bound, promised.rounds);
    EXPECT_LE(promised.memory_bytes, problem_.batch.bucket_bytes * problem_.batch.buckets);
  }

 private:
  static std::vector<std::vector<int64_t>> lists_of(const Placed& placed, Rank rank) {
    const auto found = placed.held.find(rank);
    return found == placed.held.end() ? std::vector<std::vector<int64_t>>(1) : found->second;
  }
  static Local local_of(const Placed& placed, Rank rank, RandomPlacements& random) {
    return local_with(lists_of(placed, rank), random);
  }

  void expect_right(Rank rank, int destination, Local& local) {
    int64_t wrong = 0;
    for_each_element(lists_of(problem_.destinations[destination], rank), local,
                     [&](const std::vector<int64_t>& local_index, double& place) {
                       const auto index = in_tensor(problem_.destinations[destination].layout, local_index);
                       double expected = kUntouched;
                       for (const BatchItem& item : problem_.batch.items) {
                         if (item.destination != destination) continue;
                         const size_t ndim = problem_.sources[item.source].layout.tensor_shape().size();
                         if (const auto from = source_index(item.map, ndim, index)) {
                           expected = value_of(item.source, *from);
                         }
                       }
                       wrong += place != expected ? 1 : 0;
                     });
    EXPECT_EQ(wrong, 0) << "of destination " << destination << " on rank " << rank;
  }

  int64_t missing_bytes(Rank rank) {
    int64_t bytes = 0;
    for (const BatchItem& item : problem_.batch.items) {
      const Placed& src = problem_.sources[item.source];
      const Placed& dst = problem_.destinations[item.destination];
      const auto held = src.held.find(rank);
      Local& local = destinations_[rank][item.destination];
      for_each_element(lists_of(dst, rank), local, [&](const std::vector<int64_t>& local_index, double&) {
        const auto index = in_tensor(dst.layout, local_index);
        auto from = source_index(item.map, src.layout.tensor_shape().size(), index);
        if (!from) return;
        from = in_local_dims(src.layout, *from);
        bool has = held != src.held.end();
        for (size_t d = 0; has && d < from->size(); ++d) {
          has = std::find(held->second[d].begin(), held->second[d].end(), (*from)[d]) != held->second[d].end();
        }
        bytes += has ? 0 : std::min(src.layout.dtype().size_bytes(), dst.layout.dtype().size_bytes());
      });
    }
    return bytes;
  }

  const Problem& problem_;
  const BatchPlan plan_;
  std::map<Rank, Program> programs_;
  std::map<Rank, std::vector<Local>> destinations_;
  Machine machine_;
  int64_t memory_bytes_ = 0;
};

DType any_dtype(RandomPlacements& random) {
  constexpr DType::Id kIds[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kComplex128};
  return kIds[random.pick(0, 4)];
}

// Adds a box of the source, with its dims in another order, as a box of a larger destination.
void add_box(Problem& problem, RandomPlacements& random, int64_t world) {
  const std::vector<int64_t> shape = random.shape(9);
  std::vector<MapAxis> axes;
  for (size_t d = 0; d < shape.size(); ++d) {
    MapAxis axis;
    axis.src_dim = static_cast<int>(d);
    axis.src_begin = random.pick(0, std::max<int64_t>(shape[d] - 1, 0));
    if (random.pick(0, 3) > 0 || shape[d] == 0) {
      axis.dst_dim = 0;  // any dim; chosen below
      axis.length = random.pick(0, shape[d] - axis.src_begin);
    }
    axes.push_back(axis);
  }
  if (random.pick(0, 2) == 0) axes.push_back({MapAxis::kNoDim, 0, 0, 0, 1});
  std::vector<size_t> order;
  for (size_t a = 0; a < axes.size(); ++a) {
    if (axes[a].dst_dim == 0) order.push_back(a);
  }
  std::shuffle(order.begin(), order.end(), random.random());
  std::vector<int64_t> dst_shape;
  for (const size_t a : order) {
    axes[a].dst_dim = static_cast<int>(dst_shape.size());
    axes[a].dst_begin = random.pick(0, 2);
    dst_shape.push_back(axes[a].dst_begin + axes[a].length + random.pick(0, 2));
  }
  std::shuffle(axes.begin(), axes.end(), random.random());
  const int source = problem.add_source(random.on_any_mesh(shape, world, any_dtype(random)));
  const int destination = problem.add_destination(random.on_any_mesh(dst_shape, world, any_dtype(random)));
  problem.batch.items.push_back({source, destination, IndexMap(axes)});
}

void add_whole(Problem& problem, RandomPlacements& random, int64_t world) {
  const std::vector<int64_t> shape = random.shape(9);
  const DType dtype = any_dtype(random);
  const Placed src = random.on_any_mesh(shape, world, dtype);
  const Placed dst = random.on_any_mesh(shape, world, dtype);
  for (int64_t i = 0, copies = random.pick(1, 3); i < copies; ++i) {
    const int source = problem.add_source(src);
    const int destination = problem.add_destination(dst);
    problem.batch.items.push_back({source, destination, IndexMap::identity(shape)});
  }
}

// Adds tensors of one shape that go into a stack, or out of one.
void add_stack(Problem& problem, RandomPlacements& random, int64_t world) {
  const std::vector<int64_t> shape = random.shape(5);
  const int64_t height = random.pick(1, 3);
  const bool unstacks = random.pick(0, 1) == 1;
  const auto dim = static_cast<int>(random.pick(0, static_cast<int64_t>(shape.size())));
  std::vector<int64_t> stacked = shape;
  stacked.insert(stacked.begin() + dim, height);
  const Placed stack = random.on_any_mesh(stacked, world);
  const int whole = unstacks ? problem.add_source(stack) : problem.add_destination(stack);
  for (int64_t i = 0; i < height; ++i) {
    const Placed placed = random.on_any_mesh(shape, world);
    const int one = unstacks ? problem.add_destination(placed) : problem.add_source(placed);
    std::vector<MapAxis> axes;
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      const int in_stack = d < dim ? d : d + 1;
      axes.push_back(unstacks ? MapAxis{in_stack, d, 0, 0, shape[d]} : MapAxis{d, in_stack, 0, 0, shape[d]});
    }
    axes.push_back(unstacks ? MapAxis{dim, MapAxis::kNoDim, i, 0, 1} : MapAxis{MapAxis::kNoDim, dim, 0, i, 1});
    problem.batch.items.push_back({unstacks ? whole : one, unstacks ? one : whole, IndexMap(axes)});
  }
}

class RandomBatches : public testing::TestWithParam<unsigned> {};

TEST_P(RandomBatches, EveryElementArrivesAndCostsMatchTheCertificate) {
  RandomPlacements random(GetParam());
  for (int trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE(testing::Message() << "seed " << GetParam() << ", trial " << trial);
    const int64_t world = random.pick(1, 9);
    Problem problem;
    problem.batch.buckets = random.pick(1, 3);
    problem.batch.bucket_bytes = random.pick(0, 1) == 0 ? random.pick(1024, 2000) : random.pick(10000, 100000);
    for (int64_t i = 0, items = random.pick(0, 8); i < items; ++i) {
      const int64_t kind = random.pick(0, 2);
      kind == 0   ? add_whole(problem, random, world)
      : kind == 1 ? add_box(problem, random, world)
                  : add_stack(problem, random, world);
    }
    Simulation simulation(problem, random, world);
    simulation.run();
    simulation.expect_right();
    simulation.expect_certificate();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomBatches, testing::Range(1u, 11u));

// Returns a layout with the elements that its own regions give each rank. region_test.cpp and indexed_exchange_test.cpp
// test regions.
Placed placed_by_region(const Layout& layout) {
  Placed made{layout, {}};
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    std::vector<std::vector<int64_t>>& lists = made.held[layout.mesh().rank_at(Position{p})];
    for (const IntervalList& list : layout.region(p)) {
      std::vector<int64_t>& indices = lists.emplace_back();
      for (const Interval& one : list) {
        for (int64_t i = one.begin; i < one.end; ++i) indices.push_back(i);
      }
    }
  }
  return made;
}

// Returns pieces in any order, some of them on several coordinates, or cuts of flattened dims.
Placed any_rearranged(RandomPlacements& random, const std::vector<int64_t>& shape, int64_t world) {
  const int64_t k = random.pick(1, std::min<int64_t>(world, 4));
  const int64_t first = random.pick(0, world - k);
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < k; ++r) ranks.push_back(first + r);
  std::shuffle(ranks.begin(), ranks.end(), random.random());
  const MeshPtr mesh = mesh_of({k}, ranks);
  const auto flattened = static_cast<int>(random.pick(1, static_cast<int64_t>(shape.size())));
  int64_t n = 1;
  for (int d = 0; d < flattened; ++d) n *= shape[d];
  std::vector<Placement> placements;
  if (random.pick(0, 2) == 0) {
    std::string sizes;
    int64_t left = n;
    for (int64_t c = 0; c < k; ++c) {
      const int64_t size = c + 1 == k ? left : random.pick(0, left);
      sizes += concat(c > 0 ? ":" : "", size);
      left -= size;
    }
    placements = parse_placements(concat("Ragged(0,", sizes, ")"));
  } else {
    const int64_t pieces = random.pick(1, 6);
    std::vector<std::vector<int64_t>> lists(k);
    for (int64_t i = 0; i < pieces; ++i) {
      for (int64_t copies = random.pick(1, 2); copies > 0; --copies) {
        std::vector<int64_t>& list = lists[random.pick(0, k - 1)];
        if (std::find(list.begin(), list.end(), i) == list.end()) list.push_back(i);
      }
    }
    std::string text;
    for (int64_t c = 0; c < k; ++c) {
      text += c > 0 ? ":" : "";
      std::shuffle(lists[c].begin(), lists[c].end(), random.random());
      std::string joined;
      for (const int64_t i : lists[c])
        joined += concat(joined.empty() ? "" : "+", n * i / pieces, "-", n * (i + 1) / pieces);
      text += joined;
    }
    placements = parse_placements(concat("Pieces(0,", text, ")"));
  }
  return placed_by_region(Layout(mesh, shape, DType::kFloat32, placements, {}, StridedMeaning::kAuto, flattened));
}

// Returns cyclic blocks of some dim, which may stand for several flattened ones.
Placed any_cyclic(RandomPlacements& random, const std::vector<int64_t>& shape, int64_t world) {
  const int64_t k = random.pick(1, std::min<int64_t>(world, 4));
  const int64_t first = random.pick(0, world - k);
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < k; ++r) ranks.push_back(first + r);
  std::shuffle(ranks.begin(), ranks.end(), random.random());
  const int64_t dim = random.pick(0, std::ssize(shape) - 1);
  const auto flattened = static_cast<int>(dim == 0 ? random.pick(1, std::ssize(shape)) : 1);
  const std::vector<Placement> placements = parse_placements(concat("Cyclic(", dim, ",", random.pick(1, 3), ")"));
  return placed_by_region(
      Layout(mesh_of({k}, ranks), shape, DType::kFloat32, placements, {}, StridedMeaning::kAuto, flattened));
}

// Adds a box of one tensor, with its dims in another order, that goes to a box of another tensor. One side or both are
// rearranged. Long dims are in cyclic blocks.
void add_rearranged(Problem& problem, RandomPlacements& random, int64_t world, bool are_long = false) {
  std::vector<int64_t> shape;
  for (int64_t d = 0, dims = random.pick(1, 3); d < dims; ++d) shape.push_back(random.pick(1, are_long ? 24 : 6));
  std::vector<int> order;
  for (size_t d = 0; d < shape.size(); ++d) order.push_back(static_cast<int>(d));
  const bool is_box = random.pick(0, 1) == 1;
  if (is_box) std::shuffle(order.begin(), order.end(), random.random());
  std::vector<int64_t> dst_shape(shape.size());
  std::vector<MapAxis> axes;
  for (size_t d = 0; d < shape.size(); ++d) {
    MapAxis axis{static_cast<int>(d), order[d], 0, 0, shape[d]};
    if (is_box && random.pick(0, 1) == 0) {
      axis.src_begin = random.pick(0, shape[d]);
      axis.length = random.pick(0, shape[d] - axis.src_begin);
      axis.dst_begin = random.pick(0, 2);
    }
    dst_shape[order[d]] = std::max<int64_t>(axis.dst_begin + axis.length + (is_box ? random.pick(0, 1) : 0), 1);
    axes.push_back(axis);
  }
  if (is_box) std::shuffle(axes.begin(), axes.end(), random.random());
  const auto any = [&](const std::vector<int64_t>& of, bool is_rearranged) {
    if (are_long && random.pick(0, 2) > 0) return any_cyclic(random, of, world);
    return is_rearranged ? any_rearranged(random, of, world) : random.on_any_mesh(of, world);
  };
  const int64_t which = random.pick(0, 2);
  const int source = problem.add_source(any(shape, which != 0));
  const int destination = problem.add_destination(any(dst_shape, which != 1));
  problem.batch.items.push_back({source, destination, IndexMap(axes)});
}

class RearrangedBatches : public testing::TestWithParam<unsigned> {};

TEST_P(RearrangedBatches, EveryElementArrivesAndCostsMatchTheCertificate) {
  RandomPlacements random(GetParam());
  for (int trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(testing::Message() << "seed " << GetParam() << ", trial " << trial);
    const int64_t world = random.pick(1, 6);
    Problem problem;
    problem.batch.bucket_bytes = random.pick(0, 1) == 0 ? random.pick(256, 512) : 1000000;
    for (int64_t i = 0, items = random.pick(1, 4); i < items; ++i) {
      random.pick(0, 3) == 0 ? add_whole(problem, random, world)
                             : add_rearranged(problem, random, world, GetParam() % 2 == 0);
    }
    Simulation simulation(problem, random, world);
    simulation.run();
    simulation.expect_right();
    simulation.expect_certificate();
    if (HasFailure()) {
      for (const BatchItem& item : problem.batch.items)
        ADD_FAILURE() << problem.batch.item_text(static_cast<int>(&item - problem.batch.items.data()));
      return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RearrangedBatches, testing::Range(1u, 9u));

// Programs for a million rows in cyclic blocks have few boxes, also if local tensors have gaps, a side is transposed,
// or dims are flattened.
TEST(Batch, BoxesDoNotGrowWithTheNumberOfBlocks) {
  struct Case {
    std::vector<int64_t> shape;
    const char* src;
    int flattened;
    std::vector<int64_t> dst_shape;
    const char* dst;
    IndexMap map;
  };
  const int64_t n = 1'000'003;
  const IndexMap whole = IndexMap::identity({n, 4});
  const IndexMap transposed({{0, 1, 0, 0, n}, {1, 0, 0, 0, 4}});
  const IndexMap columns({{0, 0, 0, 0, n}, {1, 1, 1, 0, 2}});
  const std::string quarters = concat("Ragged(0,", n, ":", n, ":", n, ":", n, ")");
  for (const auto& [shape, src, flattened, dst_shape, dst, map] :
       std::vector<Case>{{{n, 4}, "Cyclic(0,1)", 1, {n, 4}, "S(0)", whole},
                         {{n, 4}, "Cyclic(0,64)", 1, {n, 4}, "Cyclic(0,3)", whole},
                         {{n, 4}, "Cyclic(0,1)", 1, {4, n}, "Cyclic(1,5)", transposed},
                         {{n, 4}, "Cyclic(0,1)", 1, {n, 2}, "S(0)", columns},
                         {{n, 4}, quarters.c_str(), 2, {n, 4}, "Cyclic(0,1)", whole},
                         {{n, 4}, quarters.c_str(), 2, {n, 4}, "S(1)", whole}}) {
    SCOPED_TRACE(concat(src, " to ", dst));
    Batch batch;
    batch.sources.emplace_back(mesh_of({4}), shape, DType::kFloat32, parse_placements(src), ShardOrder{},
                               StridedMeaning::kAuto, flattened);
    batch.destinations.push_back(layout_of(mesh_of({3}, {1, 2, 3}), dst_shape, dst));
    batch.items.push_back({0, 0, map});
    const BatchPlan plan(batch);
    for (int64_t r = 0; r < 4; ++r) {
      size_t boxes = 0;
      int64_t elements = 0;
      int64_t expected = 0;
      for (const Instruction& instruction : compile_batch(plan, Rank{r}, 4, {{{7, 1}}, {{7, 1}}}).instructions) {
        if (const auto* copy = std::get_if<Copy>(&instruction.operation); copy != nullptr && instruction.step > 0) {
          boxes += copy->boxes.size();
          for (const Box& box : copy->boxes) {
            elements += std::accumulate(box.sizes.begin(), box.sizes.end(), int64_t{1}, std::multiplies<>());
          }
        }
        if (const auto* move = std::get_if<SendReceive>(&instruction.operation)) {
          for (const auto* messages : {&move->sends, &move->receives}) {
            for (const auto& message : *messages) expected += message.range.count / 4;
          }
        }
      }
      EXPECT_EQ(elements, expected);
      EXPECT_LE(boxes, 100u) << "rank " << r;
    }
  }
}

// All senders of a large tensor have a copy of it, in different orders, and share the load.
TEST(Batch, SendersOfRearrangedTensorsAreBalanced) {
  const MeshPtr from = mesh_of({2});
  const MeshPtr to = mesh_of({2}, {2, 3});
  const Layout src = layout_of(from, {1 << 16}, "Pieces(0,0-65536:32768-65536+0-32768)");
  const BatchCertificate certificate =
      certificate_of(BatchPlan(whole_tensors({{src, layout_of(to, {1 << 16}, "S(0)")}})));
  EXPECT_EQ(certificate.received_bytes_max, 4 << 15);
  EXPECT_EQ(certificate.sent_bytes_max, 4 << 15);
  EXPECT_EQ(certificate.sent_bytes_bound, 4 << 15);
  EXPECT_TRUE(certificate.sent_bound_is_exact);
}

// First, small replicated tensors are stacked, such as experts, each by its own map. Then large tensors alternate with
// small ones.
TEST(Batch, ReplicasAlternateAcrossItemsAndBatches) {
  const MeshPtr from = mesh_of({8});
  const MeshPtr to = mesh_of({8}, {8, 9, 10, 11, 12, 13, 14, 15});
  Batch stacked;
  stacked.destinations.push_back(layout_of(to, {128, 1024}, "S(0)"));
  for (int i = 0; i < 128; ++i) {
    stacked.sources.push_back(layout_of(from, {1024}, "R"));
    stacked.items.push_back({i, 0, IndexMap({{MapAxis::kNoDim, 0, 0, i, 1}, {0, 1, 0, 0, 1024}})});
  }
  EXPECT_EQ(certificate_of(BatchPlan(stacked)).sent_bytes_max, 128 * 4096 / 8);
  std::vector<std::pair<Layout, Layout>> pairs;
  for (int i = 0; i < 64; ++i) {
    for (const int64_t n : {3000, 100}) pairs.emplace_back(layout_of(from, {n}, "R"), layout_of(to, {n}, "Owned(0,0)"));
  }
  const BatchCertificate certificate = certificate_of(BatchPlan(whole_tensors(pairs)));
  EXPECT_LE(certificate.sent_bytes_max, certificate.sent_bytes_bound + 12000);  // a large tensor
  // Consecutive batches: each begins with the sender after that of the batch before.
  std::map<int64_t, int64_t> sent;
  for (int64_t sender = 0; sender < 8; ++sender) {
    Batch one = whole_tensors({{layout_of(from, {1000}, "R"), layout_of(to, {1000}, "Owned(0,0)")}});
    one.first_sender_group = sender;
    const BatchPlan plan(Batch::from_bytes(one.to_bytes()));
    for (int64_t r = 0; r < 8; ++r) {
      for (const Instruction& instruction : compile_batch(plan, Rank{r}, 16, {{{1}}, {{1}}}).instructions) {
        const auto* move = std::get_if<SendReceive>(&instruction.operation);
        if (move != nullptr && !move->sends.empty()) sent[r] += move->sends[0].range.count;
      }
    }
  }
  for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(sent[r], 4000) << "rank " << r;
}

// If several ranks hold a row, and columns are cut too, a message of one item has several parts.
TEST(Batch, MessagesOfSeveralPartsAreSentInRounds) {
  RandomPlacements random(3);
  test::RandomPieces pieces(3, 40);
  int64_t ranks_in_rounds = 0;
  int64_t above_the_mean = 0;
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(testing::Message() << "trial " << i);
    const int64_t rows = random.pick(30, 63);
    Problem problem;
    problem.batch.bucket_bytes = random.pick(3000, 40000);
    problem.add_source(placed_by_region(pieces.layout(rows, 2, "S(1)", 64, "complex128")));
    problem.add_destination(placed_by_region(pieces.layout(rows, 2, "Cyclic(0,3)", 64, "complex128")));
    problem.batch.items.push_back({0, 0, IndexMap::identity({rows, 64})});
    Simulation simulation(problem, random, 11);
    simulation.run();
    simulation.expect_right();
    simulation.expect_certificate();
    const BatchCertificate certificate = certificate_of(simulation.plan());
    ASSERT_TRUE(certificate.sent_bound_is_exact);
    const ExchangeBound bound = exchange_bound(problem.batch.sources[0], problem.batch.destinations[0]);
    ASSERT_EQ((certificate.sent_bytes_bound + 15) / 16 * 16, bound.direct_sent_bytes_max);  // in whole elements
    const int64_t least = std::max(certificate.received_bytes_max, certificate.sent_bytes_bound);
    ASSERT_LE(certificate.sent_bytes_max, std::max(least + least / 20, ItemFamily::kLeastShareBytes));
    const int64_t sources = problem.batch.sources[0].mesh().size();
    above_the_mean += certificate.sent_bytes_bound > (certificate.received_bytes_sum + sources - 1) / sources + 16;
    ranks_in_rounds += simulation.ranks_in_rounds();
    if (HasFailure()) return;
  }
  EXPECT_GT(ranks_in_rounds, 3);
  EXPECT_GT(above_the_mean, 5);
}

TEST(Batch, PendingSumsAreReducedToTheLayoutThatLeavesTheFewestBytes) {
  const MeshPtr mesh = mesh_of({4});
  const MeshPtr other = mesh_of({2}, {4, 5});
  const auto reduced = [](const Layout& src, const Layout& dst) {
    const BatchPlan plan(whole_tensors({{src, dst}}));
    EXPECT_EQ(plan.reductions().size(), 1u);
    return plan.reductions()[0].after.placements_string();
  };
  EXPECT_EQ(reduced(layout_of(mesh, {8, 8}, "P"), layout_of(mesh, {8, 8}, "S(1)")), "[S(1)]");
  EXPECT_EQ(reduced(layout_of(mesh, {2, 64}, "P"), layout_of(other, {2, 64}, "R")), "[S(1)]");
  EXPECT_EQ(reduced(layout_of(mesh, {}, "P"), layout_of(other, {}, "R")), "[R]");
  // Each rank keeps a quarter of four tensors of 1 KiB, and nothing is left to move.
  const Layout src = layout_of(mesh, {16, 16}, "P");
  const Layout dst = layout_of(mesh, {16, 16}, "S(0)");
  const BatchCertificate certificate =
      certificate_of(BatchPlan(whole_tensors({{src, dst}, {src, dst}, {src, dst}, {src, dst}})));
  EXPECT_EQ(certificate.reductions, 4);
  EXPECT_EQ(certificate.received_bytes_sum, 0);
  EXPECT_EQ(certificate.reduction_bytes_sum, 4 * 3 * 1024);
  EXPECT_EQ(certificate.reduced_bytes_max, 4 * 256);
  EXPECT_GE(certificate.reducing_bytes_max, 3 * 256);  // contributions of three other ranks
  EXPECT_EQ(certificate.memory_bytes, certificate.reduced_bytes_max + certificate.reducing_bytes_max);
}

TEST(Batch, ATensorLargerThanABucketIsSentInRounds) {
  RandomPlacements random(1);
  const MeshPtr from = mesh_of({2}, {0, 1});
  const MeshPtr to = mesh_of({3}, {2, 3, 4});
  Problem problem;
  problem.batch.bucket_bytes = 64;
  problem.add_source(test::placed(from, {0, 1}, {32, 8}, parse_placements("S(0)"), {0}));
  problem.add_destination(test::placed(to, {2, 3, 4}, {32, 8}, parse_placements("S(1)"), {0}));
  problem.batch.items.push_back({0, 0, IndexMap::identity({32, 8})});
  Simulation simulation(problem, random, 5);
  simulation.run();
  simulation.expect_right();
  simulation.expect_certificate();
  const BatchCertificate certificate = certificate_of(simulation.plan());
  EXPECT_EQ(certificate.rounds_bound, 8);  // each source sends 512 bytes in buckets of 64
  EXPECT_LE(certificate.rounds, 12);       // messages are rounded up
  EXPECT_EQ(certificate.memory_bytes, 3 * 64);
}

TEST(Batch, BoundOfOneItemEqualsItsExchangeBound) {
  RandomPlacements random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<int64_t> shape = random.shape(9);
    const Placed src = random.on_any_mesh(shape, 8);
    const Placed dst = random.on_any_mesh(shape, 8);
    const ExchangeBound bound = exchange_bound(src.layout, dst.layout);
    const BatchPlan plan(whole_tensors({{src.layout, dst.layout}}));
    EXPECT_EQ(certificate_of(plan).received_bytes_max, bound.received_bytes_max);
    EXPECT_EQ(certificate_of(plan).received_bytes_sum, bound.received_bytes_sum);
    const int64_t in_bytes = (bound.direct_sent.numerator * 4 + bound.direct_sent.denominator - 1) /
                             bound.direct_sent.denominator;  // bytes; an element may be split here
    EXPECT_EQ(certificate_of(plan).sent_bytes_bound, in_bytes) << src.layout.to_string() << dst.layout.to_string();
  }
}

TEST(Batch, SendersOfSmallTensorsAlternate) {
  const MeshPtr from = mesh_of({8});
  const MeshPtr to = mesh_of({1}, {8});
  std::vector<std::pair<Layout, Layout>> pairs;
  for (int i = 0; i < 80; ++i) pairs.emplace_back(layout_of(from, {16}, "R"), layout_of(to, {16}, "R"));
  const BatchPlan plan(whole_tensors(pairs));
  EXPECT_EQ(certificate_of(plan).kinds, 8);
  EXPECT_EQ(certificate_of(plan).messages_sum, 8);  // each sender has all its tensors in one message
  EXPECT_EQ(certificate_of(plan).sent_bytes_max, 10 * 16 * 4);
  EXPECT_EQ(certificate_of(plan).sent_bytes_bound, 10 * 16 * 4);
}

TEST(Batch, LargeTensorsAreSplitEvenlyOverSenders) {
  const MeshPtr from = mesh_of({8});
  const MeshPtr to = mesh_of({1}, {8});
  const std::vector<int64_t> shape{8, 1 << 14};
  const BatchPlan plan(whole_tensors({{layout_of(from, shape, "R"), layout_of(to, shape, "R")}}));
  EXPECT_EQ(certificate_of(plan).sent_bytes_max, 4 << 14);
  EXPECT_EQ(certificate_of(plan).sent_bytes_bound, 4 << 14);
}

TEST(Batch, EqualBatchesSerializeToEqualBytes) {
  const auto batch = [] {  // makes new meshes each time
    const MeshPtr from = mesh_of({2, 2});
    const MeshPtr to = mesh_of({3}, {1, 2, 5});
    return whole_tensors({{layout_of(from, {8}, "S(0),R"), layout_of(to, {8}, "R")},
                          {layout_of(from, {8}, "S(0),R"), layout_of(from, {8}, "R,R")}});
  };
  const std::string bytes = batch().to_bytes();
  EXPECT_EQ(bytes, batch().to_bytes());
  EXPECT_EQ(bytes, Batch::from_bytes(bytes).to_bytes());
  EXPECT_THROW(Batch::from_bytes(bytes.substr(1)), UserError);
}

std::string error_of(const Batch& batch) {
  try {
    BatchPlan{batch};
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Batch, ErrorsNameTheItemAndTheAllowedValues) {
  const MeshPtr mesh = mesh_of({2});
  const auto batch = [&](IndexMap map, const std::string& dst = "R") {
    return Batch{{layout_of(mesh, {4, 6}, "R")}, {layout_of(mesh, {12, 6}, dst)}, {{0, 0, std::move(map)}}};
  };
  const auto expect = [&](const Batch& wrong, const std::string& text) {
    EXPECT_NE(error_of(wrong).find(text), std::string::npos) << error_of(wrong);
  };
  EXPECT_EQ(error_of(batch(IndexMap({{0, 0, 0, 4, 4}, {1, 1, 0, 0, 6}}))), "");
  expect(batch(IndexMap({{0, 0, 0, 9, 4}, {1, 1, 0, 0, 6}})),
         "item 0: range of destination dim 0 must be within [0, 12), got begin 9 and length 4");
  expect(batch(IndexMap({{0, 0, 1, 0, 4}, {1, 1, 0, 0, 6}})),
         "item 0: range of source dim 0 must be within [0, 4), got begin 1 and length 4");
  expect(batch(IndexMap({{0, 0, 0, std::numeric_limits<int64_t>::max(), 4}, {1, 1, 0, 0, 6}})),
         "must be within [0, 12), got begin 9223372036854775807 and length 4");
  expect(batch(IndexMap({{0, 0, 0, 0, 4}})), "source dim 1 must be on one axis, got 0");
  expect(batch(IndexMap({{0, 0, 0, 0, 4}, {1, 1, 0, 0, 6}, {1, -1, 0, 0, 1}})), "must be on one axis, got 2");
  expect(batch(IndexMap({{0, 0, 0, 0, 4}, {1, -1, 0, 0, 6}, {-1, 1, 0, 0, 1}})), "must be 1, got 6");
  expect(batch(IndexMap({{0, 0, 0, 0, 4}, {1, 2, 0, 0, 6}})),
         "destination dim must be a dim of the shape [12, 6], got 2");
  expect(batch(IndexMap({{0, 0, 0, 0, 4}, {1, 1, 0, 0, 6}}), "P"), "destination 0 must be");
  Batch small = batch(IndexMap({{0, 0, 0, 4, 4}, {1, 1, 0, 0, 6}}));
  small.bucket_bytes = 3;
  expect(small, "bucket_bytes must be at least 4, got 3: item 0");
  small.bucket_bytes = 4;
  small.buckets = 0;
  expect(small, "buckets must be at least 1, got 0");
  small.buckets = 1;
  small.items[0].source = 1;
  expect(small, "source of item 0 must be in [0, 0], got 1");
  small.sources.clear();
  expect(small, "source of item 0 must be left out, because there are no sources, got 1");
}

}  // namespace
}  // namespace shardwright
