// Between torch's streams, events and generators and the simulated device's.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include "streams.hpp"

namespace sim {

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Stream as_c10(const Stream& stream);
Stream& from_c10(const c10::Stream& stream);

// Of c10 events' native handles. Milliseconds as cudaEventElapsedTime gives them.
double elapsed_ms(void* one, void* other);
int64_t event_ns(void* event);

at::Generator& generator_of(int device);

}  // namespace sim
