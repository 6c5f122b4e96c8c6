"""The lock files that prove a process dead: never a living one, whatever the moment."""

from __future__ import annotations

import multiprocessing
import threading
import uuid

from gateway.liveness import Liveness


def _hold_and_end(directory, owner):
    liveness = Liveness(directory)
    with liveness.opened():
        liveness.hold(owner)
        # As at kill -9: nothing is tidied up.
        liveness._held[owner].close()
        liveness._held.clear()


def test_an_owner_is_dead_once_its_process_is_gone_and_not_before(tmp_path):
    owner = uuid.uuid4()
    with Liveness(tmp_path).opened() as one, Liveness(tmp_path).opened() as other:
        one.hold(owner)
        one.hold(owner)
        assert one.dead() == other.dead() == []
        gone = uuid.uuid4()
        process = multiprocessing.get_context("spawn").Process(target=_hold_and_end, args=(tmp_path, gone))
        process.start()
        process.join()
        assert one.dead() == other.dead() == [gone]
        other.forget(gone)
        assert one.dead() == []


def test_an_owner_that_leaves_in_order_leaves_no_file(tmp_path):
    with Liveness(tmp_path).opened() as one:
        one.hold(uuid.uuid4())
    assert list((tmp_path / "owners").iterdir()) == []


def test_an_owner_is_never_seen_dead_while_it_registers(tmp_path):
    over = threading.Event()
    wrong: list[uuid.UUID] = []

    with Liveness(tmp_path).opened() as one, Liveness(tmp_path).opened() as watcher:

        def watch() -> None:
            while not over.is_set():
                wrong.extend(watcher.dead())

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(300):
            one.hold(uuid.uuid4())
        over.set()
        thread.join()
    assert wrong == []
