"""One language model on real text, in one process and under three plans by turns: curves in one picture.

Run ``python -m tests.studies.text_curves OUT.json PICTURE.png [STEPS]``. A tokenizer (byte-level BPE) is trained on
sources of Python's standard library, and a small Llama on their tokens by ``meshwise train --hf``: whole in one
process; and in parts, stopped twice and resumed under another plan. The weights at the end are loaded by transformers,
whose loss on held-out text is compared with that of the run.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from sysconfig import get_path
from tempfile import TemporaryDirectory
from typing import Any

from meshwise.reports.pictures.figure import GRID, QUIET, add_axes, header, open_sheet

STEPS, BATCH, SEQUENCE, VOCABULARY = 500, 16, 64, 2048
PLANS = ("data=2,zero=3", "pipeline=2,num_microbatches=4", "data=2,num_microbatches=2")
_COLOURS = ("#0072B2", "#D55E00", "#009E73")
TEXTS, HELD_OUT = ("argparse", "ast", "doctest", "inspect", "pydoc", "subprocess", "tarfile", "typing"), "turtle"
_LEARNING_RATE = 3e-3


def write_model(folder: Path) -> None:
    """Write the configuration of a small Llama, and a tokenizer of the standard library's text, into a folder."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(path) for path in list_texts()], vocab_size=VOCABULARY, special_tokens=["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def list_texts() -> list[Path]:
    """Return the texts that are trained on."""
    return [Path(get_path("stdlib"), f"{name}.py") for name in TEXTS]


def run_part(model: Path, out: Path, steps: int, plan: str, *, resumes: bool) -> list[float]:
    """Return the losses of a run up to a step, or of the rest of one."""
    command = [sys.executable, "-m", "meshwise", "train", "--hf", str(model), "--text", *map(str, list_texts())]
    options = ["--evaluation-text", str(Path(get_path("stdlib"), f"{HELD_OUT}.py")), "--sequence", str(SEQUENCE)]
    options += ["--batch", str(BATCH), "--steps", str(steps), "--plan", plan, "--out", str(out), "--json"]
    options += ["--no-calibrate", "--learning-rate", str(_LEARNING_RATE), *(["--resume"] if resumes else [])]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    losses: list[float] = json.loads(result.stdout)["loss"]
    return losses


def measure_loaded(weights: Path, model: Path) -> float:
    """Return the loss of exported weights, loaded by transformers, on the held-out text, cut as a run cuts it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = Path(get_path("stdlib"), f"{HELD_OUT}.py").read_text()
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    rows = torch.tensor(tokens[: len(tokens) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)
    loaded = AutoModelForCausalLM.from_pretrained(weights).eval()
    with torch.no_grad():
        losses = [float(loaded(input_ids=row[None], labels=row[None]).loss) for row in rows]
    return sum(losses) / len(losses)


def list_parts(steps: int) -> Iterator[tuple[str, int, int]]:
    """Yield every plan with its first step and the step after its last."""
    ends = [steps * part // len(PLANS) for part in range(len(PLANS) + 1)]
    yield from zip(PLANS, ends, ends[1:], strict=False)


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw both curves, and how far they are apart."""
    whole, parts = rows["whole"], rows["parts"]
    apart = [abs(a - b) / a for a, b in zip(whole, parts, strict=True)]
    with open_sheet(path) as figure:
        facts = f"Llama of {rows['parameters']:,} parameters, {BATCH} x {SEQUENCE} tokens a step, fp32: rounding grows"
        header(figure, "One run under three plans has the curve of one process", facts)
        ax, lower = add_axes(figure, 110, 130, 1420, 480), add_axes(figure, 110, 680, 1420, 150)
        ax.plot(whole, color="#1A1A1A", linewidth=4, alpha=0.25, label="one process, never stopped")
        for (plan, start, end), colour in zip(list_parts(len(whole)), _COLOURS, strict=True):
            ax.plot(range(start, end), parts[start:end], color=colour, linewidth=1.2, label=plan.replace(",", ", "))
            lower.semilogy(range(start, end), [max(value, 1e-9) for value in apart[start:end]], color=colour)
        ax.set_ylabel("loss (nats a token)")
        lower.set_ylabel("apart, of the loss")
        lower.set_yticks([1e-8, 1e-5, 1e-2], ["1e-8", "1e-5", "1e-2"])
        lower.minorticks_off()
        lower.set_xlabel("step")
        for axes in (ax, lower):
            axes.set_xlim(0, len(whole))
            axes.grid(color=GRID, linewidth=0.6)
        ax.legend(fontsize=12, labelcolor=QUIET)


def main(arguments: Sequence[str]) -> None:
    """Train, draw and tell."""
    out, picture = Path(arguments[0]), Path(arguments[1])
    steps = int(arguments[2]) if len(arguments) > 2 else STEPS
    with TemporaryDirectory() as name:
        model, whole, parted = (Path(name) / part for part in ("model", "whole", "parts"))
        model.mkdir()
        write_model(model)
        losses = run_part(model, whole, steps, "data=1", resumes=False)
        parts: list[float] = []
        for plan, start, end in list_parts(steps):
            parts += run_part(model, parted, end, plan, resumes=start > 0)
        lines = [json.loads(line) for line in (parted / "metrics.jsonl").read_text().splitlines()]
        rows = {
            "whole": losses,
            "parts": parts,
            "held_out": lines[-1]["evaluation"]["loss"],
            "held_out_loaded": measure_loaded(parted / "weights", model),
            "parameters": _count_parameters(parted / "weights"),
        }
    out.write_text(json.dumps(rows))
    draw(rows, picture)
    apart = max(abs(a - b) / a for a, b in zip(losses, parts, strict=True))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; at most {apart:.1e} apart", end="; ")
    print(f"held-out loss {rows['held_out']:.6f} of the run, {rows['held_out_loaded']:.6f} loaded by transformers")


def _count_parameters(weights: Path) -> int:
    from meshwise.executor.recording.weight_files import read_weights

    return sum(tensor.numel() for tensor in read_weights(weights).values())


if __name__ == "__main__":
    main(sys.argv[1:])
