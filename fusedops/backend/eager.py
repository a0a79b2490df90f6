"""Runs a graph by PyTorch's eager operators, without Inductor.

    graph with operators ──▶ each node calls what takes the least host time ──▶ its code runs

Autograd differentiates what runs, as it does in eager mode: hooks of autograd, checkpointing and
higher derivatives work as there. A node's function is exchanged for one that computes the same:

    node                                   is called as
    a region, or an operator of this       a launch, with an autograd Function where a backward
      library that the model calls           follows: see `core.calls.call`
    an operator of PyTorch                 the function or method of Python that dispatches to it,
                                             which takes less host time
    a checkpointed part                    `torch.utils.checkpoint`, without re-entrance
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from ..compiler.operator import Program
from ..core.calls.call import elsewhere, launched
from ..core.calls.operator import Operator
from ..core.calls.operators import decode, site_from
from ..core.calls.registration import defined
from ..core.compat.bindings import binding
from ..core.compat.dispatch import is_intercepted
from ..core.random.rng import probability
from .fx import CHECKPOINTED, OVERLOAD, namespace, without_autocast
from .graphs import FUSED, value_of

__all__ = ["calls_operators", "runnable"]


def calls_operators(gm: fx.GraphModule) -> bool:
    """Whether a graph, or a body in it, calls operators in the place of several of the model."""
    bodies = filter(None, map(_body, gm.graph.nodes))
    return any(itertools.chain(map(_is_fused, gm.graph.nodes), map(calls_operators, bodies)))


def _is_fused(node: fx.Node) -> bool:
    return bool(namespace(node.target) == "fusedops" or node.meta.get(FUSED))


def runnable(gm: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs a graph, which it changes.

    Args:
        gm: a captured graph, in which casts of autocast are operators.
    """
    _lower(gm)
    run = gm.forward

    def in_context(*args: Any) -> Any:
        is_enabled = torch.is_grad_enabled()
        with without_autocast():
            try:
                return run(*args)
            except BaseException:
                # Between two switches of the gradient mode an error must not leave the caller in
                # the inner one. Without an error the graph leaves its own, as the model does.
                torch.set_grad_enabled(is_enabled)
                raise

    return in_context


def _lower(gm: fx.GraphModule) -> None:
    """Exchanges the functions that nodes call; see the module's table."""
    graph = gm.graph
    for node in list(graph.nodes):
        operator = _operator_of(node.target)
        body = _body(node)
        if operator is not None:
            _call_directly(node, operator)
        elif body is not None:
            _lower(body)
            node.target = _checkpointed
        elif isinstance(node.target, OVERLOAD):
            _call_binding(node)
    _erase_unused_states(graph)
    gm.recompile()


def _body(node: fx.Node) -> fx.GraphModule | None:
    """The graph of a checkpointed part that a node calls; None for other nodes."""
    if node.target is not CHECKPOINTED:
        return None
    body: Any = node.args[0]
    return getattr(node.graph.owning_module, body.target)  # type: ignore[no-any-return]


def _checkpointed(body: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Runs the body of a checkpointed part, and again in the backward.

    Args:
        body: the body.
        args: its inputs.
        options: those of `torch.utils.checkpoint.checkpoint`.
    """
    # A part that was checkpointed with re-entrance has the same values and gradients.
    options = {**options, "use_reentrant": False}
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is not None:
        options["context_fn"] = context_fn
    return checkpoint(body.forward, *args, **options)


# --- operators of this library --------------------------------------------------------------------


def _operator_of(target: Any) -> Operator | None:
    """The operator whose forward is called; None for other functions."""
    if namespace(target) != "fusedops":
        return None
    name: str = target.overloadpacket.__name__
    operator = defined(name.rpartition("_")[0])
    if operator is None:
        return None
    # The forward of an operator of many slices returns buffers, and no launch does.
    kind = ("forward", "call")[operator.variadic]
    return operator if name == f"{operator.name}_{kind}" else None


def _call_directly(node: fx.Node, op: Operator) -> None:
    """Lets a node launch an operator's kernels, with a random state that the launch draws."""
    count = len(op.tensors)
    seed, threshold, cols, call, *numbers = node.args[count:]
    # The mask of a rank's part has a state of more numbers.
    if seed is not None and not _is_state(seed):
        return
    dropout = seed is not None
    constants = (int(threshold), int(cols), str(call), *numbers)  # type: ignore[arg-type]
    node.target = _launching(op, constants, dropout=dropout)
    tensors: Any = node.args[:count]
    node.args = (*tensors[:-1], *tensors[-1]) if op.variadic else tensors


def _is_state(node: Any) -> bool:
    """Whether a node draws a random state of a whole mask."""
    return getattr(node, "target", None) is torch.ops.fusedops.random_state.default


def _launching(op: Operator, constants: Sequence[Any], *, dropout: bool) -> Callable[..., Any]:
    """A function of an operator's tensors, which are like those of the graph's trace.

    Args:
        op: the operator.
        constants: its arguments after the random state.
        dropout: whether it draws a mask.
    """
    threshold, cols, call, *numbers = constants
    first, is_single = op.first, len(op.outputs) == 1
    p = probability(threshold)
    _, _, saves = decode(op, call, tuple(numbers))

    @functools.cache
    def site_on(index: int) -> Any:
        return site_from(op, index, dropout, cols, call, tuple(numbers))

    def fitted(tensors: Sequence[Any]) -> Any:
        # Of a program there is none if a tensor is of a subclass.
        if isinstance(op, Program):
            return op.fitted_site(tensors, saves=saves)
        return site_on(tensors[first].get_device())

    def launching(*tensors: Any) -> Any:
        like = tensors[first]
        site = None if is_intercepted() or not like.numel() else fitted(tensors)
        if site is None:
            outs = elsewhere(op, site_on(like.get_device()), tensors, p)
        else:
            outs = launched(op, site, tensors, p)
        return outs[0] if is_single else outs

    launching.__name__ = launching.__qualname__ = op.name
    return launching


def _erase_unused_states(graph: fx.Graph) -> None:
    """Erases the nodes that draw a random state which launches now draw themselves."""
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.fusedops.random_state.default
    ):
        if not node.users:
            graph.erase_node(node)


# --- operators of PyTorch -------------------------------------------------------------------------


def _call_binding(node: fx.Node) -> None:
    """Lets a node call the function of Python that dispatches to its operator, if there is one."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _example)
    bound = binding(node.target, args, kwargs)
    if bound is None:
        return
    node.target, named = bound
    node.kwargs = {**named, **node.kwargs}


def _example(node: fx.Node) -> Any:
    """A value of the type of a node's: without a trace, as in a graph that was stored, a tensor."""
    value = value_of(node)
    if value is None or isinstance(value, Tensor):
        return torch.empty(0, device="meta")
    return 2 if isinstance(value, torch.SymInt) else value
