"""Helpers for the forwards of fused blocks: they postpone the last steps of residual branches.

A branch of a transformer ends in a linear layer and a dropout, and its sum with the residual stream
is normalised. Each module of the branch may leave its last steps to the block (`branch`, `linear`),
which computes them in one operator (`add_norm`, `add`, `activate`):

    linear  ->  + bias -> activation -> dropout  ->  + residual -> norm
    product     the other fields of a Branch         the block
    computed    postponed

A module leaves nothing to the block unless it is exactly of the known kind and has no hooks.
Otherwise it is called as PyTorch would call it, and only the rest is fused. So a child may be
hooked, excluded, parametrized, or replaced by an adapter, before or after the model is fused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..activations.ops import bias_act, gated_act
from ..core.activations import ActivationName
from ..core.compat.dynamo import constant_when_traced
from ..distributed.sequence import Rows, rows_of_norm
from ..norms.ops import bias_dropout_add
from .autocast import low_dtype, narrowed, normed
from .cast import Cast
from .hooks import can_call, has_hooks, is_conv1d, is_linear, is_named, original

__all__ = [
    "Branch",
    "activate",
    "activated",
    "activation_name",
    "add",
    "add_norm",
    "add_norm_cast",
    "branch",
    "branches",
    "drop",
    "dropped",
    "finished",
    "first",
    "folded",
    "gated",
    "gated_by",
    "gelu_tanh",
    "handed",
    "in_place",
    "leaving",
    "like",
    "linear",
    "narrowed",
    "normed",
    "packed_gated",
    "postponed_gate",
    "rejoined",
    "replacing",
    "reshaped",
    "split",
    "whole",
    "without_last_bias",
]


class Branch(NamedTuple):
    """``dropout(activation(product + bias))``, postponed: only ``product`` is computed."""

    product: Tensor
    bias: Tensor | None = None
    p: float = 0.0
    training: bool = False
    activation: Any = None

    @property
    def drops(self) -> bool:
        """Whether a dropout is postponed."""
        return self.training and self.p > 0.0


# --- modules that leave something to their parent -------------------------------------------------


def product(layer: Any, x: Tensor) -> Tensor:
    """Return a linear layer's product, without its bias."""
    cls = type(layer)
    # Conv1D has its weight transposed. The test for the usual class is the cheaper one.
    if cls is not nn.Linear and is_conv1d(cls):
        return torch.matmul(x, layer.weight)
    return F.linear(x, layer.weight)


def linear(layer: Any, x: Tensor) -> Branch:
    """Return a linear layer's product, with its bias left to the caller."""
    if _is_real(x) and (type(layer) is Cast or _is_plain_linear(layer)):
        return Branch(product(layer, x), layer.bias)
    return Branch(layer(x))


def _is_real(x: Any) -> bool:
    """Whether this is a tensor of a dtype that the operators have: no integers, nothing complex."""
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _is_plain_linear(layer: Any) -> bool:
    """Whether a product and a sum compute what a call of this layer does."""
    return is_linear(layer) and not has_hooks(layer)


def _is_plain_dropout(module: Any) -> bool:
    """Whether the operators' dropout computes what a call of this module does."""
    if type(module) is not nn.Dropout:
        return False
    return not has_hooks(module)


def dropped(end: Branch, dropout: Any) -> Branch:
    """Postpone a dropout behind the branch, or call it if it must be called."""
    if _is_plain_dropout(dropout) and _may_postpone(end, dropout):
        return Branch(end.product, end.bias, dropout.p, dropout.training, end.activation)
    if type(dropout) is nn.Identity and not has_hooks(dropout):
        return end
    return Branch(dropout(finished(end)))


def _may_postpone(end: Branch, dropout: Any) -> bool:
    """Whether a dropout behind the branch may be computed later.

    A branch has one dropout. A dropout in place would write to its input, which others may read.
    With a bias they cannot: the input is then the sum with the bias, which only the branch has.
    """
    if end.drops or not _has_operators_dropout(end, dropout.p):
        return False
    if end.bias is not None:
        return True
    return not getattr(dropout, "inplace", False)


