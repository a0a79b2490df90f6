"""Processes of a distributed test, as forks of one that has imported what all of them need."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

__all__ = ["run_ranks"]


def run_ranks(
    function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, *imported: str
) -> None:
    """Calls ``function(rank, *arguments)`` in each process; raises what one of them raises.

    Args:
        imported: modules that the processes import besides the function's.
    """
    multiprocessing.set_forkserver_preload([function.__module__, *imported])
    # Up to Python 3.12 the server does not get the path of the process that starts it.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        mp.start_processes(function, arguments, ranks, start_method="forkserver")
