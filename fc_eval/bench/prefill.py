"""One rank's part of a LLaMA-type model with random weights, and its prefill: what `bench ttft` times.

Column-parallel q, k, v, gate and up, row-parallel o_proj and down_proj, whole norms and embedding, a head cut along the
vocabulary; every rank draws its own shard, so no rank ever holds the model. B prompts of S tokens, T = B * S rows, H
hidden, W ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from fc_eval.errors import FcEvalError
from fc_eval.models.config import Shape
from fc_eval.predict.work import Prefill, layer_products
from fc_eval.weights.int8 import Rows, product

EPSILON, ROPE_BASE = 1e-5, 500_000.0

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Stopwatch:
    """Adds up the times of named parts of a forward pass while it is on; off, it costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time of a block, on a GPU that of its kernels."""
        if not self.on:
            yield
            return
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        # An event in a graph is recorded anew by each replay only where it is external.
        capturing = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=capturing)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take_spans(self) -> list[tuple[str, Any, Any]]:
        """What was begun and ended since the last call, such as the parts of a pass that was captured."""
        found, self._spans = self._spans, []
        return found

    def take_ms(self) -> dict[str, float]:
        """Milliseconds by part since the last call; the device must be through with them."""
        return self.sum_ms(self.take_spans())

    def sum_ms(self, spans: list[tuple[str, Any, Any]]) -> dict[str, float]:
        """Milliseconds by part."""
        found: dict[str, float] = {}
        for name, start, end in spans:
            found[name] = found.get(name, 0.0) + (start.elapsed_time(end) if self._cuda else 1e3 * (end - start))
        return found


Weight = torch.Tensor | Rows


def _linear(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[T, k] to [T, n], bf16, by a weight [n, k] in bf16 or in INT8."""
    return product(x_TK, weight) if isinstance(weight, Rows) else functional.linear(x_TK, weight)


def check_split(prefill: Prefill) -> None:
    """Makes sure that every rank has equal parts.

    Raises:
        FcEvalError: W does not divide the shape.
    """
    shape, size = prefill.shape, prefill.world_size
    if shape.heads % size or shape.kv_heads % size or shape.intermediate % size or prefill.vocabulary % size:
        raise FcEvalError(
            f"tp={size} does not divide all of {shape.heads} heads, {shape.kv_heads} key/value heads, "
            f"{shape.intermediate} MLP columns and {prefill.vocabulary} words: choose a tp that does"
        )


class RankPrefill:
    """The layers of one rank."""

    def __init__(self, prefill: Prefill, rank: int, device: torch.device) -> None:
        check_split(prefill)
        shape, size = prefill.shape, prefill.world_size
        self.prefill, self.watch, self._device = prefill, Stopwatch(device), device
        self._generator = torch.Generator(device).manual_seed(rank)
        names = [(each.name, each.k, each.n) for each in layer_products(prefill)]
        self._layers = [
            {name: self._weight(n, k, prefill.weights) for name, k, n in names} for _ in range(shape.layers)
        ]
        self._norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        self._head = self._weight(prefill.vocabulary // size, shape.hidden, "bf16")
        whole = torch.Generator(device).manual_seed(size)  # the embedding is the same on every rank
        rows = min(prefill.vocabulary, 1024)  # as many words as the ids use
        self._embedding = torch.randn((rows, shape.hidden), generator=whole, device=device).to(torch.bfloat16)

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        """Random words, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(len(self._embedding), (batch, tokens), generator=generator).to(self._device)

    def __call__(self, ids_BS: torch.Tensor, reduce: Reduce) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's logits of the last token of each prompt, [B, V / W], and the hidden states [T, H]."""
        shape, watch = self.prefill.shape, self.watch
        batch, tokens = ids_BS.shape
        turn = _rope(tokens, self.prefill.head_dim, self._device)
        x_TH = self._embedding[ids_BS.flatten()]
        for layer in self._layers:
            h_TH = self._normed(x_TH)
            with watch.part("gemm_ms"):
                qkv = _linear(h_TH, layer["qkv"])
            q, k, v = _heads(qkv, batch, tokens, shape, self.prefill)
            q, k = _turned(q, turn), _turned(k, turn)
            with watch.part("attention_ms"):
                mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(batch * tokens, -1)
            with watch.part("gemm_ms"):
                partial_TH = _linear(mixed, layer["o_proj"])
            with watch.part("comm_ms"):
                reduced_TH = reduce(partial_TH)
            x_TH = x_TH + reduced_TH
            h_TH = self._normed(x_TH)
            with watch.part("gemm_ms"):
                gate, up = _linear(h_TH, layer["gate_up"]).chunk(2, dim=1)
            h_TH = functional.silu(gate) * up
            with watch.part("gemm_ms"):
                partial_TH = _linear(h_TH, layer["down_proj"])
            with watch.part("comm_ms"):
                reduced_TH = reduce(partial_TH)
            x_TH = x_TH + reduced_TH
        last_BH = x_TH.view(batch, tokens, -1)[:, -1]
        return _linear(self._normed(last_BH), self._head), x_TH

    def _normed(self, x_TH: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x_TH, (x_TH.shape[-1],), self._norm, EPSILON)

    def _weight(self, n: int, k: int, weights: str) -> Weight:
        if weights == "w8a8":
            codes = torch.randint(-127, 128, (n, k), generator=self._generator, dtype=torch.int8, device=self._device)
            return Rows(codes, torch.full((n,), k**-0.5 / 73, device=self._device))  # codes spread by 73
        drawn = torch.empty((n, k), dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(0, k**-0.5, generator=self._generator)


def _heads(
    qkv: torch.Tensor, batch: int, tokens: int, shape: Shape, prefill: Prefill
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (q + k + v)] to [B, heads, S, head size] each."""
    counts = [prefill.share(shape.heads), prefill.share(shape.kv_heads), prefill.share(shape.kv_heads)]
    parts = torch.split(qkv, [count * prefill.head_dim for count in counts], dim=1)
    q, k, v = (part.view(batch, tokens, -1, prefill.head_dim).transpose(1, 2) for part in parts)
    return q, k, v


def _rope(tokens: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [S, head size], of rotary position embeddings (arXiv 2104.09864)."""
    rates = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(tokens, device=device).float(), rates).repeat(1, 2)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]
