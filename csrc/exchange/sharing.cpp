#include "exchange/sharing.h"

#include "support/names.h"

namespace shardwright {

const char* sharing_name(Sharing sharing) {
  switch (sharing) {
    case Sharing::kNone:
      return "none";
    case Sharing::kMessages:
      return "messages";
    case Sharing::kBytes:
      return "bytes";
    case Sharing::kNodes:
      return "nodes";
  }
  return "?";
}

Sharing parse_sharing(const std::string& name) { return parse_name("sharing", name, Sharing::kNodes, sharing_name); }

}  // namespace shardwright
