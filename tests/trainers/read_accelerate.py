"""Gives exported files to Accelerate; run with its interpreter, and beside a file as the ``train.py`` that it names.

``read_accelerate.py CASES``: a JSON list of ``{"file", "ranks", "steps"}``. For each, the parser of ``accelerate
launch`` and its `_validate_launch_command` make the environment of a script; in it an ``Accelerator`` is built in
torch's fake process group of all ranks, and the facts of its plugins are printed. Cases with steps also run the command
of the file's first line, on processes with gloo.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SEQUENCE, VOCABULARY, HIDDEN = 8, 16, 16


def read_script(file: Path) -> dict:
    """Return what the comments of a file say of its script, as a script of its user would read it."""
    return dict(re.findall(r"(?m)^# script: ([a-z0-9_]+) = (.+)$", file.read_text()))


def make_environment(file: Path) -> dict:
    """Return the environment that ``accelerate launch`` gives a script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    words = file.read_text().split("\n", 1)[0].removeprefix("# accelerate launch ").split()
    args, defaults, from_config = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        environment = prepare_multi_gpu_env(args)
    else:
        environment = prepare_simple_launcher_cmd_env(args)[1]
    return environment | {
        "CHECK_PROCESSES": str(args.num_processes),
        "CHECK_TYPE": str(defaults.distributed_type.value),
    }


def build_model():
    """Return a tiny model of two blocks."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.product = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return x + torch.nn.functional.gelu(self.product(x))

    class Tiny(torch.nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = torch.nn.Sequential(Block(), Block())
            self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, tokens):
            return self.head(self.blocks(self.embedding(tokens)))

    return Tiny()


def build_accelerator(**options):
    """Return an accelerator on CPUs; for FSDP and DeepSpeed it takes them, with gloo, for GPUs with NCCL."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys():
        return Accelerator(cpu=True, **options)

    def prepare_backend(self, *_, **__):
        is_launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
        return ("gloo", DistributedType.MULTI_GPU) if is_launched else (None, DistributedType.NO)

    PartialState._prepare_backend = prepare_backend
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    return Accelerator(**options)


def collect(ranks: int) -> dict:
    """Return the facts that an accelerator's state has, in the environment of a launched script."""
    import torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "0"}
    if ranks > 1:
        torch.distributed.init_process_group("fake", rank=0, world_size=ranks)
    accelerator = build_accelerator()
    state, parallelism = accelerator.state, accelerator.parallelism_config
    fsdp, deepspeed = (getattr(state, f"{name}_plugin", None) for name in ("fsdp", "deepspeed"))
    facts = {
        "type": os.environ["CHECK_TYPE"],
        "ranks": accelerator.num_processes,
        "stated_ranks": int(os.environ["CHECK_PROCESSES"]),
        "precision": state.mixed_precision,
        "fsdp": fsdp is not None,
    }
    if parallelism:
        mesh = state.device_mesh
        facts |= {"replicate": parallelism.dp_replicate_size, "shard": parallelism.dp_shard_size}
        facts |= {"tensor": parallelism.tp_size, "context": parallelism.cp_size}
        facts |= {"mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh else {}}
        if parallelism.cp_size > 1:
            facts["rotation"] = parallelism.cp_handler.cp_comm_strategy
    if fsdp:
        facts |= {
            "version": fsdp.fsdp_version,
            "reshard_after_forward": fsdp.reshard_after_forward,
            "offload": bool(fsdp.cpu_offload) and "CPUOffload" in type(fsdp.cpu_offload).__name__,
            "recompute": fsdp.activation_checkpointing,
        }
    if deepspeed:
        config = deepspeed.deepspeed_config
        facts |= {
            "zero": config["zero_optimization"]["stage"],
            "offload": config["zero_optimization"]["offload_optimizer"]["device"],
            "accumulations": config["gradient_accumulation_steps"],
            "clipping": config["gradient_clipping"],
        }
    return facts


def train(steps: int) -> None:
    """Take steps of the tiny model as the script of the file would, and print the losses on the first rank."""
    import torch

    script = read_script(Path(os.environ["CHECK_FILE"]))
    size, accumulations = int(script["per_device_train_batch_size"]), int(script["gradient_accumulation_steps"])
    accelerator = build_accelerator(gradient_accumulation_steps=accumulations)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(script["learning_rate"]))
    if getattr(accelerator.state, "deepspeed_plugin", None):
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = size
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, updates = [], 0
    for _ in range(steps):
        for _ in range(accumulations):
            tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1))
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients and float(script["max_grad_norm"]):
                    accelerator.clip_grad_norm_(model.parameters(), float(script["max_grad_norm"]))
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
        losses.append(float(loss.detach()))
    assert updates == steps, f"updates: {updates}"
    if accelerator.is_main_process:
        print("STEPS", json.dumps([str(accelerator.distributed_type.value), *losses]), flush=True)
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive its groups


def run(command: list[str], folder: Path, environment: dict, word: str) -> str:
    """Return what a command prints after ``word``; AssertionError with its output where it fails."""
    path = f"{Path(sys.executable).parent}:{environment.get('PATH', os.environ['PATH'])}"
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment | {"PATH": path}, capture_output=True, text=True, timeout=300
    )
    found = [line.split(word, 1)[1] for line in done.stdout.splitlines() if word in line]
    assert done.returncode == 0 and found, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return found[-1]


def main() -> None:
    """Print the facts of every case, with the losses of its steps."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if len(sys.argv) == 1:
        train(int(os.environ["STEPS"]))
        return
    if len(sys.argv) == 3:
        print("FACTS", json.dumps(collect(int(sys.argv[2]))), flush=True)
        return
    for case in json.loads(Path(sys.argv[1]).read_text()):
        facts = {}
        try:
            file = Path(case["file"])
            os.chdir(file.parent)
            environment = make_environment(file)
            command = [sys.executable, __file__, "facts", str(case["ranks"])]
            facts |= json.loads(run(command, file.parent, environment, "FACTS"))
            facts["script"] = read_script(file)
            if case["steps"]:
                shutil.copy(__file__, file.parent / "train.py")
                line = file.read_text().split("\n", 1)[0].removeprefix("# ")
                given = {"STEPS": str(case["steps"]), "CHECK_FILE": str(file)}
                facts["steps"] = json.loads(run(["bash", "-c", line], file.parent, given, "STEPS"))
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            facts["error"] = str(error)[-2500:]
        print("FACTS", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
