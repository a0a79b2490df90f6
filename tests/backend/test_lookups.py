"""`fusedops.compile`: operators of slices read the rows of embeddings from their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import Backend, check, results
from fusedops.core.launches import launch
from support import DEVICE, INTERPRETED

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

ROWS, WIDTHS, TABLES = 70, (16, 24, 7, 40), (9, 5, 12, 3)
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)}
READ = "which reads the rows of embeddings from their tables"


class Tables(nn.Module):
    """Looked-up rows with norms.

    Args:
        function: takes the module and the indices; returns a tensor.
        widths: the widths of the tables.
        options: of the tables.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        widths: Sequence[int] = WIDTHS,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__()
        self.function = function
        pairs = zip(TABLES, widths, strict=True)
        self.tables = nn.ModuleList(
            [nn.Embedding(rows, width, dtype=dtype, **options) for rows, width in pairs]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width, dtype=dtype) for width in widths])
        for parameter in self.norms.parameters():
            nn.init.normal_(parameter)

    def norm(self, x: Tensor, k: int) -> Tensor:
        return torch.tanh(self.norms[k](x))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def _plain(module: Tables, ids: Tensor) -> Tensor:
    columns = ids.unbind(-1)
    embedded = [table(column) for table, column in zip(module.tables, columns, strict=True)]
    return torch.cat([module.norm(x, k) for k, x in enumerate(embedded)], -1)


def _separate_indices(module: Tables, *ids: Tensor) -> Tensor:
    return _plain(module, torch.stack([part + 0 for part in ids], -1))


def _one_table(module: Tables, ids: Tensor) -> Tensor:
    """All indices look up one table, which a product reads as well."""
    table = module.tables[0]
    rows = [table(column) for column in ids.unbind(-1)]
    joined = torch.cat([module.norm(x, k) for k, x in enumerate(rows)], -1)
    return joined @ joined.new_ones(joined.shape[-1], WIDTHS[0]) @ table.weight.t()


def _also_dense(module: Tables, ids: Tensor) -> Tensor:
    """A further slice of the same function, which is not looked up."""
    dense = torch.cat([module.tables[0].weight] * 8)[: ids.shape[0]].cumsum(0)
    return torch.cat([torch.tanh(module.norms[0](dense)), _plain(module, ids)], -1)


def _checkpointed(module: Tables, ids: Tensor) -> Tensor:
    return checkpoint(_plain, module, ids, use_reentrant=False)  # type: ignore[no-any-return]


def _dropped(module: Tables, ids: Tensor) -> Tensor:
    """The backward of a dropout needs the index, but no rows."""
    columns = ids.unbind(-1)
    rows = [table(column) for table, column in zip(module.tables, columns, strict=True)]
    return torch.cat([F.dropout(x, 0.5) for x in rows], -1)


def _frozen(module: Tables) -> Tables:
    module.tables.requires_grad_(requires_grad=False)
    return module


def _with_one_table(function: Callable[..., Tensor]) -> Tables:
    module = Tables(function, (16,) * 4)
    module.tables = module.tables[:1]
    return module


