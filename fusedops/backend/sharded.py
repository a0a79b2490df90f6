"""DTensors in a capture: calls on them become calls on this rank's tensors.

A call on DTensors that PyTorch computes by one operator on each rank, without communication, is
recorded as that operator, on local tensors. So regions and all other passes see the tensors that a
rank has:

    Dynamo's graph    from_local ──▶ layer_norm ──▶ redistribute ──▶ linear ──▶ redistribute
    captured graph                   layer_norm ──▶ redistribute ──▶ mm     ──▶ redistribute
                      local tensors                 DTensors         local      DTensors

PyTorch differentiates the captured graph. Of a local tensor whose DTensor is replicated, while the
result is sharded, each rank has a part of the gradient's sum, and the conversion says so
(`Partial`). All other calls stay calls on DTensors: those that communicate, draw random numbers or
change a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from ..core.compat import distributed
from ..core.compat.dispatch import DispatchMode
from ..core.compat.fake import current_tracer
from ..core.launches import launch
from .changes import NotCapturedError
from .fx import (
    aliased_arguments,
    draws,
    is_recorded,
    leaves,
    mapped,
    mutates,
    record_as,
    recorded_call,
    recorded_node,
    recording_nothing,
    returning,
)
from .graphs import SHARD, are_numbers, direct_tensors
from .meshes import has_equal_shards
from .shards import Shard
from .targets import FromLocal, OnDTensors, ToLocal

__all__ = ["LocalCalls", "has_dtensors"]


def has_dtensors(values: Any) -> bool:
    """Whether DTensors are among values, or in tuples, lists and dictionaries of them."""
    return any(map(distributed.is_dtensor, leaves(values)))


class LocalCalls(DispatchMode):  # type: ignore[misc]
    """Records calls on DTensors as calls on local tensors; see the module.

    Args:
        inputs: the inputs of the graph that is being recorded.

    Attributes:
        is_of_rank: whether the graph differs between ranks: a rank's shard has another size, or its
            part of a dropout mask another place.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._tracer = current_tracer()
        self.is_of_rank = False
        # Local tensors by the nodes of their DTensors, by the placements that the gradients of the
        # local tensors have, and by whether gradients are enabled: what is recorded under
        # `torch.no_grad` has none, and what is recorded outside must not be used as if it had none.
        self._local: dict[tuple[fx.Node, Any, bool], Tensor] = {}
        # The nodes of DTensors that are results of operators, and whose memory no other value has.
        self._unshared: set[fx.Node] = set()
        # The nodes of views of DTensors, by what they are views of, and by the same.
        self._views: dict[Any, fx.Node] = {}
        # The first DTensor on each mesh.
        self._first: list[Any] = []
        self._note(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtensors = list(filter(distributed.is_dtensor, leaves((args, kwargs))))
        if not dtensors or current_tracer() is not self._tracer:
            return func(*args, **kwargs)
        # The tracer itself copies a DTensor that it is about to record.
        if not all(map(is_recorded, dtensors)):
            return func(*args, **kwargs)
        if mutates(func):
            return self._changed(func, types, args, kwargs)
        if func is torch.ops.aten.native_dropout.default and _is_located(args[0]):
            return self._dropout(*args)
        if aliased_arguments(func, args, kwargs):
            self._share(dtensors)
        with recording_nothing(), _Observer(dtensors) as observer:
            result = func(*args, **kwargs)
        call = _local_call(func, dtensors, leaves(result), observer.calls)
        if call is None:
            return self._on_dtensors(func, args, kwargs, result)
        return self._on_local_tensors(func, call, dtensors, result)

    def converted(self, name: str, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records a function or a method of DTensors, one of `fx.CONVERSIONS`."""
        with recording_nothing():
            result = target(*args, **kwargs)
            distributed.wait_for(result)
        # The placements of gradients, as PyTorch's autograd function has them. Without a gradient
        # they do not matter.
        gradients = getattr(getattr(result, "grad_fn", None), "grad_placements", None)
        self._share(leaves((args, kwargs)))
        if name == "to_local":
            (source,) = args
            local = self._local_of(source, gradients or _of_gradient(source.placements))
            record_as(result, recorded_node(local))
            return result
        # Before the tracer copies the result, for its record of the value.
        self._note(result)
        recorded_call(OnDTensors(target), args, kwargs, result)
        if name == "redistribute" and result.placements == args[0].placements:
            self._remember(result, self._local_of(args[0], _of_gradient(result.placements)))
        if name == "from_local" and gradients is None and _keeps_gradient(args[0]):
            self._remember(result, args[0])
        return result

    def _note(self, values: Any) -> None:
        """Notes the first DTensor on each mesh among values."""
        for value in filter(distributed.is_dtensor, leaves(values)):
            if all(value.device_mesh != other.device_mesh for other in self._first):
                self._first.append(value)

    def _share(self, values: Sequence[Any]) -> None:
        """Notes that other values may have the memory of these."""
        self._unshared.difference_update(map(recorded_node, filter(distributed.is_dtensor, values)))

    # --- operators --------------------------------------------------------------------------------

    def _on_dtensors(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Records a call on DTensors; equal views of one DTensor once."""
        if not aliased_arguments(func, args, kwargs) or not isinstance(result, Tensor):
            return recorded_call(OnDTensors(func), args, kwargs, result)
        key = str((torch.is_grad_enabled(), func, mapped(_node_or_value, (args, kwargs))))
        if key in self._views:
            record_as(result, self._views[key])
        else:
            self._views[key] = recorded_node(recorded_call(OnDTensors(func), args, kwargs, result))
        return result

    def _on_local_tensors(
        self, func: Any, call: tuple[Any, Any], dtensors: Sequence[Any], result: Any
    ) -> Any:
        """Records a call on local tensors; returns its results as DTensors.

        Args:
            func: the operator.
            call: its arguments on this rank.
            dtensors: the DTensors among the caller's arguments.
            result: what it returns.
        """
        own = {}
        for dtensor in dtensors:
            local = self._local_of(dtensor, _of_argument(dtensor.placements))
            own[id(distributed.local_of(dtensor))] = local
        args, kwargs = mapped(lambda value: own.get(id(value), value), call)
        outs = iter(leaves(func(*args, **kwargs)))
        results = mapped(lambda like: self._as_dtensor(next(outs), like), result)
        if not aliased_arguments(func, args, kwargs):
            self._unshared.update(map(recorded_node, leaves(results)))
        return results

    def _changed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Records an operator in place as one that returns the new value of its first argument."""
        changed, operator = args[0], returning(func)
        if operator is None or recorded_node(changed) not in self._unshared:
            raise NotCapturedError("it changes a DTensor in place")
        # The gradient of the tensor stays that of its old value; the new value would have none.
        if not _keeps_gradient(changed):
            raise NotCapturedError("it changes a DTensor in place without a gradient")
        result = self.__torch_dispatch__(operator, types, args, kwargs)
        if _form(result) != _form(changed):
            raise NotCapturedError("it changes a DTensor in place")
        record_as(changed, recorded_node(result))
        return changed

    def _as_dtensor(self, local: Any, like: Any) -> Any:
        """A DTensor of a local tensor that is recorded, distributed as another."""
        if not distributed.is_dtensor(like):
            return local
        if not are_numbers((*like.shape, *like.stride())):
            raise NotCapturedError("a size of a DTensor changes from call to call")
        conversion = FromLocal(like.placements, like.shape, like.stride())
        reference = next(one for one in self._first if one.device_mesh == like.device_mesh)
        with recording_nothing(), torch.no_grad():
            dtensor = conversion(local, reference)
        recorded_call(conversion, (local, reference), {}, dtensor)
        self._remember(dtensor, local)
        return dtensor

    def _remember(self, dtensor: Any, local: Tensor) -> None:
        """Remembers the local tensor that a DTensor consists of."""
        self._local[self._key(dtensor, _of_gradient(dtensor.placements))] = local

    def _local_of(self, dtensor: Any, gradients: Any) -> Tensor:
        """The local tensor of a DTensor, as a value of the graph.

        Args:
            dtensor: the DTensor.
            gradients: the placements of the local tensor's gradient.
        """
        key = self._key(dtensor, gradients)
        if key not in self._local:
            conversion = ToLocal(gradients)
            with recording_nothing(), torch.no_grad():
                local = conversion(dtensor)
            recorded_call(conversion, (dtensor,), {}, local)
            self._local[key] = local
        return self._local[key]

    def _key(self, dtensor: Any, gradients: Sequence[Any]) -> tuple[fx.Node, Any, bool]:
        """The key of a DTensor's local tensor, in the current grad mode."""
        self.is_of_rank |= not has_equal_shards(dtensor)
        return recorded_node(dtensor), tuple(gradients), torch.is_grad_enabled()

    # --- dropout ----------------------------------------------------------------------------------

    def _dropout(self, dtensor: Any, p: float, train: bool | None) -> Any:
        """Records a dropout of a local tensor, for a region to draw its part of the whole mask."""
        local = self._local_of(dtensor, dtensor.placements)
        outs = torch.ops.aten.native_dropout.default(local, p, train)
        (call,) = recorded_node(outs[0]).all_input_nodes
        self.is_of_rank = True
        call.meta[SHARD] = Shard(
            dtensor.device_mesh, tuple(dtensor.placements), tuple(dtensor.shape)
        )
        with recording_nothing(), torch.no_grad():
            likes = (torch.empty_like(dtensor), torch.empty_like(dtensor, dtype=torch.bool))
        return tuple(map(self._as_dtensor, outs, likes))


def _keeps_gradient(tensor: Tensor) -> bool:
    """Whether what is computed from a tensor now has a gradient if the tensor has one."""
    return torch.is_grad_enabled() or not tensor.requires_grad


def _node_or_value(value: Any) -> Any:
    """The node of a tensor, and another value as it is."""
    return recorded_node(value) if isinstance(value, Tensor) else value


class _Observer(DispatchMode):  # type: ignore[misc]
    """Records the operators that calls on DTensors run on this rank's tensors."""

    def __init__(self, dtensors: Sequence[Any]) -> None:
        super().__init__()
        self._own = {id(distributed.local_of(dtensor)) for dtensor in dtensors}
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_dtensors((args, kwargs)):
            return NotImplemented
        # PyTorch also calls operators on other tensors, to compute the shapes of whole results.
        if not self._own.isdisjoint(map(id, leaves((args, kwargs)))):
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def _local_call(
    func: Any, dtensors: Sequence[Any], results: Sequence[Any], calls: Sequence[Any]
) -> tuple[Any, Any] | None:
    """The arguments of the one operator that computes a call on each rank; None if there is none.

    Args:
        func: the operator.
        dtensors: its DTensors.
        results: what it returns.
        calls: the operators that were called on this rank's tensors, with their arguments.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if len(calls) != 1 or calls[0][0] is not func or draws(func):
        return None
    returned = direct_tensors(results)
    if set(map(type, returned)) != {DTensor}:
        return None
    # The gradient of a replicated result may be whole on each rank, or a part of a sum. PyTorch
    # decides that in the backward, and here it would have to be known.
    if Replicate in set(map(type, _placements(returned))):
        return None
    if not all(map(_is_known, _placements((*returned, *dtensors)))):
        return None
    return calls[0][1:]  # type: ignore[no-any-return]


def _placements(dtensors: Iterable[Any]) -> list[Any]:
    """The placements of all DTensors, one after the other."""
    return list(itertools.chain(*map(attrgetter("placements"), dtensors)))


def _form(dtensor: Any) -> Any:
    """What a change in place preserves."""
    return dtensor.placements, dtensor.shape, dtensor.dtype


def _is_known(placement: Any) -> bool:
    """Whether a placement is one for which `_of_argument` has a rule."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor import Shard as Sharded

    if type(placement) is Partial:
        return bool(placement.reduce_op == "sum")
    return type(placement) in (Replicate, Sharded)


def _of_argument(placements: Sequence[Any]) -> tuple[Any, ...]:
    """The placements of an argument's gradient, of an operator that each rank computes alone.

    Its results are not replicated. Along a dimension of the mesh:

        argument      results       gradient
        sharded       any           sharded
        replicated    any           a partial sum: each rank computes what its results contribute
        partial sum   partial sums  replicated: the gradient of a sum is that of each summand
    """
    from torch.distributed.tensor import Partial

    pairs = zip(placements, _of_gradient(placements), strict=True)
    return tuple([Partial() if own.is_replicate() else one for own, one in pairs])


def _of_gradient(placements: Sequence[Any]) -> tuple[Any, ...]:
    """The placements that PyTorch gives to gradients of DTensors: of partial sums, replicated."""
    from torch.distributed.tensor import Replicate

    return tuple([Replicate() if one.is_partial() else one for one in placements])


def _is_located(dtensor: Any) -> bool:
    """Whether kernels can locate a rank's part of the dropout mask of a DTensor.

    Its rows may be sharded, and not its columns; besides the first dimension, at most two.
    """
    from torch.distributed.tensor import Shard as Sharded

    if not launch.runs_kernels(dtensor.device.type):
        return False
    if set(map(type, dtensor.placements)) != {Sharded}:
        return False
    dims = {placement.dim % dtensor.dim() for placement in dtensor.placements}
    return dtensor.dim() - 1 not in dims and len(dims - {0}) <= 2
