"""Rows of published kernel timings: each becomes a kernel that the model predicts, or a reason to skip it.

A row is a flat JSON object: ``source_id``, ``source_repo`` (the publisher), ``accelerator``, ``kernel``, ``dtype``,
``time_us`` and the kernel's sizes; ``in_a_row`` says how often it ran without a pause. Files are not trusted: a line
that is no such object is refused by its number.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshwise.simulator.calibration.kernels import FusedAttention, Kernel, Product, Stream
from meshwise.simulator.files import JsonError, parse_json
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.machine.kernels import AttentionShape, Matmul
from meshwise.simulator.operator_graph import ITEMSIZE

MAX_ROWS = 1_000_000
MAX_ROW_BYTES = 2**16
MAX_SIZE = 2**40
"""Largest size of a kernel."""

BURST_PUBLISHERS = ("ai-dynamo/aiconfigurator", "Dao-AILab/flash-attention")
"""Publishers that time a few launches in a row; clocks have no time to sink."""

RUNS_IN_A_ROW = {"MooreThreads/SimuMax": 100, "microsoft/vidur": 40}
"""How often other publishers run a kernel in a row, to warm up included (SimuMax, ``test_gemm_efficiency.py``: 25 and
75; vidur, ``mlp_wrapper.py``: 20 layers twice). Where nothing is known clocks have sunk."""

BURST_SECONDS = 10e-3
"""Seconds of the same work, about, until clocks sink: below it products of SimuMax reach 0.62 to 0.65 of the peak of a
B200, as bursts do, and from twice as long on 0.49; on the A100 the steps of SimuMax and vidur are there too."""

HOST_TIMED_PUBLISHERS = ("microsoft/SuperScaler", "eth-easl/sailor")
"""Publishers that time eager calls from the host: short kernels show its launches."""

HOST_LOOPED_KERNELS = {
    "MooreThreads/SimuMax": ("gemm", "grouped_gemm", "attention_fwd", "attention_bwd"),
    "linkedin/Liger-Kernel": ("rope", "layernorm", "rmsnorm", "add_rmsnorm"),
}
"""Kernels that others time from the host as well: SimuMax calls products from Python and none takes less than 14 us;
Liger's backward, by autograd, takes 125 to 130 us for any size up to 168 MB."""

SIXTEEN_BITS = ("bf16", "fp16")
"""Dtypes whose products run at the same rate; other dtypes have their own fraction and share all other parameters."""

MIN_HOST_TIMED_FLOPS, MIN_HOST_TIMED_BYTES = 5e10, 2e8
"""Work below which a host-timed kernel may be bound by its launches: 100 to 400 us of an accelerator."""

MIN_STREAM_BYTES = 32e6
"""Bytes below which caches and launches, not memory, are measured."""

SERVING_KERNELS = {"microsoft/vidur": ("rmsnorm", "activation", "rope")}
"""Kernels of a serving stack's own, not those of training: their RMSNorm reaches 0.32 of the bandwidth of A100 and
H100, fused norms of training 0.72 and 0.85; its additions, which are torch's, reach 0.88 and 0.97."""

SPLIT_PRODUCT = "enc-attention-qkv"
"""A product of Megatron whose result is split into queries, keys and values, which copies it: with 3 / 4 of the FLOP
it takes as long as the one after it (A100, 2048 x 2560 x 7680: 453 us, x 10240: 404 us)."""

REDUCED_PRODUCTS = {"": ("enc-attention-dense", "enc-MLP-GEMM-2"), "data": ("enc-attention-qkv", "enc-MLP-GEMM-1")}
"""Products of Megatron that its tensor groups all-reduce, by what they make (Shoeybi et al. 2019, "Megatron-LM", figure
3): with 4 ranks those of 16384 x 2560 results take 0.85 ms longer on the A100 than the same without."""

DEVICES: dict[str, tuple[str, float | None]] = {
    "A100 SXM": ("a100-80gb", None),
    "A100 PCIe": ("a100-80gb", 1.935e12),
    "A100 SXM 40GB": ("a100-80gb", 1.555e12),
    "L40S": ("l40s-48gb", None),
    "H100 SXM": ("h100-80gb", None),
    "H200 SXM": ("h200-141gb", None),
    "B200 SXM": ("b200-180gb", None),
    "GB200 SXM": ("gb200-186gb", None),
    "GH200 SXM 96GB": ("h100-80gb", 4.0e12),
    "V100 SXM2": ("v100-16gb", None),
    "V100 SXM2 16GB": ("v100-16gb", None),
}
"""Names of devices in rows: the catalogue's name, and the memory bandwidth of a variant.

A GH200 of 96 GB has the H100's GPU with faster memory (NVIDIA, "GH200 Grace Hopper Superchip", data sheet: 4 TB/s,
990 TFLOP/s).
"""

