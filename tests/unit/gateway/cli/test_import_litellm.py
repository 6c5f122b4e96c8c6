"""`tollbridge import-litellm`: configurations as people have them, and that nothing of any is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway import config
from gateway.call import Order, Unsupported
from gateway.cli import litellm_known, main
from gateway.cli.litellm_mapping import Fate, Imported, imported
from gateway.cli.litellm_yaml import Node, Unreadable, parse, read
from metering.prices import Price

LOAD_BALANCED = """
# Two Azure regions behind one name, OpenAI behind them.
model_list:
  - model_name: gpt-4o
    litellm_params: &azure
      model: azure/gpt-4o-eu
      api_base: https://europe.openai.azure.com/
      api_key: os.environ/AZURE_API_KEY_EU
      api_version: "2024-10-21"
      rpm: 600
      tpm: 90000
      timeout: 45
  - model_name: gpt-4o
    litellm_params:
      <<: *azure
      model: azure/gpt-4o-ca
      api_base: https://canada.openai.azure.com
      api_key: os.environ/AZURE_API_KEY_CA
      rpm: 200
  - model_name: gpt-4o-direct
    litellm_params:
      model: gpt-4o
    model_info:
      input_cost_per_token: 0.0000025
      output_cost_per_token: 1e-5
      cache_read_input_token_cost: 1.25e-06
router_settings:
  routing_strategy: simple-shuffle
  num_retries: 2
  allowed_fails: 3
  cooldown_time: 45
  model_group_alias: {"gpt-4": "gpt-4o", "gpt-4-secret": {"model": "gpt-4o", "hidden": true}}
  redis_host: os.environ/REDIS_HOST
litellm_settings:
  drop_params: true
  request_timeout: 600
  fallbacks: [{"gpt-4o": ["gpt-4o-direct"]}]
general_settings:
  master_key: os.environ/LITELLM_MASTER_KEY
"""
MANY_VENDORS = """
model_list:
  - model_name: claude
    litellm_params: {model: anthropic/claude-sonnet-4-6, api_key: os.environ/ANTHROPIC_API_KEY, max_tokens: 4096}
  - model_name: flash
    litellm_params: {model: gemini/gemini-2.5-flash, api_key: os.environ/GEMINI_API_KEY}
  - model_name: vertex
    litellm_params: {model: vertex_ai/gemini-2.5-pro, vertex_project: p, vertex_location: us-central1}
  - model_name: titan
    litellm_params: {model: bedrock/amazon.titan-text, aws_region_name: us-east-1, aws_secret_access_key: canary-aws}
  - model_name: llama
    litellm_params: {model: ollama_chat/llama3.1, api_base: "http://gpu.internal:11434"}
  - model_name: qwen
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-32B, api_base: os.environ/VLLM_URL, max_parallel_requests: 16}
  - model_name: qwen
    litellm_params: {model: openrouter/qwen/qwen3-32b, order: 2, weight: 3}
  - model_name: mine
    litellm_params:
      model: openai/my/model
      api_base: https://llm.example.com/v1
      api_key: none
      extra_headers: {x-team: search, x-api-token: canary-header}
      extra_body: {top_k: 20, guided: {choice: [a, b]}}
      additional_drop_params: [seed, user]
  - model_name: o-pro
    litellm_params: {model: openai/responses/o1-pro, api_key: os.environ/OPENAI_API_KEY, organization: org-1}
  - model_name: embed
    litellm_params: {model: text-embedding-3-small, api_key: os.environ/OPENAI_API_KEY}
    model_info: {mode: embedding}
  - model_name: pictures
    litellm_params: {model: openai/gpt-image-1}
    model_info: {mode: image_generation}
  - model_name: "groq/*"
    litellm_params: {model: "groq/*", api_key: os.environ/GROQ_API_KEY}
  - model_name: "*"
    litellm_params: {model: "*"}
  - model_name: strange
    litellm_params: {model: somebody/new, api_key: canary-strange}
