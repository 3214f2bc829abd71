"""Data as YAML that the strict reader reads back equal."""

from typing import Any

import yaml

from scenarios.reader import is_text


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as something else, and writes pairs on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if is_text(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    mantissa, *exponent = repr(float(value)).split("e")
    point = "" if "." in mantissa or not exponent else ".0"  # PyYAML takes 1e-05 for text and would tag it
    return dumper.represent_scalar("tag:yaml.org,2002:float", "e".join([mantissa + point, *exponent]))


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)
_Dumper.add_multi_representer(float, _float)  # NumPy floats too
_Dumper.add_representer(float, _float)


def dump(data: dict[str, Any]) -> str:
    """Return ``data`` as YAML text, keys in their order.

    >>> print(dump({"name": "1e9", "pair": [1, "2 us"]}), end="")
    name: '1e9'
    pair: [1, 2 us]
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
