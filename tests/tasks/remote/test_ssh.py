"""Logins on a real sshd over links that break."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.errors import BoxLost, LoginFailed, TransferFailed
from tasks.remote.bundle import box_zip
from tasks.remote.jobs import Jobs
from tasks.remote.ssh import Remote, make_key, wait_for_login
from tests.tasks.remote.conftest import SshBox
from tests.training.box.netfault import Link
from training.contract import layout

Login = Callable[..., Remote]


def test_a_command_answers_with_code_output_and_errors_apart(login: Login, box: SshBox) -> None:
    answer = login(box.port).run("echo out; echo err >&2; exit 3", timeout_s=10)
    assert (answer.code, answer.out, answer.err) == (3, b"out\n", b"err\n")


def test_megabytes_on_both_streams_do_not_block(login: Login, box: SshBox) -> None:
    answer = login(box.port).run("head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2", timeout_s=30)
    assert (answer.code, len(answer.out), len(answer.err)) == (0, 3_000_000, 3_000_000)


def test_stdin_reaches_the_command_byte_for_byte(login: Login, box: SshBox) -> None:
    data = os.urandom(1_000_000)
    assert login(box.port).run("cat", timeout_s=30, stdin=data).out == data


def test_a_reset_in_mid_command_is_an_unknown_outcome_not_a_failure(remote: Remote, link: Link) -> None:
    assert remote.run("true", timeout_s=30).code == 0
    threading.Timer(0.5, link.reset).start()
    assert remote.run("sleep 20; exit 7", timeout_s=30).code is None
    assert remote.run("echo back", timeout_s=30).text == "back\n"


def test_a_frozen_link_ends_at_the_deadline_with_an_unknown_outcome(remote: Remote, link: Link) -> None:
    link.freeze()
    began = time.monotonic()
    assert remote.run("true", timeout_s=1.5).code is None
    assert time.monotonic() - began < 10
    link.thaw()
    assert remote.run("echo back", timeout_s=30).code == 0


def test_a_command_that_outlives_its_deadline_is_unknown(remote: Remote) -> None:
    began = time.monotonic()
    assert remote.run("sleep 30", timeout_s=1).code is None
    assert time.monotonic() - began < 15


def test_a_connection_that_died_while_idle_is_replaced_without_a_word(remote: Remote, link: Link) -> None:
    assert remote.run("true", timeout_s=30).code == 0
    link.reset()
    time.sleep(0.2)
    assert remote.run("echo again", timeout_s=30).text == "again\n"


def test_endpoints_are_asked_again_at_each_reconnect(key_path: Path, tmp_path: Path, box: SshBox, login: Login) -> None:
    ports = [1]
    remote = login()
    from tasks.domain import Endpoint

    remote._endpoints = lambda: [Endpoint(host="127.0.0.1", port=port, kind="direct") for port in ports]
    assert remote.run("true", timeout_s=5).code is None
    ports[0] = box.port
    assert remote.run("true", timeout_s=30).code == 0


def test_the_proxy_is_used_when_the_direct_port_is_shut(login: Login, box: SshBox) -> None:
    remote = login(1, box.port)
    assert remote.run("true", timeout_s=30).code == 0
    assert remote._worked is not None and remote._worked.port == box.port


def test_a_changed_host_key_is_refused_at_any_address(login: Login, box: SshBox, link: Link) -> None:
    assert login(box.port).run("true", timeout_s=30).code == 0
    assert login(link.port).run("true", timeout_s=30).code == 0  # the same box elsewhere
    box.kill()
    box.new_host_key()
    box.start()
    for port in (box.port, link.port):
        with pytest.raises(LoginFailed, match="another host key"):
            login(port).run("true", timeout_s=30)


def test_put_is_whole_has_its_mode_and_makes_its_folder(login: Login, box: SshBox) -> None:
    data = os.urandom(300_000)
    login(box.port).put(data, "livery/deep/private.env", mode=0o600, timeout_s=20)
    path = box.home / "livery/deep/private.env"
    assert path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["private.env"]


def test_put_is_sent_again_after_a_reset(remote: Remote, link: Link, box: SshBox) -> None:
    link.up_bps = 2e6
    data = os.urandom(2_000_000)
    threading.Timer(0.4, link.reset).start()
    remote.put(data, "big", timeout_s=30)
    assert (box.home / "big").read_bytes() == data


def test_put_that_the_box_cannot_write_fails_with_the_boxs_word(remote: Remote) -> None:
    with pytest.raises(TransferFailed, match=r"could not write /proc/nothing/x: .*/proc/nothing"):
        remote.put(b"x" * 5_000_000, "/proc/nothing/x", timeout_s=20)


def test_put_to_a_box_that_does_not_answer_is_lost(remote: Remote, link: Link) -> None:
    link.refuse()
    link.reset()
    with pytest.raises(BoxLost, match="does not answer"):
        remote.put(b"x", "x", timeout_s=2)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_refused_login_is_waited_for(login: Login, box: SshBox) -> None:
    clock = FakeClock()
    box.kill()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now >= 1010:
            box._process or box.start()  # type: ignore[func-returns-value]

    wait_for_login(login(box.port), deadline=2000, clock=clock, sleep=sleep)
    assert clock.now >= 1010


def test_a_key_that_is_attached_late_is_waited_for(login: Login, box: SshBox, key_path: Path) -> None:
    clock = FakeClock()
    box.let_in("")

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now >= 1006:
            box.let_in(key_path.with_name("id.pub").read_text())

    wait_for_login(login(box.port), deadline=2000, clock=clock, sleep=sleep)


def test_connections_that_are_swallowed_for_a_minute_fail_before_the_deadline(login: Login, link: Link) -> None:
    clock = FakeClock()
    link.freeze()
    with pytest.raises(LoginFailed, match="time out for"):
        wait_for_login(login(link.port, connect_s=0.3), deadline=9999, clock=clock, sleep=lambda s: clock.sleep(30))
    assert 1060 <= clock.now < 1150


def test_the_deadline_tells_the_sequence_seen(login: Login, box: SshBox) -> None:
    clock = FakeClock()
    box.kill()

    def sleep(seconds: float) -> None:
        clock.sleep(10)
        if clock.now == 1020:
            box.let_in("")
            box.start()

    with pytest.raises(LoginFailed, match="refused → key not accepted"):
        wait_for_login(login(box.port), deadline=1040, clock=clock, sleep=sleep)


def test_a_key_is_made_once_is_private_and_openssh_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "id"
    line = make_key(path)
    assert line.startswith("ssh-ed25519 ") and make_key(path) == line
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = subprocess.run(["ssh-keygen", "-y", "-f", str(path)], capture_output=True, text=True, check=True)
    assert read.stdout.split()[:2] == line.split()[:2]


def test_the_pure_python_server_of_a_machine_without_sshd_serves_as_well(
    tmp_path: Path, key_path: Path, login: Login
) -> None:
    box = SshBox(tmp_path / "abox", key_path.with_name("id.pub").read_text().strip())
    box._write_shim()
    (box.root / "root").mkdir()
    command = [sys.executable, "-m", "deployments.rehearsal.asyncbox", str(box.root), str(box.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        remote = login(box.port)
        wait_for_login(remote, deadline=time.time() + 30, poll_s=0.2)
        data = os.urandom(3_000_000)
        remote.put(data, "livery/file", timeout_s=30)
        assert (box.home / "livery/file").read_bytes() == data
        remote.put(box_zip(), layout.BOX_ZIP, timeout_s=30)
        jobs = Jobs(remote)
        jobs.start("work", "t", ["bash", "-c", "head -c 400000 /dev/zero; exit 3"])
        while (state := jobs.poll("work")).state == "running":
            time.sleep(0.1)
        assert (state.exit_code, len(state.log)) == (3, 400_000)
    finally:
        server.kill()
        server.wait()