router_settings:
  routing_strategy: latency-based-routing
"""
SECRETS_IN_CLEAR = """
model_list:
  - model_name: a
    litellm_params: {model: openai/gpt-4o, api_key: sk-canary-1}
  - model_name: a
    litellm_params: {model: openai/gpt-4o, api_key: sk-canary-2}
  - model_name: b
    litellm_params: {model: openai/gpt-4o-mini, api_key: os.environ/OPENAI_API_KEY}
  - model_name: c
    litellm_params: {model: azure/d, api_base: "https://x.openai.azure.com", azure_ad_token: eyJ-canary-3}
  - model_name: d
    litellm_params: {model: openai/x, api_base: "https://user:canary-4@x.example/v1", api_key: none}
  - model_name: e
    litellm_params: {model: gpt-4o, litellm_credential_name: shared}
credential_list:
  - credential_name: shared
    credential_values: {api_key: sk-canary-5, api_base: "https://proxy.example/v1"}
    credential_info: {description: ours}
general_settings: {master_key: sk-canary-6, database_url: "postgresql://u:canary-7@h/d"}
environment_variables: {LANGFUSE_SECRET_KEY: canary-8}
litellm_settings: {cache: true, cache_params: {type: redis, password: canary-9}}
"""
REALISTIC = {"load_balanced": LOAD_BALANCED, "many_vendors": MANY_VENDORS, "secrets_in_clear": SECRETS_IN_CLEAR}


def loaded(tmp_path: Path, made: Imported, **environ: str) -> config.Settings:
    file = tmp_path / "tollbridge.toml"
    file.write_text(made.toml)
    return config.load(file, environ)


def fate(made: Imported, path: str) -> Fate:
    [found] = [note.fate for note in made.notes if note.path == path]
    return found


def untold(root: Node, made: Imported) -> list[str]:
    """Leaves that no note is about, nor about what they are in."""
    paths = [note.path for note in made.notes if note.path]

    def covered(leaf: str) -> bool:
        return any(leaf == path or leaf.startswith((f"{path}.", f"{path}[")) for path in paths)

    return [leaf.path for leaf in root.leaves() if leaf is not root and not covered(leaf.path)]


# ------------------------------------------------------------------ configurations as people have them


@pytest.mark.parametrize("source", REALISTIC.values(), ids=REALISTIC)
def test_what_is_made_is_a_configuration_without_secrets_and_each_entry_is_told(tmp_path, source):
    root = parse(source, "config.yaml")
    made = imported(root, "config.yaml")
    loaded(tmp_path, made)
    assert untold(root, made) == []
    assert "canary" not in made.toml
    assert "canary" not in "".join(note.said for note in made.notes)


def test_deployments_of_one_name_are_routes_with_their_weights_limits_and_fallbacks(tmp_path):
    made = imported(parse(LOAD_BALANCED, "c"), "c")
    found = loaded(tmp_path, made, AZURE_API_KEY_EU="one", AZURE_API_KEY_CA="two", OPENAI_API_KEY="three")
    model = found.models["gpt-4o"]
    assert [(t.provider, t.model, t.weight) for t in model.targets] == [
        ("azure", "gpt-4o-eu", 600),
        ("azure_2", "gpt-4o-ca", 200),
        ("openai", "gpt-4o", 1),
    ]
    assert (model.primary, model.order) == (2, Order.WEIGHTED)
    assert found.models["gpt-4"].targets == model.targets
    azure = found.providers["azure_2"]
    assert (azure.base_url, azure.endpoint and azure.endpoint.headers["api-key"]) == (
        "https://canada.openai.azure.com/openai/v1",
        "two",
    )
    assert {p.unsupported for p in found.providers.values()} == {Unsupported.DROP}
    assert found.providers["openai"].execution_limit_s == 600
    assert model.targets[0].adjustments[0].execution_limit_s == 45
    group = found.admission.groups["https://europe.openai.azure.com:443"]
    assert group.models["gpt-4o-eu"].requests_per_minute == 600
    assert group.models["gpt-4o-eu"].tokens_per_minute == 90000
    assert (group.failure_threshold, group.first_cooldown_s, group.failure_window_s) == (4, 45, 60)
    assert (found.routing.backoff_s, found.routing.most_attempts) == ((1.0, 2.0), 6)
    price = found.prices_by_route["openai/gpt-4o"]
    assert isinstance(price, Price)
    assert [str(p) for p in (price.input, price.output, price.cache_read)] == ["2.5", "10", "1.25"]
    assert fate(made, "router_settings.redis_host") is Fate.LEFT_OUT
    assert fate(made, "router_settings.model_group_alias.gpt-4-secret.hidden") is Fate.LEFT_OUT


WEIGHTS = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/gpt-4o}}
  - model_name: m
    litellm_params: {{model: openai/gpt-4o-mini, weight: 1, rpm: 5}}
  - model_name: m
    litellm_params: {{model: openai/gpt-4.1, weight: 0}}
{settings}
"""


