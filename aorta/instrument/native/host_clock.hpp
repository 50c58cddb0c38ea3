// The clock of Python's time.perf_counter_ns() on Linux: CLOCK_MONOTONIC.

#pragma once

#include <chrono>
#include <cstdint>

namespace aorta {

// Replacement clock for tests in virtual time; null: the real clock.
inline int64_t (*other_clock)() = nullptr;

inline int64_t now_ns() {
  if (other_clock != nullptr) {
    return other_clock();
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace aorta
