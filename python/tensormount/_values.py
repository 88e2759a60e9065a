# SPDX-License-Identifier: Apache-2.0
"""Plain values of a state dict in their encoded form, and the JSON of that form.

docs/state-dicts.md, "Encoded values", and docs/format.md, "common.json", specify it.
"""

from __future__ import annotations

import collections
import json
import math
import struct
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from .errors import LayoutError, UnsupportedError

# Limits of a common value (docs/format.md, "Limits").
MAX_VALUES = 1 << 22
MAX_VALUE_DEPTH = 60  # 64 less the levels that a tag around a value takes.
MAX_DEPTH = 64  # The limit that messages state.


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
    """Stands for a stored value that cannot be read here: its type is unknown, or it is damaged.

    `reason` says why. The rest of the checkpoint is not affected.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<tensormount.Unreadable: {self.reason}>"


def encode_special(value: Any) -> Optional[Dict[str, Any]]:
    """A value of any other type as a dict of one key. None: the type is unknown, or decoding would not give the
    same value back."""
    try:
        special = _special(value)
        if special is None:
            return None
        back = decode(special)
        # A NaN is equal to nothing, so its repr is compared.
        same = type(back) is type(value) and (bool(back == value) or repr(back) == repr(value))
    except Exception:  # NumPy, torch or the value itself may raise anything.
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
        if kind is torch.Size:
            return {"torch.Size": [int(n) for n in value]}
        if kind is torch.dtype:
            return {"torch.dtype": str(value).split(".", 1)[1]}
        if kind is torch.device:
            return {"torch.device": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.dtype) and value.names is None and value.subdtype is None:
            # The `str` of types of ml_dtypes is "<f1" or the like, which NumPy cannot parse.
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
    # A float becomes a number only if that keeps every bit; a NaN or an extended float may lose some.
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
        raise UnsupportedError(f"a stored value is a NumPy value ({name}), but NumPy is not installed") from None
    if name == "str":
        return numpy.str_(payload)
    if name == "bytes":
        return numpy.bytes_(payload)
    dtype = _numpy_dtype(numpy, name)
    if isinstance(payload, bytes):
        if len(payload) != dtype.itemsize:
            raise LayoutError(f"a NumPy value of type {name} has {len(payload)} bytes instead of {dtype.itemsize}")
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
            raise UnsupportedError(f"the NumPy type {name} is unknown to NumPy and ml_dtypes here") from None


# Types of dicts that can be one value, stored as pairs. Schedulers of PyTorch use Counter.
DICTS: Dict[Any, str] = {dict: "dict", collections.OrderedDict: "odict", collections.Counter: "counter"}


def encode(value: Any, where: str = "") -> Any:
    """The encoded form of a plain value. None, bool, 64-bit integers, floats, text and bytes stay as they are,
    lists and tuples are copied; any other value becomes a dict whose one key is its kind. Floats keep their bits.

    UnsupportedError: the type has no encoded form. LayoutError: too deep, too large, or a cycle. `where`: for
    messages.
    """
    return _encode(value, where, 0, [MAX_VALUES])


def _encode(value: Any, where: str, depth: int, room: List[int]) -> Any:
    kind = type(value)
    room[0] -= 1
    if kind is int:
        # A larger integer becomes hexadecimal text, because Python refuses to parse very long decimal numbers.
        return value if INT_MIN <= value <= INT_MAX else {"int": hex(value)}
    if kind in NATIVE_SET:
        return value
    if depth >= MAX_VALUE_DEPTH:
        raise LayoutError(f"{where}: containers are nested more than {MAX_DEPTH} deep, or in a cycle")
    if kind is list or kind is tuple:
        if len(value) > room[0]:
            raise LayoutError(f"{where}: more than {MAX_VALUES} values; use an array")
        if not set(map(type, value)) <= SIMPLE_SET or not _ints_fit(value):
            return kind([_encode(item, where, depth + 1, room) for item in value])
        room[0] -= len(value)
        # A copy, which does not change with the caller's list.
        return kind(value)
    if kind in DICTS:
        if 3 * len(value) > room[0]:
            raise LayoutError(f"{where}: more than {MAX_VALUES} values; use an array")
        pairs = [
            [_encode(k, where, depth + 3, room), _encode(v, where, depth + 3, room)]
            for k, v in value.items()
        ]
        return {DICTS[kind]: pairs}
    special = encode_special(value)
    if special is None:
        raise UnsupportedError(f"{where or 'a value'}: {type_name(value)} cannot be stored")
    return special


def _ints_fit(values: Sequence[Any]) -> bool:
    ints = [v for v in values if type(v) is int]
    return not ints or (min(ints) >= INT_MIN and max(ints) <= INT_MAX)


def decode(value: Any) -> Any:
    """The inverse of `encode`. UnsupportedError: the kind is unknown, or its package is missing. LayoutError: the
    value is malformed."""
    if type(value) is list or type(value) is tuple:
        if set(map(type, value)) <= SIMPLE_SET:
            return value
        return type(value)([decode(item) for item in value])
    if type(value) is not dict:
        return value
    if len(value) != 1:
        raise LayoutError("a stored value is malformed: a dict with one key was expected")
    ((kind, payload),) = value.items()
    try:
        return _decode_special(kind, payload)
    except (LayoutError, UnsupportedError):
        raise
    except Exception as error:  # A torch.device that this PyTorch lacks, a number too large, ...
        raise LayoutError(f"a stored value of kind {kind} cannot be read: {error}") from None


def decode_or_unreadable(value: Any, name: str) -> Any:
    """As `decode`, but returns Unreadable on failure, so that one bad value does not hide the others."""
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
            raise UnsupportedError("a stored value is a NumPy dtype, but NumPy is not installed") from None
        return _numpy_dtype(numpy, payload)
    if kind in ("torch.Size", "torch.dtype", "torch.device"):
        try:
            import torch
        except ImportError:
            raise UnsupportedError(f"the stored value is a {kind}: reading it needs PyTorch, which is not installed") from None
        if kind == "torch.Size":
            return torch.Size(payload)
        if kind == "torch.device":
            return torch.device(payload)
        dtype = getattr(torch, payload, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"the type torch.{payload} does not exist in this version of PyTorch")
        return dtype
    raise UnsupportedError(f"a stored value has the kind {kind}, which this version of the package does not know")


# ---- JSON (docs/format.md, "common.json") -----------------------------------------------------


def to_json(value: Any) -> str:
    """An encoded value as the library reads it (the form of common.json)."""
    out: List[str] = []
    _write_json(value, out.append)
    return "".join(out)


def native_json(value: Any, limit: int) -> Optional[str]:
    """JSON of a value whose types common values have in every program: None, bool, 64-bit int, float, text, bytes, and
    lists, tuples and dicts of them. None: it has others, or takes more than about `limit` bytes."""
    room = [limit]
    return to_json(value) if _is_native(value, room, 0) else None


def _is_native(value: Any, room: List[int], depth: int) -> bool:
    kind = type(value)
    room[0] -= len(value) if kind is str or kind is bytes else 8
    if room[0] < 0 or depth > MAX_VALUE_DEPTH:
        return False
    if kind is int:
        return bool(INT_MIN <= value <= INT_MAX)
    if kind is list or kind is tuple:
        return all(_is_native(item, room, depth + 1) for item in value)
    if kind is dict:
        return all(
            type(key) is str and key[:1] != "$" and plain_json(key) is not None and _is_native(item, room, depth + 1)
            for key, item in value.items()
        )
    return kind in NATIVE_SET


def plain_json(value: Any) -> Optional[str]:
    """JSON by the C encoder of `json`; None: it cannot represent the value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except ValueError:  # Infinity, NaN, or a lone surrogate.
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
        raise UnsupportedError(f"{type_name(value)} cannot be written as JSON")


def from_json(text: Union[str, bytes]) -> Any:
    """Parses JSON in the form of common.json to an encoded value. LayoutError: it is malformed."""
    try:
        return json.loads(text, object_hook=_from_object)
    except RecursionError:
        raise LayoutError("a common value cannot be read: containers are nested too deeply") from None
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(f"a common value cannot be read: {error}") from None


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
            # Bytes that are invalid even with lone surrogates are decoded as by os.fsdecode.
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
    raise LayoutError(f"a common value has the tags {sorted(found)}, which this version of the package does not know")
