"""A scenario: the value that is simulated, searched, compared and executed."""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from meshwise.executor.launch.processes import lock_folder
from meshwise.scenarios.files.errors import suggest_nearest
from meshwise.scenarios.inputs.graph_file import GraphModel
from meshwise.scenarios.inputs.plan_table import list_plan_violations
from meshwise.scenarios.inputs.remarks import list_machine_assumptions
from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.search_journal import SearchJournal
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import recomputation
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.algorithms import ALGORITHMS, PINNED_ALGORITHMS, list_installed
from meshwise.strategies.search.space import Space

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from meshwise.executor.job import Job
    from meshwise.executor.launch.run import Run
    from meshwise.executor.options import RunOptions
    from meshwise.scenarios.choices.loaded_choice import LoadedChoice
    from meshwise.scenarios.choices.setup_choice import Choice
    from meshwise.scenarios.files.errors import Fault
    from meshwise.scenarios.interchange.targets import Acceptance
    from meshwise.scenarios.long_run import RunSettings
    from meshwise.scenarios.oracle_check import Check
    from meshwise.scenarios.simulation import Simulation
    from meshwise.strategies.evaluation import Trial
    from meshwise.strategies.loads.loaded_costs import LoadedCosts
    from meshwise.strategies.loads.loads import Loads
    from meshwise.strategies.operators.choices import Pin
    from meshwise.strategies.search.driver import Progress, SearchResult, SearchResults


SEARCH_SECONDS = 60.0
"""Longest wall time of a search that has neither a budget nor a time limit; it then ends with the gap of its proof."""

MIN_SECONDS = 0.01
"""Seconds of a search whose time is over before it begins: enough to simulate the first known plan."""

MAX_PROCESSES = 64
"""Most ranks that one machine runs as processes."""


FRAMEWORK_OF = {"torchtitan": "torchtitan", "megatron": "megatron", "accelerate": "torch", "execute": "execute"}
"""The framework whose conventions price the plans of a target. Those of other targets were not compared with measured
peaks of memory: a scenario has to name them."""


# To import an engine, a search, a trainer or the executor takes longer than to read a scenario: methods below import
# only what they run.


