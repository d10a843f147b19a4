"""Is every LoRA group alive? One set of checks for every phase, from the first import to the last server.

A routed expert whose adapter never trains looks healthy in every number of a run: losses fall, gradients have a norm, checkpoints have
their size. So each check looks at the tensors one by one, in groups that come from the recipe and never from what happens to be trainable.

stage       what is looked at                                              what it catches
versions    versions, libraries about, Hugging Face's `kernels`            libraries that replace forwards at import; a peft, transformers or trl with a known hole
load        family, class, adapter_config.json, names and shapes           text and vision class mixed up; missing or unknown keys; A and B of an older peft; lora_B
                                                                           grouped by expert; another rank, alpha or set of targets
attach      counts, rank, alpha, dtype, orientation a group                a group that no target matches; only the shared expert; doubled ranks; frozen adapters
static      classes and forwards of block, experts, wrappers and LoRA      class, block or instance forward replaced; experts class swapped at load; registry name lost,
            layers; registry; switches; trainer arguments                  shadowed or on the wrong config; use_kernels, Liger, torch.compile, `wrapped` packing;
                                                                           adapters off, merged, frozen, or another one active
canary      noise in one group's lora_B must move the loss; one layer's    any way round a group's adapters, by whatever mechanism; a kernel that reads lora_B in
            answers are PEFT's own                                         another order
step1       a gradient in every lora_B, all tensors in the optimizer,      experts bypassed in one layer, gate_up only, no graph through checkpointing; an optimizer
            every lora_B changed by the update                             built before parameters were replaced, or that does nothing
step2       a gradient in every lora_A once its lora_B is not zero         a detached input of the adapter
running     finite gradients before each update; each layer's experts      NaN; patches by a late import; a block that stops calling its experts; rewards without variance
            ran with the adapter; static again every few steps
rollout     adapters on while GRPO generates; base weights bit for bit     another engine or no adapter in rollouts; a merge in place that rounds the base away
reference   rewards of the first step are zero (DPO, KTO)                  the base, or a later policy, taken for the reference
checkpoint  what lies on the disk is what is in memory                     `ref` saved for `default`, tensors left out, another step's file
restore     group digests and optimizer state against the manifest         a resume from other weights, or without the optimizer's state
end         every group changed, no lora_B zero, base unchanged            a phase that trained nothing
merge       each weight changes by s·B·A, answers stay, bits come back     wrong packing of lora_B, a delta left out
serve       a server's log-probabilities are the adapter's                 a server that takes the adapter and applies nothing
"""

from training.errors import LivenessError, Stage
from training.liveness.rollouts import Rollouts, base_sums, require_base_unchanged
from training.liveness.serving import (
    PROBE,
    Probe,
    log_probabilities,
    probe_of,
    read_probe,
    require_merged,
    require_served,
    write_probe,
)
from training.liveness.states import (
    SaveGuard,
    group_states,
    require_changed,
    require_reference,
    require_restored,
    require_saved,
)
from training.liveness.static import (
    Fault,
    faults,
    likely_cause,
    refuse_foreign,
    require_active,
    require_arguments,
    require_static,
    require_versions,
)
from training.liveness.steps import (
    Gradient,
    Guard,
    canary,
    checksums,
    gradients,
    group_norms,
    require_finite,
    require_gradients,
)

__all__ = [
    "PROBE",
    "Fault",
    "Gradient",
    "Guard",
    "LivenessError",
    "Probe",
    "Rollouts",
    "SaveGuard",
    "Stage",
    "base_sums",
    "canary",
    "checksums",
    "faults",
    "gradients",
    "group_norms",
    "group_states",
    "likely_cause",
    "log_probabilities",
    "probe_of",
    "read_probe",
    "refuse_foreign",
    "require_active",
    "require_arguments",
    "require_base_unchanged",
    "require_changed",
    "require_finite",
    "require_gradients",
    "require_merged",
    "require_reference",
    "require_restored",
    "require_saved",
    "require_served",
    "require_static",
    "require_versions",
    "write_probe",
]
