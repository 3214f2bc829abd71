"""``meshwise train``: train a user's own module on his data under a plan. It runs the user's code."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.executor.device import CUDA, check_device, count_gpus
from meshwise.executor.launch.several_hosts import Hosts, Rendezvous
from meshwise.scenarios.commands.options import Collect, Json, MeetingPoint
from meshwise.scenarios.commands.train_report import Follower, tell_run
from meshwise.scenarios.console import Ticker, note, tell_hosts
from meshwise.scenarios.files.results import make_folder

if TYPE_CHECKING:
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.job import TrainJob
    from meshwise.executor.user_training.pretrained import Corpus

STEPS = 100
SEARCH = "search"
PRECISIONS = ("fp32", "bf16", "fp64")


def train(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py",
            help="It has model() and data(); optionally loss(outputs, batch), optimizer(model), scheduler(optimizer), "
            "initialize(model), evaluate(model, batch) with evaluation_data(), and BATCH, the samples of a step. With "
            "--text or --tokens further files of these.",
        ),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead of a file, a causal language model of transformers: a folder with config.json, tokenizer and "
            "perhaps safetensors, or a name in the local cache. Nothing is downloaded.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILES", help="Text files that the model of --hf is trained on.")
    ] = None,
    evaluation_text: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text files on which the model of --hf is evaluated.")
    ] = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILES",
            help="Instead of --text, files of tokens: Megatron's .bin with .idx, raw .bin with --token-dtype, .npy, "
            ".parquet, .arrow, or folders of datasets.save_to_disk.",
        ),
    ] = None,
    evaluation_tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Files of tokens on which the model of --hf is evaluated."),
    ] = None,
    token_dtype: Annotated[
        str | None, typer.Option(help="Numbers of raw .bin files of tokens: uint16, uint32, int32, int64 or uint8.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample of --text or --tokens; by default 512, or the positions of the model."),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="A plan file, words such as data=4,zero=3,num_microbatches=2,recompute=full, recompute=selective:2, "
            "offload=activations, pipeline=2, tensor=2, context=2, expert=2 "
            "or tables=rows, or search, the default: what the simulator predicts to be fastest here.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training in all.")] = STEPS,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes; by default those of the plan, else up to one a core or GPU. With --rendezvous those of a "
            "host.",
        ),
    ] = None,
    rendezvous: MeetingPoint = None,
    collect: Collect = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step, instead of BATCH of the file.")] = None,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}; bf16 has fp32 main weights.")] = "fp32",
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, where the file has no optimizer.")] = 1e-3,
    clip: Annotated[float | None, typer.Option(help="The norm to which all gradients together are clipped.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of first parameters, data order and random draws.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare first steps in fp64 with one process beforehand.")
    ] = False,
    out: Annotated[str, typer.Option(help="Folder for metrics, checkpoints and weights.")] = "meshwise-train",
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for one at the end.")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations by the file's evaluate; 0 for one at the end.")
    ] = 0,
    tensorboard: Annotated[bool, typer.Option(help="Write figures for TensorBoard into --out too.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out, under any plan.")] = False,
    replace: Annotated[bool, typer.Option(help="Remove the checkpoints of an earlier run in --out.")] = False,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Begin with the model and optimizer of a script of your own, a folder of "
            "torch.distributed.checkpoint with the names of get_state_dict.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(help="Form of the weights at the end: safetensors, or dcp, with the optimizer, for a script."),
    ] = "safetensors",
    device: Annotated[str, typer.Option(help="cpu with gloo, or cuda with NCCL.")] = "cpu",
    calibrate: Annotated[
        bool, typer.Option(help="Measure the module for some seconds beforehand, from which steps are predicted.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Train your own module on your own data: data parallelism, ZeRO, recompute, pipelines, cut operators.

    Without a plan one is searched for. On several hosts, which share FILE.py and the folder --out: once with
    --rendezvous, then on every host what that prints, and in the end once with --collect.
    """
    if rendezvous is None:
        check_device(device)
    layout = _read_layout(plan, None if rendezvous else processes, device)
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.job import CHECKPOINTS, TrainJob
    from meshwise.executor.user_training.run import (  # so that help works without torch
        find_first_step,
        prepare_training,
    )
    from meshwise.executor.user_training.run import train as run_training
    from meshwise.executor.user_training.stopping import StoppedError
    from meshwise.scenarios.module_plans.plan_files import write_plan
    from meshwise.scenarios.module_plans.planning import count_processes, plan_run

    if collect:
        collect_hosts(Path(out), is_preparing=rendezvous is not None, has_board=tensorboard, as_json=as_json)
        return
    if precision not in PRECISIONS:
        raise ValueError(f"--precision: {', '.join(PRECISIONS)}, met {precision}; nearest: bf16")
    if not learning_rate > 0 or (clip is not None and not clip > 0):
        raise ValueError(f"--learning-rate and --clip are above 0, met {learning_rate:g} and {clip}")
    path, corpora = _find_source(
        files or [], hf, (text, tokens), (evaluation_text, evaluation_tokens), sequence, token_dtype
    )
    if resume and replace:
        raise ValueError("--resume goes on from checkpoints that --replace removes, met both; nearest: --resume")
    _check_states(from_checkpoint, weights, resume=resume)
    target = make_folder(out)
    # told before anything is measured
    if first_step := find_first_step(target, steps, resume=resume, replace_run=replace):
        note(f"goes on from step {first_step}, in {target / CHECKPOINTS}")
    job = TrainJob(
        str(path),
        layout or ModuleLayout(processes or 1),
        steps,
        batch=batch,
        precision=precision,
        learning_rate=learning_rate,
        max_norm=clip,
        seed=seed,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        resume=resume,
        source=None if from_checkpoint is None else str(Path(from_checkpoint).resolve()),
        weights=weights,
        device=device,
    )
    if corpora is not None:
        from meshwise.executor.user_training.pretrained import prepare_job

        job = prepare_job(job, *corpora, sequence, target)
    if rendezvous is not None:
        if layout is None or verify:
            met = "--verify" if verify else "no --plan"
            raise ValueError(f"--rendezvous: several hosts run a plan that is known, compared on one host, met {met}")
        hosts = Hosts.from_ranks(layout.num_ranks, processes or count_processes(device), Rendezvous.parse(rendezvous))
        script = prepare_training(choose_cuts_of_job(job), target, hosts, replace_run=replace)
        tell_hosts(script, hosts.nodes, hosts.processes, hosts.rendezvous.host, as_json=as_json)
        return
    if layout is not None:
        job = choose_cuts_of_job(job)
        layout = job.layout
    ticker = Ticker()
    try:
        planned = plan_run(
            job,
            layout=layout,
            processes=processes,
            calibrates=calibrate,
            report=ticker,
            checkpoints=target / CHECKPOINTS if resume else None,
        )
    finally:
        ticker.clear()
    job = dataclasses.replace(job, layout=planned.layout)
    write_plan(planned, target)
    lines = [*planned.list_assumptions(), *planned.list_reasons()]
    lines.append(f"{planned.layout.describe()}{', after a comparison in fp64 with one process' if verify else ''}")
    if not planned.failure:
        for line in lines:
            note(line)
    # where what failed fails the run too, its message is the only one
    progress = Follower(ticker, steps, lines if planned.failure else ())
    try:
        run = run_training(
            job, target, verify=verify, replace_run=replace, has_board=tensorboard, progress=progress, tell=note
        )
    except StoppedError as stop:
        ticker.clear()
        note(str(stop))
        raise typer.Exit(stop.code) from stop
    finally:
        ticker.clear()
    tell_run(run, planned, as_json=as_json)


