"""The mechanisms as slow loops over floats, written from the sources' equations; no tensor, no library of ours.

Each oracle maps ``(q, k, allowed, **options)`` to rows of weights. ``q`` and ``k`` are lists of vectors,
``allowed[i][j]`` says whether query i may attend key j, options have the names of the library's. `OPTION_VALUES`
lists, for every option, values on which mechanism and oracle are compared.
"""

from math import exp, expm1, inf, log, log1p, sqrt, tanh

Vectors = list[list[float]]

OPTION_VALUES = {
    "scale": [None, 0.3, 1.7, -1.0],
    "temperature": [1.0, 0.5, 3.0],
    "bias": [None, -0.7, 1.2],
    "soft_cap": [None, 1.5, 50.0],
    "qk_norm": [False, True],
    "gain": [None, 1.3],
    "epsilon": [1e-5, 1e-8, 1e-2],
    "s": [1.0, 0.43, 2.0],
    "norm_order": [2.0, 1.0, 0.5, 3.5],
    "per_root_n": [False, True],
}


# --- logits ---


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def layer_norm(x, epsilon=1e-5, gain=None):
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    return [(a - mean) / sqrt(variance + epsilon) * (1.0 if gain is None else gain) for a in x]


def cosine_similarity(x, y):
    lengths = sqrt(dot(x, x)) * sqrt(dot(y, y))
    return 0.0 if lengths == 0 else dot(x, y) / lengths


def minus_squared_distance(x, y):
    return -sum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def logits_of(similarity, q, k, *, scale=None, temperature=1.0, bias=None, soft_cap=None, qk_norm=False, **norm):
    if qk_norm:
        q, k = [layer_norm(x, **norm) for x in q], [layer_norm(x, **norm) for x in k]
    c = 1 / sqrt(len(q[0])) if scale is None else scale
    rows = []
    for i, x in enumerate(q):
        row = []
        for j, y in enumerate(k):
            z = c * similarity(x, y) / temperature
            if soft_cap is not None:
                z = soft_cap * tanh(z / soft_cap)
            if bias is not None:
                z += bias[i][j] if isinstance(bias, list) else bias
            row.append(z)
        rows.append(row)
    return rows


# --- from logits to weights, one row at a time; `z` holds the allowed logits only ---


def softmax_row(z):
    top = max(z)
    total = sum(exp(a - top) for a in z)
    return [exp(a - top) / total for a in z]


def sigmoid_row(z, bias):
    b = -log(len(z)) if bias is None else 0.0  # a given bias is in the logits already
    return [1 / (1 + exp(-(a + b))) if a + b > 0 else exp(a + b) / (1 + exp(a + b)) for a in z]


def softpick_row(z, epsilon):
    top = max(0.0, *z)  # e^z − 1 over e^top, so that e^z cannot overflow
    lifted = [expm1(a) * exp(-top) if a < 1 else exp(a - top) - exp(-top) for a in z]
    total = sum(abs(a) for a in lifted) + epsilon * exp(-top)
    return [0.0 if total == 0 else max(a, 0.0) / total for a in lifted]


def p_softmax_row(z, norm_order, per_root_n):
    top = max(z)
    norm = sum(exp(norm_order * (a - top)) for a in z) ** (1 / norm_order)
    return [exp(a - top) / norm / (sqrt(len(z)) if per_root_n else 1.0) for a in z]


def by_rows(rows, allowed, weigh):
    """Apply `weigh` to the allowed entries of each row, 0 elsewhere."""
    result = []
    for row, may in zip(rows, allowed, strict=True):
        kept = [a for a, yes in zip(row, may, strict=True) if yes]
        weights = iter(weigh(kept) if kept else [])
        result.append([next(weights) if yes else 0.0 for yes in may])
    return result


def softmax(q, k, allowed, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, softmax_row)


def cosine(q, k, allowed, *, scale=10.0, **options):
    return by_rows(logits_of(cosine_similarity, q, k, scale=scale, **options), allowed, softmax_row)


def l2(q, k, allowed, **options):
    return by_rows(logits_of(minus_squared_distance, q, k, **options), allowed, softmax_row)


def qk_layernorm(q, k, allowed, *, qk_norm=True, gain=None, epsilon=1e-5, **options):
    return softmax(q, k, allowed, qk_norm=qk_norm, gain=gain, epsilon=epsilon, **options)


def soft_cap(q, k, allowed, *, soft_cap=50.0, **options):
    return softmax(q, k, allowed, soft_cap=soft_cap, **options)


def ssmax(q, k, allowed, *, s=1.0, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, lambda z: softmax_row([s * log(len(z)) * a for a in z]))


def sigmoid(q, k, allowed, *, bias=None, **options):
    return by_rows(logits_of(dot, q, k, bias=bias, **options), allowed, lambda z: sigmoid_row(z, bias))


def relu_pointwise(q, k, allowed, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, lambda z: [max(a, 0.0) / len(z) for a in z])


def squared_relu_pointwise(q, k, allowed, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, lambda z: [max(a, 0.0) ** 2 / len(z) for a in z])


def softpick(q, k, allowed, *, epsilon=1e-8, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, lambda z: softpick_row(z, epsilon))


def p_softmax(q, k, allowed, *, norm_order=2.0, per_root_n=False, **options):
    return by_rows(logits_of(dot, q, k, **options), allowed, lambda z: p_softmax_row(z, norm_order, per_root_n))


# --- kernels ---


def kernel_from_logs(log_feature, q, k, allowed):
    """φ(q)·φ(k) over its row sum, from log φ, since φ(−1e30) = exp(−1e30) is no float."""
    logs_q, logs_k = [[log_feature(a) for a in x] for x in q], [[log_feature(a) for a in y] for y in k]
    result = []
    for x, may in zip(logs_q, allowed, strict=True):
        seen = [a for y, yes in zip(logs_k, may, strict=True) if yes for a in y]
        top_q, top_k = max(x), max(seen, default=0.0)
        products = [
            sum(exp(a - top_q) * exp(b - top_k) for a, b in zip(x, y, strict=True) if -inf not in (a, b))
            if yes
            else 0.0
            for y, yes in zip(logs_k, may, strict=True)
        ]
        total = sum(products)
        result.append([0.0 if total == 0 else product / total for product in products])
    return result


def relu_kernel(q, k, allowed):
    return kernel_from_logs(lambda a: log(a) if a > 0 else -inf, q, k, allowed)


def elu_kernel(q, k, allowed):
    return kernel_from_logs(lambda a: log1p(a) if a > 0 else a, q, k, allowed)


ORACLES = {
    "softmax": softmax,
    "relu_kernel": relu_kernel,
    "elu_kernel": elu_kernel,
    "qk_layernorm": qk_layernorm,
    "sigmoid": sigmoid,
    "relu_pointwise": relu_pointwise,
    "squared_relu_pointwise": squared_relu_pointwise,
    "cosine": cosine,
    "l2": l2,
    "soft_cap": soft_cap,
    "ssmax": ssmax,
    "softpick": softpick,
    "p_softmax": p_softmax,
}
