#include "picture/picture.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "picture/step.h"
#include "picture/svg.h"
#include "planning/serialize.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

using test::all_layouts;
using test::layout_of;
using test::mesh_of;

// ---- a parser for the subset of XML that pictures use

struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;   // its own text, decoded
  std::string title;  // the text of its <title>
  int parent = -1;
};

class Document {
 public:
  explicit Document(std::string xml) : xml_(std::move(xml)) {
    while (at_ < xml_.size()) xml_[at_] == '<' ? read_tag() : read_text();
    expect(open_.empty(), "tags left open");
  }

  const std::vector<Element>& elements() const { return elements_; }

  std::vector<int> of_class(const std::string& name) const {
    std::vector<int> found;
    for (size_t i = 0; i < elements_.size(); ++i) {
      std::istringstream words(attribute(static_cast<int>(i), "class"));
      for (std::string word; words >> word;) {
        if (word == name) found.push_back(static_cast<int>(i));
      }
    }
    return found;
  }

  std::vector<int> children(int parent) const {
    std::vector<int> found;
    for (size_t i = 0; i < elements_.size(); ++i) {
      if (elements_[i].parent == parent) found.push_back(static_cast<int>(i));
    }
    return found;
  }

  std::string attribute(int element, const std::string& name) const {
    const auto found = elements_[element].attributes.find(name);
    return found == elements_[element].attributes.end() ? "" : found->second;
  }

  bool has_text(const std::string& text) const {
    return std::any_of(elements_.begin(), elements_.end(), [&](const Element& e) { return e.text == text; });
  }

 private:
  void expect(bool ok, const char* what) const {
    if (!ok) throw std::runtime_error(concat(what, " at byte ", at_, ": ", xml_.substr(at_, 60)));
  }

  void read_tag() {
    if (at_ == 0 && xml_.starts_with("<!DOCTYPE html>")) {
      at_ = 15;
    } else if (xml_.compare(at_, 2, "</") == 0) {
      const size_t end = xml_.find('>', at_);
      expect(!open_.empty() && xml_.substr(at_ + 2, end - at_ - 2) == elements_[open_.back()].name, "wrong end tag");
      const Element& closed = elements_[open_.back()];
      if (closed.name == "title" && closed.parent >= 0) elements_[closed.parent].title = closed.text;
      open_.pop_back();
      at_ = end + 1;
    } else {
      ++at_;
      read_element();
    }
  }

  void read_element() {
    Element element{read_name(), {}, {}, {}, open_.empty() ? -1 : open_.back()};
    while (true) {
      while (xml_[at_] == ' ') ++at_;
      if (xml_[at_] == '>' || xml_[at_] == '/') break;
      const std::string name = read_name();
      expect(xml_.compare(at_, 2, "=\"") == 0, "attribute without a value");
      const size_t end = xml_.find('"', at_ + 2);
      const std::string value = unescaped(xml_.substr(at_ + 2, end - at_ - 2));
      expect(element.attributes.emplace(name, value).second, "attribute twice");
      at_ = end + 1;
    }
    elements_.push_back(std::move(element));
    const bool is_self_closing = xml_[at_] == '/';
    if (is_self_closing) ++at_;
    expect(xml_[at_] == '>', "tag without an end");
    ++at_;
    if (!is_self_closing) open_.push_back(static_cast<int>(elements_.size()) - 1);
  }

  std::string read_name() {
    const size_t begin = at_;
    while (at_ < xml_.size() && (std::isalnum(xml_[at_]) != 0 || xml_[at_] == '-')) ++at_;
    expect(at_ > begin, "no name");
    return xml_.substr(begin, at_ - begin);
  }

  void read_text() {
    const size_t end = std::min(xml_.find('<', at_), xml_.size());
    const std::string text = unescaped(xml_.substr(at_, end - at_));
    if (open_.empty()) {
      expect(text.find_first_not_of('\n') == std::string::npos, "text outside");
    } else {
      elements_[open_.back()].text += text;
    }
    at_ = end;
  }

