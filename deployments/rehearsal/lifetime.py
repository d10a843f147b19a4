"""Runs a whole rehearsal in this process: bucket, market, boxes, until told to stop; then removes all of it."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.rehearsal.api import Api
from deployments.rehearsal.box import sshd_program
from deployments.rehearsal.bucket import BUCKET, REGION, Bucket, remove_sockets
from deployments.rehearsal.faults import FaultBook
from deployments.rehearsal.market import Market
from deployments.rehearsal.processes import hold, kill_under
from deployments.rehearsal.world import World

PARENT_CHECK_S = 0.3


@dataclass(frozen=True)
class Options:
    root: Path
    port: int = 0
    faults: Sequence[str] = ()
    boot_s: float = 1.0
    pace: float = 0.1
    clock_ahead_s: float = 0.0
    env_file: Path | None = None
    outlive_parent: bool = False
    parent_pid: int | None = None
    """Whose end is ours; None means whoever started this process."""
    keep_bucket: bool = False


class RehearsalClock:
    """The real time, plus what was added to it."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


async def serve(options: Options, announce: Callable[[dict[str, str]], None]) -> None:
    """Starts everything, announces the environment, runs until SIGTERM, SIGINT or the parent's end, removes everything.

    RuntimeError: the root is in use, there is no weed binary, or the bucket did not start. ValueError: a bad fault.
    """
    parent = options.parent_pid or os.getppid()
    options = _absolute(options)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    faults = FaultBook()
    for spec in options.faults:
        faults.arm(spec)
    with hold(options.root):
        remove_leftovers(options.root, keep_bucket=options.keep_bucket)
        bucket = Bucket(options.root / "bucket")
        try:
            bucket.start()
            await _run(options, bucket, faults, stop, parent, announce)
        finally:
            await asyncio.to_thread(bucket.stop, keep=options.keep_bucket)
            remove_leftovers(options.root, keep_bucket=options.keep_bucket)
            for path in (options.root / "env", options.env_file):
                if path is not None:
                    path.unlink(missing_ok=True)


def remove_leftovers(root: Path, *, keep_bucket: bool) -> None:
    """Ends what a killed rehearsal on this root left running, and deletes its boxes. The caller holds the root."""
    kill_under(root)
    remove_sockets(root / "bucket")
    for name in ("boxes", "trash", *(() if keep_bucket else ("bucket",))):
        shutil.rmtree(root / name, ignore_errors=True)


async def _run(
    options: Options,
    bucket: Bucket,
    faults: FaultBook,
    stop: asyncio.Event,
    parent: int,
    announce: Callable[[dict[str, str]], None],
) -> None:
    from deployments.rehearsal import web  # now, not above: its half second of imports passes while the bucket starts

    world, clock = World(options.root, bucket), RehearsalClock(options.clock_ahead_s)
    market = Market(clock, faults=faults, host=world, boot_s=options.boot_s)
    listener = _listen(options.port)
    api = Api(market, pace=options.pace, base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    world.base_url = api.base_url
    server = web.server(api, world, advance_clock=clock.advance)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    heart = asyncio.create_task(world.run(market))
    try:
        await asyncio.to_thread(bucket.wait_ready)
        env = environment(api, bucket, options.pace)
        _write_env(options.root / "env", env)
        if options.env_file is not None:
            _write_env(options.env_file, env)
        announce(env)
        await _until_stopped(stop, parent, options.outlive_parent, serving, heart)
    finally:
        heart.cancel()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await world.close(market)
        listener.close()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as problem:
        raise RuntimeError(f"port {port}: {problem.strerror}; pass another --port, or 0 for a free one") from None


async def _until_stopped(
    stop: asyncio.Event, parent: int, outlive: bool, serving: asyncio.Task[None], heart: asyncio.Task[None]
) -> None:
    while not stop.is_set() and (outlive or os.getppid() == parent):
        for task in (serving, heart):
            if task.done():
                task.result()
                raise RuntimeError("the rehearsal's own server ended")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_CHECK_S)


def environment(api: Api, bucket: Bucket, pace: float) -> dict[str, str]:
    """What the product must be told so that it runs against this rehearsal."""
    return {
        "LIVERY_MARKET": "vast",
        "LIVERY_MARKET_URL": api.base_url,
        "LIVERY_MARKET_API_KEY": api.market.account_key,
        "LIVERY_REAPER_API_KEY": api.market.reaper_key,
        "LIVERY_MARKET_PACE": str(pace),
        "LIVERY_S3_ENDPOINT_URL": bucket.endpoint_url,
        "LIVERY_S3_REGION": REGION,
        "LIVERY_BUCKET": BUCKET,
        "LIVERY_S3_ACCESS_KEY_ID": bucket.control.access_key_id,
        "LIVERY_S3_SECRET_ACCESS_KEY": bucket.control.secret_access_key,
        "LIVERY_BOX_S3_ACCESS_KEY_ID": bucket.box.access_key_id,
        "LIVERY_BOX_S3_SECRET_ACCESS_KEY": bucket.box.secret_access_key,
        "LIVERY_SSH_USER": getpass.getuser(),
    }


def ssh_server_notice() -> str:
    program = sshd_program()
    return f"boxes run {program}" if program else "no sshd on this machine: boxes run the asyncssh server instead"


def _absolute(options: Options) -> Options:
    env_file = None if options.env_file is None else options.env_file.absolute()
    return replace(options, root=options.root.absolute(), env_file=env_file)


def _write_env(path: Path, env: dict[str, str]) -> None:
    """Whole or not at all, and never readable by others: it holds keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.touch(mode=0o600)
    draft.chmod(0o600)
    draft.write_text("".join(f"{name}={value}\n" for name, value in env.items()))
    draft.replace(path)
