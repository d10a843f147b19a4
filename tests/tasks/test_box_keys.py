# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""A box's key for the bucket: limited to its run, never the control plane's, renewed before it expires. STS pretends on loopback."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from tasks.box_keys import BoxKey, KeyNotIssued, issue, policy
from tasks.errors import UserError
from tasks.market.vast import VastMarket
from tasks.remote.ssh import Remote
from tasks.run import Run
from tasks.settings import Settings
from tasks.stores import private_env
from tests.tasks.pretend import FLOW_RUN, Clock, Pretend, recipe
from tests.tasks.remote.conftest import SshBox, box, key_path, link, login, remote  # noqa: F401
from training.box.folder import FolderStore
from training.contract import layout


class Sts:
    """Answers GetFederationToken and AssumeRole as AWS writes it; `refuse` is a code to answer instead."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.asked, self.refuse, self.url = clock, list[dict[str, str]](), "", ""

    def reply(self, form: dict[str, str]) -> tuple[int, str]:
        self.asked.append(form)
        if self.refuse:
            error = f"<Error><Type>Sender</Type><Code>{self.refuse}</Code><Message>no</Message></Error>"
            return 403, f"<ErrorResponse>{error}<RequestId>r</RequestId></ErrorResponse>"
        number, until = len(self.asked), datetime.fromtimestamp(self.clock.now + int(form["DurationSeconds"]), UTC)
        key = f"<AccessKeyId>ASIATEMPORARY{number}</AccessKeyId><SecretAccessKey>temporary-secret-{number}</SecretAccessKey>"
        key += f"<SessionToken>token-{number}</SessionToken><Expiration>{until:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
        action = form["Action"]
        body = f"<{action}Result><Credentials>{key}</Credentials></{action}Result>"
        return 200, f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">{body}</{action}Response>'


@pytest.fixture
def sts(clock: Clock) -> Iterator[Sts]:
    pretend = Sts(clock)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            status, body = pretend.reply({name: values[0] for name, values in parse_qs(text).items()})
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pretend.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield pretend
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(pretend: Pretend, sts: Sts, tmp_path: Path) -> Settings:
    keys = {"s3_access_key_id": "AKIACONTROL", "s3_secret_access_key": "control-secret"}
    return pretend.settings(
        tmp_path, "b", box_s3_credentials="federation", sts_endpoint_url=sts.url, **keys, ssh_user="x"
    )


def test_a_temporary_key_carries_the_policy_of_its_run_and_its_end(settings: Settings, sts: Sts, clock: Clock) -> None:
    key = issue(settings, recipe(), clock)
    (asked,) = sts.asked
    assert (asked["Action"], asked["DurationSeconds"], asked["Name"]) == (
        "GetFederationToken",
        "3600",
        "livery-tools-35b",
    )
    assert json.loads(asked["Policy"]) == policy("b", recipe())
    assert key.environ()["AWS_SESSION_TOKEN"] == "token-1"
    until = datetime.fromisoformat(key.environ()["AWS_CREDENTIAL_EXPIRATION"]).timestamp()
    assert until == pytest.approx(clock.now + 3600, abs=1)


def test_a_role_is_asked_for_by_its_name_and_for_no_longer_than_a_role_can_be(settings: Settings, sts: Sts) -> None:
    role = {"box_s3_credentials": "role", "box_s3_role_arn": "arn:aws:iam::1:role/box", "box_s3_session_s": 99_999}
    issue(settings.model_copy(update=role), recipe(), time.time)
    (asked,) = sts.asked
    assert (asked["Action"], asked["RoleArn"]) == ("AssumeRole", "arn:aws:iam::1:role/box")
    assert asked["DurationSeconds"] == "43200" and json.loads(asked["Policy"]) == policy("b", recipe())


def allowed(document: dict[str, Any], action: str, key: str) -> bool:
    """As IAM judges it: a deny wins, and what no statement allows is refused."""
    from fnmatch import fnmatchcase

    def names(statement: dict[str, Any]) -> bool:
        actions, places = (
            [each] if isinstance(each, str) else each for each in (statement["Action"], statement["Resource"])
        )
        return action in actions and any(fnmatchcase(f"arn:aws:s3:::b/{key}", place) for place in places)

    effects = {statement["Effect"] for statement in document["Statement"] if names(statement)}
    return "Allow" in effects and "Deny" not in effects


@pytest.mark.parametrize(
    ("action", "key", "may"),
    [
        ("s3:PutObject", "runs/tools-35b/blobs/ab", True),
        ("s3:AbortMultipartUpload", "runs/tools-35b/blobs/ab", True),
        ("s3:GetObject", "runs/tools-35b/claims/00000001.json", True),
        ("s3:GetObject", "models/qwen/model.safetensors", True),
        ("s3:GetObject", "data/sft.jsonl", True),
        ("s3:PutObject", "runs/tools-35b-2/blobs/ab", False),
        ("s3:GetObject", "runs/other/blobs/ab", False),
        ("s3:PutObject", "models/qwen/model.safetensors", False),
        ("s3:PutObject", "leases/f.json", False),
        ("s3:GetObject", "intents/f/001.json", False),
        ("s3:GetObject", "data/sft.jsonl.other", False),
        ("s3:DeleteObject", "runs/tools-35b/receipts/f.json", False),
        ("s3:PutObject", "runs/tools-35b/receipts/f.json", False),
        ("s3:GetObject", "models/qwen-other/model.safetensors", False),
    ],
)
def test_a_box_reaches_its_run_its_model_and_its_data_and_nothing_else(action: str, key: str, may: bool) -> None:
    assert allowed(policy("b", recipe()), action, key) is may


def test_only_a_box_that_is_to_make_the_mirror_may_write_there() -> None:
    source = f"hub:Qwen/Qwen3@{'a' * 40}"
    key = f"{layout.mirror(source)}model.safetensors"
    assert not allowed(policy("b", recipe(model={"source": source})), "s3:PutObject", key)
    assert allowed(policy("b", recipe(model={"source": source, "mirror": True})), "s3:PutObject", key)


def test_a_policy_that_aws_would_not_take_is_told_before_it_is_asked(settings: Settings, sts: Sts) -> None:
    phases = [
        {"kind": "sft", "name": f"p{n}", "data": f"bucket:{'x' * 200}{n}", "steps": 1, "learning_rate": 1e-4}
        for n in range(9)
    ]
    with pytest.raises(UserError, match=r"policy for this recipe has \d{4} characters, AWS takes 2048"):
        issue(settings, recipe(phases=phases), time.time)
    assert not sts.asked


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("AccessDenied", "allow the control plane's key sts:GetFederationToken"),
        ("ExpiredToken", "the control plane's own key has expired: renew LIVERY_S3_"),
        ("ValidationError", r"LIVERY_BOX_S3_SESSION_S \(now 3600\)"),
    ],
)
def test_a_refusal_names_the_setting_and_what_to_do(settings: Settings, sts: Sts, code: str, said: str) -> None:
    sts.refuse = code
    with pytest.raises(
        UserError, match=f"LIVERY_BOX_S3_CREDENTIALS=federation: STS answered {code}; .*{said}"
    ) as caught:
        issue(settings, recipe(), time.time)
    assert "control-secret" not in str(caught.value)


def test_an_sts_that_does_not_answer_is_no_refusal(settings: Settings) -> None:
    with pytest.raises(KeyNotIssued, match="STS does not answer"):
        issue(settings.model_copy(update={"sts_endpoint_url": "http://127.0.0.1:9"}), recipe(), time.time)


def test_the_control_planes_key_never_goes_to_a_box(settings: Settings) -> None:
    own = {"box_s3_credentials": "static", "box_s3_access_key_id": "AKIACONTROL"}
    with pytest.raises(UserError, match="LIVERY_BOX_S3_ACCESS_KEY_ID: seen the control plane's own key"):
        issue(settings.model_copy(update=own), recipe(), time.time)
    for changes in ({}, {"box_s3_credentials": "static", "box_s3_access_key_id": "AKIABOX"}):
        now = settings.model_copy(update=changes)
        sent = "\n".join(private_env(now, issue(now, recipe(), time.time)).values())
        assert "AKIACONTROL" not in sent and "control-secret" not in sent


def test_what_is_made_on_the_way_is_hidden_from_the_log(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    key = issue(settings, recipe(), time.time)
    logging.getLogger("tasks").warning("sent %s", key.secret_access_key.get_secret_value())
    assert "temporary-secret" not in caplog.text and "temporary-secret" not in repr(key)


@pytest.fixture
def run(settings: Settings, market: VastMarket, clock: Clock, tmp_path: Path) -> Run:
    return Run(recipe(), {"sft": ""}, FLOW_RUN, market, FolderStore(tmp_path / "bucket"), settings, clock=clock)


def on_box(box: SshBox) -> str:
    return (box.home / layout.BOX_PRIVATE_ENV).read_text()


def test_a_key_is_renewed_over_ssh_when_half_its_life_is_over(
    run: Run, sts: Sts, clock: Clock, remote: Remote, box: SshBox
) -> None:
    run.send_key(remote, run.fresh_key())
    clock.now += 1799
    run.renew_key(remote)
    assert "token-1" in on_box(box) and len(sts.asked) == 1
    clock.now += 2
    run.renew_key(remote)
    assert "token-2" in on_box(box) and "AWS_CREDENTIAL_EXPIRATION=" in on_box(box)
    assert (box.home / layout.BOX_PRIVATE_ENV).stat().st_mode & 0o777 == 0o600


def test_a_key_that_cannot_be_renewed_is_said_with_its_end_and_tried_again(
    run: Run, sts: Sts, clock: Clock, remote: Remote, box: SshBox, caplog: pytest.LogCaptureFixture
) -> None:
    run.send_key(remote, run.fresh_key())
    clock.now += 2000
    sts.refuse = "AccessDenied"
    run.renew_key(remote)
    assert "expires in 1600 s and is not renewed yet" in caplog.text and "token-1" in on_box(box)
    sts.refuse = ""
    run.renew_key(remote)
    assert "token-3" in on_box(box)


def test_a_static_key_is_never_due(run: Run, remote: Remote, sts: Sts, clock: Clock) -> None:
    run.settings = run.settings.model_copy(update={"box_s3_credentials": "static", "box_s3_access_key_id": "AKIABOX"})
    run.send_key(remote, run.fresh_key())
    clock.now += 1e9
    run.renew_key(remote)
    assert not sts.asked and not BoxKey("a", run.settings.box_s3_secret_access_key).due(1e12)
