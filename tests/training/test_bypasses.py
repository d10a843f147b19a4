"""The museum of bypasses: every known way in which an adapter does not train, put into a real phase, and what the guard must say of it.

Each fault is run twice. With the guard, it is stopped at its stage and named. Without (the same code, only that no LivenessError is raised), the
same fault runs to the end and says nothing, or is stopped by somebody else, whom the table then names: so it is the guard that sees it.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeSparseMoeBlock

from tests.training.bypasses import Bench, make_world, without_guard
from training import experts, model, packing
from training.errors import LivenessError, Stage
from training.model import lora_tensors
from training.phases import grpo, sft
from training.phases.desk import Interrupted

GATE_UP, DOWN = "routed_experts.gate_up_proj", "routed_experts.down_proj"
ROUTED = (GATE_UP, DOWN)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Fault:
    sabotage: Callable[[Bench], None]
    stage: str
    group: str | None
    names: str
    """A piece of what the error must say: of its reason, its tensor or its cause."""
    phase: str = "sft"
    fresh: bool = False
    """Begin from fresh adapters and not from trained ones."""
    resumes: bool = False
    """Begin from fresh adapters and go on from the checkpoint at step 2."""
    groups: Sequence[str] | None = None
    """The recipe's groups, where they are not all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the phase, where they matter."""
    dead: Sequence[str] = ()
    """Groups whose lora_B, without the guard, is after training bit for bit what it was before."""
    otherwise: str = ""
    """Who stops it when the guard is gone; empty: nobody."""

    @property
    def name(self) -> str:
        return self.sabotage.__name__


FAULTS: list[Fault] = []
# Steps that a fault of that stage needs; one is enough for all others.
_STEPS = {"step2": 2, "running": 3, "restore": 3}


def fault(stage: str, group: str | None, names: str, **more: Any) -> Callable[[Callable[[Bench], None]], Any]:
    def enter(sabotage: Callable[[Bench], None]) -> Callable[[Bench], None]:
        FAULTS.append(Fault(sabotage, stage, group, names, **more))
        return sabotage

    return enter


@fault("versions", None, "unsloth")
def a_library_that_replaces_forwards_is_loaded(bench: Bench) -> None:
    bench.patch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))


@fault("versions", None, "peft 0.18.1")
def peft_is_older_than_what_was_tested(bench: Bench) -> None:
    version = importlib.metadata.version
    bench.patch.setattr(importlib.metadata, "version", lambda name: "0.18.1" if name == "peft" else version(name))


@fault("load", DOWN, "missing", otherwise="SafetensorError")
def the_start_adapter_lacks_a_group(bench: Bench) -> None:
    """PEFT warns and trains that group from zeros."""
    _rewrite(
        bench,
        lambda tensors: {k: v for k, v in tensors.items() if not k.split(".mlp.experts")[-1].startswith(".lora_")},
    )


@fault("load", None, "1 unknown")
def the_start_adapter_holds_a_tensor_too_many(bench: Bench) -> None:
    extra = "base_model.model.model.layers.0.mlp.gate.lora_A.weight"
    _rewrite(bench, lambda tensors: tensors | {extra: torch.zeros(8, 32)})


@fault("load", "linear_attention", "language_model", otherwise="SafetensorError")
def the_start_adapter_was_made_on_the_vision_class(bench: Bench) -> None:
    """Every name differs by one word; PEFT warns, and the model is exactly the base."""
    _rewrite(
        bench, lambda tensors: {k.replace("model.layers", "model.language_model.layers"): v for k, v in tensors.items()}
    )


@fault("load", GATE_UP, "0.19.1", otherwise="RuntimeError")
def the_start_adapter_has_a_and_b_of_an_old_peft(bench: Bench) -> None:
    """Before 0.19.1 PEFT read [E, out, in] as [E, in, out]: A and B of the experts have changed places."""
    _rewrite(bench, _swap, peft_version="0.18.1")


@fault("load", DOWN, "changed places", otherwise="RuntimeError")
def the_start_adapter_has_a_and_b_swapped_under_a_new_peft_version(bench: Bench) -> None:
    _rewrite(bench, _swap)


@fault("load", GATE_UP, "grouped by expert")
def the_start_adapter_has_lora_b_grouped_by_expert(bench: Bench) -> None:
    """What unsloth wrote until September 2026: every shape is right, the delta is nonsense."""

    def group(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: _expert_slowest(v) if ".experts." in k and "lora_B" in k else v for k, v in tensors.items()}

    _rewrite(bench, group, auto_mapping={"unsloth_fixed": True})


