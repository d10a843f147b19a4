"""The benchmark of AdamW measures the adapters of the model that it names, all its ways do the same step, and without a card it says so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
benchmark = pytest.importorskip("kernels.benchmark_adamw")


def test_the_shapes_are_those_of_the_35b_models_adapters_at_rank_32() -> None:
    found = list(benchmark.shapes())
    assert len(found) == 660 and sum(height * width for (height, width), _ in found) == 1_883_832_320


def test_every_call_runs_and_is_named_with_the_bytes_that_it_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_REPEATS": 1, "_CALLS": 1, "_EXPERTS": 64, "_RANK": 4}.items():
        monkeypatch.setattr(benchmark, name, value)
    rows = list(benchmark.measure(1, torch.device("cpu")))
    assert all(ms > 0 and gb > 0 for _, ms, _, gb in rows)
    assert [name.split(":")[0] for name, *_ in rows] == ["torch"] * 4 + ["ours"] * 3 + ["ours, 8 bits"] * 2
    assert len(list(benchmark.sweep(1, torch.device("cpu")))) == 24
    assert len(list(benchmark.sweep_8bit(1, torch.device("cpu")))) == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([]) == 2
    assert "no CUDA card" in capsys.readouterr().err
