"""Programs that wait for one another, where one runs after the other: under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedops.core import exchange
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

__all__ = ["found_at_once"]


@triton.jit
def _read(places, there):  # type: ignore[no-untyped-def]
    return tl.load(places, mask=there, other=0)


def found_at_once(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Lets programs that share rows wait, and launches each such kernel twice.

    The second launch finds all the words. Returns the configs of these kernels, as they are built.
    """
    waiting: list[Config] = []
    build = launch.build

    def twice(
        kernel: Any, types: Any, constants: dict[str, Any], config: Config, **more: Any
    ) -> launch.Variant:
        variant = build(kernel, types, constants, config, **more)
        if constants.get("EXCHANGE") != "wait":
            return variant
        waiting.append(config)

        def launched(*arguments: Any) -> None:
            variant(*arguments)
            variant(*arguments)

        return launched

    monkeypatch.setattr(exchange, "_await_words", _read)
    monkeypatch.setattr(launch, "build", twice)
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: acc == torch.float32)
    return waiting
