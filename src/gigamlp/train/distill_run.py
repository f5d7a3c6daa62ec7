"""The stages of a distillation: pool, teacher, students; each starts from what the checkpoint has of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch

from gigamlp.measure.clock import clock_for, stopwatch
from gigamlp.train.bank import Bank
from gigamlp.train.bank_layout import Student
from gigamlp.train.checkpoint import Checkpoint
from gigamlp.train.distill_values import Distillation, Moment, Settings, Trained
from gigamlp.train.encode import Problem
from gigamlp.train.pool import Pool, Progress, TeacherLogits, epoch_plan, make_pool
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array
from gigamlp.train.selection import Chosen, Ground, held_rows, restored, select
from gigamlp.train.teacher import (
    ConvTeacher,
    MLPTeacher,
    callable_teacher,
    fit_conv,
    fit_mlps,
    restore_conv,
    restore_mlps,
)
from gigamlp.train.window import Runs

__all__ = ["Run"]

_Net: TypeAlias = tuple[tuple[int, ...], str]  # hidden widths, and the label of what is read

_LOOKS = 20  # evaluations and checkpoints of one bank
_PROBE_EPOCHS = 3
_ROWS = 1024  # that the teacher answers at once


class Run:
    """The stages one after the other, each of which starts from what the checkpoint has of it."""

    def __init__(
        self,
        *,
        problem: Problem,
        settings: Settings,
        teacher: Callable[[Array], Any] | object,
        seed: int,
        kept: Checkpoint,
        progress: Progress | None,
        budget_s: float | None,
    ) -> None:
        self.problem, self.settings, self.teacher, self.seed = problem, settings, teacher, seed
        self.kept, self.progress, self.budget_s = kept, progress, budget_s
        self.graph = problem.rows.x.device.type == "cuda"
        self.clock = clock_for(settings.device)
        self.watch = stopwatch()

    def result(self) -> Distillation:
        """Go through all stages."""
        settings = self.settings
        self.watch = stopwatch()
        with stopwatch() as pooling:
            pool = make_pool(
                self.problem.rows,
                settings.augment,
                settings.strengths,
                seed=self.seed,
                workers=max(1, min(8, (os.cpu_count() or 1) // 2)),
                progress=self.progress,
            )
            self.clock.synchronize()
        accuracy = None
        with stopwatch() as teaching:
            if settings.teacher is not None:
                logits = self._taught_by(pool)
                accuracy = self._accuracy(logits)
                pool = pool.taught(logits, self.progress)
                self.clock.synchronize()
        with stopwatch() as selecting:
            chosen = self._chosen(pool)
        with stopwatch() as training:
            students, history, recipe = self._students(pool, chosen)
            self.clock.synchronize()
        return Distillation(
            students,
            history,
            accuracy,
            pooling.seconds,
            teaching.seconds,
            training.seconds,
            replace(settings, recipe=recipe),
            tuple(chosen.values()),
            selecting.seconds,
        )

    def _taught_by(self, pool: Pool) -> TeacherLogits:
        kind, source, state = self.settings.teacher, self.problem.rows, self.kept.get("teacher")
        strength = max(self.settings.strengths)
        if isinstance(kind, ConvTeacher):
            if state:
                return restore_conv(source, kind, state)
            conv = fit_conv(pool, kind, seed=self.seed, strength=strength, progress=self.progress)
            self.kept.put("teacher", conv.state())
            return conv
        if isinstance(kind, MLPTeacher):
            if state:
                return restore_mlps(source, state)
            mlps = fit_mlps(
                pool,
                kind,
                self.settings.recipe,
                seed=self.seed,
                strength=strength,
                graph=self.graph,
                progress=self.progress,
            )
            self.kept.put("teacher", mlps.state())
            return mlps
        assert callable(self.teacher)
        return callable_teacher(self.teacher, source, self.problem.scaling if self.problem.scaled else None)

    def _accuracy(self, logits: TeacherLogits) -> float | None:
        x, y = self.problem.x_val, self.problem.y_val
        if x is None or y is None:
            return None
        with torch.no_grad():
            right = sum(
                int((logits(x[i : i + _ROWS]).argmax(1) == y[i : i + _ROWS]).sum()) for i in range(0, len(x), _ROWS)
            )
        return right / len(x)

    def _students_of(
        self, widths: tuple[int, ...], columns: Runs | None = None, reads: str | None = None
    ) -> list[Student]:
        choice = self.settings.choices[widths]
        common = (choice.lr, choice.weight_decay, choice.follow, choice.temperature, columns, reads)
        return [Student(widths, seed, *common) for seed in self.settings.seeds]

    def _chosen(self, pool: Pool) -> dict[_Net, Chosen]:
        """Choose what networks read, where that is not whole rows."""
        settings, problem = self.settings, self.problem
        kept: dict[str, Any] = dict(self.kept.facts.get("chosen", {}))
        held = held_rows(problem.x_val, problem.y_val, pool)
        ground = Ground(pool, *held, settings.recipe, self.seed, self.graph, self.progress)
        found = {}
        for widths, several in settings.reads.items():
            for request in several:
                if request is None:
                    continue
                name = f"{widths} {request.label}"
                if name in kept:
                    found[widths, request.label] = restored(kept[name])
                    continue
                strength = settings.choices[widths].phases[0][1]
                made = select(request, self._students_of(widths), strength, ground)
                found[widths, request.label] = made
                kept[name] = asdict(made)
                self.kept.put("chosen", {}, chosen=kept)
        return found

    def _students(
        self, pool: Pool, chosen: dict[_Net, Chosen]
    ) -> tuple[tuple[Trained, ...], tuple[Moment, ...], Recipe]:
        settings = self.settings
        groups: dict[tuple[Any, ...], list[Student]] = {}
        for widths, choice in settings.choices.items():
            for request in settings.reads[widths]:
                label = None if request is None else request.label
                columns = None if label is None else chosen[widths, label].columns
                groups.setdefault(choice.phases, []).extend(self._students_of(widths, columns, label))
        recipe = settings.recipe
        if self.budget_s is not None:
            epochs = self.kept.facts.get("epochs") or self._affordable(pool, groups)
            self.kept.facts["epochs"] = epochs
            recipe = recipe.with_(epochs=epochs)
        history = [
            Moment(tuple(each["hidden"]), each["epoch"], each["accuracy"], each["loss"], each["reads"])
            for each in self.kept.facts.get("history", [])
        ]
        trained: list[Trained] = []
        for index, (phases, students) in enumerate(groups.items()):
            plan = epoch_plan(pool.strengths, phases, recipe.epochs)
            with Bank(students, pool, recipe, seed=self.seed, graph=self.graph) as bank:
                trained += self._train(bank, plan, f"bank{index}", history, (index, len(groups)))
        nets = [(widths, request) for widths, several in settings.reads.items() for request in several]
        order = {(w, None if request is None else request.label): place for place, (w, request) in enumerate(nets)}
        trained.sort(key=lambda each: (order[each.hidden, each.reads], each.seed))
        return tuple(trained), tuple(history), recipe

    def _affordable(self, pool: Pool, groups: dict[tuple[Any, ...], list[Student]]) -> int:
        """Return how many epochs fit the budget, from the time that a few of each bank take."""
        recipe, spent = self.settings.recipe, 0.0
        for phases, students in groups.items():
            plan = epoch_plan(pool.strengths, phases, recipe.epochs)
            few = min(_PROBE_EPOCHS, recipe.epochs)
            with Bank(students, pool, recipe, seed=self.seed, graph=self.graph) as bank:
                bank.run(plan, until=1)
                self.clock.synchronize()
                with stopwatch() as watch:
                    bank.epoch = 0
                    bank.run(plan, until=few)
                    self.clock.synchronize()
            spent += watch.seconds / few
        assert self.budget_s is not None
        left = self.budget_s - self.watch.seconds
        return max(1, min(recipe.epochs, int(0.9 * left / spent)))

    def _train(
        self, bank: Bank, plan: Sequence[int], name: str, history: list[Moment], place: tuple[int, int]
    ) -> list[Trained]:
        epochs = bank.recipe.epochs
        every = -(-epochs // _LOOKS)
        x, y = self.problem.x_val, self.problem.y_val
        done = self.kept.facts.get(name, 0)
        if done:
            bank.restore(self.kept.get(name), done)

        def look(epoch: int) -> None:
            text = f"students, {place[0] + 1} of {place[1]}"
            if epoch % every == 0 or epoch == epochs:
                if x is not None and y is not None:
                    score = bank.score(x, y)
                    nets = [(student.hidden, student.reads) for student in bank.students]
                    for net in dict.fromkeys(nets):
                        own = [i for i, other in enumerate(nets) if other == net]
                        accuracy, loss = float(score.accuracy[own].mean()), float(score.loss[own].mean())
                        history.append(Moment(net[0], epoch, accuracy, loss, net[1]))
                    text += f", accuracy {100 * history[-1].accuracy:.2f} %"
                if self.kept.path is not None:
                    self.kept.put(name, bank.state(), **{name: epoch}, history=[asdict(each) for each in history])
            if self.progress is not None:
                self.progress(place[0] * epochs + epoch, place[1] * epochs, text)

        bank.run(plan, look)
        bank.check()
        score = None if x is None or y is None else bank.score(x, y)
        found = []
        for index, (student, layers) in enumerate(zip(bank.students, bank.networks(), strict=True)):
            label, part = "x".join(str(width) for width in student.hidden), student.reads
            found.append(
                Trained(
                    student.hidden,
                    student.seed,
                    self.problem.mlp(layers, f"distilled-{label}{f'-{part}' if part else ''}", student.columns),
                    None if score is None else float(score.accuracy[index]),
                    None if score is None else float(score.loss[index]),
                    part,
                )
            )
        return found
