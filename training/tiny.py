"""The tiny world: a tokenizer, a Qwen3.5-MoE of half a million weights, and data for all five phases, made by code.

Nothing is downloaded and a second run writes the same bytes. The initial weights are scaled so that LoRA visibly learns: with the
usual std of 0.02 at this width the logits are almost zero and an adapter has nothing to steer.

    python -m training.tiny --out DIR     DIR/model/*, DIR/datasets/{cpt,sft,dpo,kto,grpo,evaluation}.jsonl
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.contract.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Row = dict[str, Any]

CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Accra", "Bern", "Riga", "Hanoi", "Dakar")
ZONES = ("UTC", "CET", "EST", "JST")
WEATHER = ("sunny", "cloudy", "rainy", "windy")
QUESTIONS = {
    "get_weather": ("Weather in {}?", "How is the weather in {}?", "Tell me the weather in {}."),
    "get_time": ("Time in {}?", "What time is it in {}?", "Tell me the time in {}."),
}
ARGUMENT = {"get_weather": "city", "get_time": "zone"}
VOCABULARY = 1536
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_GATED_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Added but not special, as Qwen has them: skip_special_tokens must not delete a tool call before the reward sees it.
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen's own split of text before byte pairs: contractions, words, single digits, punctuation, line ends, spaces.
PRE_TOKENS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make(out: Path, seed: int = 0, family: str = "qwen3_5_moe") -> None:
    """Write `out/model` and `out/datasets`."""
    data = datasets(seed)
    tokenizer = make_tokenizer(data)
    (out / "model").mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out / "model")
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed, family)
    model.save_pretrained(out / "model")
    (out / "datasets").mkdir(parents=True, exist_ok=True)
    for name, rows in data.items():
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
        (out / "datasets" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def datasets(seed: int = 0) -> dict[str, list[Row]]:
    """Rows of every phase in the forms that the recipe's phases name, and a held-out set in GRPO's form."""
    return {
        "cpt": [{"text": text} for text in _texts(random.Random(seed + 1), 96)],
        "sft": [_conversation(*question) for question in _questions(random.Random(seed + 2), 240)],
        "dpo": [_preference(*question, random.Random(i)) for i, question in _numbered(seed + 3, 48)],
        "kto": [row for i, question in _numbered(seed + 4, 48) for row in _judged(*question, random.Random(i))],
        "grpo": [_task(*question) for question in _questions(random.Random(seed + 5), 96)],
        "evaluation": [_task(*question) for question in _every_question()],
    }


def make_tokenizer(data: dict[str, list[Row]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens and chat template, trained on the world's own texts and rendered chats."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    template = _chat_template()
    chats = [
        render_jinja_template([row["messages"]], tools=row["tools"], chat_template=template)[0][0]
        for row in data["sft"][:48]
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCABULARY - len(SPECIAL) - len(ADDED)
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([row["text"] for row in data["cpt"]] + chats, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def make_model(
    vocabulary: int, eos_id: int, pad_id: int, seed: int = 0, family: str = "qwen3_5_moe"
) -> PreTrainedModel:
    """Four layers, of which three are gated delta nets where the family has them; eight routed experts of which two run; float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = FAMILIES[family]
    config = AutoConfig.for_model(
        known.model_type,
        vocab_size=vocabulary,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        **_SIZES,
        **(_GATED_DELTA_NET if known.packing == "gated_delta_net" else {}),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1.0)
        model.lm_head.weight.normal_(0, 0.3)
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(4)
    return model


def tools() -> list[Row]:
    """The two tools of this world, as JSON schemas; their arguments have different names."""
    return [
        _schema("get_weather", "Weather of a city.", "city"),
        _schema("get_time", "Time in a zone.", "zone"),
    ]


def _schema(name: str, description: str, argument: str) -> Row:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _questions(rng: random.Random, count: int) -> Iterator[tuple[str, str, str]]:
    """(question, tool, argument's value)"""
    for _ in range(count):
        tool = rng.choice(("get_weather", "get_weather", "get_time"))
        value = rng.choice(CITIES if tool == "get_weather" else ZONES)
        yield rng.choice(QUESTIONS[tool]).format(value), tool, value


def _numbered(seed: int, count: int) -> Iterable[tuple[int, tuple[str, str, str]]]:
    return enumerate(_questions(random.Random(seed), count))


def _every_question() -> Iterator[tuple[str, str, str]]:
    for tool, values in (("get_weather", CITIES), ("get_time", ZONES)):
        for value in values:
            yield f"Please: {QUESTIONS[tool][1].format(value)}", tool, value


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _call(tool: str, value: str) -> Row:
    function = {"name": tool, "arguments": {ARGUMENT[tool]: value}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _conversation(question: str, tool: str, value: str) -> Row:
    return {"messages": [_user(question), _call(tool, value)], "tools": tools()}


def _bad_answer(tool: str, value: str, rng: random.Random) -> Row:
    if rng.random() < 0.5:
        return {"role": "assistant", "content": "I do not know."}
    others = [other for other in (CITIES if tool == "get_weather" else ZONES) if other != value]
    return _call(tool, rng.choice(others))


def _preference(question: str, tool: str, value: str, rng: random.Random) -> Row:
    return {
        "prompt": [_user(question)],
        "chosen": [_call(tool, value)],
        "rejected": [_bad_answer(tool, value, rng)],
        "tools": tools(),
    }


def _judged(question: str, tool: str, value: str, rng: random.Random) -> Iterator[Row]:
    for completion, label in ((_call(tool, value), True), (_bad_answer(tool, value, rng), False)):
        yield {"prompt": [_user(question)], "completion": [completion], "label": label, "tools": tools()}


def _task(question: str, tool: str, value: str) -> Row:
    answer = {"name": tool, "arguments": {ARGUMENT[tool]: value}}
    return {"messages": [_user(question)], "tools": tools(), "answer": answer}


def _texts(rng: random.Random, count: int) -> Iterator[str]:
    """Short travel notes; every eighth is longer than a training row, so that splitting is exercised."""
    for number in range(count):
        sentences = 48 if number % 8 == 0 else rng.randrange(4, 12)
        yield " ".join(_sentence(rng) for _ in range(sentences))


def _sentence(rng: random.Random) -> str:
    city, other, sky, zone = rng.choice(CITIES), rng.choice(CITIES), rng.choice(WEATHER), rng.choice(ZONES)
    return rng.choice(
        (
            f"In {city} the weather is {sky} today, and the sky over {other} will follow.",
            f"The train from {city} to {other} leaves at {rng.randrange(1, 24)} o'clock {zone}.",
            f"Travellers who ask for the time in {city} are told it in {zone}.",
            f"If it is {sky} in {city}, call the station before you go to {other}.",
            f"A tool named get_weather knows {city}; a tool named get_time knows {zone}.",
            f"Please tell the people of {city} that it was {sky} in {other}.",
        )
    )


def _chat_template() -> str:
    """TRL ships Qwen3.6's template; SFT recognises exactly this text and swaps in the variant that marks the assistant's tokens."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("trl is not installed here; the tiny world takes Qwen3.6's chat template from it")
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3_6.jinja").read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny model, its tokenizer and its datasets.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_5_moe")
    arguments = parser.parse_args()
    # Byte-pair training in parallel may break ties in another order.
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    make(arguments.out, arguments.seed, arguments.family)
    print(f"tiny world in {arguments.out}: model/ and datasets/")


if __name__ == "__main__":
    main()
