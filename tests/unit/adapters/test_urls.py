"""Names of models as steps of a path."""

from __future__ import annotations

from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import RequestNotExpressible
from adapters.urls import path_step


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_step_is_escaped_as_the_standard_library_does_it_or_refused(name: str) -> None:
    if any(part in {"", ".", ".."} for part in name.split("/")):
        with pytest.raises(RequestNotExpressible):
            path_step(name)
        return
    assert path_step(name) == quote(name, safe="@")
    assert unquote(path_step(name)) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/a", "a/"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(RequestNotExpressible) as refused:
        path_step(name)
    assert refused.value.path == "model"
