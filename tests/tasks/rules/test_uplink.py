from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.domain import Offer
from tasks.rules.pricing import work_left
from tasks.rules.uplink import NewBox, Predicament, decide, setup_of
from tests.tasks.pretend import recipe

GB = 1_000_000_000
HOUR = 3600.0
# 7 GB at 0.38 MB/s is five hours of a card that waits, if nothing is left to train.
SEED = Predicament(
    what="upload sft/40",
    total_bytes=7 * GB,
    left_bytes=7 * GB - 46_000_000,
    light_bytes=None,
    later_checkpoints=0,
    mbps=3.04,
    trains_s=0,
    unsaved_s=0.2 * HOUR,
    dph_usd=1.25,
    up_usd_gb=0.004,
    left_usd=20,
    left_s=10 * HOUR,
    new_box=NewBox(setup_s=1800, setup_usd=0.9, dph_usd=1.30, up_mbps=500, up_usd_gb=0.004),
)


def test_five_idle_hours_cost_more_than_another_box() -> None:
    seen = decide(SEED)
    assert seen.way == "move"
    assert seen.sentence == (
        "upload sft/40: 6.95 GB of 7.00 GB left at 3.0 Mbps; waiting $6.50 and 5.08 h, sending less is not possible, "
        "another box $1.23 and 0.73 h: the box is left"
    )


def test_a_tenth_of_the_bytes_is_sent_where_that_is_cheapest() -> None:
    assert decide(replace(SEED, light_bytes=GB // 2)).way == "light"


def test_less_is_not_sent_without_the_recipes_word() -> None:
    seen = decide(replace(SEED, light_bytes=GB // 2, light_allowed=False))
    assert seen.way == "move" and "sending less is not allowed (allow: [light_checkpoints])" in seen.sentence
    assert decide(replace(SEED, light_bytes=GB // 2, light_allowed=False, left_usd=0.0)).way == "wait"


def test_what_is_sent_lightly_is_sent_anew_and_so_nearly_done_it_is_waited_for() -> None:
    assert decide(replace(SEED, light_bytes=GB // 2, left_bytes=GB // 10)).way == "wait"


def test_while_training_goes_on_a_slow_upload_costs_nothing_and_is_waited_for() -> None:
    assert decide(replace(SEED, trains_s=9 * HOUR)).way == "wait"


def test_uploads_to_come_count_against_a_slow_link() -> None:
    nearly = replace(SEED, left_bytes=GB // 10)
    assert decide(nearly).way == "wait"
    assert decide(replace(nearly, later_checkpoints=2)).way == "move"


def test_much_that_only_this_box_holds_is_not_thrown_away() -> None:
    assert decide(replace(SEED, unsaved_s=8 * HOUR)).way == "wait"


@pytest.mark.parametrize(("field", "value"), [("left_usd", 1.0), ("left_s", 0.5 * HOUR), ("new_box", None)])
def test_a_box_that_the_budget_does_not_allow_or_that_is_not_there_is_not_moved_to(field: str, value: object) -> None:
    seen = decide(replace(SEED, **{field: value}))  # type: ignore[arg-type]
    assert seen.way == "wait"
    assert ("no way fits the budget" in seen.sentence) is (field != "new_box")


def test_without_money_for_any_way_the_shorter_one_is_sent_on() -> None:
    assert decide(replace(SEED, left_usd=0.0, light_bytes=GB // 2)).way == "light"


def test_a_new_box_with_a_slow_uplink_is_no_way_out() -> None:
    assert SEED.new_box is not None
    assert decide(replace(SEED, new_box=replace(SEED.new_box, up_mbps=2.0))).way == "wait"
    assert decide(replace(SEED, new_box=replace(SEED.new_box, up_mbps=0.0))).way == "wait"


def test_a_link_that_moves_nothing_never_ends() -> None:
    seen = decide(replace(SEED, mbps=0.0, light_bytes=GB // 2))
    assert seen.way == "move" and "waiting never ends, sending less never ends" in seen.sentence


def test_a_new_box_boots_installs_and_fetches_the_model_again() -> None:
    there = Offer(
        id=1,
        machine_id=1,
        gpu_name="x",
        num_gpus=1,
        gpu_ram_mb=97_887,
        disk_space_gb=1000,
        dph_total_usd=1.05,
        inet_down_mbps=800,
        inet_up_mbps=800,
        inet_down_usd_gb=0.01,
        inet_up_usd_gb=0.02,
    )
    work = work_left(recipe())
    box = setup_of(work, there)
    down_s = 70.2 * 8000 / min(there.inet_down_mbps or 0, 2000)
    assert box.setup_s == pytest.approx(240 + 240 + 120 + down_s + 0.25 * 480)
    bytes_usd = (70.2 + 15 + 0.25 * 15) * there.inet_down_usd_gb
    assert box.setup_usd > bytes_usd + (360 + down_s) / 3600 * box.dph_usd