def collect_hosts(folder: Path, *, is_preparing: bool, has_board: bool, as_json: bool) -> None:
    """Print the run that the ranks of several hosts left in a folder."""
    from meshwise.executor.user_training.run import collect_training
    from meshwise.scenarios.module_plans.choosing import PlannedRun

    if is_preparing:
        raise ValueError("--rendezvous comes before a run and --collect after it, met both")
    run = collect_training(folder, has_board=has_board)
    tell_run(run, PlannedRun(run.job.layout), as_json=as_json)


Names = list[str] | None
"""Files that an option names."""


def _find_source(
    files: list[str],
    hf: str | None,
    training: tuple[Names, Names],
    evaluation: tuple[Names, Names],
    sequence: int | None,
    dtype: str | None,
) -> "tuple[Path, tuple[Corpus, Corpus] | None]":
    """Return what is trained, the user's file or the folder of a model of transformers, and the files of the latter.

    Those are of training, and of evaluation.

    Parameters
    ----------
    training, evaluation
        Files of text, and of tokens.
    """
    if hf is None:
        if any(training) or any(evaluation) or sequence is not None or dtype is not None:
            raise ValueError(
                "--text, --tokens, --evaluation-text, --evaluation-tokens, --token-dtype and --sequence are of a "
                "model, met no --hf FOLDER"
            )
        if len(files) != 1:
            raise ValueError(f"one FILE.py, or --hf FOLDER --text FILES, met {len(files)} files")
        path = Path(files[0])
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"{files[0]}: a Python file that has model() and data(), met no such file")
        return path.resolve(), None
    if not any(training):
        raise ValueError("--hf: a model is trained on --text FILES or --tokens FILES, met none")
    if all(training) or all(evaluation):
        raise ValueError("--text and --tokens are two forms of the same, met both")
    if dtype is not None and not (training[1] or evaluation[1]):
        raise ValueError("--token-dtype is of --tokens FILES, met none")
    from meshwise.executor.user_training.pretrained import Corpus, find_folder

    texts, tokens = ([*names, *files] if names else [] for names in training)
    evaluation_texts, evaluation_tokens = (names or [] for names in evaluation)
    return find_folder(hf), (Corpus(texts, tokens, dtype), Corpus(evaluation_texts, evaluation_tokens, dtype))


