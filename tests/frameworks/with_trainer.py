"""Under mpirun or torchrun: MPISparseTrainer and MPISparseCallback. Arguments as of with_lightning.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from shown import alike, apart, digest, refused
from torch.nn.functional import mse_loss

import mpisparse
from mpisparse.integrations.huggingface import MPISparseCallback, MPISparseTrainer
from mpisparse.integrations.launch import communicator

OUT, OTHER = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
EXDYNA: dict[str, Any] = {"scheme": "exdyna", "density": 0.1}
DRIFT: dict[str, Any] = {"scheme": "drift", "density": 0.2, "every": 2}
ROWS = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
DATA = [{"x": row, "labels": row[:1] * 2 - row[1:2]} for row in ROWS]


class Config(transformers.PreTrainedConfig):
    model_type = "tiny"


class Tiny(transformers.PreTrainedModel):
    """Notes losses, and the weights with which it is evaluated."""

    config_class = Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or Config())
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(40, 1)
        )  # fmt: skip
        self.losses: list[float] = []
        self.evaluated: list[str] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = mse_loss(self.net(x), labels)
        (self.losses if self.training else self.evaluated).append(
            loss.item() if self.training else digest(self.parameters())
        )
        return {"loss": loss, "logits": labels}


def arguments(name: str, **settings: Any) -> transformers.TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(OUT / name), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 0.05, "optim": "sgd", "save_steps": 3,
        "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "data_seed": 5,
    }  # fmt: skip
    return transformers.TrainingArguments(**chosen | settings)


def trainer(options: dict[str, Any], name: str, **settings: Any) -> MPISparseTrainer:
    args = arguments(name, **settings)
    return MPISparseTrainer(Tiny(), args, train_dataset=DATA, eval_dataset=DATA[:12], exchange=options)


def called_back(callback: MPISparseCallback, name: str, **settings: Any) -> transformers.Trainer:
    args = arguments(name, **settings)
    return transformers.Trainer(Tiny(), args, train_dataset=DATA, eval_dataset=DATA[:12], callbacks=[callback])


def without_dropout(model: Any) -> Any:
    model.net[2].p = 0.0
    return model


def plain_loop(done: MPISparseTrainer) -> tuple[list[float], str]:
    """Train on the batches of a trainer without it."""
    loader = done.get_train_dataloader()
    model = without_dropout(Tiny())
    model.train()
    sync = mpisparse.GradientSync(model, comm=communicator(), **EXDYNA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, 6)
    mpisparse.attach(optimizer, sync)
    epoch, step = 0, 0
    while step < 6:
        loader.set_epoch(epoch)
        batches = list(loader)
        for pair in zip(batches[::2], batches[1::2], strict=False):
            if step == 6:
                break
            for batch in pair:
                (model(**batch)["loss"] / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
        epoch += 1
    sync.close()
    return model.losses, digest(model.parameters())


def show_losses() -> None:
    """The same losses and weights as in a plain loop."""
    done = trainer(EXDYNA, "plain", eval_strategy="no", save_strategy="no")
    without_dropout(done.model)
    done.train()
    losses, weights = plain_loop(done)
    assert done.model.losses == losses, (done.model.losses, losses)
    assert digest(done.model.parameters()) == weights
    done.train()  # with the optimizer of before
    assert len(done.model.losses) == 2 * len(losses)
    alike(digest(done.model.parameters()), "replicas after more training")


def show_resuming(name: str, options: dict[str, Any], **settings: Any) -> None:
    """Equal replicas, shared weights in evaluation and in files; resumed is uninterrupted, to the last bit."""
    first = trainer(options, name, **settings)
    first.train()
    assert first.model_wrapped is first.model
    alike(digest(first.model.parameters()), "replicas")
    alike(first.model.evaluated, "weights in evaluation")
    apart(first.model.losses, "losses, though data are sharded,")
    alike([h.get("loss") for h in first.state.log_history], "logged losses")
    place = OUT / name / "checkpoint-3"
    second = trainer(options, f"{name}-again", **settings)
    second.train(resume_from_checkpoint=str(place))
    assert second.model.losses == first.model.losses[-len(second.model.losses) :]
    assert len(second.model.losses) * 2 == len(first.model.losses)
    assert digest(second.model.parameters()) == digest(first.model.parameters())
    assert torch.equal(first.sync.residual, second.sync.residual)
    ranks = {p.name for p in place.glob("mpisparse/*/*/rank-*.h5")}
    assert ranks == {f"rank-{rank:04d}.h5" for rank in range(first.args.world_size)}
    saved = transformers.trainer.safetensors.torch.load_file(place / "model.safetensors")
    assert digest(saved[key] for key, _ in first.model.named_parameters()) == first.model.evaluated[0]
    if OTHER is not None:
        third = trainer(options, f"{name}-other", **settings)
        third.train(resume_from_checkpoint=str(OTHER / name / "checkpoint-3"))
        alike(digest(third.model.parameters()), "replicas of other ranks' state")
        assert third.state.global_step == 6


def show_best() -> None:
    """The best model at the end is the one that was evaluated as the best."""
    best = trainer(DRIFT, "best", load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1)
    best.train()
    alike(digest(best.model.parameters()), "replicas")
    assert digest(best.model.parameters()) in best.model.evaluated
    best.evaluate()
    assert digest(best.model.parameters()) == best.model.evaluated[-1]


def show_callback(name: str, **options: Any) -> None:
    """A plain Trainer with the callback: equal replicas, residuals, and resumed is uninterrupted to the last bit."""
    callback = MPISparseCallback(**options)
    first = called_back(callback, name)
    first.train()
    if first.args.world_size == 1:
        assert callback.state is None
        return
    assert isinstance(first.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    alike(digest(first.model.parameters()), "replicas")
    apart(digest(callback.state.residuals.values()), "residuals")
    place = OUT / name / "checkpoint-3"
    again = MPISparseCallback(resume_from=place, **options)
    second = called_back(again, f"{name}-again")
    second.train(resume_from_checkpoint=str(place))
    assert second.model.losses == first.model.losses[-len(second.model.losses) :]
    assert len(second.model.losses) * 2 == len(first.model.losses)
    assert digest(second.model.parameters()) == digest(first.model.parameters())
    assert digest(again.state.residuals.values()) == digest(callback.state.residuals.values())
    first.train()  # once more, with the wrapper of before
    alike(digest(first.model.parameters()), "replicas after more training")
    assert callback.state.state_dict()["steps"] == 12
    lost = called_back(MPISparseCallback(**options), f"{name}-lost")
    with refused("from another place than"):
        lost.train(resume_from_checkpoint=str(place))
    if OTHER is not None:
        there = OTHER / name / "checkpoint-3"
        taken = MPISparseCallback(resume_from=there, **options)
        third = called_back(taken, f"{name}-other")
        third.train(resume_from_checkpoint=str(there))
        alike(digest(third.model.parameters()), "replicas of other ranks' state")
        assert taken.state.state_dict()["steps"] == 12  # of which 6 + 3 were before: the callback had trained twice
        empty = MPISparseCallback(resume_from=there, **options)
        (there / "mpisparse-2-of-3.h5").write_bytes(b"")
        with refused("cannot be read"):
            called_back(empty, f"{name}-broken").train(resume_from_checkpoint=str(there))


def show_refusals() -> None:
    """What is asked wrongly is refused on all ranks."""
    with refused("exchange must be a dict with options of GradientSync"):
        trainer("drift", "refused")  # type: ignore[arg-type]
    with refused("unknown scheme"):
        trainer({"scheme": "none such"}, "refused").train()
    with refused('max_grad_norm needs accumulate="step"'):
        trainer({**EXDYNA, "accumulate": "backward"}, "refused").train()


def main() -> None:
    mpisparse.init_torch_distributed()
    show_losses()
    show_resuming("exdyna", EXDYNA)
    show_resuming("drift", DRIFT, optim="adamw_torch", learning_rate=0.01)
    show_best()
    show_callback("callback", **EXDYNA)
    show_callback("callback-int4", scheme="dense", codec="int4")
    show_refusals()
    print(f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}: all shown", flush=True)


if __name__ == "__main__":
    main()
