"""`fusedops.nn.Rowwise`, the text of `explain`, and traced functions on disk."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import re
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fusedops
import rowwise_operators
from fusedops.compiler import grammar, programs, storing
from fusedops.compiler.codegen import backward_kernels, forward_kernels
from fusedops.compiler.errors import NotRowwiseError
from fusedops.compiler.tracing import trace
from fusedops.core.configs import cache
from fusedops.core.launches import launch
from rowwise_functions import FUNCTIONS, named
from support import DEVICE, KERNEL_PATH

kernels = pytest.mark.kernels


def scaled_norm(
    x: Tensor, weight: Tensor, scale: float = 1.0, p: float = 0.5, training: bool = True
) -> Tensor:
    return F.rms_norm(F.dropout(x, p, training), x.shape[-1:], weight, 1e-6) * scale


def _module() -> fusedops.nn.Rowwise:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, generator=generator)
    return fusedops.nn.Rowwise(
        fusedops.rowwise(scaled_norm, strict=True), weight=weight, scale=2.0
    ).to(DEVICE)


def _rows() -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(4)).to(DEVICE)


# --- modules --------------------------------------------------------------------------------------


def test_module_has_parameters_and_a_training_mode() -> None:
    module, x = _module(), _rows()
    assert list(module.state_dict()) == ["weight"]
    assert repr(module) == "Rowwise(scaled_norm, weight=(24,), scale=2.0)"
    assert (module(x) == 0.0).any()  # in training
    module.eval()
    with launch.record() as launched:
        y = module(x)
    assert bool(launched) == KERNEL_PATH
    torch.testing.assert_close(y, scaled_norm(x, module.weight, 2.0, training=False))
    y.sum().backward()
    assert module.weight.grad is not None
    # An argument may be passed by the name that it has in the function.
    assert torch.equal(module(x, p=0.9), y)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_have_separate_parameters(copied: object) -> None:
    module, x = _module().eval(), _rows()
    other = copied(module)  # type: ignore[operator]
    assert torch.equal(other(x), module(x))
    assert other.weight is not module.weight
    with torch.no_grad():
        other.weight.mul_(2.0)
    assert not torch.equal(other(x), module(x))


def test_parametrization_of_a_weight_is_applied() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    module, x = _module().eval(), _rows()
    before = module(x)
    parametrize.register_parametrization(module, "weight", Twice())
    torch.testing.assert_close(module(x), 2.0 * before)


@kernels
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_captured_norm_that_fuse_model_replaced_is_part_of_the_kernel(
    make: type[nn.Module],
) -> None:
    """Forward and backward stay one kernel each, as with PyTorch's norm."""
    norm = make(24).to(DEVICE)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    function = fusedops.rowwise(lambda x: norm(F.silu(x)) + x, strict=True)
    x = torch.randn(5, 24, device=DEVICE, requires_grad=True)
    expected = norm(F.silu(x)) + x
    leaves = [x, *norm.parameters()]
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    model = nn.Sequential(norm)
    fusedops.fuse_model(model)
    norm = model[0]
    leaves = [x, *norm.parameters()]
    with launch.record() as launched:
        result = function(x)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
    assert [name.split("_kernel")[0] for name in launched] == ["forward", "backward"]
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def test_bad_arguments_of_constructor_and_call_are_refused() -> None:
    with pytest.raises(
        TypeError, match="has no argument weights; it has x, weight, scale, p, training"
    ):
        fusedops.nn.Rowwise(scaled_norm, weights=torch.ones(24))
    with pytest.raises(TypeError, match="function must be a function, got NoneType"):
        fusedops.nn.Rowwise(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight must be a tensor or a number, got list"):
        fusedops.nn.Rowwise(scaled_norm, weight=[1.0])
    with pytest.raises(TypeError, match="takes 2 arguments beside its parameters, got 3"):
        _module()(_rows(), 0.1, 0.2)


# --- explanations ---------------------------------------------------------------------------------


def test_explanation_names_rows_inputs_kernels_and_the_choice_of_configs() -> None:
    fused = fusedops.rowwise(scaled_norm)
    text = str(fused.explain(_rows(), torch.ones(24, device=DEVICE)))
    if not KERNEL_PATH:
        assert text == (
            "scaled_norm runs as it is: there are no kernels for cpu tensors; set "
            "TRITON_INTERPRET=1 to run them there, slowly; source() needs no GPU"
        )
        return
    assert "scaled_norm runs as kernels, on rows of 24 columns" in text
    assert re.search(r"^  weight +float32 +columns$", text, re.MULTILINE)
    assert "backward_kernel" in text and "1 number of each row" in text
    assert "(heuristic: as many elements a thread as its sums leave registers for)" in text


@kernels
def test_explanation_and_source_are_those_of_the_call() -> None:
    """Groups of few rows have another kernel than groups of many."""
    function = fusedops.rowwise(lambda x, shift: x + shift, strict=True)
    few, many = [
        (torch.randn(2, rows, 24, device=DEVICE), torch.randn(2, 1, 24, device=DEVICE))
        for rows in (3, 40)
    ]
    assert "group" not in function.source(*few)
    assert "group = " in function.source(*many)
    key_of_few, key_of_many = (function.explain(*tensors).kernels[0].key for tensors in (few, many))
    assert (key_of_few.variant[0], key_of_many.variant[0]) == ("rows", "groups")
    assert key_of_few.bucket < key_of_many.bucket
    with pytest.raises(fusedops.NotRowwiseError, match="none of its arguments is a tensor"):
        function.source(1.0, 2.0)
    module = _module()
    assert module.source(_rows()) == module.function.source(
        _rows(), module.weight, scale=2.0, training=True
    )
    assert "backward_kernel" in str(module.explain(_rows()))


@kernels
def test_explanation_of_a_refused_function_has_the_reason() -> None:
    explanation = fusedops.rowwise(lambda x: x.cumsum(-1)).explain(_rows())
    assert "each column depends on those before it" in str(explanation)
    assert "line" in explanation.reason
    explanation = fusedops.rowwise(lambda x: x * x.detach().numpy().max()).explain(_rows())
    assert "it cannot be traced" in explanation.reason
    assert "numpy().max()" in explanation.reason


@kernels
def test_explanation_has_the_parts_of_a_row() -> None:
    function = fusedops.rowwise(lambda x: torch.cat([c.softmax(-1) for c in x.chunk(2, -1)], -1))
    halves = function.explain(_rows())
    assert (halves.columns, halves.parts) == (12, 2)


@kernels
def test_kernels_move_as_many_tensors_as_the_handwritten_operator() -> None:
    """The operator is dropout-add-LayerNorm. Each kernel reads and writes four tensors of rows.

    The forward reads x and residual, and writes sum and output. The backward reads the output's
    gradient and the sum, and writes two gradients.
    """
    (sample,) = named("dropout_add_layer_norm")
    fused = fusedops.rowwise(sample.function, strict=True)
    plan = fused._programs.find(
        list(sample.tensors(torch.bfloat16, DEVICE).values()), autocast=False
    ).program.plan
    options = {"group": (), "tiled": False}
    forward = forward_kernels(plan, torch.float32, **options, saves=True)
    backward = backward_kernels(
        plan, torch.float32, **options, cotangents=[0], wanted=list(plan.differentiable)
    )
    assert [len(kernel.moved) for kernel in (*forward, *backward)] == [4, 4]


# --- on disk --------------------------------------------------------------------------------------


@kernels
def test_second_process_does_not_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new `rowwise` object stands for another process: it reads the file, if that is valid."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x, weight = _rows(), torch.ones(24, device=DEVICE)
    expected = fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)
    (file,) = (tmp_path / "rowwise").iterdir()

    def traced(*args: object) -> None:
        raise AssertionError("it traced")

    monkeypatch.setattr(programs, "trace", traced)
    of_second_process = fusedops.rowwise(scaled_norm, strict=True)
    assert torch.equal(of_second_process(x[:3], weight, training=False), expected[:3])
    file.write_text("[{")
    with pytest.raises(fusedops.NotRowwiseError, match="it traced"):
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)


