from typing import Any, NamedTuple

from torch import Tensor

class Field(NamedTuple):
    name: str
    kind: str
    type: str
    optional: bool
    shape: tuple[str, ...]
    choices: tuple[str, ...]
    default: Any

CALLS: dict[str, tuple[Field, ...]]

def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scratch: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    threads: int,
    stream: int,
    deterministic: bool = False,
    tf32: bool = False,
) -> None: ...
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dbias: Tensor | None,
    scratch: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    whole: bool,
    threads: int,
    stream: int,
    deterministic: bool = False,
    tf32: bool = False,
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
    scratch: Tensor | None,
    kept: Tensor | None,
    kept_upstream: Tensor | None,
    order: Tensor | None,
    gathered: Tensor | None,
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
def scale_rows(
    x: Tensor,
    factor: Tensor | None,
    out: Tensor,
    order: Tensor | None,
    scatters: bool,
    threads: int,
    stream: int,
) -> None: ...
def order_rows(
    target: Tensor | None,
    mask: Tensor | None,
    order: Tensor,
    ignore_index: int,
    threads: int,
    stream: int,
) -> None: ...
def rows_product(
    a: Tensor,
    b: Tensor,
    factor: Tensor | None,
    out: Tensor,
    order: Tensor | None,
    threads: int,
    stream: int,
) -> None: ...
def columns_product(
    a: Tensor,
    b: Tensor,
    scale: Tensor | None,
    out: Tensor,
    order: Tensor | None,
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
    scratch: Tensor | None,
    kept: Tensor | None,
    teacher_kept: Tensor | None,
    kept_upstream: Tensor | None,
    order: Tensor | None,
    gathered: Tensor | None,
    teacher_gathered: Tensor | None,
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
    scratch: Tensor | None,
    activation: int,
    threads: int,
    stream: int,
    tf32: bool = False,
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
    activation: int,
    deterministic: bool,
    threads: int,
    stream: int,
    tf32: bool = False,
) -> None: ...
def mlp_hidden(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    out: Tensor,
    activation: int,
    threads: int,
    stream: int,
) -> None: ...
def mlp_local_gradient(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    out: Tensor,
    hidden: Tensor,
    sums: Tensor | None,
    activation: int,
    threads: int,
    stream: int,
) -> None: ...
def logsumexp_forward(
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
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
    scale: float,
    deterministic: bool,
    threads: int,
    stream: int,
) -> None: ...
def build_info() -> dict[str, Any]: ...
def attention_forward_tier(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    lse_low: Tensor | None = None,
    scratch: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    left: int = -1,
    right: int = -1,
    threads: int = 1,
    stream: int = 0,
    deterministic: bool = False,
    tf32: bool = False,
) -> tuple[str, str, int, bool, tuple[int, int]]: ...
def attention_backward_tier(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    lse_low: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    scratch: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    left: int = -1,
    right: int = -1,
    whole: bool = True,
    threads: int = 1,
    stream: int = 0,
    deterministic: bool = False,
    tf32: bool = False,
) -> tuple[str, str, int, bool, tuple[int, int]]: ...
def mlp_forward_tier(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    workspace: int,
    tf32: bool,
    deterministic: bool,
) -> tuple[str, str, int, bool, tuple[int, int]]: ...

mlp_backward_tier = mlp_forward_tier

def cross_entropy_forward_tier(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    logit_scale: float,
) -> tuple[str, str, int, bool]: ...
def cross_entropy_backward_tier(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    order: Tensor | None,
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
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    kept: Tensor | None,
    temperature: float,
) -> tuple[str, str, int, bool]: ...
def distillation_backward_tier(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
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
    order: Tensor | None,
    kind: int,
    temperature: float,
    threads: int,
    stream: int,
) -> None: ...
def can_keep(device: int, width: int, other_width: int, scale: float, deterministic: bool) -> bool: ...
def logsumexp_forward_tier(a: Tensor, b: Tensor, scale: float) -> tuple[str, str, int, bool]: ...
def logsumexp_backward_tier(
    a: Tensor, b: Tensor, scale: float, workspace: int, deterministic: bool
) -> tuple[str, str, int, bool]: ...
def logsumexp_local_gradient(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out: Tensor,
    scale: float,
    threads: int,
    stream: int,
) -> None: ...
def cpu_isa() -> str: ...
def cpu_isa_of(t: Tensor) -> str: ...
def cpu_isas() -> list[str]: ...
def cpu_tiles(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    payload: Tensor | None,
    bias_gradient: bool,
    threads: int,
) -> tuple[tuple[int, int], tuple[int, int]]: ...
def path_counts() -> dict[str, int]: ...