FLASH_KERNELS = {"flash-attn 2", "flash-attn 3", "cuDNN"}


class RowError(ValueError):
    """A line that is no row; the message says what a row must hold."""


class SkipRow(Exception):
    """A valid row that is not used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured kernel.

    Parameters
    ----------
    publisher
        The repository that published it; publishers, not files, are left out together.
    device
        Name in the catalogue.
    bandwidth
        Memory bandwidth of the variant measured, byte/s; ``None`` for the catalogue's.
    family
        Family under which errors are reported, such as ``matmul forward``.
    burst
        Whether it was timed in a short burst.
    """

    line: int
    source: str
    publisher: str
    device: str
    bandwidth: float | None
    family: str
    kernel: Kernel
    seconds: float
    burst: bool


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not used, and the reason."""

    line: int
    source: str
    device: str
    reason: str


def read_rows(lines: Iterable[bytes]) -> tuple[list[Row], list[Skipped]]:
    """Return the usable rows and the skipped ones; the message of a `RowError` begins with the line's number."""
    usable: list[Row] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(lines, start=1):
        if number > MAX_ROWS:
            raise RowError(f"{number}: a file has at most {MAX_ROWS} rows")
        if not line.strip():
            continue
        try:
            fields = _Fields(_parse_line(line))
            source, device = fields.text("source_id"), DEVICES.get(fields.text("accelerator"), ("", None))[0]
        except RowError as error:
            raise RowError(f"{number}: {error}") from None
        try:
            usable.append(_parse_row(number, fields))
        except SkipRow as reason:
            skipped.append(Skipped(number, source, device, str(reason)))
        except RowError as error:
            raise RowError(f"{number}: {error}") from None
    if not usable and not skipped:
        raise RowError("1: a file of kernels has one JSON object a line, met none")
    return usable, skipped


