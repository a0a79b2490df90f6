"""The slices family's samples, bad samples, bytes moved and benchmark shapes.

The functional has two specs: for slices in one tensor, and for slices in separate tensors. The
separate tensors are named ``slice_0``, ``slice_1`` and so on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import ACTIVATIONS
from ..core.calls.operators import site_of
from ..core.configs.tuning_key import Grid
from ..core.launches.tables import store_variant
from ..core.spec import BadSample, Maker, Sample, Shape, Spec, Sweep
from . import configs, launching, ops, reference
from .operator import SLICES
from .site import SliceConstants

__all__ = ["GRID", "SPECS", "compiled_plans"]

_HALF = (torch.float16, torch.bfloat16)
# The names of separate slices, the most that a sample has.
_SLICES = tuple(f"slice_{k}" for k in range(128))

# The widths of slices, again and again, in rows of more than 1024 columns.
_CYCLE = (1024, 1000, 1024, 700)


def _widths(cols: int) -> tuple[int, ...]:
    """Returns unequal widths that add up to ``cols``: up to three, and more past 1024 columns."""
    if cols <= 1024:
        first, second = cols // 5, cols // 3
        return tuple(filter(None, (first, second, cols - first - second)))
    widths = []
    for width in itertools.cycle(_CYCLE):
        widths.append(min(width, cols))
        cols -= widths[-1]
        if not cols:
            break
    return tuple(widths)


def _embeddings(cols: int) -> tuple[int, ...]:
    """Returns multiples of 8 from 16 to 256 that add up to ``cols``, a multiple of 16."""
    widths: list[int] = []
    # A linear congruential generator: the widths are the same in every version of Python.
    state = 7
    while cols > 512:
        state = (state * 1103515245 + 12345) % 2**31
        widths.append(16 + 8 * (state // 65536 % 31))
        cols -= widths[-1]
    if cols > 256:
        return (*widths, cols // 2, cols - cols // 2)
    return (*widths, cols)


def _widths_of_name(name: str) -> tuple[int, ...]:
    """Returns the unequal widths that a name stands for.

    A name is a letter and a number:

        R4096    widths of embeddings that add up to 4096
        D4096    random widths that add up to 4096, another set for each number
        W96      widths up to 96 with a common factor
        O96      widths up to 96 without a common factor
    """
    letter, number = name[0], int(name[1:])
    if letter == "R":
        return _embeddings(number)
    if letter == "D":
        return _random_widths(number)
    largest_factor = number & -number  # the largest power of two that divides the number
    return _widths_up_to(number, step=min(largest_factor, 8) if letter == "W" else 0)


def _random_widths(cols: int) -> tuple[int, ...]:
    """Returns widths from 1 to 256 that add up to ``cols``, which is also the seed."""
    widths: list[int] = []
    generator = random.Random(cols)
    while cols:
        widths.append(min(generator.randint(1, 256), cols))
        cols -= widths[-1]
    return tuple(widths)


def _widths_up_to(widest: int, step: int) -> tuple[int, ...]:
    """Returns widths up to ``widest`` that add up to about 4096; the first is ``widest``.

    The other widths are multiples of ``step``, or odd if ``step`` is 0.
    """
    widths = [widest]
    eighths = itertools.cycle((6, 4, 7, 5, 3))
    while sum(widths) < 4096 and len(widths) < 64:
        width = widest * next(eighths) // 8
        if step:
            widths.append(max(width // step * step, step))
        else:
            widths.append(width | 1)
    return tuple(widths)


# --- the reference implementation, and eager code -------------------------------------------------


def _parts(parameter: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Returns a parameter's part for each slice; all slices share one as wide as a slice."""
    if parameter is None:
        return [None] * len(sizes)
    if parameter.dim() == 1 and parameter.shape[0] != sum(sizes):
        return [parameter] * len(sizes)
    return list(parameter.reshape(-1).split(list(sizes)))


def _apply_to_each(
    rule: Callable[..., Tensor],
    slices: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
) -> list[Tensor]:
    """Returns ``rule(slice, weight, bias)`` of each slice, with its part of the parameters."""
    sizes = [t.shape[-1] for t in slices]
    weights, biases = _parts(weight, sizes), _parts(bias, sizes)
    return [rule(x, w, b) for x, w, b in zip(slices, weights, biases, strict=True)]