@fault("load", None, "lora_alpha is 64")
def the_start_adapter_is_scaled_otherwise_than_the_recipe_says(bench: Bench) -> None:
    _rewrite(bench, lambda tensors: tensors, lora_alpha=64)


@fault("attach", DOWN, "0 lora_B tensors, want 2", fresh=True)
def no_target_names_the_routed_experts(bench: Bench) -> None:
    """`all-linear` does this: the experts are parameters, not linears."""
    _targets(bench, target_parameters=None)


@fault("attach", DOWN, "0 lora_B tensors, want 2", fresh=True, groups=("shared_expert", "routed_experts"))
def the_targets_meet_only_the_shared_expert(bench: Bench) -> None:
    """gate_proj, up_proj, down_proj: the routed experts have no modules of these names."""
    _targets(bench, target_modules=["gate_proj", "up_proj", "down_proj"], target_parameters=None)


@fault("attach", GATE_UP, "rank 16", fresh=True)
def a_shorthand_doubles_the_rank_of_gate_up(bench: Bench) -> None:
    """PEFT does so when it turns names of an older layout into fused parameters."""
    _targets(bench, rank_pattern={"gate_up_proj": 16}, alpha_pattern={"gate_up_proj": 32})


@fault("attach", DOWN, "frozen", dead=ROUTED)
def the_routed_adapters_are_frozen(bench: Bench) -> None:
    """`is_trainable` forgotten, or get_peft_model around it: a look at what is trainable would find nothing missing."""
    bench.at("attached", _freeze_routed)


@fault("attach", DOWN, "want float32")
def the_routed_adapters_are_bfloat16(bench: Bench) -> None:
    """A small update of a large number is then rounded away."""
    bench.at(
        "attached", lambda model: [part.bfloat16() for link in _links(model) for part in (link.lora_A, link.lora_B)]
    )


@fault("static", GATE_UP, "unsloth_experts")
def the_experts_class_forward_is_replaced_after_attach(bench: Bench) -> None:
    """What a late `import unsloth` does. Our forward stands on the instance and goes on; that it does must not be luck."""
    bench.at("attached", lambda _: bench.patch.setattr(Qwen3_5MoeExperts, "forward", unsloth_experts))


@fault("static", GATE_UP, "unsloth_experts")
def the_experts_class_forward_is_replaced_before_attach(bench: Bench) -> None:
    bench.at("loaded", lambda _: bench.patch.setattr(Qwen3_5MoeExperts, "forward", unsloth_experts))


@fault("static", GATE_UP, "fused_block")
def the_block_class_forward_is_replaced(bench: Bench) -> None:
    """The same import does this, too. Ours stands on the instance and asks no class, so training would go on; whoever generates with a cache would not."""
    bench.at("attached", lambda _: bench.patch.setattr(Qwen3_5MoeSparseMoeBlock, "forward", fused_block))


@fault("static", GATE_UP, "layers.1.mlp.forward")
def one_block_has_a_forward_of_its_own(bench: Bench) -> None:
    bench.at("attached", lambda model: _bind(_layers(model)[1].mlp, fused_block))


@fault("static", "linear_attention", "fused_mixer")
def a_library_binds_its_forward_to_one_of_our_layers(bench: Bench) -> None:
    bench.at("attached", lambda model: _bind(_layers(model)[0].linear_attn, fused_mixer))


@fault("static", "attention", "is not training.lean's any more")
def one_of_our_forwards_is_taken_away(bench: Bench) -> None:
    bench.at("attached", lambda model: _layers(model)[-1].self_attn.__dict__.pop("forward"))


@fault("static", DOWN, "liger_experts", dead=ROUTED)
def a_kernel_library_binds_its_forward_to_the_wrappers(bench: Bench) -> None:
    """Liger means the experts; on an adapted model it meets the outermost wrapper."""
    bench.at("attached", lambda model: [_bind(wrapper, liger_experts) for _, wrapper in experts.outer_wrappers(model)])


@fault("static", DOWN, "wrapper_forward")
def the_class_of_pefts_wrapper_gets_another_forward(bench: Bench) -> None:
    bench.at("attached", lambda _: bench.patch.setattr(ParamWrapper, "forward", wrapper_forward))


@fault("static", GATE_UP, "FusedExperts")
def the_experts_class_is_swapped_at_load(bench: Bench) -> None:
    """As transformers' patch mappings and quantizers do."""
    bench.at("loaded", lambda base: [_become(layer.mlp.experts, FusedExperts) for layer in _layers(base)])


@fault("static", GATE_UP, "experts implementation None")
def the_experts_implementation_is_unset(bench: Bench) -> None:
    bench.at("loaded", lambda base: setattr(base.config, "_experts_implementation_internal", None))


