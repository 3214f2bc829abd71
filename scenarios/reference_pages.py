"""What the reference of the Python interface has: pages, modules and names."""

from dataclasses import dataclass

CONTENTS = "README.md"

Names = tuple[str, ...]
ALL: Names = ()
"""Every public class and function, and every constant that is documented."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: ``modules`` are pairs of a module and its names, `ALL` for all that is public."""

    file: str
    title: str
    lead: str
    modules: tuple[tuple[str, Names], ...]


PAGES = (
    Page(
        "scenarios.md",
        "Scenarios and results",
        "What `from scenarios import load` gives, and what its methods return.",
        (
            ("scenarios.loader", ("load",)),
            ("scenarios.scenario", ("Scenario", "SearchSettings", "Measured")),
            ("scenarios.simulation", ("Simulation", "StageMemory")),
            ("scenarios.errors", ("Fault", "ScenarioError")),
            ("scenarios.library", ALL),
            ("scenarios.cluster_file", ("load_cluster", "write_cluster")),
            ("scenarios.graph_file", ("load_graph", "dump_graph")),
            (
                "scenarios.prediction_interval",
                ("step_time_interval", "peak_memory_interval", "memory_margin"),
            ),
        ),
    ),
    Page(
        "search.md",
        "Search",
        "The driver of every search, its result, the space, and the algorithms with their options.",
        (
            ("strategies.search.driver", ("search", "SearchResult", "Progress", "Proof", "SearchAlgorithm", "Journal")),
            ("strategies.search.space", ("Space", "layouts", "neighbours")),
            ("strategies.search.certificate", ("Certificate",)),
            ("strategies.search.fan_out", ("processes",)),
            ("strategies.search.auto", ("Auto",)),
            ("strategies.search.best_first", ("BestFirst",)),
            ("strategies.search.exhaustive", ("Exhaustive",)),
            ("strategies.search.breadth_first", ("BreadthFirst",)),
            ("strategies.search.beam", ("Beam",)),
            ("strategies.search.mcmc", ("MCMC",)),
            ("strategies.search.mcts", ("MCTS",)),
            ("strategies.search.reinforcement", ("Reinforcement",)),
            ("strategies.search.random", ("RandomSearch",)),
            ("strategies.search.expert", ("Expert",)),
            ("strategies.search.bottleneck", ("Bottleneck",)),
            ("strategies.search.pipeline_dp", ("PipelineDP",)),
            ("strategies.search.layer_dp", ("LayerDP",)),
            ("strategies.search.inter_stage_milp", ("InterStageMILP",)),
            ("strategies.search.frontier", ("Frontier",)),
            ("strategies.search.integer_programming", ("IntegerProgramming",)),
            ("strategies.search.dynamic_programming", ("DynamicProgramming",)),
            ("strategies.search.recursive_programming", ("RecursiveProgramming",)),
            ("strategies.search.sharding_propagation", ("ShardingPropagation",)),
        ),
    ),
    Page(
        "plans.md",
        "Plans",
        "A problem, a plan and its parts, and how a plan becomes a program.",
        (
            ("strategies.problem", ALL),
            ("strategies.training", ("Training",)),
            ("strategies.plan", ("Plan", "Stage")),
            ("strategies.layout", ("Layout",)),
            ("strategies.mesh", ("Axis", "Mesh")),
            ("strategies.sharding", ("ShardingSpec", "OperatorSharding", "Redistribution", "redistribute")),
            ("strategies.schedule", ("ActionKind", "Action", "Schedule", "schedule")),
            ("strategies.recomputation", ("Recompute", "FirstLayers", "SomeOperators", "PerStage", "recomputation")),
            ("strategies.offloading", ("StepPlace", "Offloading", "offloading")),
            ("strategies.evaluation", ALL),
            ("strategies.cost_model", ALL),
            ("strategies.lowering.lower", ("lower",)),
        ),
    ),
    Page(
        "simulator.md",
        "Simulator",
        "The machine, the network, the program that is run, and what comes of it.",
        (
            ("simulator.engine", ("simulate", "step_time", "step_ticks")),
            ("simulator.engine.bound", ("step_bound",)),
            ("simulator.program", ALL),
            ("simulator.timeline", ("Timeline", "LinkUse")),
            ("simulator.spans", ("Span",)),
            ("simulator.memory", ("MemoryProfile", "sweep")),
            ("simulator.cluster", ALL),
            ("simulator.accelerator", ("Accelerator",)),
            ("simulator.kernels.matmul", ("Matmul", "MatmulModel", "compute_time", "soft_roofline")),
            ("simulator.kernels.attention", ("AttentionShape", "AttentionModel", "attention_compute_time")),
            ("simulator.compute", ("Pass", "matmul_time", "attention_time", "operator_time", "optimizer_time")),
            ("simulator.host", ALL),
            ("simulator.link", ALL),
            ("simulator.library", ("Protocol", "Library")),
            ("simulator.interconnect.kinds", ALL),
            ("simulator.collective_kinds", ALL),
            ("simulator.collective", ("phases", "algorithms", "idle_time", "measured_time", "choose")),
            ("simulator.operator_graph", ("OperatorKind", "Tensor", "Operator", "Block", "OperatorGraph")),
            ("simulator.models.model", ALL),
            ("simulator.models.transformer", ("Transformer",)),
            ("simulator.models.hugging_face", ("spec_from_config",)),
            ("simulator.catalog", ("accelerator_names", "accelerator", "cluster_names", "cluster", "sources")),
            ("simulator.units", ("Dimension", "parse", "format_time", "format_size", "format_bandwidth")),
            ("simulator.reliability.long_run", ("LongRun",)),
            ("simulator.reliability.goodput", ("Goodput", "goodput")),
            ("simulator.reliability.interval", ("young_interval", "daly_interval", "best_interval")),
        ),
    ),
    Page(
        "executor.md",
        "Executor",
        "Running a plan on torch, measuring a machine, and capturing a module. Needs the extra `exec`.",
        (
            ("executor.run", ("Run", "execute")),
            ("executor.continuation", ("RunOptions",)),
            ("executor.learning_rate", ("LearningRate",)),
            ("executor.verification", ("Verification", "VerificationError")),
            ("executor.oracle_check", ("Check", "RankCheck", "MemoryLine", "TrafficLine")),
            ("executor.calibrate", ("calibrate",)),
            ("executor.capture.capture", ("capture",)),
            ("executor.capture.captured", ("NamedDims", "CaptureError", "Captured")),
            ("executor.several_hosts", ("Hosts", "prepare", "read_run")),
        ),
    ),
    Page(
        "reports.md",
        "Reports",
        "Pictures, traces, tables and pages from results.",
        (
            ("reports.timeline", ("draw_timeline", "draw_comparison")),
            ("reports.memory", ("draw_memory",)),
            ("reports.page.report", ("Report",)),
            ("reports.page.html", ("html",)),
            ("reports.traces.chrome", ("write_trace",)),
            ("reports.traces.perfetto", ("write_perfetto",)),
            ("reports.search", ("draw_search", "trials_table")),
            ("reports.difference", ("Difference", "DifferenceRow", "difference")),
            ("reports.accuracy", ("AccuracyRow", "draw_accuracy")),
            ("reports.goodput", ("draw_goodput",)),
            ("reports.pareto", ("draw_fronts",)),
            ("reports.sharded_graph", ("draw_sharded_graph",)),
            ("reports.document", ("Section", "to_markdown")),
        ),
    ),
)
