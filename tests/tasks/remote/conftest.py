"""Boxes for these tests: real sshd servers on loopback with a disk, a HOME and a host key of their own, behind a link that can break."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.rehearsal.box import uv_cache_dir, uv_program
from tasks.domain import Endpoint
from tasks.remote.bundle import box_zip
from tasks.remote.ssh import Remote, make_key
from tests.training.box.netfault import Link
from training.contract.recipe import Recipe

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


class SshBox:
    """One sshd. `reboot` kills everything that runs in it, the disk stays."""

    def __init__(self, root: Path, public_key: str) -> None:
        self.root = root
        self.home = root / "home"
        for name in ("etc", "home", "tmp", "bin"):
            (root / name).mkdir(parents=True)
        self.move()
        self.new_host_key()
        self.let_in(public_key)
        base = Path(sys.base_prefix) / "bin" / "python3"
        self.script("bin/python3", f'exec {base} "$@"')
        self.environ: dict[str, str] = {"UV_OFFLINE": "1"}
        if (uv := uv_program()) is not None:  # as a rented box, but from this machine's cache: no test leaves it
            self.script("bin/uv", f'exec {uv} "$@"')
            self.environ["UV_CACHE_DIR"] = str(uv_cache_dir())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._write_shim()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        isolate = os.geteuid() == 0 and shutil.which("unshare")
        own = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount", "--mount-proc"] if isolate else []
        log = (self.root / "log").open("ab")
        self._process = subprocess.Popen(
            [*own, SSHD, "-D", "-e", "-f", str(self._config())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                    if sock.recv(4) == b"SSH-":
                        return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError((self.root / "log").read_text())

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def reboot(self) -> None:
        self.kill()
        self.start()

    def move(self) -> None:
        """Another port from the next start on."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def new_host_key(self) -> None:
        for path in (self.root / "etc").glob("host_key*"):
            path.unlink()
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / "etc/host_key")]
        subprocess.run(make, check=True, stdin=subprocess.DEVNULL)

    def let_in(self, public_key: str) -> None:
        (self.root / "etc/authorized_keys").write_text(public_key + "\n")

    def script(self, path: str, body: str) -> None:
        (self.root / path).write_text(f"#!/bin/sh\n{body}\n")
        (self.root / path).chmod(0o755)

    def _write_shim(self) -> None:
        extra = " ".join(f"{key}={value}" for key, value in self.environ.items())
        (self.root / "etc/shim").write_text(
            "#!/bin/bash\n"
            f"export HOME={self.home} TMPDIR={self.root}/tmp PATH={self.root}/bin:/usr/local/bin:/usr/bin:/bin {extra}\n"
            'cd "$HOME" && exec bash -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        (self.root / "etc/shim").chmod(0o755)

    def _config(self) -> Path:
        etc = self.root / "etc"
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {etc}/host_key",
            f"AuthorizedKeysFile {etc}/authorized_keys",
            f"PidFile {etc}/sshd.pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            f"SetEnv HOME={self.home}",  # else sshd's shell reads the tester's own .bashrc
            f"ForceCommand {etc}/shim",
            "MaxStartups 50:30:100",
            "MaxSessions 50",
            "UseDNS no",
            "PrintMotd no",
            "PrintLastLog no",
        ]
        (etc / "sshd_config").write_text("\n".join(lines) + "\n")
        return etc / "sshd_config"


def counting_recipe(**changes: Any) -> Recipe:
    """The smallest recipe: nothing is trained, and a box of this machine's size will do."""
    return Recipe.model_validate(
        {
            "name": "unit",
            "model": {"source": "bucket:models/unit", "family": "qwen3_5_moe", "size_gb": 0.001},
            "phases": [{"kind": "sft", "data": "bucket:data/unit.jsonl", "steps": 4, "learning_rate": 0.001}],
            "box": {
                "tier": "rehearsal",
                "device": "none",
                "min_inet_up_mbps": 20,
                "min_inet_down_mbps": 20,
                "min_disk_free_gb": 0.01,
                "min_host_memory_gb": 0.1,
                "min_pids": 16,
            },
            "budget": {"max_usd": 1, "install_s": 120, "prefetch_s": 120, "stall_s": 30},
            "trainer": "counting",
            **changes,
        }
    )


@pytest.fixture(scope="session")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "id"
    make_key(path)
    return path


@pytest.fixture
def box(tmp_path: Path, key_path: Path) -> Iterator[SshBox]:
    if not Path(SSHD).exists():
        pytest.skip("no sshd on this machine: install openssh-server")
    box = SshBox(tmp_path / "box", key_path.with_name("id.pub").read_text().strip())
    box.start()
    yield box
    box.kill()


@pytest.fixture
def link(box: SshBox) -> Iterator[Link]:
    link = Link(box.port)
    yield link
    link.close()


@pytest.fixture
def login(tmp_path: Path, key_path: Path) -> Iterator[Callable[..., Remote]]:
    """Makes a Remote that goes through these ports in turn."""
    made: list[Remote] = []

    def make(*ports: int, connect_s: float = 3.0) -> Remote:
        endpoints = [Endpoint(host="127.0.0.1", port=port, kind="direct") for port in ports]
        user = os.environ.get("USER") or subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        made.append(Remote(user, key_path, tmp_path / "known_hosts", lambda: endpoints, connect_s=connect_s))
        return made[-1]

    yield make
    for remote in made:
        remote.close()


@pytest.fixture
def remote(login: Callable[..., Remote], link: Link) -> Remote:
    """A login on the box with the zip already there."""
    remote = login(link.port)
    remote.put(box_zip(), "livery/box.zip", timeout_s=20)
    return remote
