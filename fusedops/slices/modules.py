"""The slices family's modules: the parameters of all slices' norms, and one functional call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import torch
from torch import Tensor, nn

from ..core.calls.checks import check_choice, check_eps
from ..core.compat.modules import has_own_hooks
from ..core.typevars import Sliced
from . import ops
from .checkpoints import load_separate

__all__ = ["FusedBatchedLayerNormAct", "FusedBatchedLayerNormTanh", "check_layers"]


class FusedBatchedLayerNormAct(nn.Module, Generic[Sliced]):
    """``activation(layer_norm(slice))`` on many slices of features in one launch.

    Each slice has its own norm. The module replaces a list of `torch.nn.LayerNorm`, one per slice,
    each followed by an activation. `from_layers` copies the parameters of such a list, and
    `to_layers` returns such a list. ``weight`` has the weights of all slices side by side in one
    tensor, and ``bias`` their biases. A checkpoint of a `torch.nn.ModuleList` of the separate norms
    (``0.weight``, ``0.bias``, ``1.weight``, …) loads too.

    Args:
        sizes: the widths D_k of the slices.
        eps: added to the variance.
        elementwise_affine: whether the module has learnable ``weight`` and ``bias``; they start at
            ones and zeros.
        bias: whether the module has a ``bias``; used only with ``elementwise_affine``.
        device: the parameters' device.
        dtype: the parameters' dtype: fp16, bf16, fp32 or fp64; it may differ from the slices'.
        activation: the activation after the norm, a name as in `fusedops.batched_layer_norm_act`.
        concat: return one tensor with the slices side by side, for a linear layer that follows.
    Shape:
        slices: one tensor ``(*, ΣD_k)``; or ``(*, K, D)`` if all widths are D; or a sequence of K
            tensors ``(*, D_k)``.
        output: the form of the input, and a tuple for a sequence; with ``concat`` one tensor ``(*,
            ΣD_k)``.
    Raises:
        ValueError: the slices' widths are not ``sizes``; a batch size differs; ``activation`` is
            unknown.
        TypeError: a slice is not a floating-point tensor, or the slices' dtypes differ.
        RuntimeError: slices and parameters are on different devices.
    Numerics: statistics in fp32 (fp64 for fp64 inputs); two-pass variance.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    @overload
    def __init__(
        self: FusedBatchedLayerNormAct[tuple[Tensor, ...]],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        activation: ops.SliceActivation = ...,
        concat: Literal[False] = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBatchedLayerNormAct[Tensor],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        activation: ops.SliceActivation = ...,
        concat: Literal[True],
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBatchedLayerNormAct[Any],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        activation: ops.SliceActivation = ...,
        concat: bool,
    ) -> None: ...
    def __init__(
        self,
        sizes: Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ops.SliceActivation = "tanh",
        concat: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        # A tuple of ints: so the `check_sizes` of each call returns without a loop over it.
        self.sizes = ops.check_sizes(sizes, name)
        check_eps(name, eps)
        check_choice(name, "activation", activation, ops.ACTIVATION_NAMES)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.activation: ops.SliceActivation = activation
        self.concat = concat
        total = sum(self.sizes)
        for parameter, is_present in (
            ("weight", elementwise_affine),
            ("bias", elementwise_affine and bias),
        ):
            value = None
            if is_present:
                value = nn.Parameter(torch.empty(total, device=device, dtype=dtype))
            self.register_parameter(parameter, value)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(load_separate)  # type: ignore[no-untyped-call]

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros, as `torch.nn.LayerNorm` does."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @overload
    def forward(self, slices: Tensor) -> Tensor: ...
    @overload
    def forward(self, slices: Sequence[Tensor]) -> Sliced: ...
    def forward(self, slices: Tensor | Sequence[Tensor]) -> Any:
        """Normalise and activate; see the class."""
        sizes: tuple[int, ...] | None = self.sizes
        shape = None
        if isinstance(slices, Tensor) and not slices.is_nested:
            shape = slices.shape
        if shape is not None and shape[-1:] != (sum(self.sizes),):
            # The slices are not side by side, so they must be (*, K, D).
            are_equal = len(set(self.sizes)) == 1
            if not are_equal or shape[-2:] != (len(self.sizes), self.sizes[0]):
                raise ValueError(
                    f"{type(self).__name__}: slices has shape {tuple(shape)}, "
                    f"expected (*, {sum(self.sizes)}) for the sizes of {len(self.sizes)} slices"
                )
            sizes = None
        return ops.batched_layer_norm_act(
            slices,
            self.weight,
            self.bias,
            self.eps,
            sizes=sizes,
            activation=self.activation,
            concat=self.concat,
        )

    if TYPE_CHECKING:  # torch.nn's returns Any

        @overload
        def __call__(self, slices: Tensor) -> Tensor: ...
        @overload
        def __call__(self, slices: Sequence[Tensor]) -> Sliced: ...
        def __call__(self, slices: Tensor | Sequence[Tensor]) -> Any: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Returns the constructor's arguments, in the style of `torch.nn.LayerNorm`."""
        sizes = str(self.sizes)
        if len(self.sizes) > 8:
            sizes = f"<{len(self.sizes)} slices, {sum(self.sizes)} columns>"
        return (
            f"{sizes}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}, activation={self.activation!r}, concat={self.concat}"
        )

    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        activation: ops.SliceActivation = ...,
        concat: Literal[False] = ...,
    ) -> FusedBatchedLayerNormAct[tuple[Tensor, ...]]: ...
    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        activation: ops.SliceActivation = ...,
        concat: Literal[True],
    ) -> FusedBatchedLayerNormAct[Tensor]: ...
    @overload
    @classmethod
    def from_layers(
        cls, layers: Iterable[nn.LayerNorm], *, activation: ops.SliceActivation = ..., concat: bool
    ) -> FusedBatchedLayerNormAct[Any]: ...
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        activation: ops.SliceActivation = "tanh",
        concat: bool = False,
    ) -> FusedBatchedLayerNormAct[Any]:
        """Returns a module with copies of the parameters of these layers, one per slice.

        Args:
            layers: the layers.
            activation: as in the constructor.
            concat: as in the constructor.
        Raises:
            TypeError: a layer is not a `torch.nn.LayerNorm`.
            ValueError: ``layers`` is empty; ``activation`` is unknown; a layer normalises several
                dimensions; or a layer differs from the first one in eps, in which parameters it
                has, or in their dtype, device or ``requires_grad``.
        """
        name = cls.__name__
        if not isinstance(layers, Iterable):
            raise TypeError(
                f"{name}: layers must be torch.nn.LayerNorm modules, got {type(layers).__name__}"
            )
        layers = list(layers)
        check_choice(name, "activation", activation, ops.ACTIVATION_NAMES)
        if not layers:
            raise ValueError(f"{name}: layers must hold at least one torch.nn.LayerNorm, got none")
        check_layers(name, layers)
        first = layers[0]
        like = first.weight
        module = cls(
            [layer.normalized_shape[0] for layer in layers],
            eps=first.eps,
            elementwise_affine=first.elementwise_affine,
            bias=first.bias is not None,
            device=None if like is None else like.device,
            dtype=None if like is None else like.dtype,
            concat=concat,
        )
        module.activation = activation
        for parameter in ("weight", "bias"):
            joined = getattr(module, parameter)
            if joined is not None:
                joined.requires_grad_(getattr(first, parameter).requires_grad)
                with torch.no_grad():
                    joined.copy_(torch.cat([getattr(layer, parameter) for layer in layers]))
        return module.train(first.training)

    def to_layers(self) -> list[nn.LayerNorm]:
        """Returns a `torch.nn.LayerNorm` per slice, with copies of its parameters.

        The activation is left out.
        """
        like = self.weight
        layers = []
        for k, size in enumerate(self.sizes):
            layer = nn.LayerNorm(
                size,
                eps=self.eps,
                elementwise_affine=self.elementwise_affine,
                bias=self.bias is not None,
                device=None if like is None else like.device,
                dtype=None if like is None else like.dtype,
            )
            for name, joined in self.named_parameters():
                parameter = getattr(layer, name)
                parameter.requires_grad_(joined.requires_grad)
                with torch.no_grad():
                    parameter.copy_(joined.split(self.sizes)[k])
            layers.append(layer.train(self.training))
        return layers


