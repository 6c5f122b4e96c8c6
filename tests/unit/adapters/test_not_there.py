"""A provider's 404: whose fault it is. A wrong address or model is the route's, and the next one may serve."""

from __future__ import annotations

import json

import pytest

from adapters.errors import ErrorClass, Rejected
from adapters.protocols import PROTOCOLS

NOT_THERE = {
    "openrouter_model": {"error": {"message": "No endpoints found for foo/bar.", "code": 404}},
    "fastapi": {"detail": "Not Found"},
    "lm_studio": {"error": "Unexpected endpoint or method"},
    "openai_path": {"error": {"message": "Invalid URL (POST /v1/x)", "type": "invalid_request_error", "code": None}},
    "openai_model": {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}},
    "anthropic_model": {"type": "error", "error": {"type": "not_found_error", "message": "model: claude-x"}},
    "anthropic_path": {"type": "error", "error": {"type": "not_found_error", "message": "Not found"}},
    "gemini_model": {"error": {"code": 404, "message": "models/x is not found", "status": "NOT_FOUND"}},
    "ollama_model": {"error": "model 'llama9' not found"},
    "workers_ai_path": {"success": False, "errors": [{"code": 7000, "message": "No route for that URI"}]},
    "workers_ai_account": {"success": False, "errors": [{"code": 7003, "message": "Could not route to /x"}]},
    "file_of_nobody": {"error": {"message": "File not found"}},
    "spring": {"timestamp": 1732457108046, "status": 404, "error": "Not Found", "path": "//chat"},
    "empty_object": {},
    "array": [],
    "text": "404 page not found",
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("status", [404, 405, 410])
def test_what_is_not_there_is_the_routes_fault_whatever_the_body_says_and_no_credentials(protocol, status):
    bodies = {name: json.dumps(body).encode() for name, body in NOT_THERE.items()}
    bodies |= {"nothing": b"", "page": b"<!DOCTYPE html><html>Not Found</html>", "plain": b"404 page not found"}
    for name, body in bodies.items():
        found = PROTOCOLS[protocol].parse_error(status, {"x-should-retry": "false"}, body)
        assert isinstance(found, Rejected)
        if protocol == "gemini" and name == "file_of_nobody" and status == 404:
            # There it is told so of a file that the caller named.
            continue
        assert (found.error_class, found.credential_fault) == (ErrorClass.OURS, False), f"{name}: {found}"


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (
            "responses",
            {
                "error": {
                    "message": "Previous response with id 'resp_1' not found.",
                    "param": "previous_response_id",
                    "code": "previous_response_not_found",
                }
            },
        ),
        (
            "responses",
            {"error": {"message": "Item with id 'rs_1' not found. Items are not persisted", "param": "input"}},
        ),
        ("responses", {"error": {"message": "Conversation with id 'conv_1' not found.", "code": None}}),
        ("chat_completions", {"error": {"message": "No such File object: file-1", "param": "id", "code": None}}),
        ("chat_completions", {"error": {"message": "x", "code": "file_not_found"}}),
        (
            "anthropic_messages",
            {"type": "error", "error": {"type": "not_found_error", "message": "File not found: file_011CNha8iC"}},
        ),
        ("gemini", {"error": {"code": 404, "message": "CachedContent not found", "status": "NOT_FOUND"}}),
    ],
)
def test_a_thing_that_the_caller_named_and_that_is_missing_stays_the_callers_fault(protocol, body):
    found = PROTOCOLS[protocol].parse_error(404, {}, json.dumps(body).encode())
    assert isinstance(found, Rejected)
    assert found.error_class is ErrorClass.FATAL


def test_a_file_of_gemini_that_the_key_may_not_see_is_no_fault_of_the_key():
    words = "You do not have permission to access the File abc or it may not exist."
    body = {"error": {"code": 403, "message": words, "status": "PERMISSION_DENIED"}}
    found = PROTOCOLS["gemini"].parse_error(403, {}, json.dumps(body).encode())
    assert isinstance(found, Rejected)
    assert (found.error_class, found.credential_fault) == (ErrorClass.FATAL, False)
