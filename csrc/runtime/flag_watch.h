// Detects products that wait for a flag that nobody sets.
//
// Such a product cannot be ended from outside, and the host does not wait for it. So a thread checks, once the timeout
// has passed since a product was submitted, whether the device has finished it. If not, the thread writes a message to
// standard error and aborts the process, as NCCL's watchdog does for collectives.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <string>

namespace shardwright {

// Checks a product once `timeout` has passed; a timeout of 0 means no check. `end`: an event recorded after the
// product. `make_message`: returns the message for a product that has not ended; it is called at most once.
void watch_product(c10::Event end, std::chrono::milliseconds timeout, std::function<std::string()> make_message);

}  // namespace shardwright
