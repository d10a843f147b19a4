"""What a bucket's answers mean, and what this machine's own faults are: one sentence each that says what to do. None quotes a key or a secret."""

from __future__ import annotations

import errno

from botocore.exceptions import ClientError

_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict"}
# Damage or haste on the way, not a verdict on the request.
_PASSING = {"SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "InternalError"}
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class StoreError(Exception):
    """The bucket answered something that cannot be used. The message never holds a key or a secret."""


class StoreUnreachable(StoreError):
    """No answer, a broken connection, a 5xx: nothing is known about the object."""


class StoreDenied(StoreError):
    """401 or 403: the key is wrong or may not do this."""


class StoreConflict(StoreError):
    """412: the object is already there and `create_only` was asked, or is no longer the one that was to be replaced."""


class StoreMissing(StoreError):
    """The bucket says that this object does not exist."""


class NoBucket(StoreError):
    """The bucket itself does not exist."""


class NoUpload(StoreError):
    """The unfinished upload is no longer there."""


class MachineFault(StoreError):
    """This machine's own fault, its disk or its clock: no other setting helps, another machine does."""


def told(where: str, what: str, key: str, error: ClientError) -> StoreError:
    """What the server's answer to "`what` `key`" means. Its own message is left out: it may quote the key."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code == "NoSuchBucket":
        return NoBucket(f"{where} does not exist; create it, or correct its name")
    if code == "NoSuchUpload":
        return NoUpload(f"{where}: the upload of {key} is no longer there")
    if code == "NoSuchKey" or (status == 404 and code in ("404", "NotFound", "")):
        return StoreMissing(f"{where}: {key} does not exist")
    if code == "RequestTimeTooSkewed":
        return MachineFault(
            f"{where}: this machine's clock is more than 15 minutes wrong; set it, or take another machine"
        )
    if code in _EXPIRED:
        return StoreDenied(
            f"{where}: the temporary key has expired ({code}); start again with a fresh one, or one that lasts as long as the run"
        )
    if code in _CONFLICT or status == 412:
        return StoreConflict(f"{where}: {key} is already there, or has changed meanwhile")
    if status >= 500 or status == 429 or code in _PASSING:
        return StoreUnreachable(f"{where} answered {status} {code} when asked to {what} {key}")
    if status in (401, 403) or code in _DENIED:
        return StoreDenied(
            f"{where} refused to {what} {key}".rstrip()
            + f" ({code or status}): check the access key, its secret and what the key is allowed to do"
        )
    return StoreError(f"{where} refused to {what} {key} ({status} {code})")


def brief(error: Exception) -> str:
    """The kind of failure, and the socket's own word for it, without the request."""
    cause = error.__context__ or error.__cause__
    name = type(error).__name__
    return f"{name}, {type(cause).__name__}" if cause and not isinstance(cause, ClientError) else name


def disk_fault(error: OSError) -> str:
    """In words, if the disk is to blame for it; else empty."""
    return f"this machine's disk failed: {error.strerror}" if error.errno in _DISK else ""


def pause_s(attempt: int) -> float:
    """Before the next attempt after this one, counted from 0, at what nothing is known of."""
    return min(10.0, 0.3 * 2.0**attempt)