  std::string unescaped(const std::string& raw) const {
    static const std::map<std::string, std::string> kEntities{
        {"amp", "&"}, {"lt", "<"}, {"gt", ">"}, {"quot", "\""}, {"#39", "'"}};
    std::string text;
    for (size_t i = 0; i < raw.size(); ++i) {
      const auto byte = static_cast<unsigned char>(raw[i]);
      expect(byte >= 0x20 || raw[i] == '\n', "control character");
      expect(raw[i] != '<', "unescaped <");
      if (raw[i] != '&') {
        text += raw[i];
        continue;
      }
      const size_t end = raw.find(';', i);
      const auto entity = kEntities.find(raw.substr(i + 1, end == std::string::npos ? end : end - i - 1));
      expect(entity != kEntities.end(), "unescaped &");
      text += entity->second;
      i = end;
    }
    return text;
  }

  std::string xml_;
  size_t at_ = 0;
  std::vector<Element> elements_;
  std::vector<int> open_;
};

// Returns the total area of the rectangles of a path written by rect_path.
double area_of(const std::string& d) {
  double area = 0;
  for (size_t at = d.find('h'); at != std::string::npos; at = d.find('h', d.find('z', at))) {
    const size_t v = d.find('v', at);
    area += std::stod(d.substr(at + 1)) * std::stod(d.substr(v + 1));
  }
  return area;
}

// The box of one rank in one state. Boxes are written state by state, position by position.
struct Box {
  double filled_share = 0;
  std::vector<std::string> fills;
};

Box box_at(const Document& picture, size_t index) {
  const int group = picture.of_class("sw-box").at(index);
  Box box;
  double whole = 0;
  for (const int child : picture.children(group)) {
    if (picture.elements()[child].name != "path") continue;
    const double area = area_of(picture.attribute(child, "d"));
    if (whole == 0) {
      whole = area;
    } else if (picture.attribute(child, "class") == "sw-part") {
      box.filled_share += area / whole;
      box.fills.push_back(picture.attribute(child, "fill"));
    }
  }
  return box;
}

Plan plan_of(const std::vector<int64_t>& mesh_sizes, const std::vector<int64_t>& shape, const std::string& src,
             const std::string& dst, const PlanOptions& options = {}) {
  const MeshPtr mesh = mesh_of(mesh_sizes);
  return make_plan(layout_of(mesh, shape, src), layout_of(mesh, shape, dst), options);
}

// A plan whose replicas share the sending, even if the planner would not choose it.
Plan shared_plan(ReplicaPolicy policy, const std::vector<int64_t>& shape) {
  Plan plan = plan_of({2, 3}, shape, "R,S(0)", "R,S(1)");
  plan.steps[0].op = StepOp::kExchange;
  plan.steps[0].mesh_dims = MeshDimSet::from_bits(3);
  plan.steps[0].policy = policy;
  return plan;
}

Plan plan_between(const std::vector<int64_t>& src_sizes, const std::string& src, const std::vector<int64_t>& dst_ranks,
                  const std::vector<int64_t>& dst_sizes, const std::string& dst, const std::vector<int64_t>& shape) {
  return make_plan(layout_of(mesh_of(src_sizes), shape, src), layout_of(mesh_of(dst_sizes, dst_ranks), shape, dst));
}

