"""Errors of predictions by publisher; publishers whose rows had no part in building the simulator come first.

Run ``python -m tests.studies.accuracy_publishers ROWS.jsonl FOLDER`` to write ``publishers.md`` and
``publishers.json`` into a folder; the project's own are in ``reports/accuracy``. Every publisher counts the same,
however many rows it has.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Any

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.published.accuracy import Prediction, load_runs, predict_all, select_split, summarize

TITLE = "Predicted against measured, by publisher"
PAGE, DATA = "publishers.md", "publishers.json"


class Part(StrEnum):
    """The part that the rows of a source had in building the simulator."""

    NONE = "none"
    STRUCTURE = "structure"
    FIGURES = "structure and figures"


PARTS: Mapping[str, Part] = {
    "alephalpha_layouts": Part.FIGURES,
    "korthikanti_tab5": Part.STRUCTURE,
    "llmfoundry": Part.FIGURES,
    "maxtext_tpu": Part.STRUCTURE,
    "megatron_bridge": Part.STRUCTURE,
    "megatron_h100": Part.STRUCTURE,
    "megatron_sc21": Part.STRUCTURE,
    "mindformers_ascend": Part.STRUCTURE,
    "nemo_2407_h100": Part.STRUCTURE,
    "simumax_b200": Part.STRUCTURE,
    "torchtitan_asynctp": Part.STRUCTURE,
    "torchtitan_h100": Part.STRUCTURE,
    "vtrain_single": Part.FIGURES,
}
"""Sources whose rows guided the structure of the simulator, or to which figures were fitted
(`meshwise.scenarios.published.frameworks`, `tests.studies.interval_calibration`). All other sources had no
part.
"""

PUBLISHERS: Mapping[str, str] = {
    "alephalpha_layouts": "Aleph Alpha",
    "alpa_v100": "Alpa",
    "dgxc_gb200": "NVIDIA",
    "dgxc_h100": "NVIDIA",
    "internevo_mem": "InternLM",
    "korthikanti_tab5": "NVIDIA",
    "libai_bench_megatron": "OneFlow",
    "libai_bench_oneflow": "OneFlow",
    "llmfoundry": "MosaicML",
    "maxtext_tpu": "Google",
    "mcore_functional_a100": "NVIDIA",
    "mcore_functional_gb200": "NVIDIA",
    "mcore_functional_h100": "NVIDIA",
    "megatron_bridge": "NVIDIA",
    "megatron_h100": "NVIDIA",
    "megatron_sc21": "NVIDIA",
    "mi100_pcie_pp2": "Jack31098",
    "mindformers_ascend": "Huawei",
    "modellink_ascend": "Huawei",
    "nemo_2407_h100": "NVIDIA",
    "simumax_b200": "Moore Threads",
    "torchtitan_asynctp": "PyTorch",
    "torchtitan_h100": "PyTorch",
    "torchtitan_trainy_h200": "Trainy",
    "vtrain_single": "VIA Research",
}
"""Publishers by source; a source that is not listed is its own publisher."""


class Standing(StrEnum):
    """How much of a publisher's rows was known while the simulator was built."""

    UNSEEN = "publisher unseen"
    NEW_ROWS = "other rows seen"
    SEEN = "rows seen"


def summarize_publishers(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return errors by publisher and standing, and their means over publishers, as JSON-ready data."""
    known_publishers = {PUBLISHERS.get(source, source) for source, part in PARTS.items() if part is not Part.NONE}
    rows: dict[tuple[Standing, str], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        rows[_find_standing(prediction.run.source, known_publishers), publisher_of(prediction.run.source)].append(
            prediction
        )
    order = list(Standing)
    lines = [
        _build_line(standing, publisher, rows[standing, publisher])
        for standing, publisher in sorted(rows, key=lambda key: (order.index(key[0]), key[1].lower()))
    ]
    return {
        "rows": len(predictions),
        "publishers": lines,
        "means": {
            str(standing): _average_lines([line for line in lines if line["standing"] == standing])
            for standing in Standing
            if any(line["standing"] == standing for line in lines)
        },
        "all": summarize(predictions)["all"],
    }


def publisher_of(source: str) -> str:
    """Return who measured the rows of a source."""
    return PUBLISHERS.get(source, source)


def _find_standing(source: str, known_publishers: set[str]) -> Standing:
    if PARTS.get(source, Part.NONE) is not Part.NONE:
        return Standing.SEEN
    return Standing.NEW_ROWS if PUBLISHERS.get(source, source) in known_publishers else Standing.UNSEEN


def _build_line(standing: Standing, publisher: str, rows: Sequence[Prediction]) -> dict[str, Any]:
    result = summarize(rows)["all"]
    sources = sorted({row.run.source for row in rows})
    step_time_errors = [row.error for row in rows if row.error is not None]
    return {
        "publisher": publisher,
        "standing": str(standing),
        "part": str(max((PARTS.get(source, Part.NONE) for source in sources), key=list(Part).index)),
        "sources": sources,
        "rows": len(rows),
        "skipped": len(result["skipped"]),
        "step_time": result["step_time"],
        "too_fast": round(fmean(error < 0 for error in step_time_errors), 12) if step_time_errors else None,
        "memory": result["memory"],
        "out_of_memory": result["out_of_memory"],
        "step_time_interval": result["step_time_interval"],
    }


def _average_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over publishers, each counted once."""
    step_time_errors = [line["step_time"] for line in lines if line["step_time"]["count"]]
    memory_lines = [line["memory"] for line in lines if line["memory"]["count"]]
    return {
        "publishers": len(step_time_errors),
        "rows": sum(error["count"] for error in step_time_errors),
        "step_time": _average_known(error["mape"] for error in step_time_errors),
        "bias": _average_known(error["bias"] for error in step_time_errors),
        "too_fast": sum(error["bias"] < 0 for error in step_time_errors),
        "memory_publishers": len(memory_lines),
        "memory": _average_known(error["mape"] for error in memory_lines),
        "interval": _average_known(
            line["step_time_interval"]["inside"] for line in lines if line["step_time"]["count"]
        ),
    }


def _average_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 12) if known else None


