from __future__ import annotations

import uuid

import pytest

from gateway.rest.ids import as_uuid

ID = uuid.UUID("01a2307f-7b0f-7e16-a524-27ba963314a6")


@pytest.mark.parametrize("text", [str(ID), str(ID).upper()])
def test_an_id_is_read_as_it_is_told(text: str):
    assert as_uuid(text) == ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        ID.hex,
        f"{{{ID}}}",
        ID.urn,
        f"{ID} ",
        f"{ID}\n",
        str(ID).replace("-", "", 1) + "-",
        str(ID).replace("1", "\u0661"),
        "01a2307f7b0f-7e16-a524-27ba-963314a6",
    ],
)
def test_what_the_published_format_does_not_have_is_no_id(text: str):
    with pytest.raises(ValueError, match="no UUID"):
        as_uuid(text)
