"""`fusedops.nn.Rowwise`, what `explain` says, and traced functions on disk."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fusedops
import rowwise_operators
from fusedops.compiler import grammar, programs, storing
from fusedops.compiler.codegen import backward_kernels, forward_kernels
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


def test_parameters_and_mode() -> None:
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
def test_copies_have_parameters_of_their_own(copied: object) -> None:
    module, x = _module().eval(), _rows()
    other = copied(module)  # type: ignore[operator]
    assert torch.equal(other(x), module(x)) and other.weight is not module.weight
    with torch.no_grad():
        other.weight.mul_(2.0)
    assert not torch.equal(other(x), module(x))


def test_parametrized() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    module, x = _module().eval(), _rows()
    before = module(x)
    parametrize.register_parametrization(module, "weight", Twice())
    torch.testing.assert_close(module(x), 2.0 * before)


@kernels
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_operators_by_hand_within_a_function(make: type[nn.Module]) -> None:
    """A captured norm that fuse_model has replaced is a part of the kernel, like PyTorch's."""
    norm = make(24).to(DEVICE)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    joined = fusedops.rowwise(lambda x: norm(F.silu(x)) + x, strict=True)
    x = torch.randn(5, 24, device=DEVICE, requires_grad=True)
    want = norm(F.silu(x)) + x
    leaves = [x, *norm.parameters()]
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    model = nn.Sequential(norm)
    fusedops.fuse_model(model)
    norm = model[0]
    leaves = [x, *norm.parameters()]
    with launch.record() as launched:
        result = joined(x)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
    assert [name.split("_kernel")[0] for name in launched] == ["forward", "backward"]
    torch.testing.assert_close(result, want)
    torch.testing.assert_close(gradients, wanted)


def test_bad_constructor_and_call() -> None:
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


# --- what is told ---------------------------------------------------------------------------------


def test_explains_what_runs() -> None:
    fused = fusedops.rowwise(scaled_norm)
    text = str(fused.explain(_rows(), torch.ones(24, device=DEVICE)))
    if not KERNEL_PATH:
        assert text == "scaled_norm runs as it is: there are no kernels for cpu tensors"
        return
    assert "scaled_norm runs as kernels, on rows of 24 columns" in text
    assert re.search(r"^  weight +float32 +columns$", text, re.MULTILINE)
    assert "backward_kernel" in text and "1 number of each row" in text
    assert "(heuristic: as many elements a thread as its sums leave registers for)" in text


@kernels
def test_explains_the_call_that_it_is_given() -> None:
    """Groups of few rows have another kernel than groups of many."""
    function = fusedops.rowwise(lambda x, shift: x + shift, strict=True)
    few, many = [
        (torch.randn(2, rows, 24, device=DEVICE), torch.randn(2, 1, 24, device=DEVICE))
        for rows in (3, 40)
    ]
    assert "group" not in function.source(*few) and "group = " in function.source(*many)
    keys = [function.explain(*given).kernels[0].key for given in (few, many)]
    assert [key.variant[0] for key in keys] == ["rows", "groups"] and keys[0].bucket < keys[
        1
    ].bucket
    with pytest.raises(fusedops.NotRowwiseError, match="none of its arguments is a tensor"):
        function.source(1.0, 2.0)
    module = _module()
    assert module.source(_rows()) == module.function.source(
        _rows(), module.weight, scale=2.0, training=True
    )
    assert "backward_kernel" in str(module.explain(_rows()))


@kernels
def test_explains_why_not() -> None:
    explanation = fusedops.rowwise(lambda x: x.cumsum(-1)).explain(_rows())
    assert (
        "each column depends on those before it" in str(explanation)
        and "line" in explanation.reason
    )
    halves = fusedops.rowwise(
        lambda x: torch.cat([c.softmax(-1) for c in x.chunk(2, -1)], -1)
    ).explain(_rows())
    assert (halves.columns, halves.parts) == (12, 2)
    explanation = fusedops.rowwise(lambda x: x * x.detach().cpu().numpy().max()).explain(_rows())
    assert "it cannot be traced" in explanation.reason and "numpy().max()" in explanation.reason


@kernels
def test_moves_what_the_operator_by_hand_moves() -> None:
    """The forward of dropout-add-LayerNorm moves x, residual, sum and output.

    The gradient and the sum, and two gradients.
    """
    (sample,) = named("dropout_add_layer_norm")
    fused = fusedops.rowwise(sample.function, strict=True)
    plan = fused._programs.find(
        list(sample.tensors(torch.bfloat16, DEVICE).values()), False
    ).program.plan
    options = {"group": (), "tiled": False}
    forward = forward_kernels(plan, torch.float32, **options, saves=True)
    backward = backward_kernels(
        plan, torch.float32, **options, cotangents=[0], wanted=list(plan.differentiable)
    )
    assert [len(kernel.moved) for kernel in (*forward, *backward)] == [4, 4]


# --- on disk --------------------------------------------------------------------------------------


@kernels
def test_a_second_process_does_not_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x, weight = _rows(), torch.ones(24, device=DEVICE)
    expected = fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)
    (file,) = (tmp_path / "rowwise").iterdir()

    def traced(*args: object) -> None:
        raise AssertionError("it traced")

    monkeypatch.setattr(programs, "trace", traced)
    again = fusedops.rowwise(scaled_norm, strict=True)  # knows nothing, as in another process
    assert torch.equal(again(x[:3], weight, training=False), expected[:3])
    file.write_text("[{")
    with pytest.raises(fusedops.NotRowwiseError, match="it traced"):
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)