HEAD = ("publisher", "part in building", "rows", "timed", "mean", "bias", "memory", "bias", "ran: fits", "OOM: told")


def format_page(result: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    sections = [
        Section("What this is", _build_introduction(result)),
        *(_build_section(standing, result) for standing in Standing if standing in result["means"]),
        _build_fits(result),
        _build_sources(result),
    ]
    return to_markdown(TITLE, sections)


def _build_introduction(result: Mapping[str, Any]) -> tuple[str, ...]:
    unseen = result["means"].get(Standing.UNSEEN)
    paragraph = (
        f"{result['rows']} published runs. Errors are predicted over measured, minus 1; of the step time unless memory "
        "is named. Means over publishers count each publisher once. "
        "Written by python -m tests.studies.accuracy_publishers."
    )
    if unseen is None or not unseen["publishers"]:
        return (paragraph,)
    return (
        paragraph,
        f"What to expect of a machine and a framework that are not here is the first table: {_describe_means(unseen)}. "
        "The rows of OneFlow do not name their accelerator, and those of Megatron Core's tests are of networks so "
        "small that hosts are what takes the time; they are counted all the same.",
    )


def _describe_means(means: Mapping[str, Any]) -> str:
    memory = f", and memory {_format_percent(means['memory'])}" if means["memory"] is not None else ""
    inside = means["interval"]
    interval = (
        f"; the 90 % intervals of the step time hold {_format_percent(inside)} of their runs"
        if inside is not None
        else ""
    )
    return (
        f"over {means['publishers']} publishers the step time is {_format_percent(means['step_time'])} off in the mean "
        f"(bias {_format_signed(means['bias'])}, too fast for {means['too_fast']} of them){memory}{interval}"
    )


_WORDS = {
    Standing.UNSEEN: "No row of these publishers had a part in building the simulator.",
    Standing.NEW_ROWS: "These rows had no part; other rows of the same publishers had.",
    Standing.SEEN: (
        "Structure, what is modelled and how, was chosen with these rows in view, and where the part says so figures "
        "were fitted to some of them: these errors say what the simulator can be brought to, not what to expect."
    ),
}


def _build_section(standing: Standing, result: Mapping[str, Any]) -> Section:
    lines = [line for line in result["publishers"] if line["standing"] == standing]
    means = result["means"][standing]
    words = [_WORDS[standing]]
    if means["publishers"]:
        words.append(f"In short: {_describe_means(means)}.")
    return Section(str(standing).capitalize(), tuple(words), (HEAD, *map(_format_cells, lines)))


def _format_cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    time, memory, confusion = line["step_time"], line["memory"], line["out_of_memory"]
    ran, failed = confusion["true_fit"] + confusion["false_oom"], confusion["true_oom"] + confusion["false_fit"]
    return (
        line["publisher"],
        line["part"],
        str(line["rows"]),
        str(time["count"]),
        *_format_errors(time),
        *_format_errors(memory),
        f"{confusion['true_fit']} of {ran}" if ran else "-",
        f"{confusion['true_oom']} of {failed}" if failed else "-",
    )


def _format_errors(error: Mapping[str, Any]) -> tuple[str, str]:
    return (_format_percent(error["mape"]), _format_signed(error["bias"])) if error["count"] else ("-", "-")


def _build_fits(result: Mapping[str, Any]) -> Section:
    confusion = result["all"]["out_of_memory"]
    num_right = confusion["true_fit"] + confusion["true_oom"]
    head = ("", "predicted to fit", "predicted not to fit")
    rows = (
        ("ran", str(confusion["true_fit"]), str(confusion["false_oom"])),
        ("out of memory", str(confusion["false_fit"]), str(confusion["true_oom"])),
    )
    runs = sum(confusion.values())
    words = (
        f"Of {runs} runs {num_right} are told rightly, {_format_percent(num_right / runs)}."
        if runs
        else "No run was judged.",
    )
    return Section("Whether it fits", words, (head, *rows))


def _build_sources(result: Mapping[str, Any]) -> Section:
    rows = [(line["publisher"], line["standing"], ", ".join(line["sources"])) for line in result["publishers"]]
    return Section("Which rows", (), (("publisher", "standing", "sources"), *rows))


def _format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _format_signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def main(arguments: Sequence[str]) -> int:
    """Write the page and its data into the folder of the command line; return the exit code."""
    if len(arguments) != 2:
        note("usage: python -m tests.studies.accuracy_publishers ROWS.jsonl FOLDER")
        return BAD_INPUT
    ticker = Ticker()
    try:
        rows, place = arguments
        target = make_folder(place)
        result = summarize_publishers(
            predict_all(
                select_split(load_runs(rows), judge=False),
                lambda num_done, num_runs: ticker(f"{num_done} of {num_runs} runs"),
            )
        )
        write(target / DATA, json.dumps(result | {"all": _drop_skipped(result["all"])}, indent=1) + "\n")
        write(target / PAGE, format_page(result))
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    finally:
        ticker.clear()
    return 0


def _drop_skipped(summary_fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary_fields.items() if name != "skipped"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
