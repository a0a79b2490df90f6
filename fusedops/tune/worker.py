"""``python -m fusedops.tune.worker``: compiles kernels into Triton's cache on disk.

A request is one line of JSON, and a reply is a line in the format of `core.children`. The process
exits when its input ends, so that it does not outlive its parent.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from ..compiler import loading
from ..core.children import send
from ..core.compat.triton import gpu_target
from ..core.configs.tuning_key import Config
from ..core.launches import launch
from ..core.launches.usage import Usage, usage_of

__all__ = ["decode", "encode", "serve"]


def encode(request: launch.Request) -> dict[str, Any]:
    """Return a request as JSON, with kernels and device functions by module and name."""
    return {
        "kernel": _location(request.kernel),
        "types": dict(request.types),
        "constants": {name: _plain(value) for name, value in request.constants.items()},
        "config": asdict(request.config),
        "divisible": dict(request.divisible),
    }


def decode(plain: Mapping[str, Any]) -> launch.Request:
    """Return the request that `encode` turned into JSON."""
    constants = {name: _constant(value) for name, value in plain["constants"].items()}
    kernel = _function(plain["kernel"])
    return launch.Request(
        kernel, plain["types"], constants, Config(**plain["config"]), plain["divisible"]
    )


def _location(function: Any) -> list[str]:
    """Return a kernel's module and name, or a generated kernel's file, name and source."""
    name, source = function.fn.__name__, loading.text_of(function)
    if source is None:
        return [function.fn.__module__, name]
    # A generated kernel is in no module that another process could import.
    return [function.fn.__code__.co_filename, name, source]


def _function(location: list[str]) -> Any:
    """Return the kernel at a `_location`."""
    module_or_file, name, *source = location
    if source:
        return loading.kernel_of(module_or_file, name, source[0])
    return getattr(importlib.import_module(module_or_file), name)


def _plain(value: Any) -> Any:
    """Return a constant as JSON; types and device functions are tagged."""
    import triton.language as tl

    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if hasattr(value, "fn"):
        return {"function": _location(value)}
    return value


def _constant(value: Any) -> Any:
    """Return the constant that `_plain` turned into JSON; a list was a tuple."""
    import triton.language as tl

    if isinstance(value, list):
        return tuple(map(_constant, value))
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    return _function(value["function"])


def serve(requests: TextIO, replies: TextIO) -> None:
    """Reply to each request with the kernel's `Usage`."""
    for line in requests:
        plain = json.loads(line)
        send(asdict(_compile(plain)), replies)


def _compile(plain: Mapping[str, Any]) -> Usage:
    """Compile a kernel, and return what it uses or why it does not compile."""
    request, target = decode(plain["request"]), gpu_target(*plain["target"])
    try:
        # The heuristic's config must run, with fewer stages if necessary. Other configs are dropped
        # if they do not fit.
        if plain["fit"]:
            return usage_of(launch.compile_fitting(request, plain["limit"], target))
        return usage_of(launch.compile_kernel(request, target))
    # Whatever the compiler raises, the process must serve the next request.
    except Exception as error:  # noqa: BLE001
        return Usage(error=f"does not compile: {type(error).__name__}")


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
