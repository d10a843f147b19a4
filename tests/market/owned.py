"""A host that its user owns: a real sshd on loopback with a home of its own, which also reads the keys in that home."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable
from pathlib import Path

from deployments.rehearsal.box import Facts
from tasks.market.ssh_host import SshHost
from tasks.remote.ssh import make_key
from tests.tasks.remote.conftest import SshBox
from training.box.folder import FolderStore


class OwnedBox(SshBox):
    """`key_path` is the owner's private key."""

    def __init__(self, root: Path) -> None:
        self.key_path = root / "owner"
        super().__init__(root / "box", make_key(self.key_path))
        self.facts = root / "facts.json"
        self.facts.write_text(json.dumps(Facts("Rehearsal CPU", 8000).as_json()))
        self.environ["LIVERY_BOX_FACTS"] = str(self.facts)

    def market(self, store: FolderStore, state_dir: Path, clock: Callable[[], float], **changes: object) -> SshHost:
        given = {"key_path": self.key_path, "command_s": 20.0, **changes}
        return SshHost(
            "127.0.0.1",
            self.port,
            getpass.getuser(),
            store=store,
            state_dir=state_dir,
            clock=clock,
            **given,  # type: ignore[arg-type]
        )

    @property
    def keys(self) -> list[str]:
        path = self.home / ".ssh/authorized_keys"
        return path.read_text().splitlines() if path.exists() else []

    def _config(self) -> Path:
        path, etc = super()._config(), self.root / "etc/authorized_keys"
        both = f"AuthorizedKeysFile {etc} {self.home}/.ssh/authorized_keys"
        path.write_text(path.read_text().replace(f"AuthorizedKeysFile {etc}", both))
        return path