def _ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return indices of each table, with repetitions, ``(*shape, tables)``."""
    limits = [torch.randint(rows, shape, device=DEVICE) for rows in TABLES]
    return torch.stack(limits, -1).to(dtype)


# Each model, and its inputs.
_TAKEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "columns of a matrix": (lambda: Tables(_plain), lambda: [_ids(ROWS)]),
    "int32": (lambda: Tables(_plain), lambda: [_ids(ROWS, dtype=torch.int32)]),
    "batch and length": (lambda: Tables(_plain), lambda: [_ids(5, 14)]),
    "transposed": (lambda: Tables(_plain), lambda: [_ids(14, 5).transpose(0, 1)]),
    "rows side by side": (lambda: Tables(_plain), lambda: [_ids(ROWS).t().contiguous().t()]),
    "one index": (lambda: Tables(_plain), lambda: [_ids(1).expand(ROWS, 4)]),
    "computed indices": (
        lambda: Tables(_separate_indices),
        lambda: [*_ids(ROWS).unbind(-1)],
    ),
    "padding": (lambda: Tables(_plain, padding_idx=1), lambda: [_ids(ROWS)]),
    "last row is padding": (lambda: Tables(_plain, padding_idx=-1), lambda: [_ids(ROWS)]),
    "one table": (
        lambda: _with_one_table(_one_table),
        lambda: [_ids(ROWS).remainder(TABLES[0])],
    ),
    "frozen tables": (lambda: _frozen(Tables(_plain)), lambda: [_ids(ROWS)]),
    "bf16": (lambda: Tables(_plain, dtype=torch.bfloat16), lambda: [_ids(ROWS)]),
    "checkpointed": (lambda: Tables(_checkpointed), lambda: [_ids(ROWS)]),
    "beside another slice": (lambda: Tables(_also_dense), lambda: [_ids(ROWS)]),
}


def _compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(model, backend=backend, fullgraph=True, **options), backend


@pytest.mark.parametrize("name", _TAKEN)
def test_rows_of_tables_are_read_by_index(name: str) -> None:
    make_model, make_inputs = _TAKEN[name]
    torch.manual_seed(0)
    model, inputs = make_model().to(DEVICE), make_inputs()
    dtype = next(model.parameters()).dtype
    cotangent = torch.randn_like(model(*inputs))
    compiled, backend = _compiled(model, dynamic=False)
    with launch.record() as launched:
        actual = results(compiled, model, inputs, cotangent)
    assert str(backend.report).count(READ) == len(set(WIDTHS if name != "one table" else (16,)))
    assert "forward_slices" in launched and "backward_slices" in launched
    check(actual, model, inputs, cotangent, EPS[dtype])
    expected = results(model, model, inputs, cotangent)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
    # Neither rows nor copies of them are saved: only the index and numbers of each row.
    rows = math.prod(inputs[0].shape[: cotangent.dim() - 1])
    for tensor in backend.saved:
        is_output = tensor.shape == cotangent.shape
        assert (
            is_output
            or tensor.numel() <= 16 * rows
            or name in ("beside another slice", "one table")
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Callable[[], Any]) -> None:
    model, ids = Tables(_plain).to(DEVICE), _ids(ROWS)
    compiled, backend = _compiled(model)
    with mode():
        actual = compiled(ids)
        torch.testing.assert_close(actual, model(ids), rtol=1e-5, atol=1e-5)
    assert READ in str(backend.report)


def test_autocast() -> None:
    model, ids = Tables(_plain).to(DEVICE), _ids(ROWS)
    cotangent = torch.randn_like(model(ids))
    compiled, backend = _compiled(model)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual = results(compiled, model, [ids], cotangent)
        check(actual, model, [ids], cotangent, EPS[torch.bfloat16])
    assert READ in str(backend.report)


def test_changing_batches_share_a_graph() -> None:
    model = Tables(_plain).to(DEVICE)
    compiled, backend = _compiled(model, dynamic=True)
    graphs = []
    for shape in ((3, 2), (5, 4), (17, 3)):
        ids = _ids(*shape)
        cotangent = torch.randn_like(model(ids))
        actual = results(compiled, model, [ids], cotangent)
        check(actual, model, [ids], cotangent, EPS[torch.float32])
        graphs.append(backend.report.graphs)
    assert graphs[0] == graphs[-1] and READ in str(backend.report)


def test_dropped_rows() -> None:
    """The gradient of a row is a sum over its lookups that were not dropped."""
    model, ids = Tables(_dropped).to(DEVICE), _ids(ROWS)
    compiled, backend = _compiled(model)
    y = compiled(ids)
    assert READ in str(backend.report)
    y.sum().backward()
    parts = zip(y.split(WIDTHS, -1), model.tables, ids.unbind(-1), strict=True)
    for part, table, column in parts:
        rows = table.weight[column]
        torch.testing.assert_close(part, torch.where(part != 0, 2 * rows, 0))
        kept = 2.0 * (part != 0)
        expected = torch.zeros_like(table.weight).index_add(0, column, kept)
        torch.testing.assert_close(table.weight.grad, expected)


def test_lookups_are_read_under_inductor() -> None:
    model, ids = Tables(_plain).to(DEVICE), _ids(ROWS)
    compiled = fusedops.compile(model, fullgraph=True)
    cotangent = torch.randn_like(model(ids))
    with launch.record() as launched:
        actual = results(compiled, model, [ids], cotangent)
    # One call adds up the gradients of all tables.
    sums = ["key_lookups_kernel", "sum_runs_kernel", "sum_crossing_runs_kernel"]
    assert launched == ["forward_slices", "backward_slices", "reduce_slices", *sums]
    check(actual, model, [ids], cotangent, EPS[torch.float32])


# --- embeddings that are not read -----------------------------------------------------------------


def _returned(module: Tables, ids: Tensor) -> Tensor:
    rows = [table(column) for table, column in zip(module.tables, ids.unbind(-1), strict=True)]
    normed = [module.norm(x, k) for k, x in enumerate(rows)]
    return torch.cat([*normed, *[x.cumsum(0) for x in rows]], -1)


def _twice(module: Tables, ids: Tensor) -> Tensor:
    """Two slices have the same rows."""
    rows = module.tables[0](ids[..., 0])
    return torch.cat([module.norm(rows, k) for k in range(4)], -1)


def _changed(module: Tables, ids: Tensor) -> Tensor:
    result = _plain(module, ids)
    with torch.no_grad():
        module.tables[0].weight.mul_(1.0)
    return result


def _two_of_four(module: Tables, ids: Tensor) -> Tensor:
    rows = [table(column) for table, column in zip(module.tables, ids.unbind(-1), strict=True)]
    rows[2:] = [x.cumsum(0) for x in rows[2:]]
    return torch.cat([module.norm(x, k) for k, x in enumerate(rows)], -1)


def _computed(module: Tables, ids: Tensor) -> Tensor:
    pairs = zip(ids.unbind(-1), module.tables, strict=True)
    rows = [F.embedding(column, table.weight.cumsum(0)) for column, table in pairs]
    return torch.cat([module.norm(x, k) for k, x in enumerate(rows)], -1)


_NARROW = (2, 2, 2, 2)
_LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other users": (lambda: Tables(_returned), "its rows have other users"),
    "the same rows": (lambda: _with_one_table(_twice), ""),
    "computed tables": (lambda: Tables(_computed), "a table is computed"),
    "frequencies": (
        lambda: Tables(_plain, scale_grad_by_freq=True),
        "its gradient is divided by frequencies",
    ),
    "narrow rows": (
        lambda: Tables(_plain, _NARROW),
        "its rows are shorter than what a GPU reads at once",
    ),
    "some slices": (lambda: Tables(_two_of_four), "other slices are not looked up"),
}


@pytest.mark.parametrize("name", _LEFT)
def test_other_embeddings_are_not_read(name: str) -> None:
    make_model, reason = _LEFT[name]
    torch.manual_seed(0)
    model, ids = make_model().to(DEVICE), _ids(ROWS)
    cotangent = torch.randn_like(model(ids))
    compiled, backend = _compiled(model, dynamic=False)
    actual = results(compiled, model, [ids], cotangent)
    report = str(backend.report)
    assert READ not in report
    assert (f"an embedding is not part of it: {reason}" in report) or not reason
    check(actual, model, [ids], cotangent, EPS[torch.float32])


def test_changed_tables_are_not_read() -> None:
    model, ids = Tables(_changed).to(DEVICE), _ids(ROWS)
    compiled, backend = _compiled(model)
    compiled(ids)
    assert READ not in str(backend.report)


def test_a_change_before_the_backward_is_an_error() -> None:
    """The backward reads the tables again."""
    model, ids = Tables(_plain).to(DEVICE), _ids(ROWS)
    compiled, _ = _compiled(model)
    y = compiled(ids)
    with torch.no_grad():
        model.tables[1].weight.mul_(2.0)  # type: ignore[operator,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- indices out of range ------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, an assertion that fails ends the process")
def test_nothing_outside_of_a_table_is_read() -> None:
    """Triton's interpreter has no assertions: an index out of range stands for row 0 there."""
    model, ids = Tables(_plain).to(DEVICE), _ids(ROWS)
    compiled, _ = _compiled(model)
    outside = ids.clone()
    outside[1], outside[2], outside[3] = -1, torch.tensor(TABLES), 1 << 40
    ids[1:4] = 0
    with torch.no_grad():
        torch.testing.assert_close(compiled(outside), model(ids))
