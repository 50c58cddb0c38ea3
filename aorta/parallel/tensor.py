"""Tensor parallelism: the ranks of a mesh compute a layer together, each with a part of its heads or hidden units.

Must not know which model it is; the workload says which layers are split by columns and which by rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from aorta.parallel.plan import Parts


def split(parts: Iterable[Parts], mesh: DeviceMesh) -> None:
    """Split the layers of every part over the 1-D `mesh`.

    A part makes one all-reduce in forward, after its `rows`, and one in backward for each of its `columns` layers:
    Megatron-LM's scheme (Shoeybi et al., 2019), without its fusing of the layers that share an input.
    """
    for module, layers in parts:
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if how == "columns" else RowwiseParallel() for name, how in layers.items()
        }
        parallelize_module(module, mesh, plan)
