"""
A newer published price list, kept in the data directory: what `tollbridge prices update` leaves there.

The list of the installed release is as old as the release. A gateway should not fetch prices by itself from a place
that its operator did not choose, and one that reads a half-written or damaged list would charge wrongly for as long as
it runs. So a list is validated before it replaces the one that is there, and once more, with its hash, at each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from metering.library_prices import Library

#: In the data directory.
FILE_NAME: Final = "prices.json"
_FORM: Final = 1
#: Bytes. The published list has about two million.
LARGEST: Final = 100_000_000


class PriceListFault(Exception):
    """A price list cannot be used; the message says why."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    form: int
    #: When it was taken, and where from: a URL or the name of a file.
    taken_at: datetime
    source: str
    #: Of the list, as it came.
    sha256: str
    list: msgspec.Raw

    @property
    def version(self) -> str:
        return _version(self.taken_at, self.sha256)


def checked(published: bytes, *, taken_at: datetime) -> Library:
    """A list as it is published, as prices. Raises `PriceListFault`."""
    if len(published) > LARGEST:
        raise PriceListFault(f"the list has more than {LARGEST:,} bytes")
    try:
        found = Library.of_list(published, _version(taken_at, _hash(published)))
    except ValueError as error:
        # Of the errors of a validation, the first says enough; the whole would be longer than the list.
        raise PriceListFault(f"this is no price list: {' '.join(str(error).split())[:300]}") from error
    if not found.models:
        raise PriceListFault("the list has no model")
    return found


def keep(directory: Path, published: bytes, *, source: str, taken_at: datetime) -> Kept:
    """
    Takes the place of what is kept there, at once or not at all. Raises `PriceListFault` for a list that is none, and
    OSError.
    """
    checked(published, taken_at=taken_at)
    kept = Kept(
        form=_FORM, taken_at=taken_at, source=source, sha256=_hash(published), list=msgspec.Raw(published.strip())
    )
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f"{FILE_NAME}.{os.getpid()}"
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.encode(kept))
            file.flush()
            os.fsync(file.fileno())
        new.replace(directory / FILE_NAME)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
    return kept


def kept(directory: Path) -> Kept | None:
    """What is kept there; None where the list of the installed release is in use. Raises `PriceListFault`."""
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PriceListFault(f"{directory / FILE_NAME} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(data, type=Kept)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PriceListFault(f"{directory / FILE_NAME} is damaged: {error}") from error
    if found.form != _FORM:
        raise PriceListFault(f"{directory / FILE_NAME} is of another version of Tollbridge")
    if _hash(found.list) != found.sha256:
        raise PriceListFault(f"{directory / FILE_NAME} is damaged: its list is not the one that was taken")
    return found


def library(directory: Path) -> Library:
    """The prices of the list that is in use there. Raises `PriceListFault`."""
    found = kept(directory)
    return Library() if found is None else checked(bytes(found.list), taken_at=found.taken_at)


def forget(directory: Path) -> bool:
    """Back to the list of the installed release. False where that is in use already. Raises OSError."""
    try:
        (directory / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    return True


def _hash(published: bytes | msgspec.Raw) -> str:
    return hashlib.sha256(bytes(published).strip()).hexdigest()


def _version(taken_at: datetime, sha256: str) -> str:
    return f"genai-prices:{taken_at:%Y-%m-%d}:{sha256[:12]}"