@pytest.mark.parametrize("strategy", ["", "simple-shuffle"])
def test_a_deployment_that_is_never_drawn_is_told_of(tmp_path, strategy):
    settings = f"router_settings: {{routing_strategy: {strategy}}}" if strategy else ""
    made = imported(parse(WEIGHTS.format(settings=settings), "c"), "c")
    assert [target.weight for target in loaded(tmp_path, made).models["m"].targets] == [0, 1, 0]
    assert fate(made, "model_list[0]") is Fate.CHANGED
    # This one's weight was written.
    assert "model_list[2]" not in {note.path for note in made.notes}
    assert fate(made, "model_list[2].litellm_params.weight") is Fate.CARRIED


@pytest.mark.parametrize(
    "strategy",
    ["least-busy", "usage-based-routing", "usage-based-routing-v2", "latency-based-routing", "cost-based-routing"],
)
def test_where_litellm_looks_at_no_weight_none_is_written(tmp_path, strategy):
    settings = f"router_settings: {{routing_strategy: {strategy}}}"
    made = imported(parse(WEIGHTS.format(settings=settings), "c"), "c")
    assert [target.weight for target in loaded(tmp_path, made).models["m"].targets] == [1, 1, 1]
    assert fate(made, "model_list[1].litellm_params.weight") is Fate.NOT_NEEDED
    assert "model_list[0]" not in {note.path for note in made.notes}


def test_what_of_a_credential_is_in_no_provider_is_told_with_its_reason():
    source = """
model_list:
  - model_name: a
    litellm_params: {model: openai/gpt-4o, litellm_credential_name: shared, api_key: os.environ/OWN}
credential_list:
  - {credential_name: shared, credential_values: {api_key: os.environ/SHARED, unheard_of: 1}}
  - {credential_name: unused, credential_values: {api_key: os.environ/UNUSED}}
"""
    root = parse(source, "c")
    made = imported(root, "c")
    assert untold(root, made) == []
    said = {note.path: note for note in made.notes}
    own = said["credential_list[0].credential_values.api_key"]
    assert (own.fate, "have their own" in own.said) == (Fate.NOT_NEEDED, True)
    assert fate(made, "credential_list[0].credential_values.unheard_of") is Fate.LEFT_OUT
    for part in ("credential_name", "credential_values.api_key"):
        assert said[f"credential_list[1].{part}"].said == "no model names this credential"


