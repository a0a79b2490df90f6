"""Train the same small language model with ``torch.nn`` and with fusedops, and compare.

The model is a post-norm transformer over bytes; it learns the source text of Python's standard
library. All runs start from the same weights and see the same batches. The first is plain PyTorch.
``fusedops.compile`` and ``fuse_model`` take the same model; ``fusedops.nn`` is a model that is
written with the operators: ``FusedBlock`` differs from ``TorchBlock`` in ``join`` and ``expand``.

    python examples/train_lm.py                  # sizes to suit the machine
    python examples/train_lm.py --steps 1000 --layers 12 --output curves.png
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import fusedops
from fusedops.nn import FusedBiasDropoutAddLayerNorm

VOCABULARY = 256  # bytes
# Folders beside the standard library's packages that are left out of the text.
NOT_THE_LIBRARY = {"dist-packages", "site-packages", "test"}


@dataclass(frozen=True)
class Config:
    """The sizes of the model and of its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    rate: float
    dropout: float = 0.1
    seed: int = 0


PRESETS = {
    "cpu": Config(layers=2, width=128, heads=4, context=128, batch=12, steps=200, rate=2e-3),
    "cuda": Config(layers=8, width=1024, heads=16, context=512, batch=32, steps=400, rate=3e-4),
}


# The model.
# --------------------------------------------------------------------------------------------------


