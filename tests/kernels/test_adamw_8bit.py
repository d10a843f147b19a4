"""AdamW with moments in 8 bits is torchao's: its maps, its codes to the last border, its steps. What else its launches owe is in test_adamw.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
quant_utils = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
adamw_8bit, cases = (pytest.importorskip(name) for name in ("kernels.adamw_8bit", "tests.kernels.adamw_8bit_cases"))


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_torchaos_to_the_bit(signed: bool) -> None:
    assert torch.equal(adamw_8bit.dynamic_map(signed), torch.tensor(quant_utils.create_dynamic_map(signed=signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_a_threshold_is_the_first_number_that_torchao_gives_the_code(signed: bool) -> None:
    qmap = adamw_8bit.dynamic_map(signed)
    first = adamw_8bit.thresholds(qmap)[1:]
    last = torch.nextafter(first, torch.tensor(-2.0))
    assert torch.equal(quant_utils.quantize_8bit_with_qmap(first, qmap).int(), torch.arange(1, 256).int())
    assert torch.equal(quant_utils.quantize_8bit_with_qmap(last, qmap).int(), torch.arange(255).int())


def test_the_plain_twin_is_torchaos_step() -> None:
    bad = cases.check(adamw_8bit.plain_adamw_8bit)
    assert not bad, bad


def test_a_twin_that_forgets_to_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = adamw_8bit.dequantise
    monkeypatch.setattr(adamw_8bit, "dequantise", lambda moment: whole(moment._replace(scale=moment.scale * 1.01)))
    assert any(
        "codes are off" in fault or "scales are off" in fault for fault in cases.check(adamw_8bit.plain_adamw_8bit)
    )


def test_the_kernel_finds_torchaos_code_for_every_border_and_takes_its_steps(interpreted: Callable[..., str]) -> None:
    interpreted(
        "interpreted_adamw_8bit.py",
        "every_number_has_torchaos_code",
        "what_is_not_a_number_reads_nowhere_else",
        "steps_are_torchaos",
    )


def test_a_search_that_is_a_unit_off_is_caught(interpreted: Callable[..., str]) -> None:
    interpreted("interpreted_adamw_8bit.py", "thresholds_a_unit_off_are_caught")
