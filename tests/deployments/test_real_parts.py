"""Where the tests must run on real parts, the fallbacks do not count."""

from __future__ import annotations

import os

import pytest

from deployments.rehearsal.box import sshd_program


@pytest.mark.skipif(
    not os.environ.get("LIVERY_TEST_REQUIRE_SSHD"),
    reason="LIVERY_TEST_REQUIRE_SSHD is not set: the asyncssh fallback is allowed here",
)
def test_the_boxes_are_real_openssh_servers() -> None:
    assert sshd_program() is not None
