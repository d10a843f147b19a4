"""The SSH server of a box where the machine has no sshd: `python -m deployments.rehearsal.asyncbox BOX_DIR PORT`.

Key login for any user name, commands through the box's own shim, and sftp. It is not OpenSSH: a command ended by a
signal reports no exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import asyncssh

from deployments.rehearsal.processes import MARKER

PUMP_BYTES = 65_536


def main() -> None:
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    asyncio.run(serve(directory, port))


async def serve(directory: Path, port: int) -> None:
    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return True

        def public_key_auth_supported(self) -> bool:
            return True

        def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
            # Read at each login: the market attaches and drops keys while the server runs.
            lines = (directory / "etc/authorized_keys").read_text().splitlines()
            return any(asyncssh.import_public_key(line) == key for line in lines if line.strip())

    class Sftp(asyncssh.SFTPServer):
        def map_path(self, path: bytes) -> bytes:
            return path if path.startswith(b"/") else os.fsencode(directory / "root") + b"/" + path

    server = await asyncssh.listen(
        "127.0.0.1",
        port,
        server_host_keys=[str(directory / "etc/host_key")],
        server_factory=Server,
        process_factory=lambda process: run(directory, process),
        sftp_factory=Sftp,
        encoding=None,
        keepalive_interval=15,
        compression_algs=None,
    )
    await server.wait_closed()


async def run(directory: Path, process: Any) -> None:
    environment = {
        "HOME": str(directory / "root"),
        "PATH": os.environ["PATH"],
        MARKER: str(directory),
        "SSH_ORIGINAL_COMMAND": process.command or "",
    }
    child = await asyncio.create_subprocess_exec(
        "/bin/bash",
        str(directory / "etc/shim"),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    feeder = asyncio.create_task(_feed(process, child))
    try:
        # Own pumps: asyncssh's redirect breaks off after some megabytes of output under back-pressure.
        await asyncio.gather(_pump(child.stdout, process.stdout), _pump(child.stderr, process.stderr))
        code = await child.wait()
        if code >= 0:
            process.exit(code)
        else:
            process.exit_with_signal(signal.Signals(-code).name[3:])
    except (asyncssh.Error, OSError):
        # The client went away. As with sshd, only what ignores a hang-up lives on.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGHUP)
    finally:
        feeder.cancel()


async def _pump(source: asyncio.StreamReader | None, sink: Any) -> None:
    assert source is not None
    while data := await source.read(PUMP_BYTES):
        sink.write(data)
        await sink.drain()


async def _feed(process: Any, child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await process.stdin.read(PUMP_BYTES):
            child.stdin.write(data)
            await child.stdin.drain()
        child.stdin.close()


if __name__ == "__main__":
    main()
