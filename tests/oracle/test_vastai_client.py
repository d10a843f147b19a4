"""The market's official client, in an environment of its own, finds the pretend market believable."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.rehearsal import Rehearsal, start

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with start(tmp_path_factory.mktemp("oracle"), boot_s=0.2, pace=0) as running:
        yield running


@pytest.fixture
def environment(rehearsal: Rehearsal, tmp_path: Path) -> dict[str, str]:
    """Nothing of the developer's own configuration, and the pretend market instead of the real one."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "VAST_URL": rehearsal.env["LIVERY_MARKET_URL"],
        "VAST_API_KEY": rehearsal.env["LIVERY_MARKET_API_KEY"],
    }


@pytest.fixture
def sdk(vastai: Path, environment: dict[str, str]) -> Callable[[str], Any]:
    """Runs statements with the SDK as `v`; the value left in `result` comes back as JSON."""

    def run(statements: str) -> Any:
        script = f"import json\nfrom vastai import VastAI\nv = VastAI()\n{statements}\nprint(json.dumps(result))"
        command = [str(vastai / "python"), "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def cli(vastai: Path, environment: dict[str, str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        command = [str(vastai / "vastai"), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def _nothing_left(rehearsal: Rehearsal) -> Iterator[None]:
    yield
    left = [state["id"] for state in rehearsal.control.state()["instances"] if not state["gone"]]
    with httpx.Client(headers={"Authorization": f"Bearer {rehearsal.env['LIVERY_MARKET_API_KEY']}"}) as http:
        for instance_id in left:
            http.delete(f"{rehearsal.env['LIVERY_MARKET_URL']}/api/v0/instances/{instance_id}/")
    assert left == []


def test_the_sdk_searches_creates_shows_labels_lists_and_destroys(sdk: Callable[[str], Any]) -> None:
    result = sdk(
        """
offers = v.search_offers(query='gpu_name="Rehearsal CPU" gpu_ram>=7 num_gpus=1 disk_space>=20 inet_up>=200', order='dph_total', storage=20)
made = v.create_instance(id=offers[0]['id'], image='pytorch', disk=20, label='livery:o:1:9', env='-e A=b', ssh=True, direct=True)
i = made['new_contract']
shown = v.show_instance(i)
v.label_instance(i, 'other')
listed = v.show_instances()
destroyed = v.destroy_instance(i)
result = dict(ids=[o['id'] for o in offers], made=made, shown=shown, listed=listed, destroyed=destroyed, after=v.show_instance(i))
"""
    )
    assert result["ids"] == [24002001, 24002002, 24002003, 24002004]
    assert result["made"]["success"] and result["shown"]["id"] == result["made"]["new_contract"]
    assert result["shown"]["extra_env"] == {"A": "b"} and result["shown"]["label"] == "livery:o:1:9"
    assert [(row["id"], row["label"]) for row in result["listed"]] == [(result["made"]["new_contract"], "other")]
    assert result["destroyed"]["success"] and result["after"] is None


def test_the_sdks_typed_classes_parse_offers_and_instances(vastai: Path, environment: dict[str, str]) -> None:
    script = """
import json, os
from vastai.data.offer import Offer
from vastai.data.instance import Instance, InstanceConfig
from vastai.sync.client import SyncClient
from vastai.data.query import Query
c = SyncClient(vast_server=os.environ['VAST_URL'])
q = Query({'compute_cap': {'eq': 1200}, 'verified': {'eq': True}})
offers = c.search(q, limit=3)
rehearsal = Query({'compute_cap': {'eq': 0}})
ask = c.search(rehearsal, limit=1)[0]
box = c.create_instance(ask.id, InstanceConfig(image='x', disk=10.0, label='l'))
listed = c.show_instances()
c.destroy_instance(box.id)
print(json.dumps([len(offers), box.id, [i.id for i in listed], box.label, box.gpu_name]))
"""
    command = [str(vastai / "python"), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    count, box, listed, label, gpu = json.loads(done.stdout)
    assert (count, listed, label, gpu) == (3, [box], "l", "Rehearsal CPU")


def test_the_cli_searches_creates_lists_labels_and_destroys(cli: Callable[..., str], rehearsal: Rehearsal) -> None:
    offers = json.loads(
        cli("search", "offers", "gpu_name=Rehearsal_CPU num_gpus=1", "--raw", "--storage", "20", "-o", "dph_total")
    )
    assert len(offers) == 4
    made = json.loads(
        cli("create", "instance", str(offers[0]["id"]), "--image", "x", "--disk", "20", "--label", "l", "--raw")
    )
    (listed,) = json.loads(cli("show", "instances", "--raw"))
    assert (listed["id"], listed["label"], listed["disk_space"]) == (made["new_contract"], "l", 20)
    cli("label", "instance", str(made["new_contract"]), "other")
    table = cli("show", "instances")
    assert "Results Summary" in table and "other" in table
    cli("destroy", "instance", str(made["new_contract"]), "-y")
    assert rehearsal.control.state()["instances_left"] == 0


def test_the_sdk_reads_the_account_its_keys_and_its_charges(sdk: Callable[[str], Any]) -> None:
    result = sdk(
        """
offers = v.search_offers(query='gpu_name="Rehearsal CPU"', order='dph_total')
i = v.create_instance(id=offers[0]['id'], image='x', disk=20)['new_contract']
key = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVzZWxlc3MgcHVibGljIGtleSBmb3IgdGVzdHMgb25s test'
attached = v.attach_ssh(i, key)
user = v.show_user()
v.destroy_instance(i)
result = dict(user=user, attached=attached)
"""
    )
    assert result["user"]["credit"] > 99 and result["user"]["id"] > 0
    assert result["attached"]["success"]


def test_the_sdk_mistakes_a_lost_create_reply_for_a_missing_offer(
    sdk: Callable[[str], Any], rehearsal: Rehearsal
) -> None:
    """Why we have a client of our own: it repeats the create call, is told "no such ask", and the box bills unseen."""
    rehearsal.control.arm("create.drop_after_commit")
    result = sdk(
        """
offers = v.search_offers(query='gpu_name="Rehearsal CPU"', order='dph_total')
try:
    result = v.create_instance(id=offers[0]['id'], image='x', disk=20, label='lost')
except Exception as error:
    result = str(error)
"""
    )
    unseen = [s for s in rehearsal.control.state()["instances"] if not s["gone"]]
    assert "404" in result and [s["label"] for s in unseen] == ["lost"]
    sdk(f"result = v.destroy_instance({unseen[0]['id']})")
