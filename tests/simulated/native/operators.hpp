// Torch's operators on the simulated device.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.hpp"

namespace sim {

// The same memory as torch's CPU kernels know it. Holds nothing: the caching allocator keeps the bytes for its stream.
at::Tensor host_alias(const at::Tensor& tensor);
// What a tensor of the device occupies; nothing for an empty one or for one that is not the device's.
void touch(std::vector<Touched>& into, const at::Tensor& tensor, bool write);
int64_t bytes_of(const at::Tensor& tensor);
void resize_storage(c10::StorageImpl* storage, size_t bytes, int device);

}  // namespace sim
