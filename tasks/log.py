"""Logging that cannot give away a secret: every record of the process passes here before any handler sees it."""

from __future__ import annotations

import logging
import re
from typing import Any

from pydantic import SecretStr

from tasks.errors import LiveryError
from tasks.settings import Settings

# Keys that need no acquaintance to be recognised: hub tokens, AWS access keys, bearer headers.
_PATTERNS = re.compile(r"hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|(?<=Bearer )[A-Za-z0-9._-]{12,}")
_secrets: set[str] = set()


def redact(text: str) -> str:
    """The text with every known secret and everything that looks like one replaced."""
    for secret in _secrets:
        text = text.replace(secret, "[secret]")
    return _PATTERNS.sub("[secret]", text)


def guard_secrets(settings: Settings) -> None:
    """From now on no log record of this process carries a secret of the settings."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr) and len(value.get_secret_value()) >= 6:
            _secrets.add(value.get_secret_value())
    _install()


def hide(*secrets: str) -> None:
    """The same for secrets that are made on the way, such as a box's temporary key."""
    _secrets.update(secret for secret in secrets if len(secret) >= 6)
    _install()


def to_terminal() -> None:
    """Let our own lines through, to the run's page and to the terminal alike; the SSH library's are about connections we reopen anyway."""
    for name in ("tasks", "flows"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(
                logging.Formatter("%(asctime)s.%(msecs)03d | %(levelname)-7s | %(message)s", "%H:%M:%S")
            )
            logger.addHandler(handler)
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _install() -> None:
    # A filter on a logger does not see its children's records, and handlers come and go under Prefect: the record factory sees all.
    current = logging.getLogRecordFactory()
    if getattr(current, "redacts", False):
        return

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = current(*args, **kwargs)
        if record.exc_info and isinstance(record.exc_info[1], LiveryError):
            # Our errors are sentences that say what to do; where in the code they were raised helps nobody who reads a run's page.
            record.exc_info = None
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            return record
        clean = redact(message)
        if clean != message:
            record.msg, record.args = clean, ()
        return record

    factory.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(factory)
