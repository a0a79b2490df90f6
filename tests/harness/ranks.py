"""Starts the processes of a distributed test, as forks of one that has imported their modules."""

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
    """Calls ``function(rank, *arguments)`` in each process; raises an error if one of them does.

    Args:
        function: a function of a module.
        arguments: its arguments after the rank.
        ranks: the number of processes.
        imported: modules to import before the forks, beside that of the function.
    """
    multiprocessing.set_forkserver_preload([function.__module__, *imported])
    # Up to Python 3.12 the fork server does not get `sys.path` of the process that starts it.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        mp.start_processes(function, arguments, ranks, start_method="forkserver")