std::vector<int64_t> ranks_from(int64_t first, int64_t count) {
  std::vector<int64_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

// Twelve rows from four ranks to three others. Each replica sends half of the requested rows of its part.
Plan crossing_plan(const std::vector<int64_t>& dst_ranks) {
  Plan plan = plan_between({2, 2}, "S(0),R", dst_ranks, {3}, "S(0)", {12, 2});
  plan.steps = {Step{StepOp::kCross, {}, plan.src, plan.dst, ReplicaPolicy::kEvenBytes}};
  return plan;
}

std::vector<Plan> plans_between_meshes() {
  return {crossing_plan({4, 5, 6}),
          crossing_plan({9, 1, 2}),
          plan_between({2, 2}, "S(0),P", {4, 5, 6}, {3}, "R", {12, 16}),
          plan_between({4}, "P", ranks_from(4, 8), {8}, "R", {4096, 4096}),
          plan_between({3}, "S(1)", ranks_from(2, 6), {2, 3}, "S(0),R", {7, 5}),
          plan_between({1}, "R", ranks_from(1, 3), {3}, "S(0)", {0, 3}),
          plan_between({32}, "S(0)", ranks_from(32, 16), {16}, "S(0)", {64, 64}),
          plan_between({16}, "P", ranks_from(16, 32), {32}, "R", {4096, 4096}),
          plan_between({1}, "R", ranks_from(8, 2048), {2048}, "S(0)", {2050, 64})};
}

std::vector<Plan> many_plans() {
  const std::vector<Layout> layouts = all_layouts(mesh_of({2, 2}), {7, 5}, {Placement::partial(ReduceOp::kSum)});
  std::vector<Plan> plans;
  for (const Layout& src : layouts) {
    for (const Layout& dst : layouts) plans.push_back(make_plan(src, dst));
  }
  plans.push_back(shared_plan(ReplicaPolicy::kWholeMessages, {12, 10}));
  plans.push_back(shared_plan(ReplicaPolicy::kEvenBytes, {12, 10}));
  plans.push_back(shared_plan(ReplicaPolicy::kEvenBytes, {9, 10}));  // splits messages within a row
  plans.push_back(plan_of({4}, {64}, "S(0)", "R"));
  plans.push_back(plan_of({4}, {3, 8}, "S(0)", "S(1)"));
  plans.push_back(plan_of({4}, {}, "P(max)", "R"));
  plans.push_back(plan_of({3}, {0, 3}, "S(0)", "R"));
  plans.push_back(plan_of({2, 4}, {24, 64}, "R,SS(0,3)", "R,S(1)"));
  plans.push_back(plan_of({2, 2, 2}, {8, 8, 8, 8}, "S(0),S(2),S(3)", "S(3),S(0),S(2)"));
  plans.push_back(plan_of({1, 16, 1}, {64, 64}, "S(0),S(0),R", "R,S(1),S(1)"));
  plans.push_back(plan_of({1}, {4}, "S(0)", "R"));
  plans.push_back(plan_of({8, 8}, {1024, 1024}, "P,R", "R,R"));
  plans.push_back(plan_of({8, 3}, {5, 3}, "S(0),SS(0,2)", "S(1),P"));
  plans.push_back(plan_of({17}, {}, "P", "R"));
  plans.push_back(plan_of({32}, {0}, "S(0)", "R"));
  for (Plan& plan : plans_between_meshes()) plans.push_back(std::move(plan));
  return plans;
}

// ---- any picture

TEST(Picture, IsWellFormed) {
  for (const Plan& plan : many_plans()) {
    EXPECT_NO_THROW(Document(to_svg(plan))) << to_string(plan);
  }
}

TEST(Picture, ReaderOfThisTestRejectsMalformedXml) {
  EXPECT_THROW(Document("<a><b></a></b>"), std::runtime_error);
  EXPECT_THROW(Document("<a>1 & 2</a>"), std::runtime_error);
  EXPECT_THROW(Document("<a b=\"<\"/>"), std::runtime_error);
  EXPECT_THROW(Document("<a>"), std::runtime_error);
  EXPECT_THROW(Document("<a>\x01</a>"), std::runtime_error);
}

// With the widest plausible fonts, text stays on the page and does not overlap other text.
TEST(Picture, TextIsNeitherCutOffNorOverlapping) {
  for (const Plan& plan : many_plans()) {
    const Document picture(to_svg(plan));
    const double page = std::stod(picture.attribute(0, "width"));
    std::vector<Rect> boxes;
    for (size_t i = 0; i < picture.elements().size(); ++i) {
      const Element& text = picture.elements()[i];
      if (text.name != "text") continue;
      const auto number = [&](const char* name) { return std::stod(text.attributes.at(name)); };
      const double size = number("font-size");
      const double w = text_width(text.text, {size, "", "", text.attributes.contains("font-weight")});
      const double x = number("x") - (text.attributes.at("text-anchor") == "middle" ? w / 2 : 0);
      const Rect box{x, number("y") - size * 0.75, w, size * 0.8};
      EXPECT_GE(box.x, 0) << text.text;
      EXPECT_LE(box.x + box.w, page) << text.text;
      for (const Rect& other : boxes) {
        const bool apart = box.x + box.w <= other.x || other.x + other.w <= box.x || box.y + box.h <= other.y ||
                           other.y + other.h <= box.y;
        EXPECT_TRUE(apart) << text.text << " in the picture of " << to_string(plan);
      }
      boxes.push_back(box);
    }
  }
}

TEST(Picture, IsTheSameForEqualPlans) {
  const Plan plan = plan_of({2, 2}, {7, 5}, "S(0),S(0)", "S(1),P");
  EXPECT_EQ(to_svg(plan), to_svg(from_bytes(to_bytes(plan))));
}

TEST(Picture, EscapesNames) {
  const std::string name = "<script>&\"'\x01]]>";
  for (const int64_t size : {2, 64}) {
    const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{name, "b"}, std::vector<int64_t>{size, 2});
    const Plan plan = make_plan(layout_of(mesh, {64, 64}, "S(0),R"), layout_of(mesh, {64, 64}, "S(1),R"));
    const std::string text = to_svg(plan);
    EXPECT_NO_THROW(Document{text});
    EXPECT_EQ(text.find("<script"), std::string::npos);
    EXPECT_NE(text.find("&lt;script&gt;&amp;&quot;&#39;\xEF\xBF\xBD"), std::string::npos);
    EXPECT_EQ(text.find('\x01'), std::string::npos);
  }
}

