"""Helpers of all test files: specs, cases, dropout masks, the fp64 oracle and eager PyTorch.

A new operator family needs no edit here: every ``fusedops.<family>.spec`` module is discovered.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.core.spec import Sample, Spec, only_sample

__all__ = [
    "ALL_SPECS",
    "DEVICE",
    "DTYPES",
    "EVERY_SPEC",
    "EXACT_SPECS",
    "HALF",
    "INTERPRETED",
    "KERNEL_PATH",
    "OFFSET",
    "SEED",
    "Case",
    "Mask",
    "call",
    "cases",
    "covers_the_schema",
    "dropout_mask",
    "eager",
    "fixed_draw",
    "gradients",
    "keep_mask",
    "of_families",
    "oracle",
    "philox",
    "random_like",
    "resolved",
    "tensors_of",
]

Tensors = dict[str, Tensor | None]
Function = Callable[[Tensors], tuple[Tensor, ...]]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_PATH = DEVICE.type == "cuda" or INTERPRETED
HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)

# Both 32-bit halves of both numbers are nonzero, so that tests detect a kernel that drops a half.
SEED, OFFSET = 0x0123_4567_89AB_CDEF, (3 << 32) + 20


def torch_version() -> tuple[int, ...]:
    """Major and minor version of PyTorch."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def triton_version() -> tuple[int, ...]:
    """Major and minor version of Triton."""
    from triton import __version__

    return tuple(map(int, __version__.split(".")[:2]))


def _discover() -> tuple[Spec, ...]:
    """The specs of all families."""
    specs: list[Spec] = []
    for family in pkgutil.iter_modules(fusedops.__path__):
        name = f"fusedops.{family.name}.spec"
        if family.ispkg and importlib.util.find_spec(name) is not None:
            specs += getattr(importlib.import_module(name), "SPECS", ())
    return tuple(specs)


