"""Published decoder transformers by name."""

from simulator.models.transformer import Transformer


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> Transformer:
    return Transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=vocab, name=name
    )


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False
) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        ffn_kind="swiglu",
        tied_embeddings=tied,
        positions="rotary",
        name=name,
    )


PRESETS: dict[str, Transformer] = {
    spec.name: spec
    for spec in (
        # Brown et al. 2020, "Language models are few-shot learners", table 2.1; vocabulary
        # padded to 51200 as Megatron-LM does.
        _gpt("gpt3-125m", 12, 768, 12),
        _gpt("gpt3-1.3b", 24, 2048, 16),
        _gpt("gpt3-6.7b", 32, 4096, 32),
        _gpt("gpt3-13b", 40, 5120, 40),
        _gpt("gpt3-175b", 96, 12288, 96),
        # Narayanan et al. 2021 (SC21), table 1.
        _gpt("megatron-145b", 80, 12288, 96),
        _gpt("megatron-530b", 105, 20480, 128),
        _gpt("megatron-1t", 128, 25600, 160),
        # Touvron et al. 2023, "Llama 2", and Grattafiori et al. 2024, "The Llama 3 herd of models", table 3.
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        # The byte-level model that the executor trains on a laptop.
        Transformer(
            layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=256, tied_embeddings=False, name="gpt-byte"
        ),
    )
}
"""Transformers by name."""
