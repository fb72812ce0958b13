"""Figures class by class and site by site, evaluation on labelled rows from anywhere, prediction of folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command, refused

import fedppd_ray as fp
from fedppd_ray.data.datasets import load
from fedppd_ray.data.pictures import write_sample
from fedppd_ray.evaluation.metrics import classwise_ece, classwise_gaps, metrics_of
from fedppd_ray.evaluation.per_class import per_class, per_site
from fedppd_ray.evaluation.per_client import per_client
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.reports.groups import group_tables

CLASSES = ("cat", "dog", "owl", "yak")


@pytest.fixture(scope="module")
def seen() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities, labels (nobody is a yak) and which rows are answered."""
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 3, 400)
    logits = generator.normal(0, 1, (400, 4)) + 1.5 * np.eye(4)[labels]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), labels, generator.random(400) < 0.8


def test_figures_of_a_class_are_those_of_a_plain_count(seen: Any) -> None:
    log_p, labels, answered = seen
    figures = per_class(log_p, log_p, labels, CLASSES, answered)
    said = log_p.argmax(1)
    for at, line in enumerate(figures["classes"][:3]):
        own = [row for row in range(400) if labels[row] == at]
        right = sum(said[row] == at for row in own)
        assert line["rows"] == len(own)
        assert line["recall"] == pytest.approx(100 * right / len(own))
        assert line["precision"] == pytest.approx(100 * right / sum(said == at))
        assert line["abstained"] == pytest.approx(100 * sum(not answered[row] for row in own) / len(own))
        for other in range(4):
            assert figures["confusion"][at][other] == sum(said[row] == other for row in own)
    recalls = {line["class"]: line["recall"] for line in figures["classes"][:3]}
    assert figures["worst"] == min(recalls, key=lambda name: recalls[name])
    assert figures["balanced_accuracy"] == pytest.approx(np.mean(list(recalls.values())))


def test_a_class_without_rows_has_no_recall_and_is_not_the_worst(seen: Any) -> None:
    log_p, labels, _ = seen
    figures = per_class(log_p, log_p, labels, CLASSES, None)
    assert figures["classes"][3]["recall"] is None
    assert figures["worst"] != "yak"
    assert "abstained" not in figures["classes"][0]
    json.dumps(figures, allow_nan=False)


def test_the_calibration_errors_of_the_classes_have_the_class_wise_ece_as_mean(seen: Any) -> None:
    log_p, labels, _ = seen
    assert classwise_gaps(log_p, labels).mean() == pytest.approx(classwise_ece(log_p, labels))


def test_figures_of_a_site_are_the_metrics_of_its_rows_and_the_worst_is_named(seen: Any) -> None:
    log_p, labels, answered = seen
    wrong_more = np.argsort(log_p.argmax(1) == labels)[:150]
    own = np.isin(np.arange(400), wrong_more)
    figures = per_site(log_p, 0.5 * log_p, labels, {"south": ~own, "north": own}, answered)
    south, north = figures["sites"]
    assert (south["rows"], north["rows"], figures["worst"]) == (250, 150, "north")
    assert south["accuracy"] == metrics_of(log_p[~own], labels[~own]).accuracy
    assert north["scaled_ece"] == metrics_of(0.5 * log_p[own], labels[own]).ece
    assert north["abstained"] == pytest.approx(100 * (~answered[own]).mean())


def test_a_client_of_one_class_has_that_classs_recall_and_the_worst_client_is_named(seen: Any) -> None:
    log_p, labels, answered = seen
    recalls = per_class(log_p, log_p, labels, CLASSES, answered)["classes"]
    clients = [ClientInfo(f"{name}-clinic", 9, tuple(9 * (np.arange(4) == at))) for at, name in enumerate(CLASSES[:3])]
    figures = per_client(log_p, labels, [*clients, ClientInfo("silent", 5, ())], answered)
    for line, one in zip(figures["by_client"], recalls, strict=False):
        assert line["accuracy"] == pytest.approx(one["recall"])
        assert line["abstained"] == pytest.approx(one["abstained"])
    worst = min(recalls[:3], key=lambda line: line["recall"])
    assert figures["worst"] == f"{worst['class']}-clinic"
    assert figures["accuracy"]["worst"] == pytest.approx(worst["recall"])


# ---- of a run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test digits as a user has them: two sites, <class>/*.png."""
    from PIL import Image

    root, test = tmp_path_factory.mktemp("digits"), load("mnist5k").test
    for row in range(60):
        folder = root / ("north" if row < 40 else "south") / str(test.labels[row])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(test.images[row][0])).save(folder / f"{row:03d}.png")
    return root


def test_evaluate_has_figures_per_class_and_per_client(finished_run: Path) -> None:
    figures = fp.Run(finished_run).evaluate()
    assert [line["class"] for line in figures["per_class"]["classes"]] == [str(digit) for digit in range(10)]
    assert sum(map(sum, figures["per_class"]["confusion"])) == 1000
    trace = sum(figures["per_class"]["confusion"][at][at] for at in range(10))
    assert trace / 10 == pytest.approx(figures["accuracy"])
    rows = [line["rows"] for line in figures["per_class"]["classes"]]
    declined = [line["abstained"] for line in figures["per_class"]["classes"]]
    assert np.average(declined, weights=rows) == pytest.approx(100 - figures["abstention"]["coverage"])
    assert figures["per_client"]["worst"] in ("client-00", "client-01", "client-02")
    assert len(figures["per_client"]["by_client"]) == 3
    json.dumps(figures, allow_nan=False)


