"""Formats, names and sizes of what travels between ranks: pure integers, no tensor library."""

from fc_eval.wire.format import FORMATS, MINIFLOATS, WIRE_VERSION, Minifloat, WireFormat, parse_format

__all__ = ["FORMATS", "MINIFLOATS", "WIRE_VERSION", "Minifloat", "WireFormat", "parse_format"]