def test_each_vendor_is_its_shipped_provider_and_what_is_not_spoken_is_left_out_with_the_reason(tmp_path):
    made = imported(parse(MANY_VENDORS, "c"), "c")
    found = loaded(tmp_path, made, VLLM_URL="http://gpu:8000/v1")
    assert {name: [(t.provider, t.model) for t in model.targets] for name, model in found.models.items()} == {
        "claude": [("anthropic", "claude-sonnet-4-6")],
        "flash": [("gemini", "gemini-2.5-flash")],
        "llama": [("ollama", "llama3.1")],
        "qwen": [("vllm", "Qwen/Qwen3-32B"), ("openrouter", "qwen/qwen3-32b")],
        "mine": [("openai_llm_example_com_443", "my/model")],
        "o-pro": [("openai", "o1-pro")],
        "embed": [("openai_2", "text-embedding-3-small")],
    }
    assert found.models["qwen"].primary == 1
    assert found.models["claude"].targets[0].adjustments[0].default_max_tokens == 4096
    assert found.models["o-pro"].targets[0].adjustments[0].protocol == "responses"
    mine = found.models["mine"].targets[0].adjustments[0]
    assert {name: json.loads(bytes(raw)) for name, raw in mine.force.items()} == {
        "top_k": 20,
        "guided": {"choice": ["a", "b"]},
    }
    assert mine.omit == {"seed", "user"}
    headers = found.providers["openai_llm_example_com_443"].endpoint
    assert headers is not None
    assert headers.headers == {"x-team": "search"}
    assert found.admission.groups["vllm"].models["Qwen/Qwen3-32B"].concurrency == 16
    left = {note.path: note.said for note in made.notes if note.fate is Fate.LEFT_OUT}
    at = {
        name: f"model_list[{place}]" for name, place in (("vertex", 2), ("titan", 3), ("pictures", 10), ("strange", 13))
    }
    assert "Google Cloud" in left[at["vertex"]]
    assert "AWS" in left[at["titan"]]
    assert "chat and embeddings" in left[at["pictures"]]
    assert "somebody" in left[at["strange"]]
    assert "may be a secret" in left["model_list[7].litellm_params.extra_headers.x-api-token"]
    # `groq/*`: what the profile lists may be asked for under these names.
    assert fate(made, "model_list[11].model_name") is Fate.CHANGED
    assert found.providers["groq"].models


def test_a_key_in_clear_is_told_the_variable_it_belongs_into_and_two_keys_have_two(tmp_path):
    made = imported(parse(SECRETS_IN_CLEAR, "c"), "c")
    found = loaded(tmp_path, made, OPENAI_2_API_KEY="two", OPENAI_API_KEY_2="one", OPENAI_API_KEY="env")
    first, second = (found.providers[t.provider].endpoint for t in found.models["a"].targets)
    third = found.providers[found.models["b"].targets[0].provider].endpoint
    assert [e and e.headers["authorization"] for e in (first, second, third)] == [
        "Bearer one",
        "Bearer two",
        "Bearer env",
    ]
    # Limits are of a key, not of all keys at one address.
    assert (
        len({found.providers[t.provider].group for t in (*found.models["a"].targets, *found.models["b"].targets)}) == 3
    )
    told = next(note.said for note in made.notes if note.path == "model_list[0].litellm_params.api_key")
    assert "OPENAI_API_KEY_2" in told
    assert found.providers["azure"].missing == ("AZURE_API_KEY",)
    assert "d" not in found.models
    shared = found.providers[found.models["e"].targets[0].provider]
    assert shared.base_url == "https://proxy.example/v1"


@pytest.mark.parametrize("prefix", [p for p, v in litellm_known.VENDORS.items() if v.profile or v.base_url])
def test_every_vendor_that_is_known_makes_a_ready_provider_of_what_litellm_reads(tmp_path, prefix):
    vendor = litellm_known.VENDORS[prefix]
    base = ", api_base: 'http://gpu:1/v1'" if prefix == "vllm" else ""
    made = imported(parse(f"model_list: [{{model_name: m, litellm_params: {{model: {prefix}/up{base}}}}}]", "c"), "c")
    environ = dict.fromkeys(vendor.keys[:1], "k") | ({vendor.address: "https://h.example"} if vendor.address else {})
    found = loaded(tmp_path, made, CLOUDFLARE_ACCOUNT_ID="acc", **environ)
    [target] = found.models["m"].targets
    assert found.providers[target.provider].ready, found.providers[target.provider].missing
    assert target.model == "up"


