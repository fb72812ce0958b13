"""FedPPD: federated learning with distilled predictive distributions (ACML 2023). [4][5]

A client samples its posterior by SGLD (the teacher's chain) and distils the posterior predictive distribution,
online, into a student network. The server aggregates teachers and students the same way, in parallel: by a
weighted average, or by Gaussian, ensemble and SWA distillation.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.distill import noisy, student_step
from fedppd_ray.bayes.ensemble import server_distillation
from fedppd_ray.bayes.likelihood import label_loss, label_shift
from fedppd_ray.bayes.samplers import Sampler
from fedppd_ray.config.schema import Config, for_rows, settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.federation.aggregate import build_rule
from fedppd_ray.federation.momentum import with_momentum
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models
from fedppd_ray.methods.base import Aggregation, LocalResult, Method, NetworkConfig, Row, ServerResult
from fedppd_ray.methods.paper import LOCAL, SAMPLING, SERVER, authors, figures
from fedppd_ray.methods.settings import DistillConfig, check_distill, class_weights, rate_factor
from fedppd_ray.methods.student import StudentConfig, StudentPlan, check_student, plan_student, student_by_rounds
from fedppd_ray.methods.teacher import TeacherConfig, build_sampler, check_sampler, labels_of, log_posterior
from fedppd_ray.models.flat import FlatModel, Vector
from fedppd_ray.models.networks import seed_dropout
from fedppd_ray.seeding import generator_for

ROLES = ("teacher", "student")


class ServerConfig(Section):
    aggregate: Literal["average", "distill"] = Field(
        default="average", description="distill: on unlabelled rows of the server, see data.server_pool"
    )
    distill: DistillConfig = DistillConfig()


class FedPPDSettings(Section):
    teacher: TeacherConfig = TeacherConfig()
    student: StudentConfig = StudentConfig()
    server: ServerConfig = ServerConfig()


@dataclass(frozen=True)
class _Chain:
    """The settings of one client's chain in one round."""

    rows: int
    prior_precision: float
    sampler: Sampler
    shift: Tensor | None  # τ log π_k, of the client's labels
    weights: Tensor | None  # w_c, of the client's labels
    student: StudentPlan
    generator: torch.Generator
    cancelled: Callable[[], bool]

    def check(self) -> None:
        if self.cancelled():
            raise LocalUpdateCancelled("told to stop: the round's deadline has passed")