def test_key_of_code_does_not_depend_on_the_order_of_a_set() -> None:
    """A set's order depends on the hash seed, and here on the order of two colliding items."""
    code = compile("x in {0, 8}", "", "eval")
    first, second = frozenset([0, 8]), frozenset([8, 0])
    assert repr(first) != repr(second)
    keys = [storing._code(code.replace(co_consts=(items,))) for items in (first, second)]
    assert keys[0] == keys[1]
    other = storing._code(code.replace(co_consts=(frozenset([0, 9]),)))
    assert keys[0] != other


def _structure(function: Any, *tensors: Tensor) -> Any:
    fused = fusedops.rowwise(function)
    args = fused._positional(tensors, {})
    look, _, around = fused._programs.looks(args).at(args)
    return fused._programs._structure_at(
        programs._Call(args, look, around, None), [tuple(t.shape) for t in tensors]
    )[1]


def _structures_of_one_argument() -> Iterator[Any]:
    x = torch.rand(5, 24)
    for function in (*rowwise_operators.UNARY.values(), *rowwise_operators.ROWS.values()):
        yield _structure(lambda x, function=function: function(x), x)


def _structures_of_two_arguments() -> Iterator[Any]:
    x, y = torch.rand(5, 24), torch.rand(5, 24)
    for function in rowwise_operators.BINARY.values():
        yield _structure(lambda x, y, function=function: function(x, y), x, y)


