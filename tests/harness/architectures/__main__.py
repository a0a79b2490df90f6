"""``python tests/harness/architectures [--write] [NAME...]``.

Which of Transformers' model types can be built and run small.

Prints those that cannot, with the reason; with ``--write`` that becomes `left.txt`, of which the
tests leave out what stands there. Run it after an update of Transformers.
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

# Of what takes longer there is nothing to be learnt that a smaller one does not show.
_SECONDS, _PARAMETERS = 10, 6_000_000


def tried(name: str) -> str:
    """Why an architecture cannot be used: built, run, and differentiated in training.

    "" if it can.
    """
    try:
        architecture = make(name)
        model = architecture.build()
        arguments = architecture.inputs(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if sum(p.numel() for p in parameters) > _PARAMETERS:
            return "does not become small"
        if _random(model, arguments) or _random(model.train(), arguments):
            return "is random with the same seed"
        results = [y for y in outputs(model(**arguments)) if y.requires_grad]
        if not results:
            return "has no output that can be differentiated"
        torch.autograd.grad(
            sum(y.double().nan_to_num().sum() for y in results), parameters, allow_unused=True
        )
    except Exception as error:  # noqa: BLE001, of any kind
        return textwrap.shorten(f"{type(error).__name__}: {error}", 140, placeholder=" …")
    return ""


def _random(model: Any, arguments: dict[str, Any]) -> bool:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return outputs(model(**arguments))

    return any(
        not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(run(), run(), strict=True)
    )


def _late(*_: Any) -> None:
    raise TimeoutError(f"takes more than {_SECONDS} seconds")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python tests/harness/architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; by default all")
    parser.add_argument("--write", action="store_true", help=f"write {LEFT.name}")
    options = parser.parse_args(arguments)
    names = options.names or transformers_types()
    signal.signal(signal.SIGALRM, _late)
    reasons, start = {}, time.monotonic()
    for name in names:
        signal.alarm(_SECONDS)
        try:
            with quiet():
                reason = tried(name)
        except TimeoutError as error:
            reason = str(error)
        finally:
            signal.alarm(0)
        if reason:
            reasons[name] = reason
            print(f"{name}\t{reason}", flush=True)
    print(
        f"{len(names) - len(reasons)} of {len(names)} model types run, in {time.monotonic() - start:.0f} s"
    )
    if options.write and not options.names:
        LEFT.write_text(
            "".join(f"{name}\t{reason}\n" for name, reason in reasons.items()), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
