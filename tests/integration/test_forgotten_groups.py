"""A database that was put back to before a group was made known, as by a standby that lagged."""

from __future__ import annotations

import asyncpg
import structlog

from admission.controller import Controller
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store
from tests.unit.admission.test_controller import GROUP, demand, ended, granted

GIVEN = AdmissionSettings(groups={GROUP: GroupSettings(concurrency=2)})


async def test_a_running_process_makes_its_groups_known_again(database_url):
    store = Store(database_url, GIVEN)
    await store.configure()
    async with Controller(store, GIVEN).opened() as one:
        connection = await asyncpg.connect(database_url)
        await connection.execute("truncate control.capacity_group, control.endpoint, control.configuration cascade")
        await connection.close()
        with structlog.testing.capture_logs() as events:
            leases = [await granted(one, demand()) for _ in range(2)]
        assert [event["event"] for event in events] == ["admission.groups_forgotten"]
        for lease in leases:
            assert (await one.settle(ended(lease))).applied
    await store.close()
