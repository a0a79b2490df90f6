"""Checkpoints of separate norms, which load into the module that has their parameters joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["load_separate"]


def load_separate(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Joins the entries ``0.weight``, ``1.weight``, … of a state_dict that has no ``weight``.

    It does the same for ``bias``. The module calls it before it loads a state_dict. Missing entries
    and entries of another size are reported under their own names, as by separate norms, and their
    slices keep their parameters.

    Args:
        module: the module, with ``sizes``.
        state_dict: changed in place.
        prefix: the module's name in the state_dict.
        local_metadata: not used.
        strict: whether missing entries are reported.
        missing_keys: extended by the missing entries.
        unexpected_keys: not used; PyTorch extends it by the entries that are left.
        error_msgs: extended by the errors.
    """
    for name, parameter in module.named_parameters(recurse=False):
        keys = [f"{prefix}{k}.{name}" for k in range(len(module.sizes))]
        if prefix + name in state_dict or state_dict.keys().isdisjoint(keys):
            continue
        parts: dict[str, Tensor] = {}
        for key, size in zip(keys, module.sizes, strict=True):
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            part = state_dict.pop(key)
            problem = _problem(key, part, size)
            if problem:
                error_msgs.append(problem)
            else:
                parts[key] = part
        # Parameters on the meta device have no values for the missing slices.
        if len(parts) == len(keys) or not parameter.is_meta:
            state_dict[prefix + name] = _joined(parts, keys, parameter, module.sizes)


def _problem(key: str, part: Any, size: int) -> str:
    """Returns why an entry does not fit a slice of this size, in PyTorch's words; "" if it does."""
    if not isinstance(part, Tensor):
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
            f"object from checkpoint but received {type(part)}"
        )
    expected = torch.Size([size])
    if part.shape == expected:
        return ""
    return (
        f"size mismatch for {key}: copying a param with shape {part.shape} from checkpoint, "
        f"the shape in current model is {expected}."
    )


def _joined(
    parts: dict[str, Tensor], keys: list[str], parameter: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Returns the parts side by side; for those that are missing, the parameter's own."""
    if len(parts) < len(keys):
        current = dict(zip(keys, parameter.split(list(sizes)), strict=True))
        parts = {key: parts.get(key, current[key]) for key in keys}
    # In one copy between devices, if all parts are on one.
    device = parts[keys[0]].device
    return torch.cat([parts[key].to(device) for key in keys])
