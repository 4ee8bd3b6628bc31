"""What each benchmark takes on the command line. Nothing here needs MPI or torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mpisparse.names import BLENDED, CODECS, SCHEMES
from mpisparse.runtime.argument_types import above_one, count, density, elements, positive, steps
from mpisparse.runtime.flags import add_arguments, add_list

CASE_SETTINGS = ("model", "data", "scheme", "density", "codec", "options", "resume", "log_every", "log_ranks")
SPARSE_MODELS = ("pruned", "embeddings", "experts")  # for bench sparse-models
CONVERGE_SETTINGS = (
    "model", "data", "steps", "batch_size", "seed", "optimizer", "lr", "momentum", "beta2", "weight_decay", "schedule",
    "warmup", "drop_at", "clip", "validation", "imports",
)  # fmt: skip
OFTEN = {"diloco": "diloco:every=4", "sparseloco": "sparseloco:every=4"}
MEMORY_CASES = tuple(OFTEN.get(name, name) for name in SCHEMES if name != "auto")  # for bench memory
FOR_REPORT = ", for mpisparse report"
GROUPS = ("partitions", "threshold", "blocks", "feedback", "codecs")  # for bench ablation


def add_sync(sync: argparse.ArgumentParser) -> None:
    _add_rounds(sync)
    _add_density(sync, 0.001)
    sync.add_argument(
        "--scheme", nargs="+", default=["exdyna"], metavar="NAME", help=f"of {', '.join(SCHEMES)}; default exdyna"
    )
    plain = ", ".join(name for name in CODECS if not name.startswith(BLENDED))
    sync.add_argument("--codec", help=f"of {plain} (default: the scheme's); momentum uses momentum-CODEC")
    add_list(sync, "imports")
    sync.add_argument("--path", nargs="+", choices=("step", "backward"), default=["step", "backward"], help="default: both")
    _add_gradients(sync)
    sync.add_argument("--no-gloo", action="store_true", help="do not measure gloo")


def add_checkpoint(saving: argparse.ArgumentParser) -> None:
    _add_rounds(saving)
    saving.add_argument("--directory", type=Path, help="the file system to measure (default: that of temporary files)")


def add_train(train: argparse.ArgumentParser) -> None:
    train.add_argument("--models", nargs="+", default=["digits-cnn"], metavar="NAME[=DATA]", help="default digits-cnn")
    _add_cases(train, ["dense", "exdyna"], "default dense exdyna")
    _add_seeds(train)
    _add_json(train)
    add_arguments(train, leave_out=CASE_SETTINGS)


def add_ddp(ddp: argparse.ArgumentParser) -> None:
    _add_cases(ddp, ["exdyna", "exdyna:density=0.01"], "default: exdyna at two densities")
    ddp.add_argument("--powersgd-rank", type=count, default=4, help="rank of DDP's PowerSGD hook (default %(default)s)")
    _add_json(ddp)
    _add_out(ddp, FOR_REPORT)
    add_arguments(ddp, keep=("model", "data", "steps", "batch_size", "seed", "optimizer", "lr", "momentum", "weight_decay"))


def add_sparse_models(sparse: argparse.ArgumentParser) -> None:
    sparse.add_argument("--models", nargs="+", choices=SPARSE_MODELS, default=list(SPARSE_MODELS), help="default: all")
    _add_cases(sparse, ["dense", "exdyna:density=0.01", "exdyna:density=0.1"], "default: dense, and exdyna at two densities")
    _add_seeds(sparse)
    _add_json(sparse)
    add_arguments(sparse, leave_out=CASE_SETTINGS)


def add_scaling(scaling: argparse.ArgumentParser) -> None:
    _add_elements(scaling, 4_000_000)
    _add_density(scaling, 0.001)
    words = "schemes exdyna, topk, cltk, dense (with codec, overlap and hierarchy); default exdyna topk dense"
    _add_cases(scaling, ["exdyna", "topk", "dense"], words)
    scaling.add_argument("--steps", type=steps, default=8, help="steps of each (default %(default)s)")
    scaling.add_argument(
        "--workers", nargs="*", type=count, default=[32, 64, 256, 1024, 4096], metavar="N", help="simulated ranks"
    )
    scaling.add_argument("--latency", type=positive, metavar="SECONDS", help="of a message (default: measured)")
    scaling.add_argument("--bandwidth", type=positive, metavar="BYTES/S", help="of a link (default: measured)")
    scaling.add_argument(
        "--backward", type=positive, default=0.0, metavar="SECONDS", help="of a backward, which real ranks sleep (default 0)"
    )
    scaling.add_argument(
        "--ranks-a-node", type=count, default=1, metavar="K", help="simulated ranks on a host, with one link (default 1)"
    )
    _add_json(scaling)
    _add_gradients(scaling)


def add_ablation(ablation: argparse.ArgumentParser) -> None:
    ablation.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    _add_elements(ablation, 4_000_000)
    _add_density(ablation, 0.001)
    ablation.add_argument("--steps", type=steps, default=40, help="steps of each variant (default %(default)s)")
    ablation.add_argument("--train", metavar="MODEL[=DATA]", help="also train this model with every variant")
    ablation.add_argument("--train-steps", type=count, default=200, help="training steps of each (default %(default)s)")
    ablation.add_argument("--train-out", type=Path, default=Path("runs/ablation"), help="where (default %(default)s)")
    ablation.add_argument("--config", type=Path, metavar="FILE.toml", help="settings of these runs")
    ablation.add_argument("--seeds", type=count, default=1, help="runs of each (default %(default)s)")
    _add_json(ablation)
    _add_gradients(ablation)


def add_converge(converge: argparse.ArgumentParser) -> None:
    converge.description = (
        "Train with one worker alone, with dense exchange and with each case, every one at its own best learning rate. "
        "How to train follows the model, whatever defaults stand below: a GPT of 0.8 million parameters, 300 steps, AdamW "
        "(0.9, 0.99, decay 0.1), clipping at 1, 40 steps of warm-up, then a cosine; lstm and image models with SGD."
    )
    converge.add_argument(
        "--case", dest="case_texts", action="append", default=[], metavar="'NAME: OPTION=VALUE ...'",
        help="a way to exchange, by options of GradientSync; may be repeated. alone and dense are always there",
    )  # fmt: skip
    converge.add_argument("--cases", dest="case_file", type=Path, metavar="FILE.toml", help="more cases, as tables [[case]]")
    converge.add_argument("--workers", type=count, help="virtual workers (default 4; under mpirun the ranks)")
    converge.add_argument("--jobs", type=count, default=1, help="processes side by side (default %(default)s)")
    _add_seeds(converge)
    converge.add_argument("--tuning-seeds", type=count, help="seeds that pick the learning rate (default: all)")
    converge.add_argument(
        "--lr-factor", type=above_one, default=1.5, help="between neighbouring learning rates (default %(default)s)"
    )
    converge.add_argument("--rates", type=count, default=3, help="learning rates to begin with (default %(default)s)")
    converge.add_argument(
        "--stability", action="store_true",
        help="run every seed at each of --rates learning rates, and count those that diverge instead of picking a rate",
    )  # fmt: skip
    converge.add_argument("--most-rates", type=count, default=12, help="rates of a case at most (default %(default)s)")
    converge.add_argument(
        "--give-up", type=float, default=0.0, metavar="SHARE",
        help="run no further seeds of a learning rate whose validation loss is worse than the best by this share, as in "
        "0.03 (default: run all)",
    )  # fmt: skip
    converge.add_argument(
        "--eval-examples", type=count, default=1024, help="validation and test examples at the end (default %(default)s)"
    )
    converge.add_argument("--out", type=Path, default=Path("runs/converge"), help="results (default %(default)s)")
    _add_json(converge)
    add_arguments(converge, keep=CONVERGE_SETTINGS)


def add_overlap(overlap: argparse.ArgumentParser) -> None:
    overlap.add_argument("--batch-size", type=count, default=64, help="examples per rank and step (default %(default)s)")
    overlap.add_argument("--density", type=density, default=0.2, help="share of elements to send (default %(default)s)")
    overlap.add_argument("--rounds", type=count, default=8, help="interleaved rounds of steps (default %(default)s)")
    _add_json(overlap)


def add_nodes(nodes: argparse.ArgumentParser) -> None:
    _add_elements(nodes, 12_000_000)
    _add_cases(nodes, ["dense:codec=int4", "exdyna:density=0.01"], "default: dense in int4, and exdyna at density 0.01")
    nodes.add_argument("--steps", type=count, default=12, help="steps of each way (default %(default)s)")
    _add_json(nodes)
    _add_out(nodes)


def add_memory(memory: argparse.ArgumentParser) -> None:
    _add_elements(memory, 4_000_000)
    _add_density(memory, 0.01)
    _add_cases(memory, MEMORY_CASES, "default: every scheme")
    memory.add_argument("--steps", type=steps, default=12, help="steps of each (default %(default)s)")
    _add_json(memory)
    _add_out(memory)


def add_kernels(kernels: argparse.ArgumentParser) -> None:
    _add_rounds(kernels)
    _add_density(kernels, 0.001)


# What several benchmarks take


def _add_rounds(command: argparse.ArgumentParser) -> None:
    """Flags of benchmarks that measure something over and over, in turn with something else."""
    _add_elements(command, 25_000_000)
    command.add_argument("--rounds", type=count, default=15, help="interleaved; results are medians (default %(default)s)")
    _add_json(command)


def _add_elements(command: argparse.ArgumentParser, default: int) -> None:
    command.add_argument("--elements", type=elements, default=default, help="float32 elements (default %(default)s)")


def _add_density(command: argparse.ArgumentParser, default: float) -> None:
    command.add_argument("--density", type=density, default=default, help="share of elements selected (default %(default)s)")


def _add_cases(command: argparse.ArgumentParser, default: Sequence[str], words: str) -> None:
    command.add_argument("--cases", nargs="+", default=list(default), metavar="SCHEME[:NAME=VALUE,...]", help=words)


def _add_seeds(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seeds", type=count, default=3, help="number of seeds, from --seed on (default %(default)s)")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON record per line instead of a table")


def _add_out(command: argparse.ArgumentParser, purpose: str = "") -> None:
    command.add_argument("--out", type=Path, metavar="FILE.jsonl", help=f"also write the records here{purpose}")


def _add_gradients(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gradients", type=Path, metavar="RUN", help="replay what train --record-gradients wrote (default: synthetic)"
    )
    _add_out(command, FOR_REPORT)
