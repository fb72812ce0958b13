"""The Grafana dashboard shows every metric of the code, by the name it has on Ray's metrics port."""

import json
import re
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from fedppd_ray.runtime.gauges import GAUGES
from serve.metrics import Metrics
from tests.k8s.conftest import K8S

DASHBOARD: dict[str, Any] = json.loads((K8S / "grafana-dashboard.json").read_text())
TRAINING = set(GAUGES)


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def shown() -> set[str]:
    return {name for expression in expressions() for name in re.findall(r"\bray_(fedppd_[a-z_]+)", expression)}


def service_series() -> dict[str, set[str]]:
    """Metric → the names of its series in Prometheus."""
    series = {}
    for family in Metrics().collect():
        if isinstance(family, CounterMetricFamily):
            series[family.name] = {f"{family.name}_total"}
        elif isinstance(family, HistogramMetricFamily):
            series[family.name] = {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            series[family.name] = {family.name}
    return series


def test_every_series_shown_exists() -> None:
    assert shown() <= TRAINING | set().union(*service_series().values())


def test_every_metric_is_shown() -> None:
    assert shown() >= TRAINING
    for metric, names in service_series().items():
        assert names & shown(), f"{metric} is on no panel"


def test_training_panels_follow_the_chosen_run() -> None:
    for expression in expressions():
        if any(re.search(rf"\bray_{name}\b", expression) for name in TRAINING):
            assert '{run=~"$run"}' in expression


def test_every_metric_has_rays_prefix() -> None:
    for expression in expressions():
        assert not re.search(r"(?<!ray_)fedppd_", expression), expression


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
