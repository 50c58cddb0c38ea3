"""Accelerate with gradient accumulation, and an evaluation every fourth step."""

import torch
from accelerate import Accelerator
from watched import STEPS, Net, Tokens, loss_of, pause, watched

import aorta  # AORTA

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with watched(model):
    recording = aorta.start("artifacts/mine", model=model)  # AORTA
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            recording.step()  # AORTA
            step += 1
            if step % 4 == 0:
                model.eval()
                with pause("evaluation"), torch.no_grad():
                    accelerator.gather(loss_of(model, batch))
                model.train()
                recording.restart()  # AORTA
            if step == STEPS:
                break
    recording.close()  # AORTA
accelerator.end_training()
