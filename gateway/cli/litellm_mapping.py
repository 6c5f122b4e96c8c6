"""
What a LiteLLM configuration becomes here, and what is told of each of its parts.

Nothing may be lost without a word: every part that is read gets its note (carried, changed in meaning, left out, not
needed), and what nobody has read at the end is noted as left out. So a setting that LiteLLM invents tomorrow is told,
too. No secret is ever taken over: what stands in clear is named by the variable that it belongs into.

The fields are those of LiteLLM's documentation, https://docs.litellm.ai/docs/proxy/config_settings.
"""

from __future__ import annotations

import enum
import importlib.resources
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias

import msgspec

from gateway.cli import litellm_known as known
from gateway.cli.litellm_known import Vendor
from gateway.cli.litellm_yaml import Node
from gateway.cli.toml_text import entry, key, value
from gateway.config import normalised_endpoint

#: LiteLLM sends as many calls at once as come. A group here has a limit, 3 where none is given.
CONCURRENCY: Final = 32
QUEUE: Final = 200
#: Seconds. Clocks of a provider that no shipped profile knows.
_UNKNOWN_CLOCKS: Final = {"first_byte_s": 60, "gap_s": 15}
_LONGEST_S: Final = 10_000_000
_MOST_ATTEMPTS: Final = 50
_MOST_ROUTES: Final = 20
_HEAVIEST: Final = 1_000_000

_ENVIRONMENT: Final = "os.environ/"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: As the configuration reads names.
_NAME: Final = re.compile(r"[^\s\x00-\x1f]{1,200}")
_SECRET: Final = re.compile(r"auth|key|token|secret|passw|cookie|credential|signature", re.IGNORECASE)
_NO_KEY: Final = frozenset({"", "none", "null", "empty", "dummy", "fake", "not-needed", "no-key"})


class Fate(enum.StrEnum):
    CARRIED = "carried"
    CHANGED = "changed"
    LEFT_OUT = "left out"
    #: What it is for is so here without being asked.
    NOT_NEEDED = "not needed"
    #: Of ours, where LiteLLM has nothing.
    ADDED = "added"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    fate: Fate
    path: str
    #: File and line; empty for what was added.
    place: str
    said: str


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    toml: str
    notes: list[Note]
    #: How many models it has.
    models: int


_Limits: TypeAlias = dict[str, int]
_Credential: TypeAlias = tuple[str, str]


class _Provider(msgspec.Struct, eq=False):
    id: str
    #: Of the shipped profile, where its table takes from one.
    profile: Mapping[str, Any]
    #: None: the profile's.
    base_url: str | None
    credential: _Credential
    vendor: Vendor
    headers: dict[str, str]
    #: Where its base URL is known: `scheme://host:port`.
    origin: str | None
    auth_header: str | None = None
    #: The name of a group of its own; empty: that of its endpoint.
    group: str = ""
    #: What LiteLLM calls it.
    told: str = ""
    keys: list[Node] = []
    #: The names of its own that callers may put behind its id.
    any_model: bool = False


class _Deployment(msgspec.Struct, eq=False):
    provider: _Provider
    upstream: str
    #: Settings of the route, but its weight.
    settings: dict[str, Any]
    order: int
    weights: dict[str, float]
    limits: _Limits
    prices: dict[str, Decimal]
    node: Node


def imported(root: Node, source: str) -> Imported:
    """`source` is how the file is called in the comment at the top."""
    return _Import(root).made(source)


