import asyncio
from pathlib import Path

import pytest

from support.openai_server import TEMPLATE_TOKENS, Behaviour, count_words, fake_server
from twinfire.bench.client import Client
from twinfire.bench.load_run import RunOptions, build_workload, run_scenario
from twinfire.bench.parameters import (
    Agent,
    Concurrent,
    InterferenceStreams,
    Prefix,
    RateSweep,
    TraceReplay,
)
from twinfire.bench.request import user_request
from twinfire.bench.scenarios import ScenarioError
from twinfire.bench.target import Target
from twinfire.bench.workloads import ClosedLoop, Interference, OpenLoop


def ignore(record):
    del record


def report_of(scenario, behaviour=None, **options):
    async def run():
        async with fake_server(behaviour) as server:
            stages = []
            report = await run_scenario(
                Target(server.url),
                scenario,
                RunOptions(seed=3, **options),
                lambda stage, total: stages.append((stage, total)),
                ignore,
            )
            return report, server, stages

    return asyncio.run(run())


def test_a_closed_loop_keeps_so_many_in_flight():
    async def run():
        everyone = asyncio.Event()
        server_box = []

        def arrived():
            # Opens only when three requests are there at once; a fourth would be seen below.
            if server_box[0].in_flight == 2:
                everyone.set()

        behaviour = Behaviour(gate=lambda number, chunk: everyone, on_request=arrived)
        async with fake_server(behaviour) as server, Client(Target(server.url)) as client:
            server_box.append(server)
            requests = [user_request(f"request {index}", 2) for index in range(9)]
            (phase,) = await ClosedLoop("c", requests, 3).run(client, ignore)
            return phase, server

    phase, server = asyncio.run(asyncio.wait_for(run(), 30))
    assert len(phase.records) == 9
    assert all(record.completed for record in phase.records)
    assert server.most_in_flight == 3


def test_an_open_loop_does_not_wait_for_answers():
    async def run():
        everyone = asyncio.Event()
        server_box = []

        def arrived():
            if server_box[0].in_flight == 4:
                everyone.set()

        behaviour = Behaviour(gate=lambda number, chunk: everyone, on_request=arrived)
        async with fake_server(behaviour) as server, Client(Target(server.url)) as client:
            server_box.append(server)
            arrivals = [(0.01 * index, user_request(f"r {index}", 1)) for index in range(5)]
            (phase,) = await OpenLoop("o", arrivals).run(client, ignore)
            return phase

    phase = asyncio.run(asyncio.wait_for(run(), 30))
    starts = [record.started_s for record in phase.records]
    assert all(record.completed for record in phase.records)
    assert starts[4] - starts[0] >= 0.035


def test_decode_streams_run_until_the_long_prompts_are_answered():
    async def run():
        long_may_end = asyncio.Event()
        answered = 0

        def gate(number, chunk):
            body = server_box[0].bodies[number]
            if body["max_tokens"] == 1:
                return long_may_end
            open_gate = asyncio.Event()
            open_gate.set()
            return open_gate

        def count(record):
            nonlocal answered
            answered += record.label == "decode"
            if answered == 6:
                long_may_end.set()

        server_box = []
        async with (
            fake_server(Behaviour(gate=gate)) as server,
            Client(Target(server.url)) as client,
        ):
            server_box.append(server)
            streams = [[user_request("s", 3, label="decode")] for _ in range(2)]
            long_requests = [user_request("long", 1, label="long") for _ in range(2)]
            return await Interference(streams, long_requests, 0.001).run(client, count)

    decode, long = asyncio.run(asyncio.wait_for(run(), 30))
    assert (decode.name, long.name) == ("decode", "long")
    assert len(decode.records) >= 6
    assert len(long.records) == 2
    assert decode.window_s is not None
    assert decode.window_s[0] == min(record.started_s for record in long.records)


def test_failing_decode_streams_do_not_hold_up_the_run():
    report, _, _ = report_of_failing()
    by_name = {phase.name: phase.metrics for phase in report.phases}
    assert by_name["decode"].errors_by_kind == {"http_503": 2}
    assert by_name["long"].errors_by_kind == {"http_503": 2}
    assert any("4 of 4" in note or "2 of 2" in note for note in report.notes)


def report_of_failing():
    scenario = InterferenceStreams(2, 20, 4, 2, 40, 2, 0.001)
    behaviour = Behaviour()
    calls = 0

    def fail_after_warm_up():
        nonlocal calls
        calls += 1
        # One request calibrates, one warms up.
        behaviour.status = 200 if calls <= 2 else 503

    behaviour.on_request = fail_after_warm_up
    return report_of(scenario, behaviour)


