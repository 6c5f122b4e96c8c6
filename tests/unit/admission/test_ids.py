"""Identities: what they say, and that nobody gets one that another has."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

from admission.ids import new_id


def test_an_id_is_a_uuid_of_version_7_with_the_time_in_front():
    before = time.time_ns() // 1_000_000
    made = new_id()
    assert isinstance(made, uuid.UUID)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert before <= made.int >> 80 <= time.time_ns() // 1_000_000
    assert uuid.UUID(str(made)) == made
    assert hash(uuid.UUID(made.hex)) == hash(made)


def test_no_two_are_the_same_and_their_random_bits_are_all_used():
    made = [new_id() for _ in range(2000)]
    assert len(set(made)) == len(made)
    random = [one.int & ~(0xF << 76) & ~(0b11 << 62) & ((1 << 76) - 1) for one in made]
    for bit in range(76):
        if bit not in (62, 63):
            assert 0 < sum(number >> bit & 1 for number in random) < len(random), f"bit {bit} never changes"


_FORKS = """
import os
from admission.ids import new_id
new_id()
child = os.fork()
for _ in range(8):
    os.write(1, f"{new_id().hex[12:]}\\n".encode())
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_child_makes_others_than_its_parent():
    # In a process of its own, which has no threads.
    told = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True).stdout.split()
    assert len(told) == len(set(told)) == 16
