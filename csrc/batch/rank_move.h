// The messages of one rank for an item of a batch, and the part that stays on the rank.
#pragma once

#include <optional>
#include <vector>

#include "layout/rank.h"
#include "layout/selection.h"

namespace shardwright {

struct RankMove {
  struct Message {
    Rank peer{};
    Selection elements;
  };

  // By ascending peer. Messages between two ranks are in the same order on both.
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::optional<Selection> own;  // what stays here, if anything does
  std::vector<LocalAxis> src_axes;
  std::vector<LocalAxis> dst_axes;
};

}  // namespace shardwright