TEST(Picture, ShowsATrainingStep) {
  const StepSchedule step = make_schedule({{"<a>", 1, 512, 0, 512, 30'000'000, 20'000'000}},
                                          {{{0}, Pass::kForward, {}, 50'000'000}, {{0}, Pass::kBackward, {0}, 1}}, {});
  std::multiset<std::string> titles;
  const Document picture(to_svg(step));
  for (const Element& e : picture.elements()) titles.insert(e.name == "path" ? e.title : "");
  for (const char* title : {"use 0: forward <a>, 50 us", "gather <a> for use 0, 30 us",
                            "<a>: 512 B at offset 0, uses 0 to 1", "reduce the gradient of <a>, 20 us"}) {
    EXPECT_EQ(titles.count(title), 1u) << title;
  }
}

// ---- by rank

TEST(Picture, ShowsEveryRankStateAndStep) {
  const MeshPtr mesh = mesh_of({2, 2}, {7, 3, 11, 0});
  const Plan plan = make_plan(layout_of(mesh, {8, 8}, "P,S(0)"), layout_of(mesh, {8, 8}, "S(0),P"));
  const Document picture(to_svg(plan));
  for (const int rank : {7, 3, 11, 0}) EXPECT_TRUE(picture.has_text(concat("rank ", rank)));
  EXPECT_FALSE(picture.has_text("rank 1")) << "a position is not a rank";
  ASSERT_GE(plan.steps.size(), 2u);
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    EXPECT_TRUE(picture.has_text(concat(i + 1, ". ", step_op_name(step.op), " over ", mesh->names_of(step.mesh_dims))));
  }
  EXPECT_EQ(picture.of_class("sw-box").size(), 4 * (plan.steps.size() + 1));
}

TEST(Picture, FillsTheShareThatARankHolds) {
  const Document picture(to_svg(plan_of({2, 2}, {7, 5}, "S(0),S(1)", "S(1),S(0)")));
  const double before[] = {4 * 3, 4 * 2, 3 * 3, 3 * 2};
  const double after[] = {3 * 4, 3 * 3, 2 * 4, 2 * 3};
  for (size_t p = 0; p < 4; ++p) {
    EXPECT_NEAR(box_at(picture, p).filled_share, before[p] / 35, 0.005);
    EXPECT_NEAR(box_at(picture, 4 + p).filled_share, after[p] / 35, 0.005);
  }
}

// The received and kept parts add up to the held share.
TEST(Picture, FilledShareIsTheHeldShareInEveryState) {
  for (const Plan& plan : many_plans()) {
    const int64_t num_ranks = plan.src.mesh().size();
    if (!(plan.src.mesh() == plan.dst.mesh())) continue;
    if (num_ranks > kMaxRanksDrawn || plan.src.ndim() > 2 || plan.src.num_elements() == 0) continue;
    const Document picture(to_svg(plan));
    for (int64_t p = 0; p < num_ranks; ++p) {
      for (size_t state = 1; state <= plan.steps.size(); ++state) {
        const Step& step = plan.steps[state - 1];
        if (step.op == StepOp::kZeroFill) continue;
        const auto held = static_cast<double>(num_elements(step.after.region(p)));
        EXPECT_NEAR(box_at(picture, state * num_ranks + p).filled_share,
                    held / static_cast<double>(plan.src.num_elements()), 0.01)
            << "rank " << p << " after step " << state << " of " << to_string(plan);
      }
    }
  }
}