def _build_acceptance(target: str, spec: Model) -> "Acceptance":
    """Return which plans of a model a target can express."""
    from meshwise.scenarios.interchange.targets import Acceptance

    return Acceptance(target, spec)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run of this very scenario: seconds a step, and the source of the figure."""

    step_time: float
    source: str


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How to search for a plan: an algorithm by name with its options, limits of the space, and pinned operators.

    ``budget`` is in evaluations, ``seconds`` in wall time; None is the driver's default. ``asked`` are the fields that
    ask for the best machine of a run, by name (`meshwise.scenarios.choices.question.PARSERS`).
    """

    algorithm: str = "auto"
    budget: int | None = None
    seconds: float | None = None
    options: tuple[tuple[str, Any], ...] = ()
    space: tuple[tuple[str, Any], ...] = ()
    pin: "tuple[Pin, ...]" = ()
    asked: tuple[tuple[str, Any], ...] = ()

    __repr__ = brief_repr()

    def find_algorithm(self, name: str | None = None) -> str:
        """Return ``name``, by default that of the settings, after checks.

        Raises
        ------
        ValueError
            Where there is no such algorithm, or it ignores pins and there are some.
        """
        algorithm = name or self.algorithm
        if algorithm not in ALGORITHMS:
            nearest = suggest_nearest(algorithm, ALGORITHMS)
            raise ValueError(f"algorithm is one of {', '.join(ALGORITHMS)}, met {algorithm[:60]}{nearest}")
        if self.pin and algorithm not in PINNED_ALGORITHMS:
            raise ValueError(f"pin needs one of the algorithms {', '.join(PINNED_ALGORITHMS)}, met {algorithm}")
        return algorithm

    def make_algorithm(self, name: str | None = None, seed: int | None = None) -> Any:
        """Return the configured algorithm; ``seed`` replaces that of the options where the algorithm has one.

        Raises
        ------
        ValueError
            Where there is no such algorithm or it has no such option.
        """
        algorithm = self.find_algorithm(name)
        kind = ALGORITHMS[algorithm]
        known_options = [field.name for field in fields(kind)]
        options = dict(self.options) if algorithm == self.algorithm else {}
        unknown_options = [option for option in options if option not in known_options]
        if unknown_options:
            raise ValueError(f"{unknown_options[0]}: {algorithm} has the options {', '.join(known_options) or 'none'}")
        if seed is not None and "seed" in known_options:
            options["seed"] = seed
        try:
            return kind(**options)
        except TypeError as error:
            raise ValueError(f"{algorithm}: {error}") from None

    def make_space(self) -> Space:
        """Return the limits as a search space."""
        limits = dict(self.space)
        if "recompute" in limits:
            limits["recompute"] = tuple(map(recomputation, limits["recompute"]))
        if "attention" in limits:
            limits["attention"] = tuple(map(Attention, limits["attention"]))
        return Space(**limits, pin=self.pin)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A network, a machine and a training step; with a plan, or with settings to search for one.

    Parameters
    ----------
    plan
        The complete plan, or None to search for one.
    assumptions
        Every default and catalogue figure that a result rests on.
    run
        A long run of the step; None for results without goodput.
    warnings
        Figures that are possible but probably mistyped.
    framework
        What runs the step, where the scenario says so; None where it is assumed.
    asked_target
        The trainer that has to be able to express every plan of a search, or the executor that has to run it; None
        where none was asked for.
    kernels, loss
        Words for how kernels and the loss run, where the scenario says so; None where its framework decides.
    loads
        What varies from step to step; None where nothing does.
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
    kernels: str | None = None
    loss: str | None = None
    loads: "Loads | None" = None

    @property
    def target(self) -> str | None:
        """The target of searched plans: the one asked for, else the framework if it is itself a trainer; or None."""
        if self.asked_target is not None or self.framework is None:
            return self.asked_target
        is_trainer = self.framework != "execute" and FRAMEWORK_OF.get(self.framework) == self.framework
        return self.framework if is_trainer else None

    def for_target(self, target: str) -> "Scenario":
        """Return the scenario whose search is limited to what a target can express: a trainer by name, or ``execute``.

        Where the scenario names no framework, plans are priced by the target's conventions, if these are known.

        Raises
        ------
        ValueError
            Where there is no such target, or it can express no plan of the model or the training step.
        """
        acceptance = _build_acceptance(target, self.spec)
        if refusals := acceptance.list_general_reasons(self.problem):
            raise ValueError(f"{self.file}: {acceptance.can} no plan of this scenario: {'; '.join(refusals)}")
        problem = self.to_target_problem(target)
        assumptions = self.assumptions
        if problem.training.framework != self.problem.training.framework:  # then the assumed one is out of date
            assumptions = tuple(line for line in assumptions if not line.startswith("training.framework is "))
        return replace(self, asked_target=target, problem=problem, assumptions=assumptions)

    def to_target_problem(self, target: str) -> Problem:
        """Return the problem with a target's framework; unchanged where the scenario names one, or it is not known."""
        framework = FRAMEWORK_OF.get(target)
        if self.framework is not None or framework is None:
            return self.problem
        training = self.problem.training.run_by(framework, self.kernels, self.loss)
        target_problem = replace(self.problem, training=training)
        return target_problem if target_problem.memory_margin == 1.0 else with_margin(target_problem)

    def without_margin(self) -> "Scenario":
        """Return the scenario without a memory margin: a plan fits if its predicted peak does, whatever the risk."""
        return replace(self, problem=replace(self.problem, memory_margin=1.0))

    def make_space(self) -> Space:
        """Return the search space: the limits of the settings, and what the target can express."""
        space = self.search_settings.make_space()
        if self.target is None:
            return space
        return _build_acceptance(self.target, self.spec).limit_space(self.problem, space)

    __repr__ = brief_repr()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks to show before any result: efficiencies that nobody measured, and probably mistyped figures."""
        warning_lines = (f"{fault.field} {fault.message}" for fault in self.warnings)
        return (*self.problem.cluster.estimated, *warning_lines)

    def choose_plan(self, plan: Plan | Layout | None = None) -> Plan:
        """Return a plan or the plan of a layout, by default the scenario's own.

        Decisions of a layout may be words and lists, as in a file: ``recompute="full"``.

        Raises
        ------
        ValueError
            Where there is none, or it breaks a rule or does not follow from the scenario.
        """
        if isinstance(plan, Layout):
            parsers = {item.name: item.parse for item in DECISIONS.values() if item.parse is not None}
            stated = {name: getattr(plan, name) for name in parsers}
            plain = {name: value for name, value in stated.items() if type(value) in (str, list, dict)}
            plan = complete(self.problem, replace(plan, **{name: parsers[name](plain[name]) for name in plain}))
        if plan is None or plan == self.plan:
            if self.plan is None:
                raise ValueError(f"{self.file}: plan: a plan is needed; write one, name a plan file or search for one")
            return self.plan
        violation = next(iter(list_plan_violations(self.problem, plan)), None)
        if violation is not None:
            raise ValueError(f"plan: {violation.field}: {violation.message}")
        return plan

    def on(self, cluster: Cluster, warnings: "tuple[Fault, ...]" = ()) -> "Scenario":
        """Return the scenario on as many devices of another machine, such as one that `meshwise calibrate` measured.

        Assumptions and warnings about the machine become those of the new one; ``warnings`` are those of its file.
        """
        own_cluster = self.problem.cluster
        sized_cluster = cluster.with_size(own_cluster.num_nodes, own_cluster.first_node.devices)
        problem = replace(self.problem, cluster=sized_cluster)
        problem = problem if problem.memory_margin == 1.0 else with_margin(problem)
        # about the machine are remarks in the scenario's cluster table, and those in a cluster file
        own_faults = (fault for fault in self.warnings if fault.file == self.file)
        other_warnings = (fault for fault in own_faults if fault.field.split(".")[0] != "cluster")
        moved_scenario = replace(self, problem=problem, warnings=(*warnings, *other_warnings))
        stale_lines = {*self.remarks, *self._list_machine_assumptions()}
        kept_lines = (line for line in self.assumptions if line not in stale_lines and not line.startswith("cluster."))
        moved_lines = (*moved_scenario.remarks, *moved_scenario._list_machine_assumptions())
        return replace(moved_scenario, assumptions=(*moved_lines, *kept_lines))

    def _list_machine_assumptions(self) -> tuple[str, ...]:
        offloads = self.plan is not None and bool(self.plan.offload)
        return tuple(list_machine_assumptions(self.problem.cluster, offloads=offloads))

    def simulate(self, plan: Plan | Layout | None = None, engine: str = "discrete_event") -> "Simulation":
        """Return one simulated step of a plan, by default the scenario's own: its time, its memory and their parts.

        ``engine`` is ``discrete_event`` or ``longest_path``.
        """
        from meshwise.scenarios.simulation import simulate_plan

        result = simulate_plan(self.problem, self.choose_plan(plan), engine, self.assumptions)
        if self.loads is not None and result.fits:
            result = replace(result, loads=self.make_loaded_costs().weigh(result.plan))
        return result if self.run is None else self.run.extend_simulation(result, self.problem.cluster)

    def make_loaded_costs(self) -> "LoadedCosts":
        """Return the cost model of plans under the scenario's loads, all of them under the same draws.

        Raises
        ------
        ValueError
            Where nothing varies.
        """
        from meshwise.strategies.loads.loaded_costs import LoadedCosts

        if self.loads is None:
            raise ValueError(f"{self.file}: loads: draws need a load that varies, met none")
        return LoadedCosts(self.problem, self.spec, self.loads)

    def search(self, algorithm: str | None = None, **options: Any) -> "SearchResult | Choice":
        """Return the best plan that a search finds; or the best machine, batch and plan of a whole run.

        Under loads that vary the best plan is that of `choose_loaded`, with the evaluation of full sequences.

        Both results have ``best.plan``, ``best.evaluation`` and ``gap``.

        Parameters
        ----------
        algorithm
            Its name, for the fastest plan on the scenario's own machine.
        **options
            Those of `search_plan` give the result of that. An objective, terms of a run, or numbers of nodes give a
            `meshwise.scenarios.choices.setup_choice.Choice`, as does a file that has one of these: ``minimize``
            (``"time"``, ``"cost"``, ``"devices"`` or ``"energy"``), ``nodes`` and ``batch`` (a number, a list, or text
            such as ``"1..8"``), ``tokens`` and ``critical_batch`` (numbers, or ``"300B"``), ``deadline`` and
            ``reclaim_every`` (seconds, or ``"30d"``), ``budget_usd``, ``price`` and ``spot`` (US dollars); they
            replace those of the file, and ``front=True`` searches every setup to its end. With them go ``seconds`` and
            ``target`` alone.

        Raises
        ------
        ValueError
            Where an option is unknown or has no such value, or one needs another.
        """
        from meshwise.scenarios.choices.keywords import search_setups, split_options

        asked, rest = split_options(self, options)
        if not asked:
            return self._weigh_result(self.search_plan(algorithm, **rest), rest)
        return search_setups(self, asked, {"algorithm": algorithm} | rest)

    def _weigh_result(self, result: "SearchResult", options: dict[str, Any]) -> "SearchResult":
        """Return a result with the best plan under loads that vary, found in the time that its search has left."""
        if self.loads is None:
            return result
        from meshwise.scenarios.choices.loaded_choice import weigh_result

        limit = self.limit_seconds(options.get("budget"), options.get("seconds"))
        end = inf if limit is None else perf_counter() + max(limit - result.wall_time, MIN_SECONDS)
        return weigh_result(self, result, lambda: end - perf_counter())[0]

    def search_plan(
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
        """Return the best plan on the scenario's own machine that a search finds, with its proof or gap.

        Arguments replace the scenario's settings.

        Parameters
        ----------
        progress
            Called after every evaluation.
        resume
            The path of a journal, which is created if it is missing: the search continues from its trials and appends
            its own, so that nothing is lost however it ends.
        executor
            Evaluates several plans at once where the algorithm can propose them ahead:
            ``meshwise.strategies.search.fan_out.processes(4)``, or ``Client(...).get_executor()`` of Dask. The result
            is the same for any number of workers.
        target
            As in `for_target`: search for the best plan that this trainer can express, or that the executor can run.

        Raises
        ------
        ValueError
            Where there is no such algorithm or target, or the journal is of another search.
        """
        from meshwise.scenarios.memory_forecast import judge_result
        from meshwise.strategies.cost_model import SimulatedCost
        from meshwise.strategies.search.driver import run_search
        from meshwise.strategies.search.fan_out import Evaluator

        scenario = self if target is None else self.for_target(target)
        start, settings = perf_counter(), self.search_settings
        search_algorithm, space = settings.make_algorithm(algorithm, seed), scenario.make_space()
        space_with_starts = scenario.with_starts(space)
        seconds = self.limit_seconds(budget, seconds)
        if seconds is not None:  # to list what a trainer can express takes up to a second: the search's own time
            seconds = max(seconds - (perf_counter() - start), MIN_SECONDS) if seconds > 0 else seconds
        budget = settings.budget if budget is None else budget
        problem = scenario.problem
        with nullcontext() if resume is None else SearchJournal(resume, search_algorithm, problem, space) as journal:
            cost_model = SimulatedCost(problem)
            evaluator = Evaluator(cost_model, executor, journal)
            result = run_search(
                search_algorithm,
                problem,
                space_with_starts,
                costs=evaluator,
                budget=budget,
                seconds=seconds,
                progress=progress,
            )
        return judge_result(cost_model, result)

    def choose_loaded(self, best: "Trial", seconds: float | None = None) -> "LoadedChoice":
        """Return the best plan at a quantile of the steps that the scenario's loads make differ.

        Parameters
        ----------
        best
            The best plan of a search for full sequences, ``search_plan().best``: it and fast plans of the space are
            compared.
        seconds
            Time limit.

        Raises
        ------
        ValueError
            Where nothing varies.
        """
        from meshwise.scenarios.choices.loaded_choice import choose_loaded
        from meshwise.simulator.deadline import unlimited_seconds

        end = perf_counter() + (seconds or 0.0)
        return choose_loaded(self, best, unlimited_seconds if seconds is None else lambda: end - perf_counter())

    def limit_seconds(self, budget: int | None, seconds: float | None) -> float | None:
        """Return the time limit of a search in seconds: the argument, else the setting or default; None for none."""
        settings = self.search_settings
        seconds = settings.seconds if seconds is None else seconds
        return SEARCH_SECONDS if seconds is None and budget is None and settings.budget is None else seconds

    def with_starts(self, space: Space) -> Space:
        """Return a space whose search starts with the scenario's own plan and published recipes."""
        from meshwise.scenarios.recipes import list_recipe_layouts

        starts = (*self._list_own_layouts(), *(layout for _, layout in list_recipe_layouts(self.problem)))
        return replace(space, starts=starts)

    def _list_own_layouts(self) -> tuple[Layout, ...]:
        """Return the layout of the scenario's own plan; no layout where there is no plan, or none completes to it."""
        if self.plan is None:
            return ()
        layout = recover_layout(self.problem, self.plan)
        violation = next(violations(self.problem, layout), None)
        return (layout,) if violation is None and complete(self.problem, layout) == self.plan else ()

    def compare(self, algorithms: Iterable[str] | None = None, **limits: Any) -> "SearchResults":
        """Return the result of each algorithm (None: all installed ones) under equal limits, as `search_plan` has."""
        from meshwise.strategies.search.driver import SearchResults

        names = list_installed() if algorithms is None else tuple(algorithms)
        return SearchResults(self.search_plan(name, **limits) for name in names)

    def execute(
        self,
        plan: Plan | Layout | None = None,
        options: "RunOptions | None" = None,
        *,
        folder: str | Path | None = None,
        module: str | None = None,
        progress: Callable[[int, float, float], None] | None = None,
        warn: Callable[[str], None] = lambda text: None,
        **changes: Any,
    ) -> "Run":
        """Run a plan on this machine and return the run.

        Parameters
        ----------
        options
            Steps, verification, seed, device, data, checkpoints and whether to resume from one; ``None`` for the
            defaults.
        folder
            Where the run leaves its files; a temporary folder by default.
        module
            ``FILE.py:FACTORY`` of the module that the scenario's graph was captured from: its code is run.
        progress
            Called with step, loss and seconds after every step.
        warn
            Called with a line for every damaged checkpoint that is skipped.
        **changes
            Single fields of `meshwise.executor.options.RunOptions`, such as ``steps=20`` or ``device="cuda"``, in
            place of those of ``options``.

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
        from meshwise.executor.options import DEFAULT_OPTIONS

        chosen_plan, options = self.choose_plan(plan), replace(options or DEFAULT_OPTIONS, **changes)
        if module is None:
            self.check_executable(chosen_plan)
        else:
            self._check_processes(chosen_plan)
        training = self.problem.training
        with (
            tempfile.TemporaryDirectory(prefix="meshwise-") as temporary,
            lock_folder(Path(temporary if folder is None else folder)) as run_folder,
        ):
            if module is not None:
                graph = self.problem.graph
                return execute_module(
                    module, graph, training, chosen_plan, options, folder=run_folder, progress=progress
                )
            spec = self.to_executable_spec()
            return execute(spec, training, chosen_plan, options, folder=run_folder, progress=progress, warn=warn)

    def check(self, plan: Plan | Layout | None = None, progress: Callable[[str], None] = lambda text: None) -> "Check":
        """Return the simulator's memory and collectives compared with those of the executor's own model.

        Only one rank of every kind is built, on tensors without data, so the plan may have any number of ranks.

        Raises
        ------
        ValueError
            Where the executor cannot build the plan, or torch is missing.
        """
        from meshwise.scenarios.oracle_check import check_plan

        return check_plan(self.to_executable_spec(), self.problem, self.choose_plan(plan), progress)

    def make_jobs(self, options: "RunOptions", folder: Path, warn: Callable[[str], None]) -> "list[tuple[Job, Path]]":
        """Return the job files of the ranks that run the scenario's plan on hosts where torchrun starts them.

        The run is verified only where the options ask for it: on several hosts it has started by the time that ranks
        and the single process can be compared.

        Raises
        ------
        ValueError
            Where the executor cannot run the plan, or data or checkpoint do not fit.
        """
        from meshwise.executor.launch.run import make_jobs

        options = replace(options, verify=bool(options.verify))
        return make_jobs(
            self.to_executable_spec(), self.problem.training, self.choose_plan(), options, folder=folder, warn=warn
        )

    def check_executable(self, plan: Plan | Layout | None = None) -> None:
        """Raise ``ValueError`` where this machine cannot run ``plan``, the scenario's own by default."""
        from meshwise.executor.launch.run import require_supported

        chosen_plan = self.choose_plan(plan)
        self._check_processes(chosen_plan)
        require_supported(self.to_executable_spec(), self.problem.training, chosen_plan)

    def _check_processes(self, plan: Plan) -> None:
        if plan.mesh.num_ranks > MAX_PROCESSES:
            ranks_text = f"the plan has {plan.mesh.num_ranks}"
            raise ValueError(
                f"{self.file}: plan: a run on one machine has at most {MAX_PROCESSES} processes, {ranks_text}"
            )

    def to_executable_spec(self) -> Transformer:
        """Return the model for the executor; ``ValueError`` where the executor cannot build it."""
        if isinstance(self.spec, GraphModel):
            nearest_text = "`meshwise execute --module FILE.py:FACTORY`, the module that it was captured from"
            raise ValueError(
                f"{self.file}: model.graph: a graph has no code to run, met it alone; nearest: {nearest_text}"
            )
        if not isinstance(self.spec, Transformer):
            model_text = f"met {self.spec.name}: {self.spec.summary}"
            raise ValueError(f"{self.file}: model: the executor's model is a decoder transformer, {model_text}")
        return self.spec
