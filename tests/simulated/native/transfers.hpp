// What each collective does to bytes once everybody is ready: run in a stream's thread, on the ranks' own memory.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>

#include "link.hpp"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using Transfer = std::function<void(Link&)>;

// Raw bytes of a dense tensor of the device, as the host's kernels know them.
at::Tensor raw(const at::Tensor& tensor);

Transfer allreduce_transfer(const at::Tensor& tensor, const c10d::ReduceOp& op);
Transfer reduce_transfer(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op, int root);
Transfer broadcast_transfer(const at::Tensor& tensor, int root);
Transfer allgather_transfer(const Tensors& outputs, const at::Tensor& input);  // one output, or one of each rank
Transfer reduce_scatter_transfer(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
Transfer alltoall_transfer(const Tensors& outputs, const Tensors& inputs);     // one of each rank
// Rows of the first dimension that come from and go to each of `size` ranks; empty: equal parts.
Transfer alltoall_split_transfer(const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                                 int size);
Transfer gather_transfer(const Tensors& outputs, const at::Tensor& input, int root);
Transfer scatter_transfer(const at::Tensor& output, const Tensors& inputs, int root);

}  // namespace sim