class FedPPD(Method):
    """Clients sample their posterior and distil its predictive distribution into a student."""

    name = "fedppd"
    Settings: ClassVar[type[Section]] = FedPPDSettings

    # ---- configuration

    @classmethod
    def networks(cls, config: Any) -> Mapping[str, NetworkConfig]:
        settings = settings_of(config, FedPPDSettings)
        return {"teacher": settings.teacher, "student": settings.student}

    @classmethod
    def exported_role(cls, config: Any) -> str:
        return "student"

    @classmethod
    def check(cls, config: Any) -> None:
        settings = settings_of(config, FedPPDSettings)
        check_sampler(settings.teacher, config.client.epochs)
        check_student(settings.student)
        if settings.server.aggregate == "distill":
            check_distill(settings.server.distill, config.federation.rounds)

    @classmethod
    def by_rounds(cls, config: Any) -> list[str]:
        return [*super().by_rounds(config), *student_by_rounds(settings_of(config, FedPPDSettings).student)]

    @classmethod
    def unused(cls, values: Mapping[str, Any]) -> dict[str, str]:
        return {} if cls.needs_pool(values) else {"server.distill": "server.aggregate=average does not distil"}

    @classmethod
    def needs_pool(cls, values: Mapping[str, Any]) -> bool:
        return bool(values.get("server", {}).get("aggregate") == "distill")

    @classmethod
    def rates(cls, config: Any) -> str:
        server = settings_of(config, FedPPDSettings).server
        return "student.rate" + (" or the rates of server.distill" if server.aggregate == "distill" else "")

    @classmethod
    def server_rates(cls, config: Any) -> str:
        return "the rates of server.distill"

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        average, distill = ("method=fedppd", "server.aggregate=average"), ("method=fedppd", "server.aggregate=distill")
        femnist = {"teacher.rate": 0.06, "teacher.rate_gamma": 0.85}
        return (
            Row("fedppd", average, figures("fedppd"), authors(LOCAL, SAMPLING)),
            Row(
                "fedppd_distill", distill, figures("fedppd_distill"), authors(LOCAL, SAMPLING, SERVER, femnist=femnist)
            ),
        )

    # ---- start

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self.settings = settings_of(config, FedPPDSettings)
        self.networks_by_role = {role: self.build(role) for role in ROLES}

    def initial_models(self) -> Models:
        for role, network in self.networks_by_role.items():
            self.initialise(network, role)
        return {role: network.export() for role, network in self.networks_by_role.items()}

    # ---- client

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        """Sampling by the teacher, online distillation into the student; sends θ_MAP (or the last θ) and w.

        θ_MAP is the sample, one per epoch, of the highest posterior density on the client's rows as they are. That
        takes a forward pass of the teacher per epoch, 8 % of the update. An estimate from the pass that distillation
        makes anyway is free, but chooses another sample where rows are augmented (8 of 40 times) or where the chain
        moves on meanwhile (`distill_every: iteration`, 12 of 40 times).

        Epochs in which the sampler only explores teach the student nothing and offer no θ_MAP.
        """
        teacher, student = self.networks_by_role["teacher"], self.networks_by_role["student"]
        teacher.load(state.models["teacher"])
        student.load(state.models["student"])
        chain = self._chain(client, state.round + 1, shard, cancelled)
        seed_dropout(teacher.module, chain.generator)
        seed_dropout(student.module, chain.generator)
        run_epoch = self._distil_per_epoch if self.settings.student.distill_every == "epoch" else self._distil_online
        best, best_density = None, float("-inf")
        loss = float("nan")
        for epoch in range(self.config.client.epochs):
            if not chain.sampler.schedule.samples(epoch):
                self._run_teacher(shard, chain, epoch)
                continue
            loss = run_epoch(shard, chain, epoch)
            if self.settings.teacher.send == "map":
                density = log_posterior(teacher, shard, chain.prior_precision, chain.shift, chain.weights)
                if best is None or density > best_density:
                    best, best_density = teacher.export(), density
        metrics = {"distillation_loss": loss}
        if best is not None:
            metrics["log_posterior_per_row"] = best_density / chain.rows
        sent = teacher.export() if best is None else best
        return LocalResult({"teacher": sent, "student": student.export()}, metrics)

    def _chain(self, client: str, round_id: int, shard: Shard, cancelled: Callable[[], bool]) -> _Chain:
        config, teacher, rows = self.config, self.settings.teacher, len(shard)
        rate = teacher.rate * rate_factor(config, round_id)
        shift = label_shift(labels_of(shard), len(config.dataset.classes), config.client.label_shift)
        weights = class_weights(config, labels_of(shard))
        return _Chain(
            rows=rows,
            prior_precision=for_rows(teacher.prior_precision, rows),
            sampler=build_sampler(teacher, rate=rate, epochs=config.client.epochs, rows=rows),
            shift=shift,
            weights=weights,
            student=plan_student(config, self.settings.student, client, round_id, shift, weights, self.device),
            generator=generator_for(config.seed, "local", round_id, client, self.device),
            cancelled=cancelled,
        )

    def _distil_per_epoch(self, shard: Shard, chain: _Chain, epoch: int) -> float:
        """A teacher epoch, then a student epoch against its last iterate; returns the mean distillation loss."""
        self._run_teacher(shard, chain, epoch)
        return self._distil(shard, chain, lambda _inputs, _rows: None)

    def _distil_online(self, shard: Shard, chain: _Chain, epoch: int) -> float:
        """One step of the chain, one student step, batch by batch: the paper's Algorithm 1 to the letter."""
        return self._distil(
            shard, chain, lambda inputs, rows: self._sample(inputs, labels_of(shard)[rows], chain, epoch)
        )

    def _distil(self, shard: Shard, chain: _Chain, before: Callable[[Tensor, Tensor], None]) -> float:
        teacher, student = self.networks_by_role["teacher"], self.networks_by_role["student"]
        settings, plan, loss = self.settings.student, chain.student, 0.0
        student.module.train()
        for inputs, rows in shard.batches(self.config.client.batch_size, chain.generator):
            chain.check()
            before(inputs, rows)
            mix = plan.draw_mix(rows)
            shown = inputs if mix is None else mix.of(inputs)
            perturbed = noisy(shown, settings.input_noise, chain.generator)
            teacher.module.eval()  # dropout is part of sampling, not of the targets
            with torch.no_grad():
                targets = torch.softmax(teacher.module(perturbed), 1)
            labels = plan.label_term(labels_of(shard)[rows], mix)
            loss += len(rows) * student_step(
                student, perturbed, targets, plan.rate, settings.weight_decay, labels=labels, outliers=plan.outliers
            )
        return loss / chain.rows

    def _run_teacher(self, shard: Shard, chain: _Chain, epoch: int) -> None:
        for inputs, rows in shard.batches(self.config.client.batch_size, chain.generator):
            chain.check()
            self._sample(inputs, labels_of(shard)[rows], chain, epoch)

    def _sample(self, inputs: Tensor, labels: Tensor, chain: _Chain, epoch: int) -> None:
        teacher = self.networks_by_role["teacher"]
        teacher.module.train()
        gradient = teacher.backward(label_loss(teacher.module(inputs), labels, chain.shift, chain.weights))
        chain.sampler.step(teacher.weights, gradient, epoch=epoch, generator=chain.generator)

    # ---- server

    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        return {role: network.layout.size for role, network in self.networks_by_role.items()}

    def aggregation(self, state: GlobalState) -> Aggregation:
        return FedPPDAggregation(self, state)

    # ---- prediction

    def student(self, models: Models) -> FlatModel:
        student = self.networks_by_role["student"]
        student.load(models["student"])
        return student

    def teacher(self, models: Models) -> FlatModel | None:
        teacher = self.networks_by_role["teacher"]
        teacher.load(models["teacher"])
        return teacher


