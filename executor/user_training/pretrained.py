"""A causal language model of transformers from a folder, with its tokenizer, trained on packed text; all is offline.

The folder has ``config.json`` and a tokenizer as ``save_pretrained`` writes them. Weights are read from its safetensors
where there are any, and else drawn as the configuration says.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from meshwise.executor.capture.capture import format_error
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.starting.construction import DeferredModule, Start, start_module
from meshwise.executor.starting.stored_values import find_stored_tensors, match_parameters
from meshwise.executor.token_data.packing import PackedTokens, pack_texts
from meshwise.executor.token_data.parts import TokenError, TokenPart, TokenStream, read_parts, write_parts
from meshwise.executor.token_data.reading import CHECKED, Reading, describe_tokenizer, find_tokenise
from meshwise.executor.user_training.job import TOKENS, TrainJob
from meshwise.executor.user_training.user_file import UserFile

SEQUENCE = 512
"""Tokens of a sample by default, where the model has as many positions."""
BATCH = 8
"""Samples of a step by default, at least."""
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.h5", "*.msgpack", "*.gguf", "*.pth")


class PretrainedError(UserError):
    """A folder without a causal language model of transformers, its tokenizer or its weights."""


def require_transformers() -> None:
    """Raise `PretrainedError` where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise PretrainedError("--hf needs transformers, which is not installed; pip install 'meshwise[exec,hf]'")


@contextmanager
def _stay_offline() -> Iterator[None]:
    """Keep transformers from looking for files elsewhere, and from telling of its progress."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def find_folder(name: str) -> Path:
    """Return a folder with a model, or that of a name in the local cache of transformers."""
    require_transformers()
    if Path(name).is_dir():
        folder = Path(name).resolve()
    else:
        with _stay_offline():
            from huggingface_hub import snapshot_download

            try:
                folder = Path(snapshot_download(name, local_files_only=True))
            except Exception as error:
                rule = "--hf: a folder, or a name in the local cache of Hugging Face"
                raise PretrainedError(f"{rule}, met {name}; nothing is downloaded") from error
    if not (folder / "config.json").is_file():
        raise PretrainedError(f"--hf: a folder with config.json as save_pretrained writes it, met {folder} without")
    return folder


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    with _stay_offline():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            rule = "--hf: a configuration that transformers reads"
            raise PretrainedError(f"{rule}, met {folder}: {_tell(error)}") from error


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with _stay_offline():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            rule = "--hf: a folder with a tokenizer, as tokenizer.json"
            raise PretrainedError(f"{rule}, met none that loads in {folder}: {_tell(error)}") from error


def find_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; ``None`` where it has none that loads."""
    try:
        return _read_tokenizer(folder)
    except PretrainedError:
        return None


def _tell(error: Exception) -> str:
    return " ".join(format_error(error).split())[:300]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a model is trained or evaluated on.

    Parameters
    ----------
    texts, tokens
        Files of text, which the model's tokenizer makes tokens, or of tokens.
    dtype
        Numbers of raw files of tokens.
    """

    texts: Sequence[str] = ()
    tokens: Sequence[str] = ()
    dtype: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there are no files."""
        return not self.texts and not self.tokens

    @property
    def option(self) -> str:
        """The option that names the files."""
        return "tokens" if self.tokens else "text"


