"""What a dataset will be to its phase, and what is wrong with it only in the tokenizer's eyes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from training.contract.recipe import Phase
from training.data_check import Facts, check, table
from training.data_commands import main
from training.model import load_tokenizer
from training.tiny import datasets

ROWS = datasets()
ASKED, SAID = {"role": "user", "content": "Weather in Oslo?"}, {"role": "assistant", "content": "Sunny."}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny / "model")


def facts_of(tmp_path: Path, kind: str, rows: list[dict[str, Any]], tokenizer: Any, **changes: Any) -> Facts:
    path = tmp_path / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"kind": kind, "data": str(path), "steps": 3, "learning_rate": 1e-4, "accumulation": 2, "max_length": 400}
    return check(path, TypeAdapter(Phase).validate_python(fields | changes), lambda: tokenizer)


def test_sft_is_counted_in_packs_and_each_pack_once(tmp_path: Path, tokenizer: Any) -> None:
    """12 rows of 315 to 322 tokens: one fits into 400 places, three into 1000."""
    alone = facts_of(tmp_path, "sft", ROWS["sft"][:12], tokenizer)
    assert (alone.rows, alone.too_long, alone.packs, alone.units_a_step, alone.epochs) == (12, 0, 12, 4, 1.0)
    assert alone.tokens and alone.pack_fill == pytest.approx(alone.tokens / (12 * 400), abs=1e-4)
    threes = facts_of(tmp_path, "sft", ROWS["sft"][:12], tokenizer, max_length=1000)
    assert (threes.packs, threes.tokens, threes.epochs) == (4, alone.tokens, 3.0)
    assert alone.trained and 0.05 < alone.trained < 0.1 and alone.median <= alone.p95 <= alone.longest < 330


def test_texts_that_are_too_long_are_split_and_nothing_of_them_is_lost(tmp_path: Path, tokenizer: Any) -> None:
    whole = facts_of(tmp_path, "cpt", ROWS["cpt"][:9], tokenizer, max_length=4096)
    split = facts_of(tmp_path, "cpt", ROWS["cpt"][:9], tokenizer, max_length=128)
    assert (whole.too_long, whole.packs) == (0, 1) and split.too_long > 0
    assert split.tokens == whole.tokens and split.packs and split.packs * 128 >= (whole.tokens or 0)
    assert "(split)" in table([split])


def test_rows_that_are_too_long_are_counted_and_none_left_is_a_problem(tmp_path: Path, tokenizer: Any) -> None:
    long = {"messages": [{"role": "user", "content": "Oslo " * 500}, SAID]}
    facts = facts_of(tmp_path, "sft", [*ROWS["sft"][:3], long], tokenizer)
    assert (facts.rows, facts.too_long, facts.packs, facts.problems) == (4, 1, 3, [])
    (problem,) = facts_of(tmp_path, "sft", [long], tokenizer).problems
    assert "all 1 rows are longer than max_length 400" in problem and "raise max_length" in problem


def test_kto_takes_turns_so_only_as_many_as_the_rarer_label_are_read(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row for row in ROWS["kto"] if row["label"]][:6] + [row for row in ROWS["kto"] if not row["label"]][:2]
    facts = facts_of(tmp_path, "kto", rows, tokenizer)
    assert facts.epochs == 3.0 and "6 good and 2 bad answers" in facts.warnings[-1]


def test_grpo_is_counted_in_prompts(tmp_path: Path, tokenizer: Any) -> None:
    facts = facts_of(tmp_path, "grpo", ROWS["grpo"][:4], tokenizer, batch_size=4, generations=4)
    assert (facts.units_a_step, facts.epochs, facts.trained) == (2, 1.5, None)


def test_a_prompt_that_is_not_how_the_conversation_begins_is_a_problem(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that always opens a thinking block in the prompt, and closes it at once in the answer's turn."""
    row = {"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "No."}]}
    assert facts_of(tmp_path, "dpo", [row], tokenizer).problems == []
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    (problem,) = facts_of(tmp_path, "dpo", [row], tokenizer).problems
    assert problem.startswith("dpo.jsonl: line 1: chosen: the prompt as served goes on with '<think>\\n'")


@pytest.mark.parametrize(
    ("kind", "answer", "words"),
    [
        ("dpo", "", "dpo.jsonl: line 1: no token of it is trained"),
        ("sft", "{% generation %}{% endgeneration %}", "no assistant"),
    ],
)
def test_a_row_of_which_nothing_would_be_trained_is_a_problem(
    kind: str, answer: str, words: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that leaves the answer out."""
    shown = (
        "{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        + answer
        + "{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", shown)
    row = {
        "sft": {"messages": [ASKED, SAID]},
        "dpo": {"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "No."}]},
    }
    (problem,) = facts_of(tmp_path, kind, [row[kind]], tokenizer).problems
    assert words in problem


def test_what_the_template_refuses_is_a_problem_of_its_row(tmp_path: Path, tokenizer: Any) -> None:
    """It takes a user's text that looks like a tool's result for one, and then finds no question."""
    row = {"messages": [{"role": "user", "content": "<tool_response>x</tool_response>"}, SAID]}
    (problem,) = facts_of(tmp_path, "sft", [ROWS["sft"][0], row], tokenizer).problems
    assert problem.startswith("sft.jsonl: line 2: the chat template refuses it: No user query")


def test_a_control_token_inside_a_text_is_a_problem(tmp_path: Path, tokenizer: Any) -> None:
    row = {"messages": [{"role": "user", "content": "Hi<|im_end|>\n<|im_start|>assistant\nYes"}, SAID]}
    (problem,) = facts_of(tmp_path, "sft", [row], tokenizer).problems
    assert "line 1: a text holds <|im_" in problem and "control token" in problem


def test_earlier_answers_that_serving_shows_otherwise_are_warned_of(tmp_path: Path, tokenizer: Any) -> None:
    facts = facts_of(
        tmp_path, "sft", [{"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID, ASKED, SAID]}], tokenizer
    )
    assert facts.problems == [] and "1 rows (first: line 2) with earlier answers" in facts.warnings[-1]


def test_each_bad_row_is_a_line_and_the_exit_code_is_one(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"text": ""}, {"text": "a"}, {"txt": "b"})))
    assert main(["check", str(path), "--kind", "cpt", "--tokenizer", str(tiny / "model")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line[:30] for line in errors] == [f"error: cpt: mine.jsonl: line {n}"[:30] for n in (1, 3)]


def test_a_dataset_that_is_wrong_in_every_line_does_not_fill_the_screen(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": ""}\n' * 500)
    assert main(["check", str(path), "--kind", "cpt", "--tokenizer", str(tiny / "model")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 101 and errors[-1] == "error: and 400 more; --json holds them all"


def test_a_preview_of_no_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for rows in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            main(["preview", "x", "--kind", "cpt", "--tokenizer", ".", "--rows", rows])
        assert f"seen {rows}, want a number from 1" in capsys.readouterr().err


def test_a_recipe_is_checked_phase_by_phase_as_json(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load((Path(__file__).parents[2] / "training/recipes/tiny-moe.yaml").read_text())
    recipe["phases"] = [{**phase, "data": f"{phase['kind']}.jsonl"} for phase in recipe["phases"][:2]]
    for name in ("cpt", "sft"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name][:8]))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["check", str(tmp_path / "mine.yaml"), "--tokenizer", str(tiny / "model"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [facts["phase"] for facts in found] == ["cpt", "sft"] and all(facts["packs"] for facts in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "none.jsonl", "--kind", "sft", "--tokenizer", "."], "none.jsonl: no such file"),
        (["check", "none.jsonl", "--tokenizer", "."], "--kind"),
        (["preview", "GOOD", "--kind", "cpt", "--tokenizer", "nowhere"], "nowhere is no folder"),
        (["check", "GOOD", "--kind", "cpt", "--tokenizer", "nowhere"], "nowhere is no folder"),
        (["check", "GOOD", "--kind", "cpt", "--tokenizer", "."], "holds no tokenizer that loads"),
        (["check", "GOOD", "--kind", "cpt", "--tokenizer", ".", "--max-length", "3"], "--max-length: seen 3"),
        (["check", ".", "--kind", "cpt", "--tokenizer", "."], "is a folder; want JSON lines"),
        (["check", "BINARY.yaml", "--tokenizer", "."], "BINARY.yaml: is not UTF-8 at byte 0"),
        (["preview", __file__, "--kind", "cpt", "--tokenizer", "."], "test_data_check.py: line 1: not JSON"),
    ],
)
def test_a_wrong_command_is_told_in_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GOOD").write_text('{"text": "a"}\n')
    (tmp_path / "BINARY.yaml").write_bytes(b"\xff")
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
