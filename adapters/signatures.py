"""
Whose a signature is.

What a model thought is signed by its provider, and the signature is good for nobody else: another provider refuses the
whole request for it. In the canonical form a signature therefore begins with the name of the protocol it was made in:
"anthropic_messages:...". A caller of that protocol is told it without the mark, as the provider wrote it, any other
caller with it. Every format carries a signature letter by letter, so the mark comes back with it. What comes from a
caller without a mark was made in the caller's own protocol.

No provider's signature looks like a marked one: they are base64, which has no colon.
"""

from __future__ import annotations

import re

#: Stands where a format demands a signature and there is none.
NONE = "unsigned:"

_MARKED = re.compile(r"([a-z][a-z0-9_]*):")


def heard(protocol: str, signature: str | None) -> str | None:
    """From a caller or a provider of this protocol to the canonical form."""
    if not signature or signature == NONE:
        return None
    return signature if _MARKED.match(signature) else f"{protocol}:{signature}"


def told(protocol: str, signature: str | None) -> str | None:
    """From the canonical form to a caller of this protocol."""
    mine = own(protocol, signature)
    return signature if mine is None else mine


def own(protocol: str, signature: str | None) -> str | None:
    """The signature as its provider wrote it, where it was made in this protocol."""
    if signature is None or not signature.startswith(f"{protocol}:"):
        return None
    return signature.removeprefix(f"{protocol}:")


def is_marked(signature: str) -> bool:
    return _MARKED.match(signature) is not None


def is_foreign(protocol: str, signature: str | None) -> bool:
    """It was made in another protocol, or nobody knows in which."""
    return signature is not None and own(protocol, signature) is None
