// The memory of programs in segments (program/in_segments.h), from sketches of single segments.
#pragma once

#include <cstdint>
#include <vector>

#include "program/sketch.h"

namespace shardwright {

// The sketch of a rank's program for one segment, or for each segment if segments are uniform.
struct SketchedSegment {
  Sketch sketch;
  int64_t num_input_elements = 0;  // number of elements of the segment's input, which is copied from the full input
  int result = 0;  // the buffer that is copied to the full output; nothing is copied if it has no elements
};

// Returns, for each of `num_steps` steps, the maximum number of elements that are allocated at once during the step, in
// a program of `num_segments` segments. `segments` has one item per segment, or one for all uniform segments. The full
// output has `num_needed` elements; the full input belongs to the caller and does not count.
std::vector<int64_t> peaks_in_stages(const std::vector<SketchedSegment>& segments, int64_t num_segments,
                                     int64_t num_steps, int64_t num_needed);

}  // namespace shardwright