class FedPPDAggregation:
    """Server_Update for teachers and students alike."""

    def __init__(self, method: FedPPD, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._settings = method.settings.server
        self._distils = self._settings.aggregate == "distill" and self._settings.distill.in_round(state.round + 1)
        self._rule = build_rule(method.config.federation.aggregation, method.update_sizes(state))
        # Only distillation needs every client's model.
        self._members: dict[str, list[Vector]] = {role: [] for role in ROLES}

    def fold(self, update: ClientUpdate) -> None:
        self._rule.add(update.models, update.receipt.rows)
        if self._distils:
            for role in ROLES:
                self._members[role].append(update.models[role])

    def finish(self, pool: Shard | None) -> ServerResult:
        parameters = {role: network.layout.parameters for role, network in self._method.networks_by_role.items()}
        momentum = self._method.config.federation.server_momentum
        averages, kept = with_momentum(self._state, self._rule.result(), parameters, momentum)
        if not self._distils:
            return ServerResult(averages, kept)
        if pool is None:
            raise ValueError("distillation on the server needs its unlabelled pool")
        stopped = threading.Event()
        with ThreadPoolExecutor(len(ROLES)) as threads:
            running = {role: threads.submit(self._distil, role, averages[role], pool, stopped) for role in ROLES}
            try:
                return ServerResult({role: future.result() for role, future in running.items()}, kept)
            except BaseException:  # Ctrl-C above all: no thread hears it, and the pool waits for its threads
                stopped.set()
                raise

    def _distil(self, role: str, average: Vector, pool: Shard, stopped: threading.Event) -> Vector:
        method, round_id = self._method, self._state.round + 1
        return server_distillation(
            method.networks_by_role[role],
            self._state.models[role],
            average,
            self._members[role],
            pool,
            self._settings.distill.plan(role),
            drawn=generator_for(method.config.seed, f"gaussian/{role}", round_id),
            stream=generator_for(method.config.seed, f"distil/{role}", round_id, device=method.device),
            cancelled=stopped.is_set,
        )
