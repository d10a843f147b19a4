"""What TRL's trainers do otherwise on our path: log-probabilities from our own head, and SFT and CPT that never wait for the card inside a micro-batch.

Everything is set on the instance at hand, as in `training.experts`. The losses are TRL's; only where they are computed and when their numbers are read
is ours. Shape letters: B rows, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from kernels.head import IGNORED, token_log_probs
from training import lean
from training.experts import who
from training.lean import attention
from training.lean.graph import CudaGraphs, Recorder
from training.lean.packed_graph import LEAST_FULL, PackedGraphs, Room
from training.phases.reporter import TokenCount

_GIVEN = {"log_probs", "entropy", "is_top1", "mean_logits"}
_HOST_ENDS = "cu_seq_lens_host"
"""Where the documents of a packed row end, as plain numbers: accelerate sends every tensor of a batch to the card."""


@dataclass(frozen=True)
class Graphs:
    """That packed micro-batches shall run as CUDA graphs, and who is told."""

    tell: Callable[[str], None]
    """Of the capture, or of why the data has none."""
    count: TokenCount
    """Sees what goes through the model, which a replay hides."""
    at_most: int
    """Tokens of a micro-batch."""
    recorder: Callable[[], Recorder] = CudaGraphs
    warn: Callable[[str], None] | None = None
    """Of a graph that could not be captured, or not used any longer; `tell`, if not given."""


def adapt(trainer: Any, graphs: Graphs | None = None) -> bool:
    """Give this trainer, newly built by TRL, our head and, for SFT and CPT, our loss; False if it cannot have the graphs asked for. ValueError if TRL asks
    the head for what it does not give."""
    supervised = isinstance(trainer, SFTTrainer)
    install_head(trainer.model.get_base_model(), labelled_only=not supervised)
    # An auxiliary loss reads the router's logits, which TRL's own loss collects.
    ours = _Supervised(trainer) if supervised and not trainer.aux_loss_enabled else None
    if graphs is None:
        return True
    reason = "the loss is TRL's own" if ours is None else ours.run_graphs(graphs)
    if reason:
        graphs.tell(f"none, {reason}: micro-batches are launched kernel by kernel")
    return not reason


def install_head(base: Any, *, labelled_only: bool = False) -> None:
    """`base(..., fused_lm_head=True)` gives TRL's FusedCausalLMOutput, made by `kernels.head`: no logits kept, no boolean index, no wait for the card.

    `base` is a causal LM that TRL's `add_fused_lm_head` has been given. Entropy and is_top1 are always there, mean_logits if TRL asked for it. Calls
    without fused_lm_head, and those that want router logits, stay TRL's. `labelled_only` picks the positions that have a label, which waits for the
    card once a call: for methods that wait anyway, and whose long prompts have none.
    """
    asked = _asked(base)
    head, mean = base.get_output_embeddings(), None
    if head.bias is not None or head.weight.requires_grad:
        raise ValueError(
            f"the output head has {'a bias' if head.bias is not None else 'a weight that trains'}; want a frozen one without"
        )
    if "mean_logits" in asked["outputs"]:
        # The mean of the logits is the product with the mean of the rows.
        mean = head.weight.detach().mean(0, dtype=torch.promote_types(head.weight.dtype, torch.float32))
    stock, text_config = base.forward, base.config.get_text_config()

    @functools.wraps(type(base).forward)  # `generate` looks at the signature
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        routed = kwargs.get("output_router_logits") or getattr(text_config, "output_router_logits", False)
        if not fused_lm_head or routed:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return stock(*args, fused_lm_head=fused_lm_head, **given, **kwargs)
        hidden_BTH = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        weight_VH = self.get_output_embeddings().weight
        scores = functools.partial(token_log_probs, temperature=asked["temperature"])
        if labelled_only:
            scores = functools.partial(_of_labelled, scores)
        return _scored(
            hidden_BTH, scores, weight_VH, mean, labels, shift_labels, num_items_in_batch, asked["temperature"]
        )

    base.forward = types.MethodType(forward, base)


def _asked(base: Any) -> Mapping[str, Any]:
    """What TRL gave its own head: `outputs`, `temperature` and the ways of scaling logits that some families have."""
    function = getattr(base.forward, "__func__", base.forward)
    asked = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    missing = {"outputs", "temperature", "cast_lm_head_to_fp32", "final_logit_softcapping", "logit_scale"} - set(asked)
    if missing:
        raise ValueError(f"the model's forward is {who(base.forward)}; want TRL's fused head, of trl >= 1.16 and < 2")
    if unknown := set(asked["outputs"]) - _GIVEN:
        raise ValueError(f"TRL asks the head for {', '.join(sorted(unknown))}; it gives {', '.join(sorted(_GIVEN))}")
    wanted = {"cast_lm_head_to_fp32": False, "final_logit_softcapping": None, "logit_scale": 1.0}
    if odd := [f"{name} {asked[name]}" for name, plain in wanted.items() if asked[name] != plain]:
        raise ValueError(f"TRL's head has {', '.join(odd)}; our head takes the logits as they are")
    return asked


def _scored(
    hidden_BTH: Tensor,
    scores: Callable[..., tuple[Tensor, Tensor, Tensor]],
    weight_VH: Tensor,
    mean_H: Tensor | None,
    labels_BT: Tensor | None,
    shifted_BT: Tensor | None,
    items: Any,
    temperature: float,
) -> FusedCausalLMOutput:
    """TRL's fields of every position that predicts one: [B, T-1], or [B, T] with labels that are shifted already."""
    if shifted_BT is None:
        if labels_BT is None:
            raise ValueError("fused_lm_head: seen neither labels nor shift_labels, want one of them")
        # Labels move, not the hidden states, which would be copied. The last token of a row predicts nothing.
        next_BT, until = nn.functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED), -1
    else:
        next_BT, until = shifted_BT, hidden_BTH.shape[1]
    hidden_TH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).to(weight_VH.dtype)
    log_prob, entropy, top = (
        each.view(next_BT.shape)[:, :until] for each in scores(hidden_TH, weight_VH, next_BT.reshape(-1))
    )
    mask = (next_BT != IGNORED)[:, :until]
    mean_logits = None
    if mean_H is not None:
        with torch.no_grad(), torch.autocast(hidden_BTH.device.type, enabled=False):
            logits_BT = (hidden_BTH.to(mean_H.dtype) @ mean_H)[:, :until] / temperature
            mean_logits = logits_BT.masked_fill(~mask, 0.0)
    loss = -log_prob.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return FusedCausalLMOutput(
        loss=loss, log_probs=log_prob, entropy=entropy, mean_logits=mean_logits, is_top1=top, label_mask=mask
    )


