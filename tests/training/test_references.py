"""The reference of DPO and KTO: TRL's own numbers to the bit, without its copy of the adapter, from the bucket the second time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, desk_of, place_box, recipe_of
from training.contract import layout

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.train
KINDS = ("dpo", "kto")


def small(**changes: Any) -> Any:
    """The tiny recipe's DPO and KTO, three steps of two rows."""
    phases = [phase for phase in recipe_of("tiny-moe").model_dump(mode="json")["phases"] if phase["kind"] in KINDS]
    return recipe_of("tiny-moe", phases=[phase | {"steps": 3} | changes for phase in phases])


@dataclass
class Bench:
    """What a phase builds its trainer from, on a policy whose adapter does something."""

    box: Box
    world: Path
    start: Path

    def setting(self, kind: str) -> tuple[Any, Any]:
        from training import data
        from training.contract.rows import read_rows
        from training.model import attach, load_base, load_tokenizer
        from training.phases.common import Setting

        desk = desk_of(self.box, kind, self.start)
        tokenizer = load_tokenizer(self.world / "model")
        rows = read_rows(desk.home.data(kind), kind)
        recipe = desk.assignment.recipe
        prepared = getattr(data, kind)(rows, desk.phase, tokenizer, recipe.seed)
        model = attach(load_base(self.world / "model", recipe), recipe, self.start)
        return Setting(desk, model, tokenizer, rows, False), prepared

    def ours(self, kind: str) -> Any:
        from training.phases import dpo, kto

        setting, prepared = self.setting(kind)
        try:
            return {"dpo": dpo, "kto": kto}[kind].build(setting, prepared)
        finally:
            setting.desk.uploader.close()

    def trls(self, kind: str) -> Any:
        """TRL's own precompute, with its `ref` adapter."""
        import trl

        setting, prepared = self.setting(kind)
        setting.desk.uploader.close()
        config, trainer = getattr(trl, f"{kind.upper()}Config"), getattr(trl, f"{kind.upper()}Trainer")
        phase = setting.desk.phase
        arguments = config(
            **setting.arguments(), max_length=phase.max_length, beta=phase.beta, precompute_ref_log_probs=True
        )
        return trainer(
            setting.model, args=arguments, train_dataset=prepared.dataset, processing_class=setting.tokenizer
        )

    @property
    def notices(self) -> list[str]:
        return [event.what for event in self.box.of("notice")]


@pytest.fixture(scope="module")
def start(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phase-start adapter that is far from nothing: with lora_B at zero base and policy would be one and hide a wrong reference."""
    from training import packing
    from training.model import attach, load_base, lora_tensors

    packing.install()
    recipe, directory = small(), tmp_path_factory.mktemp("start")
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def bench(tmp_path: Path, tiny: Path, start: Path) -> Bench:
    box = place_box(tmp_path / "box", {}, small(), "references", tiny, bucket=f"folder:{tmp_path / 'bucket'}")
    return Bench(box, tiny, start)


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_are_trls_own_to_the_bit_and_no_ref_adapter_is_made(bench: Bench, kind: str) -> None:
    from training.references import COLUMNS, compute

    trls, ours = bench.trls(kind), bench.ours(kind)
    assert set(trls.model.peft_config) == {"default", "ref"}
    assert set(ours.model.peft_config) == {"default"}
    for name in COLUMNS[kind]:
        wanted = torch.tensor(trls.train_dataset[:][name])
        assert torch.equal(torch.tensor(ours.train_dataset[:][name]), wanted), name
    assert bench.notices == ["reference computed"]
    with ours.model.disable_adapter():
        base = compute(ours, COLUMNS[kind])
    for name, values in base.items():
        assert list(values) != list(ours.train_dataset[:][name]), "the base taken for the policy would not be seen here"
    # The loss reads the columns and nothing else, so a step is TRL's step.
    batch = [next(iter(each.get_train_dataloader())) for each in (trls, ours)]
    losses = [each.compute_loss(each.model, inputs) for each, inputs in zip((trls, ours), batch, strict=True)]
    assert torch.equal(*losses)


def test_a_new_box_fetches_what_another_computed_and_computes_again_what_is_torn(bench: Bench) -> None:
    first = bench.ours("dpo").train_dataset[:]["ref_chosen_logps"]
    assert list(bench.ours("dpo").train_dataset[:]["ref_chosen_logps"]) == list(first)
    assert bench.notices == ["reference computed", "reference fetched"]

    (info,) = desk_store(bench).list(f"{layout.run('references')}/references/")
    stored = json.loads(desk_store(bench).get_bytes(info.key) or b"")
    stored["columns"]["ref_chosen_logps"][0] += 1.0
    for torn in (json.dumps(stored).encode(), json.dumps(stored).encode()[:-9], b"[]"):
        desk_store(bench).put_bytes(info.key, torn)
        assert list(bench.ours("dpo").train_dataset[:]["ref_chosen_logps"]) == list(first)
        assert bench.notices[-2:] == ["reference torn", "reference computed"]


def test_another_adapter_other_rows_and_another_batch_have_references_of_their_own(
    bench: Bench, tiny: Path, tmp_path: Path
) -> None:
    from training.model import lora_tensors
    from training.references import digest

    trainer = bench.ours("dpo")
    desk = desk_of(bench.box, "dpo")
    seen = {digest(trainer, desk)}
    dataset = trainer.train_dataset
    trainer.train_dataset = dataset.select(list(reversed(range(len(dataset)))))
    seen.add(digest(trainer, desk))
    trainer.train_dataset = dataset
    trainer.args.per_device_train_batch_size = 3
    seen.add(digest(trainer, desk))
    trainer.args.per_device_train_batch_size = 2
    with torch.no_grad():
        next(lora_tensors(trainer.model, "lora_B"))[2][0, 0] += 1e-3
    seen.add(digest(trainer, desk))
    desk.identity.versions["peft"] = "0.0"
    seen.add(digest(trainer, desk))
    desk.uploader.close()
    assert len(seen) == 5


def test_a_copy_of_the_adapter_made_in_another_way_is_refused(bench: Bench) -> None:
    from training.errors import LivenessError
    from training.references import no_copy

    setting, _ = bench.setting("dpo")
    setting.desk.uploader.close()
    add = setting.model.add_adapter
    with pytest.raises(LivenessError, match="adapter ref stands beside default"), no_copy(setting.model):
        add("ref", setting.model.peft_config["default"])


def desk_store(bench: Bench) -> Any:
    from training.box.store import Store

    return Store.from_environment(json.loads(bench.box.assignment.read_text())["bucket"])