def test_concurrent_sends_equal_lengths_and_no_shared_prefix():
    report, server, stages = report_of(Concurrent("concurrent", 6, 2, 40, 5))
    assert stages == [("making prompts", 0), ("warming up", 0), ("concurrent", 6)]
    (phase,) = report.phases
    assert (phase.metrics.completed, phase.metrics.output_tokens) == (6, 30)
    assert phase.metrics.prompt_tokens_each is not None
    assert phase.metrics.prompt_tokens_each.min == phase.metrics.prompt_tokens_each.max == 40
    prompts = [body["messages"][0]["content"] for body in server.bodies[-6:]]
    assert len({prompt[:20] for prompt in prompts}) == 6
    assert report.notes == []


def test_agents_keep_history_and_session():
    report, server, _ = report_of(Agent(2, 3, 50, 10, 4))
    first, later = report.phases
    assert (first.metrics.requests, later.metrics.requests) == (2, 4)
    assert set(later.by_label) == {"turn 2", "turn 3"}
    turns = [
        (body["messages"], headers["x-session-affinity"])
        for body, headers in zip(server.bodies, server.headers, strict=True)
        if len(body["messages"]) > 1
    ]
    by_session: dict[str, list] = {}
    for messages, session in turns:
        by_session.setdefault(session, []).append(messages)
    assert len(by_session) == 2
    for one, two, three in by_session.values():
        assert [m["role"] for m in three] == ["system"] + ["user", "assistant"] * 2 + ["user"]
        assert two[: len(one)] == one
        assert three[: len(two)] == two
        assert two[2]["content"] == " word" * 4
        assert count_words(one[0]["content"]) == 50


def test_prefix_requests_share_only_the_system_prompt():
    report, server, _ = report_of(Prefix(4, 2, 100, 12, 3), Behaviour(cached_tokens=64))
    assert [phase.name for phase in report.phases] == ["first", "later"]
    assert report.phases[1].metrics.cached_tokens == 3 * 64
    bodies = [body["messages"] for body in server.bodies if len(body["messages"]) == 2]
    assert len({messages[0]["content"] for messages in bodies}) == 1
    assert len({messages[1]["content"] for messages in bodies}) == 4


def test_a_rate_sweep_has_a_phase_for_each_rate():
    report, _, _ = report_of(RateSweep((200.0, 400.0), 5, 20, 2))
    assert [phase.name for phase in report.phases] == ["200 req/s", "400 req/s"]
    assert all(phase.metrics.completed == 5 for phase in report.phases)


def test_a_trace_is_replayed_with_its_shared_blocks(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp":0,"input_length":1200,"output_length":8,"hash_ids":[0,1,2]}\n'
        '{"timestamp":5,"input_length":1500,"output_length":8,"hash_ids":[0,1,3]}\n'
    )
    report, server, _ = report_of(TraceReplay(path, length_scale=0.25))
    assert "lengths x 0.25" in report.notes[0]
    one, two = sorted((b["messages"][0]["content"] for b in server.bodies[-2:]), key=len)
    assert count_words(one) + TEMPLATE_TOKENS == 300
    assert count_words(two) + TEMPLATE_TOKENS == 375
    shared = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    # Two of the blocks are the same: 2 x 128 tokens of the 300.
    assert count_words(one[:shared]) == pytest.approx(256, rel=0.35)
    assert report.parameters["path"] == "t.jsonl"


def test_a_window_that_nobody_knows_must_be_given(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,9,9\n")

    async def build(options):
        async with fake_server() as server, Client(Target(server.url)) as client:
            server.max_model_len = None
            return await build_workload(client, TraceReplay(path), options)

    with pytest.raises(ScenarioError, match="--max-model-len"):
        asyncio.run(build(RunOptions(seed=1)))
    assert asyncio.run(build(RunOptions(seed=1, max_model_len=512))).workload.num_requests == 1


def test_a_request_beyond_the_window_is_refused():
    with pytest.raises(ScenarioError, match="4096"):
        report_of(Concurrent(input_tokens=4000, output_tokens=97))


def test_what_a_reader_must_know_is_noted():
    behaviour = Behaviour(end_after_tokens=3, tokenize=None)
    report, _, _ = report_of(Concurrent("concurrent", 3, 1, 200, 8), behaviour)
    notes = "\n".join(report.notes)
    assert "3 answers ended before the fixed output length" in notes
    assert "estimates" in notes


def test_one_build_runs_twice_with_the_same_requests():
    async def run():
        async with fake_server() as server, Client(Target(server.url)) as client:
            built = await build_workload(client, Concurrent("c", 3, 1, 30, 2), RunOptions(seed=9))
            before = len(server.bodies)
            await built.workload.run(client, ignore)
            await built.workload.run(client, ignore)
            return server.bodies[before:]

    bodies = asyncio.run(run())
    assert bodies[:3] == bodies[3:]
