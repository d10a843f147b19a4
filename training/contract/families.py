"""What Livery knows of each family of models: names only, no torch. No other file names a family or one of its classes.

A new family declares, in one entry of `FAMILIES`:

- where its code is: the text configuration's model type, the modeling module, its text class (…ForCausalLM), the class of a mixture block and the class of its routed experts. The experts
  must stand on transformers' experts registry (`@use_experts_implementation`) with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], gate rows
  first, not transposed, no bias: that is the form `training.experts` computes;
- its LoRA groups: for each the leaf names of its linears, the part of the module path that tells it from other groups with the same leaf names, and
  in which layers it stands. The groups are tried in the order given here, the first whose place fits wins;
- the classes of its decoder layer and that layer's parts, for `training.lean`: what it computes differently there stays in the form of its authors;
- how packed rows keep documents apart: `attention` (the mask follows position_ids) or `gated_delta_net` (a state and a convolution must be reset, too).

A family is in when tests/training/test_packing.py and tests/oracle/test_stock_peft.py pass for it: both take every entry from here.
Names read from transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Group = Literal["attention", "linear_attention", "shared_expert", "routed_experts"]

ROUTED: tuple[str, ...] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Parameters of the routed experts, as PEFT's `target_parameters` wants them. Each is a group of its own to the checks: a fault may take only one."""


@dataclass(frozen=True)
class Linears:
    """One LoRA group that is made of linear layers."""

    leaves: tuple[str, ...]
    """Last names of the modules: PEFT's `target_modules`."""
    place: str
    """What the module's path holds in this group and in no other, with dots at both ends."""
    layer_type: str | None = None
    """The entry of the configuration's `layer_types` that has this group; None = every layer."""
    gate_leaves: tuple[str, ...] = ()
    """Further leaves that `adapters.gate_projections` adds."""


@dataclass(frozen=True)
class Layers:
    """Classes of the decoder's modules, and the few facts in which families that compute alike differ."""

    decoder_layer: str
    norm: str
    zero_centered_norm: bool
    """The norm multiplies by 1 + weight, not by weight."""
    attention: str
    gated_attention: bool
    """q_proj makes a query and a gate for each head."""
    mlp: str
    router: str
    delta_net: str | None = None
    gated_norm: str | None = None
    mask_a_kind: bool = False
    """The text model takes a dictionary of ready masks, one a kind of layer."""


@dataclass(frozen=True)
class Family:
    """One family of mixture-of-experts models."""

    model_type: str
    """Of the text part's configuration."""
    modeling: str
    text_class: str
    block_class: str
    experts_class: str
    linears: Mapping[str, Linears]
    packing: Literal["gated_delta_net", "attention"]
    layers: Layers
    routed: tuple[str, ...] = ROUTED

    @property
    def groups(self) -> tuple[str, ...]:
        """Names that a recipe's `adapters.groups` may hold."""
        return (*self.linears, "routed_experts")

    def routed_groups(self) -> tuple[str, ...]:
        """`routed_experts.gate_up_proj` and so on: one group a parameter."""
        return tuple(f"routed_experts.{path.rpartition('.')[2]}" for path in self.routed)

    def leaves(self, group: str, *, gate_projections: bool) -> tuple[str, ...]:
        """Leaf names of a group; empty for the routed experts, which have none."""
        linears = self.linears.get(group)
        if linears is None:
            return ()
        return linears.leaves + (linears.gate_leaves if gate_projections else ())

    def group_of(self, path: str) -> str | None:
        """The group of a linear layer at `path`, or None: nothing that a recipe can name stands there."""
        return next((name for name, linears in self.linears.items() if linears.place in f".{path}."), None)


FAMILIES: Mapping[str, Family] = {
    # Qwen3.5 and Qwen3.6.
    "qwen3_5_moe": Family(
        model_type="qwen3_5_moe_text",
        modeling="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        text_class="Qwen3_5MoeForCausalLM",
        block_class="Qwen3_5MoeSparseMoeBlock",
        experts_class="Qwen3_5MoeExperts",
        linears={
            "shared_expert": Linears(("gate_proj", "up_proj", "down_proj"), ".shared_expert."),
            "linear_attention": Linears(
                ("in_proj_qkv", "in_proj_z", "out_proj"),
                ".linear_attn.",
                layer_type="linear_attention",
                gate_leaves=("in_proj_a", "in_proj_b"),
            ),
            "attention": Linears(("q_proj", "k_proj", "v_proj", "o_proj"), ".self_attn.", layer_type="full_attention"),
        },
        packing="gated_delta_net",
        layers=Layers(
            decoder_layer="Qwen3_5MoeDecoderLayer",
            norm="Qwen3_5MoeRMSNorm",
            zero_centered_norm=True,
            attention="Qwen3_5MoeAttention",
            gated_attention=True,
            mlp="Qwen3_5MoeMLP",
            router="Qwen3_5MoeTopKRouter",
            delta_net="Qwen3_5MoeGatedDeltaNet",
            gated_norm="Qwen3_5MoeRMSNormGated",
            mask_a_kind=True,
        ),
    ),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        modeling="transformers.models.qwen3_moe.modeling_qwen3_moe",
        text_class="Qwen3MoeForCausalLM",
        block_class="Qwen3MoeSparseMoeBlock",
        experts_class="Qwen3MoeExperts",
        linears={"attention": Linears(("q_proj", "k_proj", "v_proj", "o_proj"), ".self_attn.")},
        packing="attention",
        layers=Layers(
            decoder_layer="Qwen3MoeDecoderLayer",
            norm="Qwen3MoeRMSNorm",
            zero_centered_norm=False,
            attention="Qwen3MoeAttention",
            gated_attention=False,
            mlp="Qwen3MoeMLP",
            router="Qwen3MoeTopKRouter",
        ),
    ),
}
