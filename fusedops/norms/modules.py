"""The norm family's modules: parameters and one functional call.

Each is a subclass of the torch.nn module that it replaces. So ``isinstance`` is true, the
parameters, their initial values and their ``state_dict`` keys are the same, and weights load in
both directions. A module's ``_beside`` names its tensor arguments after x: see `TensorsBeside`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import torch
from torch import Tensor, nn

from ..compiler.quantising import Format, Quantising
from ..core.calls.checks import check_p
from ..core.typevars import Returned, Summed
from ..distributed.modules import TensorsBeside
from . import ops
from .reference import Rounding

__all__ = [
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedBiasDropoutAdd",
    "FusedBiasDropoutAddLayerNorm",
    "FusedBiasDropoutAddRMSNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
]

Save = Literal["sum", "output", "inputs"]


class FusedLayerNorm(Quantising, nn.LayerNorm, Generic[Returned]):
    """Drop-in for `torch.nn.LayerNorm`: same constructor, parameters and initial values.

    The ``state_dict`` has the same keys.

    Args:
        normalized_shape: the trailing dimensions to normalise, an int or a sequence of ints.
        eps: added to the variance.
        elementwise_affine: whether the module has learnable ``weight`` and ``bias``; they start at
            ones and zeros.
        bias: whether the module has a ``bias``; used only with ``elementwise_affine``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the input's.
        quantize: as in `fusedops.layer_norm`; in no ``state_dict``.
    Shape:
        input and output: ``(*, *normalized_shape)``, in the input's dtype (fp32 under GPU
            autocast). With ``quantize``, the values and their scales.
    Raises:
        ValueError: ``eps`` or a size is negative; the input's trailing dimensions are not
            ``normalized_shape``.
        TypeError: the input is not a floating-point tensor.
        RuntimeError: input and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs); two-pass variance.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        quantize: Format[Returned, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        ops.check_constants(name, "layer", eps)
        super().__init__(
            ops.check_sizes(name, normalized_shape), eps, elementwise_affine, bias, device, dtype
        )
        self._quantise(quantize)

    def forward(self, input: Tensor) -> Returned:  # type: ignore[override]
        """Normalise ``input``; see the class."""
        return ops.layer_norm(  # type: ignore[no-any-return]
            input, self.normalized_shape, self.weight, self.bias, self.eps, quantize=self.quantize
        )

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(self, input: Tensor) -> Returned: ...  # noqa: D102


class _RoundedRMSNorm(Quantising, nn.RMSNorm, Generic[Returned]):
    """`torch.nn.RMSNorm` with an offset that is added to the weight, and a rounding mode.

    The weight starts at ``1 - weight_offset``, so that the scale itself starts at one as torch.nn's
    does.
    """

    weight_offset: float = 0.0
    rounding: Rounding = "once"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        quantize: Format[Returned, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        ops.check_constants(name, "rms", eps, weight_offset, rounding)
        super().__init__(
            ops.check_sizes(name, normalized_shape), eps, elementwise_affine, device, dtype
        )
        self._quantise(quantize)
        self.rounding = rounding
        self.weight_offset = weight_offset
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that the scale is one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        """Returns the line of torch.nn, and the options that are not at their defaults."""
        return super().extra_repr() + _differences(self, weight_offset=0.0, rounding="once")


class FusedRMSNorm(_RoundedRMSNorm[Returned]):
    """Drop-in for `torch.nn.RMSNorm`: same constructor, parameters and initial values.

    The ``state_dict`` has the same keys.

    Args:
        normalized_shape: the trailing dimensions to normalise, an int or a sequence of ints.
        eps: added to the mean square; None for the machine epsilon of fp32 (fp64 for fp64 inputs).
        elementwise_affine: whether the module has a learnable ``weight``; it starts at ``1 -
            weight_offset``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the input's.
        weight_offset: added to ``weight`` before it scales; 1.0 for Gemma.
        rounding: "once" rounds at the end only, as Gemma's module does; "llama" and "t5" round
            where those Hugging Face modules do.
        quantize: as in `fusedops.rms_norm`; in no ``state_dict``.
    Shape:
        input and output: ``(*, *normalized_shape)``, in the input's dtype; with "llama" and "t5" in
            the weight's dtype if that is wider. With ``quantize``, the values and their scales.
    Raises:
        ValueError: ``eps`` or a size is negative, ``rounding`` is unknown; the input's trailing
            dimensions are not ``normalized_shape``.
        TypeError: the input is not a floating-point tensor.
        RuntimeError: input and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs).
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def forward(self, x: Tensor) -> Returned:  # type: ignore[override]
        """Normalise ``x``; see the class."""
        return ops.rms_norm(  # type: ignore[no-any-return]
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            quantize=self.quantize,
        )

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(self, x: Tensor) -> Returned: ...  # noqa: D102


class FusedBiasDropoutAdd(TensorsBeside, nn.Dropout):
    """``dropout(x + bias) + residual`` in one pass.

    Args:
        p: drop probability in [0, 1]; nothing is dropped in evaluation mode.
    Shape:
        x and residual: ``(..., N)``; bias: ``(N,)``. bias and residual may each be None.
        Returns ``(..., N)`` in the promoted dtype of the inputs (fp16, bf16, fp32 or fp64).
    Raises:
        ValueError: ``p`` is outside [0, 1]; a shape does not fit.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: the inputs are on different devices.
    Numerics: GPUs round p to a multiple of 2⁻¹⁶ and divide what is not dropped by the rounded keep
        probability, so the expectation is exact; the backward regenerates the mask from the seed.
    Source: Srivastava et al. 2014, JMLR 15(56).
    """

    _beside = ("bias", "residual")

    def __init__(self, p: float) -> None:
        check_p(type(self).__name__, p)
        super().__init__(p)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Drop, and add ``residual``; see the class."""
        bias, residual = self._vector(bias, x), self._rows(residual, x)
        return ops.bias_dropout_add(x, bias, residual, p=self.p, training=self.training)

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(  # noqa: D102
            self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
        ) -> Tensor: ...


class FusedBiasDropoutAddLayerNorm(TensorsBeside, nn.LayerNorm, Generic[Returned]):
    """``layer_norm(dropout(x + bias) + residual)`` in one pass.

    The module's ``weight`` and ``bias`` are the norm's, with the ``state_dict`` keys of
    `torch.nn.LayerNorm`. The bias before dropout, usually that of the linear layer before, is an
    argument of the call.

    Args:
        normalized_shape: the hidden size N, an int or a sequence of one int.
        eps: added to the variance.
        elementwise_affine: whether the module has learnable ``weight`` and ``bias``; they start at
            ones and zeros.
        bias: whether the norm has a ``bias``; used only with ``elementwise_affine``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the inputs'.
        p: drop probability in [0, 1]; nothing is dropped in evaluation mode.
        return_sum: return ``(y, z)`` with the sum ``z = dropout(x + bias) + residual``, for
            pre-norm blocks.
        save: what is saved for the backward: the "sum", the "output", or the "inputs"; see
            `bias_dropout_add_ln`.
    Shape:
        x and residual: ``(..., N)``; bias: ``(N,)``. bias and residual may each be None.
        Returns ``(..., N)`` in the promoted dtype of x, bias and residual (fp32 under GPU
        autocast).
    Raises:
        ValueError: a shape does not fit; ``p`` is outside [0, 1]; ``normalized_shape`` has several
            dimensions; another constant is out of range.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: inputs and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs); the backward regenerates the mask from the
    seed. Source: Ba et al. 2016, arXiv:1607.06450.
    """

    _beside = ("bias", "residual")

    @overload
    def __init__(
        self: FusedBiasDropoutAddLayerNorm[Tensor],
        normalized_shape: int | Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        return_sum: Literal[False] = ...,
        save: Save = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBiasDropoutAddLayerNorm[tuple[Tensor, Tensor]],
        normalized_shape: int | Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        return_sum: Literal[True],
        save: Save = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBiasDropoutAddLayerNorm[Any],
        normalized_shape: int | Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        return_sum: bool,
        save: Save = ...,
    ) -> None: ...
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float,
        return_sum: bool = False,
        save: Save = "sum",
    ) -> None:
        name = type(self).__name__
        ops.check_constants(name, "layer", eps, save=save)
        check_p(name, p)
        super().__init__(
            _width(name, normalized_shape), eps, elementwise_affine, bias, device, dtype
        )
        self.p = p
        self.return_sum = return_sum
        self.save = save

    def forward(  # type: ignore[override]
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Returned:
        """Drop, add ``residual`` and normalise; see the class."""
        bias, residual = self._vector(bias, x), self._rows(residual, x)
        if self.weight is None:
            _check_width(self, x)
        try:
            return ops.bias_dropout_add_ln(
                x,
                bias,
                residual,
                self.weight,
                self.bias,  # type: ignore[return-value]
                p=self.p,
                training=self.training,
                eps=self.eps,
                return_sum=self.return_sum,
                save=self.save,
            )
        except ValueError:
            _check_width(self, x)
            raise

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(  # noqa: D102
            self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
        ) -> Returned: ...

    def extra_repr(self) -> str:
        """Returns the line of torch.nn, and the options that are not at their defaults."""
        return f"{super().extra_repr()}, p={self.p}" + _differences(
            self, return_sum=False, save="sum"
        )


class FusedBiasDropoutAddRMSNorm(TensorsBeside, _RoundedRMSNorm[Any], Generic[Returned]):
    """``rms_norm(dropout(x + bias) + residual)`` in one pass.

    The module's ``weight`` is the norm's, with the ``state_dict`` key of `torch.nn.RMSNorm`. The
    bias before dropout, usually that of the linear layer before, is an argument of the call.

    Args:
        normalized_shape: the hidden size N, an int or a sequence of one int.
        eps: added to the mean square; None for the machine epsilon of fp32 (fp64 for fp64 inputs).
        elementwise_affine: whether the module has a learnable ``weight``; it starts at ``1 -
            weight_offset``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the inputs'.
        p: drop probability in [0, 1]; nothing is dropped in evaluation mode.
        weight_offset: added to ``weight`` before it scales; 1.0 for Gemma.
        rounding: "once" rounds at the end only, as Gemma's module does; "llama" and "t5" round
            where those Hugging Face modules do.
        return_sum: return ``(y, z)`` with the sum ``z = dropout(x + bias) + residual``, for
            pre-norm blocks.
        save: what is saved for the backward: the "sum", the "output", or the "inputs"; see
            `bias_dropout_add_ln`.
    Shape:
        x and residual: ``(..., N)``; bias: ``(N,)``. bias and residual may each be None.
        Returns ``(..., N)`` in the promoted dtype of x, bias and residual.
    Raises:
        ValueError: a shape does not fit; ``p`` is outside [0, 1]; ``normalized_shape`` has several
            dimensions; another constant is out of range.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: inputs and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs); the backward regenerates the mask from the
    seed. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    _beside = ("bias", "residual")

    @overload
    def __init__(
        self: FusedBiasDropoutAddRMSNorm[Tensor],
        normalized_shape: int | Sequence[int],
        eps: float | None = ...,
        elementwise_affine: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        weight_offset: float = ...,
        rounding: Rounding = ...,
        return_sum: Literal[False] = ...,
        save: Save = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBiasDropoutAddRMSNorm[tuple[Tensor, Tensor]],
        normalized_shape: int | Sequence[int],
        eps: float | None = ...,
        elementwise_affine: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        weight_offset: float = ...,
        rounding: Rounding = ...,
        return_sum: Literal[True],
        save: Save = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBiasDropoutAddRMSNorm[Any],
        normalized_shape: int | Sequence[int],
        eps: float | None = ...,
        elementwise_affine: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        p: float,
        weight_offset: float = ...,
        rounding: Rounding = ...,
        return_sum: bool,
        save: Save = ...,
    ) -> None: ...
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        return_sum: bool = False,
        save: Save = "sum",
    ) -> None:
        name = type(self).__name__
        ops.check_constants(name, "rms", eps, save=save)
        check_p(name, p)
        super().__init__(
            _width(name, normalized_shape),
            eps,
            elementwise_affine,
            device,
            dtype,
            weight_offset=weight_offset,
            rounding=rounding,
        )
        self.p = p
        self.return_sum = return_sum
        self.save = save

    def forward(  # type: ignore[override]
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Returned:
        """Drop, add ``residual`` and normalise; see the class."""
        bias, residual = self._vector(bias, x), self._rows(residual, x)
        if self.weight is None:
            _check_width(self, x)
        try:
            return ops.bias_dropout_add_rms_norm(
                x,
                bias,
                residual,
                self.weight,
                p=self.p,  # type: ignore[return-value]
                training=self.training,
                eps=self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                return_sum=self.return_sum,
                save=self.save,
            )
        except ValueError:
            _check_width(self, x)
            raise

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(  # noqa: D102
            self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
        ) -> Returned: ...

    def extra_repr(self) -> str:
        """Returns the line of torch.nn, and the options that are not at their defaults."""
        return f"{super().extra_repr()}, p={self.p}" + _differences(
            self, return_sum=False, save="sum"
        )


class FusedAddLayerNorm(Quantising, TensorsBeside, nn.LayerNorm, Generic[Summed]):
    """``layer_norm(x + residual)`` and the sum, in one pass.

    For the residual additions of a pre-norm block.

    Args:
        normalized_shape: the hidden size N, an int or a sequence of one int.
        eps: added to the variance.
        elementwise_affine: whether the module has learnable ``weight`` and ``bias``; they start at
            ones and zeros.
        bias: whether the norm has a ``bias``; used only with ``elementwise_affine``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the inputs'.
        quantize: as in `fusedops.add_layer_norm`; in no ``state_dict``.
    Shape:
        x and residual: ``(..., N)``.
        Returns ``(y, z)``, each ``(..., N)``: the normalised sum, and the sum in the promoted dtype
        of the inputs. With ``quantize``, the values, their scales, then the sum.
    Raises:
        ValueError: a shape does not fit; ``eps`` is negative; ``normalized_shape`` has several
            dimensions.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: inputs and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs).
    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    _beside = ("residual",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        quantize: Format[Any, Summed] | None = None,
    ) -> None:
        name = type(self).__name__
        ops.check_constants(name, "layer", eps)
        super().__init__(
            _width(name, normalized_shape), eps, elementwise_affine, bias, device, dtype
        )
        self._quantise(quantize)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor
    ) -> Summed:
        """Add ``residual`` and normalise; see the class."""
        if self.weight is None:
            _check_width(self, x)
        try:
            return ops.add_layer_norm(  # type: ignore[no-any-return]
                x,
                self._rows(residual, x),  # type: ignore[arg-type]
                self.weight,
                self.bias,
                self.eps,
                quantize=self.quantize,
            )
        except ValueError:
            _check_width(self, x)
            raise

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(self, x: Tensor, residual: Tensor) -> Summed: ...  # noqa: D102


