// The device's memory: host memory that behaves as the CUDA caching allocator's does.
//
// What is freed belongs at once to the stream it was allocated on, and is filled with 0xFF (NaN in every floating-point
// format) in that stream's order when it is given out again: who reads it without waiting reads poison. A block that
// was used on other streams (`record_stream`) comes back when those have passed. Bytes count as `allocated_bytes` does:
// rounded up to 512, from the allocation to the free. Must not: know Python.
#pragma once

#include <c10/core/Allocator.h>

#include "streams.hpp"

namespace sim {

struct Block {
  char* begin;
  size_t bytes;  // rounded
  Stream* own;
  std::vector<Stream*> used_on;  // besides its own
  Accesses accesses;
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// The block behind a storage's data; null for none (an empty tensor, or memory that is not the device's).
Block* block_of(const c10::DataPtr& pointer);
void record_stream(const c10::DataPtr& pointer, Stream& stream);

struct MemoryCounts {
  int64_t live_bytes, peak_bytes, allocations;
};
MemoryCounts memory_counts(int device);
void reset_peak(int device);

}  // namespace sim
