// Pictures of plans between two meshes of many ranks. A column shows the mesh of one state, divided into blocks of
// ranks. An arrow of a crossing is the sum of all messages from one block to another.
#include <algorithm>
#include <map>
#include <utility>

#include "moves/step_exchange.h"
#include "moves/traffic.h"
#include "picture/frame.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr int64_t kMaxBlocks = 8;                          // maximum number of blocks of a mesh
constexpr int64_t kMaxMessagesCounted = int64_t{1} << 20;  // crossings of more messages have no arrows
constexpr double kBlockWidth = 170;
constexpr double kBlockHeight = 40;
constexpr double kPitch = 56;                  // distance between the tops of adjacent blocks
constexpr double kTip = 7;                     // size of an arrow's tip
constexpr const char* kOnOneMesh = "#BBBBBB";  // color of arrows of steps on one mesh

// The picture of one plan.
class BlockPicture {
 public:
  explicit BlockPicture(const Plan& plan) : frame_(plan, 0, kBlockWidth) {
    for (const Step& step : frame_.steps()) {
      flows_.push_back(step.op == StepOp::kCross ? flows_of(step) : Flows());
      for (const auto& [blocks, flow] : flows_.back()) widest_bytes_ = std::max(widest_bytes_, flow.bytes);
    }
  }

  std::string draw() {
    frame_.draw_heads(svg_);
    int64_t most = 0;
    for (size_t state = 0; state < frame_.states().size(); ++state) {
      const int64_t blocks = num_blocks(frame_.states()[state].mesh());
      for (int64_t b = 0; b < blocks; ++b) draw_block(state, b);
      most = std::max(most, blocks);
    }
    for (size_t i = 0; i < frame_.steps().size(); ++i) {
      frame_.steps()[i].op == StepOp::kCross ? draw_flows(i) : draw_on_one_mesh(i);
    }
    add_legend();
    return frame_.page(svg_, frame_.right(), y_of(most - 1) + kPitch);
  }

 private:
  // All messages from one block to another.
  struct Flow {
    int64_t bytes = 0;
    int64_t messages = 0;
  };
  // Keys are the blocks of sender and receiver.
  using Flows = std::map<std::pair<int64_t, int64_t>, Flow>;

  // ---- blocks of consecutive positions, all of one size but the last

  static int64_t block_size(const Mesh& mesh) { return (mesh.size() + kMaxBlocks - 1) / kMaxBlocks; }
  static int64_t num_blocks(const Mesh& mesh) { return (mesh.size() + block_size(mesh) - 1) / block_size(mesh); }
  static int64_t block_of(const Mesh& mesh, Rank rank) { return *mesh.position_of(rank) / block_size(mesh); }

  // Returns the label of a block: its rank or range of ranks.
  static std::string name_of(const Mesh& mesh, int64_t block) {
    const int64_t first = block * block_size(mesh);
    const int64_t last = std::min(first + block_size(mesh), mesh.size()) - 1;
    const Rank from = mesh.rank_at(Position{first});
    if (first == last) return concat("rank ", from);
    bool are_consecutive = true;
    for (int64_t p = first; p <= last; ++p) {
      are_consecutive = are_consecutive && to_int(mesh.rank_at(Position{p})) == to_int(from) + p - first;
    }
    if (are_consecutive) return concat("ranks ", from, " to ", mesh.rank_at(Position{last}));
    return concat(last - first + 1, " ranks, first: ", from);
  }

  // Returns the flows of a crossing. Returns none for more than kMaxMessagesCounted messages.
  Flows flows_of(const Step& step) {
    Flows flows;
    const GridExchange crossing = crossing_of(step);
    if (crossing.num_overlaps() > kMaxMessagesCounted) {
      has_uncounted_ = true;
      return flows;
    }
    for (const Rank from : crossing.ranks()) {
      for (const auto& [to, elements] : crossing.message_sizes(from, Direction::kSend)) {
        Flow& flow = flows[{block_of(step.before.mesh(), from), block_of(step.after.mesh(), to)}];
        flow.bytes += elements * step.before.dtype().size_bytes();
        ++flow.messages;
      }
    }
    return flows;
  }

  // ---- drawing

  // Returns the y of a block's top.
  double y_of(int64_t block) const { return frame_.top() + kPitch * static_cast<double>(block); }

