"""Tracing: a function of plain PyTorch operators, run once on tensors without memory, becomes a `Graph`.

Every operator that PyTorch dispatches is looked up in `lowering`. What is not there is decomposed by PyTorch, or refused
with its name and the user's line. Numbers that a function takes from its tensors' sizes would be constants of the graph:
a second run with other sizes shows them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core import compat
from ..core.call import as_references
from ..core.operators import NAMES
from .axes import Axes, AxisError, Label
from .errors import NotRowwiseError
from .ir import Graph, Node
from .walking import APPLIED

__all__ = ["TWICE", "Traced", "Value", "recording", "trace", "traced_with_others", "twice"]


@dataclass(frozen=True, eq=False)
class Value:
    """A traced tensor.

    Attributes:
        node: what it is computed of.
        labels: of its dimensions.
        dtype: its dtype.
    """

    node: Node
    labels: tuple[Label, ...]
    dtype: torch.dtype


# Values know a set of axes: of such a tensor they would have the diagonal.
TWICE = (
    "it has one dimension twice, as an outer product of a row with itself, or a tensor beside itself in another order; pass "
    "one of the two as an argument"
)


def twice(axes: Axes, value: Value) -> bool:
    """Whether two dimensions of a tensor are the same axis."""
    leaves = axes.leaves(tuple([axis for label in value.labels for axis in label]))
    return len(set(leaves)) < len(leaves)


@dataclass
class Traced:
    """What came of a function.

    Attributes:
        graph: holds all nodes.
        axes: of the values.
        inputs: the tensors, those that are captured last.
        outputs: what it returns.
        container: "tensor", "tuple" or "list": what it returns.
        captured: the tensors that it found elsewhere, by their places in the state.
        drops: the drop probability of each dropout, in order.
        lines: of each node that has one, the line in the user's file.
        values: the tensors of floating-point numbers, in the order in which they were made.
        noted: all tensors, in the order in which they were made.
        file: the user's.
        wide: whether it computes anything in fp64.
        fixed: dimensions whose sizes are constants of the function.
    """

    graph: Graph
    axes: Axes
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    container: str = "tensor"
    captured: list[int] = field(default_factory=list)
    drops: list[float] = field(default_factory=list)
    lines: dict[int, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    noted: list[Value] = field(default_factory=list)
    file: str = ""
    wide: bool = False
    fixed: list[Label] = field(default_factory=list)


def trace(call: Callable[..., Any], arguments: Sequence[Any], function: Callable[..., Any], names: Sequence[str],
          find: Callable[[Tensor], tuple[int, str] | None]) -> Traced:  # fmt: skip
    """The function's graph for tensors like these.

    Args:
        call: calls the function.
        arguments: of the call; of tensors only dtype, device and shape are looked at.
        function: the user's.
        names: of the tensors among them, in order.
        find: where a tensor that is none of them comes from; None if that cannot be told.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    recorder = _Recorder(function, find)
    fakes = iter(names)

    def stand_in(value: Any) -> Any:
        return recorder.input(value, next(fakes)) if isinstance(value, Tensor) else value

    given = list(map(stand_in, arguments))
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # what is cast here has no memory, and is for nobody else
        # With gradients on, so that a block of the function's own without them is seen.
        with (
            traced_with_others(),
            as_references(),
            torch.enable_grad(),
            compat.quiet(),
            recorder.fake,
            recorder,
            _Functions(recorder),
            compat.noticing_autograd_functions(recorder.refuse_autograd_function),
        ):
            returned = call(*given)
        if recorder.failed is not None:  # the function went on without it, as PyTorch would not have
            raise recorder.failed
    except (NotRowwiseError, AxisError) as error:
        raise (recorder.failed or recorder.refused(str(error))) from None
    finally:
        torch.set_autocast_cache_enabled(cached)
    traced = recorder.traced
    traced.container = "tuple" if type(returned) is tuple else "list" if type(returned) is list else "tensor"
    outputs = (returned,) if traced.container == "tensor" else returned
    if not outputs or not all(isinstance(out, Tensor) for out in outputs):
        kinds = sorted({type(out).__name__ for out in outputs if not isinstance(out, Tensor)})
        what = (
            f"{type(returned).__name__} of {', '.join(kinds)}"
            if outputs is returned and kinds
            else type(returned).__name__
        )
        raise NotRowwiseError(
            f"{recorder.name} returns {what}, expected a tensor, or a tuple or list of tensors; return these, and put them "
            "into what else a caller expects outside"
        )
    traced.outputs = [recorder.value(out) for out in outputs]
    recorder.name_nodes()
    return traced


