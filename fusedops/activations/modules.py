"""The activation family's modules; each calls one functional.

`TensorsBeside` is the base class of modules whose forward takes further tensors after the first.
``_beside`` names these arguments. If the module is distributed, they become DTensors: ``_vector``
replicates a bias, and ``_rows`` gives ``up`` the placements of the gate. Otherwise both methods
return the argument unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor, nn

from ..compiler.quantising import Format, Quantising
from ..core.activations import ACTIVATIONS, ActivationName
from ..core.calls.checks import check_choice, check_p
from ..core.typevars import Returned
from ..distributed.modules import TensorsBeside
from . import ops

__all__ = [
    "FusedBiasAct",
    "FusedBiasGELU",
    "FusedGEGLU",
    "FusedGELU",
    "FusedGatedAct",
    "FusedSwiGLU",
]


class FusedGELU(nn.GELU):
    """Drop-in for `torch.nn.GELU`: same constructor, no parameters.

    Args:
        approximate: "none" or "tanh".
    Shape:
        input and output: ``(*, N)``, in the input's dtype (fp16, bf16, fp32 or fp64).
    Raises:
        ValueError: ``approximate`` is unknown.
        TypeError: the input is not a floating-point tensor.
    Numerics: computed in fp32 (fp64 for fp64 inputs).
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """

    approximate: ops.Approximate

    def __init__(self, approximate: ops.Approximate = "none") -> None:
        check_choice(type(self).__name__, "approximate", approximate, ops.APPROXIMATIONS)
        super().__init__(approximate)

    def forward(self, input: Tensor) -> Tensor:
        """Activate ``input``; see the class."""
        return ops.gelu(input, self.approximate)

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, input: Tensor) -> Tensor: ...  # noqa: D102


class FusedBiasGELU(TensorsBeside, nn.GELU):
    """``gelu(x + bias)`` in one pass.

    ``bias`` is usually the bias of the linear layer that computes ``x``.

    Args:
        approximate: "none" or "tanh".
    Shape:
        x: ``(*, N)``; bias: ``(N,)`` or None. Returns ``(*, N)`` in the promoted dtype of the
            inputs.
    Raises:
        ValueError: ``approximate`` is unknown; the bias does not fit.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: computed in fp32 (fp64 for fp64 inputs).
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """

    _beside = ("bias",)
    approximate: ops.Approximate

    def __init__(self, approximate: ops.Approximate = "none") -> None:
        check_choice(type(self).__name__, "approximate", approximate, ops.APPROXIMATIONS)
        super().__init__(approximate)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add ``bias`` and activate; see the class."""
        return ops.bias_gelu(x, self._vector(bias, x), self.approximate)

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...  # noqa: D102


# It is an `nn.Dropout`, so that code that sets ``p`` of all dropouts in a model sets it here too.
class FusedBiasAct(TensorsBeside, nn.Dropout):
    """``dropout(activation(x + bias))`` in one pass.

    These are the operations between the two linear layers of an MLP.

    Args:
        activation: a name as in `fusedops.bias_act`.
        p: drop probability in [0, 1]; nothing is dropped in evaluation mode.
    Shape:
        x: ``(*, N)``; bias: ``(N,)`` or None. Returns ``(*, N)`` in the promoted dtype of the
            inputs.
    Raises:
        ValueError: ``activation`` is unknown, ``p`` out of range, or the bias does not fit.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: computed in fp32 (fp64 for fp64 inputs); the backward regenerates the mask from the
    seed.
    """

    _beside = ("bias",)

    def __init__(self, activation: ActivationName = "gelu", p: float = 0.0) -> None:
        check_choice(type(self).__name__, "activation", activation, ACTIVATIONS)
        check_p(type(self).__name__, p)
        super().__init__(p)
        self.activation: ActivationName = activation

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add ``bias``, activate and drop; see the class."""
        return ops.bias_act(
            x, self._vector(bias, x), self.activation, p=self.p, training=self.training
        )

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Returns the activation and the arguments of `torch.nn.Dropout`, for ``print(module)``."""
        return f"{self.activation!r}, {super().extra_repr()}"


