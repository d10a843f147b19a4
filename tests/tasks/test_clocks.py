from __future__ import annotations

from tasks.clocks import SteadyClock


def test_a_clock_that_is_set_back_stands_for_no_time_gone_back_and_one_that_slept_is_caught_up() -> None:
    wall, lived = [1000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: lived[0])
    wall[0], lived[0] = 1060.0, 110.0
    assert clock() == 1060.0
    wall[0] -= 1200
    assert clock() == 1060.0
    lived[0] += 60
    assert clock() == 1120.0
    wall[0] = 9000.0
    assert clock() == 9000.0
