"""The recorder of a trace: runs operators on tensors without memory, and adds their nodes."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..core.calls.words import NAMES
from ..core.compat.dispatch import DispatchMode, decompositions, out_of_place, without_modes
from ..core.compat.fake import fake_mode, is_fake, share_memory
from .axes import Axes, AxisError
from .complex_numbers import MAKING, Pairs, as_pairs, of_pairs
from .errors import NotRowwiseError
from .ir import Graph, Node
from .traced import TWICE, Traced, Value, kind_of, twice
from .walking import APPLIED

__all__ = ["Recorder"]


class Recorder(DispatchMode):  # type: ignore[misc]
    """A dispatch mode that runs every operator on tensors without memory, and records a node."""

    def __init__(
        self,
        function: Callable[..., Any],
        find_captured: Callable[[Tensor], tuple[int, str] | None],
    ) -> None:
        super().__init__()
        self.fake = fake_mode()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.find_captured = find_captured
        self.code = getattr(inspect.unwrap(function), "__code__", None)
        self.traced = Traced(Graph(), Axes(), [], file=getattr(self.code, "co_filename", ""))
        # What a tensor in the trace is, by identity:
        #
        #   argument           input()         a tensor without memory, and an "input" node
        #   captured tensor    _captured()     the same, at its first use
        #   result             _note_tensor()  the node that the lowering returned
        #
        # The entry holds the tensor, so that its id is not reused.
        self.values: dict[int, tuple[Tensor, Value]] = {}
        # The tensor of pairs of each complex tensor, whose value is that of the pairs.
        self.pairs: dict[int, Pairs] = {}
        # The arguments and captured tensors, which no operator may change.
        self.protected: list[tuple[Tensor, Value]] = []
        # From the id of a captured tensor to itself, held as above, and its fake tensor.
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.line = 0
        self._targets = _targets_of(self.code)
        self._last: dict[int, Node] = {}  # the last node of each line
        self._decomposing = ""  # the outermost operator that is being decomposed
        # The first refusal, whether or not the function caught it.
        self.failed: NotRowwiseError | None = None

    @property
    def graph(self) -> Graph:
        """Return the graph that nodes are added to."""
        return self.traced.graph

    @property
    def axes(self) -> Axes:
        """Return the axes of the values."""
        return self.traced.axes

    # --- tensors ----------------------------------------------------------------------------------

    def input(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor without memory in place of an argument."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotRowwiseError(f"{self.name}: {name} is no dense tensor")
        if tensor.is_complex():
            return self._complex_input(tensor, name)
        if tensor.dtype not in NAMES:
            readable = ", ".join(sorted(word for dtype, word in NAMES.items() if dtype))
            raise NotRowwiseError(
                f"{self.name}: {name} is of {tensor.dtype}; kernels read {readable}"
            )
        # `programs` passes tensors on the meta device, with the device of the call as an attribute.
        device = getattr(tensor, "fusedops_device", tensor.device)
        fake = self.empty(tensor.shape, tensor.dtype, device)
        labels = tuple(map(self.axes.new, tensor.shape))
        node = self.graph.make(
            "input",
            attrs=(len(self.traced.inputs),),
            axes=list(itertools.chain.from_iterable(labels)),
            kind=kind_of(tensor.dtype),
        )
        node.names.append(name)
        value = Value(node, labels, tensor.dtype)
        self.traced.inputs.append(value)
        self.protected.append((fake, value))
        self.set(fake, value)
        return fake

    def _complex_input(self, tensor: Tensor, name: str) -> Tensor:
        """Return a complex tensor without memory, whose pairs are an input."""
        device = getattr(tensor, "fusedops_device", tensor.device)
        with without_modes():
            like = as_pairs(tensor)
        like.fusedops_device = device  # type: ignore[attr-defined]
        pairs = self.input(like, name)
        with without_modes(), self.fake:
            fake = torch.view_as_complex(pairs)
        self.set(fake, self.value(pairs))
        self.pairs[id(fake)] = Pairs(pairs)
        return fake

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor without memory."""
        with without_modes(), self.fake:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def set(self, tensor: Tensor, value: Value) -> None:
        """Record the value of a tensor."""
        self.values[id(tensor)] = (tensor, value)

    def value(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; if no operator computed it, it becomes an input."""
        if id(tensor) in self.pairs:
            raise NotRowwiseError("an operator of a complex tensor; use torch.view_as_real of it")
        known = self.values.get(id(tensor))
        if known is not None:
            return known[1]
        return self.values[id(self._captured(tensor))][1]

    def _captured(self, tensor: Tensor) -> Tensor:
        """Return the tensor without memory in place of a captured tensor."""
        known = self.stand_ins.get(id(tensor))
        if known is not None:
            return known[1]
        if is_fake(tensor):
            raise NotRowwiseError("it uses a result of an operator that no kernel computes")
        captured = self.find_captured(tensor)
        if captured is None:
            raise NotRowwiseError("it uses a tensor of unknown origin; make it an argument")
        position, name = captured
        self._check_device(tensor, name, "move it outside, or pass it as a number")
        self.traced.captured.append(position)
        fake = self.input(tensor, name)
        self.stand_ins[id(tensor)] = (tensor, fake)
        return fake

    def _check_device(self, tensor: Tensor, name: str, advice: str) -> None:
        """Refuse a tensor that is not on the device of the arguments, which are on one."""
        devices = {argument.device for argument, _ in self.protected}
        if tensor.device not in devices:
            raise NotRowwiseError(
                f"{name} is on {tensor.device}, and the arguments are on "
                f"{', '.join(map(str, devices))}; {advice}"
            )

    # --- operators --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.noting_refusals():
            return self._dispatched(func, args, kwargs or {})

    @contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Save the first refusal in the block.

        User code may catch it as an error of PyTorch, and take another branch.
        """
        try:
            yield
        except (NotRowwiseError, AxisError) as error:
            # A new error, because the frames of this one would keep their tensors alive.
            self.failed = self.failed or self.refused(str(error))
            raise

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors without memory, and record its result.

        The first case that applies::

            a property of a tensor, `prim::`                runs, and is not recorded
            a new tensor of one Python number               a constant
            of complex tensors                              `_of_pairs`
            `lowering` has the operator                     its node, in place or not
            in place, with an out-of-place operator         `_out_of_place`
            any other                                       `_decomposed`, or refused
        """
        from . import lowering

        self.mark_line()
        name = _name_of(func)
        if name.startswith("prim::"):  # reads a property of a tensor, and computes nothing
            return func(*args, **kwargs)
        if _is_new_number(name, args):
            return self._number(func, args[0])
        if name in MAKING or self._has_complex(args):
            return self._of_pairs(func, name, args, kwargs)
        lower = lowering.TABLE.get(name)
        in_place = _is_in_place(name)
        plain_name = name[:-1] if in_place else name
        if lower is None and not self._has_out_of_place(func, plain_name, in_place=in_place):
            return self._decomposed(func, plain_name, args, kwargs)
        args, kwargs = self._standing_in(args), self._standing_in(kwargs)
        if in_place:
            self._may_change(args[0], self._decomposing or name)
        value_args = self._valued(args)
        value_kwargs = self._valued(kwargs)
        if lower is None:
            return self._out_of_place(func, args, kwargs)
        out = func(*args, **kwargs)
        result = lower(self, out, *value_args, **value_kwargs)
        previous = value_args[0] if in_place else None
        self._written(result, previous, out, in_place=in_place)
        return out

    def _has_complex(self, args: Any) -> bool:
        """Whether a complex tensor is among the arguments."""
        tensors: list[Tensor] = []
        _map_tensors(tensors.append, args)
        return any(map(Tensor.is_complex, tensors))

    def _of_pairs(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operator of complex tensors as operators of pairs, which are recorded."""
        args = self._standing_in(args)
        out = func(*args, **kwargs)

        def paired(tensor: Tensor) -> Any:
            return self.pairs.get(id(tensor), tensor)

        with self:  # as in `_out_of_place`
            result = of_pairs(name, out, _map_tensors(paired, args), kwargs)
        # Not the result itself: a view would be one of a tensor that has another base.
        self.set(out, self.value(result))
        if out.is_complex():
            self.pairs[id(out)] = Pairs(result)
        return out

    def _has_out_of_place(self, func: Any, plain_name: str, *, in_place: bool) -> bool:
        """Whether an in-place operator has an out-of-place one that is not refused."""
        from . import lowering

        if not in_place or plain_name in lowering.REFUSED:
            return False
        return out_of_place(func) is not None

    def _out_of_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an in-place operator as its out-of-place one, and record the result as the target."""
        target = args[0]
        previous = self.value(target)
        outer = self._decomposing
        self._decomposing = outer or _name_of(func)
        try:
            # PyTorch turns a mode off while the mode handles an operator: it is entered again.
            with self:
                result = out_of_place(func)(*args, **kwargs).to(target.dtype)
        finally:
            self._decomposing = outer
        if result.shape != target.shape:  # PyTorch raises its own error for the call
            raise RuntimeError(
                f"a result of {tuple(result.shape)} does not fit into a tensor of "
                f"{tuple(target.shape)}"
            )
        self._written(self.value(result), previous, target, in_place=True)
        return target

    def _written(self, result: Any, previous: Any, out: Any, *, in_place: bool) -> None:
        """Record the result of an operator, and the derivative of an in-place one."""
        if in_place and not torch.is_grad_enabled() and result.node.kind == "float":
            # Without gradients PyTorch does not record the operator: the target has the new value,
            # and the derivative of the previous one.
            detached = self.graph.make("detached", result.node)
            node = self.graph.make("instead", detached, previous.node)
            # `_note` detaches values that are computed without gradients, and this one is not.
            with torch.enable_grad():
                self._note(Value(node, result.labels, result.dtype), out)
            return
        self._note(result, out)

    def _number(self, func: Any, tensor: Tensor) -> Tensor:
        """Record a tensor that the function creates of a Python number as a constant."""
        with without_modes():
            number = tensor.item()
        out = self.empty(tensor.shape, tensor.dtype, tensor.device)
        self.set(out, Value(self.graph.const(number), ((),) * tensor.dim(), tensor.dtype))
        return out

    def _may_change(self, target: Tensor, name: str) -> None:
        """Raise if an in-place operator changes an input, or memory that tensors share."""
        self.value(target)
        for tensor, value in self.protected:
            is_input = tensor is target or share_memory(tensor, target)
            if is_input:
                raise NotRowwiseError(
                    f"{name} changes {value.node.names[0]} in place, which the function was given; "
                    "change a copy"
                )
        for other, _ in self.values.values():
            if other is not target and share_memory(other, target):
                raise NotRowwiseError(
                    f"{name} changes in place what another tensor shares; change a copy, put parts "
                    "together with torch.cat, or use torch.where"
                )

    def _note(self, result: Any, out: Any) -> None:
        """Record the values that an operator returned, in the nesting of its results."""
        if isinstance(out, Tensor):
            self._note_tensor(result, out)
            return
        if not isinstance(out, (tuple, list)):
            return
        for inner, tensor in zip(result, out, strict=False):
            # None is for a tensor of PyTorch's own backward, which nothing reads.
            if isinstance(tensor, Tensor) and inner is not None:
                self._note_tensor(inner, tensor)

    def _note_tensor(self, value: Any, out: Tensor) -> None:
        assert isinstance(value, Value)
        sizes = [self.axes.size(self.axes.leaves(label)) for label in value.labels]
        assert sizes == list(out.shape)
        if twice(self.axes, value):
            raise NotRowwiseError(TWICE)
        node = value.node
        if not torch.is_grad_enabled() and node.kind == "float":
            node = self.graph.make("detached", node)
        if out.dtype not in NAMES:
            raise NotRowwiseError(f"a tensor of {out.dtype}, which kernels do not write")
        if out.dim():  # PyTorch takes a number of any device
            self._check_device(out, "a result", "move it outside")
        recorded = Value(node, value.labels, out.dtype)
        self.set(out, recorded)
        self.traced.wide |= out.dtype == torch.float64
        if out.dtype.is_floating_point and value.node.args:
            self.traced.values.append(recorded)
        self.traced.lines.setdefault(value.node.number, self.line)
        self.traced.noted.append(recorded)
        self._last[self.line] = value.node

    def _decomposed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run PyTorch's decomposition of an operator, whose operators are recorded."""
        from . import lowering

        outer = self._decomposing or name  # the operator in the user's code
        refused = NotRowwiseError(
            lowering.REFUSED.get(name, f"{outer} is not an operator that rows can be fused over")
        )
        if name in lowering.REFUSED:
            raise refused
        decompose = decompositions().get(func)
        if decompose is None:
            decompose = func.decompose
        # Nested decompositions leave `_decomposing` as it is, so that messages name the user's
        # operator. The outermost one clears it in the end.
        previous, self._decomposing = self._decomposing, outer
        try:
            with self:  # as in `_out_of_place`
                result = decompose(*args, **kwargs)
        finally:
            self._decomposing = previous
        if result is NotImplemented:
            raise refused
        return result

    def _standing_in(self, values: Any) -> Any:
        """Return the arguments, with a tensor without memory for each captured tensor."""

        def stand_in(tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in self.values else self._captured(tensor)

        return _map_tensors(stand_in, values)

    def _valued(self, values: Any) -> Any:
        """Return the arguments, with a `Value` for each tensor."""
        return _map_tensors(self.value, values)

    # --- source lines and names of the user -------------------------------------------------------

    def mark_line(self) -> None:
        """Save the line of the user's function that is running."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is not None:
            self.line = frame.f_lineno

    def refuse_autograd_function(self, function: type) -> None:
        """Raise when the function applies an autograd Function, whose backward is not traced."""
        self.mark_line()
        with self.noting_refusals():
            raise NotRowwiseError(APPLIED.format(function.__name__))

    def name_nodes(self) -> None:
        """Name the last node of each line by the variable that the line assigns."""
        for line, node in self._last.items():
            if line in self._targets and node.op not in ("input", "const"):
                node.names.append(self._targets[line])

    def refused(self, why: str) -> NotRowwiseError:
        """Return the error with the function's name and the line."""
        if self.code is None or not self.line:
            return NotRowwiseError(f"{self.name}: {why}")
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return NotRowwiseError(
            f"{self.name}: {why}\n  line {self.line} of {self.code.co_filename}: {text}"
        )


def _map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return nested arguments of an operator, with a function's result for each tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: _map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)([_map_tensors(function, value) for value in values])
    return values


def _is_in_place(name: str) -> bool:
    """Whether an operator changes its first argument: `add_`, but not `__and__`."""
    return name.endswith("_") and not name.endswith("__")


def _is_new_number(name: str, args: Any) -> bool:
    """Whether an operator makes a tensor of a Python number, as ``torch.tensor(2.0)`` does."""
    if not name.startswith("lift_fresh") or is_fake(args[0]):
        return False
    return bool(args[0].numel() == 1)


def _name_of(func: Any) -> str:
    """Return an operator's name without overload, after its namespace unless that is aten."""
    namespace, _, name = func.name().partition(".")[0].partition("::")
    return name if namespace == "aten" else f"{namespace}::{name}"


def _targets_of(code: Any) -> dict[int, str]:
    """Return the variable that each line of a function assigns."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    # A `TokenError` is raised if the file has changed, and the text at this line is not complete.
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return {}
    first = code.co_firstlineno - 1
    targets: dict[int, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name):
            last = node.end_lineno or node.lineno
            lines = range(first + node.lineno, first + last + 1)
            targets |= dict.fromkeys(lines, target.id)
    return targets