class FusedAddRMSNorm(TensorsBeside, _RoundedRMSNorm[Any], Generic[Summed]):
    """``rms_norm(x + residual)`` and the sum, in one pass.

    For the residual additions of a Llama block.

    Args:
        normalized_shape: the hidden size N, an int or a sequence of one int.
        eps: added to the mean square; None for the machine epsilon of fp32 (fp64 for fp64 inputs).
        elementwise_affine: whether the module has a learnable ``weight``; it starts at ``1 -
            weight_offset``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the inputs'.
        weight_offset: added to ``weight`` before it scales; 1.0 for Gemma.
        rounding: as in `FusedRMSNorm`.
        quantize: as in `fusedops.add_rms_norm`; in no ``state_dict``.
    Shape:
        x and residual: ``(..., N)``.
        Returns ``(y, z)``, each ``(..., N)``: the normalised sum, and the sum in the promoted dtype
        of the inputs. With ``quantize``, the values, their scales, then the sum.
    Raises:
        ValueError: a shape does not fit; ``eps`` is negative; ``rounding`` is unknown;
            ``normalized_shape`` has several dimensions.
        TypeError: an input is not a floating-point tensor.
        RuntimeError: inputs and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs).
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    _beside = ("residual",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        quantize: Format[Any, Summed] | None = None,
    ) -> None:
        super().__init__(
            _width(type(self).__name__, normalized_shape),
            eps,
            elementwise_affine,
            device,
            dtype,
            weight_offset=weight_offset,
            rounding=rounding,
            quantize=quantize,
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor
    ) -> Summed:
        """Add ``residual`` and normalise; see the class."""
        if self.weight is None:
            _check_width(self, x)
        try:
            return ops.add_rms_norm(  # type: ignore[no-any-return]
                x,
                self._rows(residual, x),  # type: ignore[arg-type]
                self.weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                quantize=self.quantize,
            )
        except ValueError:
            _check_width(self, x)
            raise

    if TYPE_CHECKING:  # torch.nn's returns Any

        def __call__(self, x: Tensor, residual: Tensor) -> Summed: ...  # noqa: D102


def _width(name: str, normalized_shape: int | Sequence[int]) -> int:
    """Returns the hidden size; operators with a bias or a residual normalise one dimension."""
    shape = ops.check_sizes(name, normalized_shape)
    if len(shape) != 1:
        raise ValueError(f"{name}: normalized_shape must have one dimension, got {tuple(shape)}")
    return shape[0]


def _check_width(module: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> None:
    """Raises if the input is not as wide as the module.

    The operator takes the width from the input. So its error would blame the weight, and without a
    weight there would be no error.
    """
    if isinstance(x, Tensor) and not x.is_nested and x.shape[-1:] != module.normalized_shape:
        name, expected = type(module).__name__, module.normalized_shape[0]
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (*, {expected})")


def _differences(module: nn.Module, **defaults: object) -> str:
    """Returns the options that are not at their defaults, as text for ``extra_repr``."""
    text = ""
    for name, default in defaults.items():
        value = getattr(module, name)
        if value != default:
            text += f", {name}={value!r}"
    return text
