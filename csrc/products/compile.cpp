#include "products/compile.h"

#include "support/error.h"
#include "support/match.h"

namespace shardwright {

Program compile(const Matmul& matmul, const Schedule& schedule, Rank rank) {
  check(matmul, schedule);
  const Mesh& mesh = plan_of(matmul).src.mesh();
  check_user(mesh.position_of(rank).has_value(), "rank must be on the mesh (", mesh, "), got ", rank);
  Program program = match(
      matmul, [&](const GatherMatmul& gather) { return compile_gather(gather, schedule, rank); },
      [&](const MatmulScatter& scatter) { return compile_scatter(scatter, schedule, rank); });
  program.sms_left = schedule.sms_left;
  return program;
}

}  // namespace shardwright
