"""A scenario as a value: what to simulate, search, compare and execute."""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from meshwise.executor.launch.processes import locked
from meshwise.scenarios.inputs.graph_file import GraphModel
from meshwise.scenarios.inputs.remarks import machine_assumptions
from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.search_journal import SearchJournal
from meshwise.simulator.brief import brief
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete, layout_of
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import recomputation
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.algorithms import ALGORITHMS, PINNED_ALGORITHMS, installed
from meshwise.strategies.search.space import Space

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from meshwise.executor.job import Job
    from meshwise.executor.launch.run import Run
    from meshwise.executor.options import RunOptions
    from meshwise.scenarios.files.errors import Fault
    from meshwise.scenarios.interchange.targets import Acceptance
    from meshwise.scenarios.long_run import RunSettings
    from meshwise.scenarios.oracle_check import Check
    from meshwise.scenarios.simulation import Simulation
    from meshwise.strategies.operators.choices import Pin
    from meshwise.strategies.search.driver import Progress, SearchResult, SearchResults


SEARCH_SECONDS = 60.0
"""How long a search takes at most that has neither a budget nor a time: then it tells how far its proof has come."""

LEAST_SECONDS = 0.01
"""What a search has where its time is over before it begins: enough for the known plan that is simulated soonest."""

MAX_PROCESSES = 64
"""Ranks that one machine is asked to run as processes."""


FRAMEWORK_OF = {"torchtitan": "torchtitan", "megatron": "megatron", "accelerate": "torch", "execute": "torch"}
"""Whose conventions price the plans of a target; of others none are known."""


# A scenario that is only read loads no engine, search, trainer or executor, which take longer than all the rest: what a
# method below imports is what it runs.


