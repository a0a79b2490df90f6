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
from .hooks import can_call, has_hooks, is_conv1d, is_linear, original

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
    "rejoined",
    "replacing",
    "reshaped",
    "split",
    "waiting",
    "whole",
    "without",
]


class Branch(NamedTuple):
    """``dropout(activation(product + bias))``, of which only ``product`` is computed."""

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
    if cls is not nn.Linear and is_conv1d(cls):
        return torch.matmul(x, layer.weight)
    return F.linear(x, layer.weight)


def linear(layer: Any, x: Tensor) -> Branch:
    """Return a linear layer's product, with its bias left to the caller."""
    if type(layer) is Cast or (is_linear(layer) and not has_hooks(layer)):
        return Branch(product(layer, x), layer.bias)
    return Branch(layer(x))


def dropped(end: Branch, dropout: Any) -> Branch:
    """Postpone a dropout behind the branch, or call it if it must be called."""
    is_dropout = type(dropout) is nn.Dropout and not has_hooks(dropout)
    # A branch has one dropout.
    if is_dropout and not end.drops and _needs_no_write(end, dropout):
        return Branch(end.product, end.bias, dropout.p, dropout.training, end.activation)
    if type(dropout) is nn.Identity and not has_hooks(dropout):
        return end
    return Branch(dropout(finished(end)))


def _needs_no_write(end: Branch, module: Any) -> bool:
    """Whether nothing can read what the module would write in place to its input.

    It does not write, or its input is the sum with the bias, which only the branch has.
    """
    return end.bias is not None or not getattr(module, "inplace", False)


def drop(end: Branch, p: float, *, training: bool) -> Branch:
    """Postpone a dropout that has no module behind the branch."""
    if end.drops:
        return Branch(finished(end), None, p, training)
    return Branch(end.product, end.bias, p, training, end.activation)


def activated(end: Branch, activation: Any) -> Branch:
    """Postpone an activation behind a linear layer."""
    if not callable(activation):  # raises as the module's own forward does
        return Branch(activation(finished(end)))
    if end.drops or end.activation is not None:
        return Branch(finished(end), activation=activation)
    return Branch(end.product, end.bias, activation=activation)


def waiting(x: Tensor, activation: Any) -> Branch:
    """Postpone an activation until its factor is known, or call it if it must be called."""
    if activation_name(activation) and not getattr(activation, "inplace", False):
        return Branch(x, activation=activation)
    return Branch(activation(x))


# The helpers below call a module and differ in which of its outputs they return, and how. If the
# module's class has ``_fusedops_branch``, that returns an unfinished end and the other outputs:
#
#     (end, others)   the module returns the tuple (end, *others)
#     (end, None)     the module returns the end alone


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
    """Return a module's output, unfinished if it is a tensor whose end the class postpones."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is None:
            return end  # type: ignore[no-any-return]
        return Branch((finished(end), *others))  # type: ignore[arg-type]
    return Branch(module(*args, **kwargs))


def first(module: Any, *args: Any, **kwargs: Any) -> Branch:
    """Return ``module(...)[0]``, unfinished if the class postpones its end."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        # A single output is a tensor, whose first row is taken.
        return Branch(finished(end)[0]) if others is None else end
    return Branch(module(*args, **kwargs)[0])