def _check_states(source: str | None, weights: str, *, resume: bool) -> None:
    """Raise ``ValueError`` where a run cannot begin from a checkpoint, or export the form of weights."""
    from meshwise.executor.modules.states import FORMATS, require_foreign

    if weights not in FORMATS:
        raise ValueError(f"--weights: {' or '.join(FORMATS)}, met {weights}; nearest: safetensors")
    if source is None:
        return
    if resume:
        raise ValueError("--from-checkpoint begins a run and --resume goes on with one, met both; nearest: --resume")
    require_foreign(Path(source))


def _read_layout(plan: str | None, processes: int | None, device: str) -> "ModuleLayout | None":
    """Return the layout of a plan file or of words; ``None`` where one is searched for."""
    from meshwise.executor.modules.layout import ModuleLayout, parse_layout

    if plan is None or plan == SEARCH:
        return None
    default = ModuleLayout(processes or (max(count_gpus(), 1) if device == CUDA else 1))
    if "=" in plan and not Path(plan).exists():
        layout = parse_layout(plan, default)
    else:
        from meshwise.scenarios.module_plans.plan_files import read_layout

        layout = read_layout(Path(plan))
    if processes is not None and layout.num_ranks != processes:
        nearest = layout.num_ranks
        raise ValueError(f"--processes: those of the plan, {nearest}, met {processes}; nearest: {nearest}")
    return layout


def choose_cuts_of_job(job: "TrainJob") -> "TrainJob":
    """Return a job whose plan says how operators are cut, chosen where it has none, and at which modules stages begin.

    The module of the file is captured, and refused where it cannot be cut. Other jobs are returned unchanged.
    """
    layout = job.layout
    if layout.operator_ranks == 1 and layout.plan is None:
        return job
    from meshwise.executor.cut_modules.plan_stages import list_stage_starts
    from meshwise.executor.modules.layout import CUTS
    from meshwise.executor.user_training.cuts import capture_job  # needs torch
    from meshwise.scenarios.inputs.operator_cuts import choose_cuts

    captured = capture_job(job)
    if layout.plan is not None:
        cuts = list_stage_starts(captured, layout.plan) if layout.pipeline > 1 else ()
        plan = layout.plan if layout.operator_ranks > 1 else None
        return dataclasses.replace(job, layout=dataclasses.replace(layout, cuts=cuts, plan=plan))
    plan = choose_cuts(
        captured.graph,
        data=layout.data,
        **{word: getattr(layout, word) for word in CUTS},
        samples=captured.batch // layout.data,
        num_microbatches=layout.num_microbatches,
    )
    return dataclasses.replace(job, layout=dataclasses.replace(layout, plan=plan))
