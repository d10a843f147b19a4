from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.reference import grouped_a, grouped_b
from tests.training.sharded.threads import on_ranks
from training.contract.families import FAMILIES
from training.contract.recipe import Adapters
from training.errors import LivenessError
from training.model import CONFIG, WEIGHTS, lora_config
from training.sharded import adapters
from training.sharded.adapters import Factors
from training.tiny import make_model

EXPERTS = 8


def wanted_adapters(family: str) -> Adapters:
    return Adapters(rank=4, alpha=8, groups=FAMILIES[family].groups)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(family: str) -> Any:
    """A model with adapters of random numbers, PEFT's own."""
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(make_model(256, 1, 0, family=family), lora_config(wanted_adapters(family), family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


@pytest.fixture(scope="module")
def stored(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """As PEFT itself writes it."""
    folder = tmp_path_factory.mktemp("peft")
    trained.save_pretrained(folder)
    return load_file(folder / WEIGHTS)


def factors(stored: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> list[Factors]:
    """What one rank would hold of it."""
    first, count = rank * EXPERTS // ranks, EXPERTS // ranks
    found = []
    for key in sorted(name for name in stored if name.endswith("lora_A.weight")):
        A, B = stored[key], stored[key.replace("lora_A", "lora_B")]
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if not path.removesuffix(".base_layer").endswith(".experts"):
            found.append(Factors(path, A.clone(), B.clone()))
            continue
        parameter = "gate_up_proj" if path.endswith(".base_layer") else "down_proj"
        mine = slice(first, first + count)
        a_ERX, b_EOR = grouped_a(A, EXPERTS)[mine].clone(), grouped_b(B, EXPERTS)[mine].clone()
        found.append(Factors(path.removesuffix(".base_layer"), a_ERX, b_EOR, parameter, first, EXPERTS))  # type: ignore[arg-type]
    return found


def save(folder: Path, stored: dict[str, Tensor], family: str, ranks: int = 1, **options: Any) -> None:
    on_ranks(
        ranks,
        lambda rank: adapters.save(
            folder,
            factors(stored, rank.rank, ranks),
            wanted_adapters(family),
            family,
            base="hub:qwen/q",
            ranks=rank,
            **options,
        ),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_make_pefts_own_file(
    tmp_path: Path, stored: dict[str, Tensor], family: str, ranks: int
) -> None:
    save(tmp_path, stored, family, ranks)
    seen = load_file(tmp_path / WEIGHTS)
    assert seen.keys() == stored.keys()
    assert all(torch.equal(seen[name], stored[name]) for name in stored)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


def test_the_directory_loads_in_stock_peft_with_equal_logits(
    tmp_path: Path, trained: Any, stored: dict[str, Tensor], family: str
) -> None:
    save(tmp_path, stored, family, 2)
    again = PeftModel.from_pretrained(make_model(256, 1, 0, family=family), tmp_path)
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = trained(input_ids=ids).logits
        assert torch.equal(again(input_ids=ids).logits, wanted)
        with again.disable_adapter():
            assert not torch.allclose(again(input_ids=ids).logits, wanted, atol=1e-2)


def test_the_directory_is_one_that_a_phase_may_start_from(
    tmp_path: Path, stored: dict[str, Tensor], family: str
) -> None:
    import json

    save(tmp_path, stored, family, 2)
    told = json.loads((tmp_path / CONFIG).read_text())
    assert told["base_model_name_or_path"] == "hub:qwen/q" and told["inference_mode"] is True
    assert told["peft_version"] and set(told["target_parameters"]) == {*FAMILIES[family].routed}


def test_bfloat16_halves_the_file_and_rounds_once(tmp_path: Path, stored: dict[str, Tensor], family: str) -> None:
    save(tmp_path, stored, family, 2, dtype=torch.bfloat16)
    seen = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(seen[name], stored[name].bfloat16()) for name in stored)


@pytest.mark.parametrize("ranks", [1, 4])
def test_per_expert_pairs_have_the_same_products(
    tmp_path: Path, stored: dict[str, Tensor], family: str, ranks: int
) -> None:
    save(tmp_path, stored, family, ranks, layout="per_expert")
    seen = load_file(tmp_path / WEIGHTS)
    # Three projections in place of two parameters, a pair for each expert.
    assert sum(".experts." in name for name in seen) == 4 * EXPERTS * 3 * 2
    for each in factors(stored):
        if not each.experts:
            assert torch.equal(seen[f"base_model.model.{each.module}.lora_B.weight"], each.B)
            continue
        for expert in range(EXPERTS):
            names = ("gate_proj", "up_proj") if each.parameter == "gate_up_proj" else ("down_proj",)
            base = f"base_model.model.{each.module}.{expert}."
            products = [seen[f"{base}{name}.lora_B.weight"] @ seen[f"{base}{name}.lora_A.weight"] for name in names]
            assert torch.equal(torch.cat(products), torch.cat([half @ each.A[expert] for half in each.B[expert].chunk(len(names))]))  # fmt: skip
    import json

    told = json.loads((tmp_path / CONFIG).read_text())
    assert told["target_parameters"] is None and {"gate_proj", "up_proj", "down_proj"} <= set(told["target_modules"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_directory_is_read_back_by_any_number_of_ranks(
    tmp_path: Path, stored: dict[str, Tensor], family: str, ranks: int
) -> None:
    save(tmp_path, stored, family, 2)
    for rank in range(ranks):
        mine, wanted = factors(stored, rank, ranks), factors(stored, rank, ranks)
        for each in mine:
            each.A.zero_()
            each.B.zero_()
        adapters.load(tmp_path, mine)
        for one, other in zip(mine, wanted, strict=True):
            assert torch.equal(one.A, other.A) and torch.equal(one.B, other.B), one.module


def test_a_directory_that_lacks_a_tensor_fills_none(tmp_path: Path, stored: dict[str, Tensor], family: str) -> None:
    lost = next(name for name in sorted(stored) if "experts.lora_B" in name)
    save_file({name: each for name, each in stored.items() if name != lost}, tmp_path / WEIGHTS)
    mine = factors(stored)
    mine[0].A.fill_(7)
    with pytest.raises(LivenessError, match="1 keys missing") as caught:
        adapters.load(tmp_path, mine)
    assert caught.value.tensor == lost and caught.value.group == "routed_experts.down_proj"
    assert bool((mine[0].A == 7).all())


def test_a_file_has_its_name_only_when_every_rank_is_done(
    tmp_path: Path, stored: dict[str, Tensor], family: str
) -> None:
    def work(rank: Any) -> None:
        mine = factors(stored, rank.rank, 2)
        if rank.rank == 1:
            mine[0] = Factors("model.layers.77.mlp.experts", mine[0].A, mine[0].B, "down_proj", 4, EXPERTS)
        adapters.save(tmp_path, mine, wanted_adapters(family), family, base="b", ranks=rank)

    with pytest.raises(KeyError):
        on_ranks(2, work)
    assert not (tmp_path / WEIGHTS).exists()
