"""From a target and a scenario to a report: calibrate, build prompts, warm up, run, summarise.

The one place where the parts of the load client meet; it prints nothing.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import twinfire
from twinfire.bench.client import Client, ServerUnusable
from twinfire.bench.load_metrics import Objectives
from twinfire.bench.load_report import LoadReport, phase_reports, reading_notes
from twinfire.bench.machine import describe_machine
from twinfire.bench.parameters import Parameter, Scenario
from twinfire.bench.prompt_builder import PromptBuilder
from twinfire.bench.prompt_source import PromptSource, library_paragraphs, paragraphs_of
from twinfire.bench.request import user_request
from twinfire.bench.request_record import RequestRecord
from twinfire.bench.scenarios import Built, build_scenario
from twinfire.bench.target import Target
from twinfire.bench.token_counter import calibrate

WARMUP_INPUT_TOKENS = 64
WARMUP_OUTPUT_TOKENS = 8
OnStage = Callable[[str, int], None]
"""Called with (what happens now, requests it will send; 0 if not known)."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for any scenario."""

    seed: int
    objectives: Objectives = Objectives()  # noqa: RUF009 - frozen
    warmup_requests: int = 1
    max_model_len: int | None = None
    """None asks the server."""
    text: Path | None = None
    """Source of prompt text; None takes Python's own library."""


def new_seed() -> int:
    """Return a seed that no earlier run used, so that no earlier run left its prompts cached."""
    return secrets.randbits(31)


async def build_workload(client: Client, scenario: Scenario, options: RunOptions) -> Built:
    """Make the scenario's prompts in the tokens of the client's server."""
    paragraphs = library_paragraphs() if options.text is None else paragraphs_of(options.text)
    source = PromptSource(paragraphs, options.seed)
    counter = await calibrate(client, source)
    card = await client.model()
    max_model_len = options.max_model_len or card.max_model_len
    built = await build_scenario(scenario, PromptBuilder(source, counter), max_model_len)
    if counter.method == "usage":
        note = "no /tokenize: prompt lengths are estimates, see what the server counted"
        return dataclasses.replace(built, notes=(*built.notes, note))
    return built


async def warm_up(client: Client, options: RunOptions) -> None:
    """Send requests that are not counted; ServerUnusable when the first one fails."""
    paragraphs = library_paragraphs() if options.text is None else paragraphs_of(options.text)
    source = PromptSource(paragraphs, options.seed).fork("warm-up")
    for _ in range(options.warmup_requests):
        request = user_request(source.take(WARMUP_INPUT_TOKENS * 4), WARMUP_OUTPUT_TOKENS)
        record = await client.measure(request)
        if record.error_kind == "refused":
            # Perhaps on a connection that the server closed since it was asked for its models.
            record = await client.measure(request)
        if record.error_kind not in (None, "empty"):
            raise ServerUnusable(
                f"the warm-up request failed ({record.error_kind}): {record.error_message}"
            )


async def run_built(
    client: Client,
    scenario: Scenario,
    built: Built,
    options: RunOptions,
    on_record: Callable[[RequestRecord], None],
) -> LoadReport:
    """Run a built workload against the client's server and report it."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    card = await client.model()
    machine = describe_machine()
    phases = phase_reports(await built.workload.run(client, on_record), options.objectives)
    return LoadReport(
        scenario=scenario.name,
        parameters=parameters_of(scenario),
        url=client.target.root,
        api=client.target.api,
        model=card.id,
        server_version=await server_version(client),
        client_version=twinfire.__version__,
        machine=machine,
        started_at=started_at,
        seed=options.seed,
        notes=[*built.notes, *reading_notes(phases, built.prompt_tokens)],
        objectives=options.objectives,
        phases=phases,
    )


async def run_scenario(
    target: Target,
    scenario: Scenario,
    options: RunOptions,
    on_stage: OnStage,
    on_record: Callable[[RequestRecord], None],
) -> LoadReport:
    """Do everything for one scenario against one server."""
    async with Client(target) as client:
        on_stage("making prompts", 0)
        built = await build_workload(client, scenario, options)
        on_stage("warming up", 0)
        await warm_up(client, options)
        on_stage(scenario.name, built.workload.num_requests)
        return await run_built(client, scenario, built, options, on_record)


def parameters_of(scenario: Scenario) -> dict[str, Parameter]:
    """Return the scenario's parameters for the JSON file."""
    names = [field.name for field in dataclasses.fields(scenario)]
    return {name: _plain(getattr(scenario, name)) for name in names if name != "name"}


def _plain(value: object) -> Parameter:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, tuple):
        return [float(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), "a parameter is plain"
    return value


class _Version(msgspec.Struct):
    version: str


async def server_version(client: Client) -> str | None:
    """Return what `/version` says, None where there is none."""
    content = await client.get(client.target.root + "/version")
    try:
        return None if content is None else msgspec.json.decode(content, type=_Version).version
    except msgspec.DecodeError:
        return None
