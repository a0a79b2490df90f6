"""Captures the graph that Dynamo passes to a backend as one of aten operators.

    Dynamo's graph            captured graph
    F.layer_norm, autocast    aten.native_layer_norm, aten._to_copy
                              ──▶ regions become operators ──▶ PyTorch differentiates it

In the captured graph autocast is casts, and a module's function is the operators that it dispatches
to, so that row-wise operators can be told from others. The captured graph is not differentiated
yet. An operator whose derivative a capture would lose, such as a custom autograd function, stays
one node. So does a checkpointed part, whose body is captured by itself. A function of `rowwise` is
captured like the code around it, so that one region may hold both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compiler.function import function_of
from ..compiler.tracing import traced_with_others
from ..core.compat.dispatch import without_modes
from ..core.compat.distributed import is_dtensor
from .attention import attention
from .changes import NotCapturedError, without_writes
from .fx import (
    AUTOCASTS,
    CHECKPOINTED,
    CONVERSIONS,
    GRAD_MODES,
    HIGHER_ORDER,
    NESTED,
    OPERATORS,
    OWN_DERIVATIVE,
    Opaque,
    as_fake,
    conversion,
    copy_sources,
    has_own_derivative,
    in_vmap,
    is_applied,
    is_pure,
    is_record,
    is_traceable_subclass,
    keeping_attention,
    leaves,
    leaving_vmap,
    may_save_changed_inputs,
    recorded_attribute,
    recorded_call,
    recorded_graph,
    recorded_node,
    recording_nothing,
    written_arguments,
)
from .graphs import (
    FUNCTION,
    OF_RANK,
    direct_tensors,
    drop_unused,
    held_names,
    is_view,
    name_of,
    nodes_in,
    tensors_in,
)
from .heads import Repeats
from .masks import Constants, is_mask
from .sharded import LocalCalls, has_dtensors

__all__ = ["WITHOUT_EFFECT", "NotCapturedError", "captured", "copy_metadata"]

RewriteBody = Callable[[fx.GraphModule], fx.GraphModule]

# Functions of other libraries without an effect that a graph would have to repeat. Those of
# `torch.nn.attention.sdpa_kernel` and of `torch.vmap` change what a capture records: the attention
# that is selected, and operators of all slices.
WITHOUT_EFFECT = frozenset(
    {
        "_are_functorch_transforms_active",
        "_log_api_usage_once",
        "lazy_load_decompositions",
        "_backend_from_string",
        "_sdpa_kernel",
        "_vmap_increment_nesting",
        "_vmap_decrement_nesting",
        "_add_batch_dim",
        "_remove_batch_dim",
    }
)

# The functions of `operator` that write into their first argument. Methods and other functions that
# do so have names that end in an underscore.
_WRITE = frozenset(
    {
        "setitem",
        "iadd",
        "iand",
        "ifloordiv",
        "ilshift",
        "imatmul",
        "imod",
        "imul",
        "ior",
        "ipow",
        "irshift",
        "isub",
        "itruediv",
        "ixor",
    }
)
# A tensor with more elements is not written into a graph.
_MOST_NUMBERS = 4096
# Methods that change how a tensor is differentiated. A capture does not record them.
_CHANGES_DERIVATIVE = frozenset({"detach_", "requires_grad_", "register_hook", "retain_grad"})


def captured(
    gm: fx.GraphModule, inputs: Sequence[Any], rewrite_body: RewriteBody
) -> fx.GraphModule:
    """The graph in aten operators, with the same inputs and outputs.

    ``meta["requires_grad"]`` of a placeholder is whether it requires a gradient.

    Args:
        gm: Dynamo's graph.
        inputs: its inputs, real or fake.
        rewrite_body: is applied to the captured bodies of checkpointed parts.
    Raises:
        NotCapturedError: a capture could change what the graph computes, or its derivative.
    """
    subclasses = list(filter(is_traceable_subclass, direct_tensors(list(inputs))))
    if not all(map(is_dtensor, subclasses)):
        raise NotCapturedError("an input is a tensor subclass, and no DTensor")
    return _captured(gm, as_fake(inputs), rewrite_body, {})


def _captured(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    rewrite_body: RewriteBody,
    known: Mapping[int, Tensor],
) -> fx.GraphModule:
    """See `captured`; ``known`` are the values of placeholders, by their positions."""
    _check_operators(gm)
    modes: list[LocalCalls | None] = []

    def run(*args: Any) -> Any:
        constants = {}
        for position, value in known.items():
            constants[recorded_node(args[position])] = value
        values = [node.meta.get("example_value") for node in gm.graph.nodes]
        local_calls = LocalCalls(args) if has_dtensors(values) else None
        modes.append(local_calls)
        capture = _Capture(gm, rewrite_body, Constants(constants), local_calls)
        try:
            with local_calls or nullcontext(), keeping_attention(), leaving_vmap():
                return capture.run(*args)
        finally:
            # The capture may fail within a block of autocast. The graph is then left to Inductor,
            # and must not be compiled inside of that block.
            for mode in reversed(capture.autocasts):
                mode.__exit__(None, None, None)

    # Before the capture, which may change them.
    requires_grad = list(map(_requires_grad, fakes))
    non_leaves = list(filter(_is_non_leaf, direct_tensors(list(fakes))))
    versions = _versions(non_leaves)
    # A graph may end in another gradient mode than it begins in. It is compiled in the mode in
    # which it begins, so that is restored.
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        result = recorded_graph(run, fakes)
    is_changed = versions != _versions(non_leaves)
    # Up to PyTorch 2.14 the compiled graph saves such an input, and its backward raises.
    if is_changed and may_save_changed_inputs():
        raise NotCapturedError("it changes an input that others are differentiated through")
    _inline_constants(result, {name.replace(".", "_") for name in held_names(gm.graph)})
    copy_metadata(gm, result)
    if any(mode is not None and mode.is_of_rank for mode in modes):
        result.meta[OF_RANK] = True
    placeholders = result.graph.find_nodes(op="placeholder")
    for node, fake, is_required in zip(placeholders, fakes, requires_grad, strict=True):
        node.meta["requires_grad"] = is_required
        if is_dtensor(fake):
            node.meta["val"] = fake
    without_writes(result.graph)
    drop_unused(result.graph)
    result.recompile()
    return result


def _requires_grad(fake: Any) -> bool:
    return isinstance(fake, Tensor) and fake.requires_grad


def _versions(fakes: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place."""
    return [fake._version for fake in fakes]


