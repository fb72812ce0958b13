"""Tables wherever images go: comparisons, active learning, and configs/hospital.yaml resumed to the bit."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from fedppd_ray.api import compare, study_active
from fedppd_ray.config.file import find_config, load_config
from fedppd_ray.errors import FedPPDError
from fedppd_ray.federation.observer import Observer
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.run import Run
from fedppd_ray.runtime.driver import train

SHORT = {"federation.rounds": 2, "client.epochs": 1}


def test_the_hospitals_resume_with_the_same_bits_and_have_an_ood_figure(tmp_path: Path) -> None:
    config = load_config("hospital", SHORT)
    train(config, tmp_path / "whole", Observer(), serial=True)
    train(load_config("hospital", {**SHORT, "federation.rounds": 1}), tmp_path / "parts", Observer(), serial=True)
    train(config, tmp_path / "parts", Observer(), serial=True, resume=True)
    one, other = (read_student(tmp_path / name)[1].export() for name in ("whole", "parts"))
    assert np.array_equal(one, other)
    assert 0 <= Run(tmp_path / "whole").evaluate()["ood_auroc"] <= 1


def test_methods_are_compared_on_a_table(tmp_path: Path) -> None:
    done = compare("hospital", tmp_path, methods=["fedppd", "fedavg", "fedbe"], overrides=SHORT, serial=True)
    assert all(done.finished(name) for name in ("fedppd", "fedavg", "fedbe")), done


def test_a_table_is_labelled_actively(tmp_path: Path) -> None:
    values = yaml.safe_load(find_config("hospital").read_text())
    values["active"] = {"labelled": 6, "pool": 10, "budget": 10}
    path = tmp_path / "active.yaml"
    path.write_text(yaml.safe_dump(values))
    study = study_active(path, tmp_path / "out", methods=["fedppd"], overrides=SHORT, serial=True)
    assert [point.labels for point in study.of("fedppd", "entropy")] == [6, 16]
    values["active"]["pool"] = 1000
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(FedPPDError, match=r"active: client-\d+ holds \d+ rows, fewer than"):
        study_active(path, tmp_path / "more", methods=["fedppd"], overrides=SHORT, serial=True)
