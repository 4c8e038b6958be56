"""`fc-eval formats`: every wire format and those of other systems, what a value costs, and which codec covers it."""

from collections.abc import Sequence

from fc_eval.codec.peers.table import PEERS, PeerFormat
from fc_eval.collective.peer_rules import RULES, message_of
from fc_eval.errors import FcEvalError
from fc_eval.wire.format import FORMATS, parse_format
from fc_eval.wire.layout import layout, nominal_bits

# What is shown where no names are given: all bases, and spike reserving where it is meant to be used.
SHOWN = (*FORMATS, "int4-sr", "int3-sr", "int2-sr", "int2-g64-sr", *PEERS)
MOST = 2**31 - 1  # rows and columns of a message: bits per value no longer change long before
SUFFIXES = (
    "suffixes: -g8 to -g4096 or -gtoken, -sym or -se (int), -sr (spikes), -e4m0 to -e7m0 (mx), "
    "-sbf16, -sfp16, -sfp32 or -slog8, -zint16, -had (rotation, emulated only)"
)


def formats_table(names: Sequence[str], tokens: int, hidden: int, dtype: str) -> str:
    """A text table with one row per format.

    Args:
        names: format names, also of other systems (at W = 2, where that matters); `SHOWN` where empty.
        tokens: T, rows of the message whose effective bits are shown.
        hidden: H, columns of that message.
        dtype: 'bf16', 'fp16' or 'fp32'.

    Raises:
        FcEvalError: an unknown name, or a shape or dtype that cannot be sent.
    """
    import torch

    from fc_eval.codec.base import DTYPES
    from fc_eval.codec.select import codecs_available, get_codec

    if max(tokens, hidden) > MOST:
        raise FcEvalError(
            f"--tokens and --hidden are at most {MOST}: a message of more has no effective bits of its own"
        )
    rows = [["format", "nominal bits", f"effective bits (T={tokens}, H={hidden}, {dtype})", "wire ratio", "codecs"]]
    present = [name for name, why in codecs_available().items() if why is None]
    for name in names or SHOWN:
        fmt = PEERS.get(name) or parse_format(name)
        if isinstance(fmt, PeerFormat):
            total, nominal = message_of(fmt, 2, tokens, hidden).total_bytes, fmt.nominal_bits(hidden)
        else:
            total, nominal = layout(fmt, tokens, hidden, dtype).total_bytes, nominal_bits(fmt, dtype, hidden)
        bits = 8 * total / (tokens * hidden) if tokens else 0.0
        ratio = torch.finfo(DTYPES[dtype]).bits * tokens * hidden / 8 / total if total else 0.0
        covers = []
        for codec in present:
            try:
                get_codec(codec, (fmt,), DTYPES[dtype], "cuda" if codec == "cuda" else "cpu")
                covers.append(codec)
            except FcEvalError:
                pass  # a fact for the table, not a mistake
        where = " (T = H)" if isinstance(fmt, PeerFormat) and RULES[fmt.system].columns else ""  # a scale per column
        rows.append(
            [fmt.name, f"{nominal:.4g}{where}", f"{bits:.4f}", f"{ratio:.2f}x", ", ".join(covers) or "none here"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines if names else [*lines, SUFFIXES])
