"""A pretend box: a real SSH server on loopback with its own disk, HOME, PATH and (as root on Linux) its own processes.

Not shared with the real machine: HOME, TMPDIR, PATH's first folder, authorized keys, host key. Shared: the file system,
the kernel and the clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.rehearsal.processes import MARKER, dying_with_us, kill_under

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/libexec/sftp-server")


@dataclass(frozen=True)
class Facts:
    """What a box without a GPU claims to be; its preflight reads it as JSON from $LIVERY_BOX_FACTS."""

    gpu_name: str
    gpu_memory_mb: int
    num_gpus: int = 1
    driver_version: str = "580.95.05"
    cuda_driver: int = 13000
    pids_max: int = 32_768
    memory_max_gb: float = 32.0
    disk_free_gb: float = 100.0
    clock_skew_s: float = 0.0
    xid: int | None = None

    def as_json(self) -> dict[str, Any]:
        gpu = {"name": self.gpu_name, "memory_mb": self.gpu_memory_mb}
        return {
            "gpus": [] if self.xid is not None else [gpu] * self.num_gpus,
            "driver_version": self.driver_version,
            "cuda_driver": self.cuda_driver,
            "pids_max": self.pids_max,
            "memory_max_gb": self.memory_max_gb,
            "disk_free_gb": self.disk_free_gb,
            "clock_skew_s": self.clock_skew_s,
        }


@dataclass
class Box:
    """One box's directory and processes. `make`, then `start`; `stop` keeps the disk, `remove` does not."""

    directory: Path
    facts: Facts
    environment: Mapping[str, str] = field(default_factory=dict)
    container_env: Mapping[str, str] = field(default_factory=dict)
    onstart: str = ""
    banner: str = ""
    path: str | None = None
    broken_module: str | None = None
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.directory / "root"

    def make(self) -> None:
        for name in ("etc/commands", "root", "workspace", "tmp", "bin", "log"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        # The per-instance key lies under etc/, so nobody else on this machine may look inside.
        self.directory.chmod(0o700)
        self._write_programs()
        self._write_environment()
        self.set_keys([])
        if not (key := self.directory / "etc/host_key").exists():
            _make_host_key(key)

    def start(self) -> None:
        """Starts the SSH server and, beside it, `onstart`. RuntimeError when the server dies at once."""
        self.port = free_port()
        self._write_server_config()
        with open(self.directory / "log/ssh.log", "ab") as log:
            self._process = subprocess.Popen(
                dying_with_us([*_isolation(), "/bin/bash", str(self.directory / "etc/init")]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", MARKER: str(self.directory)},
            )

    def answers(self) -> bool:
        """Whether the SSH server greets; RuntimeError with its log when it has died."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"SSH server of {self.directory} ended: {self.log()[-400:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5) as peer:
            peer.settimeout(0.5)
            return peer.recv(4) == b"SSH-"
        return False

    def stop(self) -> None:
        """Power cut: every process dies, the disk stays."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        kill_under(self.directory)

    def remove(self, trash: Path) -> Path:
        """Ends the box and moves its directory into `trash`, which is quick; deleting it there may take seconds."""
        self.stop()
        trash.mkdir(parents=True, exist_ok=True)
        return self.directory.rename(trash / f"{self.directory.name}-{os.urandom(3).hex()}")

    def wipe(self) -> None:
        for name in ("root", "workspace", "tmp"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        self.make()

    def set_keys(self, keys: Sequence[str]) -> None:
        target = self.directory / "etc/authorized_keys"
        draft = target.with_suffix(".new")
        draft.write_text("".join(f"{key}\n" for key in keys))
        draft.chmod(0o600)
        draft.replace(target)

    def begun_commands(self) -> int:
        """How many SSH commands began since the last question."""
        found = list((self.directory / "etc/commands").iterdir())
        for mark in found:
            mark.unlink(missing_ok=True)
        return len(found)

    def event_files(self) -> list[Path]:
        """Every events.jsonl under the product's folder, not looking into virtual environments."""
        return [path for path in self._walk("events.jsonl") if path.is_relative_to(self.home / "livery")]

    def break_imports(self) -> None:
        """Makes the broken module fail also where PYTHONPATH is not read (`python -I`), in every environment so far."""
        for config in self._walk("pyvenv.cfg"):
            for packages in config.parent.glob("lib/python*/site-packages"):
                if not (breaker := packages / "livery_rehearsal_broken.pth").exists():
                    breaker.write_text(f"import sys; sys.modules[{self.broken_module!r}] = None\n")

    def log(self) -> str:
        parts = [self.directory / "log" / name for name in ("onstart.log", "ssh.log")]
        return "".join(part.read_text(errors="replace") for part in parts if part.exists())

    def shell_environment(self) -> dict[str, str]:
        """What an SSH command sees. The container's own variables are not in it, as on a real box."""
        path = self.path or f"{self.directory}/bin:{SYSTEM_PATH}"
        result = {
            "HOME": str(self.home),
            "PATH": path,
            "TMPDIR": str(self.directory / "tmp"),
            "WORKSPACE": str(self.directory / "workspace"),
            "LANG": "C.UTF-8",
            MARKER: str(self.directory),
            "LIVERY_BOX_FACTS": str(self.directory / "etc/facts.json"),
            **self.environment,
        }
        if self.broken_module:
            result["PYTHONPATH"] = str(self.directory / "etc/broken")
        return result

    def _walk(self, name: str) -> list[Path]:
        found = []
        for folder, folders, files in os.walk(self.home):
            if "pyvenv.cfg" in files:
                folders.clear()
            if name in files:
                found.append(Path(folder) / name)
        return found

    def _write_environment(self) -> None:
        etc = self.directory / "etc"
        (etc / "facts.json").write_text(json.dumps(self.facts.as_json(), indent=1))
        (etc / "environment").write_text(_exports(self.shell_environment()))
        _write_private(etc / "container_env", _exports(self.container_env))
        (etc / "onstart").write_text(self.onstart)
        if self.broken_module:
            package = etc / "broken" / self.broken_module.split(".")[0]
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(
                f"raise ImportError('{self.broken_module}: broken on this box by the fault box.import_broken')\n"
            )

    def _write_programs(self) -> None:
        base_python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        _write_program(self.directory / "bin/python3", f'#!/bin/sh\nexec {shlex.quote(base_python)} "$@"\n')
        _write_program(self.directory / "bin/python", f'#!/bin/sh\nexec {shlex.quote(base_python)} "$@"\n')
        if (uv := uv_program()) is not None:
            _write_program(self.directory / "bin/uv", f'#!/bin/sh\nexec {shlex.quote(uv)} "$@"\n')
        _write_program(self.directory / "bin/nvidia-smi", _nvidia_smi(self.facts))
        _write_program(self.directory / "etc/shim", self._shim())

    def _shim(self) -> str:
        """Stands before every SSH command: gives it the box's environment, whatever the user's own shell set up."""
        etc = shlex.quote(str(self.directory / "etc"))
        sftp = next((p for p in SFTP_SERVERS if os.path.exists(p)), "sftp-server")
        say = f"printf '%s\\n' {shlex.quote(self.banner)}" if self.banner else ":"
        return f"""#!/bin/bash
command=$SSH_ORIGINAL_COMMAND
unset SSH_AUTH_SOCK VIRTUAL_ENV PYTHONPATH SSH_ORIGINAL_COMMAND
. {etc}/environment
cd "$HOME" && unset OLDPWD || exit 97
case "$command" in
  *sftp-server*|internal-sftp) exec {sftp} ;;
  "") : > {etc}/commands/$$; exec bash -l ;;
  *) : > {etc}/commands/$$; {say}; exec bash -c "$command" ;;
esac
"""

    def _write_server_config(self) -> None:
        etc, quoted = self.directory / "etc", shlex.quote(str(self.directory / "etc"))
        server = sshd_program()
        if server is None:
            serve = shlex.join([sys.executable, "-m", "deployments.rehearsal.asyncbox", str(self.directory)])
            serve = f"cd {shlex.quote(str(Path(__file__).parents[2]))} && exec {serve} {self.port}"
        else:
            (etc / "sshd_config").write_text(self._sshd_config())
            serve = f"exec {shlex.quote(server)} -D -e -f {quoted}/sshd_config"
        # onstart may append to /etc/environment, as on a real box: with mounts of its own the box gets a private one.
        private = f"mount --bind {quoted}/system_environment /etc/environment 2>/dev/null"
        (etc / "system_environment").touch()
        (etc / "init").write_text(
            f"""{f"[ -e /etc/environment ] && {private}" if _isolation() else ":"}
( . {quoted}/environment; . {quoted}/container_env; cd "$HOME" && unset OLDPWD && exec bash {quoted}/onstart ) \\
  </dev/null >>{shlex.quote(str(self.directory / "log/onstart.log"))} 2>&1 &
{serve}
"""
        )

    def _sshd_config(self) -> str:
        etc = self.directory / "etc"
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f'HostKey "{etc}/host_key"',
            f'AuthorizedKeysFile "{etc}/authorized_keys"',
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            # Without HOME here, sshd's shell would source the developer's own .bashrc before every command.
            f'SetEnv "HOME={self.home}" "{MARKER}={self.directory}"',
            f"ForceCommand {shlex.quote(str(etc / 'shim'))}",
            "Subsystem sftp internal-sftp",
            "MaxStartups 50:30:100",
            "MaxSessions 50",
            "ClientAliveInterval 15",
            "ClientAliveCountMax 4",
            "UseDNS no",
            "PrintMotd no",
            "PrintLastLog no",
        ]
        if sshd_version() >= (9, 8):
            # Newer servers lock out an address after failed logins; here every client has the same one.
            lines.append("PerSourcePenalties no")
        return "\n".join(lines) + "\n"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@functools.cache
def sshd_program() -> str | None:
    """The system's OpenSSH server, or None; LIVERY_REHEARSAL_SSHD names another, or `none` for the Python server."""
    asked = os.environ.get("LIVERY_REHEARSAL_SSHD")
    if asked == "none":
        return None
    places = (asked, shutil.which("sshd"), "/usr/sbin/sshd", "/usr/local/sbin/sshd", "/opt/homebrew/sbin/sshd")
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


@functools.cache
def sshd_version() -> tuple[int, int]:
    told = subprocess.run([sshd_program() or "sshd", "-V"], capture_output=True, text=True)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", told.stderr + told.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@functools.cache
def uv_program() -> str | None:
    """A real uv binary: beside this interpreter, beside its base interpreter, or on PATH."""
    beside = [Path(p).parent / "uv" for p in (sys.executable, getattr(sys, "_base_executable", sys.executable))]
    found = next((str(p) for p in beside if os.access(p, os.X_OK)), None)
    return found or shutil.which("uv")


@functools.cache
def uv_cache_dir() -> str | None:
    if (uv := uv_program()) is None:
        return None
    told = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True)
    return told.stdout.strip() or None


@functools.cache
def _isolation() -> tuple[str, ...]:
    """The prefix that gives a box its own process ids and mounts, or nothing where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return ()
    os.makedirs("/run/sshd", exist_ok=True)
    prefix = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount", "--mount-proc")
    works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if works else ()


def _make_host_key(path: Path) -> None:
    if shutil.which("ssh-keygen"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "box", "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return
    import asyncssh  # only where there is no OpenSSH at all: it costs 0.3 s to import

    path.touch(mode=0o600)
    path.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())


def _exports(values: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _nvidia_smi(facts: Facts) -> str:
    if facts.xid is not None:
        lost = "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error"
        return f"#!/bin/sh\necho '{lost} (Xid {facts.xid})'\nexit 255\n"
    cuda = f"{facts.cuda_driver // 1000}.{facts.cuda_driver % 1000 // 10}"
    rows = "\n".join(f"GPU {i}: {facts.gpu_name} (UUID: GPU-{i:08d})" for i in range(facts.num_gpus))
    return f"""#!/bin/sh
query=; unit=' MiB'
for word in "$@"; do
  case "$word" in --query-gpu=*) query=${{word#--query-gpu=}} ;; *nounits*) unit= ;; -L) echo '{rows}'; exit 0 ;; esac
done
if [ -z "$query" ]; then
  echo '| NVIDIA-SMI {facts.driver_version}   Driver Version: {facts.driver_version}   CUDA Version: {cuda} |'; exit 0
fi
index=0
while [ $index -lt {facts.num_gpus} ]; do
  line=
  for column in $(echo "$query" | tr ',' ' '); do
    case "$column" in
      index) value=$index ;; name|gpu_name) value='{facts.gpu_name}' ;; uuid) value="GPU-0000000$index" ;;
      driver_version) value='{facts.driver_version}' ;; memory.total|memory.free) value="{facts.gpu_memory_mb}$unit" ;;
      memory.used) value="0$unit" ;; utilization.gpu) value=0 ;; temperature.gpu) value=40 ;;
      *) echo "Field \\"$column\\" is not a valid field to query."; exit 2 ;;
    esac
    line="${{line:+$line, }}$value"
  done
  echo "$line"; index=$((index + 1))
done
"""
