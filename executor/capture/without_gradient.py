"""Blocks that run without gradients, written out: what leaves them is detached."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

_GRADIENTS_ARE_SET = torch.ops.higher_order.wrap_with_set_grad_enabled
_DATA: Any = vars(torch._C.TensorBase)["data"]
_DETACH = torch.ops.aten.detach.default


class DataIsDetached(TorchFunctionMode):
    """Reads ``x.data``, of which torch's export keeps no operator, as ``x.detach()``."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Call what is called, or ``detach``."""
        if function == _DATA.__get__:
            return arguments[0].detach()
        return function(*arguments, **(options or {}))


def inline(module: GraphModule) -> None:
    """Put the operators of each block without gradients into the graph around it, and detach what leaves the block.

    torch's own decomposition puts them there as they are, and what leaves them has a gradient then.
    """
    for node in list(module.graph.find_nodes(op="call_function", target=_GRADIENTS_ARE_SET)):
        enabled, body, *arguments = node.args
        block = getattr(module, str(body.target))
        inline(block)
        known = dict(zip(block.graph.find_nodes(op="placeholder"), arguments, strict=True))
        with module.graph.inserting_before(node):
            for each in block.graph.nodes:
                if each.op == "get_attr":
                    name = f"{body.target}_{each.target}"
                    setattr(module, name, getattr(block, each.target))
                    known[each] = module.graph.get_attr(name)
                elif each.op == "call_function":
                    known[each] = module.graph.node_copy(each, known.__getitem__)
            results = [_left(module, known, each, detached=not enabled) for each in block.graph.output_node().args[0]]
        for user in list(node.users):
            user.replace_all_uses_with(results[int(str(user.args[1]))])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _left(module: GraphModule, known: Mapping[Node, Any], result: Any, *, detached: bool) -> Any:
    """Return the node that has what leaves a block."""
    if not isinstance(result, Node):
        return result
    node = known[result]
    value = result.meta.get("val")
    has_gradient = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if not (detached and has_gradient):
        return node
    left = module.graph.call_function(_DETACH, (node,))
    left.meta = dict(result.meta)
    return left
