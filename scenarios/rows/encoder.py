"""Networks with an encoder: BERT, T5 and ViT."""

import re

from scenarios.model_schema import MAX_HEADS
from scenarios.rows.row import Row, Skip
from scenarios.rows.vocabulary import padded
from simulator.models.bert import Bert
from simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from simulator.models.model import Model
from simulator.models.t5 import T5
from simulator.models.vit import VisionTransformer

ENCODERS = ("bert", "t5", "vit")


def encoder(row: Row, family: str, known: Model | None) -> Model:
    """Return a BERT, T5 or ViT."""
    stated = row.states("n_layers") and row.states("hidden")
    if not stated and not isinstance(known, Bert | T5 | VisionTransformer):
        raise Skip(f"n_layers and hidden of a {family} are not stated, and model names none that is known")
    if known is not None:
        row.assume(f"what the row does not state as in {known.name}, which it names")
    base = known if isinstance(known, Bert | T5 | VisionTransformer) else None
    layers, hidden = (row.count("n_layers", MAX_LAYERS), row.count("hidden", MAX_WIDTH))
    layers, hidden = layers or (base.layers if base else 1), hidden or (base.hidden if base else 1)
    heads = row.count("n_heads", MAX_HEADS) or (base.heads if base else max(1, hidden // 64))
    ffn = row.count("ffn_hidden", MAX_WIDTH) or (base.ffn if base else 4 * hidden)
    if family == "vit":
        return _vision(row, base, layers, hidden, heads, ffn)
    default = base.vocab if isinstance(base, Bert | T5) else {"bert": 30522, "t5": 32128}[family]
    vocab = padded(row, row.assumed_count("vocab", default, most=MAX_WIDTH))
    if family == "bert":
        positions = max(512, row.needed("seq_len", 10**8))
        return Bert(layers, hidden, heads, ffn, vocab, max_positions=positions)
    row.assume(f"{layers} layers in the encoder and as many in the decoder, over seq_len tokens each")
    width = row.optional("head_dim", MAX_WIDTH) or (base.head_dim if isinstance(base, T5) else max(1, hidden // heads))
    return T5(layers, hidden, heads, width, ffn, vocab)


def _vision(row: Row, base: Model | None, layers: int, hidden: int, heads: int, ffn: int) -> VisionTransformer:
    named = re.search(r"/(\d\d?)\b", row.text("model"))
    patch = int(named[1]) if named else base.patch if isinstance(base, VisionTransformer) else 16
    tokens = row.count("seq_len") or 0
    side = round(tokens**0.5)
    image = patch * side if side > 1 and abs(side * side - tokens) <= 1 else 224
    row.assume(f"images of {image} pixels in patches of {patch}")
    return VisionTransformer(layers, hidden, heads, ffn, patch=max(patch, 1), image=image - image % patch or patch)
