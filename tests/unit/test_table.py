"""Tables that users bring: facts from sums, rows as numbers, and the same answers by predict as by evaluate."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from fedppd_ray.cli.app import app
from fedppd_ray.cli.console import answers_as_csv
from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config
from fedppd_ray.config.table import ColumnConfig, TableConfig
from fedppd_ray.data.datasets import load
from fedppd_ray.data.encoding import encode
from fedppd_ray.data.hospital import HOSPITALS, breast_cancer
from fedppd_ray.data.readers import tables
from fedppd_ray.data.sums_file import write_sums
from fedppd_ray.data.table import ColumnSums, column_facts, shifted_rows, sums_of, table_sums
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.federation.observer import Observer
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.run import Run
from fedppd_ray.runtime.driver import train
from fedppd_ray.workers.client import ClientWorker

Rows = Sequence[Mapping[str, Any]]
HEADER = ("age", "ward", "lab", "outcome", "site")


def patients(count: int, seed: int, sites: Sequence[str] = ("north", "south")) -> list[dict[str, Any]]:
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = []
    for number in range(count):
        age = float(generator.normal(60, 12))
        ward = ("a", "b", "c")[generator.integers(3)]
        ill = age + 8 * (ward == "c") + generator.normal(0, 4) > 62
        lab = "" if generator.random() < 0.2 else f"{generator.normal(5 + ill, 1):.3f}"
        site = sites[number % len(sites)]
        rows.append({"age": age, "ward": ward, "lab": lab, "outcome": "ill" if ill else "well", "site": site})
    return rows


def write(path: Path, rows: Rows, header: Sequence[str] = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    write(tmp_path / "data/train.csv", patients(160, 0))
    write(tmp_path / "data/test.csv", patients(60, 1))
    return tmp_path / "data"


def config_for(root: Path, out: Path, table: dict[str, Any] | None = None, **sections: Any) -> Config:
    chosen = table or {"target": "outcome", "client_column": "site"}
    values = {
        "data": {"name": "table", "root": str(root), "table": chosen, "calibration": 20},
        "federation": {"rounds": 2},
        "client": {"epochs": 2, "batch_size": 16},
        "evaluation": {"ood": "shifted"},
        **sections,
    }
    path = out / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def test_facts_are_those_of_all_rows_together(one_file: Path, tmp_path: Path) -> None:
    config = config_for(one_file, tmp_path)
    table = config.data.table
    assert table is not None
    rows = patients(160, 0)
    ages = np.array([row["age"] for row in rows])
    by_name = {column.name: column for column in table.columns}
    assert list(by_name) == ["age", "ward", "lab"]
    assert by_name["age"].mean == pytest.approx(ages.mean())
    assert by_name["age"].std == pytest.approx(ages.std())
    assert by_name["ward"].categories == ("a", "b", "c")
    assert by_name["lab"].missing
    assert not by_name["age"].missing
    assert (table.classes, table.clients) == (("ill", "well"), ("north", "south"))
    assert config.federation.clients == 2
    assert config.data.partition.kind == "column"
    assert config.evaluation.ood == "shifted"
    assert config.dataset.shape == (1 + 3 + 2,)


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    values = np.array([None, "1", "2.5", "-3", None, "8"], object)
    whole = column_facts("x", sums_of(values), None)
    parts = column_facts("x", sums_of(values[:2]) + sums_of(values[2:]) + ColumnSums(), None)
    assert parts == whole.model_copy(update={"std": parts.std})
    assert parts.std == pytest.approx(whole.std)
    assert (whole.low, whole.high, whole.missing) == (-3, 8, True)


def test_of_numbers_nothing_but_sums_and_extremes_leaves_a_client_and_of_ignored_columns_nothing() -> None:
    columns = {
        "age": np.array(["61.25", "48.5", "70", None], object),
        "name": np.array(["Ada", "Bo", "Cy", "Di"], object),
        "ward": np.array(["a", "a", "b", "b"], object),
        "outcome": np.array(["1", "0", "1", "0"], object),
    }
    given = {"target": "outcome", "ignore": ["name"]}
    text = write_sums(table_sums(columns, given))
    assert not {"61.25", "Ada", "name"} & set(re.findall(r"[\w.]+", text))
    sent = json.loads(text)
    assert sent["age"] | {"low": 48.5, "high": 70.0, "total": 179.75, "rows": 4, "missing": 1} == sent["age"]
    assert sent["age"]["categories"] == []
    assert sent["ward"]["categories"] == ["a", "b"]
    assert sent["outcome"]["categories"] == ["0", "1"]
    ids = np.array([f"patient {number}" for number in range(200)], object)
    assert sums_of(ids).categories == ()


def test_facts_of_files_that_never_meet_are_those_of_the_file_that_holds_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fedppd data sums` at each client, `fedppd data facts` from what they printed."""
    rows = patients(60, 0)
    write(tmp_path / "all/train.csv", rows)
    write(tmp_path / "all/test.csv", rows[:4])
    whole = config_for(tmp_path / "all", tmp_path, {"target": "outcome", "ignore": ["site"]}).data.table
    assert whole is not None
    options = tmp_path / "options.yaml"
    options.write_text(yaml.safe_dump({"data": {"name": "table", "table": {"target": "outcome", "ignore": ["site"]}}}))
    told = []
    for number, part in enumerate((rows[:10], rows[10:])):
        path = write(tmp_path / f"{number}.csv", part)
        app(["data", "sums", str(options), str(path)], standalone_mode=False)
        told.append(tmp_path / f"{number}.json")
        told[-1].write_text(capsys.readouterr().out)
    app(["data", "facts", str(options), *map(str, told)], standalone_mode=False)
    section = TableConfig.model_validate(yaml.safe_load(capsys.readouterr().out)["data"]["table"])
    for one, other in zip(section.columns, whole.columns, strict=True):
        assert one.model_dump(exclude={"mean", "std"}) == other.model_dump(exclude={"mean", "std"})
        assert (one.mean, one.std) == pytest.approx((other.mean, other.std))
    assert section.classes == whole.classes
    told[0].write_text("{}")
    with pytest.raises(DataError, match="'age' is not in all of them"):
        app(["data", "facts", str(options), *map(str, told)], standalone_mode=False)


