#include "program/instructions.h"

#include "support/error.h"

namespace shardwright {
namespace {

// Returns "b2[0:8]" for elements 0 to 7 of buffer 2.
std::string text(const BufferRange& r) { return concat("b", r.buffer, "[", r.offset, ":", r.offset + r.count, "]"); }

// Returns "peer:range" for each message.
std::string text(const std::vector<SendReceive::Message>& messages) {
  std::vector<std::string> parts;
  for (const auto& m : messages) parts.push_back(concat(m.peer, ":", text(m.range)));
  return join(parts, " ");
}

// Returns "1x8/2 heads, 16x32x64 to 128" for batch 1, 8 heads, 2 kv_heads, 16 rows, 32 columns, depth 64 and
// value_depth 128. Leaves out kv_heads and value_depth if they equal heads and depth.
std::string text(const AttendSizes& s) {
  return concat(s.batch, "x", s.heads, s.kv_heads == s.heads ? "" : concat("/", s.kv_heads), " heads, ", s.rows, "x",
                s.columns, "x", s.depth, s.value_depth == s.depth ? "" : concat(" to ", s.value_depth));
}

// Returns the words before "pairs" in the text of a block product.
const char* amount_text(BlockShape shape) {
  switch (shape) {
    case BlockShape::kSkip:
      return "no";
    case BlockShape::kFull:
      return "all";
    case BlockShape::kTriangle:
      return "a triangle of";
    case BlockShape::kOther:
      return "some";
  }
  return "";
}

// Returns "b2[8]" for heads that begin at element 8 of buffer 2.
std::string text(const Heads& h) { return concat("b", h.buffer, "[", h.offset, "]"); }

// Returns the text of a block product, without its result: "attend 1x8 heads, 16x32x64 b0[0] to all pairs of b1[0],
// b2[0]".
template <typename Product>
std::string text_of_product(const char* verb, const Product& o) {
  return concat(verb, " ", text(o.sizes), " ", text(o.q), " to ",
                amount_text(shape_of(o.band, o.sizes.rows, o.sizes.columns)), " pairs of ", text(o.k), ", ", text(o.v),
                o.mask ? concat(" under b", o.mask->buffer, "[", o.mask->offset, "]") : "");
}

}  // namespace

std::string to_string(const Operation& operation) {
  return match(
      operation,
      [](const Copy& o) {
        return concat("copy b", o.src, " -> b", o.dst, " in ", o.boxes.size(), " boxes",
                      o.src_dtype ? concat(", read as ", o.src_dtype->name()) : "",
                      o.dst_dtype ? concat(", written as ", o.dst_dtype->name()) : "",
                      o.divisor != 1 ? concat(", divided by ", o.divisor) : "");
      },
      [](const FillZero& o) { return concat("fill ", text(o.dst), " = 0"); },
      [](const Divide& o) { return concat("divide ", text(o.dst), " by ", o.divisor); },
      [](const Power& o) { return concat("power ", text(o.src), " ** ", o.exponent, " -> ", text(o.dst)); },
      [](const Reduce& o) {
        std::vector<std::string> parts;
        for (const BufferRange& part : o.parts) parts.push_back(text(part));
        const std::string divided = o.divisor != 1 ? concat(", divided by ", o.divisor) : "";
        return concat("reduce ", reduce_op_name(o.op), " of ", join(parts), divided, " -> ", text(o.dst));
      },
      [](const Cast& o) { return concat("cast ", text(o.src), " -> ", text(o.dst)); },
      [](const Gemm& o) {
        const std::string times = o.count > 1 ? concat(o.count, " x ") : "";
        return concat("gemm ", times, o.m, "x", o.k, " b", o.lhs.buffer, "[", o.lhs.offset, "] by ", o.k, "x", o.n,
                      " b", o.rhs.buffer, "[", o.rhs.offset, "]", o.lhs_scale ? " scaled" : "",
                      o.bias ? " plus bias" : "", o.accumulates ? " added to b" : " -> b", o.dst.buffer, "[",
                      o.dst.offset, "]",
                      o.flags ? concat(" as flags ", text(o.flags->range), " are set, from ", o.flags->first) : "");
      },
      [](const Attend& o) { return concat(text_of_product("attend", o), " -> ", text(o.result.out)); },
      [](const AttendBackward& o) {
        return concat(text_of_product("attend_backward", o), " added to ", text(o.dq), ", ", text(o.dk), ", ",
                      text(o.dv));
      },
      [](const Merge& o) { return concat("merge ", text(o.left.out), " with ", text(o.right.out)); },
      [](const Accumulate& o) { return concat("accumulate ", text(o.src), " added to ", text(o.dst)); },
      [](const AllGather& o) { return concat("all_gather g", o.group, " ", text(o.src), " -> ", text(o.dst)); },
      [](const ReduceScatter& o) {
        return concat("reduce_scatter ", reduce_op_name(o.op), " g", o.group, " ", text(o.src), " -> ", text(o.dst));
      },
      [](const AllReduce& o) { return concat("all_reduce ", reduce_op_name(o.op), " g", o.group, " ", text(o.data)); },
      [](const AllToAll& o) {
        return concat("all_to_all ", o.by_messages ? "by messages " : "", "g", o.group, " ", text(o.src), " (",
                      join(o.send_counts), ") -> ", text(o.dst), " (", join(o.receive_counts), ")");
      },
      [](const SendReceive& o) {
        return concat("send_receive g", o.group, " to {", text(o.sends), "} from {", text(o.receives), "}");
      },
      [](const Offer& o) { return concat("offer g", o.group, " ", text(o.src)); },
      [](const Fetch& o) {
        return concat("fetch g", o.group, " what instruction ", o.offer, " offers -> ", text(o.dst), ", flags ",
                      text(o.flags));
      },
      [](const Wait& o) { return concat("wait for instruction ", o.ticket); });
}

bool is_communication(const Operation& operation) {
  return match(
      operation, [](const IsTransfer auto&) { return true; }, [](const IsCompute auto&) { return false; },
      [](const Wait&) { return false; });
}

std::optional<int> group_of(const Operation& operation) {
  using Group = std::optional<int>;
  return match(
      operation, [](const IsTransfer auto& o) -> Group { return o.group; },
      [](const IsCompute auto&) -> Group { return std::nullopt; }, [](const Wait&) -> Group { return std::nullopt; });
}

std::vector<BufferId> buffers_of(const Operation& operation) {
  return match(
      operation, [](const Copy& o) { return std::vector<BufferId>{o.src, o.dst}; },
      [](const FillZero& o) { return std::vector<BufferId>{o.dst.buffer}; },
      [](const Divide& o) { return std::vector<BufferId>{o.dst.buffer}; },
      [](const Power& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const Reduce& o) {
        std::vector<BufferId> buffers{o.dst.buffer};
        for (const BufferRange& part : o.parts) buffers.push_back(part.buffer);
        return buffers;
      },
      [](const Cast& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const Gemm& o) {
        std::vector<BufferId> buffers{o.lhs.buffer, o.rhs.buffer, o.dst.buffer};
        if (o.bias) buffers.push_back(o.bias->buffer);
        for (const auto* scale : {&o.lhs_scale, &o.rhs_scale}) {
          if (*scale) buffers.push_back((*scale)->buffer);
        }
        if (o.flags) buffers.push_back(o.flags->range.buffer);
        return buffers;
      },
      [](const Attend& o) {
        std::vector<BufferId> buffers{o.q.buffer, o.k.buffer, o.v.buffer, o.result.out.buffer, o.result.lse.buffer};
        if (o.mask) buffers.push_back(o.mask->buffer);
        return buffers;
      },
      [](const AttendBackward& o) {
        std::vector<BufferId> buffers{o.q.buffer,   o.k.buffer,  o.v.buffer,  o.out.buffer, o.dout.buffer,
                                      o.lse.buffer, o.dq.buffer, o.dk.buffer, o.dv.buffer};
        if (o.mask) buffers.push_back(o.mask->buffer);
        return buffers;
      },
      [](const Merge& o) {
        return std::vector<BufferId>{o.left.out.buffer, o.left.lse.buffer, o.right.out.buffer, o.right.lse.buffer};
      },
      [](const Accumulate& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const AllGather& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const ReduceScatter& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const AllReduce& o) { return std::vector<BufferId>{o.data.buffer}; },
      [](const AllToAll& o) { return std::vector<BufferId>{o.src.buffer, o.dst.buffer}; },
      [](const SendReceive& o) {
        std::vector<BufferId> buffers;
        for (const auto& m : o.sends) buffers.push_back(m.range.buffer);
        for (const auto& m : o.receives) buffers.push_back(m.range.buffer);
        return buffers;
      },
      [](const Offer& o) { return std::vector<BufferId>{o.src.buffer}; },
      [](const Fetch& o) { return std::vector<BufferId>{o.dst.buffer, o.flags.buffer}; },
      [](const Wait&) { return std::vector<BufferId>{}; });
}

}  // namespace shardwright
