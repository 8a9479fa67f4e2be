// Detects products that wait for a flag that is never set.
//
// Such a product cannot be stopped, and the host does not wait for it. So a thread checks each product once the timeout
// has passed since its submission. If the device has not finished the product, the thread writes a message to standard
// error and aborts the process, as NCCL's watchdog does for collectives.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <string>

namespace shardwright {

// Registers a product for a check once `timeout` has passed; 0 means no check. `end`: an event recorded after the
// product. `make_message`: returns the error message; the checking thread calls it only if the product has not ended.
void watch_product(c10::Event end, std::chrono::milliseconds timeout, std::function<std::string()> make_message);

}  // namespace shardwright
