"""What the forwards of fused blocks are made of: the ends of residual branches, still to be finished.

A branch of a transformer ends in a linear layer and a dropout, and its sum with the residual stream is normalised. Each
module of the branch may leave its last steps to the block (`branch`, `linear`), which computes them in one operator
(`add_norm`, `add`, `activate`). A module leaves nothing to the block unless it is exactly of the known kind and has no
hooks. Otherwise it is called as PyTorch would call it, and only the rest is fused. So a child may be hooked, excluded,
parametrized, or replaced by an adapter, before or after the model is fused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..activations.ops import bias_act, gated_act
from ..core.activations import ActivationName
from ..core.compat import constant_when_traced
from ..norms.ops import bias_dropout_add
from .autocast import low_dtype, narrowed, normed
from .cast import Cast
from .hooks import can_call, has_hooks, is_conv1d, is_linear, original
from .spread import rows_of_norm

__all__ = ["Branch", "activate", "activated", "activation_name", "add", "add_norm", "add_norm_cast", "branch",
           "branches", "drop", "dropped", "finished", "first", "folded", "gated", "gated_by", "gelu_tanh", "handed",
           "in_place", "leaving", "like", "linear", "narrowed", "normed", "packed_gated", "rejoined", "replacing",
           "reshaped", "split", "waiting", "whole", "without"]  # fmt: skip


class Branch(NamedTuple):
    """``dropout(activation(product + bias))``, as far as it is computed."""

    product: Tensor
    bias: Tensor | None = None
    p: float = 0.0
    training: bool = False
    activation: Any = None

    @property
    def drops(self) -> bool:
        """Whether dropout is still to come."""
        return self.training and self.p > 0.0


# --- modules that leave something to their parent -------------------------------------------------------------------


def product(layer: Any, x: Tensor) -> Tensor:
    """What a linear layer computes before its bias is added."""
    cls = type(layer)
    return torch.matmul(x, layer.weight) if cls is not nn.Linear and is_conv1d(cls) else F.linear(x, layer.weight)


def linear(layer: Any, x: Tensor) -> Branch:
    """A linear layer's product, its bias left to the caller."""
    if type(layer) is Cast or (is_linear(layer) and not has_hooks(layer)):
        return Branch(product(layer, x), layer.bias)
    return Branch(layer(x))


def dropped(end: Branch, dropout: nn.Module) -> Branch:
    """A dropout behind the branch, left to the caller too."""
    if type(dropout) is nn.Dropout and not has_hooks(dropout) and not end.drops and _is_own(end, dropout):
        return Branch(end.product, end.bias, dropout.p, dropout.training, end.activation)
    if type(dropout) is nn.Identity and not has_hooks(dropout):
        return end
    return Branch(dropout(finished(end)))


def _is_own(end: Branch, module: Any) -> bool:
    """Whether the module's change in place may be left out: there is none, or nothing else reads its input."""
    return end.bias is not None or not getattr(module, "inplace", False)


def drop(end: Branch, p: float, *, training: bool) -> Branch:
    """A dropout with no module of its own behind the branch, left to the caller too."""
    if end.drops:
        return Branch(finished(end), None, p, training)
    return Branch(end.product, end.bias, p, training, end.activation)


def activated(end: Branch, activation: Any) -> Branch:
    """An activation behind a linear layer, left to the caller too."""
    if not callable(activation):  # which raises as it did
        return Branch(activation(finished(end)))
    if end.drops or end.activation is not None:
        return Branch(finished(end), activation=activation)
    return Branch(end.product, end.bias, activation=activation)


def waiting(x: Tensor, activation: Any) -> Branch:
    """An activation that waits for what its output is multiplied by, unless it is a module that has to be called."""
    known = activation_name(activation) and not getattr(activation, "inplace", False)
    return Branch(x, activation=activation) if known else Branch(activation(x))


