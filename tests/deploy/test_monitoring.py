"""Dashboards and alerts ask for metrics that there are, with labels that these have."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.cluster_metrics import ClusterMetrics
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
GRAFANA = DEPLOY / "grafana" / "twinfire.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
OF_WHAT = {"le", "part", "reason", "finished_reason", "position"}
LABELS = OF_WHAT | {"worker", "role", "model_name", "instance"}


def exposed_names() -> set[str]:
    metrics = Metrics("m")
    backend = ClusterBackend("m", Router(time.monotonic, RoutingSettings()), b"")
    metrics.include(ClusterMetrics("m", backend, lambda info: info.short_name))
    text = metrics.render(None).decode()
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return {name + suffix for name, kind in kinds for suffix in SUFFIXES.get(kind, ("",))}


def grafana() -> Any:
    return json.loads(GRAFANA.read_text())


def grafana_queries() -> Iterator[str]:
    for panel in grafana()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in grafana()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def alert_queries() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def is_balanced(query: str) -> bool:
    text = re.sub(r"[^()\[\]{}]", "", query)
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
        text = shorter
    return text == ""


@pytest.mark.parametrize("queries", [grafana_queries, alert_queries])
def test_every_metric_that_is_asked_for_is_exposed(queries: Any) -> None:
    known = exposed_names()
    asked = list(queries())
    assert len(asked) >= 10
    for query in asked:
        names = set(re.findall(r"twinfire:\w+", query))
        assert names or query.startswith("up{"), query
        assert names <= known, f"{names - known} in {query}"
        assert is_balanced(query), query
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            assert {label.strip() for label in labels.split(",")} <= LABELS, query


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = grafana()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_say_what_is_wrong() -> None:
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_scrape_example_loads_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert [(DEPLOY / "prometheus" / name).exists() for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("twinfire", "/metrics")
    assert any('job="twinfire"' in query for query in alert_queries())