class _Import:
    def __init__(self, root: Node) -> None:
        self._root = root
        self._notes: list[tuple[Node | None, Note]] = []
        self._told: set[int] = set()
        shipped = importlib.resources.files("adapters").joinpath("providers.toml").read_text(encoding="utf-8")
        self._shipped: dict[str, dict[str, Any]] = tomllib.loads(shipped)["providers"]
        self._providers: dict[tuple[object, ...], _Provider] = {}
        self._models: dict[str, list[_Deployment]] = {}
        #: Parts of prices, told of when those of all routes of a model are known.
        self._costs: list[tuple[Node, _Deployment]] = []
        self._credentials_named: list[object] = []
        self._settings = root.get("litellm_settings") or Node("litellm_settings", "", {})
        self._router = root.get("router_settings") or Node("router_settings", "", {})
        self._general = root.get("general_settings") or Node("general_settings", "", {})

    # ---------------------------------------------------------------- what is told

    def _say(self, fate: Fate, node: Node, said: str) -> None:
        self._told.add(id(node))
        self._notes.append((node, Note(fate=fate, path=node.path, place=node.place, said=said)))

    def _carried(self, node: Node, said: str) -> None:
        self._say(Fate.CARRIED, node, said)

    def _changed(self, node: Node, said: str) -> None:
        self._say(Fate.CHANGED, node, said)

    def _left_out(self, node: Node, said: str) -> None:
        self._say(Fate.LEFT_OUT, node, said)

    def _added(self, said: str) -> None:
        self._notes.append((None, Note(fate=Fate.ADDED, path="", place="", said=said)))

    def _rest(self, node: Node) -> None:
        """What nobody has spoken of is told of, too."""
        if id(node) in self._told:
            return
        children = list(node.children())
        for child in children:
            self._rest(child)
        if not children and node is not self._root:
            if node.value in ({}, []):
                self._say(Fate.NOT_NEEDED, node, "is empty")
            else:
                self._left_out(node, "this import does not know it. Look whether docs/configuration.md has the like")

    def _known(self, section: str, node: Node) -> bool:
        """Tells of a part of which all is known that can be."""
        name = node.path.rpartition(".")[2] if section else node.path
        reasons, needless = known.REASONS.get(section, {}), known.NEEDLESS.get(section, {})
        if name in needless:
            self._say(Fate.NOT_NEEDED, node, needless[name])
        elif name in reasons:
            self._left_out(node, reasons[name])
        return name in needless or name in reasons

    # ---------------------------------------------------------------- all of it

    def made(self, source: str) -> Imported:
        self._environment()
        self._model_list()
        fallbacks = self._fallbacks()
        order = self._strategy()
        routing = self._routing(fallbacks)
        self._prices()
        breaker = self._breaker()
        aliases = self._aliases()
        clocks = self._clocks()
        drops = self._drops()
        self._master_key()
        variables = self._variables()
        groups = self._groups(breaker)
        for section, node in (
            ("", self._root),
            ("litellm_settings", self._settings),
            ("router_settings", self._router),
            ("general_settings", self._general),
        ):
            for child in node.members.values():
                if id(child) not in self._told:
                    self._known(section, child)
        self._unused_credentials()
        self._rest(self._root)
        models = list(self._written_models(fallbacks, order, aliases, routing))
        body = [
            f"# Made from {_comment(source)} by `tollbridge import-litellm`. Keys of providers and of the gateway are",
            "# in the environment and never here; docs/migration.md and docs/configuration.md explain the rest.",
            *_table("routing", routing),
            *self._written_providers(clocks, drops, variables),
            *models,
            *groups,
        ]
        places = {id(node): at for at, node in enumerate(_walk(self._root))}
        notes = sorted(self._notes, key=lambda told: places.get(id(told[0]), len(places)))
        return Imported(
            toml="\n".join(body) + "\n",
            notes=[note for _, note in notes],
            models=sum(line.startswith("[models.") for line in models),
        )

    # ---------------------------------------------------------------- reading values

    def _number(self, node: Node, *, least: float, most: float, whole: bool = True) -> float | None:
        """A number; None where it cannot be taken, which is told."""
        if (name := _variable(node)) is not None:
            self._left_out(node, f"a setting cannot come from the environment ({name}). Write it into the file")
            return None
        value = _decimal(node)
        if value is None or (whole and value != value.to_integral_value()) or not least <= value <= most:
            kind = "whole number" if whole else "number"
            self._left_out(node, f"is no {kind} from {least:g} to {most:g}")
            return None
        return int(value) if value == value.to_integral_value() else float(value)

    def _seconds(self, node: Node) -> float | None:
        return self._number(node, least=0.001, most=_LONGEST_S, whole=False)

    def _flag(self, node: Node) -> bool | None:
        if isinstance(node.value, bool):
            return node.value
        self._left_out(node, "is neither true nor false")
        return None

    def _of_router(self, name: str) -> Node | None:
        """A setting that stands in either of two sections. `router_settings` wins, as it does in LiteLLM."""
        mine, other = self._router.get(name), self._settings.get(name)
        if mine is not None and other is not None:
            self._left_out(other, "router_settings has it, too, and wins")
        return mine or other

    # ---------------------------------------------------------------- sections

    def _environment(self) -> None:
        node = self._root.get("environment_variables")
        for name, child in (node.members if node else {}).items():
            self._changed(child, f"not written: set {name[:100]} in the gateway's environment")

    def _master_key(self) -> None:
        node = self._general.get("master_key")
        if node is None:
            return
        name = _variable(node)
        where = f"the value of {name}" if name else "it"
        self._changed(
            node, f"not written: put {where} into TOLLBRIDGE_API_KEY, if it has 16 to 512 characters, or make keys anew"
        )

    def _draws(self) -> bool:
        """Whether LiteLLM draws by weight. Its other strategies do not look at `weight`, `rpm` or `tpm` for that."""
        node = self._router.get("routing_strategy")
        return node is None or node.text not in _NOT_DRAWN

    def _strategy(self) -> str:
        node = self._router.get("routing_strategy")
        if node is None:
            return "weighted"
        match node.text:
            case "simple-shuffle":
                self._carried(node, 'order = "weighted": drawn by weight, else by rpm or tpm')
                return "weighted"
            case "latency-based-routing":
                self._changed(node, 'order = "latency": the time to the first content of late, of this process')
                return "latency"
            case "cost-based-routing":
                self._carried(node, 'order = "cost"')
                return "cost"
            case "least-busy" | "usage-based-routing" | "usage-based-routing-v2":
                self._changed(node, 'order = "weighted": limits hold over all processes, but do not decide the order')
                return "weighted"
            case _:
                self._left_out(node, "there is no such strategy here: order of the models is weighted")
                return "weighted"

    def _clocks(self) -> dict[str, float]:
        """Of all providers."""
        found: dict[str, float] = {}
        timeout = self._router.get("timeout")
        request = self._settings.get("request_timeout")
        if timeout is not None and request is not None:
            self._left_out(request, "router_settings.timeout is there, too, and wins")
        node = timeout or request
        if node is not None and (seconds := self._seconds(node)) is not None:
            self._changed(
                node, f"execution_limit_s = {seconds:g} of each provider: for one attempt, queue not included"
            )
            found |= {"execution_limit_s": seconds, "reasoning_execution_limit_s": seconds}
        stream = self._router.get("stream_timeout")
        if stream is not None and (seconds := self._seconds(stream)) is not None:
            self._changed(stream, f"first_byte_s = {seconds:g} of each provider: until the first content of a stream")
            found["first_byte_s"] = seconds
        return found

    def _drops(self) -> bool:
        node = self._settings.get("drop_params")
        if node is None or (flag := self._flag(node)) is None:
            return False
        self._changed(
            node, f'unsupported = "{"drop" if flag else "refuse"}" of each provider; what was dropped is told'
        )
        return flag

    def _routing(self, fallbacks: Mapping[str, list[str]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        node = self._of_router("num_retries")
        if node is not None and (retries := self._number(node, least=0, most=1000)) is not None:
            waits = [min(2**at, 8) for at in range(int(min(retries, 20)))]
            groups = 1 + max((len(names) for names in fallbacks.values()), default=0)
            found["backoff_s"] = waits
            found["most_attempts"] = int(min(_MOST_ATTEMPTS, (retries + 1) * groups))
            self._changed(
                node,
                f"routing.backoff_s has {len(waits)} waits, routing.most_attempts = {found['most_attempts']}: over all "
                "routes of a call, other routes before a second try",
            )
        return found

    def _breaker(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        node = self._of_router("allowed_fails")
        if node is not None and (fails := self._number(node, least=0, most=1_000_000)) is not None:
            found |= {"failure_threshold": int(fails) + 1, "failure_window_s": 60}
            self._changed(node, f"failure_threshold = {int(fails) + 1} of each group: of an endpoint, not a deployment")
        node = self._of_router("cooldown_time")
        if node is not None and (seconds := self._seconds(node)) is not None:
            found |= {"first_cooldown_s": seconds, "longest_cooldown_s": max(300, seconds)}
            self._changed(node, f"first_cooldown_s = {seconds:g} of each group: twice as long each time in a row")
        return found

    # ---------------------------------------------------------------- model_list

    def _model_list(self) -> None:
        node = self._root.get("model_list")
        if node is None:
            return
        if not isinstance(node.value, list):
            self._left_out(node, "must be a list")
            return
        # Patterns first: callers write what stands before the slash, so their provider has the first choice of an id.
        for item in sorted(node.items, key=lambda item: "*" not in (_raw(item.get("model_name")) or "")):
            self._deployment(item)

    def _deployment(self, item: Node) -> None:
        name, params = item.get("model_name"), item.get("litellm_params")
        model = params.get("model") if params else None
        if name is None or params is None or model is None:
            self._left_out(item, "has no model_name, or no litellm_params.model")
            return
        asked, wanted = str(name.raw), str(model.raw)
        prefix, upstream, protocol = self._named(params, wanted)
        if (why := known.UNSPOKEN.get(prefix)) is not None:
            self._left_out(item, f"{_shown(asked)} at {prefix}: {why}")
            return
        vendor = known.VENDORS.get(prefix)
        if vendor is None:
            who = f"{_shown(prefix)} is not known here" if prefix else f"{_shown(wanted)} does not say which provider"
            self._left_out(
                item,
                f"{_shown(asked)}: {who}. Where it speaks a protocol of docs/protocols.md, write a provider with its "
                "base_url",
            )
            return
        mode = (item.get("model_info") or Node("", "", {})).get("mode")
        if mode is not None and mode.text not in known.CHAT_MODES:
            self._left_out(item, f"{_shown(asked)}: only chat and embeddings are served")
            return
        wild = "*" in asked
        if "*" in upstream and not (wild and upstream == "*"):
            self._left_out(item, f"{_shown(asked)}: there are no patterns. Name each model")
            return
        if not all(_NAME.fullmatch(part) and part.isprintable() for part in (asked, upstream)):
            self._left_out(item, f"{_shown(asked)}: a model's name has 1 to 200 characters and no spaces")
            return
        given = self._with_credential(params)
        provider = self._provider(prefix, vendor, given, item)
        if provider is None:
            return
        if wild:
            self._pattern(item, name, model, provider)
            self._parameters(params, provider, protocol, given, routes=False)
            return
        self._carried(model, f"provider {provider.id}, upstream model {_shown(upstream)}")
        if name.raw not in self._models:
            self._carried(name, f"[models.{key(asked)}]")
        else:
            self._carried(name, f"one more route of [models.{key(asked)}]")
        if (custom := params.get("custom_llm_provider")) is not None:
            self._carried(custom, f"provider {provider.id}")
        made = self._parameters(params, provider, protocol, given, routes=True)
        made.upstream, made.node = upstream, item
        self._info(item, made)
        self._models.setdefault(asked, []).append(made)

    def _named(self, params: Node, wanted: str) -> tuple[str, str, str | None]:
        """What LiteLLM takes for the provider, the upstream's name, and a protocol that is named in it."""
        custom = params.get("custom_llm_provider")
        prefix, slash, rest = wanted.partition("/")
        if custom is not None and custom.text:
            prefix, rest = custom.text, wanted.removeprefix(f"{custom.text}/")
        elif not slash or (prefix not in known.VENDORS and prefix not in known.UNSPOKEN):
            found = next((vendor for pattern, vendor in known.INFERRED if pattern.match(wanted)), None)
            if found is not None:
                prefix, rest = found, wanted
            elif not slash:
                prefix, rest = "", wanted
        infix, slash, after = rest.partition("/")
        named = known.INFIXES.get(prefix, {})
        if slash and infix in named:
            return prefix, after, named[infix]
        return prefix, rest, None

    def _pattern(self, item: Node, name: Node, model: Node, provider: _Provider) -> None:
        provider.any_model = True
        listed = "those of its profile" if provider.profile.get("models") else "none yet"
        if name.raw != f"{provider.id}/*":
            said = f"there are no patterns: models are asked for as {provider.id}/NAME"
            self._left_out(name, f"{said}, where `models` of [providers.{provider.id}] lists them ({listed})")
        else:
            self._changed(
                name, f"models of [providers.{provider.id}] lists what may be asked for ({listed}). Add what is missing"
            )
        self._carried(model, f"provider {provider.id}")
        info = item.get("model_info")
        if info is not None:
            self._left_out(info, "there are no patterns: say it of each model")

    def _with_credential(self, params: Node) -> dict[str, Node]:
        """The parameters, with those of a credential that they name."""
        given = dict(params.members)
        name = given.get("litellm_credential_name")
        if name is None:
            return given
        listed = self._root.get("credential_list")
        found = next((c for c in (listed.items if listed else []) if _raw(c.get("credential_name")) == name.raw), None)
        if found is None:
            self._left_out(name, "credential_list has none of this name")
            return given
        self._credentials_named.append(name.raw)
        self._carried(name, "as if its values stood here")
        for part, fate in (("credential_name", Fate.CARRIED), ("credential_info", Fate.NOT_NEEDED)):
            child = found.get(part)
            if child is not None and id(child) not in self._told:
                self._say(fate, child, "it is in the providers of those who use it")
        values = found.get("credential_values")
        shared = {} if values is None else {n: node for n, node in values.members.items() if n in known.OF_CREDENTIALS}
        return {**shared, **given}

    def _unused_credentials(self) -> None:
        """What of `credential_list` stands in no provider, and why."""
        named = {name for name in self._credentials_named if isinstance(name, str)}
        listed = self._root.get("credential_list")
        for credential in listed.items if listed else []:
            values = credential.get("credential_values")
            if _raw(credential.get("credential_name")) not in named:
                parts = [*credential.members.values(), *(values.members.values() if values else [])]
                for part in (part for part in parts if part is not values and id(part) not in self._told):
                    self._say(Fate.NOT_NEEDED, part, "no model names this credential")
                continue
            for name, part in values.members.items() if values else ():
                if name in known.OF_CREDENTIALS and id(part) not in self._told:
                    self._say(
                        Fate.NOT_NEEDED, part, "those who name this credential have their own, or were not carried over"
                    )

    def _provider(self, prefix: str, vendor: Vendor, given: Mapping[str, Node], item: Node) -> _Provider | None:
        """The provider of a deployment: one for each address, key and set of headers. None: it was told why not."""
        address = given.get("api_base") or given.get("base_url")
        base_url: str | None = None
        if address is not None:
            url = _base_url(prefix, vendor, address)
            if isinstance(url, _Unusable):
                self._left_out(item, f"{address.path.rpartition('.')[2]} {url.reason}")
                return None
            base_url = url
        elif vendor.address is not None:
            base_url = f"{{{vendor.address}}}{vendor.suffix}"
        elif vendor.profile is None and vendor.base_url is None:
            self._left_out(item, f"{prefix}/ without api_base: there is no address")
            return None
        token = given.get("azure_ad_token") if prefix == "azure" and "api_key" not in given else None
        credential = _credential(token or given.get("api_key"))
        headers = self._headers(given)
        profile = self._profile(vendor, base_url)
        base_url = base_url or vendor.base_url
        identity = (vendor.profile or prefix, base_url, credential, token is not None, tuple(sorted(headers.items())))
        provider = self._providers.get(identity)
        if provider is None:
            provider = self._new_provider(prefix, vendor, base_url, profile, credential, headers)
            if token is not None:
                provider.auth_header = "authorization"
            self._providers[identity] = provider
        if address is not None and id(address) not in self._told:
            kept = (base_url or "").replace("{", "").replace("}", "")
            self._carried(
                address, f"base_url of [providers.{provider.id}]" + ("" if "{" in (base_url or "") else f": {kept}")
            )
        key_node = token or given.get("api_key")
        if key_node is not None and id(key_node) not in self._told:
            self._told.add(id(key_node))
            provider.keys.append(key_node)
        return provider

    def _profile(self, vendor: Vendor, base_url: str | None) -> Mapping[str, Any]:
        """The shipped profile; none for a server that only speaks like OpenAI's."""
        if vendor.profile is None:
            return {}
        profile = self._shipped[vendor.profile]
        if vendor.profile == "openai" and base_url is not None and not base_url.startswith(profile["base_url"]):
            return {}
        return profile

    def _new_provider(
        self,
        prefix: str,
        vendor: Vendor,
        base_url: str | None,
        profile: Mapping[str, Any],
        credential: _Credential,
        headers: dict[str, str],
    ) -> _Provider:
        wanted = vendor.profile if profile and vendor.profile else re.sub(r"[^A-Za-z0-9]+", "_", prefix)
        template = base_url or profile["base_url"]
        origin = None if "{" in template else normalised_endpoint(template)
        if not profile and vendor.base_url != base_url and origin is not None:
            host = re.sub(r"[^A-Za-z0-9]+", "_", origin.partition("://")[2]).strip("_")
            wanted = f"{wanted}_{host}"[:60]
        elif not profile and wanted in self._shipped:
            wanted = f"{wanted}_server"
        taken = {provider.id for provider in self._providers.values()} | (set() if profile else set(self._shipped))
        made = wanted
        number = 2
        while made in taken:
            made, number = f"{wanted}_{number}", number + 1
        same = [p for p in self._providers.values() if p.origin == origin]
        shares = origin is not None and all(p.credential == credential and p.headers == headers for p in same)
        return _Provider(
            id=made,
            profile=profile,
            base_url=base_url,
            credential=credential,
            vendor=vendor,
            headers=headers,
            origin=origin,
            group="" if shares else made,
            told=prefix,
            keys=[],
        )

    def _headers(self, given: Mapping[str, Node]) -> dict[str, str]:
        found: dict[str, str] = {}
        organization = given.get("organization")
        if organization is not None and id(organization) not in self._told:
            if (
                isinstance(organization.value, str)
                and _variable(organization) is None
                and _sendable(organization.value)
            ):
                self._carried(organization, "header OpenAI-Organization of the provider")
            else:
                self._left_out(organization, "one provider for each organization: write the header OpenAI-Organization")
        if organization is not None and _variable(organization) is None and _sendable(organization.value):
            found["OpenAI-Organization"] = str(organization.value)
        for name in ("extra_headers", "headers"):
            node = given.get(name)
            for header, child in (node.members if node else {}).items():
                fault = None
                if _SECRET.search(header):
                    fault = "may be a secret: not written. Give it by `credentials` and `auth_header` of the provider"
                elif _variable(child) is not None:
                    fault = "a header cannot come from the environment, but for the credential"
                elif not re.fullmatch(r"[A-Za-z0-9-]{1,100}", header) or not _sendable(child.value):
                    fault = "is no header that can be sent"
                if id(child) not in self._told:
                    if fault is not None:
                        self._left_out(child, fault)
                    else:
                        self._carried(child, f"header {header} of the provider")
                if fault is None:
                    found[header] = str(child.value)
        return found

    # ---------------------------------------------------------------- of one deployment

    def _parameters(
        self, params: Node, provider: _Provider, protocol: str | None, given: Mapping[str, Node], *, routes: bool
    ) -> _Deployment:
        made = _Deployment(
            provider=provider, upstream="", settings={}, order=0, weights={}, limits={}, prices={}, node=params
        )
        if protocol is not None:
            made.settings["protocol"] = protocol
        spoken = protocol or str(provider.profile.get("protocol", "chat_completions"))
        for name, node in given.items():
            if id(node) in self._told:
                continue
            if not routes:
                self._left_out(node, "there are no patterns: say it of each model, or of the provider")
            elif name in known.COSTS:
                self._price(node, made)
            elif name in (reads := _PARAMETERS):
                reads[name](self, node, made, spoken)
            elif name in known.FIELDS.get(spoken, frozenset()):
                self._forced(name, node, made)
            elif name in known.FIELDS["chat_completions"]:
                self._left_out(node, f"[providers.{provider.id}] has no field of this name: it speaks {spoken}")
            else:
                self._known("litellm_params", node)
        return made

    def _limit(self, name: str, most: int) -> Callable[[Node, _Deployment], None]:
        def read(node: Node, made: _Deployment) -> None:
            number = self._number(node, least=1, most=most)
            if number is not None:
                made.limits[name] = int(number)
                self._changed(
                    node, f"{name} of the upstream model in the group of {made.provider.id}, over all processes"
                )

        return read

    def _rpm(self, node: Node, made: _Deployment, _spoken: str) -> None:
        self._limit("requests_per_minute", 1_000_000_000)(node, made)
        made.weights["rpm"] = float(made.limits.get("requests_per_minute", 0))

    def _tpm(self, node: Node, made: _Deployment, _spoken: str) -> None:
        self._limit("tokens_per_minute", 1_000_000_000_000)(node, made)
        made.weights["tpm"] = float(made.limits.get("tokens_per_minute", 0))

    def _parallel(self, node: Node, made: _Deployment, _spoken: str) -> None:
        self._limit("concurrency", 100_000)(node, made)

    def _weight(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if not self._draws():
            self._say(Fate.NOT_NEEDED, node, "this routing_strategy does not look at weights")
        elif (number := self._number(node, least=0, most=_HEAVIEST, whole=False)) is not None:
            made.weights["weight"] = float(number)
            self._carried(node, f"weight = {number:g}")

    def _order(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if (number := self._number(node, least=0, most=1_000_000)) is not None:
            made.order = int(number)
            self._carried(node, "the lowest are `providers`, the others `fallback`, in their order")

    def _timeout(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if (seconds := self._seconds(node)) is not None:
            made.settings |= {"execution_limit_s": seconds, "reasoning_execution_limit_s": seconds}
            self._changed(node, f"execution_limit_s = {seconds:g} of the route: for one attempt, queue not included")

    def _stream_timeout(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if (seconds := self._seconds(node)) is not None:
            made.settings["first_byte_s"] = seconds
            self._changed(node, f"first_byte_s = {seconds:g} of the route: until the first content of a stream")

    def _drop(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if (flag := self._flag(node)) is not None:
            made.settings["unsupported"] = "drop" if flag else "refuse"
            self._changed(
                node, f'unsupported = "{made.settings["unsupported"]}" of the route; what was dropped is told'
            )

    def _omit(self, node: Node, made: _Deployment, _spoken: str) -> None:
        names = [str(child.value) for child in node.items]
        kept = sorted({n for n in names if re.fullmatch(r"[a-z_]{1,64}", n) and n not in known.DECIDED})
        if kept != sorted(names):
            self._left_out(node, "only top-level fields can be omitted, each once: write `omit`")
        else:
            made.settings["omit"] = kept
            self._carried(node, "omit of the route")

    def _default_limit(self, node: Node, made: _Deployment, spoken: str) -> None:
        if spoken != "anthropic_messages":
            self._known("litellm_params", node)
        elif (number := self._number(node, least=1, most=10_000_000)) is not None:
            made.settings["default_max_tokens"] = int(number)
            self._carried(node, f"default_max_tokens = {int(number)} of the route")

    def _version(self, node: Node, made: _Deployment, _spoken: str) -> None:
        if made.provider.vendor.profile == "azure":
            self._say(Fate.NOT_NEEDED, node, "Azure's v1 API has no versions")
        else:
            self._left_out(node, "there is no parameter of the URL")

    def _extra_body(self, node: Node, made: _Deployment, spoken: str) -> None:
        for name, child in node.members.items():
            if spoken not in known.FIELDS:
                self._left_out(child, f"the body for {spoken} is the gateway's own")
            else:
                self._forced(name, child, made)

    def _forced(self, name: str, node: Node, made: _Deployment) -> None:
        value = node.plain()
        if name in known.DECIDED:
            self._left_out(node, "is the gateway's to decide")
        elif not re.fullmatch(r"[A-Za-z0-9_]{1,64}", name) or not _writable(value):
            self._left_out(
                node, "cannot be written, as it is null, from the environment, no number, or may be a secret"
            )
        else:
            made.settings.setdefault("force", {})[name] = value
            self._changed(node, f"force.{name} of the route: always sent, also where the caller gives another value")

    def _price(self, node: Node, made: _Deployment) -> None:
        name = known.COSTS[node.path.rpartition(".")[2]]
        value = _decimal(node)
        amount = None if value is None else (value * 1_000_000).normalize()
        if amount is None or not 0 <= amount < 1_000_000_000 or -int(amount.as_tuple().exponent) > 12:
            self._left_out(node, "is no amount of USD that a price can have")
            return
        if name in made.prices and made.prices[name] != amount:
            self._left_out(node, "is given twice, and otherwise")
            return
        made.prices[name] = amount
        self._told.add(id(node))
        self._costs.append((node, made))

    def _info(self, item: Node, made: _Deployment) -> None:
        info = item.get("model_info")
        cannot: list[str] = []
        can: list[str] = []
        for name, node in (info.members if info else {}).items():
            if name in known.COSTS:
                self._price(node, made)
            elif name in known.CAPABILITIES and isinstance(node.value, bool):
                (can if node.value else cannot).append(known.CAPABILITIES[name])
                self._carried(node, f"{'can' if node.value else 'cannot'} of the route: {known.CAPABILITIES[name]}")
            elif name == "max_output_tokens":
                if (number := self._number(node, least=1, most=10_000_000)) is not None:
                    made.settings["max_output_tokens"] = int(number)
                    self._changed(node, "max_output_tokens of the route: bounds a cost that is not known")
            elif name == "mode":
                self._say(Fate.NOT_NEEDED, node, "the endpoint says so")
            elif name == "id":
                self._say(Fate.NOT_NEEDED, node, "a route has an id of its own, see `tollbridge check`")
            else:
                self._known("model_info", node)
        if cannot:
            made.settings["cannot"] = sorted(cannot)
        if can:
            made.settings["can"] = sorted(can)

    # ---------------------------------------------------------------- models among each other

    def _aliases(self) -> dict[str, str]:
        """Other names of models that were carried over."""
        found: dict[str, str] = {}
        node = self._of_router("model_group_alias")
        for name, child in (node.members if node else {}).items():
            target = child.get("model") or child
            if not isinstance(target.value, str):
                self._left_out(child, "is no name of a model")
            elif target.value not in self._models:
                self._left_out(child, "no model of this name was carried over")
            elif name in self._models:
                self._left_out(child, f"there is a model called {_shown(name)}, which wins")
            elif not _NAME.fullmatch(name) or not name.isprintable():
                self._left_out(child, "a model's name has 1 to 200 characters and no spaces")
            else:
                found[name] = target.value
                self._carried(target, f"[models.{key(name)}], with the same routes")
                if (hidden := child.get("hidden")) is not None:
                    self._left_out(hidden, "GET /v1/models lists every model that the key may have")
        return found

    def _fallbacks(self) -> dict[str, list[str]]:
        """By model, the models whose routes follow on its own."""
        found: dict[str, list[str]] = {}
        everybody: list[str] = []
        aliases = self._router.get("model_group_alias") or self._settings.get("model_group_alias")
        names = {name: child.get("model") or child for name, child in (aliases.members if aliases else {}).items()}
        node = self._of_router("fallbacks")
        for item in node.items if node else []:
            for name, listed in item.members.items():
                if name != "*" and name not in self._models:
                    self._left_out(listed, f"no model called {_shown(name)} was carried over")
                    continue
                into = everybody if name == "*" else found.setdefault(name, [])
                self._fall_back(listed, "all others" if name == "*" else name, into, names)
        node = self._of_router("default_fallbacks")
        if node is not None:
            self._fall_back(node, "all others", everybody, names)
        for name in self._models:
            others = [other for other in everybody if other != name]
            if name not in found and others:
                found[name] = others
        return found

    def _fall_back(self, listed: Node, of: str, into: list[str], aliases: Mapping[str, Node]) -> None:
        for child in listed.items:
            name = child.text
            if name is not None and name not in self._models and name in aliases:
                name = aliases[name].text
            if name is None or name not in self._models:
                self._left_out(child, "no model of this name was carried over")
            elif name == of or name in into:
                self._left_out(child, "is tried already")
            else:
                into.append(name)
                self._carried(child, f"fallback of {_shown(of)}: its routes are tried after the model's own")

    def _variables(self) -> dict[str, list[str]]:
        """By provider, the variables that have its key."""
        found: dict[str, list[str]] = {}
        clear: list[_Provider] = []
        for provider in self._providers.values():
            kind, name = provider.credential
            if kind == "variable" and _good_variable(name):
                found[provider.id] = [name]
            elif kind in ("variable", "clear"):
                clear.append(provider)
            elif kind == "none":
                found[provider.id] = []
            elif provider.vendor.profile == "openai" and not provider.profile:
                found[provider.id] = []
                self._added(
                    f"[providers.{provider.id}] gets no key. LiteLLM sends it OPENAI_API_KEY: write `credentials` "
                    "if it wants one"
                )
            else:
                found[provider.id] = _each(provider.vendor.keys, provider.profile.get("credentials", ()))
        taken = {name for names in found.values() for name in names}
        for provider in clear:
            wanted = f"{provider.id.upper()}_API_KEY"
            made, number = wanted, 2
            while made in taken:
                made, number = f"{wanted}_{number}", number + 1
            taken.add(made)
            found[provider.id] = [made]
        for provider in self._providers.values():
            kind, name = provider.credential
            for node in provider.keys:
                if provider in clear and kind == "clear":
                    put = f"put it into {found[provider.id][0]}"
                    self._changed(node, f"a key in clear, not written: {put}. It stood in a file: replace it")
                elif provider in clear:
                    self._changed(node, f"no name for a variable: put its value into {found[provider.id][0]}")
                elif kind == "none":
                    self._carried(node, f"[providers.{provider.id}] gets no key")
                else:
                    self._carried(node, f"credentials of [providers.{provider.id}]: {name}")
        return found

    def _groups(self, breaker: Mapping[str, Any]) -> list[str]:
        default = self._default_parallel()
        members: dict[str, list[_Deployment]] = {}
        for provider in self._providers.values():
            members.setdefault(provider.group or provider.origin or provider.id, [])
        for deployments in self._models.values():
            for made in deployments:
                if default is not None:
                    made.limits.setdefault("concurrency", default)
                members[made.provider.group or made.provider.origin or made.provider.id].append(made)
        lines: list[str] = []
        for name, deployments in members.items():
            limits: dict[str, _Limits] = {}
            for made in deployments:
                into = limits.setdefault(made.upstream, {})
                for limit, number in made.limits.items():
                    into[limit] = into.get(limit, 0) + number
            parallel = sum(min(100_000, each.get("concurrency", 0)) for each in limits.values())
            limited = bool(limits) and all("concurrency" in made.limits for made in deployments)
            concurrency = min(100_000, parallel if limited else max(CONCURRENCY, parallel))
            if not limited:
                self._added(
                    f"[groups.{key(name)}] concurrency = {concurrency}: LiteLLM has no limit there. Write what the "
                    "provider allows you"
                )
            lines += _table(f"groups.{key(name)}", {"concurrency": concurrency, "queue": QUEUE, **breaker})
            for upstream, each in limits.items():
                if each:
                    capped = {limit: min(number, _MOST_OF[limit]) for limit, number in each.items()}
                    lines += _table(f"groups.{key(name)}.models.{key(upstream)}", capped)
        return lines

    def _default_parallel(self) -> int | None:
        found: int | None = None
        for node in (self._router.get("default_max_parallel_requests"), self._general.get("max_parallel_requests")):
            if node is None:
                continue
            if found is not None:
                self._left_out(node, "router_settings has one, too, and wins")
            elif (number := self._number(node, least=1, most=100_000)) is not None:
                found = int(number)
                self._changed(node, "concurrency of each upstream model without one of its own, over all processes")
        return found

    # ---------------------------------------------------------------- what is written

    def _written_providers(
        self, clocks: Mapping[str, float], drops: bool, variables: Mapping[str, list[str]]
    ) -> Iterator[str]:
        for provider in self._providers.values():
            shipped = self._shipped.get(provider.id, {})
            said: dict[str, Any] = {}
            if provider.profile and not shipped:
                skipped = {"name", "credentials", "free", "free_source"}
                if not provider.any_model:
                    skipped.add("models")
                if provider.base_url not in (None, provider.profile["base_url"]):
                    skipped |= {name for name in provider.profile if name.startswith(("cancel_", "check_", "requires"))}
                said = {name: item for name, item in provider.profile.items() if name not in skipped}
            elif not provider.profile:
                said = {"protocol": "chat_completions", **_UNKNOWN_CLOCKS}
            if provider.base_url is not None and provider.base_url != shipped.get("base_url"):
                said["base_url"] = provider.base_url
                if "requires" in shipped:
                    # Variables of the address that it had.
                    said["requires"] = []
            if variables[provider.id] != shipped.get("credentials", []):
                said["credentials"] = variables[provider.id]
            if provider.auth_header is not None:
                said["auth_header"] = provider.auth_header
            if provider.headers:
                said["headers"] = provider.headers
            if provider.group:
                said["group"] = provider.group
            said |= clocks
            if drops:
                said["unsupported"] = "drop"
            yield from _table(f"providers.{key(provider.id)}", said, f"LiteLLM: {provider.told}/", empty=True)

    def _written_models(
        self,
        fallbacks: Mapping[str, Sequence[str]],
        order: str,
        aliases: Mapping[str, str],
        routing: dict[str, Any],
    ) -> Iterator[str]:
        most = 0
        for name, of in [*((name, name) for name in self._models), *aliases.items()]:
            deployments = sorted(self._models[of], key=lambda made: made.order)
            first = [made for made in deployments if made.order == deployments[0].order]
            weights = _weights(first) if self._draws() else None
            self._never_drawn(first, weights)
            targets = _distinct(_targets(first, weights))
            later = [*_targets(deployments[len(first) :])]
            for other in fallbacks.get(of, ()):
                later += _targets(sorted(self._models[other], key=lambda made: made.order))
            following = _distinct(later, targets)
            said: dict[str, Any] = {"providers": targets}
            if following:
                said["fallback"] = following
            if len(targets) > 1:
                said["order"] = order
            most = max(most, len(targets) + len(following))
            yield from _table(f"models.{key(name)}", said)
        if most > 3:
            routing["most_routes"] = min(_MOST_ROUTES, most)
            self._added(f"routing.most_routes = {routing['most_routes']}: so that every route of a model is tried")
            if "most_attempts" not in routing and most > 6:
                routing["most_attempts"] = routing["most_routes"]

    def _never_drawn(self, deployments: Sequence[_Deployment], weights: Sequence[float | None] | None) -> None:
        """A weight of 0 that nobody wrote is told of."""
        for made, weight in zip(deployments, weights or (), strict=False):
            if weight == 0 and made.weights.get("weight") is None and id(made.node) not in self._told:
                self._changed(
                    made.node,
                    "weight = 0, so it is tried last: LiteLLM draws by the weight, or requests or tokens per minute, "
                    "that others of this model have. Write a weight if it is to have a share",
                )

    def _prices(self) -> None:
        """A route has one price, whatever name it is asked for by."""
        seen: dict[tuple[str, str], dict[str, Decimal]] = {}
        for made in (made for deployments in self._models.values() for made in deployments):
            if not made.prices:
                continue
            fault = None
            if not {"input", "output"} <= set(made.prices):
                fault = "a price wants the costs of input and of output tokens. Write `price`"
            elif seen.setdefault((made.provider.id, made.upstream), made.prices) != made.prices:
                fault = "the same provider and upstream model has another price before"
            for node, of in self._costs:
                if of is not made:
                    continue
                if fault is None:
                    self._carried(node, "price of the route, USD per million tokens")
                else:
                    self._left_out(node, fault)
            if fault is not None:
                made.prices = {}


_Reader: TypeAlias = Callable[[_Import, Node, _Deployment, str], None]
_PARAMETERS: Final[Mapping[str, _Reader]] = {
    "rpm": _Import._rpm,  # noqa: SLF001  its own table
    "tpm": _Import._tpm,  # noqa: SLF001
    "max_parallel_requests": _Import._parallel,  # noqa: SLF001
    "weight": _Import._weight,  # noqa: SLF001
    "order": _Import._order,  # noqa: SLF001
    "timeout": _Import._timeout,  # noqa: SLF001
    "stream_timeout": _Import._stream_timeout,  # noqa: SLF001
    "drop_params": _Import._drop,  # noqa: SLF001
    "additional_drop_params": _Import._omit,  # noqa: SLF001
    "max_tokens": _Import._default_limit,  # noqa: SLF001
    "max_completion_tokens": _Import._default_limit,  # noqa: SLF001
    "api_version": _Import._version,  # noqa: SLF001
    "extra_body": _Import._extra_body,  # noqa: SLF001
}
#: Strategies of LiteLLM that do not draw by weight.
_NOT_DRAWN: Final = frozenset(
    {
        "least-busy",
        "usage-based-routing",
        "usage-based-routing-v2",
        "latency-based-routing",
        "cost-based-routing",
    }
)
_PARTS: Final = tuple(known.COSTS.values())
_MOST_OF: Final = {"concurrency": 100_000, "requests_per_minute": 1_000_000_000, "tokens_per_minute": 1_000_000_000_000}


def _targets(deployments: Sequence[_Deployment], weights: Sequence[float | None] | None = None) -> list[dict[str, Any]]:
    return [
        {
            "provider": made.provider.id,
            "model": made.upstream,
            **({} if weight is None else {"weight": weight}),
            **made.settings,
            **({"price": {part: made.prices[part] for part in _PARTS if part in made.prices}} if made.prices else {}),
        }
        for made, weight in zip(deployments, weights or [None] * len(deployments), strict=True)
    ]


def _weights(deployments: Sequence[_Deployment]) -> list[float | None]:
    """As LiteLLM draws: by weight, else by requests, else by tokens in a minute; who has none of it is not drawn."""
    for kind in ("weight", "rpm", "tpm"):
        given = [made.weights.get(kind, 0.0) for made in deployments]
        if any(given) and (kind == "weight" or len(deployments) > 1):
            scale = max(given) / _HEAVIEST if max(given) > _HEAVIEST else 1.0
            return [_plain(share / scale) for share in given]
    return [None] * len(deployments)


def _distinct(targets: Iterable[dict[str, Any]], beside: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """A route once. What is there twice has the weight of both."""
    kept: list[dict[str, Any]] = []
    seen = [_route(target) for target in beside]
    for target in targets:
        route = _route(target)
        if route not in seen:
            seen.append(route)
            kept.append(target)
            continue
        twin = next((other for other in kept if _route(other) == route), None)
        if twin is not None and not beside and "weight" in twin:
            twin["weight"] = _plain(min(_HEAVIEST, twin["weight"] + target.get("weight", 0)))
    return kept


def _route(target: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in target.items() if name not in ("weight", "price")}


def _plain(number: float) -> float:
    rounded = round(number, 6)
    return int(rounded) if rounded == int(rounded) else rounded


class _Unusable(msgspec.Struct, frozen=True):
    """An address that cannot be taken, and why."""

    reason: str


def _base_url(prefix: str, vendor: Vendor, node: Node) -> str | _Unusable:
    """What our base URL is for LiteLLM's `api_base`."""
    if (name := _variable(node)) is not None:
        if not _good_variable(name):
            return _Unusable("names no variable that could be set")
        return f"{{{name}}}{vendor.suffix}"
    url = node.text or ""
    if not url.isascii() or not url.isprintable() or set(url) & set("{} \"'<>\\^`|"):
        return _Unusable("is no URL")
    try:
        normalised_endpoint(url)
    except ValueError as error:
        return _Unusable(str(error))
    url = url.rstrip("/")
    for end in ("/chat/completions", "/messages"):
        url = url.removesuffix(end)
    if prefix == "azure":
        url = url.partition("/openai")[0]
    if vendor.suffix and not url.endswith(vendor.suffix):
        url += vendor.suffix
    return url


def _credential(node: Node | None) -> _Credential:
    if node is None or node.value is None:
        return ("default", "")
    if (name := _variable(node)) is not None:
        return ("variable", name)
    return ("none", "") if node.raw.strip().lower() in _NO_KEY else ("clear", node.raw)


def _variable(node: Node) -> str | None:
    """The variable that a value is to come from."""
    return node.raw.removeprefix(_ENVIRONMENT) if node.raw.startswith(_ENVIRONMENT) else None


def _good_variable(name: str) -> bool:
    """One that the configuration takes: it refuses what looks like a secret."""
    return _VARIABLE.fullmatch(name) is not None and (len(name) < 20 or name == name.upper())


def _decimal(node: Node) -> Decimal | None:
    """An exact number. YAML takes 1e-6 for text."""
    if isinstance(node.value, bool) or not isinstance(node.value, int | float | str):
        return None
    try:
        found = Decimal(node.raw.strip().replace("_", ""))
    except InvalidOperation:
        return None
    # The exponent first: written out, 1e999999999 would fill the memory.
    return found if found.is_finite() and -40 < found.adjusted() < 40 else None


def _writable(content: object, depth: int = 0) -> bool:
    """Whether a value may stand in the file: nothing that TOML or JSON cannot say, and nothing that may be a secret."""
    match content:
        case bool():
            return True
        case int():
            return abs(content) < 2**53
        case float():
            return math.isfinite(content)
        case str():
            return content.replace("\n", "").replace("\t", "").isprintable() and not content.startswith(_ENVIRONMENT)
        case list():
            return depth < 8 and all(_writable(child, depth + 1) for child in content)
        case dict():
            return depth < 8 and all(
                isinstance(name, str)
                and name.isprintable()
                and not _SECRET.search(name)
                and _writable(child, depth + 1)
                for name, child in content.items()
            )
        case _:
            return False


def _sendable(content: object) -> bool:
    """As the value of a header."""
    return isinstance(content, str) and content.isascii() and content.isprintable() and len(content) <= 1000


def _table(name: str, content: Mapping[str, Any], comment: str = "", *, empty: bool = False) -> list[str]:
    if not content and not empty:
        return []
    lines = ["", f"[{name}]{f'  # {_comment(comment)}' if comment else ''}"]
    for member, item in content.items():
        if isinstance(item, list) and any(isinstance(child, dict) for child in item):
            lines += [f"{key(member)} = [", *(f"    {value(child)}," for child in item), "]"]
        else:
            lines.append(entry(member, item))
    return lines


def _comment(said: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in said)


def _shown(name: str) -> str:
    return repr(name[:100])


def _raw(node: Node | None) -> str | None:
    return None if node is None else node.raw


def _each(*lists: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children():
        yield from _walk(child)