def branches(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return all outputs of a module, the first unfinished if the class postpones its end."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is not None:
            return (end, *others)
        output: Any = finished(end)
    else:
        output = module(*args, **kwargs)
    first_output, *others = output
    return (Branch(first_output), *others)


def handed(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """Return a module's outputs in the form of ``_fusedops_branch``, for the caller's own."""
    if can_call(module, "_fusedops_branch"):
        return module._fusedops_branch(*args, **kwargs)  # type: ignore[no-any-return]
    return whole(module(*args, **kwargs))


def split(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, Any]:
    """Return ``module(...)[0]``, unfinished if the class postpones its end, and ``[1:]``."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is not None:
            return end, others
        output: Any = finished(end)
    else:
        output = module(*args, **kwargs)
    return Branch(output[0]), output[1:]


def rejoined(end: Branch, others: Any) -> tuple[Any, ...]:
    """Finish the end that `split` returned, and join it with the other outputs."""
    return (finished(end), *others)


def whole(output: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """Return a forward's outputs in the form of ``_fusedops_branch``, with nothing postponed."""
    if type(output) is tuple and output:
        return Branch(output[0]), output[1:]
    return Branch(output), None


class _Replacing:
    """A proxy of a module with some attributes replaced; writes go to the module."""

    def __init__(self, module: nn.Module, instead: dict[str, Any]) -> None:
        # Saves a call of `__getattr__` for each child. torch.compile does not trace this.
        if not torch.compiler.is_compiling():
            self.__dict__.update(module._modules)
        object.__setattr__(self, "_module", module)
        for name, value in instead.items():
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


def _identity(x: Tensor) -> Tensor:
    return x


def replacing(module: Any, instead: dict[str, Any]) -> Any:
    """Return a proxy of the module with these attributes replaced; without any, the module."""
    return _Replacing(module, instead) if instead else module


def without(
    module: Any,
    output: str,
    dropout: str | None,
    instead: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> tuple[Branch, tuple[Any, ...]]:
    """Call the module's own forward, but postpone its last steps.

    These are the bias of the linear layer ``output``, and ``dropout``. The module has no hooks, and
    its forward is known to end in them (see `branch`). ``instead`` has replacements of children.
    """
    layer = module._modules[output]
    last = None if dropout is None else module._modules[dropout]
    instead = dict(instead)
    bias, p, training = None, 0.0, False
    # If the dropout must be called, the bias before it must be added.
    if last is None or (type(last) is nn.Dropout and not has_hooks(last)):
        if last is not None:
            p, training = last.p, last.training
            instead[dropout] = _identity  # type: ignore[index]
        if is_linear(layer) and not has_hooks(layer) and layer.bias is not None:
            bias = layer.bias
            instead[output] = _Product(instead.get(output, layer))
    result = original(module, "forward")(replacing(module, instead), *args, **kwargs)
    if isinstance(result, tuple):
        return Branch(result[0], bias, p, training), result[1:]
    return Branch(result, bias, p, training), ()


# --- what a block does with them ------------------------------------------------------------------


def folded(end: Branch, residual: Tensor | None = None) -> Tensor | None:
    """Return the bias in a dtype that does not widen the sum.

    Under autocast the product is narrower than the bias, which a linear layer would cast.
    """
    bias, dtype = end.bias, end.product.dtype
    if bias is None or bias.dtype == dtype:
        return bias
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
    """Whether both are tensors of one shape, so that the operators can add them."""
    return isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape


def in_place(end: Branch, residual: Any) -> tuple[Branch, Any]:
    """Compute or postpone ``branch += residual``.

    Returns:
        The branch, and the residual if it is still to be added, or None.
    """
    # With postponed steps the finished branch is a new tensor: nothing else sees it change.
    if _can_fuse_sum(end, residual):
        dtype = end.product.dtype
        if torch.promote_types(dtype, residual.dtype) == dtype:
            return end, residual
    z = finished(end)
    z += residual
    return Branch(z), None


def _can_fuse_sum(end: Branch, residual: Any) -> bool:
    """Whether the branch has postponed steps that one operator computes along with the sum."""
    has_rest = end.bias is not None or end.drops
    return has_rest and end.activation is None and _match(end.product, residual)


def add(end: Branch, residual: Tensor | None, *, first: bool = False) -> Tensor:
    """Return the branch added to the residual stream.

    Args:
        end: the branch.
        residual: the residual stream; None if it has been added already.
        first: whether the branch is the left operand, which matters to other types.
    """
    if residual is None:
        return finished(end)
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
        layout = rows_of_norm(norm) if end.bias is None else None
        rows = None if layout is None else _rows_in(layout, end, residual)
        if layout is not None and rows is not None:
            return _add_norm_of_rows(end, residual, norm, rows, layout.to_local, return_sum)
    z = add(end, residual)
    return (norm(z), z) if return_sum else norm(z)


def _rows_in(layout: Rows, end: Branch, residual: Tensor) -> tuple[Any, ...] | None:
    """Return the product and the residual in the layout, or None if the norm needs its hooks."""
    rows = layout.take(end.product, residual)
    if rows is None:
        return None
    # A plain tensor's dropout mask would be that of this rank's rows alone.
    is_plain = rows[1] is not residual
    return None if is_plain and end.drops else rows


def _add_norm_of_rows(
    end: Branch, residual: Tensor, norm: Any, rows: Any, to_local: bool, return_sum: bool
) -> Any:
    """Return the result of `add_norm` for a norm under `SequenceParallel`.

    ``rows`` are the product and the residual in the layout that the norm's hooks would give the
    sum.
    """
    product, stream = rows
    end = end._replace(product=product)
    result = norm._fusedops_add_norm(end, stream, return_sum, None)
    if not return_sum:
        return result.to_local() if to_local else result
    y, z = result
    y = y.to_local() if to_local else y
    # The sum has the type of the residual that came in.
    return y, z if stream is residual else z.to_local()


def add_norm_cast(
    end: Branch, residual: Tensor | None, norm: Any, *modules: nn.Module
) -> tuple[Tensor, Tensor]:
    """Return ``norm(branch + residual)`` for a post-norm block, twice.

    The first is for ``modules`` only, the second for the residual stream. Under autocast the first
    is a low-precision copy of the second, from the same pass.
    """
    low = None if residual is None else low_dtype(residual, modules)
    casts = low is not None and end.activation is None and can_call(norm, "_fusedops_add_norm")
    if casts and _match(end.product, residual):
        y = norm._fusedops_add_norm(end, residual, False, low, with_cast=True)
        return (y[1], y[0]) if isinstance(y, tuple) else (y, y)
    y = add_norm(end, residual, norm, return_sum=False)
    return y, y


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
        # By identity: an activation may be any callable, also one that cannot be hashed.
        return next((name for function, name in _FUNCTIONS.items() if activation is function), None)
    if can_call(activation, "_fusedops_activation"):
        return activation._fusedops_activation()  # type: ignore[no-any-return, operator]
    if has_hooks(activation):
        return None
    cls = type(activation)
    return "silu" if _is_silu(cls) else _NATIVE.get(cls)


@constant_when_traced
def _is_silu(cls: type) -> bool:
    return cls.__name__ == "SiLUActivation" and cls.__module__ == "transformers.activations"


def activate(end: Branch, activation: Any, p: float = 0.0, *, training: bool = False) -> Tensor:
    """Return ``dropout(activation(branch))``."""
    drops = training and p > 0.0
    # The operator pays if it has a bias or a dropout to fuse.
    plain = end.bias is None and not drops
    name = None if plain or end.drops else activation_name(activation)
    if name is not None:
        return bias_act(end.product, folded(end), name, p=p, training=training)
    y: Tensor = activation(finished(end))
    return F.dropout(y, p, training) if drops else y


def like(end: Branch, residual: Tensor | None) -> Tensor:
    """Return a tensor of the sum's shape; computes the sum only if its operands' shapes differ."""
    if residual is not None and _match(end.product, residual):
        return residual
    return add(end._replace(p=0.0), residual)


def reshaped(end: Branch, residual: Tensor | None, *shape: Any) -> tuple[Branch, Tensor | None]:
    """Reshape the branch and the residual."""
    if residual is None or not _match(end.product, residual):
        return Branch(add(end, residual).reshape(*shape)), None
    product = end.product.reshape(*shape)
    # The bias belongs to the last dimension.
    if end.bias is not None and product.shape[-1:] != end.product.shape[-1:]:
        return Branch(add(end, residual).reshape(*shape)), None
    return end._replace(product=product), residual.reshape(*shape)


def gated(end: Branch, up: Tensor) -> Tensor:
    """Return ``activation(gate) * up``, where `waiting` postponed the activation."""
    gate, activation = end.product, end.activation
    if activation is None:
        return gate * up
    name = activation_name(activation)
    if name is None or not _match(gate, up):
        return activation(gate) * up  # type: ignore[no-any-return]
    return gated_act(gate, up, name)


def gated_by(up: Tensor, end: Branch) -> Tensor:
    """Return ``up * activation(gate)``; evaluates ``up`` first, as that expression does."""
    return gated(end, up)


def packed_gated(x: Tensor, activation: Any) -> Tensor:
    """Return ``activation(gate) * up`` for the two halves of one tensor.

    The operator takes the tensor as it is, so that both halves have one gradient.
    """
    name = activation_name(activation)
    if name is None or x.shape[-1] % 2 or getattr(activation, "inplace", False):
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up  # type: ignore[no-any-return]
    return gated_act(x, None, name)
