"""Run by a peer's own interpreter, never imported: a few full-width layers of Qwen3.6-35B-A3B on the peer's public API, timed.

    PYTHON -P peer_program.py '{"do": "make", "folder": ...}'       write the checkpoint: random weights, in the form that a hub has them
    PYTHON -P peer_program.py '{"do": "measure", "folder": ...}'    load it with the peer, attach adapters, time forward and backward

`training.peer_step` gives the whole of the JSON and reads the lines that begin with MARK. Nothing of Livery is on the path here: the peer's environment is
its own, and the peer patches what it imports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "livery-peer "
VERSIONS = ("torch", "triton", "transformers", "peft", "trl", "flash-linear-attention", "xformers", "causal-conv1d")
# A library that the peer brings within itself is no distribution, only a module in memory.
BROUGHT = {"flash-linear-attention": "fla"}
# The leaves that Livery's default recipe trains, and the names by which the peer asks for the routed experts' parameters.
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# The ids above this are the tokenizer's own, an image's among them.
PLAIN_TOKENS = 240_000


def say(**facts: Any) -> None:
    print(MARK + json.dumps(facts), flush=True)


def make(ask: dict[str, Any]) -> None:
    """The checkpoint: text layers of the real widths, a vision tower of one small layer, a tokenizer and the processors that the loader looks for."""
    import torch
    from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    began, device = time.perf_counter(), ask["device"]
    layers = max(ask["layers"])
    text = {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)],
        "tie_word_embeddings": False,
        "dtype": ask["dtype"],
        **(TINY if ask["tiny"] else {}),
    }
    hidden = text.get("hidden_size", 2048)
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": hidden}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, dtype=ask["dtype"])
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, ask["dtype"]))
    with torch.device(device):
        model: Any = Qwen3_5MoeForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        # A part that all embeddings share makes routing uneven, as in real use.
        embeddings = model.get_input_embeddings().weight
        embeddings.add_(torch.empty_like(embeddings[:1]).normal_(0, 0.01))
    folder = Path(ask["folder"])
    model.save_pretrained(folder, max_shard_size="4GB")
    _processors(folder)
    say(made_s=round(time.perf_counter() - began, 1), parameters=sum(each.numel() for each in model.parameters()))


def _processors(folder: Path) -> None:
    """Written as files where their classes would want more packages: the images' processors are only looked for, never used."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(special)
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=plain,
        additional_special_tokens=special,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        processor_class="Qwen3VLProcessor",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    processors = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    (folder / "processor_config.json").write_text(json.dumps(processors))


def measure(ask: dict[str, Any]) -> None:
    began = time.perf_counter()
    # First of all imports: it patches torch, transformers, peft and trl.
    peer = importlib.import_module(ask["package"])
    import torch

    cuda = ask["device"] == "cuda"
    versions = {name: _version(name) for name in (ask["package"], *VERSIONS)}
    gpu = torch.cuda.get_device_name(0) if cuda else None
    say(imported_s=round(time.perf_counter() - began, 1), versions=versions, python=platform.python_version(), gpu=gpu)

    began = time.perf_counter()
    model, layers_of = adapted(peer, ask)
    trainable = [each for each in model.parameters() if each.requires_grad]
    say(
        loaded_s=round(time.perf_counter() - began, 1),
        adapter_tensors=len(trainable),
        adapter_parameters=sum(each.numel() for each in trainable),
        adapter_dtypes=sorted({str(each.dtype).removeprefix("torch.") for each in trainable}),
    )
    every = list(layers_of)
    # Of a period of four: they stay in memory where fewer layers are timed.
    layer_gb = sum(each.numel() * each.element_size() for layer in every[-4:] for each in layer.parameters()) / 4e9
    say(layer_gb=round(layer_gb, 4))
    for tokens in ask["tokens"]:
        for layers in ask["layers"]:
            # The difference of two depths is the layers' time, without embeddings, head and loss.
            layers_of._modules.clear()
            layers_of.extend(every[:layers])
            model.config.get_text_config().num_hidden_layers = layers
            run = {"layers": layers, "tokens": tokens, "recompute": ask["recompute"]}
            try:
                say(run=run | _timed(model, tokens, ask))
            except torch.OutOfMemoryError:
                say(run=run | {"failed": "out of memory"})
            _clear(model, cuda)


