// Compares the torch version that this is built against.
#pragma once

#include <torch/version.h>

#define SHARDWRIGHT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
