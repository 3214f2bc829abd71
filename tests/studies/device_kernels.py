"""Kernels and layers of torch on one GPU, timed in loops as long as training keeps a clock.

``python tests/studies/device_kernels.py FILE.jsonl [--seconds N]``

Nothing of this program is imported. Every line of the file is one measurement, named by ``what``:

- ``sdpa``: fused attention of ``B`` sequences of ``S`` tokens and ``H`` heads of 128 by a back end of torch, in
  microseconds and TFLOP/s (causal attention counted at half, backward at 2.5 times forward);
- ``merge``: one merge of a part of ring attention in fp32, as torch's ``_SDPAMerger`` does it;
- ``gemm``: a product of [M, K] with [K, N] and both of its backward, in bf16 and in fp8 with a scale a tensor or a row,
  with (``fast1``) and without (``fast0``) fast accumulation;
- ``layer``: forward and backward of a layer of Llama, whole or a rank's share of 8, in bf16 or with a recipe of torchao
  (0.18 was measured), in milliseconds.

``reports/executor/device-kernels-h200.jsonl`` was measured by an earlier form of this program (2026-11-28), whose
time ran out before the last two layers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any

HEAD = 128
"""Dim of a head."""
ATTENTIONS = (
    (4096, 32, 4, True), (8192, 32, 2, True), (32768, 32, 1, True), (32768, 32, 1, False), (16384, 32, 1, False),
    (8192, 8, 8, True),
)  # fmt: skip
"""Tokens, heads, sequences, and whether attention is causal."""
PRODUCTS = (
    (16384, 4096, 4096), (16384, 1024, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (131072, 3584, 8192),
    (131072, 8192, 3584), (131072, 1024, 8192), (98304, 1792, 4096), (98304, 4096, 1792), (98304, 512, 4096),
    (98304, 4096, 512),
)  # fmt: skip
"""M, N and K of products of Llama 8B and 70B, whole and a rank's share of 8."""
LAYERS = (
    ("8b tp8 b12", 4096, 4, 1, 1792, 12), ("8b", 4096, 32, 8, 14336, 2), ("70b tp8 b4", 8192, 8, 1, 3584, 4),
)  # fmt: skip
"""Name, hidden size, heads, heads of keys, feed-forward size, and sequences of 8192 tokens."""
RECIPES = (("bf16", False), ("bf16", True), ("tensorwise", True), ("rowwise", True), ("rowwise_with_gw_hp", True))
"""Recipes of torchao, and whether the layer is compiled."""


def time_loop(run: Callable[[], Any], torch: Any, seconds: float) -> float:
    """Return the seconds of one of many runs in a row, after a third of the time to warm up."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(2, int(seconds / max(perf_counter() - start, 5e-6)))
    for _ in range(count // 3):
        run()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (perf_counter() - start) / count


def measure_attention(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the times of fused attention, forward and backward, by torch's own kernel and by cuDNN's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    for tokens, heads, batch, causal in ATTENTIONS:
        shape = (batch, heads, tokens, HEAD)
        query, key, value = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        flops = 4 * batch * heads * tokens**2 * HEAD / (2 if causal else 1)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel([backend]):
                forward = time_loop(lambda: attend(query, key, value, is_causal=causal), torch, 0.35)  # noqa: B023
                result = attend(query, key, value, is_causal=causal)
                seed = torch.randn_like(result)

                def run_backward() -> Any:
                    return torch.autograd.grad(result, (query, key, value), seed, retain_graph=True)  # noqa: B023

                backward = time_loop(run_backward, torch, 0.35)
            yield {
                "what": "sdpa", "backend": backend.name, "S": tokens, "H": heads, "B": batch, "causal": causal,
                "fwd_us": forward * 1e6, "bwd_us": backward * 1e6,
                "fwd_tf": flops / forward / 1e12, "bwd_tf": 2.5 * flops / backward / 1e12,
            }  # fmt: skip


def measure_merge(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the time of a merge of 32768 tokens and 32 heads."""
    tokens, heads = 32768, 32
    result = torch.randn(1, heads, tokens, HEAD, device="cuda")
    part = torch.randn(1, heads, tokens, HEAD, device="cuda", dtype=torch.bfloat16)
    sums, part_sums = (torch.randn(1, heads, tokens, 1, device="cuda") for _ in range(2))

    def merge() -> Any:
        wide = part.to(torch.float32)
        merged = result - torch.sigmoid(part_sums - sums) * (result - wide)
        return merged, sums - torch.nn.functional.logsigmoid(sums - part_sums)

    yield {"what": "merge", "S": tokens, "H": heads, "us": time_loop(merge, torch, 0.35) * 1e6}


