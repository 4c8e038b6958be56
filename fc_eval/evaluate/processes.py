"""Data parallelism: several processes, each with the whole model, share the batches of an evaluation.

Under tensor parallelism several ranks have the whole model together, do the same, and count as one process here.

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
        index: 0 to count - 1.
        count: how many there are.
        device: where this process computes, such as 'cpu' or 'cuda:1'.
        rank: 0 to ranks - 1, this one among the ranks that have a model together.
        ranks: how many these are.
    """

    index: int = 0
    count: int = 1
    device: str = "cpu"
    rank: int = 0
    ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.index == self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, by index, in every process; values are pickled, and must hold no GPU tensors.

        Raises:
            LostProcessError: another process has ended, or has not come within `WAIT`.
        """
        if self.count * self.ranks == 1:
            return [value]
        from accelerate.utils import gather_object

        try:
            gathered: list[T] = gather_object([value])
        except RuntimeError as error:  # torch has no narrower type for a peer that is gone
            raise LostProcessError(f"process {self.index} lost the others: {str(error).splitlines()[0]}") from error
        return gathered[:: self.ranks]  # the first rank's value stands for those of its group

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
def joined(count: int, device: str, ranks: int = 1) -> Iterator[Processes]:
    """This process among `count * ranks` that were started together with torchrun's environment variables.

    Results are small and travel over gloo, on CPUs and GPUs alike.

    Args:
        count: processes of the run; with 1 of 1 rank nothing is joined, and the environment is not looked at.
        device: 'cpu' or 'cuda'; each process gets the GPU of its local rank.
        ranks: how many consecutive ones have a model together.
    """
    if count * ranks == 1:
        yield Processes(device=device)
        return
    from accelerate import PartialState

    options: dict[str, Any] = {"backend": "gloo", "timeout": WAIT}
    state = PartialState(cpu=device == "cpu", **options)
    assert state.num_processes == count * ranks  # who started this process has made sure
    index, rank = divmod(state.process_index, ranks)
    yield Processes(index, count, str(state.device), rank, ranks)
    state.destroy_process_group()  # not after an error: the others may be gone
