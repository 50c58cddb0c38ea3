"""Plain DistributedDataParallel. WAY: "" | raise (in the middle) | break (early) | compile_in_place."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watched import STEPS, Net, batch, loss_of, watched

import aorta  # AORTA

way = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
if way == "compile_in_place":
    for layer in net.layers:
        layer.compile(backend="aot_eager")
# torch's splitting of graphs by buckets wants them larger than 1 MB
model = DistributedDataParallel(net, bucket_cap_mb=25 if way == "compile_in_place" else 0.05)
optimizer = torch.optim.AdamW(model.parameters())
with watched(model):
    recording = aorta.start("artifacts/mine", model=model)  # AORTA
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.step()  # AORTA
        if step == 6 and way == "raise":
            raise ValueError("in the middle")
        if step == 6 and way == "break":
            break
    recording.close()  # AORTA
dist.destroy_process_group()
