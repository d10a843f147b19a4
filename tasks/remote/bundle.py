"""What goes to the box before anything is installed: the small zip, and the script that the market runs at boot."""

from __future__ import annotations

import ast
import base64
import io
import shlex
import zipfile
import zlib
from importlib.resources import files

from training.contract import layout

# Non-interactive logins do not read the profile that would put the image's Python on the PATH.
_PYTHONS = ("python3", "/opt/conda/bin/python3", "/venv/main/bin/python3", "/usr/local/bin/python3", "/usr/bin/python3")
FIND_PYTHON = f'for p in {" ".join(_PYTHONS)}; do P=$(command -v "$p") && break; done; [ -n "$P" ] || {{ echo "no python3 on this box" >&2; exit 127; }}'
_MODULES = ("supervisor", "preflight", "deadman")
# The market allows 4096 characters for onstart and arguments together.
ONSTART_CHARACTERS = 3000


def box_zip() -> bytes:
    """training/box without torch as one zip that `python3` runs; the same bytes for the same sources."""
    box = files("training.box")
    members = {"__main__.py": box.joinpath("__main__.py").read_text(), "training/__init__.py": ""}
    members["training/box/__init__.py"] = ""
    for module in _MODULES:
        members[f"training/box/{module}.py"] = box.joinpath(f"{module}.py").read_text()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), members[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def box_command(*words: str) -> str:
    """The shell command that runs a verb of the zip on the box; every word is quoted."""
    return f'{FIND_PYTHON}; exec "$P" -S "$HOME"/{layout.BOX_ZIP} {shlex.join(words)}'


def onstart(*, hard_end: int, silent_s: float = 2700, stalled_s: float = 7200, poll_s: float | None = None) -> str:
    """The script for the create call: keeps the per-instance key for the dead-man (0600) and starts it, detached.

    At boot the container's environment holds CONTAINER_ID and CONTAINER_API_KEY; a later login does not see them.
    `hard_end` is the label's, in epoch seconds; `silent_s` and `stalled_s` are LIVERY_DEADMAN_SILENT_S and …_STALLED_S, looked at
    every `poll_s` (30 s, or sooner where the silence is short). At most 3,000 characters.
    """
    source = _without_docstrings(files("training.box").joinpath("deadman.py").read_text())
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    script = "\n".join(
        [
            f"mkdir -p ~/{layout.BOX_HOME}; touch ~/.no_auto_tmux ~/{layout.BOX_ALIVE}",
            "(umask 077; printf 'CONTAINER_ID=%s\\nCONTAINER_API_KEY=%s\\nVAST_URL=%s\\n'"
            f' "$CONTAINER_ID" "$CONTAINER_API_KEY" "$VAST_URL" > ~/{layout.BOX_INSTANCE_ENV})',
            f"for p in {' '.join(_PYTHONS)}; do P=$(command -v $p) && break; done",
            f"setsid nohup $P -c 'import base64,zlib;exec(zlib.decompress(base64.b64decode(\"{packed}\")))'"
            f" {hard_end} {silent_s:g} {poll_s or min(30.0, silent_s / 10):g} {stalled_s:g} >>~/{layout.BOX_HOME}/deadman.log 2>&1 </dev/null &",
        ]
    )
    if len(script) > ONSTART_CHARACTERS:
        raise AssertionError(f"onstart has {len(script)} characters, at most {ONSTART_CHARACTERS}")
    return script


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