# ------------------------------------------------------------------ nothing is lost without a word

_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.floats(),
    st.text(max_size=8),
    st.just("os.environ/SOMETHING"),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
_NAMES = ["a", "b", "c", "openai/*", "*"]


def _or_junk(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(good, good, good, good, _JUNK)


def _some(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these, and now and then one that nobody knows."""
    return st.fixed_dictionaries({}, optional={name: _or_junk(good) for name, good in known.items()} | {"new": _JUNK})


_PREFIXES = ["", "bedrock/", "nobody/", *(f"{prefix}/" for prefix in litellm_known.VENDORS)]
_PARAMS = st.builds(
    lambda model, rest: {"model": model, **rest},
    _or_junk(st.builds(str.__add__, st.sampled_from(_PREFIXES), st.sampled_from(["gpt-4o", "claude-x", "m/n", "*"]))),
    _some(
        api_base=st.sampled_from(
            [
                "http://h:1/v1",
                "https://api.openai.com/v1",
                "os.environ/BASE",
                "ftp://x",
                "https://u:canary@h",
                "nonsense",
            ]
        ),
        api_key=st.sampled_from(["os.environ/ONE", "os.environ/with-dash", "none", "canary-a", "canary-b"]),
        organization=st.sampled_from(["org-1", "os.environ/ORG"]),
        rpm=st.integers(1, 10**9),
        tpm=st.integers(1, 10**12),
        max_parallel_requests=st.integers(1, 500),
        weight=st.integers(0, 9),
        order=st.integers(0, 3),
        timeout=st.floats(0.5, 1000),
        stream_timeout=st.integers(1, 100),
        temperature=st.floats(0, 2),
        max_tokens=st.integers(1, 10000),
        thinking=st.just({"type": "enabled", "budget_tokens": 1024}),
        seed=st.integers(0, 99),
        drop_params=st.booleans(),
        additional_drop_params=st.lists(st.sampled_from(["seed", "user", "model", "a.b"]), max_size=3),
        input_cost_per_token=st.floats(0, 1e-3),
        output_cost_per_token=st.floats(0, 1e-3),
        api_version=st.just("2024-10-21"),
        extra_headers=st.dictionaries(st.sampled_from(["x-a", "x-token"]), st.just("canary-h"), max_size=0)
        | st.just({"x-token": "canary-h", "x-a": "v"}),
        extra_body=st.just({"top_k": 3, "model": "no", "password": "canary-p"}),
        litellm_credential_name=st.sampled_from(["shared", "absent"]),
        custom_llm_provider=st.sampled_from(["openai", "nobody"]),
        mock_response=st.just("x"),
    ),
)
_INFO = _some(
    id=st.just("x"),
    mode=st.sampled_from(["chat", "embedding", "rerank"]),
    supports_vision=st.booleans(),
    supports_reasoning=st.booleans(),
    max_output_tokens=st.integers(1, 9999),
    output_cost_per_token=st.floats(0, 1e-3),
    base_model=st.just("gpt-4o"),
)
_ASKED = st.sampled_from([*_NAMES, "alias"])
_CHAINS = st.lists(
    st.dictionaries(
        st.sampled_from([*_NAMES, "alias"]), st.lists(st.sampled_from([*_NAMES, "alias"]), max_size=3), max_size=2
    ),
    max_size=3,
)
_ROUTER: dict[str, st.SearchStrategy[Any]] = {
    "num_retries": st.integers(0, 30),
    "allowed_fails": st.integers(0, 9),
    "cooldown_time": st.floats(0.5, 900),
    "fallbacks": _CHAINS,
    "default_fallbacks": st.lists(st.sampled_from(_NAMES), max_size=2),
    "context_window_fallbacks": _CHAINS,
    "model_group_alias": st.dictionaries(
        st.sampled_from(["alias", "a", "with space"]),
        st.sampled_from(["a", "absent", {"model": "b", "hidden": True}]),
        max_size=2,
    ),
}
_DOCUMENTS = _some(
    model_list=st.lists(
        st.fixed_dictionaries(
            {"model_name": _or_junk(st.sampled_from(_NAMES)), "litellm_params": _or_junk(_PARAMS)},
            optional={"model_info": _INFO, "new": _JUNK},
        ),
        max_size=6,
    ),
    router_settings=_some(
        routing_strategy=st.sampled_from(
            ["simple-shuffle", "least-busy", "cost-based-routing", "latency-based-routing"]
        ),
        timeout=st.integers(1, 1000),
        stream_timeout=st.integers(1, 100),
        default_max_parallel_requests=st.integers(1, 99),
        redis_host=st.just("h"),
        **_ROUTER,
    ),
    litellm_settings=_some(
        drop_params=st.booleans(), request_timeout=st.integers(1, 6000), callbacks=st.just(["x"]), **_ROUTER
    ),
    general_settings=_some(
        master_key=st.just("canary-m"),
        database_url=st.just("postgresql://u:canary@h"),
        max_parallel_requests=st.just(7),
    ),
    environment_variables=st.just({"SOME_KEY": "canary-e"}),
    credential_list=st.just(
        [{"credential_name": "shared", "credential_values": {"api_key": "canary-s", "api_base": "http://s:1/v1"}}]
    ),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
@given(document=_DOCUMENTS)
def test_whatever_stands_there_every_leaf_is_told_no_secret_is_written_and_the_result_loads(tmp_path, document):
    root = parse(yaml.safe_dump(document, allow_unicode=False), "c")
    made = imported(root, "c")
    assert untold(root, made) == []
    assert "canary" not in made.toml
    assert "canary" not in "".join(note.said for note in made.notes)
    loaded(tmp_path, made)
    assert [note.path for note in made.notes if note.path and not note.said] == []


def _changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 + 1
        case str():
            return f"{value}x"
    raise AssertionError(value)


#: What is told is that it is not taken over, or that it decides nothing where there is one of it.
_WITHOUT_EFFECT = ("not written", "a key in clear", "no name for a variable")


@pytest.mark.parametrize("source", REALISTIC.values(), ids=REALISTIC)
def test_what_is_told_to_be_carried_decides_what_is_made(source):
    """An entry that was read and forgotten would be told all the same: each is changed, and something must follow."""
    root = parse(source, "c")
    before = imported(root, "c")
    carried = {
        note.path: note.said
        for note in before.notes
        if note.fate in (Fate.CARRIED, Fate.CHANGED) and not note.said.startswith(_WITHOUT_EFFECT)
    }
    leaves = [leaf for leaf in root.leaves() if any(leaf.path == path for path in carried)]
    assert len(leaves) > 10
    forgotten = []
    for leaf in leaves:
        # An order counts beside others.
        old, leaf.value = leaf.value, 0 if leaf.path.endswith(".order") else _changed(leaf.value)
        old_raw, leaf.raw = leaf.raw, str(leaf.value)
        after = imported(root, "c")
        leaf.value, leaf.raw = old, old_raw
        if (after.toml, after.notes) == (before.toml, before.notes):
            forgotten.append(leaf.path)
    assert forgotten == []
    again = imported(root, "c")
    assert (again.toml, again.notes) == (before.toml, before.notes)


# ------------------------------------------------------------------ reading it


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("model_list:\n  - a: [1\n", 3, "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is there twice"),
        ("a: b: c\n", 1, "is not YAML"),
        ("x: !!python/object/apply:os.system ['true']\n", 1, "the tag"),
        ("- 1\n", 1, "is not a mapping"),
        ("? [a, b]\n: 1\n", 1, "a key must be text"),
        ("a: &a [*a]\n", 1, "nested"),
        ("a: 1\n---\nb: 2\n", 2, "is not YAML"),
        ("a: \x07\n", None, "is not YAML"),
        ("", None, "is empty"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(text, line, said):
    with pytest.raises(Unreadable) as refused:
        parse(text, "config.yaml")
    assert said in str(refused.value)
    assert str(refused.value).startswith("config.yaml" if line is None else f"config.yaml:{line}")


def test_aliases_that_stand_for_billions_are_refused():
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(Unreadable, match="parts"):
        parse("\n".join(lines), "c")


def test_included_files_are_read_and_told_with_their_own_lines(tmp_path):
    (tmp_path / "models.yaml").write_text(
        "model_list:\n  - {model_name: b, litellm_params: {model: groq/x}}\nlitellm_settings: {drop_params: true}\n"
    )
    main_file = tmp_path / "config.yaml"
    main_file.write_text("include: [models.yaml]\nmodel_list:\n  - {model_name: a, litellm_params: {model: groq/y}}\n")
    made = imported(read(main_file), "config.yaml")
    assert list(loaded(tmp_path, made).models) == ["a", "b"]
    assert {Path(note.place.rpartition(":")[0]).name for note in made.notes if note.place} == {
        "config.yaml",
        "models.yaml",
    }
    (tmp_path / "models.yaml").write_text("include: [config.yaml]\n")
    with pytest.raises(Unreadable, match="more than"):
        read(main_file)
    main_file.write_text("include: [absent.yaml]\n")
    with pytest.raises(Unreadable, match="no such file"):
        read(main_file)


# ------------------------------------------------------------------ the command


def run(tmp_path: Path, source: str, *arguments: str, output: str | None = None) -> Result:
    (tmp_path / "config.yaml").write_text(source)
    to = output or str(tmp_path / "out.toml")
    return CliRunner().invoke(main, ["import-litellm", str(tmp_path / "config.yaml"), "--output", to, *arguments])


def test_the_command_writes_the_file_and_tells_each_entry_with_its_line(tmp_path):
    done = run(tmp_path, LOAD_BALANCED)
    assert done.exit_code == 0, done.output
    assert "config.yaml:10" in done.stderr
    assert "left out" in done.stderr
    assert done.stdout == ""
    checked = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "out.toml")], env={"OPENAI_API_KEY": None})
    assert checked.exit_code == 0, checked.output
    again = run(tmp_path, LOAD_BALANCED)
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert run(tmp_path, LOAD_BALANCED, "--force").exit_code == 0
    arguments = ["import-litellm", str(tmp_path / "absent.yaml"), "--output", str(tmp_path / "out.toml")]
    absent = CliRunner().invoke(main, arguments)
    assert absent.exit_code == 1
    assert "no such file" in absent.stderr.replace("\n", " ")


def test_strict_has_a_status_of_its_own_where_something_was_left_out(tmp_path):
    assert run(tmp_path, LOAD_BALANCED, "--strict").exit_code == 3
    assert (tmp_path / "out.toml").exists()
    whole = "model_list: [{model_name: a, litellm_params: {model: openai/gpt-4o}}]"
    assert run(tmp_path, whole, "--strict", "--force").exit_code == 0


def test_it_writes_to_standard_output_and_nothing_where_there_is_no_model(tmp_path):
    told = run(tmp_path, LOAD_BALANCED, output="-")
    assert told.exit_code == 0
    assert told.stdout.startswith("# Made from config.yaml")
    none = run(tmp_path, "model_list: []\nlitellm_settings: {cache: true}\n")
    assert none.exit_code == 1
    assert "no model" in none.stderr
    assert not (tmp_path / "out.toml").exists()
    bad = run(tmp_path, "model_list:\n  - a: [1\n")
    assert (bad.exit_code, "config.yaml:3" in bad.stderr) == (1, True)