def _structures_of_samples() -> Iterator[Any]:
    for sample in FUNCTIONS:
        yield _structure(sample.function, *sample.tensors(torch.float32, "cpu").values())


@pytest.mark.parametrize(
    "structures",
    [_structures_of_one_argument, _structures_of_two_arguments, _structures_of_samples],
)
def test_structure_of_every_operator_can_be_stored(
    structures: Callable[[], Iterator[Any]],
) -> None:
    """The restored structure passes all checks, and is the same."""
    for structure in structures():
        text = json.dumps(storing.encoded(structure))
        result = storing.decoded(json.loads(text))
        assert result.text() == structure.text()
        assert json.dumps(storing.encoded(result)) == text


def _stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Tensor, Tensor, Tensor]:
    """Stores `scaled_norm`, and returns the file, both arguments and the result."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x, weight = _rows(), torch.linspace(1.0, 2.0, 24, device=DEVICE)
    expected = fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)
    (file,) = (tmp_path / "rowwise").iterdir()
    return file, x, weight, expected


@kernels
def test_damaged_files_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random character of the file is replaced, removed or doubled."""
    file, x, weight, expected = _stored(tmp_path, monkeypatch)
    before, generator = file.read_text(), random.Random(5)
    for _ in range(25):
        i = generator.randrange(len(before))
        replacement = generator.choice(["", "\0", "9", "[", '"', "é", before[i] * 2, before[:i]])
        file.write_text(before[:i] + replacement + before[i + 1 :])
        if file.read_text() != before:
            assert list(storing.read(file)) == []
    assert torch.equal(
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False), expected
    )
    assert file.read_text() == before


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys and indices that lead to each value within ``content``, and to itself."""
    yield path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, inner in items:
        yield from _paths(inner, (*path, key))


@kernels
def test_code_in_a_file_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code replaces each word, number and list of the file in turn; the checksum is right."""
    file, x, weight, expected = _stored(tmp_path, monkeypatch)
    before = cache.opened(file.read_text())
    (text,) = json.loads(before)
    code, accepted = "x\nimport builtins; builtins.executed = 1\n#", list[Any]()
    for path in _paths(json.loads(text)):
        if path:
            content = json.loads(text)
            container = functools.reduce(getitem, path[:-1], content)
            container[path[-1]] = code
            file.write_text(cache.sealed(json.dumps([json.dumps(content)])))
            accepted += storing.read(file)
    assert accepted == []
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    lists = (json.dumps(deep), "[" * 100_000, text + "]" * 3)
    for nested in (*lists, *[json.dumps([inner]) for inner in (*lists, code)], json.dumps(code)):
        file.write_text(cache.sealed(nested))
        assert list(storing.read(file)) == []
    # A file with the fields of a function, one of them with a wrong type.
    content = json.loads(text)
    content["columns"] = []
    file.write_text(cache.sealed(json.dumps([json.dumps(content)])))
    assert torch.equal(
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False), expected
    )