def adapted(peer: Any, ask: dict[str, Any]) -> tuple[Any, Any]:
    """The peer's model with adapters on every group, lora_B drawn (of zeros no gradient would reach lora_A), and its list of text layers."""
    import torch

    recompute = {"full": True, "none": False}.get(ask["recompute"], ask["recompute"])
    shared = {"max_seq_length": ask["row"], "use_gradient_checkpointing": recompute}
    model, _ = peer.FastLanguageModel.from_pretrained(
        model_name=ask["folder"],
        dtype=getattr(torch, ask["dtype"]),
        load_in_4bit=False,
        full_finetuning=False,
        fast_inference=False,
        **shared,
    )
    model = peer.FastLanguageModel.get_peft_model(
        model,
        r=ask["rank"],
        target_modules=[*LEAVES, *EXPERTS],
        lora_alpha=2 * ask["rank"],
        lora_dropout=0.0,
        bias="none",
        random_state=3407,
        **shared,
    )
    if not [name for name, each in model.named_parameters() if each.requires_grad and ".experts." in name]:
        raise RuntimeError("adapters: none on the routed experts, so this would not be the same step")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.requires_grad and "lora_B" in name:
                each.normal_(0, 0.01)
    model.train()
    lists = {name: each for name, each in model.named_modules() if name.endswith(".layers") and "visual" not in name}
    found = [each for each in lists.values() if len(each) == max(ask["layers"])]
    if len(found) != 1:
        sizes = {name: len(each) for name, each in lists.items()}
        raise RuntimeError(f"layers: seen {sizes}, want one list of {max(ask['layers'])}; the peer renamed them")
    return model, found[0]


def _timed(model: Any, tokens: int, ask: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a micro-batch forward and backward: the median of rounds, each several micro-batches with no wait between them."""
    import torch

    cuda = ask["device"] == "cuda"
    row = min(ask["row"], tokens)
    vocabulary = min(model.config.get_text_config().vocab_size, PLAIN_TOKENS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (tokens // row, row), generator=generator).to(ask["device"])

    def once() -> Any:
        casts: Any = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        with casts:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    began = now()
    loss = once()
    first_s = now() - began
    dead = [name for name, each in model.named_parameters() if each.requires_grad and not _alive(each)]
    for _ in range(2):
        once()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for _ in range(ask["rounds"]):
        began = now()
        for _ in range(ask["turns"]):
            once()
        rounds.append((now() - began) / ask["turns"] * 1e3)
    return {
        "micro_ms": round(statistics.median(rounds), 2),
        "micro_ms_all": [round(each, 2) for each in rounds],
        "first_s": round(first_s, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "loss": round(float(loss), 4),
        "without_gradient": len(dead),
        "without_gradient_such_as": dead[:3],
    }


def _alive(parameter: Any) -> bool:
    grad = parameter.grad
    return grad is not None and bool(grad.isfinite().all()) and bool(grad.any())


def _clear(model: Any, cuda: bool) -> None:
    import torch

    for each in model.parameters():
        each.grad = None
    if cuda:
        torch.cuda.empty_cache()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(BROUGHT.get(name, "")), "__version__", None)
        return f"{found} of the peer's own" if found else None


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    try:
        {"make": make, "measure": measure}[asked["do"]](asked)
    except Exception as error:  # noqa: BLE001
        # For the parent: whatever the peer raises is one line of the document, and its own frames stay its own.
        say(failed=f"{type(error).__name__}: {str(error)[:600]}")
        sys.exit(1)