@fault("static", GATE_UP, "experts implementation 'batched_mm'")
def the_experts_implementation_is_flipped_by_another_model(bench: Bench) -> None:
    """Two models of one config object: switching one switches the other."""
    bench.at(
        "attached",
        lambda model: setattr(_bare(_layers(model)[0].mlp.experts).config, "_experts_implementation", "batched_mm"),
    )


@fault("static", GATE_UP, "unsloth_experts")
def the_registry_answers_our_name_with_another_function(bench: Bench) -> None:
    local = moe.ALL_EXPERTS_FUNCTIONS._local_mapping
    bench.at("attached", lambda _: bench.patch.setitem(local, "grouped_mm", unsloth_experts))


@fault("static", DOWN, "is not training.experts")
def our_forward_is_lost_on_a_reload(bench: Bench) -> None:
    """What is bound to an instance does not survive being copied or loaded again."""
    bench.at(
        "attached", lambda model: [wrapper.__dict__.pop("forward") for _, wrapper in experts.outer_wrappers(model)]
    )


@fault("static", DOWN, "switched off", dead=ROUTED)
def the_routed_adapters_are_switched_off(bench: Bench) -> None:
    """As `disable_adapter()` does, left by an error or by a library that looks at the wrappers alone."""
    bench.at("attached", lambda model: [setattr(link, "_disable_adapters", True) for link in _links(model)])


@fault("static", DOWN, "active adapter is ref", dead=ROUTED)
def the_reference_is_the_active_adapter(bench: Bench) -> None:
    """`set_adapter("ref")`, as around the reference's forward, and not put back."""

    def activate_ref(model: Any) -> None:
        model.add_adapter("ref", model.peft_config["default"])
        model.set_adapter("ref")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)

    bench.at("attached", activate_ref)


@fault("static", DOWN, "merged", dead=ROUTED)
def the_routed_adapters_are_merged(bench: Bench) -> None:
    bench.at("attached", lambda model: [link.merge() for link in _links(model)])


@fault("static", None, "use_liger_kernel", otherwise="ImportError")
def the_trainer_is_to_use_liger(bench: Bench) -> None:
    """It replaces forwards inside train(), after every look at them. Its package is not here, so transformers cannot go on either."""
    bench.at("arguments", lambda _, arguments: arguments.update(use_liger_kernel=True))


@fault("static", None, "packing_strategy")
def packing_is_wrapped(bench: Bench) -> None:
    config = sft.SFTConfig
    bench.patch.setattr(sft, "SFTConfig", lambda **given: config(**given | {"packing_strategy": "wrapped"}))


@fault("static", None, "router_aux_loss_coef")
def the_router_loss_is_on(bench: Bench) -> None:
    """TRL's own default, with a frozen router."""
    bench.at("arguments", lambda _, arguments: arguments.pop("router_aux_loss_coef"))


@fault("static", None, "logging_nan_inf_filter")
def a_nan_is_to_be_shown_as_zero(bench: Bench) -> None:
    bench.at("arguments", lambda _, arguments: arguments.update(logging_nan_inf_filter=True))


@fault("static", None, "use_reentrant")
def checkpointing_is_reentrant(bench: Bench) -> None:
    """Layers whose input needs no gradient then get none."""
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    bench.at("arguments", lambda _, arguments: arguments.update(again))


@fault("canary", DOWN, "moves the loss by 0", dead=(DOWN,))
def only_gate_up_is_applied(bench: Bench) -> None:
    bench.at("attached", lambda model: _compute_with(model, lambda layer: Forgetful(layer, "down_proj")))


@fault("canary", GATE_UP, "moves the loss by 0", dead=(GATE_UP,))
def only_down_is_applied(bench: Bench) -> None:
    bench.at("attached", lambda model: _compute_with(model, lambda layer: Forgetful(layer, "gate_up_proj")))


@fault("canary", DOWN, "another order")
def our_computation_reads_lora_b_with_the_experts_slowest(bench: Bench) -> None:
    """It trains, it moves the loss, it answers alike wherever it runs; whoever else loads the adapter computes something else."""
    bench.patch.setattr(experts.Lora, "b_EOR", _misread)


@fault("canary", GATE_UP, "scales them otherwise")
def a_kernel_forgets_the_scaling(bench: Bench) -> None:
    bench.at("attached", lambda model: _compute_with(model, Unscaled))


@fault("canary", None, "the loss is nan", otherwise="ValidationError")
def the_base_is_damaged(bench: Bench) -> None:
    bench.at("attached", lambda model: model.get_base_model().lm_head.weight.data.view(-1)[0].fill_(float("nan")))


