"""A real rehearsal: boxes that one can log in to, links that carry bytes, faults that a client feels."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import httpx
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deployments.rehearsal import box as box_module
from deployments.rehearsal import start
from deployments.rehearsal.bucket import Bucket
from deployments.rehearsal.market import Market, Rental
from deployments.rehearsal.processes import MARKER
from deployments.rehearsal.world import World
from tests.deployments.rehearsal.conftest import Real, RealBox, connect, eventually


def s3(real: Real, who: str = "LIVERY_S3", endpoint: str | None = None, patience_s: float = 20) -> Any:
    env = real.rehearsal.env
    return boto3.client(
        "s3",
        endpoint_url=endpoint or env["LIVERY_S3_ENDPOINT_URL"],
        region_name=env["LIVERY_S3_REGION"],
        aws_access_key_id=env[f"{who}_ACCESS_KEY_ID"],
        aws_secret_access_key=env[f"{who}_SECRET_ACCESS_KEY"],
        config=Config(connect_timeout=min(2, patience_s), read_timeout=patience_s, retries={"total_max_attempts": 1}),
    )


def facts(box: RealBox) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.ssh("cat $LIVERY_BOX_FACTS").stdout)
    return found


def processes_of(directory: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == directory and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# Logging in


def test_both_ssh_endpoints_lead_into_the_box_with_its_own_home_and_path(real: Real) -> None:
    box = real.rent()
    for via in ("direct", "proxy"):
        done = box.ssh('echo "$HOME" "$PWD"; command -v nvidia-smi python3; env', via=via)
        assert done.returncode == 0, done.stderr
        home, work = done.stdout.splitlines()[0].split()
        assert home == work == next(s["home"] for s in real.rehearsal.control.state()["instances"] if s["id"] == box.id)
        assert f"{Path(home).parent}/bin/nvidia-smi" in done.stdout
        assert os.environ.get("VIRTUAL_ENV", "no-venv") not in done.stdout


def test_an_ssh_session_does_not_see_the_containers_env_but_onstart_does(real: Real) -> None:
    box = real.rent(
        onstart='echo "$CONTAINER_ID $A $VAST_URL" > ~/seen; echo "$CONTAINER_API_KEY" > ~/key', env={"A": "b"}
    )
    done = box.ssh("env; until [ -s key ]; do sleep 0.1; done; cat seen key")
    *env, seen, key = done.stdout.splitlines()
    assert not [line for line in env if line.startswith(("CONTAINER_", "VAST_", "A="))]
    assert seen == f"{box.id} b {real.rehearsal.env['LIVERY_MARKET_URL']}"
    answered = httpx.get(
        f"{real.rehearsal.env['LIVERY_MARKET_URL']}/api/v0/instances/{box.id}/",
        headers={"Authorization": f"Bearer {key}"},
    )
    assert answered.json()["instances"]["id"] == box.id


def test_onstart_may_append_to_etc_environment_without_touching_this_machine(real: Real) -> None:
    if not box_module._isolation() or not os.path.exists("/etc/environment"):
        pytest.skip("needs root on Linux and an /etc/environment")
    before = Path("/etc/environment").read_bytes()
    box = real.rent(onstart="env >> /etc/environment; touch ~/done")
    assert box.ssh(
        "until [ -e done ]; do sleep 0.1; done; ls done; grep -c CONTAINER_ID /etc/environment"
    ).stdout.split() == ["done", "1"]
    assert Path("/etc/environment").read_bytes() == before


def test_nobody_gets_in_before_a_key_is_attached(real: Real) -> None:
    box = real.rent(attach=False)
    assert eventually(lambda: "Permission denied" in box.ssh("true", tries=1).stderr)
    real.attach(box.id)
    assert box.ssh("true").returncode == 0


def test_exit_codes_stdin_and_large_output_pass_through(real: Real) -> None:
    box = real.rent()
    assert box.ssh("exit 7").returncode == 7
    assert len(box.ssh("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3_000_000


def test_python_on_the_box_makes_environments_and_sees_nothing_of_the_control_planes(real: Real) -> None:
    box = real.rent()
    done = box.ssh(
        "python3 -c 'import starlette'; python3 -m venv --without-pip v && v/bin/python -c 'import sys; print(sys.prefix)'"
    )
    assert "No module named 'starlette'" in done.stderr
    assert done.stdout.strip() == box.ssh("echo $HOME/v").stdout.strip()


def test_uv_on_the_box_installs_from_the_shared_cache_or_says_that_it_is_offline(real: Real) -> None:
    if box_module.uv_program() is None:
        pytest.skip("no uv on this machine")
    done = real.rent().ssh("uv venv -q v && v/bin/python -V && echo $UV_OFFLINE $UV_CACHE_DIR")
    assert done.returncode == 0 and done.stdout.split()[-2:] == ["1", box_module.uv_cache_dir()]


def test_nvidia_smi_and_the_facts_agree_with_the_offer(real: Real) -> None:
    box = real.rent()
    query = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits"
    assert box.ssh(query).stdout.strip() == "Rehearsal CPU, 8000, 580.95.05"
    assert box.ssh("nvidia-smi -L | wc -l").stdout.strip() == "1"
    told = facts(box)
    assert told["gpus"] == [{"name": "Rehearsal CPU", "memory_mb": 8000}]
    assert (told["driver_version"], told["cuda_driver"], told["disk_free_gb"]) == ("580.95.05", 13_000, 20)


# Living and dying


def test_a_detached_job_outlives_the_connection_and_dies_with_a_reboot_while_the_disk_stays(real: Real) -> None:
    box = real.rent()
    box.ssh("nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo kept > file")
    assert box.ssh("pgrep -f 'sleep 100[0]' >/dev/null && echo alive").stdout.strip() == "alive"
    real.http.put(f"/api/v0/instances/reboot/{box.id}/", json={}).raise_for_status()
    row = real.until(box.id, lambda row: row["actual_status"] == "running")
    assert real.ssh(row, "cat file; pgrep -f 'sleep 100[0]' || echo dead").stdout.split() == ["kept", "dead"]


def test_destroy_ends_every_process_of_the_box_and_removes_its_disk(real: Real) -> None:
    box = real.rent(onstart="sleep 1000")
    box.ssh("nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    home = Path(box.ssh("echo $HOME").stdout.strip())
    assert len(processes_of(str(home.parent))) >= 3
    assert real.http.delete(f"/api/v0/instances/{box.id}/").json()["success"]
    assert processes_of(str(home.parent)) == [] and not home.exists()
    assert real.show(box.id) is None
    assert box.ssh("true", tries=1).returncode == 255


def test_logs_of_onstart_can_be_fetched(real: Real) -> None:
    box = real.rent(onstart="echo hello from onstart")
    url = real.http.put(f"/api/v0/instances/request_logs/{box.id}/", json={"tail": "100"}).json()["result_url"]
    assert eventually(lambda: "hello from onstart" in httpx.get(url).text)


def test_stop_ends_the_processes_and_start_brings_the_box_back(real: Real) -> None:
    box = real.rent()
    box.ssh("echo kept > file")
    real.http.put(f"/api/v0/instances/{box.id}/", json={"state": "stopped"}).raise_for_status()
    assert box.ssh("true", tries=1).returncode == 255
    real.http.put(f"/api/v0/instances/{box.id}/", json={"state": "running"}).raise_for_status()
    row = real.until(box.id, lambda row: row["actual_status"] == "running")
    assert real.ssh(row, "cat file").stdout.strip() == "kept"


# The bucket


def test_the_box_identity_writes_under_runs_only(real: Real) -> None:
    bucket, control, box = real.rehearsal.env["LIVERY_BUCKET"], s3(real), s3(real, "LIVERY_BOX_S3")
    control.put_object(Bucket=bucket, Key="leases/a", Body=b"lease")
    box.put_object(Bucket=bucket, Key="runs/r/x", Body=b"mine", IfNoneMatch="*")
    assert box.get_object(Bucket=bucket, Key="leases/a")["Body"].read() == b"lease"
    assert {o["Key"] for o in box.list_objects_v2(Bucket=bucket)["Contents"]} >= {"leases/a", "runs/r/x"}
    outside: list[Any] = [
        lambda: box.put_object(Bucket=bucket, Key="leases/a", Body=b"stolen"),
        lambda: box.put_object(Bucket=bucket, Key="runsx", Body=b""),
        lambda: box.delete_object(Bucket=bucket, Key="leases/a"),
        lambda: box.create_multipart_upload(Bucket=bucket, Key="leases/big"),
        lambda: box.copy_object(Bucket=bucket, Key="leases/c", CopySource=f"{bucket}/runs/r/x"),
        lambda: box.create_bucket(Bucket="another"),
    ]
    for attempt in outside:
        with pytest.raises(ClientError, match="AccessDenied"):
            attempt()
    box.delete_object(Bucket=bucket, Key="runs/r/x")


def test_a_wrong_secret_is_refused_and_a_created_object_is_not_overwritten(real: Real) -> None:
    bucket = real.rehearsal.env["LIVERY_BUCKET"]
    wrong = boto3.client(
        "s3",
        endpoint_url=real.rehearsal.env["LIVERY_S3_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id=real.rehearsal.env["LIVERY_S3_ACCESS_KEY_ID"],
        aws_secret_access_key="wrong",
    )
    with pytest.raises(ClientError, match=r"SignatureDoesNotMatch|AccessDenied"):
        wrong.list_objects_v2(Bucket=bucket)
    s3(real).put_object(Bucket=bucket, Key="once", Body=b"", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3(real).put_object(Bucket=bucket, Key="once", Body=b"", IfNoneMatch="*")


def test_bytes_to_and_from_the_bucket_are_counted_and_charged(real: Real) -> None:
    box = real.rent()
    endpoint = box.ssh("echo $AWS_ENDPOINT_URL_S3").stdout.strip()
    client, bucket = s3(real, "LIVERY_BOX_S3", endpoint), real.rehearsal.env["LIVERY_BUCKET"]
    client.put_object(Bucket=bucket, Key="runs/r/bytes", Body=b"z" * 2_000_000)
    for _ in range(2):
        client.get_object(Bucket=bucket, Key="runs/r/bytes")["Body"].read()
    state = next(s for s in real.rehearsal.control.state()["instances"] if s["id"] == box.id)
    assert 2_000_000 < state["bytes"]["up"] < 2_100_000 and 4_000_000 < state["bytes"]["down"] < 4_100_000
    assert state["usd"]["bwu"] == pytest.approx(state["bytes"]["up"] * 0.0045 / 1e9)


# Faults that a client feels


def test_net_uplink_holds_uploads_to_its_rate(real: Real) -> None:
    box = real.rent("net.uplink=0.38")
    endpoint = box.ssh("echo $AWS_ENDPOINT_URL_S3").stdout.strip()
    client, bucket = s3(real, "LIVERY_BOX_S3", endpoint), real.rehearsal.env["LIVERY_BUCKET"]
    began = time.monotonic()
    client.put_object(Bucket=bucket, Key="runs/r/slow", Body=b"z" * 1_000_000)
    assert 0.5 * 0.38 < 1.0 / (time.monotonic() - began) < 1.1 * 0.38, "a busy machine may be slower, never faster"
    began = time.monotonic()
    client.get_object(Bucket=bucket, Key="runs/r/slow")["Body"].read()
    assert time.monotonic() - began < 2.0
    real.rehearsal.control.disarm("net.uplink")
    began = time.monotonic()
    client.put_object(Bucket=bucket, Key="runs/r/fast", Body=b"z" * 1_000_000)
    assert time.monotonic() - began < 2.0


def test_net_downlink_holds_downloads_to_its_rate(real: Real) -> None:
    box = real.rent("net.downlink=0.38")
    endpoint = box.ssh("echo $AWS_ENDPOINT_URL_S3").stdout.strip()
    client, bucket = s3(real, "LIVERY_BOX_S3", endpoint), real.rehearsal.env["LIVERY_BUCKET"]
    began = time.monotonic()
    client.put_object(Bucket=bucket, Key="runs/r/slow-down", Body=b"z" * 1_000_000)
    assert time.monotonic() - began < 2.0
    began = time.monotonic()
    client.get_object(Bucket=bucket, Key="runs/r/slow-down")["Body"].read()
    assert 0.5 * 0.38 < 1.0 / (time.monotonic() - began) < 1.1 * 0.38, "a busy machine may be slower, never faster"


def test_net_stall_after_freezes_the_bucket_link_but_not_ssh(real: Real) -> None:
    box = real.rent("net.stall_after=200000")
    endpoint = box.ssh("echo $AWS_ENDPOINT_URL_S3").stdout.strip()
    client = s3(real, "LIVERY_BOX_S3", endpoint, patience_s=0.7)
    with pytest.raises((ClientError, BotoCoreError)):
        client.put_object(Bucket=real.rehearsal.env["LIVERY_BUCKET"], Key="runs/r/stalled", Body=b"z" * 3_000_000)
    assert box.ssh("true").returncode == 0


def test_ssh_drop_mid_command_resets_a_running_command_so_many_times_and_not_the_job(real: Real) -> None:
    box = real.rent("ssh.drop_mid_command=2")
    for _ in range(2):
        began = time.monotonic()
        done = box.ssh("(nohup sleep 1000 >/dev/null 2>&1 </dev/null &); echo begun; sleep 8", tries=1)
        assert done.returncode == 255 and 1.0 < time.monotonic() - began < 8, "reset, not ended by itself"
    assert box.ssh("sleep 2.5; pgrep -fc 'sleep 100[0]'").stdout.strip() == "2"


def test_ssh_drop_mid_command_armed_later_spares_the_commands_before_it(real: Real) -> None:
    box = real.rent()
    box.ssh("true")
    real.rehearsal.control.arm("ssh.drop_mid_command")

    def effects() -> dict[str, Any]:
        return next(s["effects"] for s in real.rehearsal.control.state()["instances"] if s["id"] == box.id)

    assert eventually(lambda: effects() == {"ssh.drop_mid_command": 1})
    time.sleep(1.5)
    assert box.ssh("sleep 4", tries=1).returncode == 255


def test_ssh_direct_blocked_leaves_the_proxy(real: Real) -> None:
    box = real.rent("ssh.direct_blocked")
    assert box.ssh("true", tries=1).returncode == 255
    assert box.ssh("true", via="proxy").returncode == 0


def test_ssh_proxy_blocked_leaves_the_direct_endpoint(real: Real) -> None:
    box = real.rent("ssh.proxy_blocked=refuse")
    done = box.ssh("true", via="proxy", tries=1)
    assert done.returncode == 255 and "refused" in done.stderr
    assert box.ssh("true").returncode == 0


def test_ssh_blackhole_silences_both(real: Real) -> None:
    box = real.rent("ssh.blackhole")
    assert [box.ssh("true", via=via, tries=1).returncode for via in ("direct", "proxy")] == [255, 255]


def test_ssh_refused_for_and_key_missing_for_pass_in_their_order(real: Real) -> None:
    box, control = real.rent("ssh.refused_for=600", "ssh.key_missing_for=1200"), real.rehearsal.control
    assert "refused" in box.ssh("true", tries=1).stderr
    control.advance(600)
    assert eventually(lambda: "denied" in box.ssh("true", tries=1).stderr)
    control.advance(600)
    assert box.ssh("true").returncode == 0


def test_ssh_key_dropped_after_locks_out_new_logins_until_the_key_is_attached_again(real: Real) -> None:
    box = real.rent("ssh.key_dropped_after=600")
    assert box.ssh("true").returncode == 0
    real.rehearsal.control.advance(600)
    assert "denied" in box.ssh("true", tries=1).stderr
    real.attach(box.id)
    assert box.ssh("true").returncode == 0


def test_ssh_port_changes_after_closes_the_old_ports_and_the_row_shows_the_new(real: Real) -> None:
    box = real.rent("ssh.port_changes_after=600")
    assert box.ssh("true").returncode == 0
    real.rehearsal.control.advance(600)
    row = real.show(box.id)
    assert row is not None and row["ports"] != box.row["ports"] and row["ssh_port"] != box.row["ssh_port"]
    assert box.ssh("true", tries=1).returncode == 255
    assert real.ssh(row, "true").returncode == 0 and real.ssh(row, "true", via="proxy").returncode == 0


def test_ssh_tmux_banner_on_stdout_stands_before_the_answer(real: Real) -> None:
    lines = real.rent("ssh.tmux_banner_on_stdout").ssh("echo answer").stdout.splitlines()
    assert "vast.ai" in lines[0] and lines[-1] == "answer"


def test_ssh_path_minimal_hides_the_boxes_programs(real: Real) -> None:
    assert real.rent("ssh.path_minimal").ssh("echo $PATH").stdout.strip() == "/usr/bin:/bin"


def test_box_driver_old_shows_on_the_box_and_not_in_the_offer(real: Real) -> None:
    box = real.rent("box.driver_old")
    told = facts(box)
    assert (told["driver_version"], told["cuda_driver"]) == ("550.127.05", 12_040)
    assert "550.127.05" in box.ssh("nvidia-smi").stdout
    assert box.row["driver_version"] == "580.95.05"


def test_a_box_may_have_bad_facts(real: Real) -> None:
    told = facts(real.rent("box.pids_max=1024", "box.disk_full", "box.clock_skew=90"))
    assert (told["pids_max"], told["disk_free_gb"], told["clock_skew_s"]) == (1024, 0.5, 90)


def test_box_gpu_lost_fails_nvidia_smi_and_leaves_no_gpu(real: Real) -> None:
    box = real.rent("box.gpu_lost=79")
    done = box.ssh("nvidia-smi -L || echo failed")
    assert "Xid 79" in done.stdout and done.stdout.endswith("failed\n") and facts(box)["gpus"] == []


@pytest.mark.parametrize("flags", ["", "-I"])
def test_box_import_broken_fails_in_every_environment_on_the_box(real: Real, flags: str) -> None:
    box = real.rent("box.import_broken=json.tool")
    broken = "until ls v/lib/python3*/site-packages/*.pth; do sleep 0.1; done"
    done = box.ssh(f"python3 -m venv --without-pip v; {broken}; v/bin/python {flags} -c 'import json.tool'")
    assert done.returncode == 1 and "Error" in done.stderr


def test_box_lost_at_waits_for_its_step_and_takes_the_whole_host(real: Real) -> None:
    box = real.rent("box.lost_at=sft:3")
    events = "livery/runs/r/events.jsonl"

    def tell(phase: str, step: int) -> None:
        line = json.dumps({"kind": "step", "phase": phase, "step": step})
        box.ssh(f"mkdir -p $(dirname {events}); echo '{line}' >> {events}; (nohup sleep 1000 >/dev/null 2>&1 &)")

    for phase, step in (("cpt", 9), ("sft", 2)):
        tell(phase, step)
    time.sleep(0.5)
    assert box.ssh("true").returncode == 0
    tell("sft", 3)
    row = real.until(box.id, lambda row: row["actual_status"] == "offline")
    assert box.ssh("true", tries=1).returncode == 255
    state = next(s for s in real.rehearsal.control.state()["instances"] if s["id"] == box.id)
    assert state["lost"] and state["billed_now_usd_per_h"] == 0
    assert processes_of(str(Path(state["home"]).parent)) == []
    assert row["intended_status"] == "running"
    assert real.http.delete(f"/api/v0/instances/{box.id}/").json()["success"]


def test_create_drop_after_commit_drops_the_connection_without_a_reply(real: Real) -> None:
    real.rehearsal.control.arm("create.drop_after_commit")
    with pytest.raises(httpx.RemoteProtocolError):
        real.http.put("/api/v0/asks/24002001/", json={"disk": 20, "label": "livery:lost:1:9"})
    rows = real.http.get("/api/v1/instances/").json()["instances"]
    assert [row["label"] for row in rows] == ["livery:lost:1:9"]


def test_destroy_hang_holds_the_connection_then_drops_it(real: Real) -> None:
    box = real.rent("destroy.hang=0.5")
    began = time.monotonic()
    with pytest.raises(httpx.RemoteProtocolError):
        real.http.delete(f"/api/v0/instances/{box.id}/")
    assert time.monotonic() - began > 0.4
    assert real.show(box.id) is not None


# The levers


def test_control_arms_disarms_and_refuses_what_it_does_not_know(real: Real) -> None:
    control = real.rehearsal.control
    control.arm("list.410@always")
    assert real.http.get("/api/v1/instances/").status_code == 410
    assert control.state()["faults"] == [
        {"name": "list.410", "value": True, "scope": "always", "left": None, "fired": 1}
    ]
    assert control.disarm("list.410") and not control.disarm("list.410")
    with pytest.raises(ValueError, match=r"nearest: .*list\.410"):
        control.arm("list.401")


def test_control_moves_the_markets_clock(real: Real) -> None:
    box, control = real.rent(), real.rehearsal.control
    before = next(s for s in control.state()["instances"] if s["id"] == box.id)
    control.advance(3600)
    after = next(s for s in control.state()["instances"] if s["id"] == box.id)
    assert after["usd"]["gpu"] - before["usd"]["gpu"] == pytest.approx(0.30, rel=0.01)
    assert box.ssh("true").returncode == 0


def test_control_loses_a_box(real: Real) -> None:
    box = real.rent()
    real.rehearsal.control.lose(box.id)
    row = real.show(box.id)
    assert row is not None and row["actual_status"] == "offline"
    with pytest.raises(ValueError, match="no instance 1"):
        real.rehearsal.control.lose(1)


def test_everything_listens_on_loopback_only(real: Real) -> None:
    real.rent()
    server = psutil.Process(real.rehearsal.process.pid)
    listening = []
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a shell may end while we look
            found = process.net_connections("tcp")
            listening += [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 10 and set(listening) == {"127.0.0.1"}


def test_the_machines_own_sshd_is_used_where_there_is_one(real: Real) -> None:
    if not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("no sshd on this machine: boxes run asyncssh here")
    assert box_module.sshd_program() is not None
    log = (real.rehearsal.root / "rehearsal.log").read_text()
    assert log.startswith("boxes run /") and real.rehearsal.env["LIVERY_MARKET_API_KEY"] not in log


def test_twenty_commands_at_once_do_not_lock_anybody_out(real: Real) -> None:
    box = real.rent()
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(box.ssh("true", tries=1).returncode)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 20


def test_without_namespaces_a_boxs_processes_are_found_by_their_mark(
    tmp_path: Path, ssh_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "_isolation", lambda: ())
    os.makedirs("/run/sshd", exist_ok=True)
    box = box_module.Box(tmp_path / "box", box_module.Facts("CPU", 8000), onstart="sleep 1000")
    box.make()
    box.set_keys([ssh_key.with_suffix(".pub").read_text().strip()])
    box.start()
    assert eventually(box.answers)
    words = ["ssh", "-F", "none", "-i", str(ssh_key), "-p", str(box.port), "-o", "StrictHostKeyChecking=no"]
    words += ["-o", "UserKnownHostsFile=/dev/null", f"{getpass.getuser()}@127.0.0.1"]
    subprocess.run([*words, "nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null &"], check=True, capture_output=True)
    assert len(processes_of(str(tmp_path / "box"))) >= 2
    box.stop()
    assert processes_of(str(tmp_path / "box")) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", box.port))


def test_a_box_whose_port_was_taken_starts_again_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_port, taken = box_module.free_port, socket.create_server(("127.0.0.1", 0))
    ports = iter([taken.getsockname()[1], free_port()])
    monkeypatch.setattr(box_module, "free_port", lambda: next(ports))

    async def rent() -> bool:
        world = World(tmp_path, Bucket(tmp_path / "bucket"))
        market = Market(time.time, host=world, boot_s=0)
        contract = market.rent(market.offers[24002001], Rental(20.0))
        market.settle()
        guest = world.guests[contract.id]
        for _ in range(100):
            await asyncio.sleep(0.05)
            if guest.box.port != taken.getsockname()[1] and await asyncio.to_thread(guest.box.answers):
                break
        assert guest.direct is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", guest.direct.port)
        greeting = await asyncio.wait_for(reader.read(4), 5)
        writer.close()
        await world.close(market)
        return greeting == b"SSH-"

    assert asyncio.run(rent())
    taken.close()
    assert list((tmp_path / "boxes").iterdir()) == []


def test_a_rehearsal_killed_outright_takes_its_boxes_with_it_on_linux(tmp_path: Path, ssh_key: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's parent-death signal is Linux's")
    rehearsal = start(tmp_path, boot_s=0.1, pace=0)
    real = connect(rehearsal, ssh_key)
    box = real.rent(onstart="sleep 1000")
    box.ssh("nohup setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 0
    os.kill(rehearsal.process.pid, signal.SIGKILL)
    rehearsal.process.wait()
    directory = str(tmp_path / "boxes" / str(box.id))
    if box_module._isolation():
        assert eventually(lambda: processes_of(directory) == [])
    with start(tmp_path, boot_s=0.1, pace=0):
        assert processes_of(directory) == [] and not Path(directory).exists()