class _Running(threading.local):
    """How many functions are being traced in this thread, in one another."""

    count = 0


_running = _Running()


def recording() -> bool:
    """Whether a function is being traced in this thread: another that it calls is traced with it."""
    return _running.count > 0


@contextmanager
def traced_with_others() -> Iterator[None]:
    """Within it functions that kernels would be made of run as they are, for a tracer that makes kernels of more than one."""
    _running.count += 1
    try:
        yield
    finally:
        _running.count -= 1


class _Recorder(compat.DispatchMode):  # type: ignore[misc]
    """Sees every operator, runs it on tensors without memory, and notes what it does."""

    def __init__(self, function: Callable[..., Any], find: Callable[[Tensor], tuple[int, str] | None]) -> None:
        super().__init__()
        self.fake = compat.fake_mode()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.find = find
        self.code = getattr(inspect.unwrap(function), "__code__", None)
        self.traced = Traced(Graph(), Axes(), [], file=getattr(self.code, "co_filename", ""))
        self.values: dict[int, tuple[Tensor, Value]] = {}  # by identity; the tensor is held, so that no other has it
        self.given: list[tuple[Tensor, Value]] = []  # what came from outside
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.line = 0
        self._targets = _targets_of(self.code)
        self._last: dict[int, Node] = {}
        self._decomposing = ""  # the operator that is being taken apart
        # The first refusal, whether or not the function caught it.
        self.failed: NotRowwiseError | None = None

    @property
    def graph(self) -> Graph:
        """Where nodes are made."""
        return self.traced.graph

    @property
    def axes(self) -> Axes:
        """Of the values."""
        return self.traced.axes

    # --- tensors --------------------------------------------------------------------------------------------------------

    def input(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor without memory that stands for an argument."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotRowwiseError(f"{self.name}: {name} is no dense tensor")
        if tensor.dtype not in NAMES:
            readable = ", ".join(sorted(word for dtype, word in NAMES.items() if dtype))
            parts = "; pass torch.view_as_real of it" if tensor.dtype.is_complex else ""
            raise NotRowwiseError(f"{self.name}: {name} is of {tensor.dtype}; kernels read {readable}{parts}")
        made = self.empty(tensor.shape, tensor.dtype, getattr(tensor, "fusedops_device", tensor.device))
        labels = tuple([self.axes.new(size) for size in tensor.shape])
        node = self.graph.make("input", attrs=(len(self.traced.inputs),), axes=[a for label in labels for a in label],
                               kind=kind_of(tensor.dtype))  # fmt: skip
        node.names.append(name)
        value = Value(node, labels, tensor.dtype)
        self.traced.inputs.append(value)
        self.given.append((made, value))
        self.set(made, value)
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without memory."""
        with compat.without_modes(), self.fake:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def set(self, tensor: Tensor, value: Value) -> None:
        """Note what a tensor is."""
        self.values[id(tensor)] = (tensor, value)

    def value(self, tensor: Tensor) -> Value:
        """What a tensor is."""
        found = self.values.get(id(tensor))
        if found is not None:
            return found[1]
        return self.values[id(self._captured(tensor))][1]

    def _captured(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for one that the function found elsewhere."""
        known = self.stand_ins.get(id(tensor))
        if known is not None:
            return known[1]
        if compat.is_fake(tensor):
            raise NotRowwiseError("it uses a result of an operator that no kernel computes")
        captured = self.find(tensor)
        if captured is None:
            raise NotRowwiseError(
                "a tensor of which cannot be told where the function has it from; make it an argument"
            )
        place, name = captured
        self.traced.captured.append(place)
        made = self.input(tensor, name)
        self.stand_ins[id(tensor)] = (tensor, made)
        return made

    # --- operators ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.noting_refusals():
            return self._dispatched(func, args, kwargs or {})

    @contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Within it the first refusal is kept: user code may catch it as PyTorch's error, and take another way."""
        try:
            yield
        except (NotRowwiseError, AxisError) as error:
            # Without its frames, which would keep the tensors.
            self.failed = self.failed or self.refused(str(error))
            raise

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        from . import lowering

        self.mark_line()
        name = _name_of(func)
        if name.startswith("prim::"):  # a question about a tensor
            return func(*args, **kwargs)
        if name.startswith("lift_fresh") and not compat.is_fake(args[0]) and args[0].numel() == 1:
            return self._number(func, args[0])
        lower = lowering.TABLE.get(name)
        in_place = name.endswith("_") and not name.endswith("__")
        if lower is None and (not in_place or compat.out_of_place(func) is None or name[:-1] in lowering.REFUSED):
            return self._decomposed(func, name.removesuffix("_") if in_place else name, args, kwargs)
        args, kwargs = self._standing_in(args), self._standing_in(kwargs)
        if in_place:
            self._may_change(args[0], self._decomposing or name)
        valued, named = self._valued(args), self._valued(kwargs)
        if lower is None:
            return self._out_of_place(func, args, kwargs)
        out = func(*args, **kwargs)
        self._written(lower(self, out, *valued, **named), valued[0] if in_place else None, out, in_place=in_place)
        return out

    def _out_of_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator in place as what it is of a copy."""
        before, was, target = self.value(args[0]), self._decomposing, args[0]
        self._decomposing = was or _name_of(func)
        try:
            with self:
                made = compat.out_of_place(func)(*args, **kwargs).to(target.dtype)
        finally:
            self._decomposing = was
        if made.shape != target.shape:  # PyTorch's error comes with the call
            raise RuntimeError(f"a result of {tuple(made.shape)} does not fit into a tensor of {tuple(target.shape)}")
        self._written(self.value(made), before, target, in_place=True)
        return target

    def _written(self, found: Any, before: Any, out: Any, *, in_place: bool) -> None:
        """Note what an operator made."""
        if in_place and not torch.is_grad_enabled() and found.node.kind == "float":
            # PyTorch's derivative knows nothing of it: that of what was there before goes on.
            value = self.graph.make("detached", found.node)
            found = Value(self.graph.make("instead", value, before.node), found.labels, found.dtype)
            with torch.enable_grad():
                self._note(found, out)
            return
        self._note(found, out)

    def _number(self, func: Any, tensor: Tensor) -> Tensor:
        """A number that the function makes a tensor of."""
        with compat.without_modes():
            number = tensor.item()
        out = self.empty(tensor.shape, tensor.dtype, tensor.device)
        self.set(out, Value(self.graph.const(number), ((),) * tensor.dim(), tensor.dtype))
        return out

    def _may_change(self, target: Tensor, name: str) -> None:
        """Raises where an operator in place changes what others see."""
        self.value(target)
        for given, value in self.given:
            if given is target or compat.share_memory(given, target):
                raise NotRowwiseError(
                    f"{name} changes {value.node.names[0]} in place, which the function was given; change a copy"
                )
        if any(other is not target and compat.share_memory(other, target) for other, _ in self.values.values()):
            raise NotRowwiseError(
                f"{name} changes in place what another tensor shares; change a copy, put parts together with torch.cat, or "
                "use torch.where"
            )

    def _note(self, found: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            value = found if isinstance(found, Value) else None
            assert value is not None
            assert [self.axes.size(self.axes.leaves(label)) for label in value.labels] == list(out.shape)
            if twice(self.axes, value):
                raise NotRowwiseError(TWICE)
            node = value.node
            if not torch.is_grad_enabled() and node.kind == "float":
                node = self.graph.make("detached", node)
            if out.dtype not in NAMES:
                raise NotRowwiseError(f"a tensor of {out.dtype}, which kernels do not write")
            made = Value(node, value.labels, out.dtype)
            self.set(out, made)
            self.traced.wide |= out.dtype == torch.float64
            if out.dtype.is_floating_point and value.node.args:
                self.traced.values.append(made)
            self.traced.lines.setdefault(value.node.number, self.line)
            self.traced.noted.append(made)
            self._last[self.line] = value.node
        elif isinstance(out, (tuple, list)):
            for inner, tensor in zip(found, out, strict=False):
                if inner is not None and isinstance(tensor, Tensor):
                    self._note(inner, tensor)

    def _decomposed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What PyTorch says that an operator is."""
        from . import lowering

        outer = self._decomposing or name  # the one that the user knows
        refused = NotRowwiseError(lowering.REFUSED.get(name, f"{outer} is not an operator that rows can be fused over"))
        if name in lowering.REFUSED:
            raise refused
        decomposition = compat.decompositions().get(func)
        before, self._decomposing = self._decomposing, outer
        try:
            with self:
                found = func.decompose(*args, **kwargs) if decomposition is None else decomposition(*args, **kwargs)
        finally:
            self._decomposing = before
        if found is NotImplemented:
            raise refused
        return found

    def _standing_in(self, values: Any) -> Any:
        """The arguments, with a tensor without memory for each that was found elsewhere."""
        if isinstance(values, Tensor):
            return values if id(values) in self.values else self._captured(values)
        if isinstance(values, dict):
            return {key: self._standing_in(value) for key, value in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)([self._standing_in(value) for value in values])
        return values

    def _valued(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return self.value(values)
        if isinstance(values, dict):
            return {key: self._valued(value) for key, value in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)([self._valued(value) for value in values])
        return values

    # --- the user's words -----------------------------------------------------------------------------------------------

    def mark_line(self) -> None:
        """Note the line of the user's function that is running."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        self.line = self.line if frame is None else frame.f_lineno

    def refuse_autograd_function(self, function: type) -> None:
        """Raises as the function applies one, whose backward no trace sees."""
        self.mark_line()
        with self.noting_refusals():
            raise NotRowwiseError(APPLIED.format(function.__name__))

    def name_nodes(self) -> None:
        """Give what a line assigned the name that it has there."""
        for line, node in self._last.items():
            if line in self._targets and node.op not in ("input", "const"):
                node.names.append(self._targets[line])

    def refused(self, why: str) -> NotRowwiseError:
        """The error that says where."""
        if self.code is None or not self.line:
            return NotRowwiseError(f"{self.name}: {why}")
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return NotRowwiseError(f"{self.name}: {why}\n  line {self.line} of {self.code.co_filename}: {text}")


# What of a tensor is another in the trace than in a call: there gradients are on, and no tensor has any.
_OF_GRADIENTS = frozenset({"grad", "grad_fn", "is_inference", "is_leaf", "requires_grad", "retains_grad"})


class _Functions(TorchFunctionMode):
    """Takes dropout out of PyTorch's hands, which becomes a factor of the graph; sees what asks for gradients."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        with self.recorder.noting_refusals():
            if func is F.dropout or func is torch.dropout:
                return self._dropout(*args, **kwargs)
            if func is torch.einsum and not compat.any_autocast_enabled() and (of_elements := _of_elements(*args)):
                return of_elements()
            if func is F.gaussian_nll_loss:
                self.recorder.mark_line()
                raise NotRowwiseError("gaussian_nll_loss takes for Python whether a variance is negative; write "
                                      "0.5 * (var.log() + (x - y) ** 2 / var)")  # fmt: skip
            if func is F.one_hot:
                return self._one_hot(*args, **kwargs)
            if func is F.instance_norm:
                return self._instance_norm(*args, **kwargs)
            if name in ("batch_norm", "_batch_norm_impl_index"):
                self.recorder.mark_line()
                raise NotRowwiseError("BatchNorm mixes rows")
            if name in _OF_GRADIENTS and not _is_asked_by_a_library(inspect.currentframe()):
                self.recorder.mark_line()
                raise NotRowwiseError(
                    f"it reads {name} of a tensor, which is another in other calls; pass it as a number"
                )
        return func(*args, **kwargs)

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Of what is no class PyTorch raises an error; here it has no row of numbers."""
        from .lowering.common import where_within

        if tensor.dtype != torch.int64:
            return F.one_hot(tensor, num_classes)  # PyTorch's error
        if num_classes < 1:
            self.recorder.mark_line()
            raise NotRowwiseError("one_hot takes the number of classes from the largest of them; pass num_classes")
        places = torch.arange(num_classes, device=tensor.device)
        found, recorder = (tensor.unsqueeze(-1) == places).long(), self.recorder
        value, index = recorder.value(found), recorder.value(tensor).node
        node = where_within(recorder, index, num_classes, value.node, found.dtype)
        recorder.set(found, Value(node, value.labels, found.dtype))
        return found

    def _instance_norm(self, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
                       weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True,
                       momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
        """A GroupNorm of single channels; PyTorch takes the batch and the channels for those of a BatchNorm."""
        if running_mean is not None or running_var is not None or not use_input_stats:
            self.recorder.mark_line()
            raise NotRowwiseError("InstanceNorm with running statistics changes these; use track_running_stats=False")
        if math.prod(input.shape[2:]) == 1:
            return F.instance_norm(input)  # PyTorch's error
        return F.group_norm(input, input.shape[1], weight, bias, eps)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
                 train: bool | None = None) -> Tensor:  # fmt: skip
        recorder = self.recorder
        if inplace:
            raise NotRowwiseError("dropout in place")
        if not (training if train is None else train) or p == 0.0:
            return input
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        value = recorder.value(input)
        number = len(recorder.traced.drops)
        recorder.traced.drops.append(float(p))
        axes = [axis for label in value.labels for axis in label]
        factor = recorder.graph.make("keep", attrs=(number,), axes=axes, kind="float")
        out = recorder.empty(input.shape, input.dtype, input.device)
        recorder.set(out, Value(recorder.graph.binary("mul", value.node, factor), value.labels, input.dtype))
        return out


def _of_elements(equation: Any, *operands: Any) -> Callable[[], Tensor] | None:
    """What computes an einsum of which one operand has all dimensions: products of elements and sums, no matrix product."""
    terms, _, left = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    letters = terms.split(",")
    every = "".join(dict.fromkeys(terms.replace(",", "")))
    if not left.isalpha() or len(letters) != len(operands) or not any(set(every) == set(one) for one in letters):
        return None
    if any(len(set(one)) < len(one) or not one.isalpha() for one in (left, *letters)):
        return None
    order = max(letters, key=len)

    def aligned(tensor: Tensor, own: str) -> Tensor:
        tensor = tensor.permute([own.index(letter) for letter in order if letter in own])
        return tensor[tuple([slice(None) if letter in own else None for letter in order])]

    def result() -> Tensor:
        found = functools.reduce(torch.mul, map(aligned, operands, letters))
        gone = [at for at, letter in enumerate(order) if letter not in left]
        rest = [letter for letter in order if letter in left]
        return (found.sum(gone) if gone else found).permute([rest.index(letter) for letter in left])

    return result


def _is_asked_by_a_library(frame: FrameType | None) -> bool:
    """Whether PyTorch's code, or this library's, asks the mode whose frame this is."""
    asking = None if frame is None else frame.f_back
    home = "" if asking is None else str(asking.f_globals.get("__name__", ""))
    return home.partition(".")[0] in ("torch", "fusedops")


def kind_of(dtype: torch.dtype) -> str:
    """Float, int or bool."""
    return "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "int"


def _name_of(func: Any) -> str:
    namespace, _, name = func.name().partition(".")[0].partition("::")
    return name if namespace == "aten" else f"{namespace}::{name}"


def _targets_of(code: Any) -> dict[int, str]:
    """From the lines of a function to the names that they assign."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return {}
    first = code.co_firstlineno - 1
    return {line + first: node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}  # fmt: skip
