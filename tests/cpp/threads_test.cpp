// Many threads use shared objects: plans, certificates, prepared copies, compilers. `make tsan` runs this under the
// thread sanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "layouts.h"
#include "moves/describe.h"
#include "planning/plan_cache.h"
#include "products/compile.h"
#include "products/serialize.h"
#include "products/timeline.h"
#include "program/copy_boxes.h"
#include "program/strided_copy.h"
#include "search/make_plan.h"

namespace shardwright {
namespace {

constexpr int kThreads = 8;

// Runs `body(thread)` on all threads, which start together.
void together(const std::function<void(int)>& body) {
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      body(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Layout layout_on(const MeshPtr& mesh, const std::string& placements) {
  return test::layout_of(mesh, {64, 48}, placements);
}

TEST(Threads, ShareAPlanCacheAndCertificates) {
  const MeshPtr mesh = test::mesh_of({2, 2, 2});
  const Layout dst = layout_on(mesh, "R,S(0),S(1)");
  const std::vector<Layout> sources{layout_on(mesh, "S(0),S(0),R"), layout_on(mesh, "S(1),R,S(0)"),
                                    layout_on(mesh, "P,P,P"), layout_on(mesh, "R,P,S(1)")};
  std::vector<std::string> expected;
  for (const Layout& src : sources) expected.push_back(to_string(make_plan(src, dst)));
  const ContextPtr context = PlanningContext::make({});
  PlanCache cache(3);  // fewer than the requested plans, so that some are evicted
  std::atomic<int64_t> asked{0};
  together([&](int t) {
    for (int turn = 0; turn < 40; ++turn) {
      const size_t i = static_cast<size_t>(t + turn) % sources.size();
      const CertifiedPlanPtr plan = cache.get({sources[i], dst, context});
      EXPECT_EQ(to_string(plan->plan()), expected[i]);
      EXPECT_GE(plan->certificate().predicted_ps, plan->certificate().least_ps);
      EXPECT_GE(plan->traffic().received_bytes_sum, plan->bound().bytes_sum);
      ++asked;
      if (turn % 16 == 7) cache.clear();
    }
  });
  EXPECT_EQ(cache.counts().hits + cache.counts().misses, asked);
  EXPECT_LE(cache.counts().size, 3);
}

TEST(Threads, ShareAPreparedCopy) {
  const std::vector<Box> boxes{{0, 0, {64, 96}, {128, 1}, {96, 1}}, {96, 64 * 96, {64, 32}, {128, 1}, {32, 1}}};
  std::vector<float> src(64 * 128);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i);
  std::vector<float> expected(src.size());
  copy_boxes(boxes, src.data(), expected.data(), sizeof(float));
  const StridedCopy copy(boxes, sizeof(float));
  const ParallelFor by_threads = [](int64_t count, int64_t grain, const auto& body) {
    std::vector<std::thread> threads;
    const int64_t share = std::max(grain, (count + 2) / 3);
    for (int64_t begin = 0; begin < count; begin += share) {
      threads.emplace_back([&body, begin, end = std::min(begin + share, count)] { body(begin, end); });
    }
    for (std::thread& thread : threads) thread.join();
  };
  together([&](int t) {
    for (int turn = 0; turn < 10; ++turn) {
      // Addresses have different alignments, and the first thread makes the table.
      std::vector<float> dst(src.size() + 4);
      run(copy, src.data(), dst.data() + t % 4, by_threads);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), dst.begin() + t % 4));
    }
  });
}

TEST(Threads, CompileAndPredictConcurrently) {
  const MeshPtr mesh = test::mesh_of({4});
  const Matmul matmul = GatherMatmul{make_plan(layout_on(mesh, "S(0)"), layout_on(mesh, "R")),
                                     {{Contraction::parse("mk,nk->mn"), layout_on(mesh, "R"), false}},
                                     false};
  const GemmModel model = GemmModel::named("h100");
  const std::string expected = compile(matmul, {Method::kRing, 4}, Rank{2}).to_string();
  const Schedule chosen = choose_fastest(matmul, model);
  together([&](int) {
    EXPECT_EQ(compile(matmul, {Method::kRing, 4}, Rank{2}).to_string(), expected);
    EXPECT_EQ(choose_fastest(matmul, model), chosen);
    EXPECT_EQ(matmul_from_bytes(to_bytes(matmul, chosen)).second, chosen);
  });
}

}  // namespace
}  // namespace shardwright
