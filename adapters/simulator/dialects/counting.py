"""Anthropic's count of a request's tokens: https://platform.claude.com/docs/en/api/messages-count-tokens."""

from __future__ import annotations

import msgspec
from typing_extensions import override

from adapters.simulator.content import Answer
from adapters.simulator.dialect import Asked, decode, field_names, text_of
from adapters.simulator.dialects.anthropic_messages import AnthropicMessages
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest


class CountTokens(AnthropicMessages):
    """A `Dialect`: the request of a message without a limit, answered by how many tokens it has."""

    @override
    def parse(self, path: str, query: str, body: bytes) -> Asked:
        names = field_names(body)
        for refused in ("max_tokens", "stream", "temperature"):
            if refused in names:
                raise BadRequest("Extra inputs are not permitted.", param=refused)
        fields = {**decode(body, dict[str, msgspec.Raw]), "max_tokens": msgspec.Raw(b"1000000")}
        asked = super().parse(path, query, text_of(fields))
        return msgspec.structs.replace(asked, fields=names)

    @override
    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        return text_of({"input_tokens": answer.prompt_tokens}), Ended.COMPLETE
