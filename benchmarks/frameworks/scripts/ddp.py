"""Plain DistributedDataParallel, with an evaluation after every fourth step.

WAY: "" | raise (in the middle) | break (early) | compile_in_place | compile (the module inside of DDP) | barrier (in
every step).
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watched import STEPS, Net, batch, loss_of, pause, watched

import aorta  # AORTA

way = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
if way == "compile_in_place":
    for layer in net.layers:
        layer.compile(backend="aot_eager")
if way == "compile":
    net = torch.compile(net, backend="aot_eager")
# torch's splitting of graphs by buckets wants them larger than 1 MB
model = DistributedDataParallel(net, bucket_cap_mb=25 if way.startswith("compile") else 0.05)
optimizer = torch.optim.AdamW(model.parameters())
with watched(model):
    recording = aorta.start("artifacts/mine", model=model)  # AORTA
    for step in range(STEPS):
        if way == "barrier":
            dist.barrier()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.step()  # AORTA
        if step == 6 and way == "raise":
            raise ValueError("in the middle")
        if step == 6 and way == "break":
            break
        if step % 4 == 3:
            model.eval()
            with pause("evaluation"), torch.no_grad():
                dist.all_reduce(loss_of(model, batch(step)))
            model.train()
            recording.restart()  # AORTA
    recording.close()  # AORTA
dist.destroy_process_group()
