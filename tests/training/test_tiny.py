from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import tiny as world
from training.contract.rows import read_rows


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.train
def test_a_second_run_in_another_process_writes_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.tiny", "--out", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True)
    assert digests(tmp_path) == digests(tiny)


def test_another_seed_makes_another_world() -> None:
    assert world.datasets(0) == world.datasets(0) != world.datasets(1)


@pytest.mark.parametrize("kind", ["cpt", "sft", "dpo", "kto", "grpo", "evaluation"])
def test_every_dataset_holds_good_rows(tiny: Path, kind: str) -> None:
    assert len(read_rows(tiny / "datasets" / f"{kind}.jsonl", kind)) >= 16  # type: ignore[arg-type]


def test_tool_call_tags_survive_when_special_tokens_are_skipped(tiny: Path) -> None:
    from training.model import load_tokenizer

    tokenizer = load_tokenizer(tiny / "model")
    text = "<|im_start|><tool_call>\n</tool_call><|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "<tool_call>\n</tool_call>"