def _parse_line(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_ROW_BYTES:
        raise RowError(f"a row has at most {MAX_ROW_BYTES} bytes, met more")
    try:
        row = parse_json(line)
    except JsonError as error:
        raise RowError(f"a row is a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"a row is a JSON object, met {type(row).__name__}")
    return row


class _Fields:
    """The fields of a row, checked as they are read."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def text(self, name: str, default: str | None = None) -> str:
        value = self.row.get(name, default)
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            raise RowError(f"{name} is a text of 1 to 200 characters, met {value!r:.60}")
        return value

    def flag(self, name: str) -> bool:
        value = self.row.get(name, False)
        if not isinstance(value, bool):
            raise RowError(f"{name} is true or false, met {value!r:.60}")
        return value

    def notes(self, words: str) -> bool:
        return words in str(self.row.get("note", ""))

    def has(self, name: str) -> bool:
        return self.row.get(name) is not None

    def size(self, name: str) -> int:
        if not self.has(name):
            raise SkipRow(f"no {name} is stated")
        value = self.row[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise RowError(f"{name} is a whole number from 1 to {MAX_SIZE}, met {value!r:.60}")
        return value

    def seconds(self) -> float:
        if not self.has("time_us"):
            raise SkipRow("no time_us is stated")
        value = self.row["time_us"]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1e-3 <= value <= 1e12:  # no clock tells less than a nanosecond
            raise RowError(f"time_us is a number from 0.001 to 1e12, met {value!r:.60}")
        return float(value) / 1e6


def _parse_row(line: int, fields: _Fields) -> Row:
    publisher, source = fields.text("source_repo"), fields.text("source_id")
    accelerator = fields.text("accelerator")
    if accelerator not in DEVICES:
        raise SkipRow(f"accelerator {accelerator} is not in the catalogue")
    device, bandwidth = DEVICES[accelerator]
    seconds = fields.seconds()
    if not fields.has("kernel"):
        raise SkipRow("no kernel is stated")
    name = fields.text("kernel")
    if name not in _READERS:
        raise SkipRow(f"{name} is no single kernel of the model")
    family, kernel = _READERS[name](fields)
    if _is_host_timed(publisher, name, kernel) and _is_small(kernel):
        raise SkipRow("small, and timed from the host: its launches show")
    runs = fields.size("in_a_row") if fields.has("in_a_row") else RUNS_IN_A_ROW.get(publisher, math.inf)
    burst = publisher in BURST_PUBLISHERS or seconds * runs < BURST_SECONDS
    return Row(line, source, publisher, device, bandwidth, family, kernel, seconds, burst)


def _is_host_timed(publisher: str, name: str, kernel: Kernel) -> bool:
    is_looped = name in HOST_LOOPED_KERNELS.get(publisher, ()) and not (
        isinstance(kernel, Stream) and not kernel.backward
    )
    return publisher in HOST_TIMED_PUBLISHERS or is_looped


def _is_small(kernel: Kernel) -> bool:
    if isinstance(kernel, Stream):
        return kernel.traffic < MIN_HOST_TIMED_BYTES
    work = kernel.matmul if isinstance(kernel, Product) else kernel.shape
    return work.flops < MIN_HOST_TIMED_FLOPS


def _read_dtype(fields: _Fields) -> str:
    dtype = fields.text("dtype")
    if dtype not in ITEMSIZE:
        raise SkipRow(f"dtype {dtype} is not in the catalogue")
    return dtype


_GRADIENTS = {"fwd": "", "dgrad": "data", "wgrad": "weight"}
_PASSES = {"": "forward", "data": "input gradient", "weight": "weight gradient"}


def _read_product(fields: _Fields) -> tuple[str, Kernel]:
    pass_name, dtype = fields.text("pass", "fwd"), _read_dtype(fields)
    if pass_name not in _GRADIENTS:
        raise SkipRow(f"{pass_name} is more than one product")
    if fields.notes("best shape"):
        raise SkipRow("the best shape of a search is no fair sample")
    if dtype == "fp32":
        raise SkipRow("products in fp32 do not run on the units that the model is of")
    gradient = _GRADIENTS[pass_name]
    m, n, k = (fields.size(name) for name in "mnk")
    if gradient == "data" and not fields.has("layout"):  # the sizes are those of the forward product
        n, k = k, n
    casts = fields.notes("activation quantisation")
    family = f"matmul {_PASSES[gradient]}" + (f" {dtype}" if dtype not in SIXTEEN_BITS else "")
    if fields.text("impl", "none") in REDUCED_PRODUCTS.get(gradient, ()) and fields.has("tp") and fields.size("tp") > 1:
        raise SkipRow("the all-reduce of the tensor group is in the time")
    is_split = fields.row.get("impl") == SPLIT_PRODUCT
    copied_bytes = 2.0 * m * (k if gradient else n) * ITEMSIZE[dtype] if is_split else 0.0
    product = Product(Matmul(1, m, n, k), dtype, gradient, casts_input=casts, copied_bytes=copied_bytes)
    return family, replace(product, result_bytes=_find_result_bytes(fields))


def _read_grouped_product(fields: _Fields) -> tuple[str, Kernel]:
    gradient = _GRADIENTS.get(fields.text("pass", "fwd"), "")
    m, n, k = (fields.size(name) for name in "mnk")
    if fields.flag("accumulate") and not fields.notes("output"):
        raise SkipRow("the dtype of the sum of gradients is not stated: the same experts take 1.0 or 1.8 times as long")
    sizes = {"": (m, n, k), "data": (m, k, n), "weight": (k, n, m)}[gradient]
    matmul, dtype, result_bytes = Matmul(fields.size("groups"), *sizes), _read_dtype(fields), _find_result_bytes(fields)
    kernel = Product(matmul, dtype, gradient, grouped=True, result_bytes=result_bytes)
    return f"experts {_PASSES[gradient]}", kernel


def _find_result_bytes(fields: _Fields) -> int:
    """Return the bytes moved per element of a product's result; 0 for those of its dtype.

    A result that is added to a sum is read and written, in fp32 where no other dtype is stated.
    """
    is_narrow, is_wide = (fields.notes(f"output {dtype}") for dtype in ("bf16", "fp32"))
    if fields.flag("accumulate"):
        return 2 * ITEMSIZE["bf16" if is_narrow else "fp32"]
    return ITEMSIZE["fp32"] if is_wide else 0


def _read_batched_product(fields: _Fields) -> tuple[str, Kernel]:
    if fields.text("pass", "fwd") != "fwd":
        raise SkipRow("two products in one time")
    matmul = Matmul(*(fields.size(name) for name in ("batch", "m", "n", "k")))
    return "batched matmul forward", Product(matmul, _read_dtype(fields))


def _read_attention(fields: _Fields) -> tuple[str, Kernel]:
    _check_flash(fields)
    name = fields.text("kernel")
    heads, keys, queries = fields.size("heads"), fields.size("seq_kv"), fields.size("seq_q")
    width = fields.size("head_dim")
    values = fields.size("v_head_dim") if fields.has("v_head_dim") else width
    batch, causal = fields.size("batch"), fields.flag("causal")
    mean_keys = keys / 2 if causal else float(keys)
    shape = AttentionShape(batch * heads, queries, keys, (width + values) / 2, mean_keys, float(max(width, values)))
    passes = {"attention_fwd": (Pass.FORWARD,), "attention_bwd": (Pass.BACKWARD,)}.get(name, tuple(Pass))
    writes_cache = fields.notes("KV-cache write")
    cache_bytes = batch * keys * fields.size("kv_heads") * (width + values) * 2 if writes_cache else 0
    family = {1: f"attention {passes[0]}", 2: "attention both"}[len(passes)]
    return family, FusedAttention(shape, _read_dtype(fields), passes, copied_bytes=2.0 * cache_bytes)


def _check_flash(fields: _Fields) -> None:
    """Raise `SkipRow` where an attention kernel is another than training uses on its accelerator."""
    if fields.notes("encoder attention"):
        raise SkipRow("a serving stack's kernel for images: another than for tokens, and as fast at half the head dim")
    if fields.text("source_repo") != "Dao-AILab/flash-attention":
        return
    name, is_newer_device = fields.text("impl"), fields.text("accelerator") != "A100 SXM"
    if name not in FLASH_KERNELS or (is_newer_device and name == "flash-attn 2"):
        raise SkipRow(f"{name} is not what training runs on {fields.text('accelerator')}")


_STREAMS = {
    "layernorm": ("norm", 2.0, 3.0),
    "rmsnorm": ("norm", 2.0, 3.0),
    "add_rmsnorm": ("norm", 4.0, 4.0),
    "softmax": ("softmax", 2.0, 3.0),
    "dropout": ("dropout", 2.5, 2.5),
    "gelu": ("activation", 2.0, 3.0),
    "activation": ("activation", 3.0, 5.0),
    "add": ("elementwise", 3.0, 3.0),
    "rope": ("elementwise", 2.0, 2.0),
}
"""Kind, and number of tensors that forward and backward move, as the simulator counts them.

A mask of dropout counts as half a tensor of 16 bits.
"""


def _read_stream(fields: _Fields) -> tuple[str, Kernel]:
    name, implementation = fields.text("kernel"), fields.text("impl", "fused")
    if name in SERVING_KERNELS.get(fields.text("source_repo"), ()):
        raise SkipRow("a serving stack's kernel: another than training runs, and half as fast")
    if (
        "eager" in implementation and name != "layernorm"
    ) or implementation == "liger_rms_norm":  # torch's LayerNorm is one kernel
        raise SkipRow("several kernels run one after the other")
    pass_name = fields.text("pass", "fwd")
    if pass_name not in ("fwd", "bwd"):
        raise SkipRow("forward and backward in one time")
    kind, forward, backward = _STREAMS[name]
    num_copied = fields.notes("residual copy")
    tensors = (backward if pass_name == "bwd" else forward) + num_copied
    traffic = tensors * fields.size("elements") * ITEMSIZE[_read_dtype(fields)]
    _check_large(traffic)
    return f"{kind} {'backward' if pass_name == 'bwd' else 'forward'}", Stream(kind, traffic, pass_name == "bwd")


def _refuse_unfused(fields: _Fields) -> tuple[str, Kernel]:
    """Raise `SkipRow`: published forward times are those of 15 bytes an element at dropout's rate, not of 7."""
    raise SkipRow("bias, dropout and sum ran as three kernels, which training fuses")


def _check_large(traffic: float) -> None:
    if traffic < MIN_STREAM_BYTES:
        raise SkipRow("less than 32 MB moved: caches and launches are measured")


def _read_optimizer(fields: _Fields) -> tuple[str, Kernel]:
    if "fused" not in fields.text("impl", "none"):
        raise SkipRow("an optimizer of many kernels")
    traffic = 28.0 * fields.size("params")  # reads parameter, gradient and two moments, writes all but the gradient
    _check_large(traffic)
    return "optimizer", Stream("optimizer", traffic)


def _read_quantization(fields: _Fields) -> tuple[str, Kernel]:
    traffic = 3.0 * fields.size("elements")
    _check_large(traffic)
    return "cast", Stream("elementwise", traffic)


_READERS: dict[str, Callable[[_Fields], tuple[str, Kernel]]] = {
    "gemm": _read_product,
    "grouped_gemm": _read_grouped_product,
    "bmm": _read_batched_product,
    "attention_fwd": _read_attention,
    "attention_bwd": _read_attention,
    "attention_fwd_bwd": _read_attention,
    **dict.fromkeys(_STREAMS, _read_stream),
    "bias_dropout_add": _refuse_unfused,
    "optimizer_step": _read_optimizer,
    "quantize": _read_quantization,
}
