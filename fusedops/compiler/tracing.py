"""Trace a function of plain PyTorch operators, once and on tensors without memory, into a `Graph`.

Every operator that PyTorch dispatches is looked up in `lowering`. An operator without an entry is
decomposed by PyTorch, or refused with its name and the user's line. Numbers that a function reads
from the sizes of its tensors would be constants of the graph; `programs` traces the function again
with other sizes to detect them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import math
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core.calls.call import as_references
from ..core.calls.operators import NAMES
from ..core.compat import dispatch
from ..core.compat.autograd import noticing_autograd_functions
from ..core.compat.fake import fake_mode, is_fake, quiet, share_memory
from .axes import Axes, AxisError
from .errors import NotRowwiseError
from .ir import Graph, Node
from .traced import TWICE, Traced, Value, kind_of, twice
from .walking import APPLIED

__all__ = ["recording", "trace", "traced_with_others"]


def trace(
    call: Callable[..., Any],
    arguments: Sequence[Any],
    function: Callable[..., Any],
    names: Sequence[str],
    find: Callable[[Tensor], tuple[int, str] | None],
) -> Traced:
    """Return the function's graph for tensors like these.

    Args:
        call: calls the function.
        arguments: arguments of the call; of tensors only dtype, device and shape are read.
        function: the user's function.
        names: names of the tensors among the arguments, in order.
        find: returns the position and name of a captured tensor; None if its origin is unknown.
    Raises:
        NotRowwiseError: the function cannot be one kernel.
    """
    recorder = _Recorder(function, find)
    fakes = iter(names)

    def stand_in(value: Any) -> Any:
        return recorder.input(value, next(fakes)) if isinstance(value, Tensor) else value

    fake_arguments = list(map(stand_in, arguments))
    autocast_cached = torch.is_autocast_cache_enabled()
    try:
        # A cast in the trace has no memory. Autocast would cache it, and use it in later calls.
        torch.set_autocast_cache_enabled(False)
        # Gradients are enabled, so that a `torch.no_grad` block of the function is noticed.
        with (
            traced_with_others(),
            as_references(),
            torch.enable_grad(),
            quiet(),
            recorder.fake,
            recorder,
            _Functions(recorder),
            noticing_autograd_functions(recorder.refuse_autograd_function),
        ):
            returned = call(*fake_arguments)
        # The function caught the refusal, and continued in a branch that no call takes: PyTorch
        # would not have raised an error.
        if recorder.failed is not None:
            raise recorder.failed
    except (NotRowwiseError, AxisError) as error:
        raise (recorder.failed or recorder.refused(str(error))) from None
    finally:
        torch.set_autocast_cache_enabled(autocast_cached)
    traced = recorder.traced
    traced.container = _container_of(returned)
    outputs = (returned,) if traced.container == "tensor" else returned
    if not outputs or not all(isinstance(out, Tensor) for out in outputs):
        raise NotRowwiseError(
            f"{recorder.name} returns {_described(returned, outputs)}, expected a tensor, or a "
            "tuple or list of tensors; return these, and put them into what else a caller expects "
            "outside"
        )
    traced.outputs = [recorder.value(out) for out in outputs]
    recorder.name_nodes()
    return traced


def _container_of(returned: Any) -> str:
    """Return "tuple", "list", or "tensor" for anything else."""
    if type(returned) is tuple:
        return "tuple"
    if type(returned) is list:
        return "list"
    return "tensor"


def _described(returned: Any, outputs: Sequence[Any]) -> str:
    """Return the type of a wrong result, with the types of its elements that are no tensors."""
    name = type(returned).__name__
    kinds = sorted({type(out).__name__ for out in outputs if not isinstance(out, Tensor)})
    if outputs is returned and kinds:
        return f"{name} of {', '.join(kinds)}"
    return name


class _Running(threading.local):
    """The number of nested traces in this thread."""

    count = 0


_running = _Running()


def recording() -> bool:
    """Whether a function is being traced in this thread: functions that it calls are inlined."""
    return _running.count > 0


@contextmanager
def traced_with_others() -> Iterator[None]:
    """Run row-wise functions as plain PyTorch in the block, for a tracer that fuses several."""
    _running.count += 1
    try:
        yield
    finally:
        _running.count -= 1


class _Recorder(dispatch.DispatchMode):  # type: ignore[misc]
    """A dispatch mode that runs every operator on tensors without memory, and records a node."""

    def __init__(
        self, function: Callable[..., Any], find: Callable[[Tensor], tuple[int, str] | None]
    ) -> None:
        super().__init__()
        self.fake = fake_mode()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.find = find
        self.code = getattr(inspect.unwrap(function), "__code__", None)
        self.traced = Traced(Graph(), Axes(), [], file=getattr(self.code, "co_filename", ""))
        # By identity. The entry holds the tensor, so that its id is not reused.
        self.values: dict[int, tuple[Tensor, Value]] = {}
        # The arguments and captured tensors, which no operator may change.
        self.protected: list[tuple[Tensor, Value]] = []
        # From the id of a captured tensor to itself, held as above, and its fake tensor.
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.line = 0
        self._targets = _targets_of(self.code)
        self._last: dict[int, Node] = {}
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
        if tensor.dtype not in NAMES:
            readable = ", ".join(sorted(word for dtype, word in NAMES.items() if dtype))
            parts = "; pass torch.view_as_real of it" if tensor.dtype.is_complex else ""
            raise NotRowwiseError(
                f"{self.name}: {name} is of {tensor.dtype}; kernels read {readable}{parts}"
            )
        # `programs` passes tensors on the meta device, with the device of the call as an attribute.
        device = getattr(tensor, "fusedops_device", tensor.device)
        fake = self.empty(tensor.shape, tensor.dtype, device)
        labels = tuple([self.axes.new(size) for size in tensor.shape])
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

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor without memory."""
        with dispatch.without_modes(), self.fake:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def set(self, tensor: Tensor, value: Value) -> None:
        """Record the value of a tensor."""
        self.values[id(tensor)] = (tensor, value)

    def value(self, tensor: Tensor) -> Value:
        """Return the value of a tensor, which becomes an input where no operator computed it."""
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
        captured = self.find(tensor)
        if captured is None:
            raise NotRowwiseError(
                "a tensor of which cannot be told where the function has it from; make it an "
                "argument"
            )
        position, name = captured
        self.traced.captured.append(position)
        fake = self.input(tensor, name)
        self.stand_ins[id(tensor)] = (tensor, fake)
        return fake

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
        """Run an operator on tensors without memory, and record its result."""
        from . import lowering

        self.mark_line()
        name = _name_of(func)
        if name.startswith("prim::"):  # reads a property of a tensor, and computes nothing
            return func(*args, **kwargs)
        # `torch.tensor(2.0)` in the function.
        is_new_tensor = name.startswith("lift_fresh") and not is_fake(args[0])
        if is_new_tensor and args[0].numel() == 1:
            return self._number(func, args[0])
        lower = lowering.TABLE.get(name)
        in_place = name.endswith("_") and not name.endswith("__")
        if lower is None:
            out_of_place = dispatch.out_of_place(func) if in_place else None
            if out_of_place is None or name[:-1] in lowering.REFUSED:
                plain_name = name.removesuffix("_") if in_place else name
                return self._decomposed(func, plain_name, args, kwargs)
        args, kwargs = self._standing_in(args), self._standing_in(kwargs)
        if in_place:
            self._may_change(args[0], self._decomposing or name)
        value_args, value_kwargs = self._valued(args), self._valued(kwargs)
        if lower is None:
            return self._out_of_place(func, args, kwargs)
        out = func(*args, **kwargs)
        result = lower(self, out, *value_args, **value_kwargs)
        before = value_args[0] if in_place else None
        self._written(result, before, out, in_place=in_place)
        return out

    def _out_of_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an in-place operator as its out-of-place one, and record the result as the target."""
        target = args[0]
        before, outer = self.value(target), self._decomposing
        self._decomposing = outer or _name_of(func)
        try:
            # PyTorch turns a mode off while the mode handles an operator: it is entered again.
            with self:
                result = dispatch.out_of_place(func)(*args, **kwargs).to(target.dtype)
        finally:
            self._decomposing = outer
        if result.shape != target.shape:  # PyTorch raises its own error for the call
            raise RuntimeError(
                f"a result of {tuple(result.shape)} does not fit into a tensor of "
                f"{tuple(target.shape)}"
            )
        self._written(self.value(result), before, target, in_place=True)
        return target

    def _written(self, result: Any, before: Any, out: Any, *, in_place: bool) -> None:
        """Record the result of an operator, and the derivative of an in-place one."""
        if in_place and not torch.is_grad_enabled() and result.node.kind == "float":
            # Without gradients PyTorch does not record the operator: the target has the new value,
            # and the derivative of the value before.
            detached = self.graph.make("detached", result.node)
            node = self.graph.make("instead", detached, before.node)
            # `_note` detaches values that are computed without gradients, and this one is not.
            with torch.enable_grad():
                self._note(Value(node, result.labels, result.dtype), out)
            return
        self._note(result, out)

    def _number(self, func: Any, tensor: Tensor) -> Tensor:
        """Record a tensor that the function creates of a Python number as a constant."""
        with dispatch.without_modes():
            number = tensor.item()
        out = self.empty(tensor.shape, tensor.dtype, tensor.device)
        self.set(out, Value(self.graph.const(number), ((),) * tensor.dim(), tensor.dtype))
        return out

    def _may_change(self, target: Tensor, name: str) -> None:
        """Raise where an in-place operator changes an input, or memory that tensors share."""
        self.value(target)
        for tensor, value in self.protected:
            if tensor is target or share_memory(tensor, target):
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
        elif isinstance(out, (tuple, list)):
            for inner, tensor in zip(result, out, strict=False):
                if inner is not None and isinstance(tensor, Tensor):
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
        decompose = dispatch.decompositions().get(func)
        if decompose is None:
            decompose = func.decompose
        before, self._decomposing = self._decomposing, outer
        try:
            with self:  # as in `_out_of_place`
                result = decompose(*args, **kwargs)
        finally:
            self._decomposing = before
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


# Attributes of a tensor that differ between the trace and a call: the trace enables gradients, and
# its tensors need none.
_OF_GRADIENTS = frozenset(
    {"grad", "grad_fn", "is_inference", "is_leaf", "requires_grad", "retains_grad"}
)


class _Functions(TorchFunctionMode):
    """A mode that replaces functions before PyTorch dispatches operators of them, or refuses them.

    Dropout becomes a node of the graph, and reads of attributes about gradients are refused.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        with self.recorder.noting_refusals():
            replacement = _REPLACEMENTS.get(func)
            if replacement is not None:
                return replacement(self, *args, **kwargs)
            if func is torch.einsum and not dispatch.any_autocast_enabled():
                elementwise = _elementwise_einsum(*args)
                if elementwise is not None:
                    return elementwise()
            if name in ("batch_norm", "_batch_norm_impl_index"):
                self.recorder.mark_line()
                raise NotRowwiseError("BatchNorm mixes rows")
            if name in _OF_GRADIENTS and not _called_by_a_library(inspect.currentframe()):
                self.recorder.mark_line()
                raise NotRowwiseError(
                    f"it reads {name} of a tensor, which is another in other calls; pass it as a "
                    "number"
                )
        return func(*args, **kwargs)

    def _gaussian_nll_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse the loss, which reads values of a tensor in Python."""
        self.recorder.mark_line()
        raise NotRowwiseError(
            "gaussian_nll_loss takes for Python whether a variance is negative; write "
            "0.5 * (var.log() + (x - y) ** 2 / var)"
        )

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Return rows of zeros and a one; for an index out of range, where PyTorch raises, none."""
        from .lowering.common import where_within

        if tensor.dtype != torch.int64:
            return F.one_hot(tensor, num_classes)  # PyTorch's error
        if num_classes < 1:
            self.recorder.mark_line()
            raise NotRowwiseError(
                "one_hot takes the number of classes from the largest of them; pass num_classes"
            )
        recorder = self.recorder
        classes = torch.arange(num_classes, device=tensor.device)
        result = (tensor.unsqueeze(-1) == classes).long()
        value, index = recorder.value(result), recorder.value(tensor).node
        node = where_within(recorder, index, num_classes, value.node, result.dtype)
        recorder.set(result, Value(node, value.labels, result.dtype))
        return result

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return the GroupNorm of single channels.

        PyTorch would reshape the batch and the channels to the channels of a BatchNorm.
        """
        if running_mean is not None or running_var is not None or not use_input_stats:
            self.recorder.mark_line()
            raise NotRowwiseError(
                "InstanceNorm with running statistics changes these; use track_running_stats=False"
            )
        if math.prod(input.shape[2:]) == 1:
            return F.instance_norm(input)  # PyTorch's error
        return F.group_norm(input, input.shape[1], weight, bias, eps)

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        """Return the input times a "keep" node, whose mask the backward draws again."""
        recorder = self.recorder
        if inplace:
            raise NotRowwiseError("dropout in place")
        is_training = training if train is None else train  # `torch.dropout` calls it ``train``
        if not is_training or p == 0.0:
            return input
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        value = recorder.value(input)
        number = len(recorder.traced.drops)
        recorder.traced.drops.append(float(p))
        axes = list(itertools.chain.from_iterable(value.labels))
        factor = recorder.graph.make("keep", attrs=(number,), axes=axes, kind="float")
        product = recorder.graph.binary("mul", value.node, factor)
        out = recorder.empty(input.shape, input.dtype, input.device)
        recorder.set(out, Value(product, value.labels, input.dtype))
        return out


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _Functions._dropout,
    torch.dropout: _Functions._dropout,
    F.gaussian_nll_loss: _Functions._gaussian_nll_loss,
    F.one_hot: _Functions._one_hot,
    F.instance_norm: _Functions._instance_norm,
}


def _elementwise_einsum(equation: Any, *operands: Any) -> Callable[[], Tensor] | None:
    """Return a function that computes an einsum as products of elements and sums.

    None where no operand has all the dimensions, as in a matrix product, or where the equation has
    an ellipsis, a diagonal, or no explicit result.
    """
    if not isinstance(equation, str):
        return None
    terms, _, result_letters = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not result_letters.isalpha() or len(letters) != len(operands):
        return None
    for term in (result_letters, *letters):
        has_diagonal = len(set(term)) < len(term)
        if has_diagonal or not term.isalpha():
            return None
    order = max(letters, key=len)
    if set(order) != set(terms.replace(",", "")):
        return None

    def aligned(tensor: Tensor, own: str) -> Tensor:
        """Permute a tensor into the common order, with a dimension of one for each it lacks."""
        tensor = tensor.permute([own.index(letter) for letter in order if letter in own])
        return tensor[tuple([slice(None) if letter in own else None for letter in order])]

    def compute() -> Tensor:
        product = functools.reduce(torch.mul, map(aligned, operands, letters))
        reduced = [dim for dim, letter in enumerate(order) if letter not in result_letters]
        remaining = [letter for letter in order if letter in result_letters]
        if reduced:
            product = product.sum(reduced)
        return product.permute([remaining.index(letter) for letter in result_letters])

    return compute


def _called_by_a_library(frame: FrameType | None) -> bool:
    """Whether PyTorch's code, or this library's, calls the function that runs in a frame."""
    caller = None if frame is None else frame.f_back
    module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("torch", "fusedops")


def _map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return nested arguments of an operator, with a function's result for each tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: _map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)([_map_tensors(function, value) for value in values])
    return values


def _name_of(func: Any) -> str:
    """Return an operator's name without overload, with the namespace where it is not aten's."""
    namespace, _, name = func.name().partition(".")[0].partition("::")
    return name if namespace == "aten" else f"{namespace}::{name}"


def _targets_of(code: Any) -> dict[int, str]:
    """Return the variable that each line of a function assigns."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return {}
    first = code.co_firstlineno - 1
    targets: dict[int, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        last = node.end_lineno or node.lineno
        for line in range(node.lineno, last + 1):
            targets[line + first] = node.targets[0].id
    return targets
