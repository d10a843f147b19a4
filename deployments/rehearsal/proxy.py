"""TCP proxies that shape, freeze, reset or refuse what crosses them; a box's SSH and bucket traffic goes through them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Literal

# Small buffers let back-pressure reach the sender at once; with the kernel's defaults megabytes vanish into the
# buffers and a slow upload looks instant.
BUFFER_BYTES = 32 * 1024
BURST_S = 0.02
CHUNK_S = 0.05

Mode = Literal["open", "refuse", "blackhole"]


class Link:
    """One direction of a box's line. All connections that cross it share its rate and its byte count."""

    def __init__(self) -> None:
        self.rate_bytes_s: float | None = None
        self.bytes = 0
        self._free_at = 0.0

    def chunk_bytes(self) -> int:
        if self.rate_bytes_s is None:
            return BUFFER_BYTES
        return max(1024, min(BUFFER_BYTES, int(self.rate_bytes_s * CHUNK_S)))

    async def carry(self, count: int) -> None:
        if self.rate_bytes_s is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - BURST_S) + count / self.rate_bytes_s
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
        self.bytes += count


class Proxy:
    """A loopback port in front of `target`. `forward` carries what the client sends, `backward` what it receives.

    The port is reserved for the proxy's whole life, so that refusing and opening again keeps the number.
    """

    def __init__(self, target: tuple[str, int], forward: Link, backward: Link) -> None:
        self.target = target
        self.forward, self.backward = forward, backward
        self.stall_after_bytes: int | None = None
        self.cut_after_bytes: int | None = None
        self.sent_bytes = 0
        self.accepted = 0
        self._moving = asyncio.Event()
        self._moving.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._held: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._mode: Mode = "refuse"
        self._reservation = _socket()
        self._reservation.bind(("127.0.0.1", 0))
        self.port: int = self._reservation.getsockname()[1]

    @property
    def mode(self) -> Mode:
        return self._mode

    def set_mode(self, mode: Mode) -> None:
        """refuse: connection refused; blackhole: connects and stays silent; open: forwards."""
        if mode == self._mode:
            return
        self._mode = mode
        self._release_held()
        if mode == "refuse":
            self._close_listener()
            self.reset_all()
        elif self._listener is None:
            self._listener = _socket()
            self._listener.bind(("127.0.0.1", self.port))
            self._listener.listen(128)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def freeze(self) -> None:
        """Sockets stay open and nothing moves: a dead peer without FIN or RST."""
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    def reset_all(self) -> None:
        """Every connection ends with an RST, on both sides."""
        for writer in list(self._writers):
            _arm_reset(writer.get_extra_info("socket"))
            writer.transport.abort()

    def close(self) -> None:
        self.set_mode("refuse")
        self.thaw()
        self.reset_all()
        for task in list(self._tasks):
            task.cancel()
        self._reservation.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        client.setblocking(False)
        self.accepted += 1
        if self._mode == "blackhole":
            self._held.add(client)
            return
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            client_reader, client_writer = await self._streams(client, writers)
            target = _socket()
            try:
                await asyncio.get_running_loop().sock_connect(target, self.target)
            except OSError:
                target.close()
                return
            target_reader, target_writer = await self._streams(target, writers)
            await asyncio.gather(
                self._pump(client_reader, target_writer, self.forward, counted=True),
                self._pump(target_reader, client_writer, self.backward, counted=False),
            )
        except OSError:
            self._abort(writers)
        finally:
            for writer in writers:
                self._writers.discard(writer)
                writer.close()

    async def _streams(
        self, sock: socket.socket, writers: list[asyncio.StreamWriter]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        writers.append(writer)
        self._writers.add(writer)
        return reader, writer

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link, *, counted: bool
    ) -> None:
        while True:
            await self._moving.wait()
            data = await reader.read(link.chunk_bytes())
            if not data:
                break
            await link.carry(len(data))
            await self._moving.wait()
            writer.write(data)
            await writer.drain()
            if counted:
                self._count(len(data))
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    def _count(self, count: int) -> None:
        self.sent_bytes += count
        if self.stall_after_bytes is not None and self.sent_bytes >= self.stall_after_bytes:
            self.stall_after_bytes = None
            self.freeze()
        if self.cut_after_bytes is not None and self.sent_bytes >= self.cut_after_bytes:
            self.cut_after_bytes = None
            self.reset_all()

    def _abort(self, writers: list[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()

    def _close_listener(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _release_held(self) -> None:
        for client in self._held:
            client.close()
        self._held.clear()


def _socket() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The reservation and the listener hold the same port; only a listening socket is given connections.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _arm_reset(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
