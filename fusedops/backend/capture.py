"""From the graph that Dynamo hands to a backend to one of aten operators, in which derivatives are still PyTorch's.

Autocast is casts there, and a module's function is what it dispatches to, so that row-wise operators can be told from
others. PyTorch differentiates the captured graph. An operator whose derivative a capture would lose, such as a custom
autograd function, stays one node. So does a checkpointed part, whose body is captured by itself. A function of `rowwise` is
captured like the code around it, so that one region may hold both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..compiler.function import function_of
from ..compiler.tracing import traced_with_others
from ..core import compat, launch
from ..models.tricks.masks import made_contiguous
from ..models.tricks.padding import HALF
from .changes import NotCapturedError, without_changes
from .heads import Repeats
from .masks import Constants, Mask
from .regions import FUNCTION, drop_unused, name_of
from .report import note_change

__all__ = ["WITHOUT_EFFECT", "NotCapturedError", "captured", "handed_on"]

Inner = Callable[[fx.GraphModule], fx.GraphModule]

# Functions of others that do nothing which a graph has to repeat.
WITHOUT_EFFECT = frozenset({"_are_functorch_transforms_active", "_log_api_usage_once", "lazy_load_decompositions"})


# The functions that write into their first argument, besides methods and functions whose names end in an underscore.
_WRITE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow"})
# A tensor with more elements is not written into a graph.
_MOST_NUMBERS = 4096
# Methods that change how a tensor is differentiated, of which nothing is recorded.
_CHANGES_DERIVATIVE = frozenset({"detach_", "requires_grad_", "register_hook", "retain_grad"})


def captured(gm: fx.GraphModule, inputs: Sequence[Any], inner: Inner) -> fx.GraphModule:
    """The graph in aten operators, with the same inputs and outputs.

    Placeholders have a mark whether they require a gradient, ``meta["requires_grad"]``.

    Args:
        gm: from Dynamo.
        inputs: of it, real or fake.
        inner: what is done with the captured bodies of checkpointed parts.
    Raises:
        NotCapturedError: a capture could change what the graph computes, or its derivative.
    """
    if any(isinstance(value, Tensor) and compat.is_traceable_subclass(value) for value in inputs):
        raise NotCapturedError("an input is a tensor subclass")
    return _captured(gm, compat.as_fake(inputs), inner)


def _captured(
    gm: fx.GraphModule, fakes: Sequence[Any], inner: Inner, known: Mapping[int, Tensor] | None = None
) -> fx.GraphModule:
    """See `captured`; ``known`` are the values of placeholders, by their places."""
    _check_known(gm)

    def run(*args: Any) -> Any:
        constants = {compat.recorded_node(args[place]): value for place, value in (known or {}).items()}
        return _Capture(gm, inner, Constants(constants)).run(*args)

    trained = [isinstance(fake, Tensor) and fake.requires_grad for fake in fakes]
    computed = [fake for fake, needed in zip(fakes, trained, strict=True) if needed and not fake.is_leaf]
    versions = [fake._version for fake in computed]
    made = compat.recorded_graph(run, fakes)
    if compat.may_save_changed_inputs() and versions != [fake._version for fake in computed]:
        raise NotCapturedError("it changes an input that others are differentiated through")
    _made_again(made, {str(node.target).replace(".", "_") for node in gm.graph.find_nodes(op="get_attr")})
    handed_on(gm, made)
    for node, needed in zip(made.graph.find_nodes(op="placeholder"), trained, strict=True):
        node.meta["requires_grad"] = needed
    without_changes(made.graph)
    drop_unused(made.graph)
    made.recompile()
    return made


def _check_known(gm: fx.GraphModule) -> None:
    """Raises where a graph has a node that a capture could change."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            raise NotCapturedError(f"it calls the module {node.target}")
        if node.op == "call_method" and node.target in _CHANGES_DERIVATIVE:
            raise NotCapturedError(f"it calls {node.target}")
        if node.op == "call_function" and not _is_known(node.target):
            raise NotCapturedError(f"it calls {getattr(node.target, '__name__', node.target)}")


