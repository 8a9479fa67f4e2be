// Times planning with Google Benchmark. benchmarks/planning.py runs it and adds Python and PyTorch.
//
// An iteration plans one pair of layouts with empty caches and computes the certificate except for peak memory.
// median_us and p90_us are over pairs, with the shortest time of each pair.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include "moves/plan.h"
#include "planning/certificate.h"
#include "planning/memory_limit.h"
#include "planning/plan_cache.h"
#include "support/error.h"

namespace shardwright {
namespace {

struct Setting {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  bool sums;      // sources have pending reductions too
  size_t stride;  // stride over the pairs
};

constexpr size_t kRepeats = 3;  // consecutive repetitions of a pair

// planning.py draws the same pairs.
const std::vector<Setting> kSettings{
    {{4, 4, 4}, {4096, 4096}, false, 7},
    {{4, 4, 4}, {4096, 4096}, true, 31},
    {{4, 4, 4}, {64, 64}, true, 31},
    {{8, 8, 8, 64}, {4096, 4096, 512}, false, 1301},
    {{8, 8, 8, 64}, {4096, 4096, 512}, true, 2003},
    {{8}, {1048576, 64}, true, 1},
    {{8, 8}, {1048576, 64}, true, 3},
    {{64, 8}, {1048576, 64}, true, 3},
    {{512, 8}, {1048576, 64}, true, 3},
    {{4096, 8}, {1048576, 64}, true, 3},
    {{32768, 8}, {1048576, 64}, true, 3},
    {{131072, 8}, {1048576, 64}, true, 3},
};

std::vector<Layout> layouts(const MeshPtr& mesh, const std::vector<int64_t>& shape, bool sums) {
  std::vector<Placement> choices{Placement::replicate()};
  for (size_t t = 0; t < shape.size(); ++t) choices.push_back(Placement::shard(static_cast<int64_t>(t)));
  if (sums) choices.push_back(Placement::partial(ReduceOp::kSum));
  size_t count = 1;
  for (int d = 0; d < mesh->ndim(); ++d) count *= choices.size();
  std::vector<Layout> all;
  for (size_t number = 0; number < count; ++number) {
    std::vector<Placement> placements(mesh->ndim());
    size_t left = number;
    for (int d = mesh->ndim() - 1; d >= 0; --d) {
      placements[d] = choices[left % choices.size()];
      left /= choices.size();
    }
    all.emplace_back(mesh, shape, DType::parse("float32"), placements);
  }
  return all;
}

std::vector<std::pair<Layout, Layout>> pairs(const Setting& setting) {
  std::vector<std::string> names;
  for (size_t d = 0; d < setting.mesh.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  const MeshPtr mesh = std::make_shared<Mesh>(names, setting.mesh);
  const std::vector<Layout> sources = layouts(mesh, setting.shape, setting.sums);
  const std::vector<Layout> destinations = layouts(mesh, setting.shape, false);
  std::vector<std::pair<Layout, Layout>> all;
  for (size_t i = 0; i < sources.size() * destinations.size(); i += setting.stride) {
    const Layout& src = sources[i / destinations.size()];
    const Layout& dst = destinations[i % destinations.size()];
    if (!(src == dst)) all.emplace_back(src, dst);
  }
  return all;
}

PlanOptions options() {
  PlanOptions options;
  options.topology = Topology::named("64x8");
  return options;
}

void plan_cold(benchmark::State& state, const Setting& setting) {
  const auto cases = pairs(setting);
  const PlanOptions wanted = options();
  std::vector<double> least(cases.size(), std::numeric_limits<double>::max());
  size_t at = 0;
  size_t iteration = 0;
  for (auto _ : state) {
    const auto& [src, dst] = cases[at];
    const auto start = std::chrono::steady_clock::now();
    const Plan plan = make_plan_within(src, dst, wanted, std::nullopt);
    benchmark::DoNotOptimize(certify(plan, 0));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(seconds.count());
    least[at] = std::min(least[at], seconds.count() * 1e6);
    at = ++iteration / kRepeats % cases.size();
  }
  std::erase(least, std::numeric_limits<double>::max());
  std::sort(least.begin(), least.end());
  state.counters["pairs"] = static_cast<double>(least.size());
  state.counters["median_us"] = least[least.size() / 2];
  state.counters["p90_us"] = least[least.size() * 9 / 10];
  state.counters["max_us"] = least.back();
}

void look_up(benchmark::State& state, const Setting& setting) {
  const auto cases = pairs(setting);
  PlanCache cache;
  std::vector<PlanRequest> requests;
  const ContextPtr context = PlanningContext::make(options());
  for (const auto& [src, dst] : cases) requests.push_back({src, dst, context});
  for (const PlanRequest& request : requests) cache.get(request);
  size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(cache.get(requests[at]));
    at = (at + 1) % requests.size();
  }
}

const bool kRegistered = [] {
  for (const Setting& setting : kSettings) {
    const std::string name = concat("mesh ", join(setting.mesh, "x"), ", shape ", join(setting.shape, "x"),
                                    setting.sums ? ", with sums" : "", ", stride ", setting.stride);
    benchmark::RegisterBenchmark(("plan, " + name).c_str(), plan_cold, setting)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(static_cast<int64_t>(kRepeats * pairs(setting).size()));
  }
  benchmark::RegisterBenchmark("look up, mesh 4x4x4", look_up, kSettings[0])->Unit(benchmark::kNanosecond);
  return true;
}();

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