def test_a_column_of_numbers_here_and_texts_there_is_refused_with_the_remedy() -> None:
    numbers, texts = (np.array(values, object) for values in (["1", "2"], ["x", None]))
    with pytest.raises(DataError, match=r"column 'zip' has numbers in one file.*kinds: \{zip: categorical\}"):
        column_facts("zip", sums_of(numbers) + sums_of(texts), None)
    both = sums_of(numbers, "categorical") + sums_of(texts, "categorical")
    assert column_facts("zip", both, "categorical").categories == ("1", "2", "x")


def test_a_row_becomes_standardised_numbers_one_hot_and_an_indicator() -> None:
    facts = [
        ColumnConfig(name="age", kind="numeric", mean=50, std=10, missing=True),
        ColumnConfig(name="ward", kind="categorical", categories=("a", "b"), missing=True),
    ]
    columns = {
        "age": np.array(["60", None, "40"], object),
        "ward": np.array(["b", "never seen", None], object),
    }
    expected = [[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [-1, 0, 0, 0, 1]]
    assert encode(columns, facts, "here").tolist() == expected


@pytest.fixture
def trained(one_file: Path, tmp_path: Path) -> tuple[Config, Path]:
    config = config_for(one_file, tmp_path)
    train(config, tmp_path / "run", Observer(), serial=True)
    return config, tmp_path / "run"


def test_predict_answers_what_evaluate_computed_and_needs_no_data_file(
    trained: tuple[Config, Path], one_file: Path, tmp_path: Path
) -> None:
    _, run = trained
    card, _ = read_student(run)
    assert card["table"]["columns"][0]["name"] == "age"
    figures = Run(run).evaluate()
    assert 0 <= figures["ood_auroc"] <= 1
    rows = write(tmp_path / "elsewhere/rows.csv", patients(60, 1), ("ward", "lab", "age"))
    labels = [row["outcome"] for row in patients(60, 1)]
    for name in ("train.csv", "test.csv"):
        (one_file / name).unlink()
    answers = Run(run).predict([rows])
    assert figures["accuracy"] == pytest.approx(
        100 * np.mean([answer["class_name"] == label for answer, label in zip(answers, labels, strict=True)])
    )
    table = list(csv.DictReader(io.StringIO(answers_as_csv(answers))))
    assert len(table) == 60
    assert float(table[3]["probability_0"]) == answers[3]["probabilities"][0]
    assert {row["abstain"] for row in table} <= {"0", "1"}


def test_a_run_of_a_table_resumes_with_the_same_bits(trained: tuple[Config, Path], tmp_path: Path) -> None:
    config, run = trained
    path = tmp_path / "config.yaml"
    train(load_config(path, {"federation.rounds": 1}), tmp_path / "again", Observer(), serial=True)
    train(config, tmp_path / "again", Observer(), serial=True, resume=True)
    assert np.array_equal(read_student(run)[1].export(), read_student(tmp_path / "again")[1].export())


def test_values_beyond_training_are_named(trained: tuple[Config, Path], tmp_path: Path) -> None:
    rows = [{"age": 400, "ward": "z", "lab": ""}, {"age": 60, "ward": "a", "lab": "5"}]
    path = write(tmp_path / "odd.csv", rows, ("age", "ward", "lab"))
    assert [answer["outside"] for answer in Run(trained[1]).predict([path])] == [["age", "ward"], []]


def test_each_client_may_hold_a_file_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write(root / "test.csv", patients(30, 9))
    for number, rows in enumerate((30, 12)):
        write(root / f"clients/client-{number:02d}.csv", patients(rows, number))
    table = {"target": "outcome", "ignore": ["site"]}
    config = config_for(root, tmp_path, table, federation={"clients": 2, "rounds": 1})
    config = load_config(tmp_path / "config.yaml", {"data.calibration": 0})
    assert config.data.partition.kind == "folders"
    infos = ClientWorker(config, ["client-00", "client-01"]).describe()
    assert [info.rows for info in infos] == [30, 12]
    assert config.data.table is not None
    ages = [row["age"] for number, count in enumerate((30, 12)) for row in patients(count, number)]
    assert config.data.table.columns[0].mean == pytest.approx(np.mean(ages))


def _first(rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    return [{**rows[0], **changes}, *rows[1:]]


@pytest.mark.parametrize(
    ("test_rows", "message"),
    [
        (_first(patients(5, 1), outcome="dead"), r"test.csv: row 1, column 'outcome': 'dead' is none of ill, well"),
        (_first(patients(5, 1), outcome=""), "nothing is none of ill, well; mend or remove the row"),
        (_first(patients(5, 1), age="old"), r"test.csv: row 1, column 'age': 'old' is not a number"),
        ([], "test.csv: holds no row"),
    ],
)
def test_a_bad_row_is_named_with_file_column_and_remedy(
    one_file: Path, tmp_path: Path, test_rows: Rows, message: str
) -> None:
    write(one_file / "test.csv", test_rows)
    config = config_for(one_file, tmp_path)
    with pytest.raises(DataError, match=message):
        load("table", config.data.root, config.dataset).test  # noqa: B018


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"target": "nothing"}, "there is no column 'nothing'; the columns are age, ward"),
        ({}, "target is missing"),
        ({"target": "outcome", "kinds": {"ward": "numeric"}}, "ward is not numeric: it holds 'a'"),
        ({"target": "outcome", "colums": []}, "unknown key 'colums'"),
    ],
)
def test_a_wrong_section_is_named(one_file: Path, tmp_path: Path, table: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"data": {"name": "table", "root": str(one_file), "table": table}}))
    with pytest.raises((ConfigError, DataError), match=message):
        load_config(path)


