"""Two models and two optimizers that step in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import STEPS, VOCABULARY, WIDTH, Block, Net, batch, watched

import aorta  # AORTA

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
judge = nn.Sequential(nn.Linear(VOCABULARY, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
discriminator = DistributedDataParallel(judge, bucket_cap_mb=0.05, broadcast_buffers=False)
of_generator = torch.optim.AdamW(generator.parameters())
of_discriminator = torch.optim.AdamW(discriminator.parameters())
with watched(generator, discriminator):
    recording = aorta.start("artifacts/mine", model=[generator, discriminator])  # AORTA
    for step in range(STEPS):
        tokens = batch(step)
        real = nn.functional.one_hot(tokens, VOCABULARY).float()
        made = generator(tokens).softmax(-1).detach()
        of_discriminator.zero_grad()
        (discriminator(made).mean() - discriminator(real).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (-discriminator(generator(tokens).softmax(-1)).mean()).backward()
        of_generator.step()
        recording.step()  # AORTA
    recording.close()  # AORTA
dist.destroy_process_group()
