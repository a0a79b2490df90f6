"""The library's targets on an H200, and their comparison with a results file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .results import Key, Row

__all__ = ["TARGETS", "Target", "Verdict", "compare", "report"]

Kind = Literal["fraction", "loop", "us", "times"]


@dataclass(frozen=True)
class Target:
    """A target for a figure of ``fusedops``.

    The meaning of ``value`` depends on ``kind``:

        fraction    at least this fraction of the roofline
        loop        at most this multiple of eager's host time
        us          at most this many microseconds of GPU time
        times       at most this multiple of the GPU time of ``base_op`` on the same shape
    """

    op: str
    shape: str
    dtype: str
    mode: str
    value: float
    kind: Kind = "fraction"
    base_op: str = ""

    @property
    def case(self) -> tuple[str, str, str, str]:
        """The operator, shape, dtype and mode."""
        return self.op, self.shape, self.dtype, self.mode


@dataclass(frozen=True)
class Verdict:
    """A target and its result; ``result`` is None if a row that it needs is missing."""

    target: Target
    result: float | None
    best_peer: str

    @property
    def met(self) -> bool:
        """Whether there is a result, and it reaches the target."""
        if self.result is None:
            return False
        if self.target.kind == "fraction":
            return self.result >= self.target.value
        return self.result <= self.target.value


def _both(op: str, dtype: str, figures: dict[str, float]) -> tuple[Target, ...]:
    """Returns targets for forward + backward: fractions of the roofline, by shape."""
    return tuple(Target(op, shape, dtype, "fwd_bwd", value) for shape, value in figures.items())


TARGETS: tuple[Target, ...] = (
    *_both("bias_dropout_add_ln", "fp32", {"8192x1024": 0.75}),
    *_both("bias_dropout_add_ln", "fp16", {"16384x768": 0.65}),
    *_both(
        "bias_dropout_add_ln",
        "bf16",
        {"8192x1024": 0.60, "8192x4096": 0.75, "4096x8192": 0.73, "2048x16384": 0.65},
    ),
    *_both(
        "rms_norm",
        "bf16",
        {"8192x1024": 0.63, "8192x4096": 0.83, "4096x8192": 0.82, "2048x16384": 0.70},
    ),
    *_both(
        "layer_norm",
        "bf16",
        {
            "8192x1024": 0.58,
            "8192x4096": 0.80,
            "4096x8192": 0.77,
            "2048x16384": 0.60,
            "1024x32768": 0.55,
        },
    ),
    Target("layer_norm", "8192x4096", "bf16", "fwd", 0.90),
    Target("rms_norm", "8192x4096", "bf16", "fwd", 0.90),
    Target("bias_dropout_add_ln", "8192x4096", "bf16", "fwd", 0.85),
    Target("layer_norm", "8x256", "bf16", "fwd_bwd", 1.15, "loop"),
    Target("bias_dropout_add_ln", "8x256", "bf16", "fwd_bwd", 0.60, "loop"),
    *_both("bias_gelu_tanh", "bf16", {"8192x4096": 0.82, "8192x16384": 0.88}),
    *_both("bias_gelu_tanh", "fp32", {"8192x4096": 0.88}),
    *_both("bias_gelu_erf", "bf16", {"8192x4096": 0.80, "8192x16384": 0.85}),
    *_both("bias_gelu_erf", "fp32", {"8192x4096": 0.88}),
    *_both("swiglu", "bf16", {"8192x11008": 0.88}),
    *_both("geglu", "bf16", {"8192x11008": 0.88}),
    *_both("batched_layer_norm_tanh", "fp32", {"4096x16x128": 0.75}),
    *_both(
        "batched_layer_norm_tanh",
        "bf16",
        {"4096x64x64": 0.70, "8192x200x64": 0.80, "4096xR4096": 0.65},
    ),
    Target("batched_layer_norm_tanh", "1024x16x64", "fp32", "fwd_bwd", 15.0, "us"),
    Target(
        "batched_layer_norm_tanh_sequence",
        "4096x64x64",
        "bf16",
        "fwd_bwd",
        1.15,
        "times",
        "batched_layer_norm_tanh",
    ),
    Target("batched_layer_norm_tanh_sequence", "256x64x64", "bf16", "fwd_bwd", 0.05, "loop"),
)


def compare(rows: Iterable[Row], targets: Iterable[Target] = TARGETS) -> list[Verdict]:
    """Returns the verdict of each target."""
    rows_by_key = {row.key: row for row in rows}
    return [_verdict(target, rows_by_key) for target in targets]


def _verdict(target: Target, rows_by_key: dict[Key, Row]) -> Verdict:
    """Returns a target's result, and the best peer's value of the same kind."""
    values: dict[str, float | None] = {}
    for (*case, provider), row in rows_by_key.items():
        if tuple(case) == target.case:
            values[provider] = _value(target, row, rows_by_key)
    result = values.pop("fusedops", None)
    if target.kind == "loop":
        # Eager is what the others are compared with.
        values.pop("eager", None)
    peers = {name: value for name, value in values.items() if value is not None}
    best_of = max if target.kind == "fraction" else min
    best = best_of(peers, key=lambda name: peers[name], default=None)
    return Verdict(target, result, "-" if best is None else f"{peers[best]:.2f} {best}")


def _value(target: Target, row: Row, rows_by_key: dict[Key, Row]) -> float | None:
    """Returns a row's value of the target's kind; None if another row that it needs is missing."""
    if target.kind == "fraction":
        return row.fraction
    if target.kind == "us":
        return row.gpu_us
    if target.kind == "loop":
        eager = rows_by_key.get((*row.key[:-1], "eager"))
        return None if eager is None else row.loop_us / eager.loop_us
    base = rows_by_key.get((target.base_op, *row.key[1:-1], "fusedops"))
    return None if base is None else row.gpu_us / base.gpu_us


_TARGETS = {
    "fraction": ">= {0.value:.2f} floor",
    "loop": "<= {0.value:.2f} eager loop",
    "us": "<= {0.value:.1f} us",
    "times": "<= {0.value:.2f} one tensor",
}


def report(verdicts: Iterable[Verdict]) -> str:
    """Returns the verdicts as a table for the terminal."""
    lines = [
        f"{'operator':<34}{'shape':<13}{'dtype':<6}{'mode':<9}{'target':>18}{'result':>8}  {'':<8}best peer"
    ]
    for verdict in verdicts:
        target = verdict.target
        described = _TARGETS[target.kind].format(target)
        if verdict.result is None:
            result, state = "-", "absent"
        else:
            result = f"{verdict.result:.3f}"
            state = "met" if verdict.met else "MISSED"
        lines.append(
            f"{target.op:<34}{target.shape:<13}{target.dtype:<6}{target.mode:<9}{described:>18}{result:>8}  "
            f"{state:<8}{verdict.best_peer}"
        )
    return "\n".join(lines)
