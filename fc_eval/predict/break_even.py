"""From which message size on a comm is faster than the unquantized all-reduce."""

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.predict.machine import Machine
from fc_eval.predict.model import all_reduce
from fc_eval.predict.work import WIDTH

UNQUANTIZED = parse_comm("plain")
# Of a message; beyond it a comm that does not pay is said never to.
LARGEST_BYTES = 4 << 30


def break_even_rows(comm: Comm, world_size: int, hidden: int, machine: Machine) -> int | None:
    """The fewest rows of `hidden` values from which on the comm is faster; None where it never is up to 4 GiB."""

    def pays(rows: int) -> bool:
        ours, theirs = (all_reduce(c, world_size, rows, hidden, machine).total_s for c in (comm, UNQUANTIZED))
        return ours < theirs

    high = LARGEST_BYTES // (hidden * WIDTH)
    if not pays(high):
        return None
    low = high
    while low > 1 and pays(low // 2):
        low //= 2
    if low == 1:
        return 1
    low, high = low // 2, low  # does not pay, does pay
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def break_even_kib(comm: Comm, world_size: int, hidden: int, machine: Machine) -> float | None:
    """The same as the size of the message in bf16, in KiB."""
    rows = break_even_rows(comm, world_size, hidden, machine)
    return None if rows is None else rows * hidden * WIDTH / 1024