EVERY_SPEC = _discover()
# Most tests are about floating-point arithmetic and gradients. Exact operators have neither, and
# are tested in test_exact.py.
ALL_SPECS = tuple(spec for spec in EVERY_SPEC if not spec.exact)
EXACT_SPECS = tuple(spec for spec in EVERY_SPEC if spec.exact)


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One sample of one operator in one dtype; `sample` builds its tensors."""

    spec: Spec
    dtype: torch.dtype
    name: str

    @property
    def id(self) -> str:
        return f"{self.spec.name}-{str(self.dtype).removeprefix('torch.')}-{self.name.replace(' ', '_')}"

    @property
    def is_wide(self) -> bool:
        """Whether the rows are wide enough to take long in the interpreter."""
        samples = _catalogue(self.spec.name, self.dtype)
        sample = next(sample for sample in samples if sample.name == self.name)
        return rows_of(self.spec, sample).shape[-1] > _ORDINARY

    def sample(self, device: torch.device = DEVICE) -> Sample:
        """The sample with its tensors on ``device``."""
        with only_sample(self.name):  # building the others would take most of a test's time
            result = next(
                sample
                for sample in self.spec.samples(device, self.dtype)
                if sample.name == self.name
            )
        # `only_sample` gives the other samples tensors on the meta device.
        assert all(t is None or t.device.type == device.type for t in result.tensors.values()), (
            "built as another sample"
        )
        return result


@cache
def _catalogue(spec_name: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    """The samples of a spec on the meta device."""
    spec = next(spec for spec in EVERY_SPEC if spec.name == spec_name)
    samples = tuple(spec.samples(torch.device("meta"), dtype))
    assert len({sample.name for sample in samples}) == len(samples), (
        f"{spec_name}: two samples of one name"
    )
    return samples


# Rows of at least `_WIDE` columns take seconds in the interpreter, which therefore tests them in
# two dtypes only, one of 16 bits and one of 32.
_WIDE = 8192
_WIDE_DTYPES = (torch.bfloat16, torch.float32)
# Cases with rows of more columns than this are chosen last for the short suite.
_ORDINARY = 1024


def _affordable(spec: Spec, sample: Sample, dtype: torch.dtype) -> bool:
    """Whether the case runs. The interpreter runs wide rows in two dtypes only."""
    if INTERPRETED and rows_of(spec, sample).shape[-1] >= _WIDE:
        return dtype in _WIDE_DTYPES
    return True


def covers_the_schema(spec: Spec, sample: Sample) -> bool:
    """Selects samples of one small size that have every argument absent and present.

    They also have every mode and mixture of dtypes.
    """
    tensors = [t for t in sample.tensors.values() if t is not None]
    if any(t.shape[-1] > 5000 for t in tensors):
        return False
    if tensors[0].dtype == torch.bfloat16:
        return len({t.dtype for t in tensors}) > 1 or "out_dtype" in sample.options
    few_absent = sum(t is None for t in sample.tensors.values()) in (0, 1, len(sample.tensors) - 1)
    is_shape = sample.name.startswith("shape ")
    return few_absent and (not is_shape or sample.name in ("shape 7x17", "shape 64"))


def cases(
    dtypes: Sequence[torch.dtype] = DTYPES,
    select: Callable[[Spec, Sample], bool] | None = None,
    specs: Sequence[Spec] = ALL_SPECS,
) -> pytest.MarkDecorator:
    """Parametrises a test over ``case``: the samples of all ``specs`` in all ``dtypes``.

    Args:
        dtypes: the dtypes of the samples.
        select: returns whether to take a sample, which is on the meta device: it has shapes,
            dtypes and options, but no values. By default all are taken.
        specs: the operators.
    """
    results = [
        Case(spec, dtype, sample.name)
        for spec in specs
        for dtype in dtypes
        for sample in _catalogue(spec.name, dtype)
        if _affordable(spec, sample, dtype)
        if select is None or select(spec, sample)
    ]
    assert results, "no sample was selected"
    return pytest.mark.parametrize("case", results, ids=[case.id for case in results])


def specs_of(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrises a test over ``spec``: the specs of these names, or all with ``--full``."""
    return pytest.mark.parametrize(
        "spec",
        [
            pytest.param(spec, id=spec.name, marks=[] if spec.name in names else pytest.mark.full)
            for spec in ALL_SPECS
        ],
    )


# Parametrises a test over one operator for each kind of kernel and of call. Slow tests use it for
# properties that all operators of a kind share: a CUDA graph takes a second.
of_families = specs_of(
    (
        "bias_act",
        "glu",
        "layer_norm",
        "bias_dropout_add_ln",
        "batched_layer_norm_tanh",
        "batched_layer_norm_tanh_sequence",
    )
)


def tensors_of(spec: Spec, sample: Sample) -> dict[str, Tensor]:
    """The sample's tensors that are not None, in the spec's order: the rows first."""
    return {
        name: tensor for name in spec.tensors if (tensor := sample.tensors.get(name)) is not None
    }


def rows_of(spec: Spec, sample: Sample) -> Tensor:
    """The tensor whose rows the operator processes: the first of the spec's."""
    return tensors_of(spec, sample)[spec.tensors[0]]


