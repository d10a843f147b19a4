"""A faulty link for tests: one listening loopback port in front of one target, run by a thread of its own.

`up` is from the client to the target. Small socket buffers make back-pressure reach the sender at once; else the kernel
swallows megabytes and a slow link looks instant.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time


class Link:
    BLOCK = 32 * 1024

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.up_bps: float | None = None
        self.up_bps_each: float | None = None
        """Of each connection, as a long way sets it: several together are faster."""
        self.down_bps: float | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self.connections = 0
        self.flip_down_byte_at: int | None = None
        self._going = threading.Event()
        self._going.set()
        self._sockets: set[socket.socket] = set()
        self._free_at = {True: 0.0, False: 0.0}
        self._rate_lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.BLOCK)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Connections are refused from now on; those that are open stay."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def freeze(self) -> None:
        """Nothing moves and nothing is closed: a dead peer without FIN or RST."""
        self._going.clear()

    def thaw(self) -> None:
        self._going.set()

    def reset(self) -> None:
        """RST on every open connection."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)
            with contextlib.suppress(OSError):
                sock.close()

    def close(self) -> None:
        self.refuse()
        self.thaw()
        self.reset()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                target = socket.socket()
                target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.BLOCK)
                target.connect(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            for sock in (client, target):
                self._sockets.add(sock)
            threading.Thread(target=self._pump, args=(client, target, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(target, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        free_at = 0.0
        try:
            while True:
                self._going.wait()
                data = source.recv(4096 if self._rate(up) else self.BLOCK)
                if not data:
                    break
                self._going.wait()
                self._pace(len(data), up)
                if up and self.up_bps_each:
                    free_at = max(free_at, time.monotonic() - 0.02) + len(data) / self.up_bps_each
                    time.sleep(max(0.0, free_at - time.monotonic()))
                if up:
                    self.bytes_up += len(data)
                else:
                    data = self._damaged(data)
                    self.bytes_down += len(data)
                sink.sendall(data)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        if not up:
            for sock in (source, sink):
                self._sockets.discard(sock)

    def _rate(self, up: bool) -> float | None:
        return self.up_bps if up else self.down_bps

    def _pace(self, count: int, up: bool) -> None:
        rate = self._rate(up)
        if not rate:
            return
        with self._rate_lock:
            now = time.monotonic()
            self._free_at[up] = max(self._free_at[up], now - 0.02) + count / rate
            wait = self._free_at[up] - now
        if wait > 0:
            time.sleep(wait)

    def _damaged(self, data: bytes) -> bytes:
        at = self.flip_down_byte_at
        if at is None or not self.bytes_down <= at < self.bytes_down + len(data):
            return data
        self.flip_down_byte_at = None
        changed = bytearray(data)
        changed[at - self.bytes_down] ^= 0xFF
        return bytes(changed)
