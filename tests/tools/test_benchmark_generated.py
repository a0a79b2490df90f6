"""The command that compares generated kernels with those written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import generated, providers, results


def test_work_has_equal_sizes_and_both_modes() -> None:
    work = generated.work()
    assert {item.case.dtype_name for item in work} == {"bf16", "fp32"}
    assert len(work) == 6 * (11 + 3)
    for item in work:
        rows, cols = item.case.sides
        assert (rows + 1) * cols > 2**25 >= rows * cols
        assert len(item.pairs) == 4
    (item,) = generated.work(["rms_norm"], [4096], ["bf16"])
    assert str(item.case) == "rms_norm 8192x4096 bf16"


def test_table_has_the_ratio_of_times() -> None:
    def row(provider: str, us: float) -> results.Row:
        return results.Row(
            *("rms_norm", "8x64", "bf16", "fwd", provider, us, math.nan, 30.0, 1.0),
            *("commit", "torch", "triton"),
        )

    (line,) = generated.table([row("fusedops", 40.0), row("rowwise", 50.0)]).splitlines()
    assert line.split()[4:] == ["40.0", "50.0", "1.25", "0.60", "of", "the", "floor"]
    assert not generated.table([row("rowwise", 50.0)])


@pytest.mark.kernels
@pytest.mark.parametrize("op", ["bias_gelu_tanh", "rms_norm"])
def test_provider_computes_the_same(op: str) -> None:
    (item,) = generated.work([op], [1024], ["fp32"])
    spec = item.case.spec
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sample = spec.benchmark((2, 40), torch.float32, device)
    call = providers.build("rowwise", spec)
    assert call is not None
    arguments = {**sample.tensors, **sample.options}
    for actual, expected in zip(call(**arguments), spec.eager(**arguments), strict=True):
        torch.testing.assert_close(actual, expected)
