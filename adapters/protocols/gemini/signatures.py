"""
Signatures of thoughts, and where they belong.

A Gemini model signs parts of its answer: function calls, text, pictures and thoughts. Each signature has to come back
on the part it was on, and what another provider signed must not come here: both make a request fail. In the canonical
form each is marked with whose it is and where it belongs. A function call has its own with it: "gemini:call:...". The
other ones are the signature of a block of reasoning: "gemini:text:0:14:..." was on these characters of the text,
"gemini:image:0:..." on the first picture, "gemini:thought:..." on the thought that is the block's own text. Every
other protocol carries a signature letter by letter, so the mark comes back through each.

On this wire a signature is bytes in base64. Google's client library gives its users the bytes and writes them back in
the other alphabet of base64, and refuses what is no base64 at all. Another provider's signature is therefore wrapped
on its way to a caller of this protocol, and unwrapped when it comes back.

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
#: How each wrapped signature begins in JSON.
WRAPPED = b'"' + base64.b64encode(_WRAP)[:14]
_MARK = re.compile(r"gemini:(?:text:([0-9]{1,9}):([0-9]{1,9})|image:([0-9]{1,9})|thought|call):(.*)", re.DOTALL)


def of_text(signature: str, start: int, end: int) -> str:
    """The mark for a signature of these characters of the text."""
    return f"gemini:text:{start}:{end}:{signature}"


def of_image(signature: str, number: int) -> str:
    return f"gemini:image:{number}:{signature}"


def of_thought(signature: str) -> str:
    return f"gemini:thought:{signature}"


def of_call(signature: str) -> str:
    return f"gemini:call:{signature}"


def own(marked: str | None) -> str | None:
    """The signature itself, where it is one of Gemini's."""
    found = _MARK.fullmatch(marked) if marked is not None else None
    return found[4] if found else None


def span_of(marked: str) -> tuple[int, int] | None:
    """The characters a signature is of."""
    found = _MARK.fullmatch(marked)
    return (int(found[1]), int(found[2])) if found and found[1] else None


def image_of(marked: str) -> int | None:
    """The picture a signature is of."""
    found = _MARK.fullmatch(marked)
    return int(found[3]) if found and found[3] else None


class Places:
    """Gemini's signatures of one message by where they belong."""

    __slots__ = ("_images", "_spans", "lost")

    def __init__(self, reasoning: Sequence[Reasoning], text_length: int, images: int) -> None:
        self._spans: list[tuple[int, int, str]] = []
        self._images: dict[int, str] = {}
        #: Whose place is no more.
        self.lost: list[str] = []
        for block in reasoning:
            signature = own(block.signature)
            if signature is None or block.signature is None or block.text:
                continue
            image, span = image_of(block.signature), span_of(block.signature)
            after = self._spans[-1][1] if self._spans else 0
            if image is not None and image < images:
                self._images[image] = signature
            elif span is not None and after <= span[0] <= span[1] <= text_length:
                self._spans.append((*span, signature))
            else:
                self.lost.append(signature)

    def of_image(self, number: int) -> str | None:
        return self._images.get(number)

    def split(self, text: str, offset: int) -> list[dict[str, Any]]:
        """The text, which begins at `offset`, as the parts it was in. Signatures across its ends stay behind."""
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
        return [*self.lost, *(signature for _, _, signature in self._spans)]


def told(signature: str) -> str:
    """A signature as a caller is given it: Gemini's own as it was, any other wrapped."""
    mine = own(signature)
    return mine if mine is not None else wrapped(signature)


def wrapped(signature: str) -> str:
    return base64.b64encode(_WRAP + signature.encode()).decode()


def heard(signature: str) -> tuple[str, bool]:
    """A signature from a caller, in whichever alphabet it came back in, and whether it is Gemini's own."""
    try:
        data = base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return signature, True
    if data.startswith(_WRAP):
        return data.removeprefix(_WRAP).decode(errors="replace"), False
    return base64.b64encode(data).decode(), True


def can_be_ours(signature: str) -> bool:
    """It is base64, which Gemini demands of every signature."""
    try:
        base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