TEST(Picture, StripesPendingSums) {
  const Document picture(to_svg(plan_of({2, 2}, {8, 8}, "P,S(0)", "R,S(0)")));
  for (size_t i = 0; i < 8; ++i) {
    const int box = picture.of_class("sw-box").at(i);
    double share = 0;
    for (const int child : picture.children(box)) {
      if (picture.attribute(child, "fill") != "url(#sw-stripes)") continue;
      share += area_of(picture.attribute(child, "d")) / area_of(picture.attribute(picture.children(box).at(1), "d"));
    }
    EXPECT_NEAR(share, i < 4 ? 0.5 : 0, 0.005) << "half a tensor each before, none after";
  }
}

TEST(Picture, ColorsPartsByTheirSender) {
  const Document picture(to_svg(plan_of({4}, {64, 64}, "S(0)", "R")));
  std::vector<std::string> senders;
  for (size_t p = 0; p < 4; ++p) senders.push_back(box_at(picture, p).fills.at(0));
  EXPECT_EQ(std::set<std::string>(senders.begin(), senders.end()).size(), 4u);
  for (size_t p = 0; p < 4; ++p) EXPECT_EQ(box_at(picture, 4 + p).fills, senders);
}

TEST(Picture, DrawsAnArrowPerMessage) {
  const Document picture(to_svg(plan_of({4}, {3, 8}, "S(0)", "S(1)")));
  std::set<std::string> titles;
  for (const int arrow : picture.of_class("sw-sends")) titles.insert(picture.elements()[arrow].title);
  EXPECT_EQ(titles, (std::set<std::string>{"rank 0 -> rank 1: 8 B", "rank 0 -> rank 2: 8 B", "rank 0 -> rank 3: 8 B",
                                           "rank 1 -> rank 0: 8 B", "rank 1 -> rank 2: 8 B", "rank 1 -> rank 3: 8 B",
                                           "rank 2 -> rank 0: 8 B", "rank 2 -> rank 1: 8 B", "rank 2 -> rank 3: 8 B"}));
  EXPECT_EQ(picture.of_class("sw-sends").size(), 9u);
  EXPECT_EQ(picture.of_class("sw-stays").size(), 3u) << "rank 3 had nothing";
}

TEST(Picture, DrawsAsManyArrowsAsThereAreMessages) {
  for (const Plan& plan : many_plans()) {
    const std::vector<Rank> ranks = ranks_of(plan);
    if (static_cast<int64_t>(ranks.size()) > kMaxRanksDrawn) continue;
    int64_t messages = 0;
    for (const Step& step : plan.steps) {
      if (step.op == StepOp::kReduceScatter || step.op == StepOp::kAllReduce) continue;
      for (const Rank rank : ranks) messages += traffic_at(step, plan.lowering, rank).messages;
    }
    EXPECT_EQ(static_cast<int64_t>(Document(to_svg(plan)).of_class("sw-sends").size()), messages) << to_string(plan);
  }
}

TEST(Picture, JoinsTheGroupsOfAReduction) {
  const Document picture(to_svg(plan_of({2, 4}, {1024, 1024}, "P(max),R", "R,R")));
  std::vector<std::string> knots;
  for (const Element& element : picture.elements()) {
    if (element.name == "circle") knots.push_back(element.title);
  }
  EXPECT_EQ(knots, (std::vector<std::string>{"max over ranks 0, 4", "max over ranks 1, 5", "max over ranks 2, 6",
                                             "max over ranks 3, 7"}));
  EXPECT_EQ(picture.of_class("sw-gives").size(), 8u);
  EXPECT_EQ(picture.of_class("sw-takes").size(), 8u);
}

TEST(Picture, LabelsPlansWithoutSteps) {
  const Document picture(to_svg(plan_of({4}, {64, 64}, "S(0)", "S(0)")));
  EXPECT_TRUE(picture.has_text("no steps"));
  EXPECT_EQ(picture.of_class("sw-box").size(), 8u);
  EXPECT_TRUE(picture.of_class("sw-sends").empty());
}

TEST(Picture, LabelsEmptyParts) {
  EXPECT_TRUE(Document(to_svg(plan_of({3}, {0, 3}, "S(0)", "R"))).has_text("no elements"));
  const Document picture(to_svg(plan_of({4}, {3, 8}, "S(0)", "R")));
  EXPECT_TRUE(picture.has_text("empty"));
  EXPECT_EQ(box_at(picture, 3).filled_share, 0);
}

