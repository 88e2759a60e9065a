# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and tensors as HTML, for notebooks."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensormount._checkpoint import Checkpoint, Tensor


def table(checkpoint: Checkpoint) -> str:
    """A table of the first 100 tensors."""
    keys = checkpoint.keys()
    rows = []
    for key in keys[:100]:
        tensor = checkpoint[key]
        rows.append(
            f"<tr><td><code>{escape(_printable(key))}</code></td><td>{tensor.dtype_name}</td>"
            f"<td>{escape(str(list(tensor.shape)))}</td>"
            f'<td style="text-align:right">{_size_text(tensor.nbytes)}</td></tr>'
        )
    more = f"<p>and {len(keys) - 100} more</p>" if len(keys) > 100 else ""
    return (
        f"<div><b>{escape(_printable(checkpoint.path))}</b>: {len(keys)} tensors<table><thead><tr>"
        "<th>key</th><th>dtype</th><th>shape</th><th>size</th></tr></thead><tbody>"
        + "".join(rows)
        + f"</tbody></table>{more}</div>"
    )


def picture(tensor: Tensor) -> str:
    """The layout of a tensor, as an image, so that no name can become a part of the page."""
    svg = b64encode(tensor.layout_svg().encode()).decode()
    about = escape(_printable(f"{tensor.key}: {tensor.dtype_name} {list(tensor.shape)}"))
    return (
        f"<div><b>{about}</b>, {_size_text(tensor.nbytes)}<br>"
        f'<img alt="layout" src="data:image/svg+xml;base64,{svg}"></div>'
    )


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _size_text(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
