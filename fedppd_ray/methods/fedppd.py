"""FedPPD: federated learning with distilled predictive distributions (ACML 2023). [4][5]

A client samples its posterior by SGLD (the teacher's chain) and distils the posterior predictive distribution,
online, into a student network. The server aggregates teachers and students the same way, in parallel: by a
weighted average, or by Gaussian, ensemble and SWA distillation.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedppd_ray.config import Config, for_rows
from fedppd_ray.core.aggregate import StreamingAverage
from fedppd_ray.core.distill import noisy, student_step
from fedppd_ray.core.ensemble import server_distillation
from fedppd_ray.core.samplers import Sampler, build_sampler
from fedppd_ray.core.sgld import log_prior
from fedppd_ray.core.types import ClientUpdate, GlobalState, Models
from fedppd_ray.data.batches import Shard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.evaluation.predictive import Predictor, network_predictor
from fedppd_ray.methods.base import LocalResult
from fedppd_ray.models.flat import FlatModel, Vector
from fedppd_ray.models.networks import build_network, first_weights, seed_dropout
from fedppd_ray.seeding import generator_for

ROLES = ("teacher", "student")


@dataclass(frozen=True)
class _Chain:
    """The settings of one client's chain in one round."""

    rows: int
    prior_precision: float
    sampler: Sampler
    student_rate: float
    generator: torch.Generator
    cancelled: Callable[[], bool]

    def check(self) -> None:
        if self.cancelled():
            raise LocalUpdateCancelled("told to stop: the round's deadline has passed")


class FedPPD:
    one_network = True

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        info = config.dataset
        self.networks = {
            role: FlatModel(build_network(config.network_for(role), info.shape, len(info.classes)), self.device)
            for role in ROLES
        }

    # ---- start

    def initial_models(self) -> Models:
        models: dict[str, Vector] = {}
        for role in ROLES:
            network = self.networks[role]
            generator = generator_for(self.config.seed, f"init/{role}", device=self.device)
            first_weights(network.module, self.config.network_for(role), generator, self.config.pretrained(role))
            models[role] = network.export()
        return models

    # ---- client

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        """Sampling by the teacher, online distillation into the student; sends θ_MAP (or the last θ) and w.

        Epochs in which the sampler only explores teach the student nothing and offer no θ_MAP.
        """
        teacher, student = self.networks["teacher"], self.networks["student"]
        teacher.load(state.models["teacher"])
        student.load(state.models["student"])
        chain = self._chain(client, state.round + 1, shard, cancelled)
        seed_dropout(teacher.module, chain.generator)
        seed_dropout(student.module, chain.generator)
        run_epoch = self._distil_per_epoch if self.config.student.distill_every == "epoch" else self._distil_online
        best, best_density = None, float("-inf")
        loss = float("nan")
        for epoch in range(self.config.client.epochs):
            if not chain.sampler.schedule.samples(epoch):
                self._run_teacher(shard, chain, epoch)
                continue
            log_likelihood, loss = run_epoch(shard, chain, epoch)
            density = log_likelihood + log_prior(teacher.weights, chain.prior_precision)
            if self.config.teacher.send == "last" or best is None or density > best_density:
                best, best_density = teacher.export(), density
        if best is None:
            raise RuntimeError("a local update of no epoch that samples")
        metrics = {"log_posterior_per_row": best_density / chain.rows, "distillation_loss": loss}
        return LocalResult({"teacher": best, "student": student.export()}, metrics)

    def _chain(self, client: str, round_id: int, shard: Shard, cancelled: Callable[[], bool]) -> _Chain:
        config, rows = self.config, len(shard)
        decay = config.client.rate_decay ** (round_id - 1)
        return _Chain(
            rows=rows,
            prior_precision=for_rows(config.teacher.prior_precision, rows),
            sampler=build_sampler(
                config.teacher, rate=config.teacher.rate * decay, epochs=config.client.epochs, rows=rows
            ),
            student_rate=config.student.rate * decay,
            generator=generator_for(config.seed, "local", round_id, client, self.device),
            cancelled=cancelled,
        )

    def _distil_per_epoch(self, shard: Shard, chain: _Chain, epoch: int) -> tuple[float, float]:
        """A teacher epoch, then a student epoch against its last iterate.

        Returns the log likelihood of that iterate, estimated on the pass that distillation makes anyway, and
        the mean distillation loss.
        """
        self._run_teacher(shard, chain, epoch)
        return self._distil(shard, chain, lambda _inputs, _rows: None)

    def _distil_online(self, shard: Shard, chain: _Chain, epoch: int) -> tuple[float, float]:
        """One step of the chain, one student step, batch by batch: the paper's Algorithm 1 to the letter."""
        return self._distil(shard, chain, lambda inputs, rows: self._sample(inputs, _labels(shard, rows), chain, epoch))

    def _distil(self, shard: Shard, chain: _Chain, before: Callable[[Tensor, Tensor], None]) -> tuple[float, float]:
        teacher, student, settings = self.networks["teacher"], self.networks["student"], self.config.student
        log_likelihood = loss = 0.0
        student.module.train()
        for inputs, rows in shard.batches(self.config.client.batch_size, chain.generator):
            chain.check()
            before(inputs, rows)
            perturbed = noisy(inputs, settings.input_noise, chain.generator)
            teacher.module.eval()  # dropout is part of sampling, not of the targets
            with torch.no_grad():
                log_p = torch.log_softmax(teacher.module(perturbed), 1)
                log_likelihood += float(log_p.gather(1, _labels(shard, rows)[:, None]).sum())
            loss += len(rows) * student_step(student, perturbed, log_p.exp(), chain.student_rate, settings.weight_decay)
        return log_likelihood, loss / chain.rows

    def _run_teacher(self, shard: Shard, chain: _Chain, epoch: int) -> None:
        for inputs, rows in shard.batches(self.config.client.batch_size, chain.generator):
            chain.check()
            self._sample(inputs, _labels(shard, rows), chain, epoch)

    def _sample(self, inputs: Tensor, labels: Tensor, chain: _Chain, epoch: int) -> None:
        teacher = self.networks["teacher"]
        teacher.module.train()
        gradient = teacher.backward(F.cross_entropy(teacher.module(inputs), labels))
        chain.sampler.step(teacher.weights, gradient, epoch=epoch, generator=chain.generator)

    # ---- server

    def update_sizes(self, _state: GlobalState) -> Mapping[str, int]:
        return {role: network.layout.size for role, network in self.networks.items()}

    def aggregation(self, state: GlobalState) -> "FedPPDAggregation":
        return FedPPDAggregation(self, state)

    # ---- prediction

    def student(self, models: Models) -> FlatModel:
        student = self.networks["student"]
        student.load(models["student"])
        return student

    def predictor(self, models: Models) -> Predictor:
        return network_predictor(self.student(models))