def prepare_job(job: TrainJob, corpus: Corpus, evaluation: Corpus, sequence: int | None, folder: Path) -> TrainJob:
    """Return a job of a folder's model with tokens; those of text are written into the folder of the run.

    Parameters
    ----------
    sequence
        Tokens of a sample as the user asks; ``None`` for the default.

    Raises
    ------
    UserError
        Where the folder has no such model or tokenizer, or the tokens are fewer than those of one step.
    """
    source, layout = Path(job.file), job.layout
    config = _read_config(source)
    _has_weights(source)
    with torch.device("meta"):  # whether there is such a model is known before ranks start
        _build_model(source, config, has_weights=False)
    length = _choose_sequence(config, sequence)
    num_parts = layout.data * layout.num_microbatches
    batch = job.batch or max(BATCH // num_parts, 1) * num_parts
    target = folder / TOKENS
    parts = _find_parts(config, corpus, source, target)
    _require_samples(parts, length, batch, f"--{corpus.option}: at least one step of")
    write_parts(target / "training.json", parts)
    job = replace(job, tokens=str((target / "training.json").resolve()), sequence=length, batch=batch)
    if evaluation.is_empty:
        return job
    parts = _find_parts(config, evaluation, source, target)
    _require_samples(parts, length, 1, f"--evaluation-{evaluation.option}: at least")
    write_parts(target / "evaluation.json", parts)
    return replace(job, evaluation_tokens=str((target / "evaluation.json").resolve()))


def _find_parts(config: Any, corpus: Corpus, source: Path, folder: Path) -> list[TokenPart]:
    """Return where the tokens of files lie, which the model has as far as they are looked at here."""
    if corpus.tokens:
        tokenizer = find_tokenizer(source)
        end = None if tokenizer is None else _find_end(config, tokenizer)
        tokenise = None if tokenizer is None else find_tokenise(tokenizer)
        reading = Reading(corpus.dtype, None, tokenise, end, describe_tokenizer(tokenizer), folder)
        parts = reading.find_parts(Path(name) for name in corpus.tokens)
    else:
        tokenizer = _read_tokenizer(source)
        end = _find_end(config, tokenizer)
        if end is None:
            raise PretrainedError(f"--hf: a tokenizer with eos_token, which ends a file, met {source} without")
        words = f"{type(tokenizer).__name__} {len(tokenizer)} {_read_identity(source)}"
        texts = [Path(text) for text in corpus.texts]
        parts = [pack_texts(texts, find_tokenise(tokenizer), end, words, folder)]
    stream = TokenStream(parts)
    try:
        stream.require_range(0, min(len(stream), CHECKED), _count_words(config))
    except TokenError as error:
        raise PretrainedError(f"--hf: a model that has the tokens, met {source}: {error}") from error
    return parts


def _find_end(config: Any, tokenizer: Any) -> int | None:
    """Return the token that ends a text; ``None`` where there is none."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else getattr(config, "eos_token_id", None)
    return end if isinstance(end, int) else None


def _count_words(config: Any) -> int:
    count: int = config.get_text_config().vocab_size
    return count


def _require_samples(parts: Sequence[TokenPart], sequence: int, num_samples: int, rule: str) -> None:
    """Raise `PretrainedError` where tokens make fewer samples."""
    dataset = PackedTokens(parts, sequence)
    num_tokens = len(dataset.tokens)
    if len(dataset) < num_samples:
        shorter = num_tokens // num_samples
        nearest = f"--sequence {shorter}" if shorter >= 2 else "more text"
        samples = f"{num_samples} sample{'s' * (num_samples > 1)} of {sequence} tokens"
        raise PretrainedError(f"{rule} {samples}, met {num_tokens} tokens; nearest: {nearest}")


def _read_identity(folder: Path) -> str:
    """Return words that change with the tokenizer's files."""
    other_names = ("vocab.json", "merges.txt")
    files = [path for path in sorted(folder.iterdir()) if "token" in path.name or path.name in other_names]
    return sha256(b"".join(path.read_bytes() for path in files if path.is_file())).hexdigest()


def _choose_sequence(config: Any, sequence: int | None) -> int:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if sequence is None:
        return min(SEQUENCE, most or SEQUENCE)
    if sequence < 2 or (most and sequence > most):
        positions = f" and at most {most}, the positions of the model" if most else ""
        rule = f"--sequence: at least 2 tokens{positions}"
        raise PretrainedError(f"{rule}, met {sequence}; nearest: {min(max(sequence, 2), most or sequence)}")
    return sequence


def open_pretrained(job: TrainJob) -> UserFile:
    """Return the model and the packed text of a job as what a user's file offers."""
    require_transformers()
    folder, num_words = Path(job.file), _count_words(_read_config(Path(job.file)))

    def open_tokens(path: str | None) -> PackedTokens:
        assert path is not None
        return PackedTokens(read_parts(Path(path)), job.sequence, vocabulary=num_words)

    return UserFile(
        folder,
        lambda: _load_model(folder),
        lambda: open_tokens(job.tokens),
        evaluation_data=None if job.evaluation_tokens is None else lambda: open_tokens(job.evaluation_tokens),
        save_beside=lambda target: _save_tokenizer(folder, target),
        start=lambda seed: start_model(folder, seed),
    )


def start_model(folder: Path, seed: int) -> Start:
    """Return the model of a folder; where its weights lie as it has them, ranks read them in parts."""
    if not _has_weights(folder):
        return start_module(lambda: _load_model(folder), seed)
    config = _read_config(folder)
    start = start_module(lambda: _build_model(folder, config, has_weights=False).train(), seed)
    if isinstance(start, DeferredModule) and not _converts_weights(start.module):
        values = None
        with suppress(SafetensorError, OSError, ValueError, KeyError):  # transformers tells it below
            values = match_parameters(start.module, find_stored_tensors(folder))
        if values is not None:
            _read_generation(folder, start.module)
            return DeferredModule(start.module, values)
    return start_module(lambda: _load_model(folder), seed)


def _converts_weights(module: Any) -> bool:
    """Return whether transformers turns the weights in files into others, as it may."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    is_quantised = getattr(module.config, "quantization_config", None) is not None
    return is_quantised or bool(get_model_conversion_mapping(module, add_legacy=False))


def _read_generation(folder: Path, module: Any) -> None:
    """Give a model the settings of generation that lie beside its weights, which it is saved with."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        with _stay_offline():
            module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _load_model(folder: Path) -> nn.Module:
    return _build_model(folder, _read_config(folder), has_weights=_has_weights(folder)).train()


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has weights; `PretrainedError` where they are in other files than safetensors."""
    if any(folder.glob("*.safetensors")):
        return True
    others = [path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)]
    if others:
        raise PretrainedError(f"--hf: weights are safetensors, met {others[0]} in {folder}; nearest: model.safetensors")
    return False


def _build_model(folder: Path, config: Any, *, has_weights: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "dtype": torch.float32, "use_safetensors": True}
    with _stay_offline():
        try:
            module = (
                AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
                if has_weights
                else AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            )
        except Exception as error:
            raise PretrainedError(f"--hf: a causal language model, met {folder}: {_tell(error)}") from error
    assert isinstance(module, nn.Module)
    return module


def _save_tokenizer(folder: Path, target: Path) -> None:
    tokenizer = find_tokenizer(folder)
    if tokenizer is not None:  # files of tokens need none
        with _stay_offline():
            tokenizer.save_pretrained(target)
