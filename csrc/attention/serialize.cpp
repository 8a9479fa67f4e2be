#include "attention/serialize.h"

#include "planning/serialize.h"
#include "support/error.h"
#include "support/wire_format.h"

namespace shardwright {
namespace {

constexpr std::string_view kKind = "attention";  // kind in the first line of the wire format

void write(Writer& out, const IntervalList& part) {
  out.list(part, [&](const Interval& run) {
    out.integer(run.begin);
    out.integer(run.end);
  });
}

// Reads the tokens of one rank. Throws UserError if a run is empty.
IntervalList read_part(Reader& in) {
  IntervalList part;
  in.list([&] {
    const int64_t begin = in.integer();
    const int64_t end = in.integer();
    check_user(begin < end, "attention bytes: a run of tokens must have at least one token, got [", begin, ", ", end,
               ")");
    append(part, {begin, end});
    return 0;
  });
  return part;
}

void write(Writer& out, const AttentionMask& mask) {
  out.boolean(mask.is_causal);
  out.optional(mask.window, [&](int64_t window) { out.integer(window); });
  out.integers(mask.documents);
}

AttentionMask read_mask(Reader& in) {
  AttentionMask mask;
  mask.is_causal = in.boolean();
  mask.window = in.optional([&] { return in.integer(); });
  mask.documents = in.integers();
  return mask;
}

void write(Writer& out, const MaskTensor& mask) {
  out.text(mask.dtype.name());
  out.integers(mask.shape());
}

// Throws UserError for an unknown dtype, or unless there are 4 sizes.
MaskTensor read_mask_tensor(Reader& in) {
  MaskTensor mask;
  mask.dtype = DType::parse(in.text());
  const std::vector<int64_t> shape = in.integers();
  check_user(shape.size() == 4, "attention bytes: a mask tensor must have 4 dims, got ", shape.size());
  mask.batch = shape[0];
  mask.heads = shape[1];
  mask.rows = shape[2];
  mask.columns = shape[3];
  return mask;
}

}  // namespace

std::string to_bytes(const Attention& attention, bool is_backward) {
  Writer out(kKind);
  out.boolean(is_backward);
  write(out, *attention.mesh);
  out.text(attention.dtype.name());
  out.integers({attention.batch, attention.heads, attention.kv_heads, attention.depth, attention.value_depth,
                attention.chunks, attention.ranks_per_node});
  out.list(attention.parts, [&](const IntervalList& part) { write(out, part); });
  out.list(attention.key_parts, [&](const IntervalList& part) { write(out, part); });
  out.boolean(attention.keys_are_whole);
  write(out, attention.mask);
  out.optional(attention.mask_tensor, [&](const MaskTensor& mask) { write(out, mask); });
  out.real(attention.scale);
  out.enumerator(attention.method);
  write(out, attention.lowering);
  return std::move(out).finish();
}

std::pair<Attention, bool> attention_from_bytes(std::string_view bytes) {
  Reader in(bytes, kKind);
  const bool is_backward = in.boolean();
  Attention a;
  a.mesh = read_mesh(in);
  a.dtype = DType::parse(in.text());
  const std::vector<int64_t> sizes = in.integers();
  check_user(sizes.size() == 7, "attention bytes must have 7 sizes, got ", sizes.size());
  a.batch = sizes[0];
  a.heads = sizes[1];
  a.kv_heads = sizes[2];
  a.depth = sizes[3];
  a.value_depth = sizes[4];
  a.chunks = sizes[5];
  a.ranks_per_node = sizes[6];
  a.parts = in.list([&] { return read_part(in); });
  a.key_parts = in.list([&] { return read_part(in); });
  a.keys_are_whole = in.boolean();
  a.mask = read_mask(in);
  a.mask_tensor = in.optional([&] { return read_mask_tensor(in); });
  a.scale = in.real();
  a.method = in.enumerator(AttentionMethod::kTwoLevel);
  a.lowering = read_lowering(in);
  in.finish();
  check(a);
  return {std::move(a), is_backward};
}

bool is_attention(std::string_view bytes) { return kind_of(bytes) == kKind; }

bool is_attention_text(std::string_view text) {
  return text.substr(0, text.find('|')).find(" attention") != std::string_view::npos;
}

std::string to_text(const Attention& attention, bool is_backward) {
  return to_text(concat(method_name(attention.method), is_backward ? " attention backward" : " attention"),
                 to_bytes(attention, is_backward));
}

}  // namespace shardwright