@fault("step1", DOWN, "layers.1.mlp.experts.lora_B")
def the_experts_of_one_layer_are_bypassed(bench: Bench) -> None:
    """By a hook: no forward was replaced, and the other layer still answers to noise."""
    bench.at("attached", lambda model: _bypass_by_hook(_layers(model)[1].mlp.experts))


@fault("step1", DOWN, "also dead: routed_experts.gate_up_proj", dead=ROUTED)
def a_kernel_has_no_backward(bench: Bench) -> None:
    """Noise moves the loss, and no gradient comes back."""
    bench.at("attached", lambda model: _compute_with(model, Detached))


@fault("step1", DOWN, "was frozen then", dead=ROUTED)
def the_routed_adapters_are_frozen_after_the_checks(bench: Bench) -> None:
    bench.at("built", lambda trainer: _freeze_routed(trainer.model))


@fault("step1", DOWN, "is not in the optimizer")
def the_parameters_are_replaced_after_the_optimizer_was_built(bench: Bench) -> None:
    def replace(trainer: Any, _: Any) -> None:
        for _, wrapper in experts.outer_wrappers(trainer.model):
            for link in (wrapper, wrapper.base_layer):
                link.lora_B["default"].weight = nn.Parameter(link.lora_B["default"].weight.detach().clone())

    bench.at("began", replace)


@fault("step1", "linear_attention", "bit for bit as it was", fresh=True)
def the_optimizer_does_nothing(bench: Bench) -> None:
    bench.at("began", lambda _, optimizer: setattr(optimizer, "step", lambda *args, **more: None))


@fault("step2", DOWN, "have no gradient", fresh=True)
def a_kernel_keeps_back_the_gradient_of_a(bench: Bench) -> None:
    """lora_B learns, on an A that stays as it was drawn: half an adapter."""
    bench.at("attached", lambda model: _compute_with(model, FrozenA))


@fault("running", None, "clipping has spread it", otherwise="NotFinite")
def a_gradient_is_not_a_number(bench: Bench) -> None:
    """In one tensor; the trainer's clipping then spreads it over all."""
    _spoil_gradient(bench, GATE_UP, step=3, factor=float("nan"))


@fault("running", GATE_UP, "layers.1.mlp.experts.base_layer.lora_B", otherwise="NotFinite")
def a_gradient_is_infinite(bench: Bench) -> None:
    """Clipping makes zeros of all others, and the culprit stands alone."""
    _spoil_gradient(bench, GATE_UP, step=3, factor=float("inf"))


@fault("running", None, "every tensor is not finite", otherwise="NotFinite")
def the_loss_becomes_infinite(bench: Bench) -> None:
    _at_step(bench, 3, lambda model: model.get_base_model().lm_head.weight.data.mul_(float("inf")))


@fault("running", None, "unsloth")
def a_late_import_brings_a_library(bench: Bench) -> None:
    def late(_: Any) -> None:
        bench.patch.setitem(sys.modules, "unsloth_zoo", types.ModuleType("unsloth_zoo"))
        bench.patch.setattr(Qwen3_5MoeSparseMoeBlock, "forward", fused_block)

    _at_step(bench, 3, late)


@fault("running", GATE_UP, "fused_block")
def a_block_forward_is_replaced_later(bench: Bench) -> None:
    _at_step(bench, 3, lambda _: bench.patch.setattr(Qwen3_5MoeSparseMoeBlock, "forward", fused_block))


@fault("running", DOWN, "_bypass_by_hook")
def experts_are_bypassed_later_by_a_hook(bench: Bench) -> None:
    """No forward is replaced and ours is called; only its answer is thrown away."""
    _at_step(bench, 3, lambda model: _bypass_by_hook(_layers(model)[0].mlp.experts))


@fault("running", GATE_UP, "layers.0.mlp")
def a_block_is_given_bare_experts_later(bench: Bench) -> None:
    """The wrapper is gone from the model, and with it everything that could be counted."""
    _at_step(bench, 3, lambda model: setattr(_layers(model)[0].mlp, "experts", _bare(_layers(model)[0].mlp.experts)))


@fault("running", DOWN, "merged")
def the_routed_adapters_are_merged_later(bench: Bench) -> None:
    _at_step(bench, 3, lambda model: [link.merge() for link in _links(model)])