def _made_again(made: fx.GraphModule, given: Collection[str]) -> None:
    """Replaces small CPU tensors that the capture holds by calls of `torch.tensor`, as in the captured function.

    Inductor takes a held tensor as an input. It copies it to the GPU at each call, and uses no CUDA graphs. It writes numbers
    into its code.

    Args:
        made: the captured graph.
        given: the names of the attributes of Dynamo's graph, which are not replaced.
    """
    for node in made.graph.find_nodes(op="get_attr"):
        held = getattr(made, node.target)
        is_plain = node.target not in given and type(held) is Tensor and held.layout is torch.strided
        if not is_plain or held.device.type != "cpu" or held.numel() > _MOST_NUMBERS or 0 in held.shape[:-1]:
            continue
        with compat.without_modes():
            numbers = held.tolist()
        for copy in [user for user in node.users if name_of(user) == "lift_fresh_copy"]:
            with made.graph.inserting_before(copy):
                tensor = made.graph.call_function(
                    torch.tensor, (numbers,), {"dtype": held.dtype, "device": held.device}
                )
            tensor.meta.update(copy.meta)
            copy.replace_all_uses_with(tensor)
            made.graph.erase_node(copy)
        if not node.users:
            made.graph.erase_node(node)
    left = {node.target for node in made.graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in made.named_buffers(recurse=False) if name not in left]:
        delattr(made, name)


def handed_on(gm: fx.GraphModule, made: fx.GraphModule) -> None:
    """Hands on what Dynamo says of a graph and its inputs to the one that was made of it."""
    given = [graph.find_nodes(op="placeholder") for graph in (made.graph, gm.graph)]
    for ours, theirs in zip(*given, strict=True):
        ours.target = theirs.target
        ours.meta.update({key: value for key, value in theirs.meta.items() if key not in ("val", "example_value")})
    made.meta.update(gm.meta)
    compat.copy_sources(gm, made)


