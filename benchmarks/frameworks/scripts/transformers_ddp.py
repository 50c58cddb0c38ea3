"""Transformers' Trainer under DDP: accumulation, evaluation, saving, a data worker.

WAY: "" | gradient_checkpointing | compile | raise (in the middle).
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from watched import STEPS, VOCABULARY, Tokens, pause, watched

from aorta.integrations.transformers import TransformersCallback  # AORTA

way = sys.argv[1] if len(sys.argv) > 1 else ""


class Sentences(Tokens):
    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


class Pauses(TrainerCallback):
    evaluation = None

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.evaluation is None:
            self.evaluation = pause("evaluation")
            self.evaluation.__enter__()

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluation.__exit__(None, None, None)
        self.evaluation = None

    def on_save(self, args, state, control, **kwargs):
        with pause("checkpoint"):
            pass


class Raise(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7 and way == "raise":
            raise ValueError("in the middle")


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
)
arguments = TrainingArguments(
    output_dir=os.environ["WATCHED"] + "/checkpoints",
    max_steps=STEPS,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=way == "gradient_checkpointing",
    torch_compile=way == "compile",
    torch_compile_backend="aot_eager" if way == "compile" else None,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=6,
    logging_steps=1,
    dataloader_num_workers=1,
    use_cpu=True,
    ddp_backend="gloo",
    ddp_bucket_cap_mb=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Sentences(),
    eval_dataset=torch.utils.data.Subset(Sentences(), range(8)),
    callbacks=[
        Raise(),
        Pauses(),
        TransformersCallback("artifacts/mine"),  # AORTA
    ],
)
with watched(model):
    trainer.train()
torch.distributed.destroy_process_group()