@fault("running", None, "rewards had no variance", phase="grpo")
def every_completion_is_worth_the_same(bench: Bench) -> None:
    def constant(completions: Sequence[str], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    bench.patch.setattr(grpo, "call_reward", constant)


@fault("running", None, "cut off", phase="grpo")
def every_completion_is_cut_off(bench: Bench) -> None:
    """Rewards differ, and TRL masks every token of what did not end by itself: no gradient, and no bypass either."""
    bench.at(
        "built", lambda trainer: setattr(trainer.generation_config, "suppress_tokens", trainer.eos_token_ids.copy())
    )


@fault("rollout", DOWN, "switched off", phase="grpo")
def completions_are_made_without_the_adapter(bench: Bench) -> None:
    def generate_without(trainer: Any) -> None:
        generate = trainer.model.generate

        def without(*given: Any, **named: Any) -> Any:
            with trainer.model.disable_adapter():
                return generate(*given, **named)

        trainer.model.generate = without

    bench.at("built", generate_without)


@fault("rollout", None, "another engine", phase="grpo")
def completions_are_made_by_another_engine(bench: Bench) -> None:
    """From weights that nobody looks at."""

    def elsewhere(trainer: Any) -> None:
        ids = [[20 + 3 * i] * (i % 3 + 1) + [trainer.eos_token_ids[0]] for i in range(4)]
        trainer._generate_single_turn = lambda *given, **named: (ids, None)

    bench.at("built", elsewhere)


@fault("rollout", None, "frozen base weight", phase="grpo")
def a_weight_sync_rounds_the_base(bench: Bench) -> None:
    """Merged into bfloat16 and back, as a sync to a server does it in place."""

    def generate_rounding(trainer: Any) -> None:
        generate = trainer.model.generate

        def rounding(*given: Any, **named: Any) -> Any:
            for name, weight in trainer.model.named_parameters():
                if not weight.requires_grad and "proj" in name:
                    weight.data.copy_(weight.data.bfloat16())
            return generate(*given, **named)

        trainer.model.generate = rounding

    bench.at("built", generate_rounding)


@fault("reference", None, "not the policy that the phase began with", phase="dpo")
def the_reference_of_dpo_is_the_base(bench: Bench) -> None:
    """What TRL falls back to with a peft that cannot copy an adapter of fused experts."""
    _build_as_base(bench)


@fault("reference", None, "not the policy that the phase began with", phase="kto")
def the_reference_of_kto_is_the_base(bench: Bench) -> None:
    _build_as_base(bench)


@fault("reference", None, "stands beside default", phase="dpo")
def a_second_adapter_stands_beside_the_first(bench: Bench) -> None:
    """TRL's own reference: a second copy in memory, and in every checkpoint."""
    bench.at("arguments", lambda setting, _: setting.model.add_adapter("ref", setting.model.peft_config["default"]))


@fault("reference", "linear_attention", "differs from the phase-start adapter", phase="grpo", settings={"beta": 0.1})
def the_reference_of_grpo_is_the_base(bench: Bench) -> None:
    """With a KL term GRPO has no rewards of a first step to tell by; its copy of the adapter is looked at instead."""

    class WithEmptyCopy(grpo.GRPOTrainer):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for _, _, tensor in lora_tensors(self.model, "lora_B", "ref"):
                tensor.data.zero_()

    bench.patch.setattr(grpo, "GRPOTrainer", WithEmptyCopy)


@fault("checkpoint", "linear_attention", "is not what is in memory")
def the_reference_is_saved_in_place_of_the_adapter(bench: Bench) -> None:
    assert bench.start is not None
    start = bench.start / WEIGHTS
    _after_saving(bench, lambda directory: shutil.copy(start, directory / WEIGHTS))


@fault("checkpoint", GATE_UP, "missing")
def the_routed_tensors_are_not_saved(bench: Bench) -> None:
    """As when they stand in a module of one's own, which PEFT does not know."""

    def drop(directory: Path) -> None:
        kept = {k: v for k, v in load_file(directory / WEIGHTS).items() if ".experts." not in k}
        save_file(kept, directory / WEIGHTS)

    _after_saving(bench, drop)


@fault("restore", "linear_attention", "other weights than the manifest says", resumes=True)
def a_resume_takes_the_weights_that_the_phase_began_with(bench: Bench) -> None:
    assert bench.start is not None and bench.resume_dir is not None
    shutil.copy(bench.start / WEIGHTS, bench.resume_dir / WEIGHTS)


@fault("restore", None, "state for 0 of", resumes=True)
def a_resume_lacks_the_state_of_the_optimizer(bench: Bench) -> None:
    assert bench.resume_dir is not None
    (bench.resume_dir / "optimizer.pt").unlink()


@fault("end", DOWN, "lora_B of routed_experts.down_proj are zero")
def a_lora_b_is_zero_at_the_end(bench: Bench) -> None:
    def clear(model: Any) -> None:
        next(tensor for group, _, tensor in lora_tensors(model, "lora_B") if group == DOWN).data.zero_()

    _after_step(bench, bench.steps, clear)


@fault("end", "attention", "bit for bit what it was")
def a_group_ends_as_it_began(bench: Bench) -> None:
    kept: dict[str, Tensor] = {}

    def keep(model: Any) -> None:
        kept.update({name: tensor.detach().clone() for name, tensor in _of_group(model, "attention")})

    def put_back(model: Any) -> None:
        for name, tensor in _of_group(model, "attention"):
            tensor.data.copy_(kept[name])

    bench.at("attached", keep)
    _after_step(bench, bench.steps, put_back)


@fault("end", None, "frozen base weight")
def the_base_is_trained(bench: Bench) -> None:
    def train(model: Any) -> None:
        for name, weight in model.named_parameters():
            if "lora_" not in name:
                weight.data.add_(1e-3)

    _after_step(bench, bench.steps, train)


@fault("merge", DOWN, "s·B·A", phase="merge")
def a_merge_leaves_the_experts_out(bench: Bench) -> None:
    bench.patch.setattr(ParamWrapper, "merge", lambda self, *given, **named: self.merged_adapters.append("default"))
    bench.patch.setattr(ParamWrapper, "unmerge", lambda self: self.merged_adapters.clear())


@fault("merge", None, "away from what it answers unmerged", phase="merge")
def a_merge_adds_another_delta_than_the_one_that_trained(bench: Bench) -> None:
    bench.patch.setattr(experts.Lora, "b_EOR", _misread)


@fault("serve", None, "the base answers", phase="evaluation")
def a_server_takes_the_adapter_and_applies_nothing(bench: Bench) -> None:
    bench.at("attached", lambda model: [tensor.data.zero_() for _, _, tensor in lora_tensors(model, "lora_B")])


@fault("serve", None, "only a part of the adapter", phase="evaluation")
def a_server_leaves_the_experts_out(bench: Bench) -> None:
    bench.at("attached", lambda model: _compute_with(model, Bare))


@fault("serve", None, "neither of them", phase="evaluation")
def a_server_reads_lora_b_with_the_experts_slowest(bench: Bench) -> None:
    bench.at("attached", lambda _: bench.patch.setattr(experts.Lora, "b_EOR", _misread))


@dataclass(frozen=True)
class Lab:
    """The world, an adapter that was trained in it, and a phase that was told to stop after step 2."""

    world: Path
    adapter: Path
    interrupted: Bench

    def bench(self, tmp_path: Path, patch: pytest.MonkeyPatch, phase: str, **more: Any) -> Bench:
        return Bench(self.world, tmp_path, patch, phase, **more)

    def of(self, fault: Fault, tmp_path: Path, patch: pytest.MonkeyPatch) -> Bench:
        bench = self._bench(fault, tmp_path, patch)
        fault.sabotage(bench)
        return bench

    def _bench(self, fault: Fault, tmp_path: Path, patch: pytest.MonkeyPatch) -> Bench:
        patch.setattr(packing, "check", lambda _: 0.0)  # has its own tests, and would take a tenth of each run
        if not fault.resumes:
            start = None if fault.fresh else self.adapter
            steps = _STEPS.get(fault.stage, 1)
            return self.bench(
                tmp_path, patch, fault.phase, groups=fault.groups, settings=fault.settings, start=start, steps=steps
            )
        (found,) = self.interrupted.checkpoints.newest_first("sft", self.interrupted.identity())
        files = self.interrupted.checkpoints.fetch(found, tmp_path / "fetched")
        start = self.interrupted.root / "work" / "fresh" / "sft"
        return self.bench(tmp_path, patch, "sft", steps=3, start=start, resume=found, resume_dir=files)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    root = tmp_path_factory.mktemp("lab")
    world = make_world(root / "world")
    with pytest.MonkeyPatch.context() as patch:
        adapter = Bench(world, root / "trained", patch).run()
    with pytest.MonkeyPatch.context() as patch:
        interrupted = Bench(world, root / "interrupted", patch)
        _after_step(interrupted, 2, lambda _: interrupted.stop.set())
        with pytest.raises(Interrupted):
            interrupted.run()
    return Lab(world, adapter, interrupted)


@pytest.mark.parametrize("kind", ["cpt", "sft", "dpo", "kto", "grpo"])
def test_a_healthy_phase_passes_every_stage(
    kind: str, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: layers computed again for the backward, several micro-steps a step."""
    bench = lab.bench(tmp_path, monkeypatch, kind, start=lab.adapter, steps=2, settings={"accumulation": 2})
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    bench.at("arguments", lambda _, arguments: arguments.update(again))
    bench.run()
    wanted = ["versions", "load", "attach", "static", "canary", "step1", "step2", "checkpoint", "end"]
    wanted += ["rollout"] if kind == "grpo" else ["reference"] if kind in ("dpo", "kto") else []
    assert set(wanted) <= set(bench.passed)


@pytest.mark.parametrize("what", ["evaluation", "merge"])
def test_a_healthy_adapter_is_served_and_merged(
    what: str, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.bench(tmp_path, monkeypatch, what, start=lab.adapter).run()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_caught_at_its_stage_and_named(
    fault: Fault, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LivenessError) as caught:
        lab.of(fault, tmp_path, monkeypatch).run()
    error = caught.value
    said = f"{error} | {error.tensor} | {error.cause}"
    assert (error.stage, error.group) == (fault.stage, fault.group), said
    assert fault.names in said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_without_the_guard_nobody_says_a_word(
    fault: Fault, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = lab.of(fault, tmp_path, monkeypatch)
    unsaid = without_guard(monkeypatch)
    try:
        result = bench.run()
        stopped_by = ""
    except Exception as error:  # whoever stops it then is what is asked here
        stopped_by = type(error).__name__
        if stopped_by != fault.otherwise:
            raise
    assert stopped_by == fault.otherwise
    assert unsaid and (unsaid[0].stage, unsaid[0].group) == (fault.stage, fault.group)
    for group in fault.dead:
        assert _stored(result, group) == _stored(lab.adapter, group)


def test_what_counts_as_dead_is_otherwise_alive(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = lab.bench(tmp_path, monkeypatch, "sft", start=lab.adapter, steps=1).run()
    for group in ROUTED:
        assert _stored(result, group) != _stored(lab.adapter, group)


def test_all_stages_have_a_fault_here() -> None:
    assert {fault.stage for fault in FAULTS} == set(get_args(Stage))


def fused_mixer(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def unsloth_experts(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    raise AssertionError("our forward is on the instance, and asks neither class nor registry")


class FusedExperts(Qwen3_5MoeExperts):
    """A library's own class, fed with the same weights."""

    forward = unsloth_experts


def fused_block(self: Any, hidden_BTH: Tensor) -> Tensor:
    """The whole block at once, from the experts' weights: right answers of the base, and no adapter in them."""
    rows = hidden_BTH.view(-1, hidden_BTH.shape[-1])
    _, weights, ids = self.gate(rows)
    routed = _plain(_bare(self.experts), rows, ids, weights)
    return (routed + self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)).view_as(hidden_BTH)


def liger_experts(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return _plain(_bare(self), hidden, ids, weights)


def wrapper_forward(self: Any, *given: Any) -> Any:
    return self.base_layer(*given)


class Bare:
    """Stands for a kernel: the base's experts, whatever adapters are handed to it."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor, active: Any) -> Tensor:
        result: Tensor = self._layer(experts, hidden, ids, weights, {})
        return result


class Forgetful(Bare):
    """A kernel that applies only one of the two deltas."""

    def __init__(self, layer: Any, forgotten: str) -> None:
        super().__init__(layer)
        self._forgotten = forgotten

    def __call__(self, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor, active: Any) -> Tensor:
        kept = {name: factors for name, factors in active.items() if name != self._forgotten}
        result: Tensor = self._layer(experts, hidden, ids, weights, kept)
        return result


class Detached(Bare):
    """A kernel for inference: right answers, no backward."""

    def __call__(self, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor, active: Any) -> Tensor:
        with torch.no_grad():
            result: Tensor = self._layer(experts, hidden, ids, weights, active)
        return result


class Unscaled(Bare):
    """A kernel that takes alpha / rank for 1 in the first product."""

    def __call__(self, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor, active: Any) -> Tensor:
        unscaled = [replace(lora, scaling=1.0) for lora in active.get("gate_up_proj", ())]
        handed = {**active, "gate_up_proj": unscaled} if unscaled else active
        result: Tensor = self._layer(experts, hidden, ids, weights, handed)
        return result


class FrozenA(Bare):
    """A kernel whose backward leaves lora_A out."""

    def __call__(self, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor, active: Any) -> Tensor:
        kept = {name: [replace(lora, A=lora.A.detach()) for lora in factors] for name, factors in active.items()}
        result: Tensor = self._layer(experts, hidden, ids, weights, kept)
        return result


def _stored(adapter: Path, group: str) -> dict[str, list[Any]]:
    place = ".mlp.experts.base_layer.lora_B." if group == GATE_UP else ".mlp.experts.lora_B."
    found = {name: tensor.tolist() for name, tensor in load_file(adapter / WEIGHTS).items() if place in name}
    assert len(found) == 2
    return found


def _misread(lora: experts.Lora) -> Tensor:
    return lora.B.reshape(lora.B.shape[0], lora.num_experts, -1).permute(1, 0, 2)


def _expert_slowest(b: Tensor, count: int = 4) -> Tensor:
    return b.reshape(b.shape[0], -1, count).transpose(1, 2).reshape(b.shape).contiguous()


def _plain(bare: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The base's experts in one product a token and expert."""
    up = torch.einsum("th,tkih->tki", hidden, bare.gate_up_proj[ids])
    return torch.einsum("tki,tkhi,tk->th", bare._apply_gate(up), bare.down_proj[ids], weights)


def _links(model: Any) -> list[Any]:
    """Every wrapper of a parameter of the experts."""
    return [link for _, wrapper in experts.outer_wrappers(model) for link in experts.chain(wrapper)]


def _bare(wrapper: Any) -> Any:
    return list(experts.chain(wrapper))[-1].base_layer


def _layers(model: Any) -> Any:
    return (model.get_base_model() if isinstance(model, PeftModel) else model).model.layers


def _bind(module: Any, forward: Any) -> None:
    module.forward = types.MethodType(forward, module)


def _become(module: Any, cls: type) -> None:
    module.__class__ = cls


def _bypass_by_hook(wrapper: Any) -> None:
    wrapper.register_forward_hook(lambda module, given, _: _plain(_bare(module), *given))


def _compute_with(model: Any, made: Callable[[Any], Any]) -> None:
    for _, wrapper in experts.outer_wrappers(model):
        wrapper.livery_layer = made(wrapper.livery_layer)


def _of_group(model: Any, group: str) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, tensor)
        for which in ("lora_A", "lora_B")
        for own, name, tensor in lora_tensors(model, which)
        if own == group
    ]