def _is_non_leaf(fake: Tensor) -> bool:
    """Whether an input is computed from others that have gradients."""
    return fake.requires_grad and not fake.is_leaf


def _check_operators(gm: fx.GraphModule) -> None:
    """Raises where a graph has a node that a capture could change."""
    for node in gm.graph.nodes:
        reason = _CHECKS.get(node.op, _accepted)(node.target)
        if reason:
            raise NotCapturedError(reason)


def _accepted(target: Any) -> str:
    """The reason why nodes of an operator are not captured: none."""
    return ""


def _why_not_module(target: Any) -> str:
    """The reason why a call of a module is not captured: its forward is not in the graph."""
    return f"it calls the module {target}"


def _why_not_method(target: Any) -> str:
    """The reason why a call of a method is not captured; "" if it is."""
    return f"it calls {target}" if target in _CHANGES_DERIVATIVE else ""


def _why_not_function(target: Any) -> str:
    """The reason why a call of a function is not captured; "" if it is."""
    return "" if _is_known(target) else f"it calls {getattr(target, '__name__', target)}"


# Reasons against capturing a node, by its kind.
_CHECKS: dict[str, Callable[[Any], str]] = {
    "call_module": _why_not_module,
    "call_method": _why_not_method,
    "call_function": _why_not_function,
}


