#include "runtime/attention_program.h"

#include "attention/compile.h"
#include "attention/serialize.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns dtype, batch, heads, length and depth, such as "bfloat16[2, 16, 8192, 128]", followed by the length of keys
// and the depth of values if they differ.
std::string sizes_text(const Attention& a) {
  return concat(a.dtype.name(), "[", a.batch, ", ", a.heads, ", ", a.length(), ", ", a.depth, "]",
                a.key_parts.empty() ? "" : concat(" to ", a.keys_are_whole ? "all " : "", a.key_length(), " keys"),
                a.value_depth == a.depth ? "" : concat(" to values of depth ", a.value_depth));
}

// The origin of an attention or of its backward. It stores the attention as bytes, and decodes them on each call.
class AttentionOrigin : public Origin {
 public:
  explicit AttentionOrigin(std::string bytes) : bytes_(std::move(bytes)) {}

  const char* kind() const override { return "attention"; }
  std::vector<Plan> plans() const override { return {}; }
  std::vector<Rank> ranks() const override { return attention_from_bytes(bytes_).first.mesh->ranks(); }

  std::string title() const override {
    const auto [a, is_backward] = attention_from_bytes(bytes_);
    return concat(is_backward ? "backward of attention " : "attention ", method_name(a.method));
  }

  std::string text() const override {
    const auto [a, is_backward] = attention_from_bytes(bytes_);
    return concat(is_backward ? "backward of attention" : "attention", " of ", sizes_text(a), " over ",
                  a.mesh->to_string(), ", ", mask_text(a), ", ", method_name(a.method));
  }

  Signature signature() const override {
    const auto [a, is_backward] = attention_from_bytes(bytes_);
    const std::string bytes = to_bytes(with_default_mask(a), is_backward);
    return {{"direction", is_backward ? "backward" : "forward"},
            {"tensor", sizes_text(a)},
            {"dtype", a.dtype.name()},
            {"mesh", a.mesh->to_string()},
            {"kv heads", concat(a.kv_heads)},
            {"mask", mask_text(a)},
            {"method", method_name(a.method)},
            {"chunks", concat(a.chunks)},
            {"attention bytes", concat(bytes.size(), " with hash ", std::hash<std::string>()(bytes))}};
  }

 private:
  std::string bytes_;
};

}  // namespace

std::shared_ptr<const CompiledProgram> compiled_attention(const std::string& bytes, Rank rank) {
  const auto [attention, is_backward] = attention_from_bytes(bytes);
  Program program = is_backward ? compile_attention_backward(attention, rank) : compile_attention(attention, rank);
  return std::make_shared<CompiledProgram>(std::move(program), attention.lowering, attention.mesh->size() > 1,
                                           std::make_unique<AttentionOrigin>(bytes), rank);
}

}  // namespace shardwright