def _looked_into(body: fx.GraphModule, backward: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule | None:
    """The captured forward of a custom autograd function that is left as it is. None if it does not tell what is changed."""
    if _writes_into_given(backward.graph):
        return None
    aliases = [fake.detach() if isinstance(fake, Tensor) else fake for fake in fakes]  # whose metadata may change
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            return _captured(body, aliases, lambda inner: inner)
        except Exception:  # noqa: BLE001 - whatever is unknown in it, it is not looked into
            return None


def _writes_into_given(graph: fx.Graph) -> bool:
    """Whether a graph of Dynamo's changes a tensor that it is given, or may: what is no clone may be a view."""
    for node in graph.nodes:
        name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
        changed = node if name in _WRITE or (name.endswith("_") and not name.endswith("__")) else None
        while isinstance(changed, fx.Node) and changed.target != "clone":
            if changed.op == "placeholder":
                return True
            changed = changed.args[0] if changed.args else None
    return False


def _is_known(target: Any) -> bool:
    if isinstance(target, compat.OPERATORS) or target in compat.GRAD_MODES or target in compat.AUTOCASTS:
        return True
    if function_of(target) is not None:
        return True
    return compat.is_pure(target) or getattr(target, "__name__", "") in WITHOUT_EFFECT


class _Capture(fx.Interpreter):
    """Runs Dynamo's graph while what it dispatches to is being recorded."""

    def __init__(self, gm: fx.GraphModule, inner: Inner, constants: Constants) -> None:
        super().__init__(gm)
        self.inner, self.constants = inner, constants
        self.names: dict[int, str] = {}  # of modules
        self.repeats = Repeats()
        self.calls = itertools.count()  # of marked parts
        self.prefix = ""  # of names in this call of a marked part

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        found = self.fetch_attr(target)
        if isinstance(found, Tensor):
            return compat.recorded_attribute(found, self.prefix + target.replace(".", "_"))
        self.names[id(found)] = self.prefix + target.replace(".", "_")
        return found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        if target in compat.GRAD_MODES:
            compat.recorded_call(target, args, kwargs)
            return target(*args, **kwargs)
        if isinstance(target, compat.HIGHER_ORDER):
            return self._one_node(target, args, kwargs)
        if target is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if (function := function_of(target)) is not None:
            return _inlined(function, getattr(target, "__name__", ""), args)
        return self.repeats.note(target, args, kwargs, super().call_function(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Interpreter`."""
        return self.repeats.note(target, args, kwargs, super().call_method(target, args, kwargs))

    def _one_node(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operator that takes functions, as it is; the body of a checkpointed part captured by itself."""
        if target is compat.NESTED:
            return self._nested(*args)
        known, body = dict[int, Tensor](), None
        if target is compat.CHECKPOINTED:
            values = {place: self.constants.value(compat.recorded_node(arg))
                      for place, arg in enumerate(args[1:]) if _is_mask(arg)}  # fmt: skip
            known = {place: value for place, value in values.items() if value is not None}
        with compat.recording_nothing():
            if target is compat.CHECKPOINTED:
                given, *rest = args
                body = self.inner(_captured(given, rest, self.inner, known))
                self.names[id(body)] = self.names[id(given)]
                args = (body, *rest)
            elif target is compat.OWN_DERIVATIVE:
                forward, backward, *rest = args
                body = _looked_into(forward, backward, rest)
            found = target(*args, **kwargs)
        return compat.recorded_call(target, args, kwargs, found, self.names, body)

    def _nested(self, part: fx.GraphModule, _identifier: str, *operands: Any) -> Any:
        """A call of a marked part, in its place: regions then reach across its borders."""
        _check_known(part)
        inner = _Capture(part, self.inner, self.constants)
        inner.names, inner.repeats, inner.calls = self.names, self.repeats, self.calls
        inner.prefix = f"call{next(self.calls)}_"
        return inner.run(*operands)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """Attention with no mask and no repeated heads where it needs none, or else with a mask that fused kernels support."""
        if not launch.runs_kernels(query.device.type):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
        changes = []
        if attn_mask is not None:
            is_droppable = _is_mask(attn_mask) and len(rest) < 2 and not options.get("is_causal")
            kind = self.constants.kind(compat.recorded_node(attn_mask)) if is_droppable else Mask.OTHER
            if kind is Mask.ALL:
                attn_mask = None
                changes.append("an attention without its mask, which masks nothing")
            elif (
                kind is Mask.CAUSAL
                and _is_positive(options.get("scale"))
                and attn_mask.shape[-2:] == (query.shape[-2], key.shape[-2])
            ):
                attn_mask, options = None, {**options, "is_causal": True}
                changes.append("an attention that is causal in the place of its mask")
            elif (contiguous := made_contiguous(attn_mask)) is not attn_mask:
                attn_mask = contiguous
                changes.append("an attention whose mask is made contiguous")
        if attn_mask is None and _takes_groups(query, value) and len(rest) < 4 and query.shape[1] % key.shape[1] == 0:
            heads = self.repeats.once(key), self.repeats.once(value)
            if heads[0] is not None and heads[1] is not None and heads[0].shape[1] == heads[1].shape[1]:
                (key, value), options = heads, {**options, "enable_gqa": True}  # type: ignore[assignment]
                changes.append("an attention of keys and values that are not repeated for groups of queries")
        found = F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
        for change in changes:
            note_change(compat.recorded_node(found), change)
        return found


class _Watched(TorchFunctionMode):
    """Records where a function that Dynamo has not looked into switches gradients on and off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in compat.GRAD_MODES:
            compat.recorded_call(func, args, kwargs)
        if (name := getattr(func, "__name__", "")) in _CHANGES_DERIVATIVE:
            raise NotCapturedError(f"it calls {name}")
        return func(*args, **kwargs)


def _inlined(function: Callable[..., Any], name: str, args: Any) -> Any:
    """Calls a function of `rowwise`, to capture what it does."""
    with traced_with_others(), _Watched():
        found = function(*args)
    for value in compat.leaves(found):
        if isinstance(value, Tensor) and not any(value is arg for arg in args):
            compat.recorded_node(value).meta[FUNCTION] = name
    given, made = [[value for value in compat.leaves(values) if isinstance(value, Tensor)] for values in (args, found)]
    if compat.has_own_derivative(made, given):
        raise NotCapturedError(f"it calls {name}, which calls a custom autograd function")
    return found


def _takes_groups(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch has a fused kernel that takes groups of queries: in half precision, of heads that are not too large."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if (
        query.dim() != 4
        or dtype not in HALF
        or not all(type(t.shape[-1]) is int and t.shape[-1] <= 256 for t in (query, value))
    ):
        return False
    if kind != "cuda":
        return True
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _is_positive(scale: Any) -> bool:
    """Whether scores are scaled so that what is masked, least, stays so."""
    return scale is None or (type(scale) in (int, float) and scale > 0)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and (value.dtype == torch.bool or value.is_floating_point())
