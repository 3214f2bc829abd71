"""Attention as one kernel."""

from meshwise.executor.capture.rules.dims import Dim
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def attention(call: Call) -> Work:
    """``query (.., heads, sequence, head_dim)`` attends to keys and values ``(.., heads, key, head_dim)``.

    With grouped queries the query heads are the key heads times a group. A causal kernel executes half of the
    scores (Dao et al. 2022, "FlashAttention", section 3); where its queries are cut, a rank computes those of its rows
    (`meshwise.executor.operators.cut_attention`).
    """
    query = call["query"]
    query_dims = call.get_dims(query)
    last_index = len(query_dims) - 1
    wanted_dims: dict[int, Dim | None] = dict(enumerate(query_dims[:-2]))
    keys = call.separate(call["key"], [last_index - 1], query_dims[-2:-1])
    heads = call.get_dims(keys)[last_index - 2]
    is_grouped = bool(call.arguments.get("enable_gqa")) and heads is not None and heads is not query_dims[-3]
    if is_grouped and query_dims[-3] is not None and heads is not None and heads.size < query_dims[-3].size:
        group = call.unifier.create_dim(query_dims[-3].size // heads.size)
        call.unifier.unify(query_dims[-3], call.unifier.merge((heads, group)))
        wanted_dims.pop(last_index - 2)
        group.hints.add((5, "group"))
    keys = call.align(keys, {**wanted_dims, last_index: query_dims[-1]})
    tokens = call.get_dims(keys)[last_index - 1]
    call.unifier.keep_apart((query_dims[-2], tokens))
    values = call.align(call["value"], {**wanted_dims, last_index - 1: tokens})
    width = call.get_dims(values)[last_index]
    if is_grouped:
        values = call.align(values, {last_index - 2: call.get_dims(keys)[last_index - 2]})
    call.replace_operand("key", keys)
    call.replace_operand("value", values)
    mask = call["attn_mask"]
    if mask is not None:
        score_dims = (*query_dims[:-1], tokens)
        shift = len(score_dims) - len(call.get_dims(mask))
        mask_dims = {place: score_dims[place + shift] for place in range(len(call.get_dims(mask)))}
        call.replace_operand("attn_mask", call.align(mask, mask_dims))
    out = (*query_dims[:-1], width)
    call.unifier.keep_apart((*out, tokens))
    _hint_dims(query_dims, tokens, width)
    # scores and values are two products of 2 FLOP a point; the points are the same where both widths are one dim
    is_same_width = width is not None and query_dims[-1] is not None and width.root is query_dims[-1].root
    flops = 4.0 if is_same_width else 2.0 * (_get_size(width) + _get_size(query_dims[-1]))
    space_dims = drop_none((*query_dims[:-1], tokens))
    return Work(
        (out,),
        OperatorKind.ATTENTION,
        uncut_dims=drop_none((*query_dims[-1:], width, tokens)),
        space=(*space_dims, *drop_none(query_dims[-1:])) if is_same_width else space_dims,
        flops=flops,
        saves=(query, keys, values, RESULT),
        executed_fraction=0.5 if call["is_causal"] else 1.0,
    )


def _get_size(dim: Dim | None) -> int:
    return 1 if dim is None else dim.size


def _hint_dims(query: tuple[Dim | None, ...], tokens: Dim | None, width: Dim | None) -> None:
    for dim, name in ((query[-2], "sequence"), (tokens, "key"), (query[-1], "head_dim"), (width, "value_dim")):
        if dim is not None and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((1 if name != "value_dim" else 6, name))
    if len(query) > 3 and query[-3] is not None:
        query[-3].leaves[0].hints.add((1, "heads"))


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention}