def test_images_out_of_distribution_or_augmentation_are_refused_for_tables(one_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.ood: glyphs are images; for a table set it to shifted"):
        config_for(one_file, tmp_path, evaluation={"ood": "glyphs"})
    with pytest.raises(ConfigError, match=r"client.augment"):
        config_for(one_file, tmp_path, client={"augment": "crop_flip"})


def test_a_column_of_too_many_texts_is_refused_with_the_remedy() -> None:
    values = np.array([f"patient {number}" for number in range(300)], object)
    with pytest.raises(DataError, match=r"put it into data.table.ignore"):
        column_facts("id", sums_of(values), None)


def test_missing_values_have_many_spellings(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\nNA,1\n?, 2 \n,nan\nx,3\n")
    columns = tables.read(path)
    assert columns["a"].tolist() == [None, None, None, "x"]
    assert columns["b"].tolist() == ["1", "2", None, "3"]


def test_a_parquet_file_says_the_same_as_csv(one_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    as_csv = config_for(one_file, tmp_path).data.table
    frame = pd.read_csv(one_file / "train.csv")
    (one_file / "train.csv").unlink()
    frame.to_parquet(one_file / "train.parquet")
    assert config_for(one_file, tmp_path).data.table == as_csv


def test_five_hospitals_differ_in_size_and_case_mix() -> None:
    columns = breast_cancer("train")
    owners, ill = columns["hospital"], columns["diagnosis"] == "malignant"
    shares = {name: ill[owners == name].mean() for name in HOSPITALS}
    sizes = {name: int((owners == name).sum()) for name in HOSPITALS}
    assert sum(sizes.values()) + len(breast_cancer("test")["diagnosis"]) == 569
    assert shares["cancer centre"] > 0.55 > 0.1 > shares["screening"]
    assert max(sizes.values()) > 3 * min(sizes.values())


def test_shifted_rows_are_moved_by_deviations_and_are_always_the_same(one_file: Path, tmp_path: Path) -> None:
    config = config_for(one_file, tmp_path)
    test = load("table", config.data.root, config.dataset).test.images
    assert config.data.table is not None
    moved = shifted_rows(test, config.data.table)
    assert np.array_equal(moved, shifted_rows(test, config.data.table))
    assert np.array_equal(moved, HeldOut(config).images("ood"))
    assert set(np.round(np.abs(moved[:, 0] - test[:, 0])).tolist()) == {0, 4}
    assert not (moved[:, 1:4] == test[:, 1:4]).all(axis=1).any()


@pytest.mark.parametrize("rows", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_large_table_is_mapped_and_standardised(tmp_path: Path, rows: int) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    # A fifth, five times: writing is not what is tested.
    text = np.char.mod("%.3f", generator.normal(size=(rows // 5, 50)))
    header = ",".join(f"c{number}" for number in range(50)) + ",y"
    lines = "\n".join(",".join([*row, "pn"[number % 2]]) for number, row in enumerate(text.tolist()))
    (tmp_path / "train.csv").write_text(header + "\n" + "\n".join([lines] * 5) + "\n")
    (tmp_path / "test.csv").write_text(header + "\n" + "\n".join(lines.split("\n")[:10]) + "\n")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"data": {"name": "table", "root": str(tmp_path), "table": {"target": "y"}}}))
    config = load_config(path)
    train_part = load("table", config.data.root, config.dataset).train
    assert train_part.images.shape == (rows, 50)
    assert isinstance(train_part.images, np.memmap)
    assert np.abs(np.asarray(train_part.images).mean(axis=0)).max() < 1e-3


def test_a_card_holds_all_that_a_row_needs(trained: tuple[Config, Path]) -> None:
    card = json.loads((trained[1] / "student/model.json").read_text())
    assert card["input"] == {"numbers": 6}
    assert {"name", "kind", "mean", "std", "low", "high"} <= set(card["table"]["columns"][0])