class FedPPDAggregation:
    """Server_Update for teachers and students alike."""

    def __init__(self, method: FedPPD, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._averages = {role: StreamingAverage(state.models[role].size) for role in ROLES}
        # Only distillation needs every client's model.
        self._members: dict[str, list[Vector]] = {role: [] for role in ROLES}

    def fold(self, update: ClientUpdate) -> None:
        for role in ROLES:
            self._averages[role].add(update.models[role], update.receipt.rows)
            if self._method.config.server.aggregate == "distill":
                self._members[role].append(update.models[role])

    def finish(self, pool: Shard | None) -> Models:
        averages = {role: self._averages[role].result() for role in ROLES}
        if self._method.config.server.aggregate == "average":
            return averages
        if pool is None:
            raise ValueError("distillation on the server needs its unlabelled pool")
        stopped = threading.Event()
        with ThreadPoolExecutor(len(ROLES)) as threads:
            running = {role: threads.submit(self._distil, role, averages[role], pool, stopped) for role in ROLES}
            try:
                return {role: future.result() for role, future in running.items()}
            except BaseException:  # Ctrl-C above all: no thread hears it, and the pool waits for its threads
                stopped.set()
                raise

    def _distil(self, role: str, average: Vector, pool: Shard, stopped: threading.Event) -> Vector:
        method, round_id = self._method, self._state.round + 1
        settings = method.config.server.distill
        return server_distillation(
            method.networks[role],
            self._state.models[role],
            average,
            self._members[role],
            pool,
            settings.teacher_rate if role == "teacher" else settings.student_rate,
            settings,
            drawn=generator_for(method.config.seed, f"gaussian/{role}", round_id),
            stream=generator_for(method.config.seed, f"distil/{role}", round_id, device=method.device),
            cancelled=stopped.is_set,
        )


def _labels(shard: Shard, rows: Tensor) -> Tensor:
    if shard.labels is None:
        raise ValueError("a client's shard needs labels")
    return shard.labels[rows]
