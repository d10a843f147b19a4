"""Put the final adapter into the bucket in PEFT's own layout: `PeftModel.from_pretrained(base, directory)` loads it as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from training.box.files import Item
from training.box.store import Store, sha256_of
from training.checkpoint import link_files
from training.contract import layout
from training.contract.events import Exported
from training.couriers import Courier


def export(
    store: Store, courier: Courier, run: str, source: Path, names: Sequence[str], base: str, work: Path
) -> Exported:
    """Put the adapter's files to `layout.adapter(run)`; `base` is written as the model that it belongs to, since the box's own path means
    nothing elsewhere. What the last checkpoint has brought is copied inside the bucket, the rest goes by `courier`."""
    names = [*names, *([layout.PROBE] if (source / layout.PROBE).exists() else [])]
    directory = link_files(source, names, work / "export")
    config = directory / "adapter_config.json"
    if config.exists():
        content = json.loads(config.read_text(encoding="utf-8")) | {
            "base_model_name_or_path": base,
            "inference_mode": True,
        }
        config.unlink()  # a hard link: writing into it would change the checkpoint
        config.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    prefix = layout.adapter(run)
    digests = {name: sha256_of(directory / name) for name in names}
    files = {name: (directory / name).stat().st_size for name in names}
    missing = []
    for name in names:
        blob = layout.blob(run, digests[name])
        if store.size(blob) == files[name]:
            store.copy(blob, prefix + name, sha256=digests[name])  # GBs that need not cross the line again
        else:
            missing.append(Item(name=name, key=prefix + name, bytes=files[name], sha256=digests[name]))
    if missing:
        courier.send("upload adapter", directory, missing)
    # Last, like a manifest: an adapter without it is half an adapter.
    store.put_bytes(layout.exported(run), json.dumps({"run": run, "base": base, "sha256": digests}, indent=1).encode())
    return Exported(prefix=prefix, files=files)
