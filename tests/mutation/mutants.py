"""Mutants of a source text: copies with one small change that some test should notice."""

import ast
import difflib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_PAIRS = (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil"), ("argmin", "argmax"))
_NAMES = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])} | {"ceil": "int"}
_SKIPPED = {"annotation", "returns", "decorator_list", "type_params", "bases"}


class Mutant(NamedTuple):
    """A changed source text: the line and the function of the change, and what it was and is."""

    line: int
    function: str
    was: str
    now: str
    source: str

    def change(self, original: str) -> tuple[str, str]:
        """Return the lines that were there and those that are there now, without blanks around."""
        lines = list(difflib.unified_diff(original.splitlines(), self.source.splitlines(), n=0, lineterm=""))[3:]
        was, now = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        return was, now


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a source text, in the order of what they change."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    tree, text, found = ast.parse(source), source.encode(), dict[str, Mutant]()
    conditions = {id(node.test) for node in ast.walk(tree) if isinstance(node, ast.If)}
    conditions |= {id(each) for node in ast.walk(tree) if isinstance(node, ast.comprehension) for each in node.ifs}
    for function, node in _expressions(tree, ""):
        first, last = (
            starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        was = text[first:last].decode()
        plain = id(node) in conditions and not isinstance(node, ast.Compare | ast.UnaryOp)  # those are negated anyway
        negated = [ast.UnaryOp(ast.Not(), node)] if plain else []
        for changed in [*_changes(node), *negated]:
            now = ast.unparse(changed)
            simple = isinstance(changed, ast.stmt | ast.Name | ast.Attribute | ast.Call)
            now = now if simple else f"({now})"
            mutated = (text[:first] + now.encode() + text[last:]).decode()
            found.setdefault(mutated, Mutant(node.lineno, function, was, now, mutated))
    return list(found.values())


def _expressions(node: ast.AST, function: str) -> Iterator[tuple[str, Any]]:
    """Yield what may be changed, and the function around it: no annotations, messages or documentation."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.pattern):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.expr | ast.AugAssign):
        yield function, node
    for field, value in ast.iter_fields(node):
        if field not in _SKIPPED and not (isinstance(node, ast.AnnAssign) and field == "target"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _expressions(child, function)


def _changes(node: Any) -> Iterator[ast.AST]:
    """Yield changed copies of an expression."""
    match node:
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            values = (node.value + 1, node.value - 1, node.value * 2)
            yield from (ast.Constant(value) for value in values if value != node.value)
        case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right):
            if type(operator) in _OPERATORS and not (_no_number(left) or _no_number(right)):
                yield _with(node, op=_OPERATORS[type(operator)]())
            if isinstance(node, ast.BinOp):
                yield from (left, right)  # a term is dropped
        case ast.Compare(_, [*operators], _):
            for index, each in enumerate(operators):
                swapped = [*operators[:index], _COMPARISONS[type(each)](), *operators[index + 1 :]]
                yield _with(node, ops=swapped)
        case ast.BoolOp():
            yield _with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
            yield from (_with(node, values=[v for v in node.values if v is not each]) for each in node.values)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (_with(node, body=orelse, orelse=body), body, orelse)
        case ast.Name(name, ast.Load()) if name in _NAMES:
            yield ast.Name(_NAMES[name])
        case ast.Attribute(_, name, ast.Load()) if name in _NAMES and name != "ceil":
            yield _with(node, attr=_NAMES[name])


def _no_number(node: ast.expr) -> bool:
    """Return whether an operand is a text, a sequence or a class: with another operator its line only raises."""
    kinds = ast.JoinedStr | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.ListComp | ast.SetComp | ast.DictComp
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, kinds) or (isinstance(node, ast.Name) and node.id.istitle())


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = deepcopy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return changed