def _has_operators_dropout(end: Branch, p: Any) -> bool:
    """Whether the operators have this dropout. PyTorch takes a tensor as probability, too."""
    return _is_real(end.product) and isinstance(p, (int, float))


def drop(end: Branch, p: float, *, training: bool) -> Branch:
    """Postpone a dropout that has no module behind the branch."""
    if not _has_operators_dropout(end, p):
        return Branch(F.dropout(finished(end), p, training))
    # Two dropouts are two draws of random numbers, not one of a joint probability.
    if end.drops:
        return Branch(finished(end), None, p, training)
    return Branch(end.product, end.bias, p, training, end.activation)


def activated(end: Branch, activation: Any) -> Branch:
    """Postpone an activation behind a linear layer."""
    if not callable(activation):  # raises as the module's own forward does
        return Branch(activation(finished(end)))
    # In a branch the activation comes before the dropout, and there is one.
    if end.drops or end.activation is not None:
        return Branch(finished(end), activation=activation)
    return Branch(end.product, end.bias, activation=activation)


def postponed_gate(x: Tensor, activation: Any) -> Branch:
    """Postpone an activation until its factor is known, or call it if it must be called."""
    if activation_name(activation) and not getattr(activation, "inplace", False):
        return Branch(x, activation=activation)
    return Branch(activation(x))


# The helpers below call a module and differ in which of its outputs they return, and how. If the
# module's class has ``_fusedops_branch``, that returns an unfinished end and the other outputs:
#
#     (end, others)   the module returns the tuple (end, *others)
#     (end, None)     the module returns the end alone
#
# The helper for each kind of code in a forward, and what it returns:
#
#     module(x)              leaving     end; its product is a tuple if the module returns one
#     module(x)[0]           first       end
#     a, b = module(x)       branches    (end, b)
#     outputs = module(x)    split       (end, outputs[1:]); `rejoined` undoes it
#     return module(x)       handed      (end, others) or (end, None)
#     return x               whole       the same, with nothing postponed
#
# Rules that are written by hand call `branch` and `without_last_bias`: both return (end, others).


