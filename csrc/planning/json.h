// Writes plans and topologies as JSON. docs/plan.schema.json describes the format; Python reads it back.
#pragma once

#include <string>
#include <vector>

#include "moves/plan.h"
#include "planning/certificate.h"

namespace shardwright {

constexpr int kJsonVersion = 5;  // version of the JSON format of plans

// Returns the plan, its certificate and its remarks (planning/certificate.h) as JSON.
std::string to_json(const Plan& plan, const Certificate& certificate, const std::vector<std::string>& remarks);
std::string to_json(const Topology& topology);

// Returns the text as a quoted and escaped JSON string.
std::string quoted(const std::string& text);

}  // namespace shardwright
