"""Many kernels compiled at once, in processes of their own that fill Triton's cache on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fusedops

from ..core.launch import Request
from .usage import Usage
from .worker import encode

__all__ = ["Pool", "child_environment"]


def child_environment() -> dict[str, str]:
    """For a process that stands by the tuner: it finds this very package, and does not tune by itself."""
    root = str(Path(fusedops.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "FUSEDOPS_TUNE": "", "OMP_NUM_THREADS": "1"}


class Pool:
    """Compiles requests for a target in ``jobs`` processes; each distinct one once."""

    command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.worker")

    def __init__(self, jobs: int, target: Any, limit: int) -> None:
        self._target = (target.backend, target.arch, target.warp_size)
        self._limit = limit
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="fusedops-compile")
        self._known: dict[Any, Future[Usage]] = {}
        self._workers: dict[int, subprocess.Popen[str]] = {}

    def submit(self, request: Request, *, fit: bool = False) -> Future[Usage]:
        """What the kernel takes, once it is compiled; with ``fit``, with as many stages as fit."""
        key = (request.key, fit)
        if key not in self._known:
            message = {"request": encode(request), "target": self._target, "limit": self._limit, "fit": fit}
            self._known[key] = self._threads.submit(self._compile, json.dumps(message))
        return self._known[key]

    def close(self) -> None:
        """Stops, leaving what is not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers.values()):
            worker.kill()
        self._threads.shutdown()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _compile(self, message: str) -> Usage:
        """Each thread has a worker of its own, and gets another if that one dies."""
        worker = self._workers.get(threading.get_ident())
        if worker is None:
            worker = self._workers[threading.get_ident()] = self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            print(message, file=worker.stdin, flush=True)
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            worker.kill()
            worker.wait()
            self._workers.pop(threading.get_ident(), None)
            return Usage(error="the compiler died")
        return Usage(**json.loads(answer))

    def _start(self) -> subprocess.Popen[str]:
        # No worker sees a GPU: it needs none, and each context would take memory.
        environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True, env=environment)  # fmt: skip
