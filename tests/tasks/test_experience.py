from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Attempt, Flight, Span
from tasks.experience import pace_digest, read_experience, remember_pace
from tasks.rules.pricing import Experience
from tests.tasks.pretend import FLOW_RUN, NOW, recipe
from training.box.store import Store
from training.contract import layout

SEEN: dict[str, Any] = {"steps": 100, "step_s": 57.0, "machine_id": 35101, "gpu_name": "RTX PRO 6000 WS", "now": NOW}


def test_a_pace_that_was_measured_here_is_found_again_with_its_date(store: Store) -> None:
    wanted = recipe()
    assert read_experience(store, wanted) == Experience()
    remember_pace(store, wanted, "sft", **SEEN)
    pace = read_experience(store, wanted).paces["sft"]
    assert pace.step_s == 57.0
    assert pace.source == "2027-01-03, 100 steps of run tools-35b on machine 35101 (RTX PRO 6000 WS)"
    assert read_experience(store, wanted, done=("sft",)).paces == {}


def test_the_newest_measurement_counts(store: Store) -> None:
    for step_s in (112.0, 57.0):
        remember_pace(store, recipe(), "sft", **{**SEEN, "step_s": step_s})
    assert read_experience(store, recipe()).paces["sft"].step_s == 57.0


def test_a_few_steps_are_no_measurement(store: Store) -> None:
    remember_pace(store, recipe(), "sft", **{**SEEN, "steps": 4})
    remember_pace(store, recipe(), "sft", **{**SEEN, "step_s": None})
    assert store.list("paces/") == []


def _sft(**changes: Any) -> dict[str, Any]:
    return {"kind": "sft", "data": "bucket:data/sft.jsonl", "steps": 100, "learning_rate": 1e-4, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"adapters": {"rank": 64, "alpha": 128}},
        {"phases": [_sft(accumulation=16)]},
        {"phases": [_sft(max_length=4096)]},
        {"optimizer": "adamw"},
        {"allow": ["slow_experts"]},
        {"recompute": "full"},
        {"micro_batches": "recipe"},
    ],
)
def test_another_version_of_the_recipe_has_another_pace(changes: dict[str, Any]) -> None:
    """112 s and 57 s a step of two versions of one recipe do not line up."""
    assert pace_digest(recipe(**changes), "sft") != pace_digest(recipe(), "sft")


def test_another_tier_has_another_pace(store: Store) -> None:
    remember_pace(store, recipe(), "sft", **SEEN)
    assert read_experience(store, recipe(box={"tier": "h200"})).paces == {}


def test_more_steps_or_another_name_leave_the_pace_as_it_is() -> None:
    other = recipe(name="other", phases=[_sft(steps=7, learning_rate=1e-5, data="bucket:other.jsonl")], seed=3)
    assert pace_digest(other, "sft") == pace_digest(recipe(), "sft")


def test_a_4_bit_base_and_the_number_of_its_cards_have_paces_of_their_own() -> None:
    def digest(gpus: int, **model: Any) -> str:
        wanted = recipe(model=model, box={"gpus": gpus}, adapters={"rank": 8})
        return pace_digest(wanted, "sft")

    made = {digest(1), digest(1, quantisation="nf4"), digest(4, quantisation="nf4")}
    assert len(made | {digest(4, quantisation="nf4", execution="host")}) == 4


def test_paces_kept_before_4_bit_bases_are_found_again() -> None:
    """Frozen: what an earlier version measured stays known."""
    assert pace_digest(recipe(), "sft") == "399db016031e9da13332bc4dbcda2b007e542f6f1b1107fc2a1f0cd02786b623"


def test_boxes_that_never_trained_are_counted_and_those_at_work_are_not(store: Store) -> None:
    def attempt(number: int, steps: list[str], **facts: Any) -> Attempt:
        spans = tuple(Span(step=step, started_at=NOW, ended_at=NOW + 1) for step in steps)
        known = {"label": "x", "machine_id": number, "offer_id": 1, "dph_usd": 1.0, "instance_id": number, **facts}
        return Attempt(attempt=number, spans=spans, **known)

    attempts = (
        attempt(1, ["boot"], ended="no login", wasted=True),
        attempt(2, ["boot", "preflight"], ended="driver", wasted=True),
        attempt(3, ["boot"], ended="offer gone", instance_id=None, wasted=True),
        attempt(4, ["boot", "phase sft"], ended="cancelled", wasted=True),
        attempt(5, ["boot", "phase sft"], ended="done"),
        attempt(6, ["boot"]),
    )
    flight = Flight(
        flow_run_id=FLOW_RUN, run="r", started_at=NOW, planned_usd=1, max_usd=2, market="vast", attempts=attempts
    )
    store.put_bytes(layout.flight(FLOW_RUN), flight.model_dump_json().encode())
    seen = read_experience(store, recipe())
    assert (seen.fit_boxes, seen.unfit_boxes) == (2, 2)


def test_what_cannot_be_read_is_said_and_predicted(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put_bytes(layout.pace("rtxpro6000", pace_digest(recipe(), "sft")), b'{"step_s": "fast"}')
    store.put_bytes(layout.flight(FLOW_RUN), b"{oops")
    assert read_experience(store, recipe()) == Experience()
    assert "this phase is predicted" in caplog.text and "is not counted" in caplog.text


def test_a_bucket_that_fails_costs_the_note_and_not_the_run(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.bucket = "nobodys-bucket"
    remember_pace(store, recipe(), "sft", **SEEN)
    assert "the pace of phase sft is not kept" in caplog.text
