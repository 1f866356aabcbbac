"""Sizes of a transformer, and FLOPs and time of training it (paper, section 1.4)."""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce._validate import mismatch
from monoidreduce.theory.plan._positive import check_counts, check_numbers

__all__ = ["Experts", "Latent", "Model", "training_flops", "training_seconds"]


@dataclass(frozen=True)
class Experts:
    """Feedforward layers of which each token uses a few.

    Attributes:
        count: routed experts of a layer.
        chosen: how many of them a token uses.
        hidden: hidden width of one.
        shared: experts of the same width that all tokens use.
        dense: layers at the start that have one feedforward layer of `Model.hidden` instead.
        nodes: the most nodes that a token is sent to; None if there is no limit.

    Raises TypeError or ValueError unless these are ints, `chosen` of `count` at most.
    """

    count: int
    chosen: int
    hidden: int
    shared: int = 0
    dense: int = 0
    nodes: int | None = None

    def __post_init__(self) -> None:
        check_counts(count=self.count, chosen=self.chosen, hidden=self.hidden)
        check_counts(shared=self.shared + 1, dense=self.dense + 1, nodes=self.nodes or 1)
        if self.chosen > self.count:
            raise ValueError(mismatch("chosen", f"at most the {self.count} experts", self.chosen))

    def reached(self, nodes: int) -> float:
        """Of this many nodes, how many have an expert that a token chose: the mean of random choices."""
        return min(nodes * (1 - (1 - 1 / nodes) ** self.chosen), self.nodes or nodes)


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values come from narrow vectors, as DeepSeek's (MLA).

    Attributes:
        queries: width of the vector of queries; None if they come from the layer's input.
        keys: width of the vector of keys and values.
        rotary: width of the part of a head's key that all heads share.
    """

    queries: int | None
    keys: int
    rotary: int


@dataclass(frozen=True)
class Model:
    """A transformer: blocks of attention and a feedforward layer.

    With `kv_heads == heads` and heads of width / heads columns, as in the paper's models, the formulas below
    are those of section 1.4. Layer norms and biases are left out, as in the paper (footnote 3).

    Attributes:
        layers, width, hidden, vocabulary: the paper's L, d, D and V.
        heads, kv_heads: number of query heads and of key/value heads.
        gated: the feedforward layer has three matrices instead of two.
        tied: embedding and head share one weight.
        head_width: columns of a head of queries and keys; None for width / heads.
        value_width: columns of a head of values; None for head_width.
        window: keys that a query of a windowed layer sees; None if there are no such layers.
        windowed: number of layers with that window.
        parallel: attention and feedforward layer read the same input, as in PaLM.
        experts: the feedforward layers of a mixture of experts; None for dense ones.
        latent: narrow vectors of attention; None if there are none.
        sinks: attention's softmax has one more entry a head, which is learned, as GPT-OSS.

    Raises TypeError or ValueError unless sizes are ints of 1 or more, kv_heads divides heads, and heads
    divides width where head_width is not given.
    """

    layers: int
    width: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    gated: bool = True
    tied: bool = False
    head_width: int | None = None
    value_width: int | None = None
    window: int | None = None
    windowed: int = 0
    parallel: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        check_counts(
            layers=self.layers,
            width=self.width,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            heads=self.heads,
            kv_heads=self.kv_heads,
        )
        for name in ("head_width", "value_width", "window"):
            if (size := getattr(self, name)) is not None:
                check_counts(**{name: size})
        if self.head_width is None and self.width % self.heads:
            raise ValueError(mismatch("heads", f"a divisor of width {self.width}", self.heads))
        if self.heads % self.kv_heads:
            raise ValueError(mismatch("kv_heads", f"a divisor of heads {self.heads}", self.kv_heads))
        if not 0 <= self.windowed <= self.layers or (self.windowed and self.window is None):
            expected = f"at most the {self.layers} layers, 0 without a window"
            raise ValueError(mismatch("windowed", expected, self.windowed))

    # Widths

    @property
    def head_columns(self) -> int:
        """Columns of a head of queries and keys."""
        return self.head_width or self.width // self.heads

    @property
    def value_columns(self) -> int:
        """Columns of a head of values."""
        return self.value_width or self.head_columns

    @property
    def query_width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_columns

    @property
    def output_width(self) -> int:
        """The width of the results of all heads together."""
        return self.heads * self.value_columns

    @property
    def kv_width(self) -> int:
        """The mean width of all key heads together and of all value heads together."""
        return self.kv_heads * (self.head_columns + self.value_columns) // 2

    # Parameters

    @property
    def projection_parameters(self) -> int:
        """Parameters of a block's attention: 4 d^2 for the paper's models."""
        output = self.width * self.output_width
        if self.latent is None:
            return self.width * (self.query_width + 2 * self.kv_width) + output
        latent, unshared = self.latent, self.head_columns - self.latent.rotary
        queries = (
            self.width * self.query_width
            if latent.queries is None
            else latent.queries * (self.width + self.query_width)
        )
        keys = self.width * (latent.keys + latent.rotary)
        keys += latent.keys * self.heads * (unshared + self.value_columns)
        return queries + keys + output

    @property
    def feedforward_parameters(self) -> int:
        """Parameters of a dense feedforward layer: 2 d D, or 3 d D if it is gated."""
        return (2 + self.gated) * self.width * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a block with a dense feedforward layer."""
        return self.projection_parameters + self.feedforward_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        return (2 + self.gated) * self.width * self.experts.hidden if self.experts else 0

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense feedforward layer."""
        return min(self.experts.dense, self.layers) if self.experts else self.layers

    @property
    def shared_parameters(self) -> int:
        """Parameters of a block with experts that all tokens use: attention, router and shared experts."""
        if self.experts is None:
            return 0
        shared = self.experts.shared * self.expert_parameters
        return self.projection_parameters + shared + self.width * self.experts.count

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's weight, and also of the embedding: V d."""
        return self.vocabulary * self.width

    def _parameters(self, experts: int) -> int:
        """Parameters of the blocks, if `experts` experts of each layer count."""
        sparse = self.layers - self.dense_layers
        used = self.shared_parameters + experts * self.expert_parameters
        return self.dense_layers * self.layer_parameters + sparse * used

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token meets in products; the embedding is a lookup (footnote 3)."""
        return self._parameters(self.experts.chosen if self.experts else 0) + self.head_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks, all experts counted."""
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def parameters(self) -> int:
        """All parameters, n_params."""
        return self.block_parameters + (1 if self.tied else 2) * self.head_parameters

    # FLOPs

    def gemm_flops(self, tokens: float, remat: bool = False) -> float:
        """n_F,GEMM of section 1.4: L (24 B d^2 + 18 B F d^2) + 6 B d V.

        remat: 8 FLOPs per parameter and token instead of 6.
        """
        return training_flops(self.matmul_parameters, tokens, remat)

    def keys_per_query(self, length: float) -> float:
        """Keys that a query sees in the mean over positions and layers, under a causal mask."""
        full = length / 2
        if self.window is None or self.window >= length:
            return full
        seen = self.window * (1 - self.window / (2 * length))
        return (self.windowed * seen + (self.layers - self.windowed) * full) / self.layers

    def attention_flops(self, tokens: float, length: float, remat: bool = False) -> float:
        """n_F,ATTN of section 1.4, causal: 6 L B T d for sequences of T tokens; with remat 8 L B T d."""
        check_numbers(tokens=tokens, length=length)
        widths = self.query_width + self.output_width
        return (8 if remat else 6) * self.layers * tokens * self.keys_per_query(length) * widths

    @property
    def balanced_length(self) -> float:
        """The length at which attention has as many FLOPs as all products: T* = d (4 + 3 F) + V / L."""
        return 2 * self.matmul_parameters / (self.layers * (self.query_width + self.output_width))

    def attention_overhead(self, length: float) -> float:
        """FLOPs of attention over FLOPs of the products, T / T* (section 1.4)."""
        check_numbers(length=length)
        return length / self.balanced_length


def training_flops(parameters: float, tokens: float, remat: bool = False) -> float:
    """6 FLOPs per parameter and token (equation 4), 8 if backward recomputes the forward (footnote 3)."""
    check_numbers(parameters=parameters, tokens=tokens)
    return (8 if remat else 6) * parameters * tokens


def training_seconds(flops: float, chips: float, peak: float, mfu: float) -> float:
    """n_F / (K pi MFU) (equation 5).

    peak: FLOP/s of a chip. mfu: the fraction of peak that training reaches.
    """
    check_numbers(flops=flops, chips=chips, peak=peak, mfu=mfu)
    return flops / (chips * peak * mfu)
