"""Graphs of torch.compile: operators in them, their capture, and Inductor.

Private names of FX, Dynamo, AOTAutograd and Inductor that the backend alone uses. Those of symbols
are in ``symbols.py``, others in ``core/compat/``. Without a private name a graph is left to
Inductor as it is, or fewer regions of it are fused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core.compat.fake import fake_mode, is_fake
from ..core.compat.lookup import find

__all__ = [
    "AUTOCASTS",
    "CAST",
    "CHECKPOINTED",
    "CONVERSIONS",
    "GRAD_MODES",
    "HIGHER_ORDER",
    "NESTED",
    "OPERATORS",
    "OVERLOAD",
    "OWN_DERIVATIVE",
    "Called",
    "JointPass",
    "Opaque",
    "aliased_arguments",
    "as_fake",
    "aten_name",
    "attention_order",
    "called",
    "casts_recorded",
    "changes_shape",
    "check_of_inductor",
    "compile_by_inductor",
    "contiguous_tangents",
    "conversion",
    "copy_sources",
    "draws",
    "has_own_derivative",
    "in_vmap",
    "is_applied",
    "is_erased",
    "is_pointwise",
    "is_pure",
    "is_record",
    "is_recorded",
    "is_tangent",
    "is_traceable_subclass",
    "is_view",
    "keeping_attention",
    "leaves",
    "leaving_vmap",
    "mapped",
    "may_save_changed_inputs",
    "mutates",
    "namespace",
    "primals",
    "record_as",
    "recorded_attribute",
    "recorded_call",
    "recorded_graph",
    "recorded_node",
    "recording_nothing",
    "returning",
    "schema",
    "without_autocast",
    "written_arguments",
]

# --- targets of nodes -----------------------------------------------------------------------------
# Where a release of PyTorch lacks a name, `find` returns its second argument. These fallbacks match
# no target: for a type it is the type of None, and for a function it is None.

# The types of PyTorch's operators: with an overload, without one, and those that take functions.
OVERLOAD: type = find("_ops.OpOverload", type(None))
HIGHER_ORDER: type = find("_ops.HigherOrderOperator", type(None))
OPERATORS: tuple[type, ...] = (OVERLOAD, find("_ops.OpOverloadPacket", type(None)), HIGHER_ORDER)

CAST: Any = find("ops.aten._to_copy.default", None)

# A part that `torch.utils.checkpoint` computes again in the backward.
CHECKPOINTED: Any = find("_higher_order_ops.wrap.tag_activation_checkpoint", None)
# A part that is marked by `torch.compiler.nested_compile_region`: one graph for all of its calls.
NESTED: Any = find("ops.higher_order.invoke_subgraph", None)
# A call of a custom `torch.autograd.Function`.
OWN_DERIVATIVE: Any = find("_functorch.autograd_function.autograd_function_apply", None)

# In a functionalised graph, a call of an operator that writes into its arguments.
FUNCTIONALIZED: Any = find("ops.higher_order.auto_functionalized_v2", object())

# The methods and functions of DTensors that differ from operators: they convert or redistribute.
CONVERSIONS = frozenset({"from_local", "to_local", "redistribute", "full_tensor"})

# Functions that change what is recorded after them: whether gradients are, and in which dtype.
GRAD_MODES = frozenset({find("_C._set_grad_enabled", None)})
AUTOCASTS = frozenset(
    {find(f"amp.autocast_mode.{name}", None) for name in ("_enter_autocast", "_exit_autocast")}
)

# Returns the order in which PyTorch tries its implementations of attention. A capture records the
# one that PyTorch chose, so the order is in the key of a stored graph. Without the private name a
# graph that is stored under one order is also read under another.
attention_order: Callable[[], Any] = find("_C._get_sdp_priority_order", lambda: None)

_attention_kernels: Any = find("nn.attention._cur_sdpa_kernel_backends", None)
_select_attention: Any = find("nn.attention._sdpa_kernel", None)
_order_attention: Callable[[Any], None] = find("_C._set_sdp_priority_order", lambda order: None)


@contextmanager
def keeping_attention() -> Iterator[None]:
    """Restores the selection of `torch.nn.attention.sdpa_kernel`, even if the block fails."""
    selected, order = _attention_kernels and _attention_kernels(), attention_order()
    try:
        yield
    finally:
        if selected and _select_attention:
            _select_attention(selected)
            _order_attention(order)


# Returns how many transforms of functions are entered; None for none.
_vmap_level: Callable[[], int | None] = find("_C._functorch.maybe_current_level", lambda: None)
_leave_vmap: Any = find("_C._functorch._vmap_decrement_nesting", None)


def in_vmap() -> bool:
    """Returns whether a `torch.vmap` is entered. Its tensors lack the mapped dimension."""
    return bool(_vmap_level())


@contextmanager
def leaving_vmap() -> Iterator[None]:
    """Leaves each `torch.vmap` that the block enters, even if the block fails in one."""
    level = _vmap_level() or 0
    try:
        yield
    finally:
        while (_vmap_level() or 0) > level:
            _leave_vmap()


# The modules whose functions compute tensors and do nothing else, by the names that nodes have.
# Dynamo calls `torch._refs` in the place of `torch.tensor` with numbers that are symbols.
_PURE_MODULES = frozenset(
    {
        "torch",
        "torch._refs",
        "torch.functional",
        "torch.nn.functional",
        "fusedops.losses.registration",
        "torch._tensor",
        "torch._C._nn",
        "torch._C._special",
        "torch._C._linalg",
        "torch._C._fft",
        "torch._numpy._ufuncs",
        "_operator",
        "builtins",
        "math",
    }
)


def is_pure(target: Any) -> bool:
    """Returns whether a function computes tensors and does nothing else."""
    function = target
    # Dynamo wraps a function of NumPy, whose elementwise ones are in a module of their own, or an
    # operator of Python.
    if type(target).__module__ == "torch._dynamo.utils":
        function = getattr(target, "f", getattr(target, "op", target))
    module = str(getattr(function, "__module__", None))
    # Where Dynamo does not look into einops (PyTorch 2.11), its functions are nodes.
    return module in _PURE_MODULES or module.partition(".")[0] == "einops"


def is_record(target: Any) -> bool:
    """Returns whether a class is one of records that never change, such as a configuration."""
    if not isinstance(target, type):
        return False
    if issubclass(target, tuple):
        return hasattr(target, "_fields")
    parameters = getattr(target, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def is_applied(target: Any) -> bool:
    """Returns whether a function is Dynamo's for a custom autograd function that it does not trace.

    It was marked by `torch.compiler.allow_in_graph`.
    """
    module = str(getattr(target, "__module__", None))
    name = getattr(target, "__name__", "")
    return module.startswith("torch._dynamo.") and name == "trampoline_autograd_apply"


class Opaque:
    """A function that stays one node, of its tensors; it holds its other arguments.

    Args:
        function: the function.
        args: its arguments.
        kwargs: its arguments by keyword.
    Attributes:
        tensors: the tensors among the arguments.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        from torch.utils import _pytree as pytree

        self.__name__ = function.__name__
        self._function, self._pytree = function, pytree
        values, self._spec = pytree.tree_flatten((args, kwargs))
        self._places = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self.tensors = tuple(map(values.__getitem__, self._places))
        self._values = [None if isinstance(value, torch.Tensor) else value for value in values]

    def __call__(self, *tensors: Any) -> Any:
        """Calls the function."""
        values = list(self._values)
        for place, tensor in zip(self._places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = self._pytree.tree_unflatten(values, self._spec)
        return self._function(*args, **kwargs)


def conversion(target: Any) -> str:
    """Returns which of `CONVERSIONS` a function of a graph of Dynamo's is; "" for others."""
    module, name = str(getattr(target, "__module__", None)), str(getattr(target, "__name__", ""))
    # Up to PyTorch 2.12 Dynamo wraps them in functions of its own, such as "prim from_local" and
    # "prim_to_local", which hold meshes and placements.
    if module.startswith("torch._dynamo.variables."):
        name = name.removeprefix("prim").strip("_ ")
    elif not module.startswith("torch.distributed.tensor."):
        return ""
    return name if name in CONVERSIONS else ""


# --- schemas of operators -------------------------------------------------------------------------
# The schema and the tags of an operator tell what it writes, returns and draws. For other functions
# the answer is that they do none of it: `is_pure` tells whether that is true.


def mutates(target: Any) -> bool:
    """Returns whether an operator writes into one of its arguments."""
    return isinstance(target, OVERLOAD) and target._schema.is_mutable  # type: ignore[attr-defined]


def _has_tag(target: Any, tag: torch.Tag) -> bool:
    return isinstance(target, OVERLOAD) and tag in cast(Any, target).tags


def changes_shape(target: Any) -> bool:
    """Returns whether an operator changes the shape, strides or memory of its input tensor."""
    return _has_tag(target, torch.Tag.inplace_view)


def draws(target: Any) -> bool:
    """Returns whether an operator's results are random."""
    return _has_tag(target, torch.Tag.nondeterministic_seeded)


def is_view(target: Any) -> bool:
    """Returns whether an operator's result shares the memory of an argument and writes to none."""
    arguments = target._schema.arguments
    writes = {argument.is_write for argument in arguments if argument.alias_info is not None}
    return writes == {False}


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operator writes into."""
    if not mutates(target):
        return []
    return _passed(target, args, kwargs, lambda argument: argument.is_write)


def aliased_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operator returns, or returns views of."""
    if not isinstance(target, OVERLOAD):
        return []
    # An operator without an aliased result, such as `_foreach_add_`, writes, but returns nothing.
    results = target._schema.returns  # type: ignore[attr-defined]
    if all(result.alias_info is None for result in results):
        return []
    return _passed(target, args, kwargs, lambda argument: argument.alias_info is not None)


def _passed(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool]
) -> list[Any]:
    """Returns what is passed as the arguments that are wanted, by position or by name."""
    values: list[Any] = []
    for position, argument in enumerate(target._schema.arguments):
        if is_wanted(argument):
            is_positional = position < len(args)
            values += leaves(args[position] if is_positional else kwargs.get(argument.name))
    return values


