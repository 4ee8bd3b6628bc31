"""transformers.Trainer: `mpirun -n 2 python -m mpisparse.examples.huggingface_gpt`; `--resume` goes on."""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import mpisparse
from mpisparse.integrations.huggingface import MPISparseTrainer


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 16 tokens that count up from a random one."""
    starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def main() -> None:
    """Train on all ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 with the Trainer and sparse exchange.")
    parser.add_argument("--out", default="runs/huggingface", help="directory of checkpoints (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--steps", type=int, default=60, help="default %(default)s")
    args = parser.parse_args()

    mpisparse.init_torch_distributed()  # before TrainingArguments: under mpirun, ranks find each other through MPI
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    trainer = MPISparseTrainer(
        model,
        TrainingArguments(
            args.out, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            learning_rate=3e-3, save_steps=20, eval_strategy="steps", eval_steps=20, logging_steps=10,
            report_to=[], disable_tqdm=True,
        ),
        train_dataset=sentences(512),
        eval_dataset=sentences(64),
        exchange={"scheme": "drift"},  # for AdamW, the Trainer's default; all options of GradientSync
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
