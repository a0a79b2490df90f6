"""Hints of a report: lists of norms that the user can join in one module, with the lines to write.

`fuse_model` does not join them itself: the loop over the norms is the user's, and a fused model
keeps its parameters, which one launch needs side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..slices.configs import widest
from ..slices.modules import check_layers
from .hooks import is_plain
from .report import ModuleReport

__all__ = ["hints"]

# A hint for fewer norms takes longer to read than they take to launch.
_FEWEST = 4
# Code that is not the user's to change. The lists of norms in it have a norm for each layer, not
# for each slice.
_LIBRARIES = ("timm", "torch", "transformers")


def hints(model: nn.Module, lines: Mapping[nn.Module, ModuleReport]) -> Iterator[str]:
    """Yield a hint for each list of norms in the model that one module can compute.

    Args:
        model: the model.
        lines: the lines of its report. Norms that are excluded, that a block computes, or that a
            library's code calls, are left out.
    """
    for module, line in lines.items():
        # A list that is the model itself is in no forward that could be changed.
        if not line.name or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        # Not `children`, which leaves out repetitions.
        norms: list[Any] = list(module._modules.values())
        if not _can_join(norms) or not all(_is_called(lines[norm]) for norm in norms):
            continue
        owner, expression = _owner(model, line.name)
        if owner.__module__.partition(".")[0] not in _LIBRARIES:
            layers = expression + (".values()" if isinstance(module, nn.ModuleDict) else "")
            yield _hint(line.name, _widths(norms), owner.__name__, expression, layers)


def _can_join(norms: list[Any]) -> bool:
    """Whether `FusedBatchedLayerNormAct.from_layers` takes the norms, and computes them at once."""
    if len(norms) < _FEWEST:
        return False
    try:
        check_layers("", norms)
    except (TypeError, ValueError):
        return False
    parameters = [parameter for norm in norms for parameter in norm.parameters()]
    # Tied parameters would be separate afterwards.
    if not all(map(is_plain, parameters)) or len(set(parameters)) != len(parameters):
        return False
    itemsize = max([parameter.itemsize for parameter in parameters], default=4)
    return max(_widths(norms)) <= widest(itemsize)


def _is_called(line: ModuleReport) -> bool:
    """Whether a module's own forward runs, and the user has not excluded it."""
    return line.by is None and not line.reason.startswith("excluded")


def _widths(norms: list[Any]) -> list[int]:
    return [norm.normalized_shape[0] for norm in norms]


def _hint(name: str, widths: list[int], owner: str, expression: str, layers: str) -> str:
    """Return the hint for a list of norms.

    Args:
        name: the list's name in the model.
        widths: the norms' widths.
        owner: the class with the list.
        expression: the list in the class's code.
        layers: the norms in the class's code.
    """
    count = len(widths)
    columns = " to ".join(map(str, dict.fromkeys((min(widths), max(widths)))))
    lines = (
        f"{name}: {count} LayerNorms of {columns} columns take {count} launches or more each way",
        "  If each has its own slice of the same rows, one module takes 1 or 2 each way:",
        f'    # in {owner}.__init__; activation is the one that follows the norms, or "none"',
        f"    {expression} = fusedops.nn.FusedBatchedLayerNormAct.from_layers(",
        f'        {layers}, activation="none"',
        "    )",
        f"    # instead of the calls of the norms; slices is a sequence of their {count} inputs",
        f"    outputs = {expression}(slices)",
    )
    return "\n".join(lines)


def _owner(model: nn.Module, name: str) -> tuple[type, str]:
    """Return the class in whose code a list of this name is, and the expression for the list there.

    For example (Encoder, "self.norms[2]") for "encoder.norms.2".
    """
    owner, expression = type(model), "self"
    for part in name.split("."):
        if isinstance(model, nn.ModuleDict):
            expression += f"[{part!r}]"
        elif part.isdecimal():
            expression += f"[{part}]"
        else:
            owner, expression = type(model), f"self.{part}"
        model = model.get_submodule(part)
    return owner, expression
