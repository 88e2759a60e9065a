# SPDX-License-Identifier: Apache-2.0
"""Plain values of a state dict in the form that is stored, and its JSON (docs/python.md, "Encoded
values"; docs/format.md, "common.json")."""

from __future__ import annotations

import collections
import json
import math
import struct
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from .errors import LayoutError, UnsupportedError

# Of a common value, docs/format.md, "Limits".
MAX_VALUES = 1 << 22
MAX_VALUE_DEPTH = 60  # 64, less what a tag puts around a value.
MAX_DEPTH = 64  # As messages say it.


def type_name(value: Any) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- Plain values ----------------------------------------------------------------------------

_NATIVE = (bool, int, float, str, bytes, type(None))
NATIVE_SET = frozenset(_NATIVE)
SIMPLE_SET = frozenset((bool, int, float, str, type(None)))
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1


class Unreadable:
    """Stands for a stored value that cannot be read here: of a type that is not known, or damaged.
    `reason` says why. What else the checkpoint holds is not affected."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<tensormount.Unreadable: {self.reason}>"


def encode_special(value: Any) -> Optional[Dict[str, Any]]:
    """A value of a type that the form does not have, as an object of one key; None where the type
    is not known, or where decoding would not give the same value back."""
    try:
        special = _special(value)
        if special is None:
            return None
        back = decode(special)
        # A NaN is equal to nothing, but has a text.
        same = type(back) is type(value) and (bool(back == value) or repr(back) == repr(value))
    except Exception:  # Of NumPy, torch or the value itself, whatever they raise.
        return None
    return special if same else None


def _special(value: Any) -> Optional[Dict[str, Any]]:
    kind = type(value)
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytearray:
        return {"bytearray": bytes(value)}
    torch = sys.modules.get("torch")
    if torch is not None:
        if kind is torch.dtype:
            return {"torch.dtype": str(value).split(".", 1)[1]}
        if kind is torch.device:
            return {"torch.device": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.dtype) and value.names is None and value.subdtype is None:
            # Types of ml_dtypes call themselves "<f1" and the like, which NumPy does not know.
            own = value.type.__module__.split(".")[0] != "ml_dtypes"
            if own and value.kind not in "biufcSU":
                return None
            return {"numpy.dtype": value.str if own else value.name}
        if isinstance(value, numpy.generic):
            return _encode_numpy(value)
    return None


def _encode_numpy(value: Any) -> Optional[Dict[str, Any]]:
    dtype = value.dtype
    if dtype.kind == "b":
        return {"numpy": ["bool", bool(value)]}
    if dtype.kind in "iu":
        return {"numpy": [dtype.name, int(value)]}
    if dtype.kind == "U":
        return {"numpy": ["str", str(value)]}
    if dtype.kind == "S":
        return {"numpy": ["bytes", bytes(value)]}
    # As a number where that gives every bit back, which a NaN's or an extended float need not.
    if dtype.name in ("float16", "float32", "float64") and math.isfinite(value):
        return {"numpy": [dtype.name, float(value)]}
    if dtype.name in ("float16", "float32", "float64", "complex64", "complex128"):
        return {"numpy": [dtype.name, value.tobytes()]}
    if type(value).__module__.split(".")[0] == "ml_dtypes":
        return {"numpy": [dtype.name, value.tobytes()]}
    return None


def _decode_numpy(name: str, payload: Any) -> Any:
    try:
        import numpy
    except ImportError:
        raise UnsupportedError(f"a NumPy value ({name}), and NumPy is not installed") from None
    if name == "str":
        return numpy.str_(payload)
    if name == "bytes":
        return numpy.bytes_(payload)
    dtype = _numpy_dtype(numpy, name)
    if isinstance(payload, bytes):
        if len(payload) != dtype.itemsize:
            raise LayoutError(f"a NumPy value of type {name} of {len(payload)} bytes")
        return numpy.frombuffer(payload, dtype)[0]
    return dtype.type(payload)


def _numpy_dtype(numpy: Any, name: str) -> Any:
    try:
        return numpy.dtype(name)
    except TypeError:
        try:
            import ml_dtypes

            return numpy.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError, TypeError):
            raise UnsupportedError(f"the NumPy type {name}: not known here") from None


# What is a dict of pairs when it is stored as one value. Schedulers of PyTorch count by Counter.
DICTS: Dict[Any, str] = {dict: "dict", collections.OrderedDict: "odict", collections.Counter: "counter"}


def encode(value: Any, where: str = "") -> Any:
    """A plain value in the form that is stored: what common values have themselves (None, bool,
    integers of 64 bits, floats, text, bytes, lists, tuples) is itself; anything else is a dict of
    one key, which names its kind. Floats keep their bits.

    UnsupportedError: a type that has no form. LayoutError: too deep, too large, a cycle.
    """
    return _encode(value, where, 0, [MAX_VALUES])


def _encode(value: Any, where: str, depth: int, room: List[int]) -> Any:
    kind = type(value)
    room[0] -= 1
    if kind is int:
        # In hexadecimal: Python refuses to read decimal numbers of many digits.
        return value if INT_MIN <= value <= INT_MAX else {"int": hex(value)}
    if kind in NATIVE_SET:
        return value
    if depth >= MAX_VALUE_DEPTH:
        raise LayoutError(f"{where}: containers more than {MAX_DEPTH} deep, or a cycle")
    if kind is list or kind is tuple:
        if len(value) > room[0]:
            raise LayoutError(f"{where}: more than {MAX_VALUES} values; an array holds more")
        if not set(map(type, value)) <= SIMPLE_SET or not _ints_fit(value):
            return kind([_encode(item, where, depth + 1, room) for item in value])
        room[0] -= len(value)
        # A copy: the form must not change with the caller's list.
        return kind(value)
    if kind in DICTS:
        if 3 * len(value) > room[0]:
            raise LayoutError(f"{where}: more than {MAX_VALUES} values; an array holds more")
        pairs = [
            [_encode(k, where, depth + 3, room), _encode(v, where, depth + 3, room)]
            for k, v in value.items()
        ]
        return {DICTS[kind]: pairs}
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Size:
        return {"torch.Size": [int(n) for n in value]}
    special = encode_special(value)
    if special is None:
        raise UnsupportedError(f"{where or 'a value'}: {type_name(value)} cannot be stored")
    return special


def _ints_fit(values: Sequence[Any]) -> bool:
    ints = [v for v in values if type(v) is int]
    return not ints or (min(ints) >= INT_MIN and max(ints) <= INT_MAX)


def decode(value: Any) -> Any:
    """The other way. UnsupportedError: a kind that is not known, or whose package is missing.
    LayoutError: all else that is wrong with a value."""
    if type(value) is list or type(value) is tuple:
        if set(map(type, value)) <= SIMPLE_SET:
            return value
        return type(value)([decode(item) for item in value])
    if type(value) is not dict:
        return value
    if len(value) != 1:
        raise LayoutError("a stored value: a dict of one key was expected")
    ((kind, payload),) = value.items()
    try:
        return _decode_special(kind, payload)
    except (LayoutError, UnsupportedError):
        raise
    except Exception as error:  # Of a torch.device that this PyTorch lacks, of a number too large, ...
        raise LayoutError(f"a stored value of kind {kind}: {error}") from None


def decode_or_unreadable(value: Any, name: str) -> Any:
    """As `decode`; Unreadable where that fails, so that one bad value does not hide the others."""
    try:
        return decode(value)
    except (LayoutError, UnsupportedError, RecursionError) as error:
        return Unreadable(f"{name}: {error}")


def _decode_special(kind: str, payload: Any) -> Any:
    if kind == "int":
        return int(payload, 16)
    if kind == "complex":
        real, imaginary = payload
        return complex(real, imaginary)
    if kind == "bytearray":
        return bytearray(payload)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in payload}
    if kind == "odict":
        return collections.OrderedDict((decode(k), decode(v)) for k, v in payload)
    if kind == "counter":
        return collections.Counter({decode(k): decode(v) for k, v in payload})
    if kind == "numpy":
        name, item = payload
        return _decode_numpy(name, item)
    if kind == "numpy.dtype":
        try:
            import numpy
        except ImportError:
            raise UnsupportedError("a NumPy dtype, and NumPy is not installed") from None
        return _numpy_dtype(numpy, payload)
    if kind in ("torch.Size", "torch.dtype", "torch.device"):
        try:
            import torch
        except ImportError:
            raise UnsupportedError(f"a {kind}, and PyTorch is not installed") from None
        if kind == "torch.Size":
            return torch.Size(payload)
        if kind == "torch.device":
            return torch.device(payload)
        dtype = getattr(torch, payload, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"the type torch.{payload}, which this PyTorch lacks")
        return dtype
    raise UnsupportedError(f"a stored value of kind {kind}: not known to this version")


# ---- JSON (docs/format.md, "common.json") -----------------------------------------------------


def to_json(value: Any) -> str:
    """An encoded value as the library reads it (the form of common.json)."""
    out: List[str] = []
    _write_json(value, out.append)
    return "".join(out)


def plain_json(value: Any) -> Optional[str]:
    """By the C encoder; None where that would lose something."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except ValueError:  # Infinities, NaNs; text that is no UTF-8.
        return None
    return text


