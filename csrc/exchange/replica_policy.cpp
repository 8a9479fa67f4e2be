#include "exchange/replica_policy.h"

#include "support/names.h"

namespace shardwright {

const char* replica_policy_name(ReplicaPolicy policy) {
  switch (policy) {
    case ReplicaPolicy::kAligned:
      return "aligned";
    case ReplicaPolicy::kWholeMessages:
      return "whole_messages";
    case ReplicaPolicy::kEvenBytes:
      return "even_bytes";
    case ReplicaPolicy::kNodeLocal:
      return "node_local";
  }
  return "?";
}

ReplicaPolicy parse_replica_policy(const std::string& name) {
  return parse_name("replica_policy", name, ReplicaPolicy::kNodeLocal, replica_policy_name);
}

}  // namespace shardwright
