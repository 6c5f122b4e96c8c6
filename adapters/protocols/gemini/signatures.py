"""
Signatures of thoughts, and where they belong.

A Gemini model signs parts of its answer: function calls, text, pictures and thoughts. Each signature has to come back
on the part it was on, or a model of the third generation refuses the request. The canonical form joins the text of an
answer and has no signature on it, so the signature of a piece of text becomes a block of reasoning without text, and
the block's id says which characters it was on ("text:0:14"); that of a picture says which one ("image:0"). Where the
id was lost on the way through another format the last piece of text gets the signature.

On the wire a signature is bytes in base64. Google's client library gives its users the bytes and writes them back in
the other alphabet of base64, and refuses what is no base64 at all. Signatures of other providers are text, and theirs
back letter by letter: one that would not survive that is wrapped on its way to a caller.

Source: https://ai.google.dev/gemini-api/docs/thought-signatures
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from adapters.chat import Reasoning

#: What Google documents for a call that another model made: it is then not checked for a signature.
UNSIGNED = "skip_thought_signature_validator"

_WRAP = b"tollbridge:"
_TEXT = re.compile(r"text:([0-9]{1,9}):([0-9]{1,9})")
_IMAGE = re.compile(r"image:([0-9]{1,9})")


def text_id(start: int, end: int) -> str:
    return f"text:{start}:{end}"


def span_of(place: str | None) -> tuple[int, int] | None:
    """The characters a block's id names."""
    found = _TEXT.fullmatch(place or "")
    return (int(found[1]), int(found[2])) if found else None


def image_id(number: int) -> str:
    return f"image:{number}"


def is_thought(block: Reasoning) -> bool:
    """It is a thought of its own, and not only the signature of something else."""
    return bool(block.text) or (block.id is None and block.signature is None)


class Places:
    """The signatures of one message by where they belong. `loose` are those whose place is not known."""

    __slots__ = ("_images", "_spans", "loose")

    def __init__(self, reasoning: Sequence[Reasoning], text_length: int, images: int) -> None:
        self._spans: list[tuple[int, int, str]] = []
        self._images: dict[int, str] = {}
        self.loose: list[str] = []
        for block in reasoning:
            if is_thought(block) or block.signature is None:
                continue
            if (found := _IMAGE.fullmatch(block.id or "")) and int(found[1]) < images:
                self._images[int(found[1])] = block.signature
                continue
            start, end = span_of(block.id) or (-1, -1)
            after = self._spans[-1][1] if self._spans else 0
            if after <= start <= end <= text_length:
                self._spans.append((start, end, block.signature))
            else:
                self.loose.append(block.signature)

    def of_image(self, number: int) -> str | None:
        return self._images.get(number)

    def split(self, text: str, offset: int) -> list[dict[str, Any]]:
        """The text, which begins at `offset`, as the parts it was in. Signatures across its ends become loose."""
        parts: list[dict[str, Any]] = []
        at = 0
        left = []
        for start, end, signature in self._spans:
            if start < offset + at or end > offset + len(text):
                left.append((start, end, signature))
                continue
            if start > offset + at:
                parts.append({"text": text[at : start - offset]})
            parts.append({"text": text[start - offset : end - offset], "thoughtSignature": signature})
            at = end - offset
        self._spans = left
        if at < len(text):
            parts.append({"text": text[at:]})
        return parts

    def rest(self) -> list[str]:
        """What found no place."""
        return [*self.loose, *(signature for _, _, signature in self._spans)]


def told(signature: str) -> str:
    """A signature as a caller is given it."""
    try:
        if base64.b64encode(base64.b64decode(signature, validate=True)).decode() == signature:
            return signature
    except (binascii.Error, ValueError):
        pass
    return base64.b64encode(_WRAP + signature.encode()).decode()


def heard(signature: str) -> str:
    """The signature that was told, from whichever alphabet it came back in."""
    try:
        data = base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return signature
    if data.startswith(_WRAP):
        return data.removeprefix(_WRAP).decode(errors="replace")
    return base64.b64encode(data).decode()


def can_be_ours(signature: str) -> bool:
    """It is base64, which Gemini demands of every signature."""
    try:
        base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