class FusedGatedAct(TensorsBeside):
    """``activation(gate) * up`` in one pass.

    It differs from `torch.nn.GLU` in two ways: the activation is an argument, and the first half of
    a packed tensor is the gate, not the second.

    Args:
        activation: a name as in `fusedops.bias_act`.
    Shape:
        gate and up: ``(*, N)``. Without up, gate is a packed tensor ``(*, 2 N)``: the gate in the
        first half, up in the second. Returns ``(*, N)`` in the promoted dtype of the inputs.
    Raises:
        ValueError: ``activation`` is unknown; the shapes differ.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: computed in fp32 (fp64 for fp64 inputs).
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    _beside = ("up",)

    def __init__(self, activation: ActivationName = "silu") -> None:
        super().__init__()
        check_choice(type(self).__name__, "activation", activation, ACTIVATIONS)
        self.activation: ActivationName = activation

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Activate ``gate`` and multiply by ``up``; see the class."""
        return ops.gated_act(gate, self._rows(up, gate), self.activation)

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Returns the arguments in ``print(module)``: the activation."""
        return f"{self.activation!r}"


class FusedSwiGLU(Quantising, TensorsBeside, Generic[Returned]):
    """``silu(gate) * up`` in one pass.

    Args:
        quantize: as in `fusedops.swiglu`; in no ``state_dict``.
    Shape:
        gate and up: ``(*, N)``. Without up, gate is a packed tensor ``(*, 2 N)``: the gate in the
        first half, up in the second. Returns ``(*, N)`` in the promoted dtype of the inputs; with
        ``quantize``, the values and their scales.
    Raises:
        ValueError: the shapes differ.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: computed in fp32 (fp64 for fp64 inputs).
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    _beside = ("up",)

    def __init__(self, *, quantize: Format[Returned, Any] | None = None) -> None:
        super().__init__()
        self._quantise(quantize)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Returned:
        """Activate ``gate`` and multiply by ``up``; see the class."""
        return ops.swiglu(  # type: ignore[no-any-return]
            gate, self._rows(up, gate), quantize=self.quantize
        )

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, gate: Tensor, up: Tensor | None = None) -> Returned: ...  # noqa: D102


class FusedGEGLU(Quantising, TensorsBeside, Generic[Returned]):
    """``gelu(gate) * up`` in one pass.

    Args:
        approximate: "none" or "tanh".
        quantize: as in `fusedops.geglu`; in no ``state_dict``.
    Shape:
        gate and up: ``(*, N)``. Without up, gate is a packed tensor ``(*, 2 N)``: the gate in the
        first half, up in the second. Returns ``(*, N)`` in the promoted dtype of the inputs; with
        ``quantize``, the values and their scales.
    Raises:
        ValueError: ``approximate`` is unknown; the shapes differ.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: computed in fp32 (fp64 for fp64 inputs).
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    _beside = ("up",)

    def __init__(
        self,
        approximate: ops.Approximate = "none",
        *,
        quantize: Format[Returned, Any] | None = None,
    ) -> None:
        super().__init__()
        check_choice(type(self).__name__, "approximate", approximate, ops.APPROXIMATIONS)
        self.approximate: ops.Approximate = approximate
        self._quantise(quantize)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Returned:
        """Activate ``gate`` and multiply by ``up``; see the class."""
        return ops.geglu(  # type: ignore[no-any-return]
            gate, self._rows(up, gate), self.approximate, quantize=self.quantize
        )

    if TYPE_CHECKING:  # the ``__call__`` of nn.Module returns Any

        def __call__(self, gate: Tensor, up: Tensor | None = None) -> Returned: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Returns the arguments in ``print(module)``, as `torch.nn.GELU` prints them."""
        line = super().extra_repr()
        return f"approximate={self.approximate!r}, {line}".removesuffix(", ")
