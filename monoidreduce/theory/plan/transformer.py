"""FLOPs and time of training a transformer (paper, section 1.4), and the sizes of known models."""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.plan._positive import check_counts, check_numbers

__all__ = ["MODELS", "Model", "find_model", "training_flops", "training_seconds"]


@dataclass(frozen=True)
class Model:
    """A transformer of blocks of attention and a feedforward layer.

    The paper's models have `kv_heads == heads`: then the formulas below are the formulas of section 1.4.
    Layer norms and biases are left out, as in the paper (footnote 3).

    Attributes:
        layers, width, hidden, vocabulary: the paper's L, d, D and V.
        heads, kv_heads: of width / heads columns each; keys and values have `kv_heads` of them.
        gated: the feedforward layer has three matrices, not two.
        tied: the embedding is the head's weight.

    Raises TypeError or ValueError unless sizes are ints of 1 or more, heads divide width and kv_heads heads.
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
        """The width of all heads of keys."""
        return self.width * self.kv_heads // self.heads

    @property
    def projection_parameters(self) -> int:
        """Of a block's attention: 4 d^2 where keys have as many heads as queries."""
        return 2 * self.width * (self.width + self.kv_width)

    @property
    def layer_parameters(self) -> int:
        """Of a block: with a gated feedforward layer 3 d D more."""
        return self.projection_parameters + (2 + self.gated) * self.width * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the weight that makes logits, and of the embedding: V d."""
        return self.vocabulary * self.width

    @property
    def matmul_parameters(self) -> int:
        """Those in matrix products: the embedding is not one (footnote 3)."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def parameters(self) -> int:
        """All of them, n_params."""
        return self.matmul_parameters + (0 if self.tied else self.head_parameters)

    def gemm_flops(self, tokens: float, remat: bool = False) -> float:
        """n_F,GEMM of section 1.4: L (24 B d^2 + 18 B F d^2) + 6 B d V.

        remat: 8 FLOPs a parameter and token, not 6.
        """
        return training_flops(self.matmul_parameters, tokens, remat)

    def attention_flops(self, tokens: float, length: float, remat: bool = False) -> float:
        """n_F,ATTN of section 1.4, causal: 6 L B T d for sequences of T tokens; with remat 8."""
        check_numbers(tokens=tokens, length=length)
        return (8 if remat else 6) * self.layers * tokens * length * self.width

    @property
    def balanced_length(self) -> float:
        """The length at which attention computes as much as all products: T* = d (4 + 3 F) + V / L."""
        return self.matmul_parameters / (self.layers * self.width)

    def attention_overhead(self, length: float) -> float:
        """What attention adds to the FLOPs of the products, T / T* (section 1.4)."""
        check_numbers(length=length)
        return length / self.balanced_length


def training_flops(parameters: float, tokens: float, remat: bool = False) -> float:
    """6 FLOPs a parameter and token (equation 4), 8 if the forward runs again (footnote 3)."""
    check_numbers(parameters=parameters, tokens=tokens)
    return (8 if remat else 6) * parameters * tokens


def training_seconds(flops: float, chips: float, peak: float, mfu: float) -> float:
    """n_F / (K pi MFU) (equation 5). peak: FLOP/s of a chip; mfu: the share of it that training reaches."""
    check_numbers(flops=flops, chips=chips, peak=peak, mfu=mfu)
    return flops / (chips * peak * mfu)


# "The Llama 3 Herd of Models", arXiv 2407.21783, Table 3; vocabularies as published with the weights.
MODELS: dict[str, Model] = {
    "llama3-8b": Model(32, 4096, 14336, 128256, heads=32, kv_heads=8),
    "llama3-70b": Model(80, 8192, 28672, 128256, heads=64, kv_heads=8),
    "llama3-405b": Model(126, 16384, 53248, 128256, heads=128, kv_heads=8),
}


def find_model(name: str) -> Model:
    """The model of that name. Raises ValueError for a name that is not in `MODELS`."""
    check_choice("model", name, tuple(MODELS))
    return MODELS[name]