class TorchBlock(nn.Module):
    """A post-norm transformer block in plain PyTorch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, context, width)`` to the same shape."""
        x = self.join(self.attend(x), self.proj, self.attention_norm, residual=x)
        return self.join(self.expand(x), self.down, self.mlp_norm, residual=x)

    def attend(self, x: Tensor) -> Tensor:
        """Return causal self-attention, without its output projection."""
        q, k, v = rearrange(self.qkv(x), "b t (qkv h d) -> qkv b h t d", qkv=3, h=self.heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return rearrange(attended, "b h t d -> b t (h d)")

    def expand(self, x: Tensor) -> Tensor:
        """Apply the MLP's first linear layer and its activation: two operators."""
        return F.gelu(self.up(x))

    def join(
        self, hidden: Tensor, linear: nn.Linear, norm: nn.LayerNorm, residual: Tensor
    ) -> Tensor:
        """Apply a branch's last linear layer, dropout, the residual sum and the norm.

        These are four operators.
        """
        output: Tensor = norm(residual + self.dropout(linear(hidden)))
        return output


class FusedBlock(TorchBlock):
    """The same block with the same parameters; one operator computes all after a matrix product."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention_norm = FusedBiasDropoutAddLayerNorm(config.width, p=config.dropout)
        self.mlp_norm = FusedBiasDropoutAddLayerNorm(config.width, p=config.dropout)

    def expand(self, x: Tensor) -> Tensor:
        """Apply the linear layer without its bias, and one operator for the bias and GELU."""
        # The bias in the product's dtype, as `F.linear` would add it under autocast.
        product = F.linear(x, self.up.weight)
        return fusedops.bias_gelu(product, self.up.bias.to(product.dtype))

    def join(
        self, hidden: Tensor, linear: nn.Linear, norm: nn.LayerNorm, residual: Tensor
    ) -> Tensor:
        """Apply the linear layer without its bias, and one operator for the bias and the rest."""
        output: Tensor = norm(F.linear(hidden, linear.weight), linear.bias, residual)
        return output


class LanguageModel(nn.Module):
    """A model that maps bytes to the logits of the next byte."""

    def __init__(self, config: Config, block: type[TorchBlock]) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(block(config) for _ in range(config.layers)))
        self.head = nn.Linear(config.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, context)`` bytes to ``(batch, context, 256)`` logits."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(x))
        return logits


def plain(model: LanguageModel) -> nn.Module:
    """Return the model as it is."""
    return model


def compiled(model: LanguageModel) -> nn.Module:
    """Return the model, compiled with fused operators for its row-wise parts."""
    return fusedops.compile(model)


def fused_in_place(model: LanguageModel) -> nn.Module:
    """Return the model, whose modules call fused operators, and print which do."""
    print(f"fuse_model: {fusedops.fuse_model(model)}".splitlines()[0])
    return model


# Each way to train: the block, and what is done with the model.
WAYS: dict[str, tuple[type[TorchBlock], Callable[[LanguageModel], nn.Module]]] = {
    "torch.nn": (TorchBlock, plain),
    "fusedops.compile": (TorchBlock, compiled),
    "fuse_model": (TorchBlock, fused_in_place),
    "fusedops.nn": (FusedBlock, plain),
}


# Training.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    name: str
    losses: list[float]
    tokens_per_second: float
    peak_mib: float | None  # None on a CPU


def describe(device: torch.device) -> str:
    """Return the name of the GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def read_corpus() -> Tensor:
    """Return the standard library's modules, one after the other, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = [path for path in library.iterdir() if path.is_dir()]
    folders = [library, *(path for path in packages if path.name not in NOT_THE_LIBRARY)]
    modules = sorted(module for folder in folders for module in folder.glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(corpus: Tensor, config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows of the text, and for each byte of them the next byte.

    They depend only on the seed: the generator is their own, so the model's dropout does not
    advance it.
    """
    generator = torch.Generator().manual_seed(config.seed)
    window = torch.arange(config.context + 1, device=corpus.device)
    for _ in range(config.steps):
        starts = torch.randint(len(corpus) - config.context, (config.batch, 1), generator=generator)
        tokens = corpus[starts.to(corpus.device) + window].long()
        yield tokens[:, :-1], tokens[:, 1:]


def train(name: str, model: nn.Module, corpus: Tensor, config: Config) -> Run:
    """Train ``model`` on random windows of ``corpus``, in bf16 autocast on a GPU, else in fp32."""
    device = corpus.device
    on_gpu = device.type == "cuda"
    torch.manual_seed(config.seed)  # both runs draw their dropout masks from the same seed
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    # The learning rate rises for 40 steps, and is constant from then on.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    losses = torch.zeros(config.steps, device=device)
    # The first steps, in which kernels compile and caches fill, are not timed.
    warm_up = min(10, config.steps // 2)

    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(corpus, config)):
        if step == warm_up:
            synchronize(device)
            started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = F.cross_entropy(
                rearrange(model(inputs), "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)")
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        if (step + 1) % 10 == 0 or step + 1 == config.steps:
            show_progress(name, step + 1, config.steps, loss.item())
    synchronize(device)
    seconds = time.perf_counter() - started

    return Run(
        name=name,
        losses=losses.tolist(),
        tokens_per_second=(config.steps - warm_up) * config.batch * config.context / seconds,
        peak_mib=torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None,
    )


def limit_steps(config: Config, corpus: Tensor, seconds: float) -> Config:
    """Return the config with no more steps than fit in ``seconds``, but at least 20.

    A short trial measures the speed.
    """
    if math.isinf(seconds):
        return config
    trial_config = replace(config, steps=min(8, config.steps))
    model = LanguageModel(config, TorchBlock).to(corpus.device)
    trial = train("trial", model, corpus, trial_config)
    tokens_per_step = config.batch * config.context
    affordable_steps = int(seconds * trial.tokens_per_second / tokens_per_step)
    return replace(config, steps=min(config.steps, max(20, affordable_steps)))


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show_progress(name: str, step: int, steps: int, loss: float) -> None:
    """Redraw the progress bar. If the output is not a terminal, print only the finished bar."""
    done = 30 * step // steps
    if sys.stderr.isatty() or step == steps:
        start, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        bar = "█" * done + "░" * (30 - done)
        print(
            f"{start}{name:>16} {bar} {step}/{steps}  loss {loss:.3f} ",
            end=end,
            file=sys.stderr,
            flush=True,
        )
    if step == steps and sys.stderr.isatty():
        print(file=sys.stderr)


# The report.
# --------------------------------------------------------------------------------------------------


def report(runs: list[Run]) -> None:
    """Print the loss curves, the speed and the memory."""
    last = len(runs[0].losses) - 1
    steps = sorted({round(last * i / 8) for i in range(9)})
    print("\nloss in nats per byte, mean of the last 10 steps")
    print(f"{'step':>16}" + "".join(f"{step + 1:>8}" for step in steps))
    for run in runs:
        curve = smooth(run.losses)
        print(f"{run.name:>16}" + "".join(f"{curve[step]:>8.3f}" for step in steps))
    first, *others = runs
    gaps = (abs(a - b) for run in others for a, b in zip(first.losses, run.losses, strict=True))
    print(f"largest difference from {first.name} at any step: {max(gaps):.2g}\n")

    for run in runs:
        memory = "" if run.peak_mib is None else f"   peak memory {run.peak_mib:,.0f} MiB"
        speed_up = run.tokens_per_second / first.tokens_per_second
        print(f"{run.name:>16} {run.tokens_per_second:>12,.0f} tokens/s   {speed_up:.2f} x{memory}")
    if runs[0].peak_mib is None:
        print(f"peak memory of the process, over all trainings: {resident_mib()} MiB")
    print()


def resident_mib() -> str:
    """Return the most memory that the process has held so far, in MiB.

    The operating system reports no separate peak for each training.
    """
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    # macOS reports bytes, Linux KiB.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:,.0f}"


def smooth(losses: list[float]) -> list[float]:
    """Return the running mean over the last ten steps."""
    return [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]


def plot(runs: list[Run], path: Path) -> None:
    """Draw the loss curves."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot written")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--", "-.", ":"), strict=False):
        steps = range(1, len(run.losses) + 1)
        axes.plot(
            steps,
            smooth(run.losses),
            style,
            label=f"{run.name}, {run.tokens_per_second:,.0f} tokens/s",
        )
    axes.set(
        xlabel="step",
        ylabel="loss (nats per byte, mean of 10 steps)",
        title="The same model, trained in each way",
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"loss curves drawn in {path}")


# The block's time, on a GPU.
# ----------------------------------------------------------------------------------------


def time_block(config: Config, device: torch.device) -> None:
    """Print the times of forward and backward in bf16, of the whole block and of one ``join``.

    The block is timed in eager mode, under torch.compile, and with fusedops.
    """
    torch.manual_seed(config.seed)
    eager = TorchBlock(config).to(device, torch.bfloat16)
    fused = FusedBlock(config).to(device, torch.bfloat16)
    compiled, compiled_join = torch.compile(eager), torch.compile(eager.join)
    shape = (config.batch, config.context, config.width)
    x, residual, gradient = (
        torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    # The tensors whose gradients are reset before each timed run.
    leaves = [
        x.requires_grad_(),
        residual.requires_grad_(),
        *eager.parameters(),
        *fused.parameters(),
    ]

    def milliseconds(forward: Callable[[], Tensor]) -> float:
        from triton.testing import do_bench

        median: float = do_bench(
            lambda: forward().backward(gradient), grad_to_none=leaves, return_mode="median"
        )
        return median

    rows = {
        "torch.nn": (lambda: eager(x), lambda: eager.join(x, eager.proj, eager.mlp_norm, residual)),
        "torch.compile": (
            lambda: compiled(x),
            lambda: compiled_join(x, eager.proj, eager.mlp_norm, residual),
        ),
        "fusedops.nn": (
            lambda: fused(x),
            lambda: fused.join(x, fused.proj, fused.mlp_norm, residual),
        ),
    }
    tokens = config.batch * config.context
    print(
        f"\nforward + backward, ms, bf16, {tokens} tokens of width {config.width}, "
        f"p = {config.dropout}"
    )
    print(f"{'':>14}{'block':>10}   linear, bias, dropout, residual, LayerNorm")
    for name, (block, join) in rows.items():
        print(f"{name:>14}{milliseconds(block):>10.3f}{milliseconds(join):>10.3f}")


# The command line.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """The options of the command line."""

    config: Config
    device: torch.device
    output: Path  # of the plot
    seconds: float  # the limit on each training; infinity for none


def parse_arguments() -> Arguments:
    """Read the command line; missing sizes are those of the device's preset."""
    parser = argparse.ArgumentParser(
        description="Train the same small language model with torch.nn and with fusedops, "
        "and compare."
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda[:index]",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo.png"), help="where to draw the loss curves"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="limit on each training unless --steps is given"
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
    if not options.output.resolve().parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder to write to")
    sizes = {field.name: getattr(options, field.name) for field in fields(Config)}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(PRESETS[device.type], **given)
    positive = ("layers", "width", "heads", "context", "batch", "steps")
    if any(getattr(config, name) < 1 for name in positive):
        parser.error("layers, width, heads, context, batch and steps must be at least 1")
    if config.width % config.heads:
        parser.error(f"--width {config.width} does not divide into --heads {config.heads}")
    seconds = math.inf if options.steps else options.seconds
    return Arguments(config, device, options.output, seconds)


def main() -> None:
    """Train the model in each way, then report."""
    arguments = parse_arguments()
    device = arguments.device
    corpus = read_corpus().to(device)
    print(
        f"{len(corpus) / 1e6:.1f} MB of Python's standard library, on {describe(device)}",
        flush=True,
    )
    config = limit_steps(arguments.config, corpus, arguments.seconds)
    print(", ".join(f"{name} {value}" for name, value in asdict(config).items()), flush=True)

    torch.manual_seed(config.seed)
    weights = LanguageModel(config, TorchBlock).state_dict()
    runs = []
    for name, (block, prepare) in WAYS.items():
        if prepare is compiled and device.type == "cpu":
            print("fusedops.compile: left out, as it fuses nothing on a CPU")
            continue
        model = LanguageModel(config, block)
        model.load_state_dict(weights)
        runs.append(train(name, prepare(model.to(device)), corpus, config))
        del model  # so that the next run's peak memory does not include it

    report(runs)
    if device.type == "cuda":
        print(
            "On a GPU each draws different dropout masks, so the losses agree closely, "
            "but not exactly."
        )
        time_block(config, device)
    else:
        print(
            "The fused kernels need a GPU. Here all models ran on PyTorch's own CPU operators: "
            "the losses agree to"
        )
        print("rounding, and none is meant to be faster. Run it on a GPU to see the difference.")
    plot(runs, arguments.output)


if __name__ == "__main__":
    main()