def aten_name(target: Any) -> str:
    """Returns the name of one of PyTorch's operators, without its overload; "" for others."""
    return str(target.overloadpacket.__name__) if namespace(target) == "aten" else ""


def namespace(target: Any) -> str:
    """Returns the namespace of an operator; "" for other functions."""
    return str(cast(Any, target).namespace) if isinstance(target, OVERLOAD) else ""


def schema(target: Any) -> str:
    """Returns the schema of an operator, or of its only overload, as text; "" for others."""
    return str(getattr(getattr(target, "default", target), "_schema", ""))


def _arguments(operator: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def returning(target: Any) -> Any:
    """Returns the operator that returns what an in-place operator of aten writes, or None."""
    packet = getattr(torch.ops.aten, aten_name(target).removesuffix("_"), None)
    if packet is None:
        return None
    # The two overloads may have different names, but their arguments are the same.
    arguments = _arguments(target)
    for name in packet.overloads():
        overload = getattr(packet, name)
        if _arguments(overload) == arguments:
            return overload
    return None


def is_pointwise(target: Any) -> bool:
    """Returns whether an operator computes each element of its result from those at its place."""
    return _has_tag(target, torch.Tag.pointwise)


# --- calls in a joint graph of forward and backward -----------------------------------------------


class Called(NamedTuple):
    """A call of an operator, functionalised or not.

    Attributes:
        node: the call.
        operator: the operator.
        arguments: its arguments by name.
    """

    node: torch.fx.Node
    operator: Any
    arguments: Mapping[str, Any]

    def results(self, name: str, position: int) -> list[torch.fx.Node]:
        """Returns the nodes of one result.

        Args:
            name: the name of the argument that a functionalised operator writes into.
            position: the position among what an operator returns.
        """
        if self.node.target is FUNCTIONALIZED:
            base = self.arguments.get(f"_{name}_base_index")
            # What the operator returns comes first, and that is None.
            position = -1 if base is None else base + 1
        arguments = (self.node, position)
        return [user for user in self.node.users if user.args == arguments]


def called(node: torch.fx.Node) -> Called:
    """Returns the call of an operator that a node is; a call of None for other nodes."""
    target: Any = node.target
    if target is FUNCTIONALIZED:
        return Called(node, node.args[0], node.kwargs)
    if not isinstance(target, OVERLOAD):
        return Called(node, None, {})
    names = map(attrgetter("name"), target._schema.arguments)  # type: ignore[attr-defined]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return Called(node, target, arguments)


def is_tangent(node: torch.fx.Node) -> bool:
    """Returns whether a node of a joint graph is the gradient of a result."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def primals(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Returns the inputs of a joint graph that are not gradients of results."""
    return list(itertools.filterfalse(is_tangent, graph.find_nodes(op="placeholder")))


# --- graphs and their inputs ----------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """Returns what is in tuples, lists and dictionaries, as PyTorch's graphs flatten them."""
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with a function applied to each of its `leaves`."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(function, value)


def is_erased(node: torch.fx.Node) -> bool:
    """Returns whether a node is no longer in its graph; ``node.graph`` stays after `erase_node`."""
    return bool(node._erased)


def is_traceable_subclass(value: Any) -> bool:
    """Returns whether a value is a tensor of a class that holds others, as DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def copy_sources(source: torch.fx.GraphModule, target: torch.fx.GraphModule) -> None:
    """Copies Dynamo's record of the sources of a graph's inputs and parameters.

    AOTAutograd recognises parameters by their sources. Without them, CUDA graphs copy each
    parameter in each run.
    """
    names = getattr(source, "_param_name_to_source", None)
    if names is None:
        return
    from torch._dynamo.source import ConstantSource

    # AOTAutograd needs a source for every parameter and buffer, also for constants of the capture.
    sources: Any = {}
    for name, _ in (*target.named_parameters(), *target.named_buffers()):
        sources[name] = names.get(name, ConstantSource(name))
    target._param_name_to_source = sources
    placeholders = [graph.find_nodes(op="placeholder") for graph in (source.graph, target.graph)]
    for theirs, ours in zip(*placeholders, strict=True):
        ours._dynamo_source = theirs._dynamo_source


def as_fake(inputs: Sequence[Any]) -> list[Any]:
    """Returns a Dynamo graph's inputs as fake tensors, with the sizes that are symbols in it."""
    context = torch._guards.TracingContext.try_get()
    contexts: Any = {} if context is None else context.tensor_to_context
    mode: Any = torch._guards.detect_fake_mode(list(inputs)) or fake_mode()

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor) or _is_in(mode, value):
            return value
        record = None if is_fake(value) else contexts.get(value)
        if record is None:
            return mode.from_tensor(value)
        # With Dynamo's own record of the tensor: otherwise its sizes become new symbols.
        return mode.from_tensor(
            value, symbolic_context=record, source=record.tensor_source, trace=False
        )

    with mode:
        return list(map(fake, inputs))


