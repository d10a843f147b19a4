from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training.contract.events import EventError, EventLog, Heartbeat, Notice, Step, finite, parse_event, read_events


def test_events_come_back_as_they_were_written_with_a_growing_sequence(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5)
    log.emit(Step(phase="sft", step=1, max_steps=2, loss=0.5, seconds=1.0))
    log.emit(Heartbeat(phase="sft", step=1))
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first.seq, second.seq, first.t) == (1, 2, 12.5)
    assert isinstance(first, Step) and first.loss == 0.5


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).emit(Heartbeat())
    with path.open("a") as file:
        file.write('{"kind":"heartb')
    assert len(list(read_events(path))) == 1


@pytest.mark.parametrize("torn", ['{"kind":"heartb', '{"v":1,"seq":9', "\x00"])
def test_a_line_that_was_never_finished_is_taken_away_by_the_next_event(tmp_path: Path, torn: str) -> None:
    """A full disk or a kill in the middle of a line must not silence the box for ever."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit(Heartbeat())
    with path.open("a") as file:
        file.write(torn)
    log.emit(Heartbeat(step=2))
    assert [event.seq for event in read_events(path)] == [1, 2]
    assert path.read_bytes().endswith(b"}\n")


def test_a_file_that_begins_with_an_unfinished_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"v":1,')
    EventLog(path).emit(Heartbeat())
    assert [event.seq for event in read_events(path)] == [1]


def test_the_sequence_goes_on_after_a_very_long_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(Heartbeat())
    log.emit(Notice(what="long", reason="x" * 200_000))
    log.emit(Heartbeat())
    assert [event.seq for event in read_events(log.path)] == [1, 2, 3]


def test_two_processes_share_one_file_and_one_sequence(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = "import sys; from pathlib import Path; from training.contract.events import *; log = EventLog(Path(sys.argv[1])); [log.emit(Heartbeat()) for _ in range(50)]"
    children = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert [event.seq for event in read_events(path)] == list(range(1, 151))


def test_a_loss_that_is_not_finite_is_none_and_never_a_number() -> None:
    assert finite(float("nan")) is None and finite(float("inf")) is None and finite(None) is None
    assert finite(1) == 1.0
    with pytest.raises(ValueError):
        Step(phase="sft", step=1, max_steps=2, loss=float("nan"), seconds=1.0)


@pytest.mark.parametrize("line", ["", "{}", '{"kind":"nonsense"}', '{"kind":"heartbeat","extra":1}', "\xff"])
def test_a_line_that_is_no_event_is_an_error_that_quotes_it(line: str) -> None:
    with pytest.raises(EventError, match="not an event"):
        parse_event(line)


def test_the_contract_is_read_in_under_a_second_without_torch() -> None:
    program = "import sys, training.contract.recipe, training.contract.events, training.contract.manifest; print('torch' in sys.modules, 'prefect' in sys.modules)"
    assert subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "False"]
