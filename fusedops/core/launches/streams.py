"""Plans that depend on the stream's number of multiprocessors: their programs wait for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..configs import tuning
from . import launch

__all__ = ["plan_of_stream"]


class _Plan(Protocol):
    @property
    def multiprocessors(self) -> int: ...


_P = TypeVar("_P", bound=_Plan)


def plan_of_stream(
    plan: _P, plans: dict[Any, _P], key: tuple[Any, ...], make: Callable[..., _P]
) -> _P:
    """Returns the plan for a key on the current stream.

    Args:
        plan: the plan that ``plans`` has for ``key``.
        plans: the plans of all calls, by key.
        key: the call's key. Its last but one item is 0 in place of a number of multiprocessors. The
            plan under it is that of the first stream that made the call. Plans for streams with
            another number of multiprocessors are stored under keys with that number:

                (..., 0, bucket)      the first stream, of 132 multiprocessors; or any stream, if
                                      programs do not wait
                (..., 66, bucket)     a stream of 66 multiprocessors

        make: a function that returns a new plan for a key.
    """
    if not plan.multiprocessors:
        return plan
    current = launch.multiprocessors(key[0].device_index)
    if current == plan.multiprocessors:
        return plan
    key = (*key[:-2], current, key[-1])
    return plans.get(key) or tuning.plan(plans, key, make)
