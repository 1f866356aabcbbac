from typing import Any

from torch import Tensor

def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    *,
    counter: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    threads: int,
    stream: int,
) -> None: ...
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dbias: Tensor | None,
    *,
    scratch: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: Tensor,
    reduced: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    *,
    scratch: Tensor | None,
    mean: bool,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    threads: int,
    stream: int,
) -> None: ...
def cross_entropy_backward(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    *,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    workspace: int,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def distillation_forward(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    loss: Tensor,
    reduced: Tensor | None,
    stats: Tensor,
    *,
    scratch: Tensor | None,
    mean: bool,
    kind: int,
    temperature: float,
    threads: int,
    stream: int,
) -> None: ...
def distillation_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dteacher_x: Tensor | None,
    dteacher_weight: Tensor | None,
    *,
    kind: int,
    temperature: float,
    workspace: int,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    out: Tensor,
    *,
    activation: int,
    threads: int,
    stream: int,
) -> None: ...
def mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    dx: Tensor | None,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dbias1: Tensor | None,
    *,
    activation: int,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def logsumexp_forward(
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    *,
    scratch: Tensor | None,
    scale: float,
    threads: int,
    stream: int,
) -> None: ...
def logsumexp_backward(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    da: Tensor | None,
    db: Tensor | None,
    *,
    scale: float,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def build_info() -> dict[str, Any]: ...
def attention_forward_tier(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float,
    left: int,
    right: int,
) -> tuple[str, str, int, bool]: ...
def attention_backward_tier(
    grad_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[str, str, int, bool]: ...
def mlp_forward_tier(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None
) -> tuple[str, str, int, bool]: ...
def mlp_backward_tier(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, *, deterministic: bool
) -> tuple[str, str, int, bool]: ...
def cross_entropy_forward_tier(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, logit_scale: float
) -> tuple[str, str, int, bool]: ...
def cross_entropy_backward_tier(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    logit_scale: float,
    workspace: int,
    deterministic: bool,
) -> tuple[str, str, int, bool]: ...
def cross_entropy_local_gradient(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out: Tensor,
    sums: Tensor | None,
    *,
    first_class: int,
    classes: int,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    threads: int,
    stream: int,
) -> None: ...
def distillation_forward_tier(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, *, temperature: float
) -> tuple[str, str, int, bool]: ...
def distillation_backward_tier(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float,
    workspace: int,
    deterministic: bool,
) -> tuple[str, str, int, bool]: ...
def distillation_local_gradient(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    out: Tensor,
    teacher_out: Tensor | None,
    *,
    kind: int,
    temperature: float,
    threads: int,
    stream: int,
) -> None: ...
def logsumexp_forward_tier(a: Tensor, b: Tensor, *, scale: float) -> tuple[str, str, int, bool]: ...
def logsumexp_backward_tier(
    a: Tensor, b: Tensor, *, scale: float, workspace: int, deterministic: bool
) -> tuple[str, str, int, bool]: ...
def logsumexp_local_gradient(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out: Tensor,
    *,
    scale: float,
    threads: int,
    stream: int,
) -> None: ...
def cpu_isa() -> str: ...
def cpu_isas() -> list[str]: ...
def cpu_tiles(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    payload: Tensor | None,
    *,
    bias_gradient: bool,
    threads: int,
) -> tuple[tuple[int, int], tuple[int, int]]: ...
def path_counts() -> dict[str, int]: ...
