"""
The planted bugs: each breaks one invariant, and each is told with the narrowest tests that must notice it.

The numbers are those of `docs/proof.md`. Whoever changes a line that a mutant changes, changes the mutant; an old text
that is not found exactly once is an error and not a mutant less.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

FUNCTIONS: Final = "admission/sql/functions"
TERMS: Final = f"{FUNCTIONS}/05_terms.sql"
RECONCILE: Final = f"{FUNCTIONS}/10_reconcile.sql"
KEYS: Final = f"{FUNCTIONS}/15_keys.sql"
ACQUIRE: Final = f"{FUNCTIONS}/20_acquire.sql"
USUAL: Final = f"{FUNCTIONS}/45_usual.sql"
TABLES: Final = "admission/sql/migrations/0001_admission.sql"
CONFIRM: Final = f"{FUNCTIONS}/30_confirm.sql"
SETTLE: Final = f"{FUNCTIONS}/40_settle.sql"
OWNERS: Final = f"{FUNCTIONS}/50_owners.sql"
GROUPS: Final = f"{FUNCTIONS}/60_groups.sql"
BREAKER: Final = "admission/breaker.py"
COMBINER: Final = "admission/combiner.py"
CONTROLLER: Final = "admission/controller.py"
CORE: Final = "admission/core"
CORE_DEMANDS: Final = f"{CORE}/demands.py"
CORE_GRANTS: Final = f"{CORE}/grants.py"
CORE_GROUPS: Final = f"{CORE}/groups.py"
CORE_KEYS: Final = f"{CORE}/keys.py"
CORE_JUDGE: Final = f"{CORE}/judge.py"
CORE_OCCUPANCY: Final = f"{CORE}/occupancy.py"
CORE_RECONCILE: Final = f"{CORE}/reconcile.py"
CORE_WORK: Final = f"{CORE}/work.py"
STORE: Final = "admission/store.py"
ATTEMPT: Final = "gateway/attempt.py"
FAILOVER: Final = "gateway/failover.py"
PIPELINE: Final = "gateway/pipeline.py"
SETTLING: Final = "gateway/settling.py"
JOURNAL: Final = "metering/journal.py"
RECORD: Final = "metering/sql/functions/10_record.sql"


def _pooled(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_pooled_connections.py::test_{name}" for name in names)


def _rules(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_admission_rules.py::test_{name}" for name in names)


def _stores(*names: str, on: str = "postgresql") -> tuple[str, ...]:
    return tuple(f"tests/conformance/test_admission_stores.py::test_{name}[{on}]" for name in names)


def _admission(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_admission.py::test_{name}" for name in names)


def _line(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_line.py::test_{name}" for name in names)


def _endings(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_endings.py::test_{name}" for name in names)


def _replays(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_journal.py::test_{name}" for name in names)


def _sessions(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_sessions.py::test_{name}" for name in names)


def _limits(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_key_limits.py::test_{name}" for name in names)


def _controller(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/admission/test_controller.py::test_{name}" for name in names)


def _core(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/admission/test_decision.py::test_{name}" for name in names)


def _breaker(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/admission/test_breaker.py::test_{name}" for name in names)


def _journal(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/metering/test_journal.py::test_{name}" for name in names)


def _m(invariant: int, name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, invariant=invariant, file=file, old=old, new=new, tests=tests)


_ADMISSION: Final = [
    # ---------------------------------------------------------------- 1: never more than the limit
    _m(
        1,
        "the group is not locked",
        USUAL,
        "from control.capacity_group c where c.group_id = p_group for update;",
        "from control.capacity_group c where c.group_id = p_group;",
        _rules("who_asks_while_another_is_granted_the_last_slot_waits_to_see_it"),
    ),
    _m(
        1,
        "quarantined slots do not count",
        ACQUIRE,
        "v_room := greatest(0, least(g.concurrency - v_active,\n"
        "                                g.concurrency + g.quarantine_headroom - v_active - v_quarantined));",
        "v_room := greatest(0, g.concurrency - v_active);",
        _stores("an_uncertain_slot_stays_until_its_window_has_passed"),
    ),
    _m(
        1,
        "quarantined slots do not count where nobody waits",
        USUAL,
        "v_limit + v_headroom - count(*) filter (where t.state = 'quarantined'))",
        "v_limit)",
        _stores("an_uncertain_slot_stays_until_its_window_has_passed"),
    ),
    _m(
        1,
        "unconfirmed grants do not count",
        ACQUIRE,
        "select count(*) filter (where t.state <> 'quarantined') as active,",
        "select count(*) filter (where t.state = 'active') as active,",
        _rules("a_grant_that_nobody_has_confirmed_yet_occupies_its_slot"),
    ),
    _m(
        1,
        "one more than the limit where nobody waits",
        USUAL,
        "and n <= least(v_limit,",
        "and n <= 1 + least(v_limit,",
        _stores("two_processes_share_one_limit"),
    ),
    _m(
        1,
        "a model's quarantined attempts do not count",
        ACQUIRE,
        "where t.group_id = p_group and t.state <> 'queued' and t.model = a.model",
        "where t.group_id = p_group and t.state = 'active' and t.model = a.model",
        _rules("a_quarantined_attempt_keeps_its_place_in_its_model"),
    ),
    _m(
        1,
        "a model's own limit is not looked at",
        ACQUIRE,
        "m := array_position(a_model, i_model[i]);\n                if m is not null and (a_room[m] <= 0 or ",
        "m := array_position(a_model, i_model[i]);\n                if m is not null and (",
        _stores("a_full_model_holds_up_nobody_else"),
    ),
    _m(
        1,
        "core: quarantined slots do not count",
        CORE_OCCUPANCY,
        "return max(0, min(limit - self.active, limit + headroom - self.active - self.quarantined))",
        "return max(0, limit - self.active)",
        _core("quarantined_slots_count_against_the_limit"),
    ),
    # ---------------------------------------------------------------- 2: a lower limit
    _m(
        2,
        "a lower limit is not taken over",
        GROUPS,
        "concurrency = excluded.concurrency,\n               quarantine_headroom",
        "concurrency = greatest(c.concurrency, excluded.concurrency),\n               quarantine_headroom",
        _rules("a_lower_limit_revokes_nothing_and_grants_nothing_until_fewer_run"),
    ),
    _m(
        2,
        "a group above its limit grants the difference",
        ACQUIRE,
        "v_room := greatest(0, least(g.concurrency - v_active,",
        "v_room := abs(least(g.concurrency - v_active,",
        _rules("a_lower_limit_revokes_nothing_and_grants_nothing_until_fewer_run"),
    ),
    _m(
        2,
        "limits of before come back with an old process",
        GROUPS,
        "where c.configuration_version < excluded.configuration_version;",
        "where c.configuration_version <> excluded.configuration_version;",
        _admission("the_newest_configuration_first_seen_is_in_force"),
    ),
    # ---------------------------------------------------------------- 3: order
    _m(
        3,
        "the last of a queue is looked at first",
        ACQUIRE,
        "t.model, t.number limit v_room) q",
        "t.model, t.number desc limit v_room) q",
        _admission("grants_follow_the_order_of_arrival"),
    ),
    _m(
        3,
        "those that nobody hears of are granted",
        ACQUIRE,
        "and t.owner_id = any (v_fresh)",
        "and true",
        _rules("a_waiter_whose_process_is_not_heard_of_is_passed_over"),
    ),
    _m(
        3,
        "a retry goes to the end",
        ACQUIRE,
        "v_number[i] := case when p_place[i] < g.next_number then p_place[i] else v_next end;",
        "v_number[i] := v_next;",
        _rules("a_retry_that_keeps_its_place_goes_before_who_came_later"),
    ),
    _m(
        3,
        "a place that was never given is kept",
        ACQUIRE,
        "v_number[i] := case when p_place[i] < g.next_number then p_place[i] else v_next end;",
        "v_number[i] := coalesce(p_place[i], v_next);",
        _rules("who_claims_a_place_that_was_never_given_keeps_the_order_of_arrival"),
    ),
    _m(
        3,
        "core: a retry may have a place that was never given",
        CORE_DEMANDS,
        "if demand.place is not None and demand.place < next_number:",
        "if demand.place is not None:",
        _core("who_claims_a_place_that_was_never_given_keeps_the_order_of_arrival"),
    ),
    _m(
        3,
        "batch takes the last slot where nobody waits",
        USUAL,
        "v_batch and n <= greatest(v_limit - 1, 1) - count(*) filter (where t.class = 1)",
        "v_batch",
        _stores("batch_takes_half_of_the_queue_and_all_slots_but_one"),
    ),
    _m(
        3,
        "batch that is granted as it comes keeps what it had waited",
        USUAL,
        "c.batch_credit = 0\n",
        "true\n",
        _rules("batch_that_is_granted_as_it_comes_has_had_its_turn"),
    ),
    # ---------------------------------------------------------------- 4: the bound
    _m(
        4,
        "one more than the bound",
        ACQUIRE,
        "or (g.waiting < g.queue_bound and (",
        "or (g.waiting <= g.queue_bound and (",
        _stores("a_full_queue_refuses_and_keeps_nothing"),
    ),
    _m(
        4,
        "an overflow uses up numbers",
        ACQUIRE,
        "if v_enqueued > 0 then\n        g.next_number",
        "if v_new > 0 then\n        g.next_number",
        _rules("an_overflow_writes_nothing_at_all"),
    ),
    _m(
        4,
        "a kept place has no bound",
        ACQUIRE,
        "if (v_place and g.waiting < g.queue_bound + g.concurrency)",
        "if v_place",
        _stores("a_retry_keeps_its_place_beyond_the_bound"),
    ),
    # ---------------------------------------------------------------- 5: one lease for an attempt
    _m(
        5,
        "an ended ticket is new where nobody waits",
        USUAL,
        "and (select 1 from control.attempt a where a.ticket_id = e.ticket_id) is null\n",
        "\n",
        _rules("a_tombstone_stops_a_late_acquire_where_slots_are_free"),
    ),
    _m(
        5,
        "an ended ticket is new",
        ACQUIRE,
        "when (select 1 from control.attempt a where a.ticket_id = e.ticket_id) is not null then 'ended'",
        "when false then 'ended'",
        _stores("a_tombstone_stops_a_late_acquire"),
    ),
    _m(
        5,
        "an earlier attempt may be made again",
        USUAL,
        "a.attempt >= e.attempt limit 1) is null",
        "a.attempt = e.attempt limit 1) is null",
        _rules("an_attempt_before_one_that_has_ended_is_a_duplicate"),
    ),
    _m(
        5,
        "a debit that is just being settled is free",
        USUAL,
        "q.state <> 'quarantined') is null",
        "q.state <> 'quarantined' and false) is null",
        _rules("who_asks_again_while_an_attempt_is_being_settled_gets_no_second_lease"),
    ),
    _m(
        5,
        "another process is granted the same ticket",
        ACQUIRE,
        "case when (e.live).owner_id <> p_owner then 'duplicate_debit'",
        "case when false then 'duplicate_debit'",
        _stores("a_replay_changes_nothing"),
    ),
    _m(
        5,
        "a debit may have two live tickets",
        TABLES,
        "create unique index ticket_debit on",
        "create index ticket_debit on",
        _rules("a_debit_that_gets_a_ticket_in_two_groups_at_once_gets_one"),
    ),
    _m(
        5,
        "a quarantined attempt's number is free",
        ACQUIRE,
        "and t.attempt >= e.attempt limit 1) is not null",
        "and false limit 1) is not null",
        _rules("an_attempt_past_its_hard_deadline_is_quarantined_although_its_process_lives"),
    ),
    _m(
        5,
        "a replay is told of another grant",
        USUAL,
        "if v_found = n then",
        "if true then",
        _rules("a_replay_where_slots_are_free_is_told_of_its_first_grant"),
    ),
    # ---------------------------------------------------------------- 6: several groups
    _m(
        6,
        "groups are locked in any order",
        SETTLE,
        "where t.ticket_id = any (p_ticket))\n          order by c.group_id for update;",
        "where t.ticket_id = any (p_ticket))\n          order by c.group_id desc for update;",
        _rules("locks_of_several_groups_are_taken_in_one_order"),
    ),
    _m(
        6,
        "a debit that two groups grant at once fails them",
        USUAL,
        "on conflict do nothing;\n        get diagnostics v_found",
        "; get diagnostics v_found",
        _rules("a_debit_that_gets_a_ticket_in_two_groups_at_once_gets_one"),
    ),
    # ---------------------------------------------------------------- 7: transitions
    _m(
        7,
        "what waits can be settled",
        USUAL,
        "where t.ticket_id = any (p_ticket) and t.state in ('active', 'quarantined')\n",
        "where t.ticket_id = any (p_ticket)\n",
        _rules("a_ticket_that_waits_cannot_be_settled"),
    ),
    _m(
        7,
        "what waits can be quarantined",
        SETTLE,
        "and e.ending = 'uncertain' and t.state in ('active', 'quarantined')",
        "and e.ending = 'uncertain'",
        _rules("a_ticket_that_waits_cannot_be_settled"),
    ),
    _m(
        7,
        "an end is corrected again and again",
        SETTLE,
        "where a.ticket_id = any (p_these) and a.state = 'unknown' order by a.ticket_id for update\n"
        "    ), moved as (\n"
        "        update control.attempt a set state = e.state, settled_at = clock_timestamp()\n"
        "          from element e join locked l on l.ticket_id = e.ticket_id\n"
        "         where a.ticket_id = e.ticket_id and a.state = 'unknown'",
        "where a.ticket_id = any (p_these) order by a.ticket_id for update\n"
        "    ), moved as (\n"
        "        update control.attempt a set state = e.state, settled_at = clock_timestamp()\n"
        "          from element e join locked l on l.ticket_id = e.ticket_id\n"
        "         where a.ticket_id = e.ticket_id",
        _stores("an_attempt_settles_once_and_unknown_is_corrected_once"),
    ),
    _m(
        7,
        "an unknown end follows another",
        SETTLE,
        "where e.ticket_id = any (p_these) and e.state in ('charged', 'zero')",
        "where e.ticket_id = any (p_these)",
        _stores("an_attempt_settles_once_and_unknown_is_corrected_once"),
    ),
    _m(
        7,
        "an expired grant is confirmed",
        CONFIRM,
        "and t.grant_expires_at > v_now and g.group_id = t.group_id",
        "and g.group_id = t.group_id",
        _rules("an_expired_grant_is_not_confirmed_however_long_its_owner_waited_for_the_row"),
    ),
    _m(
        7,
        "core: an end is corrected again and again",
        CORE_WORK,
        'if was is None or was.state != "unknown" or state == "unknown":',
        'if was is None or state == "unknown":',
        _core("unknown_is_corrected_once"),
    ),
    # ---------------------------------------------------------------- 8: no early release
    _m(
        8,
        "an uncertain end frees the slot",
        SETTLE,
        "and e.ending <> 'uncertain' and t.state in",
        "and t.state in",
        _stores("an_uncertain_slot_stays_until_its_window_has_passed"),
    ),
    _m(
        8,
        "there is no isolation",
        SETTLE,
        "least(greatest(t.quarantined_until, t.hard_deadline + t.isolation),",
        "least(greatest(t.quarantined_until, t.hard_deadline),",
        _admission("an_uncertain_end_keeps_the_slot_until_deadline_plus_isolation"),
    ),
    _m(
        8,
        "a lost attempt's window begins with the lapse",
        RECONCILE,
        "set state = 'quarantined', quarantined_until = t.hard_deadline + t.isolation, reserved_usd = null",
        "set state = 'quarantined', quarantined_until = p_now + t.isolation, reserved_usd = null",
        _rules("what_a_lapsed_process_held_is_kept_until_its_hard_deadline_plus_isolation"),
    ),
    _m(
        8,
        "a slot that time frees was not executed",
        RECONCILE,
        "perform control.end_attempts_v2(0::smallint, v_lost || v_over, 'unknown',",
        "perform control.end_attempts_v2(0::smallint, v_lost || v_over, 'zero',",
        _rules("a_slot_that_comes_free_by_time_leaves_an_attempt_of_unknown_cost"),
    ),
    _m(
        8,
        "a broken connection proves the end",
        ATTEMPT,
        "            return Ending.NOT_DISPATCHED\n        return Ending.UNCERTAIN",
        "            return Ending.NOT_DISPATCHED\n        return Ending.CONFIRMED",
        _endings("a_connection_that_breaks_after_the_caller_has_gone_is_uncertain"),
    ),
    _m(
        8,
        "abandoning frees a quarantined slot",
        SETTLE,
        "where t.ticket_id = any (p_ticket) and t.state <> 'quarantined'\n        returning t as ticket",
        "where t.ticket_id = any (p_ticket)\n        returning t as ticket",
        _rules("who_gives_up_a_quarantined_attempt_does_not_free_its_slot"),
    ),
    # ---------------------------------------------------------------- 9: the hard deadline
    _m(
        9,
        "an attempt runs as long as its process lives",
        RECONCILE,
        "and (q.hard_deadline <= p_now or control.owner_is_dead_v1(q.owner_id, p_now))",
        "and control.owner_is_dead_v1(q.owner_id, p_now)",
        _rules("an_attempt_past_its_hard_deadline_is_quarantined_although_its_process_lives"),
    ),
    _m(
        9,
        "a confirmed grant forgets the caller's deadline",
        CONFIRM,
        "hard_deadline = least(v_now + t.execution_limit, t.caller_deadline + t.isolation)",
        "hard_deadline = v_now + t.execution_limit",
        _rules("a_confirmed_grant_has_the_callers_deadline_too"),
    ),
    _m(
        9,
        "a grant forgets the caller's deadline",
        STORE,
        "else min(_ms(demand.execution_limit_s), caller_ms + _ms(demand.isolation_s)),",
        "else _ms(demand.execution_limit_s),",
        _stores("the_callers_deadline_bounds_the_hard_deadline"),
    ),
    # ---------------------------------------------------------------- 10: the holder's own clock
    _m(
        10,
        "a process trusts itself from when it heard",
        CONTROLLER,
        "self._trusted_until = sent + lives_s - self._settings.margin_s",
        "self._trusted_until = time.monotonic() + lives_s - self._settings.margin_s",
        _controller("it_trusts_itself_from_when_it_asked_and_not_from_when_it_heard"),
    ),
    _m(
        10,
        "there is no margin",
        CONTROLLER,
        "self._trusted_until = sent + lives_s - self._settings.margin_s",
        "self._trusted_until = sent + lives_s",
        _controller("a_margin_is_taken_off_what_the_store_says"),
    ),
    _m(
        10,
        "a hard deadline counts from when it was heard",
        CONTROLLER,
        "hard_deadline=sent + row.remaining_ms / 1000,",
        "hard_deadline=time.monotonic() + row.remaining_ms / 1000,",
        _controller("the_hard_deadline_counts_from_when_it_asked"),
    ),
    _m(
        10,
        "a lapsed incarnation lives on",
        OWNERS,
        "where o.owner_id = p_owner and o.expires_at > v_now\n        returning",
        "where o.owner_id = p_owner\n        returning",
        _stores("a_lapsed_owner_gets_nothing_and_begins_again_as_another"),
    ),
    # ---------------------------------------------------------------- 11: right before the dispatch
    _m(
        11,
        "nothing is checked again before the dispatch",
        PIPELINE,
        "if not self._controller.valid(lease):",
        "if False:",
        _rules("a_lease_that_is_not_valid_any_more_is_not_sent"),
    ),
    _m(
        11,
        "a lease is valid after its time",
        CONTROLLER,
        "return time.monotonic() < min(self._trusted_until, lease.hard_deadline)",
        "return time.monotonic() < self._trusted_until",
        _controller("no_lease_is_valid_once_its_time_is_over_although_its_process_is_trusted"),
    ),
    _m(
        11,
        "a lease is valid without trust",
        CONTROLLER,
        "return time.monotonic() < min(self._trusted_until, lease.hard_deadline)",
        "return time.monotonic() < lease.hard_deadline",
        _controller("no_lease_is_valid_once_its_process_is_not_trusted_although_its_time_is_not_over"),
    ),
    _m(
        11,
        "a provider is waited for beyond the hard deadline",
        ATTEMPT,
        "deadline = self.lease.hard_deadline\n        if self.call",
        "deadline = self.lease.hard_deadline + 3600\n        if self.call",
        _rules("the_provider_is_left_at_the_hard_deadline"),
    ),
    _m(
        11,
        "the intent is not kept with the grant",
        USUAL,
        "e.caller_ms * interval '1 ms', e.intent,",
        "e.caller_ms * interval '1 ms', '{}',",
        _rules("a_slot_that_comes_free_by_time_leaves_an_attempt_of_unknown_cost"),
    ),
    _m(
        11,
        "a revoked key is not looked at again",
        PIPELINE,
        "if not self._usable(run.call):",
        "if False:",
        _line("a_key_revoked_while_its_call_waited_is_not_dispatched"),
    ),
]

_BREAKER: Final = [
    # ---------------------------------------------------------------- 12: one probe
    _m(
        12,
        "two probes come together",
        ACQUIRE,
        "elsif g.breaker = 'half_open' then\n        v_room := least(v_room, 1);\n    elsif",
        "elsif",
        _rules("of_two_that_come_together_after_the_cooldown_one_is_the_probe"),
    ),
    _m(
        12,
        "a second probe beside the first",
        ACQUIRE,
        "when g.breaker = 'open' or (g.breaker = 'half_open' and g.probe is not null) then 'cooldown' end;",
        "when g.breaker = 'open' then 'cooldown' end;",
        _rules("of_two_that_come_together_after_the_cooldown_one_is_the_probe"),
    ),
    _m(
        29,
        "who takes a ticket back believes a leap",
        SETTLE,
        "        v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);\n"
        "        perform control.give_back_v1",
        "        v_now := control.now_v1();\n        perform control.give_back_v1",
        _rules("a_leap_is_made_up_for_by_who_takes_a_ticket_back_or_buries_and_leaves_no_bucket_empty"),
    ),
    _m(
        29,
        "a bucket filled in the future stays empty until then",
        ACQUIRE,
        "        if v_leapt then",
        "        if false then",
        _rules("a_leap_is_made_up_for_by_who_takes_a_ticket_back_or_buries_and_leaves_no_bucket_empty"),
    ),
    _m(
        29,
        "who buries believes a leap",
        OWNERS,
        "    v_now constant timestamptz := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, null);\n"
        "begin\n    delete from control.owner o where o.owner_id = any (p_owner);",
        "    v_now constant timestamptz := control.now_v1();\n"
        "begin\n    delete from control.owner o where o.owner_id = any (p_owner);",
        _rules("who_buries_knows_of_a_leap"),
    ),
    _m(
        4,
        "who is turned away is told of the whole queue",
        ACQUIRE,
        "            control.expected_ms_v1(g, 0, v_now),",
        "            control.expected_ms_v1(g, g.waiting, v_now),",
        _rules("who_waits_is_told_by_how_long_calls_held_their_slots_and_who_is_turned_away_by_the_first"),
    ),
    _m(
        4,
        "who waits is dealt the slots in turn, the one in quarantine too",
        TERMS,
        "cross join lateral generate_series(0, c.k / y.i - 1) r",
        "cross join lateral generate_series(0, (c.k - 1) / 3) r",
        _rules("who_waits_beside_a_slot_in_quarantine_is_told_of_the_other_slots_and_batch_of_those_it_may_have"),
    ),
    _m(
        35,
        "an end waits until another has been taken note of",
        TERMS,
        "for update of q skip locked) l",
        "for update of q) l",
        _rules("an_end_waits_for_nobody_who_takes_note_of_another"),
    ),
    _m(
        14,
        "who is late in the queue waits through what it would not wait for",
        CONFIRM,
        "and (not t.waits_for_cooldown or t.queue_deadline < g.cooldown_until))",
        "and false)",
        _rules("waiters_beyond_the_first_thousand_of_a_queue_are_let_go_by_their_owner"),
    ),
    _m(
        14,
        "a breaker changes and tells nobody",
        RECONCILE,
        "    perform control.tell_breaker_v1(p_group, v_was, p_cause, p_now);\n",
        "",
        _stores("each_change_of_a_breaker_is_told_once_and_counted_in_its_group"),
    ),
    _m(
        14,
        "each process is told of each change of a breaker",
        RECONCILE,
        "        delete from control.breaker_event e\n         where",
        "        update control.breaker_event e set was = e.was\n         where",
        _stores("each_change_of_a_breaker_is_told_once_and_counted_in_its_group"),
    ),
    _m(
        12,
        "a lost probe keeps its place",
        RECONCILE,
        "where t.ticket_id = g.probe and t.state in ('granted', 'active')) then\n"
        "        perform control.open_breaker_v2(p_group, p_now, 'probe_lost');",
        "where t.ticket_id = g.probe and t.state in ('granted', 'active')) then\n        null;",
        _rules("a_probe_that_is_lost_opens_again_for_longer"),
    ),
    _m(
        12,
        "a probe that was not sent opens",
        SETTLE,
        "elsif e.ending = 'not_dispatched' and e.verdict = 'none' then",
        "elsif false then",
        _rules("a_probe_that_was_not_sent_hands_its_place_on"),
    ),
    _m(
        12,
        "a probe that was taken back keeps its place",
        SETTLE,
        "where c.breaker = 'half_open' and c.probe in (select t.ticket_id from unnest(v_gone) t);",
        "where false;",
        _rules("a_probe_that_was_not_sent_hands_its_place_on"),
    ),
    _m(
        12,
        "a probe is decided by its end only",
        CONTROLLER,
        "if lease.probe:\n            self._decided.post(lease)",
        "if False:\n            self._decided.post(lease)",
        _admission("a_probe_is_decided_by_its_first_content_and_not_by_its_end"),
    ),
    _m(
        12,
        "core: a lost probe keeps its place",
        BREAKER,
        "if breaker.state is BreakerState.HALF_OPEN and breaker.probe is not None and not probe_lives:",
        "if False:",
        _breaker("a_probe_that_is_gone_without_a_verdict_opens"),
    ),
    # ---------------------------------------------------------------- 13: the generation of a result
    _m(
        13,
        "results of old generations count",
        SETTLE,
        "if e.generation is distinct from g.generation or e.granted_in is distinct from g.generation then",
        "if false then",
        _rules("a_result_of_an_older_generation_moves_nothing"),
    ),
    _m(
        13,
        "a ticket that moved speaks for its new group",
        SETTLE,
        " or e.granted_in is distinct from g.generation then",
        " then",
        _rules("a_ticket_that_moved_says_nothing_of_the_breaker_of_its_new_group"),
    ),
    _m(
        13,
        "a floor is lowered",
        RECONCILE,
        "v_until := greatest(v_until, f.until);",
        "",
        _rules("a_floor_is_raised_by_an_older_generation_too_and_never_lowered"),
    ),
    _m(
        13,
        "a rate limit of an old generation is not heard",
        SETTLE,
        "if v_floor is not null then\n            perform",
        "if v_floor is not null and e.generation = (\n"
        "            select c.generation from control.capacity_group c where c.group_id = e.group_id) then\n"
        "            perform",
        _rules("a_floor_is_raised_by_an_older_generation_too_and_never_lowered"),
    ),
    _m(
        13,
        "a floor stays behind in a group that nothing belongs to",
        GROUPS,
        "delete from control.floor f\n     where f.group_id = v_from",
        "delete from control.floor f\n     where false",
        _stores("a_floor_that_was_reset_with_a_merged_group_is_not_there_again_after_a_split"),
    ),
    _m(
        13,
        "a floor leaves with the first endpoint that does",
        GROUPS,
        "c.group_id = v_from and c.endpoints = '{}')",
        "c.group_id = v_from)",
        _stores("a_floor_stays_with_the_endpoints_that_stay"),
    ),
    _m(
        13,
        "core: a floor stays behind in a group that nothing belongs to",
        CORE_GROUPS,
        "if deserted:",
        "if False:",
        _stores("a_floor_that_was_reset_with_a_merged_group_is_not_there_again_after_a_split", on="memory"),
    ),
    _m(
        13,
        "an exhausted quota is told as a rejected credential",
        SETTLE,
        "when 'quota_exhausted' then e.verdict",
        "when 'quota_exhausted' then 'credential_rejected'",
        _stores("a_floor_says_why_it_is_there_to_every_process", on="postgresql-quota_exhausted-quota_exhausted"),
    ),
    _m(
        13,
        "a floor is told where a breaker keeps back for longer",
        CONFIRM,
        "when (f.floor).until >= case when g.breaker = 'open' then g.cooldown_until\n"
        "                                                     else (f.floor).until end",
        "when (f.floor).until is not null",
        _stores("who_waits_under_a_floor_is_told_what_ends_last"),
    ),
    _m(
        13,
        "core: results of old generations count",
        CORE_JUDGE,
        "if not settlement.lease.generation == ticket.generation == breaker.generation:",
        "if False:",
        _core("failures_of_an_older_generation_count_for_no_later_one"),
    ),
    # ---------------------------------------------------------------- 14: open sends nothing
    _m(
        14,
        "opening keeps the generation",
        RECONCILE,
        "set breaker = 'open', generation = c.generation + 1, probe = null",
        "set breaker = 'open', generation = c.generation, probe = null",
        _rules("every_change_of_the_breaker_is_another_generation"),
    ),
    _m(
        14,
        "half-open keeps the generation",
        RECONCILE,
        "set breaker = 'half_open', generation = c.generation + 1, probe = null",
        "set breaker = 'half_open', generation = c.generation, probe = null",
        _rules("every_change_of_the_breaker_is_another_generation"),
    ),
    _m(
        14,
        "closing keeps the generation",
        SETTLE,
        "set breaker = 'closed', generation = c.generation + 1, probe = null",
        "set breaker = 'closed', generation = c.generation, probe = null",
        _rules("every_change_of_the_breaker_is_another_generation"),
    ),
    _m(
        14,
        "a reset begins the generations anew",
        GROUPS,
        "set breaker = 'closed', generation = c.generation + 1, probe = null",
        "set breaker = 'closed', generation = 1, probe = null",
        _rules("every_change_of_the_breaker_is_another_generation"),
    ),
    _m(
        14,
        "an open breaker grants",
        ACQUIRE,
        "when g.breaker = 'open' or (g.breaker = 'half_open'",
        "when (g.breaker = 'half_open'",
        _stores("the_breaker_opens_and_one_probe_closes_it"),
    ),
    _m(
        14,
        "a grant from before the opening is confirmed",
        CONFIRM,
        "and g.group_id = t.group_id and g.generation = t.generation",
        "and g.group_id = t.group_id",
        _rules("a_grant_from_before_its_breaker_opened_is_not_confirmed"),
    ),
    _m(
        14,
        "a grant under a floor is confirmed",
        CONFIRM,
        "\n               and control.floor_until_v2(t.group_id, t.credential, t.model, v_now) is null;",
        ";",
        _rules("a_grant_under_whose_model_a_floor_was_put_is_not_confirmed"),
    ),
    _m(
        14,
        "a floor keeps nobody back",
        TERMS,
        "select max(f.until) from control.floor f\n     where f.group_id = p_group and",
        "select max(f.until) from control.floor f\n     where false and",
        _stores("a_rate_limit_gates_its_model_until_it_is_over"),
    ),
    # ---------------------------------------------------------------- 15: what counts, and how it comes back
    _m(
        15,
        "what says nothing counts as a failure",
        SETTLE,
        "if e.verdict in ('transient', 'slow') then",
        "if e.verdict in ('transient', 'slow', 'none') then",
        _rules("what_says_nothing_of_the_provider_never_opens"),
    ),
    _m(
        15,
        "a cancelled call counts as a failure",
        ATTEMPT,
        "                return Verdict.TRANSIENT\n            case _:\n                return Verdict.NONE",
        "                return Verdict.TRANSIENT\n            case _:\n                return Verdict.TRANSIENT",
        _rules("a_caller_who_goes_away_is_no_failure_of_the_provider"),
    ),
    _m(
        15,
        "a bad request counts as a failure",
        ATTEMPT,
        "            case Rejected():\n                return Verdict.ANSWERED",
        "            case Rejected():\n                return Verdict.TRANSIENT",
        _rules("a_request_that_is_refused_for_its_own_fault_is_no_failure_of_the_provider"),
    ),
    _m(
        15,
        "cooldowns go on growing after it has closed",
        SETTLE,
        "probe = null, openings = 0, failed_at = '{}',\n           cooldown_until = null, ramp = case",
        "probe = null, failed_at = '{}',\n           cooldown_until = null, ramp = case",
        _rules("after_it_has_closed_a_failure_opens_for_the_first_cooldown_again"),
    ),
    _m(
        15,
        "an open breaker stays open",
        RECONCILE,
        "elsif g.breaker = 'open' and g.cooldown_until <= p_now then",
        "elsif g.breaker = 'open' and g.cooldown_until <= p_now - interval '1 hour' then",
        _rules("a_probe_that_is_lost_opens_again_for_longer"),
    ),
    _m(
        15,
        "core: failures are counted for ever",
        BREAKER,
        "for at in breaker.failed_at if at >= now - limits.failure_window)",
        "for at in breaker.failed_at)",
        _breaker("only_failures_within_the_window_count"),
    ),
    _m(
        15,
        "core: the ramp never ends",
        BREAKER,
        "ramp=wider if wider < limits.concurrency else None)",
        "ramp=wider)",
        _breaker("the_ramp_doubles_with_each_good_answer_until_it_is_the_limit"),
    ),
]

_STREAMS: Final = [
    # ---------------------------------------------------------------- 16: after content
    _m(
        16,
        "a stream that breaks ends as if it were complete",
        PIPELINE,
        "raise run.broken(attempt, receipt) from error",
        'yield Ended(ends=(), outcome=run.outcome("complete", attempt, receipt))\n            return',
        _line("after_content_there_is_no_switch_and_the_failure_is_explicit"),
    ),
    _m(
        16,
        "a stream has two ends",
        PIPELINE,
        "            native=attempt.native_end,\n        )",
        "            native=attempt.native_end,\n        )\n"
        '        yield Ended(ends=attempt.finished.ends, outcome=run.outcome("complete", attempt, receipt))',
        _rules("a_stream_has_one_end_and_nothing_after_it"),
    ),
    _m(
        16,
        "the end of a stream comes before its settlement",
        PIPELINE,
        "        receipt = await self._attempts.settle(attempt)\n        yield Ended(",
        "        receipt = _UNSETTLED\n        yield Ended(",
        _line("a_streamed_answer_is_settled_before_its_last_message"),
    ),
    # ---------------------------------------------------------------- 17: uncertain dispatches
    _m(
        17,
        "what may have been done is sent again",
        FAILOVER,
        "if attempt.may_have_cost and not self._may_resend(attempt.route):",
        "if False:",
        _line("an_uncertain_dispatch_is_not_sent_again_where_that_is_forbidden"),
    ),
    _m(
        17,
        "a job resends by default",
        FAILOVER,
        'wish = Resend.NEVER if self.call.transport == "job" else Resend.BEFORE_FIRST_BYTE',
        "wish = Resend.BEFORE_FIRST_BYTE",
        _line("a_job_does_not_resend_an_uncertain_dispatch"),
    ),
    _m(
        17,
        "attempts have no bound",
        FAILOVER,
        "most = self.settings.most_attempts",
        "most = 1000",
        _line("attempts_are_bounded_and_all_of_them_are_listed"),
    ),
    _m(
        17,
        "an attempt is sent again under its old number",
        PIPELINE,
        "run.number += 1",
        "run.number = max(run.number, 1)",
        _line("without_another_route_a_transient_failure_is_tried_again"),
    ),
    _m(
        17,
        "a retry does not wait for the settlement of the first",
        FAILOVER,
        "if not receipt.acknowledged:",
        "if False:",
        _replays("an_error_says_that_its_settlement_is_pending"),
    ),
]

#: The time, held against what the asker knows.
_KEPT: Final = "control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered)"

_TIME: Final = [
    # ---------------------------------------------------------------- 28: time after the lock
    _m(
        28,
        "a grant's time is from before the lock",
        USUAL,
        "(select clock_timestamp() as raw offset 0)",
        "(select now() as raw offset 0)",
        _rules("times_are_read_after_the_lock_was_waited_for"),
    ),
    _m(
        28,
        "a settlement's time is from before the lock",
        SETTLE,
        f"    end if;\n\n    v_now := {_KEPT};\n",
        "    end if;\n\n    v_now := now();\n",
        _rules("times_are_read_after_the_lock_was_waited_for"),
    ),
    _m(
        28,
        "a confirmation's time is from before the lock",
        CONFIRM,
        f"if found then\n            v_now := {_KEPT};",
        "if found then",
        _rules("an_expired_grant_is_not_confirmed_however_long_its_owner_waited_for_the_row"),
    ),
    _m(
        28,
        "the host's clock is believed",
        STORE,
        "_ms(_steady() - self._told_at),",
        "_ms(time.time() - self._told_at),",
        _rules("a_step_back_of_the_servers_clock_is_made_up_for_once"),
    ),
    # ---------------------------------------------------------------- 29: the server's clock steps
    _m(
        29,
        "a step back is not made up for",
        TERMS,
        "coalesce(p_by < interval '-1 s' or",
        "coalesce(false or",
        _rules("a_step_back_of_the_servers_clock_is_made_up_for_once"),
    ),
    _m(
        29,
        "a leap forward frees what still runs",
        RECONCILE,
        "quarantined_until = greatest(t.hard_deadline, p_now) + t.isolation",
        "quarantined_until = t.hard_deadline + t.isolation",
        _rules("a_leap_forward_quarantines_for_the_whole_window_and_frees_nothing_at_once"),
    ),
    _m(
        29,
        "a late word cuts the window short",
        SETTLE,
        "least(greatest(t.quarantined_until, t.hard_deadline + t.isolation),",
        "least(t.hard_deadline + t.isolation,",
        _rules("a_leap_forward_quarantines_for_the_whole_window_and_frees_nothing_at_once"),
    ),
    _m(
        29,
        "a clock that leaps while the lock is waited for is believed",
        USUAL,
        "v_waited > interval '0' and not control.is_off_v1(v_waited, p_forward_ms)",
        "v_waited > interval '0'",
        _rules("a_leap_while_the_lock_is_waited_for_is_made_up_for_before_anything_is_decided"),
    ),
    _m(
        29,
        "a clock that leaps while the lock is waited for is believed where slots are free",
        USUAL,
        "control.off_by_v1(x.raw, s.ahead, p_clock,",
        "control.off_by_v1(v_entered, s.ahead, p_clock,",
        _rules("a_leap_while_the_lock_is_waited_for_lengthens_no_grant_where_slots_are_free"),
    ),
    _m(
        5,
        "what is special of a batch comes after the rest of it",
        USUAL,
        "and t.owner_id = p_owner and t.queued_at = v_now;",
        "and false;",
        _stores("of_two_tickets_of_a_debit_that_come_together_the_first_is_judged_first"),
    ),
    _m(
        29,
        "a settlement believes a clock that leaps while it waits for locks",
        SETTLE,
        f"    end if;\n\n    v_now := {_KEPT};\n",
        "    end if;\n\n    v_now := control.keep_time_v2(p_clock, p_steps, 0, 86400000, null);\n",
        _rules("a_leap_while_a_row_is_waited_for_lengthens_nothing"),
    ),
    _m(
        29,
        "a confirmation believes a clock that leaps while it waits for the row",
        CONFIRM,
        f"if found then\n            v_now := {_KEPT};",
        "if found then\n            v_now := control.now_v1();",
        _rules("a_leap_while_a_row_is_waited_for_lengthens_nothing"),
    ),
    _m(
        29,
        "a heartbeat is told a clock that was set meanwhile",
        OWNERS,
        "case when control.is_off_v1(c.now - v_now, p_forward_ms) then v_now else c.now end as told",
        "c.now as told",
        _rules("a_leap_while_a_heartbeat_is_on_its_way_is_told_to_nobody"),
    ),
    _m(
        29,
        "a leap lets waiters go",
        OWNERS,
        "constant timestamptz := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, null);\n    -- No",
        "constant timestamptz := control.now_v1();\n    -- No",
        _rules("a_leap_lets_no_waiter_go_and_declares_nobody_dead"),
    ),
    _m(
        29,
        "a leap declares owners dead",
        STORE,
        'self._fetch("dead", list(owners), timed=True)',
        'self._fetch("dead", list(owners), None, 0, 0, 0)',
        _rules("a_leap_lets_no_waiter_go_and_declares_nobody_dead"),
    ),
    # ---------------------------------------------------------------- 30: without a store
    _m(
        30,
        "a process without a store asks on",
        CONTROLLER,
        "if not self.available:\n            return Refusal",
        "if False:\n            return Refusal",
        _controller("who_is_not_trusted_asks_for_nothing"),
    ),
    _m(
        30,
        "a lost store is trusted on",
        CONTROLLER,
        "started + give_up_after_s:\n                    self._trusted_until = 0.0\n",
        "started + give_up_after_s:\n",
        _controller("a_store_that_does_not_answer_is_a_bounded_refusal_and_ends_the_trust"),
    ),
    _m(
        30,
        "an acquire is tried for ever",
        CONTROLLER,
        "rows = await self._insist(send, give_up_after_s=self._settings.retry_s)",
        "rows = await self._insist(send, give_up_after_s=None)",
        _controller("a_store_that_does_not_answer_is_a_bounded_refusal_and_ends_the_trust"),
    ),
    _m(
        30,
        "what cannot be kept is spent",
        SETTLING,
        "return None if self._journal is None else self._journal.fault",
        "return None",
        _replays("a_journal_that_cannot_be_written_stops_admission_until_it_can"),
    ),
    _m(
        30,
        "a closed store grants where nobody waits",
        USUAL,
        "and coalesce(s.closed_until <= x.raw + s.ahead, true)\n",
        "\n",
        _rules("a_closed_store_grants_nothing_and_says_when_it_opens"),
    ),
    _m(
        30,
        "core: a closed store grants",
        CORE_GRANTS,
        "if w.closed_until > w.now or not (occupancy.queued or new)",
        "if not (occupancy.queued or new)",
        _core("a_closed_store_grants_nothing_and_says_when_it_opens"),
    ),
    # ---------------------------------------------------------------- 31: a lost answer is unknown
    _m(
        31,
        "a lost acquire leaves no tombstone",
        CONTROLLER,
        "ticket.unsure = True\n                raise",
        "ticket.unsure = False\n                raise",
        _controller("one_that_a_lost_acquire_had_enqueued_is_given_up_with_a_tombstone"),
    ),
    _m(
        31,
        "a refused acquire leaves no tombstone",
        CONTROLLER,
        "self._abandoned.post((ticket.demand.ticket_id, True))",
        "pass",
        _controller("an_acquire_that_commits_after_it_was_given_up_revives_nothing"),
    ),
    _m(
        31,
        "a tombstone is not written",
        SETTLE,
        "if p_tombstone then",
        "if false then",
        _stores("a_tombstone_stops_a_late_acquire"),
    ),
    _m(
        31,
        "who is given up is not waited for",
        SETTLE,
        "where p_tombstone or c.probe = any (p_ticket)",
        "where c.probe = any (p_ticket)",
        _rules("a_tombstone_stops_an_acquire_that_is_just_under_way"),
    ),
    _m(
        31,
        "a lost settlement is not sent again",
        CONTROLLER,
        "rows = await self._insist(lambda: self._store.settle(shard, batch, judged=judged), give_up_after_s=None)",
        "rows = await self._store.settle(shard, batch, judged=judged)",
        _controller("a_settlement_is_tried_until_it_is_acknowledged_and_counts_once"),
    ),
    _m(
        31,
        "a replayed failure counts again",
        SETTLE,
        "if p_judged and v_lines is not null then\n"
        "        -- Only what was applied: a replay must not count a failure twice.\n"
        "        perform control.judge_v2(\n"
        "            array(select t from unnest(v_tickets) t join unnest(v_lines) l on l.ticket_id = t.ticket_id),",
        "if p_judged then\n        perform control.judge_v2(v_tickets,",
        _stores("a_replayed_failure_counts_once"),
    ),
    _m(
        31,
        "a broken connection is a definite refusal",
        STORE,
        "            self._drop(connection)\n            raise StoreUnavailable from error\n"
        "        except _LOST as error:",
        "            raise Rejected(error.sqlstate) from error\n        except _LOST as error:",
        _rules("a_statement_that_somebody_ends_is_unknown_and_no_refusal"),
    ),
    _m(
        31,
        "a replay speaks to the breaker",
        SETTLING,
        "verdict=Verdict.NONE,\n        state=kept.state,",
        "verdict=Verdict.TRANSIENT,\n        state=kept.state,",
        _replays("a_replay_says_nothing_to_the_breaker"),
    ),
    _m(
        31,
        "a settlement is not kept when the store does not take it",
        SETTLING,
        "self._overdue.add(underway)\n            self._keep(underway)",
        "self._overdue.add(underway)",
        _replays("what_the_store_does_not_take_is_kept_and_settled_when_it_is_back"),
    ),
    _m(
        31,
        "only the first of several settlements is ever late",
        SETTLING,
        "        if self._in_time:\n            self._alarm = loop.call_at",
        "        if False:\n            self._alarm = loop.call_at",
        _replays("each_of_several_that_end_one_after_the_other_is_late_in_its_time"),
    ),
    _m(
        31,
        "what was settled stays in the journal",
        SETTLING,
        "self._journal.acknowledge(underway.entry)\n            case StoreRejected()",
        "pass\n            case StoreRejected()",
        _replays("what_the_store_does_not_take_is_kept_and_settled_when_it_is_back"),
    ),
    _m(
        31,
        "a record is not synced",
        JOURNAL,
        "file.add(data, sync=bool(fresh))",
        "file.add(data, sync=False)",
        _journal("records_that_come_together_are_synced_together"),
    ),
    _m(
        31,
        "a damaged record is believed",
        JOURNAL,
        " or len(body) < length or zlib.crc32(body) != crc:",
        " or len(body) < length:",
        _journal("a_damaged_file_gives_what_came_before_and_never_a_wrong_record"),
    ),
    _m(
        31,
        "a living process's journal is adopted",
        JOURNAL,
        "        except BlockingIOError:\n            return False",
        "        except BlockingIOError:\n            return True",
        _journal("the_file_of_a_living_process_is_nobody_elses"),
    ),
    _m(
        31,
        "after a failed sync the old file is written on",
        JOURNAL,
        "            self._doubtful = True\n",
        "            self._doubtful = False\n",
        _journal("after_a_failed_sync_everything_is_written_anew"),
    ),
    # ---------------------------------------------------------------- 32: another database
    _m(
        32,
        "another timeline goes unnoticed",
        ACQUIRE,
        "if v_other_timeline then",
        "if false then",
        _rules("another_timeline_closes_the_store_for_the_longest_hold"),
    ),
    _m(
        32,
        "another timeline closes for a moment",
        ACQUIRE,
        "closed_until = clock_timestamp() + s.ahead + p_hold_ms * interval '1 ms'",
        "closed_until = clock_timestamp() + s.ahead",
        _rules("another_timeline_closes_the_store_for_the_longest_hold"),
    ),
    _m(
        32,
        "another system goes unnoticed",
        OWNERS,
        "where s.system_identifier is distinct from v_system;",
        "where s.system_identifier is null;",
        _rules("another_system_closes_the_store_for_the_longest_hold"),
    ),
    # ---------------------------------------------------------------- 33: a notification is a hint
    _m(
        33,
        "only a notification wakes a waiter",
        CONTROLLER,
        "self._wake_in(self._settings.rescan_s)",
        "pass",
        _controller("without_any_notification_the_next_look_finds_the_slot"),
    ),
    _m(
        33,
        "nobody looks after listening again",
        CONTROLLER,
        "self._hint.set()\n                    await lost.wait()",
        "await lost.wait()",
        _controller("what_was_notified_while_nobody_listened_is_found_on_listening_again"),
    ),
    _m(
        33,
        "nobody is notified",
        CONTROLLER,
        "for other in foreign:\n            self._notified.post(other)",
        "for other in foreign:\n            pass",
        _controller("a_slot_that_comes_free_in_one_process_is_told_to_the_waiter_of_another"),
    ),
    # ---------------------------------------------------------------- 34: cancelled anywhere
    _m(
        34,
        "a cancelled statement keeps its connection",
        STORE,
        "        finally:\n            self._idle.put_nowait(connection)",
        "        else:\n            self._idle.put_nowait(connection)",
        _rules("a_cancelled_statement_gives_its_connection_back"),
    ),
    _m(
        34,
        "a cancelled waiter stays in the queue",
        CONTROLLER,
        "if answer is None and ticket.acknowledged:",
        "if False:",
        _admission("a_waiter_that_is_cancelled_leaves_the_queue"),
    ),
    _m(
        34,
        "a grant that nobody waits for any more is kept",
        CONTROLLER,
        'answered.unsure if row.answer not in ("granted", "queued") else waiting is None',
        "False",
        _controller("a_caller_that_goes_away_while_the_acquire_is_on_its_way_leaves_nothing"),
    ),
    _m(
        34,
        "a heartbeat waits for a connection of the others",
        STORE,
        "async with asyncio.timeout(self._settings.statement_s):\n                if self._heartbeat is None or",
        "async with asyncio.timeout(self._settings.statement_s):\n"
        "                self._idle.put_nowait(await self._idle.get())\n"
        "                if self._heartbeat is None or",
        _rules("a_heartbeat_does_not_wait_for_a_connection_that_work_has"),
    ),
    _m(
        34,
        "an attempt that is left is not settled",
        ATTEMPT,
        "elif not self.settled:\n            await self._attempts.leave(self)",
        "elif False:\n            await self._attempts.leave(self)",
        _line("a_key_revoked_while_its_call_waited_is_not_dispatched"),
    ),
    _m(
        34,
        "one bad element fails its neighbours",
        COMBINER,
        "if len(batch) > 1:\n                middle",
        "if len(batch) > 1000:\n                middle",
        ("tests/unit/admission/test_combiner.py::test_one_bad_element_fails_alone",),
    ),
    # ---------------------------------------------------------------- 35: one that stops
    _m(
        35,
        "who waits for a lock waits for ever",
        STORE,
        '"lock_timeout": milliseconds,',
        '"lock_timeout": "0",',
        _rules("who_waits_for_a_lock_too_long_is_ended_by_the_server_itself"),
    ),
    _m(
        31,
        "an older statement that is given up takes a lease along",
        CONTROLLER,
        "if not ticket.leased:",
        "if ticket:",
        _controller("what_an_older_statement_hears_takes_no_lease_that_came_by_another[given up]"),
    ),
    _m(
        31,
        "an older statement that is acknowledged takes a lease along",
        CONTROLLER,
        "and not answered.leased",
        "and answered",
        _controller("what_an_older_statement_hears_takes_no_lease_that_came_by_another[acknowledged]"),
    ),
    _m(
        31,
        "a ticket that is lost with a lapse takes the grant that is heard of later",
        CONTROLLER,
        "if ticket.lost:\n            return",
        "if False:\n            return",
        _controller("a_grant_that_is_heard_of_after_the_lapse_is_given_back"),
    ),
    _m(
        31,
        "who was lost with a lapse is told before the store has let go",
        CONTROLLER,
        "        for ticket, known in lapsed:\n            if known:",
        "        for ticket, known in lapsed:\n            if False:",
        _controller("who_was_lost_with_a_lapse_is_told_when_the_debit_is_free_and_the_process_lives_again"),
    ),
    _m(
        30,
        "who finds out that its process has lapsed waits for the next heartbeat",
        CONTROLLER,
        "answered.unsure)\n                        self._pulse.set()",
        "answered.unsure)",
        _controller("who_asks_before_the_heartbeat_has_found_the_lapse_makes_it_look_at_once"),
    ),
    _m(
        30,
        "a store that is back is found with the next heartbeat",
        CONTROLLER,
        "well = self.available and self._lost_since is None",
        "well = True",
        _controller("a_store_that_is_back_is_found_long_before_the_next_beat_although_nobody_asks_it_for_anything"),
    ),
    _m(
        30,
        "a store that is lost with a lapse is waited for",
        CONTROLLER,
        "asyncio.get_running_loop().call_later(self._settings.retry_s, _answer",
        "asyncio.get_running_loop().call_later(60.0, _answer",
        _controller("a_store_that_is_lost_with_the_lapse_keeps_who_waited_no_longer_than_the_patience_with_it"),
    ),
    _m(
        34,
        "who leaves as another statement brings the lease leaves it behind",
        CONTROLLER,
        "ticket.acknowledged = True\n        if row",
        "if row",
        _controller("a_caller_who_leaves_as_another_statement_brings_its_lease_leaves_nothing_behind"),
    ),
    _m(
        32,
        "a group that the store has forgotten stays forgotten",
        CONTROLLER,
        "if str(error) != _UNKNOWN_GROUP:",
        "if error:",
        _controller("a_store_that_has_forgotten_a_group_is_told_of_it_again"),
    ),
    _m(
        35,
        "a pooler's session keeps what one statement was told",
        STORE,
        "'{value}', true)",
        "'{value}', false)",
        _pooled("a_statement_is_told_before_it_runs_and_the_session_is_as_it_was"),
    ),
    _m(
        35,
        "who stops in a transaction keeps its locks",
        STORE,
        '"idle_in_transaction_session_timeout": milliseconds,',
        '"idle_in_transaction_session_timeout": "0",',
        _rules("a_process_that_stops_in_a_transaction_does_not_stop_its_group"),
    ),
    # ---------------------------------------------------------------- 36: it drains, at a price that does not grow
    _m(
        36,
        "quarantine never ends",
        RECONCILE,
        "'active') and q.quarantined_until <= p_now",
        "'active') and q.quarantined_until is null",
        _rules("a_slot_that_comes_free_by_time_leaves_an_attempt_of_unknown_cost"),
    ),
    _m(
        36,
        "an unconfirmed grant is never taken back",
        RECONCILE,
        "q.state = 'granted' and q.grant_expires_at <= p_now",
        "q.state = 'granted' and q.grant_expires_at is null",
        _stores("an_unconfirmed_grant_returns_to_the_queue"),
    ),
    _m(
        36,
        "a freed slot wakes nobody",
        CONTROLLER,
        "await self.advance({row.group_id for row in rows if row.group_id and row.waiters})",
        "pass",
        _controller("a_slot_that_comes_free_in_one_process_is_told_to_the_waiter_of_another"),
    ),
    _m(
        36,
        "a slot that time frees is found by chance",
        CONTROLLER,
        "self._wake_in(max(row.wait_ms / 1000, 0.005))",
        "pass",
        _controller("a_slot_that_time_alone_frees_is_given_at_that_time"),
    ),
    _m(
        36,
        "nobody sweeps",
        CONTROLLER,
        "await self.advance(await self._store.overdue())",
        "pass",
        _controller("what_a_dead_process_left_in_a_group_without_traffic_is_cleared_away"),
    ),
    _m(
        36,
        "the dead wait on",
        OWNERS,
        "and control.owner_is_dead_v1(q.owner_id, v_now)\n         limit 1000 for update skip locked",
        "and false\n         limit 1000 for update skip locked",
        _rules("the_sweep_ends_the_waiters_of_who_is_not_heard_of"),
    ),
    _m(
        36,
        "a grant reads the whole queue",
        ACQUIRE,
        "t.model, t.number limit v_room) q",
        "t.model, t.number) q",
        _rules("what_a_grant_costs_does_not_depend_on_how_many_wait"),
    ),
    _m(
        36,
        "what lets waiters go reads the whole queue",
        RECONCILE,
        "w.model, w.number limit 1000) h",
        "w.model, w.number) h",
        _rules(
            "what_a_lock_is_held_for_by_what_lets_waiters_go_does_not_depend_on_how_many_wait[a floor]",
            "what_a_lock_is_held_for_by_what_lets_waiters_go_does_not_depend_on_how_many_wait[the breaker]",
        ),
    ),
    _m(
        36,
        "the end of one that moved wakes the group it was of",
        USUAL,
        "coalesce(v_groups[array_position(v_freed, e.ticket_id)],",
        "coalesce(",
        _stores("an_end_after_its_endpoint_moved_lets_the_queue_of_the_new_group_move", on="postgresql-False"),
    ),
    _m(
        36,
        "a store that was away has killed everybody",
        OWNERS,
        "update control.reclaim set not_before = v_now + p_ttl_ms * interval '1 ms'\n"
        "             where not_before < v_now",
        "update control.reclaim set not_before = v_now\n             where not_before < v_now",
        _rules("where_the_store_itself_was_away_nobody_is_dead_at_once"),
    ),
    _m(
        36,
        "core: a waiter is ended before its owner can",
        CORE_RECONCILE,
        "OVERDUE: Final = 2 * SECOND",
        "OVERDUE: Final = 0",
        _core("a_waiter_is_left_to_its_owner_for_two_seconds_after_its_deadline"),
    ),
]

#: 37 is that limits of keys hold over all groups and processes, and that money is reserved before it is spent.
_KEYS: Final = [
    _m(
        37,
        "what a key has used is read without a lock",
        KEYS,
        "                       order by c.key_id for update);\n",
        "                       order by c.key_id);\n",
        _limits("two_groups_cannot_pass_one_budget_together"),
    ),
    _m(
        37,
        "what is reserved does not count",
        KEYS,
        "and x.spent + x.unknown + x.reserved + v_wanted > x.most",
        "and x.spent + x.unknown + v_wanted > x.most",
        _stores("a_budget_is_kept_for_what_attempts_may_cost_until_it_is_known_what_they_did")
        + _limits("of_fifty_calls_at_once_with_money_for_three_three_reach_the_provider"),
    ),
    _m(
        37,
        "elements of one batch do not see what each other reserve",
        KEYS,
        "            v_reserved := v_reserved + v_wanted;\n",
        "",
        _stores("elements_of_one_batch_share_what_their_key_has_left"),
    ),
    _m(
        37,
        "the bound of an unknown attempt does not count",
        KEYS,
        "coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown,",
        "0::numeric as unknown,",
        _stores("a_budget_is_kept_for_what_attempts_may_cost_until_it_is_known_what_they_did"),
    ),
    _m(
        37,
        "the bound of an unknown attempt does not count in its day",
        KEYS,
        "coalesce(sum(c.unknown_upper_bound_usd) filter (where c.name = p_key || '/' || p_day), 0) as unknown_of_day,",
        "0::numeric as unknown_of_day,",
        _limits("a_failover_is_held_against_the_budget_like_any_attempt"),
    ),
    _m(
        37,
        "an unknown attempt counts twice while it is in quarantine",
        SETTLE,
        "               reserved_usd = null,\n",
        "",
        _stores("a_budget_is_kept_for_what_attempts_may_cost_until_it_is_known_what_they_did"),
    ),
    _m(
        37,
        "a lost attempt counts twice while it is in quarantine",
        RECONCILE,
        "quarantined_until = t.hard_deadline + t.isolation, reserved_usd = null",
        "quarantined_until = t.hard_deadline + t.isolation",
        _stores("what_a_dead_process_had_reserved_comes_back_but_for_what_it_had_sent"),
    ),
    _m(
        37,
        "requests at once are counted in each group for itself",
        KEYS,
        "from control.ticket t where t.key_id = p_key and t.state <> 'quarantined'\n",
        "from control.ticket t where t.key_id = p_key and t.state <> 'quarantined'\n"
        "             and t.group_id = (select max(q.group_id) from control.ticket q where q.key_id = p_key)\n",
        _stores("a_key_has_no_more_requests_at_once_than_it_may_in_all_groups_and_processes"),
    ),
    _m(
        37,
        "what is in quarantine is not at work",
        KEYS,
        "from control.ticket t where t.key_id = p_key and t.state = 'quarantined'\n",
        "from control.ticket t where t.key_id = p_key and t.state = 'quarantined' and false\n",
        _stores("a_key_has_no_more_requests_at_once_than_it_may_in_all_groups_and_processes"),
    ),
    _m(
        37,
        "another attempt of a request is another request",
        KEYS,
        "u.others + cardinality(array_remove(v_debits, p_debit[i])) >= k.concurrency",
        "u.others + cardinality(v_debits) >= k.concurrency",
        _stores("a_key_has_no_more_requests_at_once_than_it_may_in_all_groups_and_processes"),
    ),
    _m(
        37,
        "a failover is another request of the minute",
        KEYS,
        "elsif v_held and p_attempt[i] = 1 and v_requests < 1 then",
        "elsif v_held and v_requests < 1 then",
        _stores("requests_of_a_minute_are_counted_once_each_and_what_is_refused_takes_none"),
    ),
    _m(
        37,
        "what calls at work may use of the tokens of a minute does not count",
        KEYS,
        "                  - u.tokens_live;\n",
        "                  - 0;\n",
        _stores("tokens_of_a_minute_are_what_attempts_at_work_may_use_and_others_have_used"),
    ),
    _m(
        37,
        "a failover has the budget that its request had",
        PIPELINE,
        "(most_usd or Decimal(0)) if call.caller.limited else None",
        "(most_usd or Decimal(0)) if call.caller.limited and not run.reports else None",
        _limits("a_failover_is_held_against_the_budget_like_any_attempt"),
    ),
    _m(
        37,
        "a cooldown is waited for that money makes pointless",
        FAILOVER,
        "self.patient = routes[0] if alone and not for_money else None",
        "self.patient = routes[0] if alone else None",
        _limits("where_only_a_route_that_is_too_dear_is_up_no_cooldown_is_waited_for"),
    ),
    _m(
        37,
        "a cooldown hides that the budget is used up",
        FAILOVER,
        "if one[0].reason not in _HELD_BACK or self._can_pay(one[1])]",
        "if one]",
        _limits("where_only_a_route_that_is_too_dear_is_up_no_cooldown_is_waited_for"),
    ),
    _m(
        37,
        "what a session has used is read without a lock",
        KEYS,
        "where o.key_id = s.key_id and o.session_id = s.session for update;",
        "where o.key_id = s.key_id and o.session_id = s.session;",
        _sessions("two_groups_cannot_pass_the_budget_of_one_session_together"),
    ),
    _m(
        37,
        "a session with a budget goes the usual way",
        USUAL,
        "where b.key_id = e.key_id and b.session_id = e.session) is null)\n",
        "where false) is null)\n",
        _stores("a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups"),
    ),
    _m(
        37,
        "what a session has reserved does not count",
        KEYS,
        "(select coalesce(sum(q.reserved_usd), 0) as reserved\n",
        "(select coalesce(sum(0 * q.reserved_usd), 0) as reserved\n",
        _stores("a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups")
        + _sessions("two_groups_cannot_pass_the_budget_of_one_session_together"),
    ),
    _m(
        37,
        "what goes the usual way reserves nothing of its session",
        USUAL,
        "e.session, e.bound, v_generation",
        "null, null, v_generation",
        _stores("a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups"),
    ),
    _m(
        37,
        "a session is that of any key",
        KEYS,
        "where q.key_id = p_key and q.session_id = p_session)",
        "where q.session_id = p_session)",
        _sessions("a_session_belongs_to_its_key"),
    ),
    _m(
        37,
        "the bound of an unknown attempt does not count in its session",
        KEYS,
        "coalesce(sum(o.unknown_upper_bound_usd), 0) as unknown\n              from control.counter o",
        "0::numeric as unknown\n              from control.counter o",
        _stores("a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups"),
    ),
    _m(
        37,
        "elements of one batch do not see what each other reserve of their session",
        KEYS,
        "                s_reserved[m] := s_reserved[m] + v_wanted;\n",
        "                null;\n",
        _stores("elements_of_one_batch_share_what_their_session_has_left"),
    ),
    _m(
        37,
        "what its session refuses is a request of its key all the same",
        KEYS,
        "            elsif b.name is not null then\n"
        "                verdict := 'budget_reserved';\n"
        "            end if;\n",
        "            elsif b.name is not null then\n                verdict := 'budget_reserved';\n"
        "                v_debits := v_debits || p_debit[i];\n            end if;\n",
        _stores("elements_of_one_batch_share_what_their_session_has_left"),
    ),
    _m(
        37,
        "a session with a budget is served what nobody can bound",
        KEYS,
        "elsif m is not null and p_bound[i] is null then",
        "elsif false then",
        _stores("a_session_with_a_budget_is_served_only_what_has_a_bound"),
    ),
    _m(
        37,
        "a key raises what its session may cost",
        KEYS,
        "if p_usd > v_most and (p_own or not p_raises)",
        "if p_usd > v_most and not p_own and not p_raises",
        _stores("a_key_can_only_lower_what_its_session_may_cost_and_an_administrator_sets_it"),
    ),
    _m(
        37,
        "an administrator cannot raise what a session may cost",
        KEYS,
        "v_most := least(s_own[m], coalesce(s_set[m], case when v_held then k.budget_session_usd end));",
        "v_most := least(s_own[m], s_set[m], case when v_held then k.budget_session_usd end);",
        _stores("a_key_can_only_lower_what_its_session_may_cost_and_an_administrator_sets_it"),
    ),
    _m(
        37,
        "core: what a session has reserved does not count",
        CORE_KEYS,
        "            reserved=sum((t.reserved for t in at_work if t.reserved is not None), _ZERO),\n",
        "            reserved=_ZERO * len(list(at_work)),\n",
        _stores("a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups", on="memory"),
    ),
    _m(
        37,
        "core: what is reserved does not count",
        CORE_KEYS,
        "money.spent + money.unknown + money.reserved + wanted > money.most",
        "money.spent + money.unknown + wanted > money.most",
        _stores("a_budget_is_kept_for_what_attempts_may_cost_until_it_is_known_what_they_did", on="memory"),
    ),
]

_PROPERTY: Final = (
    "tests/property/test_ledger_properties.py"
    "::test_counters_are_the_sum_of_the_attempts_after_any_order_of_ends_replays_corrections_and_crashes"
)
_NAMES: Final = (
    "tests/property/test_ledger_properties.py::test_names_of_several_words_are_counted_apart_however_they_are_written"
)

_MONEY: Final = [
    _m(
        24,
        "what is corrected is still counted as unknown",
        RECORD,
        "(l.state = 'unknown')::int - (l.was = 'unknown')::int as unknown_attempts",
        "(l.state = 'unknown')::int as unknown_attempts",
        (_PROPERTY,),
    ),
    _m(
        24,
        "two tags can have one counter",
        RECORD,
        "l.key_day_name || array[t.key, t.value]::text, l.day",
        "l.key_day_name || t.key || ',' || t.value, l.day",
        (_NAMES,),
    ),
    _m(
        25,
        "a correction is written over the settlement",
        RECORD,
        "case when l.was = 'open' then 0 else coalesce((l.facts ->> 'correction')::integer, 0) + 1 end",
        "0",
        (_PROPERTY,),
    ),
    _m(
        26,
        "a bound is rounded down",
        "metering/cost.py",
        "_UPWARDS = Context(prec=60, rounding=ROUND_CEILING)",
        "_UPWARDS = Context(prec=60, rounding=ROUND_HALF_EVEN)",
        ("tests/unit/metering/test_cost.py::test_a_bound_rounds_up",),
    ),
    _m(
        27,
        "a day is UTC's",
        USUAL,
        "(x.raw at time zone p_zone)::date,",
        "(x.raw at time zone 'UTC')::date,",
        ("tests/integration/test_day_boundary.py::test_a_day_that_there_never_was_has_no_charges",),
    ),
]

MUTANTS: Final = [*_ADMISSION, *_BREAKER, *_STREAMS, *_TIME, *_KEYS, *_MONEY]
