"""Names of states in checkpoints of torch's distributed checkpoint (DCP) that other programs wrote.

A script saves ``{"model": ..., "optimizer": ...}`` with the names of ``torch.distributed.checkpoint.state_dict``, under
keys of its own: they are found by the names of parameters.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from meshwise.executor.recording.rank_files import UserError

STATE = "state."
"""How names of an optimizer's states begin, before those of their parameters."""
_USUAL = ("model", "module", "net", "")
_LAST_STEP = "last_epoch"
_PROBED = 8
"""Names by which prefixes are looked for."""


class NamesError(UserError):
    """A checkpoint without the parameters of a module."""


def find_prefix(names: Iterable[str], keys: Iterable[str]) -> str | None:
    """Return what stands before all of some names in the keys of a checkpoint; ``None`` where they are not there.

    >>> find_prefix(["a", "b"], ["app.model.a", "app.model.b", "app.optim.state.a.step"])
    'app.model.'
    """
    wanted, known = list(names), set(keys)
    if not wanted:
        return ""
    prefixes = {key.removesuffix(wanted[0]) for key in known if f".{key}".endswith(f".{wanted[0]}")}
    whole = [prefix for prefix in prefixes if all(prefix + name in known for name in wanted)]
    return min(whole, key=_rate, default=None)


def _rate(prefix: str) -> tuple[int, int, str]:
    """Return a key by which copies, such as averages of weights, come after the weights."""
    last_word = prefix.rstrip(".").rpartition(".")[2]
    return _USUAL.index(last_word) if last_word in _USUAL else len(_USUAL), len(prefix), prefix


def match_names(
    checkpoint: Path, module_names: Iterable[str], optimizer_names: Iterable[str], keys: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return the keys of a checkpoint by the names of a ``module`` and of the states of its ``optimizer``.

    States that the checkpoint has not are left out.

    Raises
    ------
    NamesError
        Where a parameter is not there, or states have other names than those of parameters.
    """
    wanted, known = list(module_names), set(keys)
    prefix = find_prefix(wanted, known)
    if prefix is None:
        met = f"met none {_tell(wanted, known)}"
        raise NamesError(f"{checkpoint}: a checkpoint has all parameters of the module, {met}")
    states = [name for name in optimizer_names if name.startswith(STATE)]
    first, num_states = _find_likeliest(states, known)
    if states and not num_states:
        strange = [key for key in known - {prefix + name for name in wanted} if f".{STATE}" in f".{key}"]
        if strange:
            rule = "states of the optimizer have the names of parameters, as torch's get_state_dict gives them"
            raise NamesError(f"{checkpoint}: {rule}, met {min(strange)}")
    return {
        "module": {name: prefix + name for name in wanted},
        "optimizer": {name: first + name for name in states if first + name in known},
    }


def _find_likeliest(names: list[str], keys: set[str]) -> tuple[str, int]:
    """Return what stands before most names in keys, and before how many."""
    prefixes = {key.removesuffix(name) for name in names[:_PROBED] for key in keys if f".{key}".endswith(f".{name}")}
    counts = {prefix: sum(prefix + name in keys for name in names) for prefix in sorted(prefixes)}
    likeliest = max(counts, key=lambda prefix: counts[prefix], default="")
    return likeliest, counts.get(likeliest, 0)


def _tell(names: list[str], keys: set[str]) -> str:
    """Return the first name that the likeliest prefix does not stand before, in words."""
    prefix, _ = _find_likeliest(names, keys)
    missing = next(name for name in names if prefix + name not in keys)
    return f"for {missing} under {prefix.rstrip('.') or 'no key'}"


def find_scheduler(checkpoint: Path, state: Mapping[str, object], keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of a schedule's states in a checkpoint, by their names; empty where it has no schedule.

    Raises
    ------
    NamesError
        Where it has one of another kind.
    """
    known = set(keys)
    prefixes = {key.removesuffix(_LAST_STEP) for key in known if f".{key}".endswith(f".{_LAST_STEP}")}
    if not prefixes:
        return {}
    prefix = find_prefix(state, known)
    if prefix is None:
        raise NamesError(f"{checkpoint}: the schedule of a checkpoint is of the same kind, met {min(prefixes)}...")
    return {name: prefix + name for name in state}


def strip_compiled(name: str) -> str:
    """Return the name of a state without what ``torch.compile`` puts into it for a module that it wraps.

    >>> strip_compiled("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")
