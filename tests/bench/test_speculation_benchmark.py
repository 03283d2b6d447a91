import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.bench.machine import describe_machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = [f"word{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def outcome(task, *, tokens=100, seconds=1.0, **more):
    from speculation_run import Outcome

    known = {"turn": 0, "decode_seconds": seconds / 2, "prompt_tokens": 10, "loops": False}
    known |= {"repeated": 0.0, "answer": "same", "finish_reason": "stop"}
    return Outcome(task=task, seconds=seconds, output_tokens=tokens, **{**known, **more})


def run(column, outcomes, *, index=0, streams=1, family="agent edit", drafted=0, accepted=0):
    from speculation_run import ScenarioRun

    return ScenarioRun(
        column=column.name,
        round=index,
        family=family,
        streams=streams,
        foreign_cpu=0.0,
        wall_s=1.0,
        outcomes=outcomes,
        drafted=drafted,
        accepted=accepted,
    )


@pytest.fixture
def columns(_scripts):
    from speculation_report import Column

    return [Column("twinfire", "int8", method, "serve") for method in ("off", "suffix")]


def report_of(columns, runs):
    from speculation_report import SpeculationReport
    from speculation_run import Screening

    return SpeculationReport(
        started_at="a",
        ended_at="b",
        command="command",
        machine=describe_machine(),
        load_average_before=0.0,
        max_foreign_cpu=0.03,
        runs_thrown_away=0,
        columns=columns,
        versions={"twinfire": "1"},
        screenings={"int8": {"agent edit": Screening("x", [0, 1], 8, 5, 1)}},
        runs=runs,
    )


@pytest.mark.parametrize("repeats", [6, 30])
def test_an_output_that_says_one_thing_for_ever_loops(repeats):
    from output_loops import loops

    assert loops("", "this is a sentence of more than eight words. " * repeats)
    assert loops("", "no " * 14 * repeats)
    assert loops("", "\n" * 14 * repeats)
    assert loops("", " " * 16 * 14 * repeats)


@given(st.permutations(PARTS), st.integers(0, 5))
def test_up_to_five_repeats_beyond_the_input_are_none(words, given_repeats):
    from output_loops import loops

    text = " ".join(words) + " "
    assert not loops(text * given_repeats, text * (given_repeats + 5))
    assert loops(text * given_repeats, text * (given_repeats + 6))


def test_what_stood_in_the_input_is_repeated():
    from output_loops import repeated_share

    text = " ".join(PARTS)
    assert repeated_share(text, text) == 1
    assert repeated_share(text, " ".join(reversed(PARTS))) == 0
    assert repeated_share(text, f"{text} {' '.join(reversed(PARTS))}") == pytest.approx(
        0.48, abs=0.01
    )
    assert repeated_share(text, "short") == 0


def test_ratios_are_of_medians_over_what_is_kept_everywhere(columns):
    from speculation_report import Scenario, ratio

    off, suffix = columns
    runs = []
    for index, seconds in enumerate((1.0, 4.0, 2.0)):
        runs.append(run(off, [outcome(0, seconds=seconds), outcome(1)], index=index))
        fast = outcome(0, seconds=seconds / 4)
        runs.append(run(suffix, [fast, outcome(1, seconds=9.0, loops=True)], index=index))
    scenario = Scenario(columns, runs)
    assert scenario.kept == {(index, 0, 0) for index in range(3)}
    assert scenario.rate(off.name) == 50
    assert scenario.rate(suffix.name) == 200
    assert ratio(scenario, suffix) == 4
    assert ratio(scenario, suffix, decode_only=True) == 4
    assert scenario.num_rejected == {off.name: 0, suffix.name: 3}


def test_rates_of_eight_streams_are_those_of_all(columns):
    from speculation_report import Scenario

    outcomes = [outcome(task, seconds=2.0) for task in range(8)]
    assert Scenario(columns[:1], [run(columns[0], outcomes, streams=8)]).rate(
        columns[0].name
    ) == pytest.approx(400)


def test_streams_without_a_task_do_not_count(columns):
    from speculation_report import Scenario

    alone = run(columns[0], [outcome(0, seconds=2.0)], streams=8)
    assert Scenario(columns[:1], [alone]).rate(columns[0].name) == 50


def test_commands_are_shown_without_folders():
    from speculation import shown

    words = "env LD_PRELOAD=/opt/a/lib/x.so /a/b-c/bin/vllm serve /m/bf16 --port 80 x/y"
    assert shown(words) == "env LD_PRELOAD=x.so vllm serve bf16 --port 80 x/y"


def test_a_column_without_anything_kept_has_no_rate(columns):
    from speculation_report import Scenario, ratio

    off, suffix = columns
    failed = outcome(0, error="dropped: gone")
    scenario = Scenario(columns, [run(off, [outcome(0)]), run(suffix, [failed])])
    assert scenario.rate(suffix.name) is None
    assert ratio(scenario, suffix) is None


def test_the_table_tells_ratios_acceptance_rejects_and_goals(columns):
    from speculation_report import markdown

    off, suffix = columns
    told = outcome(0, seconds=0.4, accepted=60, rejected=20)
    looping = outcome(1, loops=True)
    other = outcome(2, answer="other")
    runs = [
        run(off, [outcome(0), looping, outcome(2)]),
        run(suffix, [told, looping, other], drafted=80, accepted=60),
        run(off, [outcome(0)], family="chat"),
        run(suffix, [outcome(0, seconds=1.25)], family="chat"),
    ]
    table = markdown(report_of(columns, runs))
    assert "| agent edit, 1 stream | 100.0 | 142.9 (1.43) |" in table
    assert "| agent edit, 1 stream | 1.25, 60 of 80 |" in table
    assert "at most 20% of their input | 2.50, 60 of 80 |" in table
    assert "| agent edit, 1 stream | 1/3 | 1/3, 1 answers differ |" in table
    assert "suffix or hybrid 2.00 | 1.43 missed | suffix 1.43 met" in table
    assert "eagle3 or hybrid 1.25 | - missed | suffix 0.80 missed" in table
    assert "| int8 agent edit | 8 | 5 | 1 | 2 |" in table


def test_a_report_is_read_back(columns):
    from speculation_report import SpeculationReport

    report = report_of(columns, [run(columns[0], [outcome(0)])])
    assert msgspec.json.decode(msgspec.json.encode(report), type=SpeculationReport) == report


def test_no_task_is_asked_twice():
    from speculation_tasks import FAMILIES

    families = {name: family.make() for name, family in FAMILIES.items()}
    asked = [task.turns for tasks in families.values() for task in tasks]
    assert len(set(asked)) == len(asked)
    for name, tasks in families.items():
        assert [task.number for task in tasks] == list(range(len(tasks))), name


def test_edits_let_the_model_keep_or_change_each_line():
    from speculation_tasks import edits

    task = edits()[0]
    properties = task.more["response_format"]["json_schema"]["schema"]["properties"]
    given_lines = json.loads(task.turns[0].split("\n\nRename")[0].split("\n", 1)[1])
    assert {key: one["enum"][0] for key, one in properties.items()} == given_lines
    assert max(len(one["enum"]) for one in properties.values()) == 2
