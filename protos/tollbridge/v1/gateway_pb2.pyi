from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_UNSPECIFIED: _ClassVar[Order]
    ORDER_PRIORITY: _ClassVar[Order]
    ORDER_COST: _ClassVar[Order]
    ORDER_LATENCY: _ClassVar[Order]
    ORDER_WEIGHTED: _ClassVar[Order]

class Unsupported(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSUPPORTED_UNSPECIFIED: _ClassVar[Unsupported]
    UNSUPPORTED_REFUSE: _ClassVar[Unsupported]
    UNSUPPORTED_DROP: _ClassVar[Unsupported]

class Class(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLASS_UNSPECIFIED: _ClassVar[Class]
    CLASS_INTERACTIVE: _ClassVar[Class]
    CLASS_BATCH: _ClassVar[Class]

class ResendUncertain(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESEND_UNCERTAIN_UNSPECIFIED: _ClassVar[ResendUncertain]
    RESEND_UNCERTAIN_NEVER: _ClassVar[ResendUncertain]
    RESEND_UNCERTAIN_BEFORE_FIRST_BYTE: _ClassVar[ResendUncertain]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_FILTER: _ClassVar[FinishReason]
    FINISH_REASON_REFUSAL: _ClassVar[FinishReason]
    FINISH_REASON_PAUSE: _ClassVar[FinishReason]
    FINISH_REASON_OTHER: _ClassVar[FinishReason]
ORDER_UNSPECIFIED: Order
ORDER_PRIORITY: Order
ORDER_COST: Order
ORDER_LATENCY: Order
ORDER_WEIGHTED: Order
UNSUPPORTED_UNSPECIFIED: Unsupported
UNSUPPORTED_REFUSE: Unsupported
UNSUPPORTED_DROP: Unsupported
CLASS_UNSPECIFIED: Class
CLASS_INTERACTIVE: Class
CLASS_BATCH: Class
RESEND_UNCERTAIN_UNSPECIFIED: ResendUncertain
RESEND_UNCERTAIN_NEVER: ResendUncertain
RESEND_UNCERTAIN_BEFORE_FIRST_BYTE: ResendUncertain
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CONTENT_FILTER: FinishReason
FINISH_REASON_REFUSAL: FinishReason
FINISH_REASON_PAUSE: FinishReason
FINISH_REASON_OTHER: FinishReason

class CompletionRequest(_message.Message):
    __slots__ = ("model", "messages", "temperature", "top_p", "max_output_tokens", "stop", "seed", "n", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "logit_bias", "reasoning_effort", "reasoning_budget_tokens", "end_user", "extra", "top_k", "verbosity", "tools", "tool_choice", "parallel_tool_calls", "response_format", "service_tier", "prompt_cache_key", "store", "metadata", "prompt_cache_retention", "session_id", "debit_id", "idempotency_key", "scope_id", "run_id", "step_id", "skill", "skill_version", "role", "tags", "owner_fence", "tool", "max_cost_usd", "allowed_providers", "allow_failover", "resend_uncertain", "spill_after_s", "allowed_models", "order", "unsupported", "explain")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    REASONING_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_USER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    VERBOSITY_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_RETENTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DEBIT_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SCOPE_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SKILL_FIELD_NUMBER: _ClassVar[int]
    SKILL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FENCE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    CLASS_FIELD_NUMBER: _ClassVar[int]
    MAX_COST_USD_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FAILOVER_FIELD_NUMBER: _ClassVar[int]
    RESEND_UNCERTAIN_FIELD_NUMBER: _ClassVar[int]
    SPILL_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_MODELS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    temperature: float
    top_p: float
    max_output_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    top_logprobs: int
    logit_bias: _containers.ScalarMap[str, float]
    reasoning_effort: str
    reasoning_budget_tokens: int
    end_user: str
    extra: _struct_pb2.Struct
    top_k: int
    verbosity: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    response_format: ResponseFormat
    service_tier: str
    prompt_cache_key: str
    store: bool
    metadata: _containers.ScalarMap[str, str]
    prompt_cache_retention: str
    session_id: str
    debit_id: str
    idempotency_key: str
    scope_id: str
    run_id: str
    step_id: str
    skill: str
    skill_version: str
    role: str
    tags: _containers.ScalarMap[str, str]
    owner_fence: int
    tool: str
    max_cost_usd: str
    allowed_providers: _containers.RepeatedScalarFieldContainer[str]
    allow_failover: bool
    resend_uncertain: ResendUncertain
    spill_after_s: float
    allowed_models: _containers.RepeatedScalarFieldContainer[str]
    order: Order
    unsupported: Unsupported
    explain: bool
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_output_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[str, float]] = ..., reasoning_effort: _Optional[str] = ..., reasoning_budget_tokens: _Optional[int] = ..., end_user: _Optional[str] = ..., extra: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., top_k: _Optional[int] = ..., verbosity: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ..., service_tier: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ..., store: _Optional[bool] = ..., metadata: _Optional[_Mapping[str, str]] = ..., prompt_cache_retention: _Optional[str] = ..., session_id: _Optional[str] = ..., debit_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., scope_id: _Optional[str] = ..., run_id: _Optional[str] = ..., step_id: _Optional[str] = ..., skill: _Optional[str] = ..., skill_version: _Optional[str] = ..., role: _Optional[str] = ..., tags: _Optional[_Mapping[str, str]] = ..., owner_fence: _Optional[int] = ..., tool: _Optional[str] = ..., max_cost_usd: _Optional[str] = ..., allowed_providers: _Optional[_Iterable[str]] = ..., allow_failover: _Optional[bool] = ..., resend_uncertain: _Optional[_Union[ResendUncertain, str]] = ..., spill_after_s: _Optional[float] = ..., allowed_models: _Optional[_Iterable[str]] = ..., order: _Optional[_Union[Order, str]] = ..., unsupported: _Optional[_Union[Unsupported, str]] = ..., explain: _Optional[bool] = ..., **kwargs) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "text", "parts", "tool_calls", "tool_call_id", "name", "is_error", "refusal", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    text: str
    parts: Parts
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    is_error: bool
    refusal: str
    reasoning: _containers.RepeatedCompositeFieldContainer[Reasoning]
    def __init__(self, role: _Optional[str] = ..., text: _Optional[str] = ..., parts: _Optional[_Union[Parts, _Mapping]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., is_error: _Optional[bool] = ..., refusal: _Optional[str] = ..., reasoning: _Optional[_Iterable[_Union[Reasoning, _Mapping]]] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "image", "document", "audio", "cache")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    document: Document
    audio: Audio
    cache: str
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., document: _Optional[_Union[Document, _Mapping]] = ..., audio: _Optional[_Union[Audio, _Mapping]] = ..., cache: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("url", "data", "media_type", "detail")
    URL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    url: str
    data: bytes
    media_type: str
    detail: str
    def __init__(self, url: _Optional[str] = ..., data: _Optional[bytes] = ..., media_type: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("url", "data", "file_id", "media_type", "filename")
    URL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    url: str
    data: bytes
    file_id: str
    media_type: str
    filename: str
    def __init__(self, url: _Optional[str] = ..., data: _Optional[bytes] = ..., file_id: _Optional[str] = ..., media_type: _Optional[str] = ..., filename: _Optional[str] = ...) -> None: ...

class Audio(_message.Message):
    __slots__ = ("data", "format")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    format: str
    def __init__(self, data: _Optional[bytes] = ..., format: _Optional[str] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("text", "signature", "redacted", "id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REDACTED_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    signature: bytes
    redacted: bool
    id: str
    def __init__(self, text: _Optional[str] = ..., signature: _Optional[bytes] = ..., redacted: _Optional[bool] = ..., id: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict", "cache")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: _struct_pb2.Struct
    strict: bool
    cache: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., strict: _Optional[bool] = ..., cache: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "tool")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    tool: str
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., tool: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    signature: bytes
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("kind", "name", "schema", "strict", "description")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ResponseFormat.Kind]
        KIND_TEXT: _ClassVar[ResponseFormat.Kind]
        KIND_JSON_OBJECT: _ClassVar[ResponseFormat.Kind]
        KIND_JSON_SCHEMA: _ClassVar[ResponseFormat.Kind]
    KIND_UNSPECIFIED: ResponseFormat.Kind
    KIND_TEXT: ResponseFormat.Kind
    KIND_JSON_OBJECT: ResponseFormat.Kind
    KIND_JSON_SCHEMA: ResponseFormat.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    kind: ResponseFormat.Kind
    name: str
    schema: _struct_pb2.Struct
    strict: bool
    description: str
    def __init__(self, kind: _Optional[_Union[ResponseFormat.Kind, str]] = ..., name: _Optional[str] = ..., schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., strict: _Optional[bool] = ..., description: _Optional[str] = ...) -> None: ...

class CompletionResponse(_message.Message):
    __slots__ = ("choices", "outcome")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    outcome: Outcome
    def __init__(self, choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "text", "refusal", "reasoning", "tool_calls", "finish_reason", "native_finish_reason", "images", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NATIVE_FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    refusal: str
    reasoning: _containers.RepeatedCompositeFieldContainer[Reasoning]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    finish_reason: FinishReason
    native_finish_reason: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    logprobs: Logprobs
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., refusal: _Optional[str] = ..., reasoning: _Optional[_Iterable[_Union[Reasoning, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., native_finish_reason: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class CompletionChunk(_message.Message):
    __slots__ = ("queued", "started", "delta", "finished", "failed")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    queued: Queued
    started: Started
    delta: Delta
    finished: Finished
    failed: Failed
    def __init__(self, queued: _Optional[_Union[Queued, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("group", "position", "reason", "expected_wait_s", "until_s")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    group: str
    position: int
    reason: str
    expected_wait_s: float
    until_s: float
    def __init__(self, group: _Optional[str] = ..., position: _Optional[int] = ..., reason: _Optional[str] = ..., expected_wait_s: _Optional[float] = ..., until_s: _Optional[float] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("route", "attempt")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    route: Route
    attempt: int
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("route_id", "provider", "model", "protocol")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    route_id: str
    provider: str
    model: str
    protocol: str
    def __init__(self, route_id: _Optional[str] = ..., provider: _Optional[str] = ..., model: _Optional[str] = ..., protocol: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("choice", "text", "reasoning", "refusal", "tool_call", "tool_arguments", "reasoning_signature", "image", "logprobs", "reasoning_redacted", "reasoning_id", "reasoning_block")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    TOOL_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    REASONING_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_REDACTED_FIELD_NUMBER: _ClassVar[int]
    REASONING_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_BLOCK_FIELD_NUMBER: _ClassVar[int]
    choice: int
    text: str
    reasoning: str
    refusal: str
    tool_call: ToolCallStart
    tool_arguments: ToolCallArguments
    reasoning_signature: bytes
    image: Image
    logprobs: Logprobs
    reasoning_redacted: bool
    reasoning_id: str
    reasoning_block: int
    def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ..., reasoning: _Optional[str] = ..., refusal: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallStart, _Mapping]] = ..., tool_arguments: _Optional[_Union[ToolCallArguments, _Mapping]] = ..., reasoning_signature: _Optional[bytes] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., reasoning_redacted: _Optional[bool] = ..., reasoning_id: _Optional[str] = ..., reasoning_block: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "bytes", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: str
    logprob: float
    bytes: bytes
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token: _Optional[str] = ..., logprob: _Optional[float] = ..., bytes: _Optional[bytes] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class ToolCallStart(_message.Message):
    __slots__ = ("index", "id", "name", "signature")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    signature: bytes
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ToolCallArguments(_message.Message):
    __slots__ = ("index", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    arguments: str
    def __init__(self, index: _Optional[int] = ..., arguments: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("ends", "outcome")
    ENDS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedCompositeFieldContainer[ChoiceEnd]
    outcome: Outcome
    def __init__(self, ends: _Optional[_Iterable[_Union[ChoiceEnd, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("choice", "finish_reason", "native_finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NATIVE_FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish_reason: FinishReason
    native_finish_reason: str
    def __init__(self, choice: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., native_finish_reason: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "outcome")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    outcome: Outcome
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("request_id", "debit_id", "route", "attempts", "usage", "cost", "ended", "settlement", "counters", "warnings", "served_model", "provider_request_id", "left_out")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEBIT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SETTLEMENT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    debit_id: str
    route: Route
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    usage: Usage
    cost: Cost
    ended: str
    settlement: str
    counters: Counters
    warnings: _containers.RepeatedScalarFieldContainer[str]
    served_model: str
    provider_request_id: str
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    def __init__(self, request_id: _Optional[str] = ..., debit_id: _Optional[str] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., ended: _Optional[str] = ..., settlement: _Optional[str] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., served_model: _Optional[str] = ..., provider_request_id: _Optional[str] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("provider", "model", "reason")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    provider: str
    model: str
    reason: str
    def __init__(self, provider: _Optional[str] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "route", "status", "error_class", "http_status", "message", "cost", "code")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    number: int
    route: Route
    status: str
    error_class: str
    http_status: int
    message: str
    cost: Cost
    code: str
    def __init__(self, number: _Optional[int] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., status: _Optional[str] = ..., error_class: _Optional[str] = ..., http_status: _Optional[int] = ..., message: _Optional[str] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., code: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("input_tokens", "cache_read_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens", "output_tokens", "reasoning_tokens")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_5M_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_1H_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    output_tokens: int
    reasoning_tokens: int
    def __init__(self, input_tokens: _Optional[int] = ..., cache_read_tokens: _Optional[int] = ..., cache_write_5m_tokens: _Optional[int] = ..., cache_write_1h_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Cost(_message.Message):
    __slots__ = ("state", "usd", "upper_bound_usd", "price_version", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    UPPER_BOUND_USD_FIELD_NUMBER: _ClassVar[int]
    PRICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: str
    usd: str
    upper_bound_usd: str
    price_version: str
    reason: str
    def __init__(self, state: _Optional[str] = ..., usd: _Optional[str] = ..., upper_bound_usd: _Optional[str] = ..., price_version: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("session_usd", "day_usd", "total_usd", "day")
    SESSION_USD_FIELD_NUMBER: _ClassVar[int]
    DAY_USD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_USD_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    session_usd: str
    day_usd: str
    total_usd: str
    day: str
    def __init__(self, session_usd: _Optional[str] = ..., day_usd: _Optional[str] = ..., total_usd: _Optional[str] = ..., day: _Optional[str] = ...) -> None: ...