def random_like(tensors: Sequence[Tensor], seed: int = 7) -> list[Tensor]:
    """Random cotangents, drawn on the CPU so that all devices get the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        for t in tensors
    ]


# --- dropout --------------------------------------------------------------------------------------


def _mulhilo(multiplier: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers held in int64.

    The value is multiplied in halves of 16 bits, because the whole product overflows int64.
    """
    low, high = multiplier * (value & 0xFFFF), multiplier * (value >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int = 7) -> list[Tensor]:
    """Philox4x32 of Salmon et al. 2011 on 32-bit words held in int64 tensors.

    It follows the paper, not the kernels, so that tests compare two implementations.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = _mulhilo(0xD2511F53, c0)
        hi1, lo1 = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def drop_threshold(p: float) -> int:
    """Returns how many of the 65536 values of 16 random bits drop an element."""
    if p in (0.0, 1.0):
        return int(p * 65536)
    return min(max(round(p * 65536), 1), 65535)


def keep_mask(
    seed: int,
    offset: int,
    rows: int,
    cols: int,
    p: float,
    *,
    first_row: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The kernels' keep mask for ``rows`` rows from ``first_row`` on: ``(rows, cols)``, boolean.

    One Philox call draws 128 bits: 16 for each of eight neighbouring elements of a row.
    """
    groups = -(-cols // 8)
    start = first_row * groups
    group = torch.arange(start, start + rows * groups, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(group)
    counter = [
        group & 0xFFFFFFFF,
        group >> 32,
        zeros + (offset & 0xFFFFFFFF),
        zeros + (offset >> 32),
    ]
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), -1)
    lanes = torch.stack((words & 0xFFFF, words >> 16), -1)
    keep = rearrange(
        lanes >= drop_threshold(p),
        "(rows groups) words halves -> rows (groups words halves)",
        rows=rows,
        groups=groups,
    )
    return keep[:, :cols]


@dataclass(frozen=True)
class Mask:
    """The dropout mask of one call.

    Attributes:
        keep: boolean, True for elements that are not dropped; None without dropout.
        probability: the probability to keep an element.
    """

    keep: Tensor | None = None
    probability: float = 1.0

    def cpu(self) -> Mask:
        """The same mask on the CPU."""
        return self if self.keep is None else Mask(self.keep.cpu(), self.probability)

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """`F.dropout` with this mask.

        It rounds as PyTorch does: the mask is scaled first, in the input's dtype.
        """
        if self.keep is None:
            return input
        inverse = 1.0 / self.probability if self.probability > 0.0 else 0.0
        return input * (self.keep.to(input.dtype) * inverse)


def dropout_mask(spec: Spec, sample: Sample) -> Mask:
    """The mask that `call` draws for this sample.

    Kernels draw it by Philox. Without kernels `F.dropout` draws it.
    """
    if not spec.has_dropout or sample.p == 0.0:
        return Mask()
    rows = rows_of(spec, sample)
    if KERNEL_PATH:
        cols = rows.shape[-1]
        keep = keep_mask(
            SEED, OFFSET, rows.numel() // max(cols, 1), cols, sample.p, device=rows.device
        )
        return Mask(keep.view(rows.shape), 1.0 - drop_threshold(sample.p) / 65536)
    bias = sample.tensors.get("bias")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        dropped = F.dropout(torch.ones_like(rows if bias is None else rows + bias), sample.p)
    return Mask(dropped != 0.0, 1.0 - sample.p)


@contextmanager
def fixed_draw(seed: int = SEED, offset: int = OFFSET) -> Iterator[None]:
    """Within this context, every call with dropout draws the mask of `dropout_mask`."""
    if KERNEL_PATH:
        with mock.patch("fusedops.core.random.rng.draw", return_value=(seed, offset)):
            yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


# --- the operator, its oracle, and eager PyTorch --------------------------------------------------


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A single output as a tuple of one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def call(spec: Spec, sample: Sample) -> Function:
    """The operator under test as a function of its tensors.

    Each call draws the mask of `dropout_mask`.
    """

    def function(tensors: Tensors) -> tuple[Tensor, ...]:
        with fixed_draw():
            return as_tuple(spec.call(**{**sample.tensors, **tensors}, **sample.options))

    return function


def resolved(spec: Spec, sample: Sample) -> dict[str, Any]:
    """The sample's options, with the default ``eps`` of the sample's dtype filled in.

    The oracle upcasts the tensors, so it cannot derive this default from their dtype.
    """
    options = dict(sample.options)
    parameter = inspect.signature(spec.reference).parameters.get("eps")
    if parameter is not None and options.get("eps") is None:
        wide = any(tensor.dtype == torch.float64 for tensor in tensors_of(spec, sample).values())
        options["eps"] = torch.finfo(torch.float64 if wide else torch.float32).eps
        if parameter.default is not None:
            options["eps"] = parameter.default
    return options