def test_evaluate_on_own_folders_tells_what_the_run_would_of_the_same_rows(
    fedppd: Command, finished_run: Path, digits: Path
) -> None:
    done = fedppd("evaluate", finished_run, "--data", digits / "north", "--data", digits / "south", "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    answers = fp.Run(finished_run).predict([digits / "north", digits / "south"])
    right = [answer["class_name"] == Path(answer["image"]).parent.name for answer in answers]
    assert figures["rows"] == len(answers) == 60
    assert figures["accuracy"] == pytest.approx(100 * np.mean(right))
    assert figures["abstention"]["coverage"] == pytest.approx(100 * np.mean([not a["abstain"] for a in answers]))
    north, south = figures["per_site"]["sites"]
    assert (north["site"], north["rows"], south["site"], south["rows"]) == ("north", 40, "south", 20)
    assert north["accuracy"] == pytest.approx(100 * np.mean(right[:40]))
    assert figures["per_site"]["worst"] == ("north" if north["accuracy"] <= south["accuracy"] else "south")


def test_evaluate_prints_tables_of_classes_clients_and_sites(fedppd: Command, finished_run: Path, digits: Path) -> None:
    out = fedppd("evaluate", finished_run).out
    assert all(word in out for word in ("Per class: mean recall", "Per client", "Confusion", "worst: client-0"))
    out = fedppd("evaluate", finished_run, "--data", digits / "north", "--data", digits / "south").out
    assert "Per site, on its own rows, none of them trained on; worst: " in out
    assert "Per client" not in out


def test_evaluate_on_own_rows_refuses_what_it_cannot_use(fedppd: Command, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "cat").mkdir(parents=True)
    write_sample("mnist5k", 0, tmp_path / "a" / "cat" / "x.png", None)
    refused(fedppd("evaluate", finished_run, "--data", tmp_path / "a"), "cat", "a folder of no class")
    refused(fedppd("evaluate", finished_run, "--data", tmp_path / "absent"), "absent")
    refused(fedppd("evaluate", finished_run, "--data", tmp_path / "a", "--data", tmp_path / "a"), "the same name")
    refused(fedppd("evaluate", finished_run, "--data", tmp_path / "a", "--corruptions"), "--corruptions")


def test_a_table_is_evaluated_from_a_file(tmp_path: Path) -> None:
    config = fp.load_config("hospital", {"federation.rounds": 1, "client.epochs": 1})
    run = fp.train(config, tmp_path / "run", serial=True)
    from fedppd_ray.data.hospital import breast_cancer

    columns = breast_cancer("test")
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (tmp_path / "other.csv").write_text("\n".join(lines) + "\n")
    figures, own = run.evaluate(data=[tmp_path / "other.csv"]), run.evaluate()
    assert figures["accuracy"] == own["accuracy"]
    assert figures["per_class"] == own["per_class"]
    answers = run.predict([tmp_path / "other.csv"])
    assert len(answers) == figures["rows"]


def test_predict_takes_folders_and_another_coverage(fedppd: Command, finished_run: Path, digits: Path) -> None:
    answers = json.loads(fedppd("predict", finished_run, digits, "--json").out)
    assert [answer["image"] for answer in answers] == sorted(str(path) for path in digits.rglob("*.png"))

    def declined(*more: object) -> int:
        return sum(
            answer["abstain"] for answer in json.loads(fedppd("predict", finished_run, digits, "--json", *more).out)
        )

    assert declined("--coverage", 1) == 0
    assert declined("--coverage", 0.5) > declined() >= 0
    refused(fedppd("predict", finished_run, digits, "--coverage", 1.5), "coverage: 1.5")


def test_a_folder_without_pictures_is_named(fedppd: Command, finished_run: Path, tmp_path: Path) -> None:
    refused(fedppd("predict", finished_run, tmp_path), str(tmp_path), "holds no file of")


def test_many_classes_have_no_confusion_table() -> None:
    line = {"class": "x", "rows": 1, "recall": 1.0, "precision": None, "ece": 0.0, "scaled_ece": 0.0}
    figures = {
        "per_class": {"classes": [line] * 21, "balanced_accuracy": 1.0, "worst": "x", "confusion": [[0] * 21] * 21}
    }
    assert [title.partition(":")[0] for title in group_tables(figures)] == ["Per class"]
    (cells,) = group_tables(figures).values()
    assert cells[1] == ["x", "1", "1.00", "–", "0.00", "0.00"]


def test_figures_that_an_earlier_version_kept_still_make_tables() -> None:
    assert group_tables({"per_client": {"clients": 3, "accuracy": {}, "ece": {}}}) == {}


def test_the_run_needs_none_of_its_own_data_for_rows_from_elsewhere(
    finished_run: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("name: mnist5k", "name: mnist"))
    monkeypatch.setenv("FEDPPD_DATA", str(tmp_path / "nowhere"))
    assert fp.Run(run).evaluate(data=[digits / "north"])["rows"] == 40
