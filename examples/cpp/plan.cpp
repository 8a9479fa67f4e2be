// Plans a redistribute in C++, without torch or Python, and checks it on simulated ranks.
//
//   cmake --install build/cmake --prefix build/installed
//   cmake -S examples/cpp -B build/example -DCMAKE_PREFIX_PATH=$PWD/build/installed
//   cmake --build build/example && build/example/plan
#include <shardwright/moves/describe.h>
#include <shardwright/planning/memory_limit.h>
#include <shardwright/simulate/simulate.h>

#include <iostream>
#include <memory>

int main() {
  using namespace shardwright;
  const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"dp", "tp"}, std::vector<int64_t>{2, 4});
  const DType dtype = DType::parse("bfloat16");
  const Layout src(mesh, {5, 4096}, dtype, {Placement::shard(0), Placement::partial(ReduceOp::kSum)});
  const Layout dst(mesh, {5, 4096}, dtype, {Placement::replicate(), Placement::shard(1)});
  const Plan plan = make_plan_within(src, dst, PlanOptions(), std::nullopt);
  std::cout << to_string(plan) << "\n"
            << simulate(plan).elements_checked << " elements are correct on simulated ranks\n";
}
