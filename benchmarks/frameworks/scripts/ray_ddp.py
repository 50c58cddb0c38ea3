"""Ray Train: two workers on this machine, the model prepared by Ray."""

from pathlib import Path

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(config):
    from watched import STEPS, Net, batch, loss_of, watched

    import aorta  # AORTA

    torch.manual_seed(0)
    model = prepare_model(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with watched(model):
        recording = aorta.start(config["folder"], model=model)  # an absolute path  # AORTA
        for step in range(STEPS):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()  # AORTA
            if step % 4 == 3:
                ray.train.report({"loss": loss.item()})
                recording.restart()  # AORTA
        recording.close()  # AORTA


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    TorchTrainer(
        train,
        train_loop_config={"folder": str(Path("artifacts/mine").absolute())},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
