"""The step benchmark's model, of real shapes and random weights, and its packed rows.

Shape letters: T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training import packing
from training.step_setting import Setting, adapters_of


def adapted(setting: Setting) -> Any:
    """The model with adapters on every group, made on the device: frozen bf16 weights, trainable fp32 adapters whose lora_B is noise."""
    from peft import get_peft_model

    from training.model import lora_config, lora_tensors

    base = _base(setting).requires_grad_(False)
    with torch.device(setting.device):
        model: Any = get_peft_model(base, lora_config(adapters_of(setting), "qwen3_5_moe"))
    generator = torch.Generator(device=setting.device).manual_seed(1)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.normal_(0, 0.01, generator=generator)
    return model.train()


def _base(setting: Setting) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    from training.benchmark import SMALL

    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(setting.layers)]
    small = {**SMALL, "vocab_size": 512} if setting.tiny else {}
    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=setting.layers, layer_types=kinds, tie_word_embeddings=False, **small
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, setting.dtype), attn_implementation="sdpa"
        )
    model.to_empty(device=setting.device)
    with torch.device(setting.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # what it holds is computed, not drawn
    _draw(model, setting)
    model.set_experts_implementation("grouped_mm")
    return model


@torch.no_grad()
def _draw(model: Any, setting: Setting) -> None:
    """Random weights as a trained model's are scaled. All embeddings share a part: so routing is uneven, as in real use."""
    generator = torch.Generator(device=setting.device).manual_seed(0)
    spread = 0.1 if setting.tiny else 0.02
    for name, weight in model.named_parameters():
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            weight.fill_(1.0)
        elif "norm" in name:
            weight.zero_()
        elif name.endswith("A_log"):
            weight.uniform_(0.01, 16, generator=generator).log_()
        else:
            weight.normal_(0, 0.3 if "conv1d" in name else spread, generator=generator)
    embeddings = model.get_input_embeddings().weight
    embeddings.add_(torch.empty_like(embeddings[:1]).normal_(0, 0.5 * spread, generator=generator))


def packed_row(ids_1T: Tensor, setting: Setting, generator: torch.Generator) -> dict[str, Any]:
    """One row of documents whose lengths lie around that of an unpacked row, as the trainer hands it on."""
    half = setting.row // 2
    count = max(1, ids_1T.shape[1] // setting.row)
    shifts = torch.randint(-half, half, (count - 1,), generator=generator).tolist()
    cuts = [setting.row * (each + 1) + shift for each, shift in enumerate(shifts)]
    given = packing.packed_inputs([part.to(setting.device) for part in torch.tensor_split(ids_1T, cuts, dim=1)])
    labels = given["input_ids"].masked_fill(given["position_ids"] == 0, -100)
    return {**given, "labels": labels, "cu_seq_lens_cpu": given["cu_seq_lens_q"].cpu()}
