"""What one chip does for one layer and one microbatch: products, attention, memory traffic, kept
activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from monoidreduce.theory.plan.transformer import Model

__all__ = ["RECOMPUTE", "Layer", "Product"]

# What backward runs again: nothing; the core of attention (Megatron's selective); every second product and
# all that is cheap (torchtitan's selective); the whole layer from its input.
RECOMPUTE = ("none", "attention", "alternate", "full")

BF16 = 2
# Bytes per element of the scores, where a kernel stores them: forward writes and reads scores, softmax and
# dropout with its mask; backward reads these, and writes and reads three gradients. Kept: softmax, dropout
# and mask.
SCORES_FORWARD, SCORES_BACKWARD, SCORES_KEPT = 13, 19, 5
# Backward of a fused attention kernel has five products where forward has two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Product:
    """`count` matrix products [rows, inner] [inner, columns]."""

    rows: float
    inner: float
    columns: float
    count: float = 1

    @property
    def flops(self) -> float:
        return 2 * self.count * self.rows * self.inner * self.columns

    @property
    def weights(self) -> float:
        """Elements of the weight, [inner, columns]."""
        return self.count * self.inner * self.columns

    @property
    def inputs(self) -> float:
        """Elements of [rows, inner]."""
        return self.count * self.rows * self.inner

    @property
    def outputs(self) -> float:
        """Elements of [rows, columns]."""
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class Layer:
    """A layer's share of one chip, for `tokens` tokens of sequences of `length`.

    Attributes:
        model: whose layer it is.
        sparse: whether its feedforward layer has experts.
        tokens: of a microbatch, on this chip; chips of one tp group share them.
        length: tokens of a whole sequence.
        tp, experts: chips that share widths, and experts.
        sequence_parallel: norms and residuals are shared by the chips of a tp group too.
        stored_scores: attention stores its scores.
        dropout: masks of dropout are kept after attention and feedforward layer.
    """

    model: Model
    sparse: bool
    tokens: float
    length: float
    tp: int
    experts: int
    sequence_parallel: bool
    stored_scores: bool
    dropout: bool

    # Products

    @property
    def products(self) -> list[Product]:
        """Products with weights that all tokens take part in, in forward."""
        return [*self.projections(), *self._feedforward()]

    def projections(self) -> Iterator[Product]:
        """Products of attention with weights."""
        model, tokens, tp = self.model, self.tokens, self.tp
        output = Product(tokens, model.output_width / tp, model.width)
        if model.latent is None:
            keys = 2 * model.kv_width / min(tp, model.kv_heads)
            yield Product(tokens, model.width, model.query_width / tp + keys)
            yield output
            return
        latent = model.latent
        queries = model.query_width / tp
        if latent.queries is None:
            yield Product(tokens, model.width, queries)
        else:
            yield Product(tokens, model.width, latent.queries)
            yield Product(tokens, latent.queries, queries)
        unshared = model.head_columns - latent.rotary
        yield Product(tokens, model.width, latent.keys + latent.rotary)
        yield Product(tokens, latent.keys, model.heads * (unshared + model.value_columns) / tp)
        yield output

    def _feedforward(self) -> Iterator[Product]:
        model, gates = self.model, 1 + self.model.gated
        if not self.sparse or model.experts is None:
            yield Product(self.tokens, model.width, gates * model.hidden / self.tp)
            yield Product(self.tokens, model.hidden / self.tp, model.width)
            return
        experts = model.experts
        yield Product(self.tokens, model.width, experts.count)
        if experts.shared:
            hidden = experts.shared * experts.hidden / self.tp
            yield Product(self.tokens, model.width, gates * hidden)
            yield Product(self.tokens, hidden, model.width)

    @property
    def local_experts(self) -> float:
        """Routed experts of this chip."""
        return self.model.experts.count / self.experts if self.sparse and self.model.experts else 0

    @property
    def routed_products(self) -> list[Product]:
        """Products of routed experts, each for the tokens that chose it, in forward."""
        model, local = self.model, self.local_experts
        if not local or model.experts is None:
            return []
        rows, hidden = self.routed / local, model.experts.hidden / self.tp
        return [
            Product(rows, model.width, (1 + model.gated) * hidden, local),
            Product(rows, hidden, model.width, local),
        ]

    @property
    def parameters(self) -> float:
        """Parameters of this chip's products."""
        return sum(product.weights for product in [*self.products, *self.routed_products])

    @property
    def expert_parameters(self) -> float:
        """Parameters of this chip's routed experts, which other chips along the expert axis do not have."""
        return self.local_experts * self.model.expert_parameters / self.tp

    # Attention

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of attention: under a causal mask, or of all scores if they are stored."""
        model = self.model
        keys = self.length if self.stored_scores else model.keys_per_query(self.length)
        return 2 * self.tokens * keys * (model.query_width + model.output_width) / self.tp

    @property
    def scores(self) -> float:
        """Number of scores that are stored."""
        return self.tokens * self.length * self.model.heads / self.tp if self.stored_scores else 0

    # Traffic of operations that are bound by memory

    @property
    def _whole(self) -> float:
        """Rows of norms and residuals on this chip."""
        return self.tokens / (self.tp if self.sequence_parallel else 1)

    @property
    def routed(self) -> float:
        """Rows of routed experts: tokens, once for each expert that a token chose."""
        return self.tokens * self.model.experts.chosen if self.sparse and self.model.experts else 0

    @property
    def _hidden(self) -> float:
        """Hidden values of the feedforward layer that all tokens take part in, without a gate's."""
        model = self.model
        if not self.sparse or model.experts is None:
            return self.tokens * model.hidden / self.tp
        return self.tokens * model.experts.shared * model.experts.hidden / self.tp

    @property
    def _routed_hidden(self) -> float:
        return self.routed * self.model.experts.hidden / self.tp if self.model.experts else 0

    @property
    def hidden_rows(self) -> float:
        """Elements of the feedforward layer's hidden values, without a gate's."""
        return self._hidden + self._routed_hidden

    def traffic(self, hidden: bool) -> tuple[float, float]:
        """Bytes that norms, residuals, rotations and activations move, forward and backward.

        hidden: also those of the feedforward layer's activation, which some kernels fuse.
        """
        model = self.model
        norms = 1 if model.parallel else 2
        rows = self._whole * model.width
        rotated = self.tokens * (model.query_width / self.tp + model.kv_width / min(self.tp, model.kv_heads))
        gated = self._hidden if hidden else 0.0
        mask = 0.5 if self.dropout else 0.0  # of an element of two bytes
        forward = (2 * norms + 2 * (3 + mask)) * rows + 2 * rotated + (2 + model.gated) * gated
        backward = (3 * norms + 2 * (3 + mask)) * rows + 2 * rotated + (3 + 2 * model.gated) * gated
        return (
            BF16 * forward + SCORES_FORWARD * self.scores,
            BF16 * backward + SCORES_BACKWARD * self.scores,
        )

    @property
    def routed_traffic(self) -> tuple[float, float]:
        """Bytes that permutations of tokens and activations of routed experts move, forward and backward.

        Tokens are put in order of their chips, and there in order of experts; results go the same way back.
        """
        model = self.model
        orders = 2 if self.experts > 1 and self.local_experts > 1 else 1
        moved = 2 * 2 * orders * self.routed * model.width / self.tp
        forward = moved + (2 + model.gated) * self._routed_hidden
        return BF16 * forward, BF16 * (moved + (3 + 2 * model.gated) * self._routed_hidden)

    # Activations

    def kept(self, recompute: str) -> float:
        """Bytes of activations that forward keeps for backward."""
        model, rows = self.model, self._whole * self.model.width
        if recompute == "full":
            return BF16 * rows
        queries, outputs = (self.tokens * w / self.tp for w in (model.query_width, model.output_width))
        keys = self.tokens * model.kv_width / min(self.tp, model.kv_heads)
        if recompute == "alternate":
            # The layer's input, attention's output; of the products in order, the first, third, fifth, ...
            return BF16 * (rows + outputs + queries + keys + self.hidden_rows + rows)
        norms = 1 if model.parallel else 2
        # Inputs of norms and of what follows them; queries, keys, values, and the output; hidden values.
        elements = 2 * norms * rows + queries + 2 * keys + outputs
        elements += (2 + model.gated) * self.hidden_rows
        masks = 2 * rows if self.dropout else 0
        scores = SCORES_KEPT * self.scores if recompute == "none" else 0
        return BF16 * elements + masks + scores

    @property
    def working(self) -> float:
        """Temporary bytes of a layer's backward pass, beyond the activations that the forward pass saved.

        These are the gradients of the hidden values. With tensor parallelism there are also the gathered
        input, the gathered output gradient, and the results of both products before ranks add them up.
        """
        gathered = 4 * self.tokens * self.model.width if self.tp > 1 else 0
        return BF16 * ((2 + self.model.gated) * self.hidden_rows + gathered)

    def kept_by_folds(self) -> float:
        """Bytes that forward keeps if neither scores nor hidden values are stored, as by this library."""
        model, rows = self.model, self._whole * self.model.width
        keys = self.tokens * model.kv_width / min(self.tp, model.kv_heads)
        heads = self.tokens * (model.query_width + model.output_width) / self.tp + 2 * keys
        return BF16 * (4 * rows + heads)
