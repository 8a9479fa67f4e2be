// The lowerings of transports, and the choice of a lowering for a backend.
#include "cost/lowering.h"

#include <gtest/gtest.h>

#include "cost/backend.h"
#include "cost/gemm_model.h"
#include "cost/topology.h"
#include "support/error.h"

namespace shardwright {
namespace {

TEST(Lowering, IsFoundByItsName) {
  for (const Lowering& lowering : Lowering::all()) {
    EXPECT_EQ(Lowering::named(lowering.name), lowering);
    EXPECT_NO_THROW(Topology::named(lowering.default_topology).check());
  }
  EXPECT_NE(Lowering::kNccl, Lowering::kGloo);
  try {
    Lowering::named("mpi");
    FAIL() << "took a name that nobody knows";
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "backend must be one of nccl, gloo, got 'mpi'");
  }
}

TEST(Lowering, AppliesSizeThresholds) {
  EXPECT_FALSE(Lowering::kNccl.copies_gather(2, 1));
  EXPECT_FALSE(Lowering::kNccl.uses_messages(int64_t{1} << 40));
  EXPECT_TRUE(Lowering::kGloo.copies_gather(2, int64_t{1} << 40));
  EXPECT_TRUE(Lowering::kGloo.copies_gather(3, int64_t{1} << 20));
  EXPECT_FALSE(Lowering::kGloo.copies_gather(3, (int64_t{1} << 20) + 1));
  EXPECT_FALSE(Lowering::kGloo.uses_messages((int64_t{1} << 18) - 1));
  EXPECT_TRUE(Lowering::kGloo.uses_messages(int64_t{1} << 18));
}

TEST(Lowering, FollowsFromTheBackend) {
  EXPECT_EQ(lowering_of_backend("gloo", "cuda"), Lowering::kGloo);
  EXPECT_EQ(lowering_of_backend("fake", "cpu"), Lowering::kGloo);
  EXPECT_EQ(lowering_of_backend("fake", "cuda"), Lowering::kNccl);
  EXPECT_EQ(lowering_of_backend("nccl", "cuda"), Lowering::kNccl);
  EXPECT_EQ(lowering_of_backend("one of an extension", "cpu"), Lowering::kNccl);
}

TEST(Lowering, OfOneRankFollowsFromItsDevice) {
  EXPECT_EQ(lowering_of_device("cpu"), Lowering::kGloo);
  EXPECT_EQ(lowering_of_device("cuda"), Lowering::kNccl);
}

TEST(Lowering, HasDefaultsThatExist) {
  for (const Lowering& lowering : Lowering::all()) {
    EXPECT_EQ(Topology::named(lowering.default_topology).name, lowering.default_topology);
    EXPECT_EQ(default_gemm_model(lowering).name, lowering == Lowering::kGloo ? "cpu" : "h100");
  }
}

}  // namespace
}  // namespace shardwright
