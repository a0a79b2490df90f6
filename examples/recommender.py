"""Train the same small recommender slice by slice, with all slices in one launch, and compiled.

The model is similar to DLRM (Naumov et al. 2019, arXiv:1906.00091). It looks up a user's features
in 26 embedding tables of 16 to 128 columns and applies LayerNorm and tanh to each looked-up vector
(a *slice*). It concatenates the slices with the output of a dense tower, and predicts a click. The
clicks of the training data depend on random scores of the features. All runs start from the same
checkpoint and see the same batches. The first two models differ only in their norms. A checkpoint
of the first model loads into the second; ``separate`` converts one of the second for the first. At
the end a check loads the trained checkpoints into the other models, and compares the losses. The
third run trains the first model, in which `fusedops.compile` joins the slices by itself.

    python examples/recommender.py                  # sizes to suit the machine
    python examples/recommender.py --tables 256 --batch 4096 --steps 1000
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedops
from fusedops.nn import FusedBatchedLayerNormTanh

Batch = tuple[Tensor, Tensor, Tensor]  # dense features, rows of the tables, clicks


@dataclass(frozen=True)
class Config:
    """The sizes of the model and of its training."""

    tables: int
    rows: int
    batch: int
    hidden: int
    steps: int
    dense: int = 13
    rate: float = 1e-3
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        """The widths of the tables. They differ, as in real models."""
        return [(16, 24, 32, 48, 64, 96, 128)[table % 7] for table in range(self.tables)]


PRESETS = {
    "cpu": Config(tables=26, rows=100, batch=256, hidden=64, steps=100),
    "cuda": Config(tables=26, rows=10_000, batch=16_384, hidden=512, steps=200),
}


# The model.
# --------------------------------------------------------------------------------------------------


class LoopModel(nn.Module):
    """The model in plain PyTorch, which normalises slice by slice."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden
        self.tables = nn.ModuleList(nn.Embedding(config.rows, size) for size in config.sizes)
        self.norms = self.new_norms(config.sizes)
        self.tower = nn.Sequential(
            nn.Linear(config.dense, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(hidden + sum(config.sizes), hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
            nn.Flatten(0),
        )

    def new_norms(self, sizes: list[int]) -> nn.Module:
        """Return a LayerNorm for each table."""
        return nn.ModuleList(nn.LayerNorm(size) for size in sizes)

    def forward(self, dense: Tensor, users: Tensor) -> Tensor:
        """Map ``(batch, dense)`` numbers and ``(batch, tables)`` indices to ``(batch,)`` logits."""
        columns = users.unbind(1)
        slices = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        logits: Tensor = self.top(torch.cat([self.tower(dense), *self.normalise(slices)], 1))
        return logits

    def normalise(self, slices: list[Tensor]) -> list[Tensor]:
        """Normalise and activate each slice, by two operators."""
        assert isinstance(self.norms, nn.ModuleList)
        return [norm(x).tanh() for norm, x in zip(self.norms, slices, strict=True)]


class OneLaunchModel(LoopModel):
    """The same model; one operator normalises and activates all slices."""

    def new_norms(self, sizes: list[int]) -> nn.Module:
        """Return one module, which has the parameters of all norms side by side.

        Its functional form is ``fusedops.batched_layer_norm_tanh``.
        """
        return FusedBatchedLayerNormTanh(sizes, concat=True)

    def normalise(self, slices: list[Tensor]) -> list[Tensor]:
        """Normalise, activate and concatenate all slices, by one operator."""
        return [self.norms(slices)]


# Checkpoints. The parameters of the norms are separate tensors in one model, joined in the other.
# --------------------------------------------------------------------------------------------------


def separate(checkpoint: Mapping[str, Tensor], sizes: list[int]) -> dict[str, Tensor]:
    """Convert a checkpoint of `OneLaunchModel` to one of `LoopModel`."""
    result = {name: value for name, value in checkpoint.items() if not name.startswith("norms.")}
    for name in ("weight", "bias"):
        for table, part in enumerate(checkpoint[f"norms.{name}"].split(sizes)):
            result[f"norms.{table}.{name}"] = part.clone()
    return result


@torch.no_grad()
def check(loop: LoopModel, one_launch: OneLaunchModel, config: Config, batch: Batch) -> None:
    """Check that a trained model and the other one with its checkpoint have the same loss."""
    other_loop, other_launch = LoopModel(config), OneLaunchModel(config)
    other_loop.load_state_dict(separate(one_launch.state_dict(), config.sizes))
    other_launch.load_state_dict(loop.state_dict())
    for trained, other in ((loop, other_launch), (one_launch, other_loop)):
        expected, result = loss_of(trained, batch), loss_of(other.to(batch[0].device), batch)
        # The models round the norms differently, by some units in the last place of fp32. A loss
        # depends on thousands of these; a hundred units (1e-5) bound the difference.
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
        print(f"{type(trained).__name__} {expected:.6f}, as {type(other).__name__} {result:.6f}")


# Training.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    name: str
    losses: list[float]
    milliseconds: float  # per step


def batches(config: Config, device: torch.device) -> Iterator[Batch]:
    """Yield random users, and whether they click.

    Every row of every table has a random score, and so has every dense feature. The sum of a user's
    scores is the logit of a click.
    """
    generator = torch.Generator().manual_seed(config.seed)
    scores = torch.randn(config.tables, config.rows, generator=generator) * 3.0 / config.tables**0.5
    factors = torch.randn(config.dense, generator=generator) / config.dense**0.5
    tables = torch.arange(config.tables)
    while True:
        dense = torch.randn(config.batch, config.dense, generator=generator)
        users = torch.randint(config.rows, (config.batch, config.tables), generator=generator)
        chances = (scores[tables, users].sum(1) + dense @ factors).sigmoid()
        clicks = (torch.rand(config.batch, generator=generator) < chances).float()
        yield dense.to(device), users.to(device), clicks.to(device)


def loss_of(model: LoopModel, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of a batch."""
    dense, users, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, users), clicks)


def train(name: str, model: LoopModel, config: Config, device: torch.device) -> Run:
    """Train ``model`` on the batches.

    The first steps, in which kernels compile, are left out of the time.
    """
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    losses = torch.zeros(config.steps, device=device)
    warm_up = min(10, config.steps // 2)
    spent = 0.0
    for step, batch in enumerate(islice(batches(config, device), config.steps)):
        synchronize(device)
        started = time.perf_counter()
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        synchronize(device)
        spent += time.perf_counter() - started if step >= warm_up else 0.0
    return Run(name, losses.tolist(), spent * 1e3 / (config.steps - warm_up))


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The report.
# --------------------------------------------------------------------------------------------------


def report(runs: list[Run]) -> None:
    """Print the loss curves and the time of a step."""
    last = len(runs[0].losses) - 1
    steps = sorted({round(last * i / 8) for i in range(9)})
    print("\nloss, mean of the last 10 steps")
    print(f"{'step':>16}" + "".join(f"{step + 1:>8}" for step in steps))
    for run in runs:
        curve = [statistics.fmean(run.losses[max(0, step - 9) : step + 1]) for step in steps]
        print(f"{run.name:>16}" + "".join(f"{loss:>8.3f}" for loss in curve))
    gap = max(max(step) - min(step) for step in zip(*[run.losses for run in runs], strict=True))
    print(f"largest difference between the runs at any step: {gap:.2g}\n")
    for run in runs:
        print(f"{run.name:>16} {run.milliseconds:>8.2f} ms a step")
    print()


def parse_arguments() -> tuple[Config, torch.device]:
    """Read the command line; missing sizes are those of the device's preset."""
    parser = argparse.ArgumentParser(
        description="Train the same recommender slice by slice, with all slices in one launch, and "
        "compiled, and compare."
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda[:index]",
    )
    for field in fields(Config):
        cpu, gpu = (getattr(PRESETS[device], field.name) for device in ("cpu", "cuda"))
        sizes_help = f"{cpu} on the CPU, {gpu} on a GPU" if cpu != gpu else f"{cpu} by default"
        parser.add_argument(f"--{field.name}", type=type(cpu), help=sizes_help)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type not in PRESETS:
        parser.error(f"--device is cpu or cuda[:index], not {options.device}")
    sizes = {field.name: getattr(options, field.name) for field in fields(Config)}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(PRESETS[device.type], **given)
    counts = ("tables", "rows", "batch", "hidden", "steps", "dense")
    if min(getattr(config, name) for name in counts) < 1:
        parser.error(f"{', '.join(counts)} must be at least 1")
    return config, device


def main() -> None:
    """Train the models, report, and check that checkpoints of two are interchangeable."""
    config, device = parse_arguments()
    print(", ".join(f"{name} {value}" for name, value in asdict(config).items()), flush=True)
    torch.manual_seed(config.seed)
    loop, one_launch, plain = LoopModel(config), OneLaunchModel(config), LoopModel(config)
    for model in (one_launch, plain):
        model.load_state_dict(loop.state_dict())
    # Inductor compiles what is not fused, which on a CPU takes longer than this training.
    compiled = fusedops.compile(plain, rest="inductor" if device.type == "cuda" else "eager")
    runs = [
        train("slice by slice", loop, config, device),
        train("all at once", one_launch, config, device),
        train("fusedops.compile", compiled, config, device),
    ]
    report(runs)
    print("loss of each trained model, and of the other one with its checkpoint:")
    check(loop, one_launch, config, next(batches(config, device)))
    if device.type != "cuda":
        print(
            "\nThe fused kernels need a GPU. Here all models ran on PyTorch's own CPU operators: "
            "the losses agree to"
        )
        print("rounding, and none is meant to be faster. Run it on a GPU to see the difference.")


if __name__ == "__main__":
    main()
