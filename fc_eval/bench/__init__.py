"""Measurements of this machine: how fast the codecs are, and what emulating quantized communication costs."""