def _one_by_one(
    rule: Callable[..., Tensor],
    slices: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sizes: Sequence[int] | None,
    concat: bool,
) -> tuple[Tensor]:
    """Returns the operator's output for slices in one tensor, computed slice by slice."""
    if sizes is not None:
        outputs = _apply_to_each(rule, slices.split(list(sizes), -1), weight, bias)
        return (torch.cat(outputs, -1),)
    outputs = _apply_to_each(rule, slices.unbind(-2), weight, bias)
    return (torch.cat(outputs, -1) if concat else torch.stack(outputs, -2),)


def _formula(activation: str) -> Callable[[Tensor], Tensor]:
    return ACTIVATIONS["identity" if activation == "none" else activation].formula


def _by_reference(activation: str, eps: float) -> Callable[..., Tensor]:
    """Returns the operator on one slice, by the reference implementation."""
    formula = _formula(activation)
    return lambda x, w, b: reference.forward(x, w, b, eps, formula)


def _by_functional(activation: str, eps: float) -> Callable[..., Tensor]:
    """Returns the operator on one slice, by `torch.nn.functional`."""
    formula = _formula(activation)
    return lambda x, w, b: formula(F.layer_norm(x, x.shape[-1:], w, b, eps))


def _one(
    make: Callable[[str, float], Callable[..., Tensor]],
    slices: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    sizes: Sequence[int] | None = None,
    activation: str = "tanh",
    concat: bool = False,
    keep: None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor]:
    """Returns the expected output for slices in one tensor.

    ``make`` is `_by_reference` or `_by_functional`.
    """
    return _one_by_one(make(activation, eps), slices, weight, bias, sizes, concat)


def _combined(
    slices: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor]:
    """Returns the output with all slices of equal width in one norm, and the affine after it."""
    if sizes is not None:
        return _one(_by_functional, slices, weight, bias, eps, sizes=sizes)
    y = F.layer_norm(slices, slices.shape[-1:], None, None, eps)
    y = y if weight is None else y * weight
    return (torch.tanh(y if bias is None else y + bias),)


def _slices_in(tensors: dict[str, Any]) -> list[Any]:
    """Returns the separate slices among tensors, in their order."""
    return [tensors[name] for name in _SLICES if tensors.get(name) is not None]


def _call_sequence(
    weight: Tensor | None = None, bias: Tensor | None = None, **slices_and_options: Any
) -> Any:
    options = {
        name: value for name, value in slices_and_options.items() if not name.startswith("slice_")
    }
    slices = _slices_in(slices_and_options)
    return ops.batched_layer_norm_act(slices, weight, bias, **options)