def branch(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
    """Return a module's first output, which the caller may have to finish, and the others."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        return end, others or ()
    output = module(*args, **kwargs)
    if isinstance(output, tuple):
        return Branch(output[0]), output[1:]
    return Branch(output), ()


def leaving(module: Any, *args: Any, **kwargs: Any) -> Branch:
    """Return a module's output, unfinished if the class postpones its end and it is no tuple."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is None:
            return end  # type: ignore[no-any-return]
        return Branch((finished(end), *others))  # type: ignore[arg-type]
    return Branch(module(*args, **kwargs))


def first(module: Any, *args: Any, **kwargs: Any) -> Branch:
    """Return ``module(...)[0]``, unfinished if the class postpones its end."""
    end, output = _called(module, args, kwargs)
    # The output is finished: index it as the model's code does, also a single tensor.
    if end is None:
        return Branch(output[0])
    return end


def branches(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return all outputs of a module, the first unfinished if the class postpones its end."""
    end, output = _called(module, args, kwargs)
    if end is not None:
        return (end, *output)
    first_output, *others = output
    return (Branch(first_output), *others)


def _called(module: Any, args: Any, kwargs: Any) -> tuple[Branch | None, Any]:
    """Call a module, and return its end and its other outputs.

    Returns:
        The end and the other outputs, if the module returns a tuple and postpones its end.
        Otherwise None and the whole output, which is finished and may be of any type.
    """
    if not can_call(module, "_fusedops_branch"):
        return None, module(*args, **kwargs)
    end, others = module._fusedops_branch(*args, **kwargs)
    if others is None:
        return (None, finished(end))
    return (end, others)


def handed(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """Return a module's outputs as the result of the caller's own ``_fusedops_branch``."""
    if can_call(module, "_fusedops_branch"):
        return module._fusedops_branch(*args, **kwargs)  # type: ignore[no-any-return]
    return whole(module(*args, **kwargs))


def split(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, Any]:
    """Return ``module(...)[0]``, unfinished if the class postpones its end, and ``[1:]``."""
    end, output = _called(module, args, kwargs)
    if end is None:
        return (Branch(output[0]), output[1:])
    return (end, output)


def rejoined(end: Branch, others: Any) -> tuple[Any, ...]:
    """Finish the end that `split` returned, and join it with the other outputs."""
    return (finished(end), *others)


def whole(output: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """Return a forward's outputs in the form of ``_fusedops_branch``, with nothing postponed."""
    if type(output) is tuple and output:
        return Branch(output[0]), output[1:]
    return Branch(output), None


class _Replacing:
    """A proxy of a module with some attributes replaced; writes go to the module.

    A forward of the module's class runs with it as ``self``. The module itself is not changed, not
    even for a moment: other threads may run it.
    """

    def __init__(self, module: nn.Module, replacements: dict[str, Any]) -> None:
        # Saves a call of `__getattr__` for each child. torch.compile does not trace this.
        if not torch.compiler.is_compiling():
            self.__dict__.update(module._modules)
        object.__setattr__(self, "_module", module)
        for name, value in replacements.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The module's class, for ``isinstance``; the proxy's own before it has a module.

        Traced code creates a bare proxy first.
        """
        return type(self.__dict__.get("_module", self))

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # while it is copied, the proxy has none yet
            raise AttributeError(name)
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
        if name in self.__dict__:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)
        self.__dict__.pop(name, None)


class _Product:
    """A linear layer without its bias."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.weight, self.bias = layer.weight, None

    def __call__(self, x: Tensor) -> Tensor:
        return product(self._layer, x)


def replacing(module: Any, replacements: dict[str, Any]) -> Any:
    """Return a proxy of the module with these attributes replaced; the module if there are none."""
    if replacements:
        return _Replacing(module, replacements)
    return module


def without_last_bias(
    module: Any,
    output: str,
    replacements: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> tuple[Branch, tuple[Any, ...]]:
    """Call the module's own forward, but postpone the bias of its last linear layer.

    The module has no hooks, and its forward is known to end in the layer.

    Args:
        module: the module.
        output: the name of the layer.
        replacements: replacements of the module's children, by name.
        args: the forward's arguments.
        kwargs: its keyword arguments.
    """
    layer = module._modules[output]
    bias = None
    if _is_plain_linear(layer) and layer.bias is not None:
        bias = layer.bias
        product_alone = _Product(replacements.get(output, layer))
        replacements = {**replacements, output: product_alone}
    result = original(module, "forward")(replacing(module, replacements), *args, **kwargs)
    if isinstance(result, tuple):
        return Branch(result[0], bias), result[1:]
    return Branch(result, bias), ()


# --- the postponed steps, in the block ------------------------------------------------------------


def folded(end: Branch, residual: Tensor | None = None) -> Tensor | None:
    """Return the bias in a dtype that does not widen the sum.

    Under autocast the product is narrower than the bias, which a linear layer would cast.
    """
    bias, dtype = end.bias, end.product.dtype
    if bias is None or bias.dtype == dtype:
        return bias
    # Such a residual widens the sum anyway.
    if residual is not None and residual.dtype == bias.dtype:
        return bias
    return bias.to(dtype)


def finished(end: Branch) -> Tensor:
    """Compute the postponed steps of the branch."""
    if end.activation is not None:
        return activate(Branch(end.product, end.bias), end.activation, end.p, training=end.training)
    if end.bias is None and not end.drops:
        return end.product
    return bias_dropout_add(end.product, folded(end), None, p=end.p, training=end.training)


def _match(x: Any, residual: Any) -> bool:
    """Whether the operators can add or multiply these: real tensors of one shape."""
    if not _is_real(x) or not _is_real(residual):
        return False
    return bool(x.shape == residual.shape)


def in_place(end: Branch, residual: Any) -> tuple[Branch, Any]:
    """Compute or postpone ``branch += residual``.

    Returns:
        The branch, and the residual if it is still to be added, or None.
    """
    # A branch with postponed steps is no tensor yet, so nothing else could see it change in place.
    if _can_fuse_sum(end, residual):
        dtype = end.product.dtype
        # A sum in place has the branch's dtype. A wider residual would widen a new sum.
        if torch.promote_types(dtype, residual.dtype) == dtype:
            return end, residual
    z = finished(end)
    z += residual
    return Branch(z), None


def _can_fuse_sum(end: Branch, residual: Any) -> bool:
    """Whether the branch has postponed steps that one operator computes along with the sum."""
    if end.bias is None and not end.drops:
        return False
    # The operator of the sum has no activation before it.
    if end.activation is not None:
        return False
    return _match(end.product, residual)


def add(end: Branch, residual: Tensor | None, *, first: bool = False) -> Tensor:
    """Return the branch added to the residual stream.

    Args:
        end: the branch.
        residual: the residual stream; None if it has been added already.
        first: whether the branch is the left operand, which matters to other types.
    """
    if residual is None:
        return finished(end)
    # Without postponed steps the sum is one operation, of any types.
    if _can_fuse_sum(end, residual):
        return bias_dropout_add(
            end.product, folded(end, residual), residual, p=end.p, training=end.training
        )
    z = finished(end)
    return z + residual if first else residual + z


def add_norm(
    end: Branch, residual: Tensor | None, norm: Any, *modules: nn.Module, return_sum: bool = True
) -> Any:
    """Return ``norm(branch + residual)``, and the sum as well with ``return_sum``.

    If the norm's output goes to ``modules`` and nowhere else, it has the dtype to which autocast
    would cast it.
    """
    if end.activation is not None:
        end = Branch(finished(end))
    if residual is not None and _match(end.product, residual):
        if can_call(norm, "_fusedops_add_norm"):
            return norm._fusedops_add_norm(end, residual, return_sum, low_dtype(residual, modules))
        sharded = _add_sharded_norm(end, residual, norm, return_sum)
        if sharded is not None:
            return sharded
    # The modules are called, with their hooks and whatever they were replaced by.
    z = add(end, residual)
    return (norm(z), z) if return_sum else norm(z)


def _add_sharded_norm(end: Branch, residual: Tensor, norm: Any, return_sum: bool) -> Any:
    """Return the result of `add_norm` for a norm under `SequenceParallel`; None for others."""
    layout = rows_of_norm(norm) if end.bias is None else None
    if layout is None:
        return None
    rows = _rows_in(layout, end, residual)
    if rows is None:
        return None
    # The operands are in the layout that the norm's hooks would give the sum.
    product, stream = rows
    end = end._replace(product=product)
    result = norm._fusedops_add_norm(end, stream, return_sum, None)
    if not return_sum:
        return _local(result, layout.to_local)
    y, z = result
    # The sum has the type of the residual that came in: a plain tensor if `_rows_in` converted it.
    return _local(y, layout.to_local), _local(z, stream is not residual)


def _local(x: Any, to_local: bool) -> Tensor:
    """Return a DTensor, or with ``to_local`` this rank's part of it."""
    return x.to_local() if to_local else x  # type: ignore[no-any-return]


def _rows_in(layout: Rows, end: Branch, residual: Tensor) -> tuple[Any, ...] | None:
    """Return the product and the residual in the layout, or None if the norm needs its hooks."""
    rows = layout.take(end.product, residual)
    if rows is None:
        return None
    # The operands were plain tensors and became DTensors. The module draws a dropout mask for this
    # rank's rows alone; the operator would draw another one for the DTensors.
    was_plain = rows[1] is not residual
    return None if was_plain and end.drops else rows


def add_norm_cast(
    end: Branch, residual: Tensor | None, norm: Any, *modules: nn.Module
) -> tuple[Tensor, Tensor]:
    """Return ``norm(branch + residual)`` for a post-norm block, twice.

    The first is for ``modules`` only, the second for the residual stream. Under autocast the first
    is a low-precision copy of the second, from the same pass.
    """
    low = None if residual is None else low_dtype(residual, modules)
    if low is None or not _can_add_and_norm(end, residual, norm):
        y = add_norm(end, residual, norm, return_sum=False)
        return y, y
    y = norm._fusedops_add_norm(end, residual, False, low, with_cast=True)
    # There is no copy if it would be rounded twice: see `rules.norms._narrowed`.
    if isinstance(y, tuple):
        return (y[1], y[0])
    return (y, y)


def _can_add_and_norm(end: Branch, residual: Any, norm: Any) -> bool:
    """Whether one operator computes the branch's last steps, the sum and the norm."""
    if end.activation is not None or not can_call(norm, "_fusedops_add_norm"):
        return False
    return _match(end.product, residual)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return PyTorch's GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


# Activations that have one kernel in PyTorch already, so that fusing them alone gains nothing.
_NATIVE: dict[type, ActivationName] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Identity: "identity",
}
_FUNCTIONS: dict[Any, ActivationName] = {
    F.relu: "relu",
    F.gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    F.silu: "silu",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
}


def activation_name(activation: Any) -> ActivationName | None:
    """Return the operators' name of an activation, a module or a function; None if it has none."""
    if not isinstance(activation, nn.Module):
        return _function_name(activation)
    if can_call(activation, "_fusedops_activation"):
        return activation._fusedops_activation()  # type: ignore[no-any-return, operator]
    if has_hooks(activation):
        return None
    cls = type(activation)
    if _is_silu(cls):
        return "silu"
    return _NATIVE.get(cls)


def _function_name(activation: Any) -> ActivationName | None:
    # By identity: an activation may be any callable, also one that cannot be hashed.
    for function, name in _FUNCTIONS.items():
        if activation is function:
            return name
    return None


@constant_when_traced
def _is_silu(cls: type) -> bool:
    return is_named(cls, "transformers.activations", "SiLUActivation")


def activate(end: Branch, activation: Any, p: float = 0.0, *, training: bool = False) -> Tensor:
    """Return ``dropout(activation(branch))``."""
    drops = training and p > 0.0
    # Calling the operator pays only if a bias or a dropout is fused with the activation.
    pays = end.bias is not None or drops
    # The operator has no dropout before the activation.
    name = activation_name(activation) if pays and not end.drops else None
    if name is not None:
        return bias_act(end.product, folded(end), name, p=p, training=training)
    y: Tensor = activation(finished(end))
    if drops:
        return F.dropout(y, p, training)
    return y


def like(end: Branch, residual: Tensor | None) -> Tensor:
    """Return a tensor of the sum's shape; computes the sum only if its operands' shapes differ."""
    if residual is not None and _match(end.product, residual):
        return residual
    return add(end._replace(p=0.0), residual)


def reshaped(end: Branch, residual: Tensor | None, *shape: Any) -> tuple[Branch, Tensor | None]:
    """Reshape the branch and the residual."""
    if residual is not None and _match(end.product, residual):
        product = end.product.reshape(*shape)
        # The bias belongs to the last dimension.
        if end.bias is None or product.shape[-1:] == end.product.shape[-1:]:
            return end._replace(product=product), residual.reshape(*shape)
    return Branch(add(end, residual).reshape(*shape)), None


def gated(end: Branch, up: Tensor) -> Tensor:
    """Return ``activation(gate) * up``, where `postponed_gate` returned the branch."""
    gate, activation = end.product, end.activation
    # `postponed_gate` has called the activation.
    if activation is None:
        return gate * up
    name = activation_name(activation)
    if name is not None and _match(gate, up):
        return gated_act(gate, up, name)
    return activation(gate) * up  # type: ignore[no-any-return]


def gated_by(up: Tensor, end: Branch) -> Tensor:
    """Return ``up * activation(gate)``; evaluates ``up`` first, as that expression does."""
    return gated(end, up)


def packed_gated(x: Tensor, activation: Any) -> Tensor:
    """Return ``activation(gate) * up`` for the two halves of one tensor.

    The operator takes the tensor as it is, so that both halves have one gradient.
    """
    name = activation_name(activation)
    # An odd length has no two halves; an activation in place would write to x.
    has_operator = _is_real(x) and x.shape[-1] % 2 == 0
    if name is None or not has_operator or getattr(activation, "inplace", False):
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up  # type: ignore[no-any-return]
    return gated_act(x, None, name)
