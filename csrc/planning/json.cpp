#include "planning/json.h"

#include "cost/cost.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "planning/validate.h"
#include "support/error.h"

namespace shardwright {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      out += escaped;
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

namespace {

// The functions below return pieces of JSON. `value`, `fields` and `items` are JSON already; names are quoted here.
std::string field(const std::string& name, const std::string& value) { return quoted(name) + ": " + value; }
std::string field(const std::string& name, int64_t value) { return field(name, std::to_string(value)); }
std::string flag(const std::string& name, bool value) { return field(name, value ? "true" : "false"); }

std::string object(const std::vector<std::string>& fields) { return "{" + join(fields) + "}"; }
std::string list(const std::vector<std::string>& items) { return "[" + join(items) + "]"; }

// Returns the items between `open` and `close`, one per line, indented by two more spaces than `indent`.
std::string spread(const char* open, const std::vector<std::string>& items, const std::string& indent,
                   const char* close) {
  if (items.empty()) return concat(open, close);
  const std::string between = ",\n" + indent + "  ";
  return concat(open, "\n", indent, "  ", join(items, between.c_str()), "\n", indent, close);
}

// Returns the names of some mesh dims as a list.
std::string mesh_dim_names(const Mesh& mesh, MeshDimSet mesh_dims) {
  std::vector<std::string> names;
  for (const int d : mesh_dims.to_vector()) names.push_back(quoted(mesh.dim_names()[d]));
  return list(names);
}

std::string json(const Mesh& mesh) {
  std::vector<std::string> names;
  for (const std::string& name : mesh.dim_names()) names.push_back(quoted(name));
  std::vector<std::string> fields{field("dim_names", list(names)),
                                  field("dim_sizes", "[" + join(mesh.dim_sizes()) + "]")};
  if (!mesh.ranks_are_positions()) fields.push_back(field("ranks", "[" + join(mesh.ranks()) + "]"));
  return object(fields);
}

std::string json(const Layout& layout) {
  std::vector<std::string> placements;
  for (const Placement& placement : layout.placements()) placements.push_back(quoted(placement.to_string()));
  std::vector<std::string> order;
  for (int t = 0; t < layout.ndim(); ++t) {
    std::vector<std::string> names;
    for (const Cut& c : layout.cuts(t)) names.push_back(quoted(layout.mesh().dim_names()[c.mesh_dim]));
    // Counts placements, not names: cuts() omits mesh dims of size 1 whose position in the shard order does not matter.
    const auto placed =
        std::count_if(layout.placements().begin(), layout.placements().end(),
                      [&](const Placement& placement) { return placement.is_shard_like() && placement.dim == t; });
    if (placed > 1) order.push_back(field(std::to_string(t), list(names)));
  }
  std::vector<std::string> fields{field("placements", list(placements)), field("shard_order", object(order))};
  if (layout.flattened() > 1) fields.push_back(field("flattened", layout.flattened()));
  return object(fields);
}

std::string json(const Link& link) {
  return object({field("message_ps", link.message_ps), field("ps_per_kib", link.ps_per_kib)});
}

std::string json(const Topology& topology, const std::string& indent) {
  std::vector<std::string> links;
  for (const auto& [mesh_dim, link] : topology.mesh_dims) links.push_back(field(mesh_dim, json(link)));
  return spread("{",
                {field("version", 1), field("name", quoted(topology.name)),
                 field("ranks_per_node", topology.ranks_per_node), field("step_ps", topology.step_ps),
                 field("memory_ps_per_kib", topology.memory_ps_per_kib), field("inside", json(topology.inside)),
                 field("between", json(topology.between)), field("mesh_dims", object(links))},
                indent, "}");
}

// Returns the fields of a step's traffic.
std::vector<std::string> traffic_fields(const TrafficTotals& t) {
  return {field("wire_bytes_max", t.received_bytes_max), field("wire_bytes_sum", t.received_bytes_sum),
          field("send_bytes_max", t.sent_bytes_max), field("messages_max", t.messages_max),
          field("sent_messages_max", t.sent_messages_max)};
}

std::string json(const Step& step, const Plan& plan) {
  std::vector<std::string> fields{field("op", quoted(step_op_name(step.op))),
                                  field("mesh_dims", mesh_dim_names(step.before.mesh(), step.mesh_dims)),
                                  field("before", json(step.before)),
                                  field("after", json(step.after)),
                                  field("replica_policy", quoted(replica_policy_name(step.policy))),
                                  field("rounds", step.rounds),
                                  flag("ordered", step.ordered)};
  if (step.ranks_per_node > 0) fields.push_back(field("ranks_per_node", step.ranks_per_node));
  if (step.op == StepOp::kRearrange) fields.push_back(flag("leads_to_another_mesh", leads_to_another_mesh(step)));
  for (std::string& value : traffic_fields(totals(step, plan.lowering))) fields.push_back(std::move(value));
  fields.push_back(field("predicted_ps", predicted_picoseconds(step, plan.lowering, plan.topology)));
  return object(fields);
}

std::string json(const Certificate& certificate, const std::vector<std::string>& remarks) {
  std::vector<std::string> fields;
  for (const BoundedValue& bounded : bounded_values(certificate)) {
    fields.push_back(field(bounded.name, object({field("value", bounded.value), field("bound", bounded.bound)})));
  }
  fields.push_back(field("sent_messages_max", certificate.traffic.sent_messages_max));
  if (const std::optional<ExchangeBound>& bound = certificate.crossing) {
    fields.push_back(field("between_meshes", object({field("direct_send_bytes_max", bound->direct_sent_bytes_max),
                                                     flag("direct_is_exact", bound->direct_is_exact),
                                                     field("forwarded_send_bytes_max", bound->forwarded_sent_bytes_max),
                                                     flag("forwarded_is_exact", bound->forwarded_is_exact),
                                                     field("node_bytes_max", bound->node_bytes_max)})));
  }
  fields.push_back(flag("wire_bytes_sum_is_exact", certificate.traffic.sum_is_exact));
  fields.push_back(flag("maxima_are_exact", certificate.traffic.maxima_are_exact));
  fields.push_back(flag("peak_bytes_is_exact", certificate.peak_is_exact));
  fields.push_back(flag("replicas_are_bitwise_equal", certificate.replicas_are_bitwise_equal));
  std::vector<std::string> sentences;
  for (const std::string& remark : remarks) sentences.push_back(quoted(remark));
  fields.push_back(field("remarks", spread("[", sentences, "    ", "]")));
  return spread("{", fields, "  ", "}");
}

}  // namespace

std::string to_json(const Plan& plan, const Certificate& certificate, const std::vector<std::string>& remarks) {
  std::vector<std::string> steps;
  for (const Step& step : plan.steps) steps.push_back(json(step, plan));
  std::vector<std::string> fields{field("version", kJsonVersion),
                                  field("backend", quoted(std::string(plan.lowering.name))),
                                  field("objective", quoted(objective_name(plan.objective))),
                                  field("topology", json(plan.topology, "  ")),
                                  flag("named_groups_only", plan.named_groups_only),
                                  field("mesh", json(plan.src.mesh()))};
  if (crosses(plan)) fields.push_back(field("destination_mesh", json(plan.dst.mesh())));
  std::vector<std::string> relays;
  for (const MeshPtr& mesh : meshes_of_relays(plan)) relays.push_back(json(*mesh));
  if (!relays.empty()) fields.push_back(field("relay_meshes", list(relays)));
  if (!(mesh_reached(plan) == plan.dst.mesh())) fields.push_back(field("reached_mesh", json(mesh_reached(plan))));
  if (plan.segments.count > 1) {
    fields.push_back(field(
        "segments", object({field("tensor_dim", plan.segments.tensor_dim), field("count", plan.segments.count)})));
  }
  for (std::string& text : std::vector<std::string>{
           field("shape", "[" + join(plan.src.tensor_shape()) + "]"), field("dtype", quoted(plan.src.dtype().name())),
           field("source", json(plan.src)), field("destination", json(plan.dst)),
           field("steps", spread("[", steps, "  ", "]")), field("certificate", json(certificate, remarks))}) {
    fields.push_back(std::move(text));
  }
  return spread("{", fields, "", "}");
}

std::string to_json(const Topology& topology) { return json(topology, ""); }

}  // namespace shardwright
