"""One logical connection to one box. It reconnects by itself, and it never calls a lost answer a failure.

Three silences of the SSH library are handled here, each seen: a dead link hangs for ever unless every read has a deadline; keepalive
alone notices nothing unless the kernel is told to give up on unacknowledged data; and a connection that breaks under a command
reports exit status -1, which means "outcome unknown".
"""

from __future__ import annotations

import contextlib
import secrets
import select
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import fabric
import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from tasks.domain import Endpoint
from tasks.errors import BoxLost, LoginFailed, TransferFailed

CONNECT_S = 10.0
DEAD_LINK_S = 15.0
# A box may ignore connections while it boots, but one that swallows them for this long has no way in.
TIMED_OUT_S = 60.0
_KEY_AGAIN_S = 60.0
_PINNED = "box"
_CHUNK = 1 << 16

Trouble = Literal["no address yet", "refused", "timed out", "key not accepted", "broken"]


@dataclass(frozen=True)
class Answer:
    """What a command did. `code` None: the connection was lost or the deadline passed, so nobody knows what it did."""

    code: int | None
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace")


class _NoWayIn(Exception):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble: Trouble = trouble


class Remote:
    """A login on one box, at whichever address it has now. One user at a time; calls from other threads wait.

    `endpoints` is asked again before each reconnect: addresses change when a box is restarted. The first host key seen is kept in
    `known_hosts_path` (one file a box, since the market gives addresses out again) and any other is refused with LoginFailed.
    `key_refused` is told, once a minute at most, when every address that answers refuses the key: hosts have been seen to drop it.
    """

    def __init__(
        self,
        box_user: str,
        key_path: Path | str,
        known_hosts_path: Path | str,
        endpoints: Callable[[], Sequence[Endpoint]],
        *,
        connect_s: float = CONNECT_S,
        key_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._user = box_user
        self._key_path = Path(key_path)
        self._known_hosts = Path(known_hosts_path)
        self._endpoints = endpoints
        self._connect_s = connect_s
        self._key_refused = key_refused
        self._key_told_at = float("-inf")
        self._connection: fabric.Connection | None = None
        self._worked: Endpoint | None = None
        self._lock = threading.RLock()

    def run(self, command: str, *, timeout_s: float, stdin: bytes | None = None) -> Answer:
        """Run a shell command. Never raises for a lost connection (see Answer); LoginFailed only for a changed host key."""
        with self._lock:
            deadline = time.monotonic() + timeout_s
            try:
                channel = self._channel(deadline)
            except _NoWayIn as error:
                return Answer(None, b"", error.trouble.encode())
            return self._exchange(channel, command, stdin, deadline)

    def put(self, data: bytes | Path, remote_path: str, *, mode: int = 0o644, timeout_s: float) -> None:
        """Write a file whole or not at all; sent again over a new connection until the time is up.

        `remote_path` is absolute or relative to the login's home. BoxLost if the box did not answer in time, TransferFailed if it
        said no (a full disk, for one).
        """
        content = data.read_bytes() if isinstance(data, Path) else data
        path, folder = shlex.quote(remote_path), shlex.quote(str(Path(remote_path).parent))
        fresh = shlex.quote(f"{remote_path}.{secrets.token_hex(4)}.new")
        command = (
            f'cd && umask 077 && mkdir -p {folder} && cat > {fresh} && [ "$(wc -c < {fresh})" -eq {len(content)} ]'
            f" && chmod {mode:o} {fresh} && mv -f {fresh} {path} || {{ rm -f {fresh}; exit 1; }}"
        )
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answer = self.run(command, timeout_s=left, stdin=content)
            if answer.code == 0:
                return
            if answer.code is not None:
                raise TransferFailed(
                    f"the box could not write {remote_path}: {_last_line(answer.err) or 'no reason given'}"
                )
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
        raise BoxLost(
            f"{len(content)} bytes could not be sent to {remote_path} in {timeout_s:.0f} s: the box does not answer"
        )

    def close(self) -> None:
        with self._lock:
            self._drop()

    def greet(self, timeout_s: float = 20.0) -> Trouble | None:
        """Log in afresh and have one word said back; None if that worked, else what stood in the way."""
        with self._lock:
            self._drop()
            nonce = secrets.token_hex(8)
            deadline = time.monotonic() + timeout_s
            try:
                channel = self._channel(deadline)
            except _NoWayIn as error:
                return error.trouble
            answer = self._exchange(channel, f"echo {nonce}", None, deadline)
            return None if answer.code == 0 and nonce in answer.text else "broken"

    def _channel(self, deadline: float) -> paramiko.Channel:
        """A channel for one command. Only a connection just made is believed to be dead for good when it gives none."""
        if self._connection is not None:
            channel = self._open_session(deadline)
            if channel is not None:
                return channel
        self._connect(deadline)
        channel = self._open_session(deadline)
        if channel is None:
            raise _NoWayIn("broken")
        return channel

    def _open_session(self, deadline: float) -> paramiko.Channel | None:
        assert self._connection is not None
        try:
            transport = self._connection.transport
            if transport is None or not transport.is_active():
                raise EOFError
            channel: paramiko.Channel = transport.open_session(timeout=_left(deadline, at_most=self._connect_s))
            return channel
        except (paramiko.SSHException, OSError, EOFError):
            self._drop()
            return None

    def _connect(self, deadline: float) -> None:
        endpoints = sorted(self._endpoints(), key=lambda endpoint: endpoint != self._worked)
        troubles: list[Trouble] = []
        for endpoint in endpoints:
            try:
                self._connection = self._login(endpoint, deadline)
            except _NoWayIn as error:
                troubles.append(error.trouble)
                continue
            self._worked = endpoint
            return
        # One address that swallows packets says nothing as long as another one answers at all.
        ranked: tuple[Trouble, ...] = ("key not accepted", "refused", "broken", "timed out")
        worst: Trouble = next((trouble for trouble in ranked if trouble in troubles), "no address yet")
        if worst == "key not accepted" and time.monotonic() - self._key_told_at > _KEY_AGAIN_S:
            self._key_told_at = time.monotonic()
            self._key_refused()
        raise _NoWayIn(worst)

    def _login(self, endpoint: Endpoint, deadline: float) -> fabric.Connection:
        seconds = _left(deadline, at_most=self._connect_s)
        connection = fabric.Connection(
            endpoint.host,
            user=self._user,
            port=endpoint.port,
            connect_timeout=seconds,
            config=fabric.Config(overrides={"load_ssh_configs": False}),
            # The run's own key and no other: an agent with many keys uses up the server's patience.
            connect_kwargs={
                "key_filename": str(self._key_path),
                "look_for_keys": False,
                "allow_agent": False,
                "banner_timeout": seconds,
                "auth_timeout": seconds,
            },
        )
        connection.client.set_missing_host_key_policy(_FirstKeyOnly(self._known_hosts))
        began = time.monotonic()
        try:
            connection.open()
        except LoginFailed:
            _close(connection)
            raise
        except paramiko.AuthenticationException:
            raise _refused(connection, "key not accepted") from None
        except NoValidConnectionsError:
            raise _refused(connection, "refused") from None
        except (paramiko.SSHException, OSError, EOFError):
            # The library has many names for it: what used up its time was swallowed, what failed sooner was broken off.
            slow = time.monotonic() - began >= 0.9 * seconds
            raise _refused(connection, "timed out" if slow else "broken") from None
        _notice_dead_link(connection)
        return connection

    def _exchange(self, channel: paramiko.Channel, command: str, stdin: bytes | None, deadline: float) -> Answer:
        out, err = bytearray(), bytearray()
        try:
            channel.settimeout(_left(deadline))
            channel.exec_command(command)
            waiting = stdin or b""
            sent = 0
            while not (channel.exit_status_ready() and channel.eof_received and not _readable(channel)):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if sent < len(waiting) and channel.send_ready():
                    sent += _send(channel, waiting[sent : sent + _CHUNK])
                elif sent == len(waiting) and not channel.eof_sent:
                    channel.shutdown_write()
                elif not _drain(channel, out, err):
                    if channel.closed:
                        break
                    select.select([channel], [], [], min(_left(deadline), 0.1 if channel.eof_sent else 0.01))
            _drain(channel, out, err)
            code = channel.recv_exit_status() if channel.exit_status_ready() else -1
        except (paramiko.SSHException, OSError, EOFError):
            self._drop()
            return Answer(None, bytes(out), bytes(err) or b"connection lost")
        finally:
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                channel.close()
        return Answer(code if code != -1 else None, bytes(out), bytes(err))

    def _drop(self) -> None:
        if self._connection is not None:
            _close(self._connection)
            self._connection = None


def wait_for_login(
    remote: Remote,
    *,
    deadline: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    poll_s: float = 2.0,
) -> None:
    """Wait for a first login that answers. A refusal may pass; connections swallowed for a minute do not; LoginFailed tells the sequence."""
    seen: list[str] = []
    silent_since: float | None = None
    while True:
        trouble = remote.greet()
        if trouble is None:
            return
        now = clock()
        if not seen or seen[-1] != trouble:
            seen.append(trouble)
        silent_since = (silent_since if silent_since is not None else now) if trouble == "timed out" else None
        if silent_since is not None and now - silent_since >= TIMED_OUT_S:
            raise LoginFailed(f"connections time out for {now - silent_since:.0f} s ({' → '.join(seen)}); next offer")
        if now >= deadline:
            raise LoginFailed(f"no login by the deadline; seen in turn: {' → '.join(seen)}; next offer")
        sleep(poll_s)


def make_key(path: Path) -> str:
    """A new ed25519 key pair for one run (private part 0600, public part beside it as .pub); the public line. An existing one is kept."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public = path.with_name(path.name + ".pub")
    if path.exists() and public.exists():
        return public.read_text().strip()
    key = Ed25519PrivateKey.generate()
    private_text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_bytes(private_text)
    public.write_text(f"{line} livery\n")
    return f"{line} livery"


class _FirstKeyOnly(paramiko.MissingHostKeyPolicy):
    """Keeps the first host key of a box under a fixed name, whatever address it was seen at, and accepts no other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        kept = paramiko.HostKeys(str(self._path)) if self._path.exists() else paramiko.HostKeys()
        known = kept.lookup(_PINNED)
        if not known:
            kept.add(_PINNED, key.get_name(), key)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept.save(str(self._path))
        elif known.get(key.get_name()) != key:
            raise LoginFailed(
                f"{hostname} shows another host key ({key.get_name()} {key.fingerprint}) than at the first login: "
                "this is not the box that was rented; next offer"
            )


def _notice_dead_link(connection: fabric.Connection) -> None:
    transport = connection.transport
    assert transport is not None
    transport.set_keepalive(5)
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it; elsewhere the deadlines alone must do
    if option is not None and isinstance(transport.sock, socket.socket):
        transport.sock.setsockopt(socket.IPPROTO_TCP, option, int(DEAD_LINK_S * 1000))


def _refused(connection: fabric.Connection, trouble: Trouble) -> _NoWayIn:
    _close(connection)
    return _NoWayIn(trouble)


def _close(connection: fabric.Connection) -> None:
    # paramiko's own close of a dead connection may raise any of these, and there is nothing left to save.
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError, AttributeError):
        connection.close()
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        connection.client.close()


def _send(channel: paramiko.Channel, data: bytes) -> int:
    """Bytes sent; all of them if the command has ended without wanting more, for then its exit code is the answer."""
    try:
        return channel.send(data)
    except OSError:
        if channel.status_event.wait(1.0) and channel.exit_status != -1:
            return len(data)
        raise


def _readable(channel: paramiko.Channel) -> bool:
    return channel.recv_ready() or channel.recv_stderr_ready()


def _drain(channel: paramiko.Channel, out: bytearray, err: bytearray) -> bool:
    """Take what has arrived without waiting; whether there was anything."""
    took = False
    while channel.recv_ready():
        out += channel.recv(_CHUNK)
        took = True
    while channel.recv_stderr_ready():
        err += channel.recv_stderr(_CHUNK)
        took = True
    return took


def _left(deadline: float, *, at_most: float = float("inf")) -> float:
    return max(0.05, min(at_most, deadline - time.monotonic()))


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
