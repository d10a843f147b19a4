from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from kernels import benchmark_lean, lean
from kernels.benchmark_lean import main, measure


def test_every_lean_op_has_a_row_forward_and_backward_with_the_bytes_that_it_must_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_lean, "_VOCABULARY", 1000)
    asked: list[int] = []

    def clock(call: object, calls: int) -> float:
        assert callable(call)
        asked.append(calls)
        call()
        return 2.0

    rows = {row.op: row for row in measure(64, "cpu", clock)}
    assert set(rows) == {*lean.__all__, *(f"{op}, backward" for op in lean.__all__), "token_log_probs", "label_stats"}
    assert len(asked) == len(rows) and all(row.microseconds == 2.0 and row.megabytes > 0 for row in rows.values())
    unit = 64 * 2048 * 2 / 1e6
    assert rows["rms_norm"].megabytes == pytest.approx(2 * unit)
    assert rows["rms_norm, backward"].megabytes == pytest.approx(3 * unit)
    assert rows["add_rms_norm"].megabytes == rows["add_rms_norm, backward"].megabytes == pytest.approx(4 * unit)
    assert rows["label_stats"].megabytes == pytest.approx(3 * 64 * 1000 * 2 / 1e6)
    assert str(rows["rms_norm"]) == f"| rms_norm | 2.0 | {2 * unit:.1f} | {unit:.2f} |"


def test_without_a_card_the_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    assert main([]) == 2 and "no CUDA card" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--tokens", "0"])
    assert "at least 1" in capsys.readouterr().err
