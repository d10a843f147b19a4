"""The base model's mirror in the run's own bucket: written once, by the first box that has it from the hub; read by all later ones.

It is complete only with its list of files, which is written last and create-only. A box is a stranger's machine: the list is believed
only as far as the hub's own digests agree with it.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from pydantic import ValidationError

from training.box.child import Refused, Voice, Way
from training.box.files import Item, upload_all
from training.box.store import Store, StoreConflict, StoreUnreachable
from training.contract import layout
from training.contract.manifest import FileEntry
from training.contract.model import Frozen, explain


class Mirror(Frozen):
    """`models/<repo>@<commit>/mirror.json`."""

    source: str
    files: dict[str, FileEntry]
    """Path below the model's folder to its content."""
    at: float
    """Epoch seconds, for people only."""


def find_mirror(store: Store, source: str) -> Mirror | None:
    """The finished mirror of `hub:OWNER/NAME@COMMIT`, None if there is none. Refused if it cannot be read, or if it is not what the hub has."""
    key = layout.mirror_list(source)
    text = store.get_bytes(key)
    if text is None:
        return None
    try:
        mirror = Mirror.model_validate_json(text)
    except ValidationError as error:
        raise Refused(f"{explain(error, key)}; delete it, and the next box mirrors the model again") from None
    _require_the_hubs(mirror, key, source)
    return mirror


def send_mirror(store: Store, source: str, home: Path, voice: Voice, way: Way) -> int:
    """Upload the prefetched model, unless its mirror is there. Bytes sent. Two boxes that do it at once write the same objects."""
    key, base = layout.mirror_list(source), layout.mirror(source)
    if store.size(key) is not None:
        return 0
    known = json.loads((home / "prefetched.json").read_text())["files"]
    files = {
        path.removeprefix("model/"): FileEntry(sha256=entry["sha256"], bytes=entry["bytes"])
        for path, entry in known.items()
        if path.startswith("model/")
    }
    items = [
        Item(name=name, key=base + name, bytes=entry.bytes, sha256=entry.sha256)
        for name, entry in sorted(files.items(), key=lambda item: item[1].bytes)
    ]
    sent = upload_all(store, home / "model", items, "upload mirror", voice, way)
    text = Mirror(source=source, files=files, at=round(time.time(), 3)).model_dump_json(indent=1)
    with contextlib.suppress(
        StoreConflict
    ):  # another box was faster; its list names the same content, or the next reader refuses it
        store.put_bytes(key, text.encode(), create_only=True)
    return sent


def _require_the_hubs(mirror: Mirror, key: str, source: str) -> None:
    from training.box.hub import digests

    try:
        known = digests(source)
    except StoreUnreachable:
        return  # that it is a mirror is for this very case; the files are still held against its list
    for name, (size, sha256) in known.items():
        here = mirror.files.get(name)
        if here is None or (size is not None and here.bytes != size) or (sha256 is not None and here.sha256 != sha256):
            raise Refused(f"{key}: {name} is not the hub's file; delete {layout.mirror(source)} and ask who wrote it")
    if strange := sorted(set(mirror.files) - set(known)):
        raise Refused(
            f"{key}: {strange[0]} is not in the hub's repository; delete {layout.mirror(source)} and ask who wrote it"
        )