def measure_products(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the times of products in bf16 and fp8, forward and both of backward."""
    one = torch.ones((), device="cuda")
    for m, n, k in PRODUCTS:
        for name, (rows, columns, length) in (("fwd", (m, n, k)), ("dgrad", (m, k, n)), ("wgrad", (n, k, m))):
            left = torch.randn(rows, length, device="cuda", dtype=torch.bfloat16)
            right = torch.randn(columns, length, device="cuda", dtype=torch.bfloat16)
            narrow = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
            row_scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
            line = {"what": "gemm", "M": m, "N": n, "K": k, "pas": name}
            line["bf16_us"] = time_loop(lambda: left @ right.t(), torch, 0.2) * 1e6  # noqa: B023
            for is_fast in (True, False):
                for recipe, scales in (("tensorwise", (one, one)), ("rowwise", row_scales)):

                    def multiply() -> Any:
                        return torch._scaled_mm(
                            *narrow,  # noqa: B023
                            *scales,  # noqa: B023
                            out_dtype=torch.bfloat16,
                            use_fast_accum=is_fast,  # noqa: B023
                        )

                    line[f"{recipe}_fast{int(is_fast)}_us"] = time_loop(multiply, torch, 0.2) * 1e6
            yield line


def build_layer(torch: Any, hidden: int, heads: int, key_heads: int, ffn: int) -> Any:
    """Return a layer of Llama, or a rank's share of one, as a module of torch."""
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            widths = {"q": heads * HEAD, "k": key_heads * HEAD, "v": key_heads * HEAD, "w1": ffn, "w3": ffn}
            for name, width in widths.items():
                setattr(self, name, nn.Linear(hidden, width, bias=False))
            self.o, self.w2 = nn.Linear(heads * HEAD, hidden, bias=False), nn.Linear(ffn, hidden, bias=False)
            self.n1, self.n2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

        def forward(self, x: Any, angles: Any) -> Any:
            batch, tokens, _ = x.shape
            normed = self.n1(x)
            query = rotate(self.q(normed).view(batch, tokens, heads, HEAD), angles)
            key, value = (part(normed).view(batch, tokens, key_heads, HEAD) for part in (self.k, self.v))
            key, value = (tensor.repeat_interleave(heads // key_heads, 2) for tensor in (rotate(key, angles), value))
            parts = (tensor.transpose(1, 2) for tensor in (query, key, value))
            attended = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
            x = x + self.o(attended.reshape(batch, tokens, -1))
            normed = self.n2(x)
            return x + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))

    def rotate(x: Any, angles: Any) -> Any:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(3).type_as(x)

    return Layer().cuda().bfloat16()


def measure_layers(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the times of layers by recipe, forward alone and with backward; without torchao those in bf16."""
    for name, hidden, heads, key_heads, ffn, batch in LAYERS:
        tokens = 8192
        angles = torch.polar(torch.ones(1, tokens, 1, HEAD // 2), torch.rand(1, tokens, 1, HEAD // 2)).cuda()
        for recipe, is_compiled in RECIPES:
            layer = build_layer(torch, hidden, heads, key_heads, ffn)
            if recipe != "bf16":
                try:
                    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
                except ImportError:
                    continue
                layer = convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
            run = torch.compile(layer) if is_compiled else layer
            x = torch.randn(batch, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            seed = torch.randn_like(x)

            def train() -> None:
                run(x, angles).backward(seed)  # noqa: B023
                x.grad = None  # noqa: B023
                layer.zero_grad(set_to_none=True)  # noqa: B023

            step, forward = time_loop(train, torch, 0.5), time_loop(lambda: run(x, angles), torch, 0.3)  # noqa: B023
            yield {
                "what": "layer", "tag": name, "recipe": recipe, "compiled": is_compiled, "B": batch, "S": tokens,
                "h": hidden, "heads": heads, "ffn": ffn, "ms": step * 1e3, "fwd_ms": forward * 1e3,
            }  # fmt: skip
            torch._dynamo.reset()


def main(arguments: Sequence[str]) -> int:
    """Measure and write line by line; return the exit code."""
    parser = argparse.ArgumentParser(description="Kernels and layers of torch on one GPU.")
    parser.add_argument("file", help="file to write, .jsonl")
    parser.add_argument("--seconds", type=float, default=240.0, help="nothing is begun after so many seconds")
    options = parser.parse_args(arguments)
    import torch

    start = monotonic()
    with open(options.file, "w", encoding="utf-8") as file:
        for measure in (measure_attention, measure_merge, measure_products, measure_layers):
            for line in measure(torch):
                file.write(json.dumps(line) + "\n")
                file.flush()
                if monotonic() - start > options.seconds:
                    return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
