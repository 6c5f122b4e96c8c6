"""Compressed bodies."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import Broken
from adapters.http.coding import Decoder, Unreadable, decoder


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:]),
    "deflate": zlib.compress,
    " Deflate ": bare,
}


def opened(coding: str, data: bytes, size: int) -> tuple[bytes, list[int]]:
    """All that comes of it, fed in pieces, and how long each piece was that came."""
    found = decoder(coding)
    assert isinstance(found, Decoder)
    unfolded = []
    for start in range(0, len(data), size):
        found.feed(data[start : start + size])
        while piece := found.take():
            unfolded.append(piece)
        assert found.drained
    return b"".join(unfolded), [len(piece) for piece in unfolded]


@given(st.sampled_from(sorted(PACKED)), st.binary(max_size=3000), st.integers(1, 200_000), st.integers(1, 100))
def test_any_body_in_any_pieces_is_what_it_was(coding, data, times, size):
    whole = (data * times)[:300_000]
    packed = PACKED[coding](whole)
    unfolded, sizes = opened(coding, packed, max(size, len(packed) // 100))
    assert unfolded == whole
    assert max(sizes, default=0) <= 64 * 1024


@pytest.mark.parametrize("coding", sorted(PACKED))
@pytest.mark.parametrize("over", [0, 1, 257])
def test_what_is_unfolded_already_waits_for_no_more_bytes(coding, over):
    # The end of what fits into a piece lies within one copy, and all that is folded has been taken.
    whole = b"0" * (2 * 64 * 1024 + over)
    packed = PACKED[coding](whole)
    assert opened(coding, packed, len(packed))[0] == whole


def test_a_body_that_was_flushed_and_never_ended_is_read_as_far_as_it_goes():
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(b"data: a\n\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    assert opened("gzip", packed, 7)[0] == b"data: a\n\n"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bytes_that_are_not_what_they_are_said_to_be_are_malformed(coding):
    with pytest.raises(Broken) as caught:
        opened(coding, b"\x07hello, this is text", 5)
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
def test_a_coding_that_was_not_asked_for_is_malformed_where_there_is_anything_in_it(coding):
    found = decoder(coding)
    assert isinstance(found, Unreadable)
    assert found.take() == b""
    with pytest.raises(Broken) as caught:
        found.feed(b"x")
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("coding", ["", "identity", " Identity"])
def test_no_coding_is_none(coding):
    assert decoder(coding) is None
