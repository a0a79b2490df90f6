"""Random row-wise functions as Python source, one for each seed: what nobody thought of writing down.

A function is a list of statements. Each applies an operator to values that there are, which vary along some of three axes:
b, of groups, s, of rows in a group, and n, of columns. Operators are chosen so that values stay of order one and the
derivatives exist but at points that random numbers do not meet.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["RandomFunction", "random_function"]

Axes = frozenset[str]
_SHAPES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "x": lambda b, s, n: (b, s, n),  # full rows
    "v": lambda b, s, n: (n,),  # a vector
    "r": lambda b, s, n: (b, s, 1),  # a number of each row
    "g": lambda b, s, n: (b, 1, n),  # a vector of each group
    "i": lambda b, s, n: (s, n),  # rows that all groups share
    "h": lambda b, s, n: (b, 1, 1),  # a number of each group
    "k": lambda b, s, n: (s, 1),  # a number of each row, the same in all groups
    "t": lambda b, s, n: (),  # a number
}
_AXES: dict[str, Axes] = {
    "x": frozenset("bsn"),
    "v": frozenset("n"),
    "r": frozenset("bs"),
    "g": frozenset("bn"),
    "i": frozenset("sn"),
    "h": frozenset("b"),
    "k": frozenset("s"),
    "t": frozenset(),
}
_UNARY = (
    "-{0}", "{0}.abs()", "torch.tanh({0})", "torch.sigmoid({0})", "F.silu({0})", "F.gelu({0})", "torch.relu({0})",
    "F.gelu({0}, approximate='tanh')", "torch.sin({0})", "torch.cos({0})", "torch.exp(torch.tanh({0}))",
    "torch.log1p({0}.abs())", "torch.sqrt({0}.square() + 0.5)", "torch.rsqrt({0} * {0} + 0.5)",
    "(1.0 + {0}.pow(2)).reciprocal()", "torch.tanh({0}) ** 3", "{0}.clamp(-0.7, 0.9)", "F.softplus({0})", "0.5 * {0} + 0.1",
    "1.5 - {0}", "torch.expm1({0}.clamp(max=0.5))", "F.logsigmoid({0})", "F.leaky_relu({0}, 0.1)", "torch.erf({0})",
    "F.hardtanh({0})", "({0} > 0.1) * {0}", "{0}.type_as({0})", "{0}.detach() * 0.5 + {0}", "F.elu({0})",
)  # fmt: skip
_BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (1.0 + {1}.square())", "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})", "torch.where({0} > {1}, {0}, 0.3 * {1})", "{0}.masked_fill({1} > 0.5, 0.25)",
    "torch.lerp({0}, {1}.type_as({0}), 0.3)", "torch.addcmul({0}, {0}, {1}, value=0.5)",
    "torch.where(({0} < {1}) & ~({1} > 1.0), {0}, 1.0)", "F.silu({0}) * {1}", "{0} * torch.sigmoid({1})",
)  # fmt: skip
_REDUCING = (
    "{0}.mean(-1, keepdim=True)", "{0}.sum(-1, keepdim=True) * 0.2", "{0}.var(-1, unbiased=False, keepdim=True)",
    "{0}.var(-1, keepdim=True)", "{0}.amax(-1, keepdim=True)", "{0}.amin(dim=-1, keepdim=True)",
    "torch.logsumexp({0}, -1, keepdim=True)", "({0} > 0.2).sum(-1, keepdim=True) * 0.1",
    "torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 0.01)", "{0}.norm(dim=-1, keepdim=True) * 0.3",
    "torch.var_mean({0}, -1, keepdim=True)[1]",
)  # fmt: skip
_ALONG = (
    "torch.softmax({0}, -1) * 3.0", "torch.log_softmax({0}, -1) * 0.3", "F.layer_norm({0}, {0}.shape[-1:])",
    "F.rms_norm({0}, {0}.shape[-1:], eps=1e-3)", "F.normalize({0}, dim=-1) * 2.0",
    "torch.cat((-{0}.chunk(2, -1)[1], {0}.chunk(2, -1)[0]), -1)",
    "torch.stack((-{0}[..., 1::2], {0}[..., 0::2]), -1).flatten(-2)",
    "torch.cat([part * (i + 0.5) for i, part in enumerate({0}.chunk(4, -1))], -1)",
    "F.softmax({0}.unflatten(-1, (2, -1)), -1).flatten(-2) * 2.0", "{0} - {0}.mean(-1, keepdim=True)",
    "{0} + torch.arange({0}.shape[-1], device={0}.device) * 0.05",
    "torch.cat((F.silu({0}.chunk(2, -1)[0]), {0}.chunk(2, -1)[1] * 0.5), -1)",
)  # fmt: skip


@dataclass
class RandomFunction:
    """A function with what its tensors are.

    Attributes:
        seed: gives the same function again.
        source: of it.
        function: of its tensors.
        names: of them; the first letter says which axes they have.
        halves: those that are bf16.
        sizes: of the axes.
    """

    seed: int
    source: str
    names: list[str]
    halves: frozenset[str]
    sizes: tuple[int, int, int]
    function: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        path = f"<random function {self.seed}>"
        linecache.cache[path] = (len(self.source), None, self.source.splitlines(keepends=True), path)
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, path, "exec"), namespace)
        self.function = namespace["function"]

    def tensors(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Random ones: the same in every call."""
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for name in self.names:
            values = torch.randn(_SHAPES[name[0]](*self.sizes), generator=generator)
            made.append(values.to(device, torch.bfloat16 if name in self.halves else torch.float32))
        return made


