from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.simulator import faults
from adapters.simulator.dialects.workers_ai import WorkersAi
from adapters.simulator.faults import NONE, Faults, Selector
from adapters.simulator.requests import BadRequest


def test_a_models_name_carries_faults() -> None:
    name, asked = faults.split_model("sim-fast?latency=0.25&status=429&retry_after=2&bytewise=1&key=a%26b&usage=none")
    assert name == "sim-fast"
    assert asked == {
        "latency": 0.25,
        "status": 429,
        "retry_after": 2.0,
        "bytewise": True,
        "key": "a&b",
        "usage": "none",
    }
    assert faults.split_model("gpt-4o") == ("gpt-4o", {})


@pytest.mark.parametrize(
    "model",
    [
        "sim?",
        "sim?latency",
        "sim?latency=",
        "sim?=1",
        "sim?latency=1&",
        "sim?latency=1&latency=2",
        "sim?latncy=1",
        "sim?latency=-1",
        "sim?latency=soon",
        "sim?rate=1.5",
        "sim?hang=sometimes",
        "sim?status=200",
        "sim?chunks=0",
    ],
)
def test_a_wrong_setting_is_refused(model: str) -> None:
    with pytest.raises(BadRequest) as refused:
        faults.split_model(model)
    assert refused.value.status == 400
    assert refused.value.param == "model"


@pytest.mark.parametrize("asked", [{"latncy": 1}, {"latency": "1"}, {"rate": 2}, {"usage": "often"}])
def test_json_settings_are_read_strictly(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        faults.read(asked, param="simulate")


def test_a_later_layer_overrides_key_by_key() -> None:
    merged = faults.merge({"latency": 1.0, "status": 500}, {"status": 429}, {"pace": 0.5})
    assert merged == Faults(latency=1.0, status=429, pace=0.5)


def test_a_selector_alone_means_500_and_die_after_alone_a_reset() -> None:
    assert Faults(rate=0.5).struck().status == 500
    assert Faults(rate=0.5, hang="mid").struck().status is None
    assert Faults(die_after=2).struck().die == "rst"
    assert faults.merge(faults.split_model("m?error_in_stream=1")[1]).struck().error_in_stream == "chunk"


def test_who_is_spared_keeps_what_does_not_break() -> None:
    assert Faults(rate=0.5, status=500, latency=0.1, usage="late").spared() == Faults(
        rate=0.5, latency=0.1, usage="late"
    )


def strikes(selector: Selector, wanted: Faults, *, correlation: str | None = None, now: float = 0.0) -> bool:
    return selector.strikes(wanted, model="m", correlation=correlation, now=now)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_a_rate_is_kept_exactly_over_any_ten(rate: float) -> None:
    selector = Selector(0.0)
    struck = [strikes(selector, Faults(rate=rate)) for _ in range(100)]
    assert sum(struck) == round(rate * 100)


def test_a_seeded_rate_is_the_same_each_time() -> None:
    first, second = Selector(0.0), Selector(0.0)
    wanted = Faults(rate=0.3, rate_seed=7)
    drawn = [strikes(first, wanted) for _ in range(400)]
    assert drawn == [strikes(second, wanted) for _ in range(400)]
    assert 80 < sum(drawn) < 160


def test_the_first_of_each_key_fail() -> None:
    selector = Selector(0.0)
    wanted = Faults(fail_first=2)
    assert [strikes(selector, wanted, correlation="a") for _ in range(4)] == [True, True, False, False]
    assert strikes(selector, wanted, correlation="b")
    keyed = Faults(fail_first=1, key="k")
    assert [strikes(selector, keyed, correlation=name) for name in "xy"] == [True, False]


def test_it_is_up_after_its_time() -> None:
    selector = Selector(100.0)
    assert strikes(selector, Faults(up_after=5), now=104.9)
    assert not strikes(selector, Faults(up_after=5), now=105.0)


def test_without_a_selector_all_are_struck() -> None:
    assert strikes(Selector(0.0), Faults(status=500))


def test_thoughts_that_the_native_shape_of_workers_ai_would_count_and_not_show_are_refused():
    dialect = WorkersAi()
    dialect.check(NONE)
    with pytest.raises(BadRequest) as refused:
        dialect.check(msgspec.structs.replace(NONE, reasoning=9))
    assert (refused.value.param, refused.value.code) == ("reasoning", "invalid_fault")
