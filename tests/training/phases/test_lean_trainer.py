from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.training.conftest import recipe_of
from training import lean, packing
from training.lean import attention
from training.model import attach, load_base, load_tokenizer, lora_tensors
from training.phases import lean_trainer
from training.phases.reporter import TokenCount

OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits")


@pytest.fixture(scope="module")
def world() -> Any:
    from training import tiny

    return tiny.make_model(96, 1, 0).requires_grad_(False)


def with_heads(model: Any, labelled_only: bool = False, **asked: Any) -> tuple[Any, Any]:
    """The same model twice: with TRL's head, and with ours put on it."""
    pair = copy.deepcopy(model), copy.deepcopy(model)
    for each in pair:
        add_fused_lm_head(each, **{"outputs": OUTPUTS, **asked})
        each.model.embed_tokens.weight.requires_grad_(True)  # something whose gradient tells of every hidden state
    lean_trainer.install_head(pair[1], labelled_only=labelled_only)
    return pair


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (3, 17), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


@pytest.mark.parametrize("labelled_only", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shifted", [False, True])
def test_our_head_gives_what_trls_gives(world: Any, temperature: float, shifted: bool, labelled_only: bool) -> None:
    given = rows()
    if shifted:
        given = {"shift_labels" if name == "labels" else name: value for name, value in given.items()}
    weights = torch.rand(3, 17 if shifted else 16, generator=torch.Generator().manual_seed(1))
    seen = []
    for model in with_heads(world, labelled_only, temperature=temperature):
        out = model(**given, num_items_in_batch=torch.tensor(7), fused_lm_head=True)
        (out.log_probs * weights).sum().backward()
        seen.append((out, model.model.embed_tokens.weight.grad))
    (theirs, their_grad), (ours, our_grad) = seen
    for name in (*OUTPUTS, "loss", "label_mask"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, check_dtype=False)
    assert ours.is_top1.dtype == ours.label_mask.dtype == torch.bool
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-4, atol=1e-6)
    assert their_grad.abs().max() > 1e-3


@pytest.mark.parametrize("labelled_only", [False, True])
def test_a_batch_without_a_label_gives_zeros_and_a_zero_gradient(world: Any, labelled_only: bool) -> None:
    _, model = with_heads(world, labelled_only)
    given = rows() | {"labels": torch.full((3, 17), -100)}
    out = model(**given, fused_lm_head=True)
    out.loss.backward()
    assert float(out.loss) == 0.0 and not out.label_mask.any() and not out.is_top1.any()
    assert float(model.model.embed_tokens.weight.grad.abs().max()) == 0.0


def test_without_the_heads_word_the_forward_is_the_models_own(world: Any) -> None:
    _, ours = with_heads(world)
    given = rows()
    torch.testing.assert_close(ours(**given).logits, world(**given).logits, rtol=0, atol=0)


def test_what_the_head_does_not_give_is_refused_by_name(world: Any) -> None:
    model = copy.deepcopy(world)
    with pytest.raises(ValueError, match=r"want TRL's fused head"):
        lean_trainer.install_head(model)
    add_fused_lm_head(model, outputs=("log_probs", "log_sum_sq_probs"))
    with pytest.raises(ValueError, match=r"TRL asks the head for log_sum_sq_probs; it gives entropy, is_top1"):
        lean_trainer.install_head(model)
    model = copy.deepcopy(world)
    add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match=r"cast_lm_head_to_fp32 True"):
        lean_trainer.install_head(model)
    model = copy.deepcopy(world)
    model.lm_head.weight.requires_grad_(True)
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match=r"a weight that trains"):
        lean_trainer.install_head(model)


