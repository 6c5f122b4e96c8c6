"""Every wire protocol there is: those that are shipped, and the template for the next one, which must be as good."""

from __future__ import annotations

from collections.abc import Mapping

from adapters.contract import WireProtocol
from adapters.protocols import PROTOCOLS
from adapters.skeleton import Skeleton

EVERY: Mapping[str, WireProtocol] = {**PROTOCOLS, Skeleton.name: Skeleton()}
