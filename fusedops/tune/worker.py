"""``python -m fusedops.tune.worker``: compiles kernels into Triton's cache on disk.

A request and its reply are one line of JSON each. The process exits when its input ends, so that it does not outlive
its parent.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from ..compiler import loading
from ..core import compat, launch
from ..core.tuning_key import Config
from ..core.usage import Usage, usage_of

__all__ = ["decode", "encode", "serve"]


def encode(request: launch.Request) -> dict[str, Any]:
    """A request as JSON, with kernels and device functions by module and name."""
    return {
        "kernel": _place(request.kernel),
        "types": dict(request.types),
        "constants": {name: _plain(value) for name, value in request.constants.items()},
        "config": asdict(request.config),
        "divisible": dict(request.divisible),
    }


def decode(plain: Mapping[str, Any]) -> launch.Request:
    """The inverse of `encode`."""
    constants = {name: _constant(value) for name, value in plain["constants"].items()}
    kernel = _found(plain["kernel"])
    return launch.Request(kernel, plain["types"], constants, Config(**plain["config"]), plain["divisible"])


def _place(function: Any) -> list[str]:
    """A kernel's module and name; of one that was generated its file, name and text."""
    module, name = function.fn.__module__, function.fn.__name__
    text = loading.text_of(function)
    return [module, name] if text is None else [function.fn.__code__.co_filename, name, text]


def _found(place: list[str]) -> Any:
    module, name, *text = place
    return loading.made(module, name, text[0]) if text else getattr(importlib.import_module(module), name)


def _plain(value: Any) -> Any:
    import triton.language as tl

    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    return {"function": _place(value)} if hasattr(value, "fn") else value


def _constant(value: Any) -> Any:
    import triton.language as tl

    if isinstance(value, list):
        return tuple(map(_constant, value))
    if not isinstance(value, dict):
        return value
    return tl.dtype(value["dtype"]) if "dtype" in value else _found(value["function"])


def serve(requests: TextIO, replies: TextIO) -> None:
    """Replies to each request with the kernel's `Usage`."""
    for line in requests:
        plain = json.loads(line)
        print(json.dumps(asdict(_compile(plain))), file=replies, flush=True)


def _compile(plain: Mapping[str, Any]) -> Usage:
    request, target = decode(plain["request"]), compat.gpu_target(*plain["target"])
    try:
        # The heuristic's config must run, with fewer stages if necessary; others that do not fit are dropped.
        if plain["fit"]:
            return usage_of(launch.compile_fitting(request, plain["limit"], target))
        return usage_of(launch.compile_kernel(request, target))
    except Exception as error:  # noqa: BLE001 - after any error of the compiler the next request is served
        return Usage(error=f"does not compile: {type(error).__name__}")


if __name__ == "__main__":
    replies, sys.stdout = sys.stdout, sys.stderr  # the compiler's prints must not mix with the replies
    serve(sys.stdin, replies)