TEST(Picture, DrawsPartsOfTooManyPiecesPale) {
  const MeshPtr mesh = mesh_of({2});
  const Layout src(mesh, {800, 8}, DType::parse("float32"), parse_placements("SS(0,200)"), {},
                   StridedMeaning::kLiteral);
  const Document picture(to_svg(make_plan(src, layout_of(mesh, {800, 8}, "R"))));
  EXPECT_FALSE(picture.of_class("sw-pale").empty());
  EXPECT_TRUE(picture.has_text("pale: bounding range of more than 128 pieces"));
}

// Rank 0 has rows 6, 7, 0 and 1 of 32 bytes, and rank 1 has the others.
TEST(Picture, DrawsARearrangement) {
  const Plan plan = plan_of({2}, {8, 8}, "Pieces(0,6-8+0-2:2-6)", "S(0)");
  ASSERT_EQ(plan.steps[0].op, StepOp::kRearrange);
  const Document picture(to_svg(plan));
  std::set<std::string> titles;
  for (const char* kind : {"sw-sends", "sw-stays"}) {
    for (const int arrow : picture.of_class(kind)) titles.insert(picture.elements()[arrow].title);
  }
  EXPECT_EQ(titles, (std::set<std::string>{"rank 0 -> rank 1: 64 B", "rank 0 keeps 64 B", "rank 1 -> rank 0: 64 B",
                                           "rank 1 keeps 64 B"}));
  ASSERT_EQ(picture.of_class("sw-box").size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(box_at(picture, i).filled_share, 0.5, 0.005);
  for (size_t i = 2; i < 4; ++i) EXPECT_EQ(box_at(picture, i).fills.size(), 2u) << "from two senders";
}

// ---- between two meshes

// The crossing in exchange/grid_exchange.h, with rows of 8 bytes.
TEST(Picture, DrawsMessagesBetweenMeshes) {
  const Document picture(to_svg(crossing_plan({4, 5, 6})));
  std::set<std::string> titles;
  for (const int arrow : picture.of_class("sw-sends")) titles.insert(picture.elements()[arrow].title);
  EXPECT_EQ(titles,
            (std::set<std::string>{"rank 0 -> rank 4: 24 B", "rank 1 -> rank 4: 8 B", "rank 1 -> rank 5: 16 B",
                                   "rank 2 -> rank 5: 16 B", "rank 2 -> rank 6: 8 B", "rank 3 -> rank 6: 24 B"}));
  EXPECT_EQ(picture.of_class("sw-sends").size(), 6u);
  EXPECT_TRUE(picture.of_class("sw-stays").empty()) << "no rank is on both meshes";
  ASSERT_EQ(picture.of_class("sw-box").size(), 4u + 3u) << "ranks have no box in states of the other mesh";
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(box_at(picture, i).filled_share, 0.5, 0.005);
  for (size_t i = 4; i < 7; ++i) {
    EXPECT_NEAR(box_at(picture, i).filled_share, 1.0 / 3, 0.005);
    EXPECT_EQ(box_at(picture, i).fills.size(), 2u) << "from two senders";
  }
  for (const char* text : {"a=0 b=1", "a=2", "1. cross to a=3"}) EXPECT_TRUE(picture.has_text(text)) << text;
}

TEST(Picture, DrawsDataThatStaysOnRanksOfBothMeshes) {
  const Document picture(to_svg(crossing_plan({9, 1, 2})));
  std::set<std::string> kept;
  for (const int arrow : picture.of_class("sw-stays")) kept.insert(picture.elements()[arrow].title);
  EXPECT_EQ(kept, (std::set<std::string>{"rank 1 keeps 16 B", "rank 2 keeps 32 B"}));
  EXPECT_TRUE(picture.has_text("rank 9"));
}

TEST(Picture, AddsUpMessagesOfBlocksOfRanks) {
  const Plan plan = plan_between({32}, "S(0)", ranks_from(32, 16), {16}, "S(0)", {64, 64});
  ASSERT_EQ(plan.steps.size(), 1u);
  const Document picture(to_svg(plan));
  EXPECT_EQ(picture.of_class("sw-block").size(), 16u);
  std::set<std::string> titles;
  for (const int arrow : picture.of_class("sw-flow")) titles.insert(picture.elements()[arrow].title);
  std::set<std::string> expected;
  for (int b = 0; b < 8; ++b) {
    expected.insert(concat("ranks ", 4 * b, " to ", 4 * b + 3, " -> ranks ", 32 + 2 * b, " to ", 33 + 2 * b,
                           ": 2048 B in 4 messages"));
  }
  EXPECT_EQ(titles, expected);
}

TEST(Picture, OfThousandsOfRanksOfTwoMeshesIsSmall) {
  const Plan plan = plan_between({1}, "R", ranks_from(8, 2048), {2048}, "S(0)", {2050, 64});
  const std::string svg = to_svg(plan);
  EXPECT_LT(svg.size(), 50'000u);
  EXPECT_FALSE(Document(svg).of_class("sw-flow").empty());
}

// ---- by mesh dim

TEST(Picture, OfAMillionRanksIsSmallAndQuick) {
  const MeshPtr mesh = mesh_of({64, 128, 128});
  std::vector<Layout> layouts;
  for (const char* placements : {"S(0),P,S(1)", "S(0),S(0),S(1)", "R,S(0),S(1)"}) {
    layouts.push_back(layout_of(mesh, {1 << 20, 1 << 14}, placements));
  }
  const Plan plan = plan_through(layouts);
  ASSERT_EQ(plan.steps.size(), 2u);
  const auto begin = std::chrono::steady_clock::now();
  const std::string svg = to_svg(plan);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_LT(svg.size(), 50'000u);
  const Document picture(svg);
  EXPECT_TRUE(picture.of_class("sw-box").empty()) << "ranks are not drawn";
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(picture.has_text(name));
  EXPECT_TRUE(picture.has_text("64 ranks"));
  EXPECT_TRUE(picture.has_text("128 contributions"));
  EXPECT_EQ(picture.of_class("sw-spans").size(), plan.steps.size());
}

TEST(Picture, PutsAKnotOnEveryMeshDimThatAStepSpans) {
  const MeshPtr mesh = mesh_of({8, 4, 2});
  const Plan plan =
      plan_through({layout_of(mesh, {1024, 1024}, "S(0),R,S(0)"), layout_of(mesh, {1024, 1024}, "S(1),R,S(1)")});
  ASSERT_EQ(plan.steps.size(), 1u);
  const Document picture(to_svg(plan));
  const std::vector<int> bars = picture.of_class("sw-spans");
  ASSERT_EQ(bars.size(), 1u);
  EXPECT_EQ(picture.elements()[bars[0]].title, "all_to_all over a+c, groups of 16");
  int knots = 0;
  for (const int child : picture.children(bars[0])) knots += picture.elements()[child].name == "circle" ? 1 : 0;
  EXPECT_EQ(knots, 2);
}

// ---- the pieces

TEST(Svg, LengthsHaveNoTrailingZeros) {
  EXPECT_EQ(px(0), "0");
  EXPECT_EQ(px(-0.001), "0");
  EXPECT_EQ(px(12.5), "12.5");
  EXPECT_EQ(px(12.05), "12.05");
  EXPECT_EQ(px(-3.256), "-3.26");
}

TEST(Svg, ShortensBetweenCharacters) {
  EXPECT_EQ(shortened("abcdef", 6), "abcdef");
  EXPECT_EQ(shortened("abcdefg", 6), "abc...");
  EXPECT_EQ(shortened("\xC3\xA4\xC3\xA4\xC3\xA4\xC3\xA4\xC3\xA4", 4), "\xC3\xA4...");
}

TEST(Svg, ReplacesCharactersThatXmlForbids) {
  EXPECT_EQ(escaped("a\nb"), "a\nb");
  EXPECT_EQ(escaped("\xF0\x9F\x98\x80"), "\xF0\x9F\x98\x80");
  for (const char* bad : {"\x01", "\x7F", "\xC0", "\xFF"}) EXPECT_EQ(escaped(bad), "\xEF\xBF\xBD");
  EXPECT_EQ(escaped("\xC0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD") << "overlong";
  EXPECT_EQ(escaped("\xEF\xBF\xBF"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD") << "no character";
}

}  // namespace
}  // namespace shardwright
