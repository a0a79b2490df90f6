"""Runs kernels whose programs wait for one another under Triton's interpreter.

The interpreter runs one program after another, so a program must not wait for a later one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedops.core import exchange
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

__all__ = ["launch_twice"]


@triton.jit
def _read(pointers, mask):  # type: ignore[no-untyped-def]
    return tl.load(pointers, mask=mask, other=0)


def launch_twice(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Launches each kernel whose programs wait for one another twice, without waiting.

    In the first launch, programs write words, and may read words that are not yet written. In the
    second launch, all words are in memory, so the results are right.

    Returns:
        The configs of these kernels; the list grows as they are compiled.
    """
    waiting: list[Config] = []
    build = launch.build

    def build_twice_launched(
        kernel: Any, types: Any, constants: dict[str, Any], config: Config, **kwargs: Any
    ) -> launch.Variant:
        variant = build(kernel, types, constants, config, **kwargs)
        if constants.get("EXCHANGE") != "wait":
            return variant
        waiting.append(config)

        def launched(*arguments: Any) -> None:
            variant(*arguments)
            variant(*arguments)

        return launched

    monkeypatch.setattr(exchange, "_await_words", _read)
    monkeypatch.setattr(launch, "build", build_twice_launched)
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: acc == torch.float32)
    return waiting
