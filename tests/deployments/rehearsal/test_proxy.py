from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from deployments.rehearsal.proxy import Link, Proxy


class Sink:
    """Counts what arrives, and answers "done" at the end."""

    def __init__(self) -> None:
        self.received = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                self.received += len(data)
            writer.write(b"done")
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, Sink]]:
    sink = Sink()
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0)
    proxy = Proxy(("127.0.0.1", server.sockets[0].getsockname()[1]), Link(), Link())
    proxy.set_mode("open")
    try:
        yield proxy, sink
    finally:
        proxy.close()
        server.close()


async def send(proxy: Proxy, count: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.transport.set_write_buffer_limits(high=32_768)
        for _ in range(count // 8192):
            writer.write(b"x" * 8192)
            await writer.drain()
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


def run(test: Callable[[Proxy, Sink], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with proxied() as (proxy, sink):
            await asyncio.wait_for(test(proxy, sink), 20)

    asyncio.run(whole())


@pytest.mark.parametrize("flows", [1, 4])
@pytest.mark.parametrize("rate_bytes_s", [380_000.0, 5_000_000.0])
def test_a_link_carries_its_rate_however_many_flows_share_it(rate_bytes_s: float, flows: int) -> None:
    async def shaped(proxy: Proxy, sink: Sink) -> None:
        proxy.forward.rate_bytes_s = rate_bytes_s
        loop, each = asyncio.get_running_loop(), int(rate_bytes_s * 1.2 / flows) // 8192 * 8192
        for attempt in range(1, 5):
            began = loop.time()
            assert await asyncio.gather(*[send(proxy, each) for _ in range(flows)]) == [b"done"] * flows
            measured = each * flows / (loop.time() - began)
            assert measured < 1.15 * rate_bytes_s
            assert proxy.forward.bytes == sink.received == attempt * each * flows
            assert proxy.backward.bytes == attempt * 4 * flows
            if measured > 0.85 * rate_bytes_s:
                return
        pytest.fail(
            f"{measured:.0f} B/s in the last of four attempts, wanted {rate_bytes_s:.0f}"
        )  # a busy machine is slow once

    run(shaped)


def test_a_frozen_link_delivers_nothing_until_it_thaws() -> None:
    async def frozen(proxy: Proxy, sink: Sink) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.freeze()
        writer.write(b"x" * 10_000)
        await asyncio.sleep(0.2)
        assert sink.received == 0
        proxy.thaw()
        await asyncio.sleep(0.2)
        assert sink.received == 10_000
        writer.close()

    run(frozen)


def test_a_reset_is_seen_as_a_reset_not_as_an_end() -> None:
    async def reset(proxy: Proxy, sink: Sink) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        await asyncio.sleep(0.1)
        proxy.reset_all()
        with pytest.raises(ConnectionResetError):
            await reader.read()

    run(reset)


def test_refusing_and_opening_again_keeps_the_port() -> None:
    async def refused(proxy: Proxy, sink: Sink) -> None:
        port = proxy.port
        proxy.set_mode("refuse")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        proxy.set_mode("open")
        assert proxy.port == port and await send(proxy, 8192) == b"done"

    run(refused)


def test_a_blackhole_connects_and_says_nothing() -> None:
    async def silent(proxy: Proxy, sink: Sink) -> None:
        proxy.set_mode("blackhole")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        assert sink.received == 0
        writer.close()

    run(silent)


def test_a_link_may_stall_after_so_many_bytes() -> None:
    async def stalls(proxy: Proxy, sink: Sink) -> None:
        proxy.stall_after_bytes = 50_000
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(proxy, 800_000), 0.4)
        assert 50_000 <= sink.received < 150_000

    run(stalls)


def test_a_link_may_be_cut_after_so_many_bytes() -> None:
    async def cut(proxy: Proxy, sink: Sink) -> None:
        proxy.cut_after_bytes = 50_000
        with pytest.raises(ConnectionError):
            await send(proxy, 8_000_000)
        assert await send(proxy, 8192) == b"done"

    run(cut)


def test_a_dead_target_ends_the_connection() -> None:
    async def dead(proxy: Proxy, sink: Sink) -> None:
        unused = Proxy(("127.0.0.1", 1), Link(), Link())
        proxy.target = ("127.0.0.1", unused.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await reader.read() == b""
        writer.close()
        unused.close()

    run(dead)
