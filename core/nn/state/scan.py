"""Recurrences over a state, in plain torch: a chunk of one sequence, or one token of many."""

from __future__ import annotations

import torch

CHUNK = 64
"""Tokens that are computed together."""


def ssd_tokens(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence: S = exp(dt a) S + dt x bᵀ, y = S c. All float32.

    x: [L, H, P]; dt: [L, H]; a: [H]; b, c: [L, H, N]; state: [H, P, N] → y [L, H, P], the state
    after the last token. In chunks: sums within a chunk, and its state from the one before.
    Source: Mamba 2 (arXiv 2405.21060), section 6.
    """
    outputs = []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        steps, keys, queries = dt[part], b[part], c[part]
        values = x[part] * steps[:, :, None]
        total = (steps * a).cumsum(0)
        after = total[:, None] - total[None]
        later = torch.ones(len(total), len(total), dtype=torch.bool, device=x.device).triu(1)
        # Masked before exp, which may overflow there.
        decay = after.masked_fill(later[:, :, None], float("-inf")).exp()
        weights = torch.einsum("ihn,jhn->ijh", queries, keys) * decay
        y = torch.einsum("ijh,jhp->ihp", weights, values)
        y += torch.einsum("ihn,hpn->ihp", queries, state) * total.exp()[:, :, None]
        outputs.append(y)
        keys = keys * (total[-1] - total).exp()[:, :, None]
        state = state * total[-1].exp()[:, None, None] + torch.einsum("jhn,jhp->hpn", keys, values)
    return torch.cat(outputs), state


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of R sequences: as `ssd_tokens`, with R in the place of L and `states`
    [R, H, P, N]."""
    kept = states * (dt * a).exp()[:, :, None, None]
    states = kept + (x * dt[:, :, None])[..., None] * b[:, :, None, :]
    return torch.einsum("rhpn,rhn->rhp", states, c), states


def selective_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of R sequences: S[i, n] = exp(dt[i] a[i, n]) S[i, n] + dt[i] x[i] b[n],
    y = S c. All float32.

    x, dt: [R, I]; a: [I, N]; b, c: [R, N]; states: [R, I, N] → y [R, I], states after it. Source:
    Mamba (arXiv 2312.00752), section 3.
    """
    kept = states * (dt[:, :, None] * a).exp()
    states = kept + (dt * x)[:, :, None] * b[:, None]
    return torch.einsum("rin,rn->ri", states, c), states


def selective_tokens(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence, one after another: x, dt [L, I]; b, c [L, N]; state [I, N] → y
    [L, I], the state after the last."""
    outputs, states = [], state[None]
    for token in range(len(x)):
        at = slice(token, token + 1)
        y, states = selective_step(x[at], dt[at], a, b[at], c[at], states)
        outputs.append(y)
    return torch.cat(outputs), states[0]


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of R sequences: S = exp(decay) S, S += k (beta (v - Sᵀ k))ᵀ, y = Sᵀ q. All
    float32.

    q, k: [R, H, K]; v: [R, H, V]; decay: [R, H], or [R, H, K] for each channel; beta: [R, H];
    states: [R, H, K, V] → y [R, H, V], states after it. Source: gated delta networks (arXiv
    2412.06464).
    """
    kept = decay.exp() if decay.dim() == 3 else decay.exp()[:, :, None]
    states = states * kept[..., None]
    missing = v - torch.einsum("rhkv,rhk->rhv", states, k)
    states = states + k[..., None] * (missing * beta[:, :, None])[:, :, None]
    return torch.einsum("rhkv,rhk->rhv", states, q), states


def delta_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence, one after another: as `delta_step`, with L tokens in the place of R;
    state [H, K, V] → y [L, H, V], the state after the last."""
    outputs, states = [], state[None]
    for token in range(len(q)):
        at = slice(token, token + 1)
        y, states = delta_step(q[at], k[at], v[at], decay[at], beta[at], states)
        outputs.append(y)
    return torch.cat(outputs), states[0]
