"""Usage records with every field filled."""

from __future__ import annotations

import msgspec

from twinfire.accounts.usage_record import UsageRecord

NOON = 1796040000.0
"""2026-11-30 12:00 UTC."""

_RECORD = UsageRecord(
    record_id="",
    request_id="req",
    account_id="acc",
    token_id="tok",
    endpoint="/v1/chat/completions",
    model="m",
    started_s=NOON,
    status=200,
    outcome="finished",
    finish="stop",
    num_input_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=5,
    num_reasoning_tokens=0,
    price_nanos=7,
    currency="USD",
    prefill_worker="p",
    decode_worker="d",
    route_reason="",
    queue_s=0.5,
    ttft_s=1.0,
    total_s=2.0,
)


def record(record_id: str, **fields: object) -> UsageRecord:
    return msgspec.structs.replace(_RECORD, record_id=record_id, **fields)
