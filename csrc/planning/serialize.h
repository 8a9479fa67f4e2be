// Plans, and what they consist of, in the wire format (support/wire_format.h).
//
// A layout is written without its mesh, which is written once by whatever holds the layout: a plan or a problem.
#pragma once

#include <string>
#include <string_view>

#include "cost/gemm_model.h"
#include "moves/plan.h"
#include "support/wire_format.h"

namespace shardwright {

// Equal plans give equal bytes.
std::string to_bytes(const Plan& plan);

// Throws UserError on bytes that are damaged, of another version, or describe no plan: steps too must follow from one
// another and be what they say.
Plan from_bytes(std::string_view bytes);

// As operators take it, with what it moves as the label.
std::string to_text(const Plan& plan);

// The parts. What is read has passed the checks of its own constructor, so that all of these throw UserError.
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
