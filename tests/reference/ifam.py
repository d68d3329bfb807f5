"""iFAM the slow and obvious way, one image and one token at a time, on timm's own modules (torch
and timm only)."""

import torch
from torch import Tensor


def features(vit, image: Tensor) -> Tensor:
    """Patch tokens after the final norm, [N, D]."""
    return vit.forward_features(image[None])[0, vit.num_prefix_tokens :]


def maps(z: Tensor, prototypes: Tensor, noise: Tensor | None = None) -> Tensor:
    """[K + 1, N]: each patch by itself."""
    columns = []
    for n, token in enumerate(z):
        logits = torch.stack([-((token - p) ** 2).sum() for p in prototypes])
        columns.append(torch.softmax(logits if noise is None else logits + noise[:, n], dim=0))
    return torch.stack(columns, dim=1)


def votes(
    a: Tensor, z: Tensor, weight: Tensor, bias: Tensor, classifier: Tensor, joint: bool = True
) -> tuple[Tensor, Tensor]:
    """Modulated embeddings [D, K + 1] and votes [C, K]."""
    v = torch.stack(
        [sum(a[k, n] * z[n] for n in range(len(z))) / len(z) for k in range(len(a))], dim=1
    )
    if joint:
        v = (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()
    else:
        v = torch.stack([(c - c.mean()) / (c.var(correction=0) + 1e-5).sqrt() for c in v.T], dim=1)
    v = v * weight + bias
    return v, torch.stack([classifier @ v[:, k] for k in range(v.shape[1] - 1)], dim=1)


def selected(y: Tensor) -> Tensor:
    """[N] bool: the winner is a part."""
    return torch.tensor([bool(column.argmax() < len(column) - 1) for column in y.T])


def embed(vit, image: Tensor) -> Tensor:
    return vit.norm_pre(vit._pos_embed(vit.patch_embed(image[None])))


def answer(vit, fc_norm, head, tokens: Tensor) -> Tensor:
    """Logits [C] of final tokens [1, T, D]."""
    return head(fc_norm(vit.norm(tokens)[0, 0]))


def on_selected(vit, fc_norm, head, image: Tensor, mask: Tensor) -> Tensor:
    """Stage 2 by leaving tokens out: timm's own blocks on the rest."""
    h = embed(vit, image)
    keep = torch.cat([torch.ones(vit.num_prefix_tokens, dtype=torch.bool), mask.flatten()])
    h = h[:, keep]
    for block in vit.blocks:
        h = block(h)
    return answer(vit, fc_norm, head, h)


def heads(block, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [H, T, dh] of rows h [1, T, D]."""
    attention = block.attn
    q, k, v = (
        attention.qkv(block.norm1(h))[0]
        .unflatten(-1, (3, attention.num_heads, attention.head_dim))
        .permute(1, 2, 0, 3)
    )
    return attention.q_norm(q), attention.k_norm(k), v


def close(block, h: Tensor, o: Tensor) -> Tensor:
    """Rows h [1, R, D] and head outputs o [H, R, dh] -> the block's output."""
    h = h + block.ls1(block.attn.proj(o.transpose(0, 1).flatten(1)[None]))
    return h + block.ls2(block.mlp(block.norm2(h)))


def relaxed(vit, fc_norm, head, image: Tensor, s: Tensor) -> Tensor:
    """Stage 2 with real weights s [N] of patches: a_ij = s_j e^{q_i.k_j} / sum_l s_l
    e^{q_i.k_l}."""
    h = embed(vit, image)
    weight = torch.cat([torch.ones(vit.num_prefix_tokens, dtype=s.dtype), s])
    for block in vit.blocks:
        q, k, v = heads(block, h)
        a = torch.exp(q @ k.transpose(1, 2) * block.attn.scale) * weight
        h = close(block, h, a / a.sum(dim=-1, keepdim=True) @ v)
    return answer(vit, fc_norm, head, h)


def caap(
    vit,
    fc_norm,
    head,
    image: Tensor,
    mask: Tensor,
    blank: Tensor,
    blank_mask: Tensor,
    sets: list[list[int]],
) -> Tensor:
    """CAAP with the source's tail, one set of patches at a time: the class token reads the blank's
    keys, and the source's at S(i), each only where its own picture's mask lets it. Logits [n,
    C]."""
    prefix = vit.num_prefix_tokens
    seen = [
        torch.cat([torch.ones(prefix, dtype=torch.bool), m.flatten()]) for m in (mask, blank_mask)
    ]
    runs = []
    for picture, visible in zip((image, blank), seen, strict=True):
        h, kept = embed(vit, picture), []
        for block in vit.blocks:
            q, k, v = heads(block, h)
            kept.append((h, k, v))
            a = (
                (q @ k.transpose(1, 2) * block.attn.scale)
                .masked_fill(~visible, -torch.inf)
                .softmax(dim=-1)
            )
            h = close(block, h, a @ v)
        runs.append(kept)
    found = []
    for chosen in sets:
        donor = torch.zeros(len(seen[0]), dtype=torch.bool)
        donor[[prefix + i for i in chosen]] = True
        z = runs[1][0][0][:, :1]
        for block, (_, k1, v1), (_, k0, v0) in zip(vit.blocks, *runs, strict=True):
            q, k, v = heads(block, z)
            frozen = ~donor
            frozen[0] = False
            keys = torch.cat([k, k0[:, frozen & seen[1]], k1[:, donor & seen[0]]], dim=1)
            values = torch.cat([v, v0[:, frozen & seen[1]], v1[:, donor & seen[0]]], dim=1)
            z = close(
                block, z, (q @ keys.transpose(1, 2) * block.attn.scale).softmax(dim=-1) @ values
            )
        found.append(answer(vit, fc_norm, head, z))
    return torch.stack(found)


def presence(a: Tensor) -> Tensor:
    """A [B, K + 1, h, w]: strongest 3 x 3 mean of every part anywhere."""
    batch, channels, high, wide = a.shape
    best = [
        max(
            a[b, k, i : i + 3, j : j + 3].mean()
            for b in range(batch)
            for i in range(high - 2)
            for j in range(wide - 2)
        )
        for k in range(channels - 1)
    ]
    return 1 - sum(best) / len(best)


def background(a: Tensor) -> Tensor:
    _, _, high, wide = a.shape
    total = 0
    for image in a:
        values = []
        for i in range(high - 2):
            for j in range(wide - 2):
                u, v = i / (high - 3), j / (wide - 3)
                values.append(
                    (2 * (u - 0.5) ** 2 + 2 * (v - 0.5) ** 2)
                    * image[-1, i : i + 3, j : j + 3].mean()
                )
        total = total - torch.log(max(values))
    return total / len(a)


def total_variation(a: Tensor) -> Tensor:
    batch, channels, high, wide = a.shape
    total = 0
    for b in range(batch):
        for k in range(channels):
            for i in range(high):
                for j in range(wide):
                    total = total + (abs(a[b, k, i + 1, j] - a[b, k, i, j]) if i + 1 < high else 0)
                    total = total + (abs(a[b, k, i, j + 1] - a[b, k, i, j]) if j + 1 < wide else 0)
    return total / (batch * high * wide)


def orthogonality(v: Tensor) -> Tensor:
    """v [B, D, K + 1] as PDiscoFormer has it; its transpose as iFAM's trainer hands it over."""
    unit = v / v.norm(dim=1, keepdim=True)
    grams = [u.T @ u - torch.eye(u.shape[1], dtype=u.dtype) for u in unit]
    return sum((g**2).mean() for g in grams) / len(grams)
