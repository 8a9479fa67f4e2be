#include "program/stages.h"

#include <algorithm>
#include <cstddef>

#include "program/in_segments.h"

namespace shardwright {
namespace {

// Lists the instructions of all segments in the order of the program, with the numbers of elements whose lives begin
// and end with each instruction.
class SegmentLives {
 public:
  SegmentLives(const std::vector<SketchedSegment>& segments, int64_t num_segments, int64_t num_steps)
      : segments_(segments), num_segments_(num_segments), num_steps_(num_steps), progress_(num_segments) {}

  // Returns the result of peaks_in_stages(). Must be called once.
  std::vector<int64_t> peaks(int64_t num_needed) {
    for_each_stage(num_segments_, num_steps_,
                   [&](int64_t segment, int64_t stage) { append_stage(segment, stage, num_needed); });
    std::vector<int64_t> peaks(num_steps_, 0);
    int64_t live = 0;
    for (const Change& change : changes_) {
      live += change.begins;
      peaks[change.step] = std::max(peaks[change.step], live);
      live -= change.ends;
    }
    return peaks;
  }

 private:
  // The numbers of elements whose lives begin and end with an instruction.
  struct Change {
    int64_t step = 0;
    int64_t begins = 0;
    int64_t ends = 0;
  };
  // The indices in changes_ of the instructions of a segment that have been appended so far.
  struct Progress {
    std::vector<size_t> instructions;  // by instruction of the segment's sketch
    size_t input_copy = 0;             // the copy from the input
  };

  const SketchedSegment& of(int64_t segment) const { return segments_[segments_.size() == 1 ? 0 : segment]; }

  // Appends the instructions of one pipeline stage of a segment to changes_. After the segment's last stage, also adds
  // the lives of its buffers. `num_needed` is the number of elements of the full output.
  void append_stage(int64_t segment, int64_t stage, int64_t num_needed) {
    const SketchedSegment& sketched = of(segment);
    Progress& progress = progress_[segment];
    if (stage == 0 && sketched.num_input_elements > 0) {
      progress.input_copy = changes_.size();
      changes_.push_back({0, sketched.num_input_elements, 0});
    }
    const std::vector<int>& stages = sketched.sketch.stages();
    while (progress.instructions.size() < stages.size() && stages[progress.instructions.size()] == stage) {
      const int step = sketched.sketch.steps()[progress.instructions.size()];
      progress.instructions.push_back(changes_.size());
      changes_.push_back({step, 0, 0});
    }
    if (stage == num_steps_) add_lives(sketched, progress, num_needed);
  }

  // Appends the copy to the output, and adds the lives of the segment's buffers to changes_. Called in the last
  // pipeline stage of a segment, when the indices of all its instructions are known.
  void add_lives(const SketchedSegment& sketched, const Progress& progress, int64_t num_needed) {
    const std::vector<Sketch::Buffer>& buffers = sketched.sketch.buffers();
    if (sketched.num_input_elements > 0) {
      const int last = buffers[0].last;
      changes_[last < 0 ? progress.input_copy : progress.instructions[last]].ends += sketched.num_input_elements;
    }
    const bool copies = buffers[sketched.result].count > 0;
    if (copies) {
      changes_.push_back({num_steps_ - 1, has_output_ ? 0 : num_needed, 0});
      has_output_ = true;
    }
    for (size_t b = 1; b < buffers.size(); ++b) {
      const Sketch::Buffer& buffer = buffers[b];
      if (buffer.first < 0) continue;
      changes_[progress.instructions[buffer.first]].begins += buffer.count;
      const bool is_copied = copies && static_cast<int>(b) == sketched.result;
      changes_[is_copied ? changes_.size() - 1 : progress.instructions[buffer.last]].ends += buffer.count;
    }
  }

  const std::vector<SketchedSegment>& segments_;
  int64_t num_segments_;
  int64_t num_steps_;
  std::vector<Progress> progress_;
  std::vector<Change> changes_;  // indexed by instruction of the whole program
  bool has_output_ = false;
};

}  // namespace

std::vector<int64_t> peaks_in_stages(const std::vector<SketchedSegment>& segments, int64_t num_segments,
                                     int64_t num_steps, int64_t num_needed) {
  return SegmentLives(segments, num_segments, num_steps).peaks(num_needed);
}

}  // namespace shardwright
