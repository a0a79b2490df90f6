"""Compiles kernels in parallel, in child processes that fill Triton's cache on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..core.children import Child, child_environment
from ..core.launches.launch import Request
from ..core.launches.usage import Usage
from .worker import encode

__all__ = ["Pool"]


class Pool:
    """Compiles requests for a target in ``jobs`` processes, each distinct request once.

    Each thread has a worker process of its own, to which it writes requests and from which it reads
    replies:

        submit --> thread --JSON--> worker, which writes Triton's cache
                          <--JSON--
    """

    command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.worker")

    def __init__(self, jobs: int, target: Any, limit: int) -> None:
        self._target = (target.backend, target.arch, target.warp_size)
        self._limit = limit
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="fusedops-compile")
        self._futures: dict[Any, Future[Usage]] = {}
        self._workers: dict[int, Child] = {}

    def submit(self, request: Request, *, fit: bool = False) -> Future[Usage]:
        """Return a future of the compiled kernel's usage.

        With ``fit``, the kernel is compiled with as many stages as fit into shared memory.
        """
        key = (request.key, fit)
        # Many requests are the same: each candidate is submitted with all kernels of its step, and
        # only one kernel differs from candidate to candidate.
        if key not in self._futures:
            message = {
                "request": encode(request),
                "target": self._target,
                "limit": self._limit,
                "fit": fit,
            }
            self._futures[key] = self._threads.submit(self._compile, json.dumps(message))
        return self._futures[key]

    def close(self) -> None:
        """Stop all processes, and cancel requests that have not started."""
        # The threads must take no more requests before the processes are killed. Then the threads
        # that wait for replies read the end of a pipe, and end.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers.values()):
            worker.end()
        self._threads.shutdown()
        for worker in self._workers.values():  # one may have started meanwhile
            worker.end()
        self._workers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _compile(self, message: str) -> Usage:
        """Compile in the thread's own worker, which is replaced if it dies."""
        worker = self._workers.get(threading.get_ident())
        if worker is None:
            worker = self._workers[threading.get_ident()] = self._start()
        reply = worker.reply(message)
        # The compiler crashed and ended the worker. The sweep goes on without the config.
        if reply is None:
            ending = worker.how_it_ended()
            worker.end()
            self._workers.pop(threading.get_ident(), None)
            return Usage(error=f"the compiler died {ending}")
        return Usage(**reply)

    def _start(self) -> Child:
        # Workers need no GPU, and on a GPU each worker's context would take memory.
        environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
        return Child(self.command, stderr=subprocess.DEVNULL, env=environment)
