"""Data parallelism: several processes, each with the whole model, share the batches of an evaluation.

Batches are formed before they are shared out, the same ones however many processes there are, and every result comes
back in the order of its batch. So a process count changes who computes a number, never the number.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from fc_eval.errors import LostProcessError

T = TypeVar("T")
R = TypeVar("R")

# The longest wait for the slowest process, which may have one batch more to do. A process that dies is noticed by
# whoever started it, long before this.
WAIT = timedelta(hours=1)


@dataclass(frozen=True)
class Processes:
    """This process among those that share an evaluation.

    Attributes:
        index: 0 to count - 1; process 0 is the one that writes and speaks.
        count: how many there are.
        device: where this process computes, such as 'cpu' or 'cuda:1'.
    """

    index: int = 0
    count: int = 1
    device: str = "cpu"

    def gather(self, value: T) -> list[T]:
        """The value of every process, by index, in every process; values are pickled, and must hold no GPU tensors.

        Raises:
            LostProcessError: another process has ended, or has not come within `WAIT`.
        """
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        try:
            gathered: list[T] = gather_object([value])
        except RuntimeError as error:  # torch has no narrower type for a peer that is gone
            raise LostProcessError(f"process {self.index} lost the others: {str(error).splitlines()[0]}") from error
        return gathered

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`[function(item) for item in items]` in every process, each item computed by one of them.

        Items are dealt out one by one: batches of tasks are sorted by length, so consecutive shares would be unequal.

        Raises:
            LostProcessError: as `gather`.
        """
        shares = self.gather([function(item) for item in items[self.index :: self.count]])
        return [shares[index % self.count][index // self.count] for index in range(len(items))]


ALONE = Processes()


@contextmanager
def joined(count: int, device: str) -> Iterator[Processes]:
    """This process among `count` that were started together with torchrun's environment variables.

    Results are small and travel over gloo, on CPUs and GPUs alike.

    Args:
        count: processes of the run; with 1 nothing is joined, and the environment is not looked at.
        device: 'cpu' or 'cuda'; each process gets the GPU of its local rank.
    """
    if count == 1:
        yield Processes(device=device)
        return
    from accelerate import PartialState

    options: dict[str, Any] = {"backend": "gloo", "timeout": WAIT}
    state = PartialState(cpu=device == "cpu", **options)
    assert state.num_processes == count  # who started this process has made sure
    yield Processes(state.process_index, count, str(state.device))
    state.destroy_process_group()  # not after an error: the others may be gone