def test_word_of_a_set_does_not_depend_on_its_order() -> None:
    """The order depends on the seed of hashes; here on which of two equal slots is taken first."""
    code = compile("x in {0, 8}", "", "eval")
    sets = frozenset([0, 8]), frozenset([8, 0])
    words = [storing._code(code.replace(co_consts=(one,))) for one in sets]
    assert repr(sets[0]) != repr(sets[1]) and words[0] == words[1]
    other = storing._code(code.replace(co_consts=(frozenset([0, 9]),)))
    assert words[0] != other


def _structure(function: Any, *tensors: Tensor) -> Any:
    fused = fusedops.rowwise(function)
    args = fused._positional(tensors, {})
    look, _, around = fused._programs.looks(args).at(args)
    return fused._programs._structure_at(
        programs._Call(args, look, around, None), [tuple(t.shape) for t in tensors]
    )[1]


def _of_one(function: Any) -> Any:
    return lambda x: function(x)


def _of_two(function: Any) -> Any:
    return lambda x, y: function(x, y)


@pytest.mark.parametrize("count", [1, 2])
def test_every_operator_can_be_stored(count: int) -> None:
    """The structure that is read passes the checks of its words, and has the same numbers."""
    x, y = torch.rand(5, 24), torch.rand(5, 24)
    if count == 1:
        made = [
            _of_one(f)
            for f in (*rowwise_operators.UNARY.values(), *rowwise_operators.ROWS.values())
        ]
        structures = [_structure(f, x) for f in made]
        structures += [
            _structure(sample.function, *sample.tensors(torch.float32, x.device).values())
            for sample in FUNCTIONS
        ]
    else:
        structures = [_structure(_of_two(f), x, y) for f in rowwise_operators.BINARY.values()]
    for structure in structures:
        text = json.dumps(storing.encoded(structure))
        result = storing.decoded(json.loads(text))
        assert result.text() == structure.text() and json.dumps(storing.encoded(result)) == text


def _stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Tensor, Tensor, Tensor]:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x, weight = _rows(), torch.linspace(1.0, 2.0, 24, device=DEVICE)
    expected = fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False)
    (file,) = (tmp_path / "rowwise").iterdir()
    return file, x, weight, expected


@kernels
def test_changed_files_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, x, weight, expected = _stored(tmp_path, monkeypatch)
    before, generator = file.read_text(), random.Random(5)
    for _ in range(25):
        at = generator.randrange(len(before))
        changed = generator.choice(["", "\0", "9", "[", '"', "é", before[at] * 2, before[:at]])
        file.write_text(before[:at] + changed + before[at + 1 :])
        if file.read_text() != before:
            assert storing.read(file) == []
    assert torch.equal(
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False), expected
    )
    assert file.read_text() == before


def _leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    ):
        yield from _leaves(inner, (*path, key))


@kernels
def test_nothing_of_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in the place of each word, number and list, with the checksum that belongs to it."""
    file, x, weight, expected = _stored(tmp_path, monkeypatch)
    before = cache.opened(file.read_text())
    text, accepted = "x\nimport builtins; builtins.executed = 1\n#", list[Any]()
    for path in _leaves(json.loads(before)):
        if path:
            content = json.loads(before)
            functools.reduce(lambda found, key: found[key], path[:-1], content)[path[-1]] = text
            file.write_text(cache.sealed(json.dumps(content)))
            accepted += storing.read(file)
    assert accepted == []
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for nested in (json.dumps(deep), "[" * 100_000, "[" + before[1:-1] + "]" * 3):
        file.write_text(cache.sealed(nested))
        assert storing.read(file) == []
    # What has the form of a function, but is none.
    content = json.loads(before)
    content[0]["columns"] = []
    file.write_text(cache.sealed(json.dumps(content)))
    assert torch.equal(
        fusedops.rowwise(scaled_norm, strict=True)(x, weight, training=False), expected
    )


def test_files_with_wrong_flags_are_not_used() -> None:
    """An input of a node that is marked as unused would be read in any shape.

    A value in fp64 would be computed in fp32.
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
def test_files_tell_functions_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions differ by their code, by what they call, and by captured numbers.

    A tensor around one has no name on disk.
    """
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x = _rows()

    def made(inner: object, number: float) -> fusedops.rowwise:
        return fusedops.rowwise(lambda x: inner(x) * number, strict=True)  # type: ignore[operator]

    # What `exec` and `eval` make calls itself one of Python's own.
    evaluated = [eval(f"lambda x: x + {shift}", {}) for shift in (2.0, 3.0)]
    for inner in (torch.sin, torch.cos, lambda x: x + 1.0, *evaluated):
        for number in (2.0, 3.0):
            torch.testing.assert_close(made(inner, number)(x), inner(x) * number)
    for inner in evaluated:
        torch.testing.assert_close(fusedops.rowwise(inner, strict=True)(x), inner(x))
    assert len(list((tmp_path / "rowwise").iterdir())) == 12
    # The same instructions, of other parameters.
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
