// Plans and their parts in the wire format (support/wire_format.h). Readers read the fields in the order in which
// writers write them.
//
// A layout is written without its mesh. The plan or problem that contains the layout writes the mesh once.
#pragma once

#include <string>
#include <string_view>

#include "cost/gemm_model.h"
#include "moves/plan.h"
#include "support/wire_format.h"

namespace shardwright {

// Returns equal bytes for equal plans whose layouts have equal placements.
std::string to_bytes(const Plan& plan);

// Throws UserError if the bytes are damaged, of another version, or no valid plan (check_steps in planning/validate.h).
Plan from_bytes(std::string_view bytes);

// Returns the plan as the string that PyTorch operators take: ends_of(plan), then the bytes in base64, as in
// "float32[8, 4] on dp=2 as [S(0)] -> [R]|base64".
std::string to_text(const Plan& plan);

// Parts of plans. The readers throw UserError if a value does not pass the checks of its constructor or its check(),
// and read_plan throws as from_bytes does. The topology of a mesh is neither written nor read, because a plan has its
// own.
void write(Writer& out, const Mesh& mesh);
void write(Writer& out, const Lowering& lowering);
void write(Writer& out, const Topology& topology);
void write(Writer& out, const GemmModel& model);
void write(Writer& out, const Layout& layout);
void write(Writer& out, const Plan& plan);

MeshPtr read_mesh(Reader& in);
const Lowering& read_lowering(Reader& in);
Topology read_topology(Reader& in);
GemmModel read_gemm_model(Reader& in);
Layout read_layout(Reader& in, const MeshPtr& mesh);
Plan read_plan(Reader& in);

}  // namespace shardwright
