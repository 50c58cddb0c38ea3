"""Lightning's Trainer: DDP, gradient accumulation, validation, a checkpoint. WAY: "" | raise (in the middle)."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from watched import STEPS, Net, Tokens, loss_of, pause, watched

from aorta.integrations.lightning import LightningCallback  # AORTA

way = sys.argv[1] if len(sys.argv) > 1 else ""


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, tokens, index):
        if index == 14 and way == "raise":
            raise ValueError("in the middle")
        loss = loss_of(self.net, tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens, index):
        self.log("validation_loss", loss_of(self.net, tokens), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Pauses(lightning.Callback):
    def on_validation_start(self, *_):
        self.pause = pause("evaluation")
        self.pause.__enter__()

    def on_validation_end(self, *_):
        self.pause.__exit__(None, None, None)

    def on_save_checkpoint(self, *_):
        with pause("checkpoint"):
            pass


torch.manual_seed(0)
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo", bucket_cap_mb=0.05),
    max_steps=STEPS,
    accumulate_grad_batches=2,
    val_check_interval=8,
    check_val_every_n_epoch=None,
    limit_val_batches=2,
    callbacks=[
        Pauses(),
        ModelCheckpoint(os.environ["WATCHED"], every_n_train_steps=5),
        LightningCallback("artifacts/mine"),  # AORTA
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.strategy.setup_environment()
train, validate = (torch.utils.data.DataLoader(Tokens(), batch_size=2) for _ in range(2))
with watched(module):
    trainer.fit(module, train, validate)
