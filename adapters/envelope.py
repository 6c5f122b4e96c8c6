"""What a caller's body says of how it wants to be served, where the address does not say it."""

from __future__ import annotations

import msgspec

from adapters.chat import ChatRequest

_text = msgspec.json.Decoder(str | None)
_flag = msgspec.json.Decoder(bool | None)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of how it wants to be served, not of the chat."""

    model: str | None = None
    stream: bool = False
    #: False only in a protocol that tells the usage of a stream on request.
    include_usage: bool = True


def envelope(request: ChatRequest) -> Envelope:
    """Of a request that the protocol's `parse_request` gave, with the fields of most: `model` and `stream`."""
    fields = request.native.fields if request.native is not None else {}
    return Envelope(
        model=_text.decode(fields["model"]) if "model" in fields else None,
        stream=_flag.decode(fields["stream"]) is True if "stream" in fields else False,
    )
