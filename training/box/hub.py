"""The model from the Hugging Face hub: one pinned commit, its sizes and digests held against what the hub says of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training.box.store import MachineFault, Moved, StoreDenied, StoreError, StoreUnreachable, disk_fault, sha256_of

# Weights in formats that are not loaded, and other people's conversions.
IGNORED = ("*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "*.md", ".gitattributes")
Progress = Callable[[int, int], None]
_PROBE_PARTS = 4
_WORKERS = (4, 2, 1)
"""Files at once, by the try: many connections have brought the rate down to nothing."""


def settings(attempt: int) -> dict[str, str]:
    """Environment for huggingface_hub, which reads it at import. Its downloader's threads are bounded (a container's pids.max was hit),
    and from the second try on the plain way is taken: the fast one has hung."""
    chosen = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",  # training runs offline; this is the one moment that may not
        "HF_HUB_DOWNLOAD_TIMEOUT": "30",
        "TOKIO_WORKER_THREADS": "8",
    }
    return {**chosen, "HF_HUB_DISABLE_XET": "1"} if attempt else {**chosen, "HF_XET_HIGH_PERFORMANCE": "1"}


def download_model(
    source: str, folder: Path, progress: Progress, attempt: int, worked: Moved = lambda count: None
) -> dict[str, dict[str, Any]]:
    """Fetch `hub:OWNER/NAME@COMMIT` into `folder`; digests by path relative to ~/livery.

    Progress counts bytes on disk, resumed ones among them; `worked(n)` bytes that are hashed afterwards, which takes longer than a stall may.
    StoreError names a file whose size or sha256 is not the hub's.
    """
    os.environ.update(settings(attempt))
    from huggingface_hub import snapshot_download

    name, _, commit = source.removeprefix("hub:").partition("@")
    with _explained(source):
        files = _files(source)
        total = sum(file.size or 0 for file in files)
        names = [file.rfilename for file in files]
        workers = _WORKERS[min(attempt, len(_WORKERS) - 1)]
        with _Watch(folder, total, progress):
            snapshot_download(name, revision=commit, local_dir=folder, allow_patterns=names, max_workers=workers)
    with ThreadPoolExecutor(_WORKERS[0]) as pool:
        known = pool.map(lambda file: _verified(folder / file.rfilename, file, worked), files)
        verified = {f"model/{file.rfilename}": entry for file, entry in zip(files, known, strict=True)}
    progress(total, total)
    return verified


def digests(source: str) -> dict[str, tuple[int | None, str | None]]:
    """Path → size and sha256, as the hub states them, of the files that a download of `hub:OWNER/NAME@COMMIT` brings; the sha256 of small
    files is not known to it. StoreDenied or StoreUnreachable as in `download_model`."""
    os.environ.update(settings(1))
    with _explained(source):
        return {file.rfilename: (file.size, file.lfs.sha256 if file.lfs else None) for file in _files(source)}


def _files(source: str) -> list[Any]:
    """What the hub has of the model at its commit, without what nobody loads."""
    import fnmatch

    from huggingface_hub import HfApi

    name, _, commit = source.removeprefix("hub:").partition("@")
    info = HfApi().model_info(name, revision=commit, files_metadata=True)
    return [f for f in info.siblings or [] if not any(fnmatch.fnmatch(f.rfilename, p) for p in IGNORED)]


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, commit = source.removeprefix("hub:").partition("@")
    where = f"hub {name}@{commit[:12]}"
    try:
        yield
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise StoreDenied(f"{where}: {type(error).__name__}: check the name, the commit and HF_TOKEN") from None
    except (
        HfHubHTTPError.__bases__[0],
        OSError,
    ) as error:  # first its HTTP client's own error, whichever client that is
        if isinstance(error, OSError) and (fault := disk_fault(error)):
            raise MachineFault(f"{where}: {fault}") from None
        why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise StoreUnreachable(f"{where}: {why}") from None


def measure_down(source: str, size: int, seconds: float) -> float:
    """Mbps from the hub's own servers: ranges of the model's largest file, four at a time, until `size` bytes have come or `seconds` are over.

    StoreDenied for a name, commit or token that is wrong, StoreUnreachable if the hub does not answer.
    """
    os.environ.update(settings(1))
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    name, _, commit = source.removeprefix("hub:").partition("@")
    count, lock = [0], threading.Lock()
    try:
        info = HfApi().model_info(name, revision=commit, files_metadata=True)
        largest = max(info.siblings or [], key=lambda file: file.size or 0)
        url, length = hf_hub_url(name, largest.rfilename, revision=commit), largest.size or 0
        part = max(1, min(size, length) // _PROBE_PARTS)
        began = time.monotonic()

        def fetch(number: int) -> None:
            headers = {**build_hf_headers(), "Range": f"bytes={number * part}-{(number + 1) * part - 1}"}
            with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=seconds) as reply:
                hf_raise_for_status(reply)
                came = 0
                for chunk in reply.iter_raw(1 << 18):
                    came += len(chunk)
                    with lock:
                        count[0] += len(chunk)
                    if came >= part or time.monotonic() - began > seconds:
                        return

        with ThreadPoolExecutor(_PROBE_PARTS) as pool:
            list(pool.map(fetch, range(_PROBE_PARTS)))
        return count[0] * 8 / 1e6 / (time.monotonic() - began)
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise StoreDenied(
            f"hub {name}@{commit[:12]}: {type(error).__name__}: check the name, the commit and HF_TOKEN"
        ) from None
    except Exception as error:  # noqa: BLE001 - the HTTP client below the hub's library has its own errors; each of them means no answer
        raise StoreUnreachable(f"hub {name}@{commit[:12]}: {type(error).__name__}") from None


def _verified(path: Path, file: Any, worked: Moved) -> dict[str, Any]:
    """Size and digest of a downloaded file; empty files and halves were seen to arrive without an error."""
    seen = path.stat().st_size if path.is_file() else -1
    if file.size is not None and seen != file.size:
        path.unlink(missing_ok=True)
        raise StoreError(f"hub {file.rfilename}: {max(seen, 0)} bytes arrived, want {file.size}; it is deleted")
    sha256 = sha256_of(path, worked)
    if file.lfs is not None and sha256 != file.lfs.sha256:
        path.unlink()
        raise StoreError(
            f"hub {file.rfilename}: sha256 {sha256[:12]} arrived, want {file.lfs.sha256[:12]}; it is deleted"
        )
    return {"sha256": sha256, "bytes": seen}


class _Watch:
    """Reports the bytes on disk every second: the hub's library tells nobody how far it is."""

    def __init__(self, folder: Path, total: int, progress: Progress) -> None:
        self._folder, self._total, self._progress = folder, total, progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._report()  # what an earlier try left, before this one adds to it
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._report()

    def _report(self) -> None:
        done = 0
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # half files are renamed when they are whole
                done += path.stat().st_blocks * 512 if path.is_file() else 0
        self._progress(max(0, min(done, self._total - 1)), self._total)
