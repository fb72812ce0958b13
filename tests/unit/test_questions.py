"""What clients may be asked of rows that they keep back, and what may leave them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from fedppd_ray.config.data import DataConfig
from fedppd_ray.config.file import parse_config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.questions import Figures
from fedppd_ray.inference.questions import MOST_NUMBERS, Question, answer_to, question_of
from fedppd_ray.inference.scores import Labels, Outputs


class Rows(Question):
    kind: ClassVar[str] = "rows"
    times: int = 1

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        return {"scores": np.tile(outputs.log_probabilities[:, 0], self.times)}


def outputs(rows: int) -> tuple[Outputs, Labels]:
    return Outputs(np.full((rows, 2), np.log(0.5))), np.arange(rows) % 2


def test_a_question_travels_as_data_and_comes_back_the_same() -> None:
    assert question_of(Figures().told()) == Figures()


@pytest.mark.parametrize("told", [{}, {"kind": "os.system"}, {"kind": "figures", "novelty": 1}, {"kind": 3}])
def test_a_question_that_is_not_known_here_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="question"):
        question_of(told)


def test_nothing_is_said_of_fewer_than_ten_rows() -> None:
    assert answer_to(Figures(), *outputs(9)) is None
    assert float((answer_to(Figures(), *outputs(10)) or {})["rows"]) == 10


def test_an_answer_that_could_be_rows_does_not_leave() -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_NUMBERS} may leave"):
        answer_to(Rows(times=MOST_NUMBERS // 10 + 1), *outputs(10))


def test_an_answer_that_is_not_finite_does_not_leave() -> None:
    known, labels = outputs(10)
    with pytest.raises(ValueError, match="diverged"):
        answer_to(Rows(), Outputs(known.log_probabilities * np.nan), labels)


# ---- who keeps what back


def own(calibration: object) -> DataConfig:
    return DataConfig.model_validate({"partition": {"kind": "folders"}, "calibration": calibration})


@pytest.mark.parametrize(
    ("calibration", "rows", "kept"),
    [(0.2, 50, 10), (0.2, 51, 11), ("auto", 39, 0), ("auto", 40, 10), ("auto", 100, 10), ("auto", 1234, 124)],
)  # fmt: skip
def test_a_client_keeps_back_the_share_that_is_stated(calibration: object, rows: int, kept: int) -> None:
    assert own(calibration).kept_rows(rows) == kept
    assert own(calibration).calibration_rows(rows) == 0


def test_of_common_rows_the_same_share_is_held_out_and_clients_keep_none() -> None:
    common = DataConfig.model_validate({"calibration": "auto"})
    assert (common.calibration_rows(4000), common.kept_rows(4000)) == (400, 0)


@pytest.mark.parametrize("calibration", [-1, 1.5, "automatic"])
def test_a_share_that_is_none_is_refused(calibration: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.calibration"):
        parse_config({"data": {"calibration": calibration}})


def test_kept_rows_and_training_rows_are_all_rows_once_and_depend_on_seed_and_client_alone(tmp_path: Any) -> None:
    for client in ("client-00", "client-01"):
        (tmp_path / client).mkdir()
        images = np.zeros((100, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(100)  # a number of its own for each row
        np.save(tmp_path / client / "images.npy", images)
        np.save(tmp_path / client / "labels.npy", np.arange(100) % 10)

    def kept(seed: int, client: str) -> list[int]:
        config = parse_config(
            {
                "seed": seed,
                "data": {"calibration": 0.3, "partition": {"kind": "folders"}},
                "federation": {"clients": 2},
                "clients": {name: {"data": str(tmp_path / name)} for name in ("client-00", "client-01")},
            }
        )
        holdings = Holdings(config, [client])
        train, back = holdings.of(client), holdings.kept_back(client)
        numbers = [split.images[:, 0, 0, 0].tolist() for split in (train, back)]
        assert sorted([*numbers[0], *numbers[1]]) == list(range(100))
        assert (train.labels == np.array(numbers[0]) % 10).all()
        assert len(back) == 30
        return list(numbers[1])

    assert kept(0, "client-00") == kept(0, "client-00")
    assert kept(0, "client-00") != kept(0, "client-01")
    assert kept(0, "client-00") != kept(1, "client-00")