  // Draws a block, with the bytes of its largest part.
  void draw_block(size_t state, int64_t block) {
    const Layout& layout = frame_.states()[state];
    const Mesh& mesh = layout.mesh();
    const Rect box{frame_.column(state) - kBlockWidth / 2, y_of(block), kBlockWidth, kBlockHeight};
    const int64_t first = block * block_size(mesh);
    int64_t most = 0;
    for (int64_t p = first; p < std::min(first + block_size(mesh), mesh.size()); ++p) {
      most = std::max(most, num_elements(layout.region(p)) * layout.dtype().size_bytes());
    }
    const bool is_pending = !layout.partial_dims().empty();
    const std::string size = concat(is_pending ? "contribution: max " : "part: max ", bytes_text(most));
    svg_.open_group("class=\"sw-block\"", concat(name_of(mesh, block), "; ", size));
    svg_.path(rect_path(box), "fill=\"#F6F6F6\" stroke=\"#AAAAAA\"");
    svg_.path(rect_path({box.x, box.y, 6, box.h}), concat("fill=\"", color_of(block), "\""));
    svg_.text(box.x + 14, box.y + 17, name_of(mesh, block), {12, "start", "#111111", true});
    svg_.text(box.x + 14, box.y + 32, size, {11, "start", "#555555", false});
    svg_.close_group();
  }

  // Draws an arrow across the gap of a step. `kind` is its CSS class.
  void draw_arrow(size_t step, double y0, double y1, const char* kind, const char* color, double width,
                  const std::string& title) {
    const double x0 = frame_.column(step) + kBlockWidth / 2 + 3;
    const double x1 = frame_.column(step + 1) - kBlockWidth / 2 - 3;
    svg_.open_group(
        concat("class=\"", kind, "\" stroke=\"", color, "\" fill=\"", color, "\" stroke-width=\"", px(width), "\""),
        title);
    svg_.path(curve_path(x0, y0, x1 - kTip + 1, y1), "fill=\"none\"");
    svg_.tip(x1, y1, kTip);
    svg_.close_group();
  }

  // Draws one arrow for each flow. The arrows of a block are in the order of their other ends.
  void draw_flows(size_t index) {
    const Step& step = frame_.steps()[index];
    std::map<int64_t, int64_t> leaving;
    std::map<int64_t, int64_t> arriving;
    for (const auto& [blocks, flow] : flows_[index]) {
      ++leaving[blocks.first];
      ++arriving[blocks.second];
    }
    // Returns the y of arrow number `at` of `count` at a block.
    const auto arrow_y = [&](int64_t block, int64_t at, int64_t count) {
      return y_of(block) + kBlockHeight * (static_cast<double>(at) + 0.5) / static_cast<double>(count);
    };
    std::map<int64_t, int64_t> left;
    std::map<int64_t, int64_t> arrived;
    for (const auto& [blocks, flow] : flows_[index]) {
      const auto [from, to] = blocks;
      const double y0 = arrow_y(from, left[from]++, leaving[from]);
      const double y1 = arrow_y(to, arrived[to]++, arriving[to]);
      const double width = 1 + 3 * static_cast<double>(flow.bytes) / static_cast<double>(widest_bytes_);
      draw_arrow(index, y0, y1, "sw-flow", color_of(from), width,
                 concat(name_of(step.before.mesh(), from), " -> ", name_of(step.after.mesh(), to), ": ",
                        bytes_text(flow.bytes), " in ", count_text(flow.messages, "message")));
    }
  }

  // Draws an arrow from each block to the same block after the step.
  void draw_on_one_mesh(size_t index) {
    const Mesh& mesh = frame_.steps()[index].before.mesh();
    for (int64_t b = 0; b < num_blocks(mesh); ++b) {
      const double y = y_of(b) + kBlockHeight / 2;
      draw_arrow(index, y, y, "sw-stays", kOnOneMesh, 1.2, name_of(mesh, b));
    }
  }

  // Adds the legend.
  void add_legend() {
    frame_.add_legend_line(
        "box: block of ranks in mesh order, with the size of the largest part or contribution of a rank");
    frame_.add_legend_line(concat("arrow: all messages between two blocks; color: sender; width: bytes (max ",
                                  bytes_text(widest_bytes_), "); gray: step within one mesh"));
    if (has_uncounted_) {
      frame_.add_legend_line(concat("crossing without arrows: more than ", kMaxMessagesCounted, " messages"));
    }
  }

  PictureFrame frame_;
  Svg svg_;
  std::vector<Flows> flows_;  // by step
  int64_t widest_bytes_ = 0;
  bool has_uncounted_ = false;
};

}  // namespace

std::string picture_by_block(const Plan& plan) { return BlockPicture(plan).draw(); }

}  // namespace shardwright
