"""Packed equals unpacked, for every family, in logits and in every gradient; where it does not, packing is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.training.conftest import recipe_of
from training import lean, packing, tiny
from training.contract.families import FAMILIES
from training.contract.recipe import Recipe
from training.lean import delta_net
from training.liveness import LivenessError, require_arguments
from training.model import all_lora_tensors, attach, load_base, load_tokenizer, lora_tensors

LENGTHS = (1, 3, 17, 70)  # shorter than the convolution's four taps, and longer than a chunk of the rule


def recipe_for(family: str, dtype: str = "float32") -> Recipe:
    model = {"source": "bucket:models/tiny", "family": family, "size_gb": 0.001, "dtype": dtype}
    groups = list(FAMILIES[family].groups)
    return recipe_of("tiny-moe", model=model, adapters={"rank": 16, "alpha": 32, "groups": groups})


WAYS = [(family, way) for family in FAMILIES for way in ("ours", "stock")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def adapted(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Our layers train; those of transformers' authors take over where ours cannot, and must be exact, too."""
    family, way = request.param
    packing.install()
    base = tiny.make_model(773, 768, 767, family=family).requires_grad_(False)
    model = attach(base, recipe_for(family), None)
    if way == "stock":
        lean.remove(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return family, model


@pytest.fixture
def model(adapted: tuple[str, Any]) -> Any:
    return adapted[1]


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 700, (1, length), generator=generator) for length in LENGTHS]


def gradients(model: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Gradients of the sum over all tokens' logsumexp: every position of every document counts."""
    model.zero_grad()
    for row in rows:
        model(**row, use_cache=False).logits.logsumexp(-1).sum().backward()
    return taken(model)


def taken(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.grad.clone() for _, name, tensor in all_lora_tensors(model)}


def worst(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Largest relative difference over all LoRA tensors."""
    assert these.keys() == those.keys()
    return max(float((these[name] - grad).norm() / grad.norm()) for name, grad in those.items())


def test_packed_documents_train_exactly_as_alone(model: Any) -> None:
    alone = gradients(model, [{"input_ids": document} for document in documents()])
    packed = gradients(model, [packing.packed_inputs(documents())])
    assert worst(packed, alone) < 1e-4


def through_trl(model: Any, world: Path, out: Path, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of TRL's own trainer over the documents."""
    rows = Dataset.from_list([{"input_ids": document[0].tolist()} for document in documents()])
    arguments = SFTConfig(
        str(out),
        per_device_train_batch_size=len(LENGTHS),
        max_steps=1,
        max_grad_norm=0.0,
        learning_rate=0.0,
        router_aux_loss_coef=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        **options,
    )
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=load_tokenizer(world / "model"))
    grabbed: list[dict[str, torch.Tensor]] = []

    class Grab(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            grabbed.append(taken(given["model"]))

    trainer.add_callback(Grab())
    model.zero_grad()
    trainer.train()
    return float(trainer.state.log_history[0]["loss"]), grabbed[0]


def test_a_packed_step_of_trl_is_the_unpacked_step_and_wrapped_is_not(
    adapted: tuple[str, Any], tiny: Path, tmp_path: Path
) -> None:
    family, model = adapted
    loss, alone = through_trl(model, tiny, tmp_path, packing=False)
    for strategy in ("bfd", "bfd_split"):
        packed_loss, packed = through_trl(model, tiny, tmp_path, packing=True, packing_strategy=strategy, max_length=96)
        assert packed_loss == pytest.approx(loss, rel=1e-5)
        assert worst(packed, alone) < 1e-4, strategy
    _, wrapped = through_trl(model, tiny, tmp_path, packing=True, packing_strategy="wrapped", max_length=91)
    assert worst(wrapped, alone) > 0.1
    phase = recipe_for(family).phase("cpt")
    with pytest.raises(LivenessError, match="'wrapped' mixes documents"):
        require_arguments(SFTConfig(str(tmp_path), packing=True, packing_strategy="wrapped", use_cpu=True), phase)


def test_the_self_check_passes_on_our_path(model: Any) -> None:
    assert packing.check(model) < 1e-5


@pytest.mark.parametrize("size", [0.0, 0.15])
def test_rounding_that_sends_a_token_to_another_expert_is_no_leak(tiny: Path, size: float) -> None:
    """In bfloat16, on a card and on a CPU: an adapter that had trained stopped a healthy phase here."""
    packing.install()
    recipe = recipe_for("qwen3_5_moe", "bfloat16")
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    with torch.no_grad():
        for seed, (_, _, tensor) in enumerate(lora_tensors(model, "lora_B")):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * size)
    assert packing.check(model) < 1e-2
    with pytest.MonkeyPatch.context() as leaking:
        leaking.setattr(packing, "packed_inputs", without_ends(packing.packed_inputs))
        with pytest.raises(packing.PackingError):
            packing.check(model)


Inputs = Callable[[list[torch.Tensor]], dict[str, Any]]


def without_ends(exact: Inputs) -> Inputs:
    """position_ids alone: enough for attention, not for a state."""
    return lambda rows: {name: exact(rows)[name] for name in ("input_ids", "position_ids")}


def without_positions(exact: Inputs) -> Inputs:
    return lambda rows: {"input_ids": exact(rows)["input_ids"]}


def with_a_mask(exact: Inputs) -> Inputs:
    """With a mask of ones the borders in position_ids are ignored."""
    return lambda rows: exact(rows) | {"attention_mask": torch.ones_like(exact(rows)["input_ids"])}


@pytest.mark.parametrize("leaking", [without_positions, with_a_mask], ids=lambda each: each.__name__)
def test_a_row_that_does_not_say_where_its_documents_end_leaks_and_is_caught(
    model: Any, monkeypatch: pytest.MonkeyPatch, leaking: Callable[[Inputs], Inputs]
) -> None:
    monkeypatch.setattr(packing, "packed_inputs", leaking(packing.packed_inputs))
    # Our attention does not even begin where borders are known and the mask is not theirs.
    with pytest.raises((packing.PackingError, ValueError), match=r"logits differ|documents without an attention mask"):
        packing.check(model)


def test_position_ids_alone_do_not_reset_a_state_and_are_enough_for_attention(
    adapted: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model = adapted
    monkeypatch.setattr(packing, "packed_inputs", without_ends(packing.packed_inputs))
    if FAMILIES[family].packing == "attention":
        assert packing.check(model) < 1e-5
    else:
        with pytest.raises(packing.PackingError):
            packing.check(model)


def test_a_convolution_that_looks_across_the_border_is_caught(
    adapted: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model = adapted
    exact = packing.masked_conv
    monkeypatch.setattr(
        packing, "masked_conv", lambda x, w, b, a, document: exact(x, w, b, a, torch.zeros_like(document))
    )
    monkeypatch.setattr(
        delta_net, "document_numbers", lambda rows, tokens, *_: torch.zeros(rows * tokens, dtype=torch.int32)
    )
    if FAMILIES[family].packing == "attention":
        assert packing.check(model) < 1e-5, "it has no convolution"
    else:
        with pytest.raises(packing.PackingError, match="logits differ"):
            packing.check(model)
