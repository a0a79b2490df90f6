"""Train the same small recommendation model slice by slice and with all slices at once.

The model looks up a user's features in many embedding tables. It applies LayerNorm and tanh to each
looked-up vector (a *slice*), concatenates the slices, and predicts a click. The clicks of the
training data depend on random scores of the tables' rows. Both runs start from the same weights and
see the same batches. The two models differ only in the method ``normalise``.

    python examples/recommender.py                  # sizes to suit the machine
    python examples/recommender.py --tables 256 --batch 4096 --steps 1000
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedops.nn import FusedBatchedLayerNormTanh


@dataclass(frozen=True)
class Config:
    """The sizes of the model and of its training."""

    tables: int
    rows: int
    batch: int
    hidden: int
    steps: int
    rate: float = 1e-3
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        """The widths of the tables. They differ, as in real models."""
        return [(8, 16, 32, 64)[table % 4] for table in range(self.tables)]


PRESETS = {
    "cpu": Config(tables=24, rows=200, batch=256, hidden=64, steps=200),
    "cuda": Config(tables=128, rows=10_000, batch=2048, hidden=512, steps=400),
}


# The model.
# --------------------------------------------------------------------------------------------------


class SplitModel(nn.Module):
    """The model in plain PyTorch, which normalises slice by slice."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(config.rows, size) for size in config.sizes)
        self.norms: nn.Module = nn.ModuleList(nn.LayerNorm(size) for size in config.sizes)
        self.top = nn.Sequential(
            nn.Linear(sum(config.sizes), config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, 1),
            nn.Flatten(0),
        )

    def forward(self, users: Tensor) -> Tensor:
        """Map ``(batch, tables)`` indices to ``(batch,)`` logits."""
        columns = users.unbind(1)
        slices = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        logits: Tensor = self.top(self.normalise(slices))
        return logits

    def normalise(self, slices: list[Tensor]) -> Tensor:
        """Normalise and concatenate: two operators for each slice, and one for all."""
        norms = self.norms
        assert isinstance(norms, nn.ModuleList)
        return torch.cat([norm(x).tanh() for norm, x in zip(norms, slices, strict=True)], 1)


class FusedModel(SplitModel):
    """The same model with the same parameters; one operator normalises all slices."""

    def __init__(self, split: SplitModel, config: Config) -> None:
        super().__init__(config)
        self.load_state_dict(split.state_dict())
        assert isinstance(split.norms, nn.ModuleList)
        layers = [layer for layer in split.norms if isinstance(layer, nn.LayerNorm)]
        self.norms = FusedBatchedLayerNormTanh.from_layers(layers, concat=True)

    def normalise(self, slices: list[Tensor]) -> Tensor:
        """Normalise and concatenate, in one operator."""
        concatenated: Tensor = self.norms(slices)
        return concatenated


# Training.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    name: str
    losses: list[float]
    milliseconds: float  # per step


def batches(config: Config, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random users, and whether they click.

    Every row of every table has a random score. The sum of a user's scores is the logit of a click.
    """
    generator = torch.Generator().manual_seed(config.seed)
    scores = torch.randn(config.tables, config.rows, generator=generator) * 3.0 / config.tables**0.5
    tables = torch.arange(config.tables)
    for _ in range(config.steps):
        users = torch.randint(config.rows, (config.batch, config.tables), generator=generator)
        chances = scores[tables, users].sum(1).sigmoid()
        clicks = (torch.rand(config.batch, generator=generator) < chances).float()
        yield users.to(device), clicks.to(device)


def train(name: str, model: SplitModel, config: Config, device: torch.device) -> Run:
    """Train ``model`` on the batches.

    The first steps, in which kernels compile, are left out of the time.
    """
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    losses = torch.zeros(config.steps, device=device)
    warm_up = min(10, config.steps // 2)
    spent = 0.0
    for step, (users, clicks) in enumerate(batches(config, device)):
        synchronize(device)
        started = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(users), clicks)
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
    """Print both loss curves and the time of a step."""
    last = len(runs[0].losses) - 1
    steps = sorted({round(last * i / 8) for i in range(9)})
    print("\nloss, mean of the last 10 steps")
    print(f"{'step':>14}" + "".join(f"{step + 1:>8}" for step in steps))
    for run in runs:
        curve = [statistics.fmean(run.losses[max(0, step - 9) : step + 1]) for step in steps]
        print(f"{run.name:>14}" + "".join(f"{loss:>8.3f}" for loss in curve))
    gap = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    print(f"largest difference between the two at any step: {gap:.2g}\n")
    for run in runs:
        print(f"{run.name:>14} {run.milliseconds:>8.2f} ms a step")
    print()


def parse_arguments() -> tuple[Config, torch.device]:
    """Read the command line; missing sizes are those of the device's preset."""
    parser = argparse.ArgumentParser(
        description="Train the same recommendation model slice by slice and with all slices at "
        "once, and compare."
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda[:index]",
    )
    for field in fields(Config):
        cpu, gpu = (getattr(PRESETS[device], field.name) for device in ("cpu", "cuda"))
        parser.add_argument(
            f"--{field.name}", type=type(cpu), help=f"{cpu} on the CPU, {gpu} on a GPU"
        )
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type not in PRESETS:
        parser.error(f"--device is cpu or cuda[:index], not {options.device}")
    sizes = {field.name: getattr(options, field.name) for field in fields(Config)}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(PRESETS[device.type], **given)
    if min(config.tables, config.rows, config.batch, config.hidden, config.steps) < 1:
        parser.error("tables, rows, batch, hidden and steps must be at least 1")
    return config, device


def main() -> None:
    """Train both models, then report."""
    config, device = parse_arguments()
    print(", ".join(f"{name} {value}" for name, value in asdict(config).items()), flush=True)
    torch.manual_seed(config.seed)
    split = SplitModel(config)
    # It copies the weights, so both models start from the same ones.
    fused = FusedModel(split, config)
    runs = [
        train("slice by slice", split, config, device),
        train("all at once", fused, config, device),
    ]
    report(runs)
    if device.type != "cuda":
        print(
            "The fused kernels need a GPU. Here both models ran on PyTorch's own CPU operators: "
            "the losses agree to"
        )
        print("rounding, and the speed is about the same. Run this on a GPU to see the difference.")


if __name__ == "__main__":
    main()
