"""What only the library or the server finds wrong with a database URL is one line that names the setting, too."""

from __future__ import annotations

import pytest

from gateway import database

SECRET = "Zq3vT1"


@pytest.mark.parametrize("wrong", ["sslmode=banana", "target_session_attrs=x", "no_such_setting=1", "work_mem=x"])
async def test_a_parameter_that_is_unknown_is_told_with_the_setting_and_without_the_password(database_url, wrong):
    address = database_url.partition("?")
    url = f"{address[0].replace('//', f'//tester:{SECRET}@', 1) if '@' not in address[0] else address[0]}"
    joined = "&" if address[2] else "?"
    with pytest.raises(database.UrlRefused) as refused:
        await database.connect(f"{url}{'?' + address[2] if address[2] else ''}{joined}{wrong}", name="test")
    assert "TOLLBRIDGE_DATABASE_URL" in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_host_whose_name_cannot_be_one_is_told_so():
    with pytest.raises(database.UrlRefused):
        await database.connect(f"postgresql://u:{SECRET}@{'h' * 70}/db", name="test")