def _write_json(value: Any, out: Callable[[str], Any]) -> None:
    kind = type(value)
    if value is None or kind is bool or kind is int:
        out(json.dumps(value))
    elif kind is float:
        if math.isnan(value):
            out(f'{{"$float":"nan","bits":"{struct.pack(">d", value).hex()}"}}')
        elif math.isinf(value):
            out('{"$float":"inf"}' if value > 0 else '{"$float":"-inf"}')
        else:
            out(float.__repr__(value))
    elif kind is str:
        text = plain_json(value)
        if text is None:
            text = f'{{"$string":"{value.encode("utf-8", "surrogatepass").hex()}"}}'
        out(text)
    elif kind is bytes:
        out(f'{{"$bytes":"{value.hex()}"}}')
    elif kind is list or kind is tuple:
        if kind is tuple:
            out('{"$tuple":')
        text = None
        if set(map(type, value)) <= SIMPLE_SET:
            text = plain_json(value)
        if text is not None:
            out(text)
        else:
            out("[")
            for i, item in enumerate(value):
                if i:
                    out(",")
                _write_json(item, out)
            out("]")
        if kind is tuple:
            out("}")
    elif kind is dict:
        out("{")
        for i, (key, item) in enumerate(value.items()):
            if i:
                out(",")
            out(json.dumps(key))
            out(":")
            _write_json(item, out)
        out("}")
    else:
        raise UnsupportedError(f"{type_name(value)} has no form in JSON")


def from_json(text: Union[str, bytes]) -> Any:
    """An encoded value of the form of common.json. LayoutError where it is not one."""
    try:
        return json.loads(text, object_hook=_from_object)
    except RecursionError:
        raise LayoutError("a common value: containers in each other without end") from None
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(f"a common value that cannot be read: {error}") from None


def _from_object(found: Dict[str, Any]) -> Any:
    if len(found) > 2 or not any(key.startswith("$") for key in found):
        return found
    if len(found) == 1:
        ((kind, payload),) = found.items()
        if kind == "$tuple":
            return tuple(payload)
        if kind == "$bytes":
            return bytes.fromhex(payload)
        if kind == "$string":
            # Half a pair, as Python can have it in text; else bytes that are no UTF-8, as
            # os.fsdecode has them.
            data = bytes.fromhex(payload)
            try:
                return data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                return data.decode("utf-8", "surrogateescape")
        if kind == "$dict":
            return {key: item for key, item in payload}
    if "$float" in found:
        if found["$float"] == "nan":
            return struct.unpack(">d", bytes.fromhex(found.get("bits", "7ff8000000000000")))[0]
        return float(found["$float"])
    raise LayoutError(f"a common value with {sorted(found)}: not known to this version")