class FusedBatchedLayerNormTanh(FusedBatchedLayerNormAct[Sliced]):
    """``tanh(layer_norm(slice))`` on many slices of features in one launch.

    It is `FusedBatchedLayerNormAct` with tanh.

    Args:
        sizes: as in `FusedBatchedLayerNormAct`.
        eps: as in `FusedBatchedLayerNormAct`.
        elementwise_affine: as in `FusedBatchedLayerNormAct`.
        bias: as in `FusedBatchedLayerNormAct`.
        device: as in `FusedBatchedLayerNormAct`.
        dtype: as in `FusedBatchedLayerNormAct`.
        concat: as in `FusedBatchedLayerNormAct`.
    Shape:
        As `FusedBatchedLayerNormAct`.
    Raises:
        ValueError: as `FusedBatchedLayerNormAct`.
        TypeError: as `FusedBatchedLayerNormAct`.
        RuntimeError: as `FusedBatchedLayerNormAct`.
    """

    @overload
    def __init__(
        self: FusedBatchedLayerNormTanh[tuple[Tensor, ...]],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        concat: Literal[False] = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBatchedLayerNormTanh[Tensor],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        concat: Literal[True],
    ) -> None: ...
    @overload
    def __init__(
        self: FusedBatchedLayerNormTanh[Any],
        sizes: Sequence[int],
        eps: float = ...,
        elementwise_affine: bool = ...,
        bias: bool = ...,
        device: torch.device | str | int | None = ...,
        dtype: torch.dtype | None = ...,
        *,
        concat: bool,
    ) -> None: ...
    def __init__(
        self,
        sizes: Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        concat: bool = False,
    ) -> None:
        super().__init__(
            sizes,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            activation="tanh",
            concat=concat,
        )

    @overload  # type: ignore[override]  # the base class has the argument ``activation``
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        concat: Literal[False] = ...,
    ) -> FusedBatchedLayerNormTanh[tuple[Tensor, ...]]: ...
    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        concat: Literal[True],
    ) -> FusedBatchedLayerNormTanh[Tensor]: ...
    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        concat: bool,
    ) -> FusedBatchedLayerNormTanh[Any]: ...
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[nn.LayerNorm],
        *,
        concat: bool = False,
    ) -> FusedBatchedLayerNormTanh[Any]:
        """Returns a module as `FusedBatchedLayerNormAct.from_layers` does, with tanh."""
        module = super().from_layers(layers, activation="tanh", concat=concat)
        assert isinstance(module, FusedBatchedLayerNormTanh)
        return module


