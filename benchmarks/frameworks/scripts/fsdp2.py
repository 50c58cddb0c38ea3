"""FSDP2 (fully_shard) with gradient accumulation, and checkpoints by torch.distributed.checkpoint (DCP).

WAY: save | async_save.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from watched import STEPS, Net, batch, loss_of, pause, watched

import aorta  # AORTA

way = sys.argv[1]
dist.init_process_group("cpu:gloo")
torch.manual_seed(0)
model = Net()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
beside = dist.new_group(backend="gloo")  # async_save issues collectives while the training issues its own
folder = Path(os.environ["WATCHED"], "checkpoints")
with watched(model):
    recording = aorta.start("artifacts/mine", model=model)  # AORTA
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss_of(model, batch(2 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.step()  # AORTA
        if step % 4 == 3:
            with pause("checkpoint"):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if way == "save":
                    dcp.save(state, checkpoint_id=folder / str(step))
                else:
                    saving = dcp.async_save(state, checkpoint_id=folder / str(step), process_group=beside)
                    (until_saved := pause("checkpoint")).__enter__()
                    saving.add_done_callback(lambda _, until=until_saved: until.__exit__(None, None, None))
            recording.restart()  # AORTA
    if way == "async_save":
        saving.result()
    recording.close()  # AORTA
dist.destroy_process_group()