class Seen(TrainerCallback):
    """The gradient that each step would take, and what it logged."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logs: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        trained = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        self.gradients.append(trained)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class Again:
    """A recorder of graphs for a machine without a card: the same work is done again in the same memory."""

    def warm_up(self, work: Any) -> None:
        work()

    def record(self, work: Any) -> Any:
        return work


def supervised(
    tiny: Path,
    into: Path,
    *,
    ours: bool,
    batch: int,
    accumulation: int,
    packed: bool = False,
    steps: int = 1,
    max_length: int = 256,
    graphs: lean_trainer.Graphs | None = None,
) -> Seen:
    """Optimizer steps over four rows of different lengths."""
    recipe = recipe_of("tiny-moe")
    packing.install()
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(tensor.numel()))
    texts = [" ".join(["weather in Paris"] * n) for n in (1, 9, 3, 6)]
    arguments = SFTConfig(
        output_dir=str(into),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        max_grad_norm=0.0,
        max_length=max_length,
        learning_rate=1e-2,
        packing=packed,
        packing_strategy="bfd_split",
        dataset_text_field="text",
        router_aux_loss_coef=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    seen = Seen()
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=load_tokenizer(tiny / "model"),
        callbacks=[seen],
    )
    if ours:
        lean_trainer.adapt(trainer, graphs)
    if graphs is not None:
        graphs.count.watch(model)
    trainer.train()
    return seen


def require_same_step(one: Seen, other: Seen) -> None:
    (first,), (second,) = one.gradients, other.gradients
    assert first.keys() == second.keys() and len(first) > 20
    for name, gradient in first.items():
        torch.testing.assert_close(
            gradient, second[name], rtol=2e-3, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}"
        )
    assert one.logs[0]["loss"] == pytest.approx(other.logs[0]["loss"], rel=1e-4)


@pytest.mark.train
@pytest.mark.parametrize("packed", [False, True])
def test_a_supervised_step_is_trls_own_with_its_metrics(tiny: Path, tmp_path: Path, packed: bool) -> None:
    theirs, ours = (
        supervised(tiny, tmp_path / str(mine), ours=mine, batch=2, accumulation=1 if packed else 2, packed=packed)
        for mine in (False, True)
    )
    require_same_step(theirs, ours)
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert ours.logs[0][name] == pytest.approx(theirs.logs[0][name], rel=1e-4), name
        assert isinstance(ours.logs[0][name], (int, float))
    assert ours.logs[0]["num_tokens"] > 20


@pytest.mark.train
def test_every_split_of_a_step_into_micro_batches_is_the_same_step(tiny: Path, tmp_path: Path) -> None:
    """Rows have different lengths, so the mean of the micro-batches' means would be another step."""
    whole, *split = (
        supervised(tiny, tmp_path / str(batch), ours=True, batch=batch, accumulation=4 // batch) for batch in (4, 2, 1)
    )
    for each in split:
        require_same_step(whole, each)


def graphs_of(told: list[str], at_most: int = 4096) -> lean_trainer.Graphs:
    return lean_trainer.Graphs(told.append, TokenCount(), at_most, Again)


@pytest.mark.train
def test_packed_steps_as_graphs_are_the_same_steps(tiny: Path, tmp_path: Path) -> None:
    told: list[str] = []
    graphs = graphs_of(told)
    given: Any = {"ours": True, "batch": 4, "accumulation": 1, "packed": True, "steps": 3, "max_length": 16}
    plain = supervised(tiny, tmp_path / "plain", **given)
    seen = supervised(tiny, tmp_path / "graphs", **given, graphs=graphs)
    assert len(told) == 1 and "is one graph" in told[0]
    assert len(seen.logs) == len(plain.logs) == 4
    for mine, wanted in zip(seen.logs[:3], plain.logs, strict=False):
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
            assert mine[name] == pytest.approx(wanted[name], rel=1e-4), name
    for mine, wanted in zip(seen.gradients, plain.gradients, strict=True):
        for name, gradient in wanted.items():
            assert float((mine[name] - gradient).norm()) <= 5e-3 * float(gradient.norm()), name
    # What a graph's room adds to a row is none of its tokens.
    tokens, rows = graphs.count.take()
    assert rows == 3 and tokens == seen.logs[2]["num_tokens"]


@pytest.mark.train
def test_what_no_graph_takes_is_counted_once(tiny: Path, tmp_path: Path) -> None:
    class Refuses(Again):
        def record(self, work: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    told, warned = list[str](), list[str]()
    graphs = lean_trainer.Graphs(told.append, TokenCount(), 4096, Refuses, warned.append)
    given: Any = {"ours": True, "batch": 4, "accumulation": 1, "packed": True, "steps": 2, "max_length": 16}
    seen = supervised(tiny, tmp_path, **given, graphs=graphs)
    assert told == [] and len(warned) == 1 and "not captured" in warned[0]
    assert graphs.count.take() == (seen.logs[1]["num_tokens"], 2)


@pytest.mark.train
def test_where_no_graph_fits_it_is_said_and_trains_on(tiny: Path, tmp_path: Path) -> None:
    given: Any = {"ours": True, "batch": 2, "accumulation": 1}
    told: list[str] = []
    seen = supervised(tiny, tmp_path / "rows", **given, graphs=graphs_of(told))
    assert (
        told == ["none, rows are not packed: micro-batches are launched kernel by kernel"] and len(seen.gradients) == 1
    )
    told.clear()
    supervised(tiny, tmp_path / "long", **given, packed=True, max_length=24, graphs=graphs_of(told, at_most=32))
    assert len(told) == 1 and "over 32, and keep the card busy" in told[0]


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a card: numbers read back and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_reads_nothing_back(world: Any) -> None:
    """The head and the loss around it; what the layers do is theirs."""
    _, model = with_heads(world)
    given = rows()
    hidden = model.model(input_ids=given["input_ids"], use_cache=False)
    model.model.forward = lambda **_: hidden
    trainer = SimpleNamespace(
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        label_smoother=None,
        compute_loss_func=None,
        accelerator=SimpleNamespace(num_processes=1),
        model=model,
        compute_loss=None,
        log=lambda *_: None,
        data_collator=None,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
    )
    supervised_loss = lean_trainer._Supervised(trainer)
    inputs = {name: given[name] for name in ("input_ids", "labels")} | {"attention_mask": torch.ones(3, 17)}
    with Reads() as reads:
        loss = supervised_loss.compute_loss(model, inputs, num_items_in_batch=torch.tensor(30))
    assert reads.seen == [] and loss.requires_grad
    with Reads() as reads:
        float(loss.detach())
    assert reads.seen == ["_local_scalar_dense"], "a read would have been seen"
    trainer.log({})
    assert trainer._total_train_tokens == 51
    assert isinstance(trainer._metrics["train"]["entropy"][0], float)


class Handed:
    """A model in training, the watch on it, and what the watch said."""

    def __init__(self, tiny: Path) -> None:
        recipe = recipe_of("tiny-moe")
        self.model = attach(load_base(tiny / "model", recipe), recipe, None).train()
        self.refused: list[str] = []
        self.told: list[str] = []
        self.watch = lean_trainer.HandoverWatch(self.refused.append, self.told.append, every=2)

    def step(self, **options: Any) -> None:
        self.model(input_ids=torch.arange(4, 12)[None], **options)
        self.watch.on_step_end(None, None, None, model=self.model)

    def end(self) -> None:
        self.watch.on_train_end(None, None, None, model=self.model)


@pytest.mark.train
def test_a_module_that_trains_in_the_stock_form_is_told_at_the_first_step_and_once(tiny: Path) -> None:
    handed = Handed(tiny)
    for _ in range(3):
        handed.step(use_cache=True)
    handed.end()
    assert handed.told == [] and len(handed.refused) == 1
    assert "modules trained in transformers' form, such as base_model.model.model.layers.0" in handed.refused[0]
    assert len(lean.handed_over(handed.model)) > 4


@pytest.mark.train
def test_what_comes_up_later_is_told_within_some_steps_and_at_the_end_never_stops_the_phase(tiny: Path) -> None:
    handed = Handed(tiny)
    handed.step(use_cache=False)
    with torch.no_grad():
        handed.model(input_ids=torch.arange(4, 12)[None], use_cache=True)  # as a reference or a generation does
    handed.step(use_cache=False)
    handed.end()
    assert handed.refused == handed.told == []
    linear = next(each for name, each in handed.model.named_modules() if name.endswith("o_proj"))
    linear.register_forward_hook(lambda *_: None)
    handed.step(use_cache=False)
    assert len(handed.refused) == 1 and "1 modules" in handed.refused[0] and "self_attn, 1 times" in handed.refused[0]
    handed.step(use_cache=True)
    handed.end()
    assert len(handed.refused) == len(handed.told) == 1


def test_a_model_whose_attention_wants_a_mask_is_not_told_to_do_without(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 there is no variable-length kernel, on a card either."""
    packing.install()
    recipe = recipe_of("tiny-moe")
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    given = {
        **packing.packed_inputs([torch.arange(4, 12)[None], torch.arange(5, 9)[None]]),
        "cu_seq_lens_host": (0, 8, 12),
    }
    monkeypatch.setattr(
        attention, "takes_packed", lambda query: query.dtype is torch.bfloat16
    )  # but for the card itself
    packed = lean_trainer._packed(model, given)
    assert "attention_mask" not in packed and packed["cu_seq_lens_cpu"].tolist() == [0, 8, 12]
    model(**packed, use_cache=False)
    model.get_input_embeddings().to(torch.bfloat16)
    assert set(lean_trainer._packed(model, given)["attention_mask"].values()) == {None}
