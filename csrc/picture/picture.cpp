#include "picture/picture.h"

#include "moves/describe.h"
#include "picture/frame.h"
#include "picture/svg.h"
#include "support/error.h"

namespace shardwright {

std::string to_svg(const Plan& plan) {
  return plan.src.mesh().size() <= kMaxRanksDrawn ? picture_by_rank(plan) : picture_by_mesh_dim(plan);
}

std::string to_html(const Plan& plan) {
  const std::string title = concat(plan.src.to_string(), " -> ", plan.dst.placements_string());
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<title>", escaped(title),
      "</title>\n<style>\n",
      "body { margin: 2em; color: #222222; background: #ffffff; font-family: Helvetica, Arial, sans-serif; }\n",
      "svg { max-width: 100%; height: auto; }\n", "pre { padding: 1em; background: #f4f4f4; overflow-x: auto; }\n",
      "</style>\n</head>\n<body>\n", to_svg(plan), "<pre>", escaped(to_string(plan)), "</pre>\n</body>\n</html>\n");
}

}  // namespace shardwright
