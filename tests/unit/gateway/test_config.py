"""The configuration: what is taken, what is refused, and that every fault is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import config
from gateway.config import ConfigFaults, Fault, Listen, normalised_endpoint
from metering.prices import Price

GOOD = """
[providers.openai]
protocol = "chat_completions"
base_url = "https://api.openai.com/v1"
credentials = ["OPENAI_API_KEY"]

[providers.openrouter]
protocol = "chat_completions"
base_url = "https://openrouter.ai/api/v1"
credentials = ["OPENROUTER_API_KEY"]

[models."gpt-4o"]
providers = ["openai"]
fallback = [{ provider = "openrouter", model = "openai/gpt-4o" }]
price = { input = "2.50", output = "10.00" }

[groups."https://api.openai.com"]
concurrency = 8
queue = 100
"""


def load(tmp_path: Path, text: str, **environ: str) -> config.Settings:
    file = tmp_path / "tollbridge.toml"
    file.write_text(text)
    return config.load(file, environ)


def faults(tmp_path: Path, text: str, **environ: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigFaults) as refused:
        load(tmp_path, text, **environ)
    assert all(fault.file.endswith("tollbridge.toml") for fault in refused.value.faults)
    return [(fault.path, fault.reason) for fault in refused.value.faults]


def test_the_everyday_shape_is_taken(tmp_path):
    settings = load(tmp_path, GOOD, OPENAI_API_KEY="sk-1")
    targets = settings.models["gpt-4o"].targets
    assert [(target.provider, target.model) for target in targets] == [
        ("openai", "gpt-4o"),
        ("openrouter", "openai/gpt-4o"),
    ]
    group = settings.admission.groups["https://api.openai.com:443"]
    assert (group.concurrency, group.queue) == (8, 100)
    other = settings.admission.groups["https://openrouter.ai:443"]
    assert (other.concurrency, other.queue) == (3, 32)
    openai = settings.providers["openai"]
    assert openai.ready
    assert openai.endpoint is not None
    assert openai.endpoint.headers == {"authorization": "Bearer sk-1"}
    assert settings.providers["openrouter"].missing == ("OPENROUTER_API_KEY",)
    assert settings.providers["openrouter"].endpoint is None
    assert (settings.rest, settings.grpc) == (Listen("127.0.0.1", 8080), Listen("127.0.0.1", 50051))


def test_a_route_may_have_a_price_of_its_own_and_has_one_wherever_it_stands(tmp_path):
    price = '{ provider = "openai", model = "up", price = { input = "1", output = "2" } }'
    text = f'[providers.openai]\n[models.m]\nproviders = [{price}]\n[models.n]\nproviders = ["openai"]\n'
    text += f"fallback = [{price}]"
    found = load(tmp_path, text).prices_by_route
    assert {route: str(price.output) for route, price in found.items() if isinstance(price, Price)} == {
        "openai/up": "2"
    }
    for other in ('output = "3"', 'output = "x"'):
        [(path, _)] = faults(tmp_path, text[:-40] + text[-40:].replace('output = "2"', other))
        assert path == "models.n.fallback.0.price"


def test_a_shipped_profile_fills_in_what_the_file_does_not_say(tmp_path):
    settings = load(
        tmp_path, '[providers.openai]\nfirst_byte_s = 77\n[models.m]\nproviders = ["openai"]', OPENAI_API_KEY="k"
    )
    endpoint = settings.providers["openai"].endpoint
    assert endpoint is not None
    assert endpoint.base_url == "https://api.openai.com/v1"
    assert endpoint.clocks.first_byte_s == 77
    assert set(settings.providers) == {"openai"}


def test_a_shipped_word_about_closing_can_be_taken_back(tmp_path):
    text = '[providers.openai]\n%s\n[models.m]\nproviders = ["openai"]'
    shipped = load(tmp_path, text % "", OPENAI_API_KEY="k").providers["openai"]
    assert (shipped.drains_for_s(streamed=True), shipped.drains_for_s(streamed=False)) == (0, 15)
    own = load(tmp_path, text % 'cancel_confirms = "none"\ndrain_s = 4', OPENAI_API_KEY="k").providers["openai"]
    assert (own.drains_for_s(streamed=True), own.confirms_after_s(streamed=True)) == (4, None)


def test_without_a_file_every_shipped_provider_is_there_and_its_models_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config.load(None, {"OPENAI_API_KEY": "k"})
    assert settings.file is None
    assert settings.providers["openai"].ready
    assert not settings.providers["groq"].ready
    # A model that several list goes to a ready one first.
    assert settings.models["gpt-4o"].targets[0].provider == "openai"


def test_the_environment_wins_over_the_file(tmp_path):
    text = GOOD + '\n[gateway]\nrest_listen = "127.0.0.1:1"\ndatabase_url = "postgresql://file"\ndata_dir = "/file"\n'
    settings = load(
        tmp_path,
        text,
        TOLLBRIDGE_REST_LISTEN="[::1]:0",
        TOLLBRIDGE_DATABASE_URL="postgresql://environment",
        TOLLBRIDGE_DATA_DIR="/environment",
    )
    assert settings.rest == Listen("::1", 0)
    assert settings.database_url == "postgresql://environment"
    assert settings.data_dir == Path("/environment")


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = tmp_path / "other.toml"
    file.write_text(GOOD)
    assert config.load(None, {"TOLLBRIDGE_CONFIG": str(file)}).file == file


def test_variables_and_required_variables(tmp_path):
    text = """
    [providers.azure]
    protocol = "chat_completions"
    base_url = "https://{RESOURCE}.example.com/v1"
    credentials = ["A_KEY", "B_KEY"]
    requires = ["ACCOUNT_ID"]
    auth_header = "api-key"
    [models.m]
    providers = ["azure"]
    """
    without = load(tmp_path, text).providers["azure"]
    assert without.missing == ("ACCOUNT_ID", "RESOURCE", "A_KEY or B_KEY")
    ready = load(tmp_path, text, RESOURCE="r", B_KEY="secret", ACCOUNT_ID="a").providers["azure"]
    assert ready.endpoint is not None
    assert ready.endpoint.base_url == "https://r.example.com/v1"
    assert ready.endpoint.headers == {"api-key": "secret"}
    assert ready.group == "https://r.example.com:443"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[providers.p]\nprotocol='chat_completions'\nbase_url='http://h'\nbaseurl='x'", "providers.p.baseurl"),
        ("[unknown]", "unknown"),
        ("[providers.p]\nprotocol='chat_completions'", "providers.p.base_url"),
        ("[providers.p]\nprotocol='smoke_signals'\nbase_url='http://h'", "providers.p.protocol"),
        ("[providers.p]\nprotocol='chat_completions'\nbase_url='ftp://h'", "providers.p.base_url"),
        (GOOD.replace("[providers.openai]", "[providers.openai]\non_cancel='wait'"), "providers.openai.on_cancel"),
        (GOOD.replace("[providers.openai]", "[providers.openai]\ndrain_s=601"), "providers.openai.drain_s"),
        (
            GOOD.replace("[providers.openai]", "[providers.openai]\ncancel_source='a friend'"),
            "providers.openai.cancel_source",
        ),
        (
            GOOD.replace("[providers.openai]", "[providers.openai]\nslowest_tokens_per_s=0"),
            "providers.openai.slowest_tokens_per_s",
        ),
        ("[models.m]\nproviders=[]", "models.m.providers"),
        ("[models.m]\nproviders=['nobody']", "models.m.providers.0"),
        ("[models.m]\nprice={input='1',output='1'}", "models.m.providers"),
        (GOOD.replace('"2.50"', '"-2.50"'), "models.gpt-4o.price"),
        (GOOD.replace('"2.50"', "2.50"), "models.gpt-4o.price"),
        (GOOD.replace("concurrency = 8", "concurrency = -1"), "groups.https://api.openai.com.concurrency"),
        (GOOD.replace("concurrency = 8", 'concurrency = "8"'), "groups.https://api.openai.com.concurrency"),
        (GOOD + "[groups.'https://nobody.example']\nqueue=1", "groups.https://nobody.example"),
        (GOOD + "[admission]\nlease_s=0", "admission.lease_s"),
        (GOOD + "[admission]\nzone='Mars/Olympus'", "admission.zone"),
        (GOOD + "[jobs]\nconcurency=3", "jobs"),
        (GOOD + "[gateway]\nrest_listen='8080'", "gateway.rest_listen"),
    ],
    ids=(f"fault {n}" for n in range(17)),
)
def test_a_fault_is_told_with_its_path(tmp_path, text, path):
    assert path in [found for found, _ in faults(tmp_path, text)]


def test_several_faults_are_told_together(tmp_path):
    text = "[providers.p]\nprotocol='x'\n[models.m]\nproviders=['q']\nfallback=['q']\n[groups.'not a url']\nqueue=1"
    found = [path for path, _ in faults(tmp_path, text, TOLLBRIDGE_GRPC_LISTEN="nowhere")]
    assert {"providers.p.protocol", "providers.p.base_url", "models.m.providers.0", "TOLLBRIDGE_GRPC_LISTEN"} <= set(
        found
    )


def test_a_fault_within_a_table_or_an_entry_of_a_list_hides_no_other(tmp_path):
    text = """
