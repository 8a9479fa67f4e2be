// The memory of programs in segments (program/in_segments.h), from sketches of single segments.
#pragma once

#include <cstdint>
#include <vector>

#include "program/sketch.h"

namespace shardwright {

// A rank's instructions in one segment, or in each segment if segments are uniform.
struct SketchedSegment {
  Sketch sketch;
  int64_t num_input_elements = 0;  // number of elements of the segment's input, which is copied from the full input
  int result = 0;  // the buffer that is copied to the whole output; nothing is copied if it has no elements
};

// Returns the maximum number of elements that are allocated at once during each step of `num_segments` segments. The
// whole input belongs to the caller; the whole output has `num_needed` elements.
std::vector<int64_t> peaks_in_stages(const std::vector<SketchedSegment>& segments, int64_t num_segments,
                                     int64_t num_steps, int64_t num_needed);

}  // namespace shardwright
