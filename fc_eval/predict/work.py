"""What one prefill asks of the busiest rank, by count: operations and bytes of each layer, from the model's shape.

B prompts of S tokens are T = B * S rows of H values. Heads, key/value heads and MLP columns are dealt out to W ranks
whole, so a rank has ceil(heads / W) of them; norms, embedding and the residual stream are whole on every rank. Products
are those of a LLaMA-type layer with q, k, v in one and gate, up in one. Counted as a serving system runs it: a norm
with its residual sum, the rope and the activation are one pass over memory each.
"""

from dataclasses import dataclass
from math import prod

from fc_eval.errors import FcEvalError, unknown
from fc_eval.models.config import Shape

# Bytes of a value: activations and weights in bf16, and those of W8A8 products.
WIDTH, INT8_WIDTH = 2, 1
WEIGHTS = ("bf16", "w8a8")
# More than one machine has, or any domain of links that a tensor-parallel group has lived in.
MOST_RANKS = 1024
# Values of one message or matrix: what an address can count.
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Prefill:
    """One prefill.

    Attributes:
        shape: of the model.
        world_size: W.
        batch: B, prompts.
        tokens: S, tokens of each.
        weights: 'bf16', or 'w8a8' for INT8 weights and activations in the products of the layers.
        vocabulary: rows of embedding and head.
    """

    shape: Shape
    world_size: int
    batch: int
    tokens: int
    weights: str = "bf16"
    vocabulary: int = 128256

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise unknown("weights", self.weights, WEIGHTS)
        if not 2 <= self.world_size <= MOST_RANKS:
            why = "one rank reduces nothing, " if self.world_size < 2 else ""
            raise FcEvalError(f"tp={self.world_size} is not possible: {why}expected 2 to {MOST_RANKS}")
        for name in ("batch", "tokens", "vocabulary"):
            if getattr(self, name) < 1:
                raise FcEvalError(f"{name}={getattr(self, name)} is not possible: expected 1 or more")
        widest = max(self.shape.hidden, self.shape.intermediate, self.shape.heads * self.head_dim)
        if max(self.rows * widest, self.vocabulary * self.shape.hidden, self.shape.layers) > LARGEST:
            raise FcEvalError(
                f"batch={self.batch} x tokens={self.tokens} with vocabulary={self.vocabulary} is not possible: "
                "a matrix has 2^63 values or more, expected fewer"
            )

    @property
    def rows(self) -> int:
        """T."""
        return self.batch * self.tokens

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        return self.shape.head_dim or self.shape.hidden // self.shape.heads

    def share(self, count: int) -> int:
        """What the busiest rank has of `count` parts."""
        return -(-count // self.world_size)


@dataclass(frozen=True)
class Product:
    """[m, k] times [k, n] on one rank."""

    name: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of m * k * n."""
        return 2 * self.m * self.k * self.n

    def nbytes(self, width: int) -> int:
        """Both factors in `width` bytes a value, read once, and the result in bf16, written once."""
        return (self.m * self.k + self.k * self.n) * width + self.m * self.n * WIDTH


def layer_products(prefill: Prefill) -> tuple[Product, ...]:
    """The four products of one decoder layer."""
    shape, rows = prefill.shape, prefill.rows
    heads = prefill.share(shape.heads) * prefill.head_dim
    keys = prefill.share(shape.kv_heads) * prefill.head_dim
    columns = prefill.share(shape.intermediate)
    return (
        Product("qkv", rows, shape.hidden, heads + 2 * keys),
        Product("o_proj", rows, heads, shape.hidden),
        Product("gate_up", rows, shape.hidden, 2 * columns),
        Product("down_proj", rows, columns, shape.hidden),
    )


def attention_flops(prefill: Prefill) -> int:
    """Scores and their product with the values under a causal mask, which needs half of S * S, in one layer."""
    heads = prefill.share(prefill.shape.heads)
    return 2 * prefill.batch * prefill.tokens**2 * heads * prefill.head_dim


def rest_bytes(prefill: Prefill) -> int:
    """What is read and written around the products of one layer.

    Two norms (input, residual, their sum and the result: 4 H each), rope (q and k read and written), the cache (k and v
    read and written) and the activation (gate and up read, one written). With W8A8 each product's input is quantized in
    a pass of its own, 2 bytes read and 1 written.
    """
    shape = prefill.shape
    heads, keys = (prefill.share(count) * prefill.head_dim for count in (shape.heads, shape.kv_heads))
    columns = prefill.share(shape.intermediate)
    values = 8 * shape.hidden + 2 * (heads + keys) + 4 * keys + 3 * columns
    quantized = 2 * shape.hidden + heads + columns if prefill.weights == "w8a8" else 0
    return prefill.rows * (values * WIDTH + quantized * (WIDTH + INT8_WIDTH))


def embedding_bytes(prefill: Prefill) -> int:
    """Rows of the embedding read and written, whole on every rank."""
    return 2 * prod((prefill.rows, prefill.shape.hidden, WIDTH))


def head_product(prefill: Prefill) -> Product:
    """The head, for the last token of each prompt, its vocabulary divided among ranks."""
    return Product("head", prefill.batch, prefill.shape.hidden, prefill.share(prefill.vocabulary))


def weight_bytes(prefill: Prefill) -> int:
    """What one rank holds: the layers in the width of their products, embedding and head in bf16."""
    width = INT8_WIDTH if prefill.weights == "w8a8" else WIDTH
    layers = prefill.shape.layers * sum(each.k * each.n for each in layer_products(prefill)) * width
    head = head_product(prefill)
    return layers + (prefill.vocabulary * prefill.shape.hidden + head.k * head.n) * WIDTH