def check_layers(name: str, layers: list[nn.LayerNorm]) -> None:
    """Raises if the layers cannot be joined in one module."""
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.LayerNorm) or not _is_norm_alone(layer):
            raise TypeError(
                f"{name}: layer {k} must be a torch.nn.LayerNorm, got {type(layer).__name__}"
            )
        if has_own_hooks(layer):
            raise TypeError(f"{name}: layer {k} has hooks, which the module would not call")
        if len(layer.normalized_shape) != 1:
            raise ValueError(
                f"{name}: layer {k} normalises {layer.normalized_shape}, expected one dimension"
            )
        properties, expected = _common(layer), _common(layers[0])
        if properties != expected:
            raise ValueError(f"{name}: layer {k} has {properties}, expected {expected} as layer 0")


def _is_norm_alone(layer: nn.LayerNorm) -> bool:
    """Returns whether the forward is PyTorch's or this package's, and takes only the input."""
    packages = {nn.LayerNorm.__module__.partition(".")[0], __name__.partition(".")[0]}
    package = getattr(layer.forward, "__module__", "").partition(".")[0]
    return package in packages and len(signature(layer.forward).parameters) == 1


def _common(layer: nn.LayerNorm) -> str:
    """Returns the properties that layers must have in common to be one module, as text."""
    properties = [f"eps={layer.eps}"]
    for name in ("weight", "bias"):
        parameter = getattr(layer, name)
        if parameter is None:
            properties.append(f"no {name}")
        else:
            frozen = "" if parameter.requires_grad else "frozen "
            properties.append(f"a {frozen}{name} of {parameter.dtype} on {parameter.device}")
    return ", ".join(properties)