def _freeze_routed(model: Any) -> None:
    for _, tensor in [*_of_group(model, GATE_UP), *_of_group(model, DOWN)]:
        tensor.requires_grad_(False)


def _targets(bench: Bench, **changes: Any) -> None:
    lora_config = model.lora_config

    def changed(*given: Any) -> Any:
        config = lora_config(*given)
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    bench.patch.setattr(model, "lora_config", changed)


def _at_step(bench: Bench, wanted: int, sabotage: Callable[[Any], Any]) -> None:
    bench.at("step", lambda trainer, number: sabotage(trainer.model) if number == wanted else None)


def _after_step(bench: Bench, wanted: int, sabotage: Callable[[Any], Any]) -> None:
    bench.at("stepped", lambda trainer, number: sabotage(trainer.model) if number == wanted else None)


def _after_saving(bench: Bench, sabotage: Callable[[Path], Any]) -> None:
    bench.at("saved", lambda _, directory: sabotage(directory))


def _spoil_gradient(bench: Bench, group: str, step: int, factor: float) -> None:
    now = [0]
    bench.at("step", lambda _, number: now.__setitem__(0, number))

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * factor if now[0] == step else gradient

    bench.at("built", lambda trainer: _of_group(trainer.model, group)[-1][1].register_hook(spoil))


def _build_as_base(bench: Bench) -> None:
    """While the trainer is built, and with it its reference, the model is the base."""
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def clear(setting: Any, _: Any) -> None:
        kept.extend((tensor, tensor.detach().clone()) for _, _, tensor in lora_tensors(setting.model, "lora_B"))
        for tensor, _ in kept:
            tensor.data.zero_()

    def put_back(_: Any) -> None:
        for tensor, values in kept:
            tensor.data.copy_(values)

    bench.at("arguments", clear)
    bench.at("built", put_back)


def _rewrite(bench: Bench, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> None:
    """Change the start adapter's tensors, and fields of its configuration."""
    assert bench.start is not None
    save_file(change(load_file(bench.start / WEIGHTS)), bench.start / WEIGHTS)
    told = json.loads((bench.start / CONFIG).read_text())
    (bench.start / CONFIG).write_text(json.dumps(told | config))


def _swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A and B of the experts as an old peft had them: A [E·r, out], B [in, r·E]."""
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {
        key: value
        if ".experts." not in key
        else tensors[key.replace(which := next(each for each in other if each in key), other[which])].T.contiguous()
        for key, value in tensors.items()
    }
