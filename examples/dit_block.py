"""Train the same small diffusion transformer with PyTorch functions and with ``fusedops.rowwise``.

Each block is adaLN-zero (Peebles and Xie 2023, arXiv:2212.09748): from a conditioning vector, a
linear layer computes six modulations, which are a shift, a scale and a gate for the attention, and
the same for the MLP. The model learns the velocity from data to noise, on random data. Both runs
start from the same weights and see the same batches. Four functions compute everything between the
matrix products. In the second run, ``fusedops.rowwise`` compiles each of them to a kernel.

    python examples/dit_block.py                  # sizes to suit the machine
    python examples/dit_block.py --batch 4 --tokens 256 --hidden 512 --steps 100
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import fusedops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """The sizes of the model and of its training."""

    layers: int
    batch: int
    tokens: int
    hidden: int
    heads: int
    steps: int
    dtype: str
    channels: int = 16
    rate: float = 1e-3
    seed: int = 0


PRESETS = {
    "cpu": Config(layers=1, batch=2, tokens=64, hidden=128, heads=4, steps=20, dtype="fp32"),
    "cuda": Config(layers=4, batch=8, tokens=1024, hidden=1536, heads=24, steps=100, dtype="bf16"),
}


# The functions between the matrix products. x is (batch, tokens, hidden). A shift, a scale or a
# gate is (batch, 1, hidden).
# --------------------------------------------------------------------------------------------------


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return LayerNorm without parameters, then scaled and shifted by the modulations."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def gated_residual_norm(
    x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a gated branch to the residual stream ``x``, and normalise the sum for the next branch.

    Returns the modulated norm of the sum, and the sum.
    """
    stream = x + gate * (branch + bias)
    return F.layer_norm(stream, stream.shape[-1:], eps=EPS) * (1 + scale) + shift, stream


def bias_gelu(hidden: Tensor, bias: Tensor) -> Tensor:
    """Return the MLP's bias and activation, applied to its hidden layer."""
    return F.gelu(hidden + bias, approximate="tanh")


def gated_residual(x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Add the gated last branch of a block to the residual stream ``x``."""
    return x + gate * (branch + bias)


@dataclass(frozen=True)
class Functions:
    """The four functions between the matrix products, plain or compiled."""

    modulated_norm: Callable[..., Tensor]
    gated_residual_norm: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    gated_residual: Callable[..., Tensor]


PLAIN = Functions(modulated_norm, gated_residual_norm, bias_gelu, gated_residual)
# With ``strict``, a function that cannot be compiled to one kernel raises an error with the reason.
ROWWISE = Functions(
    fusedops.rowwise(modulated_norm, strict=True),
    fusedops.rowwise(gated_residual_norm, strict=True),
    fusedops.rowwise(bias_gelu, strict=True),
    fusedops.rowwise(gated_residual, strict=True),
)


# The model.
# --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a diffusion transformer.

    The functions, not the linear layers, add the biases of ``out``, ``up`` and ``down``.
    """

    def __init__(self, config: Config, functions: Functions) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads, self.functions = config.heads, functions
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        # The "zero" of adaLN-zero: before training all gates are 0, and the block is the identity.
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map ``(batch, tokens, hidden)`` to the same shape.

        ``condition`` is ``(batch, 1, hidden)``.
        """
        functions = self.functions
        modulations = self.modulation(F.silu(condition)).chunk(6, -1)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = (
            modulations
        )
        branch = self.attend(functions.modulated_norm(x, shift_attention, scale_attention))
        normed, x = functions.gated_residual_norm(
            x, branch, self.out.bias, gate_attention, shift_mlp, scale_mlp
        )
        activated = functions.bias_gelu(F.linear(normed, self.up.weight), self.up.bias)
        branch = F.linear(activated, self.down.weight)
        return functions.gated_residual(x, branch, self.down.bias, gate_mlp)

    def attend(self, x: Tensor) -> Tensor:
        """Return self-attention, without the bias of its output projection."""
        q, k, v = rearrange(self.qkv(x), "b t (qkv h d) -> qkv b h t d", qkv=3, h=self.heads)
        attended = rearrange(F.scaled_dot_product_attention(q, k, v), "b h t d -> b t (h d)")
        return F.linear(attended, self.out.weight)


class DiffusionTransformer(nn.Module):
    """A model that maps noisy tokens and their noise level to velocities."""

    def __init__(self, config: Config, functions: Functions) -> None:
        super().__init__()
        hidden = config.hidden
        self.functions = functions
        self.embed = nn.Linear(config.channels, hidden)
        self.condition = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.blocks = nn.ModuleList(Block(config, functions) for _ in range(config.layers))
        self.modulation = nn.Linear(hidden, 2 * hidden)
        self.head = nn.Linear(hidden, config.channels)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Map ``(batch, tokens, channels)`` to the same shape; ``level`` is ``(batch, 1, 1)``."""
        condition = self.condition(level)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).chunk(2, -1)
        velocity: Tensor = self.head(self.functions.modulated_norm(x, shift, scale))
        return velocity


