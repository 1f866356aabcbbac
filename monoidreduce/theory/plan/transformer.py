"""FLOPs and time of training a transformer (paper, section 1.4), and the sizes of known models."""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.plan._positive import check_counts, check_numbers

__all__ = ["MODELS", "Model", "find_model", "training_flops", "training_seconds"]


@dataclass(frozen=True)
class Model:
    """A transformer: blocks of attention and a feedforward layer.

    With `kv_heads == heads`, as in the paper's models, the formulas below are those of section 1.4. Layer
    norms and biases are left out, as in the paper (footnote 3).

    Attributes:
        layers, width, hidden, vocabulary: the paper's L, d, D and V.
        heads, kv_heads: number of query heads and of key/value heads; a head has width / heads columns.
        gated: the feedforward layer has three matrices instead of two.
        tied: embedding and head share one weight.

    Raises TypeError or ValueError unless sizes are ints of 1 or more, heads divides width, and kv_heads
    divides heads.
    """

    layers: int
    width: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        check_counts(
            layers=self.layers,
            width=self.width,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            heads=self.heads,
            kv_heads=self.kv_heads,
        )
        if self.width % self.heads:
            raise ValueError(mismatch("heads", f"a divisor of width {self.width}", self.heads))
        if self.heads % self.kv_heads:
            raise ValueError(mismatch("kv_heads", f"a divisor of heads {self.heads}", self.kv_heads))

    @property
    def kv_width(self) -> int:
        """The width of all key heads together."""
        return self.width * self.kv_heads // self.heads

    @property
    def projection_parameters(self) -> int:
        """Parameters of a block's attention: 4 d^2 if kv_heads == heads."""
        return 2 * self.width * (self.width + self.kv_width)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a block: attention plus 2 d D, or 3 d D with a gated feedforward layer."""
        return self.projection_parameters + (2 + self.gated) * self.width * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's weight, and also of the embedding: V d."""
        return self.vocabulary * self.width

    @property
    def matmul_parameters(self) -> int:
        """Parameters that take part in matrix products; the embedding is a lookup (footnote 3)."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def parameters(self) -> int:
        """All parameters, n_params."""
        return self.matmul_parameters + (0 if self.tied else self.head_parameters)

    def gemm_flops(self, tokens: float, remat: bool = False) -> float:
        """n_F,GEMM of section 1.4: L (24 B d^2 + 18 B F d^2) + 6 B d V.

        remat: 8 FLOPs per parameter and token instead of 6.
        """
        return training_flops(self.matmul_parameters, tokens, remat)

    def attention_flops(self, tokens: float, length: float, remat: bool = False) -> float:
        """n_F,ATTN of section 1.4, causal: 6 L B T d for sequences of T tokens; with remat 8 L B T d."""
        check_numbers(tokens=tokens, length=length)
        return (8 if remat else 6) * self.layers * tokens * length * self.width

    @property
    def balanced_length(self) -> float:
        """The length at which attention has as many FLOPs as all products: T* = d (4 + 3 F) + V / L."""
        return self.matmul_parameters / (self.layers * self.width)

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


# "The Llama 3 Herd of Models", arXiv 2407.21783, Table 3; vocabularies as published with the weights.
MODELS: dict[str, Model] = {
    "llama3-8b": Model(32, 4096, 14336, 128256, heads=32, kv_heads=8),
    "llama3-70b": Model(80, 8192, 28672, 128256, heads=64, kv_heads=8),
    "llama3-405b": Model(126, 16384, 53248, 128256, heads=128, kv_heads=8),
}


def find_model(name: str) -> Model:
    """The model of this name. Raises ValueError for a name that is not in `MODELS`."""
    check_choice("model", name, tuple(MODELS))
    return MODELS[name]
