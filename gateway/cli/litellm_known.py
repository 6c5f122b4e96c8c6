"""
What is known of LiteLLM's configuration: who its providers are, and which of its settings have no place here, and why.

Data only. The fields are those of LiteLLM's documentation, https://docs.litellm.ai/docs/proxy/config_settings, its
providers those of https://docs.litellm.ai/docs/providers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec


class Vendor(msgspec.Struct, frozen=True, kw_only=True):
    """How LiteLLM reaches a provider: what stands before the slash of its `model`."""

    #: The shipped profile of the same provider; None: protocol and URL are here.
    profile: str | None = None
    base_url: str | None = None
    #: The variables that LiteLLM reads where the file has no key and no address.
    keys: tuple[str, ...] = ()
    address: str | None = None
    #: What our base URL has after LiteLLM's `api_base`.
    suffix: str = ""


_COMPATIBLE: Final = Vendor()
#: https://docs.litellm.ai/docs/providers: those that speak one of our protocols.
VENDORS: Final[Mapping[str, Vendor]] = {
    "openai": Vendor(profile="openai", keys=("OPENAI_API_KEY",)),
    "azure": Vendor(profile="azure", keys=("AZURE_API_KEY",), address="AZURE_API_BASE", suffix="/openai/v1"),
    "anthropic": Vendor(profile="anthropic", keys=("ANTHROPIC_API_KEY",), suffix="/v1"),
    "gemini": Vendor(profile="gemini", keys=("GEMINI_API_KEY", "GOOGLE_API_KEY")),
    "groq": Vendor(profile="groq", keys=("GROQ_API_KEY",)),
    "openrouter": Vendor(profile="openrouter", keys=("OPENROUTER_API_KEY",)),
    "together_ai": Vendor(profile="together", keys=("TOGETHERAI_API_KEY", "TOGETHER_API_KEY")),
    "mistral": Vendor(profile="mistral", keys=("MISTRAL_API_KEY",)),
    "deepseek": Vendor(profile="deepseek", keys=("DEEPSEEK_API_KEY",)),
    "cerebras": Vendor(profile="cerebras", keys=("CEREBRAS_API_KEY",)),
    "xai": Vendor(profile="xai", keys=("XAI_API_KEY",)),
    "nvidia_nim": Vendor(profile="nvidia", keys=("NVIDIA_NIM_API_KEY", "NVIDIA_API_KEY")),
    "cloudflare": Vendor(profile="workers_ai", keys=("CLOUDFLARE_API_KEY", "CLOUDFLARE_API_TOKEN")),
    "ollama": Vendor(profile="ollama", suffix="/v1"),
    "ollama_chat": Vendor(profile="ollama", suffix="/v1"),
    "hosted_vllm": Vendor(profile="vllm", keys=("HOSTED_VLLM_API_KEY",), address="HOSTED_VLLM_API_BASE"),
    "vllm": Vendor(profile="vllm"),
    "fireworks_ai": Vendor(base_url="https://api.fireworks.ai/inference/v1", keys=("FIREWORKS_API_KEY",)),
    "perplexity": Vendor(base_url="https://api.perplexity.ai", keys=("PERPLEXITYAI_API_KEY",)),
    "deepinfra": Vendor(base_url="https://api.deepinfra.com/v1/openai", keys=("DEEPINFRA_API_KEY",)),
    "sambanova": Vendor(base_url="https://api.sambanova.ai/v1", keys=("SAMBANOVA_API_KEY",)),
    "moonshot": Vendor(base_url="https://api.moonshot.ai/v1", keys=("MOONSHOT_API_KEY",)),
    "custom_openai": _COMPATIBLE,
    "openai_like": _COMPATIBLE,
    "litellm_proxy": _COMPATIBLE,
    "lm_studio": _COMPATIBLE,
    "llamafile": _COMPATIBLE,
    "xinference": _COMPATIBLE,
}
UNSPOKEN: Final[Mapping[str, str]] = {
    "bedrock": "its requests are signed with AWS keys, which is not spoken here. Amazon's OpenAI-compatible endpoint "
    "takes an API key: give that as a provider of protocol chat_completions",
    "sagemaker": "its requests are signed with AWS keys, which is not spoken here",
    "sagemaker_chat": "its requests are signed with AWS keys, which is not spoken here",
    "vertex_ai": "it wants Google Cloud credentials, which are not spoken here. With an API key of Google AI Studio "
    "the shipped provider `gemini` serves the same models",
    "vertex_ai_beta": "it wants Google Cloud credentials, which are not spoken here",
    "text-completion-openai": "the old completions API is not served here: ask for chat/completions",
}
#: How LiteLLM knows a provider by the model alone.
INFERRED: Final = (
    (re.compile(r"(gpt-|o[134](-|$)|chatgpt-|text-embedding-|ft:gpt-)"), "openai"),
    (re.compile(r"claude-"), "anthropic"),
)
#: What LiteLLM has between the provider and the model's name, and the protocol that it asks for.
INFIXES: Final[Mapping[str, Mapping[str, str | None]]] = {
    "openai": {"responses": "responses"},
    "azure": {"responses": "responses", "o_series": None, "gpt5_series": None},
}

#: Top-level request fields that may be forced, by protocol: those that mean the same in the body that is sent.
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "chat_completions": frozenset(
        {
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "parallel_tool_calls",
            "user",
            "store",
            "response_format",
        }
    ),
    "responses": frozenset({"temperature", "top_p", "service_tier", "parallel_tool_calls", "user", "store"}),
    "anthropic_messages": frozenset({"temperature", "top_p", "top_k", "thinking"}),
}
CAPABILITIES: Final = {
    "supports_function_calling": "tools",
    "supports_vision": "images",
    "supports_pdf_input": "documents",
    "supports_audio_input": "audio",
    "supports_response_schema": "json_schema",
    "supports_reasoning": "reasoning",
}
#: LiteLLM's names for what a token costs, USD each, and ours, USD per million.
COSTS: Final = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write_5m",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "output_cost_per_reasoning_token": "reasoning",
}
#: What a named credential may hold that is read.
OF_CREDENTIALS: Final = frozenset({"api_key", "api_base", "base_url", "api_version", "organization", "azure_ad_token"})
CHAT_MODES: Final = frozenset({"chat", "completion", "responses", "embedding"})

_LISTENERS: Final = "calls are told in the log and in the ledger, and to no other service"
_NO_CACHE: Final = "answers are not cached. A call repeated under its Idempotency-Key gets the answer that was kept"
_NO_PROXY_ADMIN: Final = "keys are made with `tollbridge keys`; there is no user interface and no login"
#: What is known and has no place here: by section and key, the reason and what to do.
REASONS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "guardrails": "there are no guardrails: put them before the gateway",
        "mcp_servers": "the gateway serves models, not tools",
        "mcp_tools": "the gateway serves models, not tools",
        "callback_settings": _LISTENERS,
        "vector_store_registry": "there are no vector stores",
        "prompts": "there are no prompt templates",
        "finetune_settings": "there is no fine-tuning",
        "files_settings": "files and batches are kept in the gateway's own database",
        "search_tools": "the gateway serves models, not tools",
        "assistant_settings": "there is no Assistants API",
    },
    "litellm_settings": {
        **dict.fromkeys(("callbacks", "success_callback", "failure_callback", "service_callbacks"), _LISTENERS),
        **dict.fromkeys(("langfuse_default_tags", "redact_user_api_key_info", "s3_callback_params"), _LISTENERS),
        **dict.fromkeys(("cache", "cache_params", "enable_caching_on_provider_specific_optional_params"), _NO_CACHE),
        "context_window_fallbacks": "a request that is too long is not sent elsewhere: its refusal has the code "
        "context_length_exceeded, on which clients decide",
        "content_policy_fallbacks": "a refusal for its content is final and is not tried elsewhere",
        "max_budget": "give each key a budget of its own",
        "budget_duration": "give each key a budget of its own",
        "ssl_verify": "certificates of providers are always verified",
        "modify_params": "messages are sent as they came",
        "key_generation_settings": _NO_PROXY_ADMIN,
        "default_internal_user_params": _NO_PROXY_ADMIN,
        "upperbound_key_generate_params": _NO_PROXY_ADMIN,
        "custom_provider_map": "a provider of your own needs one of the wire protocols, see docs/protocols.md",
        "force_ipv4": "the system's resolver decides",
    },
    "router_settings": {
        **dict.fromkeys(
            ("redis_host", "redis_port", "redis_password", "redis_db", "redis_url", "cache_kwargs", "cache_responses"),
            "processes share their state through PostgreSQL: there is no Redis",
        ),
        "context_window_fallbacks": "a request that is too long is not sent elsewhere: its refusal has the code "
        "context_length_exceeded, on which clients decide",
        "content_policy_fallbacks": "a refusal for its content is final and is not tried elsewhere",
        "max_fallbacks": "routing.most_routes bounds how many routes are tried",
        "retry_policy": "which failures are tried again follows from what they are",
        "model_group_retry_policy": "which failures are tried again follows from what they are",
        "allowed_fails_policy": "which failures count for the breaker follows from what they are",
        "disable_cooldowns": "a breaker cannot be switched off. Raise failure_threshold of the group",
        "routing_strategy_args": "the strategies here take no arguments",
        "default_litellm_params": "write `force` into the provider",
        "enable_tag_filtering": "routes have no tags. A call may name allowed_providers and allowed_models",
        "tag_filtering_match_any": "routes have no tags. A call may name allowed_providers and allowed_models",
        "provider_budget_config": "budgets are those of keys",
        "default_priority": "a call has a class, `interactive` or `batch`",
        "retry_after": "routing.backoff_s says how long is waited between retries",
    },
    "general_settings": {
        "database_url": "the gateway wants a database of its own, in TOLLBRIDGE_DATABASE_URL; none: an embedded one. "
        "Keys and spend in LiteLLM's are not read: make keys anew with `tollbridge keys`",
        **dict.fromkeys(
            ("database_connection_pool_limit", "database_connection_timeout", "allow_requests_on_db_unavailable"),
            "the gateway's own: without its database nothing is dispatched",
        ),
        **dict.fromkeys(
            (
                "store_model_in_db",
                "ui_access_mode",
                "litellm_license",
                "enable_jwt_auth",
                "litellm_jwtauth",
                "custom_auth",
                "custom_sso",
                "custom_key_generate",
                "allow_user_auth",
                "key_management_system",
                "key_management_settings",
            ),
            _NO_PROXY_ADMIN,
        ),
        **dict.fromkeys(("alerting", "alert_types", "alerting_threshold", "alerting_args"), "there are no alerts"),
        **dict.fromkeys(
            ("background_health_checks", "health_check_interval"),
            "providers are judged by the calls they serve; `tollbridge check --live` asks them",
        ),
        "global_max_parallel_requests": "there is a limit for each endpoint, and none over all of them",
        "pass_through_endpoints": "there are no endpoints that pass through",
        "forward_client_headers_to_llm_api": "of a caller's headers none but `anthropic-beta` reaches a provider",
        "completion_model": "a call names its model, or a role",
        "allow_client_side_credentials": "a caller can name no key and no address of a provider",
        "max_request_size_mb": "a body has at most 32 MiB",
        "max_response_size_mb": "an answer has at most 32 MiB",
    },
    "litellm_params": {
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens"),
            "here it would be forced on callers who give their own. Set it in the clients",
        ),
        **dict.fromkeys(("num_retries", "max_retries"), "retries are the same for all models: routing.backoff_s"),
        "tags": "routes have no tags. A call may name allowed_providers and allowed_models",
        "mock_response": "`tollbridge simulate` is a provider that makes up its answers",
        "max_budget": "budgets are those of keys",
        "budget_duration": "budgets are those of keys",
        "cache_control_injection_points": "messages are sent as they came",
        "azure_ad_token": "the api_key is used",
        "azure_scope": "a token of Entra ID is not fetched here. Use an API key",
        "tenant_id": "a token of Entra ID is not fetched here. Use an API key",
        "client_id": "a token of Entra ID is not fetched here. Use an API key",
        "client_secret": "a token of Entra ID is not fetched here. Use an API key",
        "configurable_clientside_auth_params": "a caller can name no key and no address of a provider",
    },
    "model_info": {
        "access_groups": "a key has a list of the models that it may use",
        "base_model": "the price of a deployment that has a name of your own is yours to state: price of the model",
        "team_id": "there are no teams: a key has a list of the models that it may use",
        "max_tokens": "the sizes of known models come from the price list",
        "max_input_tokens": "the sizes of known models come from the price list",
    },
}
#: What is so here without being asked.
NEEDLESS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {},
    "litellm_settings": {
        "set_verbose": "the log is what it is",
        "json_logs": "the log is JSON",
        "turn_off_message_logging": "no message and no answer is ever in the log",
        "telemetry": "there is none",
        "enable_json_schema_validation": "requests are checked before they are sent",
    },
    "router_settings": {
        "enable_pre_call_checks": "routes that cannot serve a request are left out before it is sent",
        "enable_pre_call_check": "routes that cannot serve a request are left out before it is sent",
        "set_verbose": "the log is what it is",
        "debug_level": "the log is what it is",
        "client_ttl": "connections are kept as long as they are good",
    },
    "general_settings": {
        "proxy_batch_write_at": "each call is settled in its own transaction",
        "disable_spend_logs": "the ledger is part of the settlement",
        "store_prompts_in_spend_logs": "no message and no answer is in the ledger",
        "disable_master_key_return": "no secret is told twice",
        "disable_adding_master_key_hash_to_db": "keys are kept as digests",
    },
    "litellm_params": {
        "stream": "the caller says so",
        "api_type": "the provider says so",
        "use_in_pass_through": "there are no endpoints that pass through",
    },
    "model_info": {
        "description": "it is for people",
        "db_model": "models are configured in the file",
    },
}
#: What a profile may neither force nor omit.
DECIDED: Final = frozenset({"model", "messages", "stream", "input", "contents"})
