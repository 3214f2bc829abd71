import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

CRAMPED = """\
name: too large
model: {preset: gpt3-13b}
training: {global_batch: 64, sequence: 2048, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1}
plan: {data: 8, microbatch: 8}
"""


def lines(captured: str) -> list[str]:
    return captured.strip().splitlines()


BAD = {
    "unknown.yaml": ("training: {global_batch: 8, sequenc: 64}", "training.sequenc"),
    "type.yaml": ("name: [1]", "name"),
    "broken.yaml": ("a: {", ""),
    "twice.yaml": ("name: a\nname: b", "name"),
}


@pytest.mark.parametrize("command", ["simulate", "search", "compare", "execute", "validate"])
@pytest.mark.parametrize("name", ["missing.yaml", "a-folder", *BAD])
def test_bad_input_is_messages_with_code_2_and_nothing_written(command: str, name: str, folder: Path, capsys) -> None:
    (folder / "a-folder").mkdir()
    for file, (text, _) in BAD.items():
        (folder / file).write_text(text)
    before = sorted(folder.rglob("*"))
    out = [] if command == "validate" else ["--out", "result.json"]
    options = [] if command in ("simulate", "validate") else out
    assert run([command, name, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert all(line.startswith(name) for line in lines(captured.err))
    assert sorted(folder.rglob("*")) == before


def test_a_field_is_named_with_line_and_column(folder: Path, capsys) -> None:
    text = CRAMPED.replace("plan: {data: 8, microbatch: 8}", "plan:\n  data: 8\n  tensor: 3\n")
    (folder / "s.yaml").write_text(text)
    assert run(["simulate", "s.yaml"]) == 2
    found = lines(capsys.readouterr().err)
    assert any(line.startswith("s.yaml:6:3: plan.data: data(8) * tensor(3) * pipeline(1) = 24 ranks") for line in found)
    assert any(line.startswith("s.yaml:7:3: plan.tensor: tensor divides") for line in found)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["simulate"],
        ["simulate", "starter", "--engine", "x"],
        ["simulate", "starter", "--colour", "red"],
        ["search", "starter", "--budget", "0"],
        ["search", "starter", "--budget", "many"],
        ["search", "starter", "--algorithm", "magic"],
        ["search", "starter", "--seconds", "-1"],
        ["search", "starter", "--out", "plan.txt"],
        ["search", "starter", "--out", "nowhere/plan.json"],
        ["compare", "starter", "--algorithms", "exhaustive,magic"],
        ["compare", "starter", "--algorithms", ""],
        ["compare", "starter", "--algorithms", " , "],
        ["compare", "starter", "--algorithms", "auto,"],
        ["execute", "operators/mlp-2-processes"],
        ["simulate", "starter", "--timeline", "x.gif"],
        ["simulate", "starter", "--timeline", "."],
        ["search", "starter", "--report", "x.pdf"],
        ["compare", "starter", "--report", "nowhere/x.html"],
        ["explain", "starter", "--report", "x.png"],
        ["execute", "local/dp2", "--report", "x"],
        ["execute", "local/dp2", "--top", "2", "--report", "x.html"],
        ["simulate", "starter", "--plan", "missing.json"],
        ["simulate", "starter", "--plan", "."],
        ["list", "colours"],
        ["schema", "colour"],
        ["execute", "starter", "--steps", "0"],
        ["accuracy", "missing.jsonl"],
        ["accuracy", "."],
    ],
)
def test_wrong_use_is_one_message_with_code_2(arguments: list[str], folder: Path, capsys) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(lines(captured.err)) == 1
    assert list(folder.iterdir()) == []


def test_the_words_for_recompute_that_a_search_prints_limit_it(folder: Path, capsys) -> None:
    limits = "plan: {data: 8, microbatch: 8}\nsearch: {space: {core: true, recompute: [WORD]}}"
    for word, code in (("activation", 0), ("activations", 2)):
        text = CRAMPED.replace("gpt3-13b", "gpt3-125m").replace("plan: {data: 8, microbatch: 8}", limits)
        (folder / "s.yaml").write_text(text.replace("WORD", word))
        assert run(["search", "s.yaml", "--budget", "3"]) == code
        captured = capsys.readouterr()
    assert "recompute is one of none, selective, full, activation" in captured.err
    assert "met 'activations'; nearest: activation" in captured.err


@pytest.mark.parametrize("algorithms", ["", " , ", "auto,,random"])
def test_an_algorithm_without_a_name_is_told_with_the_names_that_there_are(algorithms: str, capsys) -> None:
    assert run(["compare", "local/dp2", "--algorithms", algorithms]) == 2
    told = capsys.readouterr().err
    assert f"met {algorithms!r}" in told and "best_first" in told and "nearest: all" in told


