"""Runs functions in new processes, with caches of compilers in a folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

__all__ = ["Worker", "caches", "in_a_new_process", "together"]

_R = TypeVar("_R")
_CLOSING_SECONDS = 10.0  # until a process that should end is killed


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
    """Returns the function's result from a new process; raises the errors of `Worker.run`."""
    with Worker() as worker:
        return worker.run(function, *arguments, limit=limit)


def together(
    workers: Sequence[Worker], function: Callable[..., _R], arguments: Sequence[tuple[Any, ...]]
) -> list[_R]:
    """Returns the function's results from several processes, which run it at the same time.

    If it raises an error in one of them, the others are killed: they may wait for that one.

    Raises:
        RuntimeError: the function raised an error, or a process ended without a result.
    """
    with ThreadPoolExecutor(len(workers)) as pool:
        calls = [
            pool.submit(worker.run, function, *own)
            for worker, own in zip(workers, arguments, strict=True)
        ]
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        failed = any(call.exception() for call in done)
        for worker in workers if failed else ():
            worker.stop()
        for call in done:
            call.result()
        return [call.result() for call in calls]


class Worker:
    """A process that runs functions, one after the other.

    It is spawned when it is first needed, and again after it has ended or was killed.

    Args:
        initialize: the function that a new process runs first.
        arguments: the arguments of that function.
    """

    def __init__(self, initialize: Callable[..., object] | None = None, *arguments: Any) -> None:
        self._initialize = (initialize, arguments)
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Spawns the process unless there is one."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, of_process = context.Pipe()
        arguments = (of_process, *self._initialize)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        of_process.close()

    def run(self, function: Callable[..., _R], *arguments: Any, limit: float | None = None) -> _R:
        """Returns the function's result from the process.

        Raises:
            TimeoutError: there is no result after ``limit`` seconds, with the process's start. The
                process has been killed.
            RuntimeError: the function raised an error, or the process ended without a result.
        """
        self.start()
        assert self._process is not None
        assert self._connection is not None
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(limit):
                self.kill()
                raise TimeoutError(f"no result after {limit:.0f} s")
            error, result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            status = self._process.exitcode
            self.kill()
            raise RuntimeError(f"the process ended with status {status}") from None
        if error is not None:
            raise RuntimeError(error)
        return result  # type: ignore[no-any-return]

    def pause(self) -> None:
        """Stops the process, if there is one, until `resume`. What it has launched still runs."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues the process."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills the process, also while another thread waits for its result."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.join(_CLOSING_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills the process, if there is one."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None and connection is not None:
            process.kill()
            process.join()
            connection.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        process = self._process
        if process is not None and process.pid is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, number)


def _serve(
    connection: Connection, initialize: Callable[..., object] | None, arguments: tuple[Any, ...]
) -> None:
    """Runs the functions that arrive, and sends the text of the error and the result of each."""
    if initialize is not None:
        initialize(*arguments)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the parent process has ended
            return
        message: tuple[str | None, Any]
        try:
            message = (None, function(*arguments))
        # The parent process raises it.
        except Exception:  # noqa: BLE001
            message = (traceback.format_exc(), None)
        connection.send(message)
