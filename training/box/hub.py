"""The model from the Hugging Face hub: one pinned commit, its sizes and digests held against what the hub says of it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training.box.store import StoreDenied, StoreError, StoreUnreachable

# Weights in formats that are not loaded, and other people's conversions.
IGNORED = ("*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "*.md", ".gitattributes")
Progress = Callable[[int, int], None]
_PROBE_PARTS = 4


def settings(attempt: int) -> dict[str, str]:
    """Environment for huggingface_hub, which reads it at import. Its downloader's threads are bounded (a container's pids.max was hit),
    and from the second try on the plain way is taken: the fast one has hung."""
    chosen = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",  # training runs offline; this is the one moment that may not
        "TOKIO_WORKER_THREADS": "8",
    }
    return {**chosen, "HF_HUB_DISABLE_XET": "1"} if attempt else {**chosen, "HF_XET_HIGH_PERFORMANCE": "1"}


def download_model(source: str, folder: Path, progress: Progress, attempt: int) -> dict[str, dict[str, Any]]:
    """Fetch `hub:OWNER/NAME@COMMIT` into `folder`; digests by path relative to ~/livery.

    Progress counts bytes on disk, resumed ones among them. StoreError names a file whose size or sha256 is not the hub's.
    """
    os.environ.update(settings(attempt))
    import fnmatch

    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, commit = source.removeprefix("hub:").partition("@")
    try:
        info = HfApi().model_info(name, revision=commit, files_metadata=True)
        files = [f for f in info.siblings or [] if not any(fnmatch.fnmatch(f.rfilename, p) for p in IGNORED)]
        total = sum(file.size or 0 for file in files)
        with _Watch(folder, total, progress):
            snapshot_download(
                name, revision=commit, local_dir=folder, allow_patterns=[f.rfilename for f in files], max_workers=4
            )
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise StoreDenied(
            f"hub {name}@{commit[:12]}: {type(error).__name__}: check the name, the commit and HF_TOKEN"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise StoreUnreachable(f"hub {name}@{commit[:12]}: {why}") from None
    known = {f"model/{file.rfilename}": _verified(folder / file.rfilename, file) for file in files}
    progress(total, total)
    return known


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


def _verified(path: Path, file: Any) -> dict[str, Any]:
    """Size and digest of a downloaded file; empty files and halves were seen to arrive without an error."""
    seen = path.stat().st_size if path.is_file() else -1
    if file.size is not None and seen != file.size:
        path.unlink(missing_ok=True)
        raise StoreError(f"hub {file.rfilename}: {max(seen, 0)} bytes arrived, want {file.size}; it is deleted")
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
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
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            done = sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*") if path.is_file())
            self._progress(min(done, self._total - 1), self._total)
