# SPDX-License-Identifier: Apache-2.0
"""Name maps: `names` and `numbers` of `open` and `load` (docs/mapping.md)."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional, TypedDict, Union

from tensormount.errors import InvalidArgumentError

# A list of rules, or a dict like the file: {"version": 1, "rules": [...]}.
Names = Union[Sequence[Mapping[str, Any]], Mapping[str, Any]]


class NameOptions(TypedDict, total=False):
    """Options of `open` and `load` that give tensors other names; see `open`."""

    names: Optional[Names]
    as_: Optional[str]
    from_: Optional[str]
    numbers: Optional[Mapping[str, int]]
    config: Optional[Union[Mapping[str, Any], str, "os.PathLike[str]"]]


def name_map(options: NameOptions) -> Optional[bytes]:
    """A name map as JSON for the library; None: no map. TypeError: an unknown option."""
    unknown = options.keys() - NameOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
    return _json(**options)


def options_of(json_text: Optional[bytes]) -> NameOptions:
    """Options for which `name_map` gives this text."""
    if json_text is None:
        return {}
    import json

    whole = json.loads(json_text)
    if "as" not in whole and not isinstance(whole.get("rules"), dict):
        return {"names": whole}
    return {
        "names": whole.get("rules"),
        "as_": whole.get("as"),
        "from_": whole.get("from"),
        "numbers": whole.get("numbers"),
        "config": whole.get("config"),
    }


def _json(
    names: Optional[Names] = None,
    numbers: Optional[Mapping[str, int]] = None,
    as_: Optional[str] = None,
    from_: Optional[str] = None,
    config: Optional[Union[Mapping[str, Any], str, "os.PathLike[str]"]] = None,
) -> Optional[bytes]:
    import json  # Here, because few programs need it.

    if names is None and as_ is None:
        if numbers or from_ is not None or config is not None:
            raise InvalidArgumentError("numbers, from_ and config need names or as_")
        return None
    if from_ is not None and as_ is None:
        raise InvalidArgumentError("from_ needs as_")
    whole: dict[str, Any] = {}
    if names is not None:
        whole["rules"] = _rules(names)
    if as_ is not None:
        whole["as"] = as_
    if numbers:
        whole["numbers"] = _integers(numbers)
    if from_ is not None:
        whole["from"] = from_
    if config is not None:
        whole["config"] = dict(config) if isinstance(config, Mapping) else _read_config(config)
    return json.dumps(whole).encode()


def _rules(names: Names) -> dict[str, Any]:
    if isinstance(names, Mapping):
        if "as" in names:
            raise InvalidArgumentError("names is for rules; a name of known rules is as_")
        return dict(names)
    rules = [] if isinstance(names, (str, bytes)) else list(names)
    if isinstance(names, (str, bytes)) or not all(isinstance(rule, Mapping) for rule in rules):
        raise InvalidArgumentError(f"{names!r}: a list of rules was expected, each a dict, or a dict of version 1")
    return {"version": 1, "others": "keep", "rules": [dict(rule) for rule in rules]}


def _integers(numbers: Optional[Mapping[str, int]]) -> dict[str, int]:
    try:
        return {name: operator.index(number) for name, number in (numbers or {}).items()}
    except TypeError:
        raise InvalidArgumentError(f"numbers={numbers!r}: each must be an integer") from None


def _read_config(directory: Union[str, "os.PathLike[str]"]) -> Any:
    import json

    with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
        return json.load(file)