def oracle(spec: Spec, sample: Sample, mask: Mask | None = None) -> Function:
    """The spec's reference as a function of tensors.

    It casts its inputs to fp64, so it computes and returns fp64.
    """
    mask = dropout_mask(spec, sample) if mask is None else mask
    options = resolved(spec, sample)
    options.pop("out_dtype", None)

    def function(tensors: Tensors) -> tuple[Tensor, ...]:
        wide = {
            name: None if t is None else t.double()
            for name, t in {**sample.tensors, **tensors}.items()
        }
        return spec.reference(**wide, **options, keep=mask.keep, keep_probability=mask.probability)

    return function


def eager(spec: Spec, sample: Sample, mask: Mask | None = None) -> Function:
    """The operator in `torch.nn.functional`, with the same dropout mask, as a function of tensors.

    Mixed dtypes (of tensors and ``out_dtype``) are promoted first, because PyTorch's norms refuse
    some mixtures and round others. This makes eager PyTorch more precise, and the comparison
    stricter. Options that `torch.nn.functional` lacks are implemented here.
    """
    mask = dropout_mask(spec, sample) if mask is None else mask
    options = resolved(spec, sample)
    out_dtype, offset = options.pop("out_dtype", None), options.pop("weight_offset", 0.0)
    returns_cast = options.pop("cast_dtype", None) is not None
    options.pop("save", None)
    rounding = options.pop("rounding", "once")
    patches = {"dropout": mask.dropout}
    if rounding != "once" or offset:
        patches["rms_norm"] = lambda z, shape, weight, eps: hugging_face_norm(
            z, weight, eps, rounding, offset
        )

    def function(tensors: Tensors) -> tuple[Tensor, ...]:
        tensors = {**sample.tensors, **tensors}
        present = [t for t in tensors.values() if t is not None]
        dtypes = {t.dtype for t in present} | ({out_dtype} if out_dtype else set())
        if len(dtypes) > 1 and rounding == "once":
            wide = torch.promote_types(*dtypes)
            tensors = {name: None if t is None else t.to(wide) for name, t in tensors.items()}
        with mock.patch.multiple(F, **patches):
            outputs = spec.eager(**tensors, **options)
        outputs = (outputs[0].to(out_dtype), *outputs[1:]) if out_dtype else outputs
        return (*outputs, outputs[0].clone()) if returns_cast else outputs

    return function


def hugging_face_norm(
    z: Tensor, weight: Tensor | None, eps: float, rounding: str, offset: float = 0.0
) -> Tensor:
    """RMSNorm with the roundings of Hugging Face's modules, from their documented formulas.

    All compute the statistics in fp32. Llama rounds the normalised rows to their own dtype, then
    multiplies by the weight. T5 rounds them to the weight's dtype if that has 16 bits, then
    multiplies. Gemma multiplies in fp32 and rounds last.
    """
    wide = z if z.dtype == torch.float64 else z.float()
    hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return hat.to(z.dtype)
    scale = weight + offset if offset else weight
    if rounding == "llama":
        return scale * hat.to(z.dtype)
    if rounding == "t5":
        return scale * (hat.to(weight.dtype) if weight.dtype in HALF else hat)
    return (hat * (offset + weight.to(wide.dtype))).to(z.dtype)


def gradients(
    function: Function,
    tensors: Tensors,
    cotangents: Sequence[Tensor],
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The gradients of ``function`` for ``names``, by default all tensors that are not None."""
    names = [name for name, t in tensors.items() if t is not None] if names is None else names
    leaves = {
        name: t if t is None else t.detach().requires_grad_(name in names)
        for name, t in tensors.items()
    }
    # Outputs that depend on none of ``names`` are dropped together with their cotangents.
    pairs = [
        (o, c.to(o)) for o, c in zip(function(leaves), cotangents, strict=True) if o.requires_grad
    ]
    outputs, cotangents = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, [leaves[name] for name in names], cotangents)
    return dict(zip(names, grads, strict=True))