def random_function(seed: int) -> RandomFunction:
    """The function of a seed."""
    return _Writer(random.Random(seed), seed).written()


class _Writer:
    def __init__(self, chance: random.Random, seed: int) -> None:
        self.chance, self.seed = chance, seed
        self.lines: list[str] = []
        self.pool: dict[str, Axes] = {}

    def written(self) -> RandomFunction:
        chance = self.chance
        counts = {
            "x": chance.randint(1, 3),
            "v": chance.randint(0, 2),
            "r": chance.choice((0, 0, 1)),
            "g": chance.choice((0, 0, 1, 2)),
            **{letter: chance.choice((0, 0, 0, 1)) for letter in "ihkt"},
        }
        names = [f"{letter}{number}" for letter, count in counts.items() for number in range(count)]
        self.pool = {name: _AXES[name[0]] for name in names}
        for _ in range(chance.randint(2, 8)):
            self._step()
        outputs = self._outputs()
        returned = ", ".join(outputs)
        source = "\n".join([f"def function({', '.join(names)}):", *[f"    {line}" for line in self.lines],
                            f"    return {returned}"]) + "\n"  # fmt: skip
        halves = frozenset(name for name in names if chance.random() < 0.15)
        sizes = (2, chance.choice((1, 3, 3, 5, 18)), chance.choice((8, 16, 16, 24, 40)))
        return RandomFunction(self.seed, source, names, halves, sizes)

    def _step(self) -> None:
        """One statement, of the newer values rather than of the older."""
        chance = self.chance
        first = self._picked()
        rows = [name for name, axes in self.pool.items() if "n" in axes]
        kind = chance.choices(("unary", "binary", "reducing", "along"), (3, 5, 2, 2))[0]
        if kind == "binary":
            second = self._picked()
            text = chance.choice(_BINARY).format(first, second)
            axes = self.pool[first] | self.pool[second]
        elif kind == "unary":
            text, axes = chance.choice(_UNARY).format(first), self.pool[first]
        else:
            one = chance.choice(rows[-4:])
            text = chance.choice(_REDUCING if kind == "reducing" else _ALONG).format(one)
            axes = self.pool[one] - {"n"} if kind == "reducing" else self.pool[one]
        name = f"y{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.pool[name] = axes

    def _picked(self) -> str:
        names = list(self.pool)
        return self.chance.choice(names[-3:] if self.chance.random() < 0.6 else names)

    def _outputs(self) -> list[str]:
        """Values that vary along all rows; the first has all that no statement used."""
        text = "\n".join(line.partition("=")[2] for line in self.lines)
        unused = [name for name in self.pool if not re.search(rf"\b{name}\b", text)]
        if self.chance.random() < 0.15:  # some arguments, or some statements, come to nothing
            unused = unused[-1:]
        whole = f"y{len(self.lines)}"
        self.lines.append(f"{whole} = {' + '.join(['x0 * 0.5', *[name for name in unused if name != 'x0']])}")
        rows = [name for name, axes in self.pool.items() if axes >= {"b", "s"} and name.startswith("y")]
        return [whole, *([self.chance.choice(rows)] if rows and self.chance.random() < 0.3 else [])]
