"""Plans whose programs wait for one another: they depend on the stream's multiprocessors."""

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
        plan: that under ``key``, which has 0 for the number of multiprocessors: the plan of the
            first stream. Plans for streams with another number are stored under keys with that
            number:

                (..., 0, bucket)      first stream, of 132 multiprocessors; or a plan for any stream
                (..., 66, bucket)     a stream of 66

        plans: by key.
        key: the key of the call.
        make: makes a plan for a key.
    """
    if not plan.multiprocessors:
        return plan
    current = launch.multiprocessors(key[0].device_index)
    if current == plan.multiprocessors:
        return plan
    key = (*key[:-2], current, key[-1])
    return plans.get(key) or tuning.plan(plans, key, make)