[models.m]
providers = [{ provider = "q", weigth = 3, cannot = ["fly"], qualified_for = { r = "0123456789abcdef" } }, "z"]
fallback = ["q"]
weigth = 3
order = "sideways"
first_byte_s = "soon"
"""
    found = [path for path, _ in faults(tmp_path, text)]
    assert sorted(found) == [
        "models.m.fallback.0",
        "models.m.first_byte_s",
        "models.m.order",
        "models.m.providers.0",
        "models.m.providers.0.cannot.0",
        "models.m.providers.0.qualified_for.r",
        "models.m.providers.0.weigth",
        "models.m.providers.1",
        "models.m.weigth",
    ]


@pytest.mark.parametrize("key", ["short", "x" * 600, "with a space in it 123", "ünïcödé-key-0123456789"])
def test_an_unusable_key_in_the_environment_is_a_fault_and_not_repeated(tmp_path, key):
    [(path, reason)] = faults(tmp_path, GOOD, TOLLBRIDGE_API_KEY=key)
    assert path == "TOLLBRIDGE_API_KEY"
    assert key not in reason


def test_a_model_given_twice_is_refused_by_toml_itself(tmp_path):
    [(path, reason)] = faults(tmp_path, GOOD + '\n[models."gpt-4o"]\nproviders = ["openai"]\n')
    assert path == ""
    assert "TOML" in reason


def test_a_file_that_is_not_there_is_a_fault(tmp_path):
    with pytest.raises(ConfigFaults) as refused:
        config.load(tmp_path / "absent.toml", {})
    assert refused.value.faults == [Fault(str(tmp_path / "absent.toml"), "", "there is no such file")]


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://API.OpenAI.com/v1", "https://api.openai.com:443"),
        ("http://h/v1/", "http://h:80"),
        ("http://h:8000", "http://h:8000"),
        ("http://[::1]:9/x", "http://[::1]:9"),
    ],
    ids=["https", "http", "port", "ipv6"],
)
def test_endpoints_are_normalised(url, endpoint):
    assert normalised_endpoint(url) == endpoint


@pytest.mark.parametrize("url", ["h", "ftp://h", "https://user:pw@h", "https://h?x=1", "https://", "http://h:99999"])
def test_what_is_no_endpoint_is_refused(url):
    with pytest.raises(ValueError, match=r"."):
        normalised_endpoint(url)


def test_no_fault_repeats_a_credential(tmp_path):
    text = GOOD.replace('"OPENAI_API_KEY"', '"K"')
    for _, reason in faults(tmp_path, text, K="sk-secret\nx"):
        assert "secret" not in reason


ONE_PROVIDER = """
[providers.p]
protocol = "chat_completions"
base_url = "http://127.0.0.1:1/v1"
%s
[models.m]
providers = ["p"]
"""


@pytest.mark.parametrize("field", ["model", "messages", "stream", "input", "contents"])
def test_no_profile_may_force_or_omit_what_is_the_gateways_to_decide(tmp_path, field):
    [(path, reason)] = faults(tmp_path, ONE_PROVIDER % f'force = {{ top_k = 3, {field} = "x" }}')
    assert path == f"providers.p.force.{field}"
    assert f"'{field}' is the gateway's to decide" in reason
    [(path, reason)] = faults(tmp_path, ONE_PROVIDER % f'omit = ["user", "{field}"]')
    assert path == "providers.p.omit.1"
    assert f"'{field}' is the gateway's to decide" in reason


def test_what_is_no_whole_field_of_ours_may_be_omitted_and_others_forced(tmp_path):
    text = ONE_PROVIDER % 'omit = ["messages.cache", "stream_options"]\nforce = { reasoning = { effort = "low" } }'
    endpoint = load(tmp_path, text).providers["p"].endpoint
    assert endpoint is not None
    assert endpoint.omit == {"messages.cache", "stream_options"}
    assert set(endpoint.force) == {"reasoning"}


SECRETS = [
    "sk-proj-Zq3vT1",
    "Bearer sk-proj-Zq3vT1",
    "$OPENAI_API_KEY_Zq3vT1",
    "1Zq3vT1",
    "Zq3vT1\u00e9",
    "Zq3vT1.",
    # Names as far as their letters go.
    "gsk_Zq3vT1aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "AIzaSyZq3vT1aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Zq3vT1c0ffee5aaaaaaaaaaa",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("key", ["credentials", "requires"])
def test_a_secret_where_the_name_of_a_variable_belongs_is_refused_and_not_repeated(tmp_path, key, secret):
    text = ONE_PROVIDER % f'{key} = ["GOOD_NAME", "{secret}"]'
    with pytest.raises(ConfigFaults) as refused:
        load(tmp_path, text, GOOD_NAME="k")
    assert "Zq3vT1" not in str(refused.value)
    [fault] = refused.value.faults
    assert fault.path == f"providers.p.{key}.1"
    assert "NAME of an environment variable" in fault.reason
    # Neither does whoever reads the file instead of the message.
    assert "Zq3vT1" not in repr(refused.value.faults)


def test_a_long_name_that_is_set_is_a_name(tmp_path):
    text = ONE_PROVIDER % 'credentials = ["key4theProviderOfTheYear2026"]'
    assert load(tmp_path, text, key4theProviderOfTheYear2026="k").providers["p"].ready


def test_a_credential_that_no_header_can_carry_is_told_by_the_name_that_holds_it(tmp_path):
    text = ONE_PROVIDER % 'credentials = ["FIRST", "SECOND"]'
    assert faults(tmp_path, text, SECOND="a\u00e9Zq3vT1") == [
        ("providers.p", "the value of SECOND cannot be sent in a header")
    ]


WRONG_URLS = [
    ("mysql://u:{}@h/db", "postgresql://"),
    ("{}", "postgresql://"),
    ("postgresql:u:{}@h", "postgresql://"),
    ("postgresql://u:{}@h:99999/db", "port"),
    ("postgresql://u:{}@h:0/db", "port"),
    ("postgresql://u:{}@h:abc/db", "port"),
    ("postgresql://u:{}@h,g:abc/db", "port"),
    ("postgresql://u:{}@h/db?port=abc", "port"),
    ("postgresql://u:a/{}@h/db", "%2F"),
    ("postgresql://u:a#{}@h/db", "%23"),
    ("postgresql://u:a@{}@h/db", "%40"),
    ("postgresql://u:{}@[::1/db", "cannot be read"),
    ("postgresql://u:{}@::1/db", "port"),
    ("postgresql://u:{}@h h/db", "host"),
    ("postgresql://u:{}@h/db?sslmode", "cannot be read"),
]


@pytest.mark.parametrize(("url", "said"), WRONG_URLS, ids=[url for url, _ in WRONG_URLS])
@pytest.mark.parametrize("name", ["database_url", "content_database_url"])
def test_a_database_url_that_cannot_be_one_is_refused_by_the_name_of_its_setting(tmp_path, name, url, said):
    wrong = url.format("Zq3vT1")
    for text, environ, path in (
        (f'{GOOD}\n[gateway]\n{name} = "{wrong}"', {}, f"gateway.{name}"),
        (GOOD, {f"TOLLBRIDGE_{name.upper()}": wrong}, f"TOLLBRIDGE_{name.upper()}"),
    ):
        [(told, reason)] = faults(tmp_path, text, **environ)
        assert told == path
        assert said in reason
        assert "Zq3vT1" not in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/db",
        "postgres://u:p%2F%40%23@h.example:5432,g_1:5433/db?sslmode=require",
        "postgresql://u@[::1]:5432/db",
        "postgresql:///db?host=/run/postgresql&port=5433",
        "postgresql://%2Frun%2Fpostgresql/db",
        "postgresql://",
    ],
)
def test_a_database_url_that_postgresql_knows_is_taken(tmp_path, url):
    assert load(tmp_path, GOOD, TOLLBRIDGE_DATABASE_URL=url).database_url == url


def test_a_url_to_listen_at_tells_that_the_others_are_a_poolers(tmp_path):
    assert not load(tmp_path, GOOD, TOLLBRIDGE_DATABASE_URL="postgresql://h/db").pooled
    settings = load(
        tmp_path,
        GOOD,
        TOLLBRIDGE_DATABASE_URL="postgresql://pooler/db",
        TOLLBRIDGE_LISTEN_DATABASE_URL="postgresql://server/db",
    )
    assert settings.pooled
    assert settings.listen_database_url == "postgresql://server/db"
    [(told, reason)] = faults(tmp_path, GOOD, TOLLBRIDGE_LISTEN_DATABASE_URL="postgresql://server/db")
    assert told == "gateway.listen_database_url"
    assert "database_url" in reason


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ('{ provider = "p", modle = "x" }', "models.a.providers.0.modle"),
        ('""', "models.a.providers.0"),
        ("7", "models.a.providers.0"),
    ],
)
def test_an_entry_that_is_a_name_or_a_table_is_told_one_fault(tmp_path, entry, path):
    text = f"""
[providers.p]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
[models.a]
providers = [{entry}]
"""
    file = tmp_path / "tollbridge.toml"
    file.write_text(text)
    with pytest.raises(ConfigFaults) as wrong:
        config.load(file, {})
    assert [fault.path for fault in wrong.value.faults] == [path]
