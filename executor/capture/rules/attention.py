"""Attention as one kernel."""

from meshwise.executor.capture.rules.dims import Dim
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def attention(call: Call) -> Work:
    """``query (.., heads, sequence, head_dim)`` attends to keys and values ``(.., heads, key, head_dim)``.

    With grouped queries the query heads are the key heads times a group. A causal kernel executes half of the
    scores (Dao et al. 2022, "FlashAttention", section 3), and no mesh axis cuts its rows, because the keys that a row
    sees depend on its position.
    """
    query = call["query"]
    first = call.axes(query)
    last = len(first) - 1
    wanted: dict[int, Dim | None] = dict(enumerate(first[:-2]))
    keys = call.separate(call["key"], [last - 1], first[-2:-1])
    heads = call.axes(keys)[last - 2]
    grouped = bool(call.given.get("enable_gqa")) and heads is not None and heads is not first[-3]
    if grouped and first[-3] is not None and heads is not None and heads.size < first[-3].size:
        group = call.dims.new(first[-3].size // heads.size)
        call.dims.unify(first[-3], call.dims.merge((heads, group)))
        wanted.pop(last - 2)
        group.hints.add((5, "group"))
    keys = call.align(keys, {**wanted, last: first[-1]})
    tokens = call.axes(keys)[last - 1]
    call.dims.keep_apart((first[-2], tokens))
    values = call.align(call["value"], {**wanted, last - 1: tokens})
    width = call.axes(values)[last]
    if grouped:
        values = call.align(values, {last - 2: call.axes(keys)[last - 2]})
    call.read("key", keys)
    call.read("value", values)
    mask = call["attn_mask"]
    if mask is not None:
        square = (*first[:-1], tokens)
        shift = len(square) - len(call.axes(mask))
        seen = {place: square[place + shift] for place in range(len(call.axes(mask)))}
        call.read("attn_mask", call.align(mask, seen))
    out = (*first[:-1], width)
    call.dims.keep_apart((*out, tokens))
    _hint(first, tokens, width)
    # scores and values are two products of 2 FLOP a point; the points are the same where both widths are one dim
    same = width is not None and first[-1] is not None and width.root is first[-1].root
    flops = 4.0 if same else 2.0 * (_size(width) + _size(first[-1]))
    square_dims = present((*first[:-1], tokens))
    return Work(
        (out,),
        OperatorKind.ATTENTION,
        uncut=present((*first[-1:], width, tokens, first[-2] if call["is_causal"] else None)),
        space=(*square_dims, *present(first[-1:])) if same else square_dims,
        flops=flops,
        saves=(query, keys, values, RESULT),
        executed=0.5 if call["is_causal"] else 1.0,
    )


def _size(dim: Dim | None) -> int:
    return 1 if dim is None else dim.size


def _hint(query: tuple[Dim | None, ...], tokens: Dim | None, width: Dim | None) -> None:
    for dim, name in ((query[-2], "sequence"), (tokens, "key"), (query[-1], "head_dim"), (width, "value_dim")):
        if dim is not None and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((1 if name != "value_dim" else 6, name))
    if len(query) > 3 and query[-3] is not None:
        query[-3].leaves[0].hints.add((1, "heads"))


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention}
