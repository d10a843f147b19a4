"""The model from a hub: a small real HTTP server that speaks as much of its API as a download needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from training.box import hub
from training.contract.checks import Check

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"old",
}


class Hub:
    def __init__(self) -> None:
        self.truncate = ""
        self.lie = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = self.path.split("?")[0]
                if path.startswith("/api/models/me/tiny/revision/") or path == "/api/models/me/tiny":
                    self.reply(json.dumps(outer.info()).encode(), {"Content-Type": "application/json"}, body)
                elif path.startswith("/api/models/me/tiny/tree/"):
                    self.reply(json.dumps(outer.tree()).encode(), {"Content-Type": "application/json"}, body)
                elif path.startswith(f"/me/tiny/resolve/{COMMIT}/"):
                    self.file(path.rsplit("/", 1)[1], body)
                elif "/me/busy/" in path:
                    self.reply(b"{}", {}, body, status=503)
                else:
                    self.reply(b"{}", {"X-Error-Code": "RepoNotFound"}, body, status=404)

            def file(self, name: str, body: bool) -> None:
                data = b"" if name == outer.truncate else FILES[name]
                etag = hashlib.sha256(FILES[name]).hexdigest()
                self.reply(data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

            def reply(self, data: bytes, headers: dict[str, str], body: bool, status: int = 200) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def tree(self) -> list[dict[str, object]]:
        return [{"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in FILES.items()]

    def info(self) -> dict[str, object]:
        siblings = []
        for name, data in FILES.items():
            sha256 = "0" * 64 if name == self.lie else hashlib.sha256(data).hexdigest()
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "b" * 40}
            if name.endswith("safetensors"):
                entry["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        return {
            "id": "me/tiny",
            "modelId": "me/tiny",
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }


@pytest.fixture
def served() -> Iterator[Hub]:
    served = Hub()
    yield served
    served.server.shutdown()
    served.server.server_close()


def download(
    served: Hub, folder: Path, commit: str = COMMIT, repo: str = "me/tiny"
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its environment at import."""
    code = (
        "import json, pathlib, sys; from training.box.hub import download_model\n"
        f"known = download_model('hub:{repo}@{commit}', pathlib.Path({str(folder)!r}), lambda d, t: None, 1)\n"
        "print(json.dumps(known))"
    )
    environ = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(folder.parent / "hf"), "NO_PROXY": "127.0.0.1"}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)


def test_a_pinned_commit_arrives_verified_without_the_formats_nobody_loads(served: Hub, tmp_path: Path) -> None:
    done = download(served, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    assert set(known) == {"model/config.json", "model/model.safetensors"}
    assert known["model/model.safetensors"]["sha256"] == hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert (tmp_path / "model/model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_an_empty_file_from_the_hub_is_refused(served: Hub, tmp_path: Path) -> None:
    served.truncate = "model.safetensors"
    done = download(served, tmp_path / "model")
    assert done.returncode == 1 and "Error" in done.stderr
    assert not (tmp_path / "model/model.safetensors").exists() or "want 300000" in done.stderr


def test_a_digest_that_differs_is_refused_and_the_file_deleted(served: Hub, tmp_path: Path) -> None:
    served.lie = "model.safetensors"
    done = download(served, tmp_path / "model")
    assert "model.safetensors: sha256" in done.stderr and "it is deleted" in done.stderr
    assert not (tmp_path / "model/model.safetensors").exists()


def test_a_repository_that_is_not_there_is_denied_with_what_to_check(served: Hub, tmp_path: Path) -> None:
    done = download(served, tmp_path / "model", repo="me/none")
    assert "check the name, the commit and HF_TOKEN" in done.stderr


def test_what_came_from_the_hub_counts_as_line_and_what_lay_there_before_does_not(served: Hub, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from training.box.child import Voice; from training.box.prefetch import _from_hub\n"
        f"voice = Voice(mute=True); _from_hub('hub:me/tiny@{COMMIT}', pathlib.Path(sys.argv[1]), voice, 1)\n"
        "print(voice._counts['moved'], voice._counts['worked'])"
    )
    environ = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    first, again = (subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100) for _ in range(2))
    size = len(FILES["model.safetensors"]) + len(FILES["config.json"])
    moved, worked = map(int, first.stdout.split())
    assert moved == size, first.stderr
    assert worked == size, "67 GB are hashed for longer than the stall rule has patience"
    assert int(again.stdout.split()[0]) <= 1, "the files lie there, blocks rounded up"


RECIPE = {
    "name": "unit",
    "model": {"source": f"hub:me/tiny@{COMMIT}", "family": "qwen3_5_moe", "size_gb": 0.01},
    "phases": [{"kind": "sft", "data": "bucket:d", "steps": 1, "learning_rate": 0.001}],
    "box": {"tier": "rehearsal", "device": "cpu", "min_inet_down_mbps": 0.001},
    "budget": {"max_usd": 1},
}


def test_the_downlink_is_measured_on_the_models_own_file_and_its_trouble_is_told_apart(
    served: Hub, tmp_path: Path
) -> None:
    code = (
        "import sys; from training.box.links import _hub_checks; from training.contract.recipe import Recipe\n"
        "for name in ('tiny', 'none', 'busy'):\n"
        "    recipe = Recipe.model_validate_json(sys.argv[1].replace('tiny', name))\n"
        "    print(_hub_checks(recipe, 1 << 20, 5)[0].model_dump_json())\n"
    )
    environ = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, json.dumps(RECIPE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    good, denied, silent = (Check.model_validate_json(line) for line in done.stdout.splitlines())
    assert (good.id, good.verdict, good.unit) == ("hub_mbps", "pass", "Mbps") and float(good.actual) > 0
    assert (denied.verdict, denied.blame) == ("fail", "user") and "commit and HF_TOKEN" in denied.actual
    assert silent.verdict == "unknown" and "hub me/busy@" in silent.actual, "it may be the hub's own trouble"


def test_the_first_try_is_the_fast_way_and_the_second_the_plain_one() -> None:
    assert "HF_HUB_DISABLE_XET" not in hub.settings(0) and hub.settings(1)["HF_HUB_DISABLE_XET"] == "1"
    assert all(hub.settings(attempt)["TOKIO_WORKER_THREADS"] == "8" for attempt in (0, 1, 2))
