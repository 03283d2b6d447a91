import io
import sys

import pytest
from rich.console import Console
from test_load_metrics import record

from twinfire.bench.load_metrics import Objectives
from twinfire.bench.load_report import LoadReport, phase_reports, read_json, write_json
from twinfire.bench.machine import describe_machine
from twinfire.bench.report_plot import PlotUnavailable, write_plot
from twinfire.bench.report_table import markdown_table, print_report
from twinfire.bench.stream_events import StreamFault
from twinfire.bench.workloads import Phase


@pytest.fixture
def report():
    records = (
        record(5.0, [5.5, 5.6, 5.9], tokens=4),
        record(6.0, [6.5, 6.6], tokens=2),
        record(6.0, [6.5], end_s=7.0, fault=StreamFault("dropped", "gone")),
    )
    objectives = Objectives(ttft_ms=400)
    return LoadReport(
        scenario="concurrent",
        parameters={"concurrency": 2},
        url="http://h",
        api="chat",
        model="m",
        server_version=None,
        client_version="0",
        machine=describe_machine(),
        started_at="2026-01-01T00:00:00+00:00",
        seed=1,
        notes=["mind this"],
        objectives=objectives,
        phases=phase_reports([Phase("concurrent", records)], objectives),
    )


def test_the_json_file_keeps_everything(report, tmp_path):
    path = tmp_path / "deep" / "r.json"
    write_json(report, path)
    assert read_json(path) == report
    (phase,) = report.phases
    assert [row.start_ms for row in phase.requests] == pytest.approx([0, 1000, 1000])
    assert phase.itl_gaps_ms == pytest.approx([100, 300, 100])


def test_the_table_shows_latencies_rates_failures_and_notes(report):
    out = io.StringIO()
    print_report(Console(file=out, width=80), report)
    shown = out.getvalue()
    for part in ("TTFT", "ITL (gaps)", "TPOT", "E2E", "out tok/s", "mind this", "good/s"):
        assert part in shown
    assert "500.0" in shown


def test_a_plot_is_written(report, tmp_path):
    path = tmp_path / "r.png"
    write_plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"twinfire\[bench\]"):
        write_plot(report, tmp_path / "r.png")


def test_markdown():
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