@pytest.mark.parametrize("plan", [[], ["--plan", "plan.yaml"], ["--top", "2"]])
def test_a_graph_alone_is_not_run_and_what_to_pass_is_told(plan: list[str], folder: Path, capsys) -> None:
    (folder / "plan.yaml").write_text("data: 2\nmicrobatch: 128\n")
    assert run(["execute", "operators/mlp-2-processes", *plan]) == 2
    (told,) = lines(capsys.readouterr().err)
    assert "model.graph: a graph has no code to run" in told
    assert "--module FILE.py:FACTORY" in told


def test_a_plan_that_does_not_fit_is_code_3_with_the_reason_and_the_nearest_that_fits(folder: Path, capsys) -> None:
    (folder / "s.yaml").write_text(CRAMPED)
    outputs = ["--timeline", "t.png", "--save", "s.json", "--trace", "t.json"]
    assert run(["simulate", "s.yaml", "--json", *outputs]) == 3
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["fits"] is False
    assert document["peak_memory"] > document["memory_capacity"]
    assert document["nearest"]["version"] == 1
    assert "the plan does not fit: stage 0 needs" in captured.err
    assert "nearest plan that fits" in captured.err
    assert [path.name for path in folder.iterdir()] == ["s.yaml"]
    (folder / "near.json").write_text(json.dumps(document["nearest"]))
    assert run(["simulate", "s.yaml", "--plan", "near.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_search_where_nothing_fits_is_code_3(folder: Path, capsys) -> None:
    few = "search: {space: {core: true}}"
    text = CRAMPED.replace("gpt3-13b", "gpt3-175b").replace("plan: {data: 8, microbatch: 8}", few)
    (folder / "s.yaml").write_text(text)
    assert run(["search", "s.yaml", "--out", "plan.json", "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["best"] is None
    assert "nothing fits" in captured.err
    assert not (folder / "plan.json").exists()


def test_a_search_whose_time_runs_out_does_not_say_that_nothing_fits(folder: Path, capsys) -> None:
    text = CRAMPED.replace("gpt3-13b", "gpt3-175b").replace("plan: {data: 8, microbatch: 8}", "")
    (folder / "s.yaml").write_text(text)
    for command in ("search", "compare"):
        algorithms = ["--algorithms", "best_first,random"] if command == "compare" else []
        assert run([command, "s.yaml", "--seconds", "0.001", "--json", *algorithms]) == 1
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        for result in found if command == "compare" else [found]:
            assert (result["best"], result["end"]) == (None, "out of time")
        assert "time ran out after" in captured.err and "nothing fits" not in captured.err


FIELDS = {
    "step_time", "tokens_per_second", "tokens_per_second_per_device", "model_flops_per_second_per_device", "mfu",
    "step_time_interval", "peak_memory_interval", "out_of_memory", "peak_reserved", "peak_device", "memory_usable",
    "fits", "peak_memory", "memory_capacity", "memory", "bubble", "exposed_communication", "links",
    "bottleneck", "engine", "tasks", "classes", "ranks", "wall_time", "assumptions",
    "peak_memory_interval_runs", "framework", "target", "unit",
}  # fmt: skip


@pytest.mark.parametrize("engine", ["discrete_event", "longest_path"])
def test_simulate_prints_one_json_document_with_every_field(engine: str, capsys) -> None:
    assert run(["simulate", "local/dp2-tp2-pp2", "--engine", engine, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == FIELDS
    assert document["engine"] == engine
    columns = {"stage", "parameters", "gradients", "optimizer", "activations", "buffers", "peak", "host_peak"}
    assert all(columns | {"peak_time", "peak_operator"} <= set(row) for row in document["memory"])
    assert all(0 <= row["peak_time"] <= document["step_time"] for row in document["memory"])


def test_simulate_writes_what_it_is_asked_for(folder: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    outputs = {"--timeline": "t.png", "--memory": "m.svg", "--trace": "t.json", "--save": "s.json"}
    assert run(["simulate", "local/pp2-1f1b", *(word for pair in outputs.items() for word in pair)]) == 0
    assert {path.name for path in folder.iterdir()} == set(outputs.values())
    saved = json.loads((folder / "s.json").read_text())
    spans = saved["timeline"]["spans"]
    assert max(spans["end"]) == saved["result"]["step_time"]
    assert json.loads((folder / "t.json").read_text())["traceEvents"]


def test_search_writes_a_plan_that_simulate_reads(folder: Path, capsys) -> None:
    assert run(["search", "local/dp2-tp2-pp2", "--algorithm", "best_first", "--out", "plan.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gap"] == 0
    assert {"evaluations", "elapsed", "best"} == set(document["history"][0])
    assert json.loads((folder / "plan.json").read_text()) == document["best"]["plan"]
    assert run(["validate", "plan.json"]) == 0
    capsys.readouterr()
    assert run(["simulate", "local/dp2-tp2-pp2", "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time"] == document["best"]["evaluation"]["step_time"]


def test_ctrl_c_keeps_the_best_plan_and_is_code_130(folder: Path, capsys, monkeypatch) -> None:
    from meshwise.strategies.cost_model import SimulatedCost

    real, calls = SimulatedCost.evaluate, []

    def evaluate(self, plan):
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, plan)

    monkeypatch.setattr(SimulatedCost, "evaluate", evaluate)
    assert run(["search", "local/dp2-tp2-pp2", "--algorithm", "mcmc", "--out", "plan.json", "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["interrupted"] is True
    assert "the best plan so far is in plan.json" in captured.err
    assert json.loads((folder / "plan.json").read_text())["version"] == 1


def test_ctrl_c_elsewhere_is_code_130_and_one_word(capsys, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwise.scenarios.scenario.Scenario.simulate", interrupt)
    assert run(["simulate", "starter"]) == 130
    assert lines(capsys.readouterr().err) == ["interrupted"]


def test_an_unexpected_failure_is_one_line_with_code_1(capsys, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr("meshwise.scenarios.scenario.Scenario.simulate", fail)
    assert run(["simulate", "starter"]) == 1
    assert lines(capsys.readouterr().err) == ["failed: RuntimeError: out of luck (MESHWISE_DEBUG=1 shows where)"]
    monkeypatch.setenv("MESHWISE_DEBUG", "1")
    assert run(["simulate", "starter"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_compare_puts_algorithms_side_by_side(folder: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert run(["compare", "local/dp2", "--budget", "5", "--seed", "3", "--out", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len({result["algorithm"] for result in document}) == len(document) >= 2
    assert {path.name for path in (folder / "out").iterdir()} == {"compare.csv", "compare.json", "compare.png"}
    assert len((folder / "out" / "compare.csv").read_text().splitlines()) == len(document) + 1


def test_the_same_seed_gives_the_same_search(capsys) -> None:
    found = []
    for _ in range(2):
        assert (
            run(["search", "local/dp2-tp2-pp2", "--algorithm", "mcmc", "--budget", "6", "--seed", "7", "--json"]) == 0
        )
        document = json.loads(capsys.readouterr().out)
        found.append((document["best"]["plan"], [point["best"] for point in document["history"]]))
    assert found[0] == found[1]


HEAVY = ("torch", "pandas", "matplotlib", "scipy")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["simulate", "--help"],
        ["validate", "starter"],
        ["validate", "gpt3-175b-1024-a100"],
        ["list", "models"],
    ],
)
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom meshwise.scenarios.commands.main import run\n"
        f"code = run({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert lines(done.stdout)[-1] == "[] 0", done.stderr


def test_load_imports_nothing_heavy() -> None:
    lines = ("import sys", "from meshwise import load", "load('starter').simulate()")
    code = "\n".join((*lines, f"print([name for name in {HEAVY!r} if name in sys.modules])"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{sys.executable} -m meshwise schema scenario | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "{"
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["typer", "meshwise.scenarios.commands.simulate", "meshwise.strategies.plan.plan"])
def test_an_interrupt_while_modules_load_is_one_word(module: str) -> None:
    code = (
        "import sys\n"
        "class Stop:\n"
        f"    def find_spec(self, name, *_):\n        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['meshwise', 'simulate', 'local/dp2']\n"
        "from meshwise.__main__ import main\n"
        "main()"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, lines(done.stderr)) == (130, ["interrupted"])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("ValueError('Invalid affine transformation matrix')", 130, "interrupted"),
        ("OSError(28, 'no space')", 1, "failed: OSError: [Errno 28] no space (MESHWISE_DEBUG=1 shows where)"),
    ],
)
def test_an_error_that_an_extension_made_of_an_interrupt_is_an_interrupt(error: str, code: int, told: str) -> None:
    program = (
        "import os, signal\n"
        "import meshwise.scenarios.commands.main as command_line\n"
        "def command(**_):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        f"    except KeyboardInterrupt:\n        raise {error} from None\n"
        "command_line.application = lambda: command\n"
        "command_line.main()"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, lines(done.stderr)) == (code, [told])