def _acceptance(target: str, spec: Model) -> "Acceptance":
    """Return which plans of a model a target can say."""
    from meshwise.scenarios.interchange.targets import Acceptance

    return Acceptance(target, spec)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run of this very scenario took: seconds a step, and who says so."""

    step_time: float
    source: str


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a plan is looked for: an algorithm by name with its options, and limits.

    ``budget`` is in evaluations, ``seconds`` of wall time; None is the driver's default.
    """

    algorithm: str = "auto"
    budget: int | None = None
    seconds: float | None = None
    options: tuple[tuple[str, Any], ...] = ()
    space: tuple[tuple[str, Any], ...] = ()
    pin: "tuple[Pin, ...]" = ()

    __repr__ = brief()

    def algorithm_name(self, name: str | None = None) -> str:
        """Return ``name``, or that of the settings; ``ValueError`` where no algorithm has it or it heeds no pins."""
        chosen = name or self.algorithm
        if chosen not in ALGORITHMS:
            raise ValueError(f"algorithm is one of {', '.join(ALGORITHMS)}, met {chosen}")
        if self.pin and chosen not in PINNED_ALGORITHMS:
            raise ValueError(f"pin needs one of the algorithms {', '.join(PINNED_ALGORITHMS)}, met {chosen}")
        return chosen

    def make_algorithm(self, name: str | None = None, seed: int | None = None) -> Any:
        """Return the algorithm as a value; ``seed`` replaces its own where it has one.

        Raises
        ------
        ValueError
            Where there is no such algorithm or it has no such option.
        """
        chosen = self.algorithm_name(name)
        kind = ALGORITHMS[chosen]
        known = list(kind.__dataclass_fields__)
        options = dict(self.options) if chosen == self.algorithm else {}
        unknown = [option for option in options if option not in known]
        if unknown:
            raise ValueError(f"{unknown[0]}: {chosen} has the options {', '.join(known) or 'none'}")
        if seed is not None and "seed" in known:
            options["seed"] = seed
        try:
            return kind(**options)
        except TypeError as error:
            raise ValueError(f"{chosen}: {error}") from None

    def make_space(self) -> Space:
        """Return the limits as the search's own value."""
        limits = dict(self.space)
        if "recompute" in limits:
            limits["recompute"] = tuple(map(recomputation, limits["recompute"]))
        if "attention" in limits:
            limits["attention"] = tuple(map(Attention, limits["attention"]))
        return Space(**limits, pin=self.pin)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A network, a machine and a training step; a plan, or how to look for one.

    Parameters
    ----------
    plan
        The complete plan, or None where one is to be searched.
    assumptions
        Every default and catalogue figure that a result rests on.
    run
        A long run of the step, or None: then a simulation says nothing of goodput.
    warnings
        Figures that are possible and probably mistyped.
    framework
        What runs the step, where the scenario says so; None where it is assumed.
    asked_target
        The trainer whose words, or the executor, all plans of a search are for, where one was asked for.
    """

    name: str
    file: str
    problem: Problem
    spec: Model
    plan: Plan | None
    search_settings: SearchSettings
    measured: Measured | None
    assumptions: tuple[str, ...]
    run: "RunSettings | None" = None
    warnings: "tuple[Fault, ...]" = ()
    framework: str | None = None
    asked_target: str | None = None

    @property
    def target(self) -> str | None:
        """What plans of a search are for: the target that was asked for, or the framework, where it is a trainer's."""
        if self.asked_target is not None or self.framework is None:
            return self.asked_target
        return self.framework if FRAMEWORK_OF.get(self.framework) == self.framework else None

    def for_target(self, target: str) -> "Scenario":
        """Return the scenario with a search among what a target can say: a trainer by name, or ``execute``.

        Where the scenario names no framework, plans are priced by the target's conventions, if these are known.

        Raises
        ------
        ValueError
            Where there is no such target, or it can say no plan of the model or the training step.
        """
        accepts = _acceptance(target, self.spec)
        if never := accepts.never(self.problem):
            raise ValueError(f"{self.file}: {accepts.can} no plan of this scenario: {'; '.join(never)}")
        problem = self.priced_for(target)
        priced = problem.training.framework != self.problem.training.framework  # then none is assumed
        kept = (line for line in self.assumptions if not (priced and line.startswith("training.framework is ")))
        return replace(self, asked_target=target, problem=problem, assumptions=tuple(kept))

    def priced_for(self, target: str) -> Problem:
        """Return the problem by the conventions of a target, where the scenario names none and they are known."""
        framework = FRAMEWORK_OF.get(target)
        if self.framework is not None or framework is None:
            return self.problem
        priced = replace(self.problem, training=replace(self.problem.training, framework=framework))
        return priced if priced.memory_margin == 1.0 else with_margin(priced)

    def without_margin(self) -> "Scenario":
        """Return the scenario with every plan taken to fit that is predicted to, however likely it lacks memory."""
        return replace(self, problem=replace(self.problem, memory_margin=1.0))

    def make_space(self) -> Space:
        """Return what a search may choose from: the limits that are written, and what the target can say."""
        space = self.search_settings.make_space()
        if self.target is None:
            return space
        return _acceptance(self.target, self.spec).space(self.problem, space)

    __repr__ = brief()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to know before any figure: efficiencies that nobody measured, and figures that are probably mistyped."""
        typed = (f"{fault.field} {fault.message}" for fault in self.warnings)
        return (*self.problem.cluster.estimated, *typed)

    def chosen(self, plan: Plan | None = None) -> Plan:
        """Return ``plan`` or the scenario's own; ``ValueError`` where there is neither."""
        result = plan or self.plan
        if result is None:
            raise ValueError(f"{self.file}: plan: a plan is needed; write one, name a plan file or search for one")
        return result

    def on(self, cluster: Cluster, warnings: "tuple[Fault, ...]" = ()) -> "Scenario":
        """Return the scenario on as many devices of another machine, as `meshwise calibrate` measures it.

        What it rests on, and what is probably mistyped, is then of that machine: ``warnings`` are those of its file.
        """
        own = self.problem.cluster
        sized = cluster.resized(own.num_nodes, own.first.devices)
        problem = replace(self.problem, cluster=sized)
        others = tuple(fault for fault in self.warnings if not self._is_of_cluster(fault))
        moved = replace(
            self,
            problem=problem if problem.memory_margin == 1.0 else with_margin(problem),
            warnings=(*warnings, *others),
        )
        stale = {*self.remarks, *self._machine_assumptions()}
        kept = (line for line in self.assumptions if line not in stale and not line.startswith("cluster."))
        return replace(moved, assumptions=(*moved.remarks, *moved._machine_assumptions(), *kept))

    def _is_of_cluster(self, fault: "Fault") -> bool:
        """Return whether a remark is of the machine: of the scenario's table of it, or of a cluster file."""
        return fault.file != self.file or fault.field.split(".")[0] == "cluster"

    def _machine_assumptions(self) -> tuple[str, ...]:
        offloads = self.plan is not None and bool(self.plan.offload)
        return tuple(machine_assumptions(self.problem.cluster, offloads=offloads))

    def simulate(self, plan: Plan | None = None, engine: str = "discrete_event") -> "Simulation":
        """Return one simulated step of a plan: time, memory and where both go.

        Parameters
        ----------
        plan
            Default: the scenario's own.
        engine
            ``discrete_event`` or ``longest_path``.
        """
        from meshwise.scenarios.simulation import simulation

        result = simulation(self.problem, self.chosen(plan), engine, self.assumptions)
        return result if self.run is None else self.run.extend(result, self.problem.cluster)

    def search(
        self,
        algorithm: str | None = None,
        *,
        budget: int | None = None,
        seconds: float | None = None,
        seed: int | None = None,
        progress: "Callable[[Progress], None] | None" = None,
        resume: str | Path | None = None,
        executor: "Executor | None" = None,
        target: str | None = None,
    ) -> "SearchResult":
        """Return the best plan found, with its proof or gap; arguments replace the scenario's settings.

        Parameters
        ----------
        progress
            Called after every evaluation.
        resume
            A journal: the search goes on from the trials in it and adds its own, so that at any end nothing is lost.
            It is made where it is missing.
        executor
            Evaluates several plans at once where the algorithm can name them:
            ``meshwise.strategies.search.processes(4)``, or ``Client(...).get_executor()`` of Dask. The result is the
            same for any number of workers.
        target
            As `for_target`: the best plan that this trainer can say, or that the executor can run.

        Raises
        ------
        ValueError
            Where there is no such algorithm or target, or the journal is of another search.
        """
        if target is not None:
            return self.for_target(target).search(
                algorithm,
                budget=budget,
                seconds=seconds,
                seed=seed,
                progress=progress,
                resume=resume,
                executor=executor,
            )
        from meshwise.strategies.search.driver import search

        start, settings = perf_counter(), self.search_settings
        chosen, space = settings.make_algorithm(algorithm, seed), self.make_space()
        space_with_starts = self.with_starts(space)
        seconds = self.search_seconds(budget, seconds)
        if seconds is not None:  # what a trainer can say takes up to a second to list: it is time of the search
            seconds = max(seconds - (perf_counter() - start), LEAST_SECONDS) if seconds > 0 else seconds
        budget = settings.budget if budget is None else budget
        with nullcontext() if resume is None else SearchJournal(resume, chosen, self.problem, space) as journal:
            return search(
                chosen,
                self.problem,
                space_with_starts,
                budget=budget,
                seconds=seconds,
                progress=progress,
                executor=executor,
                journal=journal,
            )

    def search_seconds(self, budget: int | None, seconds: float | None) -> float | None:
        """Return the seconds that a search takes at most, where so much is asked for; ``None`` for no limit."""
        settings = self.search_settings
        seconds = settings.seconds if seconds is None else seconds
        return SEARCH_SECONDS if seconds is None and budget is None and settings.budget is None else seconds

    def with_starts(self, space: Space) -> Space:
        """Return a space that is begun with the scenario's own plan and published recipes."""
        from meshwise.scenarios.recipes import recipe_layouts

        starts = (*self._own_layout(), *(layout for _, layout in recipe_layouts(self.problem)))
        return replace(space, starts=starts)

    def _own_layout(self) -> tuple[Layout, ...]:
        """Return the layout of the scenario's own plan; none where it has no plan, or one that no layout means."""
        if self.plan is None:
            return ()
        layout = layout_of(self.problem, self.plan)
        broken = next(violations(self.problem, layout), None)
        return (layout,) if broken is None and complete(self.problem, layout) == self.plan else ()

    def compare(self, algorithms: Iterable[str] | None = None, **limits: Any) -> "SearchResults":
        """Return the result of each algorithm (None: all that are installed) under equal limits, those of `search`."""
        from meshwise.strategies.search.driver import SearchResults

        chosen = installed() if algorithms is None else tuple(algorithms)
        return SearchResults(self.search(name, **limits) for name in chosen)

    def execute(
        self,
        plan: Plan | None = None,
        options: "RunOptions | None" = None,
        *,
        folder: str | Path | None = None,
        module: str | None = None,
        progress: Callable[[int, float, float], None] | None = None,
        warn: Callable[[str], None] = lambda text: None,
        **changes: Any,
    ) -> "Run":
        """Return what happened when the plan ran for real on this machine.

        Parameters
        ----------
        options
            Steps, verification, seed, device, data, checkpoints and whether the run goes on from one; ``None`` for the
            defaults.
        folder
            Where the run leaves its files; a temporary folder by default.
        module
            ``FILE.py:FACTORY`` of the module that the scenario's graph was captured from, whose code is run.
        progress
            Called with step, loss and seconds after every step.
        warn
            Told of every checkpoint that is damaged and passed over.
        **changes
            Single fields of `meshwise.executor.options.RunOptions`, as ``steps=20`` or ``device="cuda"``, instead of
            those of ``options``.

        Raises
        ------
        ValueError
            Where this machine cannot run the plan, an option is out of its range, or another run uses the folder;
            nothing was started.
        VerificationError
            Where the ranks do not compute what one process computes; the run was not started.
        """
        from meshwise.executor.launch.run import execute
        from meshwise.executor.operators.run import execute_module
        from meshwise.executor.options import DEFAULTS

        chosen, options = self.chosen(plan), replace(options or DEFAULTS, **changes)
        if module is None:
            self.check_executable(chosen)
        else:
            self._check_processes(chosen)
        training = self.problem.training
        with (
            tempfile.TemporaryDirectory(prefix="meshwise-") as temporary,
            locked(Path(temporary if folder is None else folder)) as place,
        ):
            if module is not None:
                graph = self.problem.graph
                return execute_module(module, graph, training, chosen, options, folder=place, progress=progress)
            spec = self.executable_spec()
            return execute(spec, training, chosen, options, folder=place, progress=progress, warn=warn)

    def check(self, plan: Plan | None = None, progress: Callable[[str], None] = lambda text: None) -> "Check":
        """Return what the simulator says of memory and collectives beside what the executor's own model does.

        Nothing runs but one rank of every kind, on tensors without data; the plan may have any number of ranks.

        Raises
        ------
        ValueError
            Where the executor cannot build the plan, or torch is missing.
        """
        from meshwise.scenarios.oracle_check import check

        return check(self.executable_spec(), self.problem, self.chosen(plan), progress)

    def jobs(self, options: "RunOptions", folder: Path, warn: Callable[[str], None]) -> "list[tuple[Job, Path]]":
        """Return what the ranks are told that run the scenario's plan, for hosts that torchrun starts them on.

        The run is verified only where that is asked for: on several hosts it has begun when the two are compared.

        Raises
        ------
        ValueError
            Where the executor cannot run the plan, or data or checkpoint do not fit.
        """
        from meshwise.executor.launch.run import make_jobs

        options = replace(options, verify=bool(options.verify))
        return make_jobs(
            self.executable_spec(), self.problem.training, self.chosen(), options, folder=folder, warn=warn
        )

    def check_executable(self, plan: Plan | None = None) -> None:
        """Raise ``ValueError`` where this machine cannot run ``plan``, the scenario's own by default."""
        from meshwise.executor.launch.run import refuse

        chosen = self.chosen(plan)
        self._check_processes(chosen)
        refuse(self.executable_spec(), self.problem.training, chosen)

    def _check_processes(self, plan: Plan) -> None:
        if plan.mesh.num_ranks > MAX_PROCESSES:
            met = f"the plan has {plan.mesh.num_ranks}"
            raise ValueError(f"{self.file}: plan: a run on one machine has at most {MAX_PROCESSES} processes, {met}")

    def executable_spec(self) -> Transformer:
        """Return the model as the executor builds it; ``ValueError`` where it builds no such model."""
        if isinstance(self.spec, GraphModel):
            nearest = "`meshwise execute --module FILE.py:FACTORY`, the module that it was captured from"
            raise ValueError(f"{self.file}: model.graph: a graph has no code to run, met it alone; nearest: {nearest}")
        if not isinstance(self.spec, Transformer):
            met = f"met {self.spec.name}: {self.spec.summary}"
            raise ValueError(f"{self.file}: model: the executor's model is a decoder transformer, {met}")
        return self.spec
