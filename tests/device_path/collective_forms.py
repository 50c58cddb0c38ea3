"""Every form of every collective of c10d: a scene of the device path.

Must not: keep what its callers would not keep.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.device_path.rig import ELEMENTS, Scene
from tests.simulated import device as simulated

Told = tuple[Any, Any]
SIZES = (ELEMENTS // 2, ELEMENTS, 2 * ELEMENTS)
FORMS = (
    "all_reduce",
    "all_reduce, coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor, coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor, coalesced",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single, of other sizes",
    "gather",
    "scatter",
    "send and recv",
)


def garbage(scene: Scene) -> list[torch.Tensor]:
    """Who writes to memory of the sizes that collectives use."""
    return [torch.full((size,), -5.0, device=scene.device) for size in SIZES for _ in range(6)]


def every_form(scene: Scene) -> Told:
    """Every collective of c10d in each of its forms, synchronous and not, with callers that keep nothing but the handle
    and the result, and others that ask for the memory at once, also where the backend uses tensors of its own, which
    the first wait for its handle releases. Wrong values, races, kernels that the record does not have, rows.
    """
    zeros = []
    with scene.one_step():
        simulated.lengths(copy_d2d=(0, 0.0))  # the backend's own copies are part of what the record has
        for name in FORMS:
            for asynchronous in (False, True):
                torch.mm(inputs := scene.square(), inputs)  # the collective waits for it
                work, outs, shares = issued(scene, name, asynchronous)
                others = garbage(scene)
                if work is not None:
                    work.wait()
                zeros += [
                    (name, asynchronous, (out - share).abs().max()) for out, share in zip(outs, shares, strict=True)
                ]
                del others, outs
    (line,) = scene.lines
    timed = set(scene.spans())
    return (
        [(name, asynchronous) for name, asynchronous, zero in zeros if float(zero) != 0],
        [race.words for race in simulated.races()],
        [kernel for kernel in scene.kernels() if kernel[1:] not in timed],
        (line.coverage.complete, len(line.collectives)),
    ), ([], [], [], (True, 2 * len(FORMS)))


def issued(scene: Scene, form: str, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    """Issue it: the handle, what is read in the end, and the values that are right in each."""
    rank, now = scene.rank, {"async_op": asynchronous}
    x, out = scene.tensor(rank + 1.0), scene.tensor(0.0)
    whole, part = torch.empty(2 * ELEMENTS, device=scene.device), torch.empty(ELEMENTS // 2, device=scene.device)
    pair = [scene.tensor(0.0) for _ in range(2)]
    match form:
        case "all_reduce":
            return dist.all_reduce(x, **now), [x], [3]
        case "broadcast":
            return dist.broadcast(x, 1, **now), [x], [2]
        case "reduce":
            return dist.reduce(x, 0, **now), [x][rank:], [3][rank:]
        case "all_gather":
            return dist.all_gather(pair, x, **now), pair, [1, 2]
        case "all_gather_into_tensor":
            return dist.all_gather_into_tensor(whole, x, **now), list(whole.chunk(2)), [1, 2]
        case "reduce_scatter":
            return dist.reduce_scatter(out, [x, x.clone()], **now), [out], [3]
        case "reduce_scatter_tensor":
            return dist.reduce_scatter_tensor(part, x, **now), [part], [3]
        case "all_to_all":
            return dist.all_to_all(pair, [x, x.clone()], **now), pair, [1, 2]
        case "all_to_all_single":
            return dist.all_to_all_single(out, x, **now), list(out.chunk(2)), [1, 2]
        case "all_to_all_single, of other sizes":
            sizes = [ELEMENTS // 4, ELEMENTS // 4 * 3]  # what each rank gets of both
            out = torch.empty(2 * sizes[rank], device=scene.device)
            return dist.all_to_all_single(out, x, [sizes[rank]] * 2, sizes, **now), list(out.chunk(2)), [1, 2]
        case "gather":
            outs = [] if rank else pair
            return dist.gather(x, outs or None, 0, **now), outs, [1.0, 2.0][: len(outs)]
        case "scatter":
            sources = [scene.tensor(other + 5.0) for other in range(2)] if rank else None
            return dist.scatter(out, sources, 1, **now), [out], [rank + 5.0]
        case "send and recv":
            if rank == 0:
                return (dist.isend if asynchronous else dist.send)(x, 1), [x], [1]
            work = (dist.irecv if asynchronous else dist.recv)(out, 0)
            return work if asynchronous else None, [out], [1]
    with dist._coalescing_manager(device=scene.device, async_ops=asynchronous) as manager:
        outs = []
        for source in (x, x.clone()):
            if form.startswith("all_reduce"):
                dist.all_reduce(source)
                outs.append(source)
            elif form.startswith("all_gather"):
                dist.all_gather_into_tensor(whole := source.new_empty(2 * ELEMENTS), source)
                outs.append(whole[ELEMENTS:])
            else:
                dist.reduce_scatter_tensor(part := torch.empty_like(part), source)
                outs.append(part)
    return manager if asynchronous else None, outs, [2 if "gather" in form else 3] * 2
