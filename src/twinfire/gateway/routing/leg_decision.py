"""Whether a prompt is computed by a prefill worker or by the one that will decode, and why."""

from __future__ import annotations

from twinfire.gateway.routing.costs import CostModel
from twinfire.gateway.routing.demand import Demand
from twinfire.gateway.routing.route import RouteReason
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState

HAND_OFF_REASONS: frozenset[RouteReason] = frozenset({"always", "cheaper"})


def decide_leg(
    costs: CostModel,
    settings: RoutingSettings,
    demand: Demand,
    decode: WorkerState,
    prefill: WorkerState | None,
) -> RouteReason:
    """Return the reason; the prompt is handed over when it is one of HAND_OFF_REASONS.

    Alone, the decode worker's streams are held up by the prompt, which is charged; handed over, the
    prompt waits for the prefill worker and for the transfer.
    """
    if demand.pd_policy == "never":
        return "never"
    if prefill is None:
        return "no_prefill_worker"
    if demand.pd_policy == "always":
        return "always"
    if demand.uncached_tokens(decode.instance_id) <= settings.short_suffix_tokens:
        return "short_suffix"
    alone_s, on_prefill_s = costs.prompt_s((decode, prefill), demand)
    (hand_off_s,) = costs.hand_off_s((decode,), costs.compute_s(prefill, demand), demand)
    handed_over_s = on_prefill_s + hand_off_s
    if handed_over_s < alone_s:
        return "cheaper"
    if not decode.num_streams and not decode.prefill.load:
        return "decode_idle"
    queue_s = prefill.prefill.load / prefill.prefill_tokens_per_s
    return "prefill_busy" if handed_over_s - queue_s < alone_s else "decode_cheaper"