def _sequence(
    make: Callable[[str, float], Callable[..., Tensor]],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "tanh",
    concat: bool = False,
    keep: None = None,
    keep_probability: float = 1.0,
    **slices: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the expected outputs for separate slices.

    ``make`` is `_by_reference` or `_by_functional`.
    """
    outputs = _apply_to_each(make(activation, eps), _slices_in(slices), weight, bias)
    return (torch.cat(outputs, -1),) if concat else tuple(outputs)


# --- samples --------------------------------------------------------------------------------------

_SHAPES = [
    (6, 64),
    (5, 1),
    (1, 3),
    (7, 17),
    (4, 127),
    (3, 1000),
    (2, 3, 96),
    (129, 40),
    (1, 1024),
    (64,),
    (2, 20000),
]


def _tensors(
    make: Maker,
    shape: Sequence[int],
    sizes: Sequence[int] | None,
    *,
    separate: bool,
    present: str,
    param_shape: tuple[int, ...],
    param_dtype: torch.dtype | None,
) -> dict[str, Tensor | None]:
    """Returns the tensors of a sample.

    ``present`` has a "w" if there is a weight, and a "b" if there is a bias.
    """
    tensors: dict[str, Tensor | None] = {"slices": make(*shape, shift=0.5, scale=1.5)}
    if separate:
        widths = sizes or (shape[-1],) * shape[-2]
        batch = shape[:-1] if sizes else shape[:-2]
        tensors = {
            f"slice_{k}": make(*batch, width, shift=0.5, scale=1.5)
            for k, width in enumerate(widths)
        }
    tensors["weight"] = make(*param_shape, dtype=param_dtype) if "w" in present else None
    tensors["bias"] = make(*param_shape, dtype=param_dtype) if "b" in present else None
    return tensors


def _samples(separate: bool) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        def sample(
            name: str,
            shape: tuple[int, ...],
            sizes: Sequence[int] | None = None,
            present: str = "wb",
            param_shape: tuple[int, ...] | None = None,
            param_dtype: torch.dtype | None = None,
            **options: Any,
        ) -> Sample:
            make = Maker(name, device, dtype)
            flat = (sum(sizes),) if sizes else shape[-2:]
            tensors = _tensors(
                make,
                shape,
                sizes,
                separate=separate,
                present=present,
                param_shape=param_shape or flat,
                param_dtype=param_dtype,
            )
            if sizes and not separate:
                options = {"sizes": tuple(sizes), **options}
            return Sample(name, tensors, options)

        for shape in _SHAPES:
            yield sample("shape " + "x".join(map(str, shape)), shape, _widths(shape[-1]))
        for shape in (
            (6, 5, 8),
            (3, 33, 4),
            (70, 3, 32),
            (2, 3, 4, 24),
            (5, 20, 1),
            (4, 7, 3),
            (3, 1, 40),
        ):
            yield sample("equal " + "x".join(map(str, shape)), shape)
        if not separate:
            yield sample("equal 2x1000x3", (2, 1000, 3))
            # The last 48 columns of very wide rows. The distance between rows is so large that
            # offsets within a tile take 64 bits: see `launching._FAR`.
            wide = sample("rows far apart", (5, 70016), (70000, 16))
            columns = {
                name: None if t is None else t[..., -48:] for name, t in wide.tensors.items()
            }
            yield Sample(wide.name, columns, {"sizes": (24, 8, 16)})
        yield sample("from 1 to 1024", (5, 1200), (3, 128, 1, 1024, 44))
        yield sample("ten widths", (9, 220), (16, 4, 32, 17, 64, 1, 3, 7, 64, 12))
        yield sample("multiples of eight", (40, 136), (16, 8, 64, 8, 40))
        for present in ("", "w", "b"):
            name = f"parameters {present or 'none'}"
            yield sample(name, (9, 40), (9, 31), present=present)
            yield sample(f"{name}, equal", (9, 5, 8), present=present)
        for present, width in (("w", 8), ("b", 8), ("wb", 24)):
            yield sample(
                f"shared parameters {present}",
                (40, 5, width),
                present=present,
                param_shape=(width,),
            )
        yield sample("flat parameters", (4, 5, 8), param_shape=(40,))
        yield sample("concatenated", (6, 44), (12, 32), concat=True)
        yield sample("concatenated, equal", (6, 4, 24), concat=True)
        yield sample("large eps", (5, 33), (11, 22), eps=0.3)
        for activation in (*ACTIVATIONS, "none"):
            if activation != "tanh":
                yield sample(f"activation {activation}", (6, 44), (12, 32), activation=activation)
        if dtype in _HALF:
            yield sample("fp32 parameters", (6, 80), (16, 24, 40), param_dtype=torch.float32)

    return samples


def _bad_samples(separate: bool) -> Callable[[torch.device], Iterator[BadSample]]:
    def bad_samples(device: torch.device) -> Iterator[BadSample]:
        randn = partial(torch.randn, device=device)

        def bad(
            name: str,
            error: type[Exception],
            match: str,
            *,
            options: dict[str, Any] | None = None,
            **tensors: Any,
        ) -> BadSample:
            good: dict[str, Any] = {"slices": randn(4, 8)}
            if separate:
                good = {"slice_0": randn(4, 1), "slice_1": randn(4, 2), "slice_2": randn(4, 5)}
            good |= {"weight": randn(8), "bias": randn(8)}
            good_options: dict[str, Any] = {} if separate else {"sizes": (1, 2, 5)}
            return BadSample(
                name, {**good, **tensors}, {**good_options, **(options or {})}, error, match
            )

        first, first_in_message, width = "slices", "slices", 8
        if separate:
            first, first_in_message, width = "slice_0", "slice 0", 1
        integers: dict[str, Any] = {first: torch.ones(4, width, dtype=torch.int64, device=device)}
        yield bad(
            "integer slices",
            TypeError,
            rf"{first_in_message} has dtype torch\.int64",
            options=None,
            **integers,
        )
        yield bad(
            "weight of another width",
            ValueError,
            r"weight has shape \(9,\), expected \(8,\) for 3 slices",
            weight=randn(9),
        )
        yield bad(
            "bias for one slice",
            ValueError,
            r"bias has shape \(5,\), expected \(8,\)",
            bias=randn(5),
        )
        yield bad(
            "integer weight",
            TypeError,
            r"weight has dtype torch\.int32",
            weight=torch.ones(8, dtype=torch.int32, device=device),
        )
        yield bad(
            "weight on another device",
            RuntimeError,
            "weight is on meta, expected",
            weight=torch.randn(8, device="meta"),
        )
        yield bad(
            "negative eps", ValueError, "eps must be at least 0, got -1.0", options={"eps": -1.0}
        )
        yield bad(
            "unknown activation",
            ValueError,
            "activation must be one of .*, got 'tan'",
            options={"activation": "tan"},
        )
        yield bad(
            "sizes no numbers",
            TypeError,
            r"sizes\[1\] must be an int, got str",
            options={"sizes": (1, "2", 5)},
        )
        yield bad(
            "a width of zero",
            ValueError,
            r"sizes\[1\] must be at least 1, got 0",
            options={"sizes": (1, 0, 7)},
        )
        if not separate:
            yield bad(
                "sizes that do not add up",
                ValueError,
                r"sizes of 3 slices add up to 9, but slices has shape \(4, 8\)",
                options={"sizes": (1, 2, 6)},
            )
            yield bad(
                "sizes forgotten",
                ValueError,
                r"slices has shape \(4, 8\), expected sizes with it",
                options={"sizes": None},
            )
            yield bad(
                "no sizes", ValueError, "sizes must name at least one slice", options={"sizes": ()}
            )
            yield bad(
                "one dimension and no sizes",
                ValueError,
                r"slices has shape \(8,\), expected \(\*, K, D\)",
                slices=randn(8),
                options={"sizes": None},
            )
            yield bad(
                "slices of no width",
                ValueError,
                r"slices has shape \(4, 3, 0\), expected",
                slices=randn(4, 3, 0),
                options={"sizes": None},
            )
            yield bad(
                "no tensor",
                TypeError,
                "slices must be a torch.Tensor or a sequence of them, got float",
                slices=1.0,
            )
            yield bad(
                "empty sequence",
                ValueError,
                "slices must hold at least one tensor",
                slices=[],
                options={"sizes": None},
            )
            yield bad(
                "a list of numbers",
                TypeError,
                r"slice 0 must be a torch\.Tensor, got float",
                slices=[1.0],
                options={"sizes": None},
            )
            return
        yield bad(
            "another batch size",
            ValueError,
            r"slice 1 has shape \(5, 2\), but slice 0 has \(4, 1\)",
            slice_1=randn(5, 2),
        )
        yield bad(
            "another dtype",
            TypeError,
            r"slice 2 has dtype torch\.float16, expected torch\.float32 as slice 0",
            slice_2=randn(4, 5).half(),
        )
        yield bad(
            "another device",
            RuntimeError,
            "slice 2 is on meta, expected",
            slice_2=torch.randn(4, 5, device="meta"),
        )
        yield bad(
            "a scalar", ValueError, r"slice 1 has shape \(\), expected \(\*, D\)", slice_1=randn(())
        )
        yield bad(
            "a slice of no width", ValueError, r"slice 1 has shape \(4, 0\)", slice_1=randn(4, 0)
        )
        yield bad(
            "no tensor", TypeError, r"slice 1 must be a torch\.Tensor, got float", slice_1=1.0
        )
        yield bad(
            "sizes that are not the slices'",
            ValueError,
            r"slice 1 has shape \(4, 2\), but sizes\[1\] is 3",
            options={"sizes": (1, 3, 4)},
        )
        yield bad(
            "fewer sizes than slices",
            ValueError,
            "sizes names 2 slices, but there are 3",
            options={"sizes": (1, 7)},
        )

    return bad_samples


def _benchmark(separate: bool) -> Callable[[Shape, torch.dtype, torch.device], Sample]:
    def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device) -> Sample:
        make = partial(torch.randn, dtype=dtype, device=device)
        # (rows, slices, width), (rows, columns), or (rows, name): see `_widths_of_name`.
        rows, cols = shape[0], shape[-1]
        assert isinstance(rows, int)
        name = "x".join(map(str, shape))
        if len(shape) == 3:
            count = shape[1]
            assert isinstance(count, int) and isinstance(cols, int)
            tensors: dict[str, Tensor | None] = {"slices": make(rows, count, cols)}
            if separate:
                tensors = {f"slice_{k}": make(rows, cols) for k in range(count)}
            return Sample(name, tensors | {"weight": make(count, cols), "bias": make(count, cols)})
        sizes = _widths(cols) if isinstance(cols, int) else _widths_of_name(cols)
        total = sum(sizes)
        tensors = {"slices": make(rows, total)}
        if separate:
            tensors = {f"slice_{k}": make(rows, size) for k, size in enumerate(sizes)}
        return Sample(
            name,
            tensors | {"weight": make(total), "bias": make(total)},
            {} if separate else {"sizes": sizes},
        )

    return benchmark


_BUCKET = 3  # of the number of rows: 4,096 to 65,535


def compiled_plans(
    cols: int, dtype: torch.dtype, other: torch.dtype | None = None
) -> dict[str, Callable[[], object]]:
    """Returns functions that build all variants of the operator, by name.

    The widest slice has ``cols`` columns. If the parameters have another dtype, ``other``, only the
    variants with the most traffic are returned. There are variants for one width of each number of
    warps, and for 96 columns, which are in three parts. 768 stands for 96. For other widths the
    result is empty.
    """
    if other is not None and cols == 8192:
        cols = configs.widest(dtype.itemsize)
    if cols == 768:
        cols = 96
    if cols not in (17, 64, 96, 256, 1024, 2048, 4096) or cols > configs.widest(dtype.itemsize):
        return {}

    # ``dims`` is the form of the slices, as in `SliceConstants`.
    def build(
        sizes: tuple[int, ...],
        *,
        dims: int,
        shared: bool = False,
        concat: bool = False,
        small_offsets: bool = True,
        unused: bool = False,
    ) -> None:
        constants = SliceConstants(
            op="compiled",
            sizes=sizes,
            dims=dims,
            concat=concat,
            eps=1e-5,
            activation="tanh",
            shared=shared,
        )
        parameters = other or dtype
        dtypes = (parameters, parameters, dtype)
        total = sum(sizes)
        site = site_of(SLICES, constants, dtypes, total, device_index=-1, dropout=False, saves=True)
        has_one_cotangent = dims > 0 or concat
        # 0 for one gradient of the outputs; for several 1, or 2 if some are absent.
        separate = 0 if has_one_cotangent else 1 + unused
        device = torch.device("cpu")
        launching._plan_forward(
            site,
            aligned=True,
            strided=False,
            small_offsets=small_offsets,
            bucket=_BUCKET,
            device=device,
        )
        launching._plan_backward(
            site,
            needs=(True, True, True),
            dy=dtype,
            separate=separate,
            aligned=True,
            strided=False,
            dy_strided=False,
            small_offsets=small_offsets,
            bucket=_BUCKET,
            device=device,
        )

    equal = (cols,) * 20
    # Multiples of eight, as embeddings usually are.
    eights = max(cols // 8, 1)
    unequal = tuple(8 * max(part, 1) for part in (eights // 5, eights, eights // 2, eights))
    plans: dict[str, Callable[[], object]] = {
        "slices of one width": partial(build, equal, dims=2),
        "slices of several widths": partial(build, unequal, dims=1),
    }
    if other is not None:
        return plans
    if cols == 96:
        plans["slices of one odd width"] = partial(build, (cols + 1,) * 20, dims=2)
    if cols in (17, 256) or (cols == 1024 and dtype.itemsize == 2):
        odd = tuple(width | 1 for width in (cols // 5, cols - 2, cols // 3, cols // 2))
        plans["slices without a common factor"] = partial(build, odd, dims=1)
    return plans | {
        "slices that share parameters": partial(build, equal, dims=2, shared=True),
        "rows far from each other": partial(build, equal, dims=2, small_offsets=False),
        "separate slices": partial(build, equal, dims=0),
        "separate slices, some unused": partial(build, unequal, dims=0, unused=True),
        "a table of addresses": partial(store_variant, device_index=-1),
        "separate slices of several widths": partial(build, unequal, dims=0),
        "slices joined": partial(build, unequal, dims=0, concat=True),
    }


_BF16, _FP32 = torch.bfloat16, torch.float32


def _slices_of(width: int) -> tuple[int, int]:
    """Returns the tail of slices of one width, about 4096 columns in all, in at most 64 slices."""
    return max(1, min(64, 4096 // width)), width


_EQUAL = (*(_slices_of(1 << exponent) for exponent in range(3, 13)), (64, 48), (42, 96), (21, 192))
_MIXED = (("R4096",), ("W32",), ("W64",), ("W256",), ("W1024",), ("O64",), ("O256",), ("O512",))
GRID = Grid(
    tails=(*_EQUAL, *_MIXED),
    coarse=((64, 64), (16, 256), ("R4096",)),
    buckets=(1, 2, 3),
    tails_of=lambda cols: (_slices_of(cols), (f"W{cols}",), (f"O{cols}",)),
)

SPECS = (
    Spec(
        name="batched_layer_norm_tanh",
        functional="batched_layer_norm_act",
        call=ops.batched_layer_norm_act,
        reference=partial(_one, _by_reference),
        eager=partial(_one, _by_functional),
        tensors=("slices", "weight", "bias"),
        has_dropout=False,
        samples=_samples(separate=False),
        bad_samples=_bad_samples(separate=False),
        benchmark=_benchmark(separate=False),
        passes={"fwd": 2, "fwd_bwd": 5},
        launches=(1, 2),
        saved=0,
        shapes=(
            ((4096, 16, 128), _FP32),
            ((4096, 64, 64), _BF16),
            ((8192, 200, 64), _BF16),
            ((1024, 16, 64), _FP32),
            ((4096, "R4096"), _BF16),
        ),
        sweep=Sweep(
            hidden=tuple((64, 1 << exponent) for exponent in range(4, 11)),
            slices=((1, 64), (4, 64), (16, 64), (64, 64), (256, 64)),
            rows=((64, 64),),
            widths=tuple((26, cols) for cols in (48, 80, 96, 112, 160, 224)),
            ragged=("R4096", *(f"D{cols}" for cols in range(8001, 12002, 444))),
        ),
        combined=_combined,
    ),
    Spec(
        name="batched_layer_norm_tanh_sequence",
        call=_call_sequence,
        reference=partial(_sequence, _by_reference),
        eager=partial(_sequence, _by_functional),
        tensors=(*_SLICES, "weight", "bias"),
        has_dropout=False,
        samples=_samples(separate=True),
        bad_samples=_bad_samples(separate=True),
        benchmark=_benchmark(separate=True),
        passes={"fwd": 2, "fwd_bwd": 5},
        launches=(1, 2),
        saved=0,
        shapes=(((4096, 64, 64), _BF16), ((256, 64, 64), _BF16)),
        # torch.compile unrolls the slices: with more of them it takes minutes per shape.
        sweep=Sweep(
            hidden=((16, 16), (16, 64), (16, 256), (16, 1024)),
            slices=((1, 64), (4, 64), (16, 64)),
            rows=((16, 64),),
        ),
        functional="batched_layer_norm_act",
    ),
)
