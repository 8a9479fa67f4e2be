#include "products/compile.h"

#include "support/error.h"

namespace shardwright {

Program compile(const Matmul& matmul, const Schedule& schedule, Rank rank) {
  check(matmul, schedule);
  const Mesh& mesh = plan_of(matmul).src.mesh();
  check_user(mesh.position_of(rank).has_value(), "rank: ", rank, " is not on the mesh (", mesh, ")");
  const auto* gather = std::get_if<GatherMatmul>(&matmul);
  Program program = gather != nullptr ? compile_gather(*gather, schedule, rank)
                                      : compile_scatter(std::get<MatmulScatter>(matmul), schedule, rank);
  program.sms_left = schedule.sms_left;
  return program;
}

}  // namespace shardwright