def _is_in(mode: Any, tensor: Tensor) -> bool:
    """Returns whether a tensor is a fake one of a mode, or holds such tensors as a DTensor."""
    if not is_traceable_subclass(tensor):
        return getattr(tensor, "fake_mode", None) is mode
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = [
        part for part in map(functools.partial(getattr, tensor), names) if isinstance(part, Tensor)
    ]
    return all(map(functools.partial(_is_in, mode), parts))


# --- capture --------------------------------------------------------------------------------------


def recorded_graph(function: Callable[..., Any], fakes: Sequence[Any]) -> torch.fx.GraphModule:
    """Returns the operators that a function of fake tensors calls, in the current gradient mode."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = torch._guards.detect_fake_mode(list(fakes))
    with mode or nullcontext(), enable_python_dispatcher(), _saving_nothing():
        # With an empty table of decompositions: without a table, `detach` becomes `alias` (PyTorch
        # 2.14), which has a derivative.
        return make_fx(function, decomposition_table={}, _allow_non_fake_inputs=True)(*fakes)


_hooks_are_enabled: Callable[[], bool] = find(
    "_C._autograd._saved_tensors_hooks_is_enabled", lambda: True
)


def _saving_nothing() -> AbstractContextManager[Any]:
    """Hides what autograd saves in the block from the hooks of `torch.utils.checkpoint`.

    They count saved tensors, and a capture in the first forward would add its own. Nothing is
    differentiated in the block. Transforms of `torch.func` forbid such hooks; then none count.
    """
    if not _hooks_are_enabled():
        return nullcontext()
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    return hooks(lambda _: None, lambda _: None)  # type: ignore[no-any-return]


def recording_nothing() -> AbstractContextManager[Any]:
    """Does not record what is computed in the block; fake tensors stay fake in it."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def _tracer() -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode().tracer  # type: ignore[union-attr]