def branch(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
    """A module's output, which its class may leave to the caller to finish, and its other outputs."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        return end, others or ()
    output = module(*args, **kwargs)
    if isinstance(output, tuple):
        return Branch(output[0]), output[1:]
    return Branch(output), ()


def leaving(module: Any, *args: Any, **kwargs: Any) -> Branch:
    """What a module returns, if that is a tensor: its class may leave the end of it to the caller."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        return end if others is None else Branch((finished(end), *others))  # type: ignore[arg-type]
    return Branch(module(*args, **kwargs))


def first(module: Any, *args: Any, **kwargs: Any) -> Branch:
    """The first of what a module returns."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        return Branch(finished(end)[0]) if others is None else end
    return Branch(module(*args, **kwargs)[0])


def branches(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """All that a module returns, the first of it as it may be left to the caller."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is not None:
            return (end, *others)
        output: Any = finished(end)
    else:
        output = module(*args, **kwargs)
    one, *others = output
    return (Branch(one), *others)


def handed(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """What a module returns, handed on: with the end of it left to the caller, if its class leaves it."""
    if can_call(module, "_fusedops_branch"):
        return module._fusedops_branch(*args, **kwargs)  # type: ignore[no-any-return]
    return whole(module(*args, **kwargs))


def split(module: Any, *args: Any, **kwargs: Any) -> tuple[Branch, Any]:
    """The first of what a module returns, as it may be left to the caller, and all the rest."""
    if can_call(module, "_fusedops_branch"):
        end, others = module._fusedops_branch(*args, **kwargs)
        if others is not None:
            return end, others
        output: Any = finished(end)
    else:
        output = module(*args, **kwargs)
    return Branch(output[0]), output[1:]


def rejoined(end: Branch, others: Any) -> tuple[Any, ...]:
    """What `split` took apart, finished."""
    return (finished(end), *others)


def whole(output: Any) -> tuple[Branch, tuple[Any, ...] | None]:
    """What a forward returns, with nothing left to do."""
    return (Branch(output[0]), output[1:]) if type(output) is tuple and output else (Branch(output), None)


class _Replacing:
    """A module as its own forward sees it, but with other attributes in some places; what is written to it arrives."""

    def __init__(self, module: nn.Module, instead: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():  # which does not look through __dict__
            self.__dict__.update(module._modules)  # found at once, not through `__getattr__`
        object.__setattr__(self, "_module", module)
        for name, value in instead.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The module's class, for ``isinstance``; in traced code, where a bare proxy is made first, the proxy's own."""
        return type(self.__dict__.get("_module", self))

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # a copy that is being made has none yet
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
    """The module as its own forward is to see it: with some of its children replaced, or as it is."""
    return _Replacing(module, instead) if instead else module


def without(module: Any, output: str, dropout: str | None, instead: dict[str, Any], *args: Any,
            **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    """The module's own forward, but for its last steps: the linear layer ``output``'s bias, and ``dropout``.

    For modules without hooks whose forward is known to end in them (see `branch`). ``instead`` has
    replacements of children.
    """
    layer, last = module._modules[output], None if dropout is None else module._modules[dropout]
    instead = dict(instead)
    bias, p, training = None, 0.0, False
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


# --- what a block does with them ------------------------------------------------------------------------------------


def folded(end: Branch, residual: Tensor | None = None) -> Tensor | None:
    """The bias in a dtype that leaves the sum's dtype as it is where autocast made the product narrower."""
    bias, dtype = end.bias, end.product.dtype
    if bias is None or bias.dtype == dtype or (residual is not None and residual.dtype == bias.dtype):
        return bias
    return bias.to(dtype)


def finished(end: Branch) -> Tensor:
    """The branch with all that was left."""
    if end.activation is not None:
        return activate(Branch(end.product, end.bias), end.activation, end.p, training=end.training)
    if end.bias is None and not end.drops:
        return end.product
    return bias_dropout_add(end.product, folded(end), None, p=end.p, training=end.training)


def _match(x: Any, residual: Any) -> bool:
    """Whether both are tensors of one shape; anything else is PyTorch's to add."""
    return isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape


def in_place(end: Branch, residual: Any) -> tuple[Branch, Any]:
    """``branch += residual``: the branch, and the residual if it is still to be added, or None."""
    new = (end.bias is not None or end.drops) and end.activation is None and _match(end.product, residual)
    if new and torch.promote_types(end.product.dtype, residual.dtype) == end.product.dtype:
        return end, residual
    z = finished(end)
    z += residual
    return Branch(z), None


def add(end: Branch, residual: Tensor | None, *, first: bool = False) -> Tensor:
    """The branch added to the residual stream. ``first``: it is the left operand, which matters to other types."""
    if residual is None:  # it has been
        return finished(end)
    if (end.bias is None and not end.drops) or end.activation is not None or not _match(end.product, residual):
        z = finished(end)
        return z + residual if first else residual + z
    return bias_dropout_add(end.product, folded(end, residual), residual, p=end.p, training=end.training)


def add_norm(end: Branch, residual: Tensor | None, norm: Any, *modules: nn.Module, return_sum: bool = True) -> Any:
    """``norm(branch + residual)``, and the sum as well unless told otherwise.

    Where the norm's output goes to ``modules`` and nowhere else, it is in the dtype that they take under autocast.
    """
    if end.activation is not None:
        end = Branch(finished(end))
    if residual is not None and can_call(norm, "_fusedops_add_norm") and _match(end.product, residual):
        return norm._fusedops_add_norm(end, residual, return_sum, low_dtype(residual, modules))
    if residual is not None and end.bias is None and _match(end.product, residual):
        rows = rows_of_norm(norm)
        taken = None if rows is None else rows.take(end.product, residual)
        # A plain tensor's mask would be that of this rank's rows alone.
        if rows is not None and taken is not None and (taken[1] is residual or not end.drops):
            return _add_norm_of_rows(end, residual, norm, taken, rows.to_local, return_sum)
    z = add(end, residual)
    return (norm(z), z) if return_sum else norm(z)


def _add_norm_of_rows(end: Branch, residual: Tensor, norm: Any, rows: Any, to_local: bool, return_sum: bool) -> Any:
    """`add_norm` of a norm under `SequenceParallel`, of rows that are placed as its hooks would place the sum."""
    product, stream = rows
    found = norm._fusedops_add_norm(end._replace(product=product), stream, return_sum, None)
    y, *z = found if return_sum else (found,)
    y = y.to_local() if to_local else y
    return (y, z[0] if stream is residual else z[0].to_local()) if z else y


def add_norm_cast(end: Branch, residual: Tensor | None, norm: Any, *modules: nn.Module) -> tuple[Tensor, Tensor]:
    """``norm(branch + residual)`` for a post-norm block: in the dtype for ``modules``, and for the residual stream.

    Under autocast the first is a low-precision copy of the second, from the same pass. The caller passes it to ``modules``
    only.
    """
    low = None if residual is None else low_dtype(residual, modules)
    if residual is None or low is None or end.activation is not None or not can_call(norm, "_fusedops_add_norm"):
        y = add_norm(end, residual, norm, return_sum=False)
        return y, y
    if not _match(end.product, residual):
        y = add_norm(end, residual, norm, return_sum=False)
        return y, y
    y = norm._fusedops_add_norm(end, residual, False, low, with_cast=True)
    return (y[1], y[0]) if isinstance(y, tuple) else (y, y)


def gelu_tanh(x: Tensor) -> Tensor:
    """PyTorch's GELU, by tanh."""
    return F.gelu(x, approximate="tanh")


# Activations that have one kernel in PyTorch already, so that nothing is gained by fusing them alone.
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
    """The operators' name of an activation, which is a module or a function; None if they have none."""
    if not isinstance(activation, nn.Module):
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
    """``dropout(activation(branch))``."""
    plain = end.bias is None and not (training and p > 0.0)
    name = None if plain or end.drops else activation_name(activation)
    if name is None:
        y: Tensor = activation(finished(end))
        return F.dropout(y, p, training) if training and p > 0.0 else y
    return bias_act(end.product, folded(end), name, p=p, training=training)


def like(end: Branch, residual: Tensor | None) -> Tensor:
    """A tensor of the shape that their sum has."""
    return residual if residual is not None and _match(end.product, residual) else add(end._replace(p=0.0), residual)


def reshaped(end: Branch, residual: Tensor | None, *shape: Any) -> tuple[Branch, Tensor | None]:
    """Both, in another shape."""
    if residual is None or not _match(end.product, residual):
        return Branch(add(end, residual).reshape(*shape)), None
    product = end.product.reshape(*shape)
    if end.bias is not None and product.shape[-1:] != end.product.shape[-1:]:
        return Branch(add(end, residual).reshape(*shape)), None
    return end._replace(product=product), residual.reshape(*shape)


def gated(end: Branch, up: Tensor) -> Tensor:
    """``activation(gate) * up``, of what `waiting` made of the gate."""
    gate, activation = end.product, end.activation
    if activation is None:
        return gate * up
    name = activation_name(activation)
    if name is None or not _match(gate, up):
        return activation(gate) * up  # type: ignore[no-any-return]
    return gated_act(gate, up, name)


def gated_by(up: Tensor, end: Branch) -> Tensor:
    """``up * activation(gate)``, where ``up`` is computed first."""
    return gated(end, up)


def packed_gated(x: Tensor, activation: Any) -> Tensor:
    """``activation(gate) * up`` of the two halves of one tensor; packed, they have one gradient."""
    name = activation_name(activation)
    if name is None or x.shape[-1] % 2 or getattr(activation, "inplace", False):
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up  # type: ignore[no-any-return]
    return gated_act(x, None, name)
