"""Gives exported files to DeepSpeed; run with DeepSpeed's interpreter, and beside a file as the ``train.py`` it names.

``read_deepspeed.py CASES``: a JSON list of ``{"file", "ranks", "steps"}``. For each, ``DeepSpeedConfig`` reads the file
in torch's fake process group of all ranks, and the facts that it holds are printed. Cases with steps also run the
command of the file's first line, whose script takes them by ``deepspeed.initialize``, on processes with gloo.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SEQUENCE, VOCABULARY, HIDDEN = 8, 16, 16


def build_model():
    """Return a tiny model of two products."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)
    )


def build_engine(file: str):
    """Return DeepSpeed's engine of a file; the optimizer is torch's, for DeepSpeed's own kernels are not built here."""
    import deepspeed

    document = json.loads(Path(file).read_text())
    document["optimizer"]["params"]["torch_adam"] = True
    document["zero_force_ds_cpu_optimizer"] = False
    if document["optimizer"]["type"] == "SGD":
        del document["optimizer"]["params"]["torch_adam"]
    model = build_model()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)


def collect(file: str, ranks: int) -> dict:
    """Return the facts of a plan that an engine has; the parser first has the file itself."""
    import torch
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import groups
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks)
    comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
    document = json.loads(Path(file).read_text())
    tensor = document.get("tensor_parallel", {}).get("autotp_size", 1)
    sequence = document.get("sequence_parallel_size", 1)
    mesh = None
    if sequence > 1:
        mesh = comm.initialize_mesh_device(
            (document["data_parallel_size"], sequence), ("data_parallel", "sequence_parallel")
        )
    if tensor > 1:
        groups._init_tp_mesh_device(tensor_model_parallel_size=tensor)
    config = DeepSpeedConfig(file, mpu=groups if tensor > 1 else None, mesh_device=mesh)
    zero = config.zero_config
    offload, parameters = zero.offload_optimizer, zero.offload_param

    def is_host(part):
        return str(getattr(part.device, "value", part.device)) == "cpu"

    return {
        "data": int(config.world_size),
        "tensor": config.tensor_parallel_config.autotp_size or 1,
        "context": sequence,
        "expert": config.expert_parallel_config.autoep_size if config.expert_parallel_config.enabled else 1,
        "microbatch": config.train_micro_batch_size_per_gpu,
        "microbatches": config.gradient_accumulation_steps,
        "batch": config.train_batch_size,
        "zero": int(config.zero_optimization_stage),
        "overlap_gradients": zero.overlap_comm if config.zero_optimization_stage else None,
        "offload_optimizer": (offload.ratio if is_host(offload) else 0) if offload else 0,
        "offload_parameters": bool(parameters) and is_host(parameters),
        "recompute": config.activation_checkpointing_config.number_checkpoints,
        "precision": "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "fp32",
        "gradients": config.grad_accum_dtype,
        "clipping": config.gradient_clipping,
        "optimizer": config.optimizer_name,
        "rate": config.optimizer_params["lr"],
        "schedule": config.scheduler_name,
        "iterations": config.scheduler_params["total_num_steps"],
    }


def train(file: str, steps: int) -> None:
    """Take steps of the tiny model with the file, and print the losses on the first rank."""
    import torch

    engine, *_ = build_engine(file)
    losses = []
    for _ in range(steps):
        loss = torch.zeros(())
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), SEQUENCE + 1))
            logits = engine(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    assert engine.global_steps == steps, f"steps of the engine: {engine.global_steps}"
    if torch.distributed.get_rank() == 0:
        print("STEPS", json.dumps(losses), flush=True)
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive its groups


def run(command: list[str], folder: Path, word: str) -> str:
    """Return what a command prints after ``word``; AssertionError with its output where it fails."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    found = [line.split(word, 1)[1] for line in done.stdout.splitlines() if word in line]
    assert done.returncode == 0 and found, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return found[-1]


def main() -> None:
    """Print the facts of every case, with the losses of its steps."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    if options.deepspeed_config:
        train(options.deepspeed_config, int(os.environ["STEPS"]))
        return
    if len(options.words) == 2:
        print("FACTS", json.dumps(collect(options.words[0], int(options.words[1]))), flush=True)
        return
    for case in json.loads(Path(options.words[0]).read_text()):
        facts = {}
        try:
            file = Path(case["file"])
            facts |= json.loads(run([sys.executable, __file__, str(file), str(case["ranks"])], file.parent, "FACTS"))
            if case["steps"]:
                shutil.copy(__file__, file.parent / "train.py")
                os.environ["STEPS"] = str(case["steps"])
                facts["steps"] = json.loads(
                    run(["bash", "-c", json.loads(file.read_text())["command"]], file.parent, "STEPS")
                )
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            facts["error"] = str(error)[-2500:]
        print("FACTS", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