def _is_known(target: Any) -> bool:
    """Whether a function computes the same in a captured graph."""
    if isinstance(target, OPERATORS):
        return True
    if target in GRAD_MODES | AUTOCASTS:
        return True
    if function_of(target) is not None or is_pure(target) or conversion(target):
        return True
    if is_record(target) or is_applied(target):
        return True
    return getattr(target, "__name__", "") in WITHOUT_EFFECT


def _inline_constants(gm: fx.GraphModule, attributes: Collection[str]) -> None:
    """Replaces small CPU tensors that the capture holds by calls of `torch.tensor`.

    The model calls `torch.tensor`, too, but the capture records its result: a tensor that the graph
    holds. Inductor makes a held tensor an input, which is copied to the GPU at each call and
    prevents CUDA graphs. The numbers of a call it writes into its code.

    Args:
        gm: the captured graph.
        attributes: the names of the attributes of Dynamo's graph, which are not replaced.
    """
    for node in gm.graph.find_nodes(op="get_attr"):
        tensor = getattr(gm, node.target)
        if node.target not in attributes and _is_inlined(tensor):
            _inline(node, tensor)
    _delete_unused_buffers(gm)


def _inline(node: fx.Node, tensor: Tensor) -> None:
    """Replaces the copies of a held tensor by calls of `torch.tensor`."""
    graph = node.graph
    with without_modes():
        numbers = tensor.tolist()
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    # `torch.tensor` is recorded as a held tensor and its copy.
    for copy in [user for user in node.users if name_of(user) == "lift_fresh_copy"]:
        with graph.inserting_before(copy):
            call = graph.call_function(torch.tensor, (numbers,), options)
        call.meta.update(copy.meta)
        copy.replace_all_uses_with(call)
        graph.erase_node(copy)
    if not node.users:
        graph.erase_node(node)


def _delete_unused_buffers(gm: fx.GraphModule) -> None:
    """Deletes the buffers of a module that its graph does not read."""
    buffers = set(dict(gm.named_buffers(recurse=False)))
    for name in buffers.difference(held_names(gm.graph)):
        delattr(gm, name)


def _is_inlined(tensor: Any) -> bool:
    """Whether `torch.tensor` makes this tensor again, from few numbers."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu":
        return False
    # `tolist` loses the dimensions behind one of no elements: for the shape (0, 3) it returns [],
    # for (3, 0) it returns [[], [], []].
    is_empty = 0 in tensor.shape[:-1]
    return not is_empty and tensor.numel() <= _MOST_NUMBERS


def copy_metadata(source: fx.GraphModule, target: fx.GraphModule) -> None:
    """Copies Dynamo's metadata of a graph and its inputs to the graph that replaces it."""
    graphs = (target.graph, source.graph)
    placeholders = [graph.find_nodes(op="placeholder") for graph in graphs]
    for target_node, source_node in zip(*placeholders, strict=True):
        target_node.target = source_node.target
        # The values are the fake tensors of another trace: each graph has its own.
        meta = dict(source_node.meta)
        for value in ("val", "example_value"):
            meta.pop(value, None)
        target_node.meta.update(meta)
    target.meta.update(source.meta)
    copy_sources(source, target)


# --- custom autograd functions --------------------------------------------------------------------


def _captured_forward(
    body: fx.GraphModule, backward: fx.GraphModule, fakes: Sequence[Any]
) -> fx.GraphModule | None:
    """The captured forward of a custom autograd function, which stays one node.

    From the captured forward, `graphs.written` reads which tensors the function changes. None where
    that would be wrong or unknown: the function is then taken to change all its arguments.
    """
    # A backward may change a tensor that a region saves, too.
    if _writes_into_inputs(backward.graph):
        return None
    # The capture may change the metadata of its inputs.
    aliases = list(map(_alias, fakes))
    try:
        return _captured(body, aliases, lambda graph: graph, {})
    except Exception:  # noqa: BLE001 - something in it is unknown: so is what it changes
        return None


