"""What of a provider's own words reaches the caller: what helps to mend the request, and nothing that tells of us."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.classify import told, words_for_the_caller
from adapters.errors import Broken, ErrorClass, Rejected
from adapters.protocols import PROTOCOLS

KEY = "sk-proj-Canary0123456789abcdefghij"
BODIES = {
    "chat_completions": {"error": {"message": "WORDS", "type": "invalid_request_error", "code": "x", "param": "n"}},
    "responses": {"error": {"message": "WORDS", "type": "invalid_request_error", "code": "x", "param": "n"}},
    "anthropic_messages": {"type": "error", "error": {"type": "invalid_request_error", "message": "WORDS"}},
    "gemini": {"error": {"code": 400, "message": "WORDS", "status": "INVALID_ARGUMENT"}},
    "workers_ai": {"success": False, "errors": [{"code": 5004, "message": "WORDS"}], "result": None},
}


@pytest.mark.parametrize(
    "words",
    [
        "Invalid 'messages[0].content': string too long. Expected at most 10485760, but got length 10485761 instead.",
        "This model's maximum context length is 128000 tokens. However, your messages resulted in 150000 tokens.",
        "Invalid value: 'foo'. Supported values are: 'system', 'assistant', 'user', 'function' and 'developer'.",
        "messages.1.content.0: unexpected `tool_use_id` found in `tool_result` blocks",
        "* GenerateContentRequest.contents: contents is not specified",
        "Invalid value for 'text.format.schema.properties.location': expected an object, but got a string instead.",
        "'max_completion_tokens' or 'max_output_tokens' must be at least 16, not 8; see reasoning_budget_tokens.",
        "The model claude-3-5-sonnet-20241022 does not support `thinking.budget_tokens` above 32000.",
        "meta-llama/Llama-3.3-70B-Instruct-Turbo and mistral-small-24b-instruct-2501 take no tools",
        "gpt-4.1-mini-2025-04-14 does not support response_format.type json_schema with this org-wide setting",
        "tools.0.custom.input_schema: JSON schema is invalid. It must match JSON Schema draft 2020-12",
        "Unable to process input image: image/png of 10485760 bytes, 7680x4320, at 2026-11-30 23:15:42",
        "seed must be between -9223372036854775808 and 9223372036854775807",
        "Invalid JSON payload received. Unknown name \"responseMimeType\" at 'generation_config': Cannot find field.",
        "GenerateContentRequest.generation_config.response_schema.properties: should be non-empty for OBJECT type",
        "Unknown parameter: 'parallel_tool_calls'. Did you mean 'disable_parallel_tool_use'?",
        "task-specific and user-provided settings, e.g. proj-wide ones, are team-level (HTTP/1.1 400)",
        "temperature: Input should be less than or equal to 1.0; top_p: 0.95, top_k: 40",
    ],
)
def test_what_helps_to_mend_a_request_is_told_as_it_was_said(words: str) -> None:
    assert told(words_for_the_caller(words) or "", [f"Bearer {KEY}"]) == words


@pytest.mark.parametrize(
    "secret",
    [
        "sk-abc***xyz",
        "org-AbCdEf123456",
        "proj_0123456789",
        "https://internal.example/path?key=canary",
        "postgresql://user:canary@db/x",
        "ops@example.com",
        "10.20.30.40",
        "Bearer canary",
        "AIzaSyCanary-key",
        "gsk_4Canary4Canary4Canary",
        "0123456789abcdef0123456789abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0",
        "****canary",
        # OpenAI, of every age
        "sk-abcdefghijklmnopqrstuv",
        "sk-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv",
        "sk-proj-AbCdEfGhIjKlMnOpQrStUvWxYz_abc-DEF",
        "sk-svcacct-abcdefghijklmnop",
        "sess-AbCdEfGhIjKlMnOpQrSt",
        "org-abcdefghijklmnopqrstu",
        "org-ABCDEFGHIJKLMNOPQRSTUVWX",
        "proj_AbCdEfGhIjKlMnOpQrStUvWx",
        "user-abcdefghijklmnopqrst",
        # Anthropic, Google, Amazon
        "sk-ant-api03-abcdefghijklmnopqrstuvwxyz-ABCDEFG",
        "wrkspc_01JwQvzr7rXLA5AGx3HKfFUJ",
        "AIzaSyabcdefghijklmnopqrstuvwxyzABCDEFG",
        "ya29.abcdefghijklmnopqrstuvwxyz",
        "AKIAABCDEFGHIJKLMNOP",
        "ASIAQWERTYUIOPASDFGH",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "arn:aws:bedrock:us-east-1:123456789012:inference-profile/x",
        "123456789012",
        # Azure, Mistral, Cohere
        "0a1b2c3d4e5f60718293a4b5c6d7e8f9",
        "8xKq2Lm4Nv6Bt9Yw1Zr3Hs5Jd7Fg0Pc2",
        "AbC1dEf2GhI3jKl4MnO5pQr6StU7vWx8YzA9bCd0AAAJQQJ99",
        # Groq, xAI, Hugging Face, GitHub, Slack, NVIDIA, Perplexity, OpenRouter, ours
        "gsk_abcdefghijklmnopqrstuvwxyz",
        "xai-abcdefghijklmnopqrstuvwxyz",
        "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
        "ghp_abcdefghijklmnopqrstuvwxyzABCDEFGHIJ",
        "github_pat_abcdefghijklmnopqrstuv_ABCDEFGH",
        "xoxb-abcdefghijkl-abcdefghijkl",
        "xoxp-1234-5678-abcd",
        "nvapi-abcdefghijklmnop",
        "pplx-abcdefghijklmnop",
        "sk-or-v1-abcdefghijklmnop",
        "tb_abcdefghijklmnop",
        # A token, an id, a word of chance
        "eyJabcdefghijkl.eyJabcdefghijkl.abcdefghijkl-ABCDEF_gh",
        "123e4567-e89b-12d3-a456-426614174000",
        "abcdefab-cdef-abcd-efab-cdefabcdefab",
        "toolu_01A09q90qw90lq917835lq9",
        "req_011CYFmrpsCfZVCj4YKZhnV5",
        "aBcDeFgHiJkLmNoPqRsTuVwX",
        "qwertyuiopasdfghjklzxcvbnm",
        "1a2b3c4d5e6f",
        # Hosts
        "host.internal.corp",
        "llm_backend.prod.internal",
        "vllm.models.svc.cluster.local",
        "vllm.models.svc:8000",
        "ip-10-0-3-4.ec2.internal",
        "my-resource.openai.azure.com",
        "api.acme-gateway.ai:8443/v1/chat",
        "gpu-node-17:8000",
        "localhost:11434",
        "localhost",
        "fe80::1ff:fe23:4567:890a",
    ],
)
def test_what_looks_like_a_key_an_id_or_an_address_is_not(secret: str) -> None:
    for words in (f"it was {secret}", f"it was '{secret}', which is wrong", f"({secret})", secret):
        said = told(words_for_the_caller(words) or "", ())
        assert secret not in said
        assert "canary" not in said.lower()
        assert "[...]" in said


@given(st.text(max_size=1500), st.integers(0, 1500), st.sampled_from([KEY, "plainwordsecret", "two words of one"]))
def test_wherever_a_secret_of_ours_stands_no_beginning_of_it_is_left(text: str, at: int, secret: str) -> None:
    message = text[:at] + " " + secret + " " + text[at:]
    said = told(words_for_the_caller(message) or "", [f"Bearer {secret}", secret])
    assert secret not in said
    assert len(said) <= 300
    assert said.isprintable()
    if secret == KEY:
        assert KEY[:12] not in said


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_where_the_request_is_at_fault_are_there_words_and_never_in_the_message(protocol: str) -> None:
    if protocol not in BODIES:
        pytest.fail(f"{protocol} has no error body here")
    body = json.dumps(BODIES[protocol]).replace("WORDS", "your prompt was: canary").encode()
    seen = set()
    for status in (400, 401, 402, 403, 404, 413, 422, 429, 500, 503, 529):
        error = PROTOCOLS[protocol].parse_error(status, {}, body)
        assert "canary" not in str(error)
        if isinstance(error, Broken):
            continue
        assert isinstance(error, Rejected)
        assert (error.said is not None) == (error.error_class is ErrorClass.FATAL), status
        if error.said is not None:
            assert "your prompt was: canary" in error.said
        seen.add(error.error_class)
    assert {ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT} <= seen
