"""Tries which of Transformers' model types can be built and run at a small size.

``python tests/harness/architectures [--write] [NAME...]`` prints those that cannot, and the reason.
With ``--write`` it writes them to `left.txt`, and the tests leave them out. Run it after an update
of Transformers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from architectures import LEFT, make, outputs, quiet, transformers_types

# The most seconds and parameters of an architecture. Larger ones would make the tests slow, and
# show nothing that smaller ones do not.
_SECONDS, _PARAMETERS = 10, 6_000_000


def reason_to_leave(name: str) -> str:
    """Returns why an architecture cannot be built, run, or differentiated in training, or ""."""
    try:
        architecture = make(name)
        model = architecture.build()
        arguments = architecture.inputs(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if sum(p.numel() for p in parameters) > _PARAMETERS:
            return "does not become small"
        if _is_random(model, arguments) or _is_random(model.train(), arguments):
            return "is random with the same seed"
        results = [y for y in outputs(model(**arguments)) if y.requires_grad]
        if not results:
            return "has no output that can be differentiated"
        torch.autograd.grad(
            sum(y.double().nan_to_num().sum() for y in results), parameters, allow_unused=True
        )
    except Exception as error:  # noqa: BLE001, a model may raise any error
        return textwrap.shorten(f"{type(error).__name__}: {error}", 140, placeholder=" …")
    return ""


def _is_random(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether two runs with the same seed have different outputs."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return outputs(model(**arguments))

    for first, second in zip(run(), run(), strict=True):
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            return True
    return False


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError(f"takes more than {_SECONDS} seconds")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python tests/harness/architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; by default all")
    parser.add_argument("--write", action="store_true", help=f"write {LEFT.name}")
    options = parser.parse_args(arguments)
    names = options.names or transformers_types()
    signal.signal(signal.SIGALRM, _raise_timeout)
    reasons, start = {}, time.monotonic()
    for name in names:
        signal.alarm(_SECONDS)
        try:
            with quiet():
                reason = reason_to_leave(name)
        except TimeoutError as error:
            reason = str(error)
        finally:
            signal.alarm(0)
        if reason:
            reasons[name] = reason
            print(f"{name}\t{reason}", flush=True)
    seconds = time.monotonic() - start
    print(f"{len(names) - len(reasons)} of {len(names)} model types run, in {seconds:.0f} s")
    if options.write and not options.names:
        LEFT.write_text(
            "".join(f"{name}\t{reason}\n" for name, reason in reasons.items()), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