def _alias(value: Any) -> Any:
    """A tensor with the memory of another, and metadata of its own; other values as they are."""
    return value.detach() if isinstance(value, Tensor) else value


def _writes_into_inputs(graph: fx.Graph) -> bool:
    """Whether a graph of Dynamo's changes one of its inputs, or may."""
    inputs = set(graph.find_nodes(op="placeholder"))
    written = itertools.chain.from_iterable(map(_written, graph.nodes))
    return not inputs.isdisjoint(map(_origin, nodes_in(written)))


def _written(node: fx.Node) -> list[Any]:
    """The arguments that a node of Dynamo's graph writes into."""
    if "out" in node.kwargs:
        return leaves(node.kwargs["out"])
    if _is_write(node):
        return _first_argument(node)
    return written_arguments(node.target, node.args, node.kwargs)


def _first_argument(node: fx.Node) -> list[Any]:
    """The tensors in the first argument of a call: `_foreach_add_` has a list of them there.

    Without positional arguments, any argument may be the first: all are returned.
    """
    return leaves(node.args[:1] or tuple(node.kwargs.values()))


def _origin(node: fx.Node) -> fx.Node:
    """The first argument of the first argument, and so on, up to an input or a clone.

    Any result but a clone may be a view of an argument.
    """
    while node.target != "clone":
        arguments = nodes_in(_first_argument(node))
        if not arguments:
            break
        node = arguments[0]
    return node


def _is_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's calls a method or a function that writes, by its name."""
    name = str(getattr(node.target, "__name__", ""))
    if node.op == "call_method":
        name = str(node.target)
    if name in _WRITE:
        return True
    return name.endswith("_") and not name.endswith("__")


# --- the capture ----------------------------------------------------------------------------------


