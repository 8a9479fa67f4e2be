// Plans and topologies as JSON, for people and tools. docs/plan.schema.json says what is in it; Python reads it back.
#pragma once

#include <string>
#include <vector>

#include "moves/plan.h"
#include "planning/certificate.h"

namespace shardwright {

constexpr int kJsonVersion = 3;

std::string to_json(const Plan& plan, const Certificate& certificate, const std::vector<std::string>& remarks);
std::string to_json(const Topology& topology);

// Text in quotation marks.
std::string quoted(const std::string& text);

}  // namespace shardwright
