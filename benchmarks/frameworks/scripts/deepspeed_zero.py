"""DeepSpeed's ZeRO with gradient accumulation, and an evaluation after every fourth step. WAY: the stage."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from watched import STEPS, Net, batch, loss_of, pause, watched

import aorta  # AORTA

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}
net = Net()
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)
with watched(engine.module):
    recording = aorta.start("artifacts/mine", model=engine)  # AORTA
    for micro in range(2 * STEPS):
        loss = loss_of(engine, batch(micro))
        engine.backward(loss)
        ends_step = engine.is_gradient_accumulation_boundary()  # before step(), which counts on  # AORTA
        engine.step()
        if ends_step:  # AORTA
            recording.step()  # AORTA
        if micro % 8 == 7:
            engine.eval()
            with pause("evaluation"), torch.no_grad():
                dist.all_reduce(loss_of(engine, batch(micro)))
            engine.train()
            recording.restart()  # AORTA
    recording.close()  # AORTA
dist.destroy_process_group()