# Training.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    name: str
    losses: list[float]
    milliseconds: float  # per step
    peak_mib: float | None  # None on a CPU


def batches(config: Config, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield noisy tokens, their noise level, and the velocity; they depend only on the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.batch, config.tokens, config.channels)
    for _ in range(config.steps):
        data, noise = torch.randn(2, *shape, generator=generator)
        level = torch.rand(config.batch, 1, 1, generator=generator)
        noisy, velocity = torch.lerp(data, noise, level), noise - data
        batch = [t.to(device, DTYPES[config.dtype]) for t in (noisy, level, velocity)]
        yield batch[0], batch[1], batch[2]


def train(name: str, model: DiffusionTransformer, config: Config, device: torch.device) -> Run:
    """Train ``model`` on the batches.

    The first steps, in which kernels compile, are left out of the time.
    """
    model.to(device, DTYPES[config.dtype])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate)
    losses = torch.zeros(config.steps, device=device)
    warm_up = min(10, config.steps // 2)
    started = 0.0
    # All batches are drawn before the first step, so that drawing them is not timed.
    all_batches = list(batches(config, device))
    for step, (noisy, level, velocity) in enumerate(all_batches):
        if step == warm_up:
            synchronize(device)
            started = time.perf_counter()
        loss = F.mse_loss(model(noisy, level).float(), velocity.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    synchronize(device)
    milliseconds = (time.perf_counter() - started) * 1e3 / (config.steps - warm_up)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return Run(name, losses.tolist(), milliseconds, peak)


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The report.
# --------------------------------------------------------------------------------------------------


def report(runs: list[Run]) -> None:
    """Print the losses, the time of a step and the peak memory."""
    last = len(runs[0].losses) - 1
    steps = sorted({round(last * i / 8) for i in range(9)})
    print(f"\n{'loss at step':>18}" + "".join(f"{step + 1:>8}" for step in steps))
    for run in runs:
        print(f"{run.name:>18}" + "".join(f"{run.losses[step]:>8.4f}" for step in steps))
    gap = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    print(f"largest difference of losses: {gap:.2g}\n")
    for run in runs:
        memory = "" if run.peak_mib is None else f"   peak memory {run.peak_mib:,.0f} MiB"
        print(f"{run.name:>18} {run.milliseconds:>8.2f} ms a step{memory}")


def parse_arguments() -> tuple[Config, torch.device]:
    """Read the command line; missing sizes are those of the device's preset."""
    parser = argparse.ArgumentParser(
        description="Train the same diffusion transformer with plain functions and with "
        "fusedops.rowwise, and compare."
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda[:index]",
    )
    for field in fields(Config):
        cpu, gpu = (getattr(PRESETS[device], field.name) for device in ("cpu", "cuda"))
        choices = list(DTYPES) if field.name == "dtype" else None
        default = f"{cpu} on the CPU, {gpu} on a GPU" if cpu != gpu else f"{cpu} by default"
        parser.add_argument(f"--{field.name}", type=type(cpu), choices=choices, help=default)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type not in PRESETS:
        parser.error(f"--device is cpu or cuda[:index], not {options.device}")
    sizes = {field.name: getattr(options, field.name) for field in fields(Config)}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(PRESETS[device.type], **given)
    positive = ("layers", "batch", "tokens", "hidden", "heads", "steps", "channels")
    if any(getattr(config, name) < 1 for name in positive):
        parser.error("layers, batch, tokens, hidden, heads, steps and channels must be at least 1")
    if config.hidden % config.heads:
        parser.error(f"--hidden {config.hidden} does not divide into --heads {config.heads}")
    return config, device


def main() -> None:
    """Train both models, then report."""
    config, device = parse_arguments()
    print(", ".join(f"{name} {value}" for name, value in asdict(config).items()), flush=True)
    torch.manual_seed(config.seed)
    weights = DiffusionTransformer(config, PLAIN).state_dict()
    runs = []
    for name, functions in {"plain functions": PLAIN, "fusedops.rowwise": ROWWISE}.items():
        model = DiffusionTransformer(config, functions)
        model.load_state_dict(weights)
        runs.append(train(name, model, config, device))
        del model  # so that the next run's peak memory does not include it
    report(runs)
    if device.type != "cuda":
        print(
            "\nThe kernels need a GPU. On a CPU a rowwise function runs as it is, or with\n"
            "TRITON_INTERPRET=1 in Triton's interpreter, which is for tests. The times are no\n"
            "comparison; run this on a GPU for one."
        )


if __name__ == "__main__":
    main()
