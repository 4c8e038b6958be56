"""What a rank of a test does: in a file of its own, which a new process imports quickly."""

from fc_eval.bench.link import measure_link


def measure_and_fail(ranks, device):
    """Measures, and says what it found as an error, so that one start of processes tests both."""
    raise ValueError(measure_link(ranks, device, large_bytes=4096, rounds=1))
