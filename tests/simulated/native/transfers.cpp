// The collectives' arithmetic. See transfers.hpp.
#include "transfers.hpp"

#include <ATen/ATen.h>

#include "operators.hpp"

namespace sim {
namespace {

using Op = c10d::ReduceOp;
using Sizes = std::vector<int64_t>;

int64_t bytes_in(const Tensors& list) {
  int64_t bytes = 0;
  for (const auto& one : list) bytes += one.numel();
  return bytes;
}

Tensors raws(const Tensors& list) {
  Tensors made;
  for (const auto& one : list) made.push_back(raw(one));
  return made;
}

at::Tensor joined(const Tensors& list) { return list.size() == 1 ? list[0] : at::cat(list); }

// Writes consecutive pieces of `from` into the list.
void deal(const at::Tensor& from, const Tensors& into) {
  int64_t begin = 0;
  for (const auto& one : into) {
    one.copy_(from.narrow(0, begin, one.numel()));
    begin += one.numel();
  }
}

// Rows of values, one of each rank, in the order of ranks: the same result everywhere, to the bit.
at::Tensor reduced(at::Tensor rows, const Op& op) {
  const auto type = rows.scalar_type();
  if (type == at::kHalf || type == at::kBFloat16) rows = rows.to(at::kFloat);
  if (op.op_ == Op::PREMUL_SUM) {
    const auto* factor = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    rows = factor->tensor_factor.defined() ? rows * host_alias(factor->tensor_factor) : rows * factor->double_factor;
  }
  auto result = rows[0].clone();
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const auto row = rows[rank];
    switch (op.op_) {
      case Op::SUM:
      case Op::AVG:
      case Op::PREMUL_SUM:
        type == at::kBool ? result.logical_or_(row) : result.add_(row);
        break;
      case Op::PRODUCT: result.mul_(row); break;
      case Op::MIN: result = at::minimum(result, row); break;
      case Op::MAX: result = at::maximum(result, row); break;
      default: TORCH_CHECK(false, "Cannot use this ReduceOp with NCCL");
    }
  }
  if (op.op_ == Op::AVG) {
    if (at::isFloatingType(result.scalar_type())) {
      result.div_(rows.size(0));
    } else {
      result = result.div(rows.size(0), "trunc");
    }
  }
  return result.to(type);
}

at::Tensor values(const at::Tensor& bytes, at::ScalarType type) { return bytes.view(type); }

// A complex number is two real ones to whoever adds them.
at::ScalarType real_type(const at::Tensor& tensor) {
  return tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type()) : tensor.scalar_type();
}

}  // namespace

at::Tensor raw(const at::Tensor& tensor) {
  void* data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
  return at::from_blob(data, {bytes_of(tensor)}, at::TensorOptions().dtype(at::kByte));
}

Transfer allreduce_transfer(const at::Tensor& tensor, const Op& op) {
  return [own = raw(tensor), type = real_type(tensor), op](Link& link) {
    if (own.numel() == 0) return;
    values(own, type).copy_(reduced(values(link.allgather(own), type), op));
  };
}

Transfer reduce_transfer(const at::Tensor& output, const at::Tensor& input, const Op& op, int root) {
  return [to = raw(output), from = raw(input), type = real_type(input), op, root](Link& link) {
    if (from.numel() == 0) return;
    const auto rows = values(link.allgather(from), type);
    if (link.rank == root) values(to, type).copy_(reduced(rows, op));
  };
}

Transfer broadcast_transfer(const at::Tensor& tensor, int root) {
  return [own = raw(tensor), root](Link& link) {
    Sizes to(link.size, 0), from(link.size, 0);
    to[root] = own.numel();
    const bool sends = link.rank == root;
    if (sends) from.assign(link.size, own.numel());
    const auto sent = sends ? own.repeat({link.size}) : at::empty({0}, at::kByte);
    auto received = at::empty({own.numel()}, at::kByte);
    link.alltoall(received, sent, to, from);
    if (!sends) own.copy_(received);
  };
}

Transfer allgather_transfer(const Tensors& outputs, const at::Tensor& input) {
  return [to = raws(outputs), from = raw(input)](Link& link) { deal(link.allgather(from).view({-1}), to); };
}

Transfer reduce_scatter_transfer(const at::Tensor& output, const Tensors& inputs, const Op& op) {
  return [to = raw(output), from = raws(inputs), type = real_type(output), op](Link& link) {
    if (to.numel() == 0) return;
    const Sizes sizes(link.size, to.numel());
    auto rows = at::empty({link.size * to.numel()}, at::kByte);
    link.alltoall(rows, joined(from), sizes, sizes);
    values(to, type).copy_(reduced(values(rows.view({link.size, -1}), type), op));
  };
}

Transfer alltoall_transfer(const Tensors& outputs, const Tensors& inputs) {
  return [to = raws(outputs), from = raws(inputs)](Link& link) {
    Sizes to_sizes, from_sizes;
    for (const auto& one : to) to_sizes.push_back(one.numel());
    for (const auto& one : from) from_sizes.push_back(one.numel());
    auto received = at::empty({bytes_in(to)}, at::kByte);
    link.alltoall(received, joined(from), to_sizes, from_sizes);
    deal(received, to);
  };
}

Transfer alltoall_split_transfer(const at::Tensor& output, const at::Tensor& input, const Sizes& output_rows,
                                 const Sizes& input_rows, int size) {
  auto in_bytes = [size](const at::Tensor& tensor, Sizes rows) {
    const auto all = bytes_of(tensor);
    if (rows.empty()) return Sizes(size, all / size);
    const auto row = tensor.size(0) == 0 ? 0 : all / tensor.size(0);
    for (auto& one : rows) one *= row;
    return rows;
  };
  return [to = raw(output), from = raw(input), to_sizes = in_bytes(output, output_rows),
          from_sizes = in_bytes(input, input_rows)](Link& link) {
    auto received = at::empty_like(to);
    link.alltoall(received, from, to_sizes, from_sizes);
    to.copy_(received);
  };
}

Transfer gather_transfer(const Tensors& outputs, const at::Tensor& input, int root) {
  return [to = raws(outputs), from = raw(input), root](Link& link) {
    Sizes to_sizes(link.size, link.rank == root ? from.numel() : 0), from_sizes(link.size, 0);
    from_sizes[root] = from.numel();
    auto received = at::empty({link.rank == root ? link.size * from.numel() : 0}, at::kByte);
    link.alltoall(received, from, to_sizes, from_sizes);
    if (link.rank == root) deal(received, to);
  };
}

Transfer scatter_transfer(const at::Tensor& output, const Tensors& inputs, int root) {
  return [to = raw(output), from = raws(inputs), root](Link& link) {
    const bool sends = link.rank == root;
    Sizes to_sizes(link.size, 0), from_sizes(link.size, sends ? to.numel() : 0);
    to_sizes[root] = to.numel();
    auto received = at::empty_like(to);
    link.alltoall(received, sends ? joined(from) : at::empty({0}, at::kByte), to_sizes, from_sizes);
    to.copy_(received);
  };
}

}  // namespace sim