def test_structures_with_wrong_flags_are_refused() -> None:
    """An input that is read, but marked as unused, could have any shape.

    A value that is not marked as fp64 would be computed in fp32.
    """

    def function(x: Tensor, unused: Tensor) -> Tensor:
        return x.double().square().sum(-1, keepdim=True).float()

    before = json.dumps(storing.encoded(_structure(function, torch.rand(5, 24), torch.rand(5, 24))))
    assert storing.decoded(json.loads(before)).used == (True, False)
    for field, values in {
        "used": ([False, False], [1, 0], [True], [True, True, False], True),
        "wide": (False, 1, [True]),
        "other": (True,),
    }.items():
        for value in values:
            fields = json.loads(before)
            fields[field] = value
            with pytest.raises((grammar.GrammarError, TypeError)):
                storing.decoded(fields)


@kernels
def test_different_functions_have_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions differ by their code, the functions that they call, and captured numbers.

    A function that captures a tensor is not stored.
    """
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x = _rows()

    def scaled(inner: object, number: float) -> fusedops.rowwise:
        return fusedops.rowwise(lambda x: inner(x) * number, strict=True)  # type: ignore[operator]

    # The code of functions by `eval` has the name of a module of Python, not of a file.
    evaluated = [eval(f"lambda x: x + {shift}", {}) for shift in (2.0, 3.0)]
    for inner in (torch.sin, torch.cos, lambda x: x + 1.0, *evaluated):
        for number in (2.0, 3.0):
            torch.testing.assert_close(scaled(inner, number)(x), inner(x) * number)
    for inner in evaluated:
        torch.testing.assert_close(fusedops.rowwise(inner, strict=True)(x), inner(x))
    assert len(list((tmp_path / "rowwise").iterdir())) == 12
    # Helpers with the same instructions, but other kinds of parameters.
    texts = (
        "def helper(x, *rest):\n    return x * rest[0]",
        "def helper(x, rest):\n    return x * rest[0]",
    )
    for text in texts:
        namespace: dict[str, Any] = {}
        exec(f"{text}\ndef function(x, y):\n    return helper(x, y)", namespace)
        function = namespace["function"]
        torch.testing.assert_close(
            fusedops.rowwise(function, strict=True)(x, x + 1), function(x, x + 1)
        )
    assert len(list((tmp_path / "rowwise").iterdir())) == 14
    weight = torch.ones(24, device=DEVICE)
    fusedops.rowwise(lambda x: x * weight, strict=True)(x)
    assert len(list((tmp_path / "rowwise").iterdir())) == 14


def _scaled_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x * (1.0 / x.shape[-1]))


@kernels
def test_other_lengths_of_one_function_take_three_traces_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    lengths = range(8, 40, 4)
    tensors = [torch.rand(3, n, device=DEVICE) for n in lengths]
    function = fusedops.rowwise(_scaled_tanh, strict=True)
    with mock.patch("fusedops.compiler.programs.trace", wraps=trace) as traces:
        function(tensors[0])
        first = traces.call_count
        for x in tensors[1:]:
            torch.testing.assert_close(function(x), _scaled_tanh(x))
    assert traces.call_count == first + 3 * (len(lengths) - 1)
    # A later process decodes each of them once to compare, and once more to use it.
    storing._known.cache_clear()
    again = fusedops.rowwise(_scaled_tanh, strict=True)
    with (
        mock.patch("fusedops.compiler.programs.trace", side_effect=AssertionError("traced again")),
        mock.patch.object(storing, "decoded", wraps=storing.decoded) as decoded,
    ):
        for x in tensors:
            torch.testing.assert_close(again(x), _scaled_tanh(x))
    assert decoded.call_count == 2 * len(lengths)


@kernels
def test_numbers_of_another_length_are_tested_for_other_rows() -> None:
    """The number is a constant for one row length, and the number of rows for the other."""
    function = fusedops.rowwise(
        lambda x: x * (float(x.shape[0]) if x.shape[-1] > 20 else 7.0), strict=True
    )
    function(torch.rand(3, 16, device=DEVICE))
    with pytest.raises(NotRowwiseError, match="depends on the number of rows"):
        function(torch.rand(3, 32, device=DEVICE))


@kernels
def test_limits_of_another_length_are_tested_for_few_rows() -> None:
    """All numbers of rows are above the limit for one row length, and not for the other."""
    function = fusedops.rowwise(lambda x: x * (2.0 if x.numel() < 1000 else 3.0), strict=True)
    function(torch.rand(3, 2048, device=DEVICE))
    with pytest.raises(NotRowwiseError, match="depends on the number of rows"):
        function(torch.rand(100, 64, device=DEVICE))
