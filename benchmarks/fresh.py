"""Runs a function in a new process, with caches of compilers in a folder."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

__all__ = ["caches", "in_a_new_process"]

_R = TypeVar("_R")


@contextmanager
def caches(folder: Path) -> Iterator[None]:
    """Context manager: new processes have their caches in the folder."""
    folders = {
        name: str(folder / name.lower())
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEDOPS_CACHE_DIR")
    }
    with mock.patch.dict(os.environ, folders):
        yield


def in_a_new_process(
    function: Callable[..., _R], *arguments: Any, limit: float | None = None
) -> _R:
    """Returns the function's result from a new process.

    Raises:
        TimeoutError: there is no result after ``limit`` seconds, with the process's start. The
            process has been killed.
        RuntimeError: the function raised an error, or the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            process.kill()
            raise TimeoutError(f"no result after {limit:.0f} s")
        error, result = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with status {process.exitcode}") from None
    finally:
        process.join()
    if error is not None:
        raise RuntimeError(error)
    return result  # type: ignore[no-any-return]


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Sends the text of the error, and the result; one of them is None."""
    message: tuple[str | None, Any]
    try:
        message = (None, function(*arguments))
    # The parent process raises it.
    except Exception:  # noqa: BLE001
        message = (traceback.format_exc(), None)
    sender.send(message)
