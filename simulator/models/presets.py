"""Published models by name."""

from dataclasses import replace
from functools import partial

from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.unet import UNet
from meshwise.simulator.models.vision import ResNet, VisionTransformer


def _make_gpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers, hidden, heads, heads, 4 * hidden, vocab=51200, name=name)


_make_llama = partial(Transformer, ffn_kind="swiglu", tied_embeddings=False, positions="rotary")
_LATENT = LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


PRESETS: dict[str, Transformer] = {
    spec.name: spec
    for spec in (
        # Brown et al. 2020, "Language models are few-shot learners", table 2.1; vocabulary
        # padded to 51200 as Megatron-LM does.
        _make_gpt("gpt3-125m", 12, 768, 12),
        _make_gpt("gpt3-1.3b", 24, 2048, 16),
        _make_gpt("gpt3-6.7b", 32, 4096, 32),
        _make_gpt("gpt3-13b", 40, 5120, 40),
        _make_gpt("gpt3-175b", 96, 12288, 96),
        # Narayanan et al. 2021 (SC21), table 1.
        _make_gpt("megatron-145b", 80, 12288, 96),
        _make_gpt("megatron-530b", 105, 20480, 128),
        _make_gpt("megatron-1t", 128, 25600, 160),
        # Touvron et al. 2023, "Llama 2", and Grattafiori et al. 2024, "The Llama 3 herd of models", table 3.
        _make_llama(32, 4096, 32, 32, 11008, 32000, name="llama2-7b"),
        _make_llama(40, 5120, 40, 40, 13824, 32000, name="llama2-13b"),
        _make_llama(80, 8192, 64, 8, 28672, 32000, name="llama2-70b"),
        _make_llama(32, 4096, 32, 8, 14336, 128256, name="llama3-8b"),
        _make_llama(80, 8192, 64, 8, 28672, 128256, name="llama3-70b"),
        _make_llama(126, 16384, 128, 8, 53248, 128256, name="llama3-405b"),
        # Jiang et al. 2023, "Mistral 7B", table 1.
        _make_llama(32, 4096, 32, 8, 14336, 32000, name="mistral-7b", window=4096),
        # Jiang et al. 2024, "Mixtral of experts", table 1; the released configuration of Mixtral-8x22B-v0.1.
        _make_llama(32, 4096, 32, 8, 14336, 32000, name="mixtral-8x7b", experts=Experts(8, 2, 14336)),
        _make_llama(56, 6144, 48, 8, 16384, 32000, name="mixtral-8x22b", experts=Experts(8, 2, 16384)),
        # DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.2 and appendix B (Lite); "DeepSeek-V3", section 4.2,
        # without the layer that predicts a second token.
        replace(
            _make_llama(27, 2048, 16, 16, 10944, 102400, name="deepseek-v2-lite"),
            experts=Experts(64, 6, 1408, shared=2, dense_layers=1),
            latent=_LATENT,
        ),
        replace(
            _make_llama(60, 5120, 128, 128, 12288, 102400, name="deepseek-v2"),
            experts=Experts(160, 6, 1536, shared=2, dense_layers=1),
            latent=replace(_LATENT, q_rank=1536),
        ),
        replace(
            _make_llama(61, 7168, 128, 128, 18432, 129280, name="deepseek-v3"),
            experts=Experts(256, 8, 2048, shared=1, dense_layers=3, score_bias=True),
            latent=replace(_LATENT, q_rank=1536),
        ),
        # Yang et al. 2025, "Qwen3 technical report", tables 1 and 2; widths from the released configurations.
        _make_llama(36, 4096, 32, 8, 12288, 151936, name="qwen3-8b", kv_channels=128, qk_norm=True),
        replace(
            _make_llama(48, 2048, 32, 4, 6144, 151936, name="qwen3-30b-a3b"),
            experts=Experts(128, 8, 768),
            kv_channels=128,
            qk_norm=True,
        ),
        replace(
            _make_llama(94, 4096, 64, 4, 12288, 151936, name="qwen3-235b-a22b"),
            experts=Experts(128, 8, 1536),
            kv_channels=128,
            qk_norm=True,
        ),
        # The byte-level model that the executor trains on a laptop.
        Transformer(
            layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=256, tied_embeddings=False, name="gpt-byte"
        ),
    )
}
"""Decoder transformers by name."""


_CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
_CRITEO_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


MODELS: dict[str, Model] = {
    **PRESETS,
    **{
        spec.name: spec
        for spec in (
            # Devlin et al. 2019, "BERT", section 3; vocabulary of the released uncased models.
            Bert(12, 768, 12, 3072, 30522, name="bert-base"),
            Bert(24, 1024, 16, 4096, 30522, name="bert-large"),
            # Raffel et al. 2020, "Exploring the limits of transfer learning", section 3.7; vocabulary as released.
            T5(6, 512, 8, 64, 2048, vocab=32128, name="t5-small"),
            T5(12, 768, 12, 64, 3072, vocab=32128, name="t5-base"),
            T5(24, 1024, 16, 64, 4096, vocab=32128, name="t5-large"),
            T5(24, 1024, 32, 128, 16384, vocab=32128, name="t5-3b"),
            T5(24, 1024, 128, 128, 65536, vocab=32128, name="t5-11b"),
            # Dosovitskiy et al. 2021, "An image is worth 16x16 words", table 1.
            VisionTransformer(12, 768, 12, 3072, patch=16, name="vit-b-16"),
            VisionTransformer(24, 1024, 16, 4096, patch=16, name="vit-l-16"),
            VisionTransformer(32, 1280, 16, 5120, patch=14, name="vit-h-14"),
            # He et al. 2016, "Deep residual learning for image recognition", table 1.
            ResNet((3, 4, 6, 3), name="resnet-50"),
            ResNet((3, 4, 23, 3), name="resnet-101"),
            ResNet((3, 8, 36, 3), name="resnet-152"),
            # MLPerf Training v0.7 (one index a table) and v3.0 (bags of indices): Criteo 1 TB, tables cut at
            # 40 million rows; facebookresearch/dlrm, torchrec_dlrm/README.MD.
            Dlrm(_CRITEO_ROWS, (1,) * 26, 128, 13, (512, 256, 128), (1024, 1024, 512, 256, 1), name="dlrm-criteo"),
            Dlrm(
                _CRITEO_ROWS,
                _CRITEO_HOTS,
                128,
                13,
                (512, 256, 128),
                (1024, 1024, 512, 256, 1),
                interaction="cross",
                crosses=3,
                rank=512,
                name="dlrm-dcnv2",
            ),
            # Rombach et al. 2022, section 3.3; the released configuration of stable-diffusion-v1-5, unet.
            UNet((320, 640, 1280, 1280), (True, True, True, False), 2, 8, 64, 77, 768, name="stable-diffusion-1.5"),
        )
    },
}
"""Models of all families by name."""
