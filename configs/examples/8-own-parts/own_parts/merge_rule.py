"""Merge rule `agreeing`: contributions count by how far they point where all together point."""

import math


def agreeing(gram, weights):
    """Return a coefficient for each contribution to one tensor.

    c_m = w_m a_m / sum(w a), a_m = max(0, cos(v_m, mean)); the weighted mean where none agrees.

    Args:
        gram: Inner products of all pairs of contributions.
        weights: Of the contributions, in tokens, at least 0.
    """
    total = sum(weights) or 1.0
    shares = [weight / total for weight in weights]
    with_mean = [sum(map(math.prod, zip(row, shares, strict=True))) for row in gram]
    lengths = [math.sqrt(gram[m][m]) or 1.0 for m in range(len(weights))]
    agreed = [
        weight * max(0.0, product / length)
        for weight, product, length in zip(weights, with_mean, lengths, strict=True)
    ]
    return [each / sum(agreed) for each in agreed] if sum(agreed) > 0 else shares