class _Capture(fx.Interpreter):
    """Runs Dynamo's graph while the operators that it dispatches to are recorded.

    Attributes:
        rewrite_body: see `captured`.
        constants: the values of constant nodes.
        names: the names of the modules that the graph holds, by their ids.
        repeats: the calls that may repeat heads.
        autocasts: the blocks of autocast that are entered and not left yet.
        calls: counts the calls of marked parts.
        prefix: the prefix of names in the marked part that this captures; "" outside of any.
        local_calls: records calls on DTensors; None without any.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        rewrite_body: RewriteBody,
        constants: Constants,
        local_calls: LocalCalls | None,
    ) -> None:
        super().__init__(gm)
        self.rewrite_body, self.constants = rewrite_body, constants
        self.names: dict[int, str] = {}
        self.repeats = Repeats()
        self.autocasts: list[Any] = []
        self.calls = itertools.count()
        self.prefix = ""
        self.local_calls = local_calls

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        value = self.fetch_attr(target)
        name = self.prefix + target.replace(".", "_")
        if isinstance(value, Tensor):
            return recorded_attribute(value, name)
        self.names[id(value)] = name
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        if target in GRAD_MODES:
            recorded_call(target, args, kwargs)
            return target(*args, **kwargs)
        if target in AUTOCASTS:
            return self._autocast(target, *args)
        if isinstance(target, HIGHER_ORDER):
            return self._one_node(target, args, kwargs)
        if is_applied(target):
            opaque = Opaque(target, args, kwargs)
            return self._one_node(opaque, opaque.tensors, {})
        if self.local_calls is not None and conversion(target):
            return self.local_calls.converted(conversion(target), target, args, kwargs)
        is_plain = not has_dtensors(args) and not in_vmap()
        if target is F.scaled_dot_product_attention and is_plain:
            return attention(self.constants, self.repeats, *args, **kwargs)
        function = function_of(target)
        if function is not None:
            return _inlined(function, getattr(target, "__name__", ""), args)
        return self.repeats.note(target, args, kwargs, super().call_function(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        if self.local_calls is not None and target in CONVERSIONS:
            method = getattr(type(args[0]), target)
            return self.local_calls.converted(target, method, args, kwargs)
        return self.repeats.note(target, args, kwargs, super().call_method(target, args, kwargs))

    def _autocast(self, target: Any, *args: Any) -> Any:
        """Enters a block of autocast, and returns it; or leaves the one that is the argument."""
        block = target(*args)
        if block is None:
            self.autocasts.remove(*args)
        else:
            self.autocasts.append(block)
        return block

    def _one_node(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Records an operator that calls functions as one node.

        The body of a checkpointed part is captured by itself.
        """
        if target is NESTED:
            return self._nested(*args)
        body = None
        known = self._known_masks(args[1:]) if target is CHECKPOINTED else {}
        with recording_nothing():
            if target is CHECKPOINTED:
                part, *inputs = args
                body = self.rewrite_body(_captured(part, inputs, self.rewrite_body, known))
                self.names[id(body)] = self.names[id(part)]
                args = (body, *inputs)
            elif target is OWN_DERIVATIVE:
                forward, backward, *inputs = args
                body = _captured_forward(forward, backward, inputs)
            result = target(*args, **kwargs)
        return recorded_call(target, args, kwargs, result, self.names, body)

    def _known_masks(self, arguments: Sequence[Any]) -> dict[int, Tensor]:
        """The values of constant masks among arguments, by their positions."""
        # In the graph of a checkpointed part a mask is an input, though it may be constant outside.
        known = dict[int, Tensor]()
        for position, arg in enumerate(arguments):
            if not is_mask(arg):
                continue
            value = self.constants.value(recorded_node(arg))
            if value is not None:
                known[position] = value
        return known

    def _nested(self, part: fx.GraphModule, _identifier: str, *operands: Any) -> Any:
        """Runs the graph of a marked part, so that the capture has its operators, and no call.

        Regions then reach across its borders. The mark is lost: PyTorch would compile one graph for
        all calls, and cannot differentiate one that calls this package's operators.
        """
        _check_operators(part)
        nested = _Capture(part, self.rewrite_body, self.constants, self.local_calls)
        nested.names, nested.repeats, nested.calls = self.names, self.repeats, self.calls
        nested.autocasts = self.autocasts
        nested.prefix = f"call{next(self.calls)}_"
        return nested.run(*operands)


# --- functions of rowwise -------------------------------------------------------------------------


class _GradModes(TorchFunctionMode):
    """Records where a function that Dynamo has not traced switches gradients on and off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GRAD_MODES:
            recorded_call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _CHANGES_DERIVATIVE:
            raise NotCapturedError(f"it calls {name}")
        return func(*args, **kwargs)


def _inlined(function: Callable[..., Any], name: str, args: Any) -> Any:
    """Calls a function of `rowwise`, to capture its operators."""
    with traced_with_others(), _GradModes():
        result = function(*args)
    results = tensors_in(result)
    arguments = set(map(recorded_node, tensors_in(args)))
    for value in results:
        node = _behind_views(recorded_node(value), arguments)
        if node not in arguments:
            node.meta[FUNCTION] = name
    # Its derivative would be lost: the capture has only the operators that it calls.
    if has_own_derivative(results, tensors_in(args)):
        raise NotCapturedError(f"it calls {name}, which calls a custom autograd function")
    return result


def _behind_views(node: fx.Node, arguments: Collection[fx.Node]) -> fx.Node:
    """The node that a function computes, if it returns a view of that node.

    A region has no views at its borders, so a mark of the view would be lost.

    Args:
        node: the node of a result.
        arguments: the nodes of the function's arguments: the search ends there.
    """
    while node not in arguments and is_view(node):
        node = node.all_input_nodes[0]
    return node
