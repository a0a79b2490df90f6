"""``python -m fusedops.tune.worker``: compiles what it is asked for, line by line, into Triton's cache on disk.

A request and its answer are a line of JSON each. The process ends with its input, so that it outlives nobody.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from ..core import launch
from ..core.question import Config
from .usage import Usage, usage_of

__all__ = ["decode", "encode", "serve"]


def encode(request: launch.Request) -> dict[str, Any]:
    """A request as JSON; kernels and device functions by where they are found."""
    return {
        "kernel": _place(request.kernel),
        "types": dict(request.types),
        "constants": {name: _plain(value) for name, value in request.constants.items()},
        "config": asdict(request.config),
        "divisible": dict(request.divisible),
    }


def decode(plain: Mapping[str, Any]) -> launch.Request:
    """The request that `encode` made this of."""
    constants = {name: _constant(value) for name, value in plain["constants"].items()}
    kernel = _found(plain["kernel"])
    return launch.Request(kernel, plain["types"], constants, Config(**plain["config"]), plain["divisible"])


def _place(function: Any) -> list[str]:
    return [function.fn.__module__, function.fn.__name__]


def _found(place: list[str]) -> Any:
    module, name = place
    return getattr(importlib.import_module(module), name)


def _plain(value: Any) -> Any:
    import triton.language as tl

    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    return {"function": _place(value)} if hasattr(value, "fn") else value


def _constant(value: Any) -> Any:
    import triton.language as tl

    if not isinstance(value, dict):
        return value
    return tl.dtype(value["dtype"]) if "dtype" in value else _found(value["function"])


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers each request with its `Usage`."""
    for line in requests:
        plain = json.loads(line)
        print(json.dumps(asdict(_answer(plain))), file=answers, flush=True)


def _answer(plain: Mapping[str, Any]) -> Usage:
    from triton.backends.compiler import GPUTarget

    request, target = decode(plain["request"]), GPUTarget(*plain["target"])
    try:
        # The heuristic's config must run, if need be with fewer stages; another that does not fit is not worth it.
        if plain["fit"]:
            return usage_of(launch.compile_fitting(request, plain["limit"], target))
        return usage_of(launch.compile_kernel(request, target))
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the next request is another kernel's
        return Usage(error=f"does not compile: {type(error).__name__}")


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that the compiler prints may come between the answers
    serve(sys.stdin, answers)