def _of_labelled(
    scores: Callable[..., tuple[Tensor, Tensor, Tensor]], hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same scores, made of the positions with a label alone."""
    (at,) = torch.nonzero(label_T != IGNORED, as_tuple=True)
    found = scores(hidden_TH[at], weight_VH, label_T[at])
    log_prob, entropy, top = (each.new_zeros(label_T.shape).index_put((at,), each) for each in found)
    return log_prob, entropy, top


class _Supervised:
    """TRL's SFT loss and metrics. TRL reads four numbers back in each micro-batch, for each of which the card runs dry; here they stay on the card, and
    each process's own, until the step is logged."""

    def __init__(self, trainer: Any) -> None:
        odd = {
            "loss_type": trainer.args.loss_type != "nll",
            "label_smoothing_factor": trainer.label_smoother is not None,
            "compute_loss_func": trainer.compute_loss_func is not None,
        }
        assert not any(odd.values()), odd
        self._trainer = trainer
        self._stock_loss, self._stock_log = trainer.compute_loss, trainer.log
        self._seen: list[Tensor] = []
        """Of each micro-batch of the step: sum of the entropies, labels that were the likeliest, labels, tokens."""
        self._graphs: tuple[Graphs, PackedGraphs] | None = None
        trainer.compute_loss, trainer.log = self.compute_loss, self.log
        if getattr(trainer.data_collator, "padding_free", False):
            trainer.data_collator = _with_host_ends(trainer.data_collator)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Minus the sum of the micro-batch's log-probabilities over the labels of the *whole step*, so that every split of a step into micro-batches
        is the same step."""
        trainer = self._trainer
        inputs = _packed(trainer.model, inputs)
        if return_outputs or not trainer.model.training:
            return self._stock_loss(model, inputs, return_outputs, num_items_in_batch)
        log_probs, counts = _scores(model, inputs)
        self._seen.append(torch.cat([counts, _tokens(inputs, counts).reshape(1)]))
        items = counts[2] if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = -log_probs.sum() / items.clamp(min=1)
        if num_items_in_batch is not None and trainer.args.average_tokens_across_devices:
            # The labels are those of all processes, whose gradients are averaged.
            loss = loss * trainer.accelerator.num_processes
        return loss

    def run_graphs(self, graphs: Graphs) -> str:
        """From now on each micro-batch is one graph. Returns why not, if not."""
        trainer = self._trainer
        lengths = (
            getattr(trainer.train_dataset, "column_names", None) and "seq_lengths" in trainer.train_dataset.column_names
        )
        if not getattr(trainer.data_collator, "livery_ends", False) or not lengths:
            return "rows are not packed"
        if trainer.accelerator.num_processes > 1:
            return f"{trainer.accelerator.num_processes} processes wait for each other"
        rows = [row for row in trainer.train_dataset["seq_lengths"] if row]
        room = Room.for_rows(rows, trainer.args.per_device_train_batch_size)
        if room.tokens > graphs.at_most:
            return f"micro-batches are of {room.tokens} tokens, over {graphs.at_most}, and keep the card busy for longer than the host"
        full = trainer.args.per_device_train_batch_size * sum(map(sum, rows)) / len(rows) / room.tokens
        if full < LEAST_FULL:
            return f"rows would fill {full:.0%} of a graph, and what is free would cost as much"
        self._graphs = (
            graphs,
            PackedGraphs(trainer.model, self._results, room, graphs.tell, graphs.recorder, graphs.warn),
        )
        self._stock_step, trainer.training_step = trainer.training_step, self.training_step
        return ""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The trainer's, forward and backward, by one launch if this is a row that a graph is for."""
        assert self._graphs is not None
        (graphs, packed), ends = self._graphs, inputs.get(_HOST_ENDS)
        if ends is None or num_items_in_batch is None or "labels" not in inputs:
            return self._stock_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        if not model.training:
            model.train()
        given = self._trainer._prepare_inputs({name: inputs[name] for name in ("input_ids", "labels")})
        with graphs.count.unseen():
            found = packed(given["input_ids"], given["labels"], ends, torch.as_tensor(num_items_in_batch))
        if found is None:
            return self._stock_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        graphs.count.add(ends[-1], 1)
        loss, counts = found
        self._seen.append(torch.cat([counts, counts.new_full((1,), ends[-1])]))
        return loss.clone()

    def _results(self, inputs: dict[str, Any], items: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, counts) of a graph's micro-batch."""
        trainer = self._trainer
        with trainer.compute_loss_context_manager():
            log_probs, counts = _scores(trainer.model_wrapped, _without_mask(trainer.model, inputs))
        return -log_probs.sum() / items.clamp(min=1), counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with the metrics read back at once. Collective if there were micro-batches."""
        if self._seen:
            trainer, seen = self._trainer, torch.stack(self._seen)
            self._seen = []
            if trainer.accelerator.num_processes > 1:
                seen = trainer.accelerator.reduce(seen, "sum")
            rows = [(entropy, right, max(labels, 1.0), tokens) for entropy, right, labels, tokens in seen.tolist()]
            trainer._total_train_tokens += int(sum(tokens for *_, tokens in rows))
            metrics = trainer._metrics["train"]
            metrics["entropy"] = [entropy / labels for entropy, _, labels, _ in rows]
            metrics["mean_token_accuracy"] = [right / labels for _, right, labels, _ in rows]
            metrics["num_tokens"] = [trainer._total_train_tokens]
        self._stock_log(logs, start_time)


class HandoverWatch(TrainerCallback):
    """Modules of ours that trained in the form of their authors are a slower way that no other number shows. Looks after the first step, when little
    is paid, and every few steps; what comes up then goes to `refuse`, which may raise. At the end of training only `tell` hears of it."""

    def __init__(self, refuse: Callable[[str], None], tell: Callable[[str], None], *, every: int = 10) -> None:
        self._refuse, self._tell, self._every = refuse, tell, every
        self._steps, self._told = 0, frozenset[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._steps % self._every == 0:
            self._look(model, self._refuse)
        self._steps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._look(model, self._tell)

    def _look(self, model: Any, say: Callable[[str], None]) -> None:
        found = lean.handed_over(model)
        new = sorted(found.keys() - self._told)
        if new:
            self._told = frozenset(found)
            say(
                f"{len(new)} modules trained in transformers' form, such as {new[0]}, {found[new[0]]} times: it was given a cache, has a hook that came"
                " after loading, or several adapters at once"
            )


def _scores(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels, and [3]: sum of the entropies, labels that were the likeliest, labels."""
    outputs = model(**{**inputs, "use_cache": False}, fused_lm_head=True)
    counts = (outputs.entropy.detach().sum(), outputs.is_top1.sum(), outputs.label_mask.sum())
    return outputs.log_probs, torch.stack([each.float() for each in counts])


def _tokens(inputs: Mapping[str, Any], like: Tensor) -> Tensor:
    mask = inputs.get("attention_mask")
    # A packed row is all tokens.
    # Filled on the card: a number that is copied there waits for all before it.
    return (
        mask.sum() if isinstance(mask, Tensor) and mask.dim() == 2 else like.new_full((), inputs["input_ids"].numel())
    )


def _with_host_ends(collate: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """The collator, which also says in plain numbers where the documents of a row end."""

    def collated(examples: Any) -> dict[str, Any]:
        batch = collate(examples)
        return {**batch, _HOST_ENDS: tuple(batch["cu_seq_lens_q"].tolist())}

    collated.livery_ends = True  # type: ignore[attr-defined]
    return collated


def _packed(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a micro-batch as lean layers want them; others only lose what no model takes."""
    given = dict(inputs)
    ends = given.pop(_HOST_ENDS, None)
    if ends is None or lean.recompute_of(model) is None:
        return given
    given["cu_seq_lens_cpu"] = torch.tensor(ends, dtype=torch.int32)
    return _without_mask(model, given)


def _without_mask(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Packed inputs, with what keeps the model from building a mask of T x T, and reading it on the host, where its attention goes by the ends of the
    documents. Not so in float32, which the variable-length kernel does not take."""
    embeddings = model.get_input_embeddings().weight
    mask = lean.no_mask(model, inputs["input_ids"].device) if attention.takes_packed(embeddings) else None
    return inputs if mask is None else {**inputs, "attention_mask": mask}