def record_as(tensor: Tensor, node: torch.fx.Node) -> None:
    """Makes a tensor the value of a node of the graph that is being recorded."""
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    tracer, meta = _tracer(), dict(node.meta)
    track_tensor_tree(tensor, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
    node.meta.update(meta)


def is_recorded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a value of the graph that is being recorded."""
    return isinstance(_tracer().unwrap_proxy(tensor), torch.fx.Proxy)


def recorded_node(tensor: Tensor) -> torch.fx.Node:
    """Returns the node of a value of the graph that is being recorded."""
    node: torch.fx.Node = _tracer().unwrap_proxy(tensor).node
    return node


def recorded_attribute(tensor: Tensor, name: str) -> Tensor:
    """Returns a tensor that a graph holds, as a value of the graph that is being recorded."""
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    tracer = _tracer()
    setattr(tracer.root, name, tensor)
    with recording_nothing():
        fake: Tensor = as_fake([tensor])[0]
    track_tensor_tree(
        fake, tracer.create_proxy("get_attr", name, (), {}), constant=None, tracer=tracer
    )
    return fake


_NO_NAMES: Mapping[int, str] = {}


def recorded_call(
    target: Any,
    args: Any,
    kwargs: Any,
    result: Any = None,
    names: Mapping[int, str] = _NO_NAMES,
    body: torch.fx.GraphModule | None = None,
) -> Any:
    """Records a call as one node, whose value is ``result``.

    `make_fx` would record the operators that such a function calls instead.

    Args:
        names: the names of the modules among the arguments, by `id`.
        body: the captured form of the first module among the arguments.
    """
    from torch.fx.experimental.proxy_tensor import track_tensor_tree
    from torch.utils import _pytree as pytree

    tracer = _tracer()

    def proxy(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            name = names[id(value)]
            setattr(tracer.root, name, value)
            return tracer.create_proxy("get_attr", name, (), {})
        return tracer.unwrap_proxy(value)

    node = tracer.create_proxy("call_function", target, *pytree.tree_map(proxy, (args, kwargs)))
    if body is not None:
        node.node.args[0].meta["val"] = body
    track_tensor_tree(result, node, constant=None, tracer=tracer)
    # `make_fx` notes a plain tensor of the same shape as the value of a node.
    for value in filter(is_traceable_subclass, leaves(result)):
        recorded_node(value).meta["val"] = value
    return result


def has_own_derivative(results: Iterable[Tensor], arguments: Iterable[Tensor]) -> bool:
    """Returns whether a custom autograd function is between the results and the arguments."""
    # Walks autograd's graph back from the results, as far as the arguments.
    seen = {None, *[tensor.grad_fn for tensor in arguments]}
    todo = [tensor.grad_fn for tensor in results]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        todo += [other for other, _ in node.next_functions]  # type: ignore[union-attr]
    return False


def may_save_changed_inputs() -> bool:
    """Returns whether a compiled graph may save an input that it changes.

    Up to PyTorch 2.14 it may, and the backward of such a graph raises an error. Since 2.15
    AOTAutograd's partitioner saves another tensor in the input's place.
    """
    return torch.__version__ < "2.15"


# --- compilation of the rest ----------------------------------------------------------------------


def compile_by_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Any,
    change: JointPass | None = None,
) -> Any:
    """Returns what Inductor compiles a graph to, under a mode and options of `torch.compile`.

    Args:
        gm: the graph.
        inputs: its inputs.
        mode: Inductor's mode.
        options: Inductor's options.
        change: changes the joint graph of forward and backward, before it is partitioned.
    """
    # What `torch.compile` calls itself: it turns the two into Inductor's settings.
    inductor: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    if change is not None:
        name = "joint_custom_post_pass"
        other = inductor.config.get(name, getattr(torch._inductor.config, name))
        inductor.config[name] = _joined(other, change)
    return inductor(gm, list(inputs))


class JointPass(NamedTuple):
    """A pass over joint graphs.

    Attributes:
        apply: changes a graph.
        key: for PyTorch's caches, which hold the results of the pass.
    """

    apply: Callable[[torch.fx.Graph], None]
    key: str


def _joined(other: Any, change: JointPass) -> Any:
    """Returns one of Inductor's passes, which applies the user's passes first."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    others = list(other) if isinstance(other, (list, tuple)) else [other] * (other is not None)
    keys = list(map(_key_of, others))

    class Joined(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in others:
                one(graph)
            change.apply(graph)

        def uuid(self) -> Any:
            # Without a key for one of the passes PyTorch caches nothing.
            return None if None in keys else (*keys, change.key)

    return Joined()


def _key_of(one: Any) -> Any:
    """Returns the key of one of Inductor's passes for PyTorch's caches; None if it has none."""
    return getattr(one, "uuid", lambda: None)()


def check_of_inductor(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Raises `torch.compile`'s own error for a mode or options that Inductor does not know."""
    torch._TorchCompileInductorWrapper(mode, options, None)


def contiguous_tangents() -> AbstractContextManager[Any]:
    """Compiles a graph for contiguous gradients of its results, whatever the results' strides.

    After PyTorch 2.11 AOTAutograd compiles the backward for gradients with the strides of the
    results, and copies a gradient with others. Without the private setting this cannot be changed:
    the backward copies once more, with the same results.
    """
    import torch._functorch as functorch

    config: Any = getattr(functorch, "config", None)
    if not hasattr(config, "guess_tangent_strides_as_outputs"):
        return nullcontext()
    return config.patch(guess_tangent_strides_as_outputs=False)  # type: ignore[no-any-return]


@contextmanager
def casts_recorded() -> Iterator[None]:
    """Compiles a graph as it is: autocast casts neither at compile time nor in its runs.

    At compile time it is enough to switch autocast off. In a run the caller's autocast is on again,
    and AOTAutograd switches it off only if it was on for some device at compile time. So it is
    switched on for a device that no operator of the graph runs on.
    """
    if not any(map(torch.is_autocast_enabled, _AUTOCAST_KINDS)):
        yield
        return
    # "hpu" is Intel's Gaudi.
    before = torch.is_autocast_enabled("hpu")
    with without_autocast():
        torch.set_autocast_enabled("hpu", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("hpu", before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Computes nodes of a captured graph as they are: its casts are nodes, autocast adds none."""
    kinds = list(filter(torch.is_autocast_enabled, _AUTOCAST_KINDS))
    _set_autocast(kinds, False)
    try:
        yield
    finally:
        _set_autocast(kinds, True)


_AUTOCAST_KINDS = ("cuda", "cpu")


def _set_autocast(kinds: Iterable[str], is_enabled: bool) -> None:
    for kind in kinds:
        torch.set_autocast_enabled(kind, is_enabled)
