"""Stretches of files through a few pinned buffers to a device, read by a few threads with preadv in the order of the files.

Not mapped: pages of a mapped file count as the process's memory, and are read one fault at a time. The buffers are all that the host holds.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from training.sharded.headers import CheckpointError

BUFFER_BYTES = 16 << 20
BUFFERS = 8


class Read(NamedTuple):
    """One stretch of a file and what to do with it. `sink` gets the bytes on the device, on the thread that called `stream`, in the order of the
    reads; they are its own only until it returns."""

    file: Path
    offset: int
    bytes: int
    sink: Callable[[Tensor], None]
    name: str
    """Of the tensor, for errors."""
    crc32: int | None = None
    """What the bytes must sum to, where that is known."""


@dataclass
class Streamed:
    bytes: int = 0
    reads: int = 0


class DamagedError(CheckpointError):
    """Bytes were read whose checksum is not the one written down."""


def stream(
    reads: Iterable[Read], device: torch.device, *, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS
) -> Streamed:
    """Carry out `reads`, none longer than `buffer_bytes`, sorted by file and offset. CheckpointError if a file ends too early or cannot be read."""
    ordered = sorted(reads, key=lambda read: (read.file, read.offset))
    done = Streamed()
    with _Files() as files, ThreadPoolExecutor(buffers) as pool:
        desk = _Desk(device, buffer_bytes, buffers)
        waiting: deque[tuple[Read, Future[Tensor]]] = deque()
        rest = iter(ordered)

        def ask() -> None:
            read = next(rest, None)
            if read is not None:
                waiting.append((read, pool.submit(desk.fetch, files, read)))

        try:
            for _ in range(buffers):
                ask()
            while waiting:
                read, future = waiting.popleft()
                buffer = future.result()
                desk.deliver(buffer, read)
                done.bytes += read.bytes
                done.reads += 1
                ask()
        except BaseException:
            # The pool's exit waits for its threads, and those for a buffer that nobody gives back any more.
            desk.abandon(len(waiting))
            raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies to host memory may still be under way
    return done


def pieces(offset: int, numbers: int, item_bytes: int, buffer_bytes: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, first number) of stretches that fit the buffer, each but the last of whole blocks of numbers."""
    step = max(1, buffer_bytes // item_bytes // block) * block
    for first in range(0, numbers, step):
        yield offset + first * item_bytes, min(step, numbers - first) * item_bytes, first


class _Files:
    """Open descriptors, shared by the threads."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[path]


class _Desk:
    """The buffers, and for each the copy that must end before it is filled again."""

    def __init__(self, device: torch.device, buffer_bytes: int, buffers: int) -> None:
        self._device = device
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event | None] | None] = SimpleQueue()
        for _ in range(buffers):
            self._free.put((torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"), None))

    def fetch(self, files: _Files, read: Read) -> Tensor:
        slot = self._free.get()
        if slot is None:
            raise CheckpointError("reading was given up")
        buffer, copied = slot
        if copied is not None:
            copied.synchronize()
        view = memoryview(buffer.numpy())[: read.bytes]
        _read_into(view, files, read)
        if read.crc32 is not None and zlib.crc32(view) != read.crc32:
            raise DamagedError(f"{read.file.name}: {read.name}: its bytes are not those that were written")
        return buffer

    def deliver(self, buffer: Tensor, read: Read) -> None:
        data = buffer[: read.bytes]
        if self._device.type != "cuda":
            read.sink(data)
            self._free.put((buffer, None))
            return
        on_card = data.to(self._device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        read.sink(on_card)
        self._free.put((buffer, copied))

    def abandon(self, waiting: int) -> None:
        for _ in range(waiting + 1):
            self._free.put(None)


def _read_into(view: memoryview, files: _Files, read: Read) -> None:
    done = 0
    try:
        descriptor = files.descriptor(read.file)
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], read.offset + done)
            if not count:
                raise CheckpointError(
                    f"{read.file.name}: ends {len(view) - done} bytes before {read.name} does; the file was cut while it was read, fetch it again"
                )
            done += count
    except OSError as error:
        raise CheckpointError(
            f"{read.file.name}: {read.name} cannot be read: {error.strerror}; check the disk, then fetch the file again"
        ) from None
