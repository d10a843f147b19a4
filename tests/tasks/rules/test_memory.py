from __future__ import annotations

from typing import Any

import pytest

from tasks.errors import UserError
from tasks.recipes import load_recipe, shipped
from tasks.rules.memory import adapter_parameters, memory_fit, require_fit
from tests.tasks.pretend import recipe, rehearsal_recipe

QWEN_235B = {"source": "bucket:models/235b", "family": "qwen3_moe", "size_gb": 470.2}


def _phase(**changes: Any) -> dict[str, Any]:
    return {"kind": "sft", "data": "bucket:x", "steps": 10, "learning_rate": 1e-5, **changes}


def test_the_35b_at_rank_32_fits_96_gb_with_8_bit_optimizer_state() -> None:
    fit = require_fit(recipe())
    assert fit.fits and fit.parts["base"] == pytest.approx(69.3, abs=0.1)
    assert fit.parts["adapters"] == pytest.approx(7.4 + 0.15, abs=0.1)
    assert fit.parts["optimizer"] == pytest.approx(3.8, abs=0.1)
    assert fit.needed_gb == pytest.approx(sum(fit.parts.values()), abs=0.05)


def test_rank_64_does_not_fit_96_gb_and_fits_an_h200() -> None:
    adapters = {"rank": 64, "alpha": 128}
    assert not memory_fit(recipe(adapters=adapters)).fits
    assert memory_fit(recipe(adapters=adapters, box={"tier": "h200"})).fits


def test_what_does_not_fit_is_an_error_before_anything_is_rented() -> None:
    with pytest.raises(
        UserError, match=r"rtxpro6000 has 99\.5 GB .* needs 11\d\.\d GB .*base 69\.3.*adapters\.rank \(now 64\)"
    ):
        require_fit(recipe(adapters={"rank": 64, "alpha": 128}))


def test_the_hungriest_phase_decides() -> None:
    sft, dpo = _phase(), _phase(kind="dpo")
    grpo = _phase(kind="grpo", beta=0.1, batch_size=8, accumulation=1)
    alone = memory_fit(recipe(phases=[sft])).needed_gb
    assert memory_fit(recipe(phases=[sft, dpo])).needed_gb > alone
    assert "reference adapter" in memory_fit(recipe(phases=[sft, dpo, grpo])).parts


def test_fewer_groups_take_less() -> None:
    assert memory_fit(recipe(adapters={"groups": ["attention"]})).parts["adapters"] < 0.1


def test_the_35b_has_its_known_number_of_adapter_parameters() -> None:
    assert adapter_parameters(recipe(adapters={"groups": ["routed_experts"]})) == 1_845_493_760


def test_the_235b_streams_its_experts_and_fits_one_h200() -> None:
    adapters = {"rank": 16, "alpha": 32, "groups": ["attention", "routed_experts"]}
    fit = memory_fit(recipe(model=QWEN_235B, adapters=adapters, box={"tier": "h200"}))
    assert fit.fits and fit.parts["base"] == 6.4


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_fits_the_card_of_its_tier(name: str) -> None:
    require_fit(load_recipe(name))


def test_a_micro_batch_is_measured_by_its_tokens() -> None:
    """Full-depth steps: 3.2 GB above the static parts at 4,096 tokens, 9.8 GB at 16,384."""
    for rows, seen_gb in ((2, 3.2), (8, 9.8)):
        parts = memory_fit(recipe(phases=[_phase(batch_size=rows)])).parts
        assert parts["activations"] + parts["buffers"] == pytest.approx(seen_gb, abs=0.1)


def test_a_tiny_model_fits_trivially() -> None:
    fit = memory_fit(rehearsal_recipe())
    assert fit.fits and fit.needed_gb < 1
