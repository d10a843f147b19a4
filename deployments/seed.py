"""What a user of the rehearsal would have had in the bucket already: a small base model and five small datasets, made by code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from training.box.store import Store

CACHE = Path(".livery/world")
_STAMP = "made-by.json"


def make(folder: Path = CACHE) -> Path:
    """Make the tiny world once; made again when the code that makes it has changed.

    RuntimeError with the end of its output when that fails (the `train` extra is needed).
    """
    stamp = folder / _STAMP
    wanted = _code_digest()
    if stamp.exists() and json.loads(stamp.read_text())["code"] == wanted:
        return folder
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "training.tiny", "--out", str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"making the tiny model failed; is the extra 'train' installed?\n{done.stderr[-2000:]}")
    stamp.write_text(json.dumps({"code": wanted}))
    return folder


def seed(environ: Mapping[str, str], folder: Path | None = None) -> None:
    """Put the tiny world into the rehearsal's bucket under models/tiny-moe and datasets/tiny; what is there stays."""
    source = folder or make()
    store = store_of(environ)
    for local, prefix in (("model", "models/tiny-moe"), ("datasets", "datasets/tiny")):
        for path in sorted((source / local).rglob("*")):
            if path.is_file():
                store.upload_file(
                    path,
                    f"{prefix}/{path.relative_to(source / local).as_posix()}",
                    sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                )


def store_of(environ: Mapping[str, str]) -> Store:
    """The rehearsal's bucket with the control plane's key."""
    return Store(
        environ["LIVERY_BUCKET"],
        endpoint_url=environ["LIVERY_S3_ENDPOINT_URL"],
        region=environ["LIVERY_S3_REGION"],
        access_key_id=environ["LIVERY_S3_ACCESS_KEY_ID"],
        secret_access_key=environ["LIVERY_S3_SECRET_ACCESS_KEY"],
    )


def _code_digest() -> str:
    spec = find_spec("training.tiny")
    assert spec is not None and spec.origin is not None, "training.tiny is part of this distribution"
    versions = f"{sys.version_info[:2]}"
    return hashlib.sha256(Path(spec.origin).read_bytes() + versions.encode()).hexdigest()
